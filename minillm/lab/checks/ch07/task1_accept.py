"""Task 1 of exercise 07: whether a guess is accepted."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from minillm.lab.check import seeded
from minillm.lab.checks.ch07.base import CHAPTER, random_rows

accept = CHAPTER.task(
    "accept_guess",
    hints=(
        "Only two numbers of the rows matter, and `u`. Try it by hand with p = 0.25 and q = 0.5: how often?",
        "u lies below a number c, from 0 to 1, with probability c. Which c do you want?",
        "Avoid a division: compare u times one number with the other. Is the border itself in, or out?",
    ),
)

N = 64  # random numbers (i + 0.5) / N: all products below are exact in binary
Shares = tuple[float, ...]


def verdict(got: object, label: str) -> bool:
    """True or False, as Python's or PyTorch's."""
    assert got is not None, f"{label}: your function returned None; is a `return` missing?"
    boolean = isinstance(got, bool) or (isinstance(got, Tensor) and got.dtype == torch.bool and got.numel() == 1)
    assert boolean, f"{label}: expected True or False, got {got!r}"
    return bool(got)


def about(p: Tensor, q: Tensor, guess: int) -> str:
    return f"p(guess) = {p[guess]:.4g}, q(guess) = {q[guess]:.4g}"


def share(fn: Callable, p: Tensor, q: Tensor, guess: int) -> float:
    """How often the guess is accepted, over evenly spaced random numbers."""
    label = about(p, q, guess)
    accepted = [verdict(fn(p.clone(), q.clone(), guess, (i + 0.5) / N), label) for i in range(N)]
    return sum(accepted) / N


def check_shares(fn: Callable, rows: list[tuple[Tensor, Tensor, int]]) -> None:
    """The shares of several guesses together tell mistakes apart."""
    got = tuple(share(fn, *row) for row in rows)
    pairs = [(float(p[guess]), float(q[guess])) for p, q, guess in rows]
    want = tuple(min(1.0, p / q) for p, q in pairs)
    mistakes: Mapping[str, Shares] = {
        "every guess is accepted": tuple(1.0 for _ in pairs),
        "no guess is accepted": tuple(0.0 for _ in pairs),
        "the ratio is the other way round, q / p": tuple(min(1.0, q / p) if p else 1.0 for p, q in pairs),
        "p and q are only compared, without the random number": tuple(float(p >= q) for p, q in pairs),
        "u is compared with p alone: q counts too": tuple(p for p, q in pairs),
        "u is compared with q alone: p counts too": tuple(q for p, q in pairs),
        "accepted and rejected are exchanged": tuple(1 - w for w in want),
        "only the model's most probable token is accepted": tuple(float(p.argmax() == guess) for p, _, guess in rows),
        "u is compared with p - q, not with p / q": tuple(min(1.0, max(0.0, p - q)) for p, q in pairs),
    }
    # One evenly spaced number more or less may fall on the other side of a share that is no multiple of 1 / N.
    made = [mistake for mistake, shares in mistakes.items() if close(shares, got)]
    for row, mine, right in zip(rows, got, want, strict=True):
        named = f"; it looks as if {made[0]}" if made else ""
        assert abs(mine - right) < 0.75 / N, (
            f"{about(*row)}: accepted for {mine:.4g} of all random numbers, expected {right:.4g}{named}"
        )


def close(a: Shares, b: Shares) -> bool:
    return all(abs(x - y) < 0.75 / N for x, y in zip(a, b, strict=True))


def row(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


P, Q = row(0.25, 0.5, 0.125, 0.125), row(0.5, 0.125, 0.25, 0.125)


@accept
def given_number(fn):
    """`u` is the only random number: asked twice, the same answer comes"""
    times = sum(verdict(fn(P, Q, 0, 0.375), about(P, Q, 0)) for _ in range(40))
    told = f"accepted {times} of 40 times with the same u = 0.375"
    assert times in (0, 40), f"{about(P, Q, 0)}: {told}; is there a second random number?"


@accept
def shares(fn):
    """a guess is accepted with probability min(1, p / q)"""
    flat = row(0.25, 0.25, 0.25, 0.25)
    check_shares(fn, [(P, Q, 0), (P, Q, 1), (P, Q, 2), (P, Q, 3), (row(0.0625, 0.75, 0.125, 0.0625), flat, 3)])


@accept
def excluded(fn):
    """a token that the model's rules exclude is never accepted, not even at u = 0"""
    p, q = row(0.5, 0.5, 0, 0), row(0.25, 0.25, 0.25, 0.25)
    for u in (0.0, 0.25, 0.75):
        got = verdict(fn(p, q, 2, u), about(p, q, 2))
        assert not got, (
            f"{about(p, q, 2)}, u = {u}: accepted, and the model can never say this token. "
            "u may be 0, but is never 1: the border belongs to the rejected"
        )


@accept
def border(fn):
    """u comes from [0, 1): below the border it is accepted, at the border it is not"""
    for u, want in ((0.5, False), (0.499, True), (0.501, False)):
        got = verdict(fn(P, Q, 0, u), about(P, Q, 0))
        assert got == want, f"{about(P, Q, 0)}, u = {u}: {('rejected', 'accepted')[got]}, and p / q is 0.5"


@accept
def always(fn):
    """where p is at least q nothing is rejected, however near u comes to 1"""
    for p, q, guess in ((P, Q, 1), (P, P, 0), (row(0, 1), row(0, 1), 1), (row(0.125, 0.875), row(0.125, 0.875), 0)):
        got = verdict(fn(p, q, guess, 1 - 2**-53), about(p, q, guess))
        assert got, f"{about(p, q, guess)}, u = 1 - 2^-53: rejected, and p is not below q"


@accept
def certain_guess(fn):
    """a certain guess, q = 1, is accepted with the model's probability"""
    one = row(0, 0, 1, 0)
    check_shares(fn, [(P, one, 2), (row(0.25, 0, 0.75, 0), one, 2), (one, one, 2)])


@accept
def any_rows(fn):
    """any rows, a little above and a little below the border"""
    generator = torch.Generator().manual_seed(seeded(0))
    for _ in range(20):
        p, q = random_rows(generator, 2, 8, 6)
        guess = int(torch.multinomial(q, 1, generator=generator))
        border = float(p[guess] / q[guess])
        for u in (border * 0.999, border * 1.001, 0.5 * min(border, 1.0)):
            if u < 1:
                got = verdict(fn(p, q, guess, u), about(p, q, guess))
                want = u < border
                assert got == want, (
                    f"{about(p, q, guess)}, u = {u:.6g}: {('rejected', 'accepted')[got]}, and p / q is {border:.6g}"
                )
