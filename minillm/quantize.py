"""Stage 9: weights on a grid. Few bits a weight, a scale and a minimum for each group of them.

Decoding is as slow as the weights are to read. So store them in 4 bits: cut each row into groups, and replace each
weight by the number of the nearest of 16 levels, spaced evenly from the group's least weight to its greatest. The
products still run in 16 bits, on weights that are expanded on the way (W4A16: weights of 4 bits, activations of 16).

    weight ~ code * scale + minimum,    code in 0 ... 2^bits - 1

A symmetric grid keeps no minimum: it is -scale * 2^(bits - 1), and 0 is a level. How the codes are chosen is another
question, with several answers: the nearest level (here), awq.py, gptq.py.

Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference" (2018),
section 2.1; groups: Dettmers et al., "QLoRA" (2023), section 2; the form with a minimum is GGUF's Q4_1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # of scales and minima


@dataclass(frozen=True)
class Grid:
    """How a matrix is quantized. group: weights of a row that share a scale; None: the whole row.

    dtype: in which scales and minima are stored; codes are chosen for the stored ones.
    """

    bits: int = 4
    group: int | None = 64
    symmetric: bool = False
    dtype: torch.dtype = torch.float16

    def __post_init__(self):
        if isinstance(self.bits, bool) or not isinstance(self.bits, int) or not 2 <= self.bits <= 8:
            raise ValueError(f"bits must be a whole number from 2 to 8, not {self.bits!r}")
        if self.group is not None and (
            isinstance(self.group, bool) or not isinstance(self.group, int) or self.group < 1
        ):
            raise ValueError(f"group must be a positive number of weights, or None for a whole row, not {self.group!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"scales are stored in one of {DTYPES}, not {self.dtype!r}")

    @property
    def levels(self) -> int:
        return 2**self.bits

    def groups(self, n_in: int) -> int:
        """Groups in a row of n_in weights. Raises ValueError if they do not divide it."""
        if self.group is None:
            return 1
        if n_in % self.group:
            raise ValueError(f"groups of {self.group} do not divide rows of {n_in} weights")
        return n_in // self.group

    def bits_a_weight(self, n_in: int) -> float:
        """As if packed without gaps, with the scales, and the minima of an asymmetric grid. `QuantLinear` stores codes
        of 2 and 3 bits in 4, and those of 5 to 7 in 8."""
        numbers = self.groups(n_in) * (1 if self.symmetric else 2)
        return self.bits + numbers * torch.finfo(self.dtype).bits / n_in


@dataclass(frozen=True)
class Quantized:
    """A matrix on its grid.

    codes: [out, in] uint8; scale, minimum: [out, groups]. channel: [in] or None, a factor of each column (awq.py).
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor
    bits: int
    channel: Tensor | None = None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """-> [out, in]"""
        wide = torch.promote_types(dtype, torch.float32)  # rounded once, at the end: code * scale is larger than both
        groups = self.codes.unflatten(-1, (self.scale.shape[-1], -1)).to(wide)
        weight = (groups * self.scale[..., None].to(wide) + self.minimum[..., None].to(wide)).flatten(-2)
        return (weight if self.channel is None else weight * self.channel.to(wide)).to(dtype)


Method = Callable[[Tensor, Grid, Tensor | None], Quantized]
"""(weight [out, in], grid, hessian [in, in] or None) -> Quantized. The hessian is X^T X / rows of the layer's inputs X,
from calibrate.py; None where nothing is known of the inputs."""


def scales(groups: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """groups: [..., group] -> scale, minimum [...], as they are stored. The scale of a group of zeros is 0."""
    if not torch.isfinite(groups).all():
        raise ValueError("the weights hold numbers that are not finite")
    most, least = groups.amax(-1), groups.amin(-1)
    if grid.symmetric:
        # The level of the largest weight must exist: there is one more level below 0 than above.
        half = grid.levels // 2
        scale = stored(torch.maximum(most / (half - 1), -least / half), grid)
        minimum = -scale * half
    else:
        minimum = least.to(grid.dtype)
        scale = stored((most - minimum.to(most.dtype)) / (grid.levels - 1), grid)  # from where the levels begin
    if not (torch.isfinite(scale).all() and torch.isfinite(minimum).all()):
        raise ValueError(f"the weights are too large for scales in {grid.dtype}")
    return scale, minimum


def stored(scale: Tensor, grid: Grid) -> Tensor:
    """Scales rounded to grid.dtype, never negative: to the nearest number, or to the next one up if the nearest would
    leave the last level more than half a step below the last weight. That happens among the smallest numbers of
    float16 (2^-24, 2^-23, ...), which are far apart."""
    info = torch.finfo(grid.dtype)
    scale = scale.clamp(min=0)
    low = scale.to(grid.dtype).to(scale.dtype)
    short = (scale - low) * (grid.levels - 1) > low / 2
    return torch.where(short, low * (1 + info.eps) + info.tiny * info.eps, scale).to(grid.dtype)


def nearest(groups: Tensor, scale: Tensor, minimum: Tensor, levels: int) -> Tensor:
    """The number of the level nearest to each weight. groups: [..., group]; scale, minimum: [...] -> uint8"""
    scale, minimum = (x.to(groups.dtype)[..., None] for x in (scale, minimum))
    steps = torch.where(scale == 0, 0, (groups - minimum) / scale)
    return steps.round().clamp(0, levels - 1).to(torch.uint8)


def round_to_nearest(weight: Tensor, grid: Grid, hessian: Tensor | None = None) -> Quantized:
    """Each weight to its nearest level, whatever the inputs are. weight: [out, in]"""
    groups = weight.detach().float().unflatten(-1, (grid.groups(weight.shape[-1]), -1))
    scale, minimum = scales(groups, grid)
    return Quantized(nearest(groups, scale, minimum, grid.levels).flatten(-2), scale, minimum, grid.bits)
