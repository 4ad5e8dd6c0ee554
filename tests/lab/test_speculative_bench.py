"""The benchmark counts what really happened, predicts from the costs it measured, and gives the promised fields."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from conftest import TINY

import minillm
from minillm.drafters import LayerSkipDrafter, ModelDrafter, NgramDrafter
from minillm.lab import speculative_bench as bench
from minillm.lab.speculative_bench import Line, Round, Watched, compare, median_error, table
from minillm.lab.tiny import tiny_model
from minillm.sampling import SamplingParams
from minillm.speculative import Proposal, expected_tokens, stream

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


class Oracle:
    """Knows the text, and is wrong at every `wrong`-th place of it."""

    def __init__(self, text: list[int], wrong: int):
        self.text, self.wrong = text, wrong

    def propose(self, writers, counts):
        (writer,), (n,) = writers, counts
        at = len(writer.tokens)
        return [Proposal([t + 1 if i % self.wrong == 0 else t for i, t in enumerate(self.text)][at : at + n])]

    def begin(self, writer, kv):
        pass

    def observe(self, writer, start, hidden):
        pass

    def release(self, writer):
        pass


@pytest.mark.parametrize("wrong", [2, 3, 4, 1000])
def test_rounds_are_counted_as_they_were(wrong):
    model = tiny_model(0)
    params = SamplingParams(temperature=0, max_tokens=24)
    text = PROMPT + minillm.generate(model, None, PROMPT, params).tokens
    watched = Watched(Oracle(text, wrong))
    pieces = list(stream(model, None, PROMPT, watched, params, k=3))
    assert [*PROMPT, *(p.token for p in pieces)] == text
    expected, at = [], len(PROMPT) + 1  # the prefill gives the first token
    while at < len(text):
        guesses = min(3, len(text) - at - 1)
        right = next((i for i in range(guesses) if (at + i) % wrong == 0), guesses)
        if guesses:
            expected.append(Round(guesses, right, right + 1))
        at += right + 1
    assert watched.rounds == expected and len(watched.seconds) == len(expected)
    judged = sum(r.accepted + (r.accepted < r.guesses) for r in expected)
    assert watched.acceptance == pytest.approx(sum(r.accepted for r in expected) / judged)
    assert watched.tokens_per_round == pytest.approx(sum(r.tokens for r in expected) / len(expected))
    assert not watched.open


def test_nothing_judged_is_no_acceptance():
    assert Watched(NgramDrafter()).acceptance == 0.0
    assert Round(0, 0, 1).judged == 0 and Round(3, 3, 4).judged == 3 and Round(3, 1, 2).judged == 2
    assert Round(3, 2, 2).judged == 2  # the text ended with a guess: the third was not looked at


@pytest.mark.parametrize("batch", [1, 2])
def test_predictions_come_from_the_costs(batch, monkeypatch):
    """With a scripted clock: a pass of one row takes 1 s, of two 1.5, of four 2.5; all guesses are right."""
    model = tiny_model(0).prepare()
    monkeypatch.setattr(bench, "step_seconds", lambda model, context, batch, rows: 0.5 + 0.5 * rows)
    monkeypatch.setattr(Watched, "propose", timed(Watched.propose, 0.25))
    prompts = [PROMPT, PROMPT[::-1]][:batch]
    line = compare(model, "same", lambda: ModelDrafter(model), "tiny", prompts, 0.0, 3, 14, 1)
    assert (line.drafter, line.workload, line.temperature, line.k, line.batch) == ("same", "tiny", 0.0, 3, batch)
    assert line.acceptance == 1.0
    # 13 tokens follow the first: rounds of 4, 4, 4, and a last one of 1 without room for guesses.
    rounds = [4, 4, 4] if batch == 1 else [4, 4, 4, 1]
    passes = [2.5, 2.5, 2.5] if batch == 1 else [2.5, 2.5, 2.5, 1.0]
    assert line.tokens_per_round == pytest.approx(sum(rounds) / len(rounds))
    cost = 0.25 + sum(passes) / len(passes)
    assert line.predicted_speedup == pytest.approx(line.tokens_per_round / cost)
    assert line.formula_speedup == pytest.approx(expected_tokens(1.0, 3) / cost)
    assert line.speedup > 0 and line.spread[0] <= line.speedup <= line.spread[1]


def timed(propose, seconds):
    def call(self, writers, counts):
        out = propose(self, writers, counts)
        self.seconds[-1] = seconds
        return out

    return call


def test_more_rows_and_more_texts_are_more_work():
    """No time is asserted: only that the pass is that of so many rows."""
    seen = []

    class Counting(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.config, self.dtype, self.device = model, model.config, model.dtype, model.device

        def forward(self, tokens, positions, kv):
            seen.append((len(tokens), positions.tolist()))
            return self.model(tokens, positions, kv)

        def logits(self, hidden):
            return self.model.logits(hidden)

    assert bench.step_seconds(Counting(tiny_model(0)), context=10, batch=2, rows=3, repeats=2) > 0
    assert seen == [(6, [10, 11, 12, 10, 11, 12])] * 3


LINE = Line("n-gram", "prose", 0.0, 3, 1, 0.5, 1.9, 1.5, 1.4, 1.6, (1.5, 1.7))


def test_table_and_json_have_what_was_promised():
    lines = table([LINE]).splitlines()
    assert " ".join(lines[2].split()) == "n-gram prose 0 3 1 50% 1.90 1.50 1.40 1.60 (1.50 to 1.70)"
    result = json.loads(json.dumps(bench.as_json([LINE], {"cpu": "Chip"})))
    wanted = {"drafter", "workload", "temperature", "k", "batch", "acceptance", "tokens_per_round", "speedup"}
    assert result["machine"] == {"cpu": "Chip"} and wanted | {"predicted_speedup"} <= set(result["results"][0])


def test_the_median_error_is_of_the_prediction():
    lines = [replace(LINE, predicted_speedup=p, speedup=1.0) for p in (1.1, 0.8, 1.0)]
    assert median_error(lines) == pytest.approx(0.1)


def test_the_sweep_varies_one_thing_at_a_time(smollm2, monkeypatch):
    calls = []
    monkeypatch.setattr(bench, "compare", lambda model, name, make, kind, prompts, t, k, n, r: calls.append(
        (name, kind, t, k, len(prompts), n, r)))  # fmt: skip
    model, tokenizer = smollm2
    bench.sweep(model, tokenizer, {"a": NgramDrafter, "b": NgramDrafter}, quick=True)
    cases = [call[1:5] for call in calls if call[0] == "a"]
    assert cases == [call[1:5] for call in calls if call[0] == "b"] and len(set(cases)) == len(cases)
    assert {case[0] for case in cases if case[1:] == (0.0, 3, 1)} == set(bench.KINDS)
    usual = (0.0, 3, 1)
    assert all(sum(a != b for a, b in zip(case[1:], usual, strict=True)) <= 1 for case in cases)
    assert {call[5:] for call in calls} == {(32, 1)}


def test_the_packages_own_drafters_are_made_anew():
    made = bench.drafters(tiny_model(0, replace(TINY, n_layers=6)))
    assert isinstance(made["n-gram"](), NgramDrafter) and isinstance(made["layer skip"](), LayerSkipDrafter)
    assert made["layer skip"]().model.config.n_layers == 2


@pytest.mark.parametrize("quick", [False, True])
def test_the_prompts_are_pinned(quick):
    raw = bench.read_json("speculative", quick)
    assert all(len(raw[kind]) == max(bench.BATCHES) for kind in bench.KINDS)
    assert (raw["new_tokens"], raw["repeats"]) == ((32, 1) if quick else (96, 3))
