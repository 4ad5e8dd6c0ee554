"""The pictures of grouped heads draw what they are given: asserted on the plotted data."""

from __future__ import annotations

import pytest

from minillm.gqa import kv_bytes_a_token, with_kv_heads
from minillm.lab.catalogue import MODELS
from minillm.lab.draw_gqa import (
    draw_decode_times,
    draw_heads,
    draw_intensity,
    draw_memory,
    draw_twins,
    name_of,
    readers,
)
from minillm.lab.plots import KINDS
from minillm.lab.roofline import Limits, gpu_limits

SEVEN = MODELS["Llama-2-7B"]


def kinds(axes) -> list[str]:
    looks = {look.hatch: kind for kind, look in KINDS.items() if kind in ("new", "cached", "prompt")}
    return [looks[patch.get_hatch() or ""] for patch in axes.patches]


def test_heads_side_by_side_share_and_in_turn_is_another_map():
    assert readers(6, 6) == [0, 1, 2, 3, 4, 5]
    assert readers(6, 2) == [0, 0, 0, 1, 1, 1]
    assert readers(6, 1) == [0] * 6
    assert readers(6, 2, "in turn") == [0, 1, 0, 1, 0, 1]
    with pytest.raises(ValueError, match="6 query heads cannot share 4"):
        readers(6, 4)
    with pytest.raises(ValueError, match="order must be"):
        readers(6, 2, "backwards")


def test_a_name_says_which_of_the_three_it_is():
    assert name_of(9, 9) == "MHA: 9 query heads, 9 KV heads"
    assert name_of(9, 3) == "GQA-3: 9 query heads, 3 KV heads"
    assert name_of(9, 1) == "MQA: 9 query heads, 1 KV head"


@pytest.mark.parametrize("order", ["side by side", "in turn"])
def test_every_query_head_is_joined_with_the_one_it_reads(order):
    figure = draw_heads(6, [6, 2, 1], order)
    assert f"heads read {readers(6, 2, order)}" in figure.alt
    for axes, n in zip(figure.axes, [6, 2, 1], strict=True):
        assert kinds(axes).count("new") == 6 and kinds(axes).count("cached") == n
        boxes = [p.get_x() + 0.4 for p in axes.patches if p.get_y() == 0]
        ends = [line.get_xdata() for line in axes.lines]
        assert [x[0] for x in ends] == [h + 0.5 for h in range(6)]
        assert [boxes.index(pytest.approx(x[1])) for x in ends] == readers(6, n, order)
    if order == "in turn":
        assert "2 query heads read a KV head" in figure.get_suptitle()


def test_a_memory_is_filled_with_weights_and_caches():
    figure = draw_memory("7B", SEVEN, 32, 80e9, 13.5e9, 4096, 16)
    (axes,) = figure.axes
    assert kinds(axes) == ["prompt"] + ["cached"] * 16
    assert axes.patches[1].get_width() == pytest.approx(2)
    assert axes.patches[0].get_width() == pytest.approx(13.5e9 / 2**30)
    assert axes.lines[0].get_xdata()[0] == pytest.approx(80e9 / 2**30)
    assert "16 texts fit, at most 30 do" in axes.get_title(loc="left")
    assert "do not fit" in draw_memory("7B", SEVEN, 32, 80e9, 13.5e9, 4096, 31).axes[0].get_title(loc="left")
    assert "31 texts fit, at most 123 do" in draw_memory("7B", SEVEN, 8, 80e9, 13.5e9, 4096, 31).axes[0].get_title(
        "left"
    )


def test_very_many_caches_are_drawn_as_few_boxes_of_the_same_width_together():
    axes = draw_memory("7B", SEVEN, 1, 80e9, 13.5e9, 4096, 900).axes[0]
    caches = axes.patches[1:]
    together = 900 * 4096 * kv_bytes_a_token(with_kv_heads(SEVEN, 1)) / 2**30
    assert len(caches) == 200 and sum(p.get_width() for p in caches) == pytest.approx(together)


def test_decode_times_are_bars_with_the_rooflines_mark():
    measured, predicted = {9: [0.03, 0.09], 3: [0.02, 0.04]}, {9: [0.02, 0.08], 3: [0.01, 0.03]}
    axes = draw_decode_times(["a", "b"], measured, predicted, "title").axes[0]
    assert [round(p.get_height()) for p in axes.patches] == [30, 90, 20, 40]
    assert [list(line.get_ydata()) for line in axes.lines] == [[20, 80], [10, 30]]
    with pytest.raises(ValueError, match="a time for each of 3 places"):
        draw_decode_times(["a", "b", "c"], measured, predicted, "title")


def test_intensity_grows_with_the_group_and_the_title_counts_what_is_below():
    low = Limits("Small", 10.0, 1.0)
    axes = draw_intensity([gpu_limits("A100 80GB SXM"), low], SEVEN).axes[0]
    assert list(axes.lines[0].get_ydata()) == [1, 2, 4, 8, 16, 32]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["32", "16", "8", "4", "2", "1"]
    assert "below the ridge of the Small for 4 of 6" in axes.get_title(loc="left")
    assert axes.lines[2].get_ydata()[0] == 10


def test_twins_are_points_with_errors_joined_by_seed():
    points = [(9, 0, 2.0, 0.1), (1, 0, 2.3, 0.1), (9, 1, 2.2, 0.1), (1, 1, 2.3, 0.1)]
    figure = draw_twins(points, "bits a byte")
    axes = figure.axes[0]
    assert [list(c.lines[0].get_ydata()) for c in axes.containers] == [[2.0, 2.3], [2.2, 2.3]]
    assert "From 9 KV heads to 1: +0.200 bits a byte" in axes.get_title(loc="left")
    assert "9 KV heads, seed 1: 2.200" in figure.alt
