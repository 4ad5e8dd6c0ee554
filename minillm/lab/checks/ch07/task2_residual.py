"""Task 2 of exercise 07: the distribution of the token that takes a rejected guess's place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minillm.lab.check import expect_close, seeded
from minillm.lab.checks.ch07.base import CHAPTER, certain, random_rows, same_row, short

residual = CHAPTER.task(
    "residual_distribution",
    hints=(
        "Draw p and q as bars over the tokens. Where does q give too little? Only there something is missing.",
        "What is missing is max(0, p - q). Its sum is the probability of a rejection, not 1.",
        "A certain guess is a q too: which one? And when nothing at all is missing, what do you divide by?",
    ),
)


def expected(p: Tensor, q: Tensor) -> Tensor:
    """Entry by entry."""
    missing = [max(0.0, a - b) for a, b in zip(p.tolist(), q.tolist(), strict=True)]
    total = sum(missing)
    return torch.tensor([m / total for m in missing], dtype=p.dtype) if total else p


def known_mistakes(p: Tensor, q: Tensor, guess: int) -> dict[str, Tensor]:
    missing, extra, rest = (p - q).clamp(min=0), (q - p).clamp(min=0), p.clone()
    rest[guess] = 0
    return {
        "p itself: tokens that q proposes too often would come twice, once as guesses and once here": p,
        "max(0, p - q) without the division by its sum": missing,
        "p - q with its negative entries: nothing is clamped": p - q,
        "|p - q| divided by its sum: entries below 0 have to be 0": (p - q).abs() / (p - q).abs().sum(),
        "what p is missing of q, max(0, q - p): the other way round": extra / extra.sum(),
        "p without the guess, divided by its sum: that is right for a certain guess only": rest / rest.sum(),
        "a softmax of p - q: the entries are probabilities already, divide by their sum": (p - q).softmax(-1),
        "a softmax of max(0, p - q): the entries are probabilities already, divide by their sum": missing.softmax(-1),
        "a certain distribution: the token that is missing most": certain(int((p - q).argmax()), len(p)),
    }


def equal(p: Tensor, q: Tensor) -> str:
    return (
        ": nothing is missing of p, what is divided is 0 / 0, and only rounding can have rejected" if p.equal(q) else ""
    )


def check_residual(fn: Callable, p: Tensor, q: Tensor | None, guess: int, what: str) -> None:
    label = f"{what}, p = {short(p)}, " + (f"guess {guess} certain" if q is None else f"q = {short(q)}")
    p_before, q_before = p.clone(), None if q is None else q.clone()
    got = fn(p, q, guess)
    same = torch.equal(p, p_before) and (q is None or torch.equal(q, q_before))
    assert same, f"{label}: your function changed a row that it was given"
    assert isinstance(got, Tensor), f"{label}: expected a tensor, got {got!r}; is a `return` missing?"
    full_q = certain(guess, len(p)).to(p.dtype) if q is None else q
    want = expected(p, full_q)
    if got.shape == want.shape and got.is_floating_point():
        assert not got.isnan().any(), f"{label}: NaN at index {int(got.isnan().int().argmax())}{equal(p, full_q)}"
        nothing = p.equal(full_q) and not same_row(got, p)
        assert not nothing, f"{label}: yours {short(got)}, expected p{equal(p, full_q)}"
        if not same_row(got, want):
            made = [text for text, row in known_mistakes(p, full_q, guess).items() if same_row(got, row)]
            assert not made, f"{label}: yours {short(got)}, expected {short(want)}; yours is {made[0]}"
        gone = ((got == 0) & (want > 0)).nonzero().flatten().tolist()
        assert not gone, f"{label}: token {gone[:1]} has 0, expected {want[gone[0]]:.4g}: is a rule used a second time?"
        total, missing = float(got.sum()), float((p - full_q).clamp(min=0).sum())
        divided = f"is {missing:.4g}, the sum of what is missing, all that you divide by?"
        assert abs(total - 1) < 1e-4, f"{label}: the entries add up to {total:.6g}, and not to 1; {divided}"
        assert (got >= 0).all(), f"{label}: {got.min():.6g} at index {int(got.argmin())}: below 0"
    expect_close(got, want, label)


def row(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@residual
def the_example(fn):
    """what q was missing of p, made a distribution"""
    check_residual(fn, row(0.5, 0.3, 0.2), row(0.1, 0.6, 0.3), 1, "three tokens")
    check_residual(fn, row(0.2, 0.5, 0.3), row(0.5, 0.25, 0.25), 0, "two tokens are missing")


@residual
def a_certain_guess(fn):
    """a certain guess: q is None, or all of it lies on the guess"""
    p = row(0.5, 0.3, 0.2)
    for guess in range(3):
        check_residual(fn, p, None, guess, "q is None")
        check_residual(fn, p, certain(guess, 3), guess, "q is one-hot")
    check_residual(fn, row(0, 0, 1, 0), None, 3, "p is certain of another token")


@residual
def nothing_is_missing(fn):
    """p = q: nothing is missing, and p comes back"""
    p = row(0.5, 0.25, 0.25)
    check_residual(fn, p, p.clone(), 0, "p = q")
    check_residual(fn, certain(1, 4), None, 1, "both are certain of the guess")


@residual
def hardly_anything_is_missing(fn):
    """p and q nearly equal: what is missing is small, and still divided by its whole sum"""
    check_residual(fn, row(0.5, 0.25, 0.25), row(0.5 + 2**-20, 0.25 - 2**-21, 0.25 - 2**-21), 0, "q is nearly p")


@residual
def after_the_rules(fn):
    """tokens that the rules exclude stay excluded, and no rule is used a second time"""
    check_residual(fn, row(0.6, 0.4, 0, 0), row(0, 0, 0.7, 0.3), 2, "nothing in common")
    check_residual(fn, row(0.6, 0.35, 0.05, 0), row(0.6, 0.05, 0, 0.35), 3, "different tokens are left")
    p = row(0.15, 0.13, 0.12, 0.11, 0.1, 0.1, 0.1, 0.1, 0.05, 0.04)
    check_residual(fn, p, certain(0, 10), 0, "a long tail")


@residual
def any_rows(fn):
    """any rows, float32 and float64"""
    generator = torch.Generator().manual_seed(seeded(1))
    for i in range(20):
        p, q = random_rows(generator, 2, 12, 12 - i % 6).to((torch.float32, torch.float64)[i % 2])
        guess = int((q - p).argmax())
        check_residual(fn, p, None if i % 5 == 4 else q, guess, "random rows")
