"""The ledger's rows on attention: a softmax in each block, what FlashAttention saves, what a cache saves, decode.

Sketches are run beside the right thing in float64, and differ by a number. Costs are counted: bytes by `Traffic`,
which sees every tile that is read, and pairs of a query and a key by a store that looks at each call.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from minillm import ContiguousKV, NoCache
from minillm.attention import OnlineSoftmax, Traffic, reference_attention, tiled_attention
from minillm.config import ModelConfig
from minillm.generation import next_logits
from minillm.lab.catalogue import MODELS
from minillm.lab.checks.ch04.task2_tiles import Watch
from minillm.lab.claims.decide import decide
from minillm.lab.claims.ledger import ALGORITHM, ARITHMETIC, Figures, Finding, Ledger
from minillm.lab.claims.workbench import Workbench
from minillm.lab.tiny import tiny_model

ledger = Ledger()
ROUNDING = 1e-9  # of float64, generously: larger differences are mistakes
PROCESSORS = 108  # of an A100 (Dao et al., "FlashAttention", 2022, section 2.1)
ON_CHIP = 192 * 1024  # bytes of memory on each of them (the same section)


def apart(a: Tensor, b: Tensor) -> float:
    """The error of a, as a share of b."""
    return float((a - b).norm() / b.norm())


def growth(values: list[float]) -> float:
    """The power of the length by which the last doubling of it multiplied a cost: 1 is linear, 2 quadratic."""
    return math.log2(values[-1] / values[-2])


def softmax_in_blocks(bench: Workbench) -> Figures:
    """One head without a mask, so that nothing else can be wrong. Lists are by the number of blocks."""
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(64, 16, generator=generator, dtype=torch.float64) for _ in range(3))
    scores, right = q @ k.T / 4, (q @ k.T / 4).softmax(-1) @ v
    found: dict[str, list[float]] = {name: [] for name in ("blocks", "added", "crossed", "averaged", "online", "sums")}
    for n in (1, 2, 4, 8):
        parts, values = scores.chunk(n, -1), v.chunk(n)
        added = sum(part.softmax(-1) @ value for part, value in zip(parts, values, strict=True))
        crossed = sum(part.softmax(-1) @ value for part in parts for value in values)
        online = OnlineSoftmax(q)
        for part, value in zip(parts, values, strict=True):
            online.add(part, value)
        outputs = {"added": added, "crossed": crossed, "averaged": added / n, "online": online.result()}
        for name, output in outputs.items():
            found[name].append(apart(output, right))
        found["blocks"].append(n)
        found["sums"].append(float(sum(part.softmax(-1).sum(-1) for part in parts)[0]))
    return found


@ledger.claim(
    "B1",
    sources="T1",
    text="FlashAttention takes a softmax in each block of the scores and adds the blocks' results up",
    notebook="04_flash_attention",
    scope=ALGORITHM,
    measure=softmax_in_blocks,
)
def added_blocks(figures: Figures) -> Finding:
    blocks, added, crossed = figures["blocks"], figures["added"], figures["crossed"]
    wrong = max(*added, *crossed) > ROUNDING
    return Finding(
        min(added[-1], crossed[-1]),
        f"times the size of the right output is the sketch's error with {blocks[-1]} blocks",
        decide(not wrong),
        f"With {blocks[0]} block the error is {added[0]:.1g}, with {blocks[1]} it is {added[1]:.2f}, and with "
        f"{blocks[-1]} the weights of a row sum to {figures['sums'][-1]:.1f} (crossing blocks of K with blocks of V: "
        f"error {crossed[-1]:.1f}; dividing by the number of blocks: {figures['averaged'][-1]:.2f}). A block must be "
        "rescaled by the running maximum and sum, which the online softmax does: its error is "
        f"{max(figures['online']):.1g}.",
    )


def one_head(head_dim: int) -> ModelConfig:
    return replace(MODELS["SmolLM2-135M"], n_heads=1, n_kv_heads=1, head_dim=head_dim)


def tiled_bytes(config: ModelConfig, n: int, n_queries: int, rows: int = 128) -> int:
    """What attention in tiles of `rows` queries moves in 16 bits. Counted on tensors without content."""
    q = torch.empty(n_queries, config.n_heads, config.head_dim, dtype=torch.float16, device="meta")
    k = torch.empty(n, config.n_kv_heads, config.head_dim, dtype=torch.float16, device="meta")
    traffic = Traffic()
    tiled_attention(q, k, k, rows, n, traffic)
    return traffic.read + traffic.written


def materialised_bytes(config: ModelConfig, n: int, n_queries: int) -> int:
    """Of attention that writes scores and weights down and reads each once, in 16 bits."""
    rows = 2 * n_queries * config.n_heads + 2 * n * config.n_kv_heads  # q and out, k and v
    return 2 * (rows * config.head_dim + 4 * config.n_heads * n_queries * n)


def extra_numbers(function, n: int) -> int:
    """The most numbers that were alive at one time beside inputs and output."""
    q, k, v = (torch.zeros(n, 1, 16) for _ in range(3))
    with Watch(q, k, v) as watch:
        out = function(q, k, v)
    return watch.most - out.numel()


def accesses(bench: Workbench) -> Figures:
    """Lists are by length. Memory is that of PyTorch's operations, at smaller lengths."""
    lengths, short = [2048, 4096, 8192, 16384], [256, 512] if bench.quick else [512, 1024]
    head = one_head(64)
    return {
        "lengths": lengths,
        "head_dim": head.head_dim,
        "tile_rows": 128,
        "tiled": [tiled_bytes(head, n, n) for n in lengths],
        "materialised": [materialised_bytes(head, n, n) for n in lengths],
        "extra_tiled": [extra_numbers(tiled_attention, n) for n in short],
        "extra_materialised": [extra_numbers(reference_attention, n) for n in short],
    }


