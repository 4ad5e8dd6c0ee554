"""Claims about rates: FLOP against bytes, how soon comes a first token, and how many a second.

A step takes the longer of two times, that of its arithmetic and that of its bytes (lab/roofline.py). Most of the
statements that are wrong here have looked at one of the two only. The rates are the vendors' (lab/catalogue.py), the
models' sizes their own; 16 bits everywhere.
"""

from __future__ import annotations

from functools import partial

from minillm.config import ModelConfig
from minillm.gqa import kv_bytes_a_token
from minillm.lab.catalogue import GPUS, MODELS
from minillm.lab.claims.a_memory import GiB, weight_bytes
from minillm.lab.claims.decide import close, decide
from minillm.lab.claims.ledger import Finding, Ledger
from minillm.lab.roofline import Work, gpu_limits, step_work

ledger = Ledger()
work_of = partial(step_work, weight_bytes=2, kv_bytes=2)


def bytes_between_kernels(config: ModelConfig, tokens: int) -> int:
    """What a pass writes and reads again where each kernel hands its result to the next one through memory."""
    d = 4 + 4 + 4 + 4 + 2 + 6 + 2  # norms; q, k, v; rotation; attention; output; two residual sums; MLP's ends
    f = 2 + 3 + 1  # gate and up written; silu(gate) x up; read by down
    return 2 * tokens * config.n_layers * (d * config.d_model + f * config.d_ff)


def bytes_of_scores(config: ModelConfig, tokens: int) -> int:
    """Plain attention: scores written, read and written by the softmax, and read."""
    return 2 * 4 * tokens**2 * config.n_heads * config.n_layers


@ledger.claim(
    "A3",
    sources="T4",
    text="A 7B model's prefill of 2,048 tokens is about 28 TFLOP over 14 GB, 2,000 FLOP a byte; a decode step is 14 "
    "GFLOP, 1 FLOP a byte",
    notebook="03_prefill_and_decode",
)
def intensity_of_the_phases() -> Finding:
    tokens, stated_flops, stated_bytes, stated_intensity, decode_flops = 2048, 28e12, 14e9, 2000, 14e9
    config = MODELS["Llama-2-7B"]
    fused, step = work_of(config, tokens), work_of(config, 1, tokens)
    once = Work(fused.flops, fused.bytes - 2 * tokens * config.kv_elements_per_token)
    unfused = Work(fused.flops, fused.bytes + bytes_between_kernels(config, tokens))
    plain = Work(fused.flops, unfused.bytes + bytes_of_scores(config, tokens))
    matrices = 2 * config.layer_parameters * tokens
    kv_share = step_work(config, 1, tokens, weight_bytes=0, kv_bytes=2).bytes / step.bytes
    right = close(fused.flops, stated_flops) and close(once.bytes, stated_bytes) and close(step.flops, decode_flops)
    intense = [close(work.intensity, stated_intensity) for work in (once, fused, unfused, plain)]
    return Finding(
        once.intensity,
        "FLOP a byte for the prefill, everything fused",
        decide(right and intense[0] and close(step.intensity, 1), always=all(intense)),
        f"{matrices / 1e12:.1f} TFLOP of matrices and {(fused.flops - matrices) / 1e12:.1f} of causal attention, over "
        f"{once.bytes / 1e9:.1f} GB. The condition: only weights are read, and keys and values written, once. If "
        f"attention reads those from memory it is {fused.intensity:,.0f} FLOP a byte, with a trip to memory between "
        f"kernels {unfused.intensity:.0f}, with the scores written out {plain.intensity:.0f}. A decode step is "
        f"{step.flops / 1e9:.1f} GFLOP and {step.intensity:.2f} FLOP a byte; {kv_share:.0%} of its bytes are keys and "
        "values.",
    )


@ledger.claim(
    "A4",
    sources="T2",
    text="A 32B model in bf16 on an H100 SXM with 148 TFLOP/s reads a prompt of 1,024 tokens, 65.5 TFLOP, in 0.44 s, "
    "or in 0.73 s at 60 % of that rate",
    notebook="03_prefill_and_decode",
)
def first_token_of_a_large_model() -> Finding:
    stated_rate, stated_flops, stated_seconds, share = 148e12, 65.5e12, 0.44, 0.6
    work = work_of(MODELS["Qwen2.5-32B"], 1024)
    seconds = {name: work.seconds(gpu_limits(name)) for name in GPUS}
    owners = [name for name in GPUS if close(gpu_limits(name).flops, stated_rate)]
    whose = " and ".join(f"the {name}'s ({seconds[name]:.2f} s)" for name in owners) or "no card's here"
    named = seconds["H100 SXM"]
    counted = "right" if close(work.flops, stated_flops) else "wrong"
    return Finding(
        1e3 * named,
        "ms at least on an H100 SXM",
        decide(close(work.flops, stated_flops) and close(named, stated_seconds)),
        f"The count is {counted}: {work.flops / 1e12:.1f} TFLOP with this model's own sizes. But "
        f"{stated_rate / 1e12:.0f} TFLOP/s are {whose}. An H100 SXM has {GPUS['H100 SXM'].flops / 1e12:.0f} and needs "
        f"{1e3 * named:.0f} ms, {1e3 * named / share:.0f} at {share:.0%}.",
    )


