"""Many requests at a time: what joining at every step, chunks of prompts, and streaming change.

Steps are counted by the real scheduler without a model: the same on every machine. Gaps and first tokens are seconds
of the real engine on this one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import mean, median

import minillm
from minillm.engine import Engine
from minillm.lab.catalogue import MODELS
from minillm.lab.claims.decide import decide
from minillm.lab.claims.ledger import ALGORITHM, THIS_MACHINE, Figures, Finding, Ledger, Verdict
from minillm.lab.claims.passes import greedy, model_of
from minillm.lab.claims.workbench import Workbench
from minillm.lab.kv_memory import Text, run_lengths
from minillm.lab.metrics import RequestTimes, duration
from minillm.lab.roofline import gpu_limits, step_work
from minillm.lab.serving import cut
from minillm.model import Transformer
from minillm.policies import Continuous, Static

ledger = Ledger()


def log_normal(n: int, average: float, spread: float) -> list[int]:
    """n lengths. spread: standard deviation over mean, before they are rounded and cut off at 32 times the mean."""
    numbers, sigma = random.Random(0), math.sqrt(math.log(1 + spread**2))
    drawn = (numbers.lognormvariate(math.log(average) - sigma**2 / 2, sigma) for _ in range(n))
    return [round(min(32 * average, max(1, x))) for x in drawn]


def spread_sweep(bench: Workbench) -> Figures:
    """[places, spread, times fewer steps, share of the places in use: static, continuous]"""
    rows = []
    for places in (8, 32) if bench.quick else (8, 32, 128):
        for spread in (0, 0.25, 2) if bench.quick else (0, 0.1, 0.25, 0.5, 1, 2, 3):
            texts = [Text(1, n) for n in log_normal(32 * places, 10, spread)]
            sizes = [
                [len(step) for step in run_lengths(texts, places, 512, places, 10**6, policy).steps]
                for policy in (Static(), Continuous())
            ]
            static, joining = sizes
            rows.append([places, spread, len(static) / len(joining), *(mean(each) / places for each in sizes)])
    return {"rows": rows}


@ledger.claim(
    "C5", sources="T4 T3 T1", notebook="06_continuous_batching", scope=ALGORITHM, measure=spread_sweep, slow=True,
    text="Continuous batching brings 2 to 10 times the throughput, 40 to 60 % more, or takes GPU use from 30 to 80 %",
)  # fmt: skip
def continuous_gain(figures: Figures) -> Finding:
    rows = figures["rows"]
    said = {
        "2 to 10 times": [2 <= gain <= 10 for _, _, gain, _, _ in rows],
        "40 to 60 % more": [1.4 <= gain <= 1.6 for _, _, gain, _, _ in rows],
        "use from 30 to 80 %": [0.25 <= static <= 0.35 and joining >= 0.75 for *_, static, joining in rows],
    }
    everywhere, somewhere = (any(all(found) for found in said.values()), all(any(found) for found in said.values()))
    low, high = (choose(rows, key=lambda row: row[2]) for choose in (min, max))
    return Finding(
        high[2],
        f"times fewer steps at {high[0]} places and a spread of {high[1]}",
        decide(somewhere, everywhere),
        "The condition is the spread of the output lengths (standard deviation over mean), with the number of places: "
        f"{low[2]:.2f} times at {low[0]} places and spread {low[1]}. "
        + "; ".join(f"{name} in {sum(found)} of {len(rows)} settings" for name, found in said.items())
        + ". Counted in steps, which are equally long on a GPU below its ridge; on a CPU fuller steps take longer.",
    )


def stall(model: Transformer, text: Sequence[int], budget: int, long: int, running: int) -> dict[str, float]:
    """Some texts are decoding when a long prompt arrives: seconds of their gaps, of its first token, and in all."""
    engine = Engine(model, None, n_blocks=512, sharing=False, max_num_seqs=running + 1, max_num_batched_tokens=budget)
    requests = [engine.add(cut(text, 9 * i, 8), greedy(12)) for i in range(running)]
    for _ in range(4):
        engine.step()
    late = engine.add(cut(text, 0, long), greedy(4))
    for _ in engine.stream(*requests, late):
        pass
    times = [RequestTimes(r.arrival, tuple(r.arrival + p.seconds for p in r.pieces)) for r in (*requests, late)]
    gaps = [gap for each in times[:-1] for gap in each.gaps]
    return {"worst": max(gaps), "median": median(gaps), "ttft": late.ttft, "total": duration(times)}


def with_and_without_chunks(bench: Workbench) -> Figures:
    """The quicker of two runs each, in turn."""
    long, budget, running = (64, 16, 2) if bench.quick else (1500, 256, 8)
    runs: dict[str, list[dict[str, float]]] = {"whole": [], "chunks": []}
    for _ in range(1 if bench.quick else 2):
        for name, limit in (("whole", 4096), ("chunks", budget)):
            runs[name].append(stall(model_of(bench), bench.story.prompt, limit, long, running))
    best = {name: min(found, key=lambda run: run["total"]) for name, found in runs.items()}
    return best | {"long": long, "budget": budget}


@ledger.claim(
    "C13", sources="T4", text="Chunked prefill keeps the latency of each step steady",
    notebook="06_continuous_batching", scope=THIS_MACHINE, measure=with_and_without_chunks, slow=True,
)  # fmt: skip
def chunked_prefill(figures: Figures) -> Finding:
    steady, better = 2, 0.5  # times the usual gap; of the worst gap without
    whole, chunks = figures["whole"], figures["chunks"]
    share = chunks["worst"] / whole["worst"]
    usual = chunks["worst"] / whole["median"]
    times = {
        "the long prompt's TTFT": chunks["ttft"] / whole["ttft"],
        "the time in all": chunks["total"] / whole["total"],
    }

    def told(least: float, below: float) -> list[str]:
        return [f"{factor:.2f} times {name}" for name, factor in times.items() if least <= factor < below]

    return Finding(
        share,
        "of the worst gap between tokens without chunks",
        decide(share <= better, usual <= steady),
        f"A prompt of {figures['long']:,} tokens, in chunks of {figures['budget']} at most: the worst gap of the "
        f"others falls from {1e3 * whole['worst']:,.0f} to {1e3 * chunks['worst']:,.0f} ms, still {usual:.1f} times "
        "the usual gap. The condition: a budget so small that a step with a chunk takes little longer than one "
        f"without. The price here: {', '.join(told(1, math.inf)) or 'none'}."
        + (f" No price: {', '.join(told(0, 1))}." if told(0, 1) else ""),
    )


def first_tokens(bench: Workbench) -> Figures:
    """Seconds until the first token exists and is seen: streamed, collected; by tokens of the prompt."""
    model, n, rows = model_of(bench), 8 if bench.quick else 64, []
    for length in (4, 64) if bench.quick else (4, 64, 512):
        prompt = cut(bench.story.prompt, 0, length)
        minillm.generate(model, None, prompt, greedy(1))  # to warm up
        streamed = next(iter(minillm.stream(model, None, prompt, greedy(n)))).seconds
        collected = minillm.generate(model, None, prompt, greedy(n)).seconds
        rows.append([length, streamed, collected[0], collected[-1]])
    return {"rows": rows, "n": n}


@ledger.claim(
    "C19", sources="T3", text="Streaming brings the first token under 100 ms", notebook="03_prefill_and_decode",
    scope=THIS_MACHINE, measure=first_tokens, slow=True,
)  # fmt: skip
def streaming(figures: Figures) -> Finding:
    limit = 0.1
    in_time = [streamed < limit for _, streamed, _, _ in figures["rows"]]
    length, streamed, exists, seen = figures["rows"][-1]
    model, gpu = MODELS["Qwen2.5-32B"], gpu_limits("H100 SXM")
    most = next(n for n in range(1, 10**6) if step_work(model, n, 0, 1, 1, 2, 2).seconds(gpu) >= limit) - 1
    return Finding(
        1e3 * streamed,
        f"ms to the first token, streamed, after a prompt of {length} tokens",
        Verdict.HOLDS if all(in_time) else Verdict.HOLDS_IF if any(in_time) else Verdict.NOT_TESTABLE,
        "Streaming changes when a token is seen, not when it exists: that is the prefill's time. Collected, the same "
        f"first token exists after {1e3 * exists:,.0f} ms and is seen with the other {figures['n'] - 1} after "
        f"{1e3 * seen:,.0f}. The condition: a short prompt and no queue. A 32B model on an idle H100 needs over 100 ms "
        f"beyond {most:,} tokens, at its full rate.",
    )
