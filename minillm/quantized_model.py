"""A model with quantized matrices: swap the linear layers, save them, load them.

A saved model is one safetensors file. Its metadata, as JSON, hold the model's shape, what is quantized, the tokenizer.
Codes are stored as packing.py says, never in a layout that some operator of this machine likes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend
from torch import Tensor, nn
from tqdm import tqdm

from minillm.awq import awq
from minillm.calibrate import hessians, linear_layers
from minillm.config import ModelConfig, RopeScaling
from minillm.gptq import gptq
from minillm.model import Transformer
from minillm.packing import pack_nibbles, unpack_nibbles
from minillm.quant_linear import QuantEmbedding, QuantLinear, require_compute, symmetric_minimum
from minillm.quantize import Grid, Method, Quantized, round_to_nearest
from minillm.tokenizer import Tokenizer

METHODS: dict[str, Method] = {"rtn": round_to_nearest, "awq": awq, "gptq": gptq}
FORMAT = "quantized model, 1"


def quantize(
    model: Transformer,
    grid: Grid | None = None,
    method: str = "rtn",
    calibration: Sequence[Sequence[int]] | None = None,
    keep: Callable[[str], bool] = lambda name: False,
    compute: torch.dtype | None = None,
    head: Grid | None = None,
) -> Transformer:
    """Put the matrices of the blocks on a grid, in place; then `prepare` the model. A refusal changes nothing.

    method: "rtn" (round to nearest), "awq" or "gptq"; the last two need `calibration`, some texts as token ids.
    -> the same model. Raises ValueError for what cannot be put on the grid.
    keep: names of layers ("blocks.0.mlp.down") that stay as they are. compute: the dtype of the products (QuantLinear).
    head: a grid for the embedding and the head, such as Grid(8, 32, symmetric=True); they are rounded to nearest.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, not {method!r}")
    require_compute(compute)
    grid = grid or Grid()
    if not linear_layers(model):
        raise ValueError("all matrices of this model are quantized already")
    if head and isinstance(model.embed, QuantEmbedding):
        raise ValueError("the embedding of this model is quantized already")
    layers = [(name, layer) for name, layer in linear_layers(model) if not keep(name)]
    for _, layer in layers:
        grid.groups(layer.weight.shape[1])  # all of them first: a refusal should not take minutes
    ends = {"embed": model.embed} if model.config.tied_embeddings else {"embed": model.embed, "head": model.head}
    found = {name: round_to_nearest(layer.weight, head) for name, layer in ends.items()} if head else {}
    known = {} if calibration is None else hessians(model, calibration)
    for name, layer in layers if method == "rtn" else tqdm(layers, "quantizing", leave=False):
        found[name] = METHODS[method](layer.weight, grid, known.get(name))
    for name, weight in found.items():
        put(model, name, QuantLinear(weight, getattr(model.get_submodule(name), "bias", None), compute))
    return model


def put(model: Transformer, name: str, layer: QuantLinear) -> None:
    """Put a layer in place of the module of this name. "embed": also in place of a head that is tied to it."""
    if name != "embed":
        replace_module(model, name, layer)
        return
    model.embed = QuantEmbedding(layer, model.dtype)
    if model.config.tied_embeddings:
        model.head = layer


def replace_module(model: nn.Module, name: str, new: nn.Module | nn.Parameter) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, new)


