"""One run of a kernel for bench.py: its sizes, the bytes and FLOPs that it costs at least, and PyTorch's ways to do it.

A case is plain numbers until `build` puts tensors on a device. `ours` runs the kernel, `peers` what PyTorch offers for
the same, `reference` the float64 formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from kernels import flash_attention, paged_attention, rmsnorm, store_kv, w4a16

EPS = 1e-5


@dataclass(frozen=True)
class Built:
    """A case with its tensors. Each callable gives the result, the same from all."""

    ours: Callable[[], Tensor]
    reference: Callable[[], Tensor]
    peers: dict[str, Callable[[], Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class RMSNorm:
    rows: int
    columns: int
    residual: bool = False
    kernel = "rmsnorm"

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns}" + (", residual" if self.residual else "")

    def bytes(self, itemsize: int) -> int:
        return rmsnorm.bytes_moved(self.rows, self.columns, itemsize, self.residual)

    def flops(self) -> int:
        return rmsnorm.flops(self.rows, self.columns, self.residual)

    def build(self, device: str, dtype: torch.dtype) -> Built:
        normal = partial(random_normal, device=device, dtype=dtype)
        x, weight = normal(self.rows, self.columns), normal(self.columns, seed=1)
        residual = normal(self.rows, self.columns, seed=2) if self.residual else None

        def pytorch() -> Tensor:
            total = x if residual is None else x + residual
            return F.rms_norm(total, (self.columns,), weight, EPS)

        return Built(
            lambda: rmsnorm.rmsnorm(x, weight, EPS, residual)[0],
            lambda: rmsnorm.reference(x, weight, EPS, residual)[0],
            {"F.rms_norm": pytorch},
        )


@dataclass(frozen=True)
class StoreKV:
    tokens: int
    n_kv_heads: int
    head_dim: int
    block_size: int = 16
    kernel = "store_kv"

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.n_kv_heads} heads of {self.head_dim}"

    def bytes(self, itemsize: int) -> int:
        return store_kv.bytes_moved(self.tokens, self.n_kv_heads, self.head_dim, itemsize)

    def flops(self) -> int:
        return 0

    def build(self, device: str, dtype: torch.dtype) -> Built:
        normal = partial(random_normal, device=device, dtype=dtype)
        sizes = (self.tokens, self.n_kv_heads, self.head_dim)
        k, v = normal(*sizes), normal(*sizes, seed=1)
        n_blocks = -(-self.tokens // self.block_size)
        shape = (2, n_blocks, self.n_kv_heads, self.block_size, self.head_dim)
        pool, other_pool = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        slots = torch.randperm(n_blocks * self.block_size, generator=torch.Generator().manual_seed(0))[: self.tokens]
        slots = slots.to(device, torch.int32)

        def stored(by: Callable[..., None], pool: Tensor) -> Tensor:
            by(k, v, *pool, slots)
            return pool

        pytorch = partial(stored, store_kv.reference, other_pool)
        return Built(partial(stored, store_kv.store_kv, pool), pytorch, {"pool[blocks, :, rows] = k": pytorch})


@dataclass(frozen=True)
class Attention:
    """Requests with counts[i] query rows, the last of their lengths[i] tokens.

    decode: by `paged_attention`, for requests with equal counts; else by `flash_attention`.
    """

    counts: Sequence[int]
    lengths: Sequence[int]
    n_heads: int
    n_kv_heads: int
    head_dim: int
    decode: bool = False
    block_size: int = 16

    @property
    def kernel(self) -> str:
        return "paged_attention" if self.decode else "flash_attention"

    @property
    def alike(self) -> bool:
        """Whether all requests have the same sizes: PyTorch's batches are rectangles."""
        return len({*self.counts}) == len({*self.lengths}) == 1

    def __str__(self) -> str:
        if self.alike:
            sizes = f"{len(self.counts)} x {self.counts[0]} on {self.lengths[0] - self.counts[0]}"
        else:
            sizes = f"{len(self.counts)} ragged, {sum(self.counts)} on {sum(self.lengths) - sum(self.counts)}"
        return f"{sizes}, heads {self.n_heads}/{self.n_kv_heads} of {self.head_dim}"

    def bytes(self, itemsize: int) -> int:
        heads = (self.n_heads, self.n_kv_heads, self.head_dim, itemsize)
        if self.decode:
            return paged_attention.bytes_moved(self.lengths, self.counts[0], *heads)
        return flash_attention.bytes_moved(self.counts, self.lengths, *heads)

    def flops(self) -> int:
        return flash_attention.flops(self.counts, self.lengths, self.n_heads, self.head_dim)

    def build(self, device: str, dtype: torch.dtype) -> Built:
        needed = [-(-length // self.block_size) for length in self.lengths]
        order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(0)).to(torch.int32)
        tables = torch.nn.utils.rnn.pad_sequence(order.split(needed), batch_first=True).to(device)
        shape = (sum(needed), self.n_kv_heads, self.block_size, self.head_dim)
        normal = partial(random_normal, device=device, dtype=dtype)
        cache = normal(*shape), normal(*shape, seed=1), tables
        q = normal(sum(self.counts), self.n_heads, self.head_dim, seed=2)
        whole = partial(torch.tensor, dtype=torch.int32, device=device)
        lengths, ends = whole(list(self.lengths)), whole([0, *accumulate(self.counts)])
        peers = self.sdpa(q, *cache) if self.alike else {}
        reference = partial(flash_attention.reference, q, *cache, ends, lengths)
        if not self.decode:
            return Built(
                lambda: flash_attention.flash_attention(q, *cache, ends, lengths, max(self.counts)), reference, peers
            )
        rows = q.unflatten(0, (len(self.counts), -1))
        longest = max(self.lengths)
        return Built(
            lambda: paged_attention.paged_attention(rows, *cache, lengths, longest).flatten(0, 1), reference, peers
        )

    def sdpa(self, q: Tensor, keys: Tensor, values: Tensor, tables: Tensor) -> dict[str, Callable[[], Tensor]]:
        """PyTorch's attention by each of its backends, over a cache that already lies in one piece: the best case."""
        requests, length = len(self.lengths), self.lengths[0]
        q = q.view(requests, -1, self.n_heads, self.head_dim).transpose(1, 2)
        k, v = (x[tables.long()].transpose(2, 3).flatten(1, 2)[:, :length] for x in (keys, values))
        k, v = (x.transpose(1, 2).contiguous() for x in (k, v))  # [requests, n_kv_heads, length, head_dim]
        n_queries = q.shape[2]
        mask = causal_lower_right(n_queries, length) if 1 < n_queries < length else None

        def run(backend: SDPBackend) -> Tensor:
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=n_queries == length > 1, enable_gqa=q.shape[1] != k.shape[1]
                )
            return out.transpose(1, 2).flatten(0, 1)

        backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
        return {f"SDPA {backend.name.lower()}": partial(run, backend) for backend in backends}


