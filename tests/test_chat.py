"""A conversation: each turn costs only what is new, and says what a fresh run on the whole conversation would say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conftest import TINY, tiny_model

from minillm import chat as module
from minillm.chat import Chat, common_prefix
from minillm.generation import generate
from minillm.model import NoCache, Transformer
from minillm.sampling import SamplingParams
from minillm.tokenizer import Tokenizer, bpe_tokenizer

LETTERS = [*"abcdefghijklmnopqrstuvwxyz", "Ġ", "<|start|>", "<|end|>"]  # Ġ is the space
START, END = 27, 28
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role[0] }} {{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>a {% endif %}"
)
LETTERS_ONLY = SamplingParams(temperature=0, max_tokens=6, min_tokens=6, stop_ids=START)  # its end tokens are barred
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def letter_tokenizer() -> Tokenizer:
    return bpe_tokenizer(LETTERS, [1] * 27 + [3, 3], [], "gpt-2", end_ids=(END,), chat_template=TEMPLATE)


def new_chat(seed: int = 0, max_context: int = 256, system: str | None = None) -> Chat:
    config = replace(TINY, vocab_size=len(LETTERS), max_context=max_context)
    return Chat(tiny_model(seed, config), letter_tokenizer(), system)


def said(chat: Chat, text: str, params: SamplingParams) -> tuple[list[int], str]:
    """One whole turn. -> its tokens and text"""
    pieces = list(chat.send(text, params))
    return [piece.token for piece in pieces], "".join(piece.text for piece in pieces)


def fresh(chat: Chat, text: str, params: SamplingParams) -> tuple[list[int], str]:
    """The same turn without any cache: the whole conversation, computed anew. Changes nothing in the chat."""
    prompt = chat.tokenizer.encode_chat([*chat.messages, {"role": "user", "content": text}])
    done = generate(chat.model, chat.tokenizer, prompt, params, NoCache())
    return done.tokens, done.text


@pytest.fixture
def fed(monkeypatch) -> list[int]:
    """The number of tokens of each pass through a model with a cache."""
    counts = []
    real = Transformer.forward

    def forward(self, tokens, positions, kv):
        if not isinstance(kv, NoCache):
            counts.append(len(tokens))
        return real(self, tokens, positions, kv)

    monkeypatch.setattr(Transformer, "forward", forward)
    return counts


TURNS = ["hello", "how are you", "", "good", "hello"]


@pytest.mark.parametrize("system", [None, "be kind"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("params", [GREEDY, LETTERS_ONLY, SamplingParams(seed=5, max_tokens=10, ignore_eos=True)])
def test_every_answer_is_that_of_a_fresh_run(seed, system, params):
    """Random models also say special tokens in mid-answer, which the rendered conversation does not hold: then the
    cache is a prefix of the new prompt only in part."""
    chat = new_chat(seed, system=system)
    for text in TURNS:
        expected = fresh(chat, text, params)
        assert said(chat, text, params) == expected


def test_a_cache_that_is_trusted_too_far_is_noticed(monkeypatch):
    """A stored mutant: the cache is taken to be a prefix of the new prompt without a look."""
    monkeypatch.setattr(module, "common_prefix", lambda a, b: min(len(a), len(b)))
    with pytest.raises(AssertionError):
        for seed in range(4):
            test_every_answer_is_that_of_a_fresh_run(seed, None, SamplingParams(seed=5, max_tokens=10, ignore_eos=True))


def test_a_turn_is_fed_only_what_is_new(fed):
    """The prompt but for what the cache holds: all earlier tokens, except the last answer's last one."""
    chat = new_chat()
    known = 0
    for text in TURNS:
        prompt = len(chat.tokenizer.encode_chat([*chat.messages, {"role": "user", "content": text}]))
        said(chat, text, LETTERS_ONLY)
        assert fed == [prompt - known] + [1] * 5
        assert chat.kv.length == len(chat.cached) == prompt + 5
        known = prompt + 5
        fed.clear()


def test_a_turn_may_be_asked_again(fed):
    """The cache holds all of its prompt; the last token is computed anew, for its scores."""
    chat = new_chat()
    first = said(chat, "hello", LETTERS_ONLY)
    chat.messages = []
    fed.clear()
    assert said(chat, "hello", LETTERS_ONLY) == first
    assert fed == [1] * 6


def test_the_messages_are_the_conversation():
    chat = new_chat(system="be kind")
    assert chat.messages == [{"role": "system", "content": "be kind"}]
    _, one = said(chat, "hello", GREEDY)
    _, two = said(chat, "again", GREEDY)
    assert [(message["role"], message["content"]) for message in chat.messages[1:]] == [
        ("user", "hello"),
        ("assistant", one),
        ("user", "again"),
        ("assistant", two),
    ]
    assert new_chat().messages == []


