"""The picture of a deployment draws its estimates, its goals, and where they end the batch."""

from __future__ import annotations

import pytest

from minillm.lab.advice.demand import Demand, find_hardware
from minillm.lab.advice.deployment import deploy
from minillm.lab.advice.guide import batches
from minillm.lab.draw_advice import draw_goals


def eight(**demand):
    return deploy("Llama-3.1-8B", find_hardware("H100 SXM"), Demand(512, 128, **demand))


def lines(axes):
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}


def test_times_rates_and_goals_are_drawn():
    d = eight(concurrency=16, ttft=0.02, tpot=0.015)
    estimates = batches(d)
    figure = draw_goals(d, estimates)
    times, rates = (lines(axes) for axes in figure.axes)
    sizes = [e.batch for e in estimates]
    assert times["TTFT"] == (sizes, [e.ttft * 1e3 for e in estimates])
    assert times["TPOT"] == (sizes, [e.tpot * 1e3 for e in estimates])
    assert times["TTFT goal: 20 ms"][1] == [20, 20] and times["TPOT goal: 15 ms"][1] == [15, 15]
    assert rates["tokens/s"] == (sizes, [e.tokens_per_s for e in estimates])
    assert times["chosen: 16"][0] == rates["chosen: 16"][0] == [16, 16]
    for axes in figure.axes:
        (ground,) = axes.patches
        assert ground.get_x() == d.within_goals and ground.get_x() + ground.get_width() == d.fits
    assert f"the largest batch within them is {d.within_goals:,}, chosen is 16." in figure.alt
    assert "batch 16 of 762 that fit" in figure.get_suptitle()


def test_without_goals_no_ground_and_no_goal_lines():
    figure = draw_goals(eight(concurrency=16), batches(eight(concurrency=16)))
    assert not any(axes.patches for axes in figure.axes)
    assert set(lines(figure.axes[0])) == {"TTFT", "TPOT", "chosen: 16"}
    assert "Goals: none" in figure.alt


def test_one_batch_makes_no_line():
    with pytest.raises(ValueError, match="give at least two estimates"):
        draw_goals(eight(concurrency=1), [eight(concurrency=1).estimate(1)])
