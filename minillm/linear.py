"""The linear layer, and the choice of the quickest way to multiply by its matrix.

Decoding multiplies a few rows by large matrices, and is as slow as the weights are to read. A BLAS library has a
different routine for each shape, and not all of them read at full speed: on many CPUs `(W @ x.T).T` with four rows
is quicker than `F.linear` with one. So `choose_products` times a few forms once, when the model is prepared, as
Triton's autotuner does for a kernel. Two of them read the same weights in the same layout, [out, in]. The third, if
asked for, reads a second copy that oneDNN has packed into blocks: twice the memory, and for a batch's rows often
the quickest by far. The results differ by rounding only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES = (1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64)  # numbers of rows that are timed
SAMPLE_BYTES = 64 * 2**20  # enough weights that no cache holds them
REPEATS = 4
PACKED_FOR = 32  # rows that the packed layout is made for; it serves any number

# A choice is the number of rows that x is padded to, for the product by columns, or one of these.
PLAIN, PACKED = 0, -1


class Linear(nn.Module):
    """x [rows, in] -> x W^T + b [rows, out], with W [out, in] as checkpoints store it."""

    def __init__(self, n_in: int, n_out: int, bias: bool = False, weight: nn.Parameter | None = None, **kwargs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in, **kwargs)) if weight is None else weight
        self.bias = nn.Parameter(torch.empty(n_out, **kwargs)) if bias else None
        self.choices: list[int] | None = None  # for each number of rows, set by the functions below
        self.packed: Tensor | None = None  # set by choose_products and pack_all

    def _apply(self, fn: Callable, recurse: bool = True) -> Linear:
        """Another dtype or device: what was measured and packed for this one is of no use there."""
        self.choices = self.packed = None
        return super()._apply(fn, recurse)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of some rows of the matrix. ids: [n] -> [n, in]"""
        return self.weight.detach()[ids].to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        choice = PLAIN if self.choices is None else self.choices[min(len(x), SIZES[-1] + 1)]
        if choice == PLAIN:
            return F.linear(x, self.weight, self.bias)
        if choice == PACKED:
            return packed_product(x, self.packed, self.bias)
        out = columns_product(x, self.weight, choice)
        return out if self.bias is None else out + self.bias


def columns_product(x: Tensor, weight: Tensor, padded_rows: int) -> Tensor:
    """x W^T as (W x^T)^T, with rows of zeros added below x up to `padded_rows`. -> [rows, out]"""
    rows = len(x)
    if rows < padded_rows:
        x = F.pad(x, (0, 0, 0, padded_rows - rows))  # padded first, so that x.T stays a view
    return (weight @ x.T)[:, :rows].T.contiguous()


def packed_product(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b with a matrix from `pack`. -> [rows, out]"""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def pack(weight: Tensor) -> Tensor | None:
    """A copy of W in oneDNN's own layout; None where this PyTorch cannot do it (its operator is not a public one)."""
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)
    except (AttributeError, RuntimeError):
        return None


def choose_products(model: nn.Module, packed: bool = False) -> None:
    """Time the forms on this model's own weights (a second or a few) and set the quickest in each `Linear`.

    Only on a CPU in float32: elsewhere F.linear is kept. packed: keep a second, packed copy of the weights too; whoever
    changes weights afterwards has to call this again.
    """
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    weights = sample_weights([layer.weight.detach() for layer in layers])
    if not weights or any(w.device.type != "cpu" or w.dtype != torch.float32 for w in weights):
        return
    forms: dict[str, Callable[[Tensor, int], Tensor]] = {
        "plain": lambda x, i: F.linear(x, weights[i]),
        "columns": lambda x, i: columns_product(x, weights[i], len(x)),
    }
    if packed:
        for layer in layers:
            layer.packed = pack(layer.weight.detach())
        copies = [layer.packed for layer in layers[: len(weights)]]
        if None not in copies:
            forms["packed"] = lambda x, i: packed_product(x, copies[i])
    times = fastest(forms, [w.shape[1] for w in weights])
    choices = [quickest(rows, **times) for rows in range(SIZES[-1] + 2)]
    for layer in layers:
        layer.choices = choices


def adopt_choices(module: nn.Module, like: nn.Module) -> None:
    """Multiply as another layer does, without timing: for weights that are too few to be timed. None is packed."""
    choices = getattr(like, "choices", None)  # a layer of another kind has none
    for layer in module.modules():
        if isinstance(layer, Linear) and choices is not None:
            layer.choices = [PLAIN if choice == PACKED else choice for choice in choices]


def pack_all(module: nn.Module) -> None:
    """Multiply by packed copies, where oneDNN has them, without timing: meant for 16-bit weights, where they are the
    quickest by far."""
    for layer in module.modules():
        if isinstance(layer, Linear):
            layer.packed = pack(layer.weight.detach())
            layer.choices = None if layer.packed is None else [PACKED] * (SIZES[-1] + 2)


@torch.inference_mode()
def fastest(forms: dict[str, Callable[[Tensor, int], Tensor]], n_in: list[int]) -> dict[str, dict[int, float]]:
    """For each form and number of rows, the seconds of its shortest pass over all weights: noise only ever adds time.

    The forms take turns, so that a slow moment of the machine spoils one pass of many forms, not all passes of one.
    forms: x [rows, in] and the number of a weight -> the product. n_in: the columns of each weight.
    """
    times: dict[str, dict[int, float]] = {name: dict.fromkeys(SIZES, math.inf) for name in forms}
    for turn in range(REPEATS + 1):
        for rows in SIZES:
            inputs = {n: torch.randn(rows, n) for n in n_in}
            for name, product in forms.items():
                start = time.perf_counter()
                for i, n in enumerate(n_in):
                    product(inputs[n], i)
                if turn:  # the first pass warms up
                    times[name][rows] = min(times[name][rows], time.perf_counter() - start)
    return times


def sample_weights(weights: list[Tensor]) -> list[Tensor]:
    """The first weights up to SAMPLE_BYTES together, or none if all of them would fit in a cache."""
    sample, size = [], 0
    for weight in weights:
        sample.append(weight)
        size += weight.nbytes
        if size >= SAMPLE_BYTES:
            return sample
    return []


def quickest(
    rows: int, plain: dict[int, float], columns: dict[int, float], packed: dict[int, float] | None = None
) -> int:
    """PLAIN, PACKED, or the rows to pad to. More rows than were timed: no padding, and what was best for the most."""
    if rows == 0:
        return PLAIN  # no row is padded, and no weight is read
    size = next((n for n in SIZES if n >= rows), SIZES[-1])
    padded = min((n for n in SIZES if n >= size), key=columns.__getitem__)
    options = {PLAIN: plain[size], padded if rows <= size else 1: columns[padded]}
    if packed:
        options[PACKED] = packed[size]
    return min(options, key=options.__getitem__)
