"""The prefill kernel equals attention worked out row by row in float64, at ragged shapes, and touches nothing else.

guards.py says what lies beside inputs and outputs. The interpreter runs one program after the other: what is proved
here is the arithmetic, the masks and the addresses, not that programs on a GPU do not race. Stored mutants of the
kernel, and of the walk that it shares with decode, must be rejected.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from guards import (
    DTYPES,
    Requests,
    assert_equals,
    attend,
    changed_copy,
    far_apart,
    guarded,
    integers,
    numbers,
    requests,
    run,
    steep,
)

from kernels import flash_attention as module
from kernels import online_softmax
from kernels.flash_attention import Tiles
from minillm.attention import reference_attention

SMALL = Tiles(16, 16, 4, 2)  # several tiles at short lengths


def check(case: Requests, module=module) -> None:
    arguments = (case.q, *case.cache, case.cu_seqlens, case.lengths, case.max_queries)
    out = run(module, module.flash_attention, *arguments)
    assert out.dtype == case.q.dtype and out.shape == case.q.shape and out.is_contiguous()
    assert_equals(out, case.expected, case.q.dtype)


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(module, "tiles", lambda *_: SMALL)


def test_the_oracle_equals_the_engines_reference():
    for heads in [(1, 1), (6, 2), (3, 3)]:
        for count, length in [(1, 1), (1, 9), (7, 7), (5, 12)]:
            q, k, v = (
                numbers(n, h, 6).double() for n, h in [(count, heads[0]), (length, heads[1]), (length, heads[1])]
            )
            torch.testing.assert_close(attend(q, k, v), reference_attention(q, k, v), rtol=0, atol=1e-12)


def test_the_modules_reference_equals_the_oracle():
    for heads in [(1, 1), (6, 2), (3, 3)]:
        for block_size in (1, 3, 16):
            case = requests([1, 5, 0, 7, 4, 2], [1, 12, 4, 7, 2, 0], heads, 6, block_size)
            out = module.reference(case.q, *case.cache, case.cu_seqlens, case.lengths)
            torch.testing.assert_close(out, case.expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_lengths_beside_a_block_and_a_tile(block_size):
    """Without a past; tiles of 32 x 32 in float32."""
    lengths = sorted({1, 2, block_size, block_size + 1, 15, 31, 32, 33, 63, 64, 65})
    check(requests(lengths, lengths, block_size=block_size))


@pytest.mark.parametrize(("head_dim", "columns"), [(64, 64), (80, 32)])
def test_lengths_beside_a_tile_in_16_bits(head_dim, columns):
    """The tiles that a GPU gets: 128 rows."""
    lengths = [1, columns - 1, columns, columns + 1, 127, 128, 129]
    assert module.tiles(head_dim, torch.float16, "cpu")[:2] == (128, columns)
    check(requests(lengths, lengths, head_dim=head_dim, dtype=torch.float16))


def test_counts_on_top_of_pasts():
    """Packed: each request has its own number of new rows and its own past, and none sees another's keys."""
    shapes = [(count, count + past) for count in (1, 31, 32, 33) for past in (0, 1, 16, 31, 32, 33)]
    check(requests(*zip(*shapes, strict=True), heads=(1, 1)))


@pytest.mark.parametrize("tile", [(16, 16), (16, 32), (32, 16), (64, 16)])
def test_tiles_of_any_size_give_the_same(tile, monkeypatch):
    monkeypatch.setattr(module, "tiles", lambda *_: Tiles(*tile, 4, 2))
    check(requests([17, 1, 40, 16, 33], [17, 50, 47, 32, 80], (2, 1), 20, 3))


def test_one_request_of_many_lengths(small_tiles):
    for length in (1, 2, 15, 16, 17, 33, 50):
        for count in {1, length // 2, length} - {0}:
            check(requests([count], [length], (1, 1), block_size=3, seed=length))


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (5, 5), (6, 2), (8, 1), (9, 3), (16, 2)])
def test_groups_of_heads(heads, small_tiles):
    check(requests([3, 17], [3, 37], heads))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 20, 64, 80, 96, 128])
def test_head_dims(head_dim, dtype, small_tiles):
    check(requests([18, 3], [18, 37], (3, 1), head_dim, 16, dtype))


@pytest.mark.parametrize("gap", [0, 3])
def test_rows_that_do_not_lie_side_by_side(gap, small_tiles):
    case = requests([18, 3], [18, 37], (6, 2), 20, gap=gap)
    assert case.q.is_contiguous() == case.keys.is_contiguous() == case.tables.is_contiguous() == (gap == 0)
    check(case)


