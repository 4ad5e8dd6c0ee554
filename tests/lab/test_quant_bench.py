"""The benchmark compares each case with the model as loaded, asks its tasks as they are pinned, and can be resumed."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
from conftest import TINY, mutant, random_model

from minillm import cli, linear
from minillm.calibrate import linear_layers
from minillm.generation import generate
from minillm.lab import quality, quant_bench
from minillm.lab.bench import Measured
from minillm.lab.commands import QUANT_PARTS
from minillm.lab.perplexity import kl, paired, text_nll
from minillm.lab.quality import Item, Quality, ask, layer_kl, method_seconds, read_tasks
from minillm.lab.quant_bench import Case, cases, report, speed, sweep
from minillm.lab.results import Results
from minillm.lab.workload import read_json
from minillm.linear import Linear
from minillm.model import NoCache
from minillm.quantize import Grid, round_to_nearest
from minillm.sampling import SamplingParams

RAW = {
    "predicted": 1024,
    "calibration": 512,
    "short": 1,
    "tasks": {
        "recall": {"before": "", "items": [["abc", "d"], ["bca", "de"]]},
        "arithmetic": {"before": "1", "items": [["2+3=", "5"]]},
    },
}
GRID = Grid(4, 8)


class Letters:
    """A tokenizer of one token a character, for a vocabulary of 37."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) % 37 for c in text]


def small_model(seed: int = 0):
    return random_model(seed=seed).float()


@pytest.fixture(scope="module")
def judge() -> Quality:
    return Quality(small_model(), Letters(), RAW)


# The tasks.


@pytest.mark.parametrize("quick", [False, True])
def test_the_tasks_are_pinned(quick, smollm2):
    raw = read_json("quality", quick)
    assert {name: len(task["items"]) for name, task in raw["tasks"].items()} == {"recall": 32, "arithmetic": 32}
    for task in raw["tasks"].values():
        questions = [question for question, _ in task["items"]]
        assert len({*questions}) == 32
        assert not any(line.startswith(question) for line in task["before"].split("\n") for question in questions)
    sums = raw["tasks"]["arithmetic"]
    lines = [f"{question}{answer}" for question, answer in sums["items"]] + sums["before"].strip().split("\n")
    for line in lines:
        left, right = line.split(" = ")
        assert sum(int(number) for number in left.split(" + ")) == int(right)
    items = read_tasks(smollm2[1], raw["tasks"])
    assert all(item.answer == 1 for item in items["recall"])
    assert {item.answer for item in items["arithmetic"]} == {2, 3}  # a space, and a token for each digit
    assert (raw["predicted"] >= 20_000) != quick and raw["batches"][-1] == (8 if quick else 64)


def test_an_answer_must_begin_with_a_token_of_its_own():
    class Pairs:
        def encode(self, text):
            return [text[i : i + 2] for i in range(0, len(text), 2)]

    for question, answer in (("abc", "d"), ("ab", "")):
        with pytest.raises(ValueError, match="must begin with a token of its own"):
            read_tasks(Pairs(), {"t": {"before": "", "items": [[question, answer]]}})
    items = read_tasks(Pairs(), {"t": {"before": "xy", "items": [["ab", "cde"]]}})
    assert items == {"t": [Item(["xy", "ab", "cd", "e"], 2)]}


def test_answers_are_those_of_greedy_decoding_and_their_nats_are_summed():
    check_answers()


def check_answers(module=quality) -> None:
    model = random_model()
    items, right, nats = [], 0, 0.0
    for seed in range(12):
        tokens = torch.randint(0, 37, (5 + seed,), generator=torch.Generator().manual_seed(seed)).tolist()
        n = 1 + seed % 3
        written = generate(model, None, tokens, SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)).tokens
        answer = written if seed % 2 else [*written[:-1], (written[-1] + 1) % 37]  # wrong in its last token only
        items.append(Item(tokens + answer, n))
        right += answer == written
        logits = model.logits(model(torch.tensor(tokens + answer), torch.arange(len(tokens) + n), NoCache()))
        nats -= float(logits.log_softmax(-1)[len(tokens) - 1 : -1].gather(-1, torch.tensor(answer)[:, None]).sum())
    assert module.ask(model, items) == (pytest.approx(right / 12), pytest.approx(nats / 12)) and right == 6


