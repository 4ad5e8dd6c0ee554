"""The learner's side of the command line: check a notebook, see the progress."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path

from minillm.lab import progress
from minillm.lab.check import chapters
from minillm.lab.notebooks import execute, find

CELL_SECONDS = 120  # a loop that does not end is interrupted
MARKS = {"PASS": "x", "FAIL": "!", "ERROR": "!", "TODO": " ", "SKIP": "-"}
REPORT = re.compile(rf"^\[({'|'.join(MARKS)})\]", re.M)  # what the learner's own code prints may stand before it


def check_notebook(number: str, folder: Path = Path("exercises")) -> bool:
    """Run an exercise notebook in a fresh kernel, print what its checks say, and say whether all tasks passed.

    A task that this system cannot check does not count.
    """
    path = find(folder, number)
    number = path.stem.split("_")[0]
    chapter = next((c for c in chapters() if c.number == number), None)
    if chapter is None:
        raise ValueError(f"the notebook {path.name} has no checks")
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / progress.FILE_NAME
        earlier = progress.read().get(number, {})  # the tries go on, so that hints grow; the states are this run's
        file.write_text(json.dumps({number: {task: {**e, "state": "TODO"} for task, e in earlier.items()}}))
        notebook = execute_with(path, file)
        states = progress.read_file(file).get(number, {})
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            text = output.get("text", "")
            if REPORT.search(text):
                print(text, end="")
            if output.output_type == "error":
                print(f"[ERROR] a cell stopped with {output.ename}: {output.evalue}")
    ended = [states.get(task, {}).get("state") for task in chapter.tasks]
    passed, skipped = ended.count("PASS"), ended.count("SKIP")
    rest = f", {skipped} cannot be checked on this system" if skipped else ""
    print(f"\n{path.name}: {passed} of {len(chapter.tasks)} tasks pass{rest}")
    for task in chapter.tasks:
        progress.record(number, task, str(states.get(task, {}).get("state", "TODO")))
    return passed + skipped == len(chapter.tasks)


def execute_with(path: Path, file: Path):
    """Execute with the progress kept in `file`, so that only this run counts."""
    before = os.environ.get(progress.ENVIRONMENT_VARIABLE)
    os.environ[progress.ENVIRONMENT_VARIABLE] = str(file)
    try:
        return execute(path, fast=True, allow_errors=True, timeout=CELL_SECONDS)
    finally:
        os.environ.pop(progress.ENVIRONMENT_VARIABLE)
        if before is not None:
            os.environ[progress.ENVIRONMENT_VARIABLE] = before


def progress_report() -> str:
    """All tasks of all chapters, with what was passed."""
    states = progress.read()
    lines = []
    for chapter in chapters():
        own = states.get(chapter.number, {})
        done = sum(own.get(task, {}).get("state") == "PASS" for task in chapter.tasks)
        lines.append(f"{chapter.number}: {done} of {len(chapter.tasks)}")
        for task in chapter.tasks:
            entry = own.get(task, {"state": "TODO", "tries": 0})
            tries = f", {entry['tries']} failed tries" if entry["tries"] else ""
            lines.append(f"  [{MARKS[entry['state']]}] {task} ({entry['state']}{tries})")
    return "\n".join(lines)
