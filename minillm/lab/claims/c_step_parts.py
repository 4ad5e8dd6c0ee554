"""What one part of a pass costs: attention, the block table, fused projections, and what stands around the model.

Each claim times the part in two forms, or the part beside the whole, in turn and in one run. The part of a pass that
a change can save bounds what the change can bring.
"""

from __future__ import annotations

from functools import partial

import torch

import minillm
from minillm.attention import attention, reference_attention
from minillm.config import ModelConfig
from minillm.engine import Engine
from minillm.generation import next_logits
from minillm.kv_cache import ContiguousKV
from minillm.lab.bench import alternate
from minillm.lab.catalogue import MODELS
from minillm.lab.claims.decide import borderline, decide
from minillm.lab.claims.ledger import THIS_MACHINE, Figures, Finding, Ledger, Verdict
from minillm.lab.claims.passes import MODEL, decode_step, greedy, model_of, timed
from minillm.lab.claims.workbench import Workbench
from minillm.lab.roofline import Limits, Work, gpu_limits, step_work
from minillm.lab.serving import cut
from minillm.linear import Linear, adopt_choices
from minillm.model import NoCache, Transformer
from minillm.sampling import SamplingParams, sample
from minillm.tokenizer import Detokenizer

ledger = Ledger()


@torch.inference_mode()
def attention_times(bench: Workbench) -> Figures:
    """[tokens, seconds with the matrix of scores, seconds fused] of one layer's attention."""
    found = []
    for n in (64, 128, 256) if bench.quick else (256, 512, 1024, 2048, 4096):
        q, k, v = (torch.randn(n, h, MODEL.head_dim) for h in (MODEL.n_heads, MODEL.n_kv_heads, MODEL.n_kv_heads))
        ways = {"matrix": reference_attention, "fused": attention}
        runs = {name: partial(timed, partial(way, q, k, v)) for name, way in ways.items()}
        measured = alternate(runs, 3, progress=False)
        found.append([n, *(measured[name].median(float) for name in ways)])
    return {"times": found}


def gain_at_most(model: ModelConfig, n: int, gpu: Limits, rows: int = 128) -> float:
    """Times as fast by the roofline at 16 bits: a matrix of scores that is written, read, written and read, all of it
    computed, against tiles of `rows` queries, of which the causal half is computed."""
    queries, keys = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    matrix = Work(4 * queries * n * n, 2 * (2 * n * queries + 2 * n * keys + 4 * model.n_heads * n * n))
    tiles = Work(2 * queries * n * (n + 1), 2 * (2 * n * queries + 2 * n * keys * (n / rows + 1) / 2))
    return matrix.seconds(gpu) / tiles.seconds(gpu)


@ledger.claim(
    "C6", sources="T1", text="FlashAttention is 2 to 4 times as fast as standard attention, more on long sequences",
    notebook="04_flash_attention", scope=THIS_MACHINE, measure=attention_times, slow=True,
)  # fmt: skip
def fused_attention(figures: Figures) -> Finding:
    least, most = 2, 4
    factors = {n: matrix / fused for n, matrix, fused in figures["times"]}
    first, *_, last = factors
    fast = [factor >= least for factor in factors.values()]
    as_said = all(fast) and factors[first] <= most and factors[last] > factors[first]
    lengths = (512, 8192)
    by_bytes = [gain_at_most(MODELS["Llama-2-7B"], n, gpu_limits("A100 80GB SXM")) for n in lengths]
    return Finding(
        factors[last],
        f"times as fast at {last:,} tokens",
        Verdict.HOLDS if as_said else Verdict.HOLDS_IF if any(fast) else Verdict.NOT_TESTABLE,
        "The condition is the length: fused against materialised, one layer, this CPU: "
        + ", ".join(f"{factor:.1f} times at {n:,} tokens" for n, factor in factors.items())
        + ". For Llama-2-7B on an A100 two perfect kernels differ by "
        + " and ".join(f"{factor:.1f} at {n:,}" for n, factor in zip(lengths, by_bytes, strict=True))
        + " tokens; one that passes over its matrix more often gains more. A whole prefill gains less than attention.",
    )


