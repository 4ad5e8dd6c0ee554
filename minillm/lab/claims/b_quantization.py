"""The ledger's rows on quantized weights: what they cost in tasks, the missing clamp, and why AWQ should be quicker.

The quality of whole models is read from the stored table, which takes long to measure. The textbook's formulas and
both methods, with a clock and a count of backward passes, run here.
"""

from __future__ import annotations

import math
import time
from unittest.mock import patch

import torch
from torch import Tensor

from minillm.awq import STEPS, awq
from minillm.gptq import gptq
from minillm.lab import machine
from minillm.lab.bench import alternate
from minillm.lab.claims.decide import decide
from minillm.lab.claims.ledger import ALGORITHM, THIS_MACHINE, Figures, Finding, Ledger
from minillm.lab.claims.workbench import Workbench
from minillm.lab.stored import read_stored
from minillm.quantize import Grid

ledger = Ledger()
FREE = 0.01  # nats a token, one percent of perplexity: what nobody would notice


def stored_quality(bench: Workbench) -> Figures:
    """Rows of 4 and 8 bits, and the reference, from a full run of `minillm bench quant`."""
    run = read_stored("quant.json")
    rows = [row for row in run["results"] if row["kind"] == "quality"]
    keys = ("name", "bits", "group", "nats_above", "recall", "recall_nats", "arithmetic", "arithmetic_nats")
    return {
        "machine": machine.one_line(run["machine"]),
        "tokens": run["text"]["predicted"],
        "reference": {key: rows[0][key] for key in keys[4:]},
        "rows": [{key: row[key] for key in keys} for row in rows[1:] if row["bits"] in (4, 8)],
    }


@ledger.claim(
    "B9",
    sources="T3",
    text="Quantization need not cost accuracy; 4 bits hurt arithmetic more than other tasks",
    notebook="09_w4a16",
    scope="the real model, by a stored table",
    measure=stored_quality,
)
def cost_in_tasks(figures: Figures) -> Finding:
    whole, rows = figures["reference"], figures["rows"]
    own = [row for row in rows if row["bits"] == 4 and row["nats_above"] == 0]  # the grid that the weights came from
    four = [row for row in rows if row["bits"] == 4 and row not in own]
    best = {8: min((r for r in rows if r["bits"] == 8), key=lambda r: r["nats_above"])}
    best[4] = min(four, key=lambda r: r["nats_above"])
    percent = {bits: 100 * math.expm1(row["nats_above"]) for bits, row in best.items()}
    lost = {task: [row[f"{task}_nats"] - whole[f"{task}_nats"] for row in four] for task in ("arithmetic", "recall")}
    more = sum(a > r for a, r in zip(lost["arithmetic"], lost["recall"], strict=True))
    free = {bits: row["nats_above"] < FREE for bits, row in best.items()}
    return Finding(
        percent[8],
        f"% more perplexity with 8 bits ({best[8]['name']})",
        decide(any(free.values()), always=all(free.values()) and more == len(four)),
        f"With 8 bits. With 4 the best ({best[4]['name']}) costs {percent[4]:.1f} % of perplexity; {len(own)} row of 4 "
        "bits costs nothing, as the weights lay on that grid before. Answers in arithmetic lose more nats than answers "
        f"by recall in {more} of {len(four)} other rows of 4 bits: {best[4]['name']} has {best[4]['arithmetic']:.0%} "
        f"and {best[4]['recall']:.0%} right, as loaded {whole['arithmetic']:.0%} and {whole['recall']:.0%}. Stored "
        f"figures of {figures['machine']}, up to {figures['tokens']:,} tokens and a few dozen questions; one small "
        "model.",
    )


def code_of(weight: float, least: float, most: float, bits: int) -> tuple[int, float, int]:
    """The textbook's code, scale and zero point: round(w / scale) + zero, with no clamp."""
    scale = (most - least) / (2**bits - 1)
    zero = round(-least / scale)
    return round(weight / scale) + zero, scale, zero


