"""The decode kernels equal attention worked out row by row in float64, in however many splits, and touch nothing else.

guards.py says what lies beside inputs, outputs and partial results. The interpreter runs one program after the other:
what is proved here is the arithmetic, the masks and the addresses, not that programs on a GPU do not race. Stored
mutants of both kernels must be rejected.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from guards import (
    DTYPES,
    Requests,
    assert_equals,
    changed_copy,
    far_apart,
    guarded,
    integers,
    numbers,
    requests,
    run,
    steep,
)

from kernels import paged_attention as module

N = module.BLOCK_N
BESIDE_A_TILE = [1, N - 1, N, N + 1, 2 * N - 1, 2 * N, 2 * N + 1]


def decode(n_queries: int, lengths: list[int], *sizes, **options) -> Requests:
    """The same number of query rows for each request: q is [requests, n_queries, n_heads, head_dim]."""
    case = requests([n_queries] * len(lengths), lengths, *sizes, **options)
    case.q = guarded(case.q.unflatten(0, (len(lengths), n_queries)), options.get("gap", 3))
    case.expected = case.expected.unflatten(0, (len(lengths), n_queries))
    return case


def check(case: Requests, module=module) -> None:
    longest = max([*case.lengths.tolist(), 0])
    out = run(module, module.paged_attention, case.q, *case.cache, case.lengths, longest)
    assert out.dtype == case.q.dtype and out.shape == case.q.shape and out.is_contiguous()
    assert_equals(out, case.expected, case.q.dtype)


def test_the_modules_reference_equals_the_oracle():
    for heads in [(1, 1), (6, 2), (3, 3)]:
        for n_queries, block_size in [(1, 1), (1, 16), (4, 3)]:
            case = decode(n_queries, [1, 12, 0, 7, 2], heads, 6, block_size)
            out = module.reference(case.q, *case.cache, case.lengths)
            torch.testing.assert_close(out, case.expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n_queries", [1, 3])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_lengths_beside_a_block_and_a_tile(block_size, n_queries):
    """One batch, so that a short request also has splits in which there is nothing of it."""
    lengths = sorted({*BESIDE_A_TILE, 2, block_size, block_size + 1, 15, 0})
    check(decode(n_queries, lengths, block_size=block_size))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 20, 64, 80, 96, 128])
def test_head_dims(head_dim, dtype):
    check(decode(2, [5, N + 20], (3, 1), head_dim, dtype=dtype))


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (3, 3), (5, 5), (6, 2), (8, 1), (9, 3), (16, 2)])
def test_groups_of_heads(heads):
    check(decode(1, [5, N + 20], heads))
    check(decode(3, [5], heads))


@pytest.mark.parametrize(("n_queries", "heads"), [(16, (1, 1)), (17, (1, 1)), (64, (1, 1)), (8, (8, 1)), (21, (3, 1))])
def test_up_to_64_query_rows(n_queries, heads):
    """Powers of two fill the program's rows; others leave some that are no query's."""
    check(decode(n_queries, [n_queries, N + 2], heads))


@pytest.mark.parametrize("gap", [0, 3])
def test_rows_that_do_not_lie_side_by_side(gap):
    case = decode(2, [5, N + 20], (6, 2), 20, gap=gap)
    assert case.q.is_contiguous() == case.keys.is_contiguous() == case.tables.is_contiguous() == (gap == 0)
    check(case)


def test_heads_and_rows_of_the_pool_may_lie_in_any_order():
    """A pool [n_blocks, block_size, n_kv_heads, head_dim] in memory; queries with the heads in front."""
    case = decode(2, [5, N + 20], (6, 2), 20)
    case.keys, case.values = (guarded(x.transpose(1, 2)).transpose(1, 2) for x in (case.keys, case.values))
    case.q = guarded(case.q.transpose(0, 2)).transpose(0, 2)
    check(case)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 70], [70, 0]])
def test_no_requests_and_requests_without_tokens(lengths):
    check(decode(1, lengths))


def test_no_query_rows():
    check(decode(0, [5, 20]))


def test_rows_that_see_nothing_give_zeros():
    """More query rows than tokens."""
    case = decode(20, [1, 0, 19, 21, N + 5], (1, 1))
    assert not case.expected[0, :19].any() and case.expected[0, 19].any() and not case.expected[1].any()
    check(case)


@pytest.mark.parametrize("n_splits", [1, 2, 3, 5])
def test_any_number_of_splits_gives_the_same(n_splits, monkeypatch):
    """Also where a split ends among the rows' own tokens (length 130, the last 5 of them new)."""
    monkeypatch.setattr(module, "MAX_SPLITS", n_splits)
    monkeypatch.setattr(module, "processors", lambda _: 1000)
    lengths = [4 * N + 7, 2 * N + 2, N, 3, 0]
    assert module.splits(len(lengths), lengths[0], 1000)[0] == n_splits
    check(decode(5, lengths, (3, 1)))


