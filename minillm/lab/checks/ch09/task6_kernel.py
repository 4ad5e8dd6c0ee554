"""Task 6: the Triton kernel that expands packed weights on the way into a product."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minillm.lab.check import seeded
from minillm.lab.checks.ch04.base import randn
from minillm.lab.checks.ch04.guarded import Guarded, launch
from minillm.lab.checks.ch09.base import CHAPTER, expect_values, packed, random_codes
from minillm.lab.checks.ch09.task3_linear import expand, grid

kernel = CHAPTER.task(
    "w4_kernel",
    hints=(
        "Program p has the rows p * ROWS + tl.arange(0, ROWS). For them walk over the bytes of a row, BLOCK at a time, "
        "and add up in a block of float32 zeros.",
        "Byte i meets two inputs, x[2 * i] and x[2 * i + 1]: load them by two loads. Multiply the low halves by the "
        "one and the high halves by the other.",
        "Both codes of a byte lie in the same group: number 2 * i // GROUP. So a tile of scales and one of minima have "
        "the shape of the tile of bytes.",
        "A byte of the row's end that does not exist: with code 0 its weight would still be the minimum. Its x must be "
        "0. Mask everything by what exists, with other=.",
    ),
    needs="triton",
)


def check_kernel(
    fn: Callable,
    n_out: int,
    n_in: int,
    group: int,
    rows: int,
    block: int,
    dtype: torch.dtype = torch.float32,
    size: float = 1,
    seed: int = 0,
) -> None:
    """One row of x, `rows` rows of weights a program, `block` bytes at a time."""
    groups = n_in // group
    codes, (scale, minimum) = random_codes(seeded(seed), n_out, n_in), grid(seeded(seed + 20), n_out, groups)
    values = (size * randn(seeded(seed + 40), n_in)).clamp(-60000, 60000).to(dtype)
    x = Guarded("x", (n_in,), dtype).filled(values)
    weights = Guarded("packed", (n_out, n_in // 2), torch.uint8).filled(packed(codes))
    scales = Guarded("scale", (n_out, groups), torch.float16).filled(scale)
    minima = Guarded("minimum", (n_out, groups), torch.float16).filled(minimum)
    y = Guarded("y", (n_out,))
    programs = -(-n_out // rows)
    label = f"{n_out} x {n_in} weights, GROUP={group}, ROWS={rows}, BLOCK={block}, x in {str(dtype)[6:]}"
    strides = weights.strides[0], scales.strides[0]
    try:
        launch(
            fn, programs, [x, weights, scales, minima], [y], n_out, n_in, *strides, GROUP=group, ROWS=rows, BLOCK=block
        )
    except AssertionError as error:
        raise AssertionError(f"{label}: {error}") from None
    want = expand(codes, scale, minimum) @ values.double()
    most = float(want.abs().max())
    error = float((y.data - want).abs().nan_to_num(torch.inf).max())
    coarse = "when products are taken in float16, which has three digits and ends at 65504"
    guess = {coarse: y.data} if error < 5e-3 * most or y.data.isinf().any() else {}
    expect_values(
        y.data, want, lambda: mistakes(values.double(), codes, scale, minimum, block) | guess, label, 1e-4, 1e-4 * most
    )


def mistakes(x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, block: int) -> dict[str, Tensor]:
    """What comes out of mistakes that people make."""
    n_in, groups = codes.shape[1], scale.shape[1]
    size, whole = n_in // groups, n_in // 2 // block * block * 2
    right = expand(codes, scale, minimum)
    none, padding = torch.zeros_like(minimum), -(-n_in // (2 * block)) * 2 * block - n_in
    swapped = codes.unflatten(1, (-1, 2)).flip(2).flatten(1)
    last = minimum[:, -1].double()
    return {
        "when the two halves of a byte change places": expand(swapped, scale, minimum) @ x,
        "when x is taken in halves, and not every other number": right
        @ torch.stack([x[: n_in // 2], x[n_in // 2 :]], 1).flatten(),
        "when the high halves are forgotten": right[:, 0::2] @ x[0::2],
        "when the low halves are forgotten": right[:, 1::2] @ x[1::2],
        "when both halves meet the same x": right @ x[0::2].repeat_interleave(2),
        "when the minimum is forgotten": expand(codes, scale, none) @ x,
        "when the minimum is added for one of the two halves only": right @ x
        - expand(0 * codes, scale, minimum)[:, 1::2] @ x[1::2],
        "when the minimum is subtracted": expand(codes, scale, -minimum) @ x,
        "when 8 is subtracted from the codes, as for a symmetric grid": expand(codes.int() - 8, scale, minimum) @ x,
        "when the codes are one too high": expand(codes.int() + 1, scale, minimum) @ x,
        "when the group of byte i is i // GROUP, and not 2 * i // GROUP": expand(
            codes, scale, minimum, lambda k: k // 2 // size
        )
        @ x,
        "when the first group's scale serves all": expand(codes, scale, minimum, lambda k: 0) @ x,
        "when each block of bytes takes the scale of its first group": expand(
            codes, scale, minimum, lambda k: k // (2 * block) * 2 * block // size
        )
        @ x,
        "when the bytes behind the last full block are lost": right[:, :whole] @ x[:whole],
        "when only the first block of bytes is added up": right[:, : 2 * block] @ x[: 2 * block],
        "when only the last block of bytes is kept, and not added to the sum": right[
            :, -(n_in % (2 * block) or 2 * block) :
        ]
        @ x[-(n_in % (2 * block) or 2 * block) :],
        "when hidden inputs count as ones, with the last group's minimum": right @ x + padding * last,
        "when the high half is not shifted down, and counts 16 times": expand(
            codes * torch.tensor([1, 16]).repeat(n_in // 2), scale, minimum
        )
        @ x,
    }


@kernel
def one_tile(fn):
    """one program, one block of bytes, one group"""
    check_kernel(fn, 4, 16, 16, rows=4, block=8)


@kernel
def several_groups(fn):
    """several groups in a block of bytes, and several blocks in a group"""
    check_kernel(fn, 4, 32, 8, rows=4, block=16, seed=1)
    check_kernel(fn, 4, 32, 16, rows=4, block=4, seed=2)
    check_kernel(fn, 4, 12, 2, rows=4, block=2, seed=3)


@kernel
def any_rows(fn):
    """several programs, and a number of outputs that is no multiple of ROWS"""
    check_kernel(fn, 8, 16, 8, rows=2, block=8, seed=4)
    check_kernel(fn, 7, 16, 8, rows=4, block=4, seed=5)
    check_kernel(fn, 1, 8, 4, rows=4, block=2, seed=6)


@kernel
def any_width(fn):
    """rows of weights that are no multiple of a block of bytes"""
    check_kernel(fn, 3, 12, 6, rows=2, block=4, seed=7)
    check_kernel(fn, 2, 20, 20, rows=2, block=8, seed=8)
    check_kernel(fn, 5, 6, 2, rows=4, block=8, seed=9)


@kernel
def half_precision(fn):
    """x in float16: the products and the sum are taken in float32"""
    check_kernel(fn, 3, 24, 8, rows=4, block=8, dtype=torch.float16, seed=10)
    check_kernel(fn, 3, 24, 8, rows=4, block=8, dtype=torch.float16, size=30000, seed=11)
