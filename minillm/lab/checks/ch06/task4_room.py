"""Task 4 of exercise 06: when blocks run out, somebody gives theirs back, and loses nothing but time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from minillm.lab.check import seeded
from minillm.lab.checks.ch06.base import CHAPTER, Watched, count_of, named, new_request, pairs_of, some_requests
from minillm.request import Request

BLOCK_SIZE = 4

room = CHAPTER.task(
    "make_room",
    hints=(
        "Repeat until it is enough: choose one, take it out of `running`, give its blocks back.",
        "What a request *is* are its tokens. What it *has* are rows in blocks. Only the second is lost.",
        "Write down num_computed before you set it to 0. The last token of a decoding text was never fed.",
        "`waiting` has an order too: higher priority first, then the smaller number.",
    ),
)


def in_blocks(requests: list[Request]) -> list[Request]:
    """Give each request the blocks that its computed rows need, block numbers in no order."""
    number = 7
    for request in requests:
        for _ in range(-(-request.num_computed // BLOCK_SIZE)):
            number = (number * 5 + 3) % 1009
            request.block_table.append(number)
    return requests


def expected_victims(running: list[Request], n_free: int, needed: int) -> list[Request]:
    """From the last in order on, until it is enough; the first in order always stays."""
    victims: list[Request] = []
    for request in sorted(running, key=lambda r: (r.priority, -r.number))[:-1]:
        if n_free >= needed:
            break
        victims.append(request)
        n_free += len(request.block_table)
    return victims


def about(request: Request) -> str:
    return f"{named(request)} (priority {request.priority})"


def check_room(fn: Callable, running: list[Request], waiting: list[Request], free: list[int], needed: int) -> None:
    everybody = running + waiting
    victims = expected_victims(running, len(free), needed)
    computed = {r: r.num_computed for r in everybody}
    tokens = {r: list(r.tokens) for r in everybody}
    tables = {r: list(r.block_table) for r in everybody}
    label = (
        f"{needed} blocks needed, {len(free)} free, running (priority, number, blocks) "
        f"{[(r.priority, r.number, len(r.block_table)) for r in running]}"
    )
    watched, queue, pool = Watched(running), list(waiting), list(free)
    got = pairs_of(fn(watched, queue, pool, needed), everybody, label)
    check_victims(label, [request for request, _ in got], victims, tables, len(free), needed)
    for request in everybody:
        check_tokens(label, request, tokens[request])
        lost = request in victims
        table = f"{named(request)}'s block table is {request.block_table}"
        assert not (lost and request.block_table), f"{label}: {table}; its blocks belong to others from now on"
        assert lost or request.block_table == tables[request], f"{label}: {table}, and it should keep all of its blocks"
        rows = f"{named(request)} has num_computed {request.num_computed}"
        assert not (lost and request.num_computed), f"{label}: {rows}, but all its rows lie in blocks given back"
        assert lost or request.num_computed == computed[request], f"{label}: {rows}, and it lost no row"
    check_blocks(label, pool, free + [block for request in victims for block in tables[request]])
    check_places(label, list.copy(watched), queue, running, waiting, victims)
    for request, again in got:
        want = computed[request]
        why = f": {named(request)} has {len(tokens[request])} tokens, and {want} of them had been computed"
        assert again == want, f"{label}: {again} tokens to compute again, expected {want}{why}"


def check_victims(label: str, got: list[Request], want: list[Request], tables: dict, n_free: int, needed: int) -> None:
    for mine, other in zip(got, want, strict=False):
        if mine is not other:
            lower = mine.priority > other.priority
            rule = "lower priority" if lower else "the newest goes first among equals"
            assert not lower, f"{label}: {about(mine)} loses its blocks, but {about(other)} has a {rule}"
            raise AssertionError(f"{label}: {about(mine)} loses its blocks, and not {about(other)}: {rule}")
    enough = n_free + sum(len(tables[request]) for request in got[: len(want)])
    more = "the last one that runs must stay, or nobody gets on"
    if enough >= needed:
        more = f"after {count_of(len(want), 'preemption')} {count_of(enough, 'block')} free: that is enough"
    assert len(got) <= len(want), f"{label}: {named(got[len(want)])} loses its blocks, and should not; {more}"
    freed = n_free + sum(len(tables[request]) for request in got)
    assert len(got) == len(want), (
        f"{label}: after {count_of(len(got), 'preemption')} {count_of(freed, 'block')} free, and {needed} are needed"
    )


def check_tokens(label: str, request: Request, before: list[int]) -> None:
    after = request.tokens
    cut = len(after) < len(before) and after == before[: len(after)]
    why = f"the tokens from place {len(after)} on are gone, and would be generated a second time"
    assert not cut, f"{label}: {named(request)} keeps {len(after)} of {len(before)} tokens: {why}"
    assert after == before, f"{label}: {named(request)}'s tokens changed from {before} to {after}"


def check_blocks(label: str, got: list[int], want: list[int]) -> None:
    missing, extra = Counter(want) - Counter(got), Counter(got) - Counter(want)
    assert not missing, f"{label}: blocks {sorted(missing)} belong to nobody now, and are not in `free`"
    assert not extra, f"{label}: blocks {sorted(extra.elements())} are in `free` once too often"


def check_places(
    label: str, now: list, queue: list, running: list[Request], waiting: list[Request], victims: list[Request]
) -> None:
    for request in running:
        lost = request in victims
        assert not (lost and request in now), f"{label}: {named(request)} has no blocks, and is still in `running`"
        assert lost or request in now, f"{label}: {named(request)} is missing from `running`"
        assert not lost or request in queue, f"{label}: {named(request)} is nowhere: it has to wait, or it never ends"
    want = sorted(waiting + victims, key=lambda r: (-r.priority, r.number))
    numbers = [request.number for request in queue]
    order = f"`waiting` holds requests {numbers}, expected {[r.number for r in want]}"
    assert queue == want, f"{label}: {order}: higher priority first, then who came first"


def texts(*rows: tuple[int, int, int, int]) -> list[Request]:
    """Requests of (number, priority, tokens, computed) with their blocks."""
    return in_blocks([new_request(number, n, done, priority) for number, priority, n, done in rows])


@room
def one_victim(fn):
    """of equal priorities the newest gives its blocks back"""
    check_room(fn, texts((0, 0, 12, 11), (1, 0, 9, 8), (2, 0, 6, 5)), [], [], 1)
    check_room(fn, texts((2, 0, 6, 5), (0, 0, 12, 11), (1, 0, 9, 8)), [], [], 2)


@room
def by_priority(fn):
    """the lowest priority goes first, however old it is"""
    check_room(fn, texts((0, 0, 8, 7), (1, 2, 20, 19), (2, 1, 9, 8)), [], [], 1)
    check_room(fn, texts((3, -1, 8, 7), (1, -2, 9, 8), (2, 0, 9, 8)), [], [], 1)


@room
def several_victims(fn):
    """one after another, until it is enough and no further"""
    check_room(fn, texts((0, 0, 9, 8), (1, 0, 5, 4), (2, 0, 3, 2), (3, 0, 9, 8)), [], [900], 4)
    check_room(fn, texts((0, 0, 9, 8), (1, 0, 9, 8), (2, 0, 9, 8)), [], [900], 3)


@room
def nobody_has_to_go(fn):
    """with enough free blocks nobody loses anything"""
    check_room(fn, texts((0, 0, 9, 8), (1, 0, 9, 8)), [], [900, 901], 2)
    check_room(fn, texts((0, 0, 9, 8), (1, 0, 9, 8)), [], [], 0)


@room
def the_last_one_stays(fn):
    """the first in order stays, even when it is not enough"""
    check_room(fn, texts((0, 0, 9, 8)), [], [], 1)
    check_room(fn, texts((1, 1, 9, 8), (0, 0, 9, 8)), [], [], 50)


@room
def in_the_middle_of_a_prompt(fn):
    """a prompt that is half computed loses what it has, at a block's edge too"""
    check_room(fn, texts((0, 0, 9, 8), (1, 0, 30, 8)), [], [], 1)
    check_room(fn, texts((0, 0, 9, 8), (1, 0, 30, 13)), [], [], 1)


@room
def old_place(fn):
    """it waits in its old place: before those who came later"""
    check_room(fn, texts((1, 0, 9, 8), (2, 0, 9, 8)), texts((5, 1, 4, 0), (3, 0, 4, 0), (6, 0, 4, 0)), [], 1)
    check_room(fn, texts((1, 1, 9, 8), (2, 1, 9, 8)), texts((0, 1, 4, 0), (3, 0, 4, 0)), [], 2)


@room
def any_pool(fn):
    """any texts, any need"""
    random = Random(seeded(4))
    for _ in range(30):
        running = in_blocks(some_requests(random, range(random.randint(1, 6)), computed=True, priorities=3))
        random.shuffle(running)
        waiting = some_requests(random, range(6, 6 + random.randint(0, 3)), computed=False, priorities=3)
        waiting.sort(key=lambda r: (-r.priority, r.number))
        check_room(fn, running, waiting, [2000 + i for i in range(random.randint(0, 2))], random.randint(0, 9))
