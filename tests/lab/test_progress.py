"""What a learner has passed is kept in one file, which never gets in the way: missing, damaged or read-only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minillm.lab import progress


@pytest.fixture
def file(monkeypatch, tmp_path) -> Path:
    path = tmp_path / "progress.json"
    monkeypatch.setenv(progress.ENVIRONMENT_VARIABLE, str(path))
    return path


def test_the_last_state_and_the_failed_tries_are_kept(file):
    states = ["TODO", "FAIL", "ERROR", "TODO", "PASS", "FAIL", "PASS"]
    assert [progress.record("02", "reuse", state) for state in states] == [0, 1, 2, 2, 2, 3, 3]
    assert progress.record("02", "attend", "FAIL") == 1
    assert progress.record("05", "reuse", "PASS") == 0
    wanted = {
        "02": {"reuse": {"state": "PASS", "tries": 3}, "attend": {"state": "FAIL", "tries": 1}},
        "05": {"reuse": {"state": "PASS", "tries": 0}},
    }
    assert progress.read() == json.loads(file.read_text(encoding="utf-8")) == wanted


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x00"])
def test_a_damaged_file_counts_as_empty_and_is_written_anew(file, content):
    file.write_text(content, encoding="utf-8")
    assert progress.read() == {}
    assert progress.record("02", "reuse", "FAIL") == 1
    assert progress.read() == {"02": {"reuse": {"state": "FAIL", "tries": 1}}}


def test_a_file_that_cannot_be_written_does_not_stop_the_check(monkeypatch, tmp_path):
    monkeypatch.setenv(progress.ENVIRONMENT_VARIABLE, str(tmp_path / "no folder" / "progress.json"))
    assert progress.record("02", "reuse", "FAIL") == 1
    assert progress.read() == {}


def test_where_the_file_lies(monkeypatch, tmp_path):
    monkeypatch.delenv(progress.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    assert progress.progress_file() == Path(progress.FILE_NAME)
    (tmp_path / "exercises").mkdir()
    assert progress.progress_file() == Path("exercises") / progress.FILE_NAME
    progress.record("02", "reuse", "PASS")
    from_the_root = progress.read()
    monkeypatch.chdir(tmp_path / "exercises")  # a notebook's kernel works in the notebook's folder
    assert progress.read() == from_the_root != {}
    monkeypatch.setenv(progress.ENVIRONMENT_VARIABLE, "elsewhere.json")
    assert progress.progress_file() == Path("elsewhere.json")


def test_git_ignores_the_file():
    ignored = (Path(__file__).parents[2] / ".gitignore").read_text(encoding="utf-8").split("\n")
    assert progress.FILE_NAME in ignored
