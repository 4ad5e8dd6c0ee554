"""One visual language for all figures: what a colour and a hatch mean is defined here, once.

Every `draw_*` function of the course is pure: data in, `Picture` out, no window and no global state. A `Picture` is a
matplotlib figure that carries a text for those who cannot see it. Colours are Paul Tol's "bright" set, which
colour-blind readers can tell apart; a hatch or a word always says the same as the colour.
"""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass

from IPython import get_ipython
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from PIL import Image

DPI = 110
COLORS = 64  # of a stored image: few colours are meant, and a notebook stays small
INK, GREY, LIGHT, WHITE = "#222222", "#777777", "#cccccc", "#ffffff"
BLUE, CYAN, GREEN, YELLOW, RED, PURPLE = "#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377"


@dataclass(frozen=True)
class Kind:
    """How one kind of token or slot looks everywhere."""

    label: str
    color: str
    hatch: str = ""


KINDS = {
    "prompt": Kind("prompt", BLUE),
    "generated": Kind("generated", GREEN, "///"),
    "guessed": Kind("guessed", YELLOW, "..."),
    "rejected": Kind("rejected", RED, "xxx"),
    "cached": Kind("cached", CYAN, "\\\\\\"),
    "free": Kind("free", WHITE),
    "new": Kind("computed now", PURPLE, "||"),
}


class Picture(Figure):
    """A figure with an `alt` text, which notebooks store beside the image and readers of the source see instead."""

    def __init__(self, width: float, height: float, alt: str):
        super().__init__(figsize=(width, height), layout="constrained")
        self.alt = alt

    def png(self) -> bytes:
        drawn, small = io.BytesIO(), io.BytesIO()
        self.savefig(drawn, format="png", dpi=DPI)
        Image.open(drawn).convert("RGB").quantize(COLORS).save(small, format="png", optimize=True)
        return small.getvalue()

    def _repr_mimebundle_(self, include=None, exclude=None):
        image = b64encode(self.png()).decode()
        return {"image/png": image, "text/plain": f"Figure: {self.alt}"}, {"image/png": {"alt": self.alt}}


def show_pictures_as_they_are() -> None:
    """In a notebook, once it has shown a widget, IPython would draw all figures its own way, and store them large."""
    shell = get_ipython()
    if shell is not None:
        images = shell.display_formatter.formatters["image/png"]
        images.for_type(Picture, lambda figure: (figure.png(), {"alt": figure.alt}))


def picture(width: float, height: float, title: str, alt: str) -> tuple[Picture, Axes]:
    """A figure with one pair of axes. The title says the conclusion; `alt` says what is seen."""
    figure = Picture(width, height, alt)
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    plain(axes)
    return figure, axes


def plain(axes: Axes) -> None:
    """Only the lines that carry meaning."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=GREY)


def cell(axes: Axes, x: float, y: float, kind: str, text: str = "", width: float = 1, height: float = 1) -> Rectangle:
    """One box of a grid in the look of its kind, its lower left corner at (x, y)."""
    look = KINDS[kind]
    box = Rectangle((x, y), width, height, facecolor=look.color, edgecolor=edge(look), hatch=look.hatch, linewidth=1)
    axes.add_patch(box)
    if text:
        label = axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8, color=INK)
        label.set_bbox({"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1})
    return box


def show_legend(figure: Figure, kinds: Sequence[str]) -> None:
    """Explain the kinds that a figure uses, below it."""
    looks = [KINDS[kind] for kind in kinds]
    patches = [Patch(facecolor=k.color, hatch=k.hatch, edgecolor=edge(k), label=k.label) for k in looks]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9)


def edge(look: Kind) -> str:
    """Hatches are drawn in the edge's colour: white on a colour, grey around a free slot."""
    return "white" if look.hatch or look.color != WHITE else LIGHT


def draw_bars(
    labels: Sequence[str], values: Sequence[float], unit: str, title: str, alt: str, form: str = "{:.1f}"
) -> Picture:
    """Horizontal bars, one a label, with the value written at each."""
    if len(labels) != len(values) or not labels:
        raise ValueError(f"{len(labels)} labels and {len(values)} values")
    figure, axes = picture(8, 1.2 + 0.45 * len(labels), title, alt)
    bars = axes.barh(range(len(labels)), values, color=BLUE, height=0.6)
    axes.set_yticks(range(len(labels)), labels)
    axes.bar_label(bars, [form.format(value) for value in values], padding=4, color=INK)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(unit)
    return figure