@ledger.claim(
    "B2",
    sources="T1",
    text="FlashAttention takes the accesses to memory from O(N^2) to O(N)",
    notebook="04_flash_attention",
    scope=ALGORITHM,
    measure=accesses,
)
def linear_accesses(figures: Figures) -> Finding:
    n, d, tiled = figures["lengths"][-1], figures["head_dim"], figures["tiled"]
    power = growth(tiled)
    on_chip = 4 * figures["tile_rows"] * d  # numbers: a tile each of q, k, v and out
    ratio = tiled[-1] / 2 / (n * n * d * d / on_chip)
    extra = growth(figures["extra_tiled"]), growth(figures["extra_materialised"])
    return Finding(
        power,
        f"is the power of N with which the accesses grow at N = {n:,}",
        decide(power < 1.5, always=power < 1.1),
        f"The extra memory stops growing with N x N: its power is {extra[0]:.2f} in tiles, {extra[1]:.2f} with the "
        f"matrix. The accesses are {ratio:.1f} x N^2 d^2 / M with room for M numbers on the chip, here M = {on_chip:,} "
        f"and d = {d}: {figures['materialised'][-1] / tiled[-1]:.1f} times fewer than with the matrix, by a smaller "
        "factor and not by a smaller power. They are O(N) only while one tile holds all queries, at most "
        f"{ON_CHIP // 2 // (4 * d)} of them in the {ON_CHIP // 1024} KB of an A100's processor.",
    )


class Pairs:
    """Any store, and how many pairs of a query and a key its attention computes in the first layer."""

    def __init__(self, store: NoCache | ContiguousKV):
        self.store, self.pairs, self.rows = store, 0, 0

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer == 0:
            self.pairs += len(q) * self.store.length + len(q) * (len(q) + 1) // 2
            self.rows += len(q)
        return self.store.attend(layer, q, k, v)

    def commit(self, n: int) -> None:
        self.store.commit(n)

    @property
    def length(self) -> int:
        return self.store.length


