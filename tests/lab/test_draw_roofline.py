"""The pictures of speed show the numbers they are given: heights, positions, counts and the text beside them."""

from __future__ import annotations

import pytest
from matplotlib.patches import Rectangle

from minillm.lab import draw_roofline as draw
from minillm.lab.catalogue import MODELS
from minillm.lab.draw_roofline import Point
from minillm.lab.metrics import RequestTimes
from minillm.lab.plots import KINDS
from minillm.lab.roofline import Limits, Work, step_work

ROUND = Limits("round numbers", flops=100e9, bandwidth=20e9)  # the ridge lies at 5


def boxes(axes):
    return [p for p in axes.patches if isinstance(p, Rectangle)]


def points_drawn(axes):
    """(x, y) of each marker."""
    return [tuple(float(v[0]) for v in line.get_data()) for line in axes.lines if len(line.get_xdata()) == 1]


def test_a_measured_step_lies_at_its_own_rate_and_an_unmeasured_one_on_the_roof():
    slow, fast = Work(8e9, 1e9), Work(2e9, 1e9)
    assert Point("p", "prompt", slow, seconds=0.16).rate(ROUND) == 50e9
    assert Point("p", "prompt", slow).rate(ROUND) == 100e9  # right of the ridge: the flat roof
    assert Point("d", "generated", fast).rate(ROUND) == 40e9  # left of it: 2 FLOP/B times 20 GB/s


def test_the_roofline_has_its_ridge_and_every_step_where_it_belongs():
    points = [Point("prefill", "prompt", Work(8e9, 1e9), 0.16), Point("decode", "generated", Work(2e9, 1e9), 0.1)]
    figure = draw.draw_roofline(ROUND, points)
    (axes,) = figure.axes
    assert points_drawn(axes) == [(8.0, 50.0), (2.0, 20.0)]
    roof = axes.lines[0]
    for x, y in zip(*roof.get_data(), strict=True):
        assert y == pytest.approx(min(100, 20 * x))
    gaps = [[float(v) for v in line.get_ydata()] for line in axes.lines if line.get_xdata()[0] == line.get_xdata()[-1]]
    assert [50.0, 100.0] in gaps and [20.0, 40.0] in gaps  # from the step up to the roof above it
    assert [text.get_text() for text in axes.texts] == ["ridge: 5", "1", "2"]
    assert axes.get_title(loc="left") == "round numbers: prefill limited by compute, decode limited by memory"
    assert "1 prefill, 50 GFLOP/s at 8 FLOP per byte; point 2 decode, 20 GFLOP/s at 2 FLOP" in figure.alt
    low, high = axes.get_ylim()
    assert low < 20 and high > 100


def test_the_title_says_when_both_limits_occur_and_leaves_out_a_kind_that_is_not_there():
    points = [Point(str(i), "prompt", Work(i * 1e9, 1e9)) for i in (1, 9)]
    (axes,) = draw.draw_roofline(ROUND, points).axes
    assert axes.get_title(loc="left") == "round numbers: prefill limited by compute or memory"


def test_prefill_and_decode_look_different_without_colour():
    figure = draw.draw_roofline(ROUND, [Point("a", "prompt", Work(1, 1)), Point("b", "generated", Work(1, 1))])
    markers = [(line.get_marker(), line.get_color()) for line in figure.axes[0].lines if len(line.get_xdata()) == 1]
    assert markers == [("o", KINDS["prompt"].color), ("s", KINDS["generated"].color)]


@pytest.mark.parametrize(("batch", "fits"), [(30, True), (31, False)])
def test_a_model_on_a_gpu_says_whether_it_fits(batch, fits):
    """Llama-2-7B: 13.5 GB of weights and 2 GiB for each text of 4096 tokens; on 80 GB the batch ends at 30."""
    figure = draw.draw_model_on_gpu("Llama-2-7B", "A100 80GB SXM", batch, 4094)  # and one new, written and read
    assert ("DOES NOT FIT" in figure.axes[0].get_title(loc="left")) is not fits


