"""Task 4: one result of two, each made from some of the keys."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from minillm.lab.check import expect_close, seeded
from minillm.lab.checks.ch04.base import CHAPTER, Partial, named, randn

merge = CHAPTER.task(
    "merge_partials",
    hints=(
        "The sums of `a` are relative to a.top, those of `b` to b.top. To what must both be before they are added?",
        "To the larger of the two tops. exp(old top - new top) is the factor, for `total` and for `weighted`, one for "
        "each part.",
        "A part that saw no key has the top -inf, and gives the factor exp(-inf) = 0. Only if both are empty there is "
        "-inf - -inf: subtract 0 there.",
    ),
)


def partial(scores: Tensor, values: Tensor) -> Partial:
    """By its definition, in float64. scores: [rows, keys], perhaps without any key."""
    top = torch.cat([scores, scores.new_full((len(scores), 1), -torch.inf)], 1).amax(1)
    weights = (scores - top.masked_fill(top == -torch.inf, 0)[:, None]).exp()
    return Partial(top, weights.sum(1), weights @ values)


def scaled(a: Partial, top: Tensor) -> Partial:
    """The same part relative to another top."""
    factor = (a.top - top.masked_fill(top == -torch.inf, 0)).exp()
    return Partial(top, a.total * factor, a.weighted * factor[:, None])


def mistakes(a: Partial, b: Partial) -> dict[str, Partial]:
    """What comes out of mistakes that people make."""
    top = torch.maximum(a.top, b.top)
    a_new, b_new = scaled(a, top), scaled(b, top)

    def added(x: Partial, y: Partial) -> Partial:
        return Partial(top, x.total + y.total, x.weighted + y.weighted)

    def halved(x: Partial) -> Partial:
        return Partial(top, x.total / 2, x.weighted / 2)

    right = added(a_new, b_new)
    exchanged = added(scaled(a, top + a.top - b.top), scaled(b, top + b.top - a.top))
    mean = right.weighted / right.total[:, None]
    return {
        "when the two are added without making them relative to one top": added(a, b),
        "when only `a` is scaled to the new top": added(a_new, b),
        "when only `b` is scaled to the new top": added(a, b_new),
        "when the mean of the two is taken": halved(added(a, b)),
        "when the mean of the two, scaled, is taken": halved(right),
        "when only the totals are scaled": replace(right, weighted=a.weighted + b.weighted),
        "when only the weighted values are scaled": replace(right, total=a.total + b.total),
        "when the factors of `a` and `b` change places": exchanged,
        "when the result is divided by the total already": replace(right, weighted=mean),
        "when only `a` counts": a_new,
        "when only `b` counts": b_new,
    }


def as_float32(a: Partial) -> Partial:
    return Partial(a.top.float(), a.total.float(), a.weighted.float())


def check_merge(fn: Callable, scores: Tensor, values: Tensor, cut: int, label: str) -> None:
    """Parts of the keys before `cut` and of those from it on."""
    scores, values = scores.double(), values.double()
    a, b = partial(scores[:, :cut], values[:cut]), partial(scores[:, cut:], values[cut:])
    for one, two, order in ((a, b, ""), (b, a, ", the two exchanged")):
        check_pair(fn, one, two, partial(scores, values), f"{label}, cut at {cut} of {scores.shape[1]} keys{order}")


def check_pair(fn: Callable, a: Partial, b: Partial, want: Partial, label: str) -> None:
    given = as_float32(a), as_float32(b)
    got = fn(*given)
    assert isinstance(got, Partial), f"{label}: expected a Partial, got {type(got).__name__}"
    want = as_float32(want)
    expect_close(got.top, want.top, f"{label}, top (the larger of the two)")
    for name in ("total", "weighted"):
        value, size = getattr(got, name), list(getattr(want, name).shape)
        kind = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        assert kind == f"shape {size}", f"{label}, {name}: {kind}, expected a tensor of shape {size}"
        if value.isnan().any():
            row = int(value.isnan().nonzero()[0, 0])
            empty = [which for which, part in (("a", a), ("b", b)) if part.top[row] == -torch.inf]
            reason = f"{' and '.join(empty)} saw no key, and -inf - -inf is NaN" if empty else "does exp() overflow?"
            raise AssertionError(f"{label}, {name}: NaN in row {row}: {reason}")
    made = both_named(got, want, lambda: mistakes(a, b))
    assert not made, f"{label}: {made}"
    for name in ("total", "weighted"):
        expect_close(getattr(got, name), getattr(want, name), f"{label}, {name}", rtol=1e-4, atol=1e-5)
    kept = [
        torch.equal(getattr(x, field), getattr(y, field).float())
        for x, y in zip(given, (a, b), strict=True)
        for field in ("top", "total", "weighted")
    ]
    assert all(kept), f"{label}: the parts that were given were changed"


def both_named(got: Partial, want: Partial, made: Callable[[], dict[str, Partial]]) -> str:
    """Total and weighted side by side."""

    def flat(x: Partial) -> Tensor:
        return torch.cat([x.total[:, None], x.weighted], 1)

    return named(flat(got), flat(want), lambda: {what: flat(value) for what, value in made().items()})


@merge
def two_parts(fn):
    """two parts make the whole"""
    check_merge(fn, 2 * randn(seeded(0), 4, 6), randn(seeded(1), 6, 3), 4, "4 rows")


@merge
def one_row(fn):
    """one row, and parts of one key"""
    check_merge(fn, 3 * randn(seeded(2), 1, 2), randn(seeded(3), 2, 2), 1, "one row")


@merge
def far_apart(fn):
    """tops that lie far apart, and scores that overflow exp()"""
    scores = torch.tensor([[400.0, 401.0, 1.0, 2.0], [1.0, 2.0, 400.0, 401.0], [500.0, 501.0, 502.0, 501.0]])
    check_merge(fn, scores, randn(seeded(4), 4, 3), 2, "scores of 1 and of 400")


@merge
def an_empty_part(fn):
    """a part without any key changes nothing"""
    check_merge(fn, randn(seeded(5), 2, 5), randn(seeded(6), 5, 3), 0, "2 rows")


@merge
def both_empty(fn):
    """two parts without any key are an empty part"""
    check_merge(fn, torch.empty(2, 0), torch.empty(0, 3), 0, "2 rows")


@merge
def empty_for_one_row(fn):
    """a part may be empty for one row and not for the next"""
    scores = randn(seeded(7), 3, 6)
    scores[0, :3] = scores[1, 3:] = -torch.inf
    check_merge(fn, scores, randn(seeded(8), 6, 2), 3, "3 rows")


@merge
def a_chain(fn):
    """many parts, merged in any order"""
    rng = random.Random(seeded(9))
    scores, values = 4 * randn(seeded(10), 3, 20).double(), randn(seeded(11), 20, 2).double()
    parts = [(i, i + 4) for i in range(0, 20, 4)]
    rng.shuffle(parts)
    done: list[int] = []
    for start, end in parts:
        a, b = (partial(scores[:, at], values[at]) for at in (done, list(range(start, end))))
        done = done + list(range(start, end))
        check_pair(fn, a, b, partial(scores[:, done], values[done]), f"parts {parts}, up to keys {start} to {end - 1}")
