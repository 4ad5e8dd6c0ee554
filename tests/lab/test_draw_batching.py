"""The pictures of batches show the runs they are given: who is where and when, what is marked, and the text beside."""

from __future__ import annotations

import pytest
from matplotlib.patches import Rectangle

from minillm.lab import draw_batching as draw
from minillm.lab.draw_batching import Curve, Run, places, runs, worst_gap
from minillm.lab.metrics import RequestTimes
from minillm.lab.plots import KINDS
from minillm.lab.serving import Part, Replay, StepRecord

P, D = "prefill", "decode"


def replay_of(*steps: list[tuple[int, str]], n_places: int = 2, arrivals=None, ends=None, waiting: int = 0) -> Replay:
    """A run by hand: who does what in each step. A step ends at `ends`, or each takes a second."""
    ends = list(ends or range(1, len(steps) + 1))
    starts = [0, *ends[:-1]]
    records = [
        StepRecord(start, end, [Part(r, kind, 1) for r, kind in step], waiting, len(step), 0, 0)
        for start, end, step in zip(starts, ends, steps, strict=True)
    ]
    n = 1 + max(r for step in steps for r, _ in step)
    times = []
    for r in range(n):
        tokens = tuple(end for end, step in zip(ends, steps, strict=True) if any(r == who for who, _ in step))
        times.append(RequestTimes(arrivals[r] if arrivals else 0.0, tokens))
    return Replay(records, times, [[] for _ in range(n)], 0, n_places)


# Request 0 runs three steps, 1 two; 2 takes the place of 1, and 3 that of 0.
FOUR = replay_of([(0, P), (1, P)], [(0, D), (1, D)], [(0, D), (2, P)], [(2, D), (3, P)])


def boxes(axes):
    return [p for p in axes.patches if isinstance(p, Rectangle)]


def box_list(axes):
    """(x, y, width, hatch) of each box."""
    return [(b.get_x(), b.get_y(), b.get_width(), b.get_hatch()) for b in boxes(axes)]


def texts(axes):
    return [text.get_text() for text in axes.texts if text.get_text()]


def test_a_request_keeps_its_place_and_the_next_one_takes_it_over():
    assert [{place: part.request for place, part in step.items()} for step in places(FOUR)] == [
        {0: 0, 1: 1},
        {0: 0, 1: 1},
        {0: 0, 1: 2},
        {0: 3, 1: 2},
    ]


def test_a_newcomer_takes_the_first_place_that_is_free():
    run = replay_of([(0, P), (1, P)], [(1, D), (2, P)], n_places=3)
    assert [sorted(step) for step in places(run)] == [[0, 1], [0, 1]]


def test_one_that_was_pushed_out_lends_its_place_if_all_others_are_taken():
    run = replay_of([(0, P), (1, P)], [(0, D), (2, P)], [(0, D), (2, D)], [(0, D), (1, P)])
    assert [{place: part.request for place, part in step.items()} for step in places(run)][1:] == [
        {0: 0, 1: 2},
        {0: 0, 1: 2},
        {0: 0, 1: 1},
    ]


def test_one_that_was_pushed_out_comes_back_to_its_place_if_nobody_took_it():
    run = replay_of([(0, P), (1, P)], [(1, D)], [(0, P), (1, D)], n_places=3)
    assert [sorted(step) for step in places(run)] == [[0, 1], [1], [0, 1]]


def test_steps_of_the_same_kind_are_one_box_and_free_places_are_boxes_too():
    found = [(run.place, run.start, run.length, run.part and (run.part.request, run.part.kind)) for run in runs(FOUR)]
    assert found == [
        (0, 0, 1, (0, P)),
        (0, 1, 2, (0, D)),
        (0, 3, 1, (3, P)),
        (1, 0, 1, (1, P)),
        (1, 1, 1, (1, D)),
        (1, 2, 1, (2, P)),
        (1, 3, 1, (2, D)),
    ]
    assert [run.length for run in runs(replay_of([(0, D)], [(1, D)], n_places=1))] == [1, 1]  # two texts, two boxes
    idle = runs(replay_of([(0, P)], [(0, D)]))
    assert idle[-1] == Run(place=1, start=0, length=2, part=None)


