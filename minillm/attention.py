"""Attention for one sequence: the plain reference and PyTorch's fused one, behind one signature.

Each query row looks at its own token and at all tokens before it. The queries may be only the *last* rows of the
sequence (the rest lies in a cache), so the causal mask is aligned to the lower right corner: row i of T new rows
on top of a past of S - T tokens sees the first `S - T + i + 1` keys. (The `is_causal` flag of PyTorch's
`scaled_dot_product_attention` is aligned to the upper left, and is right only without a past.)

Vaswani et al., "Attention Is All You Need" (2017), section 3.2.1; grouped heads: Ainslie et al., "GQA" (2023).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor


def causal_mask(n_queries: int, n_keys: int, device: torch.device | None = None) -> Tensor:
    """Which keys each query may see, lower-right aligned. -> bool [n_queries, n_keys]"""
    if n_keys < n_queries:
        raise ValueError(f"{n_queries} queries cannot be the last rows of {n_keys} keys")
    past = n_keys - n_queries
    return torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).tril(past)


def reference_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The formula, term by term: softmax(q k^T / sqrt(head_dim)) v. The oracle of every other version.

    q: [T, n_heads, head_dim], the last T rows of the sequence; k, v: [S, n_kv_heads, head_dim]. -> like q
    """
    n_queries, n_heads, head_dim = q.shape
    n_keys, n_kv_heads, _ = k.shape
    k, v = (repeat(x, "s g d -> s (g r) d", r=n_heads // n_kv_heads) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) / head_dim**0.5
    scores = scores.masked_fill(~causal_mask(n_queries, n_keys, q.device), -torch.inf)
    return torch.einsum("hts,shd->thd", scores.softmax(dim=-1), v)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same function through `scaled_dot_product_attention`, which picks a fused kernel.

    q: [T, n_heads, head_dim], the last T rows of the sequence; k, v: [S, n_kv_heads, head_dim]. -> like q
    """
    n_queries, n_keys = len(q), len(k)
    mask = None
    if n_queries != n_keys and n_queries != 1:  # one row sees all keys; without a past both alignments are the same
        mask = causal_mask(n_queries, n_keys, q.device)
    q, k, v = (rearrange(x, "t h d -> 1 h t d") for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=n_queries == n_keys and n_queries > 1, enable_gqa=q.shape[1] != k.shape[1]
    )
    return rearrange(out, "1 h t d -> t h d")
