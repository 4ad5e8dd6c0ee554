"""Pictures of autoregression: a text's probability token by token, what each sampling rule does, what a step costs.

The cut-off pictures call the package's own rules, so what is hatched is what `minillm.sampling` really removes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from torch import Tensor

from minillm.lab.plots import GREEN, GREY, INK, KINDS, PURPLE, Kind, Picture, edge, picture, plain
from minillm.sampling import SamplingParams, distribution, keep_min_p, keep_top_k, keep_top_p

RULES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "top-k": lambda logits, value: keep_top_k(logits, int(value)),
    "top-p": keep_top_p,
    "min-p": keep_min_p,
}
Scored = tuple[Sequence[str], Sequence[float]]  # tokens as text, and each one's log-probability given those before

KEPT = replace(KINDS["generated"], label="may be drawn")
CUT = replace(KINDS["rejected"], label="cut off")


def readable(text: str) -> str:
    """A token's text as a label: spaces and line breaks are seen, and no letter is one that the font lacks."""
    shown = text.replace(" ", "\N{OPEN BOX}").replace("\n", r"\n").replace("\t", r"\t").replace("$", r"\$")
    return "".join(c if c.isprintable() and ord(c) < 0x2500 else f"\\u{ord(c):04x}" for c in shown)


def label_tokens(axes: Axes, texts: Sequence[str]) -> None:
    """Write the tokens under the positions 0, 1, 2, ..."""
    axes.set_xticks(range(len(texts)), [readable(t) for t in texts], rotation=55, ha="right", rotation_mode="anchor")
    axes.tick_params(axis="x", labelsize=9, labelcolor=INK, length=0)


def bars(axes: Axes, xs: Sequence[int], heights: Sequence[float], look: Kind) -> None:
    axes.bar(xs, heights, width=0.8, color=look.color, hatch=look.hatch, edgecolor=edge(look), label=look.label)


def draw_temperatures(
    logits: Tensor, piece: Callable[[int], str], temperatures: Sequence[float], shown: int = 8
) -> Picture:
    """The best tokens' probabilities at each temperature. logits: [vocab]; piece: a token id as text."""
    shown = min(shown, len(logits))
    best = logits.sort(descending=True, stable=True).indices[:shown].tolist()
    rows = [distribution(logits, SamplingParams(temperature=t))[best].tolist() for t in temperatures]
    alt = f"Bars of the {shown} most probable tokens. " + "; ".join(
        f"temperature {t:g}: the best has {row[0]:.2f}, all tokens not shown {1 - sum(row):.2f}"
        for t, row in zip(temperatures, rows, strict=True)
    )
    figure = Picture(3 * len(temperatures) + 0.5, 3.6, alt)
    panels = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
    for axes, temperature, row in zip(panels, temperatures, rows, strict=True):
        plain(axes)
        bars(axes, range(shown), row, KEPT)
        label_tokens(axes, [piece(token) for token in best])
        axes.set_title(f"temperature {temperature:g}\nnot shown: {1 - sum(row):.0%}", loc="left", fontsize=10)
    panels[0].set_ylabel("probability")
    figure.suptitle("Temperature moves probability between the best tokens and all the others", fontsize=11)
    return figure


def draw_cut(logits: Tensor, piece: Callable[[int], str], rule: str, value: float, shown: int = 32) -> Picture:
    """What one rule ("top-k", "top-p" or "min-p") cuts off, and the threshold by which it decides."""
    if rule not in RULES:
        raise ValueError(f"unknown rule {rule!r}; known: {', '.join(RULES)}")
    order = logits.sort(descending=True, stable=True).indices
    probabilities = logits.softmax(-1)[order]
    kept = (RULES[rule](logits, value) > -torch.inf)[order]
    shown = min(shown, len(logits))
    n_kept, mass = int(kept.sum()), float(probabilities[kept].sum())
    heights, stays = probabilities[:shown].tolist(), kept[:shown].tolist()
    alt = (
        f"The {shown} most probable of {len(logits):,} tokens, from {heights[0]:.3f} down to {heights[-1]:.3f}. "
        f"{rule} {value:g} keeps {n_kept} of all tokens; of those shown {shown - sum(stays)} are hatched as cut off."
    )
    title = f"{rule} {value:g} keeps {n_kept:,} of {len(logits):,} tokens, with {mass:.0%} of the probability"
    figure, axes = picture(8.5, 3.4, title, alt)
    for look, flag in ((KEPT, True), (CUT, False)):
        xs = [i for i in range(shown) if stays[i] is flag]
        bars(axes, xs, [heights[i] for i in xs], look)
    label_tokens(axes, [piece(token) for token in order[:shown].tolist()])
    logarithmic(axes, "probability (logarithmic)")
    axes.set(xlim=(-0.7, shown - 0.3), ylim=(heights[-1] / 2, 1.5))
    if rule == "top-p":
        total = axes.twinx()
        total.plot(range(shown), probabilities.cumsum(-1)[:shown].tolist(), color=PURPLE, marker=".", label="sum")
        total.set(ylim=(0, 1.05), ylabel="sum up to this token")
        total.spines["top"].set_visible(False)
        total.tick_params(colors=GREY)
        threshold(total, f"p = {value:g}", y=value)
    elif rule == "min-p":
        threshold(axes, f"{value:g} x best = {value * heights[0]:.2g}", y=value * heights[0])
    elif n_kept < shown:
        threshold(axes, f"k = {n_kept}", x=n_kept - 0.5)
    explain(figure)
    return figure