@pytest.mark.parametrize(
    "old, new",
    [
        ("h[-1 - n : -1]", "h[-n:]"),  # what comes after the answer, not the answer
        ("t[-n:] for", "t[-n - 1 : -1] for"),
        ("bool(r.all())", "bool(r.any())"),
        ("NoCache(lengths)", "NoCache()"),  # every question reads those before it
        ("torch.cat([torch.arange(n, device=model.device) for n in lengths])", "torch.zeros_like(tokens)"),
        ("-log_p.gather", "log_p.gather"),
    ],
)
def test_a_planted_mistake_in_the_questions_is_found(old, new):
    with pytest.raises((AssertionError, RuntimeError)):
        check_answers(mutant(quality, old, new))


# Quality.


def test_the_reference_is_the_model_as_it_is(judge):
    row = judge.reference()
    assert row["nats_above"] == row["kl"] == 0 and row["standard_error"] == 0 and row["tokens"] == 1024
    nats = text_nll(judge.model, judge.text.evaluation)
    assert row["perplexity"] == pytest.approx(float(nats.mean().exp()), rel=1e-5)
    assert row["bytes"] == 4 * sum(layer.weight.numel() for _, layer in linear_layers(judge.model))
    assert row["bits_a_weight"] == 32 and (row["recall"], row["recall_nats"]) == ask(judge.model, judge.tasks["recall"])


def test_a_case_is_compared_token_by_token(judge):
    """Against the model quantized by hand, from the text to the tasks; the model that was given stays as it is."""
    before = copy.deepcopy(judge.model.state_dict())
    row = judge.measure("rtn", Grid(3, 8), True)
    by_hand = copy.deepcopy(judge.model)
    for _, layer in linear_layers(by_hand):
        layer.weight.copy_(round_to_nearest(layer.weight, Grid(3, 8)).dequantize())
    nats = text_nll(by_hand, judge.text.evaluation)
    above = paired(nats, text_nll(judge.model, judge.text.evaluation))
    assert (row["nats_above"], row["standard_error"]) == (pytest.approx(above.mean), pytest.approx(above.error))
    assert row["kl"] == pytest.approx(float(kl(judge.model, by_hand, judge.text.evaluation[:513]).mean()), rel=1e-4)
    assert (row["arithmetic"], row["arithmetic_nats"]) == ask(by_hand, judge.tasks["arithmetic"])
    assert row["bits_a_weight"] == 3 + 2 * 16 / 8 and row["quantizing_s"] > 0
    assert all(torch.equal(before[name], value) for name, value in judge.model.state_dict().items())


def test_cases_leave_nothing_behind_and_short_ones_read_less(judge):
    first = judge.measure("gptq", Grid(4, 8), True)
    judge.measure("rtn", Grid(2, None), True)
    again, short = judge.measure("gptq", Grid(4, 8), True), judge.measure("gptq", Grid(4, 8), False)
    same = {name for name in first if name != "quantizing_s"}
    assert {name: first[name] for name in same} == {name: again[name] for name in same}
    assert (first["tokens"], short["tokens"]) == (1024, 512) and short["kl"] == first["kl"]


def test_more_bits_are_closer_and_larger(judge):
    rows = [judge.measure("rtn", Grid(bits, 8), False) for bits in (2, 4, 8)]
    assert rows[0]["kl"] > 4 * rows[1]["kl"] > 4 * 4 * rows[2]["kl"] > 0
    assert rows[0]["bytes"] == rows[1]["bytes"] < rows[2]["bytes"] < judge.reference()["bytes"]  # 2 bits: in nibbles
    scaled = judge.measure("awq", Grid(4, 8), False)
    channels = 4 * sum(layer.weight.shape[1] for _, layer in linear_layers(judge.model))
    assert scaled["bytes"] == rows[1]["bytes"] + channels


