"""Task 5: attention whose keys and values lie in blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minillm.lab.check import expect_close, seeded
from minillm.lab.checks.ch05.base import CHAPTER, blocks_for

attend = CHAPTER.task(
    "attend_blocks",
    hints=(
        "k_pool[block_table] picks the text's blocks, in the order of the text. What is its shape?",
        "Attention wants [tokens, n_kv_heads, head_dim]: block and row side by side, then put together.",
        "The last block may be partly empty, and the table may hold blocks to come: keep the first `length` rows.",
    ),
)


class Case:
    """One text, scattered over a pool whose other slots hold NaN."""

    def __init__(self, length: int, size: int, n_queries: int = 1, scale: float = 1.0, seed: int = 0, spare: int = 0):
        n_heads, n_kv_heads, head_dim = 6, 2, 8
        g = torch.Generator().manual_seed(seeded(seed))
        self.k, self.v = (torch.randn(length, n_kv_heads, head_dim, generator=g) for _ in range(2))
        self.q = scale * torch.randn(n_queries, n_heads, head_dim, generator=g)
        self.length, self.size = length, size
        n_blocks = blocks_for(length, size)
        self.block_table = torch.randperm(n_blocks + spare + 3, generator=g)[: n_blocks + spare].tolist()
        if n_blocks > 1 and self.block_table[:n_blocks] == sorted(self.block_table[:n_blocks]):
            self.block_table[:2] = self.block_table[1::-1]  # never by chance in the pool's order
        self.k_pool, self.v_pool = (self.scatter(x, n_blocks + spare + 3) for x in (self.k, self.v))

    def scatter(self, rows: Tensor, n_blocks: int) -> Tensor:
        pool = torch.full((n_blocks, rows.shape[1], self.size, rows.shape[2]), torch.nan)
        for position, row in enumerate(rows):
            pool[self.block_table[position // self.size], :, position % self.size] = row
        return pool

    def seen(self, query: int) -> list[int]:
        """The positions that a query sees: it is one of the last rows of the text."""
        return list(range(self.length - len(self.q) + query + 1))

    def oracle(self, seen: Callable[[int], list[int]], k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        """Attention in loops over queries and heads, in float64; `seen` says which positions a query sees."""
        k, v = (self.k if k is None else k).double(), (self.v if v is None else v).double()
        q, group = self.q.double(), self.q.shape[1] // k.shape[1]
        out = torch.empty_like(q)
        for t in range(len(q)):
            at = seen(t)
            for h in range(q.shape[1]):
                weights = (k[at, h // group] @ q[t, h] / q.shape[2] ** 0.5).softmax(0)
                out[t, h] = weights @ v[at, h // group]
        return out.float()

    def rows(self, pool: Tensor, blocks: Sequence[int]) -> Tensor:
        """The rows of these blocks, one after the other; unused ones are 0."""
        return torch.stack([pool[b, :, r] for b in blocks for r in range(self.size)]).nan_to_num()

    def by_block(self) -> list[Tensor]:
        """Attention over each block by itself."""
        starts = range(0, self.length, self.size)
        return [self.oracle(lambda t, s=s: self.seen(t)[s : s + self.size] or [s]) for s in starts]

    def mistakes(self) -> dict[str, Tensor]:
        """What comes out of mistakes that people make."""
        n_blocks = blocks_for(self.length, self.size)
        pools, in_use = (self.k_pool, self.v_pool), self.block_table[:n_blocks]
        whole = [self.rows(pool, in_use) for pool in pools]
        first = [self.rows(pool, range(n_blocks)) for pool in pools]
        unturned = [pool[in_use].nan_to_num().reshape(whole[0].shape) for pool in pools]
        n_slots = n_blocks * self.size
        made = {
            "when the blocks are read in the order of the pool, without the table": self.oracle(self.seen, *first),
            "when unused slots of the last block count as tokens": self.oracle(
                lambda t: list(range(n_slots - len(self.q) + t + 1)), *whole
            ),
            "when a block is flattened with its heads before its rows": self.oracle(self.seen, *unturned),
            "when each query sees all tokens, also those after it": self.oracle(lambda t: list(range(self.length))),
            "when query 0 is taken for the first token of the text": self.oracle(lambda t: list(range(t + 1))),
            "when only the text's last block is looked at": self.by_block()[-1],
            "when only the text's first block is looked at": self.by_block()[0],
            "when each block has its own softmax and the results are added up": sum(self.by_block()),
            "when each block has its own softmax and the mean is taken": sum(self.by_block()) / len(self.by_block()),
        }
        if len(self.seen(0)) > 1:
            made["when a query does not see its own token"] = self.oracle(lambda t: self.seen(t)[:-1])
        full = self.length // self.size * self.size
        if full and len(self.q) == 1:
            made["when a last block that is filled in part is left out"] = self.oracle(lambda t: list(range(full)))
        return made


def check_case(fn: Callable, case: Case) -> None:
    k_pool, v_pool, table = case.k_pool.clone(), case.v_pool.clone(), list(case.block_table)
    got = fn(k_pool, v_pool, table, case.length, case.q.clone())
    label = f"{len(case.q)} quer{'y' if len(case.q) == 1 else 'ies'} of {case.length} tokens, blocks of {case.size}"
    want = case.oracle(case.seen)
    if isinstance(got, Tensor) and got.shape == want.shape and not same(got, want):
        how = f"{label}, table {table}: "
        if got.isnan().any():
            how += "NaN: a number from an unused slot reached the result; "
            got = fn(case.k_pool.nan_to_num(), case.v_pool.nan_to_num(), list(table), case.length, case.q.clone())
            assert not got.isnan().any(), f"{label}: NaN, and not from an unused slot: does exp() overflow?"
            assert not same(got, want), f"{how}it had the weight 0, but 0 * NaN is NaN: leave such rows out"
        made = [what for what, value in case.mistakes().items() if same(got, value)]
        assert not made, f"{how}yours is what comes out {', or '.join(made)}"
        assert not how.endswith("; "), f"{how}which rows of which blocks do you read?"
    expect_close(got, want, f"{label}, table {table}", rtol=1e-4, atol=1e-5)
    kept = [torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
            for a, b in ((k_pool, case.k_pool), (v_pool, case.v_pool))]  # fmt: skip
    assert all(kept) and table == case.block_table, f"{label}: the pool was changed"


def same(got: Tensor, want: Tensor) -> bool:
    return torch.allclose(got.float(), want, rtol=1e-4, atol=1e-5)


@attend
def full_blocks(fn):
    """full blocks, in the order of the table"""
    check_case(fn, Case(length=8, size=4))


@attend
def part_of_a_block(fn):
    """a last block that is filled in part"""
    check_case(fn, Case(length=10, size=4, seed=1))
    check_case(fn, Case(length=3, size=16, seed=2))


@attend
def one_token(fn):
    """a text of one token, and blocks of one"""
    check_case(fn, Case(length=1, size=4, seed=3))
    check_case(fn, Case(length=7, size=1, seed=4))


@attend
def several_queries(fn):
    """several queries are the last tokens of the text, and each sees what is before it"""
    check_case(fn, Case(length=9, size=4, n_queries=9, seed=5))
    check_case(fn, Case(length=11, size=3, n_queries=4, seed=6))


@attend
def blocks_to_come(fn):
    """a table that holds blocks for tokens to come"""
    check_case(fn, Case(length=5, size=4, seed=7, spare=2))
    check_case(fn, Case(length=8, size=4, n_queries=2, seed=8, spare=1))


@attend
def large_scores(fn):
    """scores so large that exp() of them overflows"""
    check_case(fn, Case(length=10, size=4, scale=100.0, seed=9))


@attend
def shared_blocks(fn):
    """two texts that share their first blocks"""
    one = Case(length=7, size=3, seed=10, spare=1)
    two = Case(length=7, size=3, seed=11, spare=1)
    two.k[:6], two.v[:6] = one.k[:6], one.v[:6]
    two.block_table = [*one.block_table[:2], one.block_table[3]]
    one.block_table = one.block_table[:3]
    for mine, theirs in ((one.k_pool, two.k), (one.v_pool, two.v)):
        mine[two.block_table[2], :, 0] = theirs[6]
    two.k_pool, two.v_pool = one.k_pool, one.v_pool
    check_case(fn, one)
    check_case(fn, two)


@attend
def random_cases(fn):
    """any lengths and blocks"""
    rng = random.Random(seeded(12))
    for i in range(12):
        length = rng.randint(1, 20)
        check_case(fn, Case(length, rng.randint(1, 7), rng.randint(1, length), seed=30 + i, spare=rng.randint(0, 1)))
