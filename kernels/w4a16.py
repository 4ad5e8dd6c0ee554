"""A linear layer whose weights lie in memory as 4-bit codes, and are expanded in registers (W4A16).

Problem: y = x W^T + b, where each weight is code * scale + minimum, with a scale and a minimum for each group of a row.
With few rows of x the time is that of reading W, and a quarter of the bytes can take a quarter of the time; but only if
the expanded weights never go through memory, and if expanding is quick. Bytes: codes, scales and minima once for each
tile of rows, x and y.

Both kernels load 16 bytes a thread, a *piece* of 32 codes of one group, as words of 8 codes. The skinny one takes one
row of x, in plain multiplications, and lets the scale meet a sum: sum((code * scale + minimum) * x) = scale * sum(code
* x) + minimum * sum(x). The tile kernel takes up to 16 rows at once, or 64, or 128; it expands to x's dtype, which is
more work, but once for all of them, and multiplies on tensor cores. Where the output alone gives a GPU too few
programs, both split the walk along the weights' rows, and a third kernel adds up the partial results.

Frantar et al., "MARLIN: Mixed-Precision Auto-Regressive Parallel Inference on Large Language Models" (2024).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import processors, require_floats, require_tensor, require_weights, target
from kernels.nibbles import PIECE, by_nibble, codes_of, load_grid, load_words
from kernels.online_softmax import precision

SKINNY = (64, 256)  # columns of the output and weights of a row that a program takes at a time
SKINNY_OPTIONS = {"num_warps": 4}
SKINNY_STAGES = 3
LEAST_SPLIT = 256  # weights of a row: a shorter split would write nearly as much as it reads
MAX_SPLITS = 64
PROGRAMS_PER_PROCESSOR = 4
MERGE_COLUMNS = 128
MERGE_OPTIONS = {"num_warps": 4}


def reference(x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same in plain PyTorch and float64, with the whole matrix of weights."""
    out = x.double() @ expanded(codes, scale, minimum, torch.float64).T
    return out if bias is None else out + bias.double()


