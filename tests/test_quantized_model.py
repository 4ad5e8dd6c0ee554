"""Quantizing a model swaps exactly the matrices that it should; saving and loading it changes no bit; and what cannot
be quantized, saved or loaded is refused in one sentence, before anything is changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import mutant, random_model
from safetensors import safe_open
from safetensors.torch import save_file
from test_checkpoint import byte_level_backend
from torch import Tensor

import minillm
from minillm import ModelConfig, NoCache, SamplingParams, Tokenizer, Transformer, quantized_model
from minillm.calibrate import linear_layers
from minillm.config import RopeScaling
from minillm.quant_linear import QuantEmbedding, QuantLinear
from minillm.quantize import Grid
from minillm.quantized_model import METHODS, load_saved, quantize, quantized_layers, save

SHAPE = {"vocab_size": 320, "d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "d_ff": 96}
TEXTS = [list(range(40)), [7, 3, 7, 3, 100]]
HEAD = Grid(8, 32, symmetric=True)


def small(tied: bool = False, dtype: torch.dtype = torch.float64, **settings) -> Transformer:
    """Shapes that PyTorch's operator can serve: rows of 64 and 96, and multiples of 64 of them."""
    config = ModelConfig(**SHAPE, max_context=64, tied_embeddings=tied, **settings)
    return random_model(config).to(dtype)


def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_backend(), (260,), "{{ bos_token }}", {"bos_token": "<|start|>"})


@torch.inference_mode()
def logits(model: Transformer) -> Tensor:
    tokens = torch.tensor(TEXTS[0])
    return model.logits(model(tokens, torch.arange(len(tokens)), NoCache()))


# ------------------------------------------------------------------------------------------------------------ quantize


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_quantized_model_computes_with_the_dequantized_matrices(method, tied):
    """Put into a float model, they give its logits. Layers to keep, norms and biases stay as they are."""
    settings = {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "qk_norm": True}
    model, expected = small(tied, **settings), small(tied, **settings)
    kept = {"blocks.0.mlp.down", "blocks.1.attention.qkv"}
    assert quantize(model, Grid(4, 32), method, TEXTS, keep=kept.__contains__, head=HEAD) is model
    layers = quantized_layers(model)
    names = {name for name, _ in linear_layers(expected)} - kept
    assert set(layers) == names | ({"embed"} if tied else {"embed", "head"})
    assert {name for name, _ in linear_layers(model)} == kept
    with torch.no_grad():
        for name, layer in layers.items():
            place = expected.get_submodule(name)
            changed = layer.weight.dequantize(torch.float64)
            assert 0 < (changed - place.weight).norm() < 0.2 * place.weight.norm()
            place.weight.copy_(changed)
    torch.testing.assert_close(logits(model), logits(expected), rtol=0, atol=1e-10)


def test_the_embedding_and_a_tied_head_share_one_matrix():
    tied, untied = quantize(small(True), Grid(4, 32), head=HEAD), quantize(small(), Grid(4, 32), head=HEAD)
    assert tied.embed.matrix is tied.head and untied.embed.matrix is not untied.head
    assert quantize(small(), Grid(4, 32)).embed.weight.dtype == torch.float64  # untouched, unless asked for


def test_the_dtype_of_the_products_is_handed_on():
    model = quantize(small(dtype=torch.float32), Grid(4, 32), compute=torch.bfloat16, head=HEAD)
    before = logits(model)
    assert all(layer.compute == torch.bfloat16 for layer in quantized_layers(model).values())
    model.prepare()
    assert any(layer.pairs is not None for layer in quantized_layers(model).values())
    assert (logits(model) - before).abs().max() < 0.1 * before.abs().max()
    assert logits(model).dtype == torch.float32


