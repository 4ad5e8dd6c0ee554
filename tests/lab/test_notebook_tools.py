"""Notebooks are run in a fresh kernel and stored without what only a running kernel can use."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from minillm import cli
from minillm.lab.notebooks import WIDGET_TEXT, WIDGET_VIEW, execute, find, store

DRAW = """\
from minillm.lab import widgets
from minillm.lab.plots import draw_bars
draw = lambda n: draw_bars(["bar"], [n], "unit", "title", f"one bar of {n}")"""
WIDGET = "print('above')\nwidgets.explore(draw, n=(1, 3))"
PLACE = "import os\nprint(os.environ['MINILLM_FAST'], os.path.basename(os.getcwd()))"


def notebook(folder: Path, name: str, *cells: nbformat.NotebookNode | str) -> Path:
    folder.mkdir(exist_ok=True)
    made = [new_code_cell(cell) if isinstance(cell, str) else cell for cell in cells]
    nbformat.write(new_notebook(cells=made), folder / name)
    return folder / name


def test_what_is_stored_can_be_read_without_a_kernel(tmp_path):
    tagged = new_code_cell("draw(2)", metadata={"tags": ["kept"], "collapsed": True}, execution_count=41)
    path = notebook(tmp_path / "course", "02_small.ipynb", new_markdown_cell("text"), DRAW, WIDGET, tagged, PLACE)
    before = path.read_bytes()
    executed = execute(path, fast=True)
    assert path.read_bytes() == before, "to execute is not to store"
    outputs = [output for cell in executed.cells for output in cell.get("outputs", [])]
    assert any(WIDGET_VIEW in output.get("data", {}) for output in outputs), "there is a widget to remove"
    assert "widgets" in executed.metadata, "and its state"

    store(executed, path)
    assert "jupyter.widget" not in path.read_text(encoding="utf-8")
    stored = nbformat.read(path, as_version=4)
    nbformat.validate(stored)
    assert set(stored.metadata) == {"kernelspec", "language_info"} and stored.metadata.kernelspec.name == "python3"
    text, setup, widget, static, place = stored.cells
    assert text.source == "text"
    assert [cell.execution_count for cell in (setup, widget, static, place)] == [1, 2, 3, 4]
    assert setup.outputs == []
    printed, shown = widget.outputs
    assert printed.text == "above\n"
    assert shown.data == {"text/plain": WIDGET_TEXT} and shown.metadata == {}
    (figure,) = static.outputs
    assert figure.data["text/plain"] == "Figure: one bar of 2" and figure.data["image/png"]
    assert figure.metadata == {"image/png": {"alt": "one bar of 2"}}
    assert static.metadata == {"tags": ["kept"]} and setup.metadata == widget.metadata == {}
    assert place.outputs[0].text == "1 course\n"  # fast; in the notebook's own folder


def test_an_error_stops_the_run_or_is_shown(tmp_path):
    path = notebook(tmp_path, "02_small.ipynb", "1 / 0", PLACE)
    with pytest.raises(ValueError, match="a cell failed with ZeroDivisionError: division by zero"):
        execute(path)
    stopped, place = execute(path, allow_errors=True).cells
    assert stopped.outputs[0].ename == "ZeroDivisionError"
    assert place.outputs[0].text.split() == ["0", tmp_path.name]  # not fast unless asked for


def test_a_notebook_is_found_by_its_number(tmp_path):
    with pytest.raises(ValueError, match=r"there is no notebook '02' in .*; known: none"):
        find(tmp_path, "02")
    first = notebook(tmp_path, "02_small.ipynb")
    with pytest.raises(ValueError, match=r"no notebook '0' in .*; known: 02"):
        find(tmp_path, "0")
    notebook(tmp_path, "03_more.ipynb")
    assert find(tmp_path, "02") == first
    assert find(tmp_path, "2") == first
    for unknown in ("04", "0", ""):
        with pytest.raises(ValueError, match=rf"there is no notebook '{unknown}' in .*; known: 02, 03"):
            find(tmp_path, unknown)
    notebook(tmp_path, "03_again.ipynb")
    with pytest.raises(ValueError, match="known: 02, 03, 03"):  # which of the two?
        find(tmp_path, "03")


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    return ended.value.code


def test_the_command_stores_full_runs_only(tmp_path, monkeypatch, capsys):
    path = notebook(tmp_path / "notebooks", "02_small.ipynb", PLACE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINILLM_FAST", "1")  # what the shell says does not decide which sizes are stored
    before = path.read_bytes()
    assert run("notebooks", "02", "--fast") == 0
    assert path.read_bytes() == before
    assert "stored" not in capsys.readouterr().out
    assert run("notebooks", "02") == 0
    assert capsys.readouterr().out.endswith("s, outputs stored\n")
    assert nbformat.read(path, as_version=4).cells[0].outputs[0].text == "0 notebooks\n"
    assert os.environ["MINILLM_FAST"] == "1"


def test_an_unknown_notebook_stops_the_command_before_any_is_run(tmp_path, monkeypatch, capsys):
    path = notebook(tmp_path / "notebooks", "02_small.ipynb", PLACE)
    before = path.read_bytes()
    monkeypatch.chdir(tmp_path)
    assert run("notebooks", "02", "77") == 1
    assert capsys.readouterr().err == "minillm: there is no notebook '77' in notebooks; known: 02\n"
    assert path.read_bytes() == before
