"""A model with quantized matrices: swap the linear layers, save them, load them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from tqdm import tqdm

from minillm.awq import awq
from minillm.calibrate import hessians, linear_layers
from minillm.gptq import gptq
from minillm.model import Transformer
from minillm.quant_linear import QuantLinear
from minillm.quantize import Grid, Method, round_to_nearest

METHODS: dict[str, Method] = {"rtn": round_to_nearest, "awq": awq, "gptq": gptq}


def quantize(
    model: Transformer,
    grid: Grid | None = None,
    method: str = "rtn",
    calibration: Sequence[Sequence[int]] | None = None,
    keep: Callable[[str], bool] = lambda name: False,
    compute: torch.dtype | None = None,
) -> Transformer:
    """Put the matrices of the blocks on a grid, in place.

    method: "rtn" (round to nearest), "awq" or "gptq"; the last two need `calibration`, some texts as token ids.
    keep: names of layers ("blocks.0.mlp.down") that stay as they are. compute: the dtype of the products (QuantLinear).
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, not {method!r}")
    grid = grid or Grid()
    layers = [(name, layer) for name, layer in linear_layers(model) if not keep(name)]
    for _, layer in layers:
        grid.groups(layer.weight.shape[1])  # all of them first: a refusal should leave the model whole
    known = hessians(model, calibration) if calibration else {}
    for name, layer in tqdm(layers, "quantizing", leave=False, disable=method == "rtn"):
        found = METHODS[method](layer.weight, grid, known.get(name))
        replace_module(model, name, QuantLinear(found, layer.bias, compute))
    return model


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, new)
