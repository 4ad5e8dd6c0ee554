"""Task 3 of exercise 06: a prompt in chunks, beside texts that go on."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from minillm.lab.check import seeded
from minillm.lab.checks.ch06.base import CHAPTER, Watched, count_of, is_count

chunk = CHAPTER.task(
    "chunk_prompt",
    hints=(
        "For each step ask first: which of the running texts still write? What is left of the budget?",
        "A chunk ends after as many tokens as are left, or at the end of the prompt, whichever comes first.",
        "Each row of the last chunk but its last says nothing that is needed; so how many tokens does a chunk give?",
    ),
)


def check_chunks(fn: Callable, n_prompt: int, decodes: list[int], budget: int) -> None:
    """Follow the steps, and say at the first that is wrong what is wrong with it."""
    label = f"chunk_prompt({n_prompt}, {decodes}, {budget})"
    got = fn(n_prompt, Watched(decodes), budget)
    assert got is not None, f"{label}: your function returned None; is a `return` missing?"
    assert isinstance(got, list), f"{label}: expected a list of steps, got {type(got).__name__}"
    at = step = 0
    while at < n_prompt:
        where = f"{label}, step {step}"
        assert step < len(got), f"{label}: after your last step {at} of {n_prompt} tokens of the prompt are computed"
        right = isinstance(got[step], tuple) and len(got[step]) == 3 and all(is_count(x) for x in got[step])
        assert right, f"{where}: expected (start, end, tokens that come out), got {got[step]!r}"
        start, end, out = got[step]
        writing = sum(1 for left in decodes if left > step)
        room = budget - writing
        assert start == at, f"{where}: starts at {start}, but the tokens up to {at} are computed, and no others"
        assert start <= end, f"{where}: ends at {end}, before it starts"
        assert end <= n_prompt, f"{where}: ends at {end}, behind the prompt's {n_prompt} tokens"
        full = f"{count_of(writing, 'running text')}, a budget of {budget}: the prompt gets nothing in this step"
        assert room or end == start, f"{where}: {full}, and the step counts; expected {(at, at, writing)}"
        beside = f"{count_of(end - start, 'token')} of the prompt beside {count_of(writing, 'running text')}"
        assert end - start <= room, f"{where}: {beside}: more than the budget of {budget}"
        if end < min(n_prompt, start + room):
            why = ""
            if end == n_prompt - 1:
                why = ": the prompt's last token is computed too; its row gives the first token"
            elif end - start == budget - len(decodes):
                why = ": texts that have ended leave their share of it"
            raise AssertionError(f"{where}: {beside}, and {room - end + start} of the budget are left unused{why}")
        check_out(where, out, writing, ends=end == n_prompt)
        at, step = end, step + 1
    extra = f"the prompt is computed after {step} steps, and yours go on: {got[step:]}"
    assert len(got) == step, f"{label}: {extra}"


def check_out(where: str, out: int, writing: int, ends: bool) -> None:
    """How many tokens come out of a step."""
    want = writing + ends
    why = ""
    if ends and out == writing:
        why = ": the chunk that ends the prompt gives the prompt's first token"
    elif not ends and out == writing + 1:
        why = ": a chunk that does not end the prompt gives no token"
    elif out == ends:
        why = ": the running texts write one each"
    assert out == want, f"{where}: {out} come out, expected {want}{why}"


@chunk
def the_example_of_chunks(fn):
    """a prompt beside two texts, one of which ends"""
    check_chunks(fn, 10, [5, 1], 4)


@chunk
def alone(fn):
    """nobody else runs: chunks of the whole budget, also where they fit exactly"""
    check_chunks(fn, 10, [], 4)
    check_chunks(fn, 8, [], 4)
    check_chunks(fn, 3, [], 4)
    check_chunks(fn, 4, [], 4)
    check_chunks(fn, 1, [], 1)
    check_chunks(fn, 3, [], 1)


@chunk
def exact_beside_others(fn):
    """chunks that fit exactly beside texts that go on"""
    check_chunks(fn, 9, [20, 30], 5)
    check_chunks(fn, 10, [20, 30], 5)


@chunk
def no_room_at_first(fn):
    """as many texts as the budget has tokens: the prompt waits, and the steps without a chunk are steps too"""
    check_chunks(fn, 4, [2, 3], 2)
    check_chunks(fn, 3, [1], 1)


@chunk
def any_prompt(fn):
    """any prompt, any budget that lets all running texts write"""
    random = Random(seeded(3))
    for _ in range(40):
        decodes = [random.randint(1, 9) for _ in range(random.randint(0, 4))]
        check_chunks(fn, random.randint(1, 30), decodes, max(1, len(decodes) + random.randint(0, 6)))