def formulas(bench: Workbench) -> Figures:
    """Of 1,000 cases each: how many have a code that does not exist. clamped: the largest error, in steps, of the ends
    of a range. unseen: numbers of a normal distribution, where the range is that of 64 others."""
    bits, generator = 4, torch.Generator().manual_seed(0)
    uniform = torch.rand(1000, 2, generator=generator, dtype=torch.float64).tolist()
    kinds = {"any": [(-a, b) for a, b in uniform], "symmetric": [(-a, a) for a, _ in uniform]}
    outside, errors = {}, []
    for kind, ranges in kinds.items():
        outside[kind] = sum(any(not 0 <= code_of(end, *ends, bits)[0] < 2**bits for end in ends) for ends in ranges)
        for ends in ranges:
            for end in ends:
                code, scale, zero = code_of(end, *ends, bits)
                errors.append(abs(min(max(code, 0), 2**bits - 1) - zero - end / scale))
    seen, unseen = torch.randn(1064, generator=generator, dtype=torch.float64).split([64, 1000])
    codes = [code_of(x, float(seen.min()), float(seen.max()), bits)[0] for x in unseen.tolist()]
    outside["unseen"] = sum(not 0 <= code < 2**bits for code in codes)
    code, scale, zero = code_of(1.0, -1.0, 1.0, bits)
    read = scale * (code % 2**bits - zero)
    return {"bits": bits, "code": code, "read": read, "outside": outside, "clamped": max(errors)}


@ledger.claim(
    "B15",
    sources="T4",
    text="Linear quantization is code = round(w / scale) + zero, with scale = (max - min) / (2^bits - 1), zero = "
    "round(-min / scale)",
    notebook="09_w4a16",
    scope=ALGORITHM,
    measure=formulas,
)
def missing_clamp(figures: Figures) -> Finding:
    most, outside = 2 ** figures["bits"] - 1, figures["outside"]
    inside = not any(outside.values())
    return Finding(
        figures["code"],
        f"is the code of 1 in a range from -1 to 1, in {figures['bits']} bits (0 to {most})",
        decide(inside or figures["clamped"] <= 1, always=inside),
        f"With a clamp to 0 and {most}: then the ends of a range are off by {figures['clamped']:.2f} steps at most. "
        f"Without one, codes that do not exist came up in {outside['symmetric']} of 1,000 symmetric ranges (both "
        f"roundings go up), in {outside['any']} of 1,000 others, and for {outside['unseen']} of 1,000 numbers beside "
        f"those that the range was taken from. Of the code {figures['code']} {figures['bits']} bits keep "
        f"{figures['code'] % (most + 1)}, and 1 is read back as {figures['read']:.2f}.",
    )


def clock(bench: Workbench) -> Figures:
    """Both methods on random matrices, where nothing is recorded for a backward pass. Calls of it are counted."""
    sizes, repeats, seconds = ((64, 128) if bench.quick else (576, 1536)), 1 if bench.quick else 3, {}
    grid, generator = Grid(4, 64), torch.Generator().manual_seed(0)
    methods = {"awq": awq, "gptq": gptq}
    calls = dict.fromkeys(methods, 0)
    for size in sizes:
        weight, x = (torch.randn(rows, size, generator=generator) for rows in (sizes[0], 2 * size))
        hessian = x.T @ x / len(x)

        def run(name: str, weight: Tensor = weight, hessian: Tensor = hessian) -> float:
            start = time.perf_counter()
            with patch("torch.autograd.backward") as backward, patch("torch.autograd.grad") as grad:
                methods[name](weight, grid, hessian)
            calls[name] += backward.call_count + grad.call_count
            return time.perf_counter() - start

        with torch.inference_mode():
            runs = alternate({name: lambda name=name: run(name) for name in methods}, repeats, progress=False)
        seconds[str(size)] = {name: found.median(float) for name, found in runs.items()}
    return {"rows": sizes[0], "seconds": seconds, "backward": calls}


@ledger.claim(
    "B16",
    sources="T4",
    text="AWQ is quicker than GPTQ, since it does not backpropagate as GPTQ does",
    notebook="09_w4a16",
    scope=THIS_MACHINE,
    measure=clock,
    slow=True,
)
def no_backward(figures: Figures) -> Finding:
    calls, seconds = figures["backward"], figures["seconds"]
    ratios = {size: found["gptq"] / found["awq"] for size, found in seconds.items()}
    reason = calls["gptq"] > 0 == calls["awq"]
    told = ", ".join(f"{ratio:.2f} times at {size} columns" for size, ratio in ratios.items())
    largest = max(ratios, key=int)
    return Finding(
        ratios[largest],
        f"times AWQ's time is GPTQ's, for a matrix of {figures['rows']} x {largest}",
        decide(reason and max(ratios.values()) > 1, always=min(ratios.values()) > 1),
        f"Backward passes: {calls['awq']} in AWQ and {calls['gptq']} in GPTQ. GPTQ solves with the Hessian of the "
        f"layer's inputs, a step for each column; AWQ tries {STEPS} scalings. GPTQ takes {told}: who is quicker "
        "depends on size and machine.",
    )
