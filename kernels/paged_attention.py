"""Decode over a paged cache, split over the sequence (flash-decoding).

Problem: in decode a request has one query row a head, and must read its whole past: bytes, not arithmetic. With one
program for each request and head, a small batch leaves most of a GPU idle, and query heads that share a key head read
it several times. Here one program takes all query rows that share one key head, and one *split* of the past; it reads
each key and value once and writes a partial result (weighted values, maximum, sum). A second kernel merges the splits.
Bytes: the past's keys and values once, plus the small partial results.

A request may have several query rows (the verification of guesses): its last `n_queries` tokens, causal among them.

Dao et al., "Flash-Decoding for long-context inference" (2023); Kwon et al., "PagedAttention" (2023), section 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import flash_attention
from kernels.checks import processors, require_cache, require_tensor, target
from kernels.flash_attention import Tiles
from kernels.online_softmax import LOG2_E, padded, precision, walk

BLOCK_N = 64  # splits are multiples of it
MAX_SPLITS = 64
PROGRAMS_PER_PROCESSOR = 2
MERGE_OPTIONS = {"num_warps": 4}


def reference(q: Tensor, keys: Tensor, values: Tensor, block_tables: Tensor, lengths: Tensor) -> Tensor:
    """The same in plain PyTorch and float64: prefill's formula for requests of n_queries rows."""
    cu_seqlens = torch.arange(len(q) + 1) * q.shape[1]
    out = flash_attention.reference(q.flatten(0, 1), keys, values, block_tables, cu_seqlens, lengths)
    return out.view(q.shape)


