"""Attention in tiles is exact, whatever the tiles; its memory does not grow with the text; its bytes are the formula's.

One property compares it with the reference over ragged shapes and tiles, another feeds the running softmax in any
order. A third watches every tensor that an operator makes. Stored mutants, each one changed line of the real source,
must be rejected. What an operator takes for itself and gives back before it returns is not seen here.
"""

from __future__ import annotations

import random
from collections import Counter
from types import ModuleType

import pytest
import torch
from conftest import TINY, mutant, random_model
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from minillm import attention as real
from minillm.attention import OnlineSoftmax, Traffic, reference_attention, tiled_attention
from minillm.model import NoCache

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}
HEADS = [(2, 2), (6, 2), (9, 1), (4, 1)]  # n_heads, n_kv_heads: groups of 1, 3, 9 and 4


def draw(rnd: random.Random, n_queries: int, n_keys: int, heads=(6, 2), head_dim: int = 8) -> tuple[Tensor, ...]:
    """q, k, v in float64."""
    generator = torch.Generator().manual_seed(rnd.getrandbits(32))
    shapes = (n_queries, heads[0]), (n_keys, heads[1]), (n_keys, heads[1])
    return tuple(torch.randn(*shape, head_dim, generator=generator, dtype=torch.float64) for shape in shapes)


def require_equal(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Against the reference in float64, on the same numbers."""
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    error = (out - reference_attention(q.double(), k.double(), v.double())).abs().max()
    assert error <= TOLERANCES[q.dtype], f"off by {error}"


def check_tiles(module: ModuleType = real, examples: int = 300) -> Counter:
    """The property: any lengths, any tiles, any heads. -> what was met"""
    rnd, met = random.Random(1), Counter()
    for i in range(examples):
        past, n_queries = rnd.choice([0, 0, 1, 7, 20]), rnd.choice([1, 2, 7, 8, 9, 16, 25])
        n_keys, heads = past + n_queries, HEADS[i % len(HEADS)]
        rows = max(1, rnd.choice([1, 3, 8, n_queries - 1, n_queries, n_queries + 1, 1000]))
        columns = max(1, rnd.choice([1, 3, 8, past, n_keys - 1, n_keys, n_keys + 1, 1000]))
        dtype = rnd.choice(list(TOLERANCES))
        q, k, v = (x.to(dtype) for x in draw(rnd, n_queries, n_keys, heads))
        require_equal(module.tiled_attention(q, k, v, rows, columns), q, k, v)
        met[dtype] += 1
        met["several tiles both ways"] += rows < n_queries and columns < n_keys
        met["one tile for all"] += rows >= n_queries and columns >= n_keys
        met["tiles of one"] += rows == 1 or columns == 1
        met["a ragged last tile of rows"] += rows < n_queries and n_queries % rows > 0
        met["a ragged last tile of keys"] += columns < n_keys and n_keys % columns > 0
        met["a past"] += past > 0
        met["a tile that ends with the past"] += columns == past
    return met


def check_order(module: ModuleType = real, examples: int = 200) -> Counter:
    """The property of the running softmax: tiles of any size in any order, each key in one of them. -> what was met"""
    rnd, met = random.Random(2), Counter()
    for _ in range(examples):
        groups, n_rows, n_keys, head_dim = 2, rnd.randint(1, 5), rnd.randint(1, 24), 3
        generator = torch.Generator().manual_seed(rnd.getrandbits(32))
        scores, q, v = (
            torch.randn(groups, *shape, generator=generator, dtype=torch.float64)
            for shape in [(n_rows, n_keys), (n_rows, head_dim), (n_keys, head_dim)]
        )
        hidden = torch.rand(scores.shape, generator=generator) < rnd.choice([0, 0.5, 0.9])
        hidden[..., rnd.randrange(n_keys)] = False  # each row sees something
        scores = (scores * rnd.choice([1, 30])).masked_fill(hidden, -torch.inf)
        softmax, left = module.OnlineSoftmax(q), rnd.sample(range(n_keys), n_keys)
        seen = torch.zeros(groups, n_rows, dtype=torch.bool)
        while left:
            tile = [left.pop() for _ in range(min(len(left), rnd.randint(1, 6)))]
            softmax.add(scores[..., tile], v[:, tile])
            met["tiles"] += 1
            seen |= ~hidden[..., tile].all(-1)
            met["rows that have seen nothing yet"] += int((~seen).sum())
        error = (softmax.result() - scores.softmax(-1) @ v).abs().max()
        assert error <= 1e-12, f"off by {error}"
    return met


def test_any_tiles_give_the_reference():
    met = check_tiles()
    assert met.pop(torch.float64) > 100
    assert met.pop(torch.float32) > 100
    assert len(met) == 7
    assert min(met.values()) > 15, met


def test_tiles_may_come_in_any_order_also_those_that_hide_everything_from_a_row():
    met = check_order()
    assert met["tiles"] > 500
    assert met["rows that have seen nothing yet"] > 300


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (8, 8), (3, 5), (1, 1)])
def test_scores_of_ten_thousand_neither_overflow_nor_lose_digits(rows, columns, dtype):
    """Whole numbers and a head_dim of 16: all scores are exact, so the tolerance is the same."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randint(-50, 51, (30, heads, 16), generator=generator).to(dtype) for heads in (6, 2, 2))
    k[7:9] = 50 * q[20:22, ::3].sign()  # what the first heads of rows 20 and 21 look for
    q[20:22, ::3] = 50 * q[20:22, ::3].sign()
    v /= 50
    scores = torch.einsum("thd,shd->ths", q[:, ::3], k) / 4
    assert scores.max() == 10_000
    assert scores.min() < -3_000
    require_equal(tiled_attention(q, k, v, rows, columns), q, k, v)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 1.5e-2)])