def logarithmic(axes: Axes, label: str) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel(label)


def threshold(axes: Axes, text: str, x: float | None = None, y: float | None = None) -> None:
    """A dashed line at a height or a place, with its name."""
    if y is not None:
        axes.axhline(y, color=INK, linestyle="--", linewidth=1.2)
        place = {"xy": (1, y), "xycoords": axes.get_yaxis_transform(), "xytext": (-4, 4), "ha": "right", "va": "bottom"}
    else:
        axes.axvline(x, color=INK, linestyle="--", linewidth=1.2)
        place = {"xy": (x, 1), "xycoords": axes.get_xaxis_transform(), "xytext": (5, -4), "ha": "left", "va": "top"}
    note = axes.annotate(text, textcoords="offset points", fontsize=9, color=INK, **place)
    note.set_bbox({"facecolor": "white", "alpha": 0.9, "edgecolor": "none", "pad": 1})


def explain(figure: Picture) -> None:
    patches = [Patch(facecolor=k.color, hatch=k.hatch, edgecolor=edge(k), label=k.label) for k in (KEPT, CUT)]
    figure.legend(handles=patches, loc="outside lower center", ncols=2, frameon=False, fontsize=9)


def draw_sampler(logits: Tensor, piece: Callable[[int], str], params: SamplingParams, shown: int = 20) -> Picture:
    """All cutting rules at once: the final probabilities of what stays, and which rule removed the rest.

    What was removed is drawn as high as temperature alone leaves it; the letter above says by which rule.
    """
    order = logits.sort(descending=True, stable=True).indices
    shown = min(shown, len(logits))
    without = replace(params, top_k=0, top_p=1.0, min_p=0.0)
    steps = {
        "k": replace(without, top_k=params.top_k),
        "p": replace(without, top_k=params.top_k, top_p=params.top_p),
        "m": params,
    }
    before, after = (distribution(logits, p)[order].tolist() for p in (without, params))
    left = {letter: (distribution(logits, step)[order] > 0).tolist() for letter, step in steps.items()}
    n_kept = sum(left["m"])
    title = f"{n_kept:,} of {len(logits):,} tokens may be drawn; the best with probability {after[0]:.2f}"
    alt = (
        f"{title}. Tokens left after top-k: {sum(left['k']):,}, then top-p: {sum(left['p']):,}, then min-p: "
        f"{n_kept:,}. The {shown} most probable are shown."
    )
    figure, axes = picture(8.5, 3.4, title, alt)
    kept = [i for i in range(shown) if left["m"][i]]
    cut = [i for i in range(shown) if before[i] > 0 and not left["m"][i]]
    bars(axes, kept, [after[i] for i in kept], KEPT)
    bars(axes, cut, [before[i] for i in cut], CUT)
    for i in cut:
        rule = next(letter for letter, stays in left.items() if not stays[i])
        axes.annotate(rule, (i, before[i]), (0, 2), textcoords="offset points", ha="center", fontsize=9)
    label_tokens(axes, [piece(token) for token in order[:shown].tolist()])
    logarithmic(axes, "probability (logarithmic)")
    axes.set(xlim=(-0.7, shown - 0.3), ylim=(1e-5, 1.5))
    axes.text(
        1, 0.98, "cut by k: top-k, p: top-p, m: min-p", transform=axes.transAxes, ha="right", va="top", fontsize=9
    )
    explain(figure)
    return figure


