"""The layers whose weights stay quantized, and the ways to multiply by them.

On a CPU, PyTorch has an operator for 4-bit weights that expands them in registers. It wants the codes in an order of
its own: `choose_layout` puts them there, in place of the plain ones. On a GPU our own kernel reads the plain ones
(kernels/w4a16.py). Where neither serves, the matrix is expanded a few rows at a time: right, small, and slow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.kernel_attention import kernels_serve, module
from minillm.packing import pack_nibbles, unpack_nibbles
from minillm.quantize import Quantized

OPERATOR_GROUPS = (256, 128, 64, 32)  # columns that may share a scale, for PyTorch's operator
OPERATOR_DTYPE = torch.bfloat16  # it takes other dtypes, but has vector instructions for this one only
BLOCK = 64  # rows that are surely together in its layout
ROWS_AT_ONCE = 256  # of an expanded matrix: few enough for a cache
COMPUTE = (None, torch.float32, torch.float16, torch.bfloat16, torch.float64)


class QuantLinear(nn.Module):
    """x [rows, in] -> x W^T + b [rows, out], with W on a grid.

    compute: the dtype of the product, whatever x is in; None: that of x. Codes of up to 4 bits are stored two a byte.
    `to(dtype)` changes the bias and what x is to be, never the grid.
    """

    def __init__(self, weight: Quantized, bias: Tensor | None = None, compute: torch.dtype | None = None):
        super().__init__()
        require_consistent(weight, bias)
        require_compute(compute)
        self.n_out, self.n_in = weight.codes.shape
        self.bits, self.compute = weight.bits, compute
        self.halved = weight.bits <= 4 and self.n_in % 2 == 0
        self.shift = (8 if self.halved else 128) - 2 ** (weight.bits - 1)  # of codes in the operator's layout
        codes = pack_nibbles(weight.codes) if self.halved else weight.codes
        symmetric = torch.equal(weight.minimum, symmetric_minimum(weight.scale, weight.bits))
        self.register_buffer("codes", codes.contiguous())
        self.register_buffer("scale", weight.scale.contiguous())
        self.register_buffer("minimum", None if symmetric else weight.minimum.contiguous())
        self.register_buffer("channel", None if weight.channel is None else weight.channel.contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.register_buffer("pairs", None)  # scale and zero for the operator: `codes` are in its layout then

    @property
    def weight(self) -> Quantized:
        """The matrix that the layer was made of, with plain codes."""
        return self.part(slice(None), self.channel)

    @property
    def bytes_read(self) -> int:
        """Bytes that one product reads of the weights: the codes, and the grid in the form that is used."""
        grid = (self.scale, self.minimum) if self.pairs is None else (self.pairs,)
        return sum(t.nbytes for t in (self.codes, *grid, self.channel, self.bias) if t is not None)

    def part(self, rows: slice | Tensor, channel: Tensor | None = None) -> Quantized:
        scale = self.scale[rows]
        minimum = symmetric_minimum(scale, self.bits) if self.minimum is None else self.minimum[rows]
        return Quantized(self.codes_of(rows), scale, minimum, self.bits, channel)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Some rows of the matrix, expanded. ids: [...] -> [..., in]"""
        return self.part(ids, self.channel).dequantize(dtype)

    def forward(self, x: Tensor) -> Tensor:
        inputs = x if self.channel is None else x * self.channel.to(x.dtype)
        out = self.product(inputs.to(self.compute or x.dtype)).to(x.dtype)
        return out if self.bias is None else out + self.bias

    def product(self, x: Tensor) -> Tensor:
        """x: [rows, in] -> [rows, out]"""
        if self.pairs is not None and x.dtype == self.pairs.dtype:
            x = x if self.halved else torch.cat([x, x], dim=-1)
            group = x.shape[-1] // len(self.pairs)
            return operator()(x.contiguous(), self.codes, group, self.pairs)
        if self.kernel_takes(x):
            plain = self.minimum if self.minimum is not None else symmetric_minimum(self.scale, self.bits)
            return module("w4a16").linear(x, self.codes, self.scale, plain)
        starts = range(0, self.n_out, ROWS_AT_ONCE)
        parts = (self.part(slice(start, start + ROWS_AT_ONCE)).dequantize(x.dtype) for start in starts)
        return torch.cat([F.linear(x, part) for part in parts], dim=-1)

    def kernel_takes(self, x: Tensor) -> bool:
        """Whether kernels/w4a16.py can compute it: there is a GPU, and it knows grids of this kind."""
        known = self.n_in // self.scale.shape[1] % 32 == 0 and self.scale.dtype != torch.bfloat16
        return self.halved and self.pairs is None and known and kernels_serve(x[:, :1])

    def codes_of(self, rows: slice | Tensor) -> Tensor:
        """The codes of some rows, whichever layout they are in. -> [..., in] uint8"""
        if self.pairs is None:
            return unpack_nibbles(self.codes[rows]) if self.halved else self.codes[rows]
        ids = torch.arange(self.n_out)[rows]
        if ids.ndim == 1 and len(ids) > ROWS_AT_ONCE:
            return torch.cat([self.codes_of(part) for part in ids.split(ROWS_AT_ONCE)])
        codes = from_operator(self.codes, ids)
        return (codes if self.halved else codes[..., : self.n_in] << 4 | codes[..., self.n_in :]) - self.shift

    def choose_layout(self, dtype: torch.dtype) -> None:
        """Get ready for products in `dtype`: once, for as long as the layer stays on its device.

        The operator computes (code - 8) * scale + zero. Fewer than 16 levels are shifted to the middle of its own, so
        that `zero`, which is rounded, is small. Two codes of 4 bits are one of up to 8, 16 * high + low: then the
        matrix has twice as many columns, first all high halves and then all low ones.
        """
        n_groups = self.scale.shape[1]
        group = next((g for g in OPERATOR_GROUPS if self.n_in // n_groups % g == 0), None)
        served = dtype == OPERATOR_DTYPE and self.codes.device.type == "cpu" and self.n_out % BLOCK == 0
        if self.pairs is not None or not served or group is None:
            return
        laid_out = torch.empty_like(self.codes)  # of the same size
        try:
            operator()
            for start in range(0, self.n_out, ROWS_AT_ONCE):
                rows = slice(start, start + ROWS_AT_ONCE)
                codes = self.codes_of(rows) + self.shift
                laid_out[rows] = to_operator(codes if self.halved else torch.cat([codes >> 4, codes & 15], dim=-1))
            order(self.n_in if self.halved else 2 * self.n_in)
        except (AttributeError, RuntimeError):  # this PyTorch has no such operator (it is not a public one)
            return
        scale = self.scale.float()
        minimum = symmetric_minimum(scale, self.bits) if self.minimum is None else self.minimum.float()
        zero = minimum + 2 ** (self.bits - 1) * scale
        if not self.halved:
            zero = torch.cat([torch.zeros_like(zero), zero + 8 * scale], dim=-1)
            scale = torch.cat([16 * scale, scale], dim=-1)
        pairs = torch.stack([scale, zero], dim=-1).to(dtype).repeat_interleave(self.n_in // n_groups // group, dim=1)
        self.codes, self.pairs = laid_out, pairs.transpose(0, 1).contiguous()

    def _apply(self, fn: Callable, recurse: bool = True) -> QuantLinear:
        """Another dtype or device: back to the plain layout, and the grid keeps its own dtypes."""
        if self.pairs is not None:
            codes = self.codes_of(slice(None))
            self.codes, self.pairs = pack_nibbles(codes) if self.halved else codes, None
        grid = {name: getattr(self, name) for name in ("scale", "minimum", "channel")}
        super()._apply(fn, recurse)
        for name, tensor in grid.items():
            setattr(self, name, None if tensor is None else tensor.to(self.codes.device))
        return self


class QuantEmbedding(nn.Module):
    """Token ids [T] -> rows [T, d_model] of a matrix on a grid, which may be the head's too.

    Rows are expanded when they are looked up.
    """

    def __init__(self, matrix: QuantLinear, dtype: torch.dtype):
        super().__init__()
        self.matrix = matrix
        self.register_buffer("like", torch.empty(0, dtype=dtype, device=matrix.codes.device))  # follows `to(dtype)`

    @property
    def weight(self) -> Quantized:
        return self.matrix.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.matrix.rows(tokens, self.like.dtype)


def symmetric_minimum(scale: Tensor, bits: int) -> Tensor:
    """The minimum of a symmetric grid, which need not be stored: 0 is a level. -> like scale"""
    return -scale * 2 ** (bits - 1)


def require_compute(compute: torch.dtype | None) -> None:
    if compute not in COMPUTE:
        raise ValueError(f"compute must be None or one of {', '.join(map(str, COMPUTE[1:]))}, not {compute!r}")


def require_consistent(weight: Quantized, bias: Tensor | None = None) -> None:
    codes, scale, channel = weight.codes, weight.scale, weight.channel
    if codes.dtype != torch.uint8 or codes.ndim != 2 or codes.numel() == 0:
        raise ValueError(f"codes must be a matrix in uint8, not {list(codes.shape)} in {codes.dtype}")
    n_out, n_in = codes.shape
    if scale.ndim != 2 or len(scale) != n_out or scale.shape[1] == 0 or n_in % scale.shape[1]:
        raise ValueError(f"scales of shape {list(scale.shape)} do not divide a matrix of {n_out} rows of {n_in}")
    if weight.minimum.shape != scale.shape:
        raise ValueError(f"minima of shape {list(weight.minimum.shape)} do not fit scales of {list(scale.shape)}")
    if channel is not None and channel.shape != (n_in,):
        raise ValueError(f"{list(channel.shape)} factors do not fit rows of {n_in}")
    if bias is not None and bias.shape != (n_out,):
        raise ValueError(f"a bias of shape {list(bias.shape)} does not fit {n_out} rows")
    factors = () if channel is None else (channel,)
    if not all(t.is_floating_point() and t.isfinite().all() for t in (scale, weight.minimum, *factors)):
        raise ValueError("scales, minima and factors must be finite numbers with a fraction")
    if int(codes.max()) >= 2**weight.bits:
        raise ValueError(f"{weight.bits} bits hold codes below {2**weight.bits}, not {int(codes.max())}")


def operator() -> Callable[[Tensor, Tensor, int, Tensor], Tensor]:
    """x, packed codes, group, pairs -> product. In full, since the search for `default` takes half a small product."""
    return torch.ops.aten._weight_int4pack_mm_for_cpu.default


def to_operator(codes: Tensor) -> Tensor:
    """codes: [rows, n] uint8 below 16 -> the same in the operator's layout, [rows, n / 2] bytes"""
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)


def from_operator(packed: Tensor, ids: Tensor) -> Tensor:
    """Some rows of codes out of the operator's layout. packed: [rows, n / 2]; ids: [...] -> [..., n]"""
    n = 2 * packed.shape[1]
    place = order(n)[ids % BLOCK]
    byte = packed.flatten()[(ids // BLOCK * BLOCK)[..., None] * packed.shape[1] + place // 2]
    return byte >> (place % 2 * 4).to(torch.uint8) & 15


@lru_cache
def order(n: int) -> Tensor:
    """Where the operator keeps the codes of a block: [BLOCK, n], each place counted in halves of a byte.

    The order depends on the CPU, and is not documented. So let it pack the numbers of the codes, a digit at a time.
    """
    number = torch.arange(2 * BLOCK * n).view(2 * BLOCK, n)
    found = torch.zeros(2 * BLOCK * n, dtype=torch.int64)
    for shift in range(0, number.numel().bit_length(), 4):
        digit = (number >> shift & 15).to(torch.uint8)
        found |= unpack_nibbles(to_operator(digit).flatten()).long() << shift
    place = found[: BLOCK * n].argsort()
    if not torch.equal(found[BLOCK * n :] - BLOCK * n, found[: BLOCK * n]) or not torch.equal(
        found[place], number[:BLOCK].flatten()
    ):
        raise RuntimeError("PyTorch's operator for 4-bit weights has a layout that is not one of blocks of rows")
    return place.view(BLOCK, n)
