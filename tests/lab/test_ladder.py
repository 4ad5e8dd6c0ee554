"""The ladder measures what it says, predicts by the roofline, and notices a rung that gives another text.

No test looks at how fast anything is: numbers are checked with runs whose times are written down. The rungs that are
wrong on purpose (`SkipsASlot`, `OnePositionOff`) are mistakes that caches are known for.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import TINY, tiny_model

from minillm.attention import attention
from minillm.kv_cache import ContiguousKV
from minillm.lab import ladder
from minillm.lab.ladder import RUNGS, Row, Run, Rung, as_json, climb, run_single
from minillm.lab.metrics import RequestTimes
from minillm.lab.roofline import Limits, step_work
from minillm.lab.workload import Workload
from minillm.model import NoCache, Rope, Transformer, rotate
from minillm.quant_linear import QuantLinear
from minillm.quantize import Grid
from minillm.quantized_model import quantize

WORKLOAD = Workload("tiny", prompt=[3, 14, 15, 9, 2, 6], new_tokens=12, repeats=2)
LIMITS = Limits("a slow machine", flops=1e6, bandwidth=1e6)
SEEDS = range(5)


def naive_text(model: Transformer, w: Workload) -> list[int]:
    """Greedy decoding in its shortest form."""
    tokens = list(w.prompt)
    for _ in range(w.new_tokens):
        tokens.append(int(logits_after(model, tokens).argmax()))
    return tokens[len(w.prompt) :]


def logits_after(model: Transformer, tokens: list[int]) -> torch.Tensor:
    return model.logits(model(torch.tensor(tokens), torch.arange(len(tokens)), NoCache()))[-1]


def margin(model: Transformer, tokens: list[int]) -> float:
    best, second, *_ = sorted(logits_after(model, tokens).tolist(), reverse=True)
    return best - second


# The rungs that there are.


def test_the_rungs_climb_in_order_each_against_an_earlier_one():
    assert [rung.stage for rung in RUNGS] == ["naive", "kv_cache", "tiled", "speculative", "w4a16"]
    assert [rung.against for rung in RUNGS][:2] == [None, "naive"]
    for i, rung in enumerate(RUNGS[1:], start=1):
        assert rung.against in [earlier.stage for earlier in RUNGS[:i]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_rung_gives_the_naive_text_in_full(seed, dtype):
    model = tiny_model(seed, dtype=dtype)
    text = naive_text(model, WORKLOAD)
    assert len(set(text)) > 3  # a text that repeats itself would hide almost any bug
    for rung in RUNGS:
        run = rung.run(model, WORKLOAD)
        assert run.tokens == text
        assert len(run.times.tokens) == WORKLOAD.new_tokens and run.times.arrival == 0
    rows = climb(model, WORKLOAD, LIMITS, progress=False)
    assert all(row.same_tokens and row.first_difference is None for row in rows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_kv_bytes_are_a_key_and_a_value_for_every_token_but_the_last(dtype):
    """The last token was chosen, and never fed."""
    naive, cached = climb(tiny_model(dtype=dtype), WORKLOAD, LIMITS, progress=False)[:2]
    tokens = len(WORKLOAD.prompt) + WORKLOAD.new_tokens - 1
    assert naive.kv_bytes == 0
    assert cached.kv_bytes == tokens * 2 * TINY.n_layers * TINY.n_kv_heads * TINY.head_dim * dtype.itemsize


# Bound by arithmetic; by memory; and, where the whole text is fed, by memory first and by arithmetic as it grows.
@pytest.mark.parametrize("flops", [1e3, 1e12, 3.5e6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_predictions_are_the_mean_of_the_roofline_over_the_real_steps(flops, dtype):
    model, limits = tiny_model(dtype=dtype), Limits("m", flops, bandwidth=1e6)
    size, prompt, n = dtype.itemsize, len(WORKLOAD.prompt), WORKLOAD.new_tokens

    def seconds(new: int, past: int) -> float:
        return step_work(TINY, new, past, weight_bytes=size, kv_bytes=size).seconds(limits)

    whole_texts = [seconds(prompt + i, 0) for i in range(1, n)]
    single_tokens = [seconds(1, prompt + i) for i in range(n - 1)]  # the first of them is fed on top of the prompt
    naive, cached = RUNGS[:2]
    assert naive.predict(model, WORKLOAD, limits) == pytest.approx((seconds(prompt, 0), sum(whole_texts) / (n - 1)))
    assert cached.predict(model, WORKLOAD, limits) == pytest.approx((seconds(prompt, 0), sum(single_tokens) / (n - 1)))


def test_predictions_are_for_the_passes_that_the_rungs_make(monkeypatch):
    """The hand count above assumes which tokens go in at which step; here is what really goes in."""
    passes = []
    real = Transformer.forward

    def forward(self, tokens, positions, kv):
        passes.append((len(tokens), kv.length))
        return real(self, tokens, positions, kv)

    monkeypatch.setattr(Transformer, "forward", forward)
    prompt, n = len(WORKLOAD.prompt), WORKLOAD.new_tokens
    RUNGS[0].run(tiny_model(), WORKLOAD)
    assert passes == [(prompt + i, 0) for i in range(n)]
    passes.clear()
    RUNGS[1].run(tiny_model(), WORKLOAD)
    assert passes == [(prompt, 0), *((1, prompt + i) for i in range(n - 1))]


# Rungs that are wrong on purpose.


class SkipsASlot(ContiguousKV):
    """A single new row does not see the first token."""

    def attend(self, layer, q, k, v):
        out = super().attend(layer, q, k, v)
        if len(q) > 1:
            return out
        past = slice(1, self.length + 1)
        return attention(q, self.k[layer, :, past].transpose(0, 1), self.v[layer, :, past].transpose(0, 1))


class OnePositionOff(ContiguousKV):
    """A single new row is compared with the past as if it stood one place further on."""

    def attend(self, layer, q, k, v):
        if len(q) == 1:
            one = Rope(TINY.head_dim, TINY.rope_theta, None)(torch.tensor([1]), q.dtype)
            q = rotate(q, *one)
        return super().attend(layer, q, k, v)


def with_store(kind: type[ContiguousKV]) -> Rung:
    def make(model: Transformer, w: Workload) -> ContiguousKV:
        return kind(model.config, len(w.prompt) + w.new_tokens, model.dtype)

    return replace(RUNGS[1], stage="wrong", run=partial(run_single, make))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", [SkipsASlot, OnePositionOff])
def test_a_wrong_store_is_reported_with_the_place_and_the_margin(kind, seed, monkeypatch):
    model, wrong = tiny_model(seed), with_store(kind)
    text, other = naive_text(model, WORKLOAD), wrong.run(model, WORKLOAD).tokens
    at = [a == b for a, b in zip(text, other, strict=True)].index(False)
    monkeypatch.setattr(ladder, "RUNGS", (*RUNGS[:2], wrong))

    *right, row = climb(model, WORKLOAD, LIMITS, progress=False)
    assert [r.same_tokens for r in right] == [True, True]
    assert not row.same_tokens
    assert row.first_difference == {
        "position": at,
        "margin": pytest.approx(margin(model, WORKLOAD.prompt + text[:at]), rel=1e-9),
    }


@pytest.mark.parametrize("at", [0, 5, WORKLOAD.new_tokens - 1])
def test_a_single_wrong_token_is_found_wherever_it_is(at, monkeypatch):
    model = tiny_model()

    def run(model: Transformer, w: Workload) -> Run:
        done = RUNGS[1].run(model, w)
        changed = [*done.tokens[:at], (done.tokens[at] + 1) % TINY.vocab_size, *done.tokens[at + 1 :]]
        return replace(done, tokens=changed)

    monkeypatch.setattr(ladder, "RUNGS", (RUNGS[0], replace(RUNGS[1], run=run)))
    difference = climb(model, WORKLOAD, LIMITS, progress=False)[1].first_difference
    assert difference["position"] == at
    assert difference["margin"] == pytest.approx(
        margin(model, WORKLOAD.prompt + naive_text(model, WORKLOAD)[:at]), rel=1e-9
    )


@pytest.mark.parametrize("change", [lambda tokens: tokens[:7], lambda tokens: [*tokens, 1]], ids=["shorter", "longer"])
def test_a_text_of_another_length_is_another_text(change, monkeypatch):
    def run(model: Transformer, w: Workload) -> Run:
        done = RUNGS[1].run(model, w)
        tokens = change(done.tokens)
        return Run(tokens, RequestTimes(0.0, tuple(range(len(tokens)))), done.kv_bytes)

    monkeypatch.setattr(ladder, "RUNGS", (RUNGS[0], replace(RUNGS[1], run=run)))
    rows = climb(tiny_model(), WORKLOAD, LIMITS, progress=False)
    assert not rows[1].same_tokens
    assert rows[1].first_difference["position"] == min(WORKLOAD.new_tokens, len(change(list(range(12)))))
    json.dumps(as_json(rows, {}, LIMITS), allow_nan=False)


def test_one_wrong_run_among_right_ones_is_reported(monkeypatch):
    """A fault that shows only sometimes, such as memory that was not cleared."""
    runs = []

    def run(model: Transformer, w: Workload) -> Run:
        done = RUNGS[1].run(model, w)
        runs.append(done)
        return done if len(runs) < 3 else replace(done, tokens=[0, *done.tokens[1:]])  # warm-up, first, second

    monkeypatch.setattr(ladder, "RUNGS", (RUNGS[0], replace(RUNGS[1], run=run)))
    row = climb(tiny_model(), WORKLOAD, LIMITS, progress=False)[1]
    assert len(runs) == 3 and naive_text(tiny_model(), WORKLOAD)[0] != 0
    assert not row.same_tokens and row.first_difference["position"] == 0


# The numbers of a row.


def scripted(stage: str, against: str | None, times: list[tuple[float, ...]]) -> Rung:
    """A rung whose runs (the warm-up first) have these token times."""
    script = iter(times)

    def run(model: Transformer, w: Workload) -> Run:
        tokens = next(script)
        return Run([5] * len(tokens), RequestTimes(0.0, tokens), kv_bytes=7)

    return Rung(stage, "new", against, run, lambda model, w, limits: (0.25, 0.125))


@pytest.fixture
def by_hand(monkeypatch) -> list[Row]:
    """Three tokens a run. naive takes 6, 3 and 12 s; kv_cache 2, 1.5 and 1 s."""
    naive = scripted("naive", None, [(9, 99, 999), (2, 4, 6), (1, 2, 3), (4, 8, 12)])
    cached = scripted("kv_cache", "naive", [(9, 99, 999), (1.0, 1.5, 2.0), (0.5, 1.0, 1.5), (0.2, 0.3, 1.0)])
    monkeypatch.setattr(ladder, "RUNGS", (naive, cached))
    return climb(tiny_model(dtype=torch.float32), replace(WORKLOAD, repeats=3), LIMITS, progress=False)


def test_a_row_holds_medians_in_milliseconds_and_the_warm_up_counts_for_nothing(by_hand):
    naive, cached = by_hand
    assert (naive.tokens_per_s, naive.spread) == (3 / 6, (3 / 12, 3 / 3))
    assert (cached.tokens_per_s, cached.spread) == (3 / 1.5, (3 / 2, 3 / 1))
    assert (naive.ttft_ms, naive.tpot_ms) == (2000, 2000)
    assert (cached.ttft_ms, cached.tpot_ms) == (500, 500)
    assert (cached.predicted_ttft_ms, cached.predicted_tpot_ms) == (250, 125)
    assert (cached.stage, cached.new, cached.workload, cached.kv_bytes) == ("kv_cache", "new", "tiny", 7)


def test_the_factor_compares_with_the_rung_named(by_hand):
    assert (by_hand[0].against, by_hand[0].factor) == (None, None)
    assert (by_hand[1].against, by_hand[1].factor) == ("naive", 4.0)


def test_the_memory_limit_is_the_time_to_read_all_weights_once(by_hand):
    """The embedding is looked up, not read; norms are nothing beside the matrices."""
    model = tiny_model(dtype=torch.float32)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and name != "embed.weight"]
    reading = sum(p.nbytes for p in matrices) / LIMITS.bandwidth
    assert by_hand[1].memory_limit_fraction == pytest.approx(reading / 0.5)


# The rung with 4-bit weights.


def in_bits(bits: int) -> Transformer:
    return quantize(tiny_model(dtype=torch.float32), Grid(bits, None), head=Grid(8, None, symmetric=True))


def test_the_small_models_rung_is_judged_by_the_wide_models_text():
    model = tiny_model(dtype=torch.float32)
    *wide, small = climb(model, WORKLOAD, LIMITS, progress=False, small=in_bits(8))
    assert [row.stage for row in (*wide, small)] == [rung.stage for rung in RUNGS]
    assert all(row.same_tokens for row in wide) and small.same_tokens  # 8 bits of whole rows are near enough
    *wide, small = climb(model, WORKLOAD, LIMITS, progress=False, small=in_bits(2))
    assert all(row.same_tokens for row in wide)
    at = small.first_difference["position"]
    text = naive_text(model, WORKLOAD)
    assert small.first_difference["margin"] == pytest.approx(margin(model, WORKLOAD.prompt + text[:at]), rel=1e-4)


def test_predictions_and_the_memory_limit_count_the_bytes_that_are_stored():
    small = in_bits(4)
    matrices, head = TINY.layer_parameters, TINY.head_parameters
    rows = sum(m.n_out for m in (*small.blocks.modules(), small.head) if isinstance(m, QuantLinear))
    narrow = sum(m.n_out for m in small.blocks.modules() if isinstance(m, QuantLinear))
    expected = matrices / 2 + head + 2 * rows + 2 * narrow  # a scale in 16 bits each, and in 4 bits a minimum
    assert ladder.bytes_a_weight(small) == pytest.approx(expected / (matrices + head))
    assert ladder.bytes_a_weight(tiny_model(dtype=torch.float32)) == 4
    row = climb(tiny_model(dtype=torch.float32), WORKLOAD, LIMITS, progress=False, small=small)[-1]
    assert row.memory_limit_fraction == pytest.approx(expected / LIMITS.bandwidth / (row.tpot_ms / 1e3))


# The JSON.

KEYS = ["stage", "new", "workload", "tokens_per_s", "spread", "ttft_ms", "tpot_ms", "predicted_ttft_ms",
        "predicted_tpot_ms", "kv_bytes", "memory_limit_fraction", "against", "factor", "same_tokens",
        "first_difference", "kv_reserved_bytes", "kv_waste", "utilisation", "utilisation_by_step"]  # fmt: skip


def test_the_json_has_exactly_the_promised_keys():
    rows = climb(tiny_model(), WORKLOAD, LIMITS, progress=False)
    content = json.loads(json.dumps(as_json(rows, {"cpu": "Chip"}, Limits("m", 2e9, 3e9)), allow_nan=False))
    assert content["machine"] == {"cpu": "Chip", "gflops": 2.0, "gb_per_s": 3.0}
    assert list(content) == ["machine", "date", "rungs"]
    assert [rung["stage"] for rung in content["rungs"]] == [rung.stage for rung in RUNGS[:4]]
    for rung in content["rungs"]:
        assert list(rung) == KEYS
        assert rung["workload"] == "tiny" and rung["same_tokens"] is True
        smallest, largest = rung["spread"]
        assert 0 < smallest <= rung["tokens_per_s"] <= largest
        for key in ("ttft_ms", "tpot_ms", "memory_limit_fraction"):
            assert math.isfinite(rung[key]) and rung[key] > 0
