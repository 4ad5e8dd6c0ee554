"""GPTQ: round one column after the other, and let the columns to come make up for each error.

After column j is rounded, its error e is known. The columns that are not rounded yet can move, and the move that makes
the error of the layer's outputs least has a closed form in the inverse of the Hessian H = X^T X: with U the upper
triangular matrix for which U^T U = H^-1, subtract (e / U_jj) U_j,k from each column k behind j.

Frantar et al., "GPTQ: Accurate Post-Training Quantization" (2023), section 3, without its blocks of columns, which
change the speed and not the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.quantize import Grid, Quantized, nearest, scales

DAMPING = 0.01  # of the mean of the Hessian's diagonal, added to it: rare inputs make it nearly singular


def gptq(weight: Tensor, grid: Grid, hessian: Tensor | None) -> Quantized:
    """weight: [out, in]; hessian: [in, in]"""
    if hessian is None:
        raise ValueError("GPTQ needs to know the layer's inputs: give calibration text")
    left = weight.detach().float().clone()  # columns from j on: what is still to be rounded, moved by the errors so far
    n_in = left.shape[1]
    size = n_in // grid.groups(n_in)
    feed = inverse_factor(hessian)
    codes = torch.empty_like(left, dtype=torch.uint8)
    scale, minimum = [], []
    for j in range(n_in):
        if j % size == 0:  # a new group: its scale is chosen for the weights as they have become
            found = scales(left[:, j : j + size], grid)
            scale.append(found[0])
            minimum.append(found[1])
        codes[:, j] = nearest(left[:, j : j + 1], scale[-1], minimum[-1], grid.levels)[:, 0]
        rounded = codes[:, j].float() * scale[-1].float() + minimum[-1].float()
        error = (left[:, j] - rounded) / feed[j, j]
        left[:, j:] -= torch.outer(error, feed[j, j:])
    return Quantized(codes, torch.stack(scale, -1), torch.stack(minimum, -1), grid.bits)


def inverse_factor(hessian: Tensor) -> Tensor:
    """U, upper triangular, with U^T U the inverse of the damped Hessian. Inputs that are always 0 are left alone."""
    damped = hessian.double()
    mean = damped.diagonal().mean().clamp(min=1e-12)
    damped = damped + torch.eye(len(damped), dtype=damped.dtype, device=damped.device) * DAMPING * mean
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True).float()
