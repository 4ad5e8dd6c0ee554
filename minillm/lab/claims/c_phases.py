"""How long prefill and decode take, which limit binds them, and how large a batch is worth having.

Four claims look at the same passes of the default model (passes.py), beside the limits of the machine. What a GPU does
is arithmetic (roofline.py): figures of a CPU say nothing against a claim about one.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from math import log

import numpy as np
import torch

from minillm.lab.bench import alternate
from minillm.lab.catalogue import GPUS, MODELS
from minillm.lab.claims.a_memory import weight_bytes
from minillm.lab.claims.decide import borderline, decide
from minillm.lab.claims.ledger import THIS_MACHINE, Figures, Finding, Ledger, Verdict
from minillm.lab.claims.passes import MODEL, NAME, phases, shares, timed, told_limits
from minillm.lab.claims.workbench import Workbench
from minillm.lab.roofline import Limits, gpu_limits, request_steps, step_work
from minillm.lab.serving import cut
from minillm.model import NoCache, Transformer

ledger = Ledger()
A100, H100 = gpu_limits("A100 80GB SXM"), gpu_limits("H100 SXM")
EIGHT = MODELS["Llama-3.1-8B"]
LECTURE = "03_prefill_and_decode"
on_gpu = partial(step_work, weight_bytes=2, kv_bytes=2)  # a pass at 16 bits


@ledger.claim(
    "C1", sources="T1 T4", text="Prefill is compute-bound, decode is bound by the memory's bandwidth", notebook=LECTURE,
    scope=THIS_MACHINE, measure=phases, slow=True,
)  # fmt: skip
def what_binds(figures: Figures) -> Finding:
    near = 0.4  # a limit of which less is used binds nobody
    (short, short_s), *_, (long, long_s) = figures["prefill"]
    past, step_s = figures["decode"][0]
    short_flops, short_read = shares(figures, short, 0, short_s)
    flops, read = shares(figures, long, 0, long_s)
    step_flops, step_read = shares(figures, 1, past, step_s)
    if flops < read or step_read < step_flops:
        verdict = Verdict.DOES_NOT_HOLD
    elif min(flops, step_read) < near:
        verdict = Verdict.NOT_TESTABLE
    else:
        verdict = Verdict.HOLDS_IF if short_flops < short_read else Verdict.HOLDS
    ten, crowd = (on_gpu(MODELS["Mistral-7B"], *step).bound(A100) for step in ((10,), (1, 128, 256)))
    return Finding(
        step_read,
        "of this machine's bandwidth is used by a decode step",
        verdict,
        f"Of {told_limits(figures)} here a prefill of {long:,} tokens uses {flops:.0%} of the arithmetic and "
        f"{read:.1%} of the bandwidth, a decode step {step_flops:.0%} and {step_read:.0%}, but a prefill of {short} "
        f"tokens {short_flops:.0%} and {short_read:.0%}. The condition: the prompt has more tokens than the ridge "
        f"asks, the decode batch fewer texts. For Mistral-7B on an A100 a prefill of 10 tokens is bound by {ten}, a "
        f"decode step of 256 texts on 128 tokens each by {crowd}."
        + borderline({"the prefill's share": flops, "the decode step's share": step_read}, near),
    )


def decode_share(first: float, steps: np.ndarray) -> float:
    return float(steps.sum() / (first + steps.sum()))


def output_beyond(share: float, first: float, steps: np.ndarray) -> int | None:
    """The shortest output with a larger share of decode. steps: seconds of each pass after the first token."""
    beyond = np.flatnonzero(np.cumsum(steps) / (first + np.cumsum(steps)) > share)
    return int(beyond[0]) + 2 if len(beyond) else None


def gpu_passes(prompt: int, output: int, batch: int) -> np.ndarray:
    """Least seconds of each pass of an 8B model on an H100."""
    steps = request_steps(EIGHT, prompt, output, batch, weight_bytes=2, kv_bytes=2)
    return np.array([step.seconds(H100) for step in steps])


@ledger.claim(
    "C2", sources="T4", text="Decode takes over 90 % of the time of a request", notebook=LECTURE,
    scope=THIS_MACHINE, measure=phases, slow=True,
)  # fmt: skip
def share_of_decode(figures: Figures) -> Finding:
    share, outputs = 0.9, (4, 16, 64, 256, 1024)
    lengths, seconds = zip(*figures["prefill"], strict=True)
    pasts, step_seconds = zip(*figures["decode"], strict=True)
    firsts = {n: float(np.interp(n, lengths, seconds)) for n in (16, 64, 256, 1024) if n <= lengths[-1]}

    def steps(prompt: int, n: int) -> np.ndarray:
        """Seconds of n decode steps; between measured pasts a straight line."""
        return np.interp(prompt + np.arange(n), pasts, step_seconds)

    over = [decode_share(first, steps(p, n - 1)) > share for p, first in firsts.items() for n in outputs]
    prompt = min(256, max(firsts))
    enough = int(share / (1 - share) * firsts[prompt] / min(step_seconds)) + 2
    here = output_beyond(share, firsts[prompt], steps(prompt, enough))
    passes = {batch: gpu_passes(prompt, 3000, batch) for batch in (1, 64)}
    alone, crowd = (output_beyond(share, first, rest) for first, *rest in passes.values())
    return Finding(
        here,
        f"output tokens after a prompt of {prompt} make it true here",
        decide(any(over), all(over)),
        f"The condition is a long output: on this machine it is true for {sum(over)} of {len(over)} pairs of prompt "
        f"and output lengths. By the roofline an 8B model on an H100 needs {alone} output tokens after the same prompt "
        f"alone, {crowd} in a batch of 64: a batch adds the prefills up, while one decode step serves all.",
    )


@ledger.claim(
    "C15", sources="T3", text="The best batch size is 32 to 128", notebook="06_continuous_batching",
)  # fmt: skip
def best_batch() -> Finding:
    least, most = 32, 128
    best, said = {}, []
    for gpu in (A100, H100):
        room = GPUS[gpu.name].memory - weight_bytes(EIGHT)
        for context in (128, 4096, 32768):
            fits = int(room / (2 * context * EIGHT.kv_elements_per_token))
            knee = first_compute_bound(gpu, context, fits)
            best[gpu.name, context] = knee or fits
            why = "knee" if knee else "memory is full"
            said.append(f"{best[gpu.name, context]} of {context:,} tokens on {gpu.name} ({why})")
    inside = [least <= batch <= most for batch in best.values()]
    return Finding(
        best[A100.name, 4096],
        "texts of 4,096 tokens at most beside an 8B model on 80 GB",
        decide(any(inside), all(inside)),
        "The condition: texts of some thousand tokens, for which it names what fits into the memory. By the roofline "
        "short texts pay up to the ridge, and long ones, whose caches are read too, have no knee. The most texts worth "
        f"having: {', '.join(said)}. A limit on the time between tokens may bind earlier.",
    )


def first_compute_bound(gpu: Limits, context: int, most: int) -> int | None:
    """The batch from which on a decode step of an 8B model is bound by the arithmetic."""
    return next((b for b in range(1, most + 1) if on_gpu(EIGHT, 1, context, b).bound(gpu) == "compute"), None)


@torch.inference_mode()
def batch_prefill(model: Transformer, text: list[int], batch: int, length: int) -> None:
    """Prompts side by side in one flat list of tokens."""
    tokens, positions = torch.tensor(cut(text, 0, batch * length)), torch.arange(length).repeat(batch)
    last = torch.arange(1, batch + 1) * length - 1
    model.logits(model(tokens, positions, NoCache([length] * batch))[last])


def by_length_and_batch(bench: Workbench) -> Figures:
    """The phases, and four prompts against one: [tokens of a prompt, times as long]."""
    fours = []
    for length in (2, 16) if bench.quick else (2, 64, 512):
        pass_of = partial(batch_prefill, bench.model, bench.story.prompt)
        runs = {batch: partial(timed, partial(pass_of, batch, length)) for batch in (1, 4)}
        measured = alternate(runs, 1 if bench.quick else 3, progress=False)
        fours.append([length, min(measured[4].runs) / min(measured[1].runs)])
    return {**phases(bench), "four": fours}


@ledger.claim(
    "C16", sources="T2", notebook=LECTURE, scope=THIS_MACHINE, measure=by_length_and_batch, slow=True,
    text="Prefill time is proportional to batch and prompt; decode throughput does not depend on the prompt",
)  # fmt: skip
def proportional(figures: Figures) -> Finding:
    near = 0.2  # of power 1, and of equal
    powers = {(a, b): log(t / s) / log(b / a) for (a, s), (b, t) in pairwise(figures["prefill"])}
    by_batch = [log(ratio) / log(4) for _, ratio in figures["four"]]
    (past, step), *_, (far, far_step) = figures["decode"]
    straight = [abs(power - 1) < near for power in (*powers.values(), *by_batch)]
    level = MODEL.layer_parameters / (MODEL.n_layers * MODEL.n_heads * MODEL.head_dim)
    bytes_ratio = on_gpu(EIGHT, 1, far, 32).bytes / on_gpu(EIGHT, 1, past, 32).bytes
    said = ", ".join(f"{a:,} to {b:,} tokens {power:.2f}" for (a, b), power in powers.items())
    four = ", ".join(f"{ratio:.1f} (of {length} tokens)" for length, ratio in figures["four"])
    everywhere = all(straight) and far_step / step < 1 + near
    return Finding(
        min(powers.values()),
        "is the lowest power of the length with which prefill time grows; proportional is 1",
        decide(any(straight), everywhere),
        f"Powers measured: {said}. Four prompts take {four} times as long as one. The condition: batch and prompt "
        f"together well beyond the ridge, and prompts far shorter than the {level:,.0f} tokens at which attention has "
        f"as many FLOP as the matrices in {NAME}, which is measured here. A decode step on {far:,} tokens takes "
        f"{far_step / step:.2f} times as long as on {past}; 32 texts of Llama-3.1-8B read {bytes_ratio:.2f} times the "
        "bytes then.",
    )


@ledger.claim(
    "C17", sources="T2", text="A GPU reaches 40 to 60 % of its rate", notebook=LECTURE,
    scope=THIS_MACHINE, measure=phases, slow=True,
)  # fmt: skip
def reached_share(figures: Figures) -> Finding:
    least, most, well_beyond = 0.4, 0.6, 10  # times the ridge: then the bytes take under a tenth of the time
    ridge = figures["flops"] / figures["bandwidth"]
    prefills = {n: shares(figures, n, 0, seconds)[0] for n, seconds in figures["prefill"]}
    beyond = [n for n in prefills if step_work(MODEL, n).intensity >= well_beyond * ridge]
    inside = [least <= prefills[n] <= most for n in beyond]
    past, seconds = figures["decode"][0]
    step = shares(figures, 1, past, seconds)[0]
    alone = on_gpu(EIGHT, 1, past)
    return Finding(
        max(prefills[n] for n in beyond or prefills),
        "of this machine's arithmetic is used by its best prefill",
        Verdict.HOLDS_IF if any(inside) else Verdict.NOT_TESTABLE,
        f"There is no one share. The condition is a prefill well beyond the ridge. Of {told_limits(figures)} here, of "
        "what a large product reaches (less of a printed peak), it is "
        + ", ".join(f"{share:.0%} for {n:,} tokens" for n, share in prefills.items())
        + f", {step:.0%} for a decode step; {sum(inside)} of the {len(beyond)} prefills at {well_beyond} times the "
        f"ridge or more lie within {least:.0%} to {most:.0%}. How much a GPU reaches in prefill, a CPU cannot tell. By "
        f"arithmetic, a decode step of one text by Llama-3.1-8B has {alone.intensity:.2f} FLOP a byte, the ridge of an "
        f"A100 is {A100.ridge:.0f}: at most {alone.intensity / A100.ridge:.1%} of its rate.",
    )
