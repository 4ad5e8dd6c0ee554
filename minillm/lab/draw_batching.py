"""Pictures of many requests at once: places of the batch by step, requests in time, padding, what batching gains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from minillm.lab.plots import (
    BLUE,
    GREEN,
    GREY,
    INK,
    LIGHT,
    PURPLE,
    RED,
    Picture,
    cell,
    picture,
    plain,
    show_legend,
)
from minillm.lab.serving import Part, Replay

KIND_OF = {"prefill": "prompt", "decode": "generated"}
NAME = 0.16  # of the width of the axes: room for the name of an arrow
STYLES = ((BLUE, "o", "-"), (GREEN, "s", "--"), (PURPLE, "^", "-."), (RED, "D", ":"))


def places(replay: Replay) -> list[dict[int, Part]]:
    """Who computes in which place of the batch: for each step {place: part}. A request keeps its place to its end.

    One that was pushed out lends its place meanwhile, and takes a free one when it comes back.
    """
    last = {part.request: i for i, step in enumerate(replay.steps) for part in step.parts}
    held: dict[int, int] = {}
    steps = []
    for i, step in enumerate(replay.steps):
        here = {part.request for part in step.parts}
        held = {request: place for request, place in held.items() if last[request] >= i}
        for part in step.parts:
            if part.request not in held:
                free = [place for place in range(replay.max_num_seqs) if place not in held.values()]
                held[part.request] = free[0] if free else held.pop(next(r for r in held if r not in here))
        steps.append({held[part.request]: part for part in step.parts})
    return steps


@dataclass(frozen=True)
class Run:
    """The same thing in the same place for some steps in a row. part: None where the place is free."""

    place: int
    start: int
    length: int
    part: Part | None


def runs(replay: Replay) -> list[Run]:
    """The places of all steps as boxes, a decode or a free place being one box for all the steps that it lasts."""
    found: list[Run] = []
    by_step = places(replay)
    for place in range(replay.max_num_seqs):
        start = 0
        for end in range(1, len(by_step) + 1):
            same = end < len(by_step) and alike(by_step[start].get(place), by_step[end].get(place))
            if not same:
                found.append(Run(place, start, end - start, by_step[start].get(place)))
                start = end
    return found


def alike(a: Part | None, b: Part | None) -> bool:
    return a == b if a is None or b is None else (a.request, a.kind) == (b.request, b.kind)


def draw_places(replays: Mapping[str, Replay], shown: int | None = None, title: str | None = None) -> Picture:
    """For each replay a row for each place of the batch, step by step, and the share of places in use below.

    shown: draw only the first steps, and say how many requests wait after them.
    """
    longest = max(len(replay.steps) for replay in replays.values())
    facts = [
        f"{name}: {len(replay.steps)} steps, {mean(replay.utilisation):.0%} of the places in use"
        for name, replay in replays.items()
    ]
    title = title or "; ".join(f"{name} {len(replay.steps)} steps" for name, replay in replays.items())
    now = "" if shown is None else f" Shown up to step {shown}."
    height = sum(0.24 * replay.max_num_seqs + 1.1 for replay in replays.values()) + 1
    figure = Picture(10, height, f"Places of the batch by step, and utilisation below. {'; '.join(facts)}.{now}")
    ratios = [part for replay in replays.values() for part in (max(2, replay.max_num_seqs), 2)]
    every = figure.subplots(2 * len(replays), 1, sharex=True, height_ratios=ratios)
    for (name, replay), fact, top, below in zip(replays.items(), facts, every[::2], every[1::2], strict=True):
        end = len(replay.steps) if shown is None else min(shown, len(replay.steps))
        draw_batch(top, replay, end)
        if shown is not None:
            step = replay.steps[end - 1]
            fact = f"{name}, step {end} of {len(replay.steps)}: {len(step.parts)} compute, {step.waiting} wait"
        top.set_title(fact, loc="left", fontsize=10)
        top.set(ylim=(replay.max_num_seqs, 0), yticks=[], ylabel="places")
        used = [100 * share for share in replay.utilisation[:end]]
        below.stairs(used, range(end + 1), fill=True, color=LIGHT)
        below.set(ylim=(0, 100), yticks=[0, 100], ylabel="% used", xlim=(0, longest))
        plain(top)
        plain(below)
        top.tick_params(bottom=False)
    every[-1].set_xlabel("step")
    if shown is None or len(replays) > 1:
        figure.suptitle(title, fontsize=11)
    show_legend(figure, ("prompt", "generated", "free"))
    return figure


def draw_batch(axes: Axes, replay: Replay, end: int) -> None:
    """The boxes of the first `end` steps; the number of a request stands at the beginning of each of its boxes."""
    for run in runs(replay):
        length = min(run.length, end - run.start)
        if length > 0:
            kind = "free" if run.part is None else KIND_OF[run.part.kind]
            cell(axes, run.start, run.place, kind, width=length)
            if run.part and (run.part.kind == "decode" or length > 1):
                name_box(axes, run.start + length / 2, run.place + 0.5, str(run.part.request))


def name_box(axes: Axes, x: float, y: float, text: str) -> None:
    label = axes.text(x, y, text, ha="center", va="center", fontsize=8, color=INK)
    label.set_bbox({"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 0.8})


def worst_gap(replay: Replay) -> tuple[int, int, float]:
    """-> (request, number of the token that came late, seconds it was waited for)"""
    gaps = [(gap, request, i + 1) for request, times in enumerate(replay.times) for i, gap in enumerate(times.gaps)]
    gap, request, token = max(gaps)
    return request, token, gap


def draw_requests(replays: Mapping[str, Replay], title: str | None = None) -> Picture:
    """A row for each request in time: a grey line while it waits, a box for each step that it takes part in.

    The longest time to a first token and the longest gap between two tokens are marked.
    """
    facts, marks = [], []
    for name, replay in replays.items():
        late = max(range(len(replay.times)), key=lambda r: replay.times[r].ttft)
        request, token, gap = worst_gap(replay)
        ttft = replay.times[late].ttft
        facts.append(f"{name}: longest TTFT {ttft:.2g} s (request {late}), worst gap {gap:.2g} s (request {request})")
        marks.append((late, ttft, request, token, gap))
    rows = [len(replay.times) for replay in replays.values()]
    figure = Picture(10, sum(0.26 * n + 0.75 for n in rows) + 0.8, f"Requests in time. {'; '.join(facts)}.")
    every = figure.subplots(len(replays), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    width = 1.02 * max(replay.steps[-1].end for replay in replays.values())
    for (name, replay), axes, mark in zip(replays.items(), every, marks, strict=True):
        plain(axes)
        axes.set_xlim(0, width)
        draw_lines(axes, replay)
        late, ttft, request, token, gap = mark
        whole = (replay.times[late].arrival, replay.times[late].tokens[0])
        behind = arrow(axes, replay, late, whole, f"TTFT {ttft:.2g} s")
        at = replay.times[request].tokens
        taken = behind if request == late else 0.0
        arrow(axes, replay, request, (at[token - 1], at[token]), f"worst gap {gap:.2g} s", taken)
        axes.set_title(f"{name}: last token after {replay.steps[-1].end:.3g} s", loc="left", fontsize=10)
        axes.set(ylim=(len(replay.times), 0), yticks=[r + 0.5 for r in range(len(replay.times))])
        axes.set_yticklabels([str(r) for r in range(len(replay.times))], fontsize=7)
        axes.set_ylabel("request")
    every[-1].set_xlabel("seconds")
    gaps = [mark[-1] for mark in marks]
    figure.suptitle(
        title or f"The worst gap between two tokens: {' against '.join(f'{g:.2g} s' for g in gaps)}", fontsize=11
    )
    show_legend(figure, ("prompt", "generated"))
    return figure


def draw_lines(axes: Axes, replay: Replay) -> None:
    for request, times in enumerate(replay.times):
        axes.plot([times.arrival, times.tokens[-1]], [request + 0.5] * 2, color=GREY, linewidth=0.8, zorder=0)
        axes.plot([times.arrival], [request + 0.5], marker="|", color=INK, markersize=7)
    for step in replay.steps:
        for part in step.parts:
            kind = KIND_OF[part.kind]
            cell(axes, step.start, part.request + 0.12, kind, width=step.end - step.start, height=0.76).set_linewidth(
                0.5
            )


def arrow(
    axes: Axes, replay: Replay, request: int, stretch: tuple[float, float], text: str, taken: float = 0.0
) -> float:
    """A marked stretch of a row. Its name stands in its middle, or behind the row's end if it is too long for that.

    taken: room behind the row's end that another name has. -> the room that this one takes there
    """
    start, end = stretch
    y = request + 0.5
    look = {"arrowstyle": "<->", "color": INK, "shrinkA": 0, "shrinkB": 0, "linewidth": 1.4}
    axes.annotate("", xy=(start, y), xytext=(end, y), arrowprops=look)
    width = axes.get_xlim()[1]
    inside = end - start > NAME * width
    x = (start + end) / 2 if inside else replay.times[request].tokens[-1] + 0.01 * width + taken
    label = axes.text(x, y, text, ha="center" if inside else "left", va="center", fontsize=8, color=INK)
    label.set_bbox({"facecolor": "white", "alpha": 0.9, "edgecolor": INK, "linewidth": 0.6, "pad": 1.2})
    return 0.0 if inside else NAME * width


def draw_flat_batch(counts: Sequence[int]) -> Picture:
    """The tokens of one step, padded to a rectangle and as one flat list. counts: new tokens of each request."""
    if not counts or min(counts) < 1:
        raise ValueError(f"each request of a step has at least one token, not {list(counts)}")
    padded, flat = len(counts) * max(counts), sum(counts)
    title = f"Padded: {padded} rows, {padded - flat} of them for nothing; flat: {flat} rows"
    alt = (
        f"{len(counts)} requests with {', '.join(map(str, counts))} new tokens. Above, a rectangle of {len(counts)} by "
        f"{max(counts)} cells, {padded - flat} of them empty; below, the same tokens in one row of {flat} cells."
    )
    figure, axes = picture(10, 1.2 + 0.3 * (len(counts) + 3), title, alt)
    at = 0
    for row, count in enumerate(counts):
        kind = "generated" if count == 1 else "prompt"
        for i in range(max(counts)):
            cell(axes, i, row, kind if i < count else "free")
            if i < count:
                cell(axes, at + i, len(counts) + 1.5, kind)
        name_box(axes, 0.5, row + 0.5, str(row))
        name_box(axes, at + count / 2, len(counts) + 2, str(row))
        at += count
    axes.set(xlim=(-0.2, max(flat, max(counts)) + 0.2), ylim=(len(counts) + 2.7, -0.2), xticks=[])
    axes.set_yticks([len(counts) / 2, len(counts) + 2], ["padded", "flat"])
    axes.spines[:].set_visible(False)
    axes.tick_params(left=False)
    show_legend(figure, ("prompt", "generated", "free"))
    return figure


def draw_gains(
    spreads: Sequence[float], gains: Mapping[str, Sequence[float]], stated: Mapping[str, tuple[float, float]]
) -> Picture:
    """How many times the throughput of static batching, by the spread of the lengths.

    gains: a curve by name. stated: (low, high) gains that are often named, drawn as bands.
    """
    lowest, highest = min(map(min, gains.values())), max(map(max, gains.values()))
    alt = "Gain of continuous over static batching by the spread of output lengths. " + "; ".join(
        f"{name}: " + ", ".join(f"{gain:.1f} at {spread:g}" for spread, gain in zip(spreads, curve, strict=True))
        for name, curve in gains.items()
    )
    title = f"Continuous batching is {lowest:.1f} to {highest:.1f} times as fast as static: it depends on the spread"
    figure, axes = picture(9, 4.2, title, alt)
    for (label, (low, high)), grey in zip(stated.items(), (LIGHT, "#e8e8e8"), strict=False):
        axes.axhspan(low, high, color=grey, alpha=0.6, zorder=0)
        right = all(curve[-1] > high for curve in gains.values())  # the side on which no curve is in the way
        x, side = (spreads[-1], "right") if right else (spreads[0], "left")
        axes.text(x, (low * high) ** 0.5, f"often stated: {label}", fontsize=9, color=INK, va="center", ha=side)
    for (name, curve), (color, marker, line) in zip(gains.items(), STYLES, strict=False):
        axes.semilogy(spreads, curve, color=color, marker=marker, linestyle=line, label=name)
    axes.set_yticks(
        ticks := [t for t in (1, 1.4, 2, 3, 5, 10, 20, 50) if t <= highest * 1.3], [f"{t:g}" for t in ticks]
    )
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel="spread of the output lengths: standard deviation / mean", ylabel="times the throughput")
    figure.legend(loc="outside right center", frameon=False, fontsize=9)
    return figure


@dataclass(frozen=True)
class Curve:
    """Tokens per second by batch. rates end where the memory is full. knee: the batch from which arithmetic limits."""

    name: str
    rates: Sequence[float]
    knee: int | None = None


def draw_batch_rates(
    batches: Sequence[int], curves: Sequence[Curve], title: str, band: tuple[int, int] | None = None
) -> Picture:
    """Tokens per second by the size of the batch. band: a range of batches to be shaded."""

    alt = "Tokens per second by batch, logarithmic. " + "; ".join(
        f"{curve.name}: {curve.rates[-1]:,.0f} tokens/s at {batches[len(curve.rates) - 1]}"
        + (f", a star at {curve.knee}" if curve.knee else "")
        for curve in curves
    )
    figure, axes = picture(9, 4, title, alt)
    if band:
        axes.axvspan(*band, color=LIGHT, alpha=0.5, zorder=0)
        axes.text(
            band[0] * 1.03,
            0.02,
            f"{band[0]} to {band[1]}",
            transform=axes.get_xaxis_transform(),
            color=GREY,
            fontsize=9,
        )
    for curve, (color, marker, line) in zip(curves, STYLES, strict=False):
        x = batches[: len(curve.rates)]
        axes.loglog(x, curve.rates, color=color, marker=marker, linestyle=line, label=curve.name)
        if curve.knee:
            at = np.interp(curve.knee, x, curve.rates)
            axes.plot([curve.knee], [at], marker="*", markersize=16, color=INK, zorder=5)
    axes.set_xticks(batches, [str(b) for b in batches])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()
    axes.set(xlabel="texts in the batch", ylabel="tokens/s")
    axes.legend(frameon=False, fontsize=9)
    return figure
