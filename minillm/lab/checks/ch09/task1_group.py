"""Task 1: a group of weights on its grid, with a scale and a minimum as they are stored."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minillm.lab.check import seeded
from minillm.lab.checks.ch04.base import randn
from minillm.lab.checks.ch09.base import CHAPTER, expect_pair, expect_tensor

group = CHAPTER.task(
    "quantize_group",
    hints=(
        "The codes run from 0 to 2^bits - 1. Which weight gets code 0, and which the greatest? How many steps lie "
        "between these two?",
        "Turn scale and minimum to float16 first, and choose the codes with these two, in float32: the code is the "
        "number of steps from the minimum, rounded to the nearest whole number.",
        "Rounding to float16 moves the ends of the grid. So a code can come out below 0 or above the greatest: clamp "
        "it before it becomes a uint8. And a scale of 0 must not be divided by.",
    ),
)
STEP = 2.0**-24  # the least float16 above 0


def check_group(fn: Callable, weights: Tensor, bits: int, label: str) -> None:
    label = f"{label}, {bits} bits"
    given = weights.clone()
    got = fn(weights, bits)
    expect_pair(got, ("codes", "scale", "minimum"), label)
    codes, scale, minimum = got
    assert torch.equal(weights, given), f"{label}: the weights that were given were changed"
    expect_tensor(scale, [], torch.float16, f"{label}, scale")
    expect_tensor(minimum, [], torch.float16, f"{label}, minimum")
    expect_tensor(codes, [len(weights)], torch.uint8, f"{label}, codes")
    weights = weights.double()
    expect_stored(minimum, [float(weights.min())], minima(weights), f"{label}, minimum")
    top, most = 2**bits - 1, float(weights.max())
    ends = [most - float(weights.min()), max(most - float(minimum), 0)]  # or from where the levels begin
    expect_stored(scale, [end / top for end in ends], steps(weights, bits), f"{label}, scale")
    expect_nearest(codes, weights, float(scale), float(minimum), bits, f"{label}, codes")


def expect_stored(got: Tensor, wanted: list[float], mistakes: dict[str, float], label: str) -> None:
    """One of these numbers in float16, up to its last digit."""

    def same(value: float) -> bool:
        return float(got) == value or abs(float(got) - value) <= min(2.0**-10 * abs(value), 64) + STEP

    if any(map(same, wanted)):
        return
    made = [what for what, value in mistakes.items() if same(value)]
    reason = f"; yours is what comes out {', or '.join(made)}" if made else ""
    raise AssertionError(f"{label}: yours {float(got):.6g}, expected {wanted[0]:.6g}{reason}")


def minima(weights: Tensor) -> dict[str, float]:
    least, most = float(weights.min()), float(weights.max())
    return {
        "when the grid begins at 0": 0.0,
        "when the minimum is kept with the other sign": -least,
        "when it is the greatest weight": most,
        "when the grid is symmetric around 0": -max(most, -least),
    }


def steps(weights: Tensor, bits: int) -> dict[str, float]:
    least, most = float(weights.min()), float(weights.max())
    top = 2**bits - 1
    return {
        "when the range is divided by 2^bits levels, and not by the 2^bits - 1 steps between them": (most - least)
        / (top + 1),
        "when the range reaches from 0 to the greatest weight": most / top,
        "when the range reaches from 0 to the largest size": max(most, -least) / top,
        "when the range is divided by one step too few": (most - least) / (top - 1),
        "when the grid is symmetric around 0": 2 * max(most, -least) / top,
        "when the range is not divided": most - least,
        "when the range is computed in float16, which holds nothing above 65504": float("inf"),
    }


def expect_nearest(codes: Tensor, weights: Tensor, scale: float, minimum: float, bits: int, label: str) -> None:
    """Each weight has the level next to it, of those that the stored scale and minimum give."""
    top = 2**bits - 1
    if scale == 0:
        wrong = codes.nonzero().flatten().tolist()
        assert not wrong, (
            f"{label}: the scale is 0, so code 0 is expected; yours at index {wrong[0]} is {codes[wrong[0]]}"
        )
        return
    levels = minimum + scale * torch.arange(top + 1).double()
    distances = (weights[:, None] - levels).abs()
    above = (codes > top).nonzero().flatten().tolist()
    chosen = distances.gather(1, codes.long().clamp(max=top)[:, None])[:, 0]
    far = (chosen > distances.amin(1) + 1e-3 * scale).nonzero().flatten().tolist()
    wrong = sorted({*above, *far})
    if not wrong:
        return
    i = wrong[0]
    made = [what for what, value in wrong_codes(weights, scale, minimum, bits).items() if torch.equal(value, codes)]
    reason = f"; yours is what comes out {', or '.join(made)}" if made else ""
    if above and not made:
        reason = f"; the codes of {bits} bits end at {top}: clamp them"
    raise AssertionError(
        f"{label}: index {i}, the weight {float(weights[i]):.6g}: yours {codes[i]}, "
        f"expected {int(distances[i].argmin())} (scale {scale:.6g}, minimum {minimum:.6g}){reason}"
    )


def wrong_codes(weights: Tensor, scale: float, minimum: float, bits: int) -> dict[str, Tensor]:
    """What comes out of mistakes that people make. Numbers that a uint8 cannot hold go round, as they mostly do."""
    top = 2**bits - 1
    place = (weights - minimum) / scale
    exact = float(weights.max() - weights.min()) / top
    unstored = (weights - float(weights.min())) / (exact or 1)

    def stored(codes: Tensor) -> Tensor:
        return (codes.long() % 256).to(torch.uint8)

    return {
        "when it is rounded down, and not to the nearest": stored(place.floor().clamp(0, top)),
        "when it is rounded up, and not to the nearest": stored(place.ceil().clamp(0, top)),
        "when nothing is clamped, and a uint8 goes round": stored(place.round()),
        "when codes below 0 are not clamped, and a uint8 goes round": stored(place.round().clamp(max=top)),
        "when codes above the greatest are not clamped": stored(place.round().clamp(min=0)),
        "when it is clamped to 2^bits, one code too many": stored(place.round().clamp(0, top + 1)),
        "when it is clamped one code too low": stored(place.round().clamp(0, top - 1)),
        "when the minimum is not subtracted": stored((weights / scale).round().clamp(0, top)),
        "when the minimum is added, and not subtracted": stored(((weights + minimum) / scale).round().clamp(0, top)),
        "when the codes are one too high": stored((place.round() + 1).clamp(0, top)),
        "when the codes are one too low": stored((place.round() - 1).clamp(0, top)),
        "when the codes are chosen for the scale and minimum before they became float16": stored(
            unstored.round().clamp(0, top)
        ),
        "when the codes count from the greatest weight downwards": stored(top - place.round().clamp(0, top)),
    }


@group
def the_example(fn):
    """the example of the text"""
    check_group(fn, torch.tensor([-1.0, 0.5, 2.0, 0.1]), 2, "[-1, 0.5, 2, 0.1]")


@group
def between_levels(fn):
    """each weight gets the nearest level, whether it lies above or below"""
    places = torch.tensor([0.0, 0.3, 1.7, 4.4, 6.6, 9.2, 12.8, 14.4, 15.0])
    check_group(fn, 0.25 * places - 1.5, 4, "weights between the levels")
    check_group(fn, 0.25 * places + 3, 4, "weights above 0 alone")
    check_group(fn, -0.5 * places - 2, 4, "weights below 0 alone")


@group
def random_weights(fn):
    """random weights, few bits and many"""
    for i, bits in enumerate((2, 3, 4, 8)):
        check_group(fn, 0.1 * randn(seeded(i), 64), bits, "64 random weights")
    check_group(fn, 0.1 * randn(seeded(9), 7), 4, "a group of 7")


@group
def half_precision(fn):
    """weights given in float16, and a range that float16 cannot hold"""
    check_group(fn, torch.tensor([-60000.0, 60000.0, 100.0, -31000.0], dtype=torch.float16), 4, "huge weights")
    check_group(fn, randn(seeded(20), 32).half(), 4, "weights in float16")


@group
def far_from_zero(fn):
    """weights far from 0 and close together: the stored minimum is not the least weight, and codes are clamped"""
    check_group(fn, torch.tensor([100.03, 100.04, 100.05, 100.06]), 4, "weights above the stored minimum")
    check_group(fn, torch.tensor([100.02, 100.025, 100.03, 100.04]), 4, "weights near 100")
    check_group(fn, torch.tensor([-100.03, -100.04, -100.05, -100.2]), 4, "weights near -100")
    check_group(fn, torch.tensor([1000.4, 1000.5, 1000.6, 1003.0]), 3, "weights near 1000")


@group
def constant(fn):
    """equal weights: scale 0, codes 0, and nothing is divided by 0"""
    for value in (0.0, 0.5, -3.0, 0.1):
        check_group(fn, torch.full((6,), value), 4, f"six times {value}")
    check_group(fn, torch.tensor([0.7]), 4, "a group of one weight")


@group
def tiny(fn):
    """tiny weights, whose scale float16 rounds far or to 0"""
    check_group(fn, STEP * torch.tensor([0.0, 5.0, 21.0, 12.0, 7.0]), 4, "weights of a few times 2^-24")
    check_group(fn, 1e-9 * torch.tensor([0.0, 5.0, 21.0, 12.0, 7.0]), 4, "weights of 1e-9, whose scale is stored as 0")