def test_a_conversation_that_is_too_long_is_refused_and_loses_nothing(fed):
    chat = new_chat(max_context=80)
    said(chat, "hello", LETTERS_ONLY)
    said(chat, "again", LETTERS_ONLY)
    messages, held = list(chat.messages), chat.kv.length
    fed.clear()
    with pytest.raises(ValueError, match="the context ends at 80"):
        chat.send("a" * 80, LETTERS_ONLY)
    assert chat.messages == messages and chat.kv.length == held and fed == []

    expected = fresh(chat, "short", LETTERS_ONLY)
    assert said(chat, "short", LETTERS_ONLY) == expected
    assert fed[0] == chat.kv.length - 5 - held  # the cache was still of use


def test_a_refusal_in_an_edited_conversation_loses_nothing_either():
    """The refused prompt shares almost nothing with the cache; the conversation that is put back does."""
    chat = new_chat(max_context=80)
    said(chat, "hello", LETTERS_ONLY)
    messages, chat.messages = chat.messages, []
    with pytest.raises(ValueError, match="context"):
        chat.send("a" * 80, LETTERS_ONLY)
    chat.messages = messages
    expected = fresh(chat, "again", LETTERS_ONLY)
    assert said(chat, "again", LETTERS_ONLY) == expected


def test_an_answer_that_meets_the_end_of_the_context_ends_there():
    chat = new_chat(max_context=24)
    pieces = list(chat.send("hello", replace(LETTERS_ONLY, max_tokens=100)))  # a prompt of 12 tokens
    assert len(pieces) == 12 and pieces[-1].finish_reason == "context"
    with pytest.raises(ValueError, match="context"):
        chat.send("more")


@pytest.mark.parametrize("taken", [1, 3])
def test_closing_the_stream_keeps_what_was_said(taken, fed):
    chat = new_chat()
    said(chat, "hello", LETTERS_ONLY)
    answer = chat.send("again", LETTERS_ONLY)
    text = "".join(next(answer).text for _ in range(taken))
    answer.close()
    assert chat.messages[-2:] == [{"role": "user", "content": "again"}, {"role": "assistant", "content": text}]
    held = chat.kv.length
    fed.clear()
    expected = fresh(chat, "and then", LETTERS_ONLY)
    assert said(chat, "and then", LETTERS_ONLY) == expected
    assert fed[0] == chat.kv.length - 5 - held


def test_leaving_a_loop_early_closes_the_stream():
    chat = new_chat()
    shown = ""
    for piece in chat.send("hello", LETTERS_ONLY):
        shown += piece.text
        if len(shown) == 2:
            break
    assert chat.messages[-1] == {"role": "assistant", "content": shown}


def test_a_new_turn_ends_one_that_was_left_open():
    """Two open turns would write over each other in the one cache."""
    chat = new_chat()
    left_open = chat.send("hello", LETTERS_ONLY)
    text = next(left_open).text + next(left_open).text
    answer = chat.send("again", LETTERS_ONLY)
    assert chat.messages[-1] == {"role": "assistant", "content": text}
    assert next(left_open, None) is None
    expected = fresh(chat, "again", LETTERS_ONLY)
    assert ([piece.token for piece in answer], chat.messages[-1]["content"]) == expected
    left_open.close()
    assert [message["content"] for message in chat.messages[::2]] == ["hello", "again"]


def test_an_answer_that_nobody_began_to_read_was_not_given():
    chat = new_chat()
    said(chat, "hello", LETTERS_ONLY)
    messages = list(chat.messages)
    chat.send("ignored", LETTERS_ONLY)
    expected = fresh(chat, "again", LETTERS_ONLY)
    assert chat.messages == messages
    assert said(chat, "again", LETTERS_ONLY) == expected


@pytest.mark.parametrize(
    ("a", "b", "n"),
    [([], [], 0), ([1], [], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 2], 2), ([1, 9, 3], [1, 2, 3], 1), ([2], [1], 0)],
)
def test_common_prefix(a, b, n):
    assert common_prefix(a, b) == common_prefix(b, a) == n


def test_a_very_long_context_does_not_reserve_all_its_room():
    chat = Chat(tiny_model(config=replace(TINY, max_context=100_000)), letter_tokenizer())
    assert chat.kv.capacity == module.MAX_KEPT


def test_the_real_model_keeps_its_cache_between_turns(smollm2, fed):
    chat = Chat(*smollm2)
    params = SamplingParams(temperature=0, max_tokens=8)
    said(chat, "What is the capital of France?", params)
    held = chat.kv.length
    fed.clear()
    expected = fresh(chat, "And of Italy?", params)
    assert said(chat, "And of Italy?", params) == expected
    prompt = chat.tokenizer.encode_chat([*chat.messages[:-1]])
    assert fed[0] == len(prompt) - held
