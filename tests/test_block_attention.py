"""Attention over blocks where they lie equals the formula, in float64, whatever the tables look like.

Random tables: blocks in any order, dense and sparse in the pool, shared by several rows, with lengths at the edges of
blocks. All that no row may see is NaN. Stored mutants of the merge must be rejected.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from minillm import block_attention
from minillm.attention import reference_attention
from minillm.block_attention import BlockAttention

KV_HEADS, REPEATS, DIM = 2, 3, 4
TOLERANCE = 1e-12


def scene(rnd: random.Random, rows: int, size: int, spread: float, shared: int, longest: int):
    """Tables and lengths of some rows in a pool with `spread` blocks for each one that is used.

    The first `shared` blocks are the beginning of all rows that are long enough.
    """
    lengths = [
        rnd.choice([rnd.randint(1, longest), size * rnd.randint(1, max(1, longest // size))]) for _ in range(rows)
    ]
    lengths = [n + rnd.choice([0, 0, 1]) for n in lengths]
    counts = [-(-n // size) for n in lengths]
    n_blocks = int((sum(counts) + shared) * spread) + 1
    free = rnd.sample(range(n_blocks), n_blocks)
    beginning = [free.pop() for _ in range(shared)]
    tables = []
    for length, count in zip(lengths, counts, strict=True):
        common = beginning if length > shared * size else []
        tables.append(common + [free.pop() for _ in range(count - len(common))])
    return tables, lengths, n_blocks


def fill(rnd: random.Random, tables, lengths, n_blocks: int, size: int, scale: float):
    """q [rows, heads, dim]; keys, values [n_blocks, kv_heads, size, dim], NaN where nothing was ever written."""
    generator = torch.Generator().manual_seed(rnd.randrange(2**32))

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    keys, values = torch.full((2, n_blocks, KV_HEADS, size, DIM), torch.nan, dtype=torch.float64)
    for table, length in zip(tables, lengths, strict=True):
        for i, block in enumerate(table):
            keys[block], values[block] = scale * draw(KV_HEADS, size, DIM), draw(KV_HEADS, size, DIM)
            if (
                length < (i + 1) * size
            ):  # the rest of a last block is cleared when it is begun; the keys may be anything
                values[block, :, length - i * size :] = 1e6
                keys[block, :, length - i * size :] = 1e3
    return scale * draw(len(tables), KV_HEADS * REPEATS, DIM), keys, values


def expected(q, keys, values, tables, lengths):
    out = []
    for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        past = (x[table].transpose(1, 2).flatten(0, 1)[:length] for x in (keys, values))
        out.append(reference_attention(q[row : row + 1], *past))
    return torch.cat(out)


def check(trials: int) -> Counter:
    met: Counter = Counter()
    for seed in range(trials):
        rnd = random.Random(seed)
        size = rnd.choice([1, 2, 3, 8, 16])
        rows = rnd.choice([1, 2, 5, 12])
        shared = rnd.choice([0, 0, 1, 3])
        scale = rnd.choice([1.0, 1.0, 30.0])
        tables, lengths, n_blocks = scene(rnd, rows, size, rnd.choice([1.0, 1.3, 5.0]), shared, rnd.choice([4, 40]))
        q, keys, values = fill(rnd, tables, lengths, n_blocks, size, scale)
        attend = BlockAttention(tables, lengths, like=keys)
        error = (attend(q, keys, values) - expected(q, keys, values, tables, lengths)).abs().max()
        assert error <= TOLERANCE, f"off by {error}"
        met["rows"] += rows
        met["one row"] += rows == 1
        met["large logits"] += scale > 1
        met["several blocks"] += sum(len(table) > 1 for table in tables)
        met["ends at the edge of a block"] += sum(length % size == 0 for length in lengths)
        met["one token in the last block"] += size > 1 and sum(length % size == 1 for length in lengths)
        for part in attend.parts:
            kind = "shared" if part.rows.shape[1] > 1 else "stretch" if isinstance(part.blocks, slice) else "picked"
            met[kind] += 1
        stretch = [part for part in attend.parts if isinstance(part.blocks, slice)]
        met["a stretch with gaps"] += any(len(p.pairs) < len(p.rows) for p in stretch)
    return met


def test_attention_over_blocks_is_the_formula():
    met = check(400)
    assert met["rows"] > 1500
    for event in ("one row", "large logits", "shared", "stretch", "picked", "a stretch with gaps"):
        assert met[event] > 40, event
    for event in ("several blocks", "ends at the edge of a block", "one token in the last block"):
        assert met[event] > 200, event


@pytest.mark.parametrize("share", [0.0, 1.1])
def test_reading_a_stretch_and_picking_blocks_give_the_same(share, monkeypatch):
    monkeypatch.setattr(block_attention, "DENSE", share)
    met = check(100)
    assert (met["stretch"] == 0) == (share > 1)
    assert (met["picked"] == 0) == (share == 0)


def test_logits_past_the_range_of_exp_are_no_trouble():
    """Scores near 10,000 in some blocks and near -10,000 in others."""
    keys = torch.zeros(3, 1, 2, 1, dtype=torch.float64)
    keys[0], keys[1], keys[2] = 1e4, -1e4, 1e4
    values = torch.arange(6, dtype=torch.float64).view(3, 1, 2, 1)
    q = torch.ones(2, 1, 1, dtype=torch.float64)
    out = BlockAttention([[0, 1, 2], [1]], [6, 2], like=keys)(q, keys, values)
    assert out.flatten().tolist() == pytest.approx([(0 + 1 + 4 + 5) / 4, 2.5], abs=1e-12)


def test_the_same_tables_serve_all_layers():
    rnd = random.Random(0)
    tables, lengths, n_blocks = scene(rnd, 4, 4, 1.5, 1, 20)
    attend = None
    for _ in range(3):
        q, keys, values = fill(rnd, tables, lengths, n_blocks, 4, 1.0)
        attend = attend or BlockAttention(tables, lengths, like=keys)
        assert (attend(q, keys, values) - expected(q, keys, values, tables, lengths)).abs().max() <= TOLERANCE


def test_the_numbers_of_float32_are_near_those_of_float64():
    rnd = random.Random(1)
    tables, lengths, n_blocks = scene(rnd, 6, 4, 1.5, 1, 40)
    q, keys, values = fill(rnd, tables, lengths, n_blocks, 4, 1.0)
    attend = BlockAttention(tables, lengths, like=keys.float())
    out = attend(q.float(), keys.float(), values.float())
    assert out.dtype == torch.float32
    eps = torch.finfo(torch.float32).eps
    reach = 4 * max(lengths) * eps  # sums of that many products of numbers of about 1
    assert (out - expected(q, keys, values, tables, lengths)).abs().max() < reach * 4


# --- The stored mutants. ---


def without_rescaling(top, total, weighted, rows, n_rows):
    denominator = torch.zeros(n_rows, top.shape[1], dtype=top.dtype).index_add_(0, rows, total)
    numerator = weighted.new_zeros(n_rows, *weighted.shape[1:]).index_add_(0, rows, weighted)
    return numerator / denominator[..., None]


def without_the_maximum(top, total, weighted, rows, n_rows):
    """Sums of exp as they are: exact on paper, and past the range of numbers for large scores."""
    denominator = torch.zeros(n_rows, top.shape[1], dtype=top.dtype).index_add_(0, rows, total * top.exp())
    numerator = weighted.new_zeros(n_rows, *weighted.shape[1:])
    numerator.index_add_(0, rows, weighted * top.exp()[..., None])
    return numerator / denominator[..., None]


def rescaled_the_wrong_way(top, total, weighted, rows, n_rows):
    return real_merge(-top, total, weighted, rows, n_rows)


def mean_of_the_blocks(top, total, weighted, rows, n_rows):
    return real_merge(torch.zeros_like(top), torch.ones_like(total), weighted / total[..., None], rows, n_rows)


def weights_not_rescaled(top, total, weighted, rows, n_rows):
    """The denominator is, the numerator is not."""
    highest = top.new_full((n_rows, top.shape[1]), -torch.inf)
    highest = highest.scatter_reduce_(0, rows[:, None].expand_as(top), top, "amax")
    return real_merge(top, total, weighted / (top - highest[rows]).exp()[..., None], rows, n_rows)


real_merge = block_attention.merge
MERGES = [without_rescaling, without_the_maximum, rescaled_the_wrong_way, mean_of_the_blocks, weights_not_rescaled]


@pytest.mark.parametrize("wrong", MERGES)
def test_a_wrong_merge_is_rejected(wrong, monkeypatch):
    monkeypatch.setattr(block_attention, "merge", wrong)
    with pytest.raises(AssertionError, match="off by"):
        check(100)


def lengths_changed(by):
    def plant(patch):
        real = BlockAttention.__init__

        def init(self, tables, lengths, like):
            size = like.shape[2]
            lengths = [max(1, min(n + by, len(t) * size)) for n, t in zip(lengths, tables, strict=True)]
            real(self, tables, lengths, like)

        patch.setattr(BlockAttention, "__init__", init)

    return plant


def queries_not_scaled(patch):
    real = BlockAttention.__call__
    patch.setattr(BlockAttention, "__call__", lambda self, q, k, v: real(self, q * q.shape[-1] ** 0.5, k, v))


def heads_in_turn(patch):
    """Query heads are dealt out to key heads in turn."""
    real = BlockAttention.__call__

    def call(self, q, k, v):
        out = real(self, q.unflatten(1, (REPEATS, -1)).transpose(1, 2).flatten(1, 2), k, v)
        return out.unflatten(1, (-1, REPEATS)).transpose(1, 2).flatten(1, 2)

    patch.setattr(BlockAttention, "__call__", call)


def padding_counts(patch):
    """Padded pairs are merged too."""
    real = block_attention.Part.of.__func__

    def of(cls, blocks, seen_by, like):
        part = real(cls, blocks, seen_by, like)
        return cls(part.blocks, part.rows, part.mask, None)

    patch.setattr(block_attention.Part, "of", classmethod(of))


MUTANTS = {
    "one token too many": lengths_changed(1),
    "one token too few": lengths_changed(-1),
    "queries are not scaled": queries_not_scaled,
    "query heads are dealt out in turn": heads_in_turn,
    "padding counts": padding_counts,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_mistake_is_rejected(name, monkeypatch):
    MUTANTS[name](monkeypatch)
    with pytest.raises(AssertionError, match="off by"):
        check(100)
