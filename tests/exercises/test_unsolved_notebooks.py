"""An exercise that nobody has touched runs to its end in a fresh kernel and says TODO for each task, no traceback."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from minillm.lab.check import chapters
from minillm.lab.notebooks import execute, find

EXERCISES = Path(__file__).parents[2] / "exercises"


@pytest.mark.parametrize("chapter", chapters(), ids=lambda chapter: chapter.number)
def test_unsolved_says_todo(chapter):
    notebook = execute(find(EXERCISES, chapter.number), fast=True)  # a cell that raises would stop it
    printed = "\n".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    for name, task in chapter.tasks.items():
        lacks = task.needs and not find_spec(task.needs)
        assert (f"[SKIP] {name}: it needs" if lacks else f"[TODO] {name}: not written yet") in printed
    assert "[PASS]" not in printed and "Traceback" not in printed
