"""Task 5: one step of GPTQ. A column is rounded, and the columns behind it make up for the error."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minillm.lab.check import seeded
from minillm.lab.checks.ch04.base import named, randn
from minillm.lab.checks.ch09.base import CHAPTER, expect_pair, expect_tensor

column = CHAPTER.task(
    "gptq_column",
    hints=(
        "First only the column: its codes, as in task 1, and what these codes stand for.",
        "The error is the column as it was, less what its codes stand for. Divide it by U[j, j].",
        "Row j of U says how much each column k behind j gets of it: one product of a column of errors and a row of "
        "factors gives the whole matrix that is subtracted.",
    ),
)


def hessian_of(seed: int, n_in: int) -> Tensor:
    """X^T X / rows of inputs that have much to do with one another. [in, in], float64"""
    mixing = torch.eye(n_in) + 0.6 * randn(seed, n_in, n_in)
    x = randn(seed + 1, 4 * n_in, n_in) @ mixing
    x = x.double()
    return x.T @ x / len(x) + 0.05 * torch.eye(n_in)


def factor_of(hessian: Tensor) -> Tensor:
    """U, upper triangular, with U^T U the inverse."""
    return torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True).float()


def best_answer(left: Tensor, j: int, rounded: Tensor, hessian: Tensor) -> Tensor:
    """Column j becomes `rounded`; the columns behind it move so that the error of the outputs is least.

    By the least squares themselves, without U: with e_j the error of column j and F the columns behind it, the error is
    least where H_FF e_F = -H_Fj e_j.
    """
    new = left.clone()
    new[:, j] = rounded
    if j + 1 < left.shape[1]:
        behind = torch.linalg.solve(hessian[j + 1 :, j + 1 :], hessian[j + 1 :, j])
        new[:, j + 1 :] = left[:, j + 1 :] + torch.outer(left[:, j] - rounded, behind)
    return new


def mistakes(left: Tensor, j: int, rounded: Tensor, factor: Tensor, hessian: Tensor) -> dict[str, Tensor]:
    """What comes out of mistakes that people make."""
    error = left[:, j] - rounded
    factor = factor.double()

    def fed(row: Tensor, columns: slice = slice(j + 1, None)) -> Tensor:
        new = left.clone()
        new[:, j] = rounded
        new[:, columns] -= torch.outer(error, row[columns])
        return new

    row = factor[j] / factor[j, j]
    inverse = torch.linalg.inv(hessian)
    unrounded = fed(row)
    unrounded[:, j] = left[:, j]
    return {
        "when the error is fed forward with the wrong sign": fed(-row),
        "when only the next column gets something of the error": fed(row, slice(j + 1, j + 2)),
        "when nothing is fed forward (is it column j of U, where 0 stands below the diagonal?)": fed(0 * row),
        "when the error is not divided by U[j, j]": fed(factor[j]),
        "when the error is divided by U[j, j] twice": fed(row / factor[j, j]),
        "when the error is multiplied by U[j, j]": fed(factor[j] * factor[j, j]),
        "when the columns before j are moved by the wrong triangle": fed(factor[:, j] / factor[j, j], slice(0, j)),
        "when all columns get the same": fed(torch.ones_like(row)),
        "when column j keeps its weights": unrounded,
        "when the last column is left out": fed(row, slice(j + 1, max(left.shape[1] - 1, j + 1))),
        "when the next column is left out": fed(row, slice(j + 2, None)),
        "when the inverse Hessian itself is taken for U": fed(inverse[j] / inverse[j, j]),
    }


def check_column(
    fn: Callable, left: Tensor, j: int, scale: Tensor, minimum: Tensor, bits: int, hessian: Tensor, label: str
) -> None:
    n_in, top = left.shape[1], 2**bits - 1
    label = f"{label}: column {j} of {n_in}, {len(left)} row(s), {bits} bits"
    factor = factor_of(hessian)
    given = (left, scale, minimum, factor)
    kept = [value.clone() for value in given]
    got = fn(left, j, scale, minimum, bits, factor)
    expect_pair(got, ("codes", "left"), label)
    for name, before, after in zip(("left", "scale", "minimum", "U"), kept, given, strict=True):
        assert torch.equal(before, after), f"{label}: {name}, which was given, was changed: give a new matrix"
    codes, new = got
    expect_tensor(codes, [len(left)], torch.uint8, f"{label}, codes")
    expect_tensor(new, list(left.shape), torch.float32, f"{label}, left")
    want = codes_of(left[:, j], scale, minimum, top)
    if not torch.equal(codes, want):
        expect_codes(codes, want, left[:, j], scale, minimum, top, f"{label}, codes")
    left, scale, minimum = left.double(), scale.double(), minimum.double()
    rounded = want.double() * scale + minimum
    best = best_answer(left, j, rounded, hessian)
    bad = (~torch.isfinite(new)).nonzero().tolist()
    assert not bad, f"{label}, left: {new[tuple(bad[0])]} at index {bad[0]}"
    made = named(new, best, lambda: mistakes(left, j, rounded, factor, hessian), rtol=1e-3, atol=1e-4)
    expect_moved(new, best, left, j, f"; {made}" if made else "", f"{label}, left")


def expect_moved(new: Tensor, best: Tensor, left: Tensor, j: int, reason: str, label: str) -> None:
    wrong = (~torch.isclose(new.double(), best, rtol=1e-3, atol=1e-4)).nonzero().tolist()
    if not wrong:
        return
    row, k = min(wrong, key=lambda at: (at[1] != j, at))
    what = (
        "which holds what its codes stand for" if k == j else
        "which was done before and stays as it was" if k < j else "which makes up for the error"
    )  # fmt: skip
    raise AssertionError(
        f"{label}: {len(wrong)} values differ; index [{row}, {k}], in column {k}, {what}: it was "
        f"{left[row, k].item():.6g}, yours {new[row, k].item():.6g}, expected {best[row, k].item():.6g}{reason}"
    )


def codes_of(weights: Tensor, scale: Tensor, minimum: Tensor, top: int) -> Tensor:
    places = (weights.double() - minimum.double()) / scale.double().where(scale > 0, 1)
    return torch.where(scale > 0, places.round().clamp(0, top), 0).to(torch.uint8)


def expect_codes(
    codes: Tensor, want: Tensor, weights: Tensor, scale: Tensor, minimum: Tensor, top: int, label: str
) -> None:
    """Says at which row they differ, and by which mistake."""
    i = int((codes != want).nonzero()[0, 0])
    places = (weights.double() - minimum.double()) / scale.double().where(scale > 0, 1)

    def stored(places: Tensor) -> Tensor:
        return (places.long() % 256).to(torch.uint8)

    made = {
        "when it is rounded down, and not to the nearest": stored(places.floor().clamp(0, top)),
        "when nothing is clamped": stored(places.round()),
        "when codes below 0 are not clamped": stored(places.round().clamp(max=top)),
        "when codes above the greatest are not clamped": stored(places.round().clamp(min=0)),
        "when it is clamped to 2^bits, one code too many": stored(places.round().clamp(0, top + 1)),
        "when the minimum is not subtracted": stored((weights / scale).round().clamp(0, top)),
        "when the scale of the first row serves all": codes_of(weights, scale[:1], minimum, top),
    }
    names = [what for what, value in made.items() if torch.equal(value, codes)]
    reason = f"; yours is what comes out {', or '.join(names)}" if names else ""
    if scale[i] == 0:
        reason = "; the scale of this row is 0, so code 0 is expected" + reason
    raise AssertionError(
        f"{label}: row {i}, the weight {weights[i].item():.6g} on a grid with scale {scale[i].item():.6g} and minimum "
        f"{minimum[i].item():.6g}: yours {codes[i]}, expected {want[i]}{reason}"
    )


def a_case(seed: int, n_out: int, n_in: int, j: int, bits: int) -> tuple:
    """Weights whose column j lies between levels of its rows' grids, and for some rows beyond the ends."""
    left = randn(seed, n_out, n_in)
    scale, top = 0.1 + 0.3 * torch.rand(n_out, generator=torch.Generator().manual_seed(seed)), 2**bits - 1
    minimum = -scale * top / 2 + 0.2 * randn(seed + 1, n_out)
    places = torch.tensor([0.3, 1.7, 2.65, -1.4, top + 2.2, 0.6])[torch.arange(n_out) % 6]
    left[:, j] = minimum + scale * places
    return left, j, scale, minimum, bits, hessian_of(seed + 2, n_in)


