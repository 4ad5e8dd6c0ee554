"""The figures of the KV cache show the counts that arithmetic gives, and their texts say the same."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from minillm.attention import causal_mask
from minillm.lab.catalogue import MODELS
from minillm.lab.draw_cache import draw_cache_step, draw_kv_bars, draw_mask, draw_staircase
from minillm.lab.plots import KINDS


def grid(axes: Axes) -> dict[tuple[int, int], str]:
    """{(column, row): kind} of all boxes; no two may lie on one another."""
    kinds = {look.color: kind for kind, look in KINDS.items()}
    boxes = {(round(box.get_x()), round(box.get_y())): kinds[to_hex(box.get_facecolor())] for box in axes.patches}
    assert len(boxes) == len(axes.patches)
    return boxes


def legend(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize(("n_prompt", "n_steps"), [(1, 1), (4, 5), (1, 6), (7, 1)])
def test_the_staircase_counts_what_is_computed(n_prompt, n_steps):
    figure = draw_staircase(n_prompt, n_steps)
    left, right = (grid(axes) for axes in figure.axes)
    naive = n_prompt * n_steps + n_steps * (n_steps - 1) // 2
    cached = n_prompt + (n_steps - 1)

    assert set(left) == set(right) == {(x, y) for y in range(n_steps) for x in range(n_prompt + y)}
    assert Counter(left.values()) == {"new": naive}
    assert Counter(right.values()) == Counter({"new": cached, "cached": naive - cached})
    for y in range(1, n_steps):  # each later step computes its last token and no other
        assert [x for (x, row), kind in right.items() if row == y and kind == "new"] == [n_prompt + y - 1]

    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        f"without a cache: {naive} tokens computed",
        f"with a cache: {cached} tokens computed",
    ]
    assert f"{n_steps} steps" in figure.alt and f"{naive} in all" in figure.alt and f"{cached} in all" in figure.alt
    assert legend(figure) == [KINDS["new"].label, KINDS["cached"].label]


@pytest.mark.parametrize(("n_prompt", "n_steps"), [(0, 3), (3, 0)])
def test_a_staircase_needs_a_prompt_and_a_step(n_prompt, n_steps):
    with pytest.raises(ValueError, match=f"not {n_prompt} and {n_steps}"):
        draw_staircase(n_prompt, n_steps)


PIECES = ["The", " price", "$5", "\n", " x", " y"]


@pytest.mark.parametrize(
    ("step", "kinds", "title"),
    [
        (0, "nnnfff", "prefill: 3 tokens go in at once; 0 are read from the cache"),
        (1, "cccnff", "decode step 1: one token goes in; 3 are read from the cache"),
        (2, "ccccnf", "decode step 2: one token goes in; 4 are read from the cache"),
    ],
)
def test_a_step_reads_what_is_past_and_computes_what_is_new(step, kinds, title):
    figure = draw_cache_step(PIECES, 3, step)
    (axes,) = figure.axes
    names = {"n": "new", "c": "cached", "f": "free"}
    assert grid(axes) == {(x, 0): names[kind] for x, kind in enumerate(kinds)}
    assert axes.get_title(loc="left") == title
    assert figure.alt.startswith(
        f"A row of 6 slots. {kinds.count('c')} are cached, {kinds.count('n')} are computed now"
    )
    arrow = next(text for text in axes.texts if text.get_text() == "next token")
    assert arrow.xy[0] == kinds.index("f") + 0.5  # it points to the first free slot: the next token's
    assert len(legend(figure)) == 3


def test_token_texts_are_shown_as_they_are():
    (axes,) = draw_cache_step(PIECES, 3, 0).axes
    shown = [text for text in axes.texts if text.get_text() != "next token"]
    assert [text.get_text() for text in shown] == ["The", " price", r"\$5", r"\n", " x", " y"]  # "$" begins a formula
    assert [text.get_position()[0] for text in shown] == [i + 0.5 for i in range(6)]


@pytest.mark.parametrize("step", [-1, 3])
def test_a_step_must_be_one_of_those_that_take_place(step):
    with pytest.raises(ValueError, match=f"step must be from 0 to 2, not {step}"):
        draw_cache_step(PIECES, 3, step)


def test_masks_are_drawn_as_they_are_and_read_aloud():
    masks = {"right": causal_mask(3, 7), "wrong": torch.ones(2, 4, dtype=torch.bool).tril()}
    figure = draw_mask(masks, "Three on a past")
    for axes, (name, mask) in zip(figure.axes, masks.items(), strict=True):
        queries, keys = mask.shape
        seen = {(key, query) for query in range(queries) for key in range(keys) if mask[query, key]}
        boxes = grid(axes)
        assert set(boxes) == {(key, query) for query in range(queries) for key in range(keys)}
        assert {at for at, kind in boxes.items() if kind == "cached"} == seen
        assert {at for at, kind in boxes.items() if kind == "free"} == set(boxes) - seen
        crosses = {tuple(int(v) for v in text.get_position()) for text in axes.texts if text.get_text() == "x"}
        assert crosses == set(boxes) - seen  # a mark besides the colour
        assert axes.get_title(loc="left") == name
        assert axes.get_ylim() == (queries, 0)  # the first query is on top
    assert figure.alt == ("Three on a past. right: query rows see [5, 6, 7] keys; wrong: query rows see [1, 2] keys")


def test_the_bars_are_the_bytes_of_the_caches():
    models = {name: MODELS[name] for name in ("Llama-2-7B", "SmolLM2-135M")}
    figure = draw_kv_bars(models, tokens=4096, bytes_per_number=2)
    (axes,) = figure.axes
    smol = 2 * 30 * 3 * 64 * 4096 * 2 / 2**30
    assert [bar.get_width() for bar in axes.patches] == [pytest.approx(2.0), pytest.approx(smol)]  # 512 KiB a token
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["Llama-2-7B (32 of 32 heads)", "SmolLM2-135M (3 of 9 heads)"]
    assert figure.alt == "Bars: Llama-2-7B 2.00 GiB, SmolLM2-135M 0.09 GiB"
    assert axes.get_xlabel() == "GiB"
    assert re.search("4096 tokens, 2 bytes a number", axes.get_title(loc="left"))
