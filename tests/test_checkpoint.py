"""Loading: the logits of a loaded model are transformers', for every family and every kind of file; and a file that is
damaged, foreign or not supported is refused in one sentence.

The random models have large weights, norms far from one and biases far from zero, so that each of these matters; the
stored mutants below prove that it does.
"""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import minillm
from minillm import ContiguousKV, NoCache, Transformer, checkpoint, gguf_file
from minillm.model import Rope

SHAPE = {
    "vocab_size": 264,  # three more than the tokenizer has: real models pad, too
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "rms_norm_eps": 0.05,  # large enough to matter
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,  # shorter than the texts here
}
FAMILIES = {
    "llama": ("llama", {}),
    "llama, multi-head": ("llama", {"num_key_value_heads": 4}),
    "llama, wide heads": ("llama", {"head_dim": 12}),
    "llama, attention biases": ("llama", {"attention_bias": True}),
    "llama, mlp biases": ("llama", {"mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, wide heads, long window": ("mistral", {"head_dim": 12, "sliding_window": 64}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3, wide heads, biases": ("qwen3", {"head_dim": 12, "attention_bias": True}),
}

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())  # the 256 characters that stand for bytes
MERGES = ["h e", "Ġ t", "Ġt he"]
TOKENS = [*BYTES, "he", "Ġt", "Ġthe", "<|start|>", "<|end|>"]
TEXT = "the 12 hens\nthen left<|end|>"


def random_model(family: str, seed: int = 0, **settings) -> PreTrainedModel:
    config = AutoConfig.for_model(family, **{**SHAPE, **settings})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 1.0 if "embed" in name else 0.3, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5, generator=generator)
            else:
                parameter.uniform_(0.3, 1.7, generator=generator)
    return model.requires_grad_(False)


def byte_level_backend() -> Backend:
    vocabulary = {token: i for i, token in enumerate(TOKENS)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[tuple(merge.split()) for merge in MERGES]))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in TOKENS[-2:]])
    return backend


def save(model: PreTrainedModel, folder: Path, **kwargs) -> Path:
    model.save_pretrained(folder, **kwargs)
    byte_level_backend().save(str(folder / "tokenizer.json"))
    return folder