@column
def in_the_middle(fn):
    """a column in the middle: the columns before it stay, those behind it move"""
    for i, j in enumerate((1, 3, 4)):
        check_column(fn, *a_case(seeded(20 + 3 * i), 6, 6, j, 3), "a column in the middle")
    check_column(fn, *a_case(seeded(30), 4, 7, 2, 2), "a column in the middle")


@column
def the_first_column(fn):
    """the first column: all others make up for its error"""
    check_column(fn, *a_case(seeded(0), 3, 5, 0, 4), "the first column")
    check_column(fn, *a_case(seeded(10), 1, 2, 0, 4), "two columns")


@column
def the_last_column(fn):
    """the last column has none behind it"""
    check_column(fn, *a_case(seeded(40), 6, 4, 3, 4), "the last column")
    check_column(fn, *a_case(seeded(43), 2, 1, 0, 4), "one column alone")


@column
def inputs_of_any_size(fn):
    """inputs far larger and far smaller than 1"""
    for i, size in enumerate((100.0, 0.01)):
        left, j, scale, minimum, bits, hessian = a_case(seeded(50 + 3 * i), 6, 5, 1, 4)
        check_column(fn, left, j, scale, minimum, bits, size**2 * hessian, f"inputs of a size near {size}")


@column
def on_a_level(fn):
    """a column that lies on its levels makes no error, and nothing moves"""
    left, j, _, _, bits, hessian = a_case(seeded(60), 4, 5, 2, 4)
    scale, minimum = torch.full((4,), 0.25), torch.full((4,), -2.0)
    left[:, j] = torch.tensor([-2.0, 1.75, 0.0, 0.25])
    check_column(fn, left, j, scale, minimum, bits, hessian, "weights on levels")


@column
def a_scale_of_zero(fn):
    """a row whose group is constant, with the scale 0: code 0, and its error is fed forward, too"""
    left, j, scale, minimum, bits, hessian = a_case(seeded(70), 5, 5, 1, 4)
    scale[1], scale[3] = 0, 0
    left[3, j] = minimum[3]
    check_column(fn, left, j, scale, minimum, bits, hessian, "rows with the scale 0")
