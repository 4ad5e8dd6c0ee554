"""Pictures of weights on a grid: the levels and the errors, outliers and groups, nibbles, and what the methods gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, ScalarFormatter
from torch import Tensor

from minillm.lab.draw_grid import LINES, bare, legend
from minillm.lab.plots import BLUE, CYAN, GREEN, GREY, INK, LIGHT, PURPLE, RED, Picture, cell, picture, plain
from minillm.quantize import Grid, Quantized, round_to_nearest

BEFORE = {"color": BLUE, "marker": "o", "markersize": 6, "linestyle": "", "fillstyle": "none"}
AFTER = {"color": PURPLE, "marker": "s", "markersize": 3.5, "linestyle": ""}


def on_grid(weights: Tensor, grid: Grid) -> tuple[Quantized, Tensor]:
    """One row [n] -> what is stored of it, and the row as it is read back."""
    stored = round_to_nearest(weights[None], grid)
    return stored, stored.dequantize()[0]


def groups_text(n: int, grid: Grid) -> str:
    count = grid.groups(n)
    return "one group" if count == 1 else f"{count} groups of {n // count}"


def draw_group(weights: Tensor, grid: Grid) -> Picture:
    """A row's weights before and after, and the levels of each group. weights: [n]"""
    stored, after = on_grid(weights, grid)
    n, scale, minimum = len(weights), stored.scale[0].float(), stored.minimum[0].float()
    worst = float((after - weights).abs().max())
    size = n // len(scale)
    cost = grid.bits_a_weight(n)
    title = f"{grid.bits} bits, {groups_text(n, grid)}: off by {worst:.3f} at most, {cost:.2f} bits a weight"
    steps = ", ".join(f"{s:.3f}" for s in scale.tolist())
    alt = f"{n} weights and the {grid.levels} levels of each group as lines. {title}. Steps of the groups: {steps}."
    figure, axes = picture(9.5, 3.8, title, alt)
    for g in range(len(scale)):
        levels = (torch.arange(grid.levels) * scale[g] + minimum[g]).tolist()
        axes.hlines(levels, g * size - 0.5, (g + 1) * size - 0.5, color=LIGHT, linewidth=0.6 if grid.bits < 6 else 0.2)
    for g in range(1, len(scale)):
        axes.axvline(g * size - 0.5, color=GREY, linestyle=":", linewidth=1)
    axes.vlines(range(n), weights.tolist(), after.tolist(), color=RED, linewidth=1.5)
    axes.plot(range(n), weights.tolist(), label="weight", **BEFORE)
    axes.plot(range(n), after.tolist(), label="its level", **AFTER)
    axes.set(xlabel="column", ylabel="weight", xlim=(-0.7, n - 0.3))
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def draw_outlier(weights: Tensor, bits: int, group: int) -> Picture:
    """The errors of one row's weights, once with one scale for the row, once with a scale for each group."""
    whole, parts = Grid(bits, None), Grid(bits, group)
    at = int(weights.abs().argmax())
    errors, half_steps = {}, {}
    for name, grid in (("one scale for the row", whole), (f"a scale for each {group}", parts)):
        stored, after = on_grid(weights, grid)
        errors[name] = (after - weights).abs().tolist()
        half_steps[name] = (stored.scale[0].float() / 2).repeat_interleave(len(weights) // stored.scale.shape[1])
    coarse, fine = (steps for steps in half_steps.values())
    typical = float(coarse[0] / fine.median())
    title = f"The largest weight, in column {at}, makes the row's step {typical:.1f} times that of a typical group"
    rms = {name: (sum(e * e for e in line) / len(line)) ** 0.5 for name, line in errors.items()}
    said = "; ".join(f"{name}: root mean square error {value:.4f}" for name, value in rms.items())
    alt = f"Lines, the error of each of {len(weights)} weights, below a line at half a step. {said}. {title}."
    figure = Picture(9, 4, alt)
    figure.suptitle(title, fontsize=11, color=INK)
    panels = figure.subplots(3, 1, sharex=True, height_ratios=(1.2, 1, 1))
    columns = range(len(weights))
    panels[0].vlines(columns, 0, weights.tolist(), color=BLUE, linewidth=1)
    panels[0].plot(at, float(weights[at]), color=PURPLE, marker="o", linestyle="")
    panels[0].set_ylabel("weight")
    highest = 1.1 * float(coarse.max())
    for axes, (name, line) in zip(panels[1:], errors.items(), strict=True):
        axes.vlines(columns, 0, line, color=RED, linewidth=1)
        axes.step(columns, half_steps[name].tolist(), where="mid", color=INK, linewidth=1)
        axes.set(ylabel="error", ylim=(0, highest))
        axes.set_title(f"{name}: error {rms[name]:.4f} (root mean square); line: half a step", loc="left", fontsize=9)
    for axes in panels:
        plain(axes)
        axes.set_xlim(-0.5, len(weights) - 0.5)
    panels[-1].set_xlabel("column")
    return figure


def draw_errors(bits: Sequence[int], errors: Mapping[str, Sequence[float]]) -> Picture:
    """The relative error by bits, a line for each size of groups; errors of exactly 0 lie below the axis and are left
    out."""
    line = next(iter(errors.values()))
    factor = (line[0] / line[-1]) ** (1 / (bits[-1] - bits[0]))
    title = f"Each bit divides the error by about {factor:.1f}; smaller groups lower it at any number of bits"
    ends = "; ".join(f"{name}: {values[0]:.3f} to {values[-1]:.4f}" for name, values in errors.items())
    alt = f"Falling lines on a logarithmic axis, from {bits[0]} to {bits[-1]} bits. {ends}."
    figure, axes = picture(7.5, 3.2, title, alt)
    for (name, values), (color, form) in zip(errors.items(), LINES, strict=False):
        axes.plot(bits, [value if value else float("nan") for value in values], form, color=color, label=name)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel="bits", ylabel="error / size of the weights")
    axes.set_xticks(list(bits))
    axes.legend(frameon=False, fontsize=9)
    return figure


