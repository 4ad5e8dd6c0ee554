"""The peers compute the same model, on the same numbers in memory, and a peer that is missing is no error.

No test looks at how fast anybody is: where a rate is checked, the times are written down.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, tiny_model

import minillm
from minillm.config import RopeScaling
from minillm.generation import generate
from minillm.lab import peers
from minillm.lab.bench import Measured
from minillm.model import NoCache, Transformer
from minillm.quantize import Grid
from minillm.quantized_model import quantize
from minillm.sampling import SamplingParams

PROMPT = [3, 14, 15, 9]
CONFIG = replace(TINY, norm_eps=1e-2)  # large enough that a wrong one shows
RATIOS = ["single_stream_vs_transformers", "w4a16_vs_own_float32", "w4a16_vs_llama_cpp"]
OURS = ["minillm float32", "minillm Q4_1, products in bfloat16"]


def small_model(**changes) -> Transformer:
    return tiny_model(config=replace(CONFIG, **changes), dtype=torch.float32)


def in_4_bits() -> Transformer:
    return quantize(small_model(), Grid(4, None), compute=torch.bfloat16).prepare()


def logits(model: Transformer, ids: torch.Tensor) -> torch.Tensor:
    return model.logits(model(ids, torch.arange(len(ids)), NoCache()))


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(CONFIG.vocab_size, (40,), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def small_sizes(monkeypatch):
    monkeypatch.setattr(peers, "PROMPT_TOKENS", len(PROMPT))
    monkeypatch.setattr(peers, "NEW_TOKENS", 5)
    monkeypatch.setattr(peers, "REPEATS", 2)


@pytest.fixture
def only(monkeypatch):
    """Let the peers that are named be found, and no other."""

    def install(*names: str) -> None:
        real = importlib.util.find_spec

        def find_spec(name, *args):
            if name in ("transformers", "llama_cpp"):
                return SimpleNamespace(name=name) if name in names else None
            return real(name, *args)

        monkeypatch.setattr(importlib.util, "find_spec", find_spec)

    return install


# The same model for transformers.


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("shape", [{}, {"tied_embeddings": True}, {"n_kv_heads": 6}, {"head_dim": 8}], ids=str)
def test_transformers_gives_the_same_logits(shape, ids):
    """To float32: the largest difference seen is 1e-6 of the largest logit, a wrong model's a thousand times that."""
    model = small_model(**shape)
    assert relative_difference(peers.to_transformers(model)(ids[None]).logits[0], logits(model, ids)) < 1e-5


@pytest.mark.parametrize("wrong", [{"rope_theta": 110.0}, {"norm_eps": 1e-6}], ids=str)
def test_a_setting_that_was_not_handed_over_would_show_in_the_logits(wrong, ids):
    model, other = small_model(), small_model(**wrong)  # the same weights
    assert relative_difference(peers.to_transformers(other)(ids[None]).logits[0], logits(model, ids)) > 1e-3


def test_transformers_gives_the_same_greedy_text():
    model = small_model()
    peer = peers.to_transformers(model)
    ours = generate(model, None, PROMPT, SamplingParams(temperature=0, max_tokens=20)).tokens
    theirs = peer.generate(
        torch.tensor([PROMPT]), max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0
    )
    assert len(set(ours)) > 3
    assert theirs[0, len(PROMPT) :].tolist() == ours


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_shares_our_memory(tied, ids):
    model = small_model(tied_embeddings=tied)
    peer = peers.to_transformers(model)
    ours = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    theirs = dict(peer.named_parameters(remove_duplicate=False))
    assert {p.untyped_storage().data_ptr() for p in theirs.values()} == ours
    assert theirs["lm_head.weight"].data_ptr() == model.head.weight.data_ptr()
    before = peer(ids[None]).logits
    model.blocks[1].attention.qkv.weight[-1] += 1  # the last row of v
    assert (peer(ids[None]).logits != before).any()


@pytest.mark.parametrize("tied", [False, True])
def test_our_model_is_left_as_it_was(tied):
    model = small_model(tied_embeddings=tied)
    before = {name: (p, p.clone()) for name, p in model.named_parameters()}
    peers.to_transformers(model)
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0] and torch.equal(parameter, before[name][1])
        assert not parameter.requires_grad


def test_transformers_runs_as_described():
    peer = peers.to_transformers(small_model())
    assert peer.config._attn_implementation == "sdpa"
    assert {p.dtype for p in peer.parameters()} == {torch.float32}
    assert not peer.training and not any(p.requires_grad for p in peer.parameters())
    assert not any(tensor.is_meta for tensor in (*peer.parameters(), *peer.buffers()))


