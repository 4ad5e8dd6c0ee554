"""Pictures of grouped heads: who reads which KV head, what the cache takes of a memory, what fewer heads save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minillm.config import ModelConfig
from minillm.gqa import attention_intensity, kv_bytes_a_token, with_kv_heads
from minillm.lab.plots import BLUE, GREEN, GREY, INK, PURPLE, RED, YELLOW, Picture, cell, picture, plain, show_legend
from minillm.lab.roofline import Limits

NAMES = {"new": "query heads", "cached": "KV heads, in the cache"}
STYLES = ((BLUE, "o", "-"), (GREEN, "s", "--"), (PURPLE, "^", ":"), (RED, "D", "-."), (YELLOW, "v", "-"))


def name_of(n_heads: int, n_kv_heads: int) -> str:
    """MHA, GQA or MQA, with the numbers."""
    short = "MHA" if n_kv_heads == n_heads else "MQA" if n_kv_heads == 1 else f"GQA-{n_kv_heads}"
    return f"{short}: {n_heads} query heads, {n_kv_heads} KV head{'s' if n_kv_heads > 1 else ''}"


def readers(n_heads: int, n_kv_heads: int, order: str = "side by side") -> list[int]:
    """For each query head, the KV head it reads. order: "side by side", as models are trained, or "in turn", the usual
    mistake."""
    if n_kv_heads < 1 or n_heads % n_kv_heads:
        raise ValueError(f"{n_heads} query heads cannot share {n_kv_heads} KV heads evenly")
    if order not in ("side by side", "in turn"):
        raise ValueError(f"order must be 'side by side' or 'in turn', not {order!r}")
    group = n_heads // n_kv_heads
    return [h // group if order == "side by side" else h % n_kv_heads for h in range(n_heads)]


def draw_heads(n_heads: int, kv_heads: Sequence[int], order: str = "side by side") -> Picture:
    """A panel for each number of KV heads: the query heads above, the KV heads below, a line from each to its own."""
    maps = [readers(n_heads, n, order) for n in kv_heads]
    said = "; ".join(f"{name_of(n_heads, n)}, heads read {read}" for n, read in zip(kv_heads, maps, strict=True))
    figure = Picture(3.6 * len(kv_heads) + 0.4, 2.9, f"Query heads joined with the KV heads they read. {said}")
    for axes, n, read in zip(figure.subplots(1, len(kv_heads), squeeze=False)[0], kv_heads, maps, strict=True):
        plain(axes)
        places = [(i + 0.5) * n_heads / n for i in range(n)]
        for h in range(n_heads):
            cell(axes, h + 0.1, 2, "new", str(h), width=0.8, height=0.6)
        for i, x in enumerate(places):
            cell(axes, x - 0.4, 0, "cached", str(i), width=0.8, height=0.6)
        for h, i in enumerate(read):
            axes.plot([h + 0.5, places[i]], [2, 0.6], color=INK, linewidth=1)
        axes.set(xlim=(0, n_heads), ylim=(-0.2, 2.8), xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        axes.set_title(name_of(n_heads, n), fontsize=9, loc="left")
    times = f"the cache is {n_heads // min(kv_heads)} times smaller with {min(kv_heads)} than with {n_heads}"
    trained = [readers(n_heads, n) for n in kv_heads]
    strayed = sum(a != b for here, there in zip(maps, trained, strict=True) for a, b in zip(here, there, strict=True))
    title = f"Each query head reads one KV head; {times}"
    if order == "in turn":
        title = f"Taken in turn, {strayed} query heads read a KV head\nthat they were not trained with"
    figure.suptitle(title, fontsize=11)
    legend(figure)
    return figure


def legend(figure: Picture) -> None:
    """The usual legend, in the words of this picture."""
    show_legend(figure, tuple(NAMES))
    for text, label in zip(figure.legends[-1].get_texts(), NAMES.values(), strict=True):
        text.set_text(label)


def draw_memory(
    name: str, config: ModelConfig, n_kv_heads: int, memory: float, weights: float, context: int, batch: int
) -> Picture:
    """A memory with the weights in it, and as many caches of `context` tokens as there are texts, at 16 bits."""
    one = context * kv_bytes_a_token(with_kv_heads(config, n_kv_heads))
    most = max(0, int((memory - weights) // one))
    fits = batch <= most
    title = (
        f"{name}, {n_kv_heads} KV heads, {context:,} tokens each: "
        f"{batch} texts {'fit' if fits else 'do not fit'}, at most {most} do"
    )
    alt = (
        f"A bar of {memory / 2**30:.1f} GiB: {weights / 2**30:.1f} GiB of weights, "
        f"then {batch} caches of {one / 2**30:.2f} GiB, {batch * one / 2**30:.1f} GiB together."
    )
    figure, axes = picture(9, 2.2, title, alt)
    cell(axes, 0, 0, "prompt", "weights", weights / 2**30)
    shown = min(batch, 200)  # more would be black
    for i in range(shown):
        cell(axes, (weights + i * batch / shown * one) / 2**30, 0, "cached", "", batch / shown * one / 2**30)
    axes.axvline(memory / 2**30, color=RED, linewidth=2)
    axes.text(memory / 2**30, 1.05, "all memory", ha="right", va="bottom", fontsize=9, color=INK)
    axes.set(xlim=(0, 1.03 * max(memory, weights + batch * one) / 2**30), ylim=(0, 1.4), yticks=[], xlabel="GiB")
    return figure


def draw_decode_times(
    places: Sequence[str], measured: Mapping[int, Sequence[float]], predicted: Mapping[int, Sequence[float]], title: str
) -> Picture:
    """Milliseconds of a decode step, for each place (a context and a batch) and number of KV heads.

    measured: bars; predicted: the roofline's, as marks on them. Both in seconds.
    """
    if any(len(x) != len(places) for x in (*measured.values(), *predicted.values())):
        raise ValueError(f"a time for each of {len(places)} places is needed")
    said = "; ".join(
        f"{n} KV heads: {', '.join(f'{1e3 * s:.0f}' for s in seconds)} ms" for n, seconds in measured.items()
    )
    figure, axes = picture(
        9, 3.6, title, f"Bars in groups, at {'; '.join(' '.join(place.split()) for place in places)}. {said}"
    )
    width = 0.8 / len(measured)
    hatches = ("", "///", "...", "xxx")
    for j, (n, seconds) in enumerate(measured.items()):
        at = [i + (j - (len(measured) - 1) / 2) * width for i in range(len(places))]
        axes.bar(at, [1e3 * s for s in seconds], width, label=f"KV heads: {n}", color=STYLES[j][0],
                 hatch=hatches[j], edgecolor="white")  # fmt: skip
        label = "the roofline's least" if j == 0 else None
        axes.plot(at, [1e3 * s for s in predicted[n]], "_", color=INK, markersize=14, markeredgewidth=2, label=label)
    axes.set_xticks(range(len(places)), places)
    axes.set_ylabel("ms a decode step")
    axes.legend(frameon=False, fontsize=9)
    return figure


def draw_intensity(limits: Sequence[Limits], config: ModelConfig, bytes_a_number: int = 2) -> Picture:
    """The intensity of decode attention for each possible number of KV heads, against the ridges of some machines."""
    counts = [n for n in range(config.n_heads, 0, -1) if config.n_heads % n == 0]
    values = [attention_intensity(with_kv_heads(config, n), bytes_a_number) for n in counts]
    lowest = min(limits, key=lambda x: x.ridge)
    below = sum(v < lowest.ridge for v in values)
    verdict = f"below the ridge of the {lowest.name} for {below} of {len(counts)} numbers of KV heads"
    alt = "Points: " + ", ".join(f"{n} KV heads {v:g} FLOP/B" for n, v in zip(counts, values, strict=True))
    alt += ". Lines: " + ", ".join(f"{x.name} {x.ridge:.0f} FLOP/B" for x in limits)
    figure, axes = picture(9, 3.4, f"Attention of a decode step is {verdict}", alt)
    axes.plot(range(len(counts)), values, "o-", color=BLUE)
    for i, value in enumerate(values):
        axes.annotate(f"{value:g}", (i, value), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=9)
    for each in limits:
        axes.axhline(each.ridge, color=GREY, linestyle="--", linewidth=1)
        axes.text(-0.3, each.ridge * 1.06, f"{each.name}: {each.ridge:.0f}", va="bottom", fontsize=9)
    axes.set(yscale="log", xlabel="KV heads", ylabel="FLOP a byte", xlim=(-0.35, len(counts) - 0.6))
    axes.set_ylim(min(values) / 2, 2.5 * max(*values, *(x.ridge for x in limits)))
    axes.set_xticks(range(len(counts)), counts)
    return figure


def draw_twins(points: Sequence[tuple[int, int, float, float]], unit: str) -> Picture:
    """points: (KV heads, seed, loss, its standard error). Losses of the same seed are joined."""
    seeds = sorted({seed for _, seed, _, _ in points})
    heads = sorted({n for n, _, _, _ in points}, reverse=True)
    mean = {n: sum(p[2] for p in points if p[0] == n) / sum(p[0] == n for p in points) for n in heads}
    change = mean[heads[-1]] - mean[heads[0]]
    title = f"From {heads[0]} KV heads to {heads[-1]}: {change:+.3f} {unit}, a mean of {len(seeds)} seeds"
    alt = f"Points in {unit}: " + "; ".join(f"{n} KV heads, seed {s}: {x:.3f}" for n, s, x, _ in points)
    figure, axes = picture(7, 3.2, title, alt)
    for j, seed in enumerate(seeds):
        own = sorted(((n, x, e) for n, s, x, e in points if s == seed), reverse=True)
        color, marker, line = STYLES[j]
        at = [heads.index(n) + 0.04 * j for n, _, _ in own]
        axes.errorbar(at, [x for _, x, _ in own], [e for _, _, e in own], color=color, marker=marker, linestyle=line,
                      capsize=4, label=f"seed {seed}")  # fmt: skip
    axes.set_xticks(range(len(heads)), heads)
    axes.set(xlabel="KV heads", ylabel=unit)
    figure.legend(loc="outside lower center", ncols=len(seeds), frameon=False, fontsize=9)
    return figure
