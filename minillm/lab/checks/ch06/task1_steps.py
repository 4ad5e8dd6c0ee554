"""Task 1 of exercise 06: how many steps static and continuous batching take for texts of known lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random

from minillm.lab.check import seeded
from minillm.lab.checks.ch03 import expect_named, expect_tuple
from minillm.lab.checks.ch06.base import CHAPTER

steps = CHAPTER.task(
    "batch_steps",
    hints=(
        "Draw a row for each place of the batch and a column for each step, and fill it in by hand for the example.",
        "Static: a batch lasts as long as its longest text. Continuous: which place is free first?",
        "Keep for each place the step at which it is free. The next text takes the smallest of these numbers.",
    ),
)


def oracle_steps(lengths: Sequence[int], batch_size: int, joins: bool) -> int:
    """Token by token. joins: whether a place is taken again before the whole batch is done."""
    waiting, running, count = list(lengths), [], 0
    while waiting or running:
        if joins or not running:
            while waiting and len(running) < batch_size:
                running.append(waiting.pop(0))
        running = [left - 1 for left in running if left > 1]
        count += 1
    return count


def check_steps(fn: Callable, lengths: list[int], batch_size: int) -> None:
    label = f"lengths {lengths}, batch of {batch_size}"
    got = expect_tuple(fn(list(lengths), batch_size), ("static steps", "continuous steps"), label)
    batches = [lengths[i : i + batch_size] for i in range(0, len(lengths), batch_size)]
    full = [batch for batch in batches if len(batch) == batch_size]
    total, longest = sum(lengths), max(lengths, default=0)
    known = "nobody knows the lengths before"
    expect_named(
        got[0],
        oracle_steps(lengths, batch_size, joins=False),
        f"static steps, {label}",
        {
            "when the last batch, which is not full, is left out": sum(max(batch) for batch in full),
            "when a batch ends with its shortest text": sum(min(batch) for batch in batches),
            "when a batch takes the mean of its texts": sum(sum(batch) / len(batch) for batch in batches),
            "when every batch takes as long as the longest text of all": longest * len(batches),
            "when all batches run at the same time": longest,
            "when the texts run one after another": total,
            f"when the longest texts are put together: {known}": oracle_steps(sorted(lengths), batch_size, False),
            f"when the texts are sorted, the longest first: {known}": oracle_steps(
                sorted(lengths, reverse=True), batch_size, False
            ),
        },
    )
    expect_named(
        got[1],
        oracle_steps(lengths, batch_size, joins=True),
        f"continuous steps, {label}",
        {
            "when no place is ever idle: at the end there is nobody to fill them": math.ceil(total / batch_size),
            "when no place is ever idle, and steps are cut in pieces": total / batch_size,
            "when the largest of two lower bounds is taken": max(longest, math.ceil(total / batch_size)),
            "when a free place stays empty for a step": oracle_steps([n + 1 for n in lengths], batch_size, True) - 1,
            "when text i has to wait for place i % batch size": max(
                (sum(lengths[i::batch_size]) for i in range(batch_size)), default=0
            ),
            "when nobody joins before the whole batch is done": oracle_steps(lengths, batch_size, False),
            f"when the longest text is served first: {known}": oracle_steps(
                sorted(lengths, reverse=True), batch_size, True
            ),
            f"when the shortest text is served first: {known}": oracle_steps(sorted(lengths), batch_size, True),
        },
    )


@steps
def the_example(fn):
    """ragged lengths: a place that is free is taken at the next step"""
    check_steps(fn, [4, 1, 7, 2, 9], 3)
    check_steps(fn, [4, 1, 1, 4], 2)


@steps
def a_long_last_one(fn):
    """a long text that comes last leaves the other places idle"""
    check_steps(fn, [1, 1, 5], 2)
    check_steps(fn, [3, 2, 2, 2, 9], 3)


@steps
def equal_lengths(fn):
    """equal lengths: nothing is gained"""
    check_steps(fn, [3] * 4, 2)
    check_steps(fn, [3] * 5, 2)


@steps
def edges(fn):
    """one text, a batch of one, a batch larger than the number of texts, no text"""
    check_steps(fn, [7], 4)
    check_steps(fn, [2, 5, 1], 1)
    check_steps(fn, [2, 5, 1], 8)
    check_steps(fn, [], 3)


@steps
def any_lengths(fn):
    """any lengths, any batch"""
    random = Random(seeded(0))
    for _ in range(20):
        lengths = [random.choice([1, 2, 3, 20]) for _ in range(random.randint(1, 15))]
        check_steps(fn, lengths, random.randint(1, 5))
