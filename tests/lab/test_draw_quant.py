"""The pictures of quantization draw what they are given: asserted on the plotted data."""

from __future__ import annotations

import pytest
import torch
from matplotlib.colors import to_hex

from minillm.lab import draw_quant
from minillm.lab.plots import BLUE, GREEN, KINDS, PURPLE, RED
from minillm.packing import pack_nibbles
from minillm.quantize import Grid

ROW = torch.tensor([-0.7, -0.1, 0.2, 0.8, 0.0, 0.1, 0.2, 0.3])


def lines(axes) -> dict[str, list[float]]:
    """The heights of each labelled line."""
    return {line.get_label(): list(line.get_ydata()) for line in axes.lines if not line.get_label().startswith("_")}


def heights(collection) -> list[tuple[float, float]]:
    """(from, to) of each vertical stroke."""
    return [(float(path.vertices[0, 1]), float(path.vertices[-1, 1])) for path in collection.get_paths()]


def test_a_group_is_drawn_before_and_after_with_its_levels():
    figure = draw_quant.draw_group(ROW, Grid(2, None, dtype=torch.float32))
    axes = figure.axes[0]
    drawn = lines(axes)
    assert drawn["weight"] == pytest.approx(ROW.tolist())
    assert drawn["its level"] == pytest.approx([-0.7, -0.2, 0.3, 0.8, -0.2, 0.3, 0.3, 0.3], abs=1e-6)
    levels = [start for start, _ in heights(axes.collections[0])]
    assert levels == pytest.approx([-0.7, -0.2, 0.3, 0.8], abs=1e-6)
    assert heights(axes.collections[1])[:2] == [pytest.approx((-0.7, -0.7)), pytest.approx((-0.1, -0.2))]
    assert "off by 0.200 at most, 10.00 bits a weight" in axes.get_title(loc="left")
    assert "Steps of the groups: 0.500" in figure.alt


