"""Results of a long run, kept in a file row by row: a run that was cut off goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from minillm.lab.report import write_json


class Results:
    """Finished rows by name, kept in a file if one is given. `reused`: those that the file had already."""

    def __init__(self, machine: Mapping[str, object], text: Mapping[str, object], file: str | None = None):
        self.head = {"machine": dict(machine), "text": dict(text)}
        self.file = file
        self.rows: dict[str, dict[str, object]] = {}
        if file and Path(file).exists():
            known = read(file)
            if identity(known) != identity(self.head):
                raise ValueError(f"{file} holds results of another machine, text or size: name another file")
            self.rows = {row["name"]: row for row in known["results"]}
        self.reused = [*self.rows]

    def row(self, name: str, measure: Callable[..., dict[str, object]], *arguments: object) -> None:
        """Measured only if it is not known yet."""
        if name not in self.rows:
            self.rows[name] = {"name": name, **measure(*arguments)}
            if self.file:
                write_json(self.file, self.as_json())

    def of(self, kind: str) -> list[dict[str, object]]:
        return [row for row in self.rows.values() if row["kind"] == kind]

    def as_json(self) -> dict[str, object]:
        return self.head | {"results": [*self.rows.values()]}


def read(file: str) -> dict:
    try:
        known = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError:  # no JSON, or no text
        known = None
    if not isinstance(known, dict) or not {"machine", "text", "results"} <= known.keys():
        raise ValueError(f"{file} is there and holds something else: name another file")
    return known


def identity(results: Mapping) -> dict[str, object]:
    """What must be the same for rows to stand in one table."""
    machine = results["machine"]
    return {"text": results["text"], "machine": machine | {"busy": None} if isinstance(machine, dict) else machine}
