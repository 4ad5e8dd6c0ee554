"""Packed 4-bit weights on their way into registers: what both kernels of w4a16.py share.

Byte i of a row holds code 2i in its low half and code 2i + 1 in its high half. Four bytes, read as one word, so hold 8
codes with the first in the lowest bits; four words, 16 bytes, are what a thread loads at once: a *piece* of 32 codes.
Groups are whole pieces, so that one scale and one minimum serve all of it, whatever the group.
"""

from __future__ import annotations

import triton
import triton.language as tl

PIECE = tl.constexpr(32)


@triton.jit
def load_words(row_ptr, row_inside, first, end, BLOCK_K: tl.constexpr):
    """Rows of W from piece `first` on. row_ptr: [rows, 1] -> [rows, BLOCK_K / 8]"""
    at = first * (PIECE // 8) + tl.arange(0, BLOCK_K // 8)
    return tl.load(row_ptr + at[None, :], mask=row_inside[:, None] & (at < end * (PIECE // 8))[None, :], other=0)


@triton.jit
def load_grid(scale_ptr, minimum_ptr, row_inside, first, end, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    """Scale and minimum of each piece of these rows. -> 2 x [rows, BLOCK_K / PIECE]"""
    pieces = first + tl.arange(0, BLOCK_K // PIECE)
    inside = row_inside[:, None] & (pieces < end)[None, :]
    group = (pieces // (GROUP // PIECE))[None, :]
    scale = tl.load(scale_ptr + group, mask=inside, other=0.0)
    return scale.to(tl.float32), tl.load(minimum_ptr + group, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def by_nibble(x):
    """x: [8 * words] -> 8 times [words]: what code 0 of each word meets, code 1, ..."""
    even, odd = tl.split(x.reshape(x.shape[0] // 8, 2, 2, 2))
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def codes_of(words):
    """The other way: [rows, words] -> [rows, 8 * words]"""
    c04 = tl.interleave(words & 15, (words >> 16) & 15)
    c15 = tl.interleave((words >> 4) & 15, (words >> 20) & 15)
    c26 = tl.interleave((words >> 8) & 15, (words >> 24) & 15)
    c37 = tl.interleave((words >> 12) & 15, words >> 28)
    return tl.interleave(tl.interleave(c04, c26), tl.interleave(c15, c37))
