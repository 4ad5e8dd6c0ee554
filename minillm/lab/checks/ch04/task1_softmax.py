"""Task 1: softmax(scores) @ values, from blocks that are seen once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from minillm.lab.check import expect_close, seeded
from minillm.lab.checks.ch04.base import CHAPTER, named, randn

softmax = CHAPTER.task(
    "online_softmax",
    hints=(
        "Keep three things of the blocks so far: the largest score of each row, the sum of exp(score - largest), and "
        "the values weighted by the same numbers.",
        "When a block raises the largest score, what you added before is too large: by which factor, the same for all "
        "of it?",
        "exp(old top - new top) goes on `total` and on `weighted`. Divide once, at the end. Where a row has seen only "
        "-inf, subtract 0 instead of its top.",
    ),
)


def stream(scores: Sequence[Tensor], values: Sequence[Tensor], keep: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    """The blocks, one at a time; each is overwritten when the next is asked for, unless it is kept."""
    for s, v in zip(scores, values, strict=True):
        s, v = s.clone(), v.clone()
        yield s, v
        if not keep:
            s.fill_(torch.nan), v.fill_(torch.nan)


def simulate(
    scores: Sequence[Tensor], values: Sequence[Tensor], on_total: int = 1, on_weighted: int = 1, divide: bool = False
) -> Tensor:
    """The walk over blocks, with mistakes: on_*: the factor is forgotten (0), right (1) or upside down (-1)."""
    top = scores[0].new_full((len(scores[0]),), -torch.inf)
    total, weighted = torch.zeros_like(top), scores[0].new_zeros(len(top), values[0].shape[1])
    for s, v in zip(scores, values, strict=True):
        new = torch.maximum(top, s.amax(1))
        base = new.masked_fill(new == -torch.inf, 0)
        change = torch.where(top == -torch.inf, 0.0, top - base)
        weights = (s - base[:, None]).exp()
        total = total * (change * on_total).exp() + weights.sum(1)
        weighted = weighted * (change * on_weighted).exp()[:, None] + weights @ v
        if divide:
            weighted = weighted / total[:, None]
        top = new
    return weighted if divide else weighted / total[:, None]


def mistakes(scores: Sequence[Tensor], values: Sequence[Tensor]) -> dict[str, Tensor]:
    """What comes out of mistakes that people make."""
    scores, values = ([x.double() for x in xs] for xs in (scores, values))
    alone = [s.softmax(1).nan_to_num() @ v for s, v in zip(scores, values, strict=True)]
    tops, sums = ([f(s) for s in scores] for f in (lambda s: s.amax(1, True), lambda s: (s - s.amax(1, True)).exp()))
    base = torch.cat(tops, 1).amax(1, True)
    own = sum(e @ v for e, v in zip(sums, values, strict=True)) / sum(e.sum(1, True) for e in sums)
    raw = sum((s - base).exp() @ v for s, v in zip(scores, values, strict=True))
    return {
        "when the sums so far are not scaled down as the top rises": simulate(scores, values, 0, 0),
        "when `total` is scaled down as the top rises, and `weighted` is not": simulate(scores, values, 1, 0),
        "when `weighted` is scaled down as the top rises, and `total` is not": simulate(scores, values, 0, 1),
        "when the factor is upside down, exp(new top - old top)": simulate(scores, values, -1, -1),
        "when each block is divided by the total so far, instead of once at the end": simulate(
            scores, values, divide=True
        ),
        "when each block has its own top, and its sums are added up without regard to it": own,
        "when each block has its own softmax and the results are added up": sum(alone),
        "when each block has its own softmax and the mean is taken": sum(alone) / len(alone),
        "when only the last block counts": alone[-1],
        "when only the first block counts": alone[0],
        "when it is not divided by the total": raw,
    }


def check_blocks(fn: Callable, scores: Tensor, values: Tensor, sizes: Sequence[int], label: str) -> None:
    assert sum(sizes) == scores.shape[1]
    parts, rows = (scores.split(list(sizes), 1), values.split(list(sizes))), values.shape[1]
    want = (scores.double().softmax(1) @ values.double()).float()
    label = f"{label}, blocks of {list(sizes)}"
    got = fn(stream(*parts), len(scores), rows)
    if isinstance(got, Tensor) and got.shape == want.shape and not got.isfinite().all():
        kept = fn(stream(*parts, keep=True), len(scores), rows)
        assert not torch.allclose(kept, want, 1e-4, 1e-5), (
            f"{label}: NaN, since a block was read after the next had been asked for: a block is gone by then"
        )
        raise AssertionError(f"{label}: {got[~got.isfinite()][0]} in row {unfinished(got)}: {why(parts[0])}")
    made = named(got, want, lambda: mistakes(*parts))
    assert not made, f"{label}: {made}"
    expect_close(got, want, label, rtol=1e-4, atol=1e-5)


def unfinished(got: Tensor) -> int:
    return int((~got.isfinite()).nonzero()[0, 0])


def why(scores: Sequence[Tensor]) -> str:
    """Where NaN and infinity come from."""
    tops = [s.amax(1) for s in scores]
    if any((top == -torch.inf).any() for top in tops):
        return "a row saw only -inf so far, and -inf - -inf is NaN"
    if all((top > 89).any() for top in tops):
        return "exp(score) overflows: subtract the largest score first"
    every = torch.cat(list(scores), 1)
    if every.max() - every.min() < 88:
        return "no exp overflows here: is it divided by 0? The total takes each block in, and the top starts at -inf"
    return (
        "exp overflows: the top of a row is its largest score *so far*, and must not fall when a block has smaller ones"
    )


@softmax
def one_block(fn):
    """one block is a softmax"""
    check_blocks(fn, randn(seeded(0), 1, 5), randn(seeded(1), 5, 3), [5], "one row")


@softmax
def rising(fn):
    """a block that raises the largest score"""
    scores = torch.tensor([[1.0, 0.0, 3.0, 2.5, 2.0, -1.0, 4.0, 1.0]])
    check_blocks(fn, scores, randn(seeded(2), 8, 3), [2, 2, 2, 2], "one row, the largest scores 1, 3, 2, 4")


@softmax
def falling(fn):
    """blocks with smaller scores than before"""
    scores = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, 0.0]])
    check_blocks(fn, scores, randn(seeded(3), 6, 3), [2, 2, 2], "one row, falling scores")


@softmax
def several_rows(fn):
    """each row has a largest score of its own"""
    scores = 3 * randn(seeded(4), 4, 12)
    check_blocks(fn, scores, randn(seeded(5), 12, 2), [5, 4, 3], "4 rows")


@softmax
def large_scores(fn):
    """scores so large that exp() of them overflows, or so small that it is 0"""
    scores = 10 * randn(seeded(6), 2, 9)
    for shift in (500, -500):
        check_blocks(fn, shift + scores, randn(seeded(7), 9, 3), [3, 3, 3], f"scores around {shift}")


@softmax
def far_below(fn):
    """a block that lies far below the ones before"""
    scores = torch.tensor([[300.0, 299.0, 1.0, 2.0, 301.0, 0.0]])
    check_blocks(fn, scores, randn(seeded(8), 6, 3), [2, 2, 2], "scores that fall from 300 to 2")


@softmax
def hidden(fn):
    """scores of -inf, also all of a row in a block, have the weight 0"""
    scores = randn(seeded(9), 3, 8)
    scores[0, [1, 6]] = scores[1, 2:4] = scores[2, :4] = -torch.inf
    check_blocks(fn, scores, randn(seeded(10), 8, 2), [2, 2, 2, 2], "hidden scores")


@softmax
def random_blocks(fn):
    """any blocks"""
    rng = random.Random(seeded(11))
    for i in range(12):
        sizes = [rng.randint(1, 5) for _ in range(rng.randint(1, 5))]
        scores = 4 * randn(seeded(20 + i), rng.randint(1, 4), sum(sizes))
        check_blocks(fn, scores, randn(seeded(40 + i), sum(sizes), rng.randint(1, 4)), sizes, f"{len(scores)} row(s)")