def test_sixteen_bits_lose_nothing_in_a_long_sum(dtype, tolerance):
    """Sums of 16 bits grow too coarse for what a tile adds (or, in float16, to infinity)."""
    q, k, v = (x.to(dtype) for x in draw(random.Random(0), 4, 16384, (2, 1)))
    expected = reference_attention(q.double(), k.double(), v.double() + 1)
    out = tiled_attention(q, k, v + 1)
    assert out.dtype == dtype
    assert (out - expected).abs().max() <= tolerance
    ones = torch.ones(70_000, 1, 8, dtype=dtype)
    assert (tiled_attention(torch.zeros(1, 1, 8, dtype=dtype), 0 * ones, ones) == 1).all()


@pytest.mark.parametrize(("rows", "columns"), [(0, 1), (1, 0), (-1, 4), (4, -128)])
def test_a_tile_of_nothing_is_refused(rows, columns):
    with pytest.raises(ValueError, match=f"at least one row and one column, not {rows} x {columns}"):
        tiled_attention(*draw(random.Random(0), 4, 4), rows, columns)


# --- Stored mutants: a changed line of the module, and the property that must reject it. ---

MUTANTS = {
    "what was added before is not scaled down": ("(self.top - base).exp()", "torch.ones_like(base)"),
    "only the total is scaled down": ("self.weighted * rescale[..., None]", "self.weighted"),
    "only the values are scaled down": ("self.total * rescale", "self.total"),
    "the maximum is not kept": ("self.top = top", "pass"),
    "the maximum is that of the tile alone": ("torch.maximum(self.top, scores.amax(-1))", "scores.amax(-1)"),
    "a row that has seen nothing is not thought of": ("top.masked_fill(top == -torch.inf, 0)", "top"),
    "the sum is not divided by": ("self.weighted / self.total[..., None]", "self.weighted"),
    "the mask shows one key too many": ("keys > positions[:, None]", "keys > positions[:, None] + 1"),
    "the mask hides a row's own key": ("keys > positions[:, None]", "keys >= positions[:, None]"),
    "the mask is left out a tile too long": ("start + columns > past:", "start + columns > past + 2:"),
    "the heads of a group have each other's positions": (".repeat(heads_", ".repeat_interleave(heads_"),
    "heads share keys with every third": ('"t (g r) d -> g (r t) d"', '"t (r g) d -> g (r t) d"'),
    "the visible keys end one too early": ("past + first + len(tile)", "past + first + len(tile) - 1"),
    "the visible keys end one too late": ("past + first + len(tile)", "past + first + len(tile) + 1"),
    "the scale is forgotten": (" * head_dim**-0.5", ""),
    "a last tile of one key is left out": ("range(0, len(k), columns)", "range(0, max(1, len(k) - 1), columns)"),
}


