"""The figures of Triton kernels show the programs, lanes and addresses that a kernel really has."""

from __future__ import annotations

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from minillm.lab.draw_grid import (
    attention_grid,
    draw_attention_grid,
    draw_indirection,
    draw_lanes,
    draw_programs,
    draw_splits,
    draw_traffic,
)
from minillm.lab.plots import KINDS

KIND_OF = {look.color: kind for kind, look in KINDS.items()}


def boxes(axes: Axes) -> dict[tuple[float, float], str]:
    """{(x, y): kind} of all filled boxes; no two may lie on one another."""
    filled = [box for box in axes.patches if box.get_fill()]
    found = {(round(b.get_x(), 2), round(b.get_y(), 2)): KIND_OF[to_hex(b.get_facecolor())] for b in filled}
    assert len(found) == len(filled)
    return found


def words(axes: Axes, y: float) -> list[str]:
    """The texts in the boxes of one line, from the left."""
    inside = [t for t in axes.texts if abs(t.get_position()[1] - y) < 0.01 and t.get_ha() == "center"]
    return [t.get_text() for t in sorted(inside, key=lambda t: t.get_position()[0])]


def said(figure) -> set[str]:
    """The words of the legend."""
    return {text.get_text() for text in figure.legends[0].get_texts()}


@pytest.mark.parametrize(("rows", "columns", "block"), [(5, 6, 8), (1, 1, 1), (3, 4, 4)])
def test_each_program_has_a_row_and_masks_the_rest(rows, columns, block):
    figure = draw_programs(rows, columns, block)
    (axes,) = figure.axes
    kinds = list(boxes(axes).values())
    assert (kinds.count("cached"), kinds.count("free")) == (rows * columns, rows * (block - columns))
    last = words(axes, 1.1 * (rows - 1) + 0.45)
    assert last == [str((rows - 1) * columns + i) for i in range(columns)] + ["x"] * (block - columns)
    assert f"{block - columns} of them masked" in axes.get_title(loc="left")
    assert f"0 to {rows * columns - 1} in all" in figure.alt


def test_a_masked_program_touches_its_own_row_only():
    figure = draw_lanes(5, 6, 8, program=2)
    (axes,) = figure.axes
    memory = {place: kind for place, kind in boxes(axes).items() if place[1] > 3}
    assert {place for place, kind in memory.items() if kind == "new"} == {(i, 5.8) for i in range(6)}
    assert "rejected" not in memory.values()
    assert [words(axes, y + 0.45) for y in range(3)] == [
        ["0", "1", "2", "3", "4", "5", "6", "7"],
        ["yes"] * 6 + ["no"] * 2,
        ["12", "13", "14", "15", "16", "17", "x", "x"],
    ]
    assert "offsets 12 to 17" in axes.get_title(loc="left") and "Touched: offsets 12 to 17." in figure.alt
    assert "touched by mistake" not in said(figure)


@pytest.mark.parametrize(("program", "strays", "title"), [(2, 6.8, "2 numbers of other"), (4, 8.8, "2 past the end")])
def test_without_a_mask_lanes_stray_into_what_lies_behind(program, strays, title):
    figure = draw_lanes(5, 6, 8, program, masked=False)
    (axes,) = figure.axes
    wrong = {place for place, kind in boxes(axes).items() if kind == "rejected" and place[1] > 3}
    assert wrong == {(0, strays), (1, strays)}
    assert title in axes.get_title(loc="left") and f"to {program * 6 + 7}." in figure.alt
    assert words(axes, 2.45)[-1] == str(program * 6 + 7)
    assert "touched by mistake" in said(figure)


@pytest.mark.parametrize(
    ("counts", "tile", "heads", "both"),
    [([70, 3, 40], 32, 4, (36, 24)), ([1], 32, 1, (1, 1)), ([32, 33], 32, 2, (8, 6)), ([8, 0], 8, 3, (6, 3))],
)
def test_programs_without_rows_return_at_once(counts, tile, heads, both):
    assert attention_grid(counts, tile, heads) == both
    figure = draw_attention_grid(counts, tile, heads)
    kinds = [kind for axes in figure.axes for kind in boxes(axes).values()]
    assert (len(kinds), kinds.count("new")) == both
    assert f"{both[1]} of {both[0]} programs have rows" in figure._suptitle.get_text()
    assert f"{both[1]} programs work, {both[0] - both[1]} return" in figure.alt


