"""The plain data that scheduler, cache and engine hand to each other: requests, and what they do in one step.

No tensors, and one truth: a request owns its tokens, its block table, and the number of its tokens that are in the
cache. Guesses live in `draft`, never in `tokens`, so they are never shown, counted or kept by mistake.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class Request:
    """A text in the making, as the scheduler sees it.

    tokens: what is decided: the prompt, then what was generated. draft: guesses that may follow them.
    num_computed: how many of these are in the cache. limit: the longest that `tokens` can become.
    followers: further samples of the same prompt, which join when it has been computed.
    """

    tokens: list[int]
    limit: int
    priority: int = 0
    arrival: float = 0.0  # seconds
    draft: list[int] = field(default_factory=list)
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    followers: deque[Request] = field(default_factory=deque)
    number: int = -1  # place in the order of arrival, given by the scheduler
    num_cached: int | None = None  # tokens found in the cache when it was first admitted; None: not yet

    @property
    def wanted(self) -> int:
        """Tokens that still have to go through the model."""
        return len(self.tokens) + len(self.draft) - self.num_computed

    @property
    def decided(self) -> int:
        """Those of the wanted tokens that are no guesses."""
        return len(self.tokens) - self.num_computed

    @property
    def wants_one(self) -> bool:
        """Whether all but the last token is computed: it is decoding."""
        return self.decided == 1

    @property
    def order(self) -> tuple[int, int]:
        """Smaller is served first."""
        return (-self.priority, self.number)


@dataclass(frozen=True)
class Span:
    """These tokens of a request go through the model in this step: `count` of them, from position `start`."""

    request: Request
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def ids(self) -> list[int]:
        known = self.request.tokens
        if self.end <= len(known):
            return known[self.start : self.end]
        return (known + self.request.draft)[self.start : self.end]

    @property
    def block_table(self) -> list[int]:
        return self.request.block_table


@dataclass(frozen=True)
class Step:
    """One pass. `copies` (source block, target block) are done before it, in order."""

    spans: Sequence[Span]
    copies: Sequence[tuple[int, int]] = ()
