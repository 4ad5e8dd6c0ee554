"""Two 4-bit codes in a byte. Byte i of a row holds code 2i in its low half, and code 2i + 1 in its high half."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_nibbles(codes: Tensor) -> Tensor:
    """codes: [..., n] uint8 below 16, n even -> [..., n / 2] uint8"""
    if codes.dtype != torch.uint8 or codes.shape[-1] % 2:
        raise ValueError(f"codes must be uint8 and even in number, not {codes.dtype} and {codes.shape[-1]}")
    if codes.numel() and int(codes.max()) > 15:
        raise ValueError(f"4 bits hold codes from 0 to 15, not {int(codes.max())}")
    low, high = codes[..., 0::2], codes[..., 1::2]
    return low | (high << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """packed: [..., n / 2] uint8 -> codes [..., n] uint8"""
    if packed.dtype != torch.uint8:
        raise ValueError(f"packed codes must be uint8, not {packed.dtype}")
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
