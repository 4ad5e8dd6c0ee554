"""The numbers that serving is judged by: TTFT, TPOT, gaps, percentiles, throughput and goodput.

TTFT   time to first token: from arrival to the first token, queue and prefill included.
TPOT   time per output token: the mean gap between the tokens after the first. A text of n tokens has n - 1 gaps, so
       latency = TTFT + (n - 1) x TPOT.
Goodput   requests per second that met their targets (the SLO); a request that is late counts for nothing
       (Zhong et al., "DistServe", 2024).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RequestTimes:
    """When one request arrived and when each of its tokens came out, in seconds on one clock."""

    arrival: float
    tokens: tuple[float, ...]

    def __post_init__(self) -> None:
        times = (self.arrival, *self.tokens)
        if any(later < earlier for earlier, later in itertools.pairwise(times)):
            raise ValueError(f"token times must not go backwards: {times}")

    @property
    def ttft(self) -> float:
        """Seconds to the first token; NaN if there was none."""
        return self.tokens[0] - self.arrival if self.tokens else float("nan")

    @property
    def gaps(self) -> list[float]:
        """Seconds between one token and the next."""
        return [b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False)]

    @property
    def tpot(self) -> float:
        """Mean gap in seconds; NaN with fewer than two tokens."""
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1) if len(self.tokens) > 1 else float("nan")

    @property
    def latency(self) -> float:
        """Seconds from arrival to the last token; NaN if there was none."""
        return self.tokens[-1] - self.arrival if self.tokens else float("nan")


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100), linearly interpolated; NaN entries are left out."""
    kept = np.asarray(values, dtype=float)
    kept = kept[~np.isnan(kept)]
    return float(np.percentile(kept, q)) if len(kept) else float("nan")


def duration(requests: Sequence[RequestTimes]) -> float:
    """Seconds from the first arrival to the last token."""
    if not any(r.tokens for r in requests):
        raise ValueError("no request has produced a token")
    seconds = max(r.tokens[-1] for r in requests if r.tokens) - min(r.arrival for r in requests)
    if seconds == 0:
        raise ValueError("all tokens came out at the moment of arrival: no rate can be computed")
    return seconds


def throughput(requests: Sequence[RequestTimes]) -> float:
    """Output tokens per second over all requests."""
    return sum(len(r.tokens) for r in requests) / duration(requests)


def goodput(requests: Sequence[RequestTimes], ttft: float, tpot: float) -> float:
    """Requests per second whose TTFT and TPOT (seconds) were both within their targets; no gaps count as met."""
    met = sum(1 for r in requests if r.tokens and r.ttft <= ttft and not r.tpot > tpot)
    return met / duration(requests)