def around_the_model(bench: Workbench) -> Figures:
    """Shortest seconds of each part beside the model, and of a decode step."""
    model, tokenizer, prompt = bench.model, bench.tokenizer, bench.story.prompt
    text, repeats = tokenizer.decode(prompt), 2 if bench.quick else 20
    with torch.inference_mode():
        logits = next_logits(model, prompt, NoCache())
    nucleus = SamplingParams(temperature=0.8, top_p=0.9, seed=0)

    def detokenize() -> None:
        detokenizer = Detokenizer(tokenizer)
        for token in prompt:
            detokenizer.add(token)

    parts = {
        f"tokenize {len(prompt)} tokens": partial(tokenizer.encode, text),
        f"tokenize {32 * len(prompt):,} tokens": partial(tokenizer.encode, text * 32),
        "sample, greedy": partial(sample, logits, greedy(1)),
        "sample, top-p": partial(sample, logits, nucleus),
        "detokenize": detokenize,
        "decode step": decode_step(model, len(prompt)),
    }
    measured = alternate({name: partial(timed, part) for name, part in parts.items()}, repeats, progress=False)
    shortest = {name: min(found.runs) for name, found in measured.items()}
    return shortest | {"detokenize": shortest["detokenize"] / len(prompt)}


@ledger.claim(
    "C18", sources="T4", text="Tokenizing, sampling and detokenizing take less than a millisecond each",
    notebook="03_prefill_and_decode", scope=THIS_MACHINE, measure=around_the_model,
)  # fmt: skip
def less_than_a_millisecond(figures: Figures) -> Finding:
    limit = 1e-3
    parts = {name: seconds for name, seconds in figures.items() if name != "decode step"}
    longest = max(parts, key=parts.get)
    longer = [name for name, seconds in parts.items() if seconds >= limit]
    held = len(parts) - len(longer)
    return Finding(
        1e3 * parts[longest],
        f"ms for the longest part: {longest}",
        Verdict.HOLDS if not longer else Verdict.HOLDS_IF if held else Verdict.DOES_NOT_HOLD,
        "The condition: no long prompt to tokenize, and no sorting of the whole vocabulary. "
        + ", ".join(f"{name}: {1e3 * seconds:.3f} ms" for name, seconds in parts.items())
        + f"; a decode step takes {1e3 * figures['decode step']:.1f} ms. Beside a step of a few milliseconds one of "
        "sampling is not little.",
    )


