"""Exercises are made from solutions: what is solved is gone, what is asked stays, and nothing goes unnoticed."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from minillm import cli
from minillm.lab.build_exercises import build, stale, strip, wanted, write

ROOT = Path(__file__).parents[2]

SOLVED = """\
def area(width: int, height: int) -> int:
    \"\"\"-> width times height\"\"\"
    ### BEGIN SOLUTION
    product_of_the_sides = width * height
    return product_of_the_sides
    ### END SOLUTION"""
UNSOLVED = """\
def area(width: int, height: int) -> int:
    \"\"\"-> width times height\"\"\"
    # YOUR CODE HERE
    raise NotImplementedError()"""
GRADED = {"grade": True, "grade_id": "check-area", "locked": True, "points": 1, "schema_version": 3}


def solution(root: Path, *cells: nbformat.NotebookNode, name: str = "02_area.ipynb") -> Path:
    """A solution notebook that has been run, its first cell the solved task."""
    task = new_code_cell(SOLVED, id="task", metadata={"nbgrader": {"solution": True}}, execution_count=7)
    notebook = new_notebook(cells=[task, *cells], metadata={"kernelspec": {"name": "mine", "display_name": "Mine"}})
    path = root / "solutions" / name
    path.parent.mkdir(exist_ok=True)
    nbformat.write(notebook, path)
    return path


def built(path: Path) -> nbformat.NotebookNode:
    return nbformat.reads(build(path), as_version=4)


def test_a_region_becomes_a_stub_in_its_own_indentation():
    result = strip(SOLVED, "here")
    assert result.text == UNSOLVED
    assert result.removed == ["product_of_the_sides = width * height", "return product_of_the_sides"]
    assert result.regions == 1


def test_starter_lines_take_the_place_of_the_stub_and_keep_their_shape():
    starter = "    #: for i in range(n):\n    #:     pass  # yours\n"
    result = strip(f"def f(n):\n    ### BEGIN SOLUTION\n{starter}    a = 1\n    ### END SOLUTION", "here")
    assert result.text == "def f(n):\n    for i in range(n):\n        pass  # yours"
    assert result.removed == ["a = 1"]


def test_two_regions_and_none():
    two = strip(
        "### BEGIN SOLUTION\na = 1\n### END SOLUTION\nb = 2\n### BEGIN SOLUTION\nc = 3\n### END SOLUTION", "here"
    )
    stub = "# YOUR CODE HERE\nraise NotImplementedError()"
    assert (two.text, two.removed, two.regions) == (f"{stub}\nb = 2\n{stub}", ["a = 1", "c = 3"], 2)
    none = strip("#: not in a region\nb = 2", "here")
    assert (none.text, none.removed, none.regions) == ("#: not in a region\nb = 2", [], 0)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("### BEGIN SOLUTION\na = 1", "here: ### BEGIN SOLUTION without ### END SOLUTION"),
        ("a = 1\n### END SOLUTION", "here: ### END SOLUTION without ### BEGIN SOLUTION"),
        ("### BEGIN SOLUTION\n### BEGIN SOLUTION\n### END SOLUTION", "here: ### BEGIN SOLUTION inside a solution"),
    ],
)
def test_markers_must_be_paired(source, says):
    with pytest.raises(ValueError, match=says):
        strip(source, "here")


def test_the_exercise_of_a_solution(tmp_path):
    path = solution(
        tmp_path,
        new_markdown_cell("## The area", id="text"),
        new_code_cell(
            "assert check(area)",
            id="check",
            metadata={"nbgrader": GRADED},
            execution_count=8,
            outputs=[new_output("stream", text="[PASS]")],
        ),
        new_code_cell("assert area(1, 1) == 1", id="own", metadata={"tags": ["kept"], "editable": False}),
    )
    notebook = built(path)
    nbformat.validate(notebook)
    assert [cell.id for cell in notebook.cells] == ["generated-note", "task", "text", "check", "own"]
    note, task, text, check, own = notebook.cells
    assert "`solutions/02_area.ipynb`" in note.source and note.cell_type == "markdown"
    assert task.source == UNSOLVED
    assert text.source == "## The area"
    assert check.source == "check(area);"  # an unsolved notebook is to say TODO, not to stop
    assert own.source == "assert area(1, 1) == 1"
    assert own.metadata == {"tags": ["kept"]} and task.metadata == check.metadata == {}
    assert all(cell.outputs == [] and cell.execution_count is None for cell in (task, check, own))
    assert notebook.metadata.kernelspec.name == "python3"


