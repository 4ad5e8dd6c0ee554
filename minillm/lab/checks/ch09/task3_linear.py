"""Task 3: a linear layer whose weights stay packed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minillm.lab.check import seeded
from minillm.lab.checks.ch04.base import randn
from minillm.lab.checks.ch09.base import CHAPTER, expect_refusal, expect_tensor, expect_values, packed, random_codes

linear = CHAPTER.task(
    "quant_linear",
    hints=(
        "Go backwards, one step at a time: the bytes to codes, the codes to weights, and then the product.",
        "`packed & 15` is all the low halves, and `packed >> 4` all the high ones. Row by row they take turns: "
        "low, high, low, high.",
        "Weight k of a row belongs to group k // (n_in // groups). A scale serves all the neighbours in its group "
        "before the next one begins.",
        "A uint8 times a float16 is a float16, with three digits. Turn codes, scale and minimum into x's dtype before "
        "you multiply.",
    ),
)


def expand(codes: Tensor, scale: Tensor, minimum: Tensor, group_of: Callable[[int], int] | None = None) -> Tensor:
    """Weight by weight, in float64. -> [out, in]"""
    n_in, groups = codes.shape[1], scale.shape[1]
    group_of = group_of or (lambda k: k // (n_in // groups))
    places = [group_of(k) % groups for k in range(n_in)]
    return codes.double() * scale.double()[:, places] + minimum.double()[:, places]


def mistakes(x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
    """What comes out of mistakes that people make."""
    n_in, groups = codes.shape[1], scale.shape[1]
    size = n_in // groups
    none = torch.zeros_like(minimum)
    swapped = codes.unflatten(1, (-1, 2)).flip(2).flatten(1)
    halves = torch.cat([codes[:, 0::2], codes[:, 1::2]], 1)
    weights = {
        "when the two halves of a byte change places": expand(swapped, scale, minimum),
        "when all low halves come first, and then all high ones": expand(halves, scale, minimum),
        "when weight k takes the scale of group k % groups, and not that of the group it lies in": expand(
            codes, scale, minimum, lambda k: k % groups
        ),
        "when each group takes the scale of the group behind it": expand(
            codes, scale, minimum, lambda k: k // size + 1
        ),
        "when each group takes the scale of the group before it": expand(
            codes, scale, minimum, lambda k: k // size - 1
        ),
        "when the first group's scale serves all": expand(codes, scale, minimum, lambda k: 0),
        "when the minimum is forgotten": expand(codes, scale, none),
        "when the minimum is subtracted": expand(codes, scale, -minimum),
        "when the minimum is added before the product with the scale": expand(codes, scale, scale * minimum),
        "when the codes are one too high": expand(codes.int() + 1, scale, minimum),
        "when the codes are one too low": expand(codes.int() - 1, scale, minimum),
        "when 8 is subtracted from the codes, as for a symmetric grid": expand(codes.int() - 8, scale, minimum),
        "when the weights are computed in float16": (
            codes.unflatten(1, (groups, -1)).half() * scale[..., None] + minimum[..., None]
        ).flatten(1),
    }
    made = {what: x.double() @ weight.double().T + (0 if bias is None else bias) for what, weight in weights.items()}
    right = x.double() @ expand(codes, scale, minimum).T
    if bias is not None:
        made["when the bias is forgotten"] = right
        made["when the bias is subtracted"] = right - bias
    return made


def check_linear(fn: Callable, x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, label: str, bias=None) -> None:
    label = (
        f"{label}: {len(x)} row(s) of {codes.shape[1]} inputs, {len(codes)} outputs, {scale.shape[1]} group(s) a row"
    )
    given = [x, packed(codes), scale, minimum, bias]
    kept = [None if value is None else value.clone() for value in given]
    got = fn(*given)
    expect_tensor(got, [len(x), len(codes)], torch.float32, label)
    changed = [i for i, (a, b) in enumerate(zip(given, kept, strict=True)) if b is not None and not torch.equal(a, b)]
    names = ("x", "packed", "scale", "minimum", "bias")
    assert not changed, f"{label}: {names[changed[0]]} was changed"
    want = x.double() @ expand(codes, scale, minimum).T + (0 if bias is None else bias)
    size = float(want.abs().max())
    expect_values(got, want, lambda: mistakes(x, codes, scale, minimum, bias), label, rtol=1e-5, atol=1e-6 * size)


def grid(seed: int, n_out: int, groups: int) -> tuple[Tensor, Tensor]:
    """scale, minimum [out, groups] in float16, all of them different"""
    scale = 0.05 + 0.2 * randn(seed, n_out, groups).abs()
    return scale.half(), (-8 * scale + 0.3 * randn(seed + 1, n_out, groups)).half()


@linear
def the_weights_themselves(fn):
    """with the unit matrix as x, row k is weight k of each output: codes in order, one group"""
    codes = torch.stack([torch.arange(16), torch.arange(16).flip(0)]).to(torch.uint8)
    ones, nothing = torch.ones(2, 1, dtype=torch.float16), torch.zeros(2, 1, dtype=torch.float16)
    check_linear(fn, torch.eye(16), codes, ones, nothing, "scale 1, minimum 0")
    check_linear(fn, torch.eye(16), codes, 0.5 * ones, nothing - 3, "scale 0.5, minimum -3")


@linear
def groups_of_a_row(fn):
    """each group of a row has its own scale and minimum"""
    for i, (n_out, n_in, groups) in enumerate(((3, 8, 2), (5, 24, 4), (4, 6, 6), (2, 6, 2), (1, 2, 1))):
        codes, pair = random_codes(seeded(i), n_out, n_in), grid(seeded(10 + 2 * i), n_out, groups)
        check_linear(fn, torch.eye(n_in), codes, *pair, "the weights themselves")
        check_linear(fn, randn(seeded(30 + i), 3, n_in), codes, *pair, "random x")


@linear
def with_a_bias(fn):
    """the bias is added to each row; without one nothing is"""
    codes, pair = random_codes(seeded(40), 5, 12), grid(seeded(41), 5, 3)
    check_linear(fn, randn(seeded(43), 1, 12), codes, *pair, "a bias, one row", bias=randn(seeded(44), 5))
    check_linear(fn, randn(seeded(45), 5, 12), codes, *pair, "a bias", bias=randn(seeded(46), 5))


@linear
def a_group_of_equal_weights(fn):
    """a scale of 0: each weight of the group is the minimum"""
    codes, (scale, minimum) = random_codes(seeded(50), 3, 8), grid(seeded(51), 3, 2)
    scale[1] = 0
    scale[2], minimum[2] = 0, 0
    check_linear(fn, randn(seeded(53), 2, 8), codes, scale, minimum, "groups with the scale 0")


@linear
def in_float32(fn):
    """weights are computed in the dtype of x: float16 has too few digits, and ends at 65504"""
    codes = random_codes(seeded(60), 4, 8)
    scale, minimum = grid(seeded(61), 4, 2)
    check_linear(fn, randn(seeded(63), 2, 8), codes, scale, (minimum + 40).half(), "minima near 40")
    codes[:, 0] = 15
    check_linear(fn, randn(seeded(64), 2, 8), codes, 6000 * (1 + scale), minimum, "scales of 6000 and more")


@linear
def refused(fn):
    """groups that do not divide a row are refused"""
    for n_in, groups in ((8, 3), (10, 4), (2, 4)):
        codes, pair = random_codes(seeded(70), 2, n_in), grid(seeded(71), 2, groups)
        label = f"{groups} groups in a row of {n_in}"
        expect_refusal(lambda codes=codes, pair=pair, n=n_in: fn(torch.ones(1, n), packed(codes), *pair, None), label)
