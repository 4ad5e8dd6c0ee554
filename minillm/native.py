"""A model that computes with the numbers of its GGUF file: 4-bit matrices stay 4-bit, and no wide copy is ever made.

Q4_1 and Q8_0 are grids like our own: a block of 32 weights of a row has a scale in float16, Q4_1 a minimum too, and a
code for each weight. So the file's bytes are only put in another order. Nothing is rounded, and nothing is lost.

The blocks: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor, nn

from minillm.gguf_file import GGUFFile, expand, half_pairs, hf_name
from minillm.model import Transformer
from minillm.quant_linear import QuantEmbedding, QuantLinear, symmetric_minimum
from minillm.quantize import Quantized


def native_model(
    source: GGUFFile, dtype: torch.dtype, device: str | torch.device, compute: torch.dtype | None = None
) -> Transformer:
    """dtype: of all that is not quantized. compute: the dtype of the products (QuantLinear).

    Raises ValueError for tensors that are of another kind than Q4_1 and Q8_0, missing, or left over.
    """
    config, parts = source.config, Parts(source)
    model = Transformer(config, dtype, device="meta")  # shapes without memory

    def matrix(place: nn.Module, *names: str) -> QuantLinear:
        return QuantLinear(parts.matrix(names, place.weight.shape), compute=compute).to(device)

    def norm(place: nn.Module, name: str) -> None:
        place.weight = nn.Parameter(parts.vector(name, place.weight.shape).to(device, dtype))

    for i, block in enumerate(model.blocks):
        layer = f"model.layers.{i}."
        qkv = [f"{layer}self_attn.{name}_proj.weight" for name in "qkv"]
        block.attention.qkv = matrix(block.attention.qkv, *qkv)
        block.attention.out = matrix(block.attention.out, f"{layer}self_attn.o_proj.weight")
        block.mlp.gate_up = matrix(block.mlp.gate_up, *(f"{layer}mlp.{name}_proj.weight" for name in ("gate", "up")))
        block.mlp.down = matrix(block.mlp.down, f"{layer}mlp.down_proj.weight")
        norm(block.attention_norm, f"{layer}input_layernorm.weight")
        norm(block.mlp_norm, f"{layer}post_attention_layernorm.weight")
    norm(model.norm, "model.norm.weight")
    embedding = matrix(model.embed, "model.embed_tokens.weight")
    model.head = embedding if config.tied_embeddings else matrix(model.head, "lm_head.weight")
    model.embed = QuantEmbedding(embedding, dtype)
    parts.require_empty()
    return model


class Parts:
    """The tensors of a file, each taken once, under Hugging Face's names."""

    def __init__(self, source: GGUFFile):
        self.source = source
        self.left = {hf_name(name): name for name in source.by_name}

    def take(self, name: str):
        if name not in self.left:
            raise ValueError(f"the checkpoint lacks the tensor {name!r}")
        return self.source.by_name[self.left.pop(name)]

    def vector(self, name: str, shape: torch.Size) -> Tensor:
        tensor = self.take(name)
        values = expand(tensor.data, tensor.tensor_type)
        require_shape(name, values.shape, shape)
        return values

    def matrix(self, names: tuple[str, ...], shape: torch.Size) -> Quantized:
        """The rows of several matrices together."""
        parts = [self.rows(name, shape[1]) for name in names]
        if len({part.bits for part in parts}) > 1:
            raise ValueError(f"{' and '.join(names)} are of different kinds, and one layer computes them together")
        together = (torch.cat([getattr(part, field) for part in parts]) for field in ("codes", "scale", "minimum"))
        found = Quantized(*together, parts[0].bits)
        require_shape(" and ".join(names), found.codes.shape, shape)
        return found

    def rows(self, name: str, n_in: int) -> Quantized:
        tensor = self.take(name)
        if tensor.tensor_type not in READERS:
            kinds = " and ".join(kind.name for kind in READERS)
            raise ValueError(
                f"weights='native' computes with {kinds}; the tensor {name!r} is of kind {tensor.tensor_type.name}"
            )
        found = READERS[tensor.tensor_type](tensor.data)
        if found.codes.shape[1] != n_in:
            raise ValueError(
                f"the tensor {name!r} has rows of {found.codes.shape[1]} weights, and {n_in} were expected"
            )
        if not (torch.isfinite(found.scale).all() and torch.isfinite(found.minimum).all()):
            raise ValueError(f"the tensor {name!r} has scales that are not finite, or too large for float16")
        heads = self.source.interleaved_heads(tensor)
        if not heads:
            return found
        return Quantized(*(half_pairs(x, heads) for x in (found.codes, found.scale, found.minimum)), found.bits)

    def require_empty(self) -> None:
        if self.left:
            name = next(iter(self.left))
            raise ValueError(f"the checkpoint holds a tensor {name!r} that this kind of model does not have")


def require_shape(name: str, shape: torch.Size, expected: torch.Size) -> None:
    if shape != expected:
        raise ValueError(f"tensor {name!r} has shape {list(shape)}, and {list(expected)} was expected")


def read_q4_1(data: np.ndarray) -> Quantized:
    """Blocks of 20 bytes: scale, minimum, and 16 bytes with the first 16 codes in their low halves, the rest above."""
    blocks = in_blocks(data, 20)
    packed = blocks[..., 4:]
    codes = torch.cat([packed & 15, packed >> 4], dim=-1).flatten(1)
    return Quantized(codes, half_floats(blocks[..., 0:2]), half_floats(blocks[..., 2:4]), bits=4)


def read_q8_0(data: np.ndarray) -> Quantized:
    """Blocks of 34 bytes: scale, and 32 codes with a sign."""
    blocks = in_blocks(data, 34)
    codes = (blocks[..., 2:] ^ 128).flatten(1)  # 128 more, as a number without a sign
    scale = half_floats(blocks[..., 0:2])
    return Quantized(codes, scale, symmetric_minimum(scale, 8), bits=8)


READERS = {Kind.Q4_1: read_q4_1, Kind.Q8_0: read_q8_0}


def in_blocks(data: np.ndarray, size: int) -> Tensor:
    """Rows of bytes -> [rows, blocks, bytes of a block], copied: the file is read only."""
    return torch.from_numpy(np.array(data)).unflatten(1, (-1, size))


def half_floats(two_bytes: Tensor) -> Tensor:
    """[..., 2] bytes -> [...] float16"""
    return two_bytes.contiguous().view(torch.float16)[..., 0]
