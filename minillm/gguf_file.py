"""Read a llama-style GGUF file: one file with the shape, the tokenizer and the (quantized) weights.

The file is memory-mapped and its tensors are expanded one by one straight into the model, so the weights are never
held twice. Two things differ from Hugging Face's layout: the names, and the row order of the query and key
projections, which GGUF stores for interleaved rotary pairs (0, 1), (2, 3) ... instead of (i, i + head_dim / 2).

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from minillm.config import config_from_gguf
from minillm.tokenizer import Tokenizer, bpe_tokenizer

ROWS_AT_ONCE = 8192  # expanding a whole embedding at once would take several times its size

NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFFile:
    """`config`, `tokenizer()` and `tensors()` of one file, under Hugging Face's names."""

    def __init__(self, path: Path, max_context: int | None = None):
        try:
            reader = gguf.GGUFReader(path)  # not kept: its notes on the vocabulary take more memory than the file
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            raise ValueError(f"{path} is not a complete GGUF file ({error})") from None
        wanted = ("general.", "llama.", "tokenizer.")
        self.fields = {name: f.contents() for name, f in reader.fields.items() if name.startswith(wanted)}
        self.by_name = {tensor.name: tensor for tensor in reader.tensors}
        if "token_embd.weight" not in self.by_name:
            raise ValueError(f"{path} has no tensor token_embd.weight: not a language model that minillm can read")
        vocab_size = int(self.by_name["token_embd.weight"].shape[1])
        tied = "output.weight" not in self.by_name
        self.config = config_from_gguf(self.fields, vocab_size, tied, max_context)

    def tokenizer(self) -> Tokenizer:
        fields = self.fields
        kind = fields.get("tokenizer.ggml.model")
        if kind != "gpt2":
            raise ValueError(
                f"the GGUF file has a tokenizer of kind {kind!r}; minillm builds 'gpt2' (byte-level BPE) ones"
            )
        for name in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges"):
            if name not in fields:
                raise ValueError(f"the GGUF file has no field {name!r}")
        tokens = fields["tokenizer.ggml.tokens"]
        names = ("bos_token", "eos_token")
        ids = {name: fields.get(f"tokenizer.ggml.{name}_id") for name in names}
        ids = {name: i for name, i in ids.items() if i is not None}
        if not all(0 <= i < len(tokens) for i in ids.values()):
            raise ValueError(f"the GGUF file names start and end tokens {ids}, but has {len(tokens)} tokens")
        return bpe_tokenizer(
            tokens,
            fields["tokenizer.ggml.token_type"],
            fields["tokenizer.ggml.merges"],
            fields.get("tokenizer.ggml.pre", "gpt-2"),
            end_ids=(ids["eos_token"],) if "eos_token" in ids else (),
            chat_template=fields.get("tokenizer.chat_template"),
            special={name: tokens[i] for name, i in ids.items()},
        )

    def tensors(self) -> Iterator[tuple[str, int, Tensor]]:
        """(Hugging Face's name, first row, rows): each tensor in parts of at most ROWS_AT_ONCE rows."""
        for name, tensor in self.by_name.items():
            heads = self.interleaved_heads(tensor)
            if heads:
                yield hf_name(name), 0, half_pairs(expand(tensor.data, tensor.tensor_type), heads)
                continue
            for start in range(0, len(tensor.data), ROWS_AT_ONCE):
                part = tensor.data[start : start + ROWS_AT_ONCE]
                yield hf_name(name), start, expand(part, tensor.tensor_type)

    def interleaved_heads(self, tensor: gguf.ReaderTensor) -> int | None:
        """The number of heads in whose rows rotary pairs are interleaved, for a query or key projection."""
        heads = {"attn_q": self.config.n_heads, "attn_k": self.config.n_kv_heads}.get(tensor.name.split(".")[-2:][0])
        whole = heads and len(tensor.data) == heads * self.config.head_dim  # any other number is refused later
        return heads if whole else None


def expand(data: np.ndarray, kind: gguf.GGMLQuantizationType) -> Tensor:
    """Quantized rows as float32. Rows that are float32 already lie in the read-only file, and are copied."""
    try:
        rows = gguf.dequantize(data, kind)
    except NotImplementedError:
        raise ValueError(
            f"tensors of kind {kind.name} are not supported: the gguf library does not expand them"
        ) from None
    return torch.from_numpy(np.require(rows, requirements="W"))


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; unknown names stay, and are refused later."""
    if name in NAMES:
        return NAMES[name]
    _, *layer = name.split(".")
    if len(layer) == 3 and layer[1] in LAYER_NAMES:
        return f"model.layers.{layer[0]}.{LAYER_NAMES[layer[1]]}.{layer[2]}"
    return name


def half_pairs(rows: Tensor, heads: int) -> Tensor:
    """Undo GGUF's row order within each head: rows of pairs (0, 1), (2, 3) ... become (i, i + head_dim / 2)."""
    return rearrange(rows, "(h i two) n -> (h two i) n", h=heads, two=2)
