"""The laws of the exercises: unsolved does not pass, solved passes, each wrong answer is rejected for its fault.

Besides the stored answers, small changes are made to each solution by a program; nearly all must be rejected, and the
few that are not are listed here as changes that do not matter.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from bank import Answer
from mutants import EQUIVALENT, compiled, mutants, task_sources, timed

from minillm.lab import build_exercises
from minillm.lab.check import Result, chapters, run

ROOT = Path(__file__).parents[2]
CHAPTERS = {chapter.number: chapter for chapter in chapters()}
BANKS = {number: importlib.import_module(f"bank_{number}").BANK for number in CHAPTERS}
ANSWERS = [(number, answer) for number, bank in BANKS.items() for answer in bank.answers]
TASKS = [(number, name) for number, chapter in CHAPTERS.items() for name in chapter.tasks]


def result_of(number: str, name: str, fn) -> Result:
    result = timed(lambda: run(CHAPTERS[number].tasks[name], fn))
    if result.state == "SKIP":
        pytest.skip(result.message)
    return result


@pytest.mark.parametrize(("number", "answer"), ANSWERS, ids=lambda x: x.id if isinstance(x, Answer) else x)
def test_stored_answers(number, answer):
    result = result_of(number, answer.task, answer.fn)
    if answer.says is None:
        assert result.state == "PASS", result
    else:
        assert result.state in ("FAIL", "ERROR"), "a wrong answer was accepted"
        assert re.search(answer.says, f"{result.what}: {result.message}"), f"the diagnosis does not name it: {result}"


@pytest.mark.parametrize(("number", "name"), TASKS)
def test_each_task_has_enough_answers_and_hints(number, name):
    own = [answer for answer in BANKS[number].answers if answer.task == name]
    assert sum(answer.says is not None for answer in own) >= 4
    assert sum(answer.says is None for answer in own) >= 2
    assert CHAPTERS[number].tasks[name].hints


@pytest.mark.parametrize(("number", "name"), TASKS)
def test_unsolved_is_todo_and_the_solution_passes(number, name):
    setup, sources = task_sources(ROOT, number)
    namespace = dict(setup)
    exec(compiled(build_exercises.strip(sources[name], name).text, name), namespace)
    assert result_of(number, name, namespace[name]).state == "TODO"
    namespace = dict(setup)
    exec(compiled(sources[name], name), namespace)
    assert result_of(number, name, namespace[name]).state == "PASS"


@pytest.mark.parametrize(("number", "name"), TASKS)
def test_nearly_all_small_changes_to_a_solution_are_rejected(number, name):
    setup, sources = task_sources(ROOT, number)
    made = list(mutants(sources[name], name))
    assert len(made) >= 3, "too few changes to prove anything"
    survivors = []
    for description, tree in made:
        namespace = dict(setup)
        exec(tree, namespace)
        if result_of(number, name, namespace[name]).state == "PASS":
            survivors.append(description)
    unexplained = [s for s in survivors if s not in EQUIVALENT.get(name, ())]
    assert not unexplained, "accepted, and not listed as changes that do not matter"
    assert len(survivors) <= len(made) / 10 or set(survivors) <= set(EQUIVALENT.get(name, ()))


def test_every_chapter_has_a_solution_notebook_and_the_other_way_round():
    notebooks = {path.stem.split("_")[0] for path in (ROOT / "solutions").glob("*.ipynb")}
    assert notebooks == set(CHAPTERS)