def edit(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def logits_in_chunks(model: Transformer, ids: Tensor, chunks: list[int], kv) -> Tensor:
    """Logits of every position. The text goes in by pieces of these lengths, on top of what `kv` keeps."""
    positions = torch.arange(len(ids))
    out = []
    with torch.inference_mode():
        for tokens, places in zip(ids.split(chunks), positions.split(chunks), strict=True):
            out.append(model.logits(model(tokens, places, kv)))
            kv.commit(len(tokens))
    return torch.cat(out)


def deviation(model: Transformer, reference: PreTrainedModel) -> float:
    """The largest difference of any logit at any position, relative to the largest logit; the worse of two ways."""
    ids = torch.randint(0, model.config.vocab_size, (48,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    one_pass = logits_in_chunks(model, ids, [48], NoCache())
    chunked = logits_in_chunks(model, ids, [1, 5, 17, 2, 1, 22], ContiguousKV(model.config, 48))
    worst = max((actual - expected).abs().max() for actual in (one_pass, chunked))
    return float(worst / expected.abs().max())


@pytest.fixture
def folder(tmp_path) -> Path:
    """A small Llama that loads; each test of a refusal breaks one thing in it."""
    return save(random_model("llama"), tmp_path / "model")


def assert_refused(words: str, path: Path | str, **kwargs) -> None:
    with pytest.raises((ValueError, OSError), match=words) as refusal:
        minillm.load(path, **kwargs)
    assert "\n" not in str(refusal.value)


# ---------------------------------------------------------------------------------------- the logits of transformers


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name, tmp_path):
    family, settings = FAMILIES[name]
    reference = random_model(family, **settings)
    model, _ = minillm.load(save(reference, tmp_path), device="cpu")
    assert deviation(model, reference) <= 1e-5


@pytest.mark.parametrize("rope", [SHAPE["rope_parameters"], LLAMA3], ids=["default", "llama3"])
def test_config_files_of_transformers_4_give_the_same_logits(rope, tmp_path):
    reference = random_model("llama", rope_parameters=rope)
    folder = save(reference, tmp_path)

    def to_old_style(raw: dict) -> None:
        scaling = raw.pop("rope_parameters")
        raw["rope_theta"] = scaling.pop("rope_theta")
        raw["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
        del raw["head_dim"]

    edit(folder / "config.json", to_old_style)
    model, _ = minillm.load(folder, device="cpu")
    assert deviation(model, reference) <= 1e-5


def test_shards_are_put_together(tmp_path):
    reference = random_model("qwen2")
    folder = save(reference, tmp_path, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    (folder / "stray.safetensors").write_bytes(b"not named by the index, so not read")
    model, _ = minillm.load(folder, device="cpu")
    assert deviation(model, reference) <= 1e-5


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_weights_stored_in_half_precision_load_as_float32(stored, tmp_path):
    folder = save(random_model("qwen3").to(stored), tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # rounded weights, exact angles
    model, _ = minillm.load(folder, device="cpu")
    assert model.dtype == torch.float32
    assert deviation(model, reference) <= 1e-5
    half, _ = minillm.load(folder, device="cpu", dtype=stored)
    for name, place in checkpoint.destinations(half).items():
        assert place.dtype == stored
        assert torch.equal(place.float(), reference.state_dict()[name]), name


def test_the_weights_stay_trainable_when_the_model_is_not_prepared(folder):
    assert all(p.requires_grad for p in minillm.load(folder, device="cpu", prepare=False)[0].parameters())
    assert not any(p.requires_grad for p in minillm.load(folder, device="cpu")[0].parameters())


def swap(a: Tensor, b: Tensor) -> None:
    a[:], b[:] = b.clone(), a.clone()


def swap_keys_and_values(model: Transformer) -> None:
    for block in model.blocks:
        swap(*block.attention.qkv.weight.split([32, 16, 16])[1:])


def swap_gate_and_up(model: Transformer) -> None:
    for block in model.blocks:
        swap(*block.mlp.gate_up.weight.chunk(2))


def swap_layer_norms(model: Transformer) -> None:
    for block in model.blocks:
        swap(block.attention_norm.weight, block.mlp_norm.weight)


def swap_head_norms(model: Transformer) -> None:
    for block in model.blocks:
        swap(block.attention.q_norm.weight, block.attention.k_norm.weight)


def drop_bias(part: str) -> Callable[[Transformer], None]:
    def change(model: Transformer) -> None:
        for name, parameter in model.named_parameters():
            if name.endswith(f"{part}.bias"):
                parameter.zero_()

    return change


def change_eps(model: Transformer) -> None:
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps = 1e-6


def use_rope(theta: float) -> Callable[[Transformer], None]:
    def change(model: Transformer) -> None:
        model.rope = Rope(model.config.head_dim, theta, None)

    return change


def interleave_query_rows(model: Transformer) -> None:
    rows = model.blocks[0].attention.qkv.weight
    rows[:32] = rows[interleaved(4, 8)]


MUTANTS = {
    "keys and values swapped": ("llama", swap_keys_and_values),
    "gate and up swapped": ("llama", swap_gate_and_up),
    "norms swapped": ("llama", swap_layer_norms),
    "head norms swapped": ("qwen3", swap_head_norms),
    "qkv bias dropped": ("qwen2", drop_bias("qkv")),
    "output bias dropped": ("llama, attention biases", drop_bias("out")),
    "gate bias dropped": ("llama, mlp biases", drop_bias("gate_up")),
    "down bias dropped": ("llama, mlp biases", drop_bias("down")),
    "epsilon of another model": ("llama", change_eps),
    "rotary base of another model": ("llama", use_rope(10000.0)),
    "rotary scaling ignored": ("llama 3", use_rope(100.0)),
    "query rows in another order": ("llama", interleave_query_rows),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_mistake_that_loading_could_make_shows_in_the_logits(mutant, tmp_path):
    name, change = MUTANTS[mutant]
    family, settings = FAMILIES[name]
    reference = random_model(family, **settings)
    model, _ = minillm.load(save(reference, tmp_path), device="cpu")
    with torch.no_grad():
        change(model)
    assert deviation(model, reference) > 1e-3  # a hundred times the tolerance


# ----------------------------------------------------------------------------------------------------- GGUF files


def interleaved(heads: int, head_dim: int) -> list[int]:
    """GGUF's order of the rows of a query or key projection: both rows of each rotary pair side by side."""
    half = head_dim // 2
    return [head * head_dim + i + side for head in range(heads) for i in range(half) for side in (0, half)]


def write_gguf(
    path: Path,
    reference: PreTrainedModel,
    architecture: str = "llama",
    change: Callable[[dict], object] = lambda fields: None,
    change_tensors: Callable[[dict], object] = lambda tensors: None,
) -> Path:
    """Write `reference` as a llama.cpp converter would, and round its weights to what the file holds.

    The embedding is Q8_0, the other matrices Q4_1, norms and a head of its own F32.
    """
    config = reference.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    tensors = {}
    for hf_name, parameter in reference.named_parameters():
        kind = gguf.GGMLQuantizationType.Q4_1
        if "embed_tokens" in hf_name:
            kind = gguf.GGMLQuantizationType.Q8_0
        elif "norm" in hf_name or "lm_head" in hf_name:
            kind = gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(parameter.numpy(), kind)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(gguf.quants.dequantize(data, kind)))
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(hf_name.split(".")[-2])
        if heads:
            data = data[interleaved(heads, config.head_dim)]
        tensors[names.get_name(hf_name, try_suffixes=(".weight",))] = (data, kind)
    fields = {
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{architecture}.rope.freq_base": config.rope_parameters["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [1] * (len(TOKENS) - 2) + [3, 3],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": len(TOKENS) - 2,
        "tokenizer.ggml.eos_token_id": len(TOKENS) - 1,
    }
    change(fields)
    change_tensors(tensors)
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in fields.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        add[type(value)](name, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_model(**settings) -> PreTrainedModel:
    """Rows of 64 and 96: quantized blocks hold 32 numbers."""
    return random_model("llama", hidden_size=64, head_dim=16, intermediate_size=96, **settings)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rows_at_once", [gguf_file.ROWS_AT_ONCE, 100])  # the second cuts the embedding in three
def test_a_gguf_file_gives_the_logits_and_tokens_of_the_same_model_in_a_folder(
    tied, rows_at_once, tmp_path, monkeypatch
):
    monkeypatch.setattr(gguf_file, "ROWS_AT_ONCE", rows_at_once)
    reference = gguf_model(tie_word_embeddings=tied)
    path = write_gguf(tmp_path / "model.gguf", reference)
    model, tokenizer = minillm.load(path, device="cpu")
    assert model.config.tied_embeddings == tied
    assert deviation(model, reference) <= 1e-5
    from_folder, other_tokenizer = minillm.load(save(reference, tmp_path / "model"), device="cpu")
    places = checkpoint.destinations(from_folder)
    for name, place in checkpoint.destinations(model).items():
        assert torch.equal(place, places[name]), name
    assert tokenizer.encode(TEXT) == other_tokenizer.encode(TEXT)
    assert tokenizer.end_ids == (len(TOKENS) - 1,)
    assert tokenizer.special == {"bos_token": "<|start|>", "eos_token": "<|end|>"}


def test_4_bit_blocks_are_expanded_in_the_right_order():
    """One block by hand: a scale, a minimum, and 16 bytes whose low halves come first. The pattern is asymmetric."""
    scale, minimum = np.float16(0.5), np.float16(-3.0)
    low, high = np.arange(16, dtype=np.uint8), np.arange(15, -1, -1, dtype=np.uint8) // 2
    block = np.concatenate([scale.reshape(1).view(np.uint8), minimum.reshape(1).view(np.uint8), low | high << 4])
    rows = gguf_file.expand(block[None], gguf.GGMLQuantizationType.Q4_1)
    assert rows.tolist() == [[0.5 * n - 3.0 for n in [*low.tolist(), *high.tolist()]]]


def test_a_gguf_file_cut_anywhere_is_refused(tmp_path):
    whole = write_gguf(tmp_path / "whole.gguf", gguf_model()).read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(4, len(whole) - 1, len(whole) // 60), len(whole) - 32]:
        cut.write_bytes(whole[:size])
        assert_refused("is not a complete GGUF file", cut, device="cpu")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.pop("llama.block_count"), "the GGUF file has no field 'llama.block_count'"),
        (lambda f: f.update({"tokenizer.ggml.model": "llama"}), "tokenizer of kind 'llama'; minillm builds 'gpt2'"),
        (lambda f: f.update({"tokenizer.ggml.pre": "llama-bpe"}), "pre-tokenizer 'llama-bpe' is not known here"),
        (lambda f: f.pop("tokenizer.ggml.merges"), "the GGUF file has no field 'tokenizer.ggml.merges'"),
        (
            lambda f: f.update({"tokenizer.ggml.merges": [*f["tokenizer.ggml.merges"], "never seen"]}),
            "the merges do not fit the vocabulary",
        ),
        (lambda f: f.update({"tokenizer.ggml.eos_token_id": 99999}), "names start and end tokens .*99999.*but has"),
        (lambda f: f.pop("tokenizer.ggml.tokens"), "the GGUF file has no field 'tokenizer.ggml.tokens'"),
        (lambda f: f.update({"llama.attention.head_count_kv": 3}), "must be a multiple of n_kv_heads"),
        (lambda f: f.update({"llama.rope.scaling.type": "linear"}), "scales its rotary positions"),
    ],
)
def test_a_gguf_file_that_cannot_be_computed_is_refused(change, words, tmp_path):
    assert_refused(words, write_gguf(tmp_path / "m.gguf", gguf_model(), change=change), device="cpu")


def test_a_gguf_file_of_another_architecture_is_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", gguf_model(), architecture="gemma")
    assert_refused("GGUF architecture 'gemma' is not supported", path, device="cpu")


NORM = (np.ones(64, dtype=np.float32), gguf.GGMLQuantizationType.F32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("token_embd.weight"), "has no tensor token_embd.weight"),
        (lambda t: t.pop("blk.1.ffn_up.weight"), "lacks the tensor 'model.layers.1.mlp.up_proj.weight'$"),
        (lambda t: t.update({"rope_freqs.weight": NORM}), "holds a tensor 'rope_freqs.weight'"),
        (lambda t: t.update({"nodots": NORM}), "holds a tensor 'nodots'"),
        (
            lambda t: t.update({"blk.7.attn_norm.weight": NORM}),
            r"'model.layers.7.input_layernorm.weight' that this kind",
        ),
        (
            lambda t: t.update({"blk.0.attn_q.weight": (np.ones((60, 64), dtype=np.float32), NORM[1])}),
            "'model.layers.0.self_attn.q_proj.weight' has 60 rows, and 64 were expected",
        ),
        (
            lambda t: t.update({"blk.0.attn_norm.weight": (np.ones(64, dtype=np.int8), gguf.GGMLQuantizationType.I8)}),
            "tensors of kind I8 are not supported",
        ),
        (lambda t: t.update({"blk.0.attn_norm.weight": (NORM[0][:32], NORM[1])}), "has 32 rows, and 64 were expected"),
    ],
)
def test_a_gguf_file_with_other_tensors_is_refused(change, words, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", gguf_model(), change_tensors=change)
    assert_refused(words, path, device="cpu")


# ------------------------------------------------------------------------------------------- folders that are refused


class Bomb:
    """An object whose pickle creates a file when it is opened."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("index", [False, True], ids=["alone", "named by the index"])
def test_pickled_weights_are_never_opened(index, folder, tmp_path):
    mark = tmp_path / "opened"
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
    if index:
        content = {"weight_map": {"model.norm.weight": "pytorch_model.bin"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    assert_refused("safetensors", folder, device="cpu")
    assert not mark.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert mark.exists()  # the bomb is live


def test_a_safetensors_file_cut_anywhere_is_refused(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for size in [*range(0, len(whole) - 1, len(whole) // 40), len(whole) - 1]:
        path.write_bytes(whole[:size])
        assert_refused("is not a complete safetensors file", folder, device="cpu")


@pytest.mark.parametrize("content", [b"", b"GG", b"A letter to a friend.\n", b"PK\x03\x04 a zip file"])
def test_a_foreign_file_is_refused(content, tmp_path):
    path = tmp_path / "file.gguf"
    path.write_bytes(content)
    assert_refused("is neither a GGUF file nor a Hugging Face folder", path)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("config.json", "has no config.json: not a model folder"),
        ("tokenizer.json", "has no tokenizer.json"),
        ("model.safetensors", r"has no \*.safetensors file$"),
    ],
)
def test_a_missing_file_is_named(file, words, folder):
    (folder / file).unlink()
    assert_refused(words, folder, device="cpu")


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("config.json", "config.json is not valid JSON"),
        ("tokenizer.json", "tokenizer.json is not a tokenizer that the tokenizers library reads"),
    ],
)
def test_a_broken_file_is_named(file, words, folder):
    text = (folder / file).read_text()
    (folder / file).write_text(text[: len(text) // 2])
    assert_refused(words, folder, device="cpu")


def test_a_config_that_is_no_object_is_refused(folder):
    (folder / "config.json").write_text("[1, 2]")
    assert_refused("does not hold a JSON object", folder)


def test_a_missing_shard_is_named(tmp_path):
    folder = save(random_model("llama"), tmp_path, max_shard_size="30KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    assert_refused(f"lacks {shard.name}, named in model.safetensors.index.json", folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"),
            "lacks the tensor 'model.layers.1.self_attn.k_proj.weight'$",
        ),
        (lambda t: (t.pop("lm_head.weight"), t.pop("model.norm.weight")), "lacks the tensor .* and 1 more"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}),
            "holds a tensor 'model.layers.0.self_attn.q_proj.bias' that this kind of model does not have",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(48, 31)}),
            r"'model.layers.0.mlp.up_proj.weight' has shape \[48, 31\], and \[48, 32\] was expected",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(49, 32)}),
            r"'model.layers.0.mlp.up_proj.weight' has shape \[49, 32\], and \[48, 32\] was expected",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(47, 32)}),
            r"'model.layers.0.mlp.up_proj.weight' has 47 rows, and 48 were expected",
        ),
    ],
)
def test_other_tensors_than_the_config_asks_for_are_refused(change, words, folder):
    edit_tensors(folder, change)
    assert_refused(words, folder, device="cpu")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_type": "gpt_neox"}, "model_type 'gpt_neox' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling 'yarn' is not supported"),
        ({"num_key_value_heads": 3}, r"n_heads \(4\) must be a multiple of n_kv_heads \(3\)"),
        ({"vocab_size": 260}, "the tokenizer has 261 tokens, the model only 260: they do not belong together"),
    ],
)
def test_a_config_that_cannot_be_computed_is_refused(settings, words, folder):
    edit(folder / "config.json", lambda raw: raw.update(settings))
    assert_refused(words, folder, device="cpu")


def test_a_sliding_window_is_refused_unless_the_context_fits_in_it(tmp_path):
    reference = random_model("mistral", sliding_window=48)
    folder = save(reference, tmp_path)
    assert_refused(r"sliding window of 48 tokens.*load\(..., max_context=48\)", folder, device="cpu")
    model, _ = minillm.load(folder, device="cpu", max_context=48)
    assert model.config.max_context == 48
    assert deviation(model, reference) <= 1e-5  # on 48 tokens, with transformers' window in place


def test_an_unused_sliding_window_is_no_obstacle(tmp_path):
    reference = random_model("qwen2", use_sliding_window=False, sliding_window=8)
    folder = save(reference, tmp_path)
    edit(folder / "config.json", lambda raw: raw.update(sliding_window=8))  # as the published Qwen2 files have it
    model, _ = minillm.load(folder, device="cpu")
    assert deviation(model, reference) <= 1e-5


@pytest.mark.parametrize("max_context", [0, -1])
def test_a_context_of_nothing_is_refused(max_context, folder):
    assert_refused(f"max_context must be at least 1, not {max_context}", folder, max_context=max_context)


@pytest.mark.parametrize("name", ["nothing-here", "./no/such.gguf", "/no/such/folder", "a/b/c", "~/no-such-model"])
def test_no_such_file_says_what_would_do(name):
    assert_refused("there is no file or folder .*'smollm2-135m', a hub name has the form 'owner/name'", name)


# ------------------------------------------------------------------------------- what else a folder may hold, and hubs


def test_tensors_that_carry_nothing_new_are_passed_over(tmp_path):
    reference = random_model("llama", tie_word_embeddings=True)
    folder = save(reference, tmp_path)

    def add_derived(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["lm_head.weight"] = torch.zeros(264, 32)  # the tied head, which is the embedding

    edit_tensors(folder, add_derived)
    assert deviation(minillm.load(folder, device="cpu")[0], reference) <= 1e-5


def test_a_second_copy_of_the_weights_in_the_makers_own_layout_is_passed_over(folder):
    """Mistral's folders hold `consolidated.safetensors` beside `model.safetensors`."""
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    minillm.load(folder, device="cpu")


@pytest.mark.parametrize(
    ("generation_config", "config", "expected"),
    [
        ({"eos_token_id": [260, 7]}, 260, (260, 7)),
        ({"eos_token_id": 259}, 260, (259,)),
        ({}, 260, (260,)),
        (None, [3, 4], (3, 4)),
        (None, None, ()),
    ],
)
def test_end_tokens_are_many_one_or_none(generation_config, config, expected, folder):
    edit(folder / "config.json", lambda raw: raw.update(eos_token_id=config))
    path = folder / "generation_config.json"
    if generation_config is None:
        path.unlink()
    else:
        path.write_text(json.dumps(generation_config))
    assert minillm.load(folder, device="cpu")[1].end_ids == expected


@pytest.mark.parametrize(
    ("settings", "file", "expected"),
    [
        ({"chat_template": "{{ eos_token }}"}, None, "<|end|>"),
        ({"chat_template": "old"}, "{{ bos_token }}", "<|start|>"),  # the newer place wins
        ({"chat_template": [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]}, None, "d"),
    ],
)
def test_the_chat_template_is_found_in_each_of_its_places(settings, file, expected, folder):
    special = {"bos_token": {"content": "<|start|>"}, "eos_token": "<|end|>"}  # both ways to write a token
    (folder / "tokenizer_config.json").write_text(json.dumps({**special, **settings}))
    if file:
        (folder / "chat_template.jinja").write_text(file)
    _, tokenizer = minillm.load(folder, device="cpu")
    assert tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == expected


def test_a_hub_name_loads_the_downloaded_folder(folder, monkeypatch):
    asked = {}

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        asked[name] = allow_patterns
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    model, _ = minillm.load("owner/name", device="cpu")
    assert model.config.d_model == 32
    assert list(asked) == ["owner/name"]
    assert not any("bin" in pattern for pattern in asked["owner/name"])  # no pickles


def test_a_hub_that_cannot_be_reached_is_reported_in_one_sentence(monkeypatch):
    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        raise RuntimeError("\nno route to host\nmany more lines\n")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert_refused(
        r"no folder 'owner/name' here, and the hub did not give that model \(no route to host\)", "owner/name"
    )


# --------------------------------------------------------------------------------------------------------- memory

PEAK = """
import minillm, minillm.checkpoint, torch

def peak():  # not ru_maxrss, which counts what the parent process held when it started this one
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM:"))

before = peak()
model, _ = minillm.load(device="cpu")
print(peak() - before, sum(parameter.nbytes for parameter in model.parameters()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
def test_the_weights_are_never_held_twice(smollm2):
    """Loading grows the peak of the resident memory by less than 1.6 times the float32 weights.

    It grows by 1.4 times: beside the weights there are the file's mapped pages (0.18 of their size), what reading the
    vocabulary takes (0.15 to 0.2) and one tensor's buffers. With a second copy of the weights it grows by 2.4.
    """
    child = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    growth, weights = map(int, child.stdout.split())
    assert weights == sum(parameter.nbytes for parameter in smollm2[0].parameters())
    assert weights < growth < 1.6 * weights
