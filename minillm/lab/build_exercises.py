"""Make exercises/ from solutions/: one source, so that the two cannot drift apart.

Lines between `### BEGIN SOLUTION` and `### END SOLUTION` (nbgrader's markers) become a stub. Lines in such a region
that begin with `#: ` are starter code and take the stub's place. A removed line that still stands elsewhere in the
notebook is a leak, and an error. Grading cells `assert check(f)` lose the
assertion: an unsolved notebook says TODO.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path

import nbformat

BEGIN, END, STARTER = "### BEGIN SOLUTION", "### END SOLUTION", "#: "
STUB = ("# YOUR CODE HERE", "raise NotImplementedError()")  # nbgrader's default text
LEAK_LENGTH = 20  # shorter lines ("return x") are no giveaway
NOTE = "*Generated from `solutions/{name}` by `minillm exercises --write`; to change it, edit that file.*"


@dataclass
class Stripped:
    text: str
    removed: list[str] = field(default_factory=list)
    regions: int = 0


def strip(text: str, where: str) -> Stripped:
    """Replace the solution regions of one cell."""
    result = Stripped("")
    kept: list[str] = []
    starter: list[str] | None = None  # None outside a region
    indent = ""
    for line in text.split("\n"):
        mark = line.strip()
        if mark == BEGIN:
            if starter is not None:
                raise ValueError(f"{where}: {BEGIN} inside a solution")
            starter, indent = [], line[: len(line) - len(line.lstrip())]
        elif mark == END:
            if starter is None:
                raise ValueError(f"{where}: {END} without {BEGIN}")
            kept += [indent + stub for stub in (starter or STUB)]
            starter = None
            result.regions += 1
        elif starter is None:
            kept.append(line)
        elif mark.startswith(STARTER):
            starter.append(mark[len(STARTER) :])
        else:
            result.removed.append(mark)
    if starter is not None:
        raise ValueError(f"{where}: {BEGIN} without {END}")
    result.text = "\n".join(kept)
    return result


def build(source: Path) -> str:
    """The exercise notebook of one solution notebook, as text."""
    notebook = nbformat.read(source, as_version=4)
    cells, removed, regions = [], [], 0
    for cell in notebook.cells:
        if "solution-only" in cell.metadata.get("tags", []):
            removed += [line.strip() for line in cell.source.split("\n")]
            continue
        stripped = strip(cell.source, f"{source.name}, cell {cell.id}")
        removed += stripped.removed
        regions += stripped.regions
        cells.append(clean(cell, stripped.text))
    if not regions:
        raise ValueError(f"{source.name} has no solution region")
    refuse_leaks(source.name, removed, cells)
    note = nbformat.v4.new_markdown_cell(NOTE.format(name=source.name), id="generated-note")
    notebook.cells = [note, *cells]
    notebook.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def clean(cell: nbformat.NotebookNode, text: str) -> nbformat.NotebookNode:
    """The cell without outputs and without nbgrader's metadata; grading cells no longer assert."""
    tags = cell.metadata.get("tags", [])
    cell.metadata = {"tags": tags} if tags else {}
    cell.source = text
    if cell.cell_type == "code":
        cell.source = "\n".join(ungraded(line) for line in text.split("\n"))
        cell.outputs, cell.execution_count = [], None
    return cell


def ungraded(line: str) -> str:
    """`assert check(f)` -> `check(f);`: it prints its report; the semicolon keeps the notebook from showing False."""
    return line.removeprefix("assert ") + ";" if line.startswith("assert check(") else line


def refuse_leaks(name: str, removed: list[str], cells: list[nbformat.NotebookNode]) -> None:
    public = [line.strip() for cell in cells for line in cell.source.split("\n")]
    for line in removed:
        if len(line) > LEAK_LENGTH and not line.startswith("#") and any(line in other for other in public):
            raise ValueError(f"{name}: the solution's line {line!r} also stands outside of it")


def wanted(root: Path) -> dict[Path, str]:
    """Every exercise file that should exist, with its text."""
    sources = sorted((root / "solutions").glob("*.ipynb"))
    if not sources:
        raise ValueError(f"there are no solutions in {root / 'solutions'}")  # never pass for want of work
    return {root / "exercises" / source.name: build(source) for source in sources}


def stale(root: Path) -> list[str]:
    """What is wrong with exercises/: a line for each file that is missing, out of date, or left over."""
    files = wanted(root)
    problems = []
    for path, text in files.items():
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        if old != text:
            changes = list(difflib.unified_diff(old.splitlines(), text.splitlines(), lineterm="", n=0))[2:8]
            problems.append(f"{path.name} is out of date:\n  " + "\n  ".join(changes))
    extra = sorted(set((root / "exercises").glob("*.ipynb")) - set(files))
    return problems + [f"{path.name} has no solution notebook" for path in extra]


def write(root: Path) -> list[Path]:
    """Write the exercises that changed. -> their paths"""
    changed = []
    for path, text in wanted(root).items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed
