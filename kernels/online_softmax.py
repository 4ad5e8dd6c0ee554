"""The walk over tiles of keys and values with a running softmax: what prefill and decode have in common.

For each query row three things are kept: the largest score so far (`top`), the sum of exp2(score - top) (`total`), and
the values weighted by those (`acc`). A tile that raises the maximum makes what was added before too large by the same
factor for all; it is scaled down. Scores come multiplied by log2(e), since exp2 is the exponential that a GPU has.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), algorithm 3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def walk(
    q, k_ptr, v_ptr, table_ptr, start, end, last_seen, length, top, total, acc, scale, stride_block, stride_row,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the keys from `start` to `end` in, BLOCK_N at a time. -> top, total, acc

    q: [rows, BLOCK_D]; last_seen: [rows], the last position that each row may see. Not MASKED: the caller knows that
    every row sees every key of these tiles.
    """
    dims = tl.arange(0, BLOCK_D)
    for first in range(start, end, BLOCK_N):
        columns = first + tl.arange(0, BLOCK_N)
        known = columns < length
        if MASKED:
            block = tl.load(table_ptr + columns // BLOCK_SIZE, mask=known, other=0)
        else:
            block = tl.load(table_ptr + columns // BLOCK_SIZE)
        offsets = (block.to(tl.int64) * stride_block + (columns % BLOCK_SIZE) * stride_row)[:, None] + dims[None, :]
        if MASKED or HEAD_DIM != BLOCK_D:
            inside = known[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(k_ptr + offsets, mask=inside, other=0.0)
            v = tl.load(v_ptr + offsets, mask=inside, other=0.0)
        else:
            k = tl.load(k_ptr + offsets)
            v = tl.load(v_ptr + offsets)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if MASKED:
            scores = tl.where(columns[None, :] <= last_seen[:, None], scores, float("-inf"))
        top, total, acc = add_tile(scores, v, top, total, acc, MASKED, PRECISION)
    return top, total, acc


@triton.jit
def add_tile(scores, v, top, total, acc, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """scores: [rows, columns], v: [columns, BLOCK_D] -> top, total, acc with the tile in them"""
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    base = new_top
    if MASKED:
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen nothing: not inf - inf
    weights = tl.exp2(scores - base[:, None])
    rescale = tl.exp2(top - base)
    acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return new_top, total * rescale + tl.sum(weights, axis=1), acc


@triton.jit
def finish(total, acc):
    """The weighted mean. A row that saw nothing gives zeros."""
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


def padded(head_dim: int) -> int:
    """Coordinates in registers: a power of two, and at least the 16 that a matrix product wants."""
    return max(16, triton.next_power_of_2(head_dim))


def precision(dtype: torch.dtype) -> str:
    """float32 products in full, not in the tensor cores' 10 bits of mantissa. In 16 bits nothing changes."""
    return "ieee" if dtype == torch.float32 else "tf32"
