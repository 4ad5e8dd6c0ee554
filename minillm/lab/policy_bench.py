"""One trace under three policies: what a user feels (TTFT, TPOT), what the owner pays for (throughput), what counts.

Goodput counts only requests that met both targets: a policy can have more tokens per second and fewer happy users.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import mean

from tabulate import tabulate

from minillm.engine import Engine
from minillm.lab.metrics import goodput, percentile, throughput
from minillm.lab.serving import Arrival, Replay, replay
from minillm.model import Transformer
from minillm.policies import Continuous, Dynamic, Policy, Static

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class Target:
    """The service level: seconds to the first token, and between tokens on average."""

    ttft: float
    tpot: float

    def __post_init__(self) -> None:
        if not (self.ttft > 0 and self.tpot > 0):
            raise ValueError(f"the targets must be above 0 seconds, not {self.ttft} and {self.tpot}")


@dataclass(frozen=True)
class PolicyRow:
    """Latencies in milliseconds, by percentile. goodput: requests per second that met the target."""

    policy: str
    tokens_per_s: float
    ttft_ms: dict[str, float | None]
    tpot_ms: dict[str, float | None]
    goodput: float
    utilisation: float
    preemptions: int


def policies(timeout: float) -> dict[str, Callable[[], Policy]]:
    return {"static": Static, "dynamic": lambda: Dynamic(timeout), "continuous": Continuous}


def compare_policies(
    model: Transformer,
    trace: Sequence[Arrival],
    target: Target,
    timeout: float = 2.0,
    max_num_seqs: int = 16,
    n_blocks: int = 1024,
    block_size: int = 16,
) -> list[PolicyRow]:
    """Replay the trace under each policy with a fresh engine. timeout: how many seconds "dynamic" collects."""
    rows = []
    for name, make_policy in policies(timeout).items():
        engine = Engine(model, None, n_blocks, block_size, max_num_seqs, policy=make_policy())
        rows.append(policy_row(name, replay(engine, trace), target))
    return rows


def policy_row(name: str, done: Replay, target: Target) -> PolicyRow:
    return PolicyRow(
        policy=name,
        tokens_per_s=throughput(done.times),
        ttft_ms=in_milliseconds([times.ttft for times in done.times]),
        tpot_ms=in_milliseconds([times.tpot for times in done.times]),
        goodput=goodput(done.times, target.ttft, target.tpot),
        utilisation=mean(done.utilisation),
        preemptions=done.preemptions,
    )


def in_milliseconds(seconds: Sequence[float]) -> dict[str, float | None]:
    """None where no request has such a time: a text of one token has no gaps."""
    found = {f"p{q}": 1e3 * percentile(seconds, q) for q in PERCENTILES}
    return {name: None if math.isnan(value) else value for name, value in found.items()}


def policy_table(rows: Sequence[PolicyRow], style: str = "simple") -> str:
    head = ["policy", "tokens/s", *(f"TTFT p{q} ms" for q in PERCENTILES), *(f"TPOT p{q} ms" for q in PERCENTILES),
            "goodput req/s", "utilisation", "preemptions"]  # fmt: skip
    body = [
        [
            row.policy,
            f"{row.tokens_per_s:.1f}",
            *("-" if ms is None else f"{ms:.0f}" for ms in (*row.ttft_ms.values(), *row.tpot_ms.values())),
            f"{row.goodput:.2f}",
            f"{row.utilisation:.0%}",
            row.preemptions,
        ]
        for row in rows
    ]
    return tabulate(body, headers=head, tablefmt=style, disable_numparse=True)


def as_json(rows: Sequence[PolicyRow], machine: dict[str, object], trace: Sequence[Arrival], target: Target) -> dict:
    """With the lengths of the trace, so that the result says what was replayed."""
    requests = [{"at": a.at, "prompt_tokens": len(a.prompt), "max_tokens": a.max_tokens} for a in trace]
    return {
        "machine": machine,
        "target": asdict(target),
        "trace": requests,
        "policies": [asdict(row) for row in rows],
    }