def test_each_layer_is_quantized_alone():
    model = small_model()
    tokens = Letters().encode("What is the price of a layer? " * 3)
    found = layer_kl(model, tokens, GRID, window=16)
    for i in range(2):
        by_hand = copy.deepcopy(model)
        for name, layer in linear_layers(by_hand):
            if name.startswith(f"blocks.{i}."):
                layer.weight.copy_(round_to_nearest(layer.weight, GRID).dequantize())
        assert found[i] == pytest.approx(float(kl(model, by_hand, tokens, 16).mean()), rel=1e-3)
    assert len(found) == 2 and found[0] != found[1]


def test_awq_and_gptq_take_turns(monkeypatch, judge):
    seen = []
    methods = {name: lambda w, grid, h, name=name: seen.append((name, len(h))) for name in ("rtn", "awq", "gptq")}
    monkeypatch.setattr(quality, "METHODS", methods)
    found = method_seconds(judge.model, judge.hessians, GRID, layers=2, repeats=3)
    assert [name for name, _ in seen] == ["awq", "awq", "gptq", "gptq"] * 4  # one to warm up
    assert {n for _, n in seen} == {24}
    assert {name: len(runs.runs) for name, runs in found.items()} == {"awq": 3, "gptq": 3}


# The sweep.


def test_what_is_promised_of_twenty_thousand_tokens_is_measured_on_them():
    found = cases()
    assert len({case.name for case in found}) == len(found)
    full = {(c.method, c.grid.bits, c.grid.group) for c in found if c.full}
    assert full == {(m, *g) for m in ("rtn", "awq", "gptq") for g in ((4, 64), (4, None), (3, 64))}
    assert {(c.grid.bits, c.grid.group) for c in found} == {
        *((b, g) for b in (3, 4) for g in (32, 64, None)), (2, 64), (8, 64), (8, None),
    }  # fmt: skip
    assert {c.name for c in quant_bench.QUICK} <= {c.name for c in found}


ROW = {
    "kind": "quality", "tokens": 512, "perplexity": 11.0, "nats_above": 0.02, "standard_error": 0.004, "kl": 0.03,
    "bytes": 5e7, "bits_a_weight": 4.5, "recall": 0.75, "recall_nats": 0.9, "arithmetic": 0.5, "arithmetic_nats": 1.8,
}  # fmt: skip
SPEED = {
    "kind": "speed", "batch": 1, "seconds": {"float32": 0.02, "4 bits": 0.01}, "bytes": {"float32": 5e8, "4 bits": 9e7},
    "speedup": {"float32": 1.0, "4 bits": 2.0}, "spread": {"float32": (1.0, 1.0), "4 bits": (1.9, 2.1)},
}  # fmt: skip


@pytest.fixture
def counted(monkeypatch) -> list[str]:
    """The sweep with everything slow replaced. -> what was measured"""
    done: list[str] = []

    def fake(name, row):
        return lambda *arguments: (done.append(name), dict(row))[1]

    monkeypatch.setattr(quant_bench, "Quality", lambda model, tokenizer, raw: None)
    monkeypatch.setattr(quant_bench, "judged", lambda make, case: (make(), done.append(case.name), dict(ROW))[2])
    monkeypatch.setattr(quant_bench, "reference", fake("reference", ROW))
    monkeypatch.setattr(
        quant_bench, "seconds_of_methods", fake("methods", {"kind": "methods", "awq": 3.0, "gptq": 1.5})
    )
    layers = {"kind": "layers", "bits": 3, "group": 64, "kl": [0.1, 0.3, 0.2]}
    monkeypatch.setattr(quant_bench, "sensitivity", fake("layers", layers))
    monkeypatch.setattr(
        quant_bench, "speed", lambda models, batch, *rest: (done.append(batch), SPEED | {"batch": batch})[1]
    )
    return done


MACHINE = {"cpu": "Chip", "busy": 0.0}


