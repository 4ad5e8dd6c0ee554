"""What the commands of the course do: measure, judge, check exercises, run notebooks. Heavy imports stand inside the
functions, so that --help is quick."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

QUANT_PARTS = ("quality", "speed", "layers", "methods")  # of `bench quant`


def four_bit_model():
    """The default model with its file's own 4 and 8 bits, or None, and a word why, if the file has other numbers."""
    import torch

    from minillm.checkpoint import load

    try:
        return load(device="cpu", weights="native", compute=torch.bfloat16)[0]
    except ValueError as error:
        warn(f"nothing is measured with 4-bit weights: {error}")
        return None


def ladder(options: argparse.Namespace) -> None:
    from minillm.checkpoint import load
    from minillm.fetch import default_model
    from minillm.lab import batch_ladder, ladder, report, roofline
    from minillm.lab.machine import busy_warning, describe, one_line
    from minillm.lab.workload import read_requests, read_workload

    report.require_folder(options.json, options.plot)
    machine = describe()
    warn(busy_warning(machine["busy"]))
    model, tokenizer = load(device="cpu")
    small = four_bit_model()
    limits = roofline.this_machine()
    workload = read_workload("story", tokenizer, options.quick)
    requests = read_requests("requests", tokenizer, options.quick)
    rows = ladder.climb(model, workload, limits, small=small)
    more = batch_ladder.climb(model, requests, small=small)
    style = "github" if options.markdown else "simple"
    caption = (
        f"{default_model().stem}, greedy; medians of runs in alternation. In float32, but for w4a16 and everything: "
        f"the file's own 4 and 8 bits, products in bfloat16.\n{one_line(machine)}; "
        f"measured limits {limits.bandwidth / 1e9:.1f} GB/s, {limits.flops / 1e9:.0f} GFLOP/s."
    )
    print(f"One request: {len(workload.prompt)} tokens in, {workload.new_tokens} out; {workload.repeats} runs.\n")
    print(report.ladder_table(rows, style))
    print(f"\n{report.requests_sentence(requests)}\n")
    print(report.requests_table(more, style))
    print(f"\n{caption}")
    if options.json:
        report.write_json(options.json, ladder.as_json([*rows, *more], machine, limits))
    if options.plot:
        report.plot_ladder([*rows, *more], options.plot, caption)


def peers(options: argparse.Namespace) -> None:
    from minillm.checkpoint import load
    from minillm.lab import batch_peers, peers, report
    from minillm.lab.machine import busy_warning, describe, one_line, today
    from minillm.lab.workload import read_requests, read_workload

    report.require_folder(options.json)
    machine = describe()
    warn(busy_warning(machine["busy"]))
    model, tokenizer = load(device="cpu", packed=True)
    small = four_bit_model()
    single = peers.compare(model, small, read_workload("story", tokenizer).prompt)
    many = batch_peers.compare_batches(model, read_requests("requests", tokenizer))
    results, ratios = single["results"] + many["results"], single["ratios"] | many["ratios"]
    print(report.peers_table(results))
    print()
    for name, ratio in ratios.items():
        print(f"{name}: {'not measured' if ratio is None else f'{ratio:.2f}'}")
    print(f"\n{one_line(machine)}")
    if options.json:
        report.write_json(options.json, {"machine": machine, "date": today(), "results": results, "ratios": ratios})


def serving(options: argparse.Namespace) -> None:
    from minillm.checkpoint import load
    from minillm.lab import policy_bench, report
    from minillm.lab.machine import busy_warning, describe, one_line
    from minillm.lab.serving import poisson_trace, read_trace
    from minillm.lab.workload import read_workload
    from minillm.policies import Dynamic

    report.require_folder(options.json)
    target = policy_bench.Target(options.slo_ttft, options.slo_tpot)
    Dynamic(options.timeout)  # refuses what is no time
    if options.max_num_seqs < 1:
        raise ValueError(f"--max-num-seqs must be at least 1, not {options.max_num_seqs}")
    if options.trace is not None:
        read_trace(options.trace, [0])  # a mistake in the file should not wait for the model
    else:
        poisson_trace(options.requests, options.rate, options.seed, [0])
    machine = describe()
    warn(busy_warning(machine["busy"]))
    model, tokenizer = load(device="cpu", packed=True)
    text = read_workload("story", tokenizer).prompt
    if options.trace is not None:
        trace = read_trace(options.trace, text)
    else:
        trace = poisson_trace(options.requests, options.rate, options.seed, text)
    rows = policy_bench.compare_policies(model, trace, target, options.timeout, options.max_num_seqs)
    print(policy_bench.policy_table(rows))
    print(
        f"\n{len(trace)} requests in {max(a.at for a in trace):.0f} s, {sum(len(a.prompt) for a in trace)} tokens in, "
        f"{sum(a.max_tokens for a in trace)} out; up to {options.max_num_seqs} at a time. Goodput: first token within "
        f"{target.ttft:g} s, then {target.tpot:g} s a token.\n{one_line(machine)}"
    )
    if options.json:
        report.write_json(options.json, policy_bench.as_json(rows, machine, trace, target))


