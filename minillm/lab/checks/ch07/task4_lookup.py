"""Task 4 of exercise 07: guesses that are looked up in the text itself."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from minillm.lab.check import seeded
from minillm.lab.checks.ch07.base import CHAPTER, require_tokens

lookup = CHAPTER.task(
    "look_up",
    hints=(
        "Take the text's last n tokens. Where else do they stand? What followed them there?",
        "They always stand at the very end, where nothing follows. How far to the right may a place begin?",
        "Two loops: n from the longest down, and for each n the places from right to left. The first hit wins.",
        "A slice that goes beyond a list's end is only shorter. An index that does raises an error.",
    ),
)


def places(tokens: list[int], n: int) -> list[int]:
    """Where the last n tokens stand, with at least one token behind them."""
    return [at for at in range(len(tokens) - n) if tokens[at : at + n] == tokens[-n:]]


def found(tokens: list[int], sizes: list[int], count: int, which: int = -1) -> list[int]:
    """What follows the first size that is found, at its last place (or another)."""
    for n in sizes:
        if at := places(tokens, n):
            return tokens[at[which] + n :][:count]
    return []


def known_mistakes(tokens: list[int], most: int, count: int) -> dict[str, list[int]]:
    size = len(tokens)
    sizes = [n for n in range(most, 0, -1) if n < size]
    used = next((n for n in sizes if places(tokens, n)), 0)
    at = places(tokens, used)[-1:] if used else []
    right = found(tokens, sizes, count)
    apart = [tokens[p[-1] + n :][:count] for n in sizes if (p := [a for a in places(tokens, n) if a + 2 * n <= size])]
    return {
        "what comes out if the last tokens are found at the end itself, where nothing follows": [],
        "what followed the first place; the last one, nearest to the end, is wanted": found(tokens, sizes, count, 0),
        "what follows a single token; a longer match, if there is one, goes first": found(tokens, [1], count),
        "what comes out if no shorter match is tried": found(tokens, sizes[:1], count),
        "the matched tokens themselves, and not what follows them": tokens[at[0] : at[0] + count] if at else [],
        "what follows, without its first token": tokens[at[0] + used + 1 :][:count] if at else [],
        "what follows, with one token too few": right[:-1],
        "as many tokens as were matched, and not `count`": found(tokens, sizes, used),
        "more than `count`: the text up to its end": found(tokens, sizes, len(tokens)),
        "the guess padded to `count`": right + right[-1:] * (count - len(right)),
        "a place that does not touch the last tokens; it may overlap them": apart[0] if apart else [],
    }


def check_lookup(fn: Callable, tokens: list[int], most: int, count: int) -> None:
    label = f"text {tokens}, at most {most} tokens to match, count {count}"
    before = list(tokens)
    got = require_tokens(fn(tokens, most, count), label)
    assert tokens == before, f"{label}: your function changed the text"
    want = found(tokens, [n for n in range(most, 0, -1) if n < len(tokens)], count)
    if got == want:
        return
    made = [text for text, answer in known_mistakes(tokens, most, count).items() if answer == got]
    named = f"; yours is {', or '.join(made)}" if made else ""
    assert len(got) <= count, f"{label}: {len(got)} guesses, {got}, expected {want}{named}"
    raise AssertionError(f"{label}: yours {got}, expected {want}{named}")


@lookup
def the_example(fn):
    """what followed the last tokens where they stood before"""
    check_lookup(fn, [5, 6, 7, 8, 9, 5, 6], 3, 2)
    check_lookup(fn, [5, 6, 7, 8, 9, 5, 6], 2, 3)


@lookup
def the_last_place(fn):
    """several places: the one nearest to the end"""
    check_lookup(fn, [1, 2, 30, 31, 1, 2, 40, 41, 1, 2], 2, 2)


@lookup
def the_longest_match(fn):
    """the longest match first, even if a shorter one stands nearer to the end"""
    check_lookup(fn, [7, 1, 2, 30, 31, 2, 40, 41, 7, 1, 2], 3, 2)
    check_lookup(fn, [7, 1, 2, 30, 31, 2, 40, 41, 7, 1, 2], 1, 2)


@lookup
def a_shorter_match(fn):
    """if the longest is not found, a shorter one"""
    check_lookup(fn, [4, 2, 30, 31, 9, 8, 2], 3, 2)


@lookup
def overlapping(fn):
    """a place may overlap the last tokens; it may not be them"""
    check_lookup(fn, [4, 4, 6, 4, 4, 5, 4, 4, 4], 2, 2)
    check_lookup(fn, [3, 3, 3, 3], 2, 2)
    check_lookup(fn, [1, 2, 1, 2, 1], 3, 3)
    check_lookup(fn, [9, 9], 3, 4)


@lookup
def the_end_of_the_text(fn):
    """where fewer than `count` tokens follow, only those"""
    check_lookup(fn, [5, 6, 7, 5, 6], 2, 10)
    check_lookup(fn, [4, 4], 1, 3)


@lookup
def nothing_found(fn):
    """no match, or a text too short: no guess"""
    check_lookup(fn, [1, 2, 3, 4], 3, 2)
    check_lookup(fn, [1], 3, 2)
    check_lookup(fn, [5, 6, 5], 3, 0)


@lookup
def any_text(fn):
    """any text, any sizes"""
    random = Random(seeded(3))
    for _ in range(60):
        tokens = [random.randrange(3) for _ in range(random.randint(1, 14))]
        check_lookup(fn, tokens, random.randint(1, 4), random.randint(1, 5))
