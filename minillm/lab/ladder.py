"""The ladder: every stage on the same real model and the same pinned text, measured in one run.

One rung a stage. A rung says how it runs the workload; the tokens must be those of the first rung, and where they are
not, the ladder says at which position they part and how close the two best logits were there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import mean

from minillm import speculative
from minillm.attention import AttentionFunction, attention
from minillm.drafters import NgramDrafter
from minillm.generation import generate, next_logits, room
from minillm.kernel_attention import flash_attention
from minillm.kv_cache import ContiguousKV
from minillm.lab.bench import Measured, alternate
from minillm.lab.machine import today
from minillm.lab.metrics import RequestTimes, throughput
from minillm.lab.roofline import Limits, request_steps, step_work
from minillm.lab.workload import Workload
from minillm.linear import Linear
from minillm.model import NoCache, SequenceStore, Transformer
from minillm.quant_linear import QuantLinear


@dataclass(frozen=True)
class Run:
    """What one run of a workload gave: the tokens and times of its request, and the cache's bytes at the end."""

    tokens: list[int]
    times: RequestTimes
    kv_bytes: int


@dataclass(frozen=True)
class Rung:
    """One stage. `run` does the workload; `predict` gives the roofline's (TTFT, TPOT) in seconds for it, with one token
    a pass: guesses that are right can be quicker, and more than the whole of the memory limit. quantized: it runs on
    the model with 4-bit weights."""

    stage: str
    new: str
    against: str | None
    run: Callable[[Transformer, Workload], Run]
    predict: Callable[[Transformer, Workload, Limits], tuple[float, float]]
    quantized: bool = False


@dataclass(frozen=True)
class Row:
    """One line of the result. Times in milliseconds; `memory_limit_fraction`: the time that reading all weights once
    would take at this machine's measured bandwidth, divided by TPOT. `factor` compares with the rung `against`.

    Rungs of many requests (batch_ladder.py) give medians over requests, and what one request does not have: the bytes
    reserved and used at the fullest moment, the share of what was reserved that held nothing, and the share of the
    batch's places that computed something. They have no predicted TTFT and no share of the memory limit.
    """

    stage: str
    new: str
    workload: str
    tokens_per_s: float
    spread: tuple[float, float]
    ttft_ms: float
    tpot_ms: float
    predicted_ttft_ms: float | None
    predicted_tpot_ms: float | None
    kv_bytes: int
    memory_limit_fraction: float | None
    against: str | None
    factor: float | None
    same_tokens: bool
    first_difference: dict[str, float] | None
    kv_reserved_bytes: int | None = None
    kv_waste: float | None = None
    utilisation: float | None = None
    utilisation_by_step: list[float] | None = None


def run_single(make_store: Callable[[Transformer, Workload], SequenceStore], model: Transformer, w: Workload) -> Run:
    """One request through the plain loop, with a fresh store."""
    kv = make_store(model, w)
    done = generate(model, None, w.prompt, w.params, kv)
    return Run(done.tokens, RequestTimes(0.0, tuple(done.seconds)), getattr(kv, "nbytes", 0))


def run_guessing(model: Transformer, w: Workload) -> Run:
    """By the n-gram drafter, which needs no second model."""
    kv = contiguous(model, w)
    done = speculative.generate(model, None, w.prompt, NgramDrafter(), w.params, kv)
    return Run(done.tokens, RequestTimes(0.0, tuple(done.seconds)), kv.nbytes)


def no_cache(model: Transformer, w: Workload) -> SequenceStore:
    return NoCache()


def contiguous(model: Transformer, w: Workload, by: AttentionFunction = attention) -> SequenceStore:
    return ContiguousKV(model.config, room(model, w.prompt, w.params), model.dtype, model.device, attention=by)


def tiled(model: Transformer, w: Workload) -> SequenceStore:
    return contiguous(model, w, by=flash_attention)


def predict_naive(model: Transformer, w: Workload, limits: Limits) -> tuple[float, float]:
    """Every step is a prefill of the whole text."""
    steps = [prefill_seconds(model, len(w.prompt) + i, limits) for i in range(w.new_tokens)]
    return steps[0], mean(steps[1:])


def predict_cached(model: Transformer, w: Workload, limits: Limits) -> tuple[float, float]:
    """One prefill, then steps of one token on a past that grows."""
    sizes = {"weight_bytes": bytes_a_weight(model), "kv_bytes": model.dtype.itemsize}
    steps = request_steps(model.config, len(w.prompt), w.new_tokens, **sizes)
    first, *later = [step.seconds(limits) for step in steps]
    return first, mean(later)


