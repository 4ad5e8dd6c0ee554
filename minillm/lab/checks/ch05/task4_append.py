"""Task 4: copy-on-write. One more token for a text whose last block may have other readers."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from minillm.lab.check import seeded
from minillm.lab.checks.ch05.base import CHAPTER, blocks_for, expect_sound, pool_of, share, take

append = CHAPTER.task(
    "append_row",
    hints=(
        "Into which block does token number `length` go? Does the table have it already?",
        "Three cases: the token begins a block; its block is this table's alone; others read its block, too.",
        "In the third case: take a free block, copy the rows, count one reader of the old block less, and put the "
        "new block into the old one's place in this table. Then write.",
    ),
)


class Readers:
    """Texts in one pool, with what each of them must read."""

    def __init__(self, fn: Callable, n_blocks: int, block_size: int, seed: int = 0):
        self.fn, self.pool = fn, pool_of(n_blocks, block_size, seed)
        self.rows = torch.full((n_blocks, block_size, 2), torch.nan)
        self.tables: dict[str, list[int]] = {}
        self.texts: dict[str, list[Tensor]] = {}
        self.generator = torch.Generator().manual_seed(seeded(seed))

    def write(self, name: str, n_tokens: int) -> None:
        """A new text, written by the check itself."""
        size = self.pool.block_size
        self.tables[name] = take(self.pool, blocks_for(n_tokens, size))
        self.texts[name] = [torch.randn(2, generator=self.generator) for _ in range(n_tokens)]
        for position, row in enumerate(self.texts[name]):
            self.rows[self.tables[name][position // size], position % size] = row

    def fork(self, name: str, new: str, length: int | None = None) -> None:
        """A second text that begins with the first `length` tokens of this one (None: all)."""
        self.texts[new] = self.texts[name][:length]
        n_blocks = blocks_for(len(self.texts[new]), self.pool.block_size)
        self.tables[new] = share(self.pool, self.tables[name][:n_blocks])

    def append(self, name: str) -> None:
        """One token more for this text, by the learner's function; then everybody reads."""
        size, length, table = self.pool.block_size, len(self.texts[name]), self.tables[name]
        index, before = length // size, {name: list(table) for name, table in self.tables.items()}
        others = [
            other for other in before if other != name and index < len(table) and table[index] in self.tables[other]
        ]
        with_whom = f", whose block {table[index]} {' and '.join(others)} also read(s)" if others else ""
        label = f"token {length} of {name}{with_whom}, blocks of {size}"
        row = torch.randn(2, generator=self.generator)
        self.fn(self.pool, self.rows, table, length, row.clone())
        self.texts[name].append(row)

        for other, own in before.items():
            assert other == name or self.tables[other] == own, f"{label}: the table of {other} was changed"
        want = blocks_for(length + 1, size)
        assert len(table) == want, f"{label}: its table has {len(table)} blocks, expected {want}"
        kept = index if others else len(before[name])
        assert table[:kept] == before[name][:kept], (
            f"{label}: its table was {before[name]} and is {table}: a block was exchanged that nobody else reads "
            "or that is not written to"
        )
        for other in before:
            self.read(other, before[other], label, written_by=name)
        expect_sound(self.pool, self.tables, label)

    def read(self, name: str, before: list[int], label: str, written_by: str) -> None:
        """This text finds all its rows through its table."""
        size, table = self.pool.block_size, self.tables[name]
        for position, row in enumerate(self.texts[name]):
            if torch.equal(self.rows[table[position // size], position % size], row):
                continue
            if name != written_by:
                why = f"{name} finds another row at its token {position}: you wrote into a block that it reads"
            elif position == len(self.texts[name]) - 1:
                why = "the new row is not where its table says"
            else:
                why = f"it lost its token {position}: " + (
                    "a new block must begin with a copy of the rows before"
                    if table != before
                    else "the new row was written over it"
                )
            raise AssertionError(f"{label}: {why}")


@append
def alone(fn):
    """a text alone: into its last block, and at the edge into a new one"""
    texts = Readers(fn, n_blocks=5, block_size=4)
    texts.write("a", 2)
    for _ in range(8):
        texts.append("a")


@append
def from_nothing(fn):
    """the first token of a text takes its first block"""
    texts = Readers(fn, n_blocks=3, block_size=2, seed=1)
    texts.write("a", 0)
    texts.append("a")
    texts.append("a")


@append
def shared_last_block(fn):
    """a last block with another reader is copied, and the reader sees what it saw"""
    texts = Readers(fn, n_blocks=6, block_size=4, seed=2)
    texts.write("a", 6)
    texts.fork("a", "b")
    texts.append("b")
    texts.append("b")
    texts.append("a")  # alone again


@append
def a_shorter_reader(fn):
    """a text that shares a block with a longer one leaves the longer one's rows alone"""
    texts = Readers(fn, n_blocks=6, block_size=4, seed=9)
    texts.write("a", 7)
    texts.fork("a", "b", length=5)
    texts.append("b")
    texts.append("a")


@append
def three_readers(fn):
    """of three readers two copy, the last writes in place"""
    texts = Readers(fn, n_blocks=7, block_size=4, seed=3)
    texts.write("a", 7)
    texts.fork("a", "b")
    texts.fork("b", "c")
    for name in "bac":
        texts.append(name)
    for name in "abc":
        texts.append(name)


@append
def shared_full_block(fn):
    """a full block is shared on: the next token begins a block, and nothing is copied"""
    texts = Readers(fn, n_blocks=6, block_size=4, seed=4)
    texts.write("a", 8)
    texts.fork("a", "b")
    texts.append("b")
    texts.append("a")
    texts.append("a")


@append
def one_token_blocks(fn):
    """blocks of a single token never need a copy"""
    texts = Readers(fn, n_blocks=8, block_size=1, seed=5)
    texts.write("a", 2)
    texts.fork("a", "b")
    for name in "abba":
        texts.append(name)


@append
def the_last_free_block(fn):
    """the copy goes into the last free block"""
    texts = Readers(fn, n_blocks=2, block_size=3, seed=6)
    texts.write("a", 1)
    texts.fork("a", "b")
    texts.append("a")
    texts.append("b")


@append
def random_life(fn):
    """texts fork and grow in any order"""
    rng = random.Random(seeded(8))
    for round_ in range(4):
        texts = Readers(fn, n_blocks=60, block_size=rng.randint(1, 5), seed=20 + round_)
        texts.write("a", rng.randint(0, 9))
        for _ in range(30):
            name = rng.choice(list(texts.tables))
            if len(texts.tables) < 4 and rng.random() < 0.3:
                texts.fork(name, "abcd"[len(texts.tables)], rng.randint(0, len(texts.texts[name])))
            texts.append(name)
