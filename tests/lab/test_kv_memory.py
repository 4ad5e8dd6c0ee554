"""What reservation and paging set aside for texts of given lengths, by arithmetic and in the real pool, and that the
two agree; on the pinned lengths the empty part of the last block is what theory says."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from minillm.lab.kv_memory import (
    Slots,
    Text,
    contiguous,
    exact_room,
    paged,
    paged_room,
    power_of_two_room,
    random_lengths,
    read_lengths,
    room_of,
    run_lengths,
)
from minillm.policies import Static
from minillm.scheduler import Scheduler

BLOCK = 16


@pytest.fixture(scope="module")
def chat_run():
    return run_lengths(read_lengths("chat"), n_blocks=2048, block_size=BLOCK)


def test_the_last_token_is_chosen_and_never_kept():
    assert [Text(5, 1).kept, Text(5, 4).kept] == [5, 8]


@pytest.mark.parametrize(("prompt", "output"), [(0, 1), (1, 0), (-3, 4)])
def test_a_text_has_a_prompt_and_an_output(prompt, output):
    with pytest.raises(ValueError, match=f"not {prompt} and {output} tokens"):
        Text(prompt, output)


def test_a_worked_example_of_reservation():
    two = [Text(1024, 1), Text(2048, 1)]
    assert contiguous(two, room_of(4096)) == Slots(8192, 3072)
    assert contiguous(two, room_of(4096)).waste == 0.625
    assert contiguous(two, room_of(2048)).waste == 0.25
    assert contiguous(two, exact_room).waste == 0


@pytest.mark.parametrize(("output", "room"), [(1, 10), (2, 11), (3, 13), (4, 13), (5, 17)], ids=lambda n: str(n))
def test_an_output_is_rounded_up_to_a_power_of_two(output, room):
    assert power_of_two_room(Text(10, output)) == room


def test_a_room_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="keeps 12 tokens, and its room is 11"):
        contiguous([Text(3, 2), Text(4, 9)], room_of(11))


@pytest.mark.parametrize(("kept", "room"), [(1, 4), (3, 4), (4, 4), (5, 8), (8, 8)])
def test_blocks_are_whole(kept, room):
    assert paged_room(4)(Text(kept, 1)) == room
    assert paged([Text(kept, 1)] * 3, 4) == Slots(3 * room, 3 * kept)


def test_blocks_of_one_slot_waste_nothing():
    assert paged([Text(3, 4), Text(1, 1)], 1).waste == 0


def test_a_block_has_slots():
    with pytest.raises(ValueError, match="at least one slot, not 0"):
        paged([Text(1, 1)], 0)


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("n_blocks_for", [64, 400])
def test_the_real_pool_holds_at_each_end_what_arithmetic_says(block_size, n_blocks_for):
    texts = [Text(p, o) for p, o in random_lengths(40, seed=1, prompt_mean=12, output_mean=20, sigma=0.8, most=60)]
    run = run_lengths(texts, -(-n_blocks_for // block_size), block_size, max_num_seqs=8, max_num_batched_tokens=24)
    assert [end.used for end in run.ends] == [text.kept for text in texts]
    assert [end.reserved for end in run.ends] == [paged_room(block_size)(text) for text in texts]
    assert run.at_the_end == paged(texts, block_size)
    assert (run.preemptions > 0) == (n_blocks_for == 64)


def test_each_step_of_a_run_is_seen():
    """One text of 3 + 3 tokens in blocks of 2: it keeps 3, 4 and 5 tokens, in 4, 4 and 6 slots."""
    run = run_lengths([Text(3, 3)], n_blocks=4, block_size=2)
    assert run.steps == [[(0, 3, 4)], [(0, 4, 4)], [(0, 5, 6)]]
    assert run.over_time() == Slots(14, 12)
    assert run.over_time(room_of(8)) == Slots(24, 12)
    assert run.over_time(exact_room) == Slots(15, 12)


def test_a_batch_that_reserves_is_smaller_in_the_same_memory():
    texts = [Text(4, 4)] * 8
    most = {reserve: max(map(len, run_lengths(texts, 16, 4, policy=Static(reserve)).steps)) for reserve in (0, 8, 32)}
    assert most == {0: 8, 8: 8, 32: 2}


def test_a_run_that_cannot_go_on_says_so(monkeypatch):
    monkeypatch.setattr(Scheduler, "admit", lambda *args: None)
    with pytest.raises(RuntimeError, match="nobody can run"):
        run_lengths([Text(2, 2)], 4, 4)


@pytest.mark.parametrize("shape", ["chat", "instructions"])
def test_the_pinned_lengths_are_those_of_their_recipe(shape):
    file = resources.files("minillm.lab") / "workloads" / "lengths.json"
    raw = json.loads(file.read_text(encoding="utf-8"))["shapes"][shape]
    assert raw["lengths"] == [list(pair) for pair in random_lengths(**raw["made_by"])]
    assert read_lengths(shape) == [Text(*pair) for pair in raw["lengths"]]


def test_lengths_have_the_means_that_were_asked_for():
    pairs = random_lengths(20000, seed=0, prompt_mean=100, output_mean=50, sigma=0.5, most=10**9)
    assert sum(p for p, _ in pairs) / len(pairs) == pytest.approx(100, rel=0.02)
    assert sum(o for _, o in pairs) / len(pairs) == pytest.approx(50, rel=0.02)
    assert min(map(min, pairs)) >= 1
    assert max(map(sum, random_lengths(500, 0, 100, 50, 0.5, most=150))) <= 150


def test_an_unknown_shape_is_named():
    with pytest.raises(ValueError, match="no shape 'poems'; known: chat, instructions"):
        read_lengths("poems")


def test_on_pinned_lengths_the_last_block_is_empty_by_half_and_paging_wastes_under_4_percent(chat_run):
    """Measured in the real pool, at each text's end and over all steps."""
    texts = chat_run.texts
    assert len(texts) >= 300
    assert sum(text.kept for text in texts) / len(texts) > 200
    ends = [end.reserved - end.used for end in chat_run.ends]
    assert all(0 <= empty < BLOCK for empty in ends)
    assert sum(ends) / len(ends) == pytest.approx((BLOCK - 1) / 2, rel=0.1)
    assert chat_run.at_the_end.waste < 0.04

    parts = [part for step in chat_run.steps for part in step]
    assert sum(slots - kept for _, kept, slots in parts) / len(parts) == pytest.approx((BLOCK - 1) / 2, rel=0.1)
    assert chat_run.over_time().waste < 0.04


def test_on_pinned_lengths_contiguous_reservation_wastes_far_more(chat_run):
    longest = max(text.kept for text in chat_run.texts)
    for room in (room_of(2048), room_of(longest)):
        assert 0.6 < contiguous(chat_run.texts, room).waste < 0.8
        assert 0.6 < chat_run.over_time(room).waste < 0.8
    ways = [room_of(2048), power_of_two_room, exact_room, None]
    waste = [chat_run.over_time(room).waste for room in ways]
    assert waste == sorted(waste, reverse=True)
    assert waste[2] > 10 * waste[3]


def test_short_texts_are_the_exception():
    """With a mean below 180 tokens, half a block of 16 is more than 4 %."""
    texts = read_lengths("instructions")
    run = run_lengths(texts, 2048, BLOCK)
    assert sum(text.kept for text in texts) / len(texts) < 180
    assert (run.at_the_end.reserved - run.at_the_end.used) / len(texts) == pytest.approx((BLOCK - 1) / 2, rel=0.1)
    assert run.at_the_end.waste > 0.04
