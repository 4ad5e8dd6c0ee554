"""The guide as a reader gets it: a report that fits a terminal, JSON with its numbers, a sentence for a mistake."""

from __future__ import annotations

import json
import re
import textwrap

import pytest
from hypothesis import given, settings
from test_deployment import deployments

from minillm import cli
from minillm.lab.advice.demand import Demand, find_hardware
from minillm.lab.advice.deployment import LEFT_OUT, deploy
from minillm.lab.advice.guide import WIDTH, advise, as_json, report
from minillm.lab.advice.verdicts import Verdict
from minillm.lab.roofline import Limits


@pytest.fixture(scope="module")
def guide():
    demand = Demand(2048, 256, concurrency=64, ttft=0.5, tpot=0.03, shared=1000, acceptance=0.7, draft_cost=0.05)
    return advise(deploy("Llama-3.1-8B", find_hardware("H100 SXM"), demand))


def flat(text: str) -> str:
    return " ".join(text.split())


def test_the_report_says_what_was_asked_and_given(guide):
    text = flat(report(guide))
    assert "2,048 tokens in, 1,000 of them shared by all prompts, 256 out" in text
    assert "64 texts at a time; goals: TTFT 500 ms, TPOT 30 ms." in text
    assert "H100 SXM: 989 TFLOP/s, 3,350 GB/s, 80 GB; efficiency 1. Weights in 16 bits, keys and values in 16." in text
    assert "Memory: weights 16.1 GB; the keys and values of a request 0.302 GB (2,304 slots in blocks of 16)." in text
    assert "Batch: 64. The goals allow 174." in text
    for line in LEFT_OUT:
        assert line in text


def test_the_report_has_every_estimate_and_every_verdict(guide):
    text = report(guide)
    for e in guide.batches:
        assert any(line.split()[:1] == [f"{e.batch:,}"] for line in text.splitlines())
    for a in guide.techniques:
        assert f"{a.technique}: {a.verdict.value.upper()}" in text and flat(a.reason) in flat(text)
    for c in guide.trees:
        assert f'"{c.rule}"' in text and flat(c.computed) in flat(text)
    assert {e.batch for e in guide.batches} >= {1, 2, 64, 174, 256, 371}


def test_the_chosen_batch_and_missed_goals_are_marked(guide):
    marks = {
        line.split()[0]: line for line in report(guide).splitlines() if line.split()[6:7] in (["memory"], ["compute"])
    }
    assert "chosen" in marks["64"] and "chosen" not in marks["32"]
    assert [n for n in marks if "too slow" in marks[n]] == ["256", "371"]
    assert "full" in marks["371"]


@pytest.mark.parametrize(
    ("demand", "words"),
    [
        (Demand(concurrency=2000), "Batch: 762. For all 2,000: 3 such machines."),
        (Demand(concurrency=4, ttft=1e-4), "No batch meets the goals: one text alone has TTFT 7."),
        (Demand(rate=1000), "Batch: 762. It serves 91.7 of 1000 requests a second: 11 such machines."),
        (Demand(rate=1), "Batch: 1."),
        (Demand(rate=1e300), "It serves 91.7 of 1e+300 requests a second: 1.09e+298 such machines."),
        (Demand(concurrency=10**9), "For all 1,000,000,000: 1,312,336 such machines."),
    ],
)
def test_the_choice_says_what_limits_it(demand, words):
    assert words in flat(report(advise(deploy("Llama-3.1-8B", find_hardware("H100 SXM"), demand))))


@pytest.mark.parametrize("demand", [Demand(rate=200, tpot=1e-3), Demand(concurrency=2000, tpot=1e-3)])
def test_machines_are_not_counted_where_no_batch_meets_the_goals(demand):
    text = flat(report(advise(deploy("Llama-3.1-8B", find_hardware("H100 SXM"), demand))))
    assert "So no number of such machines meets the goals." in text
    assert not any(f"{n} such machines" in text for n in range(10))
    assert ("It serves 91.7 of 200 requests a second." in text) == (demand.rate is not None)


def test_huge_numbers_are_written_short(capsys):
    options = "--gpu T4 --rate 1e300 --tpot-ms 1e308 --draft-cost 1e308 --memory-gb 1e6"
    assert run(*options.split()) == 0
    out, _ = capsys.readouterr()
    assert "goals: TPOT 1e+305 s" in flat(out) and not re.search(r"\d[\d,]{13}", out)


def test_an_efficiency_is_shown():
    text = report(advise(deploy("Llama-3.1-8B", find_hardware("H100 SXM", efficiency=0.6), Demand(concurrency=1))))
    assert "efficiency 0.6." in flat(text)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(deployments())
def test_every_report_fits_a_terminal_and_every_number_json(d):
    found = advise(d)
    assert max(map(len, report(found).splitlines())) <= WIDTH
    again = json.loads(json.dumps(as_json(found), allow_nan=False))
    assert again["batch"] == d.batch and len(again["techniques"]) == len(found.techniques)


def test_json_holds_the_same_numbers(guide):
    found = as_json(guide)
    assert found["fits"] == 371 and found["within_goals"] == 174 and found["batch"] == 64
    assert found["hardware"]["flops"] == 989e12 and found["demand"]["shared"] == 1000
    row = next(row for row in found["batches"] if row["batch"] == 64)
    assert row["tpot"] == guide.deployment.estimate(64).tpot and row["meets_goals"]
    assert not next(row for row in found["batches"] if row["batch"] == 371)["meets_goals"]
    assert {a["technique"]: a["verdict"] for a in found["techniques"]}["speculation"] == "pays"
    assert [c["agrees"] for c in found["trees"]] == [c.agrees for c in guide.trees]


