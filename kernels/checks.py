"""What every wrapper asks of its tensors before a kernel runs, and of the device that they are on.

A kernel sees addresses only: on a GPU a wrong shape is no error but a wrong number, or somebody else's memory.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

MAX_HEAD_DIM = 128  # the largest that is compiled and looked at (aot.py)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1, when triton was imported


def require_tensor(name: str, x: Tensor, shape: tuple[int | None, ...], like: Tensor | None = None) -> None:
    """Shape (None: any size), rows in one piece, and dtype and device as `like`."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor, not {type(x).__name__}")
    wanted = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
    if x.ndim != len(shape) or any(size not in (None, actual) for size, actual in zip(shape, x.shape, strict=True)):
        raise ValueError(f"{name} must have the shape {wanted}, not {list(x.shape)}")
    if x.numel() and x.stride(-1) != 1:
        raise ValueError(f"{name} must have its last dimension in one piece, not with stride {x.stride(-1)}")
    if like is not None and (x.dtype != like.dtype or x.device != like.device):
        raise ValueError(f"{name} is {x.dtype} on {x.device}, and must be {like.dtype} on {like.device} as the others")


def require_floats(name: str, x: Tensor) -> None:
    if x.dtype not in DTYPES:
        raise ValueError(f"{name} must be float32, float16 or bfloat16, not {x.dtype}")
    if INTERPRETED and x.dtype == torch.bfloat16:
        raise ValueError(f"{name} is bfloat16, which Triton's interpreter computes wrongly; use float32 or float16")
    if not (x.is_cuda or (INTERPRETED and x.device.type == "cpu")):
        raise ValueError(
            f"{name} is on {x.device}: a Triton kernel needs a GPU, or TRITON_INTERPRET=1 before the start"
        )


def require_whole(name: str, x: Tensor, shape: tuple[int | None, ...], like: Tensor) -> None:
    """Indices and lengths: int32, on the device of `like`."""
    require_tensor(name, x, shape)
    if x.dtype != torch.int32 or x.device != like.device:
        raise ValueError(f"{name} must be int32 on {like.device}, not {x.dtype} on {x.device}")


def require_cache(q: Tensor, keys: Tensor, values: Tensor, block_tables: Tensor, lengths: Tensor) -> None:
    """Queries [..., n_heads, head_dim]; a pool [n_blocks, n_kv_heads, block_size, head_dim]; its tables and lengths.

    What the tables and lengths say is the caller's word: to look would make the CPU wait for the GPU at every call.
    """
    require_floats("q", q)
    n_heads, head_dim = q.shape[-2:]
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim may be at most {MAX_HEAD_DIM}, not {head_dim}")
    require_pool(keys, values, (None, None, None, head_dim), like=q)
    if not keys.shape[1] or n_heads % keys.shape[1]:
        raise ValueError(f"{n_heads} query heads cannot share {keys.shape[1]} key heads evenly")
    require_whole("lengths", lengths, (None,), like=q)
    require_whole("block_tables", block_tables, (len(lengths), None), like=q)


def require_pool(keys: Tensor, values: Tensor, shape: tuple[int | None, ...], like: Tensor) -> None:
    """One set of offsets serves both, so they must lie alike."""
    require_tensor("keys", keys, shape, like)
    if not keys.shape[2]:
        raise ValueError("a block of the pool must have room for at least one token")
    require_tensor("values", values, tuple(keys.shape), like)
    if keys.stride() != values.stride():
        raise ValueError(f"keys and values must lie alike, not with the strides {keys.stride()} and {values.stride()}")


def require_weights(x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor) -> int:
    """4-bit codes [columns, k / 2] for x [rows, k], with scales and minima [columns, groups]. -> weights of a group"""
    k = x.shape[1]
    if not k or k % 2:
        raise ValueError(f"x must have an even number of columns, for codes of two a byte, and at least 2, not {k}")
    require_tensor("codes", codes, (None, k // 2))
    if codes.dtype != torch.uint8 or codes.device != x.device:
        raise ValueError(f"codes must be uint8 on {x.device}, not {codes.dtype} on {codes.device}")
    require_tensor("scale", scale, (len(codes), None))
    if scale.dtype not in (torch.float16, torch.float32) or scale.device != x.device:
        raise ValueError(f"scale must be float16 or float32 on {x.device}, not {scale.dtype} on {scale.device}")
    require_tensor("minimum", minimum, tuple(scale.shape), like=scale)
    groups = scale.shape[1]
    if not groups or k % groups or k // groups % 32:
        raise ValueError(f"{groups} groups do not cut {k} weights into multiples of 32")
    if codes.stride(0) % 16 or codes.data_ptr() % 16:
        raise ValueError("codes must have rows that start at multiples of 16 bytes")
    return k // groups


def target(device: torch.device) -> str:
    """The kind of GPU as the compiler names it: "sm_90", "gfx942"; "cpu" in the interpreter."""
    if device.type != "cuda":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    return properties.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{properties.major}{properties.minor}"


def processors(device: torch.device) -> int:
    """Streaming multiprocessors. The interpreter has none: enough that it, too, has something to merge."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