def step_through(model: Transformer, prompt: list[int], n: int, blocks: bool) -> float:
    """Mean seconds between n tokens of one text, with its cache in blocks or in one piece."""
    room = len(prompt) + n
    if blocks:
        seconds = Engine(model, n_blocks=-(-room // 16)).generate([prompt], greedy(n))[0].seconds
    else:
        kv = ContiguousKV(model.config, room, model.dtype, model.device)
        seconds = minillm.generate(model, None, prompt, greedy(n), kv).seconds
    return (seconds[-1] - seconds[0]) / (n - 1)


def paged_steps(bench: Workbench) -> Figures:
    """[tokens of the prompt, seconds of a step in one piece, in blocks]; n: tokens written."""
    lengths, n, repeats = ((16,), 6, 1) if bench.quick else ((64, 1024), 24, 3)
    found = []
    for length in lengths:
        prompt = cut(bench.story.prompt, 0, length)
        runs = {blocks: partial(step_through, model_of(bench), prompt, n, blocks) for blocks in (False, True)}
        measured = alternate(runs, repeats, progress=False)
        found.append([length, *(measured[blocks].median(float) for blocks in runs)])
    return {"steps": found, "n": n}


@ledger.claim(
    "C20", sources="T1", text="Block tables cost little, and paging gains little at batch 1",
    notebook="05_paged_attention", scope=THIS_MACHINE, measure=paged_steps, slow=True,
)  # fmt: skip
def paging_one_text(figures: Figures) -> Finding:
    little, bearable = 0.1, 0.5
    factors = {length: blocks / piece for length, piece, blocks in figures["steps"]}
    dearest, cheapest = max(factors.values()), min(factors.values())
    longest = max(factors) + figures["n"]
    read = step_work(MODEL, 1, longest).bytes
    empty = (-longest % 16) * MODEL.kv_elements_per_token * 4 + 8 * -(-longest // 16)
    gains_little = cheapest > 1 - little
    holds, holds_if = (gains_little and dearest < 1 + most for most in (little, bearable))
    return Finding(
        dearest,
        "times the seconds of a step on a cache in one piece",
        decide(holds_if, holds),
        "One text, measured: "
        + ", ".join(f"{factor:.2f} times on {length:,} tokens" for length, factor in factors.items())
        + f". By bytes {empty / read:.2%} is added on {longest:,} tokens. The condition: a kernel that follows the "
        "table; without one, more and smaller calls in each layer are the price. What blocks give back is memory, "
        "which is worth something only when somebody waits for it."
        + borderline({"the dearest": dearest}, 1 + little)
        + borderline({"the dearest": dearest}, 1 + bearable)
        + borderline({"the cheapest": cheapest}, 1 - little),
    )


def cut_up(layer: Linear, sizes: list[int]) -> list[Linear]:
    """The layer as several, each on its rows of the same weights."""
    with torch.no_grad():
        parts = [
            Linear(rows.shape[1], len(rows), weight=torch.nn.Parameter(rows)) for rows in layer.weight.split(sizes)
        ]
    for part in parts:
        adopt_choices(part, layer)
    return parts


def fused_products(bench: Workbench) -> Figures:
    """[rows, seconds fused, seconds apart] of the projections to q, k, v, gate and up in all layers; and of a step."""
    model, found = bench.model, []
    whole = [layer for block in model.blocks for layer in (block.attention.qkv, block.mlp.gate_up)]
    query, key = MODEL.n_heads * MODEL.head_dim, MODEL.n_kv_heads * MODEL.head_dim
    sizes = [[query, key, key], [MODEL.d_ff, MODEL.d_ff]] * MODEL.n_layers
    apart = [part for layer, size in zip(whole, sizes, strict=True) for part in cut_up(layer, size)]

    @torch.inference_mode()
    def products(layers: list[Linear], rows: int) -> None:
        x = torch.ones(rows, MODEL.d_model)
        for layer in layers:
            layer(x)

    for rows in (1, 16) if bench.quick else (1, 64):
        runs = {len(layers): partial(timed, partial(products, layers, rows)) for layers in (whole, apart)}
        measured = alternate(runs, 5 if bench.quick else 20, progress=False)
        found.append([rows, *(min(measured[n].runs) for n in runs)])
    step = decode_step(model, len(bench.story.prompt))
    steps = alternate({"step": partial(timed, step)}, 2 if bench.quick else 10, progress=False)
    return {"products": found, "launches": [len(whole), len(apart)], "step": min(steps["step"].runs)}


@ledger.claim(
    "C22", sources="T2", text="Fused projections save launches, and so time", notebook="03_prefill_and_decode",
    scope=THIS_MACHINE, measure=fused_products,
)  # fmt: skip
def fused_projections(figures: Figures) -> Finding:
    seen = 0.02  # a smaller difference is noise
    few, many = figures["launches"]
    saved = {rows: apart - fused for rows, fused, apart in figures["products"]}
    quicker = [apart > (1 + seen) * fused for _, fused, apart in figures["products"]]
    share = saved[1] / figures["step"]
    ratios = ", ".join(f"{apart / fused:.2f} ({rows})" for rows, fused, apart in figures["products"])
    return Finding(
        share,
        "of a decode step of one text is saved",
        decide(any(quicker), all(quicker)),
        f"q, k and v in one product, gate and up in another: {few} products a step and not {many}. By rows, apart "
        f"they take {ratios} times as long. The condition: few rows, where the products are short beside what starts "
        "them; the bytes of the weights stay the same. A CPU's call is no GPU's launch: there as many launches are "
        "saved, worth most where a step is short."
        + borderline({f"rows: {rows}": apart / fused for rows, fused, apart in figures["products"]}, 1 + seen),
    )
