"""`minillm check` and `minillm progress`: a learner's notebook is run, its tasks are counted, its progress is kept.

The notebooks here are small: two tasks of chapter 02 that need no model.
"""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from minillm import cli
from minillm.lab import course, progress
from minillm.lab.check import Chapter, find

MASK = """\
def causal_mask(n_queries, n_keys):
    return torch.ones(n_queries, n_keys, dtype=torch.bool).tril(n_keys - n_queries)"""
REUSE = """\
def reuse(cached, prompt):
    keep = 0
    while keep < min(len(cached), len(prompt) - 1) and cached[keep] == prompt[keep]:
        keep += 1
    return keep, prompt[keep:]"""
UPPER_LEFT = """\
def causal_mask(n_queries, n_keys):
    print("my own trace")
    return torch.ones(n_queries, n_keys, dtype=torch.bool).tril()"""
MASK_STUB = "def causal_mask(n_queries, n_keys):\n    raise NotImplementedError()"
REUSE_STUB = "def reuse(cached, prompt):\n    raise NotImplementedError()"
USE = "with attempt('your mask'):\n    print(causal_mask(2, 3).tolist())"
KEPT = {"05": {"blocks": {"state": "PASS", "tries": 2}}}


@pytest.fixture
def course_folder(monkeypatch, tmp_path):
    """A course with one chapter of two tasks, and the progress of another one."""
    small = Chapter("02")
    small.tasks = {name: find(name)[1] for name in ("causal_mask", "reuse")}
    other = Chapter("05")
    other.task("blocks", hints=())
    monkeypatch.setattr(course, "chapters", lambda: [small, other])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(progress.ENVIRONMENT_VARIABLE, str(tmp_path / "progress.json"))
    progress.record("05", "blocks", "FAIL")
    progress.record("05", "blocks", "FAIL")
    progress.record("05", "blocks", "PASS")
    (tmp_path / "exercises").mkdir()
    return tmp_path


def notebook(folder: Path, *sources: str) -> Path:
    setup = "import torch\nfrom minillm.lab.check import attempt, check"
    path = folder / "exercises" / "02_small.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell(source) for source in (setup, *sources)]), path)
    return path


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    return ended.value.code


def test_a_solved_notebook_passes_and_stays_as_it_is(course_folder, capsys):
    path = notebook(course_folder, MASK, "check(causal_mask);", USE, REUSE, "check(reuse);")
    before, environment = path.read_bytes(), dict(os.environ)
    assert run("check", "02") == 0
    assert capsys.readouterr().out.splitlines() == [
        "[PASS] causal_mask: 3 properties hold",
        "[PASS] reuse: 5 properties hold",
        "",
        "02_small.ipynb: 2 of 2 tasks pass",
    ]
    passed = {"state": "PASS", "tries": 0}
    assert progress.read() == {**KEPT, "02": {"causal_mask": passed, "reuse": passed}}
    assert path.read_bytes() == before and dict(os.environ) == environment
    assert {file.name for file in course_folder.rglob("*.*")} == {"progress.json", "02_small.ipynb"}


def test_an_unsolved_notebook_says_todo_and_counts_no_try(course_folder, capsys):
    progress.record("02", "reuse", "PASS")  # by an answer that is no longer there
    notebook(course_folder, MASK_STUB, "check(causal_mask);", USE, REUSE_STUB, "check(reuse);")
    assert run("check", "02") == 1
    assert capsys.readouterr().out.splitlines() == [
        "[TODO] causal_mask: not written yet",
        "[TODO] your mask: needs the function above",
        "[TODO] reuse: not written yet",
        "",
        "02_small.ipynb: 0 of 2 tasks pass",
    ]
    todo = {"state": "TODO", "tries": 0}
    assert progress.read() == {**KEPT, "02": {"causal_mask": todo, "reuse": todo}}


