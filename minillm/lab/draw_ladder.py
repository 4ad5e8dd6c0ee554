"""Pictures of the whole: the ladder's speeds, the map of the stages, the meaning of colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minillm.lab.ladder import Row
from minillm.lab.plots import BLUE, INK, KINDS, LIGHT, WHITE, Picture, cell, draw_bars, picture

QUANTITIES = {
    "tokens per second": ("tokens_per_s", "output tokens per second, whole request", "{:.1f}"),
    "time per output token": ("tpot_ms", "ms between tokens", "{:.1f}"),
    "time to first token": ("ttft_ms", "ms to the first token", "{:.0f}"),
}


@dataclass(frozen=True)
class Stage:
    """One step of the course: what is new in it, and which cost it attacks."""

    number: str
    name: str
    new: str
    buys: str


STAGES = (
    Stage("01", "Autoregression", "the loop: probabilities, rules, one token at a time", "a text"),
    Stage("02", "KV cache", "keep keys and values, feed one token", "no work twice"),
    Stage("03", "Prefill and decode", "two phases, one roofline: what a step must cost", "a prediction"),
    Stage("04", "FlashAttention", "attention in tiles with an online softmax", "memory for long texts"),
    Stage("05", "PagedAttention", "the cache in blocks, shared and counted", "memory for many texts"),
    Stage("06", "Continuous batching", "requests join and leave at every step", "throughput"),
    Stage("07", "Speculative sampling", "guess cheaply, verify in one pass", "latency"),
    Stage("08", "Grouped-query attention", "fewer key and value heads", "a smaller cache"),
    Stage("09", "W4A16", "weights of 4 bits, read as they are", "fewer bytes a token"),
    Stage("10", "Evidence", "often stated numbers, put to the test", "a verdict"),
)


def draw_ladder(rows: Sequence[Row], quantity: str = "tokens per second") -> Picture:
    """One bar a rung."""
    if quantity not in QUANTITIES:
        raise ValueError(f"quantity must be one of {', '.join(QUANTITIES)}, not {quantity!r}")
    attribute, unit, form = QUANTITIES[quantity]
    values = [getattr(row, attribute) for row in rows]
    alt = f"Bars of {unit}: " + ", ".join(f"{r.stage} {form.format(v)}" for r, v in zip(rows, values, strict=True))
    agree = sum(row.same_tokens for row in rows)
    same = "the same tokens on every rung" if agree == len(rows) else f"the same tokens on {agree} of {len(rows)} rungs"
    return draw_bars([row.stage for row in rows], values, unit, f"The ladder, {quantity}: {same}", alt, form)


def draw_map(ready: Sequence[str] | None = None) -> Picture:
    """The stages from bottom to top. `ready`: numbers of those whose notebook is there (None: all); others are pale."""
    alt = "A ladder of stages: " + "; ".join(f"{s.number} {s.name}, which buys {s.buys}" for s in STAGES)
    figure, axes = picture(9, 5.2, "Each stage is one new file; the model and the loop stay as they are", alt)
    for i, stage in enumerate(STAGES):
        here = ready is None or stage.number in ready
        axes.barh(
            i,
            2.6,
            height=0.8,
            color=BLUE if here else WHITE,
            edgecolor=BLUE if here else LIGHT,
            hatch="" if here else "///",
        )
        look = {"va": "center", "color": INK}
        label = axes.text(
            0.06,
            i,
            f"{stage.number}  {stage.name}",
            color=WHITE if here else INK,
            va="center",
            fontsize=9,
            weight="bold",
        )
        if not here:
            label.set_bbox({"facecolor": WHITE, "edgecolor": "none", "pad": 1})
        axes.text(2.72, i, stage.new, fontsize=9, **look)
        axes.text(7.1, i, f"buys {stage.buys}" + ("" if here else " (to come)"), fontsize=9, style="italic", **look)
    axes.set(xlim=(0, 9.6), ylim=(-0.6, len(STAGES) - 0.4), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    return figure


def draw_language() -> Picture:
    """What each colour and hatch means, in all notebooks."""
    alt = "Boxes, one for each kind of token: " + ", ".join(look.label for look in KINDS.values())
    figure, axes = picture(9, 1.5, "One colour and one hatch for each kind of token, everywhere", alt)
    for i, (kind, look) in enumerate(KINDS.items()):
        cell(axes, i * 1.2, 0, kind)
        axes.text(i * 1.2 + 0.5, -0.15, look.label, ha="center", va="top", fontsize=9)
    axes.set(xlim=(-0.1, 1.2 * len(KINDS)), ylim=(-0.5, 1.1), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    return figure