def test_places_of_two_runs_stand_above_each_other_with_their_utilisation():
    lonely = replay_of([(0, P)], [(0, D)])
    figure = draw.draw_places({"static": lonely, "continuous": FOUR})
    top, below, second, below_second = figure.axes
    assert box_list(top) == [(0, 0, 1, ""), (1, 0, 1, "///"), (0, 1, 2, "")]
    assert boxes(top)[2].get_facecolor()[:3] == (1, 1, 1)  # the free place is white
    assert len(boxes(second)) == len(runs(FOUR))
    assert list(below.patches[0].get_data().values) == [50, 50]
    assert list(below_second.patches[0].get_data().values) == [100] * 4
    assert top.get_title(loc="left") == "static: 2 steps, 50% of the places in use"
    assert figure.get_suptitle() == "static 2 steps; continuous 4 steps"
    assert "continuous: 4 steps, 100% of the places in use" in figure.alt
    assert below.get_xlim() == (0, 4)  # one scale for both


def test_places_can_be_shown_up_to_a_step():
    run = replay_of([(0, P)], [(0, D), (1, P)], [(0, D)], waiting=3)
    figure = draw.draw_places({"continuous": run}, shown=2)
    top, below = figure.axes
    assert box_list(top) == [(0, 0, 1, ""), (1, 0, 1, "///"), (0, 1, 1, ""), (1, 1, 1, "")]
    assert top.get_title(loc="left") == "continuous, step 2 of 3: 2 compute, 3 wait"
    assert len(below.patches[0].get_data().values) == 2
    assert below.get_xlim() == (0, 3)  # the scale stays while the player runs
    assert figure.alt.endswith("Shown up to step 2.")


def test_the_number_of_a_request_stands_in_its_decode_box():
    top = draw.draw_places({"run": FOUR}).axes[0]
    assert texts(top) == ["0", "1", "2"]  # request 3 is there for a prompt of one step only


def test_the_worst_gap_names_the_request_the_token_and_the_seconds():
    run = replay_of([(0, P), (1, P)], [(0, D)], [(0, D), (1, D)], ends=(1, 1.5, 4))
    assert worst_gap(run) == (1, 1, 3.0)


def test_requests_in_time_have_a_box_a_step_and_the_marks_of_the_longest_waits():
    run = replay_of([(0, P)], [(0, D), (1, P)], [(0, D), (1, D)], arrivals=(0.0, 0.25), ends=(1, 2, 6))
    figure = draw.draw_requests({"some": run})
    (axes,) = figure.axes
    assert [(b.get_x(), round(b.get_y(), 2), b.get_width(), b.get_hatch()) for b in boxes(axes)] == [
        (0, 0.12, 1, ""),
        (1, 0.12, 1, "///"),
        (1, 1.12, 1, ""),
        (2, 0.12, 4, "///"),
        (2, 1.12, 4, "///"),
    ]
    lines = [(list(map(float, line.get_xdata())), float(line.get_ydata()[0])) for line in axes.lines]
    assert lines == [([0.0, 6.0], 0.5), ([0.0], 0.5), ([0.25, 6.0], 1.5), ([0.25], 1.5)]
    assert texts(axes) == ["TTFT 1.8 s", "worst gap 4 s"]
    spans = [sorted((a.xy[0], a.xyann[0])) for a in axes.texts if hasattr(a, "xyann")]
    assert spans == [[0.25, 2], [2, 6]]
    assert figure.get_suptitle() == "The worst gap between two tokens: 4 s"
    assert "some: longest TTFT 1.8 s (request 1), worst gap 4 s (request 1)" in figure.alt


def test_names_that_do_not_fit_stand_behind_the_row_one_after_the_other():
    steps = [[(0, P)], *[[(0, D)]] * 40]
    axes = draw.draw_requests({"long": replay_of(*steps, n_places=1)}).axes[0]
    first, second = (text.get_position()[0] for text in axes.texts if text.get_text())
    assert 41 < first < second