def test_heads_and_rows_of_the_pool_may_lie_in_any_order(small_tiles):
    """A pool [n_blocks, block_size, n_kv_heads, head_dim] in memory; queries with the heads in front."""
    case = requests([18, 3], [18, 37], (6, 2), 20)
    case.keys, case.values = (guarded(x.transpose(1, 2)).transpose(1, 2) for x in (case.keys, case.values))
    case.q = guarded(case.q.transpose(0, 1)).transpose(0, 1)
    check(case)


def test_heads_may_lie_farther_apart_than_32_bits_count(small_tiles):
    case = requests([18, 3], [18, 37], (8, 4), dtype=torch.float16, gap=0)
    pool = [far_apart(x) for x in (case.keys, case.values)]
    out = module.flash_attention(case.q, *pool, case.tables, case.cu_seqlens, case.lengths, case.max_queries)
    assert_equals(out, case.expected, torch.float16)


@pytest.mark.parametrize(("counts", "lengths"), [([0, 5, 0, 0, 3, 0], [0, 5, 7, 0, 20, 1]), ([0], [0]), ([], [])])
def test_requests_without_rows_or_tokens(counts, lengths):
    check(requests(counts, lengths))


@pytest.mark.parametrize("tile", [SMALL, Tiles(32, 32, 4, 2), Tiles(128, 64, 4, 2)])
def test_rows_that_see_nothing_give_zeros(tile, monkeypatch):
    """More rows than tokens: the past is negative, here by more than a tile."""
    monkeypatch.setattr(module, "tiles", lambda *_: tile)
    case = requests([100, 100, 5, 40, 33, 2], [1, 0, 2, 39, 1, 2], (1, 1))
    assert not case.expected[:99].any() and case.expected[99].any() and not case.expected[100:200].any()
    check(case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["rising", "falling", "equal", "equal, below"])
def test_scores_of_ten_thousand(order, dtype, small_tiles):
    heads, head_dim = (2, 1), 64
    q, k, v = steep(200, order, heads, head_dim, dtype)
    q = q[-20:]
    biggest = (q.double() @ k.double()[:, 0].T / 8).abs().max()
    assert biggest > 1e4
    check(requests([20], [200], heads, head_dim, dtype=dtype, tokens=[(q, k, v)]))


def test_the_order_of_blocks_in_the_pool_does_not_matter(small_tiles):
    tables, results = set(), []
    for seed in range(4):
        q, k, v = numbers(20, 2, 16), numbers(50, 1, 16, seed=1), numbers(50, 1, 16, seed=2)
        case = requests([20], [50], (2, 1), seed=seed, tokens=[(q, k, v)])
        check(case)
        tables.add(tuple(case.tables[0].tolist()))
        results.append(module.flash_attention(case.q, *case.cache, case.cu_seqlens, case.lengths, 20))
    assert len(tables) == 4
    assert all(torch.equal(result, results[0]) for result in results)


def test_requests_may_share_blocks(small_tiles):
    """A prefix of 32 tokens that lies in the pool once, with two continuations."""
    k, v = numbers(90, 1, 16, seed=1), numbers(90, 1, 16, seed=2)
    second = [(x[:32], x[50:]) for x in (k, v)]
    tokens = [(numbers(18, 2, 16), k[:50], v[:50]), (numbers(40, 2, 16, seed=3), *(torch.cat(x) for x in second))]
    case = requests([18, 40], [50, 72], (2, 1), tokens=tokens)
    forgotten = case.tables[1, :2].long()
    case.tables[1, :2] = case.tables[0, :2]
    case.keys[forgotten], case.values[forgotten] = torch.nan, torch.nan
    check(case)


def test_rows_and_keys_of_others_change_nothing(small_tiles):
    """Alone and packed the same numbers come out, to the last bit."""
    both = requests([18, 33], [30, 40], (2, 1))
    packed = module.flash_attention(both.q, *both.cache, both.cu_seqlens, both.lengths, both.max_queries)
    alone = module.flash_attention(both.q[18:], *both.cache[:2], both.tables[1:], integers(0, 33), both.lengths[1:], 33)
    assert torch.equal(packed[18:], alone)


def test_bytes_moved_counts_each_tensor_once():
    counts, lengths = [5, 0, 3], [5, 7, 20]
    case = requests(counts, lengths, (6, 2), 20, block_size=1, dtype=torch.float16, gap=0)
    pool = [x[: sum(lengths)] for x in (case.keys, case.values)]  # blocks of one token: so many are in use
    wanted = 2 * case.q.nbytes + sum(x.nbytes for x in pool)
    assert module.bytes_moved(counts, lengths, 6, 2, 20, 2) == wanted


def test_flops_count_every_key_that_a_row_sees():
    for counts, lengths in [([1], [1]), ([5, 0, 3], [5, 7, 20]), ([16, 1], [17, 100])]:
        seen = sum(length - n + row + 1 for n, length in zip(counts, lengths, strict=True) for row in range(n))
        assert module.flops(counts, lengths, 6, 20) == 6 * seen * (2 * 20 + 2 * 20)