@pytest.mark.parametrize("n_processors", [1, 3, 132])
def test_any_number_of_processors_gives_the_same(n_processors, monkeypatch):
    monkeypatch.setattr(module, "processors", lambda _: n_processors)
    check(decode(1, [4 * N + 7, 130], (3, 1)))


def test_max_length_may_be_larger_than_every_length():
    """The last splits are then empty for all."""
    case = decode(2, [5, N + 20])
    assert_equals(module.paged_attention(case.q, *case.cache, case.lengths, 8 * N), case.expected, case.q.dtype)


def test_splits_cover_the_past_and_none_is_empty():
    for programs in (1, 2, 7, 64, 1000):
        for n_processors in (1, 4, 108, 132, 1000):
            for max_length in (0, *BESIDE_A_TILE, 1000, 4095, 4096, 4097, 100_000):
                n_splits, size = module.splits(programs, max_length, n_processors)
                assert size % N == 0 and 1 <= n_splits <= module.MAX_SPLITS
                assert (n_splits - 1) * size < max(1, max_length) <= n_splits * size
                wanted = module.PROGRAMS_PER_PROCESSOR * n_processors
                assert n_splits == 1 or (n_splits - 1) * programs < wanted  # no more than it takes to fill the GPU


def test_a_small_batch_fills_the_gpu():
    """One long request, 3 key heads, 132 processors: two programs for each, or as many splits as there may be."""
    assert module.splits(3, 100_000, 132)[0] > 60
    assert module.splits(300, 100_000, 132)[0] == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["rising", "falling", "equal", "equal, below"])
def test_scores_of_ten_thousand(order, dtype):
    heads, head_dim = (2, 1), 64
    q, k, v = steep(200, order, heads, head_dim, dtype)
    check(decode(3, [200], heads, head_dim, dtype=dtype, tokens=[(q[-3:], k, v)]))


def test_heads_may_lie_farther_apart_than_32_bits_count():
    case = decode(2, [5, N + 20], (8, 4), dtype=torch.float16, gap=0)
    pool = [far_apart(x) for x in (case.keys, case.values)]
    out = module.paged_attention(case.q, *pool, case.tables, case.lengths, N + 20)
    assert_equals(out, case.expected, torch.float16)


def test_the_order_of_blocks_in_the_pool_does_not_matter():
    tables, results = set(), []
    for seed in range(4):
        tokens = [(numbers(1, 2, 16), numbers(80, 1, 16, seed=1), numbers(80, 1, 16, seed=2))]
        case = decode(1, [80], (2, 1), seed=seed, tokens=tokens)
        check(case)
        tables.add(tuple(case.tables[0].tolist()))
        results.append(module.paged_attention(case.q, *case.cache, case.lengths, 80))
    assert len(tables) == 4
    assert all(torch.equal(result, results[0]) for result in results)


def test_requests_may_share_blocks():
    """A prefix of 32 tokens that lies in the pool once, with two continuations."""
    k, v = numbers(90, 1, 16, seed=1), numbers(90, 1, 16, seed=2)
    second = (torch.cat([x[:32], x[50:]]) for x in (k, v))
    tokens = [(numbers(2, 2, 16), k[:50], v[:50]), (numbers(2, 2, 16, seed=3), *second)]
    case = decode(2, [50, 72], (2, 1), tokens=tokens)
    forgotten = case.tables[1, :2].long()
    case.tables[1, :2] = case.tables[0, :2]
    case.keys[forgotten], case.values[forgotten] = torch.nan, torch.nan
    check(case)


def test_bytes_moved_counts_each_tensor_once():
    lengths = [5, 7, 20]
    case = decode(2, lengths, (6, 2), 20, block_size=1, dtype=torch.float16, gap=0)
    pool = [x[: sum(lengths)] for x in (case.keys, case.values)]  # blocks of one token: so many are in use
    wanted = 2 * case.q.nbytes + sum(x.nbytes for x in pool)
    assert module.bytes_moved(lengths, 2, 6, 2, 20, 2) == wanted


def test_flops_count_every_key_that_a_row_sees():
    for n_queries, lengths in [(1, [1]), (3, [5, 7, 20]), (1, [17, 100])]:
        seen = sum(length - n_queries + row + 1 for length in lengths for row in range(n_queries))
        assert module.flops(lengths, n_queries, 6, 20) == 6 * seen * (2 * 20 + 2 * 20)


