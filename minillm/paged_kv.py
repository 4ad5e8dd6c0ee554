"""Stage 5: PagedAttention. Keys and values in blocks anywhere in one pool, found through block tables.

`ContiguousKV` reserves a text's longest length in one piece. Here a text's rows lie in blocks of `block_size` tokens,
in any order; position p of a text is row p % block_size of block `block_table[p // block_size]`. Attention then has to
follow the table. The pool owns no lengths and no tables: the requests do (blocks.py, scheduler.py). `view(step)` is the
`KVStore` of one step, for all its requests at once.

What is read and written for each layer: a new token writes one row of K and V. A single query row reads every row of
its blocks once, in place where the blocks lie close together, and else from a copy (block_attention.py); a longer span
gathers them first, so its past is read, written and read again. On a GPU the Triton kernels do both in place
(kernel_attention.py).

Kwon et al., "PagedAttention" (2023), section 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor

from minillm.attention import attention
from minillm.block_attention import BlockAttention
from minillm.blocks import require_counts
from minillm.config import ModelConfig
from minillm.kernel_attention import KernelView, kernels_serve
from minillm.model import KVStore
from minillm.request import Span, Step


class PagedKV:
    """The pool: k and v, each [n_layers, n_blocks, n_kv_heads, block_size, head_dim].

    Raises ValueError for a pool that the device's memory does not hold.
    """

    def __init__(
        self,
        config: ModelConfig,
        n_blocks: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ):
        require_counts(n_blocks=n_blocks, block_size=block_size)
        self.heads_per_group = config.group_size
        shape = (config.n_layers, n_blocks, config.n_kv_heads, block_size, config.head_dim)
        try:
            self.k, self.v = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        except RuntimeError as error:
            size = n_blocks * block_size * config.kv_elements_per_token * dtype.itemsize / 2**30
            raise ValueError(
                f"a pool of {n_blocks} blocks of {block_size} tokens takes {size:,.1f} GiB, which cannot be reserved "
                f"on {device}: take fewer blocks"
            ) from error

    @property
    def block_size(self) -> int:
        return self.k.shape[3]

    @property
    def nbytes_reserved(self) -> int:
        return self.k.nbytes + self.v.nbytes

    @property
    def nbytes_per_block(self) -> int:
        return self.nbytes_reserved // self.k.shape[1]

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, target), in order: a source may be the target of a later copy."""
        for source, target in copies:
            self.k[:, target] = self.k[:, source]
            self.v[:, target] = self.v[:, source]

    def view(self, step: Step) -> KVStore:
        """The store of one step, after the step's copies."""
        self.copy(step.copies)
        view = KernelView if kernels_serve(self.k) else PagedView
        return view(self, step.spans)


class PagedView:
    """The `KVStore` of one step: the flat list of tokens is cut into spans, each with its own past."""

    def __init__(self, pool: PagedKV, spans: Sequence[Span]):
        self.pool = pool
        self.counts = [span.count for span in spans]
        self.lengths = [span.end for span in spans]
        size, device = pool.block_size, pool.k.device
        tables = [span.block_table[: -(-span.end // size)] for span in spans]
        self.tables = [torch.tensor(table, device=device) for table in tables]
        positions = [torch.arange(s.start, s.end, device=device) for s in spans]
        blocks = [table[p // size] for table, p in zip(self.tables, positions, strict=True)]
        self.blocks, self.rows = torch.cat(blocks), torch.cat(positions) % size  # where each new token goes
        self.clear_new_tails(spans)
        single = [i for i, count in enumerate(self.counts) if count == 1]
        self.decode = None
        if single:
            lengths = [self.lengths[i] for i in single]
            self.decode = BlockAttention([tables[i] for i in single], lengths, like=pool.k[0])
            offsets = torch.tensor(self.counts).cumsum(0) - 1
            self.decode_rows = offsets[single].to(device)

    def clear_new_tails(self, spans: Sequence[Span]) -> None:
        """Zero the blocks that are begun in this step and not filled.

        They hold what their last owner left. Attention gives those rows the weight 0, but 0 times NaN is NaN: one
        broken request would spoil those that inherit its blocks.
        """
        size = self.pool.block_size
        begun = [
            t[-1] for t, s in zip(self.tables, spans, strict=True) if s.end % size and s.start <= s.end // size * size
        ]
        if begun:
            begun = torch.stack(begun)
            self.pool.k[:, begun] = 0
            self.pool.v[:, begun] = 0

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [T, n_heads, head_dim]; k, v: [T, n_kv_heads, head_dim], T over all spans. -> like q"""
        keys, values = self.pool.k[layer], self.pool.v[layer]  # [n_blocks, n_kv_heads, block_size, head_dim]
        keys[self.blocks, :, self.rows] = k
        values[self.blocks, :, self.rows] = v
        if self.decode is not None and len(self.decode_rows) == len(q):
            return self.decode(q, keys, values)
        out = torch.empty_like(q)
        if self.decode is not None:
            out[self.decode_rows] = self.decode(q[self.decode_rows], keys, values)
        at = 0
        for count, length, table in zip(self.counts, self.lengths, self.tables, strict=True):
            if count > 1:
                past = (rearrange(x[table], "n g s d -> (n s) g d")[:length] for x in (keys, values))
                out[at : at + count] = attention(q[at : at + count], *past)
            at += count
        return out