@ledger.claim(
    "A5",
    sources="T2",
    text="For the same model and card, decode throughput is FLOP/s over FLOP a token: 2,312 tokens/s, 1,380 at 60 % "
    "of the rate, a TPOT of 0.72 ms, 1,024 tokens in 1.47 s",
    notebook="03_prefill_and_decode",
)
def decode_by_flops_alone() -> Finding:
    printed, card = 2312, "H20"  # the card that has the stated 148 TFLOP/s
    step = work_of(MODELS["Qwen2.5-32B"], 1, 1024)
    possible = {name: 1 / step.seconds(gpu_limits(name)) for name in (card, "H100 SXM")}
    return Finding(
        possible[card],
        f"tokens/s at most on an {card}",
        decide(printed <= 1.05 * possible[card]),
        f"{printed:,} is {printed / possible[card]:.0f} times what the bytes allow. Each token reads "
        f"{step.bytes / 1e9:.0f} GB: {1e3 / possible[card]:.0f} ms on an {card}, and {possible['H100 SXM']:.0f} "
        "tokens/s on an H100 SXM. The slower of the two limits counts, and at batch 1 that is "
        f"{step.bound(gpu_limits(card))}.",
    )


@ledger.claim(
    "A15",
    sources="T2",
    text="Decode throughput, in tokens/s, is bounded by FLOP/s over the FLOP of a step",
    notebook="03_prefill_and_decode",
)
def bound_by_flops() -> Finding:
    model, most, past = "Qwen2.5-32B", 4096, 1024
    config = MODELS[model]
    cards = "H100 SXM", "A100 80GB SXM", "H20"

    def reaches(name: str, past: int) -> int | None:
        """The least batch whose step is limited by its arithmetic."""
        works = ((batch, work_of(config, 1, past, batch)) for batch in range(1, most + 1))
        return next((batch for batch, work in works if work.bound(gpu_limits(name)) == "compute"), None)

    short, long = ({name: reaches(name, tokens) for name in cards} for tokens in (0, past))
    found = [*short.values(), *long.values()]
    text = past * kv_bytes_a_token(config)
    room = [n for n, batch in long.items() if batch and weight_bytes(config) + batch * text <= GPUS[n].memory]

    def said(batches: dict[str, int | None]) -> str:
        return ", ".join(
            f"{f'from {batch} texts' if batch else 'no batch'} on an {name}" for name, batch in batches.items()
        )

    return Finding(
        gpu_limits("H100 SXM").ridge,
        "FLOP a byte, the ridge of an H100 SXM: below it, bytes are the bound",
        decide(any(found), always=all(batch == 1 for batch in found)),
        "FLOP/s over the FLOP of a step are steps: times the batch they are tokens. The condition: a batch beyond "
        f"the ridge. For {model} with no past that is {said(short)}; with {past:,} tokens of past {said(long)}, since "
        f"every text brings its own keys and values. Of these {' and '.join(room) or 'none'} has the memory for it.",
    )


@ledger.claim(
    "A17",
    sources="T3",
    text="Contexts cease to be usable at 32K tokens; 100K need another kind of attention",
    notebook="10_evidence",
)
def long_contexts() -> Finding:
    config, gpu, tokens = MODELS["Llama-3.1-8B"], GPUS["H100 SXM"], 100_000
    held = weight_bytes(config) + tokens * kv_bytes_a_token(config)
    fits = config.max_context >= tokens and held <= gpu.memory
    prefill, step = (
        step_work(config, *new, weight_bytes=2, kv_bytes=2).seconds(gpu_limits(gpu.name))
        for new in ((tokens,), (1, tokens))
    )
    scores = 2 * tokens**2 * config.n_heads
    return Finding(
        config.max_context * kv_bytes_a_token(config) / GiB,
        f"GiB of keys and values for the {config.max_context:,} tokens that Llama-3.1-8B is made for",
        decide(not fits),
        f"Costly, {'not impossible' if fits else 'and too much'}: {tokens:,} tokens and the weights are "
        f"{held / 1e9:.0f} of the {gpu.memory / 1e9:.0f} GB of an {gpu.name}, where they take at least {prefill:.1f} s "
        f"to read and {1e3 * step:.1f} ms a token. It is the same attention, tiled: one layer's scores would be "
        f"{scores / 1e9:.0f} GB. How well a model uses so long a text is another question, which arithmetic does not "
        "answer.",
    )


@ledger.claim(
    "A20", sources="T4", text="The prefill of a prompt of 10 tokens is compute-bound", notebook="03_prefill_and_decode"
)
def short_prefill() -> Finding:
    tokens = 10
    intensity = {name: work_of(config, tokens).intensity for name, config in MODELS.items()}
    ridges = {name: gpu_limits(name).ridge for name in GPUS}
    lowest = min(ridges, key=ridges.get)
    bound = [i >= ridge for i in intensity.values() for ridge in ridges.values()]
    return Finding(
        max(intensity.values()),
        f"FLOP a byte at most, for {tokens} tokens",
        decide(any(bound), always=all(bound)),
        f"The catalogue's models reach {min(intensity.values()):.1f} to {max(intensity.values()):.1f} FLOP a byte; "
        f"the lowest ridge is {ridges[lowest]:.0f} ({lowest}), the highest {max(ridges.values()):.0f}. So short a "
        "prefill reads weights, like a decode step.",
    )
