"""Task 2: a block table grows and shrinks, in a pool where tables share blocks."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

from minillm.lab.check import seeded
from minillm.lab.checks.ch05.base import CHAPTER, blocks_for, expect_refused, expect_sound, pool_of, share

resize = CHAPTER.task(
    "resize_table",
    hints=(
        "How many blocks do n_tokens fill, the last one perhaps in part? Compare that with what the table has.",
        "A block that is taken leaves the free list and has one reference. To give a block back is to take one "
        "reference away.",
        "A block goes back to the free list when its last reference goes, and not before. A block without a "
        "reference cannot lose one: that is an error.",
        "Ask whether there are enough free blocks before you take the first.",
    ),
)


class Tables:
    """Some texts' block tables in one pool. The learner's function changes them; after each call all is looked at."""

    def __init__(self, fn: Callable, n_blocks: int, block_size: int, seed: int = 0):
        self.fn, self.pool = fn, pool_of(n_blocks, block_size, seed)
        self.tables: dict[str, list[int]] = {}

    def resize(self, name: str, n_tokens: int) -> None:
        table = self.tables.setdefault(name, [])
        before = list(table)
        size = self.pool.block_size
        want = blocks_for(n_tokens, size)
        label = f"the table of {name} ({before}) resized to {n_tokens} tokens, blocks of {size}"
        got = self.fn(self.pool, table, n_tokens)
        assert table != before or len(table) == want or not isinstance(got, list), (
            f"{label}: you returned a table, and the one that was given is as before; change it in place"
        )
        counted = (
            f": {len(table)} blocks hold {len(table) * size} tokens" if len(table) < want else ": blocks are left over"
        )
        assert len(table) == want, f"{label}: it has {len(table)} blocks, expected {want}{counted}"
        kept = min(len(before), want)
        assert table[:kept] == before[:kept], (
            f"{label}: it is {table} now; the first {kept} blocks hold the first tokens and must stay"
        )
        expect_sound(self.pool, self.tables, label)

    def share(self, name: str, new: str) -> None:
        self.tables[new] = share(self.pool, self.tables[name])

    def refuse(self, name: str, n_tokens: int) -> None:
        table = self.tables.setdefault(name, [])
        pool, before = copy.deepcopy(self.pool), list(table)
        free = len(self.pool.free)
        label = f"the table of {name} ({before}) resized to {n_tokens} tokens with {free} free block(s)"
        expect_refused(lambda: self.fn(self.pool, table, n_tokens), label)
        same = table == before and sorted(self.pool.free) == sorted(pool.free)
        assert same and self.pool.references == pool.references, f"{label}: was refused, and yet blocks were moved"


@resize
def grows(fn):
    """a table grows as tokens come, by a block at a time"""
    texts = Tables(fn, n_blocks=9, block_size=4)
    for n_tokens in (1, 2, 4, 5, 8, 9, 16, 17):
        texts.resize("a", n_tokens)
    texts.resize("b", 13)


@resize
def shrinks(fn):
    """a table shrinks from its end, and its blocks are free again"""
    texts = Tables(fn, n_blocks=6, block_size=3, seed=1)
    texts.resize("a", 18)
    for n_tokens in (18, 16, 15, 4, 3, 1, 0):
        texts.resize("a", n_tokens)
    texts.resize("b", 18)


@resize
def one_token_blocks(fn):
    """blocks of a single token"""
    texts = Tables(fn, n_blocks=5, block_size=1, seed=2)
    for n_tokens in (3, 5, 2, 0, 4):
        texts.resize("a", n_tokens)


@resize
def shared_blocks(fn):
    """a shared block is free only when both have let go"""
    texts = Tables(fn, n_blocks=6, block_size=4, seed=3)
    texts.resize("a", 8)
    texts.share("a", "b")
    texts.resize("b", 12)
    texts.share("b", "c")
    texts.resize("a", 0)
    texts.resize("c", 5)
    texts.resize("b", 0)
    texts.resize("c", 0)


@resize
def released_twice(fn):
    """to give a block back twice is an error"""
    texts = Tables(fn, n_blocks=4, block_size=4, seed=4)
    texts.resize("a", 6)
    stale = list(texts.tables["a"])
    texts.resize("a", 0)
    label = f"a forgotten copy {stale} of the table, whose blocks were given back already, resized to 0"
    expect_refused(lambda: fn(texts.pool, stale, 0), label)
    expect_sound(texts.pool, texts.tables, label)


@resize
def no_room(fn):
    """without enough free blocks: ValueError, and nothing has changed; the last free block can be had"""
    texts = Tables(fn, n_blocks=4, block_size=4, seed=5)
    texts.resize("a", 8)
    texts.refuse("b", 12)
    texts.resize("b", 4)
    texts.refuse("b", 13)
    texts.resize("b", 8)
    texts.refuse("c", 1)
    texts.resize("c", 0)
    texts.resize("a", 8)
    texts.resize("a", 4)


@resize
def random_life(fn):
    """texts come, grow, share and go, in any order"""
    rng = random.Random(seeded(6))
    for round_ in range(4):
        texts = Tables(fn, n_blocks=12, block_size=rng.randint(1, 4), seed=10 + round_)
        for name in "abc":
            texts.resize(name, 0)
        for _ in range(40):
            name, other = rng.sample("abc", 2)
            if rng.random() < 0.2:
                texts.resize(other, 0)
                texts.share(name, other)
                continue
            n_tokens = rng.randint(0, 30)
            more = blocks_for(n_tokens, texts.pool.block_size) - len(texts.tables[name])
            (texts.refuse if more > len(texts.pool.free) else texts.resize)(name, n_tokens)
