"""GPTQ: round one column after the other, and let the columns to come make up for each error.

After column j is rounded, its error e is known. The columns that are not rounded yet can move, and the move that makes
the error of the layer's outputs least has a closed form in the inverse of the Hessian H = X^T X: with U the upper
triangular matrix for which U^T U = H^-1, subtract (e / U_jj) U_j,k from each column k behind j.

Columns far behind can wait: the errors e / U_jj are kept, and a block of columns is moved by all earlier errors in one
product, when its turn comes. That changes the speed, and not the result.

Frantar et al., "GPTQ: Accurate Post-Training Quantization" (2023), section 3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minillm.calibrate import known_inputs
from minillm.quantize import Grid, Quantized, nearest, scales

DAMPING = 0.01  # of the mean of the Hessian's diagonal, added to it: rare inputs make it nearly singular
BLOCK = 64  # columns


def gptq(weight: Tensor, grid: Grid, hessian: Tensor | None) -> Quantized:
    """weight: [out, in]; hessian: [in, in]"""
    weight, hessian = known_inputs(weight, hessian, "GPTQ")
    n_in = weight.shape[1]
    size = n_in // grid.groups(n_in)
    block = math.gcd(size, BLOCK)
    feed = inverse_factor(hessian)
    errors = torch.zeros_like(weight)
    codes = torch.empty_like(weight, dtype=torch.uint8)
    found: list[tuple[Tensor, Tensor]] = []

    def moved(start: int, end: int) -> Tensor:
        """These columns, after the errors of all columns before them."""
        return weight[:, start:end] - errors[:, :start] @ feed[:start, start:end]

    for start in range(0, n_in, block):
        end = start + block
        if start % size == 0:  # a new group: its scale is chosen for the weights as they have become
            found.append(scales(moved(start, start + size), grid))
        scale, minimum = found[-1]
        left = moved(start, end)
        for j in range(start, end):
            column = left[:, j - start]
            codes[:, j] = nearest(column[:, None], scale, minimum, grid.levels)[:, 0]
            rounded = codes[:, j].float() * scale.float() + minimum.float()
            errors[:, j] = (column - rounded) / feed[j, j]
            left[:, j - start :] -= torch.outer(errors[:, j], feed[j, j:end])
    scale, minimum = (torch.stack(parts, -1) for parts in zip(*found, strict=True))
    return Quantized(codes, scale, minimum, grid.bits)


def inverse_factor(hessian: Tensor) -> Tensor:
    """U, upper triangular, with U^T U the inverse of the damped Hessian. Inputs that are always 0 are left alone."""
    damped = hessian.double()
    mean = damped.diagonal().mean().clamp(min=1e-12)
    damped = damped + torch.eye(len(damped), dtype=damped.dtype, device=damped.device) * DAMPING * mean
    root, failed = torch.linalg.cholesky_ex(damped)
    if failed:
        raise ValueError("the Hessian is not X^T X of any inputs: it is not positive")
    inverse = torch.cholesky_inverse(root)
    return torch.linalg.cholesky(inverse, upper=True).float()
