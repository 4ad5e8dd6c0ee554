"""Attention for one sequence, three times behind one signature: the plain reference, PyTorch's fused one, and in tiles.

Each query row looks at its own token and at all tokens before it. The queries may be only the *last* rows of the
sequence (the rest lies in a cache), so the causal mask is aligned to the lower right corner: row i of T new rows
on top of a past of S - T tokens sees the first `S - T + i + 1` keys. (The `is_causal` flag of PyTorch's
`scaled_dot_product_attention` is aligned to the upper left, and is right only without a past.)

Stage 4 is the third. The reference writes all T x S scores of every head to memory and reads them back. In tiles, some
queries walk over the keys, a few at a time, and keep of the scores only what the final answer needs: their running
maximum, the running sum of exp(score - maximum), and the values weighted by those. When a tile raises the maximum, what
was added before is scaled down. The result is exact, whatever the order and the size of the tiles.

Vaswani et al., "Attention Is All You Need" (2017), section 3.2.1; grouped heads: Ainslie et al., "GQA" (2023). Tiles:
Dao et al., "FlashAttention" (2022) and Dao, "FlashAttention-2" (2023), algorithm 1 of each; the running softmax:
Milakov and Gimelshein (2018), algorithm 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal_mask(n_queries: int, n_keys: int, device: torch.device | None = None) -> Tensor:
    """Which keys each query may see, lower-right aligned. -> bool [n_queries, n_keys]"""
    return torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).tril(past_of(n_queries, n_keys))


def past_of(n_queries: int, n_keys: int) -> int:
    """How many keys lie before the first query's own. Raises ValueError for fewer keys than queries."""
    if n_keys < n_queries:
        raise ValueError(f"{n_queries} queries cannot be the last rows of {n_keys} keys")
    return n_keys - n_queries


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


@dataclass
class Traffic:
    """Bytes between the large memory and the chip, if tiles stay on the chip while they are worked on."""

    read: int = 0
    written: int = 0

    def reads(self, *tensors: Tensor) -> None:
        self.read += sum(x.nbytes for x in tensors)

    def writes(self, *tensors: Tensor) -> None:
        self.written += sum(x.nbytes for x in tensors)


class OnlineSoftmax:
    """softmax(scores) @ v, for scores and values that come a block at a time and are then forgotten."""

    def __init__(self, q: Tensor):
        """q: [..., rows, head_dim], for sizes, dtype and device."""
        dtype = torch.promote_types(q.dtype, torch.float32)  # in 16 bits a long sum would lose what is added to it
        self.top = q.new_full(q.shape[:-1], -torch.inf, dtype=dtype)  # the largest score so far
        self.total = q.new_zeros(q.shape[:-1], dtype=dtype)  # sum of exp(score - top)
        self.weighted = torch.zeros_like(q, dtype=dtype)  # sum of exp(score - top) * value

    def add(self, scores: Tensor, v: Tensor) -> None:
        """scores: [..., rows, columns], -inf where hidden; v: [..., columns, head_dim]."""
        top = torch.maximum(self.top, scores.amax(-1))
        base = top.masked_fill(top == -torch.inf, 0)  # a row that has seen nothing yet: not -inf - -inf
        rescale = (self.top - base).exp()  # 1 where the maximum stays
        weights = (scores - base[..., None]).exp()
        self.total = self.total * rescale + weights.sum(-1)
        self.weighted = self.weighted * rescale[..., None] + weights @ v.to(weights.dtype)
        self.top = top

    def result(self) -> Tensor:
        return self.weighted / self.total[..., None]


def tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, rows: int = 128, columns: int = 128, traffic: Traffic | None = None
) -> Tensor:
    """The same function in tiles of `rows` queries and `columns` keys, all heads at once.

    Beside the output it needs memory for one tile, however long the sequence is.

    q: [T, n_heads, head_dim], the last T rows of the sequence; k, v: [S, n_kv_heads, head_dim]. -> like q
    traffic: counts the bytes of the tiles that are read and written.
    """
    if rows < 1 or columns < 1:
        raise ValueError(f"a tile needs at least one row and one column, not {rows} x {columns}")
    past = past_of(len(q), len(k))
    traffic = Traffic() if traffic is None else traffic
    out = torch.empty_like(q)
    for first in range(0, len(q), rows):
        tile = q[first : first + rows]
        end = past + first + len(tile)  # what comes later, none of these rows may see
        traffic.reads(tile)
        out[first : first + rows] = attend_tile(tile, k[:end], v[:end], columns, traffic)
        traffic.writes(tile)
    return out


def attend_tile(q: Tensor, k: Tensor, v: Tensor, columns: int, traffic: Traffic) -> Tensor:
    """One tile of queries, the last rows of the sequence, over the keys in tiles. Shapes as `tiled_attention`."""
    n_queries, n_heads, head_dim = q.shape
    past, heads_per_group = len(k) - n_queries, n_heads // k.shape[1]
    q = rearrange(q, "t (g r) d -> g (r t) d", r=heads_per_group) * head_dim**-0.5  # a group shares its tiles of keys
    positions = torch.arange(past, past + n_queries, device=q.device).repeat(heads_per_group)
    softmax = OnlineSoftmax(q)
    for start in range(0, len(k), columns):
        k_tile, v_tile = (x[start : start + columns].transpose(0, 1) for x in (k, v))  # [g, columns, d]
        traffic.reads(k_tile, v_tile)
        scores = q @ k_tile.mT
        if start + columns > past:  # else every row sees every key
            keys = torch.arange(start, start + k_tile.shape[1], device=q.device)
            scores = scores.masked_fill(keys > positions[:, None], -torch.inf)
        softmax.add(scores, v_tile)
    return rearrange(softmax.result(), "g (r t) d -> t (g r) d", r=heads_per_group)