@triton.jit
def split_kernel(
    q_ptr, k_ptr, v_ptr, acc_ptr, top_ptr, total_ptr, tables_ptr, lengths_ptr,
    stride_qr, stride_qt, stride_qh, stride_kb, stride_kg, stride_kr, stride_table,
    scale, heads_per_group, n_queries, split_size,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: one request, one key head, one split. Its rows are (query, head of the group), padded to ROWS."""
    split, group, request = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    n_splits, n_groups = tl.num_programs(0), tl.num_programs(1)
    length = tl.load(lengths_ptr + request)
    rows = tl.arange(0, ROWS)
    query, head = rows // heads_per_group, group * heads_per_group + rows % heads_per_group
    dims = tl.arange(0, BLOCK_D)
    q_offset = request.to(tl.int64) * stride_qr + query * stride_qt + head * stride_qh
    q_inside = (query < n_queries)[:, None] & (dims[None, :] < HEAD_DIM)
    q = tl.load(q_ptr + q_offset[:, None] + dims[None, :], mask=q_inside, other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    last_seen = length - n_queries + query
    k_ptr, v_ptr, table_ptr = k_ptr + group * stride_kg, v_ptr + group * stride_kg, tables_ptr + request * stride_table
    start = split * split_size
    end = tl.minimum(length, start + split_size)
    # Before `middle` every row sees every key.
    middle = tl.maximum(start, tl.minimum(end, length - n_queries + 1) // BLOCK_N * BLOCK_N)
    top, total, acc = walk(
        q, k_ptr, v_ptr, table_ptr, start, middle, last_seen, length, top, total, acc, scale,
        stride_kb, stride_kr, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, False, PRECISION,
    )  # fmt: skip
    top, total, acc = walk(
        q, k_ptr, v_ptr, table_ptr, middle, end, last_seen, length, top, total, acc, scale,
        stride_kb, stride_kr, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, True, PRECISION,
    )  # fmt: skip
    place = ((request.to(tl.int64) * n_groups + group) * n_splits + split) * ROWS + rows
    tl.store(acc_ptr + place[:, None] * BLOCK_D + dims[None, :], acc)
    tl.store(top_ptr + place, top)
    tl.store(total_ptr + place, total)


@triton.jit
def merge_kernel(
    acc_ptr, top_ptr, total_ptr, out_ptr, stride_or, stride_ot, stride_oh, heads_per_group, n_groups, n_splits,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One program: one query row of one head. Rescale the splits to the largest maximum, and add them up."""
    query, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = head // heads_per_group
    row = query * heads_per_group + head % heads_per_group
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    real = splits < n_splits
    place = ((request.to(tl.int64) * n_groups + group) * n_splits + splits) * ROWS + row
    tops = tl.load(top_ptr + place, mask=real, other=float("-inf"))
    top = tl.max(tops, axis=0)
    weights = tl.exp2(tops - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(tl.load(total_ptr + place, mask=real, other=0.0) * weights, axis=0)
    acc = tl.load(acc_ptr + place[:, None] * BLOCK_D + dims[None, :], mask=real[:, None], other=0.0)
    out = tl.sum(acc * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    offset = request.to(tl.int64) * stride_or + query * stride_ot + head * stride_oh
    tl.store(out_ptr + offset + dims, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, block_tables: Tensor, lengths: Tensor, max_length: int
) -> Tensor:
    """The last n_queries tokens of each request look at its whole past, causal among themselves.

    q: [requests, n_queries, n_heads, head_dim]; keys, values: [n_blocks, n_kv_heads, block_size, head_dim], alike in
    memory; block_tables: [requests, most blocks], lengths: [requests], int32. max_length: the largest of them.
    -> like q, zeros for rows that see nothing

    Errors as `flash_attention`; also where n_queries times the heads of a group is more than `tile` takes.
    """
    require_tensor("lengths", lengths, (None,))
    require_tensor("q", q, (len(lengths), None, None, None))
    require_cache(q, keys, values, block_tables, lengths)
    requests, n_queries, n_heads, head_dim = q.shape
    n_kv_heads, block_size = keys.shape[1:3]
    heads_per_group = n_heads // n_kv_heads
    rows = padded_rows(n_queries, heads_per_group)
    choice = tile(q.dtype, target(q.device))
    if rows > choice.rows:
        raise ValueError(
            f"{n_queries} query rows of {heads_per_group} heads a group are more than {choice.rows}: "
            "use flash_attention"
        )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not q.numel():
        return out
    n_splits, split_size = splits(requests * n_kv_heads, max_length, processors(q.device))
    partial = (requests, n_kv_heads, n_splits, rows)
    acc = torch.empty(*partial, padded(head_dim), dtype=torch.float32, device=q.device)
    top, total = torch.empty(2, *partial, dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):  # Triton launches on the current GPU
        split_kernel[(n_splits, n_kv_heads, requests)](
            q, keys, values, acc, top, total, block_tables, lengths,
            *q.stride()[:3], *keys.stride()[:3], block_tables.stride(0),
            head_dim**-0.5 * LOG2_E, heads_per_group, n_queries, split_size,
            BLOCK_SIZE=block_size, HEAD_DIM=head_dim, BLOCK_D=padded(head_dim), ROWS=rows, BLOCK_N=choice.columns,
            PRECISION=precision(q.dtype), num_warps=choice.warps, num_stages=choice.stages,
        )  # fmt: skip
        merge_kernel[(n_queries, n_heads, requests)](
            acc, top, total, out, *out.stride()[:3], heads_per_group, n_kv_heads, n_splits,
            HEAD_DIM=head_dim, BLOCK_D=padded(head_dim), ROWS=rows, SPLITS=triton.next_power_of_2(n_splits),
            **MERGE_OPTIONS,
        )  # fmt: skip
    return out


def tile(dtype: torch.dtype, target: str) -> Tiles:
    """The most query rows, and the keys of a tile, that stay in registers, as `python -m kernels.aot` shows.

    Decode waits for memory: a tile need not be large, but enough of them must be on their way (stages, and two programs
    for each processor). Products in full float32 are no work for tensor cores, and take four times the registers.
    """
    return Tiles(16, 16, 4, 2) if dtype == torch.float32 and target != "cpu" else Tiles(64, BLOCK_N, 4, 3)


def padded_rows(n_queries: int, heads_per_group: int) -> int:
    """Query rows of a program: a power of two, and at least the 16 that a matrix product wants."""
    return max(16, triton.next_power_of_2(n_queries * heads_per_group))


def splits(programs: int, max_length: int, n_processors: int) -> tuple[int, int]:
    """(number of splits, keys in each): two programs for every processor, and no split without a tile of work."""
    wanted = triton.cdiv(PROGRAMS_PER_PROCESSOR * n_processors, programs)
    n_tiles = max(1, triton.cdiv(max_length, BLOCK_N))
    tiles_each = triton.cdiv(n_tiles, min(wanted, n_tiles, MAX_SPLITS))
    return triton.cdiv(n_tiles, tiles_each), tiles_each * BLOCK_N


def bytes_moved(
    lengths: Sequence[int], n_queries: int, n_heads: int, n_kv_heads: int, head_dim: int, itemsize: int
) -> int:
    """At least: each request's keys and values once, its queries and its output. The partial results come on top."""
    return itemsize * head_dim * (2 * n_kv_heads * sum(lengths) + 2 * n_heads * n_queries * len(lengths))


def flops(lengths: Sequence[int], n_queries: int, n_heads: int, head_dim: int) -> int:
    return flash_attention.flops([n_queries] * len(lengths), lengths, n_heads, head_dim)
