"""Task 5 of exercise 07: what of a drafter's cache is still true after a round."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from minillm.lab.check import expect_equal, seeded
from minillm.lab.checks.ch03 import expect_tuple
from minillm.lab.checks.ch06.base import count_of, is_count
from minillm.lab.checks.ch07.base import CHAPTER, require_tokens

rewind = CHAPTER.task(
    "rewind_draft",
    hints=(
        "Write both lists below each other. Up to which place do they agree?",
        "A row depends on all tokens before it. After the first difference nothing in the cache is true any more.",
        "The next guess comes out of a pass of the model. So at least one token has to go in: which one?",
        "After a round in which every guess was accepted, how many tokens does the cache not hold?",
    ),
)


def common(cached: list[int], tokens: list[int]) -> int:
    n = 0
    while n < min(len(cached), len(tokens)) and cached[n] == tokens[n]:
        n += 1
    return n


def check_rewind(fn: Callable, cached: list[int], tokens: list[int], what: str) -> None:
    label = f"{what}: cache {cached}, text {tokens}"
    before = list(cached), list(tokens)
    got = expect_tuple(fn(cached, tokens), ("rows to keep", "tokens to feed"), label)
    assert (cached, tokens) == before, f"{label}: your function changed a list that it was given"
    keep, feed = got
    assert is_count(keep), f"{label}: rows to keep: expected a whole number, got {keep!r}"
    feed = require_tokens(feed, f"{label}: tokens to feed")
    same = common(cached, tokens)
    want = min(same, len(tokens) - 1)
    assert keep >= 0, f"{label}: {keep} rows to keep"
    assert keep <= len(cached), f"{label}: {count_of(keep, 'row')} to keep, and the cache holds {len(cached)}"
    if keep > same:
        there = f"the text has {tokens[same]} there" if same < len(tokens) else "the text ends before it"
        stale = f"row {same} was computed for token {cached[same]}, and {there}"
        raise AssertionError(f"{label}: {count_of(keep, 'row')} kept, expected {want}: {stale}: it is stale")
    assert keep < len(tokens), (
        f"{label}: all {keep} rows are kept and no token is left to feed: the last one goes in again, "
        "since the first guess comes out behind it"
    )
    again = f"tokens {tokens[keep:want]} are in the cache, and would be computed again"
    assert keep >= want, f"{label}: {count_of(keep, 'row')} kept, expected {want}: {again}"
    rest = tokens[want:]
    assert feed, f"{label}: no token to feed, expected {rest}"
    hole = len(feed) < len(rest) and feed == rest[len(rest) - len(feed) :]
    assert not hole, f"{label}: {feed} to feed, expected {rest}: the cache would have no row for {rest[: -len(feed)]}"
    twice = len(feed) > len(rest) and feed == tokens[len(tokens) - len(feed) :]
    assert not twice, f"{label}: {feed} to feed, expected {rest}: the first of them are in the cache already"
    expect_equal(feed, rest, f"{label}: tokens to feed")


@rewind
def a_rejection(fn):
    """a rejected guess, and what came after it, is forgotten"""
    check_rewind(fn, [1, 2, 3, 10, 11], [1, 2, 3, 10, 20], "guess 11 rejected")
    check_rewind(fn, [1, 2, 3, 10, 11, 12], [1, 2, 3, 20], "guess 10 rejected")


@rewind
def all_accepted(fn):
    """all accepted: the last guess never went in, so two tokens are fed"""
    check_rewind(fn, [1, 2, 3, 10, 11], [1, 2, 3, 10, 11, 12, 30], "12 accepted, 30 the bonus")


@rewind
def the_beginning(fn):
    """an empty cache takes the whole text"""
    check_rewind(fn, [], [1, 2, 3], "nothing there")
    check_rewind(fn, [], [1], "one token")


@rewind
def nothing_new(fn):
    """the cache holds the whole text: its last token goes in again"""
    check_rewind(fn, [1, 2, 3], [1, 2, 3], "asked twice")
    check_rewind(fn, [1, 2, 3, 4, 5], [1, 2, 3], "guesses behind the text")
    check_rewind(fn, [1], [1], "one token")


@rewind
def agreement_later_on(fn):
    """tokens that agree again after the first difference do not help"""
    check_rewind(fn, [1, 2, 9, 4, 5], [1, 2, 3, 4, 5, 6], "one token differs")
    check_rewind(fn, [9, 2, 3], [1, 2, 3, 4], "the first one differs")
    check_rewind(fn, [7, 8, 7], [7, 7, 8], "the same tokens in another order")


@rewind
def any_texts(fn):
    """any cache, any text"""
    random = Random(seeded(4))
    for _ in range(60):
        cached = [random.randrange(2) for _ in range(random.randint(0, 8))]
        start = cached[: random.randint(0, len(cached))]
        check_rewind(fn, cached, start + [random.randrange(2) for _ in range(random.randint(1, 4))], "any")
