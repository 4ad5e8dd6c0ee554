"""Task 5 of exercise 10: which of the measured quantizations to take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from minillm.lab.check import seeded
from minillm.lab.checks.ch10.base import CHAPTER, Option

choice = CHAPTER.task(
    "choose_quantization",
    hints=(
        "First cross out what is not admitted, then choose among the rest. What if nothing is left?",
        "Three conditions: bytes in the room, a step within the goal, and a loss that is clearly below the limit.",
        "A loss is known up to its error. Clearly below: even two standard errors more would not reach the limit.",
        "The smallest number of bits wins; between equals, the smaller loss. The order of the list says nothing.",
    ),
)


def faults(option: Option, parameters: int, room: float, goal: float, limit: float) -> list[str]:
    """Why an option is not admitted."""
    found = []
    size = sum(option.bits for _ in range(8)) * parameters / 64
    if size > room:
        found.append(f"it takes {size:,.0f} bytes, and there is room for {room:,.0f}")
    if option.seconds > goal:
        found.append(f"a step takes {option.seconds:g} s, and the goal is {goal:g}")
    if not limit - option.loss > option.error + option.error:
        upper = option.loss + 2 * option.error
        found.append(
            f"it loses {option.loss:g} nats with a standard error of {option.error:g}: two errors more are {upper:g}, "
            f"and that is not below {limit:g}"
        )
    return found


def check_choice(
    fn: Callable, options: Sequence[Option], parameters: int, room: float, goal: float, limit: float
) -> None:
    label = (
        f"options {[tuple(o) for o in options]}, {parameters} weights, room {room:g}, goal {goal:g}, limit {limit:g}"
    )
    given = list(options)
    got = fn(given, parameters, room, goal, limit)
    assert given == list(options), f"{label}: your function changed the list: that belongs to the caller"
    left = [o for o in options if not faults(o, parameters, room, goal, limit)]
    want = None
    for option in left:
        if want is None or option.bits < want.bits or (option.bits == want.bits and option.loss < want.loss):
            want = option
    expected = f"expected {want and want.name!r}"
    if got is None:
        assert want is None, f"{label}: yours None, {expected}, which is admitted"
        return
    assert isinstance(got, str), f"{label}: expected the name of an option or None, got {got!r}"
    (mine,) = [o for o in options if o.name == got] or [None]
    assert mine is not None, f"{label}: there is no option {got!r}; {expected}"
    wrong = faults(mine, parameters, room, goal, limit)
    assert not wrong, f"{label}: yours {got!r}, {expected}: {'; '.join(wrong)}"
    assert mine.bits == want.bits, (
        f"{label}: yours {got!r} has {mine.bits:g} bits, {expected}, which is admitted and smaller ({want.bits:g} bits)"
    )
    assert got == want.name, (
        f"{label}: yours {got!r} loses {mine.loss:g}, {expected}, which has as many bits and loses less ({want.loss:g})"
    )


FINE = Option("8 bits", 8.5, 0.004, 0.002, 0.02)
GOOD = Option("4 bits", 4.5, 0.1, 0.01, 0.012)
ROUGH = Option("3 bits", 3.5, 0.7, 0.02, 0.01)
WIDE = 10**9, 1.0  # room and goal that admit everything


@choice
def the_smallest(fn):
    """the smallest that is admitted, wherever it stands"""
    for options in ((FINE, GOOD, ROUGH), (ROUGH, GOOD, FINE), (GOOD, FINE, ROUGH), (FINE, ROUGH, GOOD)):
        check_choice(fn, options, 1000, *WIDE, 0.2)
        check_choice(fn, options, 1000, *WIDE, 0.05)
        check_choice(fn, options, 1000, *WIDE, 2.0)


@choice
def clearly_below(fn):
    """clearly below the limit: by more than two standard errors"""
    unsure = Option("a few texts", 3.0, 0.1, 0.04, 0.01)
    check_choice(fn, (unsure, GOOD, FINE), 1000, *WIDE, 0.15)
    check_choice(fn, (unsure, GOOD, FINE), 1000, *WIDE, 0.17)
    check_choice(fn, (unsure, GOOD, FINE), 1000, *WIDE, 0.19)
    check_choice(fn, (unsure, FINE), 1000, *WIDE, 0.11)


@choice
def at_the_limit(fn):
    """two standard errors that reach the limit exactly are not below it"""
    exact = Option("at the limit", 3.0, 0.25, 0.125, 0.01)
    check_choice(fn, (exact, FINE), 1000, *WIDE, 0.5)


@choice
def the_room(fn):
    """bytes, not bits; a room that is filled exactly is enough"""
    check_choice(fn, (FINE,), 1600, 1700, 1.0, 0.2)
    check_choice(fn, (FINE,), 1600, 1699, 1.0, 0.2)
    check_choice(fn, (FINE, GOOD), 1600, 1000, 1.0, 0.2)
    check_choice(fn, (FINE, GOOD), 1600, 899, 1.0, 0.2)


@choice
def small_and_slow(fn):
    """the smallest may be the slowest: the goal rules it out"""
    slow = Option("3 bits, slow", 3.25, 0.05, 0.01, 0.03)
    check_choice(fn, (GOOD, slow, FINE), 1000, 10**9, 0.025, 0.2)
    check_choice(fn, (GOOD, slow, FINE), 1000, 10**9, 0.03, 0.2)
    check_choice(fn, (slow, FINE), 1000, 10**9, 0.02, 0.2)


@choice
def as_many_bits(fn):
    """between equal bits the smaller loss, whatever its error"""
    plain, clever = Option("plain", 4.5, 0.12, 0.001, 0.012), Option("clever", 4.5, 0.11, 0.03, 0.013)
    check_choice(fn, (plain, clever, FINE), 1000, *WIDE, 0.2)
    check_choice(fn, (clever, plain, FINE), 1000, *WIDE, 0.2)
    check_choice(fn, (clever, plain, FINE), 1000, *WIDE, 0.15)


@choice
def nothing_left(fn):
    """nothing is admitted, or nothing is there: None"""
    check_choice(fn, (ROUGH, GOOD), 1000, *WIDE, 0.05)
    check_choice(fn, (FINE, GOOD), 1000, 1000, 0.001, 0.5)
    check_choice(fn, (), 1000, *WIDE, 0.5)


@choice
def below_none(fn):
    """a loss below 0: the measurement found it better than the model as it is"""
    check_choice(fn, (Option("lucky", 6.0, -0.01, 0.004, 0.02), FINE), 1000, *WIDE, 0.0)


@choice
def any_list(fn):
    """any list"""  # of numbers that cannot meet the limit exactly, where rounding would decide
    random = Random(seeded(5))
    for _ in range(40):
        options = [
            Option(
                f"option {i}", random.choice((2.5, 3.5, 4.5, 8.5)), round(random.random(), 3),
                round(0.2 * random.random(), 3), round(random.random(), 3),
            )
            for i in range(6)
        ]  # fmt: skip
        check_choice(fn, options, 800, random.choice((300, 500, 900)), random.choice((0.5, 1.0)), 0.7995)
