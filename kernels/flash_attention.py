"""Causal attention for prefill: tiles of scores that never leave the chip, over packed requests and a paged past.

Problem: the scores of N tokens are an N x N matrix for each head. Written to memory and read back they cost far more
than the keys and values themselves. Here one program takes BLOCK_M query rows of one head and walks over the keys in
tiles of BLOCK_N; it keeps the running maximum m, the running sum l, and the weighted values, and rescales them when a
tile raises the maximum (the online softmax). Bytes: q and the output once, and for each tile of queries the keys and
values before it. Tiles beyond the diagonal are not computed.

Several requests lie one behind the other: request r owns the query rows cu_seqlens[r] to cu_seqlens[r + 1], which are
the *last* rows of its lengths[r] tokens. Its keys and values, the new ones included, lie in blocks of a pool that its
row of `block_tables` names: a chunk on top of a cache needs no gather.

Dao et al., "FlashAttention" (2022), algorithm 1; Dao, "FlashAttention-2" (2023), section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import require_cache, require_tensor, require_whole, target
from kernels.online_softmax import LOG2_E, finish, padded, precision, walk


def reference(
    q: Tensor, keys: Tensor, values: Tensor, block_tables: Tensor, cu_seqlens: Tensor, lengths: Tensor
) -> Tensor:
    """The same in plain PyTorch and float64, with the whole matrix of scores."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    size = keys.shape[2]
    for r, length in enumerate(lengths.tolist()):
        start, end = cu_seqlens[r].item(), cu_seqlens[r + 1].item()
        if start == end or length == 0:
            continue
        table = block_tables[r, : -(-length // size)].long()
        k, v = (x[table].double().transpose(1, 2).flatten(0, 1)[:length] for x in (keys, values))
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("thd,shd->hts", q[start:end].double(), k) * q.shape[2] ** -0.5
        seen = torch.ones(end - start, length, dtype=torch.bool, device=q.device).tril(length - (end - start))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)  # a row that sees nothing gives 0
        out[start:end] = torch.einsum("hts,shd->thd", weights, v)
    return out


@triton.jit
def flash_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, tables_ptr, cu_seqlens_ptr, lengths_ptr,
    stride_qt, stride_qh, stride_ot, stride_oh, stride_kb, stride_kg, stride_kr, stride_table,
    scale, heads_per_group,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M query rows of one head of one request."""
    tile, head, request = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    first = tl.load(cu_seqlens_ptr + request)
    n_queries = tl.load(cu_seqlens_ptr + request + 1) - first
    if tile * BLOCK_M >= n_queries:  # the grid is as long as the longest request
        return
    length = tl.load(lengths_ptr + request)
    past = length - n_queries

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    inside = (rows < n_queries)[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (first + rows).to(tl.int64)[:, None]
    q = tl.load(q_ptr + tokens * stride_qt + head * stride_qh + dims[None, :], mask=inside, other=0.0)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    group = (head // heads_per_group) * stride_kg
    table_ptr = tables_ptr + request * stride_table
    end = tl.minimum(length, past + (tile + 1) * BLOCK_M)  # beyond it lies the future of all rows
    # Before `middle` every row sees every key.
    middle = tl.maximum(0, tl.minimum(end, past + tile * BLOCK_M + 1)) // BLOCK_N * BLOCK_N
    top, total, acc = walk(
        q, k_ptr + group, v_ptr + group, table_ptr, 0, middle, past + rows, length, top, total, acc, scale,
        stride_kb, stride_kr, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, False, PRECISION,
    )  # fmt: skip
    top, total, acc = walk(
        q, k_ptr + group, v_ptr + group, table_ptr, middle, end, past + rows, length, top, total, acc, scale,
        stride_kb, stride_kr, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, True, PRECISION,
    )  # fmt: skip
    out_offsets = tokens * stride_ot + head * stride_oh + dims[None, :]
    tl.store(out_ptr + out_offsets, finish(total, acc).to(q.dtype), mask=inside)


def flash_attention(
    q: Tensor, keys: Tensor, values: Tensor, block_tables: Tensor, cu_seqlens: Tensor, lengths: Tensor, max_queries: int
) -> Tensor:
    """Causal attention of packed requests over a paged cache.

    q: [tokens, n_heads, head_dim]; keys, values: [n_blocks, n_kv_heads, block_size, head_dim], alike in memory;
    block_tables: [requests, most blocks], cu_seqlens: [requests + 1], lengths: [requests], all int32.
    max_queries: the query rows of the request that has most. -> like q, zeros for rows that see nothing

    What the three index tensors and `max_queries` say is the caller's word; shapes, dtypes and devices are checked
    (ValueError).
    """
    require_tensor("q", q, (None, None, None))
    require_cache(q, keys, values, block_tables, lengths)
    require_whole("cu_seqlens", cu_seqlens, (len(lengths) + 1,), like=q)
    n_heads, head_dim = q.shape[1:]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not q.numel():
        return out
    choice = tiles(head_dim, q.dtype, target(q.device))
    grid = (triton.cdiv(max_queries, choice.rows), n_heads, len(lengths))
    with torch.cuda.device_of(q):  # Triton launches on the current GPU
        flash_attention_kernel[grid](
            q, keys, values, out, block_tables, cu_seqlens, lengths,
            *q.stride()[:2], *out.stride()[:2], *keys.stride()[:3], block_tables.stride(0),
            head_dim**-0.5 * LOG2_E, n_heads // keys.shape[1],
            BLOCK_SIZE=keys.shape[2], HEAD_DIM=head_dim, BLOCK_D=padded(head_dim),
            BLOCK_M=choice.rows, BLOCK_N=choice.columns, PRECISION=precision(q.dtype),
            num_warps=choice.warps, num_stages=choice.stages,
        )  # fmt: skip
    return out


class Tiles(NamedTuple):
    """Query rows and keys of a tile, warps of a program, and how many loads ahead the compiler keeps in flight."""

    rows: int
    columns: int
    warps: int
    stages: int


def tiles(head_dim: int, dtype: torch.dtype, target: str) -> Tiles:
    """The largest tiles, of those tried, whose sums stay in registers, as `python -m kernels.aot` shows.

    A tile of queries is read once and meets every key, so more rows mean fewer bytes. What limits them is `acc`: rows x
    head_dim float32 numbers beside a tile of scores. Hopper's products (wgmma) read their operands from shared memory;
    Ampere's (mma) hold them in registers too, and 128 x 64 spills there at head_dim 128.
    """
    if dtype == torch.float32:
        return Tiles(32, 16, 8, 2)
    if head_dim <= 64:
        return Tiles(128, 64, 8, 3)
    return Tiles(128, 64, 8, 2) if target == "sm_90" else Tiles(128, 32, 8, 2)


def bytes_moved(
    counts: Sequence[int], lengths: Sequence[int], n_heads: int, n_kv_heads: int, head_dim: int, itemsize: int
) -> int:
    """At least: queries and output once, and each request's keys and values once."""
    return itemsize * head_dim * (2 * n_heads * sum(counts) + 2 * n_kv_heads * sum(lengths))


def flops(counts: Sequence[int], lengths: Sequence[int], n_heads: int, head_dim: int) -> int:
    """2 products of 2 FLOP a coordinate, for each query head and each key that a row sees. counts <= lengths."""
    seen = sum(n * (length - n) + n * (n + 1) // 2 for n, length in zip(counts, lengths, strict=True))
    return 4 * n_heads * head_dim * seen
