"""A picture for the decision guide: times and throughput by batch, the goals as lines, and where they end the batch."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from minillm.lab.advice.deployment import Deployment, Estimate
from minillm.lab.advice.verdicts import duration, number
from minillm.lab.plots import BLUE, GREEN, INK, LIGHT, RED, Picture, plain


def draw_goals(d: Deployment, estimates: Sequence[Estimate]) -> Picture:
    """Left: TTFT and TPOT by batch, and the goals as lines. Right: tokens a second. The chosen batch is marked; a grey
    ground begins where a goal is missed."""
    if len(estimates) < 2:
        raise ValueError("one batch makes no line: give at least two estimates")
    at, sizes = d.estimate(d.batch), [e.batch for e in estimates]
    title = f"{d.model} on {d.hardware.limits.name}: batch {d.batch:,} of {d.fits:,} that fit, "
    title += f"TPOT {duration(at.tpot)}, {number(at.tokens_per_s)} tokens/s"
    figure = Picture(10, 4.2, alt_text(d, estimates))
    times, rates = figure.subplots(1, 2)
    for values, color, form, name, goal in (
        ([e.ttft * 1e3 for e in estimates], BLUE, "-o", "TTFT", d.demand.ttft),
        ([e.tpot * 1e3 for e in estimates], GREEN, "-s", "TPOT", d.demand.tpot),
    ):
        times.plot(sizes, values, form, color=color, markersize=4, label=name)
        if goal is not None:
            times.axhline(goal * 1e3, color=color, linestyle="--", linewidth=1, label=f"{name} goal: {duration(goal)}")
    rates.plot(sizes, [e.tokens_per_s for e in estimates], "-o", color=INK, markersize=4, label="tokens/s")
    for axes, unit in ((times, "milliseconds"), (rates, "tokens a second")):
        finish(axes, d, sizes, unit)
    figure.suptitle(title, fontsize=11)
    return figure


def finish(axes: Axes, d: Deployment, sizes: Sequence[int], unit: str) -> None:
    plain(axes)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.axvline(d.batch, color=RED, linestyle=":", linewidth=1.5, label=f"chosen: {d.batch:,}")
    if d.within_goals < d.fits:
        axes.axvspan(max(d.within_goals, sizes[0]), sizes[-1], color=LIGHT, alpha=0.5, label="misses a goal")
    powers = [n for n in sizes if n & (n - 1) == 0]
    shown = powers[:: 1 + len(powers) // 8]
    axes.set_xticks(shown, [f"{n:,}" for n in shown])
    axes.tick_params(axis="x", which="minor", bottom=False)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel="texts at a time", ylabel=unit)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.2), ncols=3)


def alt_text(d: Deployment, estimates: Sequence[Estimate]) -> str:
    points = "; ".join(
        f"batch {e.batch:,}: TTFT {duration(e.ttft)}, TPOT {duration(e.tpot)}, {number(e.tokens_per_s)} tokens/s"
        for e in estimates
    )
    goals = [f"{name} {duration(goal)}" for name, goal in (("TTFT", d.demand.ttft), ("TPOT", d.demand.tpot)) if goal]
    return (
        f"Two panels by batch on logarithmic axes: TTFT and TPOT, and tokens a second. {points}. Goals: "
        f"{', '.join(goals) or 'none'}; the largest batch within them is {d.within_goals:,}, chosen is {d.batch:,}."
    )