def speculative(options: argparse.Namespace) -> None:
    from minillm.checkpoint import load
    from minillm.lab import report, speculative_bench
    from minillm.lab.machine import busy_warning, describe, one_line

    report.require_folder(options.json)
    machine = describe()
    warn(busy_warning(machine["busy"]))
    model, tokenizer = load(device="cpu")
    lines = speculative_bench.sweep(model, tokenizer, speculative_bench.drafters(model), options.quick)
    print(speculative_bench.table(lines))
    print(
        "\nTimes as fast as plain cached decoding. Predicted: tokens a round over the measured cost of a round, off by "
        f"{speculative_bench.median_error(lines):.0%} in the median. Formula: the same acceptance at every place.\n"
        f"{one_line(machine)}"
    )
    if options.json:
        report.write_json(options.json, speculative_bench.as_json(lines, machine))


def quant(options: argparse.Namespace) -> None:
    from minillm.checkpoint import load
    from minillm.lab import quant_bench, report
    from minillm.lab.machine import busy_warning, describe, one_line

    report.require_folder(options.json)
    machine = describe()
    warn(busy_warning(machine["busy"]))
    model, tokenizer = load(device="cpu")
    results = quant_bench.sweep(model, tokenizer, machine, options.quick, options.json, options.only or QUANT_PARTS)
    if results.reused:
        print(f"{len(results.reused)} rows of {options.json} are from an earlier run: {'; '.join(results.reused)}\n")
    print(quant_bench.report(results))
    print(f"\n{quant_bench.caption(results)}\n{one_line(machine)}")


def claims(options: argparse.Namespace) -> None:
    from minillm.lab import report
    from minillm.lab.claims import run
    from minillm.lab.claims.workbench import Workbench
    from minillm.lab.machine import busy_warning, describe, one_line

    report.require_folder(options.json)
    chosen = run.choose(options.only)
    machine = describe()
    if any(claim.measure for claim in chosen):
        warn(busy_warning(machine["busy"]))
    rows = run.examine(chosen, Workbench(options.quick, options.fresh))
    print(f"{run.report(rows)}\n{one_line(machine)}")
    if options.json:
        report.write_json(options.json, run.as_json(rows, machine, options.quick))


def advise(options: argparse.Namespace) -> None:
    from minillm.lab import report
    from minillm.lab.advice import guide
    from minillm.lab.advice.demand import Demand, check_hardware, find_hardware, find_model
    from minillm.lab.advice.deployment import deploy
    from minillm.lab.machine import busy, busy_warning

    if options.json == "":
        raise ValueError("--json needs the name of a file")
    report.require_folder(options.json)
    demand = Demand(
        prompt=options.prompt,
        output=options.output,
        concurrency=8 if options.concurrency is None and options.rate is None else options.concurrency,
        rate=options.rate,
        ttft=None if options.ttft_ms is None else options.ttft_ms / 1e3,
        tpot=None if options.tpot_ms is None else options.tpot_ms / 1e3,
        shared=options.shared,
        spread=options.spread,
        reserve=options.reserve,
        acceptance=options.acceptance,
        draft_cost=options.draft_cost,
    )
    memory = None if options.memory_gb is None else options.memory_gb * 1e9
    find_model(options.model, demand)  # a mistake should not wait for the measurement
    check_hardware(memory, options.efficiency)
    if options.gpu is None:
        warn(busy_warning(busy()))
    hardware = find_hardware(options.gpu, memory, options.efficiency)
    found = guide.advise(deploy(options.model, hardware, demand, options.bits))
    print(guide.report(found))
    if options.json:
        report.write_json(options.json, guide.as_json(found))


def check(options: argparse.Namespace) -> int:
    from minillm.lab.course import check_notebook

    return 0 if check_notebook(options.number) else 1


def progress(options: argparse.Namespace) -> None:
    from minillm.lab.course import progress_report

    print(progress_report())


def exercises(options: argparse.Namespace) -> int:
    from minillm.lab.build_exercises import stale, write

    if options.write:
        for path in write(Path()):
            print(f"wrote {path}")
        return 0
    problems = stale(Path())
    print("\n".join(problems) or "exercises/ is up to date")
    return 1 if problems else 0


def notebooks(options: argparse.Namespace) -> None:
    from minillm.lab.notebooks import execute, find, store

    for path in [find(Path("notebooks"), number) for number in options.numbers]:
        start = time.perf_counter()
        notebook = execute(path, options.fast)
        if not options.fast:
            store(notebook, path)
        print(f"{path}: {time.perf_counter() - start:.0f} s{'' if options.fast else ', outputs stored'}")


def warn(text: str | None) -> None:
    if text:
        print(f"minillm: {text}", file=sys.stderr)
