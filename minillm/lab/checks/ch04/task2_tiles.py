"""Task 2: attention in tiles, for one sequence."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minillm.lab.check import expect_close, seeded
from minillm.lab.checks.ch04.base import CHAPTER, named, randn

tiles = CHAPTER.task(
    "attend_in_tiles",
    hints=(
        "Two loops: over the rows, `rows` at a time, and inside over the keys, `columns` at a time. What of a tile of "
        "rows is the same in all of the inner loop?",
        "Row i of q is token number past + i of the sequence, with past = len(k) - len(q). Compare this number with "
        "those of the tile's keys to get the mask.",
        "Head h uses key head h // (n_heads / n_kv_heads). Turn the tile of queries to [n_kv_heads, heads of a group, "
        "rows, head_dim] and multiply with the keys as [n_kv_heads, 1, columns, head_dim]. A slice may be shorter than "
        "a tile.",
    ),
)


class Watch(TorchDispatchMode):
    """Notes how large the tensors are that an operation makes, and how much of them is alive. Views cost nothing."""

    def __init__(self, *given: Tensor):
        super().__init__()
        self.known = {x.untyped_storage().data_ptr() for x in given}
        self.alive: dict[int, int] = {}
        self.largest, self.shape, self.most, self.fused = 0, [], 0, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.fused |= "scaled_dot_product" in str(func)
        old = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in old | self.known:
                self.note(x)
        return out

    def note(self, x: Tensor) -> None:
        key, size = id(x), x.untyped_storage().nbytes() // x.element_size()
        self.alive[key] = size
        weakref.finalize(x, self.alive.pop, key, None)
        if size > self.largest:
            self.largest, self.shape = size, list(x.shape)
        self.most = max(self.most, sum(self.alive.values()))


class Case:
    """Some queries, the last of a sequence."""

    def __init__(
        self, new: int, length: int, heads: tuple[int, int] = (6, 2), dim: int = 4, scale: float = 1, seed: int = 0
    ):
        self.new, self.length, self.group = new, length, heads[0] // heads[1]
        self.q = scale * randn(seeded(seed), new, heads[0], dim)
        self.k, self.v = (randn(seeded(seed + 100 * i), length, heads[1], dim) for i in (1, 2))

    def seen(self, shown: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Which keys each query sees, by their numbers: shown(row [T, 1], key [S]). -> bool [T, S]"""
        return shown(torch.arange(self.new)[:, None], torch.arange(self.length)).expand(self.new, self.length)

    def oracle(self, seen: Tensor | None = None, heads: Sequence[int] = (), scale: float | None = None) -> Tensor:
        """The formula in float64. A row that sees nothing gives zeros. heads: the key head of each query head."""
        past, n_heads, dim = self.length - self.new, *self.q.shape[1:]
        seen = self.seen(lambda row, key: key <= past + row) if seen is None else seen
        heads = heads or [h // self.group for h in range(n_heads)]
        scores = torch.einsum("thd,shd->hts", self.q.double(), self.k.double()[:, heads])
        scores = scores * (dim**-0.5 if scale is None else scale)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
        return torch.einsum("hts,shd->thd", weights, self.v.double()[:, heads]).float()

    def mistakes(self, rows: int, columns: int) -> dict[str, Tensor]:
        """What comes out of mistakes that people make."""
        past, n_kv, dim, whole = self.length - self.new, *self.k.shape[1:], self.length // columns * columns
        alone = [
            self.oracle(self.seen(lambda row, key, s=s: (key <= past + row) & (s <= key) & (key < s + columns)))
            for s in range(0, self.length, columns)
        ]
        masks: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "when query 0 is taken for the first token: the mask at the upper left, the past forgotten": (
                lambda row, key: key <= row
            ),
            "when rows are counted from the beginning of their tile": lambda row, key: key <= past + row % rows,
            "when each query sees all keys, also those after it": lambda row, key: (key >= 0) | (row < 0),
            "when all rows of a tile see what its last row sees": (
                lambda row, key: key <= past + (row // rows * rows + rows).clamp(max=self.new) - 1
            ),
            "when a query does not see its own token": lambda row, key: key < past + row,
            "when a query sees the token after it": lambda row, key: key <= past + row + 1,
            "when a last tile of keys that is not full is left out": (
                lambda row, key: (key <= past + row) & (key < whole)
            ),
        }
        return {
            **{what: self.oracle(self.seen(mask)) for what, mask in masks.items()},
            "when head h reads key head h % n_kv_heads": self.oracle(heads=[h % n_kv for h in range(self.q.shape[1])]),
            "when the scores are not divided by sqrt(head_dim)": self.oracle(scale=1.0),
            "when the scores are divided by head_dim, not by its root": self.oracle(scale=1 / dim),
            "when each tile has its own softmax and the results are added up": sum(alone),
            "when each tile has its own softmax and the mean is taken": sum(alone) / len(alone),
            "when only the last tile of keys counts": alone[-1],
        }


def check_case(fn: Callable, case: Case, rows: int, columns: int) -> None:
    given = [x.clone() for x in (case.q, case.k, case.v)]
    got, want = fn(*given, rows, columns), case.oracle()
    label = f"{case.new} queries, {case.length} keys, tiles of {rows} x {columns}"
    made = named(got, want, lambda: case.mistakes(rows, columns))
    assert not made, f"{label}: {made}"
    if isinstance(got, Tensor) and got.shape == want.shape:
        wrong = [t for t in range(case.new) if not torch.allclose(got[t], want[t], 1e-4, 1e-5)]
        last = case.new // rows * rows
        assert not wrong or wrong != list(range(last, case.new)), (
            f"{label}: only the rows {last} to {case.new - 1} are wrong: the last tile of queries, which is not full"
        )
    expect_close(got, want, label, rtol=1e-4, atol=1e-5)
    kept = all(torch.equal(x, y) for x, y in zip(given, (case.q, case.k, case.v), strict=True))
    assert kept, f"{label}: q, k or v was changed"


@tiles
def whole_tiles(fn):
    """a sequence of whole tiles"""
    check_case(fn, Case(8, 8), 4, 4)


@tiles
def on_a_past(fn):
    """queries on top of a past"""
    check_case(fn, Case(4, 12, seed=1), 4, 4)
    check_case(fn, Case(8, 12, seed=2), 4, 4)


@tiles
def ragged(fn):
    """last tiles that are not full"""
    check_case(fn, Case(4, 11, seed=3), 4, 4)
    check_case(fn, Case(7, 12, seed=4), 3, 4)


@tiles
def small_and_large(fn):
    """one query, one key, tiles of one, tiles larger than the sequence"""
    for i, (new, length, rows, columns) in enumerate(((1, 1, 4, 4), (1, 9, 4, 4), (5, 7, 1, 1), (5, 7, 16, 64))):
        check_case(fn, Case(new, length, seed=10 + i), rows, columns)


@tiles
def heads(fn):
    """as many key heads as query heads, and one for all"""
    check_case(fn, Case(5, 9, heads=(3, 3), seed=20), 2, 4)
    check_case(fn, Case(5, 9, heads=(4, 1), seed=21), 2, 4)


@tiles
def large_scores(fn):
    """scores so large that exp() of them overflows"""
    check_case(fn, Case(6, 10, scale=200, seed=30), 4, 3)


@tiles
def memory(fn):
    """nothing is made that grows with the length"""
    n_heads, rows, columns, dim = 4, 4, 8, 2
    case = Case(16, 320, heads=(n_heads, 2), dim=dim, seed=40)
    tile = n_heads * (rows * columns + (rows + columns) * dim)
    watch = Watch(case.q, case.k, case.v)
    with watch:
        fn(case.q, case.k, case.v, rows, columns)
    label = f"16 queries, 320 keys, 4 heads, tiles of {rows} x {columns}"
    assert watch.largest <= max(case.q.numel(), 2 * tile), (
        f"{label}: you made a tensor of shape {watch.shape}, {watch.largest} numbers; a tile has {tile}, and "
        f"nothing may be larger than two of them, or than q"
    )
    assert watch.most <= 2 * case.q.numel() + 8 * tile, (
        f"{label}: {watch.most} numbers are kept at a time; a tile has {tile}: do not collect the tiles"
    )
    assert not watch.fused, f"{label}: you call PyTorch's scaled_dot_product_attention: write the walk yourself"


@tiles
def random_cases(fn):
    """any lengths and tiles"""
    rng = random.Random(seeded(50))
    for i in range(10):
        length = rng.randint(1, 14)
        check_case(fn, Case(rng.randint(1, length), length, seed=60 + i), rng.randint(1, 6), rng.randint(1, 6))
