"""With MINILLM_VARIANT the checks draw other inputs, and still take what is right and reject what is wrong."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path

import pytest
from mutants import compiled, task_sources, timed

from minillm.lab.check import VARIANT, chapters, run, seeded

ROOT = Path(__file__).parents[2]


def test_a_variant_gives_other_seeds(monkeypatch):
    monkeypatch.delenv(VARIANT, raising=False)
    assert [seeded(n) for n in range(3)] == [0, 1, 2]
    monkeypatch.setenv(VARIANT, "7")
    assert [seeded(n) for n in range(3)] == [7000, 7001, 7002]
    monkeypatch.setenv(VARIANT, "seven")
    with pytest.raises(ValueError, match="MINILLM_VARIANT must be a whole number, not 'seven'"):
        seeded(0)


@pytest.mark.parametrize("variant", ["1", "2"])
@pytest.mark.parametrize("chapter", chapters(), ids=lambda chapter: chapter.number)
def test_answers_keep_their_verdicts_in_other_variants(chapter, variant, monkeypatch):
    monkeypatch.setenv(VARIANT, variant)
    setup, sources = task_sources(ROOT, chapter.number)
    here = [name for name, task in chapter.tasks.items() if not task.needs or find_spec(task.needs)]
    for name, source in sources.items():
        if name not in here:
            continue
        namespace = dict(setup)
        exec(compiled(source, name), namespace)
        result = timed(lambda name=name, fn=namespace[name]: run(chapter.tasks[name], fn))
        assert result.state == "PASS", (name, result)
    for answer in importlib.import_module(f"bank_{chapter.number}").BANK.answers:
        if answer.task not in here:
            continue
        result = timed(lambda answer=answer: run(chapter.tasks[answer.task], answer.fn))
        assert (result.state == "PASS") == (answer.says is None), (answer.id, result)