def test_the_source_as_it_is_passes():
    module = mutant(real, "self.top = top", "self.top = top")
    assert module.tiled_attention is not tiled_attention
    check_tiles(module)
    check_order(module)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_properties_reject_a_planted_mistake(name):
    module = mutant(real, *MUTANTS[name])
    with pytest.raises(AssertionError, match="off by"):
        if "seen nothing" in name:  # key 0 comes first and all rows see it: only another order shows this one
            check_order(module)
        else:
            check_tiles(module)


# --- Memory. ---


class Allocations(TorchDispatchMode):
    """Watches the tensors that operators make: how large those are that are gone, which are alive, and the most bytes
    that were alive at one time."""

    def __init__(self):
        super().__init__()
        self.alive: dict[StorageWeakRef, int] = {}
        self.largest_gone = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        given = {StorageWeakRef(x.untyped_storage()) for x in tensors((args, kwargs))}
        for x in tensors(result):
            storage = StorageWeakRef(x.untyped_storage())
            if storage not in given:  # else a view, or an operator that works in place
                self.alive[storage] = x.untyped_storage().nbytes()
        for storage in [each for each in self.alive if each.expired()]:
            self.largest_gone = max(self.largest_gone, self.alive.pop(storage))
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


def tensors(tree) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def memory(function, n: int) -> tuple[int, int]:
    """Bytes beside the output of n x n: the largest tensor, and the most that were alive at one time."""
    q, k, v = (x.float() for x in draw(random.Random(n), n, n, (2, 1), 16))
    with Allocations() as seen:
        out = function(q, k, v)
    assert seen.alive.pop(StorageWeakRef(out.untyped_storage())) == out.nbytes
    return max(seen.largest_gone, *seen.alive.values(), 0), seen.peak - out.nbytes


LENGTHS = [256, 512, 1024, 2048]


def require_the_same_memory_at_any_length(function) -> None:
    largest, peak = zip(*(memory(function, n) for n in LENGTHS), strict=True)
    assert len(set(largest)) == 1, f"the largest tensor grows: {largest}"
    assert len(set(peak)) == 1, f"the memory grows: {peak}"


def in_small_tiles(module: ModuleType = real):
    return lambda q, k, v: module.tiled_attention(q, k, v, 64, 64)


def test_memory_beside_the_output_is_that_of_a_tile_at_any_length():
    require_the_same_memory_at_any_length(in_small_tiles())
    largest, peak = memory(in_small_tiles(), LENGTHS[0])
    scores = 2 * 64 * 64 * 4  # bytes: two heads, one tile, float32
    assert largest == scores
    assert peak < 5 * scores


@pytest.mark.parametrize("tile", [(16, 64), (64, 16), (128, 32)])
def test_memory_follows_the_tile(tile):
    rows, columns = tile
    largest, _ = memory(lambda q, k, v: tiled_attention(q, k, v, rows, columns), 256)
    assert largest == 2 * rows * max(columns, 16) * 4  # of the scores, or of the queries with their 16 coordinates


def test_the_reference_does_not_pass_for_tiled():
    with pytest.raises(AssertionError, match="the largest tensor grows"):
        require_the_same_memory_at_any_length(reference_attention)
    assert memory(reference_attention, 512)[0] == 2 * 512 * 512 * 4


KEEPING = {
    "all keys are one tile": ("columns, traffic)\n        traffic", "len(k), traffic)\n        traffic"),
    "all queries are one tile": ("range(0, len(q), rows)", "range(0, len(q), rows := len(q))"),
    "the keys before are copied": ("k[:end]", "k[:end].clone()"),
    "scores are kept": ("softmax.add(scores,", "vars(traffic).update({start: scores}), softmax.add(scores,"),
}


@pytest.mark.parametrize("name", KEEPING)
def test_a_version_that_materialises_is_noticed(name):
    module = mutant(real, *KEEPING[name])
    q, k, v = draw(random.Random(0), 20, 20)
    require_equal(module.tiled_attention(q, k, v, 6, 6), q, k, v)  # right, and too large
    with pytest.raises(AssertionError, match="grows"):
        require_the_same_memory_at_any_length(in_small_tiles(module))


