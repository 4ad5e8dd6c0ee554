"""Claims about number formats: what few bits save once their scales are counted, and what FP8's grids are good for.

A code is not all that is stored: each group of numbers brings a scale, and often a minimum. And a grid is not good or
bad by itself: an even grid (INT8) spends its levels evenly up to the largest number, a floating one (FP8) keeps a
fixed share of each number. Which of them errs less depends on the numbers.

Micikevicius et al., "FP8 Formats for Deep Learning" (2022); Liu et al., "KIVI" (2024), for the residual window.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from minillm.config import ModelConfig
from minillm.lab.catalogue import MODELS
from minillm.lab.claims.decide import close, decide
from minillm.lab.claims.ledger import ALGORITHM, Figures, Finding, Ledger
from minillm.lab.claims.workbench import Workbench
from minillm.quantize import Grid, round_to_nearest

WIDTH = 4096  # numbers in a row of a matrix
FP8 = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
OUTLIERS, TIMES = 4, 20.0  # numbers of a row of WIDTH, and how many times as large as the others
ledger = Ledger()


@ledger.claim("A8", sources="T1", text="W4 saves about 75 % of the weights' memory", notebook="09_w4a16")
def saved_by_four_bits() -> Finding:
    stated, tolerance = 0.75, 0.05

    def whole(config: ModelConfig) -> float:
        """Embedding and head stay in 16 bits."""
        outside = config.head_parameters * (1 if config.tied_embeddings else 2)
        bits = config.layer_parameters * Grid(4, 64).bits_a_weight(WIDTH) + outside * 16
        return 1 - bits / (16 * (config.layer_parameters + outside))

    matrices = {group: 1 - Grid(4, group).bits_a_weight(WIDTH) / 16 for group in (128, 64, 32)}
    models = {name: whole(MODELS[name]) for name in ("Llama-2-70B", "Llama-3.1-8B", "SmolLM2-135M")}
    large = [str(group) for group, saved in matrices.items() if close(saved, stated, tolerance)]
    cases = [close(saved, stated, tolerance) for saved in (*matrices.values(), *models.values())]
    return Finding(
        100 * matrices[128],
        "% of the matrices' bytes, in groups of 128 with a 16-bit scale and minimum each",
        decide(close(matrices[128], stated, tolerance), always=all(cases)),
        f"75 % are the bare codes. The condition: of the matrices alone, in groups of {' or '.join(large)}; in groups "
        f"of 64 it is {matrices[64]:.1%}, of 32 {matrices[32]:.1%}. Embedding and head usually stay in 16 bits: of "
        "the whole model, in groups of 64, it is "
        f"{', '.join(f'{saved:.0%} for {name}' for name, saved in models.items())}.",
    )


@ledger.claim(
    "A10", sources="T4", text="2-bit keys and values turn a cache of 128 GB into one of 16 GB", notebook="10_evidence"
)
def cache_in_two_bits() -> Finding:
    before, stated = 128, 16
    group, residual, length, head = 32, 128, 4096, MODELS["Llama-2-7B"].head_dim

    def after(bits: float) -> float:
        return before * bits / 16

    bare, scales, zeros = 2, Grid(2, group, symmetric=True).bits_a_weight(head), Grid(2, group).bits_a_weight(head)
    windowed = (residual * 16 + (length - residual) * zeros) / length
    return Finding(
        after(zeros),
        "GB instead of 128, with a 16-bit scale and zero point for each 32 numbers",
        decide(close(after(bare), stated), always=close(after(zeros), stated)),
        f"{after(bare):.0f} GB are the bare codes; the condition is groups so large that their scales do not count. "
        f"With a scale for each {group} numbers it is {after(scales):.0f}, with zero points as well "
        f"{after(zeros):.0f}, and with the last {residual} of {length:,} tokens kept in 16 bits {after(windowed):.0f}.",
    )


@ledger.claim("A11", sources="T3", text="From float32 to int8 a model becomes four times smaller", notebook="09_w4a16")
def eight_bits_of_thirty_two() -> Finding:
    stated = 4
    groups = {group: 32 / Grid(8, group, symmetric=True).bits_a_weight(WIDTH) for group in (None, 64, 32)}
    return Finding(
        groups[32],
        "times smaller with a 16-bit scale for each 32 weights",
        decide(close(groups[None], stated), always=all(close(times, stated) for times in groups.values())),
        f"With one scale a row of {WIDTH:,} it is {groups[None]:.2f} times, with one for each 64 {groups[64]:.2f}, "
        f"for each 32 (GGUF's Q8_0) {groups[32]:.2f}. And it is true only of what is quantized.",
    )


def finite_values(dtype: torch.dtype) -> Tensor:
    """All numbers that 8 bits can write in this format. -> [n], sorted"""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    return values[values.isfinite()].unique()


def through_float8(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """rows -> the nearest numbers of the format, each row scaled so that its largest number is the format's."""

    def rounded(rows: Tensor) -> Tensor:
        scale = rows.abs().amax(-1, keepdim=True) / torch.finfo(dtype).max
        return (rows / scale).to(dtype).to(rows.dtype) * scale

    return rounded