def quantized_layers(model: Transformer) -> dict[str, QuantLinear]:
    """The quantized layers by the names that `put` takes; a layer that is embedding and head is there once."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}
    return {name.removesuffix(".matrix"): layer for name, layer in layers.items()}


def save(model: Transformer, tokenizer: Tokenizer, path: str | os.PathLike) -> None:
    """Write a model with quantized layers, and its tokenizer, to a .safetensors file that `minillm.load` reads.

    Raises ValueError for a model without such layers or another ending, OSError where the file cannot be written.
    """
    path = Path(path)
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {str(path.parent)!r} to save to")
    if path.suffix != ".safetensors":
        raise ValueError(f"the name of the file must end in .safetensors, and {str(path)!r} does not")
    layers = quantized_layers(model)
    if not layers:
        raise ValueError("no matrix of this model is quantized: this format is for models that are")
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, layer in layers.items():
        weight = layer.weight
        parts = {"codes": pack_nibbles(weight.codes) if layer.halved else weight.codes, "scale": weight.scale}
        parts |= {"minimum": layer.minimum, "channel": layer.channel, "bias": layer.bias}
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items() if tensor is not None}
    about = {
        "format": FORMAT,
        "config": asdict(model.config),
        "bits": {name: layer.bits for name, layer in layers.items()},
        "tokenizer": {
            "backend": tokenizer.backend.to_str(),
            "end_ids": tokenizer.end_ids,
            "chat_template": tokenizer.chat_template,
            "special": tokenizer.special,
        },
    }
    part = path.with_name(path.name + ".part")  # whoever reads the old file meanwhile, this model perhaps, may go on
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part, {"minillm": json.dumps(about)})
    part.replace(path)


def load_saved(
    path: Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    max_context: int | None = None,
    compute: torch.dtype | None = None,
) -> tuple[Transformer, Tokenizer]:
    """What `save` wrote. dtype: of all that is not quantized. Raises ValueError for a file that is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            about = (file.metadata() or {}).get("minillm", "")
            if FORMAT not in about:
                raise ValueError(f"{path} is not a quantized model that minillm saved (a model folder is loaded whole)")
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file ({error})") from None
    try:
        about = json.loads(about)
        config, bits, words = about["config"], about["bits"], about["tokenizer"]
        scaling = config.pop("rope_scaling")
        config = ModelConfig(**config, rope_scaling=RopeScaling(**scaling) if scaling else None)
        config = replace(config, max_context=min(max_context or config.max_context, config.max_context))
        tokenizer = Tokenizer(
            Backend.from_str(words["backend"]), words["end_ids"], words["chat_template"], words["special"]
        )
        model = assemble(config, dtype, tensors, bits, compute)
    except Exception as error:  # of many kinds: the tokenizers library raises plain Exception
        reason = f"lacks {error}" if isinstance(error, KeyError) else f"is damaged ({str(error).splitlines()[0]})"
        raise ValueError(f"{path} {reason}") from None
    return model.to(device), tokenizer


def assemble(
    config: ModelConfig,
    dtype: torch.dtype,
    tensors: dict[str, Tensor],
    bits: dict[str, int],
    compute: torch.dtype | None,
) -> Transformer:
    """A model of these tensors; all of them are used up. KeyError: one is missing. ValueError: one does not fit."""
    model = Transformer(config, dtype, device="meta")
    for name, n in bits.items():
        place = model.get_submodule(name)
        codes, scale = tensors.pop(f"{name}.codes"), tensors.pop(f"{name}.scale")
        minimum, channel, bias = (tensors.pop(f"{name}.{part}", None) for part in ("minimum", "channel", "bias"))
        n_out, n_in = place.weight.shape
        if n <= 4 and n_in % 2 == 0:
            codes = unpack_nibbles(codes)
        minimum = symmetric_minimum(scale, n) if minimum is None else minimum
        bias = None if bias is None else bias.to(dtype)
        layer = QuantLinear(Quantized(codes, scale, minimum, n, channel), bias, compute)
        if (layer.n_out, layer.n_in) != (n_out, n_in) or (bias is None) != (getattr(place, "bias", None) is None):
            raise ValueError(f"the matrix {name} does not fit the model")
        put(model, name, layer)
    for name, parameter in list(model.named_parameters()):
        tensor = tensors.pop(name)
        if tensor.shape != parameter.shape:
            raise ValueError(
                f"tensor {name!r} has shape {list(tensor.shape)}, and {list(parameter.shape)} was expected"
            )
        replace_module(model, name, nn.Parameter(tensor.to(dtype)))
    if config.tied_embeddings and isinstance(model.embed, nn.Embedding):
        model.head.weight = model.embed.weight
    if tensors:
        raise ValueError(f"nothing needs the tensor {next(iter(tensors))!r}")
    return model
