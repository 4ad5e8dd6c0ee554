"""Task 3 of exercise 10: the largest batch that fits and meets a goal."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from minillm.config import ModelConfig
from minillm.lab.catalogue import MODELS
from minillm.lab.checks.ch03 import expect_tuple
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
from minillm.lab.kv_memory import Text, paged_room
from minillm.lab.roofline import Limits, gpu_limits, step_work

batches = CHAPTER.task(
    "batch_for_goal",
    hints=(
        "Two conditions, and both get harder with each text: room in whole blocks, and the time of a step.",
        "A step writes a new token for each text: how many tokens does a text keep then?",
        "Begin with no text, and add one as long as both conditions hold for one more.",
        "Where you stop, ask which condition one text more would break, the room first.",
    ),
)


def seconds_of(c: ModelConfig, batch: int, past: int, size: float, kv: float, limits: Limits) -> float:
    return step_work(c, 1, past, batch, weight_bytes=size, kv_bytes=kv).seconds(limits)


def check_batch(
    fn: Callable, c: ModelConfig, context: int, blocks: int, block_size: int, goal: float, size: float, kv: float,
    limits: Limits,
) -> None:  # fmt: skip
    label = (
        f"{context} tokens a text, {blocks} blocks of {block_size}, goal {goal:g} s ({limits.name}, weights of "
        f"{size:g} bytes, keys of {kv:g})"
    )
    got = expect_tuple(
        fn(c, context, blocks, block_size, goal, size, kv, limits), ("texts", '"memory" or "goal"'), label
    )
    each = paged_room(block_size)(Text(context, 2)) // block_size  # the new token is kept too, the next one is not

    def seconds(batch: int) -> float:
        return seconds_of(c, batch, context, size, kv, limits)

    def largest(fits: Callable[[int], bool]) -> int:
        return next(b for b in count() if b >= 3000 or not fits(b + 1))

    by_room, by_goal = blocks // each, largest(lambda b: seconds(b) <= goal)
    want = min(by_room, by_goal)
    limit = "memory" if (want + 1) * each > blocks else "goal"
    batch = expect_whole(got[0], f"texts, {label}")
    assert batch >= 0, f"texts, {label}: yours {batch}, expected {want}: a batch is never negative"
    if batch != want:
        mistakes = {
            "if only the room counted": by_room,
            "if only the goal counted": by_goal,
            "if texts shared blocks": min(blocks * block_size // (context + 1), by_goal),
            "if the new token needed no room": min(blocks // -(-context // block_size), by_goal),
            "if a text's last block, which is not full, were left out": min(
                blocks // ((context + 1) // block_size or 1), by_goal
            ),
            "if slots were taken for blocks": min(blocks // (context + 1), by_goal),
            "when the goal has to be beaten, and not just met": min(by_room, largest(lambda b: seconds(b) < goal)),
            "when the step's time is divided by its texts": min(by_room, largest(lambda b: seconds(b) / b <= goal)),
            "if each text read the weights for itself": min(by_room, int(goal / seconds(1))),
            "with the time of a step of one text": min(by_room, largest(lambda b: seconds(1) <= goal)),
            "when a step has no past": min(by_room, largest(lambda b: seconds_of(c, b, 0, size, kv, limits) <= goal)),
            "with step_work's own 4 bytes for both": min(
                by_room, largest(lambda b: seconds_of(c, b, context, 4, 4, limits) <= goal)
            ),
            "with the two sizes exchanged": min(
                by_room, largest(lambda b: seconds_of(c, b, context, kv, size, limits) <= goal)
            ),
            "when one text too many is counted: the last one that was tried did not hold": want + 1,
            "when one text is counted in any case": max(want, 1),
        }
        over = batch if batch > want else batch + 1
        facts = f"a batch of {over} takes {over * each} of {blocks} blocks and {seconds(over):.6g} s a step"
        made = blamed((batch,), {name: lambda n=n: (n,) for name, n in mistakes.items()})
        raise AssertionError(f"texts, {label}: yours {batch}, expected {want}: {facts}{made}")
    known = got[1] in ("memory", "goal")
    assert known, f'what stops the batch, {label}: yours {got[1]!r}, expected one of "memory" and "goal"'
    facts = f"one text more takes {(want + 1) * each} of {blocks} blocks and {seconds(want + 1):.6g} s"
    assert got[1] == limit, f"what stops the batch of {want}, {label}: yours {got[1]!r}, expected {limit!r}: {facts}"


@batches
def room_ends_first(fn):
    """the room ends first"""
    check_batch(fn, SMALL, 100, 90, 16, 1.0, 2, 2, SLOW_MEMORY)
    check_batch(fn, TIED, 33, 47, 8, 30.0, 0.5, 2, SLOW_ARITHMETIC)


@batches
def goal_ends_first(fn):
    """the goal ends first"""
    check_batch(fn, SMALL, 100, 900, 16, 0.9, 2, 1, SLOW_MEMORY)
    check_batch(fn, TIED, 60, 5000, 16, 7.7, 0.5, 2, SLOW_ARITHMETIC)


@batches
def the_new_token(fn):
    """the new token needs a slot too"""
    check_batch(fn, SMALL, 32, 60, 16, 5.0, 2, 2, SLOW_MEMORY)
    check_batch(fn, SMALL, 31, 61, 16, 5.0, 2, 2, SLOW_MEMORY)


@batches
def small_texts(fn):
    """texts that are shorter than a block"""
    check_batch(fn, SMALL, 5, 23, 64, 3.0, 2, 2, SLOW_MEMORY)


@batches
def met_exactly(fn):
    """a goal that is met exactly is met, and one just below is not"""
    goal = seconds_of(SMALL, 6, 40, 2, 2, BINARY)
    check_batch(fn, SMALL, 40, 500, 16, goal, 2, 2, BINARY)
    check_batch(fn, SMALL, 40, 500, 16, goal * (1 - 1e-9), 2, 2, BINARY)


@batches
def full_exactly(fn):
    """blocks that are used to the last one, with the goal just met: the room stops it"""
    goal = seconds_of(SMALL, 6, 40, 2, 2, BINARY)
    check_batch(fn, SMALL, 40, 18, 16, goal, 2, 2, BINARY)
    check_batch(fn, SMALL, 40, 17, 16, goal, 2, 2, BINARY)


@batches
def not_one(fn):
    """where a single text does not fit, or is too slow, the batch is 0"""
    check_batch(fn, SMALL, 100, 5, 16, 100.0, 2, 2, SLOW_MEMORY)
    check_batch(fn, SMALL, 100, 700, 16, 0.001, 2, 2, SLOW_MEMORY)
    check_batch(fn, SMALL, 100, 0, 16, 0.001, 2, 2, SLOW_MEMORY)


@batches
def a_real_gpu(fn):
    """Llama-3.1-8B on an L4, weights of 4.5 bits"""
    check_batch(fn, MODELS["Llama-3.1-8B"], 1300, 8000, 16, 0.06, 4.5 / 8, 2, gpu_limits("L4"))
    check_batch(fn, MODELS["Llama-3.1-8B"], 1300, 3000, 16, 0.06, 4.5 / 8, 2, gpu_limits("L4"))