# --- The stored mutants. ---


def hard_cases(module) -> None:
    """Few cases, in small tiles, that no mutant passes."""
    module.tiles = lambda *_: SMALL
    check(requests([18, 1, 20, 2], [18, 35, 1, 0], (4, 2), 20), module)
    q, k, v = steep(35, "falling", (1, 1), 16, torch.float32)
    check(requests([3], [35], (1, 1), tokens=[(q[-3:], k, v)]), module)


KERNEL = {
    "no past": ("past = length - n_queries", "past = 0"),
    "the past is off by one": ("past = length - n_queries", "past = length - n_queries - 1"),
    "all heads read the first key head": ("(head // heads_per_group) * stride_kg", "0 * stride_kg"),
    "heads take key heads in turn": (
        "(head // heads_per_group) * stride_kg",
        "(head % (tl.num_programs(1) // heads_per_group)) * stride_kg",
    ),
    "the last tile is left out": ("past + (tile + 1) * BLOCK_M)", "past + tile * BLOCK_M)"),
    "the middle may be negative": (
        "tl.maximum(0, tl.minimum(end, past + tile * BLOCK_M + 1)) // BLOCK_N",
        "tl.minimum(end, past + tile * BLOCK_M + 1) // BLOCK_N",
    ),
    "the diagonal is not masked": (
        "tl.minimum(end, past + tile * BLOCK_M + 1)",
        "tl.minimum(end, past + (tile + 1) * BLOCK_M)",
    ),
    "all requests use the first one's table": ("tables_ptr + request * stride_table", "tables_ptr"),
    "all requests write the first one's rows": ("tokens = (first + rows)", "tokens = rows"),
    "rows behind the last are written": (
        "finish(total, acc).to(q.dtype), mask=inside",
        "finish(total, acc).to(q.dtype)",
    ),
    "the last rows get no program": ("triton.cdiv(max_queries, choice.rows)", "max_queries // choice.rows"),
    "scaled by the padded head_dim": ("head_dim**-0.5 * LOG2_E", "padded(head_dim)**-0.5 * LOG2_E"),
    "exp2 of scores meant for exp": ("head_dim**-0.5 * LOG2_E", "head_dim**-0.5"),
    "rows of q lie side by side": ("tokens * stride_qt + head", "tokens * stride_ot + head"),
}

WALK = {
    "the sum of values is not rescaled": ("acc * rescale[:, None] +", "acc +"),
    "the sum of weights is not rescaled": ("total * rescale +", "total +"),
    "no row sees its own token": ("columns[None, :] <= last_seen", "columns[None, :] < last_seen"),
    "one token too many is read": ("known = columns < length", "known = columns <= length"),
    "padding is read in masked tiles": ("(dims < HEAD_DIM)", "(dims < BLOCK_D)"),
    "padding is read in full tiles": ("if MASKED or HEAD_DIM != BLOCK_D:", "if MASKED:"),
    "a row that saw nothing: inf - inf": ('tl.where(new_top == float("-inf"), 0.0, new_top)', "new_top"),
    "a row that saw nothing: 0 / 0": ("tl.where(total == 0.0, 1.0, total)", "total"),
    "only this tile's maximum": ("tl.maximum(top, tl.max(scores, axis=1))", "tl.max(scores, axis=1)"),
    "rescaled the wrong way round": ("tl.exp2(top - base)", "tl.exp2(base - top)"),
    "blocks side by side in the pool": ("block.to(tl.int64) * stride_block", "(columns // BLOCK_SIZE) * stride_block"),
    "the row in the block is forgotten": ("(columns % BLOCK_SIZE) * stride_row", "0 * stride_row"),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy does not like what some of them compute
@pytest.mark.parametrize("mutant", KERNEL)
def test_each_mutant_of_the_kernel_is_rejected(mutant, tmp_path):
    with pytest.raises(AssertionError):
        hard_cases(changed_copy(module, tmp_path, KERNEL[mutant]))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy does not like what some of them compute
@pytest.mark.parametrize("mutant", WALK)
def test_each_mutant_of_the_walk_is_rejected(mutant, tmp_path):
    with pytest.raises(AssertionError):
        hard_cases(with_walk(tmp_path, WALK[mutant]))


def test_the_unchanged_copy_passes(tmp_path):
    hard_cases(with_walk(tmp_path))


def with_walk(folder, *changes):
    """The kernel on a changed copy of online_softmax.py."""
    copy, walk = changed_copy(module, folder), changed_copy(online_softmax, folder, *changes)
    copy.walk, copy.finish = walk.walk, walk.finish  # before the first call: the interpreter keeps what it then finds
    return copy
