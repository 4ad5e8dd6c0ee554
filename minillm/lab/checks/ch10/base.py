"""The chapter of exercise 10, what its functions are given, and what the checks of its tasks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from minillm.config import ModelConfig
from minillm.lab.check import Chapter
from minillm.lab.checks.ch03 import near
from minillm.lab.roofline import Limits

CHAPTER = Chapter("10")

# All sizes differ, so that no two mistakes come to the same number. The second one ties its embeddings.
SMALL = ModelConfig(56, 48, 3, 6, 2, 16, 80, 4096)
TIED = ModelConfig(1024, 64, 5, 8, 2, 32, 192, 4096, tied_embeddings=True)

SLOW_MEMORY = Limits("slow memory", 1e9, 1e6)
SLOW_ARITHMETIC = Limits("slow arithmetic", 1e6, 1e9)
BINARY = Limits("round numbers of two", 2.0**40, 2.0**20)  # times come out exact: a goal can be met to the last bit


class Option(NamedTuple):
    """A way to store the weights, as it was measured.

    bits: bits a weight, scales included. loss: nats a token above the model as it is. error: the standard error of
    that. seconds: of a decode step.
    """

    name: str
    bits: float
    loss: float
    error: float
    seconds: float


class ProfileRow(NamedTuple):
    """One line of a profile. microseconds: of all its calls together. flops, bytes: of one call."""

    name: str
    calls: int
    microseconds: float
    flops: float
    bytes: float


def expect_whole(got: object, label: str) -> int:
    """An int that is no bool."""
    assert got is not None, f"{label}: your function returned None; is a `return` missing?"
    whole = isinstance(got, int) and not isinstance(got, bool)
    assert whole, f"{label}: {got!r} is no whole number (int)"
    return got


def blamed(got: tuple, mistakes: Mapping[str, Callable[[], tuple]]) -> str:
    """The names of the mistakes that give this pair, behind a semicolon; nothing if there is none."""
    made = [name for name, make in mistakes.items() if same(got, make())]
    return f"; yours is what comes out {', or '.join(made)}" if made else ""


def same(a: tuple, b: tuple) -> bool:
    return all(x == y or (not isinstance(x, str) and near(x, y)) for x, y in zip(a, b, strict=True))
