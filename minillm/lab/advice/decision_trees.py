"""The usual decision trees, as data, beside what is computed: where do they disagree for this deployment?

A rule is a sentence as one reads it, the techniques that it is about, and a predicate: True where it says to use one of
them, False where it says to leave it, None where it is silent. The computation may agree or not; other numbers can make
each disagreement appear and vanish.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minillm.lab.advice.deployment import Deployment, largest
from minillm.lab.advice.techniques import with_weights
from minillm.lab.advice.verdicts import Advice, Verdict, number

FEW, MANY, LONG = 4, 8, 4096  # the trees' own borders: texts at a time, tokens of a text
INT4_FROM = 16
BEST_BATCH = (32, 128)


@dataclass(frozen=True)
class Rule:
    text: str
    techniques: tuple[str, ...]
    says: Callable[[Deployment], bool | None]


@dataclass(frozen=True)
class Comparison:
    """What a rule says of a deployment, and what is computed. agrees: None where there is nothing to compare."""

    rule: str
    says: str
    computed: str
    agrees: bool | None


RULES = (
    Rule(
        f"At a batch of 1 to {FEW}, where latency matters, use speculation; at larger ones leave it.",
        ("speculation",),
        lambda d: False if d.batch > FEW else True if d.demand.ttft or d.demand.tpot else None,
    ),
    Rule(
        "Where memory is short, quantize the weights to 4 bits; where it is not, keep them.",
        ("4-bit weights (speed)", "4-bit weights (memory)"),
        lambda d: with_weights(d, d.hardware.bits).short,
    ),
    Rule(
        f"INT4 pays from a batch of {INT4_FROM} to 32 on; at batch 1 16 bits may be faster.",
        ("4-bit weights (speed)",),
        lambda d: d.batch >= INT4_FROM,
    ),
    Rule(
        f"For long contexts (from {LONG:,} tokens) use GQA or a quantized KV cache.",
        ("GQA", "8-bit KV cache"),
        lambda d: d.demand.prompt + d.demand.output >= LONG,
    ),
    Rule(
        f"For high concurrency (from {MANY} requests) use continuous batching.",
        ("continuous batching",),
        lambda d: d.batch >= MANY,
    ),
    Rule(f"For high concurrency (from {MANY} requests) use paging.", ("paging",), lambda d: d.batch >= MANY),
)


def compare(deployment: Deployment, advice: Sequence[Advice]) -> list[Comparison]:
    """Every rule beside the computed advice."""
    return [*(compare_rule(rule, deployment, advice) for rule in RULES), compare_batch(deployment)]


def compare_rule(rule: Rule, deployment: Deployment, advice: Sequence[Advice]) -> Comparison:
    about = [a for a in advice if a.technique in rule.techniques]
    says = rule.says(deployment)
    pays = [a for a in about if a.verdict is Verdict.PAYS]
    hangs = [a for a in about if a.verdict is Verdict.PAYS_IF]
    computed = " ".join(f"{in_short(a)} {a.reason}" for a in (pays or hangs or about))
    agrees = None if says is None or (hangs and not pays) else says == bool(pays)
    return Comparison(rule.text, {True: "use", False: "leave", None: "nothing"}[says], computed, agrees)


def in_short(advice: Advice) -> str:
    name = advice.technique[0].upper() + advice.technique[1:]
    gain = "" if advice.gain is None else f" ({number(advice.gain)} times, {advice.what})"
    verb = "makes " if advice.verdict is Verdict.NO_DIFFERENCE else ""
    return f"{name} {verb}{advice.verdict.value}{gain}{'' if advice.verdict is Verdict.PAYS_IF else ':'}"


def compare_batch(d: Deployment) -> Comparison:
    """Throughput never falls with the batch. It stops growing where a step becomes compute-bound; before that, the
    goals or the memory end it."""
    low, high = BEST_BATCH
    reached = d.hardware.reached
    knee = 1 + largest(lambda b: d.step_work(b).bound(reached) == "memory", d.most)
    best = min(knee, d.most)
    why = (
        "a step is compute-bound from there on" if knee <= d.most else "the goals" if d.most < d.fits else "the memory"
    )
    rates = "; ".join(
        f"{number(d.estimate(b).tokens_per_s)} tokens/s at {b:,}" for b in sorted({low, high, best}) if b <= d.fits
    )
    computed = f"{best:,} ({why}). {rates}."
    return Comparison(f"The best batch is {low} to {high}.", f"{low} to {high}", computed, low <= best <= high)
