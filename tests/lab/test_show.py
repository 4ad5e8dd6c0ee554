"""What all notebooks share: the start, the notation, the package's code as it stands, a guess beside a measurement."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

from minillm.attention import causal_mask
from minillm.generation import next_logits
from minillm.kv_cache import ContiguousKV
from minillm.lab import show
from minillm.lab.catalogue import MODELS


@pytest.mark.parametrize(
    ("value", "fast"), [(None, False), ("", False), ("0", False), ("1", True)], ids=["unset", "empty", "0", "1"]
)
def test_begin_seeds_and_says_where_it_runs(value, fast, monkeypatch, capsys):
    monkeypatch.delenv("MINILLM_FAST", raising=False)
    if value is not None:
        monkeypatch.setenv("MINILLM_FAST", value)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert show.begin(seed=7) == (fast, device)
    drawn = torch.rand(3)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(7)))
    machine, run = capsys.readouterr().out.splitlines()
    assert torch.__version__ in machine
    assert run == f"device {device}, seed 7, {'fast mode: small sizes' if fast else 'full sizes'}"


def test_the_notation_has_the_numbers_of_the_model():
    rows = [line.strip("|").split("|") for line in show.notation().data.strip().split("\n") if line.startswith("| ")]
    values = {name.strip(" `"): int(value.replace(",", "")) for _, name, _, value in rows[1:] if value.strip()}
    config = MODELS["SmolLM2-135M"]
    assert values == {name: getattr(config, name) for name in values}
    assert set(values) == {"vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff"}


def test_source_is_the_code_of_the_package():
    assert show.source(causal_mask).data == "# attention.py\n" + inspect.getsource(causal_mask)
    some = show.source(ContiguousKV, "commit", "truncate").data
    assert some.startswith("# kv_cache.py\ndef commit(self")  # not indented, though it is a method
    assert "\ndef truncate(self" in some and "def attend" not in some
    assert "\ndef nbytes(self" in show.source(ContiguousKV, "nbytes").data  # a property
    assert show.source(next_logits).data.startswith("# generation.py\n@")  # its file, not that of its decorator
    everything = show.source(ContiguousKV).data
    assert everything == "# kv_cache.py\n" + inspect.getsource(ContiguousKV)


def test_a_guess_a_formula_and_a_measurement_stand_side_by_side(capsys):
    show.predicted_and_measured("ms", [("a step", None, 20.0, 25.0), ("a pass", 1234.5, 2.0, 1.0), ("none", 0, 4, 4)])
    head, rule, *rows = capsys.readouterr().out.splitlines()
    columns = [(part.start(), part.end()) for part in re.finditer("-+", rule)]
    table = [[line[start:end].strip() for start, end in columns] for line in (head, *rows)]
    assert table == [
        ["in ms", "your guess", "formula", "measured", "measured / formula"],
        ["a step", "no guess", "20", "25", "1.25"],
        ["a pass", "1.23e+03", "2", "1", "0.5"],
        ["none", "0", "4", "4", "1"],
    ]


def test_a_table_prints_what_it_is_given(capsys):
    show.table(["name", "value"], [("a", "1.50"), ("b", 7)])
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["name", "value"],
        ["------", "-------"],
        ["a", "1.50"],
        ["b", "7"],
    ]


def test_a_cell_that_needs_triton_says_why_it_is_skipped(monkeypatch, capsys):
    monkeypatch.setattr(show, "find_spec", lambda name: object() if name == "triton" else None)
    assert show.needs_triton() and capsys.readouterr().out == ""
    monkeypatch.setattr(show, "find_spec", lambda name: None)
    assert not show.needs_triton()
    assert capsys.readouterr().out.startswith("SKIP: this cell needs Triton")
