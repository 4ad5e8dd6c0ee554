"""The loop: how many tokens, why it ends, and what text is shown when.

Two kinds of model drive it. A scripted stand-in wants given tokens, so that ends, stop strings and half characters
come exactly when a test needs them. A small random model gives texts that depend on everything before them, so that
a cached run, a naive run and a run between neighbours can be compared token by token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from conftest import TINY, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from minillm.generation import generate, next_logits, stream
from minillm.kv_cache import ContiguousKV
from minillm.model import NoCache, Transformer
from minillm.sampling import SamplingParams
from minillm.tokenizer import Tokenizer, bpe_tokenizer

PROMPT = [5, 3, 8, 13, 21]
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def byte_tokenizer(end_ids: tuple[int, ...] = (258,)) -> Tokenizer:
    """A token for each byte, two merges, and two special tokens, 258 and 259."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "bc", "<|end|>", "<|other|>"]
    return bpe_tokenizer(tokens, [1] * 258 + [3, 3], ["a b", "b c"], "gpt-2", end_ids=end_ids)


BYTES = byte_tokenizer()
END, OTHER = 258, 259


class Scripted:
    """Wants the tokens of its script, one after the other, behind a prompt of one token. Records what it is fed."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, script: Iterable[int], max_context: int = 64):
        self.script = list(script)
        self.config = replace(TINY, vocab_size=260, max_context=max_context)
        self.fed: list[int] = []

    def __call__(self, tokens, positions, kv):
        self.fed.append(len(tokens))
        return positions[:, None]

    def logits(self, hidden):
        return 20.0 * torch.nn.functional.one_hot(torch.tensor(self.script)[hidden[:, 0]], 260)


def scripted(script, tokenizer=BYTES, **values):
    """Greedy generation of a script. -> Generation"""
    params = SamplingParams(temperature=0, **{"max_tokens": len(script), **values})
    return generate(Scripted(script), tokenizer, [0], params)


def ids(text: str) -> list[int]:
    return BYTES.encode(text)


# --- How many tokens, and why it ends. ---


@pytest.mark.parametrize("n", [0, 1, 2, 7])
@pytest.mark.parametrize("store", [None, NoCache])
def test_exactly_max_tokens_are_generated(n, store, tiny):
    done = generate(tiny, None, PROMPT, replace(GREEDY, max_tokens=n), store and store())
    assert len(done.tokens) == len(done.seconds) == n
    assert done.finish_reason == "length"
    assert done.prompt == PROMPT and done.text == ""


def test_no_tokens_cost_no_computation():
    model = Scripted(ids("abc"))
    assert generate(model, BYTES, [0], SamplingParams(max_tokens=0)).tokens == []
    assert model.fed == []


@pytest.mark.parametrize("n_prompt", [15, 19, 20])
def test_cached_and_naive_stop_at_the_same_token_of_the_context(n_prompt):
    model = tiny_model(config=replace(TINY, max_context=20))
    prompt = list(range(n_prompt))
    params = replace(GREEDY, max_tokens=50)
    cached, naive = generate(model, None, prompt, params), generate(model, None, prompt, params, NoCache())
    assert cached.tokens == naive.tokens and len(cached.tokens) == 20 - n_prompt
    assert cached.finish_reason == naive.finish_reason == "context"


def test_a_full_store_ends_the_text_as_the_context_does(tiny):
    done = generate(tiny, None, PROMPT, GREEDY, ContiguousKV(TINY, 8, torch.float64))
    assert done.tokens == generate(tiny, None, PROMPT, GREEDY).tokens[:3]
    assert done.finish_reason == "context"


def test_the_last_token_that_was_asked_for_may_be_the_last_of_the_context():
    model = tiny_model(config=replace(TINY, max_context=8))
    assert generate(model, None, PROMPT, replace(GREEDY, max_tokens=3)).finish_reason == "length"
    assert generate(model, None, PROMPT, replace(GREEDY, max_tokens=4)).finish_reason == "context"


@pytest.mark.parametrize(
    ("end_ids", "values", "n", "reason"),
    [
        ((END,), {}, 3, "stop"),
        ((OTHER,), {}, 5, "stop"),
        ((OTHER, END), {}, 3, "stop"),  # several: the first that comes
        ((), {}, 6, "length"),  # none
        ((), {"stop_ids": END}, 3, "stop"),  # an int
        ((OTHER,), {"stop_ids": (END, 7)}, 3, "stop"),  # in addition to the tokenizer's own
        ((END,), {"ignore_eos": True}, 6, "length"),
        ((END,), {"ignore_eos": True, "stop_ids": OTHER}, 5, "stop"),  # one's own end tokens stay
        ((END,), {"max_tokens": 3}, 3, "stop"),  # it would have ended anyway: the reason is the end token
        ((END,), {"max_tokens": 2}, 2, "length"),
    ],
)
def test_end_tokens(end_ids, values, n, reason):
    """The script is a, b, end, c, other, d."""
    script = [*ids("a"), *ids("b"), END, *ids("c"), OTHER, *ids("d")]
    done = scripted(script, byte_tokenizer(end_ids), **values)
    assert (done.tokens, done.finish_reason) == (script[:n], reason)
    assert done.text == "abcd"[: {2: 2, 3: 2, 5: 3, 6: 4}[n]]  # special tokens have no text


def test_an_end_token_that_is_a_letter_is_not_shown_either():
    done = scripted(ids("x") + ids("y"), stop_ids=ids("y"))
    assert (done.tokens, done.text) == (ids("x") + ids("y"), "x")


def test_end_tokens_work_without_a_tokenizer():
    done = scripted([1, 2, 3, 4], tokenizer=None, stop_ids=3)
    assert (done.tokens, done.text, done.finish_reason) == ([1, 2, 3], "", "stop")


def test_no_end_token_comes_before_min_tokens():
    """The script wants to end at once, and gets its wish after two other tokens."""
    done = scripted([END] * 5, min_tokens=2)
    assert END not in done.tokens[:2] and done.tokens[2:] == [END]
    assert scripted([END] * 5).tokens == [END]


def test_no_stop_string_counts_before_min_tokens():
    script = [*ids("a"), *ids("b"), *ids("c"), *ids("a"), *ids("b"), *ids("c")]
    assert scripted(script, stop="ab").text == ""
    for stop, shown in (("ab", "abc"), ("b", "abca")):
        late = scripted(script, stop=stop, min_tokens=2)
        assert (late.text, late.tokens, late.finish_reason) == (shown, script[:5], "stop")


# --- Mistakes are met at the call. ---


@pytest.mark.parametrize(
    ("prompt", "tokenizer", "values", "message"),
    [
        ([], None, {}, "empty"),
        ("", BYTES, {}, "empty"),
        ("text", None, {}, "tokenizer"),
        ([0] * 65, None, {}, "65 tokens; the context ends at 64"),
        ([0] * 65, None, {"max_tokens": 0}, "65 tokens"),
        ([0, 260], None, {}, "from 0 to 259"),
        ([-1], None, {}, "from 0 to 259"),
        ([0.0], None, {}, "whole numbers"),
        (torch.tensor([1.0, 2.0]), None, {}, "whole numbers"),
        ([0], None, {"stop": "x"}, "stop strings need a tokenizer"),
        ([0], BYTES, {"stop_ids": 260}, "stop_ids"),
        ([0], BYTES, {"stop_ids": (-1,)}, "stop_ids"),
    ],
)
def test_a_mistake_is_refused_at_the_call_and_not_at_the_first_token(prompt, tokenizer, values, message):
    model = Scripted([1])
    with pytest.raises(ValueError, match=message):
        stream(model, tokenizer, prompt, SamplingParams(**values))  # not iterated
    assert model.fed == []


@pytest.mark.parametrize("held", [5, 6])
def test_a_store_that_holds_the_whole_prompt_is_refused(held, tiny):
    kv = ContiguousKV(TINY, 20, torch.float64)
    kv.commit(held)
    with pytest.raises(ValueError, match=f"holds {held} tokens"):
        stream(tiny, None, PROMPT, GREEDY, kv)
    assert kv.length == held


def test_a_store_that_is_too_small_for_the_prompt_is_refused(tiny):
    with pytest.raises(ValueError, match="5 tokens; the context ends at 4"):
        stream(tiny, None, PROMPT, GREEDY, ContiguousKV(TINY, 4, torch.float64))


def test_broken_logits_are_an_error_and_not_a_token(tiny):
    tiny.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        generate(tiny, None, PROMPT, GREEDY)


# --- The same tokens by every road. ---

ROADS = [
    GREEDY,
    SamplingParams(seed=1, max_tokens=24),
    SamplingParams(seed=2, max_tokens=24, temperature=2.0, top_k=20, top_p=0.95, min_p=0.01),
    SamplingParams(seed=3, max_tokens=24, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
]


@pytest.mark.parametrize("params", ROADS)
@pytest.mark.parametrize("seed", range(3))
def test_cached_and_naive_give_the_same_tokens(params, seed):
    model = tiny_model(seed)
    cached, naive = generate(model, None, PROMPT, params), generate(model, None, PROMPT, params, NoCache())
    assert cached.tokens == naive.tokens
    assert len(set(cached.tokens)) > 5  # a text that repeats itself would prove nothing


def test_the_cache_is_fed_the_prompt_once_and_then_one_token_a_step(tiny, monkeypatch):
    fed = []
    real = Transformer.forward

    def spy(self, tokens, positions, kv):
        fed.append((len(tokens), positions.tolist()))
        return real(self, tokens, positions, kv)

    monkeypatch.setattr(Transformer, "forward", spy)
    generate(tiny, None, PROMPT, replace(GREEDY, max_tokens=4))
    assert fed == [(5, [0, 1, 2, 3, 4]), (1, [5]), (1, [6]), (1, [7])]
    fed.clear()
    generate(tiny, None, PROMPT, replace(GREEDY, max_tokens=4), NoCache())
    assert fed == [(n, list(range(n))) for n in (5, 6, 7, 8)]


def test_every_step_shows_the_next_token_s_logits(tiny):
    kv = ContiguousKV(TINY, 20, torch.float64)
    for n in range(1, 6):
        expected = tiny.logits(tiny(torch.tensor(PROMPT[:n]), torch.arange(n), NoCache()))[-1]
        torch.testing.assert_close(next_logits(tiny, PROMPT[:n], kv), expected, rtol=0, atol=1e-9)
        assert kv.length == n


@pytest.mark.parametrize("held", range(5))
def test_a_store_that_holds_a_prefix_goes_on_from_there(held, tiny, monkeypatch):
    kv = ContiguousKV(TINY, 64, torch.float64)
    if held:
        next_logits(tiny, PROMPT[:held], kv)
    fed = []
    real = Transformer.forward
    monkeypatch.setattr(
        Transformer, "forward", lambda self, tokens, *rest: fed.append(len(tokens)) or real(self, tokens, *rest)
    )
    done = generate(tiny, None, PROMPT, GREEDY, kv)
    assert fed[0] == 5 - held
    assert done.tokens == generate(tiny, None, PROMPT, GREEDY).tokens
    assert kv.length == 5 + len(done.tokens) - 1  # nothing was computed for the last token


def test_the_same_seed_gives_the_same_text_and_another_seed_another(tiny):
    one, again, other = (
        generate(tiny, None, PROMPT, SamplingParams(seed=seed, max_tokens=20)).tokens for seed in (4, 4, 5)
    )
    assert one == again != other


def test_a_request_s_tokens_do_not_depend_on_its_neighbours(tiny):
    asked = [
        (PROMPT, SamplingParams(seed=1, max_tokens=12)),
        ([7, 7, 2], SamplingParams(seed=2, max_tokens=20, temperature=1.5)),
        ([1], SamplingParams(temperature=0, max_tokens=9)),
    ]
    alone = [generate(tiny, None, prompt, params).tokens for prompt, params in asked]
    streams = [stream(tiny, None, prompt, params) for prompt, params in asked]
    together: list[list[int]] = [[] for _ in asked]
    for _ in range(20):
        for tokens, running in zip(together, streams, strict=True):
            tokens += [piece.token for piece in [next(running, None)] if piece]
    assert together == alone


def test_logprobs_are_those_of_the_naive_logits(tiny):
    """Under the model's own distribution, whatever rules the token was sampled by."""
    params = SamplingParams(seed=1, max_tokens=10, temperature=3.0, presence_penalty=1.0, logprobs=4)
    done = generate(tiny, None, PROMPT, params)
    tokens = PROMPT + done.tokens
    logits = tiny.logits(tiny(torch.tensor(tokens), torch.arange(len(tokens)), NoCache()))
    exact = logits[len(PROMPT) - 1 : -1].log_softmax(-1)
    assert len(done.logprobs) == len(done.top_logprobs) == 10
    for row, token, logprob, best in zip(exact, done.tokens, done.logprobs, done.top_logprobs, strict=True):
        assert logprob == pytest.approx(row[token].item(), abs=1e-9)
        assert list(best) == row.argsort(descending=True)[:4].tolist()
        assert list(best.values()) == pytest.approx(row.sort(descending=True).values[:4].tolist(), abs=1e-9)


