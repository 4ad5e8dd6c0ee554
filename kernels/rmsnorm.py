"""RMSNorm, with the residual added on the way: the smallest kernel that is worth writing.

Problem: y = (x + r) / rms(x + r) * weight, and the sum itself is needed later. PyTorch's five operations read 6 rows
and write 4, and the work is nothing beside the traffic. Here one program takes a row, keeps it in registers, and reads
and writes each number once. Bytes: 2 rows read, 2 written (1 and 1 without a residual), and the weight.

Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import require_floats, require_tensor, target

MAX_COLUMNS = 32768  # a row must fit into one program's registers


def reference(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x, residual: [rows, columns]. -> normed and x + residual, computed in float64"""
    total = x.double() if residual is None else x.double() + residual.double()
    if residual is not None:
        total = total.to(x.dtype).double()  # the sum is stored, and the norm is that of the stored sum
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps) * weight.double()
    return normed, total


@triton.jit
def rmsnorm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr,
    stride_x, stride_residual, stride_y, stride_total, n_columns, eps,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program, one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < n_columns
    x = tl.load(x_ptr + row * stride_x + columns, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * stride_residual + columns, mask=inside, other=0.0)
        tl.store(total_ptr + row * stride_total + columns, x, mask=inside)
    wide = x.to(tl.float32)  # the mean of squares needs the range
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / n_columns + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * stride_y + columns, (wide * scale * weight).to(x.dtype), mask=inside)


def rmsnorm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x: [rows, columns], residual: like x or None, weight: [columns]. -> (normed, x + residual or x itself)

    Raises ValueError for other shapes, dtypes or devices, and for rows of more than MAX_COLUMNS.
    """
    require_tensor("x", x, (None, None))
    require_floats("x", x)
    require_tensor("weight", weight, (x.shape[1],), like=x)
    if x.shape[1] > MAX_COLUMNS:
        raise ValueError(f"a row may have at most {MAX_COLUMNS} columns, not {x.shape[1]}")
    if residual is not None:
        require_tensor("residual", residual, tuple(x.shape), like=x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(y) if residual is not None else x
    given = x if residual is None else residual  # some address, which is not read without a residual
    if x.numel():
        block = triton.next_power_of_2(x.shape[1])
        with torch.cuda.device_of(x):  # Triton launches on the current GPU
            rmsnorm_kernel[(len(x),)](
                x, given, weight, y, total,
                x.stride(0), given.stride(0), y.stride(0), total.stride(0), x.shape[1], eps,
                HAS_RESIDUAL=residual is not None, BLOCK=block, num_warps=warps(block, target(x.device)),
            )  # fmt: skip
    return y, total


def warps(block: int, target: str) -> int:
    """So many that each thread holds at least 8 numbers: a load of 16 bytes, in 16 bits. At most 1024 threads."""
    threads = 64 if target.startswith("gfx") else 32  # of a warp
    return min(1024 // threads, max(1, block // (8 * threads)))


def bytes_moved(rows: int, columns: int, itemsize: int, residual: bool) -> int:
    return itemsize * (rows * columns * (4 if residual else 2) + columns)


def flops(rows: int, columns: int, residual: bool) -> int:
    """A square, its addition, and two multiplications for each number; one addition more with a residual."""
    return (5 if residual else 4) * rows * columns
