"""Over 10,000 random steps, each output row has read exactly its own text's slots, and the scheduler keeps its word.

fingerprint.py says how a row proves it. The counters say that the hard cases were met. Stored mutants of the real
pool, scheduler and store, each a mistake that such code is known for, must be rejected by the same checks; each says
which of them speaks.
"""

from __future__ import annotations

from collections import Counter

import pytest
from fingerprint import wander

from minillm.blocks import BlockPool, Prefix
from minillm.paged_kv import PagedKV, PagedView
from minillm.scheduler import Scheduler


@pytest.fixture(scope="module")
def met() -> Counter:
    return wander(worlds=60, steps=150)


def test_ten_thousand_random_steps_read_the_right_slots(met):
    assert met["steps"] > 10_000
    assert met["rows"] > 25_000


@pytest.mark.parametrize(
    ("event", "at_least"),
    [
        ("preemptions", 200),
        ("copies", 100),
        ("evictions", 3000),
        ("full hits", 150),
        ("hits on live requests", 500),
        ("hits on finished requests", 300),
        ("aborts in mid-prefill", 50),
        ("aborts in waiting", 50),
        ("aborts of a leader", 20),
        ("aborts of a follower", 50),
        ("aborts while decoding", 50),
        ("chunks", 2000),
        ("forks", 300),
        ("followers without a place", 300),
        ("verified guesses", 2000),
        ("guesses overwritten", 1000),
        ("drafts given up", 50),
        ("finished", 1500),
    ],
)
def test_the_hard_cases_were_met(met, event, at_least):
    assert met[event] >= at_least, f"{event}: {met[event]}"


def all_digests_equal(patch):
    def init(self, parent, tokens):
        self.parent, self.tokens, self.digest = parent, tokens, 7

    patch.setattr(Prefix, "__init__", init)


def test_nothing_depends_on_the_quality_of_the_hash(monkeypatch):
    """All prefixes collide, and the tokens still tell them apart."""
    all_digests_equal(monkeypatch)
    met = wander(worlds=12, steps=60)
    assert met["hits on live requests"] + met["hits on finished requests"] > 100
    assert met["full hits"] > 20


# --- The stored mutants. Each takes monkeypatch, and plants one mistake in the real code. ---


def share_does_not_count(patch):
    def share(self, block):
        self.cached.pop(block, None)
        self.references[block] = max(1, self.references[block])

    patch.setattr(BlockPool, "share", share)


def freed_while_shared(patch):
    """The first who goes frees it for all, and nobody complains."""

    def release(self, block):
        if self.references[block]:
            self.references[block] = 0
            self.block_of.pop(self.prefix_of.pop(block, None), None)
            self.free.append(block)

    patch.setattr(BlockPool, "release", release)


def take_counts_two(patch):
    real = BlockPool.take

    def take(self):
        block = real(self)
        self.references[block] = 2
        return block

    patch.setattr(BlockPool, "take", take)