def test_a_sweep_is_resumed_from_its_file(counted, monkeypatch, tmp_path):
    file = str(tmp_path / "r.json")
    quick = [case.name for case in quant_bench.QUICK]
    sweep(None, Letters(), MACHINE, True, file, ["quality"])
    assert counted == ["reference", *quick]
    results = sweep(None, Letters(), MACHINE | {"busy": 0.9}, True, file)
    assert counted == ["reference", *quick, "methods", "layers", 1, 8]
    assert results.reused == ["reference", *quick]
    written = json.loads((tmp_path / "r.json").read_text())
    assert [row["name"] for row in written["results"]] == [
        *results.reused,
        "methods",
        "layers",
        "speed, batch 1",
        "speed, batch 8",
    ]
    assert written["machine"]["cpu"] == "Chip" and written["text"]["predicted"] == 1024
    assert sweep(None, Letters(), MACHINE, True, file).as_json()["results"] == written["results"] and len(counted) == 8
    raw = read_json("quality", True)
    monkeypatch.setattr(quant_bench, "read_json", lambda name, quick: raw | {"repeats": 2})
    with pytest.raises(ValueError, match="another machine, text or size"):
        sweep(None, Letters(), MACHINE, True, file)


def test_every_row_is_written_when_it_is_there(tmp_path):
    file = tmp_path / "r.json"
    results = Results(MACHINE, {}, str(file))
    results.row("a", lambda x: {"kind": "quality", "x": x}, 3)
    assert json.loads(file.read_text())["results"] == [{"name": "a", "kind": "quality", "x": 3}]
    with pytest.raises(ZeroDivisionError):
        results.row("b", lambda: 1 / 0)
    assert [row["name"] for row in json.loads(file.read_text())["results"]] == ["a"] == list(results.rows)


@pytest.mark.parametrize("changed", [{"machine": {"cpu": "Other"}}, {"text": {"sha256": "0"}}, {"text": None}])
def test_results_of_another_machine_or_text_are_not_mixed_in(changed, tmp_path):
    file = tmp_path / "r.json"
    file.write_text(json.dumps({"machine": MACHINE, "text": {"sha256": "1"}, "results": []} | changed))
    before = file.read_text()
    with pytest.raises(ValueError, match="another machine, text or size"):
        Results(MACHINE, {"sha256": "1"}, str(file))
    assert file.read_text() == before


@pytest.mark.parametrize("content", ["", "[1, 2]", "{}", '{"results": 3, "machine": [], "text": 1}', "no json"])
def test_another_file_is_not_overwritten(content, tmp_path):
    file = tmp_path / "r.json"
    file.write_text(content)
    with pytest.raises(ValueError, match="holds"):
        Results(MACHINE, {"sha256": "1"}, str(file))
    assert file.read_text() == content


def test_the_tables_have_all_parts(counted):
    text = report(sweep(None, Letters(), MACHINE, True, None))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "reference 512 11.000 +0.0200 +- 0.0040 0.0300 50.0 4.50 75% (0.90) 50% (1.80)" in lines
    assert "batch float32, 500 MB 4 bits, 90 MB" in lines and "8 20.0 ms (1.00 x) 10.0 ms (2.00 x)" in lines
    assert "Quantizing the first block: AWQ 3.0 s, GPTQ 1.5 s." in lines
    assert "One layer alone at 3 bits, the most sensitive by KL: 1 (0.3000), 2 (0.2000), 0 (0.1000)." in lines
    assert report(Results(MACHINE, {})) == ""


# Speed.


def test_a_step_of_each_format_is_timed_in_turn(monkeypatch):
    seconds = {"float32": [9.0, 4.0, 6.0, 5.0], "4 bits": [9.0, 2.0, 2.0, 1.0]}
    models = {name: random_model() for name in seconds}
    asked = []

    def step(model, context, batch, rows, repeats):
        name = next(n for n, m in models.items() if m is model)
        asked.append((name, context, batch, rows))
        return seconds[name][sum(a[0] == name for a in asked) - 1]

    monkeypatch.setattr(quant_bench, "step_seconds", step)
    row = speed(lambda: models, 4, 7, 3)
    assert asked == [("float32", 7, 4, 1), ("4 bits", 7, 4, 1)] * 4
    assert row["seconds"] == {"float32": 5.0, "4 bits": 2.0} and row["speedup"] == {"float32": 1.0, "4 bits": 3.0}
    assert row["spread"]["4 bits"] == (2.0, 5.0) and (row["kind"], row["batch"]) == ("speed", 4)
    size = sum(p.nbytes for p in models["4 bits"].parameters())
    assert row["bytes"] == dict.fromkeys(models, size)


