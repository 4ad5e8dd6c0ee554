"""Task 4 of exercise 10: how many guesses a round should make, and where none is best."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from minillm.config import ModelConfig
from minillm.lab.catalogue import MODELS
from minillm.lab.check import expect_number, seeded
from minillm.lab.checks.ch03 import expect_tuple, near
from minillm.lab.checks.ch10.base import (
    BINARY,
    CHAPTER,
    SLOW_ARITHMETIC,
    SLOW_MEMORY,
    SMALL,
    TIED,
    blamed,
    expect_whole,
)
from minillm.lab.roofline import Limits, gpu_limits, step_work

guesses = CHAPTER.task(
    "choose_guesses",
    hints=(
        "Take one K. Which tokens does its round give, and what does the round cost? Then try every K.",
        "The cost of a round: K guesses, and one pass of K + 1 new tokens for each text, with logits for all of them.",
        "Times as fast: tokens a second of the round over tokens a second of a plain step. For K = 0 that is 1.",
        "K = 0 is one of the choices. Among equal ones the smallest is wanted.",
    ),
)


BETWEEN = Limits("between", 2e7, 1e6)


def tokens_a_round(alpha: float, k: int) -> float:
    """Over all lengths of a run of accepted guesses: probability times tokens."""
    stopped = [(alpha**n * (1 - alpha), n + 1) for n in range(k)]
    return sum(p * n for p, n in [*stopped, (alpha**k, k + 1)])


def check_guesses(
    fn: Callable, c: ModelConfig, batch: int, context: int, alpha: float, guess: float, most: int, size: float,
    kv: float, limits: Limits,
) -> None:  # fmt: skip
    label = (
        f"alpha = {alpha:g}, a guess of {guess:.6g} s, K up to {most}, a batch of {batch}, {context} tokens each "
        f"({limits.name}, weights of {size:g} bytes, keys of {kv:g})"
    )

    def verify(k: int, texts: int = batch, sampled: int | None = None) -> float:
        return step_work(c, k + 1, context, texts, sampled or k + 1, size, kv).seconds(limits)

    def times(k: int) -> float:
        return tokens_a_round(alpha, k) * verify(0) / (k * guess + verify(k))

    def best(of: Callable[[int], float]) -> tuple[int, float]:
        values = [of(k) for k in range(most + 1)]
        return next((k, v) for k, v in enumerate(values) if v >= max(values) * (1 - 1e-12))

    want = best(times)
    got = expect_tuple(fn(c, batch, context, alpha, guess, most, size, kv, limits), ("K", "times as fast"), label)
    k = expect_whole(got[0], f"K, {label}")
    assert 0 <= k <= most, f"K, {label}: yours {k}, expected {want[0]}: it lies between 0 and {most}"
    assert isinstance(got[1], (int, float)), f"times as fast, {label}: expected a number, got {got[1]!r}"
    mistakes = {
        "when the token that the model adds itself is missing": lambda k: (
            (tokens_a_round(alpha, k) - 1) * verify(0) / (k * guess + verify(k))
        ),
        "if guesses after a rejection counted too": lambda k: (1 + k * alpha) * verify(0) / (k * guess + verify(k)),
        "if every guess were accepted": lambda k: (k + 1) * verify(0) / (k * guess + verify(k)),
        "if either all guesses were accepted or none": lambda k: (
            (1 + k * alpha**k) * verify(0) / (k * guess + verify(k))
        ),
        "when the guesses cost nothing": lambda k: tokens_a_round(alpha, k) * verify(0) / verify(k),
        "when a round pays for one guess only": lambda k: (
            tokens_a_round(alpha, k) * verify(0) / (min(k, 1) * guess + verify(k))
        ),
        "when a round pays for K + 1 guesses": lambda k: (
            tokens_a_round(alpha, k) * verify(0) / ((k + 1) * guess + verify(k))
        ),
        "when verifying costs no more than a plain step": lambda k: (
            tokens_a_round(alpha, k) * verify(0) / (k * guess + verify(0))
        ),
        "when verifying takes K rows: it takes K + 1": lambda k: (
            tokens_a_round(alpha, k) * verify(0) / (k * guess + verify(max(k - 1, 0)))
        ),
        "when verifying takes K + 1 passes: it takes one": lambda k: (
            tokens_a_round(alpha, k) * verify(0) / (k * guess + (k + 1) * verify(0))
        ),
        "with logits for the last row only: every row is compared": lambda k: (
            tokens_a_round(alpha, k) * verify(0) / (k * guess + verify(k, sampled=1))
        ),
        "for a single text": lambda k: tokens_a_round(alpha, k) * verify(0, 1) / (k * guess + verify(k, 1)),
        "when guesses are paid for each text anew": lambda k: (
            tokens_a_round(alpha, k) * verify(0) / (k * guess * batch + verify(k))
        ),
        "when tokens of all texts are counted against a plain step of one": lambda k: (
            batch * tokens_a_round(alpha, k) * verify(0) / (k * guess + verify(k))
        ),
        "as tokens a round: their cost is missing": lambda k: tokens_a_round(alpha, k),
        "as tokens a second": lambda k: tokens_a_round(alpha, k) / (k * guess + verify(k)),
        "as seconds a token": lambda k: (k * guess + verify(k)) / tokens_a_round(alpha, k),
    }
    if near(got[1], times(k)) and k != want[0]:
        if near(got[1], want[1]):
            raise AssertionError(f"K, {label}: yours {k}, expected {want[0]}, which is as fast with fewer guesses")
        slower = ": slower than plain decoding, and 0 is a choice too" if want[0] == 0 else ""
        raise AssertionError(
            f"K, {label}: yours {k} is {got[1]:.6g} times as fast{slower}; expected {want[0]} ({want[1]:.6g} times)"
        )
    if k != want[0] or not near(got[1], want[1]):
        made = blamed((k, got[1]), {name: lambda of=of: best(of) for name, of in mistakes.items()})
        upside_down = near(got[1] * times(k), 1)
        made = made or ("; yours is the other way round: the times as slow" if upside_down else "")
        raise AssertionError(
            f"K and times as fast, {label}: yours ({k}, {got[1]:.6g}), expected ({want[0]}, {want[1]:.6g}){made}"
        )
    expect_number(got[1], want[1], f"times as fast, {label}", rtol=1e-9)


@guesses
def reading_is_the_limit(fn):
    """one text, memory is the limit: rows cost little, guesses pay"""
    check_guesses(fn, SMALL, 1, 60, 0.8, 0.002, 8, 2, 2, SLOW_MEMORY)
    check_guesses(fn, TIED, 3, 40, 0.6, 0.03, 6, 0.5, 2, SLOW_MEMORY)


@guesses
def arithmetic_is_the_limit(fn):
    """arithmetic is the limit: every row is paid for, and no guess is the best"""
    check_guesses(fn, SMALL, 4, 60, 0.8, 0.001, 6, 2, 2, SLOW_ARITHMETIC)


@guesses
def both_limits(fn):
    """reading is the limit of a plain step, arithmetic that of many rows: each row has its logits"""
    check_guesses(fn, TIED, 8, 40, 0.9, 0.01, 6, 2, 2, BETWEEN)
    check_guesses(fn, TIED, 5, 90, 0.8, 0.02, 6, 2, 2, BETWEEN)


@guesses
def dear_guesses(fn):
    """guesses that cost as much as a step: none is the best"""
    check_guesses(fn, TIED, 2, 30, 0.9, 1.2, 5, 2, 2, SLOW_MEMORY)


@guesses
def never_and_always(fn):
    """alpha = 0: no guess; alpha = 1: as many as allowed"""
    check_guesses(fn, SMALL, 2, 30, 0.0, 0.0, 5, 2, 2, SLOW_MEMORY)
    check_guesses(fn, SMALL, 2, 30, 1.0, 0.01, 5, 2, 2, SLOW_MEMORY)


@guesses
def none_allowed(fn):
    """K up to 0: plain decoding, 1 times as fast"""
    check_guesses(fn, SMALL, 2, 30, 0.9, 0.01, 0, 2, 2, SLOW_MEMORY)


@guesses
def no_gain(fn):
    """a guess that gains exactly nothing is not made"""
    plain, two = (step_work(SMALL, n, 40, 2, n, 2, 2).seconds(BINARY) for n in (1, 2))
    check_guesses(fn, SMALL, 2, 40, 0.5, 1.5 * plain - two, 1, 2, 2, BINARY)


@guesses
def any_numbers(fn):
    """any numbers"""
    random = Random(seeded(4))
    for _ in range(12):
        limits = Limits("some machine", 10 ** random.uniform(6, 10), 1e6)
        numbers = random.randint(1, 30), random.randint(1, 200), round(random.random(), 3), 0.2 * random.random()
        check_guesses(fn, TIED, *numbers, random.randint(1, 9), random.choice((0.5, 2)), 2, limits)


@guesses
def a_real_gpu(fn):
    """Llama-3.1-8B on an H100: guesses pay for few texts, and lose for many"""
    for batch in (1, 32, 512):
        check_guesses(fn, MODELS["Llama-3.1-8B"], batch, 1000, 0.7, 0.0004, 8, 2, 2, gpu_limits("H100 SXM"))
