"""The pictures of the whole show what they are given."""

from __future__ import annotations

import pytest

from minillm.lab.draw_ladder import QUANTITIES, STAGES, draw_ladder, draw_language, draw_map
from minillm.lab.ladder import Row
from minillm.lab.plots import BLUE, KINDS


def row(stage: str, tokens_per_s: float, same: bool = True) -> Row:
    return Row(
        stage=stage, new="x", workload="story", tokens_per_s=tokens_per_s, spread=(1, 2), ttft_ms=100 / tokens_per_s,
        tpot_ms=1000 / tokens_per_s, predicted_ttft_ms=1, predicted_tpot_ms=1, kv_bytes=0, memory_limit_fraction=0.5,
        against=None, factor=None, same_tokens=same, first_difference=None,
    )  # fmt: skip


ROWS = [row("naive", 5), row("kv_cache", 25)]


@pytest.mark.parametrize(
    ("quantity", "values"),
    [("tokens per second", [5, 25]), ("time per output token", [200, 40]), ("time to first token", [20, 4])],
)
def test_the_bars_are_the_rows(quantity, values):
    (axes,) = draw_ladder(ROWS, quantity).axes
    assert [bar.get_width() for bar in axes.patches] == values
    assert [label.get_text() for label in axes.get_yticklabels()] == ["naive", "kv_cache"]
    assert axes.get_xlabel() == QUANTITIES[quantity][1]


def test_the_title_tells_whether_the_tokens_agree():
    assert "the same tokens on every rung" in draw_ladder(ROWS).axes[0].get_title("left")
    more = [*ROWS, row("odd", 9, same=False)]
    assert f"the same tokens on {len(ROWS)} of {len(more)} rungs" in draw_ladder(more).axes[0].get_title("left")


def test_an_unknown_quantity_is_refused():
    with pytest.raises(ValueError, match="quantity must be one of tokens per second"):
        draw_ladder(ROWS, "speed")


def test_the_map_names_every_stage_and_marks_what_is_to_come():
    (axes,) = draw_map(["01", "02"]).axes
    filled = [bar.get_facecolor()[:3] != (1, 1, 1) for bar in axes.patches]
    assert filled == [stage.number in ("01", "02") for stage in STAGES]
    texts = [text.get_text() for text in axes.texts]
    assert sum("(to come)" in text for text in texts) == len(STAGES) - 2
    assert all(f"{stage.number}  {stage.name}" in texts and stage.new in texts for stage in STAGES)
    assert not any("(to come)" in text.get_text() for text in draw_map().axes[0].texts)


def test_the_language_shows_each_kind_once():
    (axes,) = draw_language().axes
    assert [patch.get_hatch() or "" for patch in axes.patches] == [look.hatch for look in KINDS.values()]
    assert [text.get_text() for text in axes.texts] == [look.label for look in KINDS.values()]
    assert BLUE in {look.color for look in KINDS.values()}
