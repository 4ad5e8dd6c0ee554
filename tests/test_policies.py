"""When those who wait may join: at every step, in a batch, or in a batch that was collected for some time."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from conftest import random_model

from minillm.blocks import BlockPool
from minillm.engine import Engine
from minillm.generation import generate
from minillm.policies import Continuous, Dynamic, Static
from minillm.request import Request
from minillm.sampling import SamplingParams
from minillm.scheduler import Scheduler


def scheduler(policy, n_blocks=100, block_size=4, **kwargs) -> Scheduler:
    return Scheduler(BlockPool(n_blocks, block_size, sharing=False), policy=policy, **kwargs)


def request(n: int, more: int, arrival: float = 0.0) -> Request:
    return Request(list(range(n)), n + more, arrival=arrival)


def play(s: Scheduler, now: float = 0.0) -> list[Request]:
    """One step; each complete text gets a token. -> who took part"""
    step = s.schedule(now)
    for span in step.spans:
        complete = span.end == len(span.request.tokens)
        s.computed(span.request, span.count)
        if complete:
            for each in (span.request, *s.fork(span.request)):
                each.tokens.append(0)
                if len(each.tokens) == each.limit:
                    s.finish(each)
    return [span.request for span in step.spans]


def timeline(policy, requests, **kwargs) -> list[list[int]]:
    """Who took part in each step, by number; one step a second, and everybody is there from the start."""
    s = scheduler(policy, **kwargs)
    for r in requests:
        s.add(r)
    steps = []
    while not s.idle:
        steps.append([requests.index(r) for r in play(s, now=float(len(steps)))])
        assert len(steps) < 100
    return steps


def test_a_text_that_ends_early_leaves_its_place_to_the_next_one_at_once_or_not():
    lengths = [1, 3, 2, 1]
    continuous = timeline(None, [request(2, n) for n in lengths], max_num_seqs=2)
    static = timeline(Static(), [request(2, n) for n in lengths], max_num_seqs=2)
    assert continuous == [[0, 1], [1, 2], [1, 2], [3]]
    assert static == [[0, 1], [1], [1], [2, 3], [2]]


def test_continuous_is_the_default():
    assert isinstance(scheduler(None).policy, Continuous)


def test_a_static_batch_takes_nobody_who_comes_later():
    s = scheduler(Static(), max_num_seqs=4)
    a, b = request(2, 3), request(2, 2)
    s.add(a)
    assert play(s) == [a]
    s.add(b)
    assert play(s) == [a]
    assert play(s) == [a]
    assert play(s) == [b]


def test_a_static_batch_that_reserves_its_longest_length_holds_fewer():
    """100 tokens of room: 4 texts by what they have, 2 at 40 reserved tokens, and at least one in any case."""
    rs = [4, 4, 4, 4]
    for reserve, first in [(0, [0, 1, 2, 3]), (40, [0, 1]), (30, [0, 1, 2]), (1000, [0])]:
        requests = [request(n, 2) for n in rs]
        assert timeline(Static(reserve), requests, n_blocks=25)[0] == first, reserve


def test_a_member_of_the_batch_that_lost_its_blocks_comes_back_before_the_next_batch():
    s = scheduler(Static(), n_blocks=7, block_size=2, max_num_seqs=3)
    a, b, c, d = request(3, 5), request(3, 3), request(4, 3), request(1, 1)
    for r in (a, b, c, d):
        s.add(r)
    seen = []
    while not s.idle:
        seen.append(play(s))
    assert seen == [[a, b, c], [a, b, c], [a, b], [a, c], [a], [d]]  # c comes back when b has ended, d does not come


def test_several_samples_take_as_many_places_of_a_batch():
    s = scheduler(Static(), max_num_seqs=3)
    leader, other = request(2, 2), request(2, 1)
    leader.followers = deque([request(2, 2)])
    third = request(2, 1)
    for r in (leader, other, third):
        s.add(r)
    assert play(s) == [leader, other]  # with the second sample, that is three
    assert third in s.waiting


def test_a_dynamic_batch_waits_until_it_is_full():
    s = scheduler(Dynamic(timeout=10.0), max_num_seqs=2)
    a, b = request(2, 1, arrival=0.0), request(2, 1, arrival=3.0)
    s.add(a)
    assert [play(s, now) for now in (0.0, 1.0, 2.0)] == [[], [], []]
    s.add(b)
    assert play(s, 3.0) == [a, b]


def test_a_dynamic_batch_waits_no_longer_than_its_timeout():
    s = scheduler(Dynamic(timeout=10.0), max_num_seqs=4)
    a, b = request(2, 2, arrival=5.0), request(2, 1, arrival=14.0)
    s.add(a)
    assert play(s, 14.9) == []
    s.add(b)
    assert play(s, 14.99) == []
    assert play(s, 15.0) == [a, b]  # a has waited for ten seconds
    c = request(2, 1, arrival=15.5)
    s.add(c)
    assert play(s, 15.6) == [a]  # nobody joins on the way
    assert play(s, 25.4) == []
    assert play(s, 25.5) == [c]


def test_the_oldest_counts_and_not_the_first_in_the_queue():
    s = scheduler(Dynamic(timeout=10.0), max_num_seqs=4)
    old, urgent = request(2, 1, arrival=0.0), Request([1], 2, priority=9, arrival=9.0)
    s.add(old)
    s.add(urgent)
    assert play(s, 9.5) == []
    assert play(s, 10.0) == [urgent, old]


def test_without_a_timeout_a_dynamic_batch_is_a_static_one():
    lengths = [1, 3, 2, 1, 2]
    static, dynamic = (
        timeline(policy, [request(2, n) for n in lengths], max_num_seqs=2) for policy in (Static(), Dynamic(0))
    )
    assert static == dynamic


@pytest.mark.parametrize("reserve", [-1, 1.5, True, "8", None])
def test_a_reserve_that_is_no_number_of_tokens_is_refused(reserve):
    for policy in (Static, lambda reserve: Dynamic(1.0, reserve)):
        with pytest.raises(ValueError, match=f"reserve must be 0 or a positive number of tokens, not {reserve!r}"):
            policy(reserve)


@pytest.mark.parametrize("timeout", [-0.1, float("nan"), float("inf")])
def test_a_timeout_that_never_ends_or_lies_in_the_past_is_refused(timeout):
    with pytest.raises(ValueError, match="timeout must be from 0 to 3600 seconds"):
        Dynamic(timeout)


@pytest.mark.parametrize("policy", [Continuous(), Static(), Static(reserve=30), Dynamic(0.002), Dynamic(0.0, 30)])
@pytest.mark.parametrize("pool", [200, 32])
def test_the_policy_changes_no_text(policy, pool):
    model = random_model()
    engine = Engine(model, None, pool // 4, 4, max_num_seqs=3, max_num_batched_tokens=12, policy=policy)
    engine.kv.v.fill_(torch.nan)
    engine.kv.k.fill_(torch.nan)
    prompts = [[i] * (3 * i % 7 + 1) for i in range(7)]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=4 * i % 11 + 1) for i in range(7)]
    done = engine.generate(prompts, params)
    assert [d.tokens for d in done] == [
        generate(model, None, prompt, p).tokens for prompt, p in zip(prompts, params, strict=True)
    ]
    samples = engine.add_samples([1, 2, 3], 5, SamplingParams(seed=0, max_tokens=4))
    for _ in engine.stream():
        pass
    for i, sample in enumerate(samples):
        assert sample.generation.tokens == generate(model, None, [1, 2, 3], SamplingParams(seed=i, max_tokens=4)).tokens


def test_samples_count_one_by_one_for_the_reservation_and_for_a_full_batch():
    """16 blocks of 4, 32 tokens for each text: two of them. Four samples of one prompt fill a batch of four places."""
    s = scheduler(Static(reserve=32), n_blocks=16, max_num_seqs=8)
    leader, other = request(2, 3), request(2, 3)
    leader.followers.append(request(2, 3))
    s.add(leader)
    s.add(other)
    assert play(s) == [leader]
    s = scheduler(Dynamic(timeout=10.0), max_num_seqs=4)
    leader = request(2, 3)
    leader.followers.extend(request(2, 3) for _ in range(3))
    s.add(leader)
    assert play(s, now=0.0) == [leader]