def test_two_runs_in_time_share_the_scale_and_the_title_compares_them():
    slow = replay_of([(0, P)], [(0, D)], ends=(1, 8))
    quick = replay_of([(0, P)], [(0, D)], ends=(1, 3))
    figure = draw.draw_requests({"without": slow, "with": quick})
    assert figure.get_suptitle() == "The worst gap between two tokens: 7 s against 2 s"
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim() == pytest.approx((0, 1.02 * 8))
    assert figure.axes[1].get_title(loc="left") == "with: last token after 3 s"


def test_a_flat_batch_has_the_tokens_of_the_padded_one_and_nothing_else():
    figure = draw.draw_flat_batch([1, 3, 1])
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "Padded: 9 rows, 4 of them for nothing; flat: 5 rows"
    drawn = [(b.get_y(), b.get_x(), b.get_facecolor()[:3] == (1, 1, 1), b.get_hatch()) for b in boxes(axes)]
    padded, flat = [b for b in drawn if b[0] < 3], sorted(b for b in drawn if b[0] > 3)
    assert [(y, x) for y, x, free, _ in padded if free] == [(0, 1), (0, 2), (2, 1), (2, 2)]
    assert [(x, hatch) for _, x, _, hatch in flat] == [(0, "///"), (1, ""), (2, ""), (3, ""), (4, "///")]
    assert "1, 3, 1 new tokens" in figure.alt and "4 of them empty" in figure.alt


@pytest.mark.parametrize("counts", [[], [1, 0], [-1]])
def test_a_flat_batch_needs_a_token_of_each_request(counts):
    with pytest.raises(ValueError, match="at least one token"):
        draw.draw_flat_batch(counts)


def test_gains_are_drawn_as_curves_over_the_stated_bands():
    curves = {"8 places": [1, 1.5, 3], "32 places": [1, 2, 6.04]}
    figure = draw.draw_gains([0, 0.5, 2], curves, {"a little": (1.4, 1.6), "a lot": (2, 10)})
    (axes,) = figure.axes
    assert {line.get_label(): [float(y) for y in line.get_ydata()] for line in axes.lines} == curves
    assert [(b.get_y(), b.get_y() + b.get_height()) for b in boxes(axes)] == [(1.4, 1.6), (2, 10)]
    assert texts(axes) == ["often stated: a little", "often stated: a lot"]
    assert [text.get_ha() for text in axes.texts] == ["right", "left"]  # where no curve is in the way
    assert axes.get_title(loc="left").startswith("Continuous batching is 1.0 to 6.0 times as fast")
    assert "32 places: 1.0 at 0, 2.0 at 0.5, 6.0 at 2" in figure.alt


def test_batch_rates_end_where_the_memory_is_full_and_the_knee_has_a_star():
    curves = [Curve("short", [10, 20, 40, 41], knee=3), Curve("long", [8, 9])]
    figure = draw.draw_batch_rates([1, 2, 4, 8], curves, "a title", band=(2, 4))
    (axes,) = figure.axes
    drawn = [([float(x) for x in line.get_xdata()], [float(y) for y in line.get_ydata()]) for line in axes.lines]
    assert drawn == [([1, 2, 4, 8], [10, 20, 40, 41]), ([3], [30]), ([1, 2], [8, 9])]  # the star between two points
    assert axes.lines[1].get_marker() == "*"
    (band,) = boxes(axes)
    assert (band.get_x(), band.get_width()) == (2, 2)
    assert "short: 41 tokens/s at 8, a star at 3; long: 9 tokens/s at 2" in figure.alt
    assert axes.get_title(loc="left") == "a title"


def test_prompt_and_generated_look_as_everywhere():
    top = draw.draw_places({"run": FOUR}).axes[0]
    assert boxes(top)[0].get_hatch() == KINDS["prompt"].hatch
    assert boxes(top)[1].get_hatch() == KINDS["generated"].hatch