def expanded(codes: Tensor, scale: Tensor, minimum: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole matrix of weights: [columns, k]"""
    unpacked = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).to(dtype)
    groups = unpacked.unflatten(1, (scale.shape[1], -1))
    return (groups * scale.to(dtype)[..., None] + minimum.to(dtype)[..., None]).flatten(1)


@triton.jit
def skinny_kernel(
    x_ptr, codes_ptr, scale_ptr, minimum_ptr, bias_ptr, out_ptr,
    stride_x, stride_codes, stride_scale, stride_minimum, stride_out, stride_split, n_columns, n_pieces, split_size,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: one row of x, BLOCK_N columns of the output, one split. stride_codes, n_pieces, ...: in pieces."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_inside, wide = columns < n_columns, columns.to(tl.int64)[:, None]
    start = split * split_size
    end = tl.minimum(n_pieces, start + split_size)
    acc = tl.zeros([BLOCK_N, BLOCK_K // PIECE], tl.float32)
    for first in tl.range(start, end, BLOCK_K // PIECE, num_stages=STAGES):
        words = load_words(codes_ptr + wide * stride_codes * (PIECE // 8), column_inside, first, end, BLOCK_K)
        scale, minimum = load_grid(
            scale_ptr + wide * stride_scale, minimum_ptr + wide * stride_minimum, column_inside, first, end,
            GROUP, BLOCK_K,
        )  # fmt: skip
        ks = first * PIECE + tl.arange(0, BLOCK_K)
        x = by_nibble(tl.load(x_ptr + row * stride_x + ks, mask=ks < end * PIECE, other=0.0).to(tl.float32))
        products = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
        sums = tl.zeros([BLOCK_K // 8], tl.float32)
        for j in tl.static_range(8):
            # Not shifted down: the code is read 16^j times too large, exactly, and x is made smaller by as much.
            products += (words & (15 << (4 * j))).to(tl.float32) * (x[j] * (1.0 / (1 << (4 * j))))[None, :]
            sums += x[j]
        acc += tl.sum(products.reshape(BLOCK_N, BLOCK_K // PIECE, PIECE // 8), axis=2) * scale
        acc += tl.sum(sums.reshape(BLOCK_K // PIECE, PIECE // 8), axis=1)[None, :] * minimum
    out = tl.sum(acc, axis=1)
    if HAS_BIAS:
        out += tl.load(bias_ptr + columns, mask=column_inside, other=0.0).to(tl.float32)
    out_ptr += split.to(tl.int64) * stride_split + row * stride_out
    tl.store(out_ptr + columns, out.to(out_ptr.dtype.element_ty), mask=column_inside)


@triton.jit
def tile_kernel(
    x_ptr, codes_ptr, scale_ptr, minimum_ptr, bias_ptr, out_ptr,
    stride_x, stride_codes, stride_scale, stride_minimum, stride_out, stride_split,
    n_rows, n_columns, n_pieces, split_size,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: a tile of BLOCK_M rows and BLOCK_N columns of the output, and one split. It computes W x^T."""
    split = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_inside, tall = (rows < n_rows)[:, None], rows.to(tl.int64)[:, None]
    column_inside, wide = columns < n_columns, columns.to(tl.int64)[:, None]
    start = split * split_size
    end = tl.minimum(n_pieces, start + split_size)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for first in range(start, end, BLOCK_K // PIECE):
        words = load_words(codes_ptr + wide * stride_codes * (PIECE // 8), column_inside, first, end, BLOCK_K)
        scale, minimum = load_grid(
            scale_ptr + wide * stride_scale, minimum_ptr + wide * stride_minimum, column_inside, first, end,
            GROUP, BLOCK_K,
        )  # fmt: skip
        ks = first * PIECE + tl.arange(0, BLOCK_K)
        inside = row_inside & (ks < end * PIECE)[None, :]
        x = tl.load(x_ptr + tall * stride_x + ks[None, :], mask=inside, other=0.0)
        pieces = codes_of(words).to(tl.float32).reshape(BLOCK_N, BLOCK_K // PIECE, PIECE)
        weight = (pieces * scale[:, :, None] + minimum[:, :, None]).reshape(BLOCK_N, BLOCK_K).to(x.dtype)
        acc = tl.dot(weight, tl.trans(x), acc, input_precision=PRECISION)
    out = tl.trans(acc)
    if HAS_BIAS:
        out += tl.load(bias_ptr + columns, mask=column_inside, other=0.0).to(tl.float32)[None, :]
    out_ptr += split.to(tl.int64) * stride_split
    inside = row_inside & column_inside[None, :]
    tl.store(out_ptr + tall * stride_out + columns[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def merge_kernel(
    parts_ptr, bias_ptr, out_ptr, n_columns, n_splits, stride_split,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N columns of one row. Add up the splits and the bias."""
    row, splits = tl.program_id(0).to(tl.int64) * n_columns, tl.arange(0, SPLITS)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < n_columns
    place = splits.to(tl.int64)[:, None] * stride_split + row + columns[None, :]
    out = tl.sum(tl.load(parts_ptr + place, mask=(splits < n_splits)[:, None] & inside[None, :], other=0.0), axis=0)
    if HAS_BIAS:
        out += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def linear(x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias, W = code * scale + minimum.

    x: [rows, k] float32, float16 or bfloat16; codes: [columns, k / 2] uint8, byte i with code 2i in its low half and
    2i + 1 in its high half, rows at multiples of 16 bytes; scale, minimum: [columns, groups] float16 or float32, groups
    of a multiple of 32 weights; bias: [columns] in x's dtype. -> [rows, columns] in x's dtype.

    Raises ValueError for anything else.
    """
    require_tensor("x", x, (None, None))
    require_floats("x", x)
    group = require_weights(x, codes, scale, minimum)
    n_rows, n_columns, n_pieces = len(x), len(codes), x.shape[1] // PIECE.value
    if bias is not None:
        require_tensor("bias", bias, (n_columns,), like=x)
    out = torch.empty((n_rows, n_columns), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    skinny = n_rows <= skinny_rows(x.dtype)
    choice = None if skinny else blocks(n_rows, x.dtype, target(x.device))
    block_m, block_n = (1, SKINNY[0]) if skinny else choice[:2]
    tiles = triton.cdiv(n_rows, block_m), triton.cdiv(n_columns, block_n)
    n_splits, split_size = splits(tiles[0] * tiles[1], n_pieces, processors(x.device))
    whole = n_splits == 1
    to = out if whole else torch.empty((n_splits, n_rows, n_columns), dtype=torch.float32, device=x.device)
    words, grid = codes.view(torch.uint32), (tiles[0], n_splits, tiles[1])
    given = x if bias is None else bias  # some address, which is not read without a bias
    tensors = (x, words, scale, minimum, given, to)
    strides = (x.stride(0), codes.stride(0) // 16, scale.stride(0), minimum.stride(0), n_columns, n_rows * n_columns)
    has_bias = bias is not None
    with torch.cuda.device_of(x):  # Triton launches on the current GPU
        if skinny:
            skinny_kernel[grid](
                *tensors, *strides, n_columns, n_pieces, split_size, GROUP=group, BLOCK_N=block_n, BLOCK_K=SKINNY[1],
                HAS_BIAS=has_bias and whole, STAGES=SKINNY_STAGES, **SKINNY_OPTIONS,
            )  # fmt: skip
        else:
            tile_kernel[grid](
                *tensors, *strides, n_rows, n_columns, n_pieces, split_size, GROUP=group,
                BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=choice.k, HAS_BIAS=has_bias and whole,
                PRECISION=precision(x.dtype), num_warps=choice.warps, num_stages=choice.stages,
            )  # fmt: skip
        if not whole:
            merge_kernel[(n_rows, triton.cdiv(n_columns, MERGE_COLUMNS))](
                to, given, out, n_columns, n_splits, n_rows * n_columns,
                BLOCK_N=MERGE_COLUMNS, SPLITS=triton.next_power_of_2(n_splits), HAS_BIAS=has_bias, **MERGE_OPTIONS,
            )  # fmt: skip
    return out


class Blocks(NamedTuple):
    """Rows and columns of a tile of the output, weights of a row at a time, warps, loads in flight (stages)."""

    rows: int
    columns: int
    k: int
    warps: int
    stages: int


def blocks(n_rows: int, dtype: torch.dtype, target: str) -> Blocks:
    """The largest tiles, of those tried, that spill nothing and leave a thread 16 bytes of codes to load (aot.py)."""
    if dtype == torch.float32:  # no work for tensor cores
        return Blocks(16, 128 if target.startswith("gfx") else 64, 64, 4, 2)
    rows = 16 if n_rows <= 16 else 64 if n_rows <= 64 else 128
    if target.startswith("gfx"):
        return Blocks(rows, 128, 64, 4, 2)
    if rows == 64 and target == "sm_80":
        return Blocks(64, 64, 64, 4, 3)
    return Blocks(rows, 128, 64, 8 if rows == 128 else 4, 3)


def skinny_rows(dtype: torch.dtype) -> int:
    """Up to how many rows, one after the other, the skinny kernel has less to do than a tile of 16.

    Instructions for each weight, counted in the code for sm_90: 4.5 a row against 7 a tile; in float32 4.3 against 25.
    """
    return 4 if dtype == torch.float32 else 1


def splits(programs: int, n_pieces: int, n_processors: int) -> tuple[int, int]:
    """(number of splits, pieces in each): enough programs for every processor, and none without work."""
    wanted = triton.cdiv(PROGRAMS_PER_PROCESSOR * n_processors, programs)
    least = LEAST_SPLIT // PIECE.value
    n_parts = triton.cdiv(n_pieces, least)
    parts_each = triton.cdiv(n_parts, min(wanted, n_parts, MAX_SPLITS))
    return triton.cdiv(n_parts, parts_each), parts_each * least


def bytes_moved(n_rows: int, n_columns: int, k: int, group: int, itemsize: int, grid_itemsize: int = 2) -> int:
    """At least: codes, scales and minima once, x and the output. Partial results come on top."""
    return n_columns * (k // 2 + 2 * grid_itemsize * k // group) + itemsize * n_rows * (k + n_columns)


def flops(n_rows: int, n_columns: int, k: int) -> int:
    """Of the product. Expanding the weights is not counted."""
    return 2 * n_rows * n_columns * k
