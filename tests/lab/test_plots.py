"""A figure carries its text, and what a colour says is also said by a hatch or a word."""

from __future__ import annotations

from base64 import b64decode
from itertools import combinations
from types import SimpleNamespace

import pytest
from IPython.core.formatters import DisplayFormatter
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from minillm.lab import plots
from minillm.lab.plots import INK, KINDS, LIGHT, WHITE, cell, draw_bars, picture, show_legend


def test_a_picture_is_shown_as_an_image_with_its_text():
    figure, axes = picture(3, 2, "the conclusion", "what is seen")
    assert axes.get_title(loc="left") == "the conclusion"
    data, metadata = DisplayFormatter().format(figure)  # as a notebook asks for it
    assert data["text/plain"] == "Figure: what is seen"
    assert metadata["image/png"]["alt"] == "what is seen"
    assert b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert set(data) == {"image/png", "text/plain"}


def test_a_picture_stays_small_where_figures_are_drawn_otherwise(monkeypatch):
    """As in a notebook behind its first widget, when matplotlib's own way of showing figures has been registered."""
    formatter = DisplayFormatter()
    formatter.formatters["image/png"].for_type(Figure, lambda figure: b"large")
    figure, _ = picture(3, 2, "the conclusion", "what is seen")
    assert formatter.format(figure)[0]["image/png"] == b"large"
    monkeypatch.setattr(plots, "get_ipython", lambda: SimpleNamespace(display_formatter=formatter))
    plots.show_pictures_as_they_are()
    data, metadata = formatter.format(figure)
    assert data["image/png"] == figure.png() and metadata["image/png"] == {"alt": "what is seen"}
    assert data["text/plain"] == "Figure: what is seen"


def test_without_a_notebook_there_is_nothing_to_register(monkeypatch):
    monkeypatch.setattr(plots, "get_ipython", lambda: None)
    plots.show_pictures_as_they_are()


def test_drawing_opens_no_window_and_keeps_no_figure():
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    draw_bars(["a"], [1], "s", "title", "alt")
    assert plt.get_fignums() == before


def test_kinds_can_be_told_apart_with_and_without_colour():
    for (one, a), (other, b) in combinations(KINDS.items(), 2):
        assert a.color != b.color, (one, other)
        assert a.label != b.label, (one, other)
        assert (a.hatch, a.color == WHITE) != (b.hatch, b.color == WHITE), (one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cell_and_the_legend_look_like_their_kind(kind):
    figure, axes = picture(3, 2, "title", "alt")
    box = cell(axes, 2, 5, kind, "word", width=3, height=4)
    show_legend(figure, (kind,))
    look = KINDS[kind]
    assert box in axes.patches and box.get_bbox().bounds == (2, 5, 3, 4)
    (label,) = axes.texts
    assert label.get_text() == "word" and label.get_position() == (3.5, 7) and label.get_color() == INK
    (legend,) = figure.legends
    (patch,) = legend.get_patches()
    assert [text.get_text() for text in legend.get_texts()] == [look.label]
    for drawn in (box, patch):
        assert drawn.get_facecolor() == to_rgba(look.color)
        assert (drawn.get_hatch() or "") == look.hatch
        assert drawn.get_edgecolor() == to_rgba(LIGHT if kind == "free" else WHITE)  # a hatch has the edge's colour


def test_a_cell_without_a_word_has_no_label():
    _, axes = picture(3, 2, "title", "alt")
    cell(axes, 0, 0, "new")
    assert not axes.texts


def test_bars_have_their_lengths_labels_and_values():
    figure = draw_bars(["first", "second"], [0.5, 2.25], "GiB", "title", "alt", "{:.2f}")
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [0.5, 2.25]
    assert [bar.get_y() + bar.get_height() / 2 for bar in axes.patches] == [0, 1]
    assert axes.yaxis_inverted()  # so that the first label is on top
    assert [label.get_text() for label in axes.get_yticklabels()] == ["first", "second"]
    assert [text.get_text() for text in axes.texts] == ["0.50", "2.25"]
    assert axes.get_xlabel() == "GiB" and axes.get_title(loc="left") == "title" and figure.alt == "alt"


@pytest.mark.parametrize(("labels", "values"), [([], []), (["a"], [1, 2]), (["a", "b"], [1])])
def test_each_bar_needs_a_label(labels, values):
    with pytest.raises(ValueError, match=f"{len(labels)} labels and {len(values)} values"):
        draw_bars(labels, values, "s", "title", "alt")
