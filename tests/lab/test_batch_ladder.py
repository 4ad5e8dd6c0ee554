"""The rungs of many requests: the same texts, and memory and utilisation as counted by hand.

No test looks at how fast anything is. The hand counts use requests whose steps can be written down.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import TINY, tiny_model

from minillm.drafters import ModelDrafter, NgramDrafter
from minillm.generation import generate
from minillm.lab import batch_ladder
from minillm.lab.batch_ladder import RUNGS, Run, climb
from minillm.lab.ladder import as_json
from minillm.lab.metrics import RequestTimes
from minillm.lab.roofline import Limits
from minillm.lab.serving import Arrival
from minillm.lab.workload import Requests
from minillm.policies import Continuous

ROW = TINY.kv_elements_per_token * 8  # bytes of one token in float64

WORKLOAD = Requests(
    "few",
    trace=[Arrival(0.0, [(3 * i + j) % 37 for j in range(5 + i)], 3 + 4 * (i % 3)) for i in range(7)],
    max_num_seqs=4,
    block_size=4,
    n_blocks=16,
    reserve=24,
    repeats=1,
)


@pytest.mark.parametrize("seed", range(3))
def test_every_rung_writes_the_texts_of_the_plain_loop(seed):
    model = tiny_model(seed)
    texts = [generate(model, None, a.prompt, a.params).tokens for a in WORKLOAD.trace]
    assert len({tuple(text) for text in texts}) == len(texts)
    for rung in RUNGS:
        run = rung.run(model, WORKLOAD)
        assert run.tokens == texts
        assert [len(times.tokens) for times in run.times] == [a.max_tokens for a in WORKLOAD.trace]
        assert all(times.arrival == 0 for times in run.times)
        assert len(run.reserved) == len(run.used) == len(run.utilisation)
        assert all(0 <= used <= reserved for used, reserved in zip(run.used, run.reserved, strict=True))
    rows = climb(model, WORKLOAD, progress=False)
    assert all(row.same_tokens for row in rows)


def test_each_rung_is_compared_with_an_earlier_one():
    assert [rung.stage for rung in RUNGS] == ["one_by_one", "static", "paged", "continuous", "everything"]
    for i, rung in enumerate(RUNGS[1:], start=1):
        assert rung.against in [earlier.stage for earlier in RUNGS[:i]]


def test_one_by_one_uses_one_place_and_the_length_of_one_text():
    run = RUNGS[0].run(tiny_model(), replace(WORKLOAD, trace=[Arrival(0.0, [1, 2, 3], 2), Arrival(0.0, [4], 3)]))
    assert run.reserved == [5 * ROW] * 2 + [4 * ROW] * 3
    assert run.used == [3 * ROW, 4 * ROW, 1 * ROW, 2 * ROW, 3 * ROW]
    assert run.utilisation == [1 / 4] * 5
    first, second = run.times
    assert second.tokens[0] > first.tokens[-1]  # the second waits for the first


def test_static_batches_set_the_longest_text_aside_and_blocks_do_not():
    """Two requests of 5 tokens, one of which ends a step earlier. 16 blocks of 4; 24 tokens for each."""
    trace = [Arrival(0.0, [1, 2, 3, 4, 5], 3), Arrival(0.0, [9, 8, 7, 6, 5], 2)]
    static, paged = (rung.run(tiny_model(), replace(WORKLOAD, trace=trace)) for rung in RUNGS[1:3])
    assert static.reserved == [2 * 24 * ROW, 1 * 24 * ROW, 0]
    assert paged.reserved == [2 * 2 * 4 * ROW, 1 * 2 * 4 * ROW, 0]
    assert static.used == paged.used == [2 * 5 * ROW, 6 * ROW, 0]
    assert static.utilisation == paged.utilisation == [2 / 4, 2 / 4, 1 / 4]


def test_in_one_memory_more_fit_in_blocks_than_in_one_piece_and_nobody_waits_when_a_place_is_free():
    static, paged, continuous = (rung.run(tiny_model(), WORKLOAD) for rung in RUNGS[1:4])
    assert max(static.utilisation) == 2 / 4  # 64 slots, 24 for each
    assert max(paged.utilisation) == 1
    assert len(continuous.utilisation) < len(paged.utilisation) < len(static.utilisation)


def test_a_rung_with_another_text_is_reported(monkeypatch):
    def run(model, w) -> Run:
        done = batch_ladder.batched(lambda w: Continuous(), model, w)
        done.tokens[3][1] = (done.tokens[3][1] + 1) % TINY.vocab_size
        return done

    monkeypatch.setattr(batch_ladder, "RUNGS", (*RUNGS[:3], replace(RUNGS[3], run=run)))
    *right, wrong = climb(tiny_model(), WORKLOAD, progress=False)
    assert all(row.same_tokens for row in right)
    assert not wrong.same_tokens and wrong.first_difference["position"] == 1


def scripted(seconds: list[float], model, w) -> Run:
    """Two requests of two tokens each, in so many seconds; the next run takes the next number."""
    end = seconds.pop(0)
    times = [RequestTimes(0.0, (end / 4, end / 2)), RequestTimes(0.0, (end / 2, end))]
    return Run([[1, 2], [3, 4]], times, reserved=[10, 30], used=[5, 15], utilisation=[0.5, 1.0])


def test_a_row_holds_medians_over_runs_and_requests(monkeypatch):
    first = replace(RUNGS[0], run=partial(scripted, [8.0, 4.0, 16.0]))
    second = replace(RUNGS[1], run=partial(scripted, [2.0, 4.0, 1.0]))
    monkeypatch.setattr(batch_ladder, "RUNGS", (first, second))
    workload = replace(WORKLOAD, trace=[Arrival(0.0, [1], 2)] * 2, repeats=3)
    one, static = climb(tiny_model(dtype=torch.float32), workload, progress=False)
    assert (one.tokens_per_s, one.spread) == (4 / 8, (4 / 16, 4 / 4))
    assert (static.tokens_per_s, static.spread) == (4 / 2, (4 / 4, 4 / 1))
    assert (one.against, one.factor, static.against, static.factor) == (None, None, "one_by_one", 4.0)
    assert (static.ttft_ms, static.tpot_ms) == (1e3 * (0.5 + 1.0) / 2, 1e3 * (0.5 + 1.0) / 2)
    assert (static.kv_reserved_bytes, static.kv_bytes, static.kv_waste) == (30, 15, 0.5)
    assert (static.utilisation, static.utilisation_by_step) == (0.75, [0.5, 1.0])
    assert static.predicted_ttft_ms is None and static.memory_limit_fraction is None


def test_the_json_carries_both_kinds_of_rungs():
    rows = climb(tiny_model(), WORKLOAD, progress=False)
    content = json.loads(json.dumps(as_json(rows, {}, Limits("m", 1e9, 1e9)), allow_nan=False))
    assert [rung["stage"] for rung in content["rungs"]] == [rung.stage for rung in RUNGS[:4]]
    for rung in content["rungs"]:
        assert rung["workload"] == "few" and 0 <= rung["kv_waste"] < 1 and 0 < rung["utilisation"] <= 1


def test_everything_runs_on_the_small_model_and_is_judged_by_the_wide_ones_texts():
    rows = climb(tiny_model(), WORKLOAD, progress=False, small=tiny_model())
    assert [row.stage for row in rows] == [rung.stage for rung in RUNGS]
    assert all(row.same_tokens for row in rows)
    assert rows[-1].against == "one_by_one" and rows[-1].kv_bytes > 0
    *right, wrong = climb(tiny_model(), WORKLOAD, progress=False, small=tiny_model(1))
    assert all(row.same_tokens for row in right)
    assert not wrong.same_tokens


def test_everything_guesses(monkeypatch):
    """With what fits: the tiny model has no trained drafter. One that knows the model finishes in fewer steps."""
    seen = []
    real = batch_ladder.batched
    monkeypatch.setattr(batch_ladder, "batched", lambda *args: seen.append(args[3]) or real(*args))
    RUNGS[-1].run(tiny_model(), WORKLOAD)
    assert isinstance(seen[0], NgramDrafter)
    monkeypatch.setattr(batch_ladder, "load_drafter", lambda model: ModelDrafter(tiny_model()))
    knowing, plain = RUNGS[-1].run(tiny_model(), WORKLOAD), RUNGS[3].run(tiny_model(), WORKLOAD)
    assert knowing.tokens == plain.tokens
    assert len(knowing.utilisation) < len(plain.utilisation)
