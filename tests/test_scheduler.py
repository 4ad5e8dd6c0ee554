"""The scheduler, on small scenes that can be followed by hand. Its random life is in test_fingerprint.py."""

from __future__ import annotations

from collections import deque

import pytest

from minillm.blocks import BlockPool
from minillm.policies import Static
from minillm.request import Request, Step
from minillm.scheduler import Scheduler


def scheduler(n_blocks=100, block_size=4, sharing=False, **kwargs) -> Scheduler:
    return Scheduler(BlockPool(n_blocks, block_size, sharing), **kwargs)


def request(n: int, more: int = 10, priority: int = 0, start: int = 0) -> Request:
    """A prompt of n tokens that may grow by `more`."""
    return Request(list(range(start, start + n)), n + more, priority)


def spans(step: Step) -> list[tuple[Request, int, int]]:
    return [(span.request, span.start, span.count) for span in step.spans]


def play(s: Scheduler, token: int = 0) -> Step:
    """One step as the engine does it: all rows are right, and each complete text chooses `token`."""
    step = s.schedule()
    for span in step.spans:
        complete = span.end == len(span.request.tokens)
        s.computed(span.request, span.count)
        if complete:
            for each in (span.request, *s.fork(span.request)):
                each.tokens.append(token)
                if len(each.tokens) == each.limit:
                    s.finish(each)
    s.blocks.check_integrity(r.block_table for r in s.running)
    return step


def decoding(s: Scheduler, n: int) -> list[Request]:
    """n texts of which all but the last token is computed."""
    rs = [request(3) for _ in range(n)]
    for r in rs:
        s.add(r)
    while not all(r.wants_one for r in rs):
        play(s)
    return rs


