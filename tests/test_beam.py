"""Beam search: one beam is greedy, enough beams are exhaustive, and any number equals a plain second writing."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import pytest
import torch
from conftest import TINY, tiny_model

from minillm.beam import Beam, beam_search
from minillm.generation import generate
from minillm.kv_cache import ContiguousKV
from minillm.model import NoCache, Transformer
from minillm.sampling import SamplingParams

FOUR_TOKENS = replace(TINY, vocab_size=4)
PROMPT = [1, 3, 0]


def next_logprobs(model: Transformer, tokens: list[int]) -> list[float]:
    """Of all tokens after a text, without a cache."""
    hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), NoCache())
    return model.logits(hidden)[-1].log_softmax(-1).tolist()


def scored(tokens: list[int], logprob: float, length_penalty: float) -> Beam:
    return Beam(tokens, logprob, logprob / len(tokens) ** length_penalty)


def all_continuations(model, max_tokens, end_ids, length_penalty) -> list[Beam]:
    """Every text of max_tokens tokens, or fewer with an end token as the last. Best first."""
    found = []

    def extend(tokens: list[int], logprob: float) -> None:
        for token, token_logprob in enumerate(next_logprobs(model, PROMPT + tokens)):
            text, total = [*tokens, token], logprob + token_logprob
            if token in end_ids or len(text) == max_tokens:
                found.append(scored(text, total, length_penalty))
            else:
                extend(text, total)

    extend([], 0.0)
    return sorted(found, key=lambda beam: -beam.score)


def plain_beam_search(model, n_beams, max_tokens, end_ids, length_penalty) -> list[Beam]:
    """The n best live texts after each step; ended ones step aside as they are met. No store, no fork."""
    live, done = [([], 0.0)], []
    for _ in range(max_tokens):
        extensions = [
            ([*tokens, token], logprob + token_logprob)
            for tokens, logprob in live
            for token, token_logprob in enumerate(next_logprobs(model, PROMPT + tokens))
        ]
        live = []
        for tokens, logprob in sorted(extensions, key=lambda extension: -extension[1]):
            if len(live) < n_beams:
                (done if tokens[-1] in end_ids else live).append((tokens, logprob))
        if len(done) >= n_beams:
            live = []
            break
    beams = [scored(tokens, logprob, length_penalty) for tokens, logprob in [*done, *live]]
    return sorted(beams, key=lambda beam: -beam.score)[:n_beams]


def assert_same(found: list[Beam], expected: list[Beam]) -> None:
    assert [beam.tokens for beam in found] == [beam.tokens for beam in expected]
    for beam, other in zip(found, expected, strict=True):
        assert beam.logprob == pytest.approx(other.logprob, abs=1e-9)
        assert beam.score == pytest.approx(other.score, abs=1e-9)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("end_ids", [(), (0,), (1, 2)])
def test_one_beam_is_greedy_decoding(seed, end_ids):
    model = tiny_model(seed, replace(TINY, vocab_size=11))
    (beam,) = beam_search(model, PROMPT, n_beams=1, max_tokens=9, end_ids=end_ids)
    greedy = generate(model, None, PROMPT, SamplingParams(temperature=0, max_tokens=9, stop_ids=end_ids))
    assert beam.tokens == greedy.tokens


def test_some_of_these_greedy_texts_end_early():
    """Or the test above would say nothing about end tokens."""
    models = [tiny_model(seed, replace(TINY, vocab_size=11)) for seed in range(4)]
    lengths = {len(beam_search(model, PROMPT, 1, 9, end_ids=(1, 2))[0].tokens) for model in models}
    assert min(lengths) < 9


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("end_ids", [(), (2,), (0, 2)])
def test_enough_beams_find_every_continuation(end_ids, length_penalty):
    for seed in range(2):
        model = tiny_model(seed, FOUR_TOKENS)
        every = all_continuations(model, 3, end_ids, length_penalty)
        assert len(every) == {0: 64, 1: 1 + 3 + 9 * 4, 2: 2 + 2 * 2 + 4 * 4}[len(end_ids)]
        assert_same(beam_search(model, PROMPT, len(every), 3, end_ids, length_penalty), every)
        assert_same(beam_search(model, PROMPT, 500, 3, end_ids, length_penalty), every)


def test_the_length_penalty_changes_the_order():
    """Or the test above would say nothing about it."""
    model = tiny_model(0, FOUR_TOKENS)
    plain, penalized = ([beam.tokens for beam in all_continuations(model, 3, (2,), p)] for p in (0.0, 2.0))
    assert plain != penalized and sorted(plain) == sorted(penalized)


@pytest.mark.parametrize("n_beams", [2, 3, 5])
@pytest.mark.parametrize("end_ids", [(), (0,), (3, 7, 8)])
def test_any_number_of_beams_equals_the_plain_search(n_beams, end_ids):
    for seed in range(3):
        model = tiny_model(seed, replace(TINY, vocab_size=11))
        found = beam_search(model, PROMPT, n_beams, 6, end_ids, length_penalty=0.8)
        assert len(found) == n_beams
        assert_same(found, plain_beam_search(model, n_beams, 6, end_ids, 0.8))


def test_two_beams_find_texts_that_greedy_decoding_misses():
    better = 0
    for seed in range(8):
        model = tiny_model(seed)
        greedy, best = (beam_search(model, PROMPT, n, 5)[0].logprob for n in (1, 4))
        better += best > greedy + 1e-6
    assert better > 0


def test_beams_that_share_a_store_are_noticed(monkeypatch):
    """A stored mutant: where a fork shares its memory, two beams overwrite each other's past."""
    monkeypatch.setattr(ContiguousKV, "fork", copy)  # Python's shallow copy: a length of its own, the same tensors
    model = tiny_model(0, FOUR_TOKENS)
    with pytest.raises(AssertionError):
        assert_same(beam_search(model, PROMPT, 64, 3), all_continuations(model, 3, (), 1.0))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n_beams": 0}, "n_beams and max_tokens"),
        ({"n_beams": -1}, "n_beams and max_tokens"),
        ({"max_tokens": 0}, "n_beams and max_tokens"),
        ({"prompt": []}, "empty"),
        ({"prompt": [37]}, "from 0 to 36"),
        ({"prompt": "text"}, "tokenizer"),
        ({"max_tokens": 126}, r"3 \+ 126 tokens do not fit the context of 128"),
        ({"prompt": [0] * 128}, "do not fit"),
    ],
)
def test_mistakes_are_refused(values, message, tiny):
    with pytest.raises(ValueError, match=message):
        beam_search(**{"model": tiny, "prompt": PROMPT, "n_beams": 2, "max_tokens": 3, **values})


def test_beams_may_fill_the_context():
    model = tiny_model(config=replace(FOUR_TOKENS, max_context=6))
    assert len(beam_search(model, PROMPT, 2, 3)[0].tokens) == 3