def test_a_second_grid_for_the_layers_that_the_first_one_left():
    model = quantize(small(), Grid(4, 32), keep=lambda name: name.endswith("down"))
    quantize(model, Grid(8, 32))
    assert {name.rpartition(".")[2]: layer.bits for name, layer in quantized_layers(model).items()}["down"] == 8
    with pytest.raises(ValueError, match="all matrices of this model are quantized already"):
        quantize(model)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"method": "best"}, "method must be one of rtn, awq, gptq, not 'best'"),
        ({"grid": Grid(4, 64)}, "groups of 64 do not divide rows of 96 weights"),
        ({"grid": Grid(4, 128)}, "groups of 128 do not divide rows of 64 weights"),
        ({"head": Grid(8, 48)}, "groups of 48 do not divide rows of 64 weights"),
        ({"method": "awq"}, "calibration"),
        ({"method": "gptq"}, "calibration"),
        ({"method": "gptq", "calibration": [[]]}, "calibration needs at least one token"),
        ({"method": "gptq", "calibration": [1, 2, 3]}, "calibration is a list of texts, each a list of token ids"),
        ({"method": "gptq", "calibration": [["a"]]}, "calibration is a list of texts, each a list of token ids"),
        ({"method": "gptq", "calibration": torch.zeros(1, 4) - 1}, "token ids beyond the vocabulary"),
        ({"method": "awq", "calibration": [[1, 10**6]]}, "token ids beyond the vocabulary"),
        ({"compute": torch.int8}, "compute must be None or one of"),
    ],
)
def test_what_cannot_be_done_is_refused_and_nothing_is_changed(arguments, words):
    model = small()
    with pytest.raises(ValueError, match=words):
        quantize(model, **{"grid": Grid(4, 32), **arguments})
    assert torch.equal(logits(model), logits(small())) and not quantized_layers(model)


def test_a_refusal_at_the_last_layer_leaves_the_first_as_it_was():
    model = small()
    model.blocks[1].mlp.down.weight[3, 5] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        quantize(model, Grid(4, 32), head=HEAD)
    assert not quantized_layers(model)


def test_an_embedding_that_is_quantized_is_not_quantized_again():
    model = quantize(small(), Grid(4, 32), keep=lambda name: "down" in name, head=HEAD)
    with pytest.raises(ValueError, match="the embedding of this model is quantized already"):
        quantize(model, Grid(4, 32), head=HEAD)


# -------------------------------------------------------------------------------------------------------- save and load


