"""The linear layer whose weights stay quantized, and the ways to multiply by them.

On a CPU PyTorch has an operator for 4-bit weights, which expands them in registers; on a GPU it is our own kernel
(kernels/w4a16.py). Everywhere else the matrix is expanded a few rows at a time: right, small, and slow.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.packing import pack_nibbles, unpack_nibbles
from minillm.quantize import Quantized

OPERATOR_GROUPS = (32, 64, 128, 256)  # group sizes that PyTorch's operator knows
ROWS_AT_ONCE = 1024  # of an expanded matrix


class QuantLinear(nn.Module):
    """x [rows, in] -> x W^T + b [rows, out], with W on a grid.

    compute: the dtype of the product, whatever x is in; None: that of x. Codes of up to 4 bits are stored two a byte.
    """

    def __init__(self, weight: Quantized, bias: Tensor | None = None, compute: torch.dtype | None = None):
        super().__init__()
        self.n_out, self.n_in = weight.codes.shape
        self.bits, self.compute = weight.bits, compute
        self.halved = weight.bits <= 4 and self.n_in % 2 == 0
        codes = pack_nibbles(weight.codes) if self.halved else weight.codes
        self.register_buffer("codes", codes.contiguous())
        self.register_buffer("scale", weight.scale.contiguous())
        self.register_buffer("minimum", weight.minimum.contiguous())
        self.register_buffer("channel", None if weight.channel is None else weight.channel.contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach())

    @property
    def weight(self) -> Quantized:
        """What it was made of."""
        codes = unpack_nibbles(self.codes) if self.halved else self.codes
        return Quantized(codes, self.scale, self.minimum, self.bits, self.channel)

    def forward(self, x: Tensor) -> Tensor:
        inputs = x if self.channel is None else x * self.channel.to(x.dtype)
        out = self.product(inputs.to(self.compute or x.dtype)).to(x.dtype)
        return out if self.bias is None else out + self.bias

    def product(self, x: Tensor) -> Tensor:
        """x: [rows, in] -> [rows, out], the matrix expanded a few rows at a time"""
        parts = []
        for start in range(0, self.n_out, ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            codes = unpack_nibbles(self.codes[rows]) if self.halved else self.codes[rows]
            part = Quantized(codes, self.scale[rows], self.minimum[rows], self.bits)
            parts.append(F.linear(x, part.dequantize(x.dtype)))
        return torch.cat(parts, dim=-1)