# --- Bytes moved. ---


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (4, 3), (8, 16), (5, 100), (100, 2)])
def test_traffic_is_the_queries_and_the_output_once_and_all_keys_before_the_end_of_each_tile(rows, columns, heads):
    n_heads, n_kv_heads = heads
    for n_queries, n_keys in [(1, 1), (1, 40), (8, 8), (16, 16), (13, 29)]:
        for dtype in TOLERANCES:
            traffic = Traffic()
            q, k, v = (x.to(dtype) for x in draw(random.Random(0), n_queries, n_keys, heads))
            out = tiled_attention(q, k, v, rows, columns, traffic)
            ends = [n_keys - n_queries + min(last, n_queries) for last in range(rows, n_queries + rows, rows)]
            a_key_and_value = 2 * n_kv_heads * 8 * dtype.itemsize
            assert traffic.written == out.nbytes == n_queries * n_heads * 8 * dtype.itemsize
            assert traffic.read == out.nbytes + sum(ends) * a_key_and_value
            if n_queries == n_keys and n_queries % rows == 0:  # the sum in closed form
                assert sum(ends) == n_keys * (n_keys + rows) // (2 * rows)


def test_traffic_adds_up_over_calls():
    traffic, inputs = Traffic(), draw(random.Random(0), 6, 9)
    tiled_attention(*inputs, 4, 4, traffic)
    once = Traffic(traffic.read, traffic.written)
    tiled_attention(*inputs, 4, 4, traffic)
    assert traffic == Traffic(2 * once.read, 2 * once.written)


# --- In a model. ---


@pytest.mark.parametrize("tile", [(128, 128), (4, 3)])
@pytest.mark.parametrize("lengths", [None, [11, 1, 7]])
def test_gradients_are_those_through_the_reference(lengths, tile):
    tokens = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 8, 8, 8, 8, 8, 7, 7])
    positions = torch.cat([torch.arange(n) for n in lengths or [len(tokens)]])
    gradients = []
    for function in (reference_attention, lambda q, k, v: tiled_attention(q, k, v, *tile)):
        model = random_model(TINY, seed=4).requires_grad_(True)
        logits = model.logits(model(tokens, positions, NoCache(lengths, attention=function)))
        torch.nn.functional.cross_entropy(logits[:-1], tokens[1:]).backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, expected in gradients[0].items():
        assert expected.abs().max() > 1e-6
        assert (gradients[1][name] - expected).abs().max() <= 1e-12 * max(1, expected.abs().max()), name


@pytest.mark.parametrize("tile", [(128, 128), (4, 3)])
@pytest.mark.parametrize("alike", ["queries of zeros", "equal keys"])
def test_gradients_are_right_where_all_scores_are_tied(alike, tile):
    """Then the maximum is in many places. Its own gradient must cancel."""
    q, k, v = draw(random.Random(0), 9, 12)
    q, k = (0 * q, k) if alike == "queries of zeros" else (q, k[:1].repeat(12, 1, 1))
    gradients = []
    for function in (reference_attention, lambda q, k, v: tiled_attention(q, k, v, *tile)):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        gradients.append(torch.autograd.grad((function(*inputs) * torch.arange(8)).sum(), inputs))
    for expected, ours in zip(*gradients, strict=True):
        assert (ours - expected).abs().max() <= 1e-12
    assert gradients[0][0 if alike == "queries of zeros" else 1].abs().max() > 1


def test_the_running_softmax_keeps_the_largest_score_and_the_sum_relative_to_it():
    softmax = OnlineSoftmax(torch.zeros(2, 3))
    for scores in ([[1.0, 5.0], [2.0, 2.0]], [[4.0, 0.0], [7.0, 2.0]]):
        softmax.add(torch.tensor(scores), torch.ones(2, 3))
    assert softmax.top.tolist() == [5, 7]
    expected = torch.tensor([[1.0, 5, 4, 0], [2, 2, 7, 2]])
    torch.testing.assert_close(softmax.total, (expected - softmax.top[:, None]).exp().sum(-1))
