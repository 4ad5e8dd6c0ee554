"""A widget calls its pure `draw` function with what its controls say. (test_browser.py moves them in a browser.)"""

from __future__ import annotations

import ipywidgets
import pytest

from minillm.lab import widgets
from minillm.lab.plots import Picture


@pytest.fixture
def shown(monkeypatch) -> list[Picture]:
    """What was displayed, in order."""
    pictures: list[Picture] = []
    monkeypatch.setattr(widgets, "display", pictures.append)
    return pictures


def draw(**values) -> Picture:
    return Picture(1, 1, str(values))


def texts(shown: list[Picture]) -> list[str]:
    return [picture.alt for picture in shown]


def test_explore_draws_at_once_and_at_each_change(shown):
    box = widgets.explore(draw, n=(2, 10, 2), kind=["plain", "grouped"])
    slider, choice, screen = box.children
    assert isinstance(screen, ipywidgets.Output)
    assert (slider.min, slider.max, slider.step, slider.description) == (2, 10, 2, "n")
    slider.value = 8
    choice.value = "grouped"
    assert texts(shown) == [
        "{'n': 6, 'kind': 'plain'}",
        "{'n': 8, 'kind': 'plain'}",
        "{'n': 8, 'kind': 'grouped'}",
    ]


def test_explore_draws_only_when_the_slider_is_let_go(shown):
    own = ipywidgets.IntSlider(value=3, min=0, max=5)
    for slider in (widgets.explore(draw, n=(1, 5)).children[0], widgets.explore(draw, n=own).children[0]):
        assert slider.continuous_update is False


def test_a_player_steps_through_all_pictures(shown):
    box = widgets.player(lambda step: draw(step=step), steps=4, label="token")
    (play, slider), screen = box.children[0].children, box.children[1]
    assert isinstance(play, ipywidgets.Play) and isinstance(screen, ipywidgets.Output)
    assert (play.min, play.max, slider.min, slider.max) == (0, 3, 0, 3)
    assert slider.description == "token"
    for step in (1, 2, 3, 0):
        slider.value = step
    assert texts(shown) == [f"{{'step': {step}}}" for step in (0, 1, 2, 3, 0)]


def test_a_player_of_one_picture(shown):
    _, slider = widgets.player(lambda step: draw(step=step), steps=1).children[0].children
    assert (slider.min, slider.max, texts(shown)) == (0, 0, ["{'step': 0}"])


@pytest.mark.parametrize("steps", [0, -3])
def test_a_player_needs_a_step(steps, shown):
    with pytest.raises(ValueError, match=f"at least one step, not {steps}"):
        widgets.player(lambda step: draw(step=step), steps=steps)
    assert not shown
