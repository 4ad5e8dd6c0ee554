"""The work of a step is counted right: by hand, against a real pass, and against published numbers.

Two independent counts: loops over matrices and keys, and PyTorch's own counter on a pass of a real `Transformer`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from minillm.attention import causal_mask
from minillm.config import ModelConfig
from minillm.kv_cache import ContiguousKV
from minillm.lab import roofline
from minillm.lab.catalogue import GPUS, MODELS
from minillm.lab.roofline import Limits, Work, gpu_limits, request_steps, step_work

FIXED = settings(derandomize=True, deadline=None, database=None)  # the same examples every time, and no time asserted

CONFIGS = [
    TINY,
    replace(TINY, tied_embeddings=True),
    replace(TINY, n_kv_heads=6, n_layers=1),
    replace(TINY, n_kv_heads=1, head_dim=6),  # heads that are together wider than the model
]
STEPS = [(1, 0, 1), (1, 9, 1), (7, 0, 1), (7, 0, 7), (5, 8, 2), (5, 8, 0)]  # new, past, sampled


def matrices_of_one_layer(c: ModelConfig) -> list[tuple[int, int]]:
    """(in, out) of each matrix, as a checkpoint names them: q, k, v, o, gate, up, down."""
    q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    sizes = [(c.d_model, q), (c.d_model, kv), (c.d_model, kv), (q, c.d_model)]
    return [*sizes, (c.d_model, c.d_ff), (c.d_model, c.d_ff), (c.d_ff, c.d_model)]


def work_in_loops(c: ModelConfig, new: int, past: int, batch: int, sampled: int, weight_bytes: float, kv_bytes: float):
    """One matrix, one token, one key after the other. -> FLOP, bytes"""
    flops = moved = 0
    for _ in range(batch):
        for _ in range(c.n_layers):
            for token in range(new):
                for n_in, n_out in matrices_of_one_layer(c):
                    flops += 2 * n_in * n_out
                for _ in range(c.n_heads):
                    for _key in range(past + token + 1):
                        flops += 2 * c.head_dim  # q . k
                        flops += 2 * c.head_dim  # its share of v
        for _ in range(sampled):
            flops += 2 * c.d_model * c.vocab_size
    for _ in range(c.n_layers):
        moved += sum(n_in * n_out * weight_bytes for n_in, n_out in matrices_of_one_layer(c))
        for _ in range(batch):
            row = 2 * c.n_kv_heads * c.head_dim * kv_bytes
            moved += new * row  # written
            moved += (past + new) * row  # read
    moved += c.d_model * c.vocab_size * weight_bytes if sampled else 0
    return flops, moved


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("new", "past", "sampled"), STEPS)
def test_the_work_of_a_step_equals_a_count_in_loops(config, batch, new, past, sampled):
    work = step_work(config, new, past, batch, sampled, weight_bytes=0.5, kv_bytes=2)
    assert (work.flops, work.bytes) == work_in_loops(config, new, past, batch, sampled, 0.5, 2)


class Recording(ContiguousKV):
    """Counts what attention has to do at least, from the shapes that it is really given."""

    flops = read = written = 0

    def attend(self, layer, q, k, v):
        visible = int(causal_mask(len(q), self.length + len(k)).sum())
        self.flops += 2 * 2 * q.shape[1] * q.shape[2] * visible
        self.written += k.nbytes + v.nbytes
        self.read += self.k[layer, :, : self.length + len(k)].nbytes * 2
        return super().attend(layer, q, k, v)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("new", "past", "sampled"), STEPS)
def test_the_work_of_a_step_equals_what_a_real_pass_does(config, new, past, sampled):
    model = tiny_model(config=config)
    tokens, positions = torch.arange(past + new) % config.vocab_size, torch.arange(past + new)
    kv = Recording(config, past + new, model.dtype)
    if past:
        model(tokens[:past], positions[:past], kv)
        kv.commit(past)
    kv.flops = kv.read = kv.written = 0
    with FlopCounterMode(display=False) as counter:
        hidden = model(tokens[past:], positions[past:], kv)
        if sampled:
            model.logits(hidden[-sampled:])
    matrices = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    weights = [p for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("blocks.")]
    weights += [model.head.weight] if sampled else []

    work = step_work(config, new, past, sampled_rows=sampled, weight_bytes=8, kv_bytes=8)
    assert work.flops == matrices + kv.flops
    assert work.bytes == sum(w.nbytes for w in weights) + kv.read + kv.written


@FIXED
@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(0, 30))
def test_a_prefill_in_chunks_has_the_flops_of_the_whole(chunks, past):
    starts = [past]
    for chunk in chunks:
        starts.append(starts[-1] + chunk)
    last = len(chunks) - 1
    parts = [
        step_work(TINY, end - start, start, sampled_rows=int(i == last))
        for i, (start, end) in enumerate(pairwise(starts))
    ]
    whole = step_work(TINY, sum(chunks), past)
    assert sum(part.flops for part in parts) == whole.flops
    if len(chunks) > 1:  # each chunk reads the weights and the earlier keys again: that is the price
        assert sum(part.bytes for part in parts) > whole.bytes


def test_a_batch_shares_the_weights_and_nothing_else():
    one, three = (
        step_work(TINY, 1, 10, weight_bytes=2, kv_bytes=2),
        step_work(TINY, 1, 10, 3, weight_bytes=2, kv_bytes=2),
    )
    weights = 2 * (TINY.layer_parameters + TINY.head_parameters)
    assert three.flops == 3 * one.flops
    assert three.bytes - weights == 3 * (one.bytes - weights) > 0


@pytest.mark.parametrize(
    "step",
    [
        {"new_tokens": 0},
        {"new_tokens": -1},
        {"new_tokens": 1, "past": -1},
        {"new_tokens": 1, "batch": 0},
        {"new_tokens": 2, "sampled_rows": 3},
        {"new_tokens": 2, "sampled_rows": -1},
    ],
)
def test_impossible_steps_are_refused(step):
    with pytest.raises(ValueError, match="impossible step"):
        step_work(TINY, **step)


@FIXED
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 4))
def test_the_passes_of_a_request_add_up_to_one_pass_over_all_but_its_last_token(prompt, output, batch):
    steps = request_steps(TINY, prompt, output, batch)
    assert len(steps) == output
    assert steps[0] == step_work(TINY, prompt, batch=batch)
    whole = step_work(TINY, prompt + output - 1, batch=batch, sampled_rows=output)
    assert sum(step.flops for step in steps) == whole.flops
    assert all(later.bytes > earlier.bytes for earlier, later in pairwise(steps[1:]))  # the past grows


def test_a_request_for_nothing_takes_no_pass_and_an_impossible_one_is_refused():
    assert request_steps(TINY, 5, 0) == []
    for prompt, output in ((0, 3), (5, -1)):
        with pytest.raises(ValueError, match="impossible request"):
            request_steps(TINY, prompt, output)


# Published numbers.


def test_a_prefill_of_2048_tokens_with_llama_2_7b():
    """2 FLOP a weight and token, and causal attention at half of 4 x layers x heads x head_dim x T a token: the forward
    third of the formula in Chowdhery et al., "PaLM" (2022), appendix B. 26.5 and 1.1 TFLOP."""
    c, tokens = MODELS["Llama-2-7B"], 2048
    matrices = 2 * 6_476_005_376 * tokens  # its published parameters without embedding, head and norms
    attention = 4 * 32 * 32 * 128 * tokens * (tokens + 1) / 2
    assert f"{matrices / 1e12:.3g} {attention / 1e12:.3g}" == "26.5 1.1"
    assert step_work(c, tokens, sampled_rows=0).flops == matrices + attention


@pytest.mark.parametrize("name", ["Llama-2-7B", "Mistral-7B", "Llama-3.1-8B", "Llama-2-70B"])
def test_decode_does_about_one_flop_for_each_byte_at_16_bits(name):
    """A weight of two bytes is used once, for a multiplication and an addition."""
    assert step_work(MODELS[name], 1, 128, weight_bytes=2, kv_bytes=2).intensity == pytest.approx(1, rel=0.02)


def test_decode_is_bound_by_memory_and_a_long_prefill_by_arithmetic_on_every_gpu():
    for name in GPUS:
        limits = gpu_limits(name)
        decode = step_work(MODELS["Llama-2-7B"], 1, 1024, weight_bytes=2, kv_bytes=2)
        prefill = step_work(MODELS["Llama-2-7B"], 2048, weight_bytes=2, kv_bytes=2)
        assert (decode.bound(limits), prefill.bound(limits)) == ("memory", "compute")


@pytest.mark.parametrize(
    ("config", "kib"),
    [
        (MODELS["Llama-2-7B"], 512),  # 2 x 32 layers x 32 heads x 128 x 2 bytes
        (MODELS["Mistral-7B"], 128),  # a quarter: 8 key heads for 32
        (MODELS["Llama-2-70B"], 320),
        # Kwon et al., "PagedAttention" (2023), section 3: "the KV cache of a single token demands 800 KB" in OPT-13B
        (ModelConfig(50272, 5120, 40, 40, 40, 128, 20480, 2048), 800),
    ],
)
def test_published_sizes_of_the_kv_cache_for_each_token_at_16_bits(config, kib):
    assert 2 * config.kv_elements_per_token == kib * 1024
    grown = step_work(config, 1, 101, kv_bytes=2).bytes - step_work(config, 1, 100, kv_bytes=2).bytes
    assert grown == kib * 1024  # what one more token in the past costs each later step


# Parameters of the weights published on each model's page; a tied head is counted once.
PUBLISHED = {
    "SmolLM2-135M": 134_515_008,
    "Qwen3-0.6B": 596_049_920,
    "Llama-2-7B": 6_738_415_616,
    "Mistral-7B": 7_241_732_096,
    "Llama-3.1-8B": 8_030_261_248,
    "Qwen2.5-32B": 32_763_876_352,
    "Llama-2-70B": 68_976_648_192,
}


@pytest.mark.parametrize("name", MODELS)
def test_the_catalogue_has_the_published_number_of_parameters(name):
    c = MODELS[name]
    matrices = c.layer_parameters + c.head_parameters * (1 if c.tied_embeddings else 2)
    vectors = c.d_model * (2 * c.n_layers + 1)
    vectors += c.n_layers * 2 * c.head_dim * c.qk_norm
    vectors += c.n_layers * (c.n_heads + 2 * c.n_kv_heads) * c.head_dim * c.qkv_bias
    assert matrices == pytest.approx(PUBLISHED[name], rel=0.01)
    assert matrices + vectors == PUBLISHED[name]


def test_the_catalogue_names_a_source_for_each_gpu():
    for name, gpu in GPUS.items():
        assert gpu.name == name
        assert len(gpu.source) > 10
        assert 1e13 < gpu.flops < 1e16 and 1e11 < gpu.bandwidth < 1e14 and 1e9 < gpu.memory < 1e12


def test_published_ridges():
    """The A100's 312 TFLOP/s over 2039 GB/s are 153 FLOP a byte, the H100's 989 over 3350 are 295."""
    assert round(gpu_limits("A100 80GB SXM").ridge) == 153
    assert round(gpu_limits("H100 SXM").ridge) == 295


# The roofline itself.


def test_the_bound_flips_at_the_ridge():
    limits = Limits("round numbers", flops=100.0, bandwidth=20.0)
    assert limits.ridge == 5
    below, at, above = Work(99, 20), Work(100, 20), Work(101, 20)
    assert [work.bound(limits) for work in (below, at, above)] == ["memory", "compute", "compute"]
    assert [work.seconds(limits) for work in (below, at, above)] == [1.0, 1.0, 1.01]
    assert Work(1, 60).seconds(limits) == 3.0
    assert Work(30, 60).intensity == 0.5


def test_an_unknown_gpu_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown GPU 'H999'; known: T4, .*MI300X"):
        gpu_limits("H999")


def test_gpu_limits_are_those_of_the_catalogue():
    assert gpu_limits("T4") == Limits("T4", 65e12, 320e9)


# Measuring this machine. No test looks at how fast it is.


@pytest.fixture
def fresh(monkeypatch):
    """A measurement of small arrays that is not kept for later tests, nor taken from earlier ones."""
    monkeypatch.setattr(roofline, "BUDGET", 0.0)
    monkeypatch.setattr(roofline, "BANDWIDTH_BYTES", 2**16)
    monkeypatch.setattr(roofline, "MATMUL_SIZE", 32)
    roofline.this_machine.cache_clear()
    yield
    roofline.this_machine.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_this_machine_has_positive_finite_limits(fresh, dtype):
    limits = roofline.this_machine(dtype)
    for number in (limits.flops, limits.bandwidth, limits.ridge):
        assert math.isfinite(number) and number > 0


def test_this_machine_is_measured_once(fresh, monkeypatch):
    measured = []
    real = roofline.best_seconds
    monkeypatch.setattr(roofline, "best_seconds", lambda *args: measured.append(args) or real(*args))
    assert roofline.this_machine() is roofline.this_machine()
    assert len(measured) == 2  # one for each rate
    roofline.this_machine(torch.float64)
    assert len(measured) == 4  # another dtype is another question


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rates_are_the_work_over_the_shortest_time(fresh, monkeypatch, dtype):
    times = iter([0.5, 0.25])  # reading, matrix product
    monkeypatch.setattr(roofline, "best_seconds", lambda work, device: next(times))
    assert roofline.this_machine(dtype) == Limits("this machine", flops=2 * 32**3 / 0.25, bandwidth=2**16 / 0.5)


class Clock:
    """A clock that moves only when work is done."""

    def __init__(self, durations: list[float]):
        self.now, self.durations, self.runs = 0.0, durations, 0

    def perf_counter(self) -> float:
        return self.now

    def work(self) -> None:
        self.now += self.durations[self.runs]
        self.runs += 1


@pytest.mark.parametrize(
    ("durations", "budget", "runs", "best"),
    [
        ([1.0, 5.0, 3.0, 2.0], 0.0, 3, 3.0),  # never fewer than three, and the first only warms up
        ([1.0, 5.0, 3.0, 2.0, 4.0, 0.5], 12.0, 5, 2.0),  # as many as the budget allows
    ],
)
def test_the_best_time_is_the_shortest_after_the_first(monkeypatch, durations, budget, runs, best):
    clock = Clock(durations)
    monkeypatch.setattr(roofline, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    monkeypatch.setattr(roofline, "BUDGET", budget)
    assert roofline.best_seconds(clock.work, "cpu") == best
    assert clock.runs == runs