CASES = {
    "4 bits": (False, Grid(4, 32), {}, "rtn", None),
    "tied, with the head": (True, Grid(4, 32, symmetric=True), {}, "rtn", HEAD),
    "untied, with the head": (False, Grid(3, 16), {}, "rtn", HEAD),
    "biases and norms": (False, Grid(4, None), {"qkv_bias": True, "mlp_bias": True, "qk_norm": True}, "rtn", HEAD),
    "factors of columns": (True, Grid(4, 32), {"rope_scaling": RopeScaling(4.0, 1.0, 4.0, 16)}, "awq", None),
    "8 bits, wide scales": (True, Grid(8, 32, dtype=torch.float32), {"out_bias": True}, "gptq", HEAD),
}


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_saved_model_comes_back_bit_for_bit(name, ready, tmp_path):
    """Also one whose codes are in the operator's layout."""
    tied, grid, settings, method, head = CASES[name]
    model = quantize(small(tied, torch.float32, **settings), grid, method, TEXTS, head=head, compute=torch.bfloat16)
    expected = quantize(small(tied, torch.float32, **settings), grid, method, TEXTS, head=head)
    if ready:
        model.prepare()
    path = tmp_path / "model.safetensors"
    save(model, tokenizer(), path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    loaded, words = minillm.load(path, device="cpu")
    assert loaded.config == model.config and loaded.dtype == torch.float32
    assert torch.equal(logits(loaded), logits(expected))  # in float32: `compute` is no part of the file
    layers = quantized_layers(loaded)
    assert list(layers) == list(quantized_layers(expected))
    for layer, other in zip(layers.values(), quantized_layers(expected).values(), strict=True):
        for part in ("codes", "scale", "minimum", "channel", "bias"):
            a, b = getattr(layer, part), getattr(other, part)
            assert (a is None) == (b is None) and (a is None or (a.dtype == b.dtype and torch.equal(a, b))), part
    assert loaded.embed is not loaded.head and (not tied or loaded.embed.weight is loaded.head.weight or head)
    text = "the 12 hens<|end|>"
    assert words.encode(text) == tokenizer().encode(text)
    assert words.end_ids == (260,) and words.chat_template == "{{ bos_token }}"
    assert words.special == {"bos_token": "<|start|>"}


def test_the_options_of_loading_hold_for_a_saved_model(tmp_path):
    path = tmp_path / "model.safetensors"
    save(quantize(small(True, torch.float32), Grid(4, 32), head=HEAD), tokenizer(), path)
    model, _ = minillm.load(str(path), device="cpu", dtype=torch.bfloat16, max_context=20, prepare=False)
    assert model.dtype == torch.bfloat16 and model.config.max_context == 20
    assert all(p.requires_grad for p in model.parameters()) and model.head.pairs is None
    assert model.embed(torch.tensor([1])).dtype == torch.bfloat16 and model.head.scale.dtype == torch.float16
    quick, _ = minillm.load(path, device="cpu", compute=torch.bfloat16, max_context=1000)
    assert quick.config.max_context == 64 and quick.head.compute == torch.bfloat16
    assert isinstance(quick.embed, QuantEmbedding) and quick.embed.matrix is quick.head


def test_a_model_may_be_saved_over_the_file_it_came_from(tmp_path):
    path = tmp_path / "model.safetensors"
    save(quantize(small(), Grid(4, 32)), tokenizer(), path)
    before = path.read_bytes()
    model, words = minillm.load(path, device="cpu", dtype=torch.float64)
    save(model, words, path)
    assert path.read_bytes() == before


def test_the_file_is_as_small_as_computed(tmp_path):
    """Its tensors, and some kilobytes of tokenizer."""
    path = tmp_path / "model.safetensors"
    model = quantize(small(True), Grid(4, 32), head=HEAD)
    save(model, tokenizer(), path)
    with safe_open(path, "pt") as file:
        size = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118 (not a dict)
        kinds = {name.rpartition(".")[2] for name in file.keys()}  # noqa: SIM118
    weights = model.config.layer_parameters
    head = model.config.head_parameters
    norms = 8 * 64 * (2 * 2 + 1)
    assert size == weights // 2 + weights // 32 * 4 + head + head // 32 * 2 + norms
    assert kinds == {"codes", "scale", "minimum", "weight"}


def test_a_model_saved_in_one_dtype_runs_in_another(tmp_path):
    """Its biases too: they are on no grid."""
    model = quantize(small(qkv_bias=True, mlp_bias=True), Grid(4, 32))
    save(model, tokenizer(), tmp_path / "m.safetensors")
    loaded, _ = minillm.load(tmp_path / "m.safetensors", dtype=torch.bfloat16, device="cpu")
    assert loaded.blocks[0].attention.qkv.bias.dtype == torch.bfloat16
    assert len(minillm.generate(loaded, None, [1, 2, 3], SamplingParams(max_tokens=3, temperature=0)).tokens) == 3


# ------------------------------------------------------------------------------------------------------------ refusals


def test_only_quantized_models_and_one_kind_of_name_can_be_saved(tmp_path):
    with pytest.raises(ValueError, match="no matrix of this model is quantized"):
        save(small(), tokenizer(), tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=r"must end in .safetensors"):
        save(quantize(small(), Grid(4, 32)), tokenizer(), tmp_path / "m.bin")
    with pytest.raises(OSError, match="there is no folder"):
        save(quantize(small(), Grid(4, 32)), tokenizer(), tmp_path / "nowhere" / "m.safetensors")
    assert not list(tmp_path.iterdir())


def rewrite(path: Path, change: Callable[[dict[str, Tensor], dict], object]) -> None:
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["minillm"])
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    change(tensors, about)
    save_file(tensors, path, {"minillm": json.dumps(about)})


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "model.safetensors"
    save(quantize(small(), Grid(3, 32), head=HEAD), tokenizer(), path)
    return path


