"""Task 6: masked loads through a block table."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minillm.lab.check import expect_close, seeded
from minillm.lab.checks.ch04.base import CHAPTER, named, randn
from minillm.lab.checks.ch04.guarded import Guarded, launch

gather = CHAPTER.task(
    "gather_kernel",
    hints=(
        "Program p has the positions p * TILE + tl.arange(0, TILE). Which of them exist? Mask everything by that.",
        "One load gives you the blocks of all positions at once, from the table at position // BLOCK_SIZE.",
        "Addresses of rows [TILE, 1] plus dimensions [1, BLOCK_D] make [TILE, BLOCK_D]: x[:, None] and x[None, :]. The "
        "mask is the `&` of both conditions, for the load and for the store.",
    ),
    needs="triton",
)


def check_gather(
    fn: Callable,
    length: int,
    size: int,
    dim: int,
    tile: int,
    dtype: torch.dtype = torch.float32,
    spare: int = 0,
    seed: int = 0,
) -> None:
    """A text of `length` tokens in blocks anywhere in a pool; the table has `spare` entries that do not count."""
    used = -(-length // size)
    n_blocks = used + spare + 2
    order = torch.randperm(n_blocks, generator=torch.Generator().manual_seed(seeded(seed))).tolist()
    table = order[: used + spare]
    if table[:used] == sorted(table[:used]):
        table[:used] = table[:used][::-1]
    pool = Guarded("pool", (n_blocks, size, dim), dtype).filled(randn(seeded(seed + 50), n_blocks, size, dim))
    rows, block_d = pool.data.clone(), 1 << (dim - 1).bit_length()
    slots = [(table[p // size], p % size) for p in range(length)]
    usable = torch.zeros(n_blocks, size, dim, dtype=torch.bool)
    usable[tuple(zip(*slots, strict=True))] = True
    pool.restrict(usable)
    pool.explain = lambda place: outside(place, table[:used], table[used:], (n_blocks, size, dim))
    entries = Guarded("table", (len(table),), torch.int32).filled(torch.tensor(table))
    out = Guarded("out", (length, dim), dtype, gap=2)
    label = f"{length} tokens, blocks {table[:used]} of {size} rows, head_dim {dim}, TILE={tile}"
    label += f", {str(dtype).removeprefix('torch.')}"
    sizes = {"BLOCK_SIZE": size, "HEAD_DIM": dim, "BLOCK_D": block_d, "TILE": tile}
    try:
        launch(fn, -(-length // tile), [pool, entries], [out], length, *pool.strides[:2], out.strides[0], **sizes)
    except AssertionError as error:
        raise AssertionError(f"{label}: {error}") from None
    want = torch.stack([rows[slot] for slot in slots])
    made = named(out.data, want, lambda: mistakes(rows, table, slots, tile))
    assert not made, f"{label}: {made}"
    expect_close(out.data, want, label)


def outside(place: list[int], used: list[int], spare: list[int], shape: tuple[int, ...]) -> str:
    """Why a number of the pool is not one of the text."""
    block, row, dim = place
    if dim >= shape[2]:
        return f"and head_dim is {shape[2]}: mask the dimensions"
    if row >= shape[1]:
        return f"and a block has {shape[1]} rows: is the row position % BLOCK_SIZE, and each stride with its own index?"
    if block in spare:
        return f"and block {block} is an entry of the table beyond the length: do not follow it"
    if block in used:
        return "a row beyond the length, whose slot is not written yet: mask the positions"
    return "and this block is not in the table: is the block read from the table, and other=0 never followed?"


def mistakes(rows: Tensor, table: list[int], slots: list[tuple[int, int]], tile: int) -> dict[str, Tensor]:
    """What comes out of mistakes that people make, and read only rows of the text."""
    size = rows.shape[1]
    return {
        "when every program takes the first tile": torch.stack([rows[slots[p % tile]] for p in range(len(slots))]),
        "when one block serves a whole tile": torch.stack(
            [rows[slots[p // tile * tile][0], p % size] for p in range(len(slots))]
        ),
    }


@gather
def one_block(fn):
    """a text in one block"""
    check_gather(fn, length=4, size=4, dim=4, tile=4)


@gather
def through_the_table(fn):
    """blocks in any order, several to a tile, and several tiles to a block"""
    check_gather(fn, length=8, size=2, dim=4, tile=4, seed=1)
    check_gather(fn, length=8, size=8, dim=4, tile=2, seed=2)


@gather
def spare_entries(fn):
    """a tile that reaches beyond the length, and spare entries of the table that are never followed"""
    check_gather(fn, length=4, size=4, dim=4, tile=8, spare=2, seed=6)
    check_gather(fn, length=6, size=2, dim=4, tile=4, spare=3, seed=7)


@gather
def any_length(fn):
    """a length that is no multiple of a tile or a block"""
    check_gather(fn, length=7, size=2, dim=4, tile=4, seed=3)
    check_gather(fn, length=1, size=4, dim=2, tile=2, seed=4)


@gather
def any_head_dim(fn):
    """a head_dim that is no power of two"""
    check_gather(fn, length=5, size=3, dim=5, tile=4, seed=5)


@gather
def half_precision(fn):
    """float16 comes out unchanged"""
    check_gather(fn, length=9, size=4, dim=6, tile=4, dtype=torch.float16, spare=1, seed=8)