def draw_penalties(tokens: Sequence[str], before: Sequence[float], after: Mapping[str, Sequence[float]]) -> Picture:
    """How each penalty moves the logits of some tokens. after: the new logits by the penalty's name."""
    moved = {name: sum(a != b for a, b in zip(values, before, strict=True)) for name, values in after.items()}
    alt = "Arrows from each token's logit to its penalized one. " + "; ".join(
        f"{name} moves {n} of {len(tokens)} tokens" for name, n in moved.items()
    )
    figure = Picture(3.2 * len(after) + 0.8, 1.6 + 0.3 * len(tokens), alt)
    panels = figure.subplots(1, len(after), sharey=True, sharex=True, squeeze=False)[0]
    for axes, (name, values) in zip(panels, after.items(), strict=True):
        plain(axes)
        axes.axvline(0, color=GREY, linewidth=0.8)
        for i, (old, new) in enumerate(zip(before, values, strict=True)):
            if old != new:
                arrow = {"arrowstyle": "->", "color": PURPLE, "linewidth": 1.4, "shrinkA": 4, "shrinkB": 4}
                axes.annotate("", xy=(new, i), xytext=(old, i), arrowprops=arrow)
        axes.scatter(values, range(len(tokens)), color=PURPLE, marker="x", label="after", zorder=3)
        axes.scatter(before, range(len(tokens)), facecolors="white", edgecolors=INK, label="before", zorder=4)
        axes.set_title(f"{name}\nmoves {moved[name]} of {len(tokens)}", loc="left", fontsize=10)
        axes.set_xlabel("logit")
    panels[0].set_yticks(range(len(tokens)), [readable(text) for text in tokens])
    panels[0].invert_yaxis()
    figure.suptitle("Penalties lower the scores of tokens that were there before, and cut nothing", fontsize=11)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def draw_chain(texts: Mapping[str, Scored]) -> Picture:
    """Each token's log-probability given those before it; the sum is the text's."""
    totals = {name: sum(logprobs) for name, (_, logprobs) in texts.items()}
    alt = "Bars hang down from 0, one a token, as long as its log-probability. " + "; ".join(
        f"{name}: {len(texts[name][1])} tokens, total {total:.1f}" for name, total in totals.items()
    )
    figure = Picture(9, 2.7 * len(texts), alt)
    for axes, (name, (tokens, logprobs)) in zip(
        figure.subplots(len(texts), 1, sharey=True, squeeze=False)[:, 0], texts.items(), strict=True
    ):
        plain(axes)
        bars(axes, range(len(tokens)), logprobs, KINDS["prompt"])
        label_tokens(axes, tokens)
        axes.set_ylabel("log-probability")
        axes.set_title(f"{name}: the bars add up to {totals[name]:.1f}", loc="left", fontsize=11)
    return figure


def draw_race(texts: Mapping[str, Scored]) -> Picture:
    """The log-probability of growing texts, token by token."""
    sums = {name: list(accumulate(logprobs)) for name, (_, logprobs) in texts.items()}
    ranked = sorted(sums, key=lambda name: -sums[name][-1])
    alt = "Lines that fall with each token. " + "; ".join(f"{name} ends at {sums[name][-1]:.2f}" for name in ranked)
    title = f"The text of {ranked[0]} ends as the most probable" if len(ranked) > 1 else f"The text of {ranked[0]}"
    figure, axes = picture(9, 4.2, title, alt)
    looks = [(GREEN, "o", "-"), (PURPLE, "s", "--"), (INK, "^", ":")]
    for row, (name, (color, marker, line)) in enumerate(zip(ranked, looks, strict=False)):
        xs = range(1, len(sums[name]) + 1)
        axes.plot(xs, sums[name], color=color, marker=marker, linestyle=line, label=f"{name}: {sums[name][-1]:.1f}")
        for x, text in zip([0.4, *xs], [name, *map(readable, texts[name][0])], strict=True):
            place = (0, -26 - 16 * row)  # below the axis, a row for each text
            axes.annotate(
                text,
                (x, 0),
                place,
                xycoords=axes.get_xaxis_transform(),
                textcoords="offset points",
                fontsize=8,
                color=color,
                ha="center" if x >= 1 else "right",
            )
    longest = max(map(len, sums.values()))
    axes.set(xlim=(0.4, longest + 0.6), xticks=range(1, longest + 1), ylabel="log-probability of the text so far")
    axes.set_xlabel("tokens written", labelpad=14 + 16 * len(ranked))
    axes.legend(frameon=False, fontsize=9)
    return figure


def draw_growth(lengths: Sequence[int], milliseconds: Sequence[float]) -> Picture:
    """Without a cache: the tokens that have gone through the layers, and the time of one step, as the text grows."""
    if len(lengths) != len(milliseconds) or len(lengths) < 2:
        raise ValueError(f"{len(lengths)} lengths and {len(milliseconds)} times")
    longest = lengths[-1]
    proportional = [milliseconds[0] * n / lengths[0] for n in lengths]
    alt = (
        f"Left: tokens pushed through the layers to write n tokens, n (n + 1) / 2, {longest * (longest + 1) // 2:,} at "
        f"{longest}, beside n itself. Right: milliseconds of one step, from {milliseconds[0]:.0f} at {lengths[0]} "
        f"tokens to {milliseconds[-1]:.0f} at {longest}, beside a line in proportion to the length."
    )
    figure = Picture(9, 3.4, alt)
    left, right = figure.subplots(1, 2)
    plain(left)
    plain(right)
    xs = list(range(1, longest + 1))
    left.plot(xs, [n * (n + 1) // 2 for n in xs], color=PURPLE, label="whole text at every step")
    left.plot(xs, xs, color=GREY, linestyle="--", label="each token once")
    left.set(xlabel="tokens written", ylabel="tokens pushed through the layers")
    left.set_title("Counted: the work of a text is quadratic", loc="left", fontsize=11)
    right.plot(lengths, milliseconds, color=PURPLE, marker="o", label="measured")
    right.plot(lengths, proportional, color=GREY, linestyle="--", label="in proportion to the length")
    right.set(xlabel="tokens of text so far", ylabel="ms for the next token", ylim=(0, None))
    right.set_title("Measured: each token takes longer", loc="left", fontsize=11)
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=9)
    return figure
