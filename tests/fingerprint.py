"""The real pool, scheduler and paged cache, driven at random and without a model.

A query of zeros makes attention a plain mean of the values it sees. Each token's value is a fingerprint of the whole
text up to it. So one output row proves that exactly the right slots were read: that of every token so far, once, each
written when the text before it was this one, and none of anybody else. The cache is full of NaN at first.

`World` is one scheduler with its pool, and the callers around it: they bring requests, guess, accept some guesses, ask
for several samples and give up. It keeps its own account of what must hold, and counts what it met in `met`.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import torch
from conftest import TINY

from minillm.blocks import BlockPool
from minillm.paged_kv import PagedKV
from minillm.request import Request, Step
from minillm.scheduler import Scheduler

CONFIG = replace(TINY, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=2)
ALPHABET = 3  # few tokens, so that texts often meet
LONGEST = 40

# One odd factor for each layer, head and coordinate: fingerprint = hash * factor mod 2 ** 64, scaled to [-1, 1).
_factors = random.Random(0)
FACTORS = torch.tensor([_factors.getrandbits(63) | 1 for _ in range(CONFIG.n_layers * 4)]).view(CONFIG.n_layers, 2, 2)


def hashes(tokens: list[int]) -> list[int]:
    """One number for each prefix of a text."""
    result, h = [], 1
    for token in tokens:
        h = hash((h, token))
        result.append(h)
    return result


def fingerprints(tokens: list[int]) -> torch.Tensor:
    """-> [n_layers, tokens, n_kv_heads, head_dim]"""
    h = torch.tensor(hashes(tokens))
    return (h[None, :, None, None] * FACTORS[:, None]).double() / 2.0**63


class World:
    """Random work for one scheduler. `step()` does one step and checks it; `drain()` lets all who are there finish."""

    def __init__(self, seed: int, met: Counter, integrity: bool = True):
        self.random = rnd = random.Random(seed)
        self.met, self.integrity = met, integrity
        self.size = rnd.choice([1, 2, 3, 4, 8, 16])
        tokens = rnd.choice([LONGEST, LONGEST + 16, 2 * LONGEST, 4 * LONGEST])
        self.blocks = BlockPool(-(-tokens // self.size), self.size, sharing=rnd.random() < 0.9)
        self.scheduler = Scheduler(self.blocks, rnd.choice([1, 2, 4, 8]), rnd.choice([1, 3, 8, 16, 64]))
        self.kv = PagedKV(CONFIG, self.blocks.n_blocks, self.size, torch.float64)
        self.kv.k.fill_(torch.nan)
        self.kv.v.fill_(torch.nan)
        self.bases = [self.tokens(LONGEST) for _ in range(3)]
        self.load = rnd.choice([0.1, 0.3, 0.6])  # requests that arrive in a step
        self.brave = rnd.choice([0.0, 0.0, 0.5])  # how often somebody guesses
        self.texts: dict[Request, list[int]] = {}  # what each unfinished request has been told
        self.computed: dict[Request, int | None] = {}  # rows that are past; None: it has no place in the cache
        self.order: dict[Request, tuple[int, int]] = {}
        self.arrived = 0

    def tokens(self, n: int) -> list[int]:
        return [self.random.randrange(ALPHABET) for _ in range(n)]

    # --- The callers. ---

    def arrive(self) -> None:
        rnd = self.random
        base = rnd.choice(self.bases)
        prompt = base[: rnd.randint(0, 30)] + self.tokens(rnd.choice([0, 0, 1, 4]))
        if rnd.random() < 0.5:
            prompt = prompt[: len(prompt) // self.size * self.size]
        prompt = prompt or base[:1]
        limit = min(LONGEST, len(prompt) + rnd.randint(1, 16))
        n = rnd.choice([1, 1, 2, 4])
        priority = rnd.choice([0, 0, 0, 0, 1])
        leader, *followers = (Request(list(prompt), limit, priority) for _ in range(n))
        leader.followers.extend(followers)
        for request in (leader, *followers):
            self.order[request] = (-priority, self.arrived)
            self.texts[request], self.computed[request] = list(prompt), None
            self.arrived += 1
        self.scheduler.add(leader)
        self.met["requests"] += n

    def give_up(self) -> None:
        """Somebody aborts: any request, wherever it is."""
        scheduler = self.scheduler
        reading = [r for r in scheduler.running if not r.wants_one]
        request = self.random.choice(reading or list(self.texts))
        if request in scheduler.running:
            where = "while decoding" if request.wants_one else "in mid-prefill"
            where = "of a leader" if request.followers else where
        else:
            where = "in waiting" if request in scheduler.waiting else "of a follower"
        if request in scheduler.running and not request.wants_one:
            self.met["aborts in mid-prefill"] += 1
        self.met[f"aborts {where}"] += where != "in mid-prefill"
        self.forget(request)
        scheduler.finish(request)
        self.look()

    def forget(self, request: Request) -> None:
        del self.texts[request], self.computed[request], self.order[request]

    def guess(self) -> None:
        for request in self.scheduler.running:
            room = request.limit - len(request.tokens) - 1
            if room > 0 and not request.followers and self.random.random() < self.brave:
                request.draft = self.tokens(self.random.randint(1, min(room, 6)))

    # --- One step. ---

    def step(self, arrivals: bool = True) -> None:
        if arrivals:
            while self.random.random() < self.load and len(self.scheduler.waiting) < 8:
                self.arrive()
            if self.texts and self.random.random() < 0.06:
                self.give_up()
        self.guess()
        before = list(self.scheduler.running)
        known = {r for r in self.scheduler.waiting if self.known_to_its_end(r)}
        step = self.scheduler.schedule()
        self.check_order(step, before, known)
        if step.spans:
            self.check_rows(step)
            self.decide(step)
        self.met["steps"] += 1
        self.look()

    def known_to_its_end(self, request: Request) -> bool:
        """A prompt of whole blocks, each of which is in the cache."""
        n = len(request.tokens)
        return n % self.size == 0 and len(self.blocks.find([*request.tokens, 0])) * self.size == n

    def check_order(self, step: Step, before: list[Request], known: set[Request]) -> None:
        """Who was chosen, and how much of each."""
        scheduler, met = self.scheduler, self.met
        counts = [span.count for span in step.spans]
        assert sum(counts) <= scheduler.max_num_batched_tokens, "the step computes more tokens than its budget"
        assert len(scheduler.running) <= scheduler.max_num_seqs, "more requests run than max_num_seqs"
        assert all(count > 0 for count in counts), "a span of nothing"
        assert len({span.request for span in step.spans}) == len(counts), "two spans of one request"
        assert counts or not self.texts, "an empty step while somebody waits"
        preempted = [r for r in scheduler.waiting if r in before]
        joined = [r for r in scheduler.running if r not in before]
        first = min(self.order, key=self.order.get, default=None)
        for request in preempted:
            assert request is not first, "the first in order was preempted"
            assert all(self.order[r] < self.order[request] for r in scheduler.running), "the victim is not the last"
            self.computed[request] = None
            met["preemptions"] += 1
        for request in joined:
            assert all(self.order[request] < self.order[r] for r in scheduler.waiting), (
                "one was admitted before its turn"
            )
        for span in step.spans:
            request = span.request
            if self.computed[request] is None:
                assert request in joined, "it computes without a place"
                self.computed[request] = found = request.num_computed
                assert found % self.size == 0 and found < len(request.tokens), "a hit leaves nothing to compute"
                if found:
                    shared = any(self.blocks.references[b] > 1 for b in request.block_table[: found // self.size])
                    met["hits on live requests" if shared else "hits on finished requests"] += 1
                    met["full hits"] += request in known and found == len(request.tokens) - self.size
            assert span.start == self.computed[request], "a position is computed twice, or left out"
            met["chunks"] += span.end < len(request.tokens)
            met["verified guesses"] += max(0, span.end - len(request.tokens))
        met["copies"] += len(step.copies)

    def check_rows(self, step: Step) -> None:
        """One pass of every layer. Each row must be the mean of its text's fingerprints."""
        texts = [(self.texts[span.request] + span.request.draft)[: span.end] for span in step.spans]
        prints = [fingerprints(text) for text in texts]
        v = torch.cat([p[:, span.start :] for p, span in zip(prints, step.spans, strict=True)], dim=1)
        means = [p.cumsum(1) / torch.arange(1, p.shape[1] + 1)[:, None, None] for p in prints]
        expected = torch.cat([m[:, span.start :] for m, span in zip(means, step.spans, strict=True)], dim=1)
        expected = expected.repeat_interleave(CONFIG.n_heads // CONFIG.n_kv_heads, dim=2)
        view = self.kv.view(step)
        q = v.new_zeros(v.shape[1], CONFIG.n_heads, CONFIG.head_dim)
        for layer in range(CONFIG.n_layers):
            error = (view.attend(layer, q, v[layer], v[layer]) - expected[layer]).abs().max()
            assert error <= 1e-12, f"a row read the wrong slots: off by {error}"
        self.met["rows"] += len(q)

    def decide(self, step: Step) -> None:
        """What the engine does after the pass: accept some guesses, let texts that are complete choose a token."""
        for span in step.spans:
            request, known = span.request, len(span.request.tokens)
            guesses = max(0, span.end - known)
            accepted = self.random.randint(0, guesses)
            right = request.draft[:accepted]
            self.met["guesses overwritten"] += guesses - accepted
            request.tokens += right
            request.draft = []
            self.texts[request] += right
            n = span.count - guesses + accepted
            self.scheduler.computed(request, n)
            self.computed[request] += n
            if span.end >= known:
                for each in (request, *self.fork(request)):
                    self.choose(each)

    def fork(self, leader: Request) -> list[Request]:
        followers = self.scheduler.fork(leader)
        for follower in followers:
            self.met["forks" if follower in self.scheduler.running else "followers without a place"] += 1
            self.computed[follower] = leader.num_computed if follower in self.scheduler.running else None
        return followers

    def choose(self, request: Request) -> None:
        text = self.texts[request]
        follows = [base[len(text)] for base in self.bases if len(text) < LONGEST and base[: len(text)] == text]
        token = self.random.choice(follows) if follows and self.random.random() < 0.7 else self.tokens(1)[0]
        text.append(token)
        request.tokens.append(token)
        if len(text) == request.limit:
            self.met["finished"] += 1
            self.forget(request)
            self.scheduler.finish(request)

    def look(self) -> None:
        """What must hold between any two steps."""
        scheduler = self.scheduler
        here = [r for each in (*scheduler.running, *scheduler.waiting) for r in (each, *each.followers)]
        assert sorted(map(id, here)) == sorted(map(id, self.texts)), "a request is lost, or there twice"
        assert len(scheduler.running) <= scheduler.max_num_seqs, "more requests run than max_num_seqs"
        for request in here:
            assert request.tokens == self.texts[request], "a text lost a token or gained one"
            assert not request.block_table or request in scheduler.running, "one that does not run holds blocks"
        for request in scheduler.running:
            assert request.num_computed == self.computed[request], "the account of what is computed is wrong"
        if self.integrity:
            self.blocks.check_integrity(request.block_table for request in scheduler.running)
            for request in scheduler.running:
                for i, block in enumerate(request.block_table):
                    known = self.blocks.prefix_of.get(block)
                    content = tuple(request.tokens[i * self.size : (i + 1) * self.size])
                    assert known is None or known.tokens == content, "a block is known for another text"

    def drain(self) -> None:
        """The first in order gets at least one row in each step and is never preempted: that bounds the steps."""
        bound = sum(request.limit for request in self.texts)
        steps = 0
        while self.texts:
            self.step(arrivals=False)
            steps += 1
            assert steps <= bound, "the requests starve each other"
        assert self.scheduler.idle
        assert self.blocks.available == self.blocks.n_blocks, "a block was left behind"
        self.met["evictions"] += self.blocks.evictions
        self.met["drafts given up"] += self.scheduler.met["drafts given up"]


def wander(worlds: int, steps: int, integrity: bool = True) -> Counter:
    """Random steps in random worlds. -> what was met"""
    met: Counter = Counter()
    for seed in range(worlds):
        world = World(seed, met, integrity)
        for _ in range(steps):
            world.step()
        world.drain()
    return met
