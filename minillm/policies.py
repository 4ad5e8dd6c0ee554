"""When may waiting requests join the batch? Continuous batching, and the two older ways that it is compared with.

All three run through the same scheduler and the same pool, so what is measured is the policy alone. (A static batch of
padded tensors also computes a row for each text that is already done; here such rows are left out. So a comparison
shows what waiting costs, and nothing else.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from minillm.request import Request
    from minillm.scheduler import Scheduler

MOST_SECONDS = 3600


class Policy(Protocol):
    """A rule of admission. The scheduler asks it only when there is room."""

    def may_join(self, request: Request, scheduler: Scheduler, now: float) -> bool:
        """Whether the first of those who wait may join in this step. now: seconds, on the clock of arrivals."""
        ...


class Continuous:
    """At every step, as soon as there is room (Yu et al., "Orca", 2022)."""

    def may_join(self, request: Request, scheduler: Scheduler, now: float) -> bool:
        return True


class Static:
    """A batch of those who wait, when the last batch has ended; nobody joins it later.

    reserve: tokens of the pool that are set aside for each member, as a cache in one piece has to: with 0, blocks are
    taken as they are needed.
    """

    def __init__(self, reserve: int = 0):
        if isinstance(reserve, bool) or not isinstance(reserve, int) or reserve < 0:
            raise ValueError(f"reserve must be 0 or a positive number of tokens, not {reserve!r}")
        self.reserve = reserve
        self.batch: list[Request] = []

    def may_join(self, request: Request, scheduler: Scheduler, now: float) -> bool:
        if not scheduler.running:
            self.batch = self.choose(scheduler, now)
        return request in self.batch

    def choose(self, scheduler: Scheduler, now: float) -> list[Request]:
        """The first of those who wait, as many as fit; at least one."""
        batch: list[Request] = []
        seqs = blocks = 0
        for request in scheduler.waiting:
            samples = 1 + len(request.followers)
            seqs += samples
            blocks += samples * scheduler.blocks.blocks_for(max(self.reserve, len(request.tokens)))
            if batch and (seqs > scheduler.max_num_seqs or blocks > scheduler.blocks.n_blocks):
                break
            batch.append(request)
        return batch


class Dynamic(Static):
    """Collect requests until the batch is full or the oldest has waited for `timeout` seconds; run them; clear.

    Often called continuous batching, and it is not: nothing joins or leaves on the way.
    """

    def __init__(self, timeout: float, reserve: int = 0):
        if not 0 <= timeout <= MOST_SECONDS:
            raise ValueError(f"timeout must be from 0 to {MOST_SECONDS} seconds, not {timeout!r}")
        super().__init__(reserve)
        self.timeout = timeout

    def choose(self, scheduler: Scheduler, now: float) -> list[Request]:
        oldest = min(request.arrival for request in scheduler.waiting)
        collected = sum(1 + len(request.followers) for request in scheduler.waiting)
        if collected < scheduler.max_num_seqs and now - oldest < self.timeout:
            return []
        return super().choose(scheduler, now)
