"""What every lecture and exercise notebook must have, as far as a program can see it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import nbformat
import pytest

from minillm.lab.notebooks import WIDGET_TEXT, WIDGET_VIEW

ROOT = Path(__file__).parents[1]
LECTURES = sorted((ROOT / "notebooks").glob("*.ipynb"))
EXERCISES = sorted((ROOT / "exercises").glob("*.ipynb"))
SOLUTIONS = sorted((ROOT / "solutions").glob("*.ipynb"))
MAP = "00_start_here"  # the map has no measurement, no exercise and no mistake to make
MARK = "# NBVAL_CHECK_OUTPUT"
COPY_LENGTH = 10  # lines of package code that a notebook may repeat


def by_name(paths: list[Path]):
    return pytest.mark.parametrize("path", paths, ids=lambda path: f"{path.parent.name}/{path.stem}")


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def prose(path: Path) -> str:
    return "\n\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")


def test_there_are_notebooks():
    assert {path.stem for path in LECTURES} >= {MAP, "01_autoregression", "02_kv_cache", "03_prefill_and_decode"}
    assert [path.name for path in EXERCISES] == [path.name for path in SOLUTIONS]


@by_name(LECTURES)
def test_header(path):
    head = read(path).cells[0].source
    number = path.stem.split("_")[0]
    assert re.match(rf"# {number} \w", head), "a title with the number"
    assert "**The question:**" in head
    assert re.search(r"[Rr]eading time \d+ minutes", head) and "run time" in head
    assert "You need" in head, "prerequisites"
    goals = re.findall(r"^\* ", head.split("you can")[-1], re.M)
    assert 3 <= len(goals) <= 6
    if path.stem != MAP:
        exercise = rf"\(\.\./exercises/{number[:2]}_\w+\.ipynb\)"  # 04b belongs to the exercise of 04
        assert re.search(exercise, head), "a link to the exercise"


@by_name(LECTURES)
def test_first_code_cell_shows_the_machine_and_seeds(path):
    first = code(path)[0].source
    assert "FAST, device = show.begin(seed=" in first
    assert "import torch" in first or "import minillm" in first
    everything = "\n".join(cell.source for cell in code(path))
    assert "pip install" not in everything and "sys.path" not in everything


@by_name(LECTURES)
def test_it_was_executed_from_top_to_bottom_without_an_error(path):
    cells = code(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [o for cell in cells for o in cell.outputs if o.output_type == "error"]
    assert not [o for cell in cells for o in cell.outputs if o.get("name") == "stderr"]


@by_name(LECTURES)
def test_deterministic_cells_are_marked_and_hold_text(path):
    marked = [cell for cell in code(path) if cell.source.startswith(MARK)]
    assert len(marked) >= 5
    for cell in marked:
        assert cell.execution_count is not None, "the comparison would be skipped"
        assert cell.outputs and all(o.output_type in ("stream", "execute_result") for o in cell.outputs)
        assert "FAST" not in cell.source, "its output must not depend on the sizes"
        assert "image/png" not in str(cell.outputs)


@by_name(LECTURES)
def test_figures_have_alt_texts_and_there_are_at_least_two(path):
    images = [o for cell in code(path) for o in cell.outputs if "image/png" in o.get("data", {})]
    assert len(images) >= 2
    for image in images:
        assert len(image.metadata["image/png"]["alt"]) > 20
        assert image.data["text/plain"].startswith("Figure: ")


@by_name(LECTURES)
def test_a_widget_and_its_static_twin(path):
    cells = code(path)
    widgets = [i for i, cell in enumerate(cells) if re.search(r"widgets\.(explore|player)\(", cell.source)]
    assert widgets
    for i in widgets:
        assert any(o.get("data", {}).get("text/plain") == WIDGET_TEXT for o in cells[i].outputs)
        drawn = set(re.findall(r"\bdraw_\w+", cells[i].source)) - {"draw_cache"}
        later = [cell for cell in cells[i + 1 :] if drawn & set(re.findall(r"\bdraw_\w+", cell.source))]
        assert any("image/png" in o.get("data", {}) for cell in later for o in cell.outputs), "no static twin"


@by_name(LECTURES + EXERCISES + SOLUTIONS)
def test_metadata_and_size(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert "widgets" not in notebook.metadata
    assert WIDGET_VIEW not in path.read_text(encoding="utf-8")
    assert path.stat().st_size < 1_000_000
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)


@by_name([path for path in LECTURES if path.stem != MAP])
def test_the_parts_of_a_lecture(path):
    text = prose(path)
    assert len(re.findall(r"\*\*Predict", text)) >= 3
    assert sum(cell.source.startswith("guess = None") for cell in code(path)) >= 3
    assert sum("predicted_and_measured(" in cell.source for cell in code(path)) >= 3
    assert re.search(r"^## .*Break it on purpose", text, re.M)
    assert 2 <= text.count("<details>") <= 6 and text.count("<details>") == text.count("</details>")
    assert "## Recap" in text and "**Further reading.**" in text
    recall = text.split("**Recall.**")[1].split("**Further reading.**")[0]
    assert all(f"({i})" in recall for i in range(1, 6)), "five recall questions"
    assert "show.notation()" in "\n".join(cell.source for cell in code(path))
    assert "show.source(" in "\n".join(cell.source for cell in code(path)), "the package's own code is shown"


@by_name(LECTURES + EXERCISES)
def test_links_to_files_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)\)", prose(path)):
        if not target.startswith("http"):
            assert (path.parent / target).is_file() or (path.parent / target).is_dir(), target


@by_name(LECTURES + SOLUTIONS)
def test_no_second_copy_of_package_code(path):
    package = {}
    for file in (ROOT / "minillm").rglob("*.py"):
        lines = code_lines(file.read_text(encoding="utf-8"))
        for i in range(len(lines) - COPY_LENGTH):
            package["\n".join(lines[i : i + COPY_LENGTH + 1])] = file.name
    for cell in code(path):
        lines = code_lines(cell.source)
        for i in range(len(lines) - COPY_LENGTH):
            block = "\n".join(lines[i : i + COPY_LENGTH + 1])
            assert block not in package, f"more than {COPY_LENGTH} lines of {package.get(block)}: {block[:80]}"


def code_lines(source: str) -> list[str]:
    return [line.strip() for line in source.split("\n") if line.strip() and not line.strip().startswith("#")]


@by_name(LECTURES + EXERCISES + SOLUTIONS)
def test_every_code_cell_is_python(path):
    for cell in code(path):
        ast.parse(cell.source)


@by_name(EXERCISES)
def test_an_exercise_says_what_each_task_asks(path):
    text = prose(path)
    tasks = re.findall(r"^## Task \d: ", text, re.M)
    assert 3 <= len(tasks) <= 6
    table = [line for line in text.split("\n") if re.match(r"\| \d ", line)]
    assert len(table) == len(tasks)
    assert "difficulty" in text and "importance" in text and "minutes" in text
    stubs = [cell for cell in code(path) if "raise NotImplementedError()" in cell.source]
    assert len(stubs) == len(tasks)
    for cell in stubs:
        (function,) = (node for node in ast.parse(cell.source).body if isinstance(node, ast.FunctionDef))
        if not function.decorator_list:  # a kernel's arguments are addresses and numbers, without types
            assert function.returns is not None and all(a.annotation for a in function.args.args), "a typed signature"
        assert any(c.source == f"check({function.name});" for c in code(path)), "its check stands in the notebook"


@by_name(EXERCISES)
def test_exercises_hold_no_outputs(path):
    assert all(not cell.outputs and cell.execution_count is None for cell in code(path))


@by_name(SOLUTIONS)
def test_solutions_carry_the_metadata_for_grading(path):
    for cell in code(path):
        graded = cell.metadata.get("nbgrader")
        if cell.source.startswith("assert check("):
            assert graded and graded["grade"] and graded["points"] > 0 and graded["locked"]
        if "### BEGIN SOLUTION" in cell.source:
            assert graded and graded["solution"] and not graded["grade"]
