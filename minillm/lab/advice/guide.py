"""The decision guide: given a demand, a model and hardware, which techniques pay? Computed, then written for a reader.

The estimates are deployment.py's, the verdicts techniques.py's; beside them what the usual decision trees would say
(decision_trees.py), and which engines suit the case (engines.py).
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tabulate import tabulate

from minillm.lab.advice import decision_trees, engines, techniques
from minillm.lab.advice.decision_trees import Comparison
from minillm.lab.advice.deployment import BLOCK, LEFT_OUT, Deployment, Estimate
from minillm.lab.advice.engines import Suit
from minillm.lab.advice.verdicts import Advice, Verdict, duration, gb, number, texts

WIDTH = 110


@dataclass(frozen=True)
class Guide:
    """All that is said of one deployment."""

    deployment: Deployment
    batches: list[Estimate]
    techniques: list[Advice]
    trees: list[Comparison]
    engines: list[Suit]


def advise(deployment: Deployment) -> Guide:
    found = techniques.examine(deployment)
    trees = decision_trees.compare(deployment, found)
    return Guide(deployment, batches(deployment), found, trees, engines.suits(deployment))


def batches(d: Deployment) -> list[Estimate]:
    """Powers of two up to what fits, and the batches that matter."""
    powers = {2**i for i in range(d.fits.bit_length())}
    return [d.estimate(b) for b in sorted(powers | {d.batch, d.most, d.fits})]


def report(guide: Guide, width: int = WIDTH) -> str:
    d = guide.deployment
    pays = [a.technique for a in guide.techniques if a.verdict is Verdict.PAYS]
    differ = sum(c.agrees is False for c in guide.trees)
    parts = [
        *(textwrap.fill(line, width) for line in (asked(d), given(d), memory(d), choice(d))),
        "",
        batch_table(d, guide.batches),
        "",
        *(paragraph(headline(a), a.reason, width) for a in guide.techniques),
        "",
        textwrap.fill(f"It pays: {', '.join(pays) or 'none of them'}.", width),
        "",
        f"The usual decision trees: {differ} of {len(guide.trees)} disagree with the computation here.",
        *(paragraph(f'"{c.rule}"', compared(c), width) for c in guide.trees),
        "",
        "Engines, by hardware and requests at a time:",
        engine_table(guide.engines),
        "",
        textwrap.fill(f"The roofline leaves out: {'; '.join(LEFT_OUT)}. So times are the least possible.", width),
    ]
    return "\n".join(parts)


def asked(d: Deployment) -> str:
    demand = d.demand
    how_many = texts(demand.concurrency) + " at a time" if demand.concurrency else f"{demand.rate:g} requests a second"
    goals = [
        f"{name} {duration(goal)}" for name, goal in (("TTFT", demand.ttft), ("TPOT", demand.tpot)) if goal is not None
    ]
    shared = f", {demand.shared:,} of them shared by all prompts" if demand.shared else ""
    return (
        f"{d.model}: {demand.prompt:,} tokens in{shared}, {demand.output:,} out (log-normal, sigma {demand.spread:g})"
        f"; {how_many}; goals: {', '.join(goals) or 'none'}."
    )


def given(d: Deployment) -> str:
    limits, hardware = d.hardware.limits, d.hardware
    scale, unit = (1e12, "TFLOP/s") if limits.flops >= 1e12 else (1e9, "GFLOP/s")
    flops = f"{number(limits.flops / scale)} {unit}"
    return (
        f"{limits.name}: {flops}, {number(limits.bandwidth / 1e9)} GB/s, "
        f"{gb(hardware.memory)}; efficiency {hardware.efficiency:g}. Weights in {d.weight_bits} bits, keys and values "
        f"in {d.kv_bits}."
    )


def memory(d: Deployment) -> str:
    one = d.kv_token * d.slots
    return (
        f"Memory: weights {gb(d.weights)}; the keys and values of a request {gb(one)} ({d.slots:,} slots in blocks of "
        f"{BLOCK}). {texts(d.fits)} fit."
    )


def choice(d: Deployment) -> str:
    """The batch, and what keeps it from being what was asked for."""
    demand, at = d.demand, d.estimate(d.batch)
    said = f"Batch: {d.batch:,}."
    if not d.within_goals:
        least = d.estimate(1)
        said += (
            f" No batch meets the goals: one text alone has TTFT {duration(least.ttft)}, TPOT {duration(least.tpot)}. "
            "So no number of such machines meets the goals."
        )
    elif d.within_goals < d.fits:
        said += f" The goals allow {d.within_goals:,}."
    if demand.concurrency is not None and d.batch < demand.concurrency and d.within_goals:
        machines = -(-demand.concurrency // d.batch)
        said += f" For all {demand.concurrency:,}: {machines:,} such machines."
    if demand.rate is not None and at.requests_per_s < demand.rate:
        machines = number(math.ceil(demand.rate / at.requests_per_s))
        enough = f": {machines} such machines" if d.within_goals else ""
        said += f" It serves {number(at.requests_per_s)} of {demand.rate:g} requests a second{enough}."
    return said


def batch_table(d: Deployment, rows: Sequence[Estimate]) -> str:
    head = ["batch", "TTFT ms", "TPOT ms", "tokens/s", "requests/s", "memory GB", "limited by", ""]
    body = [
        [
            f"{e.batch:,}", number(e.ttft * 1e3), number(e.tpot * 1e3), number(e.tokens_per_s),
            number(e.requests_per_s), number(e.memory / 1e9), e.bound, remark(d, e.batch),
        ]
        for e in rows
    ]  # fmt: skip
    align = ["right"] * 6 + ["left"] * 2
    return tabulate(body, headers=head, disable_numparse=True, colalign=align)


def remark(d: Deployment, batch: int) -> str:
    said = ["chosen"] if batch == d.batch else []
    if batch == d.fits:
        said.append("full")
    if not d.meets(batch):
        said.append("too slow")
    return ", ".join(said)


def headline(a: Advice) -> str:
    gain = "" if a.gain is None else f"  {number(a.gain)} times, {a.what}"
    return f"{a.technique}: {a.verdict.value.upper()}{gain}"


def paragraph(head: str, text: str, width: int) -> str:
    lines = textwrap.fill(text, width, initial_indent="    ", subsequent_indent="    ")
    return textwrap.fill(head, width) + "\n" + lines


def compared(c: Comparison) -> str:
    agreement = {True: "agrees", False: "DISAGREES", None: "open"}[c.agrees]
    return f"{agreement}. It says here: {c.says}. Computed: {c.computed}"


def engine_table(found: Sequence[Suit]) -> str:
    head = ["engine", "suits", "why", "quantized formats", "shared prefixes"]
    body = [
        [s.engine.name, "yes" if s.suits else "no", s.why, s.engine.formats, s.engine.prefixes]
        for s in sorted(found, key=lambda s: not s.suits)
    ]
    return tabulate(body, headers=head, disable_numparse=True, maxcolwidths=[None, None, 32, 24, 24])


def as_json(guide: Guide) -> dict[str, object]:
    d = guide.deployment
    hardware = d.hardware
    return {
        "model": d.model,
        "demand": asdict(d.demand),
        "hardware": {
            "name": hardware.limits.name, "flops": hardware.limits.flops, "bandwidth": hardware.limits.bandwidth,
            "memory": hardware.memory, "bits": hardware.bits, "kind": hardware.kind, "efficiency": hardware.efficiency,
        },
        "weight_bits": d.weight_bits,
        "kv_bits": d.kv_bits,
        "weights_bytes": d.weights,
        "kv_bytes_a_request": d.kv_token * d.slots,
        "fits": d.fits,
        "within_goals": d.within_goals,
        "batch": d.batch,
        "batches": [asdict(e) | {"meets_goals": d.meets(e.batch)} for e in guide.batches],
        "techniques": [asdict(a) | {"verdict": a.verdict.value} for a in guide.techniques],
        "trees": [asdict(c) for c in guide.trees],
        "engines": [{"engine": s.engine.name, "suits": s.suits, "why": s.why} for s in guide.engines],
        "left_out": list(LEFT_OUT),
    }  # fmt: skip
