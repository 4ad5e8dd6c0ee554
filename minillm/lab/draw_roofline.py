"""Pictures of speed: steps under a roofline, prefill by length, one request in time, the share of decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullFormatter

from minillm.lab.catalogue import GPUS, MODELS
from minillm.lab.metrics import RequestTimes
from minillm.lab.plots import GREY, INK, KINDS, PURPLE, Picture, cell, picture, plain, show_legend
from minillm.lab.roofline import Limits, Work, gpu_limits, step_work

MARKERS = {"prompt": "o", "generated": "s"}
MOST = 0.9  # the share of decode from which a cell of the map is framed


@dataclass(frozen=True)
class Point:
    """A step on a roofline. kind: "prompt" for prefill, "generated" for decode. seconds: measured; None for the least
    that the limits allow."""

    name: str
    kind: str
    work: Work
    seconds: float | None = None

    def rate(self, limits: Limits) -> float:
        """FLOP/s."""
        return self.work.flops / (self.seconds or self.work.seconds(limits))


def draw_roofline(limits: Limits, points: Sequence[Point], title: str | None = None) -> Picture:
    """The rate that the limits allow at each intensity, and where the steps lie. A grey line joins a measured step
    with the roof above it."""
    bounds = {kind: sorted({p.work.bound(limits) for p in points if p.kind == kind}) for kind in MARKERS}
    said = [
        f"{word} limited by {' or '.join(bounds[kind])}"
        for kind, word in (("prompt", "prefill"), ("generated", "decode"))
        if bounds[kind]
    ]
    names = [f"{i} {p.name}, {rate_text(p.rate(limits))}" for i, p in enumerate(points, 1)]
    alt = (
        f"Roofline of {limits.name} on logarithmic axes: a slope of {limits.bandwidth / 1e9:,.0f} GB/s up to the ridge "
        f"at {limits.ridge:.1f} FLOP per byte, then flat at {rate_text(limits.flops)}. "
        + "; ".join(
            f"point {name} at {p.work.intensity:.2g} FLOP per byte" for name, p in zip(names, points, strict=True)
        )
    )
    figure, axes = picture(10, 4.2, title or f"{limits.name}: {', '.join(said)}", alt)
    intensities = [limits.ridge, *(p.work.intensity for p in points)]
    x = np.geomspace(min(intensities) / 2.5, max(intensities) * 2.5, 200)
    roof = np.minimum(limits.flops, x * limits.bandwidth)
    axes.loglog(x, roof / 1e9, color=INK, linewidth=1.5)
    axes.axvline(limits.ridge, color=GREY, linestyle=":", linewidth=1)
    below = min([roof[0], *(p.rate(limits) for p in points)]) / 2 / 1e9
    axes.set_ylim(below, limits.flops * 2 / 1e9)
    axes.text(limits.ridge * 1.05, below * 1.15, f"ridge: {limits.ridge:.3g}", color=GREY, fontsize=9)
    handles = []
    for i, point in enumerate(points, 1):
        intensity, rate = point.work.intensity, point.rate(limits) / 1e9
        look = {"marker": MARKERS[point.kind], "color": KINDS[point.kind].color, "markersize": 12, "linestyle": ""}
        axes.plot(
            [intensity] * 2, [rate, min(limits.flops, intensity * limits.bandwidth) / 1e9], color=GREY, linewidth=1
        )
        axes.plot([intensity], [rate], markeredgecolor="white", **look)
        axes.text(intensity, rate, str(i), color="white", fontsize=8, ha="center", va="center")
        handles.append(Line2D([], [], label=names[i - 1], **{**look, "markersize": 8}))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())  # on a short axis these labels would crowd
    axes.set(xlabel="FLOP per byte", ylabel="GFLOP/s")
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=9)
    return figure


def rate_text(rate: float) -> str:
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"


def draw_model_on_gpu(model: str, gpu: str, batch: int, context: int) -> Picture:
    """The least time of a prefill of `context` tokens and of a decode step of `batch` texts that long, in 16 bits."""
    config, limits = MODELS[model], gpu_limits(gpu)
    prefill = step_work(config, context, weight_bytes=2, kv_bytes=2)
    decode = step_work(config, 1, context, batch, weight_bytes=2, kv_bytes=2)
    # Everything that lies in memory is read by a decode step, but for an embedding that is not the head's.
    needed = decode.bytes + 2 * (0 if config.tied_embeddings else config.head_parameters)
    fits = f"needs {needed / 1e9:.0f} of {GPUS[gpu].memory / 1e9:.0f} GB"
    if needed > GPUS[gpu].memory:
        fits += ": DOES NOT FIT"
    seconds = decode.seconds(limits)
    title = (
        f"{model} on {gpu}: a step for {batch} texts takes {seconds * 1e3:.3g} ms at least, limited by "
        f"{decode.bound(limits)}\n{batch / seconds:,.0f} tokens/s at most; {fits}"
    )
    points = [
        Point(f"prefill of {context} tokens", "prompt", prefill),
        Point(f"decode, {batch} on {context} past each", "generated", decode),
    ]
    return draw_roofline(limits, points, title)


def draw_prefill_times(
    lengths: Sequence[int], measured: Sequence[float], predicted: Sequence[float], ridge: float
) -> Picture:
    """Seconds of a prefill by its length. ridge: the length from which arithmetic is the limit."""
    if not len(lengths) == len(measured) == len(predicted) >= 2:
        raise ValueError(f"{len(lengths)} lengths, {len(measured)} measured and {len(predicted)} predicted times")
    first, last = (growth(lengths[i : i + 2], measured[i : i + 2]) for i in (0, len(lengths) - 2))
    title = f"Prefill: {first}; {last}"
    alt = "Prefill time by length, logarithmic. " + "; ".join(
        f"{n} tokens: measured {a * 1e3:.3g} ms, formula {b * 1e3:.3g} ms"
        for n, a, b in zip(lengths, measured, predicted, strict=True)
    )
    figure, axes = picture(8.5, 3.8, title, alt)
    axes.loglog(lengths, [s * 1e3 for s in predicted], color=INK, linestyle="--", label="roofline: at least")
    axes.loglog(lengths, [s * 1e3 for s in measured], color=KINDS["prompt"].color, marker="o", label="measured")
    axes.axvline(ridge, color=GREY, linestyle=":", label=f"ridge: {ridge:.0f} tokens")
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.minorticks_off()
    axes.set(xlabel="tokens of the prompt", ylabel="milliseconds")
    axes.legend(frameon=False, fontsize=9)
    return figure


def growth(lengths: Sequence[int], seconds: Sequence[float]) -> str:
    return f"{lengths[0]} to {lengths[1]} tokens, {seconds[1] / seconds[0]:.1f} times the time"


def draw_request(times: RequestTimes) -> Picture:
    """One request on a line: what TTFT, TPOT and latency are, and how many gaps there are."""
    if len(times.tokens) < 2:
        raise ValueError("a request with at least two tokens is needed: one token has no gap")
    n = len(times.tokens)
    ttft, tpot = f"{times.ttft * 1e3:.3g} ms", f"{times.tpot * 1e3:.3g} ms"
    title = f"{n} tokens, {n - 1} gaps: the first token after {ttft}, then one each {tpot}"
    alt = (
        f"A line in time. A wide box from arrival to the first token: TTFT {ttft}. Behind it {n - 1} boxes, the gaps "
        f"between tokens: TPOT {tpot} is their mean. All together: latency {times.latency:.3g} s."
    )
    figure, axes = picture(10, 2.5, title, alt)
    ends = [t - times.arrival for t in times.tokens]
    cell(axes, 0, 0, "prompt", width=ends[0])
    for start, end in pairwise(ends):
        cell(axes, start, 0, "generated", width=end - start)
    for y, start, end, text in (
        (1.25, 0, ends[0], f"TTFT {times.ttft:.3g} s"),
        (1.25, ends[0], ends[-1], f"{n - 1} gaps, TPOT {times.tpot:.3g} s"),
        (2.25, 0, ends[-1], f"latency {times.latency:.3g} s = TTFT + {n - 1} TPOT"),
    ):
        span(axes, y, start, end, text)
    axes.set(xlim=(-0.01 * ends[-1], 1.02 * ends[-1]), ylim=(0, 3.2), yticks=[], xlabel="seconds since arrival")
    axes.spines["left"].set_visible(False)
    show_legend(figure, ("prompt", "generated"))
    return figure


def span(axes: Axes, y: float, start: float, end: float, text: str) -> None:
    """A measured stretch: a double arrow with its name above, flush left where it is too short for the name."""
    arrow = {"arrowstyle": "<->", "color": INK, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=(start, y), xytext=(end, y), arrowprops=arrow)
    axes.text(
        start if start == 0 else (start + end) / 2, y + 0.1, text, ha="left" if start == 0 else "center", fontsize=9
    )


def draw_decode_share(
    prompts: Sequence[int], outputs: Sequence[int], shares: Mapping[str, Sequence[Sequence[float]]]
) -> Picture:
    """The share of a request's time that decode takes. shares: by panel, [output][prompt], each from 0 to 1."""
    cells = len(prompts) * len(outputs)
    flat = {name: [share for row in rows for share in row] for name, rows in shares.items()}
    counts = {name: sum(share > MOST for share in all_of) for name, all_of in flat.items()}
    alt = f"Maps of the share of time in decode, {len(outputs)} output lengths by {len(prompts)} prompt lengths. "
    alt += "; ".join(
        f"{name}: from {min(all_of):.0%} to {max(all_of):.0%}, {counts[name]} of {cells} over {MOST:.0%}"
        for name, all_of in flat.items()
    )
    least = min(map(min, flat.values()))
    figure = Picture(3.6 * len(shares) + 0.5, 1.9 + 0.42 * len(outputs), alt)
    for axes, (name, rows) in zip(figure.subplots(1, len(shares), squeeze=False)[0], shares.items(), strict=True):
        plain(axes)
        for y, row in enumerate(rows):
            for x, share in enumerate(row):
                axes.add_patch(Rectangle((x, y), 1, 1, facecolor=KINDS["generated"].color, alpha=0.6 * share))
                axes.text(x + 0.5, y + 0.5, f"{share * 100:.0f}", ha="center", va="center", fontsize=9, color=INK)
                if share > MOST:
                    frame = Rectangle((x + 0.06, y + 0.08), 0.88, 0.84, fill=False, edgecolor=PURPLE, linewidth=1.5)
                    axes.add_patch(frame)
        axes.set_title(f"{name}: {counts[name]} of {cells} over {MOST:.0%}", loc="left", fontsize=10)
        axes.set_xticks(np.arange(len(prompts)) + 0.5, [str(n) for n in prompts])
        axes.set_yticks(np.arange(len(outputs)) + 0.5, [str(n) for n in outputs])
        axes.set(xlim=(0, len(prompts)), ylim=(0, len(outputs)), xlabel="prompt tokens", ylabel="output tokens")
    total = f"{sum(counts.values())} of {cells * len(shares)} cases"
    figure.suptitle(
        f"Decode takes over {MOST:.0%} of the time in {total} (framed), and as little as {least:.0%}", fontsize=11
    )
    return figure