# --- Doors. ---


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1", None])
def test_limits_must_be_whole_numbers_of_at_least_one(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, not {value!r}"):
        scheduler(**{name: value})


def test_a_request_that_could_not_run_even_alone_is_refused_and_one_that_just_can_is_not():
    s = scheduler(n_blocks=3, block_size=4)
    with pytest.raises(ValueError, match="may grow to 14 tokens, and needs 4 blocks of 4; the pool has 3"):
        s.add(request(4, more=10))
    with pytest.raises(ValueError, match="at least one token"):
        s.add(Request([], 5))
    assert s.idle
    assert s.arrived == 0
    just = request(4, more=9)  # 13 tokens, of which the last is never fed
    s.add(just)
    while not s.idle:
        play(s)
    assert len(just.tokens) == 13


# --- What a request wants. ---


def test_what_a_request_wants_is_what_is_not_computed():
    r = Request([1, 2, 3, 4, 5], 9)
    assert (r.wanted, r.wants_one) == (5, False)
    r.num_computed = 4
    assert (r.wanted, r.wants_one) == (1, True)
    r.draft = [6, 7]
    assert (r.wanted, r.wants_one) == (3, True)


def test_the_tokens_of_a_span_run_on_into_the_guesses():
    r = Request([1, 2, 3, 4, 5], 9, draft=[6, 7, 8])
    s = scheduler()
    s.add(r)
    (span,) = s.schedule().spans
    assert (span.start, span.count, span.end, span.ids) == (0, 8, 8, [1, 2, 3, 4, 5, 6, 7, 8])
    s.computed(r, 4)
    (span,) = s.schedule().spans
    assert span.ids == [5, 6, 7, 8]
    r.draft = []
    (span,) = s.schedule().spans
    assert span.ids == [5]


# --- Order and limits. ---


def test_first_come_first_served_up_to_max_num_seqs():
    s = scheduler(max_num_seqs=2)
    a, b, c = (request(n) for n in (3, 5, 2))
    for r in (a, b, c):
        s.add(r)
    assert spans(play(s)) == [(a, 0, 3), (b, 0, 5)]
    assert spans(play(s)) == [(a, 3, 1), (b, 5, 1)]
    s.finish(a)
    assert spans(play(s)) == [(b, 6, 1), (c, 0, 2)]


def test_a_higher_priority_is_first_in_the_queue_and_in_the_step():
    s = scheduler(max_num_seqs=3)
    low, normal, high, high2 = (request(2, priority=p) for p in (-1, 0, 1, 1))
    for r in (low, normal, high, high2):
        s.add(r)
    assert [r for r, *_ in spans(play(s))] == [high, high2, normal]
    highest = request(2, priority=7)
    s.add(highest)
    assert [r for r, *_ in spans(play(s))] == [high, high2, normal]  # a waiting request pushes nobody out
    s.finish(high2)
    assert [r for r, *_ in spans(play(s))] == [high, normal, highest]  # those who run first, then the new one
    assert [r for r, *_ in spans(play(s))] == [highest, high, normal]


def test_a_long_request_in_front_is_not_overtaken_when_it_does_not_fit():
    s = scheduler(n_blocks=4, block_size=4)
    a, long, short = request(9, more=3), request(12, more=1), request(1)
    for r in (a, long, short):
        s.add(r)
    for _ in range(3):
        assert [r for r, *_ in spans(play(s))] == [a]
    assert spans(play(s)) == [(long, 0, 12), (short, 0, 1)]


def test_a_prompt_is_cut_where_the_budget_ends_and_the_next_one_takes_the_rest():
    s = scheduler(max_num_batched_tokens=8)
    a, b = request(11), request(7)
    s.add(a)
    s.add(b)
    assert spans(play(s)) == [(a, 0, 8)]
    assert len(a.tokens) == 11  # no token yet
    assert spans(play(s)) == [(a, 8, 3), (b, 0, 5)]
    assert (len(a.tokens), len(b.tokens)) == (12, 7)
    assert spans(play(s)) == [(a, 11, 1), (b, 5, 2)]
    assert s.met["chunks"] == 2


def test_one_token_for_each_text_behind_is_kept_back_from_a_long_prompt():
    s = scheduler(max_num_batched_tokens=6)
    a, b = request(2, priority=0), request(2, priority=0)
    s.add(a)
    s.add(b)
    play(s)
    long = request(20, priority=1)  # stands before them in each step
    s.add(long)
    assert spans(play(s)) == [(a, 2, 1), (b, 2, 1), (long, 0, 4)]
    assert spans(play(s)) == [(long, 4, 4), (a, 3, 1), (b, 3, 1)]


def test_a_long_prompt_gets_at_least_one_token_of_a_tight_budget():
    s = scheduler(max_num_batched_tokens=3, max_num_seqs=8)
    small = [request(1) for _ in range(2)]
    for r in small:
        s.add(r)
    play(s)
    long = request(9, priority=1)
    s.add(long)
    assert spans(play(s)) == [(small[0], 1, 1), (small[1], 1, 1), (long, 0, 1)]
    s.add(third := request(1, priority=2))
    assert spans(play(s)) == [(long, 1, 1), (small[0], 2, 1), (small[1], 2, 1)]
    s.finish(small[1])
    assert spans(play(s)) == [(long, 2, 2), (small[0], 3, 1)]
    assert third in s.waiting


def test_a_long_prompt_gets_on_even_when_more_texts_stand_behind_it_than_the_budget_has_tokens():
    s = scheduler(max_num_batched_tokens=2)
    leader = leader_with(3, tokens=3)
    s.add(leader)
    play(s)
    long = request(9, priority=1)
    s.add(long)
    assert spans(play(s)) == [(leader, 2, 1), (long, 0, 1)]
    assert len(s.running) == 5  # the samples have joined
    assert spans(play(s)) == [(long, 1, 1), (leader, 3, 1)]


def test_more_texts_than_the_budget_has_tokens_are_served_in_their_order():
    s = scheduler(max_num_batched_tokens=4, max_num_seqs=8)
    rs = [request(1, more=2) for _ in range(4)]
    leader = request(1, more=2, priority=1)
    leader.followers = deque(request(1, more=2, priority=1) for _ in range(2))
    for r in (*rs, leader):
        s.add(r)
    play(s)  # the leader and three others; the leader's samples join
    assert len(s.running) == 6
    step = play(s)
    assert sum(span.count for span in step.spans) == 4
    assert [span.request.priority for span in step.spans] == [1, 1, 1, 0]


def test_nobody_there_gives_an_empty_step():
    s = scheduler()
    assert s.schedule() == Step([])
    assert s.idle


# --- Guesses. ---


def test_guesses_are_cut_to_the_budget():
    s = scheduler(max_num_batched_tokens=4)
    a = request(3)
    s.add(a)
    play(s)
    a.draft = [7, 7, 7, 7, 7, 7]
    assert spans(s.schedule()) == [(a, 3, 4)]
    assert a.draft == [7, 7, 7]


def test_guesses_for_a_prompt_that_is_not_done_are_dropped():
    s = scheduler(max_num_batched_tokens=4)
    a = request(9)
    s.add(a)
    play(s)
    a.draft = [7, 7]
    assert spans(s.schedule()) == [(a, 4, 4)]
    assert a.draft == []


def test_guesses_are_given_up_before_anybody_loses_its_blocks():
    s = scheduler(n_blocks=4, block_size=2)
    a, b = request(3, more=5), request(3, more=5)
    s.add(a)
    s.add(b)
    play(s)
    a.draft = [7, 7, 7]
    assert spans(s.schedule()) == [(a, 3, 1), (b, 3, 1)]
    assert a.draft == []
    assert (s.met["drafts given up"], s.met["preemptions"]) == (1, 0)


def test_only_right_guesses_count_as_computed():
    s = scheduler()
    a = request(3)
    s.add(a)
    play(s)
    a.draft = [7, 8, 9]
    assert spans(s.schedule()) == [(a, 3, 4)]
    a.tokens += [7, 5]  # the first was right, the second is the model's own
    a.draft = []
    s.computed(a, 2)
    assert spans(s.schedule()) == [(a, 5, 1)]


# --- Preemption. ---


def test_when_blocks_run_out_the_newest_of_the_lowest_priority_waits_with_its_tokens():
    s = scheduler(n_blocks=6, block_size=2)
    a, b, c = request(4, more=6, priority=0), request(3, more=6, priority=1), request(3, more=6, priority=0)
    for r in (a, b, c):
        s.add(r)
    assert [r for r, *_ in spans(play(s))] == [b, a, c]
    # Two blocks each. In the next step only a needs a third, and there is none: c loses its own.
    assert spans(play(s, token=1)) == [(b, 3, 1), (a, 4, 1)]
    assert s.waiting == [c]
    assert (c.tokens, c.num_computed, c.block_table) == ([0, 1, 2, 0], 0, [])
    assert s.met["preemptions"] == 1
    while c in s.waiting:
        play(s, token=1)
    assert c.tokens == [0, 1, 2, 0, 1]  # its old tokens went through as a prompt


def test_nobody_joins_in_a_step_in_which_somebody_lost_its_blocks():
    s = scheduler(n_blocks=4, block_size=4, max_num_seqs=5)
    a, b = request(4, more=9), request(8, more=4)
    s.add(a)
    s.add(b)
    play(s)
    tiny = request(1, more=1, priority=5)
    s.add(tiny)
    assert spans(play(s)) == [(a, 4, 1)]  # a took the last block, b wanted one; tiny would fit now
    assert s.waiting == [tiny, b]
    assert spans(play(s)) == [(a, 5, 1), (tiny, 0, 1)]


def test_a_preempted_request_waits_in_its_old_place():
    s = scheduler(n_blocks=4, block_size=2, max_num_seqs=2)
    a, b, c = request(4, more=5), request(4, more=3), request(1, more=1)
    for r in (a, b, c):
        s.add(r)
    play(s)
    assert spans(play(s)) == [(a, 4, 1)]
    assert s.waiting == [b, c]


def test_one_that_must_preempt_itself_waits():
    """The last in order cannot get a block: nobody comes after it."""
    s = scheduler(n_blocks=4, block_size=2)
    a, b = request(3, more=6), request(4, more=3)
    s.add(a)
    s.add(b)
    play(s)
    assert spans(play(s)) == [(a, 3, 1)]
    assert s.waiting == [b]
    assert s.met["preemptions"] == 1


def test_a_preempted_request_finds_its_own_blocks_again():
    s = scheduler(n_blocks=6, block_size=2, sharing=True)
    a, b = request(4, more=6), request(6, more=3, start=20)
    s.add(a)
    s.add(b)
    play(s)
    play(s)  # a takes the last block, b needs another
    assert s.waiting == [b]
    play(s)
    s.finish(a)
    assert spans(s.schedule()) == [(b, 6, 1)]
    assert b.num_cached == 0  # what was found when it first came


# --- Sharing. ---


def test_a_second_request_computes_only_what_the_first_has_not():
    s = scheduler(sharing=True)
    a = request(10)
    s.add(a)
    play(s)
    b = request(9)
    s.add(b)
    assert spans(s.schedule())[1] == (b, 8, 1)
    assert b.block_table[:2] == a.block_table[:2]
    assert b.block_table[2] != a.block_table[2]
    assert b.num_cached == 8
    assert s.met["cache hits"] == 1


def test_a_prompt_known_to_its_end_computes_its_last_block_again():
    s = scheduler(sharing=True)
    a, b = request(8), request(8)
    s.add(a)
    play(s)
    s.add(b)
    assert spans(s.schedule())[1] == (b, 4, 4)
    assert set(a.block_table) & set(b.block_table) == {a.block_table[0]}
    assert s.met["cache hits"] == 1


def test_the_budget_counts_what_is_computed_and_not_what_is_found():
    s = scheduler(sharing=True, max_num_batched_tokens=16)
    a = request(16)
    s.add(a)
    play(s)
    b, c = request(16), request(16)
    s.add(b)
    s.add(c)
    assert spans(s.schedule()) == [(a, 16, 1), (b, 12, 4), (c, 12, 4)]


def test_what_is_found_must_not_be_counted_as_room():
    """Four blocks are cached; a text that finds two of them can take only the other two."""
    s = scheduler(n_blocks=4, block_size=2, sharing=True)
    a = request(8, more=1)
    s.add(a)
    play(s)
    assert s.idle
    assert len(s.blocks.cached) == 4
    b = Request([0, 1, 2, 3, 9, 9, 9, 9], 9)
    s.add(b)
    assert spans(s.schedule()) == [(b, 4, 4)]
    assert sorted(b.block_table) == [0, 1, 2, 3]


# --- Several samples. ---


def leader_with(n: int, tokens: int = 6, more: int = 5) -> Request:
    leader = request(tokens, more)
    leader.followers = deque(request(tokens, more) for _ in range(n))
    return leader


def test_samples_join_when_the_prompt_is_computed_and_copy_only_the_block_that_they_write():
    s = scheduler(max_num_batched_tokens=4)
    leader = leader_with(2)
    first, second = leader.followers
    s.add(leader)
    play(s)
    assert s.running == [leader]
    play(s, token=7)
    assert s.running == [leader, first, second]
    assert leader.block_table == first.block_table == second.block_table
    assert first.num_computed == 6 and first.tokens[6:] == [7]
    assert (first.num_cached, leader.num_cached) == (6, 0)
    full, tail = leader.block_table
    step = play(s)
    assert spans(step) == [(r, 6, 1) for r in (leader, first, second)]
    # The first two write into copies; the last owner needs none.
    assert list(step.copies) == [(tail, leader.block_table[1]), (tail, first.block_table[1])]
    assert second.block_table == [full, tail]
    assert s.blocks.references[full] == 3


def test_samples_of_whole_blocks_need_no_copies():
    s = scheduler()
    leader = leader_with(2, tokens=8)
    s.add(leader)
    play(s)
    assert not play(s).copies
    assert len({r.block_table[2] for r in s.running}) == 3


def test_samples_share_what_is_computed_and_not_the_blocks_of_the_leaders_wrong_guesses():
    """Only the first block that a span writes is looked at for other owners: those behind it must have none."""
    s = scheduler(block_size=2)
    leader = leader_with(1, tokens=3)
    (follower,) = leader.followers
    leader.draft = [7, 7, 7, 7]
    s.add(leader)
    s.schedule()
    s.computed(leader, 3)  # no guess was right
    leader.draft = []
    s.fork(leader)
    assert len(leader.block_table) == 4
    assert follower.block_table == leader.block_table[:2]
    s.blocks.check_integrity(r.block_table for r in s.running)


def test_a_sample_without_a_place_waits_with_its_first_token():
    s = scheduler(max_num_seqs=2)
    leader = leader_with(2)
    first, second = leader.followers
    s.add(leader)
    other = request(1)
    s.add(other)
    play(s, token=7)
    # The leader and `other` filled both places before the samples could join.
    assert s.running == [leader, other]
    assert s.waiting == [first, second]
    assert first.tokens == [0, 1, 2, 3, 4, 5, 7]
    s.finish(other)
    assert spans(play(s)) == [(leader, 6, 1), (first, 0, 7)]


def test_samples_join_before_those_who_came_later():
    s = scheduler(max_num_seqs=1)
    leader = leader_with(1, more=1)
    (follower,) = leader.followers
    follower.limit = 8
    s.add(leader)
    later = request(1)
    s.add(later)
    play(s)
    assert s.waiting == [follower, later]


@pytest.mark.parametrize("steps", [0, 1])
def test_when_a_leader_goes_the_first_sample_takes_its_place(steps):
    s = scheduler(max_num_batched_tokens=4)
    leader = leader_with(2)
    first, second = leader.followers
    later = request(1)
    s.add(leader)
    s.add(later)
    for _ in range(steps):
        play(s)
    s.finish(leader)
    assert s.waiting == [first, later]
    assert list(first.followers) == [second]
    assert not leader.followers
    play(s)
    play(s)
    assert first in s.running and second in s.running


def test_a_sample_that_is_given_up_before_it_joins_never_does():
    s = scheduler(max_num_batched_tokens=4)
    leader = leader_with(2)
    first, second = leader.followers
    s.add(leader)
    play(s)
    s.finish(first)
    play(s)
    assert s.running == [leader, second]
    assert len(first.tokens) == 6


def test_a_leader_that_loses_its_blocks_keeps_its_samples():
    s = scheduler(n_blocks=6, block_size=2, max_num_batched_tokens=5)
    a, leader = request(4, more=8), leader_with(1, tokens=8, more=2)
    (follower,) = leader.followers
    s.add(a)
    s.add(leader)
    while not s.met["preemptions"]:
        assert not s.idle
        play(s)
    assert s.waiting == [leader]
    assert list(leader.followers) == [follower]
    while not s.idle:
        play(s)
    assert len(follower.tokens) == len(leader.tokens) == 10


def test_a_copy_needs_a_block_and_without_one_the_last_sample_waits():
    s = scheduler(n_blocks=2, block_size=4)
    leader = leader_with(1, more=2)
    (follower,) = leader.followers
    s.add(leader)
    play(s)
    assert s.blocks.available == 0
    step = play(s)
    assert (spans(step), step.copies) == ([(leader, 6, 1)], ())  # it is the only owner now
    assert follower.num_computed == 0
    assert spans(play(s)) == [(follower, 0, 7)]


# --- Ends. ---


def test_what_ends_leaves_no_block_wherever_it_was():
    s = scheduler(n_blocks=20, max_num_seqs=2, max_num_batched_tokens=6)
    a, b, c = request(4), request(9), request(3)
    for r in (a, b, c):
        s.add(r)
    play(s)
    assert b.wanted > 1 and b in s.running and c in s.waiting  # in mid-prefill; waiting
    for r in (b, c, a):
        s.finish(r)
        assert r.block_table == []
        s.blocks.check_integrity(x.block_table for x in s.running)
    assert s.idle
    assert len(s.blocks.free) == 20


def test_a_step_whose_rows_chose_no_tokens_is_scheduled_again():
    """A step can be interrupted after its rows were computed, and before its texts went on."""
    s = scheduler()
    a = request(5)
    s.add(a)
    step = s.schedule()
    s.computed(a, 5)
    assert spans(s.schedule()) == [(a, 4, 1)]
    assert step.spans[0].count == 5


def test_the_beginning_of_a_text_stays_in_the_cache_longer_than_its_end():
    s = scheduler(n_blocks=3, block_size=2, sharing=True)
    s.add(request(6, more=1))
    play(s)
    s.add(request(2, more=1, start=20))
    play(s)
    assert s.blocks.evictions == 1
    assert len(s.blocks.find([0, 1, 2, 3, 4, 5, 6])) == 2


def test_samples_do_not_push_in_front_of_whom_is_served_before_them():
    s = scheduler(max_num_seqs=2)
    leader, follower, urgent = request(5), request(5), request(5, priority=1)
    leader.followers.append(follower)
    s.add(leader)
    step = s.schedule()
    s.add(urgent)
    s.computed(leader, step.spans[0].count)
    assert s.fork(leader) == [follower]
    assert (s.running, s.waiting) == ([leader], [urgent, follower])
    assert follower.num_cached is None  # it was given nothing


def test_guesses_in_front_leave_the_texts_behind_their_one_token():
    s = scheduler(max_num_batched_tokens=4)
    rs = decoding(s, 3)
    rs[0].draft = [1, 2, 3]
    assert [(span.request, span.count) for span in s.schedule().spans] == [(rs[0], 2), (rs[1], 1), (rs[2], 1)]
    assert rs[0].draft == [1]


@pytest.mark.parametrize(("tokens", "kept"), [(1, [2, 1]), (2, [2, 0]), (3, [1, 0]), (5, [0, 0])])
def test_guesses_leave_their_room_to_a_prompt_that_waits(tokens, kept):
    """Else they would fill a tight budget at every step, and the prompt would wait until a text is done."""
    s = scheduler(max_num_batched_tokens=6)
    rs = decoding(s, 2)
    for r in rs:
        r.draft = [1, 2]
    late = request(tokens)
    s.add(late)
    assert spans(s.schedule())[-1] == (late, 0, min(tokens, 4))
    assert [len(r.draft) for r in rs] == kept


def test_guesses_stay_when_the_prompt_that_waits_could_not_join():
    for keep_out in ({"max_num_seqs": 1}, {"n_blocks": 4, "block_size": 2}, {"policy": Static()}):
        s = scheduler(max_num_batched_tokens=4, **keep_out)
        a, late = request(3, more=3), request(5, more=4)
        s.add(a)
        while not a.wants_one:
            play(s)
        s.add(late)
        a.draft = [1, 2]
        assert spans(s.schedule()) == [(a, 3, 3)], keep_out
        assert a.draft == [1, 2]


def test_guesses_need_not_make_room_for_what_a_waiting_prompt_finds_in_the_cache():
    s = scheduler(max_num_batched_tokens=6, block_size=4, sharing=True)
    first = request(9)
    s.add(first)
    while not first.wants_one:
        play(s)
    first.draft = [7, 7, 7, 7]
    late = request(10)  # the same beginning: two blocks of it are there
    s.add(late)
    assert spans(s.schedule()) == [(first, first.num_computed, 4), (late, 8, 2)]
    assert first.draft == [7, 7, 7]
