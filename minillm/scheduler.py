"""Stage 6: who computes what in the next step. No tensors here: requests, numbers of tokens, numbers of blocks.

A batch that runs until its last request is done leaves most of its rows idle, as texts end at different times. Here
requests join and leave at every step (continuous batching). What a request still wants is
`len(tokens) + len(draft) - num_computed`, so a prompt, a part of a prompt, one new token, and guesses to be verified
are the same thing in different numbers, and one step mixes them (chunked prefill).

* First come, first served; a higher `priority` comes first. A waiting request pushes nobody out.
* A step computes at most `max_num_batched_tokens` tokens. Each running text that only wants its next token gets it
  before a long prompt takes the rest, as long as the budget has a token for each.
* Guesses get what is left of the budget when every decided token has its place, those of the next who waits too.
* When blocks run out, guesses are given up first; then the request of lowest priority, of these the newest, loses its
  blocks and waits. It keeps its tokens, and is computed again later as if they were a prompt (recomputation).
  The first in order never loses to anyone, so somebody always gets on.

Yu et al., "Orca" (2022), section 4.2; Kwon et al., "PagedAttention" (2023), section 4.5; Agrawal et al.,
"Sarathi-Serve" (2024), section 4.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque

from minillm.blocks import BlockPool, require_counts
from minillm.policies import Continuous, Policy
from minillm.request import Request, Span, Step


class Scheduler:
    """Waiting and running requests, and the blocks they own."""

    def __init__(
        self,
        blocks: BlockPool,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 256,
        policy: Policy | None = None,
    ):
        require_counts(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        self.blocks, self.policy = blocks, policy or Continuous()
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: list[Request] = []  # both lists are in the order of service
        self.running: list[Request] = []
        self.arrived = 0
        self.copies: list[tuple[int, int]] = []  # kept until the step they belong to has been computed
        self.met: Counter[str] = Counter()  # what has happened: preemptions, copies, hits, ...

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def require_room(self, request: Request) -> None:
        """ValueError if a request could not run even alone."""
        if not request.tokens:
            raise ValueError("a request needs at least one token")
        needed = self.blocks.blocks_for(request.limit - 1)  # the last token is chosen, and never fed
        if needed > self.blocks.n_blocks:
            raise ValueError(
                f"the request may grow to {request.limit} tokens, and needs {needed} blocks of "
                f"{self.blocks.block_size}; the pool has {self.blocks.n_blocks}"
            )

    def add(self, request: Request) -> None:
        """Take a new request in, with its followers."""
        self.require_room(request)
        for each in (request, *request.followers):
            each.number, self.arrived = self.arrived, self.arrived + 1
        insort(self.waiting, request, key=lambda r: r.order)

    def schedule(self, now: float = 0.0) -> Step:
        """Choose the spans of the next step, and give their requests the blocks they need. Empty if nobody can run."""
        spans: list[Span] = []
        left = self.max_num_batched_tokens
        preempted = self.met["preemptions"]
        for request in self.running:  # where a step was interrupted before its rows chose their tokens: once more
            request.num_computed = min(request.num_computed, len(request.tokens) - 1)
        self.cut_guesses(now)
        for request in list(self.running):
            if request not in self.running or left == 0:  # it was preempted for one before it
                continue
            left -= self.go_on(request, left, spans)
        if self.met["preemptions"] == preempted:  # else there is no room for anybody
            self.admit(left, spans, now)
        return Step(spans, tuple(self.copies))

    def cut_guesses(self, now: float) -> None:
        """Leave as many guesses, in the order of service, as the budget holds beside all that is decided."""
        if not any(request.draft for request in self.running):
            return
        left = self.max_num_batched_tokens - sum(request.decided for request in self.running)
        found = self.found_for_next(now)
        if found is not None:
            left -= self.waiting[0].wanted - len(found) * self.blocks.block_size
        for request in self.running:
            request.draft = request.draft[: max(0, left)]
            left -= len(request.draft)

    def go_on(self, request: Request, left: int, spans: list[Span]) -> int:
        """Give a running request its tokens of this step; preempt until it has the blocks. -> tokens taken"""
        count = self.share_of(request, left)
        while self.missing_blocks(request, count) > self.blocks.available:
            if request.draft:
                request.draft = []
                self.met["drafts given up"] += 1
                count = min(count, request.wanted)
                continue
            victim = self.running[-1]  # the last in order, so it has no span in this step yet
            self.preempt(victim)
            if victim is request:
                return 0
        return self.give(request, count, spans)

    def share_of(self, request: Request, left: int) -> int:
        """How many tokens it may compute. Those behind it that want a single one are thought of."""
        behind = self.running[self.running.index(request) + 1 :]
        return min(request.wanted, max(1, left - sum(other.wants_one for other in behind)))

    def found_for_next(self, now: float) -> list[int] | None:
        """The blocks with the beginning of the next text that waits; None if it may not join, or nobody waits."""
        if not self.waiting or len(self.running) >= self.max_num_seqs:
            return None
        request = self.waiting[0]
        found = self.blocks.find(request.tokens)
        revived = sum(self.blocks.references[block] == 0 for block in found)
        fresh = self.blocks.blocks_for(len(request.tokens)) - len(found)
        fits = fresh + revived <= self.blocks.available
        return found if fits and self.policy.may_join(request, self, now) else None

    def admit(self, left: int, spans: list[Span], now: float) -> None:
        """Let the first of those who wait join, while there is room for all the tokens they have."""
        while left and (found := self.found_for_next(now)) is not None:
            request = self.waiting.pop(0)
            for block in found:
                self.blocks.share(block)
            request.block_table = found
            request.num_computed = len(found) * self.blocks.block_size
            if request.num_cached is None:
                request.num_cached = request.num_computed
            self.met["cache hits"] += bool(found)
            insort(self.running, request, key=lambda r: r.order)
            left -= self.give(request, min(request.wanted, left), spans)

    def missing_blocks(self, request: Request, count: int) -> int:
        """Blocks that it needs for `count` more tokens."""
        more = self.blocks.blocks_for(request.num_computed + count) - len(request.block_table)
        return max(0, more) + self.writes_into_shared(request)

    def writes_into_shared(self, request: Request) -> bool:
        """Whether its next row goes into a block that others read too."""
        index = request.num_computed // self.blocks.block_size
        return index < len(request.block_table) and self.blocks.references[request.block_table[index]] > 1

    def give(self, request: Request, count: int, spans: list[Span]) -> int:
        """Take the blocks for `count` more tokens, and put the span down."""
        if self.writes_into_shared(request):  # copy-on-write
            index = request.num_computed // self.blocks.block_size
            own = self.blocks.take()
            self.copies.append((request.block_table[index], own))
            self.blocks.release(request.block_table[index])
            request.block_table[index] = own
            self.met["copies"] += 1
        while len(request.block_table) * self.blocks.block_size < request.num_computed + count:
            request.block_table.append(self.blocks.take())
        self.met["chunks"] += request.num_computed + count < len(request.tokens)
        spans.append(Span(request, request.num_computed, count))
        return count

    def computed(self, request: Request, n: int) -> None:
        """The first n of the rows that were given are right, and past from now on."""
        self.copies.clear()
        start, request.num_computed = request.num_computed, request.num_computed + n
        self.blocks.remember(request.tokens, request.block_table, start, request.num_computed)

    def fork(self, request: Request) -> list[Request]:
        """The followers of a request whose prompt is computed: each gets its block table, or waits for a place."""
        followers = list(request.followers)
        request.followers.clear()
        for follower in followers:
            first = not self.waiting or follower.order < self.waiting[0].order
            if first and len(self.running) < self.max_num_seqs:
                follower.num_cached = request.num_computed
                follower.num_computed = request.num_computed
                follower.block_table = request.block_table[: self.blocks.blocks_for(request.num_computed)]
                for block in follower.block_table:
                    self.blocks.share(block)
                insort(self.running, follower, key=lambda r: r.order)
                self.met["forks"] += 1
            else:
                insort(self.waiting, follower, key=lambda r: r.order)
        return followers

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks away. It waits, in its old place in the order, with all its tokens."""
        self.met["preemptions"] += 1
        self.running.remove(request)
        self.give_back(request)
        insort(self.waiting, request, key=lambda r: r.order)

    def finish(self, request: Request) -> None:
        """Let a request go, wherever it is. Followers that have not joined yet stay: the first takes its place."""
        for place in (self.waiting, self.running):
            if request in place:
                place.remove(request)
        for leader in (*self.waiting, *self.running):
            if request in leader.followers:
                leader.followers.remove(request)
        self.give_back(request)
        if request.followers:
            heir = request.followers.popleft()
            heir.followers, request.followers = request.followers, deque()
            insort(self.waiting, heir, key=lambda r: r.order)

    def give_back(self, request: Request) -> None:
        """Release its blocks, the last first: the beginning of a text is the likeliest to be asked for again."""
        for block in reversed(request.block_table):
            self.blocks.release(block)
        request.block_table, request.num_computed, request.draft = [], 0, []
