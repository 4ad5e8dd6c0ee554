"""The ledger's row on the axes of a quantized KV cache: by channel or by token, for keys and for values.

Keys, values and queries of every layer of the real model are kept while it reads, and keys or values are put on a grid
of 2 bits along either axis. What counts is how far attention's output moves.
"""

from __future__ import annotations

from statistics import mean, median

import torch
from torch import Tensor

from minillm import NoCache
from minillm.attention import attention
from minillm.lab.claims.decide import decide
from minillm.lab.claims.ledger import ALGORITHM, Figures, Finding, Ledger
from minillm.lab.claims.workbench import Workbench
from minillm.lab.perplexity import WINDOW, split
from minillm.model import Transformer, rotate
from minillm.quantize import Grid, round_to_nearest

ledger = Ledger()
CACHE_GRID = Grid(2, 32)  # of KIVI (Liu et al., 2024): 2 bits, groups of 32, a scale and a minimum


class Notes(NoCache):
    """Recompute everything, and keep the rows of each layer to look at."""

    def __init__(self):
        super().__init__()
        self.layers: list[tuple[Tensor, Tensor, Tensor]] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.layers.append((q, k, v))
        return super().attend(layer, q, k, v)


def on_grid(x: Tensor, axis: str) -> Tensor:
    """x: [tokens, heads, head_dim]. A group is 32 tokens of one channel, or 32 channels of one token."""
    rows = x.flatten(1).T if axis == "channel" else x.flatten(1)
    back = round_to_nearest(rows.contiguous(), CACHE_GRID).dequantize()
    return (back.T if axis == "channel" else back).reshape(x.shape)


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def outlier(x: Tensor) -> float:
    """The largest channel in units of the median one, by root mean square."""
    size = x.flatten(1).square().mean(0).sqrt()
    return float(size.max() / size.median())


def layers_on_grid(model: Transformer, tokens: list[int]) -> dict[str, list[float]]:
    """For each layer the relative errors of keys, of values, and of the output when one of them is on a grid."""
    notes, positions = Notes(), torch.arange(len(tokens))
    model(torch.tensor(tokens), positions, notes)
    cos, sin = model.rope(positions, model.dtype)
    found: dict[str, list[float]] = {}
    for q, k, v in notes.layers:
        before, out = rotate(k, cos, -sin), attention(q, k, v)
        errors = {"K outlier": outlier(k), "V outlier": outlier(v)}
        for axis in ("channel", "token"):
            k_grid, v_grid = on_grid(k, axis), on_grid(v, axis)
            errors[f"K by {axis}"], errors[f"V by {axis}"] = apart(k_grid, k), apart(v_grid, v)
            errors[f"K before by {axis}"] = apart(on_grid(before, axis), before)
            errors[f"output, K by {axis}"] = apart(attention(q, k_grid, v), out)
            errors[f"output, V by {axis}"] = apart(attention(q, k, v_grid), out)
        for name, error in errors.items():
            found.setdefault(name, []).append(error)
    return found


@torch.inference_mode()
def cache_on_grid(bench: Workbench) -> Figures:
    n = 64 if bench.quick else 256
    tokens = split(bench.tokenizer, WINDOW, 0).evaluation[:n]
    return {"tokens": n, "layers": layers_on_grid(bench.model, tokens)}


@ledger.claim(
    "B10",
    sources="T4",
    text="To quantize the KV cache, Key by channel and Value by token are the right axes (KIVI)",
    notebook="09_w4a16",
    scope=ALGORITHM,
    measure=cache_on_grid,
)
def axes_of_a_cache(figures: Figures) -> Finding:
    layers = figures["layers"]
    error = {name: mean(values) for name, values in layers.items()}
    wins = {
        name: [a < b for a, b in zip(layers[f"output, {right}"], layers[f"output, {wrong}"], strict=True)]
        for name, right, wrong in (("K", "K by channel", "K by token"), ("V", "V by token", "V by channel"))
    }
    average = error["output, K by channel"] < error["output, K by token"]
    average &= error["output, V by token"] < error["output, V by channel"]
    e = {name: f"{value:.2f}" for name, value in error.items()}
    return Finding(
        error["K by token"] / error["K by channel"],
        "times as large is K's error by token as by channel, at 2 bits",
        decide(average, always=all(wins["K"]) and all(wins["V"])),
        f"K's largest channel is {median(layers['K outlier']):.0f} times the median one (V's "
        f"{median(layers['V outlier']):.1f}): by channel K's own error is {e['K by channel']} and by token "
        f"{e['K by token']} as it lies in the cache, {e['K before by channel']} and {e['K before by token']} before "
        f"the rotation. V's own error says little ({e['V by channel']} and {e['V by token']}), but attention's output "
        f"moves by {e['output, V by channel']} with V by channel and by {e['output, V by token']} by token (with K "
        f"{e['output, K by channel']} and {e['output, K by token']}). By the output these axes are the better ones in "
        f"{sum(wins['K'])} (K) and {sum(wins['V'])} (V) of {len(wins['V'])} layers, on {figures['tokens']} tokens in "
        f"groups of {CACHE_GRID.group}.",
    )
