"""Task 4: AWQ's search for how far columns are scaled up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minillm.lab.check import seeded
from minillm.lab.checks.ch04.base import randn
from minillm.lab.checks.ch09.base import CHAPTER, expect_pair, expect_tensor

search = CHAPTER.task(
    "search_alpha",
    hints=(
        "A loop over the alphas, and in it the three lines of the text: the factors, the approximation, its error. Keep"
        " the best so far.",
        "Column k of the weights meets input k: factors [in] spread over the rows of a matrix [out, in] by themselves. "
        "What was multiplied before rounding has to be divided out afterwards.",
        "The error to compare is that of the outputs, x times the difference of the weights, squared. An alpha that "
        "makes the weights worse can make the outputs better.",
    ),
)
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
Rounded = Callable[[Tensor], Tensor]


def on_grid(group: int, bits: int) -> Rounded:
    """Round to nearest on a grid with scales that are not rounded, and back."""

    def rounded(weight: Tensor) -> Tensor:
        groups = weight.unflatten(1, (-1, group))
        least = groups.amin(2, keepdim=True)
        scale = (groups.amax(2, keepdim=True) - least) / (2**bits - 1)
        steps = ((groups - least) / scale.where(scale > 0, 1)).round()
        return (steps * scale + least).flatten(1)

    return rounded


def root_mean_square(x: Tensor) -> Tensor:
    return x.square().mean(0).sqrt().clamp(min=1e-6)


def output_errors(x: Tensor, weight: Tensor, approximation: Tensor) -> float:
    """The mean squared error of the outputs, in float64."""
    return float((x.double() @ (weight - approximation).double().T).square().mean())


def weight_errors(x: Tensor, weight: Tensor, approximation: Tensor) -> float:
    return float((weight - approximation).square().mean())


def tried(
    weight: Tensor,
    x: Tensor,
    rounded: Rounded,
    alphas: Sequence[float],
    size: Callable[[Tensor], Tensor] = root_mean_square,
    undo: Callable[[Tensor, Tensor], Tensor] = torch.div,
) -> list[Tensor]:
    """The approximation of each alpha."""
    factors = [size(x) ** alpha for alpha in alphas]
    return [undo(rounded(weight * factor), factor) for factor in factors]


def mistakes(weight: Tensor, x: Tensor, rounded: Rounded, alphas: Sequence[float]) -> dict[str, tuple[float, Tensor]]:
    """The (alpha, approximation) that mistakes lead to."""

    def chosen(made: list[Tensor], error=output_errors, pick=min) -> tuple[float, Tensor]:
        errors = [error(x, weight, each) for each in made]
        best = pick(range(len(made)), key=lambda i: errors[i] if errors[i] == errors[i] else torch.inf)
        return alphas[best], made[best]

    right = tried(weight, x, rounded, alphas)
    best = chosen(right)
    own = (weight, x, rounded, alphas)
    first = right[alphas.index(0.0)] if 0.0 in alphas else rounded(weight)
    unbounded = chosen(tried(*own, size=lambda x: x.square().mean(0).sqrt()))
    zero = {"when an input that is always 0 has the size 0: 0 / 0 is NaN, and no error is less": unbounded}
    return (zero if (x == 0).all(0).any() else {}) | {
        "when the error of the weights is compared, and not that of the outputs": chosen(right, weight_errors),
        "when the largest error is taken": chosen(right, pick=max),
        "when the last alpha is always taken": (alphas[-1], right[-1]),
        "when the first alpha is always taken": (alphas[0], right[0]),
        "when the best alpha comes with the approximation of the last one": (best[0], right[-1]),
        "when the best alpha comes with weights that were rounded without factors": (best[0], first),
        "when the factors are not divided out again": chosen(tried(*own, undo=lambda w, s: w)),
        "when the factors are multiplied a second time, and not divided out": chosen(tried(*own, undo=torch.mul)),
        "when columns are divided by their factor before rounding, and multiplied afterwards": chosen(
            tried(*own, size=lambda x: 1 / root_mean_square(x))
        ),
        "when the size of an input is the mean of |x|, and not the root of the mean square": chosen(
            tried(*own, size=lambda x: x.abs().mean(0).clamp(min=1e-6))
        ),
        "when the size of an input is its largest |x|": chosen(
            tried(*own, size=lambda x: x.abs().amax(0).clamp(min=1e-6))
        ),
        "when the size of an input is the mean of x, signs and all": chosen(
            tried(*own, size=lambda x: x.mean(0).abs().clamp(min=1e-6))
        ),
        "when the root of the mean square is forgotten": chosen(
            tried(*own, size=lambda x: x.square().mean(0).clamp(min=1e-6))
        ),
    }


def check_search(
    fn: Callable, weight: Tensor, x: Tensor, group: int, bits: int, label: str, alphas: Sequence[float] = ALPHAS
) -> None:
    label = f"{label}: {list(weight.shape)} weights, {bits} bits, groups of {group}"
    rounded = on_grid(group, bits)

    def watched(weight: Tensor) -> Tensor:
        assert isinstance(weight, Tensor) and weight.shape == given[0].shape, (
            f"{label}: rounded() takes a matrix of shape {list(given[0].shape)}, and got {describe(weight)}"
        )
        bad = (~torch.isfinite(weight)).nonzero().tolist()
        assert not bad, f"{label}: rounded() got {weight[tuple(bad[0])]} at index {bad[0]}: is a size 0 somewhere?"
        return rounded(weight)

    given = weight.clone(), x.clone()
    got = fn(weight, x, watched, alphas)
    expect_pair(got, ("alpha", "approximation"), label)
    alpha, approximation = got
    assert torch.equal(weight, given[0]), f"{label}: the weights that were given were changed"
    assert torch.equal(x, given[1]), f"{label}: the inputs that were given were changed"
    assert isinstance(alpha, float) and alpha in alphas, f"{label}: alpha {alpha!r} is not one of {list(alphas)}"
    expect_tensor(approximation, list(weight.shape), torch.float32, f"{label}, approximation")
    bad = (~torch.isfinite(approximation)).nonzero().tolist()
    assert not bad, f"{label}: {approximation[tuple(bad[0])]} at index {bad[0]}: is a size 0 somewhere?"

    errors = [output_errors(x, weight, each) for each in tried(weight, x, rounded, alphas)]
    least = min(errors)
    own, error = errors[alphas.index(alpha)], output_errors(x, weight, approximation)
    if own > 1.001 * least or abs(error - own) > 0.01 * own + 1e-12:
        made = [what for what, pair in mistakes(weight, x, rounded, alphas).items() if same(pair, got)]
        reason = f"; yours is what comes out {', or '.join(made[:3])}" if made else ""
        expected = alphas[errors.index(least)]
        raise AssertionError(
            f"{label}: yours is alpha {alpha} with an output error of {error:.4g}, "
            f"expected alpha {expected} with {least:.4g}{reason}"
        )
    ties = [a for a, e in zip(alphas, errors, strict=True) if e == least]
    assert len(ties) < 2 or alpha == ties[0], f"{label}: the alphas {ties} are equally good: the first was asked for"


def same(a: tuple[float, Tensor], b: tuple[float, Tensor]) -> bool:
    return a[0] == b[0] and torch.allclose(a[1], b[1], rtol=1e-3, atol=1e-4)


def describe(value: object) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def inputs(seed: int, rows: int, n_in: int, spread: float) -> Tensor:
    """Some inputs are much larger than others. Some are large all the time, others in one row of many."""
    x = randn(seed, rows, n_in) + 0.5
    size = 2.0 ** (spread * randn(seed + 1, n_in))
    size[seed % n_in] *= 8
    x[:, 1::3] *= (torch.rand(rows, 1, generator=torch.Generator().manual_seed(seed)) < 0.1) * 4 + 0.01
    return x * size


@search
def the_best_alpha(fn):
    """the alpha whose outputs have the least error, with its approximation"""
    for i in range(4):
        weight = randn(seeded(i), 12, 16)
        x = inputs(seeded(100 + i), 40, 16, 1.0)
        check_search(fn, weight, x, 8, 3, "inputs of different size", (0.2, 0.4, 0.6, 0.8))


@search
def any_order(fn):
    """the alphas may come in any order, and 0 need not be one of them"""
    for i, alphas in enumerate(((1.0, 0.3, 0.7, 0.0, 0.5), (0.9, 0.1, 0.4), (0.5, 0.0))):
        weight = randn(seeded(10 + i), 10, 24)
        check_search(fn, weight, inputs(seeded(110 + i), 30, 24, 1.2), 12, 3, f"alphas {list(alphas)}", alphas)


@search
def a_square_layer(fn):
    """as many rows of inputs as inputs, and as many outputs: the factors belong to the columns"""
    for i in range(2):
        check_search(fn, randn(seeded(20 + i), 12, 12), inputs(seeded(120 + i), 12, 12, 1.0), 6, 3, "a square layer")


@search
def inputs_that_are_zero(fn):
    """an input that is always 0"""
    x = inputs(seeded(130), 30, 16, 1.0)
    x[:, 3] = x[:, 9] = 0
    for alphas in (ALPHAS, (0.5, 1.0)):
        check_search(fn, randn(seeded(30), 8, 16), x, 8, 3, "inputs 3 and 9 are always 0", alphas)


@search
def equal_inputs(fn):
    """inputs of equal size: all alphas are the same, and the first is taken"""
    x = randn(seeded(40), 20, 8).sign()
    check_search(fn, randn(seeded(41), 6, 8), x, 4, 3, "inputs of 1 and -1", (0.5, 0.0, 1.0))
