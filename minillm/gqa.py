"""Stage 8: fewer key and value heads than query heads. The cache shrinks, and the seam does not notice.

Each token keeps a key and a value for every KV head. If several query heads share one (grouped-query attention, GQA;
all of them: multi-query attention, MQA), the cache, and what a decode step reads of it, is divided by the size of a
group. The model has to be trained that way; a trained one can be turned by taking, for each group, the mean of its
heads' projections, and healed by a little more training. The other way round nothing is lost: a model whose KV heads
are repeated computes the same, with a larger cache.

Shazeer, "Fast Transformer Decoding: One Write-Head is All You Need" (2019); Ainslie et al., "GQA: Training Generalized
Multi-Query Transformer Models from Multi-Head Checkpoints" (2023), section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from einops import reduce, repeat
from torch import Tensor

from minillm.blocks import require_counts
from minillm.config import ModelConfig
from minillm.model import Transformer
from minillm.quant_linear import QuantLinear


def with_kv_heads(config: ModelConfig, n_kv_heads: int) -> ModelConfig:
    """The same model with another number of KV heads. Raises ValueError if the query heads cannot share them evenly."""
    require_counts(n_kv_heads=n_kv_heads)
    if config.n_heads % n_kv_heads:
        raise ValueError(f"{config.n_heads} query heads cannot share {n_kv_heads} KV heads evenly")
    return replace(config, n_kv_heads=n_kv_heads)


def pool_heads(model: Transformer, n_kv_heads: int) -> Transformer:
    """A copy of the model in which each group of KV heads is one head: the mean of their projections.

    Raises ValueError for a number that does not divide them, and for a quantized model.
    """
    config, old = with_kv_heads(model.config, n_kv_heads), model.config
    if old.n_kv_heads % n_kv_heads:
        raise ValueError(f"{old.n_kv_heads} KV heads cannot be pooled to {n_kv_heads} evenly")
    return with_projections(model, config, lambda rows: mean_heads(rows, n_kv_heads, old.head_dim))


def repeat_heads(model: Transformer, n_kv_heads: int) -> Transformer:
    """A copy of the model in which each KV head stands several times, side by side: it computes the same.

    Raises ValueError for a number that is no multiple, and for a quantized model.
    """
    config, old = with_kv_heads(model.config, n_kv_heads), model.config
    if n_kv_heads % old.n_kv_heads:
        raise ValueError(f"{old.n_kv_heads} KV heads cannot be repeated to {n_kv_heads} evenly")
    times = n_kv_heads // old.n_kv_heads
    return with_projections(
        model, config, lambda rows: repeat(rows, "(h d) ... -> (h times d) ...", d=old.head_dim, times=times)
    )


@torch.no_grad()
def with_projections(model: Transformer, config: ModelConfig, change: Callable[[Tensor], Tensor]) -> Transformer:
    """A copy of the model with `change` made to the rows of its key and of its value projections, and their biases."""
    if any(isinstance(module, QuantLinear) for module in model.modules()):
        raise ValueError("this model's matrices are quantized: change its heads first, then quantize")
    old, weights = model.config, model.state_dict()
    for name in weights:
        if name.endswith(("attention.qkv.weight", "attention.qkv.bias")):
            q, k, v = weights[name].split([n * old.head_dim for n in (old.n_heads, old.n_kv_heads, old.n_kv_heads)])
            weights[name] = torch.cat([q, change(k), change(v)])
    changed = Transformer(config, model.dtype, model.device)
    changed.load_state_dict(weights)
    return changed


def mean_heads(rows: Tensor, n_heads: int, head_dim: int) -> Tensor:
    """rows: [heads * head_dim, ...] -> [n_heads * head_dim, ...], the mean of each run of neighbouring heads"""
    return reduce(rows, "(h group d) ... -> (h d) ...", "mean", h=n_heads, d=head_dim)


def kv_bytes_a_token(config: ModelConfig, bytes_a_number: int = 2) -> int:
    """Bytes of the keys and values of one token, in all layers."""
    return config.kv_elements_per_token * bytes_a_number


def attention_intensity(config: ModelConfig, bytes_a_number: int = 2) -> float:
    """FLOP for each byte of the cache that a decode step reads: each number of a key is multiplied and added once for
    each query head of its group, and so is each of a value. = 2 * group / bytes, whatever the length."""
    return 2 * config.group_size / bytes_a_number
