"""The pictures of sampling show what the rules really do: counted on the bars, lines and labels that are plotted."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from matplotlib.colors import to_rgba

from minillm.lab.draw_sampling import (
    CUT,
    KEPT,
    draw_chain,
    draw_cut,
    draw_growth,
    draw_penalties,
    draw_race,
    draw_sampler,
    draw_temperatures,
    readable,
)
from minillm.sampling import SamplingParams, distribution

PROBABILITIES = [0.05, 0.4, 0.1, 0.3, 0.15]  # best first: tokens 1, 3, 4, 2, 0
LOGITS = torch.tensor(PROBABILITIES, dtype=torch.float64).log()
NAMES = "abcde"


def piece(token: int) -> str:
    return NAMES[token]


def drawn(axes) -> dict[bool, dict[int, float]]:
    """Whether it stays -> place -> height, of all bars; colour and hatch must agree."""
    found = {True: {}, False: {}}
    for bar in axes.patches:
        stays = bar.get_facecolor() == to_rgba(KEPT.color)
        assert bar.get_hatch() == (KEPT if stays else CUT).hatch
        found[stays][round(bar.get_x() + bar.get_width() / 2)] = bar.get_height()
    return found


def labels(axes) -> list[str]:
    return [label.get_text() for label in axes.get_xticklabels()]


@pytest.mark.parametrize(
    ("rule", "value", "kept"),
    [("top-k", 2, 2), ("top-k", 0, 5), ("top-p", 0.75, 3), ("top-p", 0.1, 1), ("min-p", 0.3, 3), ("min-p", 0, 5)],
)
def test_kept_bars_come_first_and_the_rest_is_hatched_as_cut(rule, value, kept):
    figure = draw_cut(LOGITS, piece, rule, value)
    bars = drawn(figure.axes[0])
    assert sorted(bars[True]) == list(range(kept)) and sorted(bars[False]) == list(range(kept, 5))
    heights = [(bars[True] | bars[False])[i] for i in range(5)]
    assert heights == pytest.approx(sorted(PROBABILITIES, reverse=True))
    assert labels(figure.axes[0]) == list("bdeca")
    assert f"keeps {kept} of 5 tokens" in figure.axes[0].get_title("left")
    assert f"{rule} {value:g} keeps {kept} of all tokens; of those shown {5 - kept} are hatched" in figure.alt


def test_only_the_best_tokens_are_drawn_but_all_are_counted():
    figure = draw_cut(LOGITS, piece, "top-k", 4, shown=2)
    assert {stays: len(bars) for stays, bars in drawn(figure.axes[0]).items()} == {True: 2, False: 0}
    assert "keeps 4 of 5 tokens, with 95% of the probability" in figure.axes[0].get_title("left")


def dashed(axes):
    (line,) = (line for line in axes.lines if line.get_linestyle() == "--")
    return [float(x) for x in line.get_xdata()], [float(y) for y in line.get_ydata()]


def test_each_rule_has_its_threshold_where_it_decides():
    xs, _ = dashed(draw_cut(LOGITS, piece, "top-k", 2).axes[0])
    assert xs == [1.5, 1.5]  # between the second and the third bar
    _, ys = dashed(draw_cut(LOGITS, piece, "min-p", 0.3).axes[0])
    assert ys == pytest.approx([0.12, 0.12])  # 0.3 x 0.4
    figure = draw_cut(LOGITS, piece, "top-p", 0.75)
    total = figure.axes[1]
    _, ys = dashed(total)
    assert ys == [0.75, 0.75]
    assert list(total.lines[0].get_ydata()) == pytest.approx([0.4, 0.7, 0.85, 0.95, 1.0])


def test_an_unknown_rule_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown rule 'typical'; known: top-k, top-p, min-p"):
        draw_cut(LOGITS, piece, "typical", 0.5)


def test_the_sampler_draws_the_final_probabilities_and_names_the_rule_that_cut():
    """top-k leaves 0.4, 0.3, 0.15, 0.1; of their sum, 0.95, top-p 0.85 leaves 0.4, 0.3, 0.15; min-p 0.5 two of them."""
    params = SamplingParams(top_k=4, top_p=0.85, min_p=0.5)
    figure = draw_sampler(LOGITS, piece, params)
    bars = drawn(figure.axes[0])
    assert bars[True] == pytest.approx({0: 0.4 / 0.7, 1: 0.3 / 0.7})
    assert bars[False] == pytest.approx({2: 0.15, 3: 0.1, 4: 0.05})
    letters = {round(note.xy[0]): note.get_text() for note in figure.axes[0].texts if len(note.get_text()) == 1}
    assert letters == {2: "m", 3: "p", 4: "k"}
    assert "after top-k: 4, then top-p: 3, then min-p: 2." in figure.alt


@pytest.mark.parametrize("temperature", [0, 0.5, 2])
def test_the_sampler_agrees_with_the_distribution_at_any_temperature(temperature):
    params = SamplingParams(temperature=temperature, top_k=4, top_p=0.9, min_p=0.1)
    want = distribution(LOGITS, params).sort(descending=True).values
    bars = drawn(draw_sampler(LOGITS, piece, params).axes[0])
    assert list(bars[True].values()) == pytest.approx(want[want > 0].tolist())
    assert len(bars[False]) == (0 if temperature == 0 else 5 - len(bars[True]))  # nothing is left there to cut


def test_temperatures_have_a_panel_each_with_what_is_not_shown():
    figure = draw_temperatures(LOGITS, piece, [0, 1, 2], shown=2)
    assert len(figure.axes) == 3
    heights = [[bar.get_height() for bar in axes.patches] for axes in figure.axes]
    assert heights[0] == [1, 0]
    assert heights[1] == pytest.approx([0.4, 0.3])
    root = [math.sqrt(p) for p in (0.4, 0.3)]
    assert heights[2] == pytest.approx([r / sum(math.sqrt(p) for p in PROBABILITIES) for r in root])
    assert [axes.get_title("left").split(": ")[1] for axes in figure.axes] == ["0%", "30%", "44%"]
    assert "temperature 1: the best has 0.40, all tokens not shown 0.30" in figure.alt


def test_penalties_have_an_arrow_for_each_token_that_moves():
    figure = draw_penalties(["a", "b", "c"], [2.0, -1.0, 0.5], {"one": [1.0, -2.0, 0.5], "two": [2.0, -1.0, 0.4]})
    arrows = [
        [(note.xyann[0], note.xy[0]) for note in axes.texts if note.arrow_patch is not None] for axes in figure.axes
    ]
    assert arrows == [[(2.0, 1.0), (-1.0, -2.0)], [(0.5, 0.4)]]
    after, before = figure.axes[0].collections
    assert after.get_offsets()[:, 0].tolist() == [1.0, -2.0, 0.5]
    assert before.get_offsets()[:, 0].tolist() == [2.0, -1.0, 0.5]
    assert "one moves 2 of 3 tokens; two moves 1 of 3 tokens" in figure.alt


def test_a_chain_has_a_bar_for_each_token_and_the_total_in_its_title():
    figure = draw_chain({"good": (["a", "b"], [-1.0, -0.5]), "bad": (["b", "a"], [-3.0, -4.0])})
    assert [[bar.get_height() for bar in axes.patches] for axes in figure.axes] == [[-1.0, -0.5], [-3.0, -4.0]]
    assert [axes.get_title("left").split()[-1] for axes in figure.axes] == ["-1.5", "-7.0"]
    assert "good: 2 tokens, total -1.5; bad: 2 tokens, total -7.0" in figure.alt


def test_a_race_plots_sums_and_names_the_winner():
    figure = draw_race({"slow": (["a", "b"], [-1.0, -3.0]), "fast": (["c", "d"], [-2.0, -0.5])})
    (axes,) = figure.axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[-2.0, -2.5], [-1.0, -4.0]]
    assert axes.get_title("left") == "The text of fast ends as the most probable"
    assert [text.get_text() for text in axes.texts] == ["fast", "c", "d", "slow", "a", "b"]
    assert "fast ends at -2.50; slow ends at -4.00" in figure.alt


def test_growth_counts_the_tokens_and_draws_the_times_as_they_are():
    figure = draw_growth([10, 20, 40], [5.0, 8.0, 15.0])
    left, right = figure.axes
    pushed = list(left.lines[0].get_ydata())
    assert pushed == [sum(range(1, n + 1)) for n in range(1, 41)]
    assert [list(line.get_ydata()) for line in right.lines] == [[5.0, 8.0, 15.0], [5.0, 10.0, 20.0]]
    assert "820 at 40" in figure.alt


@pytest.mark.parametrize(("lengths", "times"), [([1], [2.0]), ([1, 2], [2.0])])
def test_growth_wants_a_time_for_each_of_several_lengths(lengths, times):
    with pytest.raises(ValueError, match=f"{len(lengths)} lengths and {len(times)} times"):
        draw_growth(lengths, times)


@pytest.mark.parametrize(
    ("text", "shown"),
    [(" a", "\u2423a"), ("\n\t", r"\n\t"), ("$5", r"\$5"), ("é", "é"), ("\u672c", r"\u672c"), ("\ufffd", r"\ufffd")],
)
def test_labels_show_what_cannot_be_seen(text, shown):
    assert readable(text) == shown


def test_every_picture_can_be_saved_without_a_warning(tmp_path):
    """A letter that the font lacks, or a layout that does not fit, would warn."""
    names = [" a", "\u672c", "$x$", "\n", "\ufffd"]
    scored = (names[:2], [-1.0, -2.0])
    figures = [
        draw_cut(LOGITS, names.__getitem__, "top-p", 0.9),
        draw_sampler(LOGITS, names.__getitem__, SamplingParams(temperature=0)),
        draw_temperatures(LOGITS, names.__getitem__, [0.5, 1]),
        draw_penalties(names, LOGITS.tolist(), {"one": (LOGITS - 1).tolist()}),
        draw_chain({"a": scored}),
        draw_race({"a": scored, "b": scored}),
        draw_growth([1, 2], [1.0, 2.0]),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for figure in figures:
            figure.savefig(tmp_path / "figure.png")
