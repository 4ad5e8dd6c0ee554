"""The rungs of the ladder that need many requests: one by one, in static batches, in blocks, continuously, and all.

All get the same requests at the same moment, the same memory for keys and values, and in float32 must write the same
texts. The second and the third differ only in what is set aside for a request: the longest that any may become, as a
cache in one piece has to, or the blocks that it fills. The third and the fourth differ only in who may join when.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import mean, median

from minillm.drafters import NgramDrafter
from minillm.engine import Engine
from minillm.feature_drafter import load_drafter
from minillm.generation import generate
from minillm.lab.bench import Measured, alternate
from minillm.lab.ladder import Row, contiguous, first_difference
from minillm.lab.metrics import RequestTimes, throughput
from minillm.lab.serving import replay
from minillm.lab.workload import Requests
from minillm.model import Transformer
from minillm.policies import Continuous, Policy, Static
from minillm.speculative import Drafter

GUESSES = 1  # for each text of a batch: there every row costs


@dataclass(frozen=True)
class Run:
    """What one run of all requests gave. reserved, used: bytes for keys and values after each step."""

    tokens: list[list[int]]
    times: list[RequestTimes]
    reserved: list[int]
    used: list[int]
    utilisation: list[float]


@dataclass(frozen=True)
class Rung:
    stage: str
    new: str
    against: str | None
    run: Callable[[Transformer, Requests], Run]
    quantized: bool = False  # on the model with 4-bit weights


def one_by_one(model: Transformer, w: Requests) -> Run:
    """The loop of stage 2 for each request in turn, with a cache of just its length. The others wait."""
    size = model.config.kv_elements_per_token * model.dtype.itemsize
    tokens, times, reserved, used = [], [], [], []
    start = 0.0
    for arrival in w.trace:
        kv = contiguous(model, arrival)
        done = generate(model, None, arrival.prompt, arrival.params, kv)
        tokens.append(done.tokens)
        times.append(RequestTimes(0.0, tuple(start + seconds for seconds in done.seconds)))
        start = times[-1].tokens[-1]
        reserved += [kv.nbytes_reserved] * len(done.tokens)
        used += [size * (len(arrival.prompt) + i) for i in range(len(done.tokens))]
    return Run(tokens, times, reserved, used, [1 / w.max_num_seqs] * len(used))


def batched(
    make_policy: Callable[[Requests], Policy], model: Transformer, w: Requests, drafter: Drafter | None = None
) -> Run:
    """Through the engine. Under a policy that reserves, what it reserves counts, not the blocks that are filled."""
    policy = make_policy(w)
    sizes = {"n_blocks": w.n_blocks, "block_size": w.block_size, "max_num_seqs": w.max_num_seqs}
    engine = Engine(model, None, **sizes, policy=policy, drafter=drafter, k=GUESSES)
    done = replay(engine, w.trace)
    row, reserve = engine.kv.nbytes_per_block // w.block_size, getattr(policy, "reserve", 0)
    reserved = [row * (s.running * reserve if reserve else s.owned * w.block_size) for s in done.steps]
    return Run(done.tokens, done.times, reserved, [row * s.held for s in done.steps], done.utilisation)


def guessing(model: Transformer, w: Requests) -> Run:
    """By the trained drafter where it fits the model, else from the text's own past."""
    try:
        drafter = load_drafter(model)
    except ValueError:
        drafter = NgramDrafter()
    return batched(lambda w: Continuous(), model, w, drafter)


RUNGS = (
    Rung("one_by_one", "many requests, stage 2's loop for each in turn", None, one_by_one),
    Rung(
        "static",
        "batches that fit with the longest text reserved for each",
        "one_by_one",
        partial(batched, lambda w: Static(w.reserve)),
    ),
    Rung("paged", "the same in blocks, taken as needed: more fit", "static", partial(batched, lambda w: Static())),
    Rung("continuous", "join and leave at every step", "one_by_one", partial(batched, lambda w: Continuous())),
    Rung("everything", "4-bit weights and a guess for each text", "one_by_one", guessing, quantized=True),
)


def climb(model: Transformer, workload: Requests, progress: bool = True, small: Transformer | None = None) -> list[Row]:
    """Measure all rungs in alternation. small: the model in 4-bit weights (ladder.py)."""
    models = {rung: small if rung.quantized else model for rung in RUNGS}
    rungs = [rung for rung, own in models.items() if own is not None]
    contestants = {rung.stage: partial(rung.run, models[rung], workload) for rung in rungs}
    measured = alternate(contestants, workload.repeats, progress, warm_up=False)
    return [row(rung, measured, model, workload) for rung in rungs]


def row(rung: Rung, measured: dict[str, Measured[Run]], model: Transformer, w: Requests) -> Row:
    own, reference = measured[rung.stage], measured[RUNGS[0].stage].runs[0].tokens
    differences = (
        first_difference(model, arrival.prompt, expected, tokens)
        for run in own.runs
        for arrival, expected, tokens in zip(w.trace, reference, run.tokens, strict=True)
    )
    difference = next((found for found in differences if found), None)
    last = own.runs[-1]  # memory and utilisation do not depend on how fast it was
    return Row(
        stage=rung.stage,
        new=rung.new,
        workload=w.name,
        tokens_per_s=own.median(rate),
        spread=own.spread(rate),
        ttft_ms=1e3 * own.median(lambda run: median(times.ttft for times in run.times)),
        tpot_ms=1e3 * own.median(lambda run: median(times.tpot for times in run.times)),
        predicted_ttft_ms=None,
        predicted_tpot_ms=None,
        kv_bytes=max(last.used),
        memory_limit_fraction=None,
        against=rung.against,
        factor=None if rung.against is None else own.median(rate) / measured[rung.against].median(rate),
        same_tokens=difference is None,
        first_difference=difference,
        kv_reserved_bytes=max(last.reserved),
        kv_waste=1 - sum(last.used) / sum(last.reserved),
        utilisation=mean(last.utilisation),
        utilisation_by_step=last.utilisation,
    )


def rate(run: Run) -> float:
    """Output tokens per second over all requests, prefill included."""
    return throughput(run.times)
