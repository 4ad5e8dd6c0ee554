"""The passes that several claims look at, measured once: prefills and decode steps of several lengths.

Beside them stand the two limits of the machine. A pass is described by its seconds and by what it has to do at least
(roofline.py); the quotient is the share of a limit that it uses.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache, partial
from statistics import mean

import torch

from minillm.drafters import first_layers
from minillm.generation import next_logits
from minillm.kv_cache import ContiguousKV
from minillm.lab.bench import alternate
from minillm.lab.catalogue import MODELS
from minillm.lab.claims.ledger import Figures
from minillm.lab.claims.workbench import Workbench
from minillm.lab.roofline import step_work, this_machine
from minillm.lab.serving import cut
from minillm.model import Transformer
from minillm.sampling import SamplingParams

NAME = "SmolLM2-135M"  # the workbench's model
MODEL = MODELS[NAME]


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def greedy(n: int) -> SamplingParams:
    """n tokens, whatever they are."""
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)


def model_of(bench: Workbench) -> Transformer:
    """The whole model; for a test its first layers with its head."""
    return first_layers(bench.model, 2) if bench.quick else bench.model


@torch.inference_mode()
def prefill(model: Transformer, tokens: list[int]) -> None:
    int(next_logits(model, tokens, ContiguousKV(model.config, len(tokens), model.dtype, model.device)).argmax())


def decode_step(model: Transformer, past: int) -> Callable[[], None]:
    """-> a function that takes one step on a past of random numbers: they do not change its time."""
    kv = ContiguousKV(model.config, past + 1, model.dtype, model.device)
    kv.k.normal_(), kv.v.normal_()
    kv.commit(past)

    @torch.inference_mode()
    def run() -> None:
        int(next_logits(model, [0] * (past + 1), kv).argmax())
        kv.truncate(past)

    return run


@lru_cache(maxsize=1)
def phases(bench: Workbench) -> Figures:
    """[tokens, seconds] of prefills, [past, seconds] of decode steps, and the limits. The shortest of some runs in
    turn: noise only ever adds time. The limits are measured before and after, since they wander on a shared machine.
    Kept for the next claim."""
    lengths, pasts = ((4, 16, 64), (16, 256)) if bench.quick else ((4, 16, 64, 256, 1024, 2048), (64, 1024, 4096))
    model, text = bench.model, bench.story.prompt
    prefills = {n: partial(timed, partial(prefill, model, cut(text, 0, n))) for n in lengths}
    steps = {past: partial(timed, decode_step(model, past)) for past in pasts}
    before = this_machine.__wrapped__()
    prefilled = alternate(prefills, 1 if bench.quick else 3, progress=False)
    stepped = alternate(steps, 2 if bench.quick else 12, progress=False)
    after = this_machine.__wrapped__()
    return {
        "prefill": [[n, min(found.runs)] for n, found in prefilled.items()],
        "decode": [[past, min(found.runs)] for past, found in stepped.items()],
        "flops": mean(limits.flops for limits in (before, after)),
        "bandwidth": mean(limits.bandwidth for limits in (before, after)),
    }


def told_limits(figures: Figures) -> str:
    return f"{figures['flops'] / 1e9:,.0f} GFLOP/s and {figures['bandwidth'] / 1e9:.0f} GB/s"


def shares(figures: Figures, new: int, past: int, seconds: float) -> tuple[float, float]:
    """The used share of the machine's arithmetic, and of its bandwidth."""
    work = step_work(MODEL, new, past)
    return work.flops / seconds / figures["flops"], work.bytes / seconds / figures["bandwidth"]
