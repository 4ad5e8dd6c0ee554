"""A model on its file's own 4 and 8 bits is the float model: the same logits, the same text, a fifth of the memory.

Small random files show the order of everything in a block of the file, and the mistakes planted below break their
logits. The real file shows that it holds at size, and that no wide copy of a matrix is anywhere.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import gguf
import numpy as np
import pytest
import torch
from conftest import mutant
from gguf import GGMLQuantizationType as Kind
from test_checkpoint import gguf_model, logits_in_chunks, save, write_gguf
from test_quant_linear import OPERATOR
from test_real_model import PROMPTS, english_text
from torch import nn

import minillm
from minillm import ContiguousKV, Engine, LayerSkipDrafter, NoCache, SamplingParams, checkpoint, native
from minillm.drafters import first_layers
from minillm.feature_drafter import FeatureDrafter, FeatureModel
from minillm.gguf_file import GGUFFile
from minillm.quant_linear import QuantEmbedding, QuantLinear

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def storages(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, each piece of memory once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def eight_bit_head(tensors: dict) -> None:
    """A head of its own, which `write_gguf` leaves in float32, as real files have it."""
    if "output.weight" in tensors:
        tensors["output.weight"] = (gguf.quants.quantize(tensors["output.weight"][0], Kind.Q8_0), Kind.Q8_0)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def path(request, tmp_path_factory) -> Path:
    reference = gguf_model(tie_word_embeddings=request.param)
    return write_gguf(tmp_path_factory.mktemp("native") / "m.gguf", reference, change_tensors=eight_bit_head)


# --------------------------------------------------------------------------------------------------------- small files


def deviation(model, other) -> float:
    """The largest difference of any logit, relative to the largest: in one pass, and in pieces on a cache."""
    ids = torch.randint(0, model.config.vocab_size, (48,), generator=torch.Generator().manual_seed(1))
    worst = 0.0
    for chunks, cached in [([48], False), ([1, 5, 17, 2, 1, 22], True)]:
        stores = [ContiguousKV(m.config, 48, m.dtype) if cached else NoCache() for m in (model, other)]
        a, b = (logits_in_chunks(m, ids, chunks, kv) for m, kv in zip((model, other), stores, strict=True))
        worst = max(worst, float((a - b).abs().max() / b.abs().max()))
    return worst


def test_every_weight_is_bit_for_bit_that_of_the_expanded_file(path):
    expanded, _ = minillm.load(path, device="cpu")
    model, _ = minillm.load(path, device="cpu", weights="native")
    matrices = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}
    assert len(matrices) == 4 * model.config.n_layers + (1 if model.config.tied_embeddings else 2)
    for name, layer in matrices.items():
        weight = expanded.get_submodule(name.removesuffix(".matrix")).weight
        assert torch.equal(layer.weight.dequantize(), weight), name
        assert layer.scale.dtype == torch.float16
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expanded.get_parameter(name)), name


@pytest.mark.parametrize("prepare", [True, False])
def test_the_logits_are_those_of_the_expanded_file(path, prepare):
    expanded, _ = minillm.load(path, device="cpu", dtype=torch.float64)
    model, _ = minillm.load(path, device="cpu", dtype=torch.float64, weights="native", prepare=prepare)
    assert deviation(model, expanded) <= 1e-12
    assert all(parameter.requires_grad != prepare for parameter in model.parameters())


@OPERATOR
def test_in_bfloat16_the_layers_that_the_operator_can_serve_use_it(path):
    """Here those of 64 times n rows: q, k and v together, but no head of 264 rows."""
    expanded, _ = minillm.load(path, device="cpu")
    model, _ = minillm.load(path, device="cpu", weights="native", compute=torch.bfloat16)
    assert model.blocks[0].attention.qkv.pairs is not None and model.head.pairs is None
    assert 1e-4 < deviation(model, expanded) < 0.05
    whole, _ = minillm.load(path, device="cpu", weights="native", dtype=torch.bfloat16)
    assert whole.blocks[0].attention.qkv.pairs is not None and whole.dtype == torch.bfloat16
    assert 1e-4 < deviation(whole, expanded) < 0.1
    again = whole.to(torch.float64)  # the grid was not rounded on the way
    assert torch.equal(again.head.weight.dequantize(), expanded.head.weight)


def test_engine_and_drafters_take_a_native_model(path):
    expanded, tokenizer = minillm.load(path, device="cpu", dtype=torch.float64)
    model, _ = minillm.load(path, device="cpu", dtype=torch.float64, weights="native")
    text = minillm.generate(expanded, tokenizer, "the hens", GREEDY).tokens
    assert minillm.generate(model, tokenizer, "the hens", GREEDY).tokens == text
    features = FeatureModel(model.config, torch.arange(40, dtype=torch.int32), dtype=torch.float64)
    for parameter in features.parameters():
        nn.init.normal_(parameter, std=0.1) if parameter.ndim > 1 else nn.init.ones_(parameter)
    features.requires_grad_(False)
    for drafter in (None, LayerSkipDrafter(model, 1), FeatureDrafter(model, features)):
        engine = Engine(model, tokenizer, n_blocks=16, block_size=8, drafter=drafter)
        assert [result.tokens for result in engine.generate(["the hens"], GREEDY)] == [text]
    drafter = FeatureDrafter(model, features)
    assert torch.equal(drafter.head.weight, expanded.head.weight[:40])
    assert first_layers(model, 1).head is model.head


def test_what_needs_float_memory_refuses_a_quantized_model(path):
    model, _ = minillm.load(path, device="cpu", weights="native")
    with pytest.raises(ValueError, match="matrices are quantized"):
        checkpoint.destinations(model)


# ---------------------------------------------------------------------------------------------------- planted mistakes


def agrees(module: ModuleType, path: Path) -> bool:
    expanded, _ = minillm.load(path, device="cpu", dtype=torch.float64)
    try:
        model = module.native_model(GGUFFile(path), torch.float64, "cpu")
        return deviation(model, expanded) <= 1e-12
    except ValueError:
        return False


MUTANTS = {
    "nibbles in the other order": ("[packed & 15, packed >> 4]", "[packed >> 4, packed & 15]"),
    "codes two by two": (
        "torch.cat([packed & 15, packed >> 4], dim=-1).flatten(1)",
        "torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)",
    ),
    "scale and minimum exchanged": (
        "half_floats(blocks[..., 0:2]), half_floats(blocks[..., 2:4])",
        "half_floats(blocks[..., 2:4]), half_floats(blocks[..., 0:2])",
    ),
    "zero point off by one": ("^ 128", "^ 129"),
    "codes with their sign bit": ("(blocks[..., 2:] ^ 128)", "blocks[..., 2:]"),
    "rope order not undone": ("if not heads:", "if True:"),
    "scales left in the file's order": (
        "(half_pairs(x, heads) for x in (found.codes, found.scale, found.minimum))",
        "(half_pairs(found.codes, heads), found.scale, half_pairs(found.minimum, heads))",
    ),
    "minima left in the file's order": (
        "(half_pairs(x, heads) for x in (found.codes, found.scale, found.minimum))",
        "(half_pairs(found.codes, heads), half_pairs(found.scale, heads), found.minimum)",
    ),
    "q and k exchanged": ('for name in "qkv"', 'for name in "kqv"'),
    "k and v exchanged": ('for name in "qkv"', 'for name in "qvk"'),
    "gate and up exchanged": ('("gate", "up")', '("up", "gate")'),
    "the norms exchanged": (
        'norm(block.mlp_norm, f"{layer}post_attention_layernorm.weight")',
        "block.attention_norm, block.mlp_norm = block.mlp_norm, block.attention_norm\n"
        '        norm(block.attention_norm, f"{layer}post_attention_layernorm.weight")',
    ),
}


def test_without_a_mistake_it_agrees(path):
    assert agrees(native, path)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_mistake_changes_the_logits(name, path):
    assert not agrees(mutant(native, *MUTANTS[name]), path)


# ------------------------------------------------------------------------------------------------------------ refusals


def refusal(path: Path | str, **kwargs) -> str:
    with pytest.raises((ValueError, OSError)) as refused:
        minillm.load(path, device="cpu", **kwargs)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def again(tensors: dict, name: str, kind: Kind) -> None:
    data, old = tensors[name]
    tensors[name] = (gguf.quants.quantize(gguf.quants.dequantize(data, old), kind), kind)


def infinite(tensors: dict, name: str) -> None:
    data = np.array(tensors[name][0])
    data[:, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    tensors[name] = (data, tensors[name][1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: again(t, "blk.0.ffn_down.weight", Kind.F32), "computes with Q4_1 and Q8_0; .* of kind F32"),
        (lambda t: again(t, "blk.1.ffn_down.weight", Kind.Q4_0), "down_proj.weight' is of kind Q4_0"),
        (lambda t: again(t, "blk.1.attn_k.weight", Kind.Q8_0), "are of different kinds"),
        (lambda t: infinite(t, "blk.1.attn_k.weight"), "scales that are not finite"),
        (lambda t: infinite(t, "token_embd.weight"), "scales that are not finite"),
        (lambda t: t.pop("blk.1.ffn_up.weight"), "lacks the tensor 'model.layers.1.mlp.up_proj.weight'"),
        (lambda t: t.pop("output_norm.weight"), "lacks the tensor 'model.norm.weight'"),
        (lambda t: t.update({"blk.7.ffn_up.weight": t["blk.0.ffn_up.weight"]}), "holds a tensor .*layers.7"),
        (lambda t: t.update({"blk.0.ffn_up.weight": t["blk.0.attn_k.weight"]}), "has shape .* was expected"),
        (lambda t: t.update({"blk.0.attn_q.weight": t["blk.0.attn_k.weight"]}), "has shape .* was expected"),
        (lambda t: t.update({"blk.0.attn_k.weight": t["blk.0.ffn_down.weight"]}), "has rows of .* were expected"),
        (lambda t: t.update({"output_norm.weight": t["blk.0.attn_k.weight"]}), "has shape .* was expected"),
    ],
)
def test_a_file_with_other_tensors_is_refused_in_one_sentence(change, words, tmp_path):
    file = write_gguf(tmp_path / "m.gguf", gguf_model(tie_word_embeddings=True), change_tensors=change)
    assert re.search(words, refusal(file, weights="native"))


def test_a_block_matrix_may_be_of_eight_bits(tmp_path):
    change = lambda t: again(t, "blk.0.ffn_down.weight", Kind.Q8_0)  # noqa: E731
    file = write_gguf(tmp_path / "m.gguf", gguf_model(tie_word_embeddings=True), change_tensors=change)
    assert minillm.load(file, device="cpu", weights="native")[0].blocks[0].mlp.down.bits == 8
    assert agrees(native, file)


def test_sources_and_options_that_do_not_go_together_are_refused(path, tmp_path):
    folder = save(gguf_model(), tmp_path / "folder")
    assert "needs a GGUF file" in refusal(folder, weights="native")
    assert "weights must be one of float, native, not 'int4'" in refusal(path, weights="int4")
    assert "compute is for weights that stay quantized" in refusal(path, compute=torch.bfloat16)
    assert "compute must be None or one of" in refusal(path, weights="native", compute=torch.int8)
    assert "compute must be None or one of" in refusal(path, weights="native", compute="bfloat16")
    assert "there is no file or folder" in refusal("no-such-model", weights="native")


# ------------------------------------------------------------------------------------------------------- the real model


@pytest.fixture(scope="module")
def exact():
    """The real model with float32 products."""
    return minillm.load("smollm2-135m", device="cpu", weights="native")[0]


def test_the_real_logits_are_those_of_the_float_model(smollm2, exact):
    model, tokenizer = smollm2
    ids = english_text(tokenizer, 64)
    with torch.inference_mode():
        a = logits_in_chunks(exact, ids, [64], NoCache())
        assert float((a - logits_in_chunks(model, ids, [64], NoCache())).abs().max()) <= 1e-4
        stores = [ContiguousKV(m.config, 64) for m in (exact, model)]
        chunks = [40, 1, 1, 1, 21]
        a, b = (logits_in_chunks(m, ids, chunks, kv) for m, kv in zip((exact, model), stores, strict=True))
    assert float((a - b).abs().max()) <= 1e-4


@pytest.mark.parametrize("prompt", PROMPTS[:2])
def test_the_real_greedy_text_is_that_of_the_float_model(prompt, smollm2, exact):
    model, tokenizer = smollm2
    texts = [minillm.generate(m, tokenizer, prompt, GREEDY).tokens for m in (exact, model)]
    assert texts[0] == texts[1]


def computed_bytes(config, operator: bool) -> int:
    """Half a byte a weight of the blocks and one a weight of the head; for 32 weights a scale and, but in the head, a
    minimum, of 2 bytes; norms in float32. The operator has a scale and a zero of 2 bytes for 32 codes of 4 bits, and
    for it a code of the head is two."""
    blocks, head = config.layer_parameters, config.head_parameters
    size = blocks // 2 + blocks // 32 * 4 + head + head // 32 * 2
    size += 4 * config.d_model * (2 * config.n_layers + 1)
    return size + (blocks // 32 + 2 * head // 32) * 4 if operator else size


def test_the_memory_is_what_is_computed_and_no_wide_copy_is_left(smollm2, exact):
    config = exact.config
    assert storages(exact) == computed_bytes(config, operator=False)
    assert storages(exact) < 0.19 * storages(smollm2[0])
    assert max(p.numel() for p in exact.parameters()) == config.d_model
    assert not [b for b in exact.buffers() if b.is_floating_point() and b.numel() > config.head_parameters // 32]
    assert isinstance(exact.embed, QuantEmbedding) and exact.embed.matrix is exact.head


@OPERATOR
def test_in_bfloat16_every_layer_uses_the_operator_and_the_text_stays_near(smollm2):
    """What rounding activations, scales and results to 8 bits of mantissa does to the next token: 0.001 nats or so."""
    model, tokenizer = smollm2
    quick, _ = minillm.load("smollm2-135m", device="cpu", weights="native", compute=torch.bfloat16)
    assert all(layer.pairs is not None for layer in quick.modules() if isinstance(layer, QuantLinear))
    assert storages(quick) == computed_bytes(quick.config, operator=True) < 0.22 * storages(model)
    ids = english_text(tokenizer, 64)
    with torch.inference_mode():
        p, q = (logits_in_chunks(m, ids, [64], NoCache()).log_softmax(-1) for m in (model, quick))
    kl = float((p.exp() * (p - q)).sum(-1).mean())
    assert 1e-6 < kl < 0.005
    agree = float((p.argmax(-1) == q.argmax(-1)).float().mean())
    assert agree > 0.9
    embedded = quick.embed(ids)
    assert torch.equal(embedded, model.embed(ids))  # out of the operator's layout, bit for bit


GROWTH = """
import minillm, minillm.checkpoint, torch

def resident():
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("RssAnon:"))

before = resident()
model, tokenizer = minillm.load(device="cpu", weights="native", compute=torch.bfloat16)
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is read from /proc")
def test_a_process_grows_by_little_more_than_the_bits(smollm2, exact):
    """Beside the weights: the vocabulary and the tokenizer, some 90 MB. A float model grows by its weights at least."""
    child = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    assert storages(exact) < int(child.stdout) < 0.5 * storages(smollm2[0])