def draw_nibbles(codes: Sequence[int], packed: Sequence[int]) -> Picture:
    """Codes above, and the bytes that hold two of them each below, high half first as numbers are written."""
    if len(codes) != 2 * len(packed):
        raise ValueError(f"{len(codes)} codes and {len(packed)} bytes")
    title = f"{len(codes)} codes in {len(packed)} bytes: the even column in the low half, the odd one in the high half"
    alt = f"Boxes. {title}. Bytes: " + ", ".join(f"{byte:#04x}" for byte in packed) + "."
    figure, axes = picture(9.5, 2.6, title, alt)
    for i, code in enumerate(codes):
        cell(axes, i, 0, "cached" if i % 2 else "new", str(code), 0.94, 0.8)
    for i, byte in enumerate(packed):
        cell(axes, 2 * i, 1.8, "cached", f"{byte >> 4:04b}", 0.97, 0.8)
        cell(axes, 2 * i + 0.97, 1.8, "new", f"{byte & 15:04b}", 0.97, 0.8)
        axes.text(2 * i + 0.97, 2.75, f"{byte:#04x}", ha="center", va="top", fontsize=9, color=INK)
        for column in (0, 1):
            axes.plot([2 * i + column + 0.47, 2 * i + 1.45 - column], [0.83, 1.77], color=GREY, linewidth=0.8)
    for y, name in ((0.4, "codes"), (2.2, "bytes")):
        axes.text(-0.15, y, name, ha="right", va="center", fontsize=9, color=INK)
    bare(axes, len(codes) + 0.1, 3.2, left=-0.1 * len(codes), top=-0.2)
    legend(figure, {"new": "even columns: low half", "cached": "odd columns: high half"})
    return figure


def draw_feeding(before: Sequence[float], rounded: Sequence[float], moved: Sequence[float]) -> Picture:
    """GPTQ on one row: the columns that are rounded, and where the others have moved to make up for their errors."""
    if len(rounded) + len(moved) != len(before):
        raise ValueError(f"{len(before)} weights, {len(rounded)} rounded and {len(moved)} moved ones")
    done, n = len(rounded), len(before)
    shifts = [abs(a - b) for a, b in zip(moved, before[done:], strict=True)]
    most = max(shifts, default=0.0)
    title = f"{done} of {n} columns are rounded; the others have moved by up to {most:.3f} to make up for the errors"
    alt = f"Weights by column. {title}. " + (f"Moves: {', '.join(f'{s:.3f}' for s in shifts)}." if shifts else "")
    figure, axes = picture(9.5, 3.4, title, alt.strip())
    after = [*rounded, *moved]
    axes.vlines(range(done), before[:done], rounded, color=RED, linewidth=1.5, label="error")
    axes.vlines(range(done, n), before[done:], moved, color=GREEN, linewidth=1.5, label="moved")
    axes.plot(range(n), before, label="weight", **BEFORE)
    axes.plot(range(done), after[:done], label="rounded", **AFTER)
    axes.plot(range(done, n), after[done:], color=GREEN, marker="^", linestyle="", markersize=5, label="still to round")
    axes.axvline(done - 0.5, color=GREY, linestyle=":", linewidth=1)
    axes.set(xlabel="column", ylabel="weight", xlim=(-0.7, n - 0.3))
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return figure