def test_logprobs_are_given_only_when_asked_for(tiny):
    without = generate(tiny, None, PROMPT, GREEDY)
    assert without.logprobs is None and without.top_logprobs is None
    chosen_only = generate(tiny, None, PROMPT, replace(GREEDY, logprobs=0))
    assert len(chosen_only.logprobs) == 24 and chosen_only.top_logprobs == [{}] * 24
    assert without.tokens == chosen_only.tokens


# --- What text is shown when. ---

# Texts as lists of segments; a segment is one token or, for a character of several bytes, a token for each byte.
SEGMENTS = st.lists(st.sampled_from(["a", "b", "c", "ab", "bc", "é", "€", "😀", " "]), min_size=1, max_size=10)
STOPS = st.lists(st.text("abcé😀", min_size=1, max_size=3), max_size=2)


def tokens_and_bytes(segments: list[str]) -> list[tuple[int, bytes]]:
    pairs = []
    for segment in segments:
        tokens, raw = ids(segment), segment.encode()
        pairs += [(tokens[0], raw)] if len(tokens) == 1 else zip(tokens, (bytes([b]) for b in raw), strict=True)
    return pairs


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(SEGMENTS, STOPS, st.integers(0, 3), st.booleans())
def test_shown_text_has_no_half_character_and_nothing_of_a_stop_string(segments, stop, cut, ended):
    """Oracle: the bytes so far, decoded without their unfinished end, searched afresh after each token."""
    pairs = tokens_and_bytes(segments)
    pairs = pairs[: max(1, len(pairs) - cut)]  # some texts break off within a character
    tokens = [token for token, _ in pairs] + [END] * ended
    params = SamplingParams(temperature=0, max_tokens=len(tokens), stop=stop)
    pieces = list(stream(Scripted(tokens), BYTES, [0], params))

    shown, raw = "", b""
    for n, piece in enumerate(pieces, start=1):
        raw += pairs[n - 1][1] if n <= len(pairs) else b""
        text = raw.decode(errors="ignore")
        shown += piece.text
        assert piece.token == tokens[n - 1]
        begins = [text.find(s) for s in stop if s in text]
        if begins:
            assert shown == text[: min(begins)] and piece.finish_reason == "stop"
            assert n == len(pieces)
        elif n == len(tokens):
            assert shown == raw.decode(errors="replace")  # all that was held back comes out
            assert piece.finish_reason == ("stop" if ended else "length")
        else:
            held = [k for k in range(1, len(text) + 1) if any(s.startswith(text[-k:]) for s in stop)]
            assert shown == text[: len(text) - max(held, default=0)] and piece.finish_reason is None
    assert pieces[-1].finish_reason is not None

    whole = generate(Scripted(tokens), BYTES, [0], params)
    assert whole.text == shown and whole.tokens == [piece.token for piece in pieces]
    assert whole.finish_reason == pieces[-1].finish_reason


