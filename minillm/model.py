"""Stage 1: the transformer, written once, on a flat list of tokens.

A decoder-only model turns the tokens so far into one score for each possible next token. Everything in it works on
each token alone, except attention, where a token looks back at earlier ones. That one place is the seam: the layer
hands its query, key and value rows to `KVStore.attend`, and the store decides where the past comes from. Recompute
everything (`NoCache`, below), keep it (stage 2), keep it in pages (stage 5): this file does not change.

There is no batch dimension. Several sequences are one longer list of tokens, and only the store knows whose is whose.

Touvron et al., "LLaMA" (2023), section 2.2; Su et al., "RoFormer" (2021), section 3.2; Shazeer, "GLU Variants" (2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.attention import AttentionFunction, attention
from minillm.config import ModelConfig, RopeScaling
from minillm.linear import Linear, choose_products
from minillm.quant_linear import QuantLinear

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class KVStore(Protocol):
    """Where the keys and values of the past live. Whoever runs the loop decides what becomes past (`commit`)."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Take in the new rows of one layer and let each query look at its own past and itself.

        q: [T, n_heads, head_dim]; k, v: [T, n_kv_heads, head_dim]; k and q are already rotated. -> like q
        """
        ...


class SequenceStore(KVStore, Protocol):
    """A store of one sequence, as the loop uses it. `length` tokens are past."""

    length: int

    def commit(self, n: int) -> None:
        """Make the first n of the rows written last part of the past."""

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens."""

    def fork(self) -> SequenceStore:
        """An independent copy, for a text that splits in two."""
        ...


class NoCache:
    """The store that keeps nothing: all tokens of every sequence go in at every step. Differentiable.

    `lengths` cuts the flat list of tokens into sequences; without it there is one. attention: by which function
    (attention.py).
    """

    length = 0  # nothing is ever past

    def __init__(self, lengths: Sequence[int] | None = None, attention: AttentionFunction = attention):
        self.lengths = None if lengths is None else list(lengths)
        self.attention = attention

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.lengths is None:
            return self.attention(q, k, v)
        if sum(self.lengths) != len(q):
            raise ValueError(f"lengths {self.lengths} add up to {sum(self.lengths)}, but {len(q)} tokens were given")
        sequences = zip(q.split(self.lengths), k.split(self.lengths), v.split(self.lengths), strict=True)
        return torch.cat([self.attention(*sequence) for sequence in sequences])

    def commit(self, n: int) -> None:
        """Nothing to keep."""

    def truncate(self, length: int) -> None:
        """Nothing to forget."""

    def fork(self) -> NoCache:
        return self


class RMSNorm(nn.Module):
    """Scale each row to a root mean square of 1, then by a learned weight (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float, **kwargs):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, **kwargs))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x  # the mean of squares needs the range
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight


class Rope(nn.Module):
    """Rotary positions: each pair of coordinates of a head is turned by an angle that grows with the position.

    The pairs are (i, i + head_dim / 2), the "rotate half" order of Hugging Face checkpoints.
    """

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None):
        super().__init__()
        frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        if scaling:
            frequencies = stretch(frequencies, scaling)
        self.frequencies = frequencies  # not a buffer: `model.to(torch.bfloat16)` must not round it

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions: [T] -> cos, sin: [T, 1, head_dim]; sin carries the sign of `rotate`."""
        self.frequencies = self.frequencies.to(positions.device)  # once
        angles = positions.to(torch.float64)[:, None, None] * self.frequencies
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def stretch(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's rule: slow frequencies are divided by `factor`, fast ones stay, those between are blended."""
    turns = scaling.original_max_context * frequencies / (2 * math.pi)  # full turns within the first context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [T, heads, head_dim] -> the same, each pair (a, b) turned to (a cos - b sin, b cos + a sin)."""
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, swapped, sin)


class Attention(nn.Module):
    """Project to queries, keys and values, rotate, let the store attend, project back."""

    def __init__(self, config: ModelConfig, **kwargs):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        heads = config.n_heads + 2 * config.n_kv_heads  # one product for all three: fewer, larger steps
        self.qkv = Linear(config.d_model, heads * config.head_dim, bias=config.qkv_bias, **kwargs)
        self.out = Linear(config.n_heads * config.head_dim, config.d_model, bias=config.out_bias, **kwargs)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps, **kwargs) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps, **kwargs) if config.qk_norm else None

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        qk, v = heads.split([self.n_heads + self.n_kv_heads, self.n_kv_heads], dim=1)
        if self.q_norm is not None:
            q, k = qk.split([self.n_heads, self.n_kv_heads], dim=1)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], dim=1)
        q, k = rotate(qk, *rope).split([self.n_heads, self.n_kv_heads], dim=1)
        return self.out(attend(q, k, v).flatten(1))


class MLP(nn.Module):
    """SwiGLU: a gate decides, unit by unit, how much of the other projection passes."""

    def __init__(self, config: ModelConfig, **kwargs):
        super().__init__()
        self.gate_up = Linear(config.d_model, 2 * config.d_ff, bias=config.mlp_bias, **kwargs)
        self.down = Linear(config.d_ff, config.d_model, bias=config.mlp_bias, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One layer: attention, then the MLP, each on a normed copy and added to the residual stream."""

    def __init__(self, config: ModelConfig, **kwargs):
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps, **kwargs)
        self.attention = Attention(config, **kwargs)
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps, **kwargs)
        self.mlp = MLP(config, **kwargs)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope, attend)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """The whole model. The weights are not set: a checkpoint fills them, or `init_weights` does for training."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"):
        super().__init__()
        kwargs = {"dtype": dtype, "device": device}
        self.config = config
        rows = torch.empty(config.vocab_size, config.d_model, **kwargs)
        self.embed = nn.Embedding.from_pretrained(rows, freeze=False)
        self.rope = Rope(config.head_dim, config.rope_theta, config.rope_scaling)
        self.blocks = nn.ModuleList(Block(config, **kwargs) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps, **kwargs)
        self.head = Linear(
            config.d_model, config.vocab_size, weight=self.embed.weight if config.tied_embeddings else None, **kwargs
        )

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    def forward(self, tokens: Tensor, positions: Tensor, kv: KVStore) -> Tensor:
        """tokens: [T] token ids; positions: [T], each token's place in its own sequence. -> hidden [T, d_model]"""
        x = self.embed(tokens)
        rope = self.rope(positions, x.dtype)  # the angles depend on the position only: once for all layers
        for i, block in enumerate(self.blocks):
            x = block(x, rope, partial(kv.attend, i))
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, d_model], only the rows that will be sampled. -> [rows, vocab_size], at least float32"""
        logits = self.head(hidden)
        return logits if logits.dtype == torch.float64 else logits.float()

    def init_weights(self, seed: int, std: float = 0.02) -> Transformer:
        """Random weights from a seed, for training and for tests: norms 1, biases 0, matrices normal."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=std, generator=generator)
            else:
                nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
        return self

    def prepare(self, packed: bool = False) -> Transformer:
        """Get ready for inference: no gradients, and the quickest matrix product for each number of rows.

        packed: keep a second copy of the weights in a layout that is quicker for many rows (linear.py).
        """
        self.requires_grad_(False)
        choose_products(self, packed)
        for module in self.modules():
            if isinstance(module, QuantLinear):
                module.choose_layout(module.compute or self.dtype)
        return self
