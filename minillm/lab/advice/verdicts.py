"""The form of a piece of advice: what a technique gains, whether it pays, and how numbers are written in its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from minillm.lab.advice.deployment import Deployment

MARGIN = 0.05  # a gain or a loss up to this share is no difference: a roofline knows no better


class Verdict(str, Enum):
    PAYS = "pays"
    DOES_NOT_PAY = "does not pay"
    NO_DIFFERENCE = "no difference"
    PAYS_IF = "pays if"  # it hangs on something that was not given


@dataclass(frozen=True)
class Advice:
    """gain: how many times as good `what` becomes. None where without the technique nothing would run, and where that
    hangs on what was not given."""

    technique: str
    verdict: Verdict
    gain: float | None
    what: str
    reason: str


def judge(gain: float) -> Verdict:
    if abs(gain - 1) <= MARGIN:
        return Verdict.NO_DIFFERENCE
    return Verdict.PAYS if gain > 1 else Verdict.DOES_NOT_PAY


def advice(technique: str, gain: float | None, what: str, reason: str) -> Advice:
    return Advice(technique, Verdict.PAYS if gain is None else judge(gain), gain, what, reason)


def carried(d: Deployment, other: Deployment) -> float | None:
    """Tokens a second of both, each with the batch that it can run; no more than are asked for."""
    if not other.batch:
        return None
    asked = math.inf if d.demand.rate is None else d.demand.rate * d.demand.output
    ours, theirs = (min(asked, x.estimate(x.batch).tokens_per_s) for x in (d, other))
    return ours / theirs


def better(d: Deployment, other: Deployment, chosen: int) -> tuple[float | None, str]:
    """The gain, and in what: the time of a decode step of the chosen batch, where memory keeps nobody out of either;
    else what each carries with its own."""
    needed = d.batch if other.short else chosen
    if other.fits < needed:
        return carried(d, other), "tokens/s"
    return other.step(chosen) / d.step(chosen), "decode speed"


def steps(d: Deployment, other: Deployment, chosen: int) -> str:
    batch = min(chosen, other.fits) or chosen
    return f"a step of {texts(batch)} takes {duration(d.step(batch))} and not {duration(other.step(batch))}"


def texts(n: int) -> str:
    return f"{n:,} text" if n == 1 else f"{n:,} texts"


def duration(seconds: float) -> str:
    return f"{number(seconds)} s" if seconds >= 1 else f"{number(seconds * 1e3)} ms"


def gb(size: float) -> str:
    return f"{number(size / 1e9)} GB"


def number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"
