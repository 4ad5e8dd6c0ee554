"""Replaying a trace of requests through an engine: who arrives when, what each step did, what came out when.

A trace is a list of arrivals. It is replayed in the engine's own time: while there is something to compute the clock
runs as a clock does, and while everybody waits for the next arrival it jumps. So a quiet hour costs nothing, and every
latency is measured.

Lengths and arrivals: Poisson arrivals and many short, few long texts (log-normal lengths), the shape that Kwon et al.
("PagedAttention", 2023, section 6.1, figure 11) show for ShareGPT.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minillm.engine import Engine, EngineRequest
from minillm.lab.metrics import RequestTimes
from minillm.sampling import SamplingParams

STRIDE = 37  # tokens between the places where two prompts are cut: no two begin alike
MOST_SECONDS, MOST_TOKENS = 86400, 10**6  # a day; more than any context


@dataclass(frozen=True)
class Arrival:
    """One request of a trace. at: seconds after the start."""

    at: float
    prompt: list[int]
    max_tokens: int

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=self.max_tokens, ignore_eos=True)


@dataclass(frozen=True)
class Part:
    """What one request did in one step: `tokens` on top of `past`. kind: "prefill" or "decode"."""

    request: int
    kind: str
    tokens: int
    past: int = 0


@dataclass(frozen=True)
class StepRecord:
    """One step. Seconds since the start of the trace; `owned` blocks; rows held in them (`held`, each block once)."""

    start: float
    end: float
    parts: list[Part]
    waiting: int
    running: int
    owned: int
    held: int

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)


@dataclass(frozen=True)
class Replay:
    """A trace that has run: its steps, and each request's times and tokens in the order of the trace."""

    steps: list[StepRecord]
    times: list[RequestTimes]
    tokens: list[list[int]]
    preemptions: int
    max_num_seqs: int

    @property
    def utilisation(self) -> list[float]:
        """For each step, the share of the batch's places that computed something."""
        return [len(step.parts) / self.max_num_seqs for step in self.steps]


class Clock:
    """Seconds since it was made, plus those that were skipped."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self.start

    def skip(self, seconds: float) -> None:
        self.start -= max(0.0, seconds)


def replay(engine: Engine, trace: Sequence[Arrival]) -> Replay:
    """Run a whole trace. The engine must be idle, and gets a clock of its own; its cache is used as it is."""
    if not engine.idle:
        raise ValueError("the engine still has requests of somebody else")
    for arrival in trace:
        engine.make_request(arrival.prompt, arrival.params)  # a bad one is refused now, not after minutes
    clock = engine.clock = Clock()
    order = sorted(range(len(trace)), key=lambda i: trace[i].at)  # stable: equal times keep their order
    requests: dict[EngineRequest, int] = {}
    steps: list[StepRecord] = []
    preemptions = engine.scheduler.met["preemptions"]
    coming = list(reversed(order))
    while coming or not engine.idle:
        while coming and trace[coming[-1]].at <= clock():
            index = coming.pop()
            request = engine.add(trace[index].prompt, trace[index].params)
            request.arrival = trace[index].at  # not the later moment at which the step before it ended
            requests[request] = index
        start = clock()
        engine.step()
        if engine.last_step.spans:
            steps.append(record(engine, requests, start, clock()))
        elif coming and engine.idle:
            clock.skip(trace[coming[-1]].at - clock())
        else:
            clock.skip(1e-3)  # a policy waits: for its timeout, or for more requests
    by_index = sorted(requests, key=requests.__getitem__)
    times = [RequestTimes(r.arrival, tuple(r.arrival + piece.seconds for piece in r.pieces)) for r in by_index]
    tokens = [r.generation.tokens for r in by_index]
    preemptions = engine.scheduler.met["preemptions"] - preemptions
    return Replay(steps, times, tokens, preemptions, engine.scheduler.max_num_seqs)


def record(engine: Engine, requests: dict[EngineRequest, int], start: float, end: float) -> StepRecord:
    """Write a step down that has just ended; requests that ended with it have given their blocks back by now."""
    scheduler = engine.scheduler
    parts = []
    for span in engine.last_step.spans:
        decodes = span.count == 1 and span.start >= len(span.request.writer.prompt)  # else it is read (again)
        parts.append(Part(requests[span.request], "decode" if decodes else "prefill", span.count, span.start))
    held: dict[int, int] = {}
    for request in scheduler.running:
        for i, block in enumerate(request.block_table):
            rows = min(scheduler.blocks.block_size, request.num_computed - i * scheduler.blocks.block_size)
            held[block] = max(held.get(block, 0), rows)
    waiting, running = len(scheduler.waiting), len(scheduler.running)
    return StepRecord(start, end, parts, waiting, running, len(held), sum(held.values()))


def cut(ids: Sequence[int], start: int, n: int) -> list[int]:
    """n tokens of a text from `start` on, around its end where needed."""
    return [ids[(start + i) % len(ids)] for i in range(n)]


def poisson_trace(
    n: int,
    rate: float,
    seed: int,
    text: Sequence[int],
    prompt: tuple[float, float, int] = (48, 0.8, 256),
    output: tuple[float, float, int] = (48, 0.8, 256),
) -> list[Arrival]:
    """n requests, on average `rate` a second, prompts cut from `text` at different places.

    prompt, output: (median, sigma, most) of their log-normal lengths.
    """
    if n < 1 or not rate > 0 or n / rate > MOST_SECONDS:
        raise ValueError(
            f"a trace needs at least one request, a rate above 0, and at most {MOST_SECONDS} s, not {n} and {rate}"
        )
    random_numbers = random.Random(seed)

    def length(median: float, sigma: float, most: int) -> int:
        return min(most, max(1, round(random_numbers.lognormvariate(math.log(median), sigma))))

    trace, at = [], 0.0
    for _ in range(n):
        at += random_numbers.expovariate(rate)
        start = random_numbers.randrange(len(text))
        trace.append(Arrival(at, cut(text, start, length(*prompt)), length(*output)))
    return trace


def read_trace(path: str | Path, text: Sequence[int]) -> list[Arrival]:
    """A trace from JSON lines: {"at": seconds, "prompt_tokens": n, "max_tokens": n}, or "prompt": [ids] for the text.

    Prompts that give only their length are cut from `text`, each at another place.
    """
    trace = []
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text in UTF-8") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
            at, most, ids = raw["at"], raw["max_tokens"], raw.get("prompt")
            if ids is None:
                length = raw["prompt_tokens"]
                if type(length) is not int or not 1 <= length <= MOST_TOKENS:
                    raise ValueError
                ids = cut(text, STRIDE * number, length)
            whole = ids and all(type(n) is int for n in (most, *ids))  # so neither True nor a string
            if type(at) not in (int, float) or not (0 <= at <= MOST_SECONDS and whole and most >= 1):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError(
                f'{path}, line {number}: expected {{"at": seconds, "prompt_tokens": n, "max_tokens": n}} with at from '
                f'0 to {MOST_SECONDS}, n from 1 to {MOST_TOKENS}, or "prompt": [ids], not {line[:80]}'
            ) from None
        trace.append(Arrival(at, ids, most))
    if not trace:
        raise ValueError(f"{path} has no request in it")
    return trace
