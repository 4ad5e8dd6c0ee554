"""Task 3: which tiles of keys a tile of queries walks over, and which of them need a mask."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from minillm.lab.check import expect_equal, seeded
from minillm.lab.checks.ch04.base import CHAPTER

bounds = CHAPTER.task(
    "causal_bounds",
    hints=(
        "Draw the staircase: `past` columns that all rows see, then one more for each row. Which row of the tile sees "
        "the fewest keys, and which the most?",
        "Row `first` of the new ones has the position past + first, and sees itself too. The tiles that lie wholly in "
        "what it sees need no mask.",
        "A tile of keys is full only if its last key is seen: round down. The last row's keys end at the length at the "
        "latest.",
    ),
)


def seen_by(row: int, past: int, length: int) -> range:
    """The keys that a new row sees."""
    return range(min(past + row + 1, length))


def count_tiles(first: int, rows: int, columns: int, past: int, length: int) -> tuple[int, int]:
    """(full tiles, end) by looking at each key of each tile."""
    present = [row for row in range(first, first + rows) if past + row < length]
    end = max(max(seen_by(row, past, length)) for row in present) + 1
    full = 0
    while all(k in seen_by(row, past, length) for row in present for k in range(full * columns, (full + 1) * columns)):
        full += 1
    return full, end


def mistakes(first: int, rows: int, columns: int, past: int, length: int) -> tuple[dict[str, int], dict[str, int]]:
    """What comes out of mistakes that people make, for each of the two numbers."""
    few, many = past + first + 1, past + first + rows
    full = {
        "when the past is forgotten": (first + 1) // columns,
        "when the diagonal is forgotten: a row sees itself too": (few - 1) // columns,
        "when a tile that is seen in part counts as full": -(-few // columns),
        "when the last row of the tile is asked instead of the first": many // columns,
        "when the tile's first row is forgotten": (past + 1) // columns,
        "when keys are counted instead of tiles": few // columns * columns,
        "when one tile more is counted": few // columns + 1,
    }
    end = {
        "when rows beyond the length count": many,
        "when the past is forgotten": min(first + rows, length),
        "when the last row does not see itself": min(many, length) - 1,
        "when one key more is counted": min(many, length) + 1,
        "when the first row of the tile is asked instead of the last": few,
        "when tiles are counted instead of keys": -(-min(many, length) // columns),
        "when it is rounded up to whole tiles": -(-min(many, length) // columns) * columns,
        "when keys after the tile's last row are walked over too": length,
    }
    return full, end


def expect_named(got: object, want: int, label: str, made: Mapping[str, int]) -> None:
    names = [what for what, value in made.items() if value == got != want]
    assert not names, f"{label}: yours {got}, expected {want}; yours is what comes out {', or '.join(names)}"
    expect_equal(got, want, label)


def check_bounds(fn: Callable, first: int, rows: int, columns: int, past: int, length: int) -> None:
    got = fn(first, rows, columns, past, length)
    label = f"causal_bounds(first={first}, rows={rows}, columns={columns}, past={past}, length={length})"
    pair = isinstance(got, tuple) and len(got) == 2
    assert pair, f"{label}: expected two numbers (full tiles, end), got {got!r}"
    wants, made = count_tiles(first, rows, columns, past, length), mistakes(first, rows, columns, past, length)
    for name, mine, want, named in zip(("full tiles", "end"), got, wants, made, strict=True):
        expect_named(mine, want, f"{label}, {name}", named)


@bounds
def without_a_past(fn):
    """a tile without a past"""
    check_bounds(fn, 4, 8, 3, 0, 24)
    check_bounds(fn, 0, 4, 4, 0, 12)


@bounds
def on_a_past(fn):
    """a tile on top of a past"""
    check_bounds(fn, 0, 5, 4, 10, 25)
    check_bounds(fn, 8, 4, 4, 10, 26)


@bounds
def at_the_diagonal(fn):
    """a tile of keys that ends at the first row's own key is full"""
    check_bounds(fn, 5, 5, 2, 0, 12)
    check_bounds(fn, 0, 2, 8, 7, 12)
    check_bounds(fn, 2, 2, 4, 0, 12)


@bounds
def sticking_out(fn):
    """the last tile of queries sticks out beyond the length"""
    check_bounds(fn, 8, 4, 4, 3, 12)
    check_bounds(fn, 0, 16, 4, 5, 6)


@bounds
def one_row(fn):
    """one row is a decode step: it sees everything"""
    check_bounds(fn, 0, 1, 4, 8, 9)
    check_bounds(fn, 0, 1, 4, 0, 1)
    check_bounds(fn, 0, 1, 1, 5, 6)


@bounds
def all_tiles(fn):
    """any tile of any chunk"""
    rng = random.Random(seeded(0))
    for _ in range(60):
        past, new, rows, columns = rng.randint(0, 12), rng.randint(1, 12), rng.randint(1, 6), rng.randint(1, 6)
        check_bounds(fn, rng.randrange(0, new, rows), rows, columns, past, past + new)
