"""Each token is predicted once, from its window alone; differences are paired; calibration text is other text."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from conftest import mutant, random_model

from minillm.lab import perplexity
from minillm.lab.perplexity import (
    WINDOW,
    Difference,
    judge,
    kl,
    log_probabilities,
    paired,
    reference_text,
    split,
    text_nll,
)
from minillm.model import NoCache

TOKENS = torch.randint(0, 37, (53,), generator=torch.Generator().manual_seed(0)).tolist()


class Letters:
    """A tokenizer of one token a character."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]


def test_no_paragraph_is_there_twice():
    text = reference_text()
    paragraphs = text.split("\n\n")
    assert len(set(paragraphs)) == len(paragraphs) and "lambda" in text and len(text) > 200_000


def test_the_parts_are_those_that_were_asked_for():
    text = "".join(chr(1000 + i) for i in range(5 * WINDOW + 7))
    parts = split(Letters(), 2 * WINDOW, 3 * WINDOW, text)
    everything = Letters().encode(text)
    assert parts.evaluation == everything[: 2 * WINDOW + 1]
    assert [t for part in parts.calibration for t in part] == everything[-3 * WINDOW :]
    assert [len(part) for part in parts.calibration] == [WINDOW] * 3
    assert not {*parts.evaluation} & {t for part in parts.calibration for t in part}
    assert parts.sha256 == hashlib.sha256(text.encode()).hexdigest()
    about = parts.describe()
    assert (about["tokens"], about["predicted"], about["calibration"]) == (len(text), 2 * WINDOW, 3 * WINDOW)
    assert split(Letters(), 5 * WINDOW, 0, text).calibration == []


@pytest.mark.parametrize(
    "predicted, calibration, words",
    [
        (100, WINDOW, "multiples of 512"),
        (0, 0, "multiples"),
        (WINDOW, 5, "multiples"),
        (WINDOW, 5 * WINDOW, "fewer than"),
    ],
)
def test_parts_that_cannot_be_are_refused(predicted, calibration, words):
    with pytest.raises(ValueError, match=words):
        split(Letters(), predicted, calibration, "a" * (3 * WINDOW))


def test_the_real_text_has_twenty_thousand_tokens_and_more_for_calibration(smollm2):
    tokenizer = smollm2[1]
    parts = split(tokenizer, 20_480, 8_192)
    assert parts.total > 40_000 and parts.describe()["predicted"] >= 20_000
    windows = {tuple(parts.evaluation[i : i + 64]) for i in range(len(parts.evaluation) - 64)}
    assert not any(tuple(text[i : i + 64]) in windows for text in parts.calibration for i in range(WINDOW - 64))


def check_nll(module=perplexity) -> None:
    """Against one call of the model for each token, on the part of its window before it."""
    model = random_model()
    nats = module.text_nll(model, TOKENS, window=8)
    assert nats.shape == (6, 8)  # 52 predicted tokens hold 6 whole windows
    for i in range(6):
        for j in range(8):
            before = torch.tensor(TOKENS[8 * i : 8 * i + j + 1])
            logits = model.logits(model(before, torch.arange(j + 1), NoCache()))[-1]
            expected = torch.logsumexp(logits, -1) - logits[TOKENS[8 * i + j + 1]]
            torch.testing.assert_close(nats[i, j], expected)


def test_each_token_is_predicted_once_from_its_window_alone():
    check_nll()


@pytest.mark.parametrize(
    "old, new",
    [
        ("ids[start + 1 : start + window + 1]", "ids[start : start + window]"),
        ("len(ids) - window, window)", "len(ids) - window, window - 1)"),
        ("torch.arange(window, device", "torch.zeros(window, dtype=torch.long, device"),
        ("nats.append(-log_p", "nats.append(log_p"),
        ("logits.log_softmax(-1)", "logits.log_softmax(0)"),
    ],
)
def test_a_planted_mistake_is_found(old, new):
    broken = mutant(perplexity, old, new)
    with pytest.raises(AssertionError):
        check_nll(broken)


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary():
    model = random_model()
    model.head.weight.zero_()
    assert float(text_nll(model, TOKENS, 4).mean().exp()) == pytest.approx(37)


@pytest.mark.parametrize("n, window", [(8, 8), (1, 1), (0, 4), (5, 0)])
def test_a_text_without_a_whole_window_is_refused(n, window):
    with pytest.raises(ValueError, match="hold no window"):
        text_nll(random_model(), TOKENS[:n], window)


def test_the_divergence_is_from_the_first_to_the_second():
    a, b = random_model(seed=0), random_model(seed=1)
    found = kl(a, b, TOKENS, window=8)
    assert found.shape == (6, 8) and bool((found > 0).all())
    p, q = (torch.cat([rows for rows, _ in log_probabilities(m, TOKENS, 8)]) for m in (a, b))
    expected = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(found.flatten(), expected)
    assert not torch.allclose(found, kl(b, a, TOKENS, window=8), rtol=0.01)
    assert kl(a, a, TOKENS, window=8).abs().max() == 0


def test_judging_gives_the_same_numbers_in_one_pass():
    a, b = random_model(seed=0), random_model(seed=1)
    others = [log_p for log_p, _ in log_probabilities(a, TOKENS[:17], 8)]
    assert len(others) == 2
    nats, kls = judge(b, TOKENS, others, window=8)
    assert torch.equal(nats, text_nll(b, TOKENS, 8)) and torch.equal(kls, kl(a, b, TOKENS, 8)[:2])
    assert judge(b, TOKENS, window=8)[1].shape == (0, 8)


def test_differences_are_paired_and_their_error_is_that_of_windows():
    generator = torch.Generator().manual_seed(0)
    b = 3 * torch.rand(200, 16, generator=generator)
    shift = 0.1 + 0.05 * torch.randn(200, 1, generator=generator)  # neighbours share their luck
    found = paired(b + shift, b)
    assert found.mean == pytest.approx(float(shift.mean()), rel=1e-5)
    assert found.error == pytest.approx(float(shift.std()) / 200**0.5, rel=1e-4)
    by_token = float(shift.expand(200, 16).flatten().std()) / (200 * 16) ** 0.5
    assert found.error > 3.5 * by_token  # which would take 16 tokens of a window for 16 pieces of evidence
    assert paired(b, b) == Difference(0.0, 0.0) and paired(b, b + 1).mean == pytest.approx(-1)
    assert str(Difference(0.01234, 0.0012)) == "+0.0123 +- 0.0012"


def test_one_window_has_no_error_and_other_shapes_are_refused():
    assert math.isnan(paired(torch.ones(1, 8), torch.zeros(1, 8)).error)
    for other in (torch.ones(2, 4), torch.ones(8)):
        with pytest.raises(ValueError, match="of the same windows"):
            paired(torch.ones(1, 8), other)


def test_the_real_model_knows_the_text(smollm2):
    model, tokenizer = smollm2
    nats = text_nll(model, split(tokenizer, WINDOW, 0).evaluation[:193], window=64)
    assert nats.shape == (3, 64) and 0.5 < float(nats.mean()) < 4