def test_a_character_of_four_tokens_is_shown_whole_by_its_last():
    pieces = list(stream(Scripted(ids("a😀b")), BYTES, [0], SamplingParams(temperature=0, max_tokens=6)))
    assert [piece.text for piece in pieces] == ["a", "", "", "", "😀", "b"]


def test_half_a_character_at_the_end_is_shown_as_a_replacement():
    assert scripted(ids("a😀")[:3]).text == "a\ufffd"


def test_a_stop_string_that_straddles_tokens_ends_the_text_before_it():
    script = [*ids("x"), *ids("ab"), *ids("c"), *ids("d")]
    pieces = list(stream(Scripted(script), BYTES, [0], SamplingParams(temperature=0, max_tokens=4, stop="abc")))
    assert [(piece.text, piece.finish_reason) for piece in pieces] == [("x", None), ("", None), ("", "stop")]


def test_the_beginning_of_a_stop_string_that_never_comes_is_shown_at_the_end():
    assert scripted(ids("x") + ids("ab"), stop="abc").text == "xab"
    assert scripted([*ids("x"), *ids("ab"), END], stop="abc").text == "xab"


def test_a_prompt_may_be_text_or_its_ids(tiny):
    """A tokenizer with fewer tokens than the model is enough here."""
    tokenizer = bpe_tokenizer(list("abcdefgh"), [1] * 8, [], "gpt-2")
    text, numbers = (generate(tiny, tokenizer, prompt, GREEDY) for prompt in ("head", [7, 4, 0, 3]))
    assert text.prompt == numbers.prompt == [7, 4, 0, 3]
    assert text.tokens == numbers.tokens and text.text == numbers.text


# --- The real model. ---


def test_the_real_model_writes_the_same_text_cached_and_naive(smollm2):
    model, tokenizer = smollm2
    params = SamplingParams(temperature=0, max_tokens=16)
    cached = generate(model, tokenizer, "The capital of France is", params)
    assert "Paris" in cached.text
    assert generate(model, tokenizer, "The capital of France is", params, NoCache()).tokens == cached.tokens
    assert "".join(piece.text for piece in stream(model, tokenizer, cached.prompt, params)) == cached.text

    stop = cached.text[10:16]  # straddles tokens
    stopped = generate(model, tokenizer, "The capital of France is", replace(params, stop=stop))
    assert stopped.text == cached.text[: cached.text.find(stop)] and stopped.finish_reason == "stop"
