"""New keys and values into their slots of the paged cache.

Problem: the rows that a step has just computed belong into blocks anywhere in the pool. Here one program takes the
keys and values of one token, all heads, and writes them to the slot that the caller names. Bytes: each row is read once
and written once. PyTorch's indexed assignment does the same in one launch for the keys and one for the values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import require_floats, require_pool, require_tensor, require_whole
from kernels.online_softmax import padded


def reference(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """The same in plain PyTorch."""
    size = keys.shape[2]
    keys[slots.long() // size, :, slots.long() % size] = k
    values[slots.long() // size, :, slots.long() % size] = v


@triton.jit
def store_kv_kernel(
    k_ptr, v_ptr, keys_ptr, values_ptr, slots_ptr,
    stride_kt, stride_kg, stride_vt, stride_vg, stride_kb, stride_kh, stride_kr, n_kv_heads,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """One program: the keys and values of one token go to their slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    groups, dims = tl.arange(0, BLOCK_G).to(tl.int64)[:, None], tl.arange(0, BLOCK_D)[None, :]
    inside = (groups < n_kv_heads) & (dims < HEAD_DIM)
    target = slot // BLOCK_SIZE * stride_kb + groups * stride_kh + slot % BLOCK_SIZE * stride_kr + dims
    k = tl.load(k_ptr + token * stride_kt + groups * stride_kg + dims, mask=inside, other=0.0)
    v = tl.load(v_ptr + token * stride_vt + groups * stride_vg + dims, mask=inside, other=0.0)
    tl.store(keys_ptr + target, k, mask=inside)
    tl.store(values_ptr + target, v, mask=inside)


def store_kv(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Write new rows into the pool.

    k, v: [tokens, n_kv_heads, head_dim]; keys, values: [n_blocks, n_kv_heads, block_size, head_dim], alike in memory;
    slots: [tokens] int32, block * block_size + row. Raises ValueError for other shapes, dtypes or devices. Two tokens
    with one slot, or a slot beyond the pool, are the caller's mistake and not seen here.
    """
    require_tensor("k", k, (None, None, None))
    require_floats("k", k)
    tokens, n_kv_heads, head_dim = k.shape
    require_tensor("v", v, tuple(k.shape), like=k)
    require_pool(keys, values, (None, n_kv_heads, None, head_dim), like=k)
    require_whole("slots", slots, (tokens,), like=k)
    if k.numel():
        block_g, block_d = triton.next_power_of_2(n_kv_heads), padded(head_dim)
        with torch.cuda.device_of(k):  # Triton launches on the current GPU
            store_kv_kernel[(tokens,)](
                k, v, keys, values, slots, *k.stride()[:2], *v.stride()[:2], *keys.stride()[:3], n_kv_heads,
                BLOCK_SIZE=keys.shape[2], HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_G=block_g,
                num_warps=warps(block_g * block_d),
            )  # fmt: skip


def warps(block: int) -> int:
    """Few enough that each thread has at least one load of 16 bytes to do."""
    return min(8, max(1, block // 1024))


def bytes_moved(tokens: int, n_kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Keys and values, read and written."""
    return 4 * tokens * n_kv_heads * head_dim * itemsize
