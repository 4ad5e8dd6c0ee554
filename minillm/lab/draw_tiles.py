"""Pictures of attention in tiles: the walk over the causal grid, and what it does to errors, memory, bytes and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator
from torch import Tensor

from minillm.attention import OnlineSoftmax, causal_mask, past_of
from minillm.lab.plots import (
    BLUE,
    GREEN,
    GREY,
    INK,
    KINDS,
    LIGHT,
    PURPLE,
    RED,
    WHITE,
    Kind,
    Picture,
    edge,
    picture,
    plain,
)

LOOKS = {
    "done": Kind("done and forgotten", LIGHT),
    "now": Kind(KINDS["new"].label, PURPLE, KINDS["new"].hatch),
    "ahead": Kind("still to come", WHITE),
    "never": Kind("never computed: the future of all its rows", WHITE, "xxx"),
}
# How a way to compute attention looks in all figures: colour, marker, line. Others are dashed, to compare with.
STYLES = {
    "materialised": (RED, "o", "-"),
    "in tiles": (BLUE, "s", "-"),
    "fused": (GREEN, "^", "-"),
    "added": (RED, "o", "-"),
    "crossed": (PURPLE, "D", "-"),
    "averaged": (GREY, "v", "-"),
    "online": (BLUE, "s", "-"),
}
DECADES = 3  # up to so many, the vertical axis names 2 and 5 as well


@dataclass(frozen=True)
class Tile:
    """Queries `first` to `last` meet keys `start` to `end`, the ends not included."""

    first: int
    last: int
    start: int
    end: int
    masked: bool  # some of its rows may not see some of its keys


def tile_walk(n_queries: int, n_keys: int, rows: int, columns: int) -> list[Tile]:
    """The tiles that are computed, in order: for each tile of queries the keys up to its last row's own."""
    if rows < 1 or columns < 1 or n_queries < 1:
        raise ValueError(f"{n_queries} queries in tiles of {rows} x {columns}: at least one of each is needed")
    past = past_of(n_queries, n_keys)
    walk = []
    for first in range(0, n_queries, rows):
        last = min(first + rows, n_queries)
        for start in range(0, past + last, columns):
            end = min(start + columns, past + last)
            walk.append(Tile(first, last, start, end, masked=end > past + first + 1))
    return walk


