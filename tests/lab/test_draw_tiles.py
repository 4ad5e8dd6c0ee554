"""The walk that is drawn is the walk that `tiled_attention` takes, and the figures show the numbers they are given."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from matplotlib.colors import to_hex

from minillm.attention import OnlineSoftmax, causal_mask, tiled_attention
from minillm.lab import draw_tiles as draw
from minillm.lab.draw_tiles import LOOKS, Tile, tile_walk

SHAPES = [(1, 1, 1, 1), (12, 16, 4, 4), (10, 13, 4, 5), (7, 7, 3, 2), (5, 5, 8, 8), (1, 9, 4, 4), (6, 20, 2, 7)]


def scores(n_queries: int, n_keys: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n_queries * 100 + n_keys)
    return 1.5 * torch.randn(n_queries, n_keys, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_walk_is_the_one_that_tiled_attention_takes(shape, monkeypatch):
    n_queries, n_keys, rows, columns = shape
    taken, add = [], OnlineSoftmax.add

    def noted(self, scores, v):
        taken.append((*scores.shape[1:], bool((scores == -math.inf).any())))
        add(self, scores, v)

    monkeypatch.setattr(OnlineSoftmax, "add", noted)
    q, k, v = (torch.ones(n, 1, 2) for n in (n_queries, n_keys, n_keys))
    tiled_attention(q, k, v, rows, columns)
    walk = tile_walk(n_queries, n_keys, rows, columns)
    assert [(t.last - t.first, t.end - t.start, t.masked) for t in walk] == taken


@pytest.mark.parametrize("shape", SHAPES)
def test_each_pair_that_may_meet_does_so_once_and_no_tile_is_hidden_as_a_whole(shape):
    seen = causal_mask(*shape[:2])
    met = torch.zeros(shape[:2], dtype=torch.long)
    for tile in tile_walk(*shape):
        met[tile.first : tile.last, tile.start : tile.end] += 1
        part = seen[tile.first : tile.last, tile.start : tile.end]
        assert part.any() and tile.masked == (not part.all())
    assert (met[seen] == 1).all() and (met <= 1).all()


def test_half_of_the_tiles_are_left_out():
    assert len(tile_walk(64, 64, 8, 8)) == 8 * 9 // 2
    assert tile_walk(4, 6, 2, 4) == [Tile(0, 2, 0, 4, True), Tile(2, 4, 0, 4, False), Tile(2, 4, 4, 6, True)]


@pytest.mark.parametrize("shape", [(0, 4, 2, 2), (4, 4, 0, 2), (4, 4, 2, 0), (5, 4, 2, 2)])
def test_a_walk_needs_queries_keys_and_tiles(shape):
    with pytest.raises(ValueError, match=r"at least one of each|cannot be the last rows"):
        tile_walk(*shape)


def kinds_drawn(axes) -> dict[tuple[int, int], str]:
    """{(row, column): kind} of every cell of the grid; no two boxes may lie on one another."""
    looks = {(look.color, look.hatch): kind for kind, look in LOOKS.items()}
    cells = {}
    for box in axes.patches:
        if not box.get_fill():
            continue  # a frame
        kind = looks[to_hex(box.get_facecolor()), box.get_hatch() or ""]
        (x, y), (w, h) = map(round, box.get_xy()), (round(box.get_width()), round(box.get_height()))
        for cell in ((i, j) for i in range(y, y + h) for j in range(x, x + w)):
            assert cell not in cells
            cells[cell] = kind
    return cells


@pytest.mark.parametrize("shape", [(12, 16, 4, 4), (10, 13, 4, 5), (5, 5, 8, 8)])
def test_every_cell_is_done_now_ahead_or_never(shape):
    n_queries, n_keys, *_ = shape
    walk = tile_walk(*shape)
    for step in range(len(walk)):
        main = draw.draw_tile_walk(scores(n_queries, n_keys), *shape[2:], step).axes[0]
        expected = {(i, j): "never" for i in range(n_queries) for j in range(n_keys)}
        for place, tile in enumerate(walk):
            kind = "done" if place < step else "now" if place == step else "ahead"
            expected |= {(i, j): kind for i in range(tile.first, tile.last) for j in range(tile.start, tile.end)}
        assert kinds_drawn(main) == expected
        hidden = {cell for cell, kind in expected.items() if kind != "never"} - set(
            map(tuple, causal_mask(n_queries, n_keys).nonzero().tolist())
        )
        crosses = [(math.floor(y), math.floor(x)) for x, y in (text.get_position() for text in main.texts)]
        assert sorted(crosses) == sorted(hidden)


def test_the_bars_are_each_row_s_maximum_and_sum_so_far():
    """By a softmax over what the row has seen, which shares nothing with the online one."""
    s = scores(12, 16)
    for step, tile in enumerate(tile_walk(12, 16, 4, 4)):
        figure = draw.draw_tile_walk(s, 4, 4, step)
        tops, totals = ({math.floor(b.get_y() + 0.35): b.get_width() for b in axes.patches} for axes in figure.axes[1:])
        assert sorted(tops) == sorted(totals) == list(range(tile.last))
        for i in range(tile.last):
            seen = s[i, : min(tile.end if i >= tile.first else 16, 4 + i + 1)]
            assert tops[i] == pytest.approx(seen.max().item())
            assert totals[i] == pytest.approx((seen - seen.max()).exp().sum().item())
        for axes, values in zip(figure.axes[1:], (tops, totals), strict=True):
            low, high = axes.get_xlim()
            assert low <= min(values.values()) and max(values.values()) <= high


def test_the_title_and_the_text_beside_it_say_where_the_walk_is():
    figure = draw.draw_tile_walk(scores(12, 16), 4, 4, 4)
    title = (
        "Tile 5 of 9: queries 4 to 7 meet keys 8 to 11, on the diagonal, partly masked; "
        "3 of 12 tiles are never computed"
    )
    assert figure.get_suptitle() == title
    assert title in figure.alt and "4 tiles are done, 4 to come" in figure.alt
    assert "seen by all its rows" in draw.draw_tile_walk(scores(12, 16), 4, 4, 3).get_suptitle()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [look.label for look in LOOKS.values()]
    assert len({(look.color, look.hatch) for look in LOOKS.values()}) == len(LOOKS)


@pytest.mark.parametrize("step", [-1, 9])
def test_a_step_beyond_the_walk_is_an_error(step):
    with pytest.raises(ValueError, match=f"from 0 to 8, not {step}"):
        draw.draw_tile_walk(scores(12, 16), 4, 4, step)


def lines_drawn(figure) -> dict[str, list[float]]:
    return {line.get_label(): [float(y) for y in line.get_ydata()] for line in figure.axes[0].lines}


def title_of(figure) -> str:
    return figure.axes[0].get_title(loc="left")


def test_errors_are_drawn_by_the_number_of_blocks():
    errors = {"added": [1e-16, 2.0], "crossed": [1e-16, 30.0], "online": [1e-16, 2e-16]}
    figure = draw.draw_errors([1, 8], errors)
    assert lines_drawn(figure) == errors
    assert title_of(figure) == "With 8 blocks: added off by 2.0, crossed off by 30.0; online by 2e-16"
    assert title_of(figure) in figure.alt and "crossed: 1e-16, 3e+01" in figure.alt


def test_memory_is_drawn_in_megabytes_and_its_title_compares_the_growth():
    figure = draw.draw_memory(
        [256, 1024], {"materialised": [2e6, 32e6], "in tiles": [3e6, 3e6], "formula": [1e6, 16e6]}
    )
    assert lines_drawn(figure) == {"materialised": [2, 32], "in tiles": [3, 3], "formula": [1, 16]}
    assert title_of(figure) == "4 times the tokens. Extra memory: materialised 16 times, in tiles no more"
    styles = [line.get_linestyle() for line in figure.axes[0].lines]
    assert styles == ["-", "-", "--"]  # what is only there to compare with is dashed


def test_accesses_are_drawn_by_the_rows_of_a_tile():
    figure = draw.draw_accesses([16, 64], {"materialised": [90.0, 90.0], "in tiles": [40.0, 10.0]}, 8192)
    assert lines_drawn(figure)["in tiles"] == [40, 10]
    assert title_of(figure) == "8192 tokens: from 16 to 64 rows a tile, 4.0 times fewer bytes"
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["16", "64"]


def test_speed_is_drawn_in_milliseconds_against_the_first():
    seconds = {"materialised": [0.01, 0.4], "fused": [0.005, 0.1], "in tiles": [0.02, 0.2]}
    figure = draw.draw_speed([256, 1024], seconds)
    assert lines_drawn(figure)["fused"] == pytest.approx([5, 100])
    assert title_of(figure) == "1024 tokens: fused 4.0 times as fast, in tiles 2.0 times as fast as materialised"


def test_a_way_to_compute_looks_the_same_in_all_figures_and_has_its_own_marker():
    figures = [
        draw.draw_memory([1, 2], {"in tiles": [1.0, 1.0]}),
        draw.draw_accesses([1, 2], {"materialised": [1.0, 1.0], "in tiles": [1.0, 1.0]}, 4),
        draw.draw_speed([1, 2], {"materialised": [1.0, 1.0], "fused": [1.0, 1.0], "in tiles": [1.0, 1.0]}),
    ]
    looks = [
        (line.get_label(), line.get_color(), line.get_marker()) for figure in figures for line in figure.axes[0].lines
    ]
    assert len(set(looks)) == 3 and Counter(label for label, *_ in looks)["in tiles"] == 3
    assert len({marker for *_, marker in looks}) == 3


def test_a_short_vertical_axis_names_more_than_the_powers_of_ten():
    short, long = (draw.draw_memory([1, 2], {"in tiles": [3e6, high]}) for high in (40e6, 1e12))
    named = [
        [v for v in f.axes[0].yaxis.get_major_locator()() if f.axes[0].get_ylim()[0] <= v <= f.axes[0].get_ylim()[1]]
        for f in (short, long)
    ]
    assert named[0] == pytest.approx([5, 10, 20])
    assert all(math.log10(v) % 1 == pytest.approx(0) for v in named[1])


@pytest.mark.parametrize(("x", "lines"), [([1], {"a": [1.0]}), ([1, 2], {}), ([1, 2], {"a": [1.0]})])
def test_lines_need_two_places_and_a_value_at_each(x, lines):
    with pytest.raises(ValueError, match="places, and lines of"):
        draw.draw_lines(x, lines, "x", "y", "title", "{:.1f}")