@pytest.mark.parametrize(
    "change",
    [
        {"qk_norm": True},
        {"qkv_bias": True},
        {"out_bias": True},
        {"mlp_bias": True},
        {"rope_scaling": RopeScaling(8.0, 1.0, 4.0, 32)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_a_plain_llama_cannot_hold_is_refused(change):
    with pytest.raises(ValueError, match="plain Llama"):
        peers.to_transformers(small_model(**change))


# The comparison.


def test_without_peers_there_are_our_own_numbers_and_their_ratio(only, small_sizes):
    only()
    result = peers.compare(small_model(), in_4_bits(), PROMPT, progress=False)
    assert [r["name"] for r in result["results"]] == OURS
    assert list(result["ratios"]) == RATIOS
    wide, narrow = (r["tokens_per_s"] for r in result["results"])
    assert result["ratios"].pop("w4a16_vs_own_float32") == narrow / wide
    assert set(result["ratios"].values()) == {None}
    json.dumps(result, allow_nan=False)


def test_without_4_bit_weights_there_is_one_number_less(only, small_sizes):
    only()
    result = peers.compare(small_model(), None, PROMPT, progress=False)
    assert [r["name"] for r in result["results"]] == OURS[:1]
    assert set(result["ratios"].values()) == {None}


def test_transformers_alone_gives_the_single_stream_ratio(only, small_sizes):
    only("transformers")
    result = peers.compare(small_model(), in_4_bits(), PROMPT, progress=False)
    ours, _, theirs = result["results"]
    assert ours["name"] == "minillm float32"
    assert theirs["name"].startswith("transformers ") and theirs["name"].endswith(" float32")
    for line in (ours, theirs):
        assert list(line) == ["name", "task", "tokens_per_s", "spread"]
        assert 0 < line["spread"][0] <= line["tokens_per_s"] <= line["spread"][1]
    ratio = result["ratios"].pop("single_stream_vs_transformers")
    assert ratio == ours["tokens_per_s"] / theirs["tokens_per_s"]
    assert result["ratios"]["w4a16_vs_llama_cpp"] is None


def test_the_ratio_is_ours_over_theirs_by_medians(only, small_sizes, monkeypatch):
    only("transformers", "llama_cpp")
    monkeypatch.setattr(peers, "to_transformers", lambda model: None)
    monkeypatch.setattr(peers, "llama_cpp", lambda: None)
    rates = [[30.0, 10.0, 32.0], [60.0, 61.0, 45.5], [12.0, 15.0, 20.0], [90.0, 91.0, 120.0]]

    def alternate(contestants, repeats, progress):
        return {name: Measured(runs) for name, runs in zip(contestants, rates, strict=True)}

    monkeypatch.setattr(peers, "alternate", alternate)
    result = peers.compare(small_model(), small_model(), PROMPT)
    assert [r["tokens_per_s"] for r in result["results"]] == [30, 60, 15, 91]
    assert [r["spread"] for r in result["results"]] == [(10, 32), (45.5, 61), (12, 20), (90, 120)]
    assert list(result["ratios"].values()) == [2.0, 2.0, 60 / 91]
    assert result["results"][3]["name"].startswith("llama.cpp (")


def test_a_prompt_of_another_length_is_refused():
    with pytest.raises(ValueError, match="must have 64 tokens, not 4"):
        peers.compare(small_model(), None, PROMPT)


def test_the_task_says_the_sizes_that_are_run():
    assert f"one request, {peers.PROMPT_TOKENS} tokens in, {peers.NEW_TOKENS} out" == peers.TASK


def test_a_rate_is_all_new_tokens_over_the_whole_time(monkeypatch):
    clock = iter([10.0, 14.0])
    monkeypatch.setattr(peers, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(peers, "NEW_TOKENS", 6)
    assert peers.per_second(lambda: 6) == 1.5


def test_a_contestant_that_stops_early_is_not_rated():
    """It would look faster, or slower, than it is."""
    with pytest.raises(RuntimeError, match="gave 3 tokens, not 128"):
        peers.per_second(lambda: 3)


# llama.cpp, where it is installed.


def test_llama_cpp_computes_the_whole_request_at_every_run(smollm2, small_sizes):
    """A prompt that is still cached from the run before would make it look faster than it is."""
    pytest.importorskip("llama_cpp")
    llama = peers.llama_cpp()
    assert llama.n_threads == llama.n_threads_batch == torch.get_num_threads()
    prompt = smollm2[1].encode("The capital of France")
    fed, real = [], llama.eval
    llama.eval = lambda tokens: fed.append(list(tokens)) or real(tokens)
    runs = []
    for _ in range(2):
        assert peers.llama_cpp_generate(llama, prompt) > 0
        runs.append(fed.copy())
        fed.clear()
    assert runs[0] == runs[1]
    assert runs[0][0] == prompt
    assert [len(tokens) for tokens in runs[0][1:]] == [1] * (peers.NEW_TOKENS - 1)


def test_all_peers_on_the_real_model(smollm2, small_sizes):
    pytest.importorskip("llama_cpp")
    model, tokenizer = smollm2
    prompt = tokenizer.encode("The capital of France")
    assert len(prompt) == len(PROMPT)
    narrow, _ = minillm.load(device="cpu", weights="native", compute=torch.bfloat16)
    result = peers.compare(model, narrow, prompt, progress=False)
    assert [r["name"].split()[0] for r in result["results"]] == ["minillm", "minillm", "transformers", "llama.cpp"]
    assert all(r["tokens_per_s"] > 0 for r in result["results"])
    assert list(result["ratios"]) == RATIOS
    assert min(result["ratios"].values()) > 0
    json.dumps(result, allow_nan=False)