def through_int8(rows: Tensor) -> Tensor:
    """The package's own grid: 8 bits, symmetric, a scale a row."""
    return round_to_nearest(rows, Grid(8, None, symmetric=True, dtype=torch.float32)).dequantize()


def through_float16(rows: Tensor) -> Tensor:
    return rows.half().to(rows.dtype)


def signal_to_noise(rows: Tensor, rounded: Tensor) -> float:
    """In decibels: 20 more are a tenth of the error."""
    return float(10 * torch.log10(rows.square().mean() / (rows - rounded).square().mean()))


def formats_compared(bench: Workbench) -> Figures:
    rows = torch.randn(64 if bench.quick else 512, WIDTH, generator=torch.Generator().manual_seed(0))
    spiked = rows.clone()
    spiked[:, :OUTLIERS] *= TIMES
    ways = {name: through_float8(dtype) for name, dtype in FP8.items()} | {
        "INT8": through_int8,
        "FP16": through_float16,
    }
    noise = {
        kind: {name: signal_to_noise(data, way(data)) for name, way in ways.items()}
        for kind, data in (("gaussian", rows), ("outliers", spiked))
    }
    grids = {name: finite_values(dtype) for name, dtype in FP8.items()}
    return {
        "largest": {name: float(grid.max()) for name, grid in grids.items()},
        "smallest": {name: float(grid[grid > 0].min()) for name, grid in grids.items()},
        "values": {name: len(grid) for name, grid in grids.items()},
        "mantissa_bits": {
            name: round(-torch.tensor(torch.finfo(dtype).eps).log2().item()) for name, dtype in FP8.items()
        },
        "decibels": noise,
    }


@ledger.claim(
    "A13",
    sources="T4",
    text="FP8 comes as E4M3 (3 mantissa bits, up to 448) and E5M2 (2 mantissa bits, up to 57,344); it lies between "
    "INT8 and FP16",
    notebook="10_evidence",
    scope=ALGORITHM,
    measure=formats_compared,
)
def eight_bits_that_float(figures: Figures) -> Finding:
    right = figures["largest"] == {"E4M3": 448, "E5M2": 57344} and figures["mantissa_bits"] == {"E4M3": 3, "E5M2": 2}
    noise = figures["decibels"]
    between = {
        (kind, name): noise[kind]["INT8"] < noise[kind][name] < noise[kind]["FP16"] for kind in noise for name in FP8
    }
    gaussian, outliers = noise["gaussian"], noise["outliers"]
    return Finding(
        gaussian["E4M3"] - gaussian["INT8"],
        "dB of E4M3 over INT8 with a scale a row, on Gaussian rows",
        decide(right and any(between.values()), always=all(between.values())),
        f"The formats {'are as' if right else 'are not as'} stated, with {figures['values']['E4M3']} and "
        f"{figures['values']['E5M2']} finite values down to 2^{math.log2(figures['smallest']['E4M3']):.0f} and "
        f"2^{math.log2(figures['smallest']['E5M2']):.0f}, as many bytes as INT8. The condition: numbers with "
        f"outliers. On Gaussian rows INT8 has {gaussian['INT8']:.0f} dB of signal to noise, E4M3 "
        f"{gaussian['E4M3']:.0f}, E5M2 {gaussian['E5M2']:.0f}, FP16 {gaussian['FP16']:.0f}. With {OUTLIERS} numbers "
        f"of {WIDTH:,} made {TIMES:.0f} times as large, INT8 has {outliers['INT8']:.0f}, E4M3 {outliers['E4M3']:.0f}, "
        f"E5M2 {outliers['E5M2']:.0f}: an even grid is stretched by the outlier, a floating one is not.",
    )
