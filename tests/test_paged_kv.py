"""The paged cache: a step writes its own slots and no others, copies are done in order, and the bytes are the tensors'.

That the right slots are read is proved in test_fingerprint.py and test_engine.py.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from conftest import TINY

from minillm.attention import reference_attention
from minillm.paged_kv import PagedKV
from minillm.request import Request, Span, Step

CANARY = 1234.5


def span(start: int, count: int, block_table: list[int]) -> Span:
    return Span(Request([0] * (start + count), 100, block_table=block_table), start, count)


def pool(n_blocks: int = 8, block_size: int = 3, dtype=torch.float64) -> PagedKV:
    kv = PagedKV(TINY, n_blocks, block_size, dtype)
    kv.k.fill_(CANARY)
    kv.v.fill_(CANARY)
    return kv


def rows(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of n tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads):
        return torch.randn(n, heads, TINY.head_dim, generator=generator, dtype=torch.float64)

    return draw(TINY.n_heads), draw(TINY.n_kv_heads), draw(TINY.n_kv_heads)


@pytest.mark.parametrize("name", ["n_blocks", "block_size"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "3", None])
def test_a_pool_of_nothing_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, not {value!r}"):
        PagedKV(TINY, **{"n_blocks": 2, "block_size": 2, name: value})


def test_a_pool_that_no_memory_holds_is_refused_in_one_sentence():
    per_token = TINY.kv_elements_per_token * 4
    n_blocks = 2**60 // (4 * per_token)  # a billion GiB
    gib = f"{n_blocks * 4 * per_token / 2**30:,.1f}"
    with pytest.raises(ValueError, match=f"a pool of {n_blocks} blocks of 4 tokens takes {gib} GiB, .* on cpu: take"):
        PagedKV(TINY, n_blocks, 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [TINY, replace(TINY, n_kv_heads=6, n_layers=3)])
def test_the_bytes_are_those_of_the_tensors(config, dtype):
    kv = PagedKV(config, 7, 5, dtype)
    assert kv.block_size == 5
    assert kv.nbytes_reserved == sum(x.numel() * x.element_size() for x in (kv.k, kv.v))
    assert kv.nbytes_per_block * 7 == kv.nbytes_reserved
    assert kv.nbytes_per_block == 5 * config.kv_elements_per_token * dtype.itemsize


def written(kv: PagedKV, layer: int) -> set[tuple[int, int]]:
    """(block, row) of the slots that a layer no longer holds the canary in. K and V must agree, in every head."""
    k, v = ((x[layer] != CANARY).all(-1).all(1) for x in (kv.k, kv.v))
    untouched = ((x[layer] == CANARY).all(-1).all(1) for x in (kv.k, kv.v))
    assert torch.equal(k, v)
    assert all(torch.equal(~each, k) for each in untouched)
    return {(int(block), int(row)) for block, row in k.nonzero()}


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 8])
def test_a_step_writes_its_slots_and_clears_the_tails_that_it_begins_and_touches_nothing_else(block_size):
    rnd = random.Random(block_size)
    for _ in range(30):
        n_blocks = 40 // block_size + 3
        kv = pool(n_blocks, block_size)
        free = rnd.sample(range(n_blocks), n_blocks)
        spans, expected = [], set()
        for _ in range(3):
            start, count = rnd.randint(0, 6), rnd.randint(1, 6)
            table = [free.pop() for _ in range(-(-(start + count) // block_size))]
            spans.append(span(start, count, table))
            expected |= {(table[p // block_size], p % block_size) for p in range(start, start + count)}
            last = (start + count) // block_size * block_size  # where the block that is not filled begins
            if start <= last < start + count:
                expected |= {(table[-1], row) for row in range(block_size)}
        view = kv.view(Step(spans))
        q, k, v = rows(sum(s.count for s in spans))
        view.attend(1, q, k, v)
        assert written(kv, 1) == expected
        cleared = {slot for slot in expected if kv.k[0, slot[0], 0, slot[1], 0] == 0}
        assert written(kv, 0) == cleared  # the other layer was not written
        at = 0
        for s in spans:
            for p in range(s.start, s.end):
                block, row = s.block_table[p // block_size], p % block_size
                assert torch.equal(kv.k[1, block, :, row], k[at])
                assert torch.equal(kv.v[1, block, :, row], v[at])
                at += 1


def test_rows_before_a_span_are_left_as_they_were_in_a_block_that_goes_on():
    kv = pool(2, 4)
    kv.view(Step([span(0, 2, [1])])).attend(0, *rows(2))
    before = kv.k[0, 1, :, :2].clone()
    kv.view(Step([span(2, 1, [1])])).attend(0, *rows(1, seed=1))
    assert torch.equal(kv.k[0, 1, :, :2], before)


def test_spare_blocks_at_the_end_of_a_table_are_left_alone():
    """Where guesses were wrong, a table can be longer than its text."""
    kv = pool(4, 2)
    kv.view(Step([span(0, 3, [0, 1, 2])])).attend(0, *rows(3))
    assert {block for block, _ in written(kv, 0)} == {0, 1}


def test_copies_are_done_in_order_for_all_layers_of_keys_and_values():
    kv = pool(4, 2)
    for x in (kv.k, kv.v):
        x.copy_(torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(len(x))))
    kv.v.mul_(2)
    k, v = kv.k.clone(), kv.v.clone()
    kv.copy([(0, 1), (2, 0), (1, 3)])  # 1 gets the old 0, which is overwritten by 2; 3 gets the new 1
    for block, source in enumerate([2, 0, 2, 0]):
        assert torch.equal(kv.k[:, block], k[:, source])
        assert torch.equal(kv.v[:, block], v[:, source])


def test_a_view_does_the_copies_of_its_step_first():
    kv = pool(4, 4)
    q, k, v = rows(4)
    kv.view(Step([span(0, 3, [0])])).attend(0, q[:3], k[:3], v[:3])
    view = kv.view(Step([span(3, 1, [2])], [(0, 2)]))
    out = view.attend(0, q[3:], k[3:], v[3:])
    assert (out - reference_attention(q[3:], k, v)).abs().max() < 1e-12
    assert torch.equal(kv.k[0, 0, :, :3], kv.k[0, 2, :, :3])
    assert (kv.k[0, 0, :, 3] == 0).all()  # the source has not got the new row


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 16])
def test_spans_of_any_length_side_by_side_give_the_reference(block_size):
    """Single rows and long spans in one step, each with its own past, from blocks in any order, amid NaN."""
    rnd = random.Random(block_size)
    single = long = 0
    for trial in range(20):
        lengths = [rnd.randint(1, 20) for _ in range(rnd.randint(1, 5))]
        n_blocks = sum(-(-n // block_size) for n in lengths) + 2
        kv = PagedKV(TINY, n_blocks, block_size, torch.float64)
        kv.k.fill_(torch.nan)
        kv.v.fill_(torch.nan)
        free = rnd.sample(range(n_blocks), n_blocks)
        texts = [rows(n, seed=100 * trial + i) for i, n in enumerate(lengths)]
        tables = [[free.pop() for _ in range(-(-n // block_size))] for n in lengths]
        starts = [0] * len(lengths)
        while any(start < n for start, n in zip(starts, lengths, strict=True)):
            spans, parts, expected = [], [], []
            for i, n in enumerate(lengths):
                count = min(n - starts[i], rnd.choice([0, 1, 1, 3, 7]))
                if count:
                    end = starts[i] + count
                    spans.append(span(starts[i], count, tables[i]))
                    parts.append([x[starts[i] : end] for x in texts[i]])
                    q, k, v = texts[i]
                    expected.append(reference_attention(q[starts[i] : end], k[:end], v[:end]))
                    starts[i] = end
            if spans:
                single += sum(s.count == 1 for s in spans)
                long += sum(s.count > 1 for s in spans)
                view = kv.view(Step(spans))
                out = view.attend(0, *(torch.cat(x) for x in zip(*parts, strict=True)))
                assert (out - torch.cat(expected)).abs().max() < 1e-12
    assert single > 50
    assert long > 50


def test_two_views_do_not_know_of_each_other():
    """No state is kept between steps: the same step can be done again."""
    kv = pool(4, 4)
    q, k, v = rows(5)
    step = Step([span(0, 5, [3, 1])])
    first = kv.view(step).attend(0, q, k, v)
    again = kv.view(step).attend(0, q, k, v)
    assert torch.equal(first, again)
