"""Task 5: a first Triton kernel, RMSNorm, a program a row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minillm.lab.check import expect_close, seeded
from minillm.lab.checks.ch04.base import CHAPTER, named, randn
from minillm.lab.checks.ch04.guarded import Guarded, launch

norm = CHAPTER.task(
    "norm_kernel",
    hints=(
        "tl.program_id(0) is the row. x_ptr + row * stride_x is the address of its first number; adding a tl.arange "
        "gives BLOCK addresses at once.",
        "BLOCK is a power of two, a row seldom is: mask each load and store by which columns exist, and give each load "
        "other=0.0.",
        "Hidden zeros change no sum. A mean is the sum divided by n_columns, and not by BLOCK. Turn x to tl.float32 "
        "before you square it.",
    ),
    needs="triton",
)
EPS = 0.1  # large: where it is added matters


def oracle(x: Tensor, weight: Tensor, eps: float = EPS, count: int = 0) -> Tensor:
    """In float64; `count`: what the sum of squares is divided by, if not by the number of columns."""
    x = x.double()
    mean = x.pow(2).sum(1, keepdim=True) / (count or x.shape[1])
    return x / (mean + eps).sqrt() * weight.double()


def mistakes(x: Tensor, weight: Tensor, block: int) -> dict[str, Tensor]:
    """What comes out of mistakes that people make."""
    wide = x.double()
    squares = wide.pow(2).mean(1, keepdim=True)
    centred = wide - wide.mean(1, keepdim=True)
    layer = centred / (centred.pow(2).mean(1, keepdim=True) + EPS).sqrt() * weight.double()
    weight = weight.double()
    low = (x * x).sum(1, keepdim=True) / x.shape[1]  # in the dtype of x
    return {
        "when the sum is divided by BLOCK, and not by n_columns": oracle(x, weight, count=block),
        "when the hidden columns count as ones in the sum": wide
        / (squares + (block - x.shape[1]) / x.shape[1] + EPS).sqrt()
        * weight,
        "when eps is added outside of the root": wide / (squares.sqrt() + EPS) * weight,
        "when eps is forgotten": oracle(x, weight, eps=0),
        "when the weight is forgotten": oracle(x, torch.ones_like(weight)),
        "when the sum of squares is not divided at all": oracle(x, weight, count=1),
        "when the root is forgotten": wide / (squares + EPS) * weight,
        "when it is multiplied by the root mean square, not divided": wide * (squares + EPS).sqrt() * weight,
        "when the mean is subtracted, as LayerNorm does": layer,
        "when squares are taken in float16, where 256 * 256 is infinite": wide / (low.double() + EPS).sqrt() * weight,
        "when every row is the first": oracle(x[:1], weight).expand(len(x), -1),
    }


def check_rows(
    fn: Callable, rows: int, columns: int, dtype: torch.dtype = torch.float32, scale: float = 1, seed: int = 0
):
    block = max(1 << (columns - 1).bit_length(), 2)
    x = Guarded("x", (rows, columns), dtype).filled(scale * randn(seeded(seed), rows, columns))
    weight = Guarded("weight", (columns,), dtype).filled(1 + 0.5 * randn(seeded(seed + 50), columns))
    y = Guarded("y", (rows, columns), dtype, gap=5)
    given = x.data.clone(), weight.data.clone()
    label = f"{rows} row(s) of {columns} columns, BLOCK={block}, {str(dtype).removeprefix('torch.')}"
    try:
        launch(fn, rows, [x, weight], [y], x.strides[0], y.strides[0], columns, EPS, BLOCK=block)
    except AssertionError as error:
        raise AssertionError(f"{label}: {error}") from None
    precise = (1e-4, 1e-5) if dtype == torch.float32 else (5e-3, 5e-3)
    want = oracle(*given)
    made = named(y.data, want, lambda: mistakes(*given, block), *precise)
    assert not made, f"{label}: {made}"
    expect_close(y.data, want.to(dtype), label, *precise)


@norm
def a_full_block(fn):
    """a row that fills its block"""
    check_rows(fn, 1, 8)


@norm
def not_a_power(fn):
    """a number of columns that is no power of two"""
    check_rows(fn, 1, 5, seed=1)
    check_rows(fn, 1, 1, seed=2)


@norm
def several_rows(fn):
    """rows that lie apart in memory"""
    check_rows(fn, 3, 6, seed=3)
    check_rows(fn, 2, 17, seed=4)


@norm
def half_precision(fn):
    """float16, with numbers whose squares it cannot hold"""
    check_rows(fn, 2, 6, torch.float16, seed=5)
    check_rows(fn, 2, 7, torch.float16, scale=300, seed=6)


@norm
def small_numbers(fn):
    """a row of zeros, and one of small numbers"""
    check_rows(fn, 2, 6, scale=0.1, seed=7)
    check_rows(fn, 1, 6, scale=0, seed=8)
