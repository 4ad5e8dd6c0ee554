"""The pictures of speculative sampling draw what they are given: asserted on the plotted data."""

from __future__ import annotations

import pytest

from minillm.generation import generate
from minillm.lab.draw_speculation import (
    Turn,
    by_place,
    draw_expected,
    draw_one_guess,
    draw_places,
    draw_rounds,
    draw_speedups,
    draw_text,
    draw_verify_cost,
    follow,
    turns,
)  # fmt: skip
from minillm.lab.plots import KINDS
from minillm.lab.tiny import tiny_model
from minillm.sampling import SamplingParams
from minillm.speculative import Proposal, expected_tokens
from minillm.tokenizer import bpe_tokenizer

LETTERS = bpe_tokenizer(list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJK"), [1] * 37, [], "gpt-2")  # token i: letter i
TOLD = [
    Turn((), 0, "She"),
    Turn((" was", " a"), 0, " saw"),
    Turn((" a", " cat", " and"), 2, "."),
    Turn((" It", " sat"), 2, None),
]


class Fixed:
    """A drafter that guesses what it was told to, round by round."""

    def __init__(self, *ids: list[int]):
        self.ids = list(ids)

    def propose(self, writers, counts):
        return [Proposal(self.ids.pop(0)[: counts[0]])]

    def begin(self, writer, kv): ...

    def observe(self, writer, start, hidden): ...

    def release(self, writer): ...


def boxes(axes) -> list[str]:
    """The kinds of the boxes in the order in which they were drawn."""
    kinds = {(look.color, look.hatch): kind for kind, look in KINDS.items()}
    return [kinds[color(patch), patch.get_hatch() or ""] for patch in axes.patches]


def color(patch) -> str:
    return "#" + "".join(f"{round(255 * c):02x}" for c in patch.get_facecolor()[:3])


def test_what_stands_behind_a_rejected_guess_was_not_looked_at():
    assert Turn(("x", "y", "z"), 1, "w").boxes == [
        ("guessed", "x"), ("rejected", "y"), ("free", "z"), ("generated", "w"),
    ]  # fmt: skip
    assert Turn(("x",), 1, "w").boxes == [("guessed", "x"), ("generated", "w")]
    assert Turn(("x", "y"), 1, None).boxes == [("guessed", "x"), ("free", "y")]  # the text ended at x


@pytest.mark.parametrize(
    ("tokens", "proposals", "wanted"),
    [
        ([9, 0, 1, 2], [], [Turn((), 0, "a"), Turn((), 0, "b"), Turn((), 0, "c")]),
        ([9, 0, 1, 2, 3], [(2, [1, 2])], [Turn((), 0, "a"), Turn(("b", "c"), 2, "d")]),
        ([9, 0, 1, 2], [(2, [5, 6]), (3, [])], [Turn((), 0, "a"), Turn(("f", "g"), 0, "b"), Turn((), 0, "c")]),
        ([9, 0, 1, 2], [(2, [1, 2])], [Turn((), 0, "a"), Turn(("b", "c"), 2, None)]),
        ([9, 0, 1], [(2, [1, 2])], [Turn((), 0, "a"), Turn(("b", "c"), 1, None)]),  # b was the end
        ([9, 0, 1, 2], [(2, [5])], [Turn((), 0, "a"), Turn(("f",), 0, "b"), Turn((), 0, "c")]),
    ],
)
def test_rounds_are_told_from_the_proposals(tokens, proposals, wanted):
    assert turns(tokens, 1, proposals, LETTERS) == wanted


def test_a_followed_text_is_the_one_that_was_written():
    model, params = tiny_model(seed=0), SamplingParams(temperature=0, max_tokens=8)
    plain = generate(model, None, [1, 2], params).tokens
    right, wrong = plain[1:3], [plain[4], (plain[5] + 1) % 37]
    told = follow(model, LETTERS, [1, 2], Fixed(right, wrong, [], []), params, k=3)
    piece = LETTERS.piece
    assert told[:3] == [
        Turn((), 0, piece(plain[0])),
        Turn(tuple(map(piece, right)), 2, piece(plain[3])),
        Turn(tuple(map(piece, wrong)), 1, piece(plain[5])),
    ]
    written = [text for turn in told for kind, text in turn.boxes if kind in ("guessed", "generated")]
    assert written == [piece(token) for token in plain]


def test_the_text_leaves_rejected_guesses_in_and_hides_what_was_not_looked_at():
    figure = draw_text(TOLD, before="Once")
    told = ["generated", "rejected", "generated", "guessed", "guessed", "rejected", "generated", "guessed", "guessed"]
    assert boxes(figure.axes[0]) == ["prompt", *told]
    assert "4 passes of the model gave 7 tokens: 4 accepted, 2 rejected, 3 of the model's own" in figure.alt
    assert len(figure.axes[0].lines) == 1 + len(TOLD)  # a bar after the prompt, and after each round
    shown = [text.get_text().strip("\N{OPEN BOX}") for text in figure.axes[0].texts]
    assert shown == ["Once", "She", "was", "saw", "a", "cat", "and", ".", "It", "sat"]


def test_the_text_stops_after_the_round_that_is_asked_for():
    assert boxes(draw_text(TOLD, 1).axes[0]) == ["generated", "rejected", "generated"]


def test_a_long_text_goes_on_in_a_new_line_inside_the_page():
    axes = draw_text([Turn((" longer",), 1, " words")] * 12).axes[0]
    assert len({patch.get_y() for patch in axes.patches}) == 3
    assert max(patch.get_x() + patch.get_width() for patch in axes.patches) <= axes.get_xlim()[1]
    assert min(patch.get_y() for patch in axes.patches) >= axes.get_ylim()[0]


def test_the_chain_has_a_row_a_round_with_the_models_own_token_in_the_last_column():
    figure = draw_rounds(TOLD)
    axes = figure.axes[0]
    own = [p for p, kind in zip(axes.patches, boxes(axes), strict=True) if kind == "generated"]
    assert {p.get_x() for p in own} == {3.3} and [p.get_y() for p in own] == [0, -1, -2]
    assert boxes(axes).count("free") == 1
    assert "Guesses accepted by round: 0, 0, 2, 2." in figure.alt
    assert axes.get_title("left") == "4 passes of the model gave 7 tokens"


def test_one_guess_is_cut_into_accepted_rejected_and_missing():
    figure = draw_one_guess([0.5, 0.3, 0.2], [0.2, 0.2, 0.6])
    guessed, wanted, residual = ([bar.get_height() for bar in axes.patches[:6]] for axes in figure.axes)
    assert guessed == pytest.approx([0.2, 0.2, 0.2, 0, 0, 0.4])
    assert wanted == pytest.approx([0.2, 0.2, 0.2, 0.3, 0.1, 0])
    assert residual == pytest.approx([0.75, 0.25, 0])
    assert [bar.get_y() for bar in figure.axes[1].patches[3:6]] == pytest.approx([0.2, 0.2, 0.2])
    assert "Accepted in all 0.60, rejected 0.40" in figure.alt


def test_equal_distributions_reject_nothing():
    figure = draw_one_guess([0.5, 0.5], [0.5, 0.5])
    assert "Accepted in all 1.00, rejected 0.00" in figure.alt
    assert [bar.get_height() for bar in figure.axes[2].patches] == [0.5, 0.5]


def test_the_cost_of_checking_is_drawn_beside_each_roofline():
    figure = draw_verify_cost([1, 4], [1, 1.5], {"a CPU": [1, 1.2], "a GPU": [1, 1]})
    lines = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert lines == {
        "measured on this machine": [1, 1.5],
        "a CPU": [1, 1.2],
        "a GPU": [1, 1],
        "one after the other": [1, 4],
    }
    assert "Measured here: 1.50 times; a CPU: 1.20 times; a GPU: 1.00 times" in figure.alt


def test_marks_are_what_was_counted_and_curves_are_the_formula():
    axes = draw_expected([1, 3], {0.5: [1.4, 1.9], 0.9: [1.8, 3.5]}).axes[0]
    curves = [list(line.get_ydata()) for line in axes.lines]
    assert curves[0] == [1.5, 1.875] and curves[1] == [1.4, 1.9] and curves[3] == [1.8, 3.5]
    assert curves[2] == [expected_tokens(0.9, 1), expected_tokens(0.9, 3)]


def test_places_count_only_guesses_that_were_looked_at():
    assert by_place(TOLD) == [(2, 3), (2, 2), (0, 1)]
    figure = draw_places({"here": TOLD})
    assert [bar.get_height() for bar in figure.axes[0].patches] == pytest.approx([2 / 3, 1, 0])
    assert "here: 2 of 3, 2 of 2, 0 of 1" in figure.alt


def test_speedups_below_one_are_called_slower():
    figure = draw_speedups({"good": (2.0, 1.9), "bad": (0.8, 0.7)})
    axes = figure.axes[0]
    assert [bar.get_width() for bar in axes.patches] == [1.9, 0.7]
    assert boxes(axes) == ["generated", "rejected"]
    assert [text.get_text() for text in axes.texts] == ["1.90 faster", "0.70 slower"]
    assert "slower than plain decoding in 1 of 2 settings" in axes.get_title("left")
    diamonds = [float(line.get_xdata()[0]) for line in axes.lines if line.get_marker() == "D"]
    assert diamonds == [2.0, 0.8]
