"""Task 3 of exercise 07: one round of guesses is verified. All ways through it are counted exactly."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minillm.lab.check import seeded
from minillm.lab.checks.ch06.base import count_of
from minillm.lab.checks.ch07.all_ways import check_all_ways
from minillm.lab.checks.ch07.base import CHAPTER, certain, missing, random_rows, require_tokens, same_row, short

verified = CHAPTER.task(
    "verify_round",
    hints=(
        "Row i of p is the model's distribution at the place of guess i. There is one row more than guesses.",
        "A round is some guesses, from the first on, and exactly one token that is drawn. Never none, never two.",
        "Two ways out: at the first rejection with what is missing of that row, or after the last guess.",
        "Read the three-token example aloud: what happens to guess 1 when guess 0 is rejected?",
    ),
)

DRAWN = 99  # no guess is this token


def accepted(guesses: list[int], p: Tensor, q: list[Tensor], u: float) -> int:
    """How many guesses pass if every random number is u."""
    for i, guess in enumerate(guesses):
        if i >= len(p) or u * float(q[i][guess]) >= float(p[i][guess]):
            return i
    return len(guesses)


def check_script(fn: Callable, guesses: list[int], p: Tensor, q: Tensor | None, u: float) -> None:
    """Every random number is u, so it is known what has to happen; `draw` tells what it was asked to draw from."""
    label = f"guesses {guesses}, every random number {u}, every drawn token {DRAWN}"
    asked: list[Tensor] = []
    uses: list[float] = []

    def uniform() -> float:
        uses.append(u)
        return u

    def draw(row: Tensor) -> int:
        right = isinstance(row, Tensor) and row.shape == p[0].shape
        assert right, f"{label}: `draw` wants a distribution [{p.shape[1]}], got {row!r}"
        asked.append(row.clone())
        return DRAWN

    q_rows = [certain(guess, p.shape[1]) for guess in guesses] if q is None else list(q)
    n = accepted(guesses, p, q_rows, u)
    got = require_tokens(fn(list(guesses), p.clone(), None if q is None else q.clone(), uniform, draw), label)
    check_end(label, got, guesses, n, len(asked))
    check_accepted(label, got[:-1], guesses, n, p, q_rows, u)
    check_row(label, asked, p, q_rows, n)
    between = sum(0 < p[i][g] < q_rows[i][g] for i, g in enumerate(guesses[: n + 1]))
    few = f"{between} judged guesses that p and q leave open, and {count_of(len(uses), 'random number')}"
    shared = 0 < len(uses) < between
    assert not shared, f"{label}: {few}: each needs one of its own, or their fates hang together"


def check_end(label: str, got: list[int], guesses: list[int], n: int, draws: int) -> None:
    """A round ends with one drawn token, and has no other. n: guesses that are accepted."""
    k = len(guesses)
    assert got, f"{label}: no token came out; a round gives at least one"
    if n == k:
        end = f"all guesses are accepted, and the bonus, drawn from row {k} of p, ends the round"
        assert got != guesses, f"{label}: {end}; the bonus is missing"
    else:
        end = f"guess {n} is rejected, and one token drawn in its place ends the round"
        assert draws or got != guesses, f"{label}: the guesses came back unverified; {end}"
        assert draws or got != guesses[: n + 1], f"{label}: {end}; yours, {got}, ends with the rejected guess itself"
        assert draws or got != guesses[:n], f"{label}: {end}; in yours, {got}, that token is missing"
        assert draws < 2, f"{label}: {count_of(draws, 'token')} were drawn; {end}: no bonus, and nothing after it"
        on = DRAWN in got[:-1]
        assert not on, f"{label}: {end}; yours goes on to {got}, with guesses made after a token that is not there"
    assert draws, f"{label}: {end}; yours, {got}, was chosen without `draw`"
    assert got.count(DRAWN) == 1 and got[-1] == DRAWN, f"{label}: {end}; yours is {got}"


def check_accepted(
    label: str, kept: list[int], guesses: list[int], n: int, p: Tensor, q: list[Tensor], u: float
) -> None:
    """The tokens before the last are the accepted guesses."""
    ways = {
        "guess i were judged by row i + 1 of p": accepted(guesses, p[1:], q, u),
        "guess i were judged by row i - 1 of p": accepted(guesses, torch.cat([p[:1], p]), q, u),
        "every guess were accepted": len(guesses),
        "p and q were only compared, without a random number": accepted(guesses, p, q, 1.0),
    }
    told = f"{n} of {len(guesses)} guesses are accepted, and yours are {kept}"
    lost = n > 1 and kept == guesses[1:n]
    assert not lost, f"{label}: {told}: the first token is lost"
    made = [way for way, m in ways.items() if m != n and kept == guesses[:m]]
    named = f"; it looks as if {', or '.join(made)}" if made else ""
    assert kept == guesses[:n], f"{label}: {told}{named}"


def check_row(label: str, asked: list[Tensor], p: Tensor, q: list[Tensor], n: int) -> None:
    """What was drawn from."""
    bonus = n == len(q)
    which = "the bonus" if bonus else f"the token for rejected guess {n}"
    row, want = asked[-1], p[-1] if bonus else missing(p[n], q[n])
    if same_row(row, want):
        return
    known = {f"row {i} of p": p[i] for i in range(len(p))}
    known |= {f"what is missing of row {i}": missing(p[i], q[i]) for i in range(len(q))}
    known |= {f"what guess {i}'s q lacks of row {i + 1}": missing(p[i + 1], q[i]) for i in range(len(q))}
    if not bonus:
        known[f"row {n} of p itself, and not what is missing of it"] = p[n]
        known["max(0, p - q), without the division by its sum"] = (p[n] - q[n]).clamp(min=0)
    made = [name for name, candidate in known.items() if same_row(row, candidate)]
    named = f": that is {made[-1]}" if made else ""
    raise AssertionError(f"{label}: {which} is drawn from {short(row)}, expected {short(want)}{named}")


def row(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


P = torch.stack([row(0.3, 0.5, 0.1, 0.1), row(0.2, 0.1, 0.4, 0.3), row(0.6, 0.15, 0.15, 0.1), row(0.1, 0.3, 0.2, 0.4)])
Q = torch.stack([row(0.5, 0.1, 0.2, 0.2), row(0.1, 0.2, 0.5, 0.2), row(0.7, 0.2, 0.05, 0.05)])
GUESSES = [0, 2, 0]  # accepted with probabilities 0.6, 0.8 and 0.86


@verified
def all_right(fn):
    """if all guesses are accepted they come out, and a bonus from the last row of p"""
    check_script(fn, GUESSES, P, Q, 0.25)
    check_script(fn, GUESSES[:1], P[:2], Q[:1], 0.25)


@verified
def first_wrong(fn):
    """the first guess is rejected: one token, and the round is over"""
    check_script(fn, GUESSES, P, Q, 0.7)
    check_script(fn, [3, 2, 0], P, Q, 0.6)


@verified
def middle_wrong(fn):
    """a later guess is rejected: those before it stay, those after it are gone"""
    check_script(fn, [1, 2, 0], P, Q, 0.83)
    check_script(fn, [1, 3, 0], P, Q, 0.88)


@verified
def certain_guesses(fn):
    """q is None: every guess was certain"""
    check_script(fn, [1, 2, 0], P, None, 0.35)
    check_script(fn, [1, 2, 0], P, None, 0.45)
    check_script(fn, [1, 2, 0], P, None, 0.9)


@verified
def no_guesses(fn):
    """a round without guesses is a plain step"""
    check_script(fn, [], P[:1], None, 0.5)
    check_script(fn, [], P[:1], Q[:0], 0.5)


@verified
def greedy(fn):
    """temperature 0, where p is certain: the guesses that are the model's own choice, then its choice"""
    own = [2, 0, 3, 1]
    p = torch.stack([certain(token, 4) for token in own])
    for guesses in ([2, 0, 3], [2, 0, 1], [2, 1, 3], [1, 0, 3], [0, 2, 0]):
        for u in (0.0, 0.5, 1 - 2**-53):
            check_script(fn, guesses, p, None, u)


@verified
def every_way(fn):
    """the tokens of a round have the model's distribution: every way through it is counted"""
    for k in (1, 2, 3):
        for sure in (False, True):
            check_all_ways(fn, k, sure, kept=3, seed=seeded(10))


@verified
def every_way_after_the_rules(fn):
    """the same, where the rules exclude a token that the drafter may guess"""
    for sure in (False, True):
        check_all_ways(fn, 2, sure, kept=2, seed=seeded(20))


@verified
def any_rows(fn):
    """any rows, any number of guesses"""
    generator = torch.Generator().manual_seed(seeded(2))
    for i in range(20):
        k = i % 5
        p, q = random_rows(generator, k + 1, 6, 5), random_rows(generator, k, 6, 6)
        guesses = [int(torch.multinomial(each, 1, generator=generator)) for each in q]
        check_script(fn, guesses, p, q, 0.1 + 0.8 * float(torch.rand((), generator=generator)))
