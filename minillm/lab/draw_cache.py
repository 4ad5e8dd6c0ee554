"""Pictures of the KV cache: what is computed at each step, what is kept, which keys a query sees, what it costs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.config import ModelConfig
from minillm.lab.plots import Picture, cell, draw_bars, picture, plain, show_legend


def draw_staircase(n_prompt: int, n_steps: int) -> Picture:
    """Which tokens are computed at each step: all of them without a cache, only the new one with it."""
    if n_prompt < 1 or n_steps < 1:
        raise ValueError(f"a prompt and some steps are needed, not {n_prompt} and {n_steps}")
    naive = sum(n_prompt + step for step in range(n_steps))
    cached = n_prompt + n_steps - 1
    alt = (
        f"Two grids, a row for each of {n_steps} steps and a column for each token. Without a cache row i has "
        f"{n_prompt} + i computed cells, {naive} in all. With a cache the first row has {n_prompt} and each later row "
        f"one, {cached} in all; the cells left of it are read from the cache."
    )
    figure = Picture(9, 1.6 + 0.32 * n_steps, alt)
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, name, count, keeps in ((left, "without a cache", naive, False), (right, "with a cache", cached, True)):
        plain(axes)
        for step in range(n_steps):
            length = n_prompt + step
            first_new = n_prompt + step - 1 if keeps and step else 0
            for token in range(length):
                cell(axes, token, step, "new" if token >= first_new else "cached")
        axes.set_title(f"{name}: {count} tokens computed", loc="left", fontsize=11)
        axes.set(xlim=(0, n_prompt + n_steps), ylim=(n_steps, 0), xlabel="token", aspect="equal")
    left.set_ylabel("step")
    show_legend(figure, ("new", "cached"))
    return figure


def draw_cache_step(pieces: Sequence[str], n_prompt: int, step: int) -> Picture:
    """One step of cached generation. pieces: all tokens as text, the first n_prompt of them the prompt; step 0 is the
    prefill, step i feeds the i-th generated token."""
    n_steps = len(pieces) - n_prompt
    if not 0 <= step < n_steps:
        raise ValueError(f"step must be from 0 to {n_steps - 1}, not {step}")
    held = 0 if step == 0 else n_prompt + step - 1
    end = n_prompt + step
    what = f"prefill: {n_prompt} tokens go in at once" if step == 0 else f"decode step {step}: one token goes in"
    alt = f"A row of {len(pieces)} slots. {held} are cached, {end - held} are computed now, the rest is free."
    figure, axes = picture(10, 2.4, f"{what}; {held} are read from the cache", alt)
    for i, text in enumerate(pieces):
        kind = "cached" if i < held else "new" if i < end else "free"
        cell(axes, i, 0, kind)
        axes.text(
            i + 0.5, -0.15, text.replace("\n", "\\n").replace("$", r"\$"), rotation=55, ha="right", va="top", fontsize=8
        )
    axes.annotate(
        "next token",
        xy=(end + 0.5, 1.02),
        xytext=(end - 0.5, 1.02),
        ha="center",
        va="bottom",
        fontsize=8,
        arrowprops={"arrowstyle": "->", "connectionstyle": "arc3,rad=-0.8"},
    )
    axes.set(xlim=(-1, len(pieces)), ylim=(0, 1.5), yticks=[], xticks=[])
    axes.spines[:].set_visible(False)
    show_legend(figure, ("cached", "new", "free"))
    return figure


def draw_mask(masks: dict[str, Tensor], title: str) -> Picture:
    """Boolean masks [queries, keys] side by side: which keys each query may see."""
    alt = f"{title}. " + "; ".join(
        f"{name}: query rows see {[int(n) for n in mask.sum(1)]} keys" for name, mask in masks.items()
    )
    queries = max(len(mask) for mask in masks.values())
    figure = Picture(4.2 * len(masks) + 0.5, 1.8 + 0.4 * queries, alt)
    for axes, (name, mask) in zip(figure.subplots(1, len(masks), squeeze=False)[0], masks.items(), strict=True):
        plain(axes)
        for i, j in torch.cartesian_prod(*(torch.arange(n) for n in mask.shape)).tolist():
            cell(axes, j, i, "cached" if mask[i, j] else "free", "" if mask[i, j] else "x")
        axes.set(xlim=(0, mask.shape[1]), ylim=(len(mask), 0), xlabel="key", ylabel="query", aspect="equal")
        axes.set_title(name, loc="left", fontsize=10)
    figure.suptitle(title, fontsize=11)
    return figure


def draw_kv_bars(models: dict[str, ModelConfig], tokens: int, bytes_per_number: int) -> Picture:
    """What the cache of `tokens` tokens takes in each model."""
    sizes = [tokens * m.kv_elements_per_token * bytes_per_number / 2**30 for m in models.values()]
    labels = [f"{name} ({m.n_kv_heads} of {m.n_heads} heads)" for name, m in models.items()]
    alt = "Bars: " + ", ".join(f"{name} {size:.2f} GiB" for name, size in zip(models, sizes, strict=True))
    title = f"The cache of {tokens} tokens, {bytes_per_number} bytes a number: heads decide, not only size"
    return draw_bars(labels, sizes, "GiB", title, alt, "{:.2f}")
