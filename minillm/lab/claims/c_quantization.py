"""What fewer bits and fewer KV heads bring and cost: 4-bit weights by batch, sensitive layers, grouped queries.

Speed is measured on the model that computes with the file's own 4 and 8 bits. What quality costs was measured in long
runs that are stored with the package: quant.json (`minillm bench quant`), twins.json (`python -m minillm.lab.twins`).
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import lru_cache, partial
from statistics import mean

import torch

import minillm
from minillm.gqa import kv_bytes_a_token, with_kv_heads
from minillm.lab import twins
from minillm.lab.bench import alternate
from minillm.lab.catalogue import GPUS, MODELS
from minillm.lab.claims.a_memory import weight_bytes
from minillm.lab.claims.decide import decide
from minillm.lab.claims.ledger import ALGORITHM, THIS_MACHINE, Figures, Finding, Ledger, Verdict
from minillm.lab.claims.passes import model_of, prefill, timed
from minillm.lab.claims.workbench import Workbench
from minillm.lab.perplexity import reference_text
from minillm.lab.quality import layer_kl
from minillm.lab.quant_bench import SENSITIVE, speed
from minillm.lab.roofline import Limits, gpu_limits, step_work
from minillm.lab.serving import cut
from minillm.lab.stored import read_stored
from minillm.model import Transformer
from minillm.quantize import Grid
from minillm.quantized_model import quantize, quantized_layers

ledger = Ledger()
SEVEN, EIGHT = MODELS["Llama-2-7B"], MODELS["Llama-3.1-8B"]
A100 = gpu_limits("A100 80GB SXM")
GROUPS = Grid(4, 128)  # 4.25 bits a weight
OF_THE_FILE = 32  # weights in a group of the grid that SmolLM2's file was made on: rounding to it again changes nothing
PAST, LONG = 128, 2000  # tokens of past of a decode step; a long past


@lru_cache(maxsize=1)
def formats(bench: Workbench) -> dict[str, Transformer]:
    """The same weights in 32, 16 and 4 bits. Kept for the next claim."""
    model = model_of(bench)
    half = copy.deepcopy(model).to(torch.bfloat16)
    if bench.quick:  # without looking for the quickest products
        four = quantize(copy.deepcopy(model), Grid(4, 32), compute=torch.bfloat16)
        for layer in quantized_layers(four).values():
            layer.choose_layout(torch.bfloat16)
    else:
        half.prepare()
        four, _ = minillm.load(device="cpu", weights="native", compute=torch.bfloat16)
    return {"float32": model, "bfloat16": half, "4 bits": four}


def gain_on_gpu(gpu: Limits, new: int, past: int, batch: int = 1) -> float:
    """Times as fast as 16 bits by the roofline: an 8B model with its layers in 4.25 bits, and its head in 16."""
    bits = GROUPS.bits_a_weight(EIGHT.d_model) * EIGHT.layer_parameters + 16 * EIGHT.head_parameters
    narrow = bits / 8 / (EIGHT.layer_parameters + EIGHT.head_parameters)  # bytes of a weight
    wide, four = (step_work(EIGHT, new, past, batch, 1, weight, 2).seconds(gpu) for weight in (2, narrow))
    return wide / four


def stored_costs() -> list[list]:
    """[method, group, perplexity more in %] of SmolLM2 in 4 bits, from the stored run."""
    rows = read_stored("quant.json")["results"]
    four = [row for row in rows if row.get("bits") == 4 and row["group"] and not row["symmetric"]]
    return [[row["method"], row["group"], 100 * math.expm1(row["nats_above"])] for row in four]


@lru_cache(maxsize=1)
def steps_by_batch(bench: Workbench) -> dict[int, dict[str, float]]:
    """Seconds of a decode step in each format, by batch. Kept for the next claim."""
    models = formats(bench)
    repeats = {1: 1, 16: 1} if bench.quick else {1: 7, 4: 2, 16: 2, 32: 2, 64: 2}
    return {n: speed(lambda: models, n, PAST, runs)["seconds"] for n, runs in repeats.items()}


def four_bits(bench: Workbench) -> Figures:
    """Seconds of a decode step and of a prefill by format; and what 4 bits cost."""
    models, length = formats(bench), 16 if bench.quick else 256
    runs = {name: partial(timed, partial(prefill, m, cut(bench.story.prompt, 0, length))) for name, m in models.items()}
    measured = alternate(runs, 1 if bench.quick else 5, progress=False)
    prefilled = {name: found.median(float) for name, found in measured.items()}
    return {"decode": steps_by_batch(bench)[1], "prefill": prefilled, "length": length, "costs": stored_costs()}


@ledger.claim(
    "C10", sources="T1", text="W4A16 is 2 to 4 times as fast, and costs 1 to 3 % of accuracy", notebook="09_w4a16",
    scope=THIS_MACHINE, measure=four_bits, slow=True,
)  # fmt: skip
def w4a16(figures: Figures) -> Finding:
    least, most, dear = 2, 4, 3
    decode, prefilled = figures["decode"], figures["prefill"]
    here, wide = decode["bfloat16"] / decode["4 bits"], decode["float32"] / decode["4 bits"]
    on_gpu = gain_on_gpu(A100, 1, PAST)
    quick = [least <= gain <= most for gain in (here, on_gpu)]
    costs = [entry for entry in figures["costs"] if entry[1] != OF_THE_FILE]
    cheap = [cost <= dear for *_, cost in costs]
    fails_by_cost = any(quick) and not any(cheap)
    return Finding(
        min(cost for *_, cost in costs) if fails_by_cost else here,
        "% more perplexity of SmolLM2 at least"
        if fails_by_cost
        else "times as fast as 16 bits in decode, one text, this machine",
        decide(any(quick) and any(cheap), all(quick + cheap)),
        f"{here:.2f} times as fast as 16 bits in decode here, {wide:.2f} times as fast as 32. {stand_in(decode)} The "
        "ceiling over 16 bits is "
        f"{16 / GROUPS.bits_a_weight(EIGHT.d_model):.2f} for the matrices in groups of {GROUPS.group}, {on_gpu:.2f} "
        f"for an 8B model on {PAST} tokens of past whose head stays at 16 bits. The condition is decode of few "
        f"texts: a prefill of 2,048 tokens gains {gain_on_gpu(A100, 2048, 0):.2f} times on an A100, one of "
        f"{figures['length']} here {prefilled['bfloat16'] / prefilled['4 bits']:.2f}. The cost depends on "
        "model, grid and method; perplexity of SmolLM2: "
        + ", ".join(f"{cost:+.1f} % ({method}, groups of {group})" for method, group, cost in costs)
        + f". Groups of {OF_THE_FILE}, the grid that its file was made on, cost nothing and say nothing: they are left "
        "out. The model is small; what larger ones lose is not measured here.",
    )


def stand_in(seconds: dict[str, float]) -> str:
    """What the 16 bits are that 4 bits are compared with on this machine."""
    told, noise = ", ".join(f"{name} {1e3 * s:.1f}" for name, s in seconds.items()), 0.05
    times = seconds["bfloat16"] / seconds["float32"]
    if times < 1 - noise:
        return f"The 16 bits here are bfloat16 (ms a step: {told})."
    slow = "slower than" if times > 1 + noise else "no faster than"
    return f"The 16 bits here are bfloat16, on this CPU {slow} float32: a poor stand-in (ms a step: {told})."


def by_batch(bench: Workbench) -> Figures:
    """[batch, seconds of a step in each format]"""
    return {"rows": [[n, seconds] for n, seconds in steps_by_batch(bench).items()]}


@ledger.claim(
    "C11", sources="T4", text="INT4 pays from a batch of 16 to 32 on; at batch 1, FP16 may be faster",
    notebook="09_w4a16", scope=THIS_MACHINE, measure=by_batch, slow=True,
)  # fmt: skip
def int4_by_batch(figures: Figures) -> Finding:
    large, batches = 16, [2**i for i in range(10)]
    gains = {n: seconds["bfloat16"] / seconds["4 bits"] for n, seconds in figures["rows"]}
    on_gpu = {n: gain_on_gpu(A100, 1, PAST, n) for n in batches}
    long = {n: gain_on_gpu(A100, 1, LONG, n) for n in (1, 64)}
    here, there = (g[1] < 1 < max(x for n, x in g.items() if n >= large) for g in (gains, on_gpu))
    lost = [n for n, gain in gains.items() if gain <= 1]
    return Finding(
        gains[1],
        "times as fast as 16 bits at batch 1, this machine",
        decide(here, there),
        f"Times as fast as 16 bits by batch on {PAST} tokens of past, here "
        + ", ".join(f"{n}: {gain:.2f}" for n, gain in gains.items())
        + (f" (nothing is gained from {lost[0]} on)" if lost else "")
        + "; by the roofline, an 8B model on an A100, "
        + ", ".join(f"{n}: {on_gpu[n]:.2f}" for n in batches if n in (1, 16, 64, 256))
        + f"; on {LONG:,} tokens of past "
        + ", ".join(f"{n}: {gain:.2f}" for n, gain in long.items())
        + f", since the caches are read at 16 bits. {stand_in(dict(figures['rows'])[1])} With weights alone in 4 bits "
        "it is the reverse: few texts wait for the weights, many for the arithmetic, which stays at 16 bits. As stated "
        "it can only be where a poor kernel loses at batch 1.",
    )


def heads_and_twins(bench: Workbench) -> Figures:
    """[context, batch, share gained] of the cases that fit a GPU; and the perplexity of the stored twins, relative to
    the twin with all heads. noise: between two twins that differ in their start alone."""
    fewer = replace(with_kv_heads(SEVEN, 8), d_ff=SEVEN.d_ff + 2048)  # as many weights: the MLP is wider
    assert fewer.layer_parameters == SEVEN.layer_parameters
    weights, gains = weight_bytes(SEVEN), []
    for context in (256, 1024, 4096, 16384):
        for batch in (1, 4, 16, 64):
            all_heads, eight = (step_work(c, 1, context, batch, 1, 2, 2).seconds(A100) for c in (SEVEN, fewer))
            if weights + context * batch * kv_bytes_a_token(SEVEN) <= GPUS[A100.name].memory:
                gains.append([context, batch, all_heads / eight - 1])
    runs = {n: [run for run in twins.read_results()["twins"] if run["kv_heads"] == n] for n in (9, 3, 1)}
    more = {
        n: mean(math.expm1(twins.difference(run, base)[0]) for run, base in zip(runs[n], runs[9], strict=True))
        for n in (3, 1)
    }
    noise = abs(math.expm1(twins.difference(*runs[9])[0]))
    return {"gains": gains, "three": more[3], "one": more[1], "noise": noise}


@ledger.claim(
    "C12", sources="T1", notebook="08_gqa", scope=ALGORITHM, measure=heads_and_twins,
    text="GQA makes inference 30 to 40 % faster for less than 0.5 of perplexity; MQA costs 5 to 10 % of quality",
)  # fmt: skip
def grouped_queries(figures: Figures) -> Finding:
    least, most, cost, low, high, blurred = 0.3, 0.4, 0.05, 0.05, 0.1, 0.025
    gains = [gain for *_, gain in figures["gains"]]
    inside = [least <= gain <= most for gain in gains]
    reached = min(gains) <= most and max(gains) >= least
    small, in_range = figures["three"] < cost, low <= figures["one"] <= high
    shares = [gain / (1 - (1 + gain) / 4) for gain in (least, most)]  # of x: (1 + x) / (1 + x / 4) = 1 + gain
    unclear = figures["noise"] > blurred
    return Finding(
        100 * shares[0],
        "% of the weights' bytes must the cache have for GQA-8 of 32 heads to be 30 % faster",
        Verdict.NOT_TESTABLE if unclear and reached else decide(reached and small, all(inside) and in_range),
        f"The condition is context times batch: decode of a 7B model on an A100 gains {min(gains):.0%} to "
        f"{max(gains):.0%} in {len(gains)} cases that fit, {sum(inside)} of them within 30 to 40 %, which is where the "
        f"cache has {shares[0]:.0%} to {shares[1]:.0%} of the weights' bytes; a prefill gains next to nothing. The "
        f"cost in quality is no constant: small twins change by {figures['three']:+.1%} of perplexity with a third of "
        f"the heads, by {figures['one']:+.1%} with one, and by {figures['noise']:.1%} through another start. "
        f"(0.5 is {cost:.0%} of a perplexity of 10.)",
    )


def sensitivity(bench: Workbench) -> Figures:
    """KL from the model as it is, when one layer alone is rounded."""
    n = 16 if bench.quick else 256
    tokens = bench.tokenizer.encode(reference_text()[: 8 * n])[: n + 1]
    return {"kl": layer_kl(model_of(bench), tokens, SENSITIVE, n), "tokens": n}


@ledger.claim(
    "C21", sources="T1", text="The first and the last layers are the most sensitive to quantization",
    notebook="09_w4a16", scope=THIS_MACHINE, measure=sensitivity, slow=True,
)  # fmt: skip
def sensitive_layers(figures: Figures) -> Finding:
    kl = figures["kl"]
    order = sorted(range(len(kl)), key=lambda layer: -kl[layer])
    first, last = (order.index(layer) + 1 for layer in (0, len(kl) - 1))
    among = [place <= max(1, len(kl) // 5) for place in (first, last)]
    return Finding(
        first,
        f"is the place of the first layer of {len(kl)}, by the damage it does",
        decide(any(among), all(among)),
        f"One layer alone at {SENSITIVE.bits} bits, KL over {figures['tokens']} tokens: the last layer has place "
        f"{last}, the first {first}; the most sensitive are {', '.join(map(str, order[:4]))} (counted from 0). It "
        "depends on the model: measure before layers are left in 16 bits.",
    )