def test_json_says_when_nothing_meets_the_goals():
    found = as_json(advise(deploy("Llama-3.1-8B", find_hardware("H100 SXM"), Demand(concurrency=4, tpot=1e-4))))
    assert (found["within_goals"], found["batch"], found["fits"]) == (0, 4, 762)


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["advise", *argv])
    return ended.value.code


def test_the_command_prints_and_writes(tmp_path, capsys):
    file = tmp_path / "advice.json"
    options = (
        "--model llama-3.1-8b --prompt 1000 --output 200 --concurrency 32 --ttft-ms 300 --tpot-ms 20 --memory-gb 40 "
        "--shared 160 --acceptance 0.8 --draft-cost 0.1 --efficiency 0.5 --spread 0.5 --reserve 2048 --bits 8"
    )
    argv = [*options.split(), "--gpu", "a100 80gb sxm"]
    assert run(*argv, "--json", str(file)) == 0
    out, err = capsys.readouterr()
    found = json.loads(file.read_text())
    demand = {"prompt": 1000, "output": 200, "concurrency": 32, "rate": None, "ttft": 0.3, "tpot": 0.02, "shared": 160,
              "spread": 0.5, "reserve": 2048, "acceptance": 0.8, "draft_cost": 0.1}  # fmt: skip
    assert found["demand"] == demand and found["weight_bits"] == 8
    assert (found["hardware"]["memory"], found["hardware"]["efficiency"]) == (40e9, 0.5)
    assert out.startswith("Llama-3.1-8B: 1,000 tokens in, 160 of them shared") and not err


def test_without_options_this_machine_is_measured(monkeypatch, capsys):
    monkeypatch.setattr("minillm.lab.advice.demand.this_machine", lambda: Limits("this machine", 50e9, 20e9))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("minillm.lab.machine.busy", lambda: 0.9)
    assert run() == 0
    out, err = capsys.readouterr()
    assert out.startswith("SmolLM2-135M: 512 tokens in, 128 out") and "8 texts at a time" in out
    assert "this machine: 50 GFLOP/s, 20 GB/s" in flat(out) and "in 32 bits, keys and values in 32." in flat(out)
    assert "the machine was busy (90%" in err


def test_a_rate_takes_the_place_of_requests_at_a_time(capsys):
    assert run("--gpu", "T4", "--rate", "2") == 0
    assert "2 requests a second" in flat(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--model nope", "unknown model 'nope'; known: SmolLM2-135M"),
        ("--gpu nope", "unknown GPU 'nope'; known: T4"),
        ("--prompt 8000 --output 400", "8400 tokens of prompt and output are more than SmolLM2-135M's context, 8192"),
        ("--prompt 0", "prompt must be a whole number of at least 1, not 0"),
        ("--output 1", "an output of one token has no TPOT"),
        ("--gpu T4 --model Llama-2-7B --memory-gb 13", "does not fit: one request needs 13.8 GB, and T4 has 13.0"),
        ("--gpu T4 --memory-gb -3", "the memory must be above 0 GB and at most 1,000,000, not -3"),
        ("--gpu T4 --efficiency nan", "an efficiency is from 0.001 to 1, not nan"),
        ("--gpu T4 --bits 3", "a weight has 4, 8, 16 bits here, not 3"),
        ("--concurrency 0", "concurrency must be a whole number of at least 1, not 0"),
        ("--gpu T4 --efficiency 1e-320", "an efficiency is from 0.001 to 1, not "),
        ("--gpu T4 --memory-gb 1e290", "the memory must be above 0 GB and at most 1,000,000, not 1e+290"),
        ("--efficiency 0", "an efficiency is from 0.001 to 1, not 0"),
        ("--memory-gb 0", "the memory must be above 0 GB"),
        ("--rate inf", "rate must be a finite number above 0, not inf"),
        ("--ttft-ms 0", "ttft-ms must be a finite number above 0, not 0"),
        ("--ttft-ms -5", "ttft-ms must be a finite number above 0, not -5"),
        ("--tpot-ms inf", "tpot-ms must be a finite number above 0, not inf"),
        ("--spread 1000", "spread must be from 0 to 5, not 1000"),
        ("--draft-cost -1", "draft-cost must be a finite number of at least 0, not -1"),
        ("--json=", "--json needs the name of a file"),
        ("--shared 513", "from 0 to all 512 tokens of the prompt can be shared, not 513"),
        ("--acceptance 2", "an acceptance is from 0 to 1, not 2"),
        ("--gpu T4 --json /nowhere/advice.json", "/nowhere/advice.json cannot be written"),
    ],
)
def test_a_mistake_gets_one_sentence_before_anything_is_measured(argv, words, monkeypatch, capsys):
    def measured(*_):
        raise AssertionError("measured before the options were looked at")

    monkeypatch.setattr("minillm.lab.advice.demand.this_machine", measured)
    assert run(*argv.split()) == 1
    out, err = capsys.readouterr()
    assert not out and err.startswith("minillm: ") and words in err and err.count("\n") == 1


def test_requests_at_a_time_and_a_rate_exclude_each_other(capsys):
    assert run("--concurrency", "2", "--rate", "2") == 2
    assert "not allowed with" in capsys.readouterr().err


def test_what_pays_is_said_once_more(guide):
    pays = ", ".join(a.technique for a in guide.techniques if a.verdict is Verdict.PAYS)
    assert textwrap.fill(f"It pays: {pays}.", WIDTH) in report(guide)
    differ = sum(c.agrees is False for c in guide.trees)
    assert f"{differ} of 7 disagree" in report(guide)
