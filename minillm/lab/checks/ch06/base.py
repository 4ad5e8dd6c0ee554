"""The chapter of exercise 06, and what the checks of its tasks share."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from minillm.lab.check import Chapter
from minillm.request import Request

CHAPTER = Chapter("06")
MOST_LOOKS = 500


class Watched(list):
    """A list that notices a loop without an end: nobody has to look through it so often."""

    looks = 0

    def __iter__(self) -> Iterator:
        self.looks += 1
        assert self.looks <= MOST_LOOKS, f"your loop does not end: after {MOST_LOOKS} rounds it was stopped"
        return super().__iter__()


def new_request(number: int, n_tokens: int, computed: int = 0, priority: int = 0, most: int = 8) -> Request:
    """A request with tokens that no other has. It may write `most` more of them."""
    tokens = [100 * number + i for i in range(n_tokens)]
    return Request(tokens, n_tokens + most, priority, float(number), num_computed=computed, number=number)


def named(request: Request) -> str:
    return f"request {request.number}"


def count_of(n: int, noun: str) -> str:
    """ "1 token", "2 tokens" """
    return f"{n} {noun}{'s' * (n != 1)}"


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def pairs_of(got: object, known: list[Request], label: str) -> list[tuple[Request, int]]:
    """A list of (request, number), each request one of `known` and none of them twice."""
    assert got is not None, f"{label}: your function returned None; is a `return` missing?"
    assert isinstance(got, list), f"{label}: expected a list of (request, number), got {type(got).__name__}"
    seen: list[Request] = []
    for pair in got:
        right = isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], Request) and is_count(pair[1])
        assert right, f"{label}: expected pairs (request, whole number), got {pair!r}"
        assert any(pair[0] is request for request in known), f"{label}: a request that was not given: {pair[0]!r}"
        assert not any(pair[0] is request for request in seen), f"{label}: {named(pair[0])} is there twice"
        seen.append(pair[0])
    return got


def some_requests(random: Random, numbers: range, computed: bool, priorities: int = 1) -> list[Request]:
    """Texts in all states: before their prompt, in the middle of it, and with one token wanted."""
    requests = []
    for number in numbers:
        n = random.randint(1, 12)
        done = random.choice([n - 1, random.randrange(n)]) if computed else 0
        requests.append(new_request(number, n, done, random.randrange(priorities), random.randint(1, 5)))
    return requests
