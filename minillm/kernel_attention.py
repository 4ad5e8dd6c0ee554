"""Stages 4 and 5 on a GPU: the same attention by the Triton kernels of `kernels/`.

`flash_attention` is attention for one sequence, as in attention.py. `KernelView` is the store of a step of the engine.
It does what `PagedView` (paged_kv.py) does, but nothing is gathered: a layer takes one launch that stores the new keys
and values, two for the requests that decode, and one for all longer spans.

On a CPU neither is used, and PyTorch computes. With TRITON_INTERPRET=1 the kernels run there in Triton's interpreter,
slowly: so they can be tested inside the whole engine.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from minillm.attention import past_of, tiled_attention
from minillm.request import Span

if TYPE_CHECKING:
    from minillm.paged_kv import PagedKV

MAX_HEAD_DIM = 128  # of the kernels (kernels/checks.py)
OLDEST = (8, 0)  # Ampere: older GPUs have less shared memory than a tile needs (AMD's numbers are above it)
FEW = 8  # tokens of a span up to which it counts as decoding: one, or the guesses that are verified with it
LONG = 0


def kernels_serve(x: Tensor) -> bool:
    """Whether the kernels can and should work on tensors like this one: [..., head_dim]."""
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")  # as Triton says
    if not (interpreted or x.is_cuda) or find_spec("triton") is None or x.shape[-1] > MAX_HEAD_DIM:
        return False
    if not interpreted and torch.cuda.get_device_capability(x.device) < OLDEST:
        return False
    return x.dtype in (torch.float32, torch.float16) or (x.dtype == torch.bfloat16 and not interpreted)


def kernel(name: str) -> Callable[..., Tensor]:
    """The wrapper in `kernels` that has the name of its file."""
    return getattr(module(name), name)


def module(name: str) -> ModuleType:
    """A file of `kernels`, which needs Triton and so is loaded only here."""
    try:
        return import_module(f"kernels.{name}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("kernels"):
            raise
        raise ImportError(
            "Python finds another package `kernels` than minillm's (Hugging Face publishes one of this name): "
            "uninstall that one, or install minillm after it"
        ) from error


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention in tiles for one sequence: the kernel where there is a GPU, else plain PyTorch.

    q: [T, n_heads, head_dim], the last T rows of the sequence; k, v: [S, n_kv_heads, head_dim]. -> like q
    """
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if trained or not kernels_serve(q):  # the kernel has no gradient
        return tiled_attention(q, k, v)
    past_of(len(q), len(k))  # more queries than keys: ValueError
    if q.stride(-1) != 1:
        q = q.clone(memory_format=torch.contiguous_format)
    if k.stride() != v.stride() or k.stride(-1) != 1:
        k, v = torch.stack([k, v])  # alike; `contiguous()` would leave the odd stride of a single row as it is
    cache = k[:, :, None], v[:, :, None]  # a paged cache in which each token is a block of its own
    table = torch.arange(len(k), dtype=torch.int32, device=q.device)[None]
    ends, lengths = integers([0, len(q)], q.device), integers([len(k)], q.device)
    return kernel("flash_attention")(q, *cache, table, ends, lengths, max_queries=len(q))


class KernelView:
    """The `KVStore` of one step. Spans of a few tokens are decoded (paged_attention), longer ones prefilled
    (flash_attention)."""

    def __init__(self, pool: PagedKV, spans: Sequence[Span]):
        self.pool = pool
        tile = module("paged_attention").tile(pool.k.dtype, module("checks").target(pool.k.device))
        few = min(FEW, tile.rows // pool.heads_per_group)
        groups = defaultdict(list)  # tokens of a span, or LONG -> (span, its first row in the flat list)
        starts = accumulate((span.count for span in spans), initial=0)
        for span, start in zip(spans, starts, strict=False):
            groups[span.count if span.count <= few else LONG].append((span, start))
        self.groups = [Group.of(members, count, pool.k.device) for count, members in groups.items()]
        size = pool.block_size
        slots = [span.block_table[p // size] * size + p % size for span in spans for p in range(span.start, span.end)]
        self.slots = integers(slots, pool.k.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [T, n_heads, head_dim]; k, v: [T, n_kv_heads, head_dim], T over all spans. -> like q"""
        keys, values = self.pool.k[layer], self.pool.v[layer]
        kernel("store_kv")(k, v, keys, values, self.slots)
        if len(self.groups) == 1:
            return self.groups[0](q, keys, values)
        out = torch.empty_like(q)
        for group in self.groups:
            out[group.rows] = group(q[group.rows], keys, values)
        return out


@dataclass(frozen=True)
class Group:
    """The spans that one launch serves. All index tensors are int32, except `rows`."""

    count: int  # tokens of each span, or LONG
    rows: Tensor  # the spans' tokens in the flat list
    tables: Tensor  # [spans, most blocks]
    lengths: Tensor  # [spans], the new tokens included
    cu_seqlens: Tensor  # [spans + 1], where each span's rows begin and end
    max_queries: int
    max_length: int

    @classmethod
    def of(cls, members: Sequence[tuple[Span, int]], count: int, device: torch.device) -> Group:
        spans = [span for span, _ in members]
        counts, lengths = [span.count for span in spans], [span.end for span in spans]
        rows = [start + i for span, start in members for i in range(span.count)]
        tables = pad_sequence([integers(span.block_table, device) for span in spans], batch_first=True)
        ends = integers(list(accumulate(counts, initial=0)), device)
        at = torch.tensor(rows, device=device)
        return cls(count, at, tables, integers(lengths, device), ends, max(counts), max(lengths))

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q: the group's rows, [rows, n_heads, head_dim]; keys, values: a layer of the pool. -> like q"""
        cache = (keys, values, self.tables)
        if self.count == LONG:
            return kernel("flash_attention")(q, *cache, self.cu_seqlens, self.lengths, self.max_queries)
        q = q.unflatten(0, (-1, self.count))
        return kernel("paged_attention")(q, *cache, self.lengths, self.max_length).flatten(0, 1)


def integers(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