def take_keeps_the_old_mapping(patch):
    """An evicted block can still be found by its old content. What is in it meanwhile is somebody else's."""

    def take(self):
        block = self.free.pop() if self.free else self.cached.popitem(last=False)[0]
        self.references[block] = 1
        return block

    def remember(self, tokens, block_table, start, end):
        for block in block_table[start // self.block_size : end // self.block_size]:
            self.prefix_of.pop(block, None)
        real(self, tokens, block_table, start, end)

    def share(self, block):
        self.cached.pop(block, None)
        self.references[block] += 1

    real = BlockPool.remember
    patch.setattr(BlockPool, "take", take)
    patch.setattr(BlockPool, "remember", remember)
    patch.setattr(BlockPool, "share", share)


def prefix_is_its_own_tokens_only(patch):
    def init(self, parent, tokens):
        self.parent, self.tokens, self.digest = None, tokens, hash(tokens)

    patch.setattr(Prefix, "__init__", init)


def equality_trusts_a_weak_hash(patch):
    all_digests_equal(patch)
    patch.setattr(Prefix, "__eq__", lambda self, other: self.digest == other.digest)


def equality_forgets_the_parent(patch):
    all_digests_equal(patch)
    patch.setattr(Prefix, "__eq__", lambda self, other: self.tokens == other.tokens)


def a_hit_reaches_the_last_token(patch):
    def find(self, tokens):
        found, prefix = [], None
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            prefix = Prefix(prefix, tuple(tokens[end - self.block_size : end]))
            if prefix not in self.block_of:
                break
            found.append(self.block_of[prefix])
        return found

    patch.setattr(BlockPool, "find", find)


def a_block_is_known_before_it_is_full(patch):
    real = BlockPool.remember

    def remember(self, tokens, block_table, start, end):
        real(self, [*tokens, 0, 0, 0, 0], block_table, start, -(-end // self.block_size) * self.block_size)

    patch.setattr(BlockPool, "remember", remember)


def freed_twice(patch):
    real = Scheduler.give_back

    def give_back(self, request):
        table = list(request.block_table)
        real(self, request)
        for block in table:
            self.blocks.release(block)

    patch.setattr(Scheduler, "give_back", give_back)


def freed_twice_in_silence(patch):
    def release(self, block):
        self.references[block] -= self.references[block] > 0
        if self.references[block] == 0:
            self.free.append(block)

    patch.setattr(BlockPool, "release", release)
    freed_twice(patch)


def a_finished_request_keeps_its_blocks(patch):
    def finish(self, request):
        table, request.block_table = request.block_table, []
        real(self, request)
        request.block_table = table

    real = Scheduler.finish
    patch.setattr(Scheduler, "finish", finish)


def finish_forgets_the_followers(patch):
    real = Scheduler.finish

    def finish(self, request):
        request.followers.clear()
        real(self, request)

    patch.setattr(Scheduler, "finish", finish)


def num_computed_survives_a_preemption(patch):
    real_preempt, real_give = Scheduler.preempt, Scheduler.give
    kept = {}

    def preempt(self, request):
        kept[request] = request.num_computed
        real_preempt(self, request)

    def give(self, request, count, spans):
        request.num_computed = min(kept.pop(request, request.num_computed), len(request.tokens) - 1)
        return real_give(self, request, count, spans)

    patch.setattr(Scheduler, "preempt", preempt)
    patch.setattr(Scheduler, "give", give)


def a_preempted_text_loses_its_last_token(patch):
    real = Scheduler.preempt

    def preempt(self, request):
        real(self, request)
        del request.tokens[-1:]

    patch.setattr(Scheduler, "preempt", preempt)


def guesses_count_as_computed(patch):
    real_give, real_computed = Scheduler.give, Scheduler.computed
    given = {}

    def give(self, request, count, spans):
        given[request] = count
        return real_give(self, request, count, spans)

    patch.setattr(Scheduler, "give", give)
    patch.setattr(Scheduler, "computed", lambda self, request, n: real_computed(self, request, given[request]))


def ignored(limit, name):
    """One method knows no such limit."""

    def plant(patch):
        real = getattr(Scheduler, name)

        def unlimited(self, *args):
            value = getattr(self, limit)
            setattr(self, limit, 1000)
            try:
                return real(self, *args)
            finally:
                setattr(self, limit, value)

        patch.setattr(Scheduler, name, unlimited)

    return plant


def the_pool_is_ignored(patch):
    patch.setattr(Scheduler, "missing_blocks", lambda self, request, count: 0)


def the_copy_is_not_counted_as_a_block(patch):
    def missing_blocks(self, request, count):
        return max(0, self.blocks.blocks_for(request.num_computed + count) - len(request.block_table))

    patch.setattr(Scheduler, "missing_blocks", missing_blocks)


def revived_blocks_are_counted_as_room(patch):
    """A cached block that is found cannot also be taken for something else."""
    real = Scheduler.admit

    def admit(self, left, spans, now):
        pool = self.blocks
        while self.waiting and len(self.running) < self.max_num_seqs and left:
            found = pool.find(self.waiting[0].tokens)
            revived = sum(pool.references[block] == 0 for block in found)
            fresh = pool.blocks_for(len(self.waiting[0].tokens)) - len(found)
            if pool.available - revived < fresh <= pool.available:
                request = self.waiting.pop(0)
                for block in found:
                    pool.share(block)
                request.block_table, request.num_computed = found, len(found) * pool.block_size
                self.running.append(request)
                left -= self.give(request, min(request.wanted, left), spans)
            else:
                return real(self, left, spans, now)

    patch.setattr(Scheduler, "admit", admit)


def the_newest_is_admitted_first(patch):
    real = Scheduler.admit

    def admit(self, left, spans, now):
        self.waiting.reverse()
        real(self, left, spans, now)
        self.waiting.reverse()

    patch.setattr(Scheduler, "admit", admit)


def priorities_are_ignored(patch):
    real = Scheduler.add

    def add(self, request):
        request.priority = 0
        for follower in request.followers:
            follower.priority = 0
        real(self, request)

    patch.setattr(Scheduler, "add", add)


def a_preempted_request_goes_to_the_end(patch):
    def preempt(self, request):
        self.met["preemptions"] += 1
        self.running.remove(request)
        self.give_back(request)
        request.number, self.arrived = self.arrived, self.arrived + 1
        self.waiting.append(request)

    patch.setattr(Scheduler, "preempt", preempt)


def one_that_reads_is_never_preempted(patch):
    """Two that read their prompts wait for each other's blocks."""
    real = Scheduler.go_on

    def go_on(self, request, left, spans):
        if self.missing_blocks(request, self.share_of(request, left)) > self.blocks.available:
            return 0
        return real(self, request, left, spans)

    patch.setattr(Scheduler, "go_on", go_on)


def shared_blocks_are_written(patch):
    patch.setattr(Scheduler, "writes_into_shared", lambda self, request: False)


def copies_are_not_done(patch):
    patch.setattr(PagedKV, "copy", lambda self, copies: None)


def copies_go_backwards(patch):
    real = PagedKV.copy
    patch.setattr(PagedKV, "copy", lambda self, copies: real(self, [(b, a) for a, b in copies]))


def values_are_not_copied(patch):
    def copy(self, copies):
        for source, target in copies:
            self.k[:, target] = self.k[:, source]

    patch.setattr(PagedKV, "copy", copy)


def one_layer_is_not_copied(patch):
    def copy(self, copies):
        for source, target in copies:
            self.k[0, target], self.v[0, target] = self.k[0, source], self.v[0, source]

    patch.setattr(PagedKV, "copy", copy)


def view_with(change):
    """A change of the finished view: where rows go, or how much is read."""

    def plant(patch):
        real = PagedView.__init__

        def init(self, pool, spans):
            real(self, pool, spans)
            change(self)

        patch.setattr(PagedView, "__init__", init)

    return plant


def row_too_high(view):
    view.rows = (view.rows + 1) % view.pool.block_size


def row_too_low(view):
    view.rows = (view.rows - 1) % view.pool.block_size


def block_too_low(view):
    view.blocks = view.blocks.roll(1)


def reads_less(view):
    view.lengths = [max(length - 1, count) for length, count in zip(view.lengths, view.counts, strict=True)]


def tails_are_not_cleared(patch):
    patch.setattr(PagedView, "clear_new_tails", lambda self, spans: None)


def every_tail_is_cleared(patch):
    """Not only blocks that begin in this step: what was in a tail before is lost."""

    def clear_new_tails(self, spans):
        for table, span in zip(self.tables, spans, strict=True):
            if span.end % self.pool.block_size:
                self.pool.v[:, table[-1]] = 0

    patch.setattr(PagedView, "clear_new_tails", clear_new_tails)


SLOTS = "a row read the wrong slots"
MUTANTS = {
    "share does not count": (share_does_not_count, "references differ"),
    "take counts two": (take_counts_two, "references differ"),
    "take keeps the old mapping": (take_keeps_the_old_mapping, "two accounts of content|known for another text"),
    "a prefix is its own tokens only": (prefix_is_its_own_tokens_only, SLOTS),
    "equality trusts a weak hash": (equality_trusts_a_weak_hash, SLOTS),
    "equality forgets the parent": (equality_forgets_the_parent, SLOTS),
    "a hit reaches the last token": (a_hit_reaches_the_last_token, "a span of nothing|nothing to compute"),
    "a block is known before it is full": (a_block_is_known_before_it_is_full, "known for another text"),
    "freed while shared": (freed_while_shared, "references differ"),
    "freed twice": (freed_twice, "released twice"),
    "freed twice in silence": (freed_twice_in_silence, "in two places"),
    "a finished request keeps its blocks": (a_finished_request_keeps_its_blocks, "references differ"),
    "finish forgets the followers": (finish_forgets_the_followers, "a request is lost"),
    "num_computed survives a preemption": (num_computed_survives_a_preemption, "nothing to compute"),
    "a preempted text loses its last token": (a_preempted_text_loses_its_last_token, "a text lost a token"),
    "guesses count as computed": (guesses_count_as_computed, "the account of what is computed is wrong"),
    "the budget is ignored": (ignored("max_num_batched_tokens", "schedule"), "more tokens than its budget"),
    "max_num_seqs is ignored on admission": (ignored("max_num_seqs", "found_for_next"), "than max_num_seqs"),
    "max_num_seqs is ignored by samples": (ignored("max_num_seqs", "fork"), "than max_num_seqs"),
    "the pool is ignored": (the_pool_is_ignored, "blocks are in use"),
    "a copy is not counted as a block": (the_copy_is_not_counted_as_a_block, "blocks are in use"),
    "found blocks are counted as room": (revived_blocks_are_counted_as_room, "blocks are in use"),
    "the newest is admitted first": (the_newest_is_admitted_first, "before its turn"),
    "priorities are ignored": (priorities_are_ignored, "before its turn|the victim is not the last|was preempted"),
    "a preempted request goes to the end": (a_preempted_request_goes_to_the_end, "before its turn|not the last"),
    "nobody is preempted": (one_that_reads_is_never_preempted, "an empty step while somebody waits"),
    "shared blocks are written": (shared_blocks_are_written, f"{SLOTS}|known for another text"),
    "copies are not done": (copies_are_not_done, SLOTS),
    "copies go from target to source": (copies_go_backwards, SLOTS),
    "values are not copied": (values_are_not_copied, SLOTS),
    "one layer is not copied": (one_layer_is_not_copied, SLOTS),
    "rows are appended one too high": (view_with(row_too_high), SLOTS),
    "rows are appended one too low": (view_with(row_too_low), SLOTS),
    "rows are appended to another block": (view_with(block_too_low), SLOTS),
    "a long span reads one row too few": (view_with(reads_less), SLOTS),
    "tails are not cleared": (tails_are_not_cleared, SLOTS),
    "every tail is cleared": (every_tail_is_cleared, SLOTS),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_checks_reject_a_planted_mistake(name, monkeypatch):
    plant, sentence = MUTANTS[name]
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError), match=sentence):
        wander(worlds=30, steps=60)


@pytest.mark.parametrize("plant", [take_keeps_the_old_mapping, freed_while_shared, a_block_is_known_before_it_is_full])
def test_the_rows_alone_reject_a_planted_mistake(plant, monkeypatch):
    """Without the pool's own account: what is wrong with the blocks comes out in what is read."""
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=SLOTS):
        wander(worlds=30, steps=60, integrity=False)