def test_a_half_solved_notebook_shows_each_fault_and_goes_on(course_folder, capsys):
    """A wrong task that prints, a cell that stops, a solved task; the hint goes on from earlier tries."""
    progress.record("02", "causal_mask", "FAIL")
    notebook(course_folder, UPPER_LEFT, "check(causal_mask);", "1 / 0", REUSE, "check(reuse);")
    assert run("check", "02") == 1
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    fail = lines.index("[FAIL] causal_mask: one new token on a past sees everything")
    assert set(lines[:fail]) == {"my own trace"}
    assert "query 0 may see keys [0, 1, 2, 3, 4], yours sees [0]" in lines[fail + 1]
    assert "hint 2 of 2" in lines[fail + 2]
    assert lines[fail + 3 :] == [
        "[ERROR] a cell stopped with ZeroDivisionError: division by zero",
        "[PASS] reuse: 5 properties hold",
        "",
        "02_small.ipynb: 1 of 2 tasks pass",
    ]
    assert "Traceback" not in printed
    assert progress.read() == {
        **KEPT,
        "02": {"causal_mask": {"state": "FAIL", "tries": 2}, "reuse": {"state": "PASS", "tries": 0}},
    }

    assert run("progress") == 0
    assert capsys.readouterr().out.splitlines() == [
        "02: 1 of 2",
        "  [!] causal_mask (FAIL, 2 failed tries)",
        "  [x] reuse (PASS)",
        "05: 1 of 1",
        "  [x] blocks (PASS, 2 failed tries)",
    ]


def test_a_task_whose_check_is_not_run_does_not_pass(course_folder, monkeypatch, capsys):
    progress.record("02", "reuse", "PASS")
    path = notebook(course_folder, MASK)
    ran = nbformat.read(path, as_version=4)

    def executed(path, fast, allow_errors, timeout):
        assert fast and allow_errors
        progress.record("02", "causal_mask", "PASS")  # what the kernel does
        return ran

    monkeypatch.setattr(course, "execute", executed)
    assert not course.check_notebook("02")
    assert capsys.readouterr().out == "\n02_small.ipynb: 1 of 2 tasks pass\n"
    assert progress.read()["02"]["reuse"]["state"] == "TODO"


def test_a_skipped_task_neither_passes_nor_fails(course_folder, monkeypatch, capsys):
    ran = nbformat.read(notebook(course_folder, MASK), as_version=4)
    ended = {"reuse": "SKIP"}

    def executed(path, fast, allow_errors, timeout):
        for task, state in ended.items():
            progress.record("02", task, state)  # what the kernel does
        return ran

    monkeypatch.setattr(course, "execute", executed)
    for state, passed in (("PASS", 1), ("FAIL", 0), ("TODO", 0)):
        ended["causal_mask"] = state
        assert course.check_notebook("02") == (state == "PASS")
        says = f"\n02_small.ipynb: {passed} of 2 tasks pass, 1 cannot be checked on this system\n"
        assert capsys.readouterr().out == says
    assert course.progress_report().splitlines()[:3] == [
        "02: 0 of 2",
        "  [ ] causal_mask (TODO, 1 failed tries)",
        "  [-] reuse (SKIP)",
    ]


def test_without_any_progress_everything_is_to_do(course_folder):
    (course_folder / "progress.json").unlink()
    assert course.progress_report().splitlines() == [
        "02: 0 of 2",
        "  [ ] causal_mask (TODO)",
        "  [ ] reuse (TODO)",
        "05: 0 of 1",
        "  [ ] blocks (TODO)",
    ]


def test_an_unknown_number_gets_one_sentence(course_folder, capsys):
    notebook(course_folder)
    assert run("check", "77") == 1
    assert capsys.readouterr().err == "minillm: there is no notebook '77' in exercises; known: 02\n"
    (course_folder / "exercises" / "09_unchecked.ipynb").write_text("{}", encoding="utf-8")
    assert run("check", "09") == 1
    assert capsys.readouterr().err == "minillm: the notebook 09_unchecked.ipynb has no checks\n"
    assert progress.read() == KEPT


def test_the_environment_is_as_before_when_the_run_fails(monkeypatch, tmp_path):
    def broken(path, fast, allow_errors, timeout):
        assert os.environ[progress.ENVIRONMENT_VARIABLE] == str(tmp_path / "own.json")
        raise OSError("the kernel died")

    monkeypatch.setattr(course, "execute", broken)
    monkeypatch.delenv(progress.ENVIRONMENT_VARIABLE, raising=False)
    with pytest.raises(OSError, match="the kernel died"):
        course.execute_with(Path("02.ipynb"), tmp_path / "own.json")
    assert progress.ENVIRONMENT_VARIABLE not in os.environ
