"""AWQ: weights that meet large inputs get a finer grid, by scaling their columns up before rounding.

Multiplying a column of W by s > 1, and its input by 1 / s, changes nothing; but after rounding, the column's error is
divided by s, while the group's step hardly grows as long as the column does not hold the group's extremes. How far to
go is a search over one number: s = (size of the inputs)^alpha, for alpha from 0 (nothing) to below 1.

Lin et al., "AWQ: Activation-aware Weight Quantization" (2024), section 3.2. There the factor goes into the layer
before; here it stays beside the matrix (`Quantized.channel`), which suits any model and costs one product a column.
There the size is the mean absolute input, and a second search clips the range of each group; here it is the root mean
square, which the Hessian has, and nothing is clipped.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from minillm.calibrate import known_inputs, output_error
from minillm.quantize import Grid, Quantized, round_to_nearest

STEPS = 20  # values of alpha that are tried
RAREST = 1e-6  # of the largest: no input counts as smaller, or an unused one would get a factor out of proportion


def awq(weight: Tensor, grid: Grid, hessian: Tensor | None) -> Quantized:
    """weight: [out, in]; hessian: [in, in]. The best of the scalings, by the error of the layer's outputs."""
    weight, hessian = known_inputs(weight, hessian, "AWQ")
    size = hessian.diagonal().clamp(min=torch.finfo(hessian.dtype).tiny).sqrt()  # root mean square of each input
    size = (size / size.max()).clamp(min=RAREST)
    plain = round_to_nearest(weight, grid)
    candidates = [plain, *(scaled(weight, grid, size ** (step / STEPS)) for step in range(1, STEPS))]
    return min(candidates, key=lambda q: output_error(weight, q.dequantize(), hessian))


def scaled(weight: Tensor, grid: Grid, factor: Tensor) -> Quantized:
    """Rounded after its columns were multiplied by `factor` [in], which `channel` undoes."""
    factor = factor / (factor.max() * factor.min()).sqrt()  # only the proportions count; stay near 1
    return replace(round_to_nearest(weight * factor, grid), channel=1 / factor)
