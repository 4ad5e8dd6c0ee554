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
    assert covered == 1.0 and answers <= set(vocabulary.tolist())


def test_batches_hold_every_text_once_and_rows_with_their_tokens(folder, model):
    seen = []
    for tokens, hidden, lengths in distill.batches(folder, range(1, 3), 40, seed=3):
        for text, rows in zip(tokens.split(lengths), hidden.split(lengths), strict=True):
            seen.append(text.tolist())
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
        return batch[1].roll(-1, 0)

    def entropy(step):
        _, hidden, lengths = batch
        rows = []
        for text in hidden.split(lengths):
            rows.append(text[step:])
        p = (torch.cat(rows) @ head.T).softmax(-1)
        return -(p * p.log()).sum(-1).mean()

    for step, (loss, right) in enumerate(distill.losses(model, head, knows, batch, 3), 1):
        assert right == 1.0 and float(loss) == pytest.approx(float(entropy(step)), rel=1e-4)


def test_training_learns_and_goes_on_where_it_stopped(folder, model, capsys):
    options = {"tokens": 40, "rate": 3e-3, "steps": 2}
    trained = distill.train(model, folder, 3, epochs=30, **options)
    printed = capsys.readouterr().out
    first, last = (float(line.split()[-3].rstrip("%")) for line in (printed.split("\n")[1], printed.split("\n")[-2]))
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