def pairs_by_length(bench: Workbench) -> Figures:
    """Texts of 30, 60 and 120 tokens, each token chosen in a step of its own."""
    model = tiny_model(seed=0)
    found: dict[str, list[int]] = {"lengths": [30, 60, 120]}
    for name in ("cached", "naive"):
        for what in ("step", "whole", "rows"):
            found[f"{name}_{what}"] = []
        for n in found["lengths"]:
            store = Pairs(ContiguousKV(model.config, n, model.dtype) if name == "cached" else NoCache())
            tokens, before = [1], 0
            while len(tokens) <= n:
                before = store.pairs
                tokens.append(int(next_logits(model, tokens, store).argmax()))
            found[f"{name}_step"].append(store.pairs - before)
            found[f"{name}_whole"].append(store.pairs)
            found[f"{name}_rows"].append(store.rows)
    return found


@ledger.claim(
    "B7",
    sources="T3 T4",
    text="A KV cache takes attention from O(L^2) to O(L); without it, writing N tokens takes O(N^2)",
    notebook="02_kv_cache",
    scope=ALGORITHM,
    measure=pairs_by_length,
)
def cost_of_a_cache(figures: Figures) -> Finding:
    power = {name: growth(values) for name, values in figures.items() if name != "lengths"}
    step = abs(power["cached_step"] - 1) < 0.1 and abs(power["naive_step"] - 2) < 0.1
    whole = abs(power["cached_whole"] - 1) < 0.1 and abs(power["naive_whole"] - 2) < 0.1
    n, last = figures["lengths"][-1], {name: values[-1] for name, values in figures.items()}
    return Finding(
        power["cached_whole"],
        f"is the power of the length with which attention over a whole text grows, with a cache, up to {n} tokens",
        decide(step, always=whole),
        f"For the step that writes one token: the power is {power['naive_step']:.2f} without a cache and "
        f"{power['cached_step']:.2f} with it. Over a whole text it is {power['naive_whole']:.2f} without and "
        f"{power['cached_whole']:.2f} with a cache ({last['naive_whole']:,} and {last['cached_whole']:,} pairs of a "
        "query and a key). O(N^2) without a cache is right for the products with weights, whose rows grow with power "
        f"{power['naive_rows']:.2f}.",
    )


def decode_bytes(bench: Workbench) -> Figures:
    """Times fewer bytes in tiles than with the matrix, at one query row and at as many as keys."""
    past = 4096
    return {
        "past": past,
        "decode": {name: materialised_bytes(m, past, 1) / tiled_bytes(m, past, 1) for name, m in MODELS.items()},
        "prefill": {name: materialised_bytes(m, past, past) / tiled_bytes(m, past, past) for name, m in MODELS.items()},
        "programs": MODELS["Llama-3.1-8B"].n_kv_heads,
    }


@ledger.claim(
    "B14",
    sources="T1",
    text="FlashAttention speeds decoding up",
    notebook="04_flash_attention",
    scope=ARITHMETIC,
    measure=decode_bytes,
)
def flash_decode(figures: Figures) -> Finding:
    decode, prefill, programs = figures["decode"].values(), figures["prefill"].values(), figures["programs"]
    worth = 1.2  # times fewer bytes: less is lost among the other things that a step does
    return Finding(
        max(decode),
        "times fewer bytes at most, in a decode step",
        decide(max(decode) >= worth, always=min(decode) >= worth),
        f"On {figures['past']:,} tokens of past one query row moves {min(decode):.2f} to {max(decode):.2f} times fewer "
        f"bytes in the models of the catalogue, since the cache is read either way; a prefill of that length "
        f"{min(prefill):.0f} to {max(prefill):.0f} times. What helps is to split the sequence: one text of "
        f"Llama-3.1-8B gives {programs} programs for the {PROCESSORS} processors of an A100, and "
        f"{-(-PROCESSORS // programs)} stretches of the past, merged exactly, give work to all.",
    )
