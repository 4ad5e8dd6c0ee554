"""The real model, SmolLM2-135M in float32: the weights were read right, the logits and the greedy text are
transformers', and the cached text is the naive text.

`transformers` computes with the very same numbers: its weights are views into this model's memory.
"""

from __future__ import annotations

import pydoc_data.topics

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from minillm import ContiguousKV, NoCache, SamplingParams, Transformer, generate
from minillm.checkpoint import destinations
from minillm.fetch import default_model

PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):\n",
    "1, 2, 3, 4,",
    "Dear Sir or Madam,",
    "The quick brown fox",
    "In 1969, people first",
    "My favourite colour is",
    "To bake bread, you need",
    "import numpy as np\n\n",
    "She opened the door and",
    "The opposite of cold is",
    "# Shopping list\n\n-",
    "Photosynthesis is",
    "Le chat est sur",
    "A triangle has",
    "Question: Why is the sky blue?\nAnswer:",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "Zzz",
]


@pytest.fixture(scope="module")
def reference(smollm2) -> LlamaForCausalLM:
    """transformers' Llama around this model's own weights."""
    config = smollm2[0].config
    hf_config = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        intermediate_size=config.d_ff,
        max_position_embeddings=config.max_context,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(hf_config)
    loaded = model.load_state_dict(destinations(smollm2[0]), strict=False, assign=True)
    assert loaded.missing_keys == ["lm_head.weight"]
    assert loaded.unexpected_keys == []
    model.tie_weights()
    model.model.rotary_emb = LlamaRotaryEmbedding(hf_config)  # its angles are not part of the weights
    return model.eval().requires_grad_(False)


def english_text(tokenizer, n: int) -> Tensor:
    """The first n tokens of a text that every Python brings along."""
    text = pydoc_data.topics.topics["exceptions"] + pydoc_data.topics.topics["objects"]
    return torch.tensor(tokenizer.encode(text)[:n])


def logits_in_chunks(model: Transformer, ids: Tensor, chunks: list[int], kv) -> Tensor:
    positions = torch.arange(len(ids))
    out = []
    with torch.inference_mode():
        for tokens, places in zip(ids.split(chunks), positions.split(chunks), strict=True):
            out.append(model.logits(model(tokens, places, kv)))
            kv.commit(len(tokens))
    return torch.cat(out)


def assert_same_text(model: Transformer, prompt: list[int], ours: list[int], theirs: list[int]) -> None:
    """If two greedy texts part, say where, and how near a tie the two best logits were there."""
    assert len(ours) == len(theirs)
    part = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
    if part is not None:
        ids = torch.tensor([*prompt, *theirs[:part]])
        best = logits_in_chunks(model, ids, [len(ids)], NoCache())[-1].topk(2).values
        margin = float(best[0] - best[1])
        pytest.fail(f"token {part} is {ours[part]}, not {theirs[part]}; the best logits are {margin:.2g} apart")


def greedy(model: Transformer, prompt: list[int], n: int, kv=None) -> list[int]:
    return generate(model, None, prompt, SamplingParams(temperature=0, max_tokens=n), kv).tokens


def test_the_shape_is_the_published_one(smollm2):
    config = smollm2[0].config
    assert (config.n_layers, config.d_model, config.d_ff) == (30, 576, 1536)
    assert (config.n_heads, config.n_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_context, config.rope_theta) == (49152, 8192, 100000.0)
    assert config.tied_embeddings
    assert sum(parameter.numel() for parameter in smollm2[0].parameters()) == 134_515_008


def test_transformers_reads_the_same_weights_from_the_file(smollm2, reference):
    """Its own table of names and its own order of the rotary rows; only the expansion of blocks is shared."""
    read = load_gguf_checkpoint(str(default_model()), return_tensors=True, model_to_load=reference)
    ours = destinations(smollm2[0])
    assert set(read["tensors"]) == set(ours)
    for name, tensor in read["tensors"].items():
        assert torch.equal(ours[name], tensor), name


def test_the_logits_are_those_of_transformers_at_every_position(smollm2, reference):
    model, tokenizer = smollm2
    ids = english_text(tokenizer, 500)
    assert len(ids) == 500
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    tolerance = 1e-4 * expected.abs().max()
    for chunks, kv in (
        ([500], NoCache()),
        ([1, 7, 64, 3, 130, 1, 2, 292], ContiguousKV(model.config, 500)),
    ):
        assert (logits_in_chunks(model, ids, chunks, kv) - expected).abs().max() <= tolerance


def test_the_greedy_text_is_that_of_transformers(smollm2, reference):
    model, tokenizer = smollm2
    prompt = tokenizer.encode("Once upon a time, in a village by the sea,")
    theirs = reference.generate(
        torch.tensor([prompt]), max_new_tokens=200, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert_same_text(model, prompt, greedy(model, prompt, 200), theirs[0, len(prompt) :].tolist())


def test_cached_text_is_naive_text(smollm2):
    """The naive loop, on all prompts at once: each step feeds every token of every text again, and keeps nothing."""
    model, tokenizer = smollm2
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    texts = [list(prompt) for prompt in prompts]
    for _ in range(24):
        lengths = [len(text) for text in texts]
        tokens = torch.tensor([token for text in texts for token in text])
        positions = torch.cat([torch.arange(length) for length in lengths])
        last = torch.tensor(lengths).cumsum(0) - 1
        with torch.inference_mode():
            best = model.logits(model(tokens, positions, NoCache(lengths))[last]).argmax(-1)
        for text, token in zip(texts, best.tolist(), strict=True):
            text.append(token)
    for prompt, text in zip(prompts, texts, strict=True):
        assert_same_text(model, prompt, greedy(model, prompt, 24), text[len(prompt) :])
    assert len({tuple(text) for text in texts}) == len(PROMPTS)


def test_the_same_loop_without_a_cache_gives_the_same_text(smollm2):
    model, tokenizer = smollm2
    prompt = tokenizer.encode("The capital of France is")
    assert_same_text(model, prompt, greedy(model, prompt, 24), greedy(model, prompt, 24, NoCache()))