def draw_search(alphas: Sequence[float], errors: Mapping[str, Sequence[float]]) -> Picture:
    """AWQ's search: the error by alpha, relative to no scaling, a line for each text. The first text decides."""
    line = next(iter(errors.values()))
    best = min(range(len(alphas)), key=line.__getitem__)
    title = f"alpha = {alphas[best]:.2f} leaves {line[best] / line[0]:.0%} of the error that rounding makes"
    ends = "; ".join(f"{text}: {values[best] / values[0]:.2f}" for text, values in errors.items())
    alt = f"Error by alpha, from {alphas[0]:g} to {alphas[-1]:.2f}. At the best alpha, {ends}."
    figure, axes = picture(8.5, 3.4, title, alt)
    for (text, values), (color, form) in zip(errors.items(), LINES, strict=False):
        axes.plot(alphas, [v / values[0] for v in values], form, color=color, label=text, markersize=4)
    axes.axvline(alphas[best], color=INK, linestyle=":", linewidth=1)
    axes.axhline(1, color=GREY, linewidth=0.8)
    axes.set(xlabel="alpha (0: plain rounding)", ylabel="error / that of rounding", ylim=(0, None))
    axes.legend(frameon=False, fontsize=9)
    return figure


def draw_methods(errors: Mapping[str, Mapping[str, float]]) -> Picture:
    """Bars for each method, relative to rounding on the same text. errors: text -> {method: error}, rounding first."""
    relative = {text: {m: e / next(iter(row.values())) for m, e in row.items()} for text, row in errors.items()}
    methods = list(next(iter(relative.values())))
    said = "; ".join(f"{text}: " + ", ".join(f"{m} {row[m]:.2f}" for m in methods) for text, row in relative.items())
    best = {text: min(row, key=row.get) for text, row in relative.items()}
    title = "Least error: " + ", ".join(f"{method} on {text}" for text, method in best.items())
    figure, axes = picture(8.5, 3.3, title, f"Bars, the error relative to {methods[0]}. {said}.")
    width = 0.8 / len(relative)
    looks = ((BLUE, ""), (CYAN, "\\\\"), (GREEN, "//"))
    for i, ((text, row), (color, hatch)) in enumerate(zip(relative.items(), looks, strict=False)):
        places = [m + (i - (len(relative) - 1) / 2) * width for m in range(len(methods))]
        heights = [row[m] for m in methods]
        bars = axes.bar(places, heights, 0.92 * width, color=color, hatch=hatch, edgecolor="white", label=text)
        axes.bar_label(bars, [f"{h:.2f}" for h in heights], padding=2, fontsize=9, color=INK)
    axes.axhline(1, color=INK, linestyle="--", linewidth=1)
    axes.set_xticks(range(len(methods)), methods)
    axes.tick_params(labelcolor=INK)
    axes.margins(y=0.12)
    axes.set_ylabel(f"error / that of {methods[0]}")
    figure.legend(loc="outside lower center", ncols=len(relative), frameon=False, fontsize=9)
    return figure


def draw_quality(points: Mapping[str, tuple[float, float, float]]) -> Picture:
    """What each setting costs in nats a token. points: name -> (bits a weight, difference, its standard error)"""
    least = min(points, key=lambda name: points[name][1])
    worst = max(points, key=lambda name: points[name][1])
    title = f"From {points[least][1]:+.3f} nats a token ({least}) to {points[worst][1]:+.3f} ({worst})"
    said = "; ".join(f"{n}: {b:.2f} bits, {d:+.3f} nats, standard error {e:.3f}" for n, (b, d, e) in points.items())
    figure, axes = picture(8.5, 1.4 + 0.3 * len(points), title, f"Marks with bars of two standard errors. {said}.")
    for y, (_, difference, error) in enumerate(points.values()):
        axes.errorbar(difference, y, xerr=2 * error, fmt="o", color=PURPLE, ecolor=GREY, capsize=3)
    axes.set_yticks(range(len(points)), [f"{name} ({bits:.2f} bits)" for name, (bits, *_) in points.items()])
    axes.invert_yaxis()
    axes.margins(y=0.12)
    axes.axvline(0, color=INK, linestyle="--", linewidth=1)
    axes.set_xscale("symlog", linthresh=0.1)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel("nats a token more than before (bars: two standard errors; logarithmic beyond 0.1)")
    axes.tick_params(labelcolor=INK)
    return figure


def draw_layers(damage: Mapping[int, float], n_layers: int) -> Picture:
    """Bars, the KL divergence when one block alone is quantized. damage: block -> KL in nats"""
    order = sorted(damage, key=damage.get, reverse=True)
    title = f"Most sensitive: block {order[0]}, then {order[1]}; least: block {order[-1]}"
    said = ", ".join(f"{block}: {value:.4f}" for block, value in damage.items())
    alt = f"Bars by block, {len(damage)} of {n_layers} blocks. KL in nats, {said}."
    figure, axes = picture(9.5, 3.2, title, alt)
    ends = (0, n_layers - 1)
    for block, value in damage.items():
        end = block in ends
        axes.bar(block, value, 0.8, color=PURPLE if end else BLUE, hatch="//" if end else "", edgecolor="white")
    axes.set(xlabel="block (hatched: the first and the last)", ylabel="KL, nats a token", xlim=(-0.8, n_layers - 0.2))
    axes.set_xticks(sorted(damage))
    axes.tick_params(axis="x", labelsize=8)
    return figure