def test_tiles_say_how_many_rows_they_have():
    first, second, _ = draw_attention_grid([70, 3, 40], 32, 4).axes
    assert words(first, 0.47) == ["32", "32", "6"]
    assert words(second, 0.47) == ["3"]
    assert second.get_title(loc="left") == "request 1: rows 70 to 72"


def test_a_key_is_found_through_the_table():
    figure = draw_indirection([5, 2, 0, 6], 8, 27, first=8, tile=8, n_blocks=8, row_size=16)
    (axes,) = figure.axes
    lines = [words(axes, y + 0.45) for y in range(6)]
    assert lines[0] == [str(c) for c in range(8, 16)] and lines[1] == ["yes"] * 8
    assert lines[2] == ["1"] * 8 and lines[3] == ["2"] * 8 and lines[4] == [str(i) for i in range(8)]
    assert lines[5] == [str((16 + i) * 16) for i in range(8)]
    pool = {place: kind for place, kind in boxes(axes).items() if place[1] > 6}
    assert len(pool) == 64
    assert {x for (x, _), kind in pool.items() if kind == "new"} == {round(2 * 8.7 + i, 2) for i in range(8)}
    assert {x for (x, _), kind in pool.items() if kind == "cached"} == {round(5 * 8.7 + i, 2) for i in range(8)}


def test_the_last_tile_is_masked_and_a_tile_may_cross_blocks():
    figure = draw_indirection([5, 2, 0, 6], 8, 27, first=24, tile=8, n_blocks=8, row_size=16)
    (axes,) = figure.axes
    assert words(axes, 5.45) == ["768", "784", "800"] + ["x"] * 5
    assert "3 rows of block 6; 5 masked" in axes.get_title(loc="left")
    assert figure.alt.endswith("Offsets: [768, 784, 800].")
    crossing = draw_indirection([1, 0], 4, 8, first=2, tile=4, n_blocks=2, row_size=1)
    assert words(crossing.axes[0], 5.45) == ["6", "7", "0", "1"]
    assert "blocks 0 and 1; 0 masked" in crossing.axes[0].get_title(loc="left")


def test_splits_are_lines_and_the_title_says_what_splitting_does():
    figure = draw_splits([64, 128, 256], {"1 text": [8, 16, 32], "64 texts": [512, 512, 512]}, wanted=264)
    (axes,) = figure.axes
    assert [list(line.get_ydata()) for line in axes.lines[:2]] == [[8, 16, 32], [512] * 3]
    assert "1 text makes 8 programs when short, 32 when long" in axes.get_title(loc="left")
    assert "1 text: 8 to 32; 64 texts: 512 to 512. A level line at 264." in figure.alt


def test_traffic_has_a_box_for_each_row_that_moves():
    figure = draw_traffic({"fused": {"all": (2, 2)}, "apart": {"sum": (2, 1), "mean": (1, 0), "product": (1, 1)}})
    (axes,) = figure.axes
    kinds = [[kind for (_, y), kind in sorted(boxes(axes).items()) if y == line] for line in (0, 1.3)]
    assert kinds == [["cached"] * 2 + ["new"] * 2, ["cached"] * 2 + ["new"] + ["cached"] * 2 + ["new"]]
    assert axes.get_title(loc="left") == "fused: 4 rows move; apart: 6 rows move"
    assert figure.alt.endswith("apart, 6: sum 2 + 1, mean 1 + 0, product 1 + 1")


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="4 lanes cannot hold a row of 6"):
        draw_programs(2, 6, 4)
    with pytest.raises(ValueError, match="program 5 of 5 with 8 lanes"):
        draw_lanes(5, 6, 8, 5)
    with pytest.raises(ValueError, match="each with 2 points"):
        draw_splits([1, 2], {"a": [1]}, 1)
