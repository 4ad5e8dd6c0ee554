"""Stage 2: the KV cache. Keep each token's keys and values, and feed only what is new.

Without a cache, step n recomputes the keys and values of all n tokens, though they cannot have changed: a token sees
only what comes before it. `ContiguousKV` writes them down once, in one block of memory for each layer, so that a step
computes one token and reads the rest. The memory it takes is what the following stages are about.

Pope et al., "Efficiently Scaling Transformer Inference" (2022), section 2.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from minillm.attention import AttentionFunction, attention
from minillm.config import ModelConfig


class ContiguousKV:
    """The past of one sequence: k and v, each [n_layers, n_kv_heads, capacity, head_dim], the first `length` valid.

    `attend` writes new rows behind the past; they become past by `commit`, and are overwritten if they do not.
    The room for `capacity` tokens is reserved from the start, used or not. attention: by which function; all give the
    same (attention.py, kernel_attention.py).
    """

    def __init__(
        self,
        config: ModelConfig,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        attention: AttentionFunction = attention,
    ):
        if capacity < 1:
            raise ValueError(f"a cache needs room for at least one token, not {capacity}")
        shape = (config.n_layers, config.n_kv_heads, capacity, config.head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0
        self.attention = attention

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return self.k.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens that are kept (not of the room that is reserved)."""
        return (self.k.nbytes + self.v.nbytes) // self.capacity * self.length

    @property
    def nbytes_reserved(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [T, n_heads, head_dim]; k, v: [T, n_kv_heads, head_dim], the T tokens after the past. -> like q"""
        end = self.length + len(k)
        if end > self.capacity:
            raise ValueError(f"the cache has room for {self.capacity} tokens, and {end} were to be kept")
        self.k[layer, :, self.length : end] = k.transpose(0, 1)
        self.v[layer, :, self.length : end] = v.transpose(0, 1)
        return self.attention(q, self.k[layer, :, :end].transpose(0, 1), self.v[layer, :, :end].transpose(0, 1))

    def commit(self, n: int) -> None:
        """Make the first n of the rows written last part of the past."""
        if not 0 <= n <= self.capacity - self.length:
            raise ValueError(f"cannot commit {n} tokens to a cache of {self.capacity} that holds {self.length}")
        self.length += n

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} tokens to {length}")
        self.length = length

    def first_layers(self, n_layers: int) -> ContiguousKV:
        """A cache of the first layers in the same memory: what one writes, the other sees. The length is its own."""
        part = copy(self)
        part.k, part.v = self.k[:n_layers], self.v[:n_layers]
        return part

    def fork(self) -> ContiguousKV:
        """An independent copy of the past, with the same room."""
        other = copy(self)
        other.k, other.v = torch.empty_like(self.k), torch.empty_like(self.v)
        other.k[:, :, : self.length] = self.k[:, :, : self.length]
        other.v[:, :, : self.length] = self.v[:, :, : self.length]
        return other