def test_a_model_on_a_gpu_shows_the_roofline_s_own_times():
    figure = draw.draw_model_on_gpu("Qwen2.5-32B", "H20", 4, 1024)
    work = step_work(MODELS["Qwen2.5-32B"], 1, 1024, 4, weight_bytes=2, kv_bytes=2)
    assert f"{4 / (work.bytes / 4e12):,.0f} tokens/s at most" in figure.axes[0].get_title(loc="left")
    prefill, decode = points_drawn(figure.axes[0])
    assert prefill[1] == pytest.approx(148e3)
    assert decode == pytest.approx((work.intensity, work.intensity * 4e3))


def test_prefill_times_are_drawn_in_milliseconds_beside_the_formula():
    figure = draw.draw_prefill_times([1, 4, 16, 32], [0.5, 0.6, 1.0, 3.0], [0.4, 0.4, 0.8, 1.6], ridge=8)
    (axes,) = figure.axes
    lines = {line.get_label(): [float(y) for y in line.get_ydata()] for line in axes.lines}
    assert lines["measured"] == [500, 600, 1000, 3000]
    assert lines["roofline: at least"] == [400, 400, 800, 1600]
    assert "ridge: 8 tokens" in lines
    assert (
        axes.get_title(loc="left") == "Prefill: 1 to 4 tokens, 1.2 times the time; 16 to 32 tokens, 3.0 times the time"
    )
    assert "16 tokens: measured 1e+03 ms, formula 800 ms" in figure.alt


@pytest.mark.parametrize("count", [1, 2])
def test_prefill_times_need_as_many_times_as_lengths_and_at_least_two(count):
    with pytest.raises(ValueError, match="lengths"):
        draw.draw_prefill_times([1, 2][:count], [1.0], [1.0], 8)


def test_a_request_has_one_box_for_the_first_token_and_one_for_each_gap():
    figure = draw.draw_request(RequestTimes(10.0, (12.0, 12.5, 14.0)))
    drawn = [(box.get_x(), box.get_width(), box.get_hatch()) for box in boxes(figure.axes[0])]
    assert drawn == [(0, 2.0, ""), (2.0, 0.5, "///"), (2.5, 1.5, "///")]
    texts = [text.get_text() for text in figure.axes[0].texts if text.get_text()]
    assert texts == ["TTFT 2 s", "2 gaps, TPOT 1 s", "latency 4 s = TTFT + 2 TPOT"]
    assert "2 boxes" in figure.alt and "latency 4 s" in figure.alt


def test_a_request_of_one_token_has_no_gap_to_draw():
    with pytest.raises(ValueError, match="at least two tokens"):
        draw.draw_request(RequestTimes(0.0, (1.0,)))


def test_the_share_of_decode_is_written_in_its_cell_and_framed_only_above_nine_tenths():
    shares = {"here": [[0.5, 0.25], [0.91, 0.9]], "there": [[0.95, 0.1], [1.0, 0.92]]}
    figure = draw.draw_decode_share([64, 512], [16, 128], shares)
    here, there = figure.axes
    written = {tuple(int(v) for v in text.get_position()): text.get_text() for text in here.texts}
    assert written == {(0, 0): "50", (1, 0): "25", (0, 1): "91", (1, 1): "90"}  # x: prompt, y: output
    framed = [[(int(b.get_x()), int(b.get_y())) for b in boxes(axes) if not b.get_fill()] for axes in (here, there)]
    assert framed == [[(0, 1)], [(0, 0), (0, 1), (1, 1)]]
    assert here.get_title(loc="left") == "here: 1 of 4 over 90%"
    assert figure.get_suptitle() == "Decode takes over 90% of the time in 4 of 8 cases (framed), and as little as 10%"
    assert "here: from 25% to 91%, 1 of 4 over 90%; there: from 10% to 100%, 3 of 4" in figure.alt
