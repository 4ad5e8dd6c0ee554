"""Task 6 of exercise 10: what binds each row of a profile, and what it is worth to make one faster."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random

from minillm.lab.check import seeded
from minillm.lab.checks.ch03 import expect_named, expect_tuple
from minillm.lab.checks.ch10.base import CHAPTER, ProfileRow
from minillm.lab.roofline import Limits, Work

profiles = CHAPTER.task(
    "read_profile",
    hints=(
        "Take one row. What is the least time that its work needs here, all calls together? And how long did it take?",
        "Far from both limits: longer than `far` times the longer of the two least times. Then neither limit binds.",
        "Otherwise the limit with the longer least time binds.",
        "Amdahl: the whole is the sum of all rows. Only one of them becomes x times shorter; divide old by new.",
    ),
)


def check_profile(fn: Callable, rows: Sequence[ProfileRow], limits: Limits, far: float, x: float) -> None:
    label = f"x = {x:g}, far = {far:g}, {limits.flops:g} FLOP/s, {limits.bandwidth:g} bytes/s"
    given = list(rows)
    got = fn(given, limits, far, x)
    assert given == list(rows), f"{label}: your function changed the list: that belongs to the caller"
    assert got is not None, f"{label}: your function returned None; is a `return` missing?"
    assert isinstance(got, list), f"{label}: expected a list of pairs, got {type(got).__name__}"
    assert len(got) == len(rows), f"{label}: {len(got)} pairs, expected {len(rows)}: one for each row, in their order"
    for i, (row, pair) in enumerate(zip(rows, got, strict=True)):
        where = f"row {row.name!r} ({row.calls} calls, {row.microseconds:g} us), {label}"
        bound, whole = expect_tuple(pair, ("what binds", "times as fast"), where)
        check_bound(bound, row, limits, far, where)
        check_whole(whole, rows, i, x, where)


def which(arithmetic: float, memory: float, took: float, far: float) -> str:
    if took > far * max(arithmetic, memory):
        return "overhead"
    return "compute" if arithmetic >= memory else "memory"


def check_bound(got: object, row: ProfileRow, limits: Limits, far: float, where: str) -> None:
    words = ("compute", "memory", "overhead")
    assert got in words, f"what binds {where}: yours {got!r}, expected one of {', '.join(words)}"
    work, took = Work(row.calls * row.flops, row.calls * row.bytes), row.microseconds / 1e6
    arithmetic, memory = work.flops / limits.flops, work.bytes / limits.bandwidth
    want = which(arithmetic, memory, took, far)
    if got == want:
        return
    mistakes = {
        "with the work of one call against the time of all": which(
            arithmetic / row.calls, memory / row.calls, took, far
        ),
        "with the time divided by the calls, and the work not": which(arithmetic, memory, took / row.calls, far),
        "if being far from both limits did not count": "compute" if arithmetic >= memory else "memory",
        "with the shorter of the two least times for both questions": (
            "overhead" if took > far * min(arithmetic, memory) else "compute" if arithmetic >= memory else "memory"
        ),
        "when exactly `far` times as long is far already": which(
            arithmetic, memory, math.nextafter(took, math.inf), far
        ),
        "with the two limits exchanged": which(memory, arithmetic, took, far),
    }
    made = [name for name, word in mistakes.items() if word == got]
    named = f"; yours is what comes out {', or '.join(made)}" if made else ""
    least = max(arithmetic, memory)
    times = f"{took / least:.4g} times the longer" if least else "and no work at all"
    raise AssertionError(
        f"what binds {where}: yours {got!r}, expected {want!r}: its arithmetic needs at least "
        f"{1e6 * arithmetic:.6g} us, its bytes {1e6 * memory:.6g} us; it took {row.microseconds:g} us, {times}{named}"
    )


def check_whole(got: object, rows: Sequence[ProfileRow], i: int, x: float, where: str) -> None:
    row = rows[i]
    total = math.fsum(r.microseconds for r in rows)
    others = math.fsum(r.microseconds for r in [*rows[:i], *rows[i + 1 :]])
    share = row.microseconds / total
    want = total / (others + row.microseconds / x)
    calls = sum(r.calls for r in rows)
    by_calls, per_call = row.calls / calls, (row.microseconds / row.calls) / sum(r.microseconds / r.calls for r in rows)
    expect_named(
        got,
        want,
        f"times as fast, {where}",
        {
            "when the whole becomes as much faster as the row": x,
            "for the whole if the row took no time at all": 1 / (1 - share) if share < 1 else math.inf,
            "the other way round: the new time over the old": 1 / want,
            "when gains are averaged by their shares: times are to be added, not rates": 1 - share + share * x,
            "if the row and all others changed places": 1 / (share + (1 - share) / x),
            "for the time of one call: microseconds are those of all calls": 1 / (1 - per_call + per_call / x),
            "when microseconds are multiplied by calls: they are those of all calls": whole_by_product(rows, row, x),
            "with the share of the calls in place of the share of the time": 1 / (1 - by_calls + by_calls / x),
            "with equal shares for all rows": 1 / (1 - 1 / len(rows) + 1 / len(rows) / x),
        },
    )


def whole_by_product(rows: Sequence[ProfileRow], row: ProfileRow, x: float) -> float:
    share = row.microseconds * row.calls / sum(r.microseconds * r.calls for r in rows)
    return 1 / (1 - share + share / x)


MACHINE = Limits("a machine", 1e12, 1e11)  # a million FLOP, or a hundred thousand bytes, take 1 us
BINARY = Limits("round numbers of two", 2.0**20, 2.0**16)

READING = ProfileRow("weights", 30, 700, 2e6, 2e6)  # 30 calls: 60 us of arithmetic, 600 us of bytes
ARITHMETIC = ProfileRow("prefill", 4, 450, 1e8, 1e6)  # 400 us of arithmetic, 40 us of bytes
SMALL_OPS = ProfileRow("norms", 61, 800, 2e3, 5e3)  # 0.1 us and 3 us
NO_WORK = ProfileRow("waiting", 5, 50, 0, 0)


@profiles
def one_of_each(fn):
    """a row for each of the three answers"""
    check_profile(fn, [READING, ARITHMETIC, SMALL_OPS], MACHINE, 4, 2)


@profiles
def calls_count(fn):
    """work is that of one call, microseconds are those of all"""
    many, one = ProfileRow("many calls", 100, 300, 1e4, 2e5), ProfileRow("one call", 1, 300, 1e8, 2e5)
    check_profile(fn, [many, one], MACHINE, 5, 3)
    check_profile(fn, [ProfileRow("far away", 50, 900, 1e4, 1e5), one], MACHINE, 5, 3)


@profiles
def no_work(fn):
    """a row without any work, one without FLOP, one without bytes"""
    rows = [NO_WORK, ProfileRow("copy", 2, 30, 0, 1e6), ProfileRow("sum", 3, 30, 6e6, 0)]
    check_profile(fn, rows, MACHINE, 4, 10)


@profiles
def what_far_means(fn):
    """the same row is far from the limits or not, as `far` says; at exactly that distance it is not"""
    product = ProfileRow("product", 1, 4e6, 2.0**20, 2.0**11)  # at least 1 s for its arithmetic, 4 s taken
    copy = ProfileRow("copy", 1, 4e6, 2.0**11, 2.0**16)  # at least 1 s for its bytes, 4 s taken
    for far in (3.9, 4 * (1 - 1e-7), 4, 4.1):
        check_profile(fn, [product, copy, READING], BINARY, far, 2)


@profiles
def both_limits(fn):
    """where both limits are met at once, compute is the answer"""
    check_profile(fn, [ProfileRow("at the ridge", 1, 1e6, 2.0**20, 2.0**16), NO_WORK], BINARY, 4, 2)


@profiles
def amdahl(fn):
    """a small row gains little, even if it takes no time at all"""
    for x in (1, 1.5, 10, 1e9, math.inf):
        check_profile(fn, [READING, SMALL_OPS, NO_WORK], MACHINE, 4, x)


@profiles
def made_slower(fn):
    """x below 1: the row becomes slower, and the whole too"""
    check_profile(fn, [READING, ARITHMETIC, SMALL_OPS], MACHINE, 4, 0.5)


@profiles
def one_row(fn):
    """a single row is the whole; an empty profile has no rows"""
    check_profile(fn, [ARITHMETIC], MACHINE, 4, 7)
    check_profile(fn, [], MACHINE, 4, 7)


@profiles
def twice_the_same(fn):
    """two rows of the same name are two rows"""
    check_profile(fn, [READING, READING._replace(microseconds=900.0), READING], MACHINE, 4, 3)


@profiles
def any_profile(fn):
    """any profile"""
    random = Random(seeded(6))
    for _ in range(20):
        rows = [
            ProfileRow(
                f"row {i}", random.randint(1, 60), 10 ** random.uniform(1, 4), 10 ** random.uniform(3, 8),
                10 ** random.uniform(3, 7),
            )
            for i in range(random.randint(2, 6))
        ]  # fmt: skip
        check_profile(fn, rows, MACHINE, random.uniform(2, 10), random.uniform(0.5, 20))