@dataclass(frozen=True)
class W4A16:
    """x [rows, k], and packed weights [columns, k] with float16 scales and minima."""

    rows: int
    columns: int
    k: int
    group: int = 128
    bias: bool = False
    kernel = "w4a16"

    def __str__(self) -> str:
        rows = f"{self.rows} row{'s' * (self.rows > 1)}"
        return f"{rows}, {self.columns} x {self.k}, groups of {self.group}" + (", bias" if self.bias else "")

    def bytes(self, itemsize: int) -> int:
        return w4a16.bytes_moved(self.rows, self.columns, self.k, self.group, itemsize)

    def flops(self) -> int:
        return w4a16.flops(self.rows, self.columns, self.k)

    def build(self, device: str, dtype: torch.dtype) -> Built:
        """Results of order one. The peer has the same weights expanded, at four times the bytes."""
        normal = partial(random_normal, device=device)
        generator = torch.Generator(device).manual_seed(1)
        shape = (self.columns, self.k // 2)
        codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator, device=device)
        groups = normal(self.columns, self.k // self.group, dtype=torch.float32, seed=2)
        scale = (0.2 + 0.05 * groups).abs() / self.k**0.5
        scale, minimum = scale.half(), (-7.5 * scale).half()
        x = normal(self.rows, self.k, dtype=dtype)
        bias = normal(self.columns, dtype=dtype, seed=3) if self.bias else None
        weights = codes, scale, minimum, bias
        expanded = w4a16.expanded(codes, scale, minimum, torch.float32).to(dtype)
        return Built(
            lambda: w4a16.linear(x, *weights),
            lambda: w4a16.reference(x, *weights),
            {"F.linear, weights expanded": lambda: F.linear(x, expanded, bias)},
        )


def random_normal(*shape: int, device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).to(dtype)