def draw_tile_walk(scores: Tensor, rows: int, columns: int, step: int) -> Picture:
    """The grid of queries and keys while tile `step` is worked on; beside it, each row's running maximum and sum.

    scores: [T, S] of one head, the T last rows of S tokens.
    """
    n_queries, n_keys = scores.shape
    walk = tile_walk(n_queries, n_keys, rows, columns)
    if not 0 <= step < len(walk):
        raise ValueError(f"step must be from 0 to {len(walk) - 1}, not {step}")
    seen, now = causal_mask(n_queries, n_keys), walk[step]
    grid = -(-n_queries // rows) * -(-n_keys // columns)
    never, what = grid - len(walk), "on the diagonal, partly masked" if now.masked else "seen by all its rows"
    top, total = running(scores.masked_fill(~seen, -torch.inf), walk[: step + 1])
    title = (
        f"Tile {step + 1} of {len(walk)}: queries {now.first} to {now.last - 1} meet keys {now.start} to "
        f"{now.end - 1}, {what}; {never} of {grid} tiles are never computed"
    )
    sums = ", ".join(f"{i}: {top[i]:.2f} and {total[i]:.2f}" for i in range(now.first, now.last))
    alt = (
        f"A grid of {n_queries} queries and {n_keys} keys in tiles of {rows} x {columns}. {step} tiles are done, "
        f"{len(walk) - step - 1} to come. {title}. Running maximum and sum of its rows: {sums}."
    )
    figure = Picture(10, 1.7 + 0.27 * n_queries, alt)
    main, tops, totals = figure.subplots(1, 3, sharey=True, width_ratios=[n_keys, 4, 4])
    for first in range(0, n_queries, rows):
        for start in range(0, n_keys, columns):
            place = next((i for i, t in enumerate(walk) if (t.first, t.start) == (first, start)), None)
            kind = "never" if place is None else "done" if place < step else "now" if place == step else "ahead"
            # A tile that the walk cuts short at its last row's own key is drawn as short as it is.
            end = min(start + columns, n_keys) if place is None else walk[place].end
            height = min(first + rows, n_queries) - first
            box(main, start, first, end - start, height, LOOKS[kind])
            if end < min(start + columns, n_keys):
                box(main, end, first, min(start + columns, n_keys) - end, height, LOOKS["never"])
    for tile in walk:
        for i in range(tile.first, tile.last):
            for j in range(tile.start, tile.end):
                if not seen[i, j]:
                    mark = main.text(j + 0.5, i + 0.5, "x", ha="center", va="center", fontsize=8, color=INK)
                    mark.set_bbox({"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.5})
    for axes, values, name in ((tops, top, "running maximum"), (totals, total, "running sum")):
        known = [i for i in range(n_queries) if total[i] > 0]
        colors = [PURPLE if now.first <= i < now.last else GREY for i in known]
        axes.barh([i + 0.5 for i in known], [values[i].item() for i in known], height=0.7, color=colors)
        axes.set_xlabel(name, fontsize=9)
        axes.axvline(0, color=INK, linewidth=0.8)
    seen_scores = scores[seen]
    tops.set_xlim(min(0.0, seen_scores.min().item()) - 0.2, max(0.0, seen_scores.max().item()) + 0.2)
    totals.set_xlim(0, running(scores.masked_fill(~seen, -torch.inf), walk)[1].max().item() * 1.1)
    main.set(xlim=(-0.05, n_keys + 0.05), ylim=(n_queries, 0), xlabel="key", ylabel="query (row)")
    main.set_xticks(range(0, n_keys + 1, columns))
    main.set_yticks(range(0, n_queries + 1, rows))
    for axes in (main, tops, totals):
        plain(axes)
    figure.suptitle(title, fontsize=10.5, x=0.01, ha="left", color=INK)
    patches = [Patch(facecolor=k.color, hatch=k.hatch, edgecolor=line_color(k), label=k.label) for k in LOOKS.values()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9)
    return figure


def running(scores: Tensor, walk: Sequence[Tile]) -> tuple[Tensor, Tensor]:
    """Each row's maximum and sum after these tiles. scores: [T, S], -inf where hidden. -> two of [T]; untouched: 0"""
    top, total = scores.new_zeros(len(scores)), scores.new_zeros(len(scores))
    states: dict[int, OnlineSoftmax] = {}
    for tile in walk:
        part = scores[tile.first : tile.last, tile.start : tile.end]
        state = states.setdefault(tile.first, OnlineSoftmax(part.new_zeros(len(part), 1)))
        state.add(part, part.new_zeros(part.shape[1], 1))
        top[tile.first : tile.last], total[tile.first : tile.last] = state.top, state.total
    return top.masked_fill(total == 0, 0.0), total


def box(axes: Axes, x: float, y: float, width: float, height: float, look: Kind) -> None:
    patch = Rectangle((x, y), width, height, facecolor=look.color, hatch=look.hatch, edgecolor=line_color(look))
    axes.add_patch(patch)
    axes.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor=INK, linewidth=0.8))


def line_color(look: Kind) -> str:
    """White hatches on a colour, grey ones on white."""
    return LIGHT if look.color == WHITE else edge(look)


def draw_errors(blocks: Sequence[int], errors: Mapping[str, Sequence[float]]) -> Picture:
    """Largest error of several ways to add up blocks, by the number of blocks. The last way is the right one."""
    wrong, right = list(errors)[:-1], list(errors)[-1]
    title = f"With {blocks[-1]} blocks: {', '.join(f'{name} off by {errors[name][-1]:,.1f}' for name in wrong)}"
    return draw_lines(
        blocks, errors, "blocks of keys", "largest error", f"{title}; {right} by {errors[right][-1]:.0e}", "{:.1g}"
    )


def draw_memory(lengths: Sequence[int], extra: Mapping[str, Sequence[float]]) -> Picture:
    """Bytes beyond the inputs and the output, by length."""
    growth = {name: values[-1] / values[0] for name, values in extra.items() if name in STYLES}
    grown = ", ".join(f"{name} {times:.3g} times" if times > 1 else f"{name} no more" for name, times in growth.items())
    title = f"{lengths[-1] // lengths[0]} times the tokens. Extra memory: {grown}"
    megabytes = {name: [v / 1e6 for v in values] for name, values in extra.items()}
    return draw_lines(lengths, megabytes, "tokens", "MB beyond the output", title, "{:.3g}")


def draw_accesses(rows: Sequence[int], megabytes: Mapping[str, Sequence[float]], n_tokens: int) -> Picture:
    """Bytes moved, by the rows of a tile."""
    counted = megabytes["in tiles"]
    title = (
        f"{n_tokens} tokens: from {rows[0]} to {rows[-1]} rows a tile, {counted[0] / counted[-1]:.1f} times fewer bytes"
    )
    return draw_lines(rows, megabytes, "query rows of a tile", "MB read and written", title, "{:.3g}")


def draw_speed(lengths: Sequence[int], seconds: Mapping[str, Sequence[float]]) -> Picture:
    """Time by length. The first way is the one that the others are compared with."""
    base, *others = seconds
    factors = ", ".join(f"{name} {seconds[base][-1] / seconds[name][-1]:.1f} times as fast" for name in others)
    milliseconds = {name: [s * 1e3 for s in values] for name, values in seconds.items()}
    title = f"{lengths[-1]} tokens: {factors} as {base}"
    return draw_lines(lengths, milliseconds, "tokens", "milliseconds", title, "{:.3g}")


def draw_lines(
    x: Sequence[int], lines: Mapping[str, Sequence[float]], x_name: str, y_name: str, title: str, form: str
) -> Picture:
    """Lines on logarithmic axes, each with its own marker; the numbers stand in the alt text."""
    if len(x) < 2 or not lines or any(len(values) != len(x) for values in lines.values()):
        raise ValueError(f"{len(x)} places, and lines of {[len(values) for values in lines.values()]}")
    alt = f"Lines on logarithmic axes: {y_name} by {x_name}, at {', '.join(map(str, x))}. " + "; ".join(
        f"{name}: {', '.join(form.format(v) for v in values)}" for name, values in lines.items()
    )
    figure, axes = picture(8.5, 3.8, title, f"{title}. {alt}.")
    for name, values in lines.items():
        color, marker, style = STYLES.get(name, (INK, "", "--"))
        axes.loglog(x, values, color=color, marker=marker, linestyle=style, label=name)
    axes.set_xticks(x, [str(n) for n in x])
    axes.minorticks_off()
    low, high = axes.get_ylim()
    if high < low * 10**DECADES:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set(xlabel=x_name, ylabel=y_name)
    axes.legend(frameon=False, fontsize=9)
    return figure
