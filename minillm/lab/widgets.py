"""Widgets around pure `draw_*` functions: change a slider, and the figure is drawn anew.

A widget needs a running kernel; on a code host or on paper nothing is left of it. So each notebook also shows the same
figure once as a static call.
"""

from __future__ import annotations

from collections.abc import Callable

import ipywidgets
from IPython.display import display

from minillm.lab.plots import Picture


def explore(draw: Callable[..., Picture], **controls: ipywidgets.Widget | tuple | list) -> ipywidgets.VBox:
    """Controls above the picture that `draw` makes of their values.

    controls: one for each argument of `draw`; `(low, high)` or `(low, high, step)` is a slider, a list a choice.
    """
    interactive = ipywidgets.interactive(lambda **values: display(draw(**values)), **controls)
    for control in interactive.children[:-1]:
        control.continuous_update = False  # draw when the slider is let go, not on the way
        control.style.description_width = "initial"
    return ipywidgets.VBox(interactive.children)


def player(draw: Callable[[int], Picture], steps: int, label: str = "step") -> ipywidgets.VBox:
    """Step through `draw(0)` ... `draw(steps - 1)` with play, pause and a slider."""
    if steps < 1:
        raise ValueError(f"a player needs at least one step, not {steps}")
    play = ipywidgets.Play(min=0, max=steps - 1, interval=900)
    slider = ipywidgets.IntSlider(min=0, max=steps - 1, description=label)
    ipywidgets.jslink((play, "value"), (slider, "value"))
    screen = ipywidgets.interactive_output(lambda step: display(draw(step)), {"step": slider})
    return ipywidgets.VBox([ipywidgets.HBox([play, slider]), screen])
