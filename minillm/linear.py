"""The linear layer, and the choice of the quickest way to multiply by its matrix.

Decoding multiplies a few rows by large matrices, and is as slow as the weights are to read. A BLAS library has a
different routine for each shape, and not all of them read at full speed: on many CPUs `(W @ x.T).T` with four rows
is quicker than `F.linear` with one. So `choose_products` times a few forms once, when the model is prepared, as
Triton's autotuner does for a kernel. All forms read the same weights in the same layout, [out, in]; the results
differ by rounding only.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES = (1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64)  # numbers of rows that are timed
SAMPLE_BYTES = 64 * 2**20  # enough weights that no cache holds them
REPEATS = 3

PLAIN = 0  # the choice that means F.linear; any other is the number of rows that x is padded to


class Linear(nn.Module):
    """x [rows, in] -> x W^T + b [rows, out], with W [out, in] as checkpoints store it."""

    def __init__(self, n_in: int, n_out: int, bias: bool = False, weight: nn.Parameter | None = None, **kwargs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in, **kwargs)) if weight is None else weight
        self.bias = nn.Parameter(torch.empty(n_out, **kwargs)) if bias else None
        self.choices: list[int] | None = None  # for each number of rows, set by choose_products

    def forward(self, x: Tensor) -> Tensor:
        if self.choices is None:
            return F.linear(x, self.weight, self.bias)
        choice = self.choices[min(len(x), SIZES[-1] + 1)]
        if choice == PLAIN:
            return F.linear(x, self.weight, self.bias)
        out = columns_product(x, self.weight, choice)
        return out if self.bias is None else out + self.bias


def columns_product(x: Tensor, weight: Tensor, padded_rows: int) -> Tensor:
    """x W^T as (W x^T)^T, with rows of zeros added below x up to `padded_rows`. -> [rows, out]"""
    rows = len(x)
    if rows < padded_rows:
        x = F.pad(x, (0, 0, 0, padded_rows - rows))  # padded first, so that x.T stays a view
    return (weight @ x.T)[:, :rows].T.contiguous()


def choose_products(model: nn.Module) -> None:
    """Time the forms on this model's own weights (about a second) and set the quickest in each `Linear`.

    Only on a CPU in float32: elsewhere F.linear is kept.
    """
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    weights = sample_weights([layer.weight for layer in layers])
    if not weights or any(w.device.type != "cpu" or w.dtype != torch.float32 for w in weights):
        return
    with torch.inference_mode():
        plain = {n: seconds(weights, n, F.linear) for n in SIZES}
        columns = {n: seconds(weights, n, lambda x, w, n=n: columns_product(x, w, n)) for n in SIZES}
    choices = [quickest(rows, plain, columns) for rows in range(SIZES[-1] + 2)]
    for layer in layers:
        layer.choices = choices


def sample_weights(weights: list[Tensor]) -> list[Tensor]:
    """The first weights up to SAMPLE_BYTES together, or none if all of them would fit in a cache."""
    sample, size = [], 0
    for weight in weights:
        sample.append(weight)
        size += weight.nbytes
        if size >= SAMPLE_BYTES:
            return sample
    return []


def seconds(weights: list[Tensor], rows: int, product: Callable[[Tensor, Tensor], Tensor]) -> float:
    """The shortest of a few passes over all weights: noise on a machine only ever adds time."""
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1]) for w in weights}
    times = []
    for _ in range(REPEATS + 1):  # the first pass warms up
        start = time.perf_counter()
        for weight in weights:
            product(inputs[weight.shape[1]], weight)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def quickest(rows: int, plain: dict[int, float], columns: dict[int, float]) -> int:
    """PLAIN, or the number of rows to pad to. More rows than were timed: no padding, the better form of the last."""
    if rows > SIZES[-1]:
        return PLAIN if plain[SIZES[-1]] <= columns[SIZES[-1]] else 1
    larger = [n for n in SIZES if n >= rows]
    padded = min(larger, key=columns.__getitem__)
    return PLAIN if plain[larger[0]] <= columns[padded] else padded
