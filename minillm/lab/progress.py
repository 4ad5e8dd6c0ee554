"""What a learner has tried and passed, in a small JSON file beside the exercises (git ignores it)."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

ENVIRONMENT_VARIABLE = "MINILLM_PROGRESS"
FILE_NAME = ".minillm_progress.json"

STATES = ("TODO", "FAIL", "ERROR", "PASS", "SKIP")
Progress = dict[str, dict[str, dict[str, object]]]


def progress_file() -> Path:
    """The file that MINILLM_PROGRESS names, else the one in exercises/ below this folder, else here."""
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if named:
        return Path(named)
    exercises = Path("exercises")
    return (exercises if exercises.is_dir() else Path()) / FILE_NAME


def read() -> Progress:
    return read_file(progress_file())


def read_file(path: Path) -> Progress:
    """{chapter: {task: {"state", "tries"}}}; a damaged file counts as empty, since it only records progress."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {
            chapter: {
                task: entry for task, entry in tasks.items() if entry["state"] in STATES and int(entry["tries"]) >= 0
            }
            for chapter, tasks in content.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return {}


def record(chapter: str, task: str, state: str) -> int:
    """Remember the last state of a task. -> how often it has failed so far (TODO and SKIP are no tries)."""
    everything = read()
    entry = everything.setdefault(chapter, {}).setdefault(task, {"state": "TODO", "tries": 0})
    entry["state"] = state
    entry["tries"] = int(entry["tries"]) + (state in ("FAIL", "ERROR"))
    with contextlib.suppress(OSError):  # a read-only folder: the check still works, only nothing is remembered
        progress_file().write_text(json.dumps(everything, indent=1), encoding="utf-8")
    return int(entry["tries"])
