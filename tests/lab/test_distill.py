"""Distilling: texts and features are made once and are the model's own, training learns and can be interrupted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY
from safetensors.torch import load_file

from minillm.kv_cache import ContiguousKV
from minillm.lab import distill
from minillm.lab.tiny import tiny_model
from minillm.model import NoCache
from minillm.sampling import SamplingParams

SMALL = replace(TINY, tied_embeddings=True)


@pytest.fixture
def model():
    return tiny_model(0, SMALL).float()


@pytest.fixture
def folder(tmp_path, model, monkeypatch) -> Path:
    """Three shards of four texts that the tiny model wrote."""
    monkeypatch.setattr(distill, "SHORT_VOCABULARY", 16)
    for shard in range(3):
        texts = []
        for i in range(4):
            prompt = [1 + shard, 2 + i, 5]
            answer = distill.Engine(model, n_blocks=8).generate([prompt], SamplingParams(temperature=0, max_tokens=20))
            texts.append([prompt, answer[0].tokens])
        distill.write_json(tmp_path / f"texts-{shard}.json", texts)
    distill.read_features(model, tmp_path, 3)
    return tmp_path


def test_features_are_the_models_rows_in_16_bits(folder, model):
    hidden = load_file(folder / "features-1.safetensors")["hidden"]
    texts = [prompt + answer for prompt, answer in distill.texts_of(folder, 1)]
    with torch.inference_mode():
        rows = torch.cat([model(torch.tensor(t), torch.arange(len(t)), NoCache()) for t in texts])
    assert hidden.dtype == torch.float16 and torch.equal(hidden, rows.half())


def test_the_vocabulary_is_that_of_the_answers_that_are_learned(folder):
    vocabulary, covered = distill.frequent_tokens(folder, 3)
    answers = {t for shard in (1, 2) for _, answer in distill.texts_of(folder, shard) for t in answer}
    assert len(vocabulary) == 16 and vocabulary.tolist() == sorted(set(vocabulary.tolist()))
    assert answers <= set(vocabulary.tolist())
    held_out = [t for _, answer in distill.texts_of(folder, 0) for t in answer]
    assert covered == sum(t in vocabulary.tolist() for t in held_out) / len(held_out)


def test_batches_hold_every_text_once_and_rows_with_their_tokens(folder, model):
    seen = []
    for batch in distill.batches(folder, range(1, 3), 40, seed=3):
        parts = (x.split(batch.lengths) for x in (batch.tokens, batch.hidden, batch.answers))
        for text, rows, answers in zip(*parts, strict=True):
            seen.append(text.tolist())
            assert answers.tolist() == [False] * 2 + [True] * (len(text) - 2)  # prompts of three: the third is behind
            with torch.inference_mode():
                assert torch.allclose(rows, model(text, torch.arange(len(text)), NoCache()), atol=2e-3)
    wanted = [prompt + answer for shard in (1, 2) for prompt, answer in distill.texts_of(folder, shard)]
    assert sorted(seen) == sorted(wanted)


def test_losses_are_of_the_right_rows(folder, model):
    """A drafter that gives the next true row has no loss beyond the entropy of the model, at every step."""
    vocabulary, _ = distill.frequent_tokens(folder, 3)
    head = model.head.weight[vocabulary].detach()
    batch = next(distill.batches(folder, range(1, 2), 1000, 0))

    def knows(given, embedded, positions, kv):
        return batch.hidden.roll(-1, 0)

    def entropy(step):
        rows = [text[max(3, step) :] for text in batch.hidden.split(batch.lengths)]  # of answers, and with a chain
        p = (torch.cat(rows) @ head.T).softmax(-1)
        return -(p * p.log()).sum(-1).mean()

    for step, (loss, right) in enumerate(distill.losses(model, head, knows, batch, 5), 1):
        assert right == 1.0 and float(loss) == pytest.approx(float(entropy(step)), rel=1e-4)


@torch.no_grad()
def chains(model, drafter, tokens: list[int], start: int, steps: int) -> list[torch.Tensor]:
    """The rows that the drafter at work predicts, when it has seen the rows of `tokens[: start + 1]` and is then told
    the true tokens."""
    hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), NoCache())
    kv, rows = ContiguousKV(drafter.config, len(tokens)), []
    given, at = hidden[: start + 1], 0
    for _ in range(steps):
        embedded = model.embed(torch.tensor(tokens[at + 1 : at + 1 + len(given)]))
        rows.append(drafter(given, embedded, torch.arange(at, at + len(given)), kv)[-1:])
        kv.commit(len(given))
        at, given = at + len(given), rows[-1]
    return rows


def test_what_is_learned_is_what_is_done(folder, model):
    """The chains of the loss, all at once, are those of a drafter at work: its cache holds true rows, then its own."""
    torch.manual_seed(0)
    vocabulary, _ = distill.frequent_tokens(folder, 3)
    drafter = distill.new_drafter(model, vocabulary)
    for parameter in drafter.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    texts = [prompt + answer for prompt, answer in distill.texts_of(folder, 1)[:2]]
    rows = [model(torch.tensor(t), torch.arange(len(t)), NoCache()).detach() for t in texts]
    lengths = [len(t) for t in texts]
    tokens, hidden = torch.tensor([i for t in texts for i in t]), torch.cat(rows)
    batch = distill.Batch(tokens, hidden, lengths, torch.ones(len(tokens), dtype=torch.bool))
    steps = []

    def watched(*arguments):
        steps.append(drafter(*arguments))
        return steps[-1]

    list(distill.losses(model, model.head.weight[vocabulary].detach(), watched, batch, 4))
    for text, first in zip(texts, (0, lengths[0]), strict=True):
        for start in (0, 1, 7, len(text) - 6):
            for step, row in enumerate(chains(model, drafter, text, start, 4)):
                assert torch.allclose(steps[step][first + start + step], row[0], atol=1e-5), (start, step)


def test_training_learns_and_goes_on_where_it_stopped(folder, model, capsys):
    options = {"tokens": 40, "rate": 3e-3, "dtype": torch.float32}
    trained = distill.train(model, folder, 3, epochs=30, **options)
    printed = capsys.readouterr().out
    first, last = (float(line.split()[-5].rstrip("%")) for line in (printed.split("\n")[1], printed.split("\n")[-2]))
    assert last > first + 10
    state = torch.load(folder / "state.pt", weights_only=True)
    assert state["epoch"] == 30
    again = distill.train(model, folder, 3, epochs=30, **options)  # nothing left to do
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), again.parameters(), strict=True))
    distill.save(again, folder / "drafter.safetensors")
    saved = load_file(folder / "drafter.safetensors")
    assert saved["join.weight"].dtype == torch.float16 and saved["vocabulary"].dtype == torch.int32


def test_what_is_there_is_not_made_again(folder, model):
    before = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    distill.read_features(model, folder, 3)
    distill.write_texts(model, SimpleNamespace(render_chat=lambda messages, generate: "user?"), folder, 3)
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == before


def test_the_real_model_writes_questions_and_answers(smollm2, tmp_path, monkeypatch):
    monkeypatch.setattr(distill, "TEXTS", 6)
    monkeypatch.setattr(distill, "QUESTION", replace(distill.QUESTION, max_tokens=40))
    for name in ("GREEDY", "WARM"):
        monkeypatch.setattr(distill, name, replace(getattr(distill, name), max_tokens=4))
    model, tokenizer = smollm2
    distill.write_texts(model, tokenizer, tmp_path, 1)
    texts = json.loads((tmp_path / "texts-0.json").read_text())
    assert texts and not list(tmp_path.glob("*.part"))
    for prompt, answer in texts:
        text = tokenizer.decode(prompt)
        assert text.startswith("system") and text.endswith("assistant\n") and 1 <= len(answer) <= 4


@pytest.mark.parametrize("wrong", [["--shards", "1"], ["--epochs", "0"]])
def test_too_little_to_learn_from_is_refused(wrong, tmp_path, capsys):
    with pytest.raises(SystemExit):
        distill.main([str(tmp_path), *wrong])
    assert "at least 2 shards and one epoch" in capsys.readouterr().err