def test_the_formats_are_the_same_model_and_smaller(monkeypatch):
    monkeypatch.setattr(quant_bench, "SPEED_GRIDS", {"4 bits": GRID, "8 bits": Grid(8, None, True)})
    monkeypatch.setattr(quant_bench, "HEAD", Grid(8, 24, symmetric=True))
    monkeypatch.setattr(linear, "SAMPLE_BYTES", 1)  # the model is large enough to be packed
    config = replace(TINY, tied_embeddings=True)
    model = random_model(config).float()
    before = copy.deepcopy(model.state_dict())
    found = quant_bench.formats(model)
    tokens = torch.arange(9)
    expected = model.logits(model(tokens, tokens, NoCache()))
    assert list(found) == ["float32", "float32 packed", "bfloat16", "4 bits", "8 bits"] and found["float32"] is model
    size = {name: quant_bench.bytes_of(m) for name, m in found.items()}
    assert size["float32"] == sum(p.nbytes for p in model.parameters()) == 2 * size["bfloat16"] > 2 * size["4 bits"]
    matrices = sum(layer.weight.nbytes for layer in found["float32 packed"].modules() if isinstance(layer, Linear))
    assert size["float32 packed"] == size["float32"] + matrices and size["8 bits"] < size["float32"]
    for name, error in (("bfloat16", 0.2), ("8 bits", 0.2), ("4 bits", 0.8)):
        got = found[name].logits(found[name](tokens, tokens, NoCache()))
        assert 0 < float((got - expected).norm() / expected.norm()) < error, name
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_times_of_methods_are_medians(monkeypatch, judge):
    times = {"awq": Measured([3.0, 1.0, 2.0]), "gptq": Measured([1.0])}
    monkeypatch.setattr(quant_bench, "method_seconds", lambda *arguments, **options: times)
    assert quant_bench.seconds_of_methods(lambda: judge, 3) == {"kind": "methods", "awq": 2.0, "gptq": 1.0}


# The command.


def test_bench_quant_prints_the_tables_and_says_what_is_old(counted, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("minillm.checkpoint.load", lambda **options: (None, Letters()))
    file = tmp_path / "r.json"

    def run(*argv: str) -> int:
        with pytest.raises(SystemExit) as ended:
            cli.main(["bench", "quant", "--quick", "--json", str(file), *argv])
        return ended.value.code

    assert run("--only", "quality", "--only", "layers") == 0
    out = capsys.readouterr().out
    assert "gptq, 4 bits, groups of 64" in out and "float32, 500 MB" not in out and "earlier run" not in out
    assert "SHA-256" in out and "512 tokens of it" in out
    assert run() == 0 and counted[-3:] == ["methods", 1, 8]
    assert "5 rows of" in (out := capsys.readouterr().out) and "are from an earlier run: reference; rtn, 4 bits" in out
    assert run("--only", "nothing") == 2
    file.write_text("[]")
    assert run() == 1


def test_the_parts_of_the_command_are_those_of_the_sweep(counted):
    everything = sweep(None, Letters(), MACHINE, True)
    assert {row["kind"] for row in everything.rows.values()} == {*QUANT_PARTS}
    for part in QUANT_PARTS:
        assert {row["kind"] for row in sweep(None, Letters(), MACHINE, True, None, [part]).rows.values()} == {part}


def test_a_case_says_what_it_is():
    assert Case("rtn", Grid(4, None, symmetric=True)).name == "rtn, 4 bits, rows, symmetric"
    assert Case("gptq", Grid(3, 64)).name == "gptq, 3 bits, groups of 64"
