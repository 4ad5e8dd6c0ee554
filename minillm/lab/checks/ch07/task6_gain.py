"""Task 6 of exercise 07: how many tokens a round gives, and what that is worth."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from minillm.lab.check import seeded
from minillm.lab.checks.ch03 import expect_named, expect_tuple
from minillm.lab.checks.ch07.base import CHAPTER

gain = CHAPTER.task(
    "draft_gain",
    hints=(
        "One token always comes. When does a second one come? And a third?",
        "Guess i counts only if all before it were accepted too: probabilities are multiplied, and then added up.",
        "Time a token: a round's costs over its tokens. Plain decoding pays 1 for each token.",
        "The closed form divides by 1 - alpha. A sum of k + 1 terms divides by nothing.",
    ),
)


def tokens_a_round(alpha: float, k: int) -> float:
    """Over all lengths of a run of accepted guesses: probability times tokens."""
    stopped = [(alpha**n * (1 - alpha), n + 1) for n in range(k)]
    return sum(p * n for p, n in [*stopped, (alpha**k, k + 1)])


def check_gain(fn: Callable, alpha: float, k: int, cost_draft: float, cost_verify: float) -> None:
    label = f"alpha = {alpha:g}, k = {k}, a guess costs {cost_draft:g}, a verification {cost_verify:g}"
    try:
        result = fn(alpha, k, cost_draft, cost_verify)
    except ZeroDivisionError:
        where = "at alpha = 1 every guess is accepted" if alpha == 1 else "what is 0 here?"
        raise AssertionError(f"{label}: a division by zero; {where}") from None
    got = expect_tuple(result, ("tokens a round", "times as fast"), label)
    tokens = tokens_a_round(alpha, k)
    expect_named(
        got[0],
        tokens,
        f"tokens a round, {label}",
        {
            "with k terms: the token that the model adds itself is missing": tokens - alpha**k,
            "with accepted guesses only: the token that the model adds itself is missing": tokens - 1,
            "if guesses after a rejection counted too": 1 + k * alpha,
            "if either all guesses were accepted or none": 1 + k * alpha**k,
            "if every guess were accepted": k + 1.0,
            "with one term too many": tokens + alpha ** (k + 1),
            "if the guesses were never cut off at k": 1 / (1 - alpha) if alpha < 1 else float("inf"),
        },
    )
    cost = k * cost_draft + cost_verify
    want = tokens / cost
    mistakes = {
        "the other way round: cost over tokens": cost / tokens,
        "without the cost of the guesses": tokens / cost_verify,
        "with the cost of one guess only: a round makes k of them": tokens / (cost_draft + cost_verify),
        "with a verification that costs no more than a plain step": tokens / (k * cost_draft + 1),
        "with k + 1 guesses: the bonus is not guessed": tokens / (cost + cost_draft),
        "with a verification for each guess: one pass verifies all": tokens / (k * (cost_draft + cost_verify) or 1),
        "tokens a round: their cost is missing": tokens,
    }
    expect_named(got[1], want, f"times as fast, {label}", mistakes)


@gain
def the_example(fn):
    """one token is sure, and each further guess needs all before it"""
    check_gain(fn, 0.8, 4, 0.05, 1.1)
    check_gain(fn, 0.5, 2, 0.1, 1.2)


@gain
def never_accepted(fn):
    """alpha = 0: one token a round, and the guesses are pure loss"""
    check_gain(fn, 0.0, 3, 0.1, 1.3)


@gain
def always_accepted(fn):
    """alpha = 1: all guesses and one token more"""
    check_gain(fn, 1.0, 3, 0.1, 1.3)
    check_gain(fn, 1.0, 7, 0.0, 2.0)


@gain
def no_guesses(fn):
    """k = 0: plain decoding"""
    check_gain(fn, 0.7, 0, 0.1, 1.0)
    check_gain(fn, 1.0, 0, 0.1, 1.0)
    check_gain(fn, 0.0, 0, 0.1, 1.0)


@gain
def nearly_always(fn):
    """alpha just below 1 differs hardly from alpha = 1"""
    check_gain(fn, 1 - 1e-6, 5, 0.02, 1.5)


@gain
def any_numbers(fn):
    """any numbers, slower than plain decoding too"""
    random = Random(seeded(5))
    for _ in range(20):
        check_gain(fn, round(random.random(), 3), random.randint(1, 12), random.random(), 1 + 3 * random.random())
