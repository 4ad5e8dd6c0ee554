"""Replaying a trace: every number of a small trace is checked by hand, on a clock in which each pass takes a second."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from statistics import mean
from types import SimpleNamespace

import pytest

from minillm.engine import Engine
from minillm.generation import generate
from minillm.lab import serving
from minillm.lab.serving import Arrival, Clock, Part, poisson_trace, read_trace, replay
from minillm.policies import Dynamic, Static

TEXT = list(range(37))


@pytest.fixture
def hands(monkeypatch):
    """A clock whose hands only move when somebody moves them."""
    hands = SimpleNamespace(now=0.0)
    monkeypatch.setattr(serving, "time", SimpleNamespace(perf_counter=lambda: hands.now))
    return hands


def engine_on(hands, model, **limits) -> Engine:
    """An engine in which every pass of the model takes exactly one second."""
    engine = Engine(model, None, **{"n_blocks": 40, "block_size": 4, "max_num_seqs": 2, **limits})
    forward = engine.forward

    def slow(step):
        hands.now += 1.0
        return forward(step)

    engine.forward = slow
    return engine


THREE = [Arrival(0.0, [1, 2, 3], 3), Arrival(0.5, [4, 5], 2), Arrival(0.5, [6, 7, 8, 9], 1)]


def test_a_trace_of_three_requests_by_hand(hands, tiny):
    run = replay(engine_on(hands, tiny), THREE)
    assert [step.parts for step in run.steps] == [
        [Part(0, "prefill", 3)],
        [Part(0, "decode", 1, past=3), Part(1, "prefill", 2)],
        [Part(0, "decode", 1, past=4), Part(1, "decode", 1, past=2)],
        [Part(2, "prefill", 4)],
    ]
    assert [(step.start, step.end) for step in run.steps] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert [step.tokens for step in run.steps] == [3, 3, 2, 4]
    assert [step.waiting for step in run.steps] == [0, 1, 1, 0]
    assert [step.running for step in run.steps] == [1, 2, 0, 0]  # who ends with a step has left after it
    assert [(step.owned, step.held) for step in run.steps] == [(1, 3), (2, 6), (0, 0), (0, 0)]
    assert [t.tokens for t in run.times] == [(1, 2, 3), (2, 3), (4,)]
    assert run.utilisation == [0.5, 1, 1, 0.5]
    assert run.preemptions == 0 and run.max_num_seqs == 2


def test_the_tokens_are_those_of_each_request_alone(hands, tiny):
    run = replay(engine_on(hands, tiny), THREE)
    assert run.tokens == [generate(tiny, None, each.prompt, each.params).tokens for each in THREE]
    assert [len(tokens) for tokens in run.tokens] == [3, 2, 1]


def test_an_arrival_in_the_middle_of_a_step_keeps_its_own_time(hands, tiny):
    run = replay(engine_on(hands, tiny), THREE)
    assert [t.arrival for t in run.times] == [0.0, 0.5, 0.5]
    assert [t.ttft for t in run.times] == [1.0, 1.5, 3.5]  # the queue is part of it


def test_results_stand_in_the_order_of_the_trace_whatever_the_order_of_arrival(hands, tiny):
    backwards = [Arrival(5.0, [6, 7, 8, 9], 1), Arrival(0.0, [1, 2, 3], 2)]
    run = replay(engine_on(hands, tiny), backwards)
    assert [t.arrival for t in run.times] == [5.0, 0.0]
    assert [len(tokens) for tokens in run.tokens] == [1, 2]
    assert [step.parts[0].request for step in run.steps] == [1, 1, 0]


def test_the_clock_jumps_over_the_time_in_which_nobody_is_there(hands, tiny):
    run = replay(engine_on(hands, tiny), [Arrival(0.0, [1], 1), Arrival(3600.0, [2], 2)])
    assert [(step.start, step.end) for step in run.steps] == [(0, 1), (3600, 3601), (3601, 3602)]
    assert hands.now == 3  # three passes, and not an hour
    assert run.times[1].ttft == 1


def test_the_time_for_which_a_policy_waits_is_skipped_too(hands, tiny):
    run = replay(engine_on(hands, tiny, policy=Dynamic(timeout=2.5)), [Arrival(1.0, [1, 2], 1)])
    assert run.steps[0].start == pytest.approx(3.5, abs=2e-3)
    assert run.times[0].ttft == pytest.approx(3.5, abs=2e-3)
    assert hands.now == 1


def test_a_static_batch_lets_nobody_join_on_the_way(hands, tiny):
    trace = [Arrival(0.0, [1, 2], 3), Arrival(0.5, [3], 1)]
    run = replay(engine_on(hands, tiny, policy=Static()), trace)
    assert [[part.request for part in step.parts] for step in run.steps] == [[0], [0], [0], [1]]
    assert run.times[1].ttft == 3.5


def test_a_long_prompt_is_recorded_chunk_by_chunk(hands, tiny):
    run = replay(engine_on(hands, tiny, max_num_batched_tokens=4), [Arrival(0.0, TEXT[:9], 2)])
    chunks = [("prefill", 4, 0), ("prefill", 4, 4), ("prefill", 1, 8), ("decode", 1, 9)]
    assert [step.parts for step in run.steps] == [[Part(0, *chunk)] for chunk in chunks]


def test_a_shared_block_is_held_once(hands, tiny):
    trace = [Arrival(0.0, TEXT[:9], 3), Arrival(0.5, [*TEXT[:8], 30], 3)]
    run = replay(engine_on(hands, tiny), trace)
    assert run.steps[1].parts == [Part(0, "decode", 1, past=9), Part(1, "prefill", 1, past=8)]  # eight are found
    assert (run.steps[1].owned, run.steps[1].held) == (4, 8 + 2 + 1)


def test_preemptions_of_this_replay_are_counted_and_not_those_before(hands, tiny):
    trace = [Arrival(0.0, TEXT[i : i + 6], 12) for i in (0, 10)]
    engine = engine_on(hands, tiny, n_blocks=6, sharing=False)
    runs = [replay(engine, trace), replay(engine, trace)]
    assert runs[0].preemptions == runs[1].preemptions > 0
    assert engine.scheduler.met["preemptions"] == 2 * runs[0].preemptions
    assert runs[0].tokens == [generate(tiny, None, each.prompt, each.params).tokens for each in trace]
    assert sum(step.tokens for step in runs[0].steps) > 2 * 17  # some rows are computed twice


def test_a_second_replay_has_a_clock_of_its_own(hands, tiny):
    engine = engine_on(hands, tiny, sharing=False)
    assert replay(engine, THREE) == replay(engine, THREE)


def test_an_engine_that_is_at_work_is_not_taken_over(hands, tiny):
    engine = engine_on(hands, tiny)
    engine.add([1, 2, 3])
    with pytest.raises(ValueError, match="still has requests"):
        replay(engine, THREE)


def test_a_request_that_cannot_run_is_refused_before_the_others_have_started(hands, tiny):
    engine = engine_on(hands, tiny, n_blocks=10)
    with pytest.raises(ValueError, match="blocks"):
        replay(engine, [THREE[0], Arrival(9.0, [1] * 100, 100)])
    assert hands.now == 0 and engine.idle


def test_a_clock_runs_and_skips_forwards_only(hands):
    hands.now = 100.0
    clock = Clock()
    hands.now += 2
    assert clock() == 2
    clock.skip(5)
    assert clock() == 7
    clock.skip(-3)
    assert clock() == 7


def test_a_poisson_trace_has_the_rate_and_the_lengths_that_were_asked_for():
    trace = poisson_trace(4000, rate=20.0, seed=1, text=TEXT, prompt=(48, 0.8, 256), output=(20, 0.5, 64))
    assert len(trace) == 4000
    times = [0.0, *(each.at for each in trace)]
    gaps = [b - a for a, b in pairwise(times)]
    assert min(gaps) >= 0 and mean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert mean(gap > 1 / 20 for gap in gaps) == pytest.approx(math.exp(-1), abs=0.03)  # no clockwork: exponential
    for lengths, median, sigma, most in (
        ([len(each.prompt) for each in trace], 48, 0.8, 256),
        ([each.max_tokens for each in trace], 20, 0.5, 64),
    ):
        assert min(lengths) >= 1 and max(lengths) == most
        assert mean(n <= median for n in lengths) == pytest.approx(0.5, abs=0.03)
        assert mean(n <= median * math.exp(sigma) for n in lengths) == pytest.approx(0.841, abs=0.02)


def test_prompts_are_pieces_of_the_text_from_different_places():
    trace = poisson_trace(50, rate=1.0, seed=2, text=TEXT)
    for each in trace:
        assert all((b - a) % 37 == 1 for a, b in pairwise(each.prompt))
    assert len({each.prompt[0] for each in trace}) > 20


def test_the_seed_decides_a_poisson_trace():
    first, again, other = (poisson_trace(20, 1.0, seed, TEXT) for seed in (3, 3, 4))
    assert first == again != other


@pytest.mark.parametrize(("n", "rate"), [(0, 1.0), (-1, 1.0), (3, 0.0), (3, -2.0), (3, math.nan)])
def test_a_poisson_trace_needs_requests_and_a_rate(n, rate):
    with pytest.raises(ValueError, match="at least one request, a rate above 0"):
        poisson_trace(n, rate, 0, TEXT)


def write(tmp_path, *lines):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_a_trace_file_gives_prompts_or_their_lengths(tmp_path):
    lines = ['{"at": 0, "prompt_tokens": 3, "max_tokens": 5}', "", '{"at": 1.5, "prompt": [7, 0], "max_tokens": 1}']
    first, second = read_trace(write(tmp_path, *lines), TEXT)
    assert (first.at, len(first.prompt), first.max_tokens) == (0.0, 3, 5)
    assert all((b - a) % 37 == 1 for a, b in pairwise(first.prompt))  # a piece of the text
    assert second == Arrival(1.5, [7, 0], 1)


def test_prompts_that_give_their_length_alone_differ_from_line_to_line(tmp_path):
    text = list(range(1000))
    trace = read_trace(write(tmp_path, *['{"at": 0, "prompt_tokens": 4, "max_tokens": 1}'] * 9), text)
    assert len({tuple(each.prompt) for each in trace}) == 9


GOOD = {"at": 0, "prompt_tokens": 3, "max_tokens": 5}
BAD_LINES = [
    "{",
    "[]",
    "7",
    "null",
    '"at"',
    *(json.dumps({k: v for k, v in GOOD.items() if k != missing}) for missing in GOOD),
    *(json.dumps(GOOD | {"at": at}) for at in (-1, "soon", "x" * 200, None, math.inf, math.nan, [0])),
    *(json.dumps(GOOD | {"max_tokens": most}) for most in (0, -2, 1.5, "5", None, True)),
    *(json.dumps(GOOD | {"prompt_tokens": n}) for n in (0, -1, 2.5, "3")),
    *(json.dumps(GOOD | {"prompt": ids}) for ids in ([], "a text", 5, {"a": 1}, [1, "x"], [1.5], [True], [[1]])),
]


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_of_a_trace_file_is_named(tmp_path, line):
    path = write(tmp_path, json.dumps(GOOD), "", line, json.dumps(GOOD))
    with pytest.raises(ValueError, match=r"trace\.jsonl, line 3: expected .*max_tokens") as caught:
        read_trace(path, TEXT)
    assert str(caught.value).endswith(f"not {line[:80]}")


@pytest.mark.parametrize("lines", [(), ("", "  ")])
def test_a_trace_file_without_a_request_says_so(tmp_path, lines):
    with pytest.raises(ValueError, match="has no request in it"):
        read_trace(write(tmp_path, *lines), TEXT)


def test_a_trace_runs_greedily_and_to_the_full():
    params = Arrival(0.0, [1], 9).params
    assert params.temperature == 0 and params.max_tokens == 9 and params.ignore_eos