def bytes_a_weight(model: Transformer) -> float:
    """Of the matrices that a step reads; with scales and minima, where they are on a grid."""
    layers = [module for module in (*model.blocks.modules(), model.head) if isinstance(module, Linear | QuantLinear)]
    quantized = [layer for layer in layers if isinstance(layer, QuantLinear)]
    size = sum(layer.weight.nbytes for layer in layers if isinstance(layer, Linear))
    size += sum(layer.bytes_read for layer in quantized)
    return size / (model.config.layer_parameters + model.config.head_parameters)


def prefill_seconds(model: Transformer, tokens: int, limits: Limits) -> float:
    size = model.dtype.itemsize
    return step_work(model.config, tokens, weight_bytes=size, kv_bytes=size).seconds(limits)


RUNGS = (
    Rung("naive", "recompute the whole text at every step", None, partial(run_single, no_cache), predict_naive),
    Rung("kv_cache", "keep keys and values, feed one token", "naive", partial(run_single, contiguous), predict_cached),
    Rung("tiled", "attention in tiles, no matrix of scores", "kv_cache", partial(run_single, tiled), predict_cached),
    Rung("speculative", "guess from the text's past, verify in one pass", "kv_cache", run_guessing, predict_cached),
    Rung("w4a16", "4-bit weights, read as they are", "kv_cache", partial(run_single, contiguous), predict_cached, True),
)


def climb(
    model: Transformer, workload: Workload, limits: Limits, progress: bool = True, small: Transformer | None = None
) -> list[Row]:
    """Measure all rungs in alternation. `limits` are those of this machine, for the predictions. small: the model in
    4-bit weights; without it, the rungs that run on it are left out."""
    models = {rung: small if rung.quantized else model for rung in RUNGS}
    rungs = [rung for rung, own in models.items() if own is not None]
    contestants = {rung.stage: partial(rung.run, models[rung], workload) for rung in rungs}
    measured = alternate(contestants, workload.repeats, progress)
    return [row(rung, measured, model, models[rung], workload, limits) for rung in rungs]


def row(
    rung: Rung, measured: dict[str, Measured[Run]], model: Transformer, used: Transformer, w: Workload, limits: Limits
) -> Row:
    """model: whose texts are the right ones; used: the one that the rung runs on."""
    own = measured[rung.stage]
    reference = measured[RUNGS[0].stage].runs[0].tokens
    differences = (first_difference(model, w.prompt, reference, run.tokens) for run in own.runs)
    difference = next((found for found in differences if found), None)
    tpot = own.median(lambda run: run.times.tpot)
    weights = (model.config.layer_parameters + model.config.head_parameters) * bytes_a_weight(used)
    predicted_ttft, predicted_tpot = rung.predict(used, w, limits)
    return Row(
        stage=rung.stage,
        new=rung.new,
        workload=w.name,
        tokens_per_s=own.median(rate),
        spread=own.spread(rate),
        ttft_ms=1e3 * own.median(lambda run: run.times.ttft),
        tpot_ms=1e3 * tpot,
        predicted_ttft_ms=1e3 * predicted_ttft,
        predicted_tpot_ms=1e3 * predicted_tpot,
        kv_bytes=own.runs[-1].kv_bytes,
        memory_limit_fraction=weights / limits.bandwidth / tpot,
        against=rung.against,
        factor=None if rung.against is None else own.median(rate) / measured[rung.against].median(rate),
        same_tokens=difference is None,
        first_difference=difference,
    )


def rate(run: Run) -> float:
    """Output tokens per second of the whole request, prefill included."""
    return throughput([run.times])


def first_difference(
    model: Transformer, prompt: list[int], reference: list[int], tokens: list[int]
) -> dict[str, float] | None:
    """None if the texts are the same; else the first position, and how far apart the two best logits are there."""
    if tokens == reference:
        return None
    pairs = enumerate(zip(reference, tokens, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(reference), len(tokens)))  # or one is longer
    best = next_logits(model, prompt + reference[:at], NoCache()).topk(2).values
    return {"position": at, "margin": float(best[0] - best[1])}


def as_json(rows: list[Row], machine: dict[str, object], limits: Limits) -> dict[str, object]:
    measured_limits = {"gflops": limits.flops / 1e9, "gb_per_s": limits.bandwidth / 1e9}
    return {"machine": machine | measured_limits, "date": today(), "rungs": [asdict(row) for row in rows]}
