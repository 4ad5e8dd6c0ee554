"""The ledger as a whole: no claim is missing, stored figures are judged again, and what is printed and written is
complete."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

import minillm
from minillm import cli
from minillm.lab.claims import run
from minillm.lab.claims.ledger import ARITHMETIC, SOURCES, Claim, Finding, Ledger, Verdict
from minillm.lab.claims.workbench import Workbench
from minillm.lab.draw_claims import draw_formats, draw_verdicts
from minillm.lab.tiny import tiny_model

ROOT = Path(__file__).parents[2]

IDS = [*(f"A{i}" for i in range(1, 21)), *(f"B{i}" for i in range(1, 17)), *(f"C{i}" for i in range(1, 23))]
STORED = {"machine": "a machine", "date": "2026-01-01", "figures": {"X1": {"gain": 3.0}}}


def judge(figures):
    gain = figures["gain"]
    return Finding(gain, "times", Verdict.HOLDS if gain > 2 else Verdict.DOES_NOT_HOLD, f"Measured {gain}.")


def slow_claim(measured: list) -> Claim:
    def measure(bench):
        measured.append(bench)
        return {"gain": 1.0}

    return Claim("X1", ("T1",), "It is quick", ARITHMETIC, "03_prefill_and_decode", judge, measure, slow=True)


def test_every_claim_is_there_once_and_in_order():
    assert list(run.all_claims()) == IDS


def test_every_claim_names_a_lecture_that_is_there_and_says_what_is_claimed():
    for claim in run.all_claims().values():
        assert (ROOT / "notebooks" / f"{claim.notebook}.ipynb").is_file(), claim.id
        assert len(claim.text.split()) >= 4 and claim.text[-1] != "."
        assert claim.sources


def test_a_slow_claim_reuses_stored_figures_and_says_whose(monkeypatch):
    monkeypatch.setattr(run, "stored_figures", lambda: STORED)
    measured = []
    [row] = run.examine([slow_claim(measured)], Workbench(), progress=False)
    assert not measured and row.finding.verdict is Verdict.HOLDS and row.finding.figure == 3.0
    assert row.stored == "a machine, 2026-01-01" and "stored figures of a machine, 2026-01-01" in run.report([row])


def test_a_fresh_run_measures_it(monkeypatch):
    monkeypatch.setattr(run, "stored_figures", lambda: STORED)
    measured = []
    bench = Workbench(fresh=True)
    [row] = run.examine([slow_claim(measured)], bench, progress=False)
    assert measured == [bench] and row.finding.verdict is Verdict.DOES_NOT_HOLD and row.stored is None
    assert "stored" not in run.report([row])


def test_without_a_stored_run_it_is_measured(monkeypatch):
    monkeypatch.setattr(run, "stored_figures", dict)
    measured = []
    run.examine([slow_claim(measured)], Workbench(), progress=False)
    assert len(measured) == 1


def test_the_stored_run_holds_every_slow_claim_in_full_size_and_its_verdicts_are_those_of_its_figures():
    stored = run.read_stored(run.STORED)
    claims = run.all_claims()
    assert stored["quick"] is False and stored["machine"]["cpu"] and stored["date"]
    rows = {row["id"]: row for row in stored["claims"]}
    assert list(rows) == IDS
    for id, claim in claims.items():
        if claim.measure is not None:
            found = claim.judge(rows[id]["figures"])
            assert found.verdict.value == rows[id]["verdict"], id


def test_a_model_that_is_first_asked_for_in_inference_mode_serves_everybody(monkeypatch):
    monkeypatch.setattr(minillm, "load", lambda **_: (tiny_model(), None))
    bench = Workbench(quick=True)
    with torch.inference_mode():
        assert not bench.model.embed.weight.is_inference()


def test_ids_can_be_chosen_in_any_case_and_wrong_ones_are_named():
    assert [claim.id for claim in run.choose(["c5", "A1"])] == ["C5", "A1"]
    assert [claim.id for claim in run.choose(None)] == IDS
    with pytest.raises(ValueError, match="there is no claim 'Z9'; the ids are A1, "):
        run.choose(["A1", "Z9"])


@pytest.mark.parametrize(
    "figure, verdict, condition, message",
    [
        (None, Verdict.HOLDS, "Because.", "'holds' needs a figure"),
        (float("nan"), Verdict.HOLDS, "Because.", "finite"),
        (float("inf"), Verdict.DOES_NOT_HOLD, "Because.", "finite"),
        (1.0, Verdict.HOLDS_IF, " ", "say under which condition"),
    ],
)
def test_a_finding_is_complete(figure, verdict, condition, message):
    with pytest.raises(ValueError, match=message):
        Finding(figure, "times", verdict, condition)


def test_only_what_cannot_be_tested_has_no_figure():
    nothing = Finding(None, "", Verdict.NOT_TESTABLE, "It needs a GPU.")
    assert run.number(nothing) == "no figure"


def test_an_id_is_entered_once_and_only_what_is_measured_can_be_slow():
    ledger = Ledger()
    ledger.claim("X1", "T1", "a", "03_prefill_and_decode")(lambda: None)
    with pytest.raises(AssertionError):
        ledger.claim("X1", "T1", "a", "03_prefill_and_decode")(lambda: None)
    with pytest.raises(AssertionError):
        ledger.claim("X2", "T1", "a", "03_prefill_and_decode", slow=True)(lambda: None)
    with pytest.raises(AssertionError):
        ledger.claim("X3", "T9", "a", "03_prefill_and_decode")(lambda: None)


def rows_of(*verdicts: tuple[str, Verdict]) -> list[run.Row]:
    claims = [Claim(id, ("T1", "T4"), f"Claim {id} | of it", ARITHMETIC, "08_gqa", judge) for id, _ in verdicts]
    found = [Finding(1234.5, "GB", verdict, "It is so.") for _, verdict in verdicts]
    return [run.Row(claim, {}, finding) for claim, finding in zip(claims, found, strict=True)]


def test_json_has_the_promised_keys_and_can_be_read_by_anything():
    rows = rows_of(("A1", Verdict.HOLDS), ("C2", Verdict.DOES_NOT_HOLD))
    written = json.loads(json.dumps(run.as_json(rows, {"cpu": "Chip"}, quick=True), allow_nan=False))
    assert written["machine"] == {"cpu": "Chip"} and written["quick"] is True
    assert written["source_titles"] == SOURCES
    first = written["claims"][0]
    assert first["id"] == "A1" and first["verdict"] == "holds" and first["figure"] == 1234.5 and first["unit"] == "GB"
    assert first["condition"] == "It is so." and first["notebook"] == "08_gqa" and first["claim"].startswith("Claim A1")


def test_the_report_tells_each_claim_and_counts_the_verdicts():
    said = run.report(rows_of(("A1", Verdict.HOLDS), ("B2", Verdict.HOLDS), ("C3", Verdict.NOT_TESTABLE)))
    assert "A1  HOLDS  1,234 GB" in said and '"Claim A1 | of it" (T1, T4)' in said and "It is so." in said
    counted, key = said.split("\n\n")[-2:]
    assert counted == "3 claims: 2 'holds', 1 'not testable here'."
    assert key.splitlines() == ["Sources:", *(f"    {source}  {title}" for source, title in SOURCES.items())]
    assert said.count("Sources:") == 1
    assert max(map(len, said.splitlines())) <= 110


def test_a_console_that_knows_no_chinese_gets_the_report_too(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="cp1252"))
    print(run.report(rows_of(("A1", Verdict.HOLDS))), flush=True)
    assert b"T2  LLM Inference (survey notes)" in written.getvalue() and b"T4  ???" in written.getvalue()


def test_the_picture_of_the_verdicts_counts_each_group():
    rows = rows_of(
        ("A1", Verdict.HOLDS), ("A2", Verdict.HOLDS_IF), ("B1", Verdict.DOES_NOT_HOLD), ("C1", Verdict.HOLDS)
    )
    drawn = draw_verdicts(rows)
    assert "2 of 4 claims hold" in drawn.axes[0].get_title(loc="left")
    assert "arithmetic: 1 holds, 1 holds if; algorithms: 1 does not hold; speed and memory: 1 holds" in drawn.alt
    widths = [[bar.get_width() for bar in bars] for bars in drawn.axes[0].containers]
    assert widths == [[1, 0, 1], [1, 0, 0], [0, 1, 0], [0, 0, 0]]
    starts = [[bar.get_x() for bar in bars] for bars in drawn.axes[0].containers]
    assert starts[1][0] == 1 and starts[2][1] == 0


def test_the_picture_of_formats_counts_the_numbers_between_one_and_two():
    drawn = draw_formats({"even": [0.5, 1.0, 1.5, 2.0], "floating": [1.0, 1.25, 4.0]})
    assert drawn.axes[0].get_title(loc="left") == "Numbers from 1 to 2: even has 2, floating has 2"
    assert "even from 0.5 to 2; floating from 1 to 4" in drawn.alt


def test_the_command_prints_what_was_chosen_and_writes_json(tmp_path, capsys):
    file = tmp_path / "claims.json"
    with pytest.raises(SystemExit) as ended:
        cli.main(["claims", "--only", "a9", "--only", "A19", "--quick", "--json", str(file)])
    assert ended.value.code == 0
    said, written = capsys.readouterr().out, json.loads(file.read_text())
    assert "A9  HOLDS  4 " in said and "A19  DOES NOT HOLD  4 " in said and "2 claims: " in said
    assert [row["id"] for row in written["claims"]] == ["A9", "A19"] and written["machine"]["cores"]


@pytest.mark.parametrize(
    "argv, words", [(["--only", "D1"], "no claim 'D1'"), (["--json", "no/such/x.json"], "no/such")]
)
def test_wrong_arguments_get_one_sentence(argv, words, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["claims", *argv])
    said = capsys.readouterr().err
    assert caught.value.code == 1 and words in said and said.count("\n") == 1
