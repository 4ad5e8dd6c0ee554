"""Stage 8: fewer key and value heads than query heads. The cache shrinks, and the seam does not notice.

Each token keeps a key and a value for every KV head. If several query heads share one (grouped-query attention, GQA;
all of them: multi-query attention, MQA), the cache, and what a decode step reads of it, is divided by the size of a
group. The model has to be trained that way; a trained one can be turned by taking, for each group, the mean of its
heads' projections, and healed by a little more training.

Shazeer, "Fast Transformer Decoding: One Write-Head is All You Need" (2019); Ainslie et al., "GQA: Training Generalized
Multi-Query Transformer Models from Multi-Head Checkpoints" (2023), section 2.1.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from einops import reduce
from torch import Tensor

from minillm.blocks import require_counts
from minillm.config import ModelConfig
from minillm.model import Transformer


def with_kv_heads(config: ModelConfig, n_kv_heads: int) -> ModelConfig:
    """The same model with another number of KV heads."""
    require_counts(n_kv_heads=n_kv_heads)
    if config.n_heads % n_kv_heads:
        raise ValueError(f"{config.n_heads} query heads cannot share {n_kv_heads} KV heads evenly")
    return replace(config, n_kv_heads=n_kv_heads)


@torch.no_grad()
def pool_heads(model: Transformer, n_kv_heads: int) -> Transformer:
    """A copy of the model in which each group of KV heads is one head: the mean of their projections."""
    old, config = model.config, with_kv_heads(model.config, n_kv_heads)
    if old.n_kv_heads % n_kv_heads:
        raise ValueError(f"{old.n_kv_heads} KV heads cannot be pooled to {n_kv_heads} evenly")
    pooled = Transformer(config, model.dtype, model.device)
    weights = model.state_dict()
    for name in weights:
        if name.endswith(("attention.qkv.weight", "attention.qkv.bias")):
            q, k, v = weights[name].split([n * old.head_dim for n in (old.n_heads, old.n_kv_heads, old.n_kv_heads)])
            weights[name] = torch.cat(
                [q, mean_heads(k, n_kv_heads, old.head_dim), mean_heads(v, n_kv_heads, old.head_dim)]
            )
    pooled.load_state_dict(weights)
    return pooled


def mean_heads(rows: Tensor, n_heads: int, head_dim: int) -> Tensor:
    """rows: [heads * head_dim, ...] -> [n_heads * head_dim, ...], the mean of each run of heads"""
    return reduce(rows, "(h group d) ... -> (h d) ...", "mean", h=n_heads, d=head_dim)


def kv_bytes_a_token(config: ModelConfig, bytes_a_number: int = 2) -> int:
    """Keys and values of all layers."""
    return 2 * config.n_layers * config.n_kv_heads * config.head_dim * bytes_a_number


def attention_intensity(config: ModelConfig, bytes_a_number: int = 2) -> float:
    """FLOP for each byte of the cache that a decode step reads: each key number is multiplied and added for each query
    head of its group, each value number too. = 2 * group / bytes, whatever the length."""
    return 2 * (config.n_heads // config.n_kv_heads) / bytes_a_number
