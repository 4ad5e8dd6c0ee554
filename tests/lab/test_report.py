"""What a reader sees: every number in its column and unit, files that other programs can read."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from minillm.lab import report
from minillm.lab.ladder import Row
from minillm.lab.serving import Arrival
from minillm.lab.workload import Requests

NAIVE = Row(
    stage="naive",
    new="recompute",
    workload="story",
    tokens_per_s=5.04,
    spread=(4.96, 5.11),
    ttft_ms=120.4,
    tpot_ms=198.76,
    predicted_ttft_ms=50.0,
    predicted_tpot_ms=88.88,
    kv_bytes=0,
    memory_limit_fraction=0.136,
    against=None,
    factor=None,
    same_tokens=True,
    first_difference=None,
)
CACHED = replace(
    NAIVE,
    stage="kv_cache",
    new="keep",
    tokens_per_s=26.31,
    spread=(25.0, 27.0),
    kv_bytes=11_700_000,
    against="naive",
    factor=5.22,
    same_tokens=False,
    first_difference={"position": 17, "margin": 0.000123},
)

STATIC = replace(
    CACHED,
    stage="static",
    new="batches",
    workload="requests",
    tokens_per_s=95.55,
    spread=(90.0, 97.0),
    ttft_ms=2345.0,
    tpot_ms=101.4,
    predicted_ttft_ms=None,
    predicted_tpot_ms=None,
    memory_limit_fraction=None,
    against="one_by_one",
    factor=2.55,
    same_tokens=True,
    first_difference=None,
    kv_reserved_bytes=94_400_000,
    kv_waste=0.612,
    utilisation=0.345,
    utilisation_by_step=[0.5, 0.19],
)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_ladder_as_markdown_has_every_number_in_its_column():
    head, rule, *body = report.ladder_table([NAIVE, CACHED], "github").splitlines()
    assert cells(head) == ["stage", "what is new", "TTFT ms", "TPOT ms", "roofline", "tokens/s", "factor",
                           "memory limit", "KV MB", "same tokens"]  # fmt: skip
    assert set(rule) <= set("|-: ")
    assert [cells(line) for line in body] == [
        ["naive", "recompute", "120", "198.8", "88.9", "5.0 (5.0 to 5.1)", "", "14%", "0.0", "yes"],
        ["kv_cache", "keep", "120", "198.8", "88.9", "26.3 (25.0 to 27.0)", "5.2 x naive", "14%", "11.7",
         "no: from 17, margin 0.00012"],
    ]  # fmt: skip


def test_the_plain_table_has_a_line_for_each_rung():
    lines = report.ladder_table([NAIVE, CACHED]).splitlines()
    assert len(lines) == 4 and not any("|" in line for line in lines)
    assert lines[2].startswith("naive") and lines[3].startswith("kv_cache")


def test_the_rungs_of_many_requests_have_memory_and_utilisation():
    head, _, line = report.requests_table([STATIC], "github").splitlines()
    assert cells(head) == ["stage", "what is new", "tokens/s", "factor", "TTFT s", "TPOT ms", "KV reserved MB",
                           "KV used MB", "waste", "utilisation", "same tokens"]  # fmt: skip
    assert cells(line) == ["static", "batches", "95.5 (90.0 to 97.0)", "2.5 x one_by_one", "2.35", "101", "94", "12",
                           "61%", "34%", "yes"]  # fmt: skip


def test_a_workload_of_many_requests_in_a_sentence():
    trace = [Arrival(0.0, [1] * 5, 9), Arrival(0.0, [1] * 30, 2)]
    sentence = report.requests_sentence(Requests("w", trace, 4, block_size=8, n_blocks=16, reserve=64, repeats=3))
    assert sentence == (
        "2 requests at once: 5 to 30 tokens in, 2 to 9 out; up to 4 at a time, memory for 128 tokens; 3 runs."
    )


def test_the_peers_table():
    results = [{"name": "minillm", "task": "one request", "tokens_per_s": 12.34, "spread": (11.96, 13.0)}]
    head, _, line = report.peers_table(results, "github").splitlines()
    assert cells(head) == ["who", "task", "tokens/s", "spread"]
    assert cells(line) == ["minillm", "one request", "12.3", "12.0 to 13.0"]


def test_files_that_can_be_written_pass(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report.require_folder(None, "here.json", str(tmp_path / "there.png"))


@pytest.mark.parametrize("file", ["missing/out.json", ".", "a file/out.json"])
def test_a_file_that_cannot_be_written_is_refused_by_name(tmp_path, monkeypatch, file):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a file").touch()
    with pytest.raises(ValueError, match="cannot be written"):
        report.require_folder("good.json", file)


def test_the_json_file_reads_back(tmp_path):
    content = {"machine": {"cpu": "Prozessor für alle"}, "rungs": [{"spread": [1.5, 2.5], "against": None}]}
    report.write_json(tmp_path / "out.json", content)
    text = (tmp_path / "out.json").read_text(encoding="utf-8")
    assert json.loads(text) == content
    assert text.endswith("}\n")


@pytest.mark.parametrize("name", ["ladder.png", "ladder", "ladder.plot"])
def test_the_picture_is_a_png_with_a_bar_for_each_rung(tmp_path, monkeypatch, name):
    """Whatever the name: the file that was asked for, and no other beside it."""
    drawn = []
    real = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: drawn.append(self) or real(self, *args, **kw))
    report.plot_ladder([NAIVE, CACHED, STATIC], tmp_path / name, "On a Chip.")

    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    axes, below = drawn[0].axes  # a panel for each workload
    assert [bar.get_width() for bar in below.patches] == [95.55]
    assert [bar.get_width() for bar in axes.patches] == [5.04, 26.31]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["naive", "kv_cache"]
    assert [text.get_text().strip() for text in axes.texts] == ["5.0", "26.3"]
    assert axes.yaxis_inverted()  # the first rung on top, as in the table
    assert drawn[0].get_supxlabel() == "On a Chip."
    (errors,) = axes.collections
    ends = [segment[:, 0].tolist() for segment in errors.get_segments()]
    assert ends == [pytest.approx(NAIVE.spread), pytest.approx(CACHED.spread)]