DOWN = "blocks.0.mlp.down"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, a: a.update(format="other"), "is not a quantized model that minillm saved"),
        (lambda t, a: a.clear(), "is not a quantized model that minillm saved"),
        (lambda t, a: a.pop("config"), "lacks 'config'"),
        (lambda t, a: a.update(config="{"), "is damaged"),
        (lambda t, a: a.update(bits=[]), "is damaged"),
        (lambda t, a: a.update(tokenizer="7"), "is damaged"),
        (lambda t, a: a["tokenizer"].update(backend="{}"), "is damaged"),
        (lambda t, a: a["config"].pop("d_model"), "is damaged .*d_model"),
        (lambda t, a: a["config"].update(n_heads=3), "is damaged .*must be a multiple"),
        (lambda t, a: a["config"].update(d_ff=64), "does not fit the model"),
        (lambda t, a: a["config"].update(qkv_bias=True), "does not fit the model"),
        (lambda t, a: a["bits"].update({DOWN: 2}), "2 bits hold codes below 4, not 7"),
        (lambda t, a: a["bits"].update({DOWN: "4"}), "is damaged"),
        (lambda t, a: a["bits"].update({DOWN: 9}), "is damaged"),
        (lambda t, a: a["bits"].update({"blocks.9.mlp.down": 4}), "is damaged"),
        (lambda t, a: a["bits"].update({"norm": 4}), "is damaged|lacks"),
        (lambda t, a: t.pop(f"{DOWN}.codes"), f"lacks '{DOWN}.codes'"),
        (lambda t, a: t.pop("norm.weight"), "lacks 'norm.weight'"),
        (lambda t, a: t.update(extra=torch.zeros(1)), "nothing needs the tensor 'extra'"),
        (lambda t, a: t.update({"norm.weight": torch.zeros(3)}), r"has shape \[3\], and \[64\] was expected"),
        (lambda t, a: t.update({f"{DOWN}.codes": t[f"{DOWN}.codes"][1:].clone()}), "do not divide"),
        (lambda t, a: t.update({f"{DOWN}.codes": t[f"{DOWN}.codes"].int()}), "must be uint8"),
        (lambda t, a: t[f"{DOWN}.scale"].fill_(torch.nan), "finite"),
        (lambda t, a: t.update({f"{DOWN}.scale": t[f"{DOWN}.scale"].int()}), "finite"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused_in_one_sentence(change, words, path):
    rewrite(path, change)
    with pytest.raises(ValueError, match=words) as refused:
        minillm.load(path, device="cpu")
    assert "\n" not in str(refused.value) and str(path) in str(refused.value)


def test_a_safetensors_file_of_others_is_refused(tmp_path):
    for metadata in (None, {"format": "pt"}):
        save_file({"weight": torch.zeros(2)}, tmp_path / "m.safetensors", metadata)
        with pytest.raises(ValueError, match="is not a quantized model that minillm saved"):
            minillm.load(tmp_path / "m.safetensors", device="cpu")


def test_a_file_cut_anywhere_is_refused(path):
    whole = path.read_bytes()
    for share in (0, 0.0001, 0.01, 0.5, 0.9999):
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(ValueError, match="is not a complete safetensors file"):
            minillm.load(path, device="cpu")


# ------------------------------------------------------------------------------------------------------------- mutants

MUTANTS = [
    ("pack_nibbles(weight.codes) if layer.halved", "pack_nibbles(weight.codes.flip(1)) if layer.halved"),
    ("codes = unpack_nibbles(codes)", "codes = unpack_nibbles(codes).roll(1, 1)"),
    ('"minimum": layer.minimum,', ""),
    ('"channel": layer.channel,', ""),
    ("weight = layer.weight\n", "weight = layer\n"),  # the codes as they lie there, perhaps in the operator's layout
    ("        model.head.weight = model.embed.weight", "        pass"),
    ("METHODS[method](layer.weight, grid, known.get(name))", "round_to_nearest(layer.weight, grid)"),
]


@pytest.mark.parametrize(("old", "new"), MUTANTS)
def test_a_planted_mistake_is_found(old, new, tmp_path):
    """With AWQ there are minima and factors; the codes are in the operator's layout; the head is tied."""
    module = mutant(quantized_model, old, new)
    expected = quantize(small(True, torch.float32), Grid(4, 32), "awq", TEXTS)
    try:
        model = module.quantize(small(True, torch.float32), Grid(4, 32), "awq", TEXTS, compute=torch.bfloat16).prepare()
        module.save(model, tokenizer(), tmp_path / "m.safetensors")
        loaded, _ = module.load_saved(tmp_path / "m.safetensors")
        assert not torch.equal(logits(loaded), logits(expected))
    except (ValueError, AttributeError, NotImplementedError):
        pass  # a refusal, or a head that has no memory


def test_without_a_mistake_nothing_is_found(tmp_path):
    expected = quantize(small(True, torch.float32), Grid(4, 32), "awq", TEXTS)
    model = quantize(small(True, torch.float32), Grid(4, 32), "awq", TEXTS, compute=torch.bfloat16).prepare()
    assert any(isinstance(m, QuantLinear) and m.pairs is not None for m in model.modules())
    save(model, tokenizer(), tmp_path / "m.safetensors")
    assert torch.equal(logits(load_saved(tmp_path / "m.safetensors")[0]), logits(expected))