LEAK = "product_of_the_sides = width * height"


@pytest.mark.parametrize(
    "cell",
    [
        new_code_cell(f"# the idea\n{LEAK}"),
        new_code_cell(f"if True:\n        {LEAK}  # again"),
        new_markdown_cell(f"Remember that `{LEAK}`."),
        new_code_cell(f"### BEGIN SOLUTION\n#: {LEAK}\n### END SOLUTION"),
    ],
    ids=["code", "indented code", "markdown", "starter"],
)
def test_a_solution_line_that_stands_elsewhere_is_an_error(tmp_path, cell):
    with pytest.raises(ValueError, match=r"02_area\.ipynb: the solution's line 'product_of.*' also stands outside"):
        build(solution(tmp_path, cell))


def test_short_lines_and_comments_are_no_leak(tmp_path):
    solved = "### BEGIN SOLUTION\n# a comment that is long enough\nx = 1\n### END SOLUTION"
    public = "# a comment that is long enough\nx = 1"
    assert built(solution(tmp_path, new_code_cell(solved), new_code_cell(public))).cells[-1].source == public


def test_solution_only_cells_are_left_out_and_may_not_leak_either(tmp_path):
    secret = new_code_cell("expected_by_hand = [2, 4, 6, 8]", metadata={"tags": ["solution-only"]})
    notebook = built(solution(tmp_path, secret))
    assert [cell.id for cell in notebook.cells] == ["generated-note", "task"]
    with pytest.raises(ValueError, match="expected_by_hand"):
        build(solution(tmp_path, secret, new_markdown_cell("so expected_by_hand = [2, 4, 6, 8] it is")))


def test_work_that_is_missing_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="there are no solutions in"):
        wanted(tmp_path)
    path = tmp_path / "solutions" / "01_empty.ipynb"
    path.parent.mkdir()
    nbformat.write(new_notebook(cells=[new_code_cell("a = 1")]), path)
    with pytest.raises(ValueError, match=r"01_empty\.ipynb has no solution region"):
        write(tmp_path)
    assert not (tmp_path / "exercises").exists()


def test_missing_stale_and_left_over_exercises_are_reported_and_written(tmp_path):
    solution(tmp_path)
    solution(tmp_path, new_markdown_cell("more"), name="03_more.ipynb")
    exercises = tmp_path / "exercises"
    assert [line.split("\n")[0] for line in stale(tmp_path)] == [
        "02_area.ipynb is out of date:",
        "03_more.ipynb is out of date:",
    ]
    assert write(tmp_path) == [exercises / "02_area.ipynb", exercises / "03_more.ipynb"]
    assert stale(tmp_path) == [] and write(tmp_path) == []

    more = exercises / "03_more.ipynb"
    more.write_text(more.read_text(encoding="utf-8").replace('"more"', '"edited here"'), encoding="utf-8")
    (exercises / "04_old.ipynb").write_text("{}", encoding="utf-8")
    edited, left_over = stale(tmp_path)
    assert edited.startswith("03_more.ipynb is out of date:")
    assert '-    "edited here"' in edited and '+    "more"' in edited
    assert left_over == "04_old.ipynb has no solution notebook"
    assert write(tmp_path) == [more]
    assert stale(tmp_path) == [left_over]


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    return ended.value.code


def test_the_command_writes_and_checks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("exercises", "--check") == 1
    assert capsys.readouterr().err == "minillm: there are no solutions in solutions\n"
    solution(tmp_path)
    assert run("exercises", "--check") == 1
    assert capsys.readouterr().out.startswith("02_area.ipynb is out of date:\n")
    assert run("exercises", "--write") == 0
    assert capsys.readouterr().out == f"wrote {Path('exercises', '02_area.ipynb')}\n"
    assert run("exercises", "--check") == 0
    assert capsys.readouterr().out == "exercises/ is up to date\n"
    assert run("exercises") == 2  # which of the two?


def test_the_exercises_of_the_course_are_up_to_date():
    assert stale(ROOT) == []
