"""For teachers who grade with nbgrader: it makes release versions of the solutions without an answer in them.

nbgrader is no dependency of a learner: `pip install -e ".[grading]"` brings it. It extends JupyterLab, so it may also
live in an environment of its own; then the variable NBGRADER names its program.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from minillm.lab.build_exercises import BEGIN, LEAK_LENGTH, STUB, strip

SOLUTIONS = Path(__file__).parents[1] / "solutions"
NBGRADER = os.environ.get("NBGRADER") or shutil.which("nbgrader", path=str(Path(sys.executable).parent))
pytestmark = pytest.mark.skipif(
    NBGRADER is None, reason="nbgrader is not installed: pip install -e '.[grading]', or name its program in NBGRADER"
)


def cells(path: Path) -> dict[str, nbformat.NotebookNode]:
    return {cell.id: cell for cell in nbformat.read(path, as_version=4).cells}


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> Path:
    """The folder of the release versions, made by nbgrader from a copy of the solutions."""
    course = tmp_path_factory.mktemp("nbgrader")
    shutil.copytree(SOLUTIONS, course / "source" / "course", ignore=shutil.ignore_patterns(".*"))
    path = os.pathsep.join([str(Path(NBGRADER).parent), os.environ["PATH"]])  # nbgrader calls alembic by its name
    own = {f"JUPYTER_{kind}_DIR": str(course / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
    done = subprocess.run(
        [NBGRADER, "generate_assignment", "course", "--create"],
        cwd=course,
        env={**os.environ, **own, "PATH": path},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    return course / "release" / "course"


def test_every_notebook_is_released(release):
    names = sorted(path.name for path in SOLUTIONS.glob("*.ipynb"))
    assert names and sorted(path.name for path in release.glob("*.ipynb")) == names


def test_no_answer_is_released(release):
    for path in SOLUTIONS.glob("*.ipynb"):
        solved, released = cells(path), cells(release / path.name)
        everything = "\n".join(cell.source for cell in released.values())
        for id, cell in solved.items():
            secret = strip(cell.source, path.name).removed
            if BEGIN in cell.source:
                assert secret and "\n".join(f"    {line}" for line in STUB) in released[id].source
                assert not set(secret) & {line.strip() for line in released[id].source.split("\n")}
            if "solution-only" in cell.metadata.get("tags", []):
                secret = cell.source.split("\n")
            assert not [line for line in secret if len(line) > LEAK_LENGTH and line in everything]


def test_grading_cells_are_kept_and_locked(release):
    for path in SOLUTIONS.glob("*.ipynb"):
        solved, released = cells(path), cells(release / path.name)
        graded = {id: cell for id, cell in solved.items() if cell.metadata.get("nbgrader", {}).get("grade")}
        assert graded, path.name
        for id, cell in graded.items():
            assert released[id].source == cell.source
            assert released[id].source.startswith("assert check(")
            kept = released[id].metadata.nbgrader
            assert kept.grade and kept.locked and kept.points == cell.metadata.nbgrader.points and kept.checksum
            assert released[id].metadata.editable is False