def test_each_group_has_levels_of_its_own_and_a_border():
    figure = draw_quant.draw_group(ROW, Grid(2, 4, dtype=torch.float32))
    axes = figure.axes[0]
    levels = [[start for start, _ in heights(group)] for group in axes.collections[:2]]
    assert levels[0] == pytest.approx([-0.7, -0.2, 0.3, 0.8], abs=1e-6)
    assert levels[1] == pytest.approx([0.0, 0.1, 0.2, 0.3], abs=1e-6)
    assert [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"] == [3.5]
    assert "2 groups of 4" in axes.get_title(loc="left")


def test_a_group_that_does_not_divide_the_row_is_refused():
    with pytest.raises(ValueError, match="groups of 3 do not divide"):
        draw_quant.draw_group(ROW, Grid(2, 3))


def test_an_outlier_spoils_the_row_and_with_groups_only_its_own_group():
    row = torch.randn(32, generator=torch.Generator().manual_seed(0))
    row[9] = 40.0
    figure = draw_quant.draw_outlier(row, bits=4, group=8)
    weights, whole, parts = figure.axes
    assert [end for _, end in heights(weights.collections[0])] == pytest.approx(row.tolist())
    assert weights.lines[0].get_xdata()[0] == 9
    step = float(row.max() - row.min()) / 15
    assert list(whole.lines[0].get_ydata()) == pytest.approx([step / 2] * 32, rel=1e-3)
    fine = [high for _, high in heights(parts.collections[0])]
    coarse = [high for _, high in heights(whole.collections[0])]
    assert max(fine[16:]) < 0.3 < max(coarse[16:])  # far from the outlier
    half_steps = list(parts.lines[0].get_ydata())
    assert half_steps[8:16] == pytest.approx([float(40 - row[8:16].min()) / 30] * 8, rel=1e-3)
    assert whole.get_ylim() == parts.get_ylim()
    assert "column 9" in figure.get_suptitle()


def test_errors_by_bits_and_the_factor_of_a_bit():
    figure = draw_quant.draw_errors([2, 3, 4], {"a": [0.4, 0.2, 0.1], "b": [0.3, 0.1, 0.0]})
    axes = figure.axes[0]
    drawn = lines(axes)
    assert drawn["a"] == [0.4, 0.2, 0.1]
    assert drawn["b"][:2] == [0.3, 0.1] and drawn["b"][2] != drawn["b"][2]  # no place on a logarithmic axis
    assert axes.get_yscale() == "log"
    assert "by about 2.0;" in axes.get_title(loc="left")


def test_nibbles_stand_high_half_first_below_their_codes():
    codes = list(range(16))
    packed = pack_nibbles(torch.arange(16, dtype=torch.uint8)).tolist()
    figure = draw_quant.draw_nibbles(codes, packed)
    axes = figure.axes[0]
    said = [text.get_text() for text in axes.texts]
    assert [text for text in said if text.isdigit() and len(text) < 4] == [str(code) for code in codes]
    halves = [text for text in said if len(text) == 4 and set(text) <= {"0", "1"}]
    assert halves[:4] == ["0001", "0000", "0011", "0010"]
    assert "0x10, 0x32" in figure.alt and "0xfe" in figure.alt
    colors = [to_hex(patch.get_facecolor()) for patch in axes.patches]
    assert colors.count(KINDS["new"].color) == colors.count(KINDS["cached"].color) == 16
    with pytest.raises(ValueError, match="16 codes and 7 bytes"):
        draw_quant.draw_nibbles(codes, packed[:-1])


def test_rounded_columns_stay_and_the_others_show_their_moves():
    figure = draw_quant.draw_feeding([1.0, 2.0, 3.0], [1.5], [2.25, 2.9])
    axes = figure.axes[0]
    assert heights(axes.collections[0]) == [(1.0, 1.5)]
    assert heights(axes.collections[1]) == [pytest.approx((2.0, 2.25)), pytest.approx((3.0, 2.9))]
    assert lines(axes) == {"weight": [1.0, 2.0, 3.0], "rounded": [1.5], "still to round": [2.25, 2.9]}
    assert [to_hex(c.get_color()[0]) for c in axes.collections] == [RED, GREEN]
    assert "up to 0.250" in axes.get_title(loc="left") and "Moves: 0.250, 0.100" in figure.alt
    with pytest.raises(ValueError, match="3 weights, 1 rounded and 1 moved"):
        draw_quant.draw_feeding([1.0, 2.0, 3.0], [1.5], [2.25])


def test_the_first_and_the_last_step_of_feeding_can_be_drawn():
    assert "0 of 2 columns" in draw_quant.draw_feeding([1.0, 2.0], [], [1.0, 2.0]).alt
    last = draw_quant.draw_feeding([1.0, 2.0], [1.0, 2.5], [])
    assert "2 of 2 columns" in last.alt and "Moves" not in last.alt


def test_the_search_marks_what_the_first_text_chooses():
    figure = draw_quant.draw_search([0.0, 0.5, 0.95], {"seen": [4.0, 1.0, 2.0], "new": [2.0, 1.5, 1.0]})
    axes = figure.axes[0]
    assert lines(axes) == {"seen": [1.0, 0.25, 0.5], "new": [1.0, 0.75, 0.5]}
    assert [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"] == [0.5]
    assert "alpha = 0.50 leaves 25%" in axes.get_title(loc="left") and "new: 0.75" in figure.alt


def test_methods_stand_relative_to_the_first_on_each_text():
    figure = draw_quant.draw_methods({"seen": {"RTN": 2.0, "GPTQ": 0.5}, "new": {"RTN": 4.0, "GPTQ": 6.0}})
    axes = figure.axes[0]
    assert [bar.get_height() for bar in axes.patches] == [1.0, 0.25, 1.0, 1.5]
    centres = [bar.get_x() + bar.get_width() / 2 for bar in axes.patches]
    assert centres == pytest.approx([-0.2, 0.8, 0.2, 1.2])
    assert axes.get_title(loc="left") == "Least error: GPTQ on seen, RTN on new"
    assert "new: RTN 1.00, GPTQ 1.50" in figure.alt


def test_what_settings_cost_is_drawn_with_two_standard_errors():
    figure = draw_quant.draw_quality({"good": (4.5, 0.02, 0.01), "bad": (3.5, 1.0, 0.2)})
    axes = figure.axes[0]
    marks = [container.lines[0] for container in axes.containers]
    assert [float(mark.get_xdata()[0]) for mark in marks] == [0.02, 1.0]
    bars = [container.lines[2][0].get_segments()[0][:, 0].tolist() for container in axes.containers]
    assert bars == [pytest.approx([0.0, 0.04]), pytest.approx([0.6, 1.4])]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["good (4.50 bits)", "bad (3.50 bits)"]
    assert axes.get_title(loc="left") == "From +0.020 nats a token (good) to +1.000 (bad)"


def test_the_ends_are_marked_among_the_blocks_that_were_measured():
    figure = draw_quant.draw_layers({0: 0.3, 14: 0.1, 29: 0.2}, 30)
    axes = figure.axes[0]
    assert [round(bar.get_x() + bar.get_width() / 2) for bar in axes.patches] == [0, 14, 29]
    assert [bar.get_height() for bar in axes.patches] == [0.3, 0.1, 0.2]
    assert [to_hex(bar.get_facecolor()) for bar in axes.patches] == [PURPLE, BLUE, PURPLE]
    assert [bool(bar.get_hatch()) for bar in axes.patches] == [True, False, True]
    assert axes.get_title(loc="left") == "Most sensitive: block 0, then 29; least: block 14"


def test_speed_by_rows_has_a_line_at_one():
    figure = draw_quant.draw_batches([1, 8, 64], {"card": [3.7, 3.0, 1.0]})
    axes = figure.axes[0]
    assert lines(axes) == {"card": [3.7, 3.0, 1.0]}
    assert any(list(line.get_ydata()) == [1, 1] for line in axes.lines)
    assert axes.get_title(loc="left") == "card: 3.7 times as fast at 1 row, 1.0 times at 64"
    assert draw_quant.draw_batches([1], {"card": [2.0]}, "said").axes[0].get_title(loc="left") == "said"


def test_what_is_worse_than_rounding_is_named():
    figure = draw_quant.draw_samples([64, 1024], {"AWQ": [0.7, 0.6], "GPTQ": [1.3, 0.5]}, columns=576)
    axes = figure.axes[0]
    drawn = lines(axes)
    assert drawn["AWQ"] == [0.7, 0.6] and drawn["GPTQ"] == [1.3, 0.5]
    assert [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"] == [576]
    assert axes.get_title(loc="left") == "After 64 tokens, worse than rounding: GPTQ. After 1,024: none"


def test_the_kernel_s_programs_cover_the_matrix():
    figure = draw_quant.draw_weight_grid(n_out=20, n_in=96, block=8, n_splits=2, size=64)
    axes = figure.axes[0]
    boxes = [(b.get_x(), b.get_y(), b.get_width()) for b in axes.patches]
    assert boxes == [(0, 0, 64), (64, 0, 32), (0, 1, 64), (64, 1, 32), (0, 2, 64), (64, 2, 32)]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rows 0 to 7", "rows 8 to 15", "rows 16 to 19"]
    assert axes.get_title(loc="left").startswith("6 programs: 3 blocks of 8 rows of W, 2 splits")
    assert len(draw_quant.draw_weight_grid(800, 96, 8, 2, 64, shown=4).axes[0].patches) == 8
    with pytest.raises(ValueError, match="3 splits of 64 columns do not make 96"):
        draw_quant.draw_weight_grid(20, 96, 8, 3, 64)
