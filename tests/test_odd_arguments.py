"""Odd arguments of the Python interface get a sentence, and nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import TINY, tiny_model

import minillm
from minillm import ContiguousKV, SamplingParams
from minillm.chat import Chat
from minillm.checkpoint import require_usable
from minillm.generation import generate, stream
from minillm.lab.check import check

GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.mark.parametrize("prompt", [None, 3.5, 5, b"hi", {1: 2}, {1, 2}, [1.0], ["a"], torch.tensor([0.5])])
def test_a_prompt_of_the_wrong_kind_is_refused(tiny, prompt):
    with pytest.raises(ValueError, match="a prompt is text or a list of token ids"):
        stream(tiny, None, prompt, GREEDY)


def test_whole_numbers_of_other_libraries_are_token_ids(tiny):
    expected = generate(tiny, None, [1, 2, 3], GREEDY).tokens
    for prompt in (np.array([1, 2, 3]), torch.tensor([1, 2, 3]), (1, 2, 3), range(1, 4)):
        assert generate(tiny, None, prompt, GREEDY).tokens == expected


def test_params_of_the_wrong_kind_are_refused(tiny):
    with pytest.raises(ValueError, match="params must be SamplingParams, not dict"):
        stream(tiny, None, [1], {"temperature": 0})


@pytest.mark.parametrize("dtype", ["float32", torch.int8, torch.complex64])
def test_a_dtype_that_a_model_cannot_have_is_refused(dtype):
    with pytest.raises(ValueError, match="dtype must be one of"):
        minillm.load(dtype=dtype)


@pytest.mark.parametrize("device", ["meta", "nowhere"])
def test_a_device_that_cannot_compute_is_refused(device):
    with pytest.raises(ValueError, match=f"device '{device}' cannot be used here"):
        require_usable(torch.float32, device)


def test_two_streams_cannot_share_a_store():
    model = tiny_model()
    kv = ContiguousKV(TINY, 32, model.dtype)
    first, second = stream(model, None, [1, 2, 3], GREEDY, kv), stream(model, None, [4, 5, 6], GREEDY, kv)
    next(first)
    with pytest.raises(ValueError, match="used for another text meanwhile"):
        list(second)
    assert len(list(first)) == GREEDY.max_tokens - 1  # the first is not hurt


def test_a_turn_that_fails_did_not_take_place(smollm2):
    chat = Chat(*smollm2)
    with pytest.raises(ValueError, match="penalties are too large"):
        list(chat.send("hello", SamplingParams(temperature=0, presence_penalty=1e300, max_tokens=8)))
    assert chat.messages == []
    assert [*chat.send("hello", SamplingParams(temperature=0, max_tokens=3))]


def test_text_that_is_no_unicode_is_refused(smollm2):
    with pytest.raises(ValueError, match="not valid Unicode"):
        smollm2[1].encode("a\udcff")


@pytest.mark.parametrize(("raised", "words"), [(KeyboardInterrupt, "interrupted"), (SystemExit, "SystemExit")])
def test_an_answer_that_leaves_python_is_an_error(raised, words, capsys):
    def causal_mask(n_queries, n_keys):
        raise raised

    assert not check(causal_mask)
    assert "[ERROR] causal_mask" in (printed := capsys.readouterr().out) and words in printed


def test_check_wants_the_function_itself():
    with pytest.raises(ValueError, match="give check\\(\\) the function itself"):
        check(None)
