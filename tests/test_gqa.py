"""Fewer KV heads: pooling and repeating against a model computed head by head, the counts against published figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, mutant, random_model, tiny_model

import minillm
from minillm import SamplingParams, gqa
from minillm.attention import attention
from minillm.gqa import attention_intensity, kv_bytes_a_token, mean_heads, pool_heads, repeat_heads, with_kv_heads
from minillm.kv_cache import ContiguousKV
from minillm.lab.catalogue import MODELS
from minillm.lab.roofline import step_work
from minillm.model import NoCache, Transformer
from minillm.quantize import Grid
from minillm.quantized_model import quantize

SIX = replace(TINY, n_kv_heads=6)
QWEN = replace(SIX, qkv_bias=True, qk_norm=True, out_bias=True)
TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])


def logits(model: Transformer) -> torch.Tensor:
    return model.logits(model(TOKENS, torch.arange(len(TOKENS)), NoCache()))


def head_by_head(model: Transformer, n_kv_heads: int) -> torch.Tensor:
    """The logits of the model with its KV heads pooled, from the model's own weights: each head's projection is cut out
    by index, added up and divided; each query head attends alone. Shares only the norms, rope and MLPs with minillm."""
    c = model.config
    d, group, shared = c.head_dim, c.n_kv_heads // n_kv_heads, c.n_heads // n_kv_heads
    rope = model.rope(torch.arange(len(TOKENS)), model.dtype)
    x = model.embed(TOKENS)

    def turned(head: torch.Tensor) -> torch.Tensor:
        """head: [T, d]; pairs (i, i + d / 2) as complex numbers"""
        cos, sin = rope[0][:, 0, : d // 2], -rope[1][:, 0, : d // 2]
        both = torch.complex(*head.chunk(2, dim=-1)) * torch.complex(cos, sin)
        return torch.cat([both.real, both.imag], dim=-1)

    for block in model.blocks:
        a, y = block.attention, block.attention_norm(x)
        weight = a.qkv.weight
        bias = torch.zeros(len(weight), dtype=model.dtype) if a.qkv.bias is None else a.qkv.bias

        def head(i: int, y=y, weight=weight, bias=bias) -> torch.Tensor:
            return y @ weight[i * d : (i + 1) * d].T + bias[i * d : (i + 1) * d]

        outputs = []
        for h in range(c.n_heads):
            first = h // shared * group
            k = sum(head(c.n_heads + i) for i in range(first, first + group)) / group  # a linear map: mean of outputs
            v = sum(head(c.n_heads + c.n_kv_heads + i) for i in range(first, first + group)) / group
            q = head(h)
            if c.qk_norm:
                q, k = a.q_norm(q), a.k_norm(k)
            scores = turned(q) @ turned(k).T / d**0.5
            outputs.append(scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).softmax(-1) @ v)
        x = x + F.linear(torch.cat(outputs, dim=1), a.out.weight, a.out.bias)
        x = x + block.mlp(block.mlp_norm(x))
    return model.logits(model.norm(x))


POOLED = [(SIX, 6), (SIX, 3), (SIX, 2), (SIX, 1), (TINY, 1), (QWEN, 3), (QWEN, 1)]
IDS = [f"{c.n_kv_heads} to {n}{', biases and norms' if c.qk_norm else ''}" for c, n in POOLED]


@pytest.mark.parametrize(("config", "n_kv_heads"), POOLED, ids=IDS)
def test_a_pooled_model_is_the_one_computed_head_by_head(config, n_kv_heads):
    model = random_model(config, seed=1)
    pooled = pool_heads(model, n_kv_heads)
    assert pooled.config == replace(config, n_kv_heads=n_kv_heads)
    assert torch.allclose(logits(pooled), head_by_head(model, n_kv_heads), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"(h group d) ... -> (h d) ..."', '"(group h d) ... -> (h d) ..."'),  # heads that are not neighbours
        ('"mean", h=n_heads', '"sum", h=n_heads'),
        ("[q, change(k), change(v)]", "[q, change(v), change(k)]"),
        ("[q, change(k), change(v)]", "[q, change(k), change(k)]"),
    ],
)
def test_a_mistake_in_pooling_shows(old, new):
    model = random_model(QWEN, seed=1)
    assert not torch.allclose(
        logits(mutant(gqa, old, new).pool_heads(model, 3)), head_by_head(model, 3), rtol=0, atol=1e-3
    )


def test_biases_that_are_forgotten_do_not_fit():
    wrong = mutant(gqa, '("attention.qkv.weight", "attention.qkv.bias")', '"attention.qkv.weight"')
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks\.0\.attention\.qkv\.bias"):
        wrong.pool_heads(random_model(QWEN), 3)


def test_pooling_to_the_same_number_changes_nothing_and_gives_a_copy():
    model = random_model(QWEN)
    same = pool_heads(model, 6)
    assert torch.equal(logits(same), logits(model))
    with torch.no_grad():
        same.blocks[0].attention.qkv.weight.zero_()
    assert not torch.equal(logits(same), logits(model))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_pooling_keeps_dtype_and_tied_embeddings(dtype):
    model = random_model(replace(SIX, tied_embeddings=True)).to(dtype)
    pooled = pool_heads(model, 2)
    assert {p.dtype for p in pooled.parameters()} == {dtype}
    assert pooled.head.weight is pooled.embed.weight


@pytest.mark.parametrize("config", [TINY, replace(TINY, qkv_bias=True, qk_norm=True)], ids=["Llama", "Qwen"])
@pytest.mark.parametrize("n_kv_heads", [2, 6])
def test_a_grouped_model_is_the_one_with_its_heads_repeated(config, n_kv_heads):
    model = random_model(config, seed=2)
    many = repeat_heads(model, n_kv_heads)
    assert many.config.n_kv_heads == n_kv_heads
    assert torch.allclose(logits(many), logits(model), rtol=0, atol=1e-12)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in weights(pool_heads(many, 2), model))


def weights(a: Transformer, b: Transformer):
    return zip(a.state_dict().values(), b.state_dict().values(), strict=True)


def test_heads_repeated_in_the_wrong_order_are_another_model():
    wrong = mutant(gqa, '"(h d) ... -> (h times d) ..."', '"(h d) ... -> (times h d) ..."')
    model = random_model(TINY, seed=2)
    assert not torch.allclose(logits(wrong.repeat_heads(model, 6)), logits(model), rtol=0, atol=1e-3)


def test_the_mean_of_heads_is_of_neighbours_and_coordinate_by_coordinate():
    rows = torch.arange(12.0)  # heads (0, 1), (2, 3), ..., (10, 11)
    assert mean_heads(rows, 3, 2).tolist() == [1, 2, 5, 6, 9, 10]
    assert mean_heads(rows, 1, 2).tolist() == [5, 6]
    assert mean_heads(rows[:, None] * torch.ones(12, 5), 2, 2)[:, 4].tolist() == [2, 3, 8, 9]


@pytest.mark.parametrize("n", [4, 5, 7, 12])
def test_heads_that_cannot_be_shared_evenly_are_an_error(n):
    with pytest.raises(ValueError, match=f"6 query heads cannot share {n} KV heads evenly"):
        with_kv_heads(TINY, n)
    with pytest.raises(ValueError, match=f"6 query heads cannot share {n} KV heads evenly"):
        pool_heads(random_model(SIX), n)


@pytest.mark.parametrize("n", [0, -1, 1.5, True, None])
def test_a_number_of_heads_is_a_whole_number_of_at_least_one(n):
    with pytest.raises(ValueError, match="n_kv_heads must be a whole number of at least 1"):
        with_kv_heads(TINY, n)


def test_a_quantized_model_keeps_its_heads():
    model = quantize(tiny_model(), Grid(4, None))
    for change in (pool_heads, repeat_heads):
        with pytest.raises(ValueError, match="change its heads first, then quantize"):
            change(model, TINY.n_kv_heads)


def test_heads_are_not_pooled_upwards_nor_repeated_downwards():
    with pytest.raises(ValueError, match="2 KV heads cannot be pooled to 3 evenly"):
        pool_heads(random_model(TINY), 3)
    with pytest.raises(ValueError, match="2 KV heads cannot be pooled to 6 evenly"):
        pool_heads(random_model(TINY), 6)
    with pytest.raises(ValueError, match="6 KV heads cannot be repeated to 3 evenly"):
        repeat_heads(random_model(SIX), 3)
    with pytest.raises(ValueError, match="2 KV heads cannot be repeated to 3 evenly"):
        repeat_heads(random_model(TINY), 3)


# Published figures, in bytes a token at 16 bits: 512, 320 and 128 KiB; a group of 4 and of all 32 divides by that.
PUBLISHED = {"Llama-2-7B": 524_288, "Llama-2-70B": 327_680, "Mistral-7B": 131_072, "Qwen3-0.6B": 114_688}


@pytest.mark.parametrize("name", PUBLISHED)
def test_bytes_a_token_of_known_models(name):
    assert kv_bytes_a_token(MODELS[name]) == PUBLISHED[name]
    assert kv_bytes_a_token(MODELS[name], 4) == 2 * PUBLISHED[name]


def test_groups_divide_the_cache():
    seven = MODELS["Llama-2-7B"]
    assert kv_bytes_a_token(seven) // kv_bytes_a_token(with_kv_heads(seven, 8)) == 4
    assert kv_bytes_a_token(seven) // kv_bytes_a_token(with_kv_heads(seven, 1)) == 32
    assert 4096 * kv_bytes_a_token(seven) == 2 * 2**30  # 2 GiB are 2.15 GB
    assert 10 * 4096 * kv_bytes_a_token(seven) == 20 * 2**30 > 21.4e9


@pytest.mark.parametrize("n_kv_heads", [1, 2, 3, 6])
def test_a_cache_has_that_many_bytes(n_kv_heads):
    config, capacity = with_kv_heads(TINY, n_kv_heads), 11
    kv = ContiguousKV(config, capacity, torch.float16)
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in (kv.k, kv.v)}
    assert sum(storages.values()) == capacity * kv_bytes_a_token(config, 2)


@pytest.mark.parametrize("n_kv_heads", [1, 2, 6])
def test_decoding_reads_the_whole_cache_and_nothing_more(n_kv_heads):
    """Counted where it is read: the keys and values that attention is given in one decode step."""
    model, read = random_model(with_kv_heads(TINY, n_kv_heads)), []

    def counting(q, k, v):
        read.append(k.nbytes + v.nbytes)
        return attention(q, k, v)

    kv = ContiguousKV(model.config, 20, model.dtype, attention=counting)
    model(TOKENS, torch.arange(8), kv)
    kv.commit(8)
    read.clear()
    model(TOKENS[:1], torch.tensor([8]), kv)
    assert sum(read) == 9 * kv_bytes_a_token(model.config, 8)


def test_the_intensity_is_the_work_of_attention_over_the_bytes_that_it_reads():
    for name, expected in (("Llama-2-7B", 1), ("Llama-3.1-8B", 4), ("Llama-2-70B", 8), ("SmolLM2-135M", 3)):
        config = MODELS[name]
        assert attention_intensity(config) == expected
        short, long = (step_work(config, 1, past, weight_bytes=2, kv_bytes=2) for past in (1000, 3000))
        assert (long.flops - short.flops) / (long.bytes - short.bytes) == pytest.approx(expected)
    assert attention_intensity(with_kv_heads(MODELS["Llama-2-7B"], 1), 4) == 16


def test_smollm2_with_its_heads_repeated_writes_the_same_text(smollm2):
    model, tokenizer = smollm2
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompt = tokenizer.encode("The cache of a language model")
    many = repeat_heads(model, 9)
    got = minillm.generate(many, tokenizer, prompt, params).tokens
    assert got == minillm.generate(model, tokenizer, prompt, params).tokens
    one = pool_heads(model, 1)
    assert minillm.generate(one, tokenizer, prompt, params).tokens != got  # pooling alone is no small change
