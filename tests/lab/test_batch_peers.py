"""Everybody writes the same texts, and only tokens that were asked for count. No test looks at how fast anybody is."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from conftest import TINY, tiny_model

from minillm.generation import generate
from minillm.lab import batch_peers
from minillm.lab.bench import Measured
from minillm.lab.peers import to_transformers
from minillm.lab.serving import Arrival
from minillm.lab.workload import Requests

TRACE = [Arrival(0.0, [(5 * i + j * j) % 37 for j in range(3 + 4 * (i % 3))], 2 + 5 * (i % 2)) for i in range(5)]
WORKLOAD = Requests("few", TRACE, max_num_seqs=4, block_size=4, n_blocks=32, reserve=24, repeats=1)


@pytest.fixture
def model():
    return tiny_model(config=replace(TINY, norm_eps=1e-2), dtype=torch.float32)


def texts(model, trace=TRACE) -> list[list[int]]:
    return [generate(model, None, a.prompt, a.params).tokens for a in trace]


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_padded_batches_write_our_texts_and_count_what_was_asked_for(model, size, monkeypatch):
    pytest.importorskip("transformers")
    peer, done = to_transformers(model), []
    real = peer.generate
    monkeypatch.setattr(peer, "generate", lambda *args, **kw: done.append(real(*args, **kw)) or done[-1])
    useful, seconds = batch_peers.static_batches(peer, size, TRACE)
    assert useful == sum(a.max_tokens for a in TRACE) and seconds > 0
    assert [len(batch) for batch in done] == [len(TRACE[i : i + size]) for i in range(0, len(TRACE), size)]
    rows = [row for batch in done for row in batch.tolist()]
    padded = [max(len(a.prompt) for a in TRACE[i // size * size :][:size]) for i in range(len(TRACE))]
    for row, start, arrival, text in zip(rows, padded, TRACE, texts(model), strict=True):
        assert row[start : start + arrival.max_tokens] == text


def test_continuous_batching_writes_our_texts_each_at_its_own_length(model, monkeypatch):
    pytest.importorskip("transformers")
    from transformers.generation.continuous_batching import ContinuousBatchingManager

    results = {}
    real = ContinuousBatchingManager.get_result

    def get_result(self, *args, **kw):
        result = real(self, *args, **kw)
        if result is not None and result.is_finished():
            results[result.request_id] = list(result.generated_tokens)
        return result

    monkeypatch.setattr(ContinuousBatchingManager, "get_result", get_result)
    peer = to_transformers(model)
    useful, _ = batch_peers.continuous_batching(peer, 4, TRACE)
    assert useful == sum(a.max_tokens for a in TRACE)
    assert sorted(results.values()) == sorted(texts(model))
    assert peer.config._attn_implementation == "sdpa"  # `generate` goes on as before
    assert batch_peers.static_batches(peer, 5, TRACE)[0] == useful


def test_ours_in_both_ways_give_every_token(model):
    wanted = sum(a.max_tokens for a in TRACE)
    assert batch_peers.ours(model, 4, TRACE)[0] == batch_peers.one_by_one(model, TRACE)[0] == wanted


def test_the_ratios_are_ours_over_the_best_of_theirs_and_over_one_by_one(model, monkeypatch):
    monkeypatch.setattr(batch_peers, "installed", lambda module: True)
    monkeypatch.setattr(batch_peers, "to_transformers", lambda model: None)
    monkeypatch.setattr(batch_peers, "static_batches", lambda *args: (1, 1.0))
    monkeypatch.setattr(batch_peers, "continuous_batching", lambda *args: (1, 1.0))
    rates = [[120.0, 100.0, 130.0], [40.0, 30.0, 50.0], [10.0] * 3, [20.0] * 3, [30.0] * 3, [60.0, 50.0, 90.0]]

    def alternate(contestants, repeats, progress, warm_up):
        return {name: Measured(runs) for name, runs in zip(contestants, rates, strict=True)}

    monkeypatch.setattr(batch_peers, "alternate", alternate)
    result = batch_peers.compare_batches(model, WORKLOAD)
    assert [r["tokens_per_s"] for r in result["results"]] == [120, 40, 10, 20, 30, 60]
    assert result["results"][0]["spread"] == (100, 130)
    assert result["ratios"] == {"throughput_vs_transformers_best": 2.0, "throughput_vs_own_one_by_one": 3.0}


def test_without_transformers_that_ratio_is_null(model, monkeypatch):
    monkeypatch.setattr(batch_peers, "installed", lambda module: False)
    result = batch_peers.compare_batches(model, WORKLOAD, progress=False)
    assert [r["name"] for r in result["results"]] == ["minillm engine", "minillm one by one"]
    assert result["ratios"]["throughput_vs_transformers_best"] is None
    assert result["ratios"]["throughput_vs_own_one_by_one"] > 0
    assert all(r["task"] == "5 ragged requests, useful tokens" for r in result["results"])
    json.dumps(result, allow_nan=False)


def test_a_contestant_that_gives_fewer_tokens_is_not_rated():
    with pytest.raises(RuntimeError, match="gave 3 of the 20 tokens"):
        batch_peers.per_second(lambda trace: (3, 1.0), TRACE)


def test_a_rate_is_useful_tokens_over_seconds():
    assert batch_peers.per_second(lambda trace: (20, 5.0), TRACE) == 4.0
