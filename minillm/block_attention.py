"""Attention of single query rows over the blocks of the cache, where they lie.

Every request that decodes has one query row and a table of blocks. Each block that one of them sees gives a *partial*
result: the largest score m, the sum of exp(score - m), and the values weighted by those. The blocks are computed in a
batched product or two, without gathering anybody's past into one piece; then the partial results of each request are
merged: rescaled to the largest m of all and added up. That is exact, since softmax does not change when a constant is
subtracted from all scores. On a GPU the same split is called flash-decoding.

The product runs over whole blocks of the pool. Where most blocks of a stretch of the pool are in use, it runs over that
stretch as it is and copies nothing. Else, and for blocks that several rows share, those that are needed are copied
first.

Dao et al., "Flash-Decoding for long-context inference" (2023); the merge: Milakov and Gimelshein, "Online normalizer
calculation for softmax" (2018), section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import rearrange, repeat
from torch import Tensor

DENSE = 0.5  # share of the blocks of a stretch that must be wanted, for it to be read as it is


@dataclass(frozen=True)
class Part:
    """Some blocks, and for each of them the m query rows that see it (fewer are padded).

    blocks: a stretch of the pool, or [n] block numbers. rows: [n, m] query rows. mask: [n * n_kv_heads, m, 1,
    block_size], 0 where a row sees a slot and -inf elsewhere. real: [pairs], the entries of the flattened `rows` that
    are no padding; None if all are.
    """

    blocks: slice | Tensor
    rows: Tensor
    mask: Tensor
    real: Tensor | None

    @classmethod
    def of(cls, blocks: slice | Sequence[int], seen_by: Sequence[dict[int, int]], like: Tensor) -> Part:
        """seen_by: for each block, how many of its slots each query row sees. like: keys of a layer."""
        n_kv_heads, size = like.shape[1:3]
        most = max(len(seen) for seen in seen_by)
        padded = [[*seen.items(), *[(0, 0)] * (most - len(seen))] for seen in seen_by]
        rows, slots = torch.tensor(padded, device=like.device).unbind(-1)
        hidden = torch.arange(size, device=like.device) >= slots[..., None]
        mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill(hidden, -torch.inf)
        mask = repeat(mask, "n m s -> (n g) m 1 s", g=n_kv_heads)
        if not isinstance(blocks, slice):
            blocks = torch.tensor(blocks, device=like.device)
        return cls(blocks, rows, mask, None if slots.all() else slots.flatten().nonzero()[:, 0])

    @property
    def pairs(self) -> Tensor:
        """The query row of each pair."""
        return self.rows.flatten() if self.real is None else self.rows.flatten()[self.real]

    def only_real(self, results: Tensor) -> Tensor:
        return results if self.real is None else results[self.real]


class BlockAttention:
    """What does not change from layer to layer: which rows see which blocks. Then `self(q, keys, values)`, a layer."""

    def __init__(self, tables: Sequence[Sequence[int]], lengths: Sequence[int], like: Tensor):
        """tables: each row's blocks, `lengths` its tokens. like: keys of a layer, for sizes, dtype and device."""
        size = like.shape[2]
        seen_by: dict[int, dict[int, int]] = {}  # block -> {query row: slots that it sees}
        for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
            for i, block in enumerate(table):
                seen_by.setdefault(block, {})[row] = min(size, length - i * size)
        self.n_rows = len(tables)
        # Most blocks have one owner, a shared beginning has many: padding the ones to the others would be a waste.
        alone = sorted(block for block, seen in seen_by.items() if len(seen) == 1)
        shared = [block for block, seen in seen_by.items() if len(seen) > 1]
        self.parts = []
        if alone:
            stretch = range(alone[0], alone[-1] + 1)
            if len(alone) >= DENSE * len(stretch):
                owners = [seen_by[b] if len(seen_by.get(b, ())) == 1 else {} for b in stretch]
                self.parts.append(Part.of(slice(stretch.start, stretch.stop), owners, like))
            else:
                self.parts.append(Part.of(alone, [seen_by[b] for b in alone], like))
        if shared:
            self.parts.append(Part.of(shared, [seen_by[b] for b in shared], like))
        self.rows = torch.cat([part.pairs for part in self.parts])  # of each pair (row, block)

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q: [rows, n_heads, head_dim]; keys, values: [n_blocks, n_kv_heads, block_size, head_dim]. -> like q"""
        q = q * q.shape[-1] ** -0.5
        results = [partial_results(q, keys, values, part) for part in self.parts]
        top, total, weighted = (torch.cat(each) if len(results) > 1 else each[0] for each in zip(*results, strict=True))
        return merge(top, total, weighted, self.rows, self.n_rows)


def partial_results(q: Tensor, keys: Tensor, values: Tensor, part: Part) -> tuple[Tensor, Tensor, Tensor]:
    """One result for each pair of a block and a row that sees it.

    -> top [pairs, n_heads], total [pairs, n_heads], weighted [pairs, n_heads, head_dim]
    """
    k, v = keys[part.blocks].flatten(0, 1), values[part.blocks].flatten(0, 1)  # [n * n_kv_heads, block_size, head_dim]
    n, m = part.rows.shape
    q = rearrange(q[part.rows], "n m (g r) d -> (n g) (m r) d", g=keys.shape[1])
    mask = part.mask.expand(-1, -1, q.shape[1] // m, -1).flatten(1, 2)  # the heads of a group see the same
    scores = torch.baddbmm(mask, q, k.mT)
    top = scores.amax(-1)
    weights = scores.sub_(top[..., None]).exp_()
    parts = (x.view(n, keys.shape[1], m, -1, *x.shape[2:]) for x in (top, weights.sum(-1), torch.bmm(weights, v)))
    return tuple(part.only_real(rearrange(x, "n g m r ... -> (n m) (g r) ...")) for x in parts)


def merge(top: Tensor, total: Tensor, weighted: Tensor, rows: Tensor, n_rows: int) -> Tensor:
    """Put each row's partial results together. rows: [pairs], whose result it is. -> [n_rows, n_heads, head_dim]"""
    highest = top.new_full((n_rows, top.shape[1]), -torch.inf)
    highest = highest.scatter_reduce_(0, rows[:, None].expand_as(top), top, "amax")
    scale = (top - highest[rows]).exp_()
    denominator = torch.zeros_like(highest).index_add_(0, rows, total * scale)
    numerator = weighted.new_zeros(n_rows, *weighted.shape[1:]).index_add_(0, rows, weighted * scale[..., None])
    return numerator / denominator[..., None]