def test_rows_of_a_program_are_a_power_of_two_that_holds_them():
    assert [module.padded_rows(1, 1), module.padded_rows(1, 16), module.padded_rows(3, 6)] == [16, 16, 32]


# --- The stored mutants. ---


def hard_cases(module) -> None:
    """Requests that no mutant passes. The last split of the first begins among the rows' own tokens."""
    module.processors = lambda _: 100
    check(decode(3, [2 * N + 1, 3, 0], (4, 2), 20), module)


SPLIT = {
    "every row sees all": ("last_seen = length - n_queries + query", "last_seen = length - 1 + 0 * query"),
    "every split runs to the end": ("tl.minimum(length, start + split_size)", "length"),
    "the middle may lie before the start": (
        "tl.maximum(\n        start, tl.minimum(end, length - n_queries + 1) // BLOCK_N * BLOCK_N\n    )",
        "tl.minimum(end, length - n_queries + 1) // BLOCK_N * BLOCK_N",
    ),
    "the rows' own tokens are not masked": (
        "tl.minimum(end, length - n_queries + 1) // BLOCK_N",
        "(end + BLOCK_N - 1) // BLOCK_N",
    ),
    "every group takes the first one's queries": ("group * heads_per_group + rows %", "rows %"),
    "every group reads the first key head": ("k_ptr + group * stride_kg", "k_ptr"),
    "every group reads the first head's values": ("v_ptr + group * stride_kg", "v_ptr"),
    "all requests use the first one's table": ("tables_ptr + request * stride_table", "tables_ptr"),
    "all requests have the first one's length": ("lengths_ptr + request)", "lengths_ptr)"),
    "all splits write to one place": (
        "place = ((request.to(tl.int64) * n_groups + group) * n_splits + split) * ROWS + rows",
        "place = ((request.to(tl.int64) * n_groups + group) * n_splits) * ROWS + rows",
    ),
    "scaled by the padded head_dim": ("head_dim**-0.5 * LOG2_E", "padded(head_dim)**-0.5 * LOG2_E"),
}

MERGE = {
    "splits are not rescaled": (
        'tl.exp2(tops - tl.where(top == float("-inf"), 0.0, top))',
        "tl.where(real, 1.0, 0.0)",
    ),
    "only the first split counts": ("real = splits < n_splits", "real = splits < 1"),
    "one split too many": ("real = splits < n_splits", "real = splits <= n_splits"),
    "a row that saw nothing: inf - inf": ('tl.where(top == float("-inf"), 0.0, top)', "top"),
    "a row that saw nothing: 0 / 0": ("tl.where(total == 0.0, 1.0, total)", "total"),
    "every query takes the first one's row": (
        "row = query * heads_per_group + head % heads_per_group",
        "row = head % heads_per_group",
    ),
    "heads of a group are mixed up": (
        "query * heads_per_group + head % heads_per_group",
        "query * heads_per_group + (head + 1) % heads_per_group",
    ),
    "padding is written": (", mask=dims < HEAD_DIM", ""),
    "the sums are not divided by": (" / tl.where(total == 0.0, 1.0, total)", ""),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy does not like what some of them compute
@pytest.mark.parametrize("mutant", SPLIT | MERGE)
def test_each_mutant_is_rejected(mutant, tmp_path):
    with pytest.raises(AssertionError):
        hard_cases(changed_copy(module, tmp_path, (SPLIT | MERGE)[mutant]))


def test_the_unchanged_copy_passes(tmp_path):
    hard_cases(changed_copy(module, tmp_path))


def test_splits_that_are_no_whole_tiles_are_rejected(tmp_path):
    """A split that ends inside a tile would have its last keys counted by the next split, too."""
    copy = changed_copy(module, tmp_path)
    copy.splits = lambda programs, max_length, n_processors: (-(-max_length // 40), 40)
    with pytest.raises(AssertionError):
        hard_cases(copy)


def test_lengths_and_tables_are_read_as_given():
    """The case that every other test builds, once by hand: two tokens in two blocks of one, the second block first."""
    keys = torch.zeros(2, 1, 1, 16)
    values = torch.stack([torch.full((1, 1, 16), 5.0), torch.full((1, 1, 16), 3.0)])
    q = torch.zeros(1, 1, 1, 16)
    out = [module.paged_attention(q, keys, values, integers(1, 0)[None], integers(n), n)[0, 0, 0, 0] for n in (1, 2)]
    assert out == [3, 4]
