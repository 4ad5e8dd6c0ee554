"""What `bench serving` prints: percentiles and goodput of written-down times, and the three policies in their order."""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import tiny_model

from minillm.generation import generate
from minillm.lab import policy_bench
from minillm.lab.metrics import RequestTimes
from minillm.lab.policy_bench import Target, compare_policies, policy_row, policy_table
from minillm.lab.serving import Arrival, Part, Replay, StepRecord, poisson_trace

TRACE = poisson_trace(12, 400.0, 1, list(range(37)), prompt=(6, 0.5, 20), output=(6, 0.5, 20))


def step(n: int) -> StepRecord:
    return StepRecord(0.0, 1.0, [Part(i, "decode", 1) for i in range(n)], 0, n, owned=n, held=n)


def test_a_row_by_hand():
    """Ten requests: the i-th waits i seconds for its first token, and has two gaps of i / 10 seconds."""
    times = [RequestTimes(0.0, (i, 1.1 * i, 1.2 * i)) for i in range(1, 11)]
    done = Replay([step(2), step(4)], times, tokens=[[1, 2, 3]] * 10, preemptions=7, max_num_seqs=4)
    row = policy_row("static", done, Target(ttft=5.0, tpot=0.35))
    assert row.tokens_per_s == pytest.approx(30 / 12)
    waits = [1e3 * i for i in range(1, 11)]
    assert row.ttft_ms == pytest.approx({f"p{q}": np.percentile(waits, q) for q in (50, 95, 99)})
    assert row.tpot_ms == pytest.approx({f"p{q}": np.percentile(waits, q) / 10 for q in (50, 95, 99)})
    assert row.goodput == pytest.approx(3 / 12)  # the first three: the gap binds before the wait
    assert (row.utilisation, row.preemptions) == (0.75, 7)
    head, _, line = policy_table([row], "github").splitlines()
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert [cell.strip() for cell in head.strip("|").split("|")][:3] == ["policy", "tokens/s", "TTFT p50 ms"]
    assert cells == ["static", "2.5", "5500", "9550", "9910", "550", "955", "991", "0.25", "75%", "7"]


def test_every_policy_replays_the_whole_trace(monkeypatch):
    model, done = tiny_model(), {}
    real = policy_bench.policy_row
    monkeypatch.setattr(policy_bench, "policy_row", lambda n, d, t: done.update({n: d}) or real(n, d, t))
    rows = compare_policies(model, TRACE, Target(1, 1), timeout=0.01, max_num_seqs=4, n_blocks=64, block_size=4)
    texts = [generate(model, None, a.prompt, a.params).tokens for a in TRACE]
    assert [row.policy for row in rows] == list(done) == ["static", "dynamic", "continuous"]
    assert all(replay.tokens == texts for replay in done.values())
    content = json.loads(json.dumps(policy_bench.as_json(rows, {"cpu": "Chip"}, TRACE, Target(1, 2)), allow_nan=False))
    assert content["machine"] == {"cpu": "Chip"} and content["target"] == {"ttft": 1, "tpot": 2}
    assert [len(a.prompt) for a in TRACE] == [request["prompt_tokens"] for request in content["trace"]]
    assert list(content["policies"][0]) == ["policy", "tokens_per_s", "ttft_ms", "tpot_ms", "goodput", "utilisation",
                                            "preemptions"]  # fmt: skip


def test_a_request_that_cannot_run_is_refused_before_anything_is_measured(monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(type(model), "forward", lambda *args: pytest.fail("the model has run"))
    with pytest.raises(ValueError, match="the context ends at 128"):
        compare_policies(model, [*TRACE, Arrival(9.0, [1] * 200, 4)], Target(1, 1))


@pytest.mark.parametrize("ttft, tpot", [(0, 1), (1, -1), (float("nan"), 1)])
def test_a_target_is_a_time(ttft, tpot):
    with pytest.raises(ValueError, match="above 0 seconds"):
        Target(ttft, tpot)
