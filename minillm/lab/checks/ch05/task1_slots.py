"""Task 1: where each token of a text lies."""

from __future__ import annotations

import random
from collections.abc import Callable

from minillm.lab.check import expect_equal, seeded
from minillm.lab.checks.ch05.base import CHAPTER

slots = CHAPTER.task(
    "find_slots",
    hints=(
        "The table is a list of blocks in the order of the text: how many whole blocks lie before a position?",
        "Two divisions of the same two numbers: the quotient says which entry of the table, the remainder which row.",
        "The first position is `start`, the place in the whole text, and not 0.",
    ),
)


def laid_out(block_table: list[int], block_size: int) -> list[tuple[int, int]]:
    """Every slot that the table reaches, in the order of the text."""
    return [(block, row) for block in block_table for row in range(block_size)]


def mistakes(block_table: list[int], start: int, count: int, size: int) -> dict[str, object]:
    """What comes out of mistakes that people make."""
    every, positions = laid_out(block_table, size), range(start, start + count)
    return {
        "when the quotient is taken for the block, without the table": [(p // size, p % size) for p in positions],
        "when the position is not reduced to a row of its block": [(every[p][0], p) for p in positions],
        "when quotient and remainder are swapped": [
            (block_table[p % size], p // size) for p in positions if p % size < len(block_table)
        ],
        "when positions are counted from 0 instead of from start": every[:count],
        "when positions are counted from 1": every[start + 1 : start + count + 1],
        "when block and row change places": [every[p][::-1] for p in positions],
        "when slots are numbered through the pool": [every[p][0] * size + every[p][1] for p in positions],
        "when the last token is left out": every[start : start + count - 1],
        "when all tokens up to the last new one are given": every[: start + count],
    }


def check_slots(fn: Callable, block_table: list[int], start: int, count: int, size: int) -> None:
    given = list(block_table)
    got = fn(given, start, count, size)
    label = f"find_slots({block_table}, start={start}, count={count}, block_size={size})"
    want = laid_out(block_table, size)[start : start + count]
    if isinstance(got, list) and got != want:
        made = [what for what, value in mistakes(block_table, start, count, size).items() if value == got]
        assert not made, f"{label}: yours {got}, expected {want}; yours is what comes out {', or '.join(made)}"
    expect_equal(got, want, label)
    expect_equal(given, block_table, f"{label}: the block table after the call")


@slots
def a_first_chunk(fn):
    """a first chunk goes over the edge of a block"""
    check_slots(fn, [7, 2, 9, 5], 0, 6, 4)


@slots
def a_chunk_on_a_past(fn):
    """a chunk on a past: the table counts from the beginning of the text"""
    check_slots(fn, [7, 2, 9], 3, 6, 4)
    check_slots(fn, [5, 1, 8, 3], 5, 1, 3)


@slots
def at_the_edges(fn):
    """the last row of a block, and the first of the next"""
    check_slots(fn, [3, 0], 3, 1, 4)
    check_slots(fn, [3, 0], 4, 1, 4)
    check_slots(fn, [6, 5], 0, 8, 4)


@slots
def blocks_of_one(fn):
    """blocks of a single token"""
    check_slots(fn, [4, 0, 2], 0, 3, 1)


@slots
def nothing_new(fn):
    """no new token has no slot"""
    check_slots(fn, [4, 1], 2, 0, 4)


@slots
def random_tables(fn):
    """any table, any chunk"""
    rng = random.Random(seeded(1))
    for _ in range(20):
        size, n = rng.randint(1, 6), rng.randint(1, 6)
        start = rng.randrange(size * n)
        check_slots(fn, rng.sample(range(20), n), start, rng.randint(1, size * n - start), size)
