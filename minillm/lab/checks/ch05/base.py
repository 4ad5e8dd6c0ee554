"""What the tasks of exercise 05 are given, and the law that every account of blocks must keep."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from minillm.lab.check import Chapter, seeded

CHAPTER = Chapter("05")


@dataclass
class Pool:
    """Blocks of `block_size` tokens: which of them are free, and for each, how many block tables point at it."""

    block_size: int
    free: list[int]
    references: list[int]


@dataclass(frozen=True)
class CachedBlock:
    """A full block of rows that are computed. prefix: the tokens of its text, from the first to this block's last."""

    block: int
    prefix: list[int]


def pool_of(n_blocks: int, block_size: int, seed: int) -> Pool:
    """All blocks free, in no order."""
    free = list(range(n_blocks))
    random.Random(seeded(seed)).shuffle(free)
    return Pool(block_size, free, [0] * n_blocks)


def blocks_for(n_tokens: int, block_size: int) -> int:
    """Counted, not calculated: each token that begins a block needs one."""
    return sum(position % block_size == 0 for position in range(n_tokens))


def take(pool: Pool, n: int) -> list[int]:
    """The check's own way to give a table its blocks."""
    taken = [pool.free.pop() for _ in range(n)]
    for block in taken:
        pool.references[block] = 1
    return taken


def share(pool: Pool, block_table: list[int]) -> list[int]:
    """A second table that points at the same blocks."""
    for block in block_table:
        pool.references[block] += 1
    return list(block_table)


def expect_sound(pool: Pool, tables: Mapping[str, list[int]], label: str) -> None:
    """Every block is free or owned, never both; each reference is one table's."""
    owners = Counter(block for table in tables.values() for block in table)
    for block, times in Counter(pool.free).items():
        assert 0 <= block < len(pool.references), f"{label}: the free list holds {block}, which is no block"
        assert times == 1, f"{label}: block {block} is in the free list {times} times: two tables will be given it"
        own = [name for name, table in tables.items() if block in table]
        assert not own, f"{label}: block {block} is in the free list, and still in the table of {' and '.join(own)}"
    for block, counted in enumerate(pool.references):
        lost = owners[block] == 0 and block not in pool.free
        assert not lost, f"{label}: block {block} is lost: no table points at it, and it is not in the free list"
        assert counted == owners[block], (
            f"{label}: references[{block}] is {counted}, and {owners[block]} table(s) point at block {block}"
        )


def expect_refused(call: Callable[[], object], label: str) -> None:
    """It raises ValueError."""
    try:
        call()
    except ValueError:
        return
    except (LookupError, AssertionError, ArithmeticError) as error:
        raise AssertionError(f"{label}: raised {type(error).__name__}, expected ValueError") from None
    raise AssertionError(f"{label}: was accepted, expected ValueError")