def draw_batches(rows: Sequence[int], speedups: Mapping[str, Sequence[float]], title: str | None = None) -> Picture:
    """Times as fast as 16-bit (or 32-bit) weights, by the rows of a product or a step."""
    said = "; ".join(f"{name}: {v[0]:.2f} at {rows[0]}, {v[-1]:.2f} at {rows[-1]}" for name, v in speedups.items())
    first, line = next(iter(speedups.items()))
    title = title or f"{first}: {line[0]:.1f} times as fast at {rows[0]} row, {line[-1]:.1f} times at {rows[-1]}"
    figure, axes = picture(7.5, 3.2, title, f"Speed-up by rows, logarithmic axis. {said}.")
    for (name, values), (color, form) in zip(speedups.items(), LINES, strict=False):
        axes.plot(rows, values, form, color=color, label=name, markersize=4)
    mark_one(axes)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(rows), [f"{n:,}" for n in rows])
    axes.minorticks_off()
    axes.set(xlabel="rows (texts in the batch)", ylabel="times as fast", ylim=(0, None))
    axes.legend(frameon=False, fontsize=9)
    return figure


def mark_one(axes: Axes) -> None:
    axes.axhline(1, color=INK, linestyle="--", linewidth=1)


def draw_samples(rows: Sequence[int], errors: Mapping[str, Sequence[float]], columns: int) -> Picture:
    """The error on unseen texts relative to rounding, by the tokens of the calibration text. columns: inputs of the
    layer."""
    ends = "; ".join(f"{name}: {values[0]:.2f} to {values[-1]:.2f}" for name, values in errors.items())
    worse = [name for name, values in errors.items() if values[0] > 1]
    title = f"After {rows[0]} tokens, worse than rounding: {'; '.join(worse) or 'none'}"
    still = [name for name, values in errors.items() if values[-1] > 1]
    title += f". After {rows[-1]:,}: {'; '.join(still) or 'none'}"
    figure, axes = picture(8, 3.2, title, f"Error relative to rounding, from {rows[0]} to {rows[-1]} tokens. {ends}.")
    for (name, values), (color, form) in zip(errors.items(), LINES, strict=False):
        axes.plot(rows, values, form, color=color, label=name, markersize=4)
    mark_one(axes)
    axes.axvline(columns, color=GREY, linestyle=":", linewidth=1, label=f"as many tokens as inputs: {columns}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(rows), [f"{n:,}" for n in rows])
    axes.minorticks_off()
    axes.set(xlabel="tokens of the calibration text", ylabel="error / that of rounding", ylim=(0, None))
    axes.legend(frameon=False, fontsize=9)
    return figure


def draw_weight_grid(n_out: int, n_in: int, block: int, n_splits: int, size: int, shown: int = 4) -> Picture:
    """The programs of the skinny kernel over W [n_out, n_in]: `block` rows of W each, and `size` columns of a split.

    shown: blocks of rows that are drawn, from the top; the others are told.
    """
    n_blocks = -(-n_out // block)
    if not (n_splits - 1) * size < n_in <= n_splits * size:
        raise ValueError(f"{n_splits} splits of {size} columns do not make {n_in}")
    drawn = min(shown, n_blocks)
    title = f"{n_blocks * n_splits} programs: {n_blocks} blocks of {block} rows of W, {n_splits} splits"
    title += f" of up to {size} columns"
    alt = f"W as boxes, one a program, {drawn} of {n_blocks} blocks of rows drawn. {title}."
    figure, axes = picture(9.5, 1.5 + 0.36 * drawn, title, alt)
    for i in range(drawn):
        for split in range(n_splits):
            width = min(size, n_in - split * size)
            cell(axes, split * size, i, "cached" if i or split else "new", f"{i}, {split}", width, 0.94)
    axes.set(xlim=(0, n_in), ylim=(drawn, 0), xticks=[*range(0, n_in, size), n_in], xlabel="columns of W, as of x")
    rows = [f"rows {i * block} to {min(n_out, (i + 1) * block) - 1}" for i in range(drawn)]
    axes.set_yticks([i + 0.47 for i in range(drawn)], rows)
    axes.tick_params(length=0, labelcolor=INK, labelsize=8)
    more = f", and so on to row {n_out - 1}" if drawn < n_blocks else ""
    legend(figure, {"new": "program 0, split 0", "cached": f"the others (block of rows, split){more}"})
    return figure
