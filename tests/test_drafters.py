"""Guesses change the time of a text and nothing else: every drafter, alone and in the engine.

At temperature 0 each token is the best one of a naive pass over the whole text, in float64, and the rows that were
judged are that pass's rows. After each round the caches hold the decided tokens' rows and no others. Then the drafters
themselves: what they guess is what their definition says, computed from nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from conftest import TINY, random_model
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from minillm import generation, speculative
from minillm.adaptive_k import AdaptiveK
from minillm.drafters import Cache, LayerSkipDrafter, ModelDrafter, NgramDrafter, first_layers
from minillm.engine import Engine
from minillm.feature_drafter import FeatureDrafter, FeatureModel, load_drafter
from minillm.kv_cache import ContiguousKV
from minillm.lab.distill import save
from minillm.lab.speculative_bench import Watched
from minillm.lab.tiny import tiny_model
from minillm.lab.workload import read_json
from minillm.model import NoCache, Transformer
from minillm.sampling import SamplingParams
from minillm.scheduler import Scheduler
from minillm.speculative import Proposal, expected_tokens, speedup, stream
from minillm.tokenizer import bpe_tokenizer
from minillm.writing import Generation, Writer

TOLERANCE = 1e-9
GREEDY = SamplingParams(temperature=0, max_tokens=14)
LETTERS = bpe_tokenizer(list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJK"), [1] * 37, [], "gpt-2")  # token i: letter i
MODEL = random_model()
OTHER = random_model(seed=1)


def a_near_model(noise: float = 0.03) -> Transformer:
    """The model with its matrices a little off: many of its guesses are right, and many are not."""
    model, generator = random_model(), torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter += noise * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


NEAR = a_near_model()
FEATURES = FeatureModel(TINY, torch.arange(3, 37, 2), dtype=torch.float64)
for number, weights in enumerate(FEATURES.parameters()):
    noise = torch.randn(weights.shape, generator=torch.Generator().manual_seed(number), dtype=weights.dtype)
    weights.requires_grad_(False).copy_(0.4 * noise + (weights.ndim == 1))
DRAFTERS = {
    "n-gram": lambda: NgramDrafter(),
    "another model": lambda: ModelDrafter(OTHER),
    "a near model": lambda: ModelDrafter(NEAR),
    "the same model": lambda: ModelDrafter(MODEL),
    "first layers": lambda: LayerSkipDrafter(MODEL, 1),
    "features": lambda: FeatureDrafter(MODEL, FEATURES),
}
STORES = {"cached": lambda: ContiguousKV(TINY, 60, torch.float64), "uncached": NoCache}


@torch.inference_mode()
def naive(tokens: list[int], model: Transformer = MODEL) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden rows, logits) of one pass over the whole text, without any cache."""
    hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), NoCache())
    return hidden, model.logits(hidden)


@torch.inference_mode()
def rows_of(tokens: list[int], model: Transformer = MODEL) -> ContiguousKV:
    """A fresh prefill."""
    kv = ContiguousKV(model.config, len(tokens), model.dtype)
    model(torch.tensor(tokens), torch.arange(len(tokens)), kv)
    kv.commit(len(tokens))
    return kv


def require_rows(kv: ContiguousKV, tokens: list[int], model: Transformer = MODEL) -> None:
    """The cache holds exactly the rows of these tokens."""
    assert kv.length == len(tokens), f"the cache holds {kv.length} rows, and {len(tokens)} tokens are past"
    if tokens:
        wanted = rows_of(tokens, model)
        for ours, fresh in ((kv.k, wanted.k), (kv.v, wanted.v)):
            error = (ours[:, :, : kv.length] - fresh).abs().max()
            assert error <= TOLERANCE, f"cached rows are off by {error}"


class Watching:
    """A drafter that looks on while another one guesses, and checks what both are told."""

    def __init__(self, inner):
        self.inner = inner
        self.met = Counter()
        self.guessed: dict[Writer, tuple[int, list[int]]] = {}  # tokens before the guesses, guesses
        self.stores = {}

    def begin(self, writer, kv):
        self.stores[writer] = kv
        self.inner.begin(writer, kv)

    def propose(self, writers, counts):
        lengths = [len(w.tokens) for w in writers]
        proposals = self.inner.propose(writers, counts)
        for writer, count, length, proposal in zip(writers, counts, lengths, proposals, strict=True):
            assert len(proposal.ids) <= count, "more guesses than were asked for"
            assert len(writer.tokens) == length, "a guess is not a decided token"
            assert proposal.probabilities is None or len(proposal.probabilities) == len(proposal.ids)
            self.guessed[writer] = (length, proposal.ids)
            self.met["rounds"] += 1
            self.met["guesses"] += len(proposal.ids)
        self.require_past(writers)
        return proposals

    def require_past(self, writers):
        """What a drafter keeps of a text is of its decided tokens, and of guesses that it will compare."""
        for writer in writers:
            text = writer.tokens + self.guessed[writer][1]
            if isinstance(self.inner, ModelDrafter) and self.guessed[writer][1]:
                cache = self.inner.caches[writer]
                assert cache.tokens == text[: len(cache.tokens)], "the drafter's cache is of another text"
                require_rows(cache.kv, cache.tokens, self.inner.model)
            if isinstance(self.inner, LayerSkipDrafter) and isinstance(self.stores.get(writer), ContiguousKV):
                assert self.inner.caches[writer].kv.k.data_ptr() == self.stores[writer].k.data_ptr()
            if isinstance(self.inner, FeatureDrafter) and writer in self.inner.memories:
                assert self.inner.memories[writer].cached <= len(writer.tokens) - 1, "predicted rows became past"

    def observe(self, writer, start, hidden):
        end = start + len(hidden)
        assert end <= len(writer.tokens) - 1, "a row of a token that is not decided"
        error = (hidden - naive(writer.tokens)[0][start:end]).abs().max() if len(hidden) else 0
        assert error <= TOLERANCE, f"observed rows are off by {error}"
        if writer in self.stores:
            assert end == len(writer.tokens) - 1, "rows are missing"
            if isinstance(self.stores[writer], ContiguousKV):
                require_rows(self.stores[writer], writer.tokens[:-1])
        if writer in self.guessed:
            length, ids = self.guessed.pop(writer)
            right = writer.tokens[length : length + len(ids)] == ids and len(writer.tokens) > length + len(ids)
            self.met["all right" if ids and right else "not all right"] += 1
        self.inner.observe(writer, start, hidden)

    def release(self, writer):
        self.met["released"] += 1
        self.inner.release(writer)


TEXTS: dict[tuple[int, ...], list[int]] = {}  # greedy texts to the end of the context, by prompt


class Knowing:
    """Guesses the greedy text, whatever may end it before. If it `slips`, some are wrong."""

    def __init__(self, slips: bool = False):
        self.slips = slips

    def propose(self, writers, counts):
        return [Proposal(self.guess(w, n)) for w, n in zip(writers, counts, strict=True)]

    def guess(self, writer, count):
        start = tuple(writer.prompt)
        if start not in TEXTS:
            most = TINY.max_context - len(start)
            done = generation.generate(MODEL, None, start, SamplingParams(temperature=0, max_tokens=most))
            TEXTS[start] = [*start, *done.tokens]
        n = len(writer.tokens)
        ids = TEXTS[start][n : n + count]
        return [(t + (self.slips and random.Random(n + i).random() < 0.3)) % 37 for i, t in enumerate(ids)]

    def begin(self, writer, kv):
        pass

    def observe(self, writer, start, hidden):
        pass

    def release(self, writer):
        pass


# --- The greedy text, alone. ---

PROMPTS = [[5], [3, 1, 4, 1, 5, 9, 2, 6]]


def require_greedy(prompt: list[int], done: Generation) -> None:
    """Each token is the best of the naive pass, and its probability is the one in that row."""
    _, logits = naive([*prompt, *done.tokens])
    rows = logits[len(prompt) - 1 : -1]
    assert done.tokens == rows.argmax(-1).tolist(), "a token is not the best one"
    if done.logprobs is not None:
        wanted = rows.log_softmax(-1).gather(1, torch.tensor(done.tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(done.logprobs, dtype=torch.float64), wanted, rtol=0, atol=TOLERANCE)


def write_alone(name: str, store: str, k: int) -> Counter:
    """Texts of one drafter. -> what it met"""
    watching = Watching({**DRAFTERS, "slips": lambda: Knowing(True)}[name]())
    for prompt in PROMPTS:
        params = replace(GREEDY, logprobs=1, max_tokens=18)
        done = speculative.generate(MODEL, None, prompt, watching, params, STORES[store](), k)
        require_greedy(prompt, done)
        assert len(done.tokens) == 18
        assert done.finish_reason == "length"
    assert watching.met["released"] == len(PROMPTS)
    return watching.met


@pytest.mark.parametrize(("store", "k"), [*(("cached", k) for k in range(1, 9)), ("uncached", 2), ("uncached", 5)])
@pytest.mark.parametrize("name", [*DRAFTERS, "slips"])
def test_every_token_is_the_best_of_the_naive_pass_and_caches_hold_the_decided_tokens(name, store, k):
    met = write_alone(name, store, k)
    assert met["guesses"] > 0
    if name == "the same model":
        assert met["not all right"] <= len(PROMPTS)  # a last token that needs no guess
    if name in ("a near model", "slips"):
        assert met["all right"] > 0
        assert met["not all right"] > len(PROMPTS)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_sampled_texts_leave_the_same_caches_and_are_those_of_their_seed(name, store):
    texts = []
    for seed in (1, 1, 2):
        params = SamplingParams(temperature=0.8, top_p=0.9, seed=seed, max_tokens=24)
        watching = Watching(DRAFTERS[name]())
        texts.append(speculative.generate(MODEL, None, PROMPTS[1], watching, params, STORES[store]()).tokens)
        assert len(texts[-1]) == 24
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_the_same_model_is_right_in_every_round():
    watching = Watching(ModelDrafter(MODEL))
    speculative.generate(MODEL, None, PROMPTS[1], watching, replace(GREEDY, max_tokens=1 + 5 * 4), k=4)
    assert watching.met == {"rounds": 4, "guesses": 4 * 4, "all right": 4, "released": 1}


# --- In the engine. ---


class Listening(Engine):
    """Keeps each row that was judged and whose token was taken. Its pool is full of NaN."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.kv.k.fill_(torch.nan)
        self.kv.v.fill_(torch.nan)
        self.rows = []

    def step(self):
        written = super().step()
        self.blocks.check_integrity(r.block_table for r in self.scheduler.running)
        for request in self.scheduler.waiting:
            assert not request.draft, "a waiting request keeps guesses"
            assert request.num_computed == 0, "a waiting request has rows"
        for request in self.scheduler.running:
            assert request.num_computed <= len(request.tokens) - 1, "rejected rows became past"
        return written

    def write(self, request, logits):
        start, draft = len(request.tokens), request.draft
        assert draft == request.proposal.ids[: len(draft)], "guesses are given up from the end"
        written = super().write(request, logits)
        self.rows.append((request, start, logits[: len(written)].clone()))
        return written


def run(engine: Engine) -> None:
    for _ in engine.stream():
        pass
    assert engine.idle
    engine.blocks.check_integrity([])
    inner = getattr(engine.drafter, "inner", engine.drafter)
    for name in ("caches", "memories", "stores"):
        assert not getattr(inner, name, None), "the drafter remembers a finished text"


def require_the_same_rows(engine: Listening) -> None:
    texts = {}
    for request, start, rows in engine.rows:
        if request not in texts:
            texts[request] = naive(request.tokens)[1]
        error = (rows - texts[request][start - 1 : start - 1 + len(rows)]).abs().max() if len(rows) else 0
        assert error <= TOLERANCE, f"the logits after {start} tokens are off by {error}"


def workload() -> list[tuple[list[int], int]]:
    """(prompt, max_tokens): ragged, many begin alike, and some repeat themselves."""
    rnd = random.Random(3)
    base = [rnd.randrange(37) for _ in range(16)]
    result = []
    for _ in range(7):
        own = [rnd.randrange(37) for _ in range(rnd.randint(0, 7))]
        result.append((base[: rnd.choice([1, 6, 12, 16])] + own, rnd.randint(1, 20)))
    return [*result, ([4, 5, 6] * 5, 18), (base, 18)]


WORKLOAD = workload()
POOLS = {"ample": 400, "forcing": 48}


def serve(name: str, block_size: int, budget: int, sharing: bool, pool: str, k: int = 3) -> Listening:
    """The workload, with samples of one prompt and a text that is given up. Texts must be the greedy ones."""
    watching = Watching({**DRAFTERS, "slips": lambda: Knowing(True)}[name]())
    engine = Listening(MODEL, None, POOLS[pool] // block_size, block_size, 5, budget, sharing, drafter=watching, k=k)
    requests = [engine.add(prompt, replace(GREEDY, max_tokens=n)) for prompt, n in WORKLOAD[:6]]
    requests += engine.add_samples([*WORKLOAD[-1][0], 5], 3, replace(GREEDY, max_tokens=18))
    sampled = engine.add([9, 9, 9], SamplingParams(temperature=0.8, top_k=5, seed=3, max_tokens=16))
    for _ in range(6):
        engine.step()
    requests += [engine.add(prompt, replace(GREEDY, max_tokens=n)) for prompt, n in WORKLOAD[6:]]  # join later
    given_up = engine.add(WORKLOAD[0][0], replace(GREEDY, max_tokens=20), priority=1)
    for _ in range(5):
        engine.step()
    written = len(given_up.pieces)
    engine.abort(given_up)
    run(engine)
    for request in requests:
        require_greedy(request.writer.prompt, request.generation)
        assert len(request.generation.tokens) == request.writer.params.max_tokens
        assert request.finish_reason == "length"
    assert len(sampled.pieces) == 16
    assert len(given_up.pieces) == written
    require_the_same_rows(engine)
    assert watching.met["guesses"] > 0
    return engine


SETTINGS = [
    (1, 64, True, "forcing"),
    (1, 7, False, "ample"),
    (3, 7, True, "forcing"),
    (3, 64, True, "ample"),
    (16, 7, True, "ample"),
    (16, 64, False, "forcing"),
]


@pytest.mark.parametrize(("block_size", "budget", "sharing", "pool"), SETTINGS)
@pytest.mark.parametrize("name", [*DRAFTERS, "slips"])
def test_every_judged_row_equals_the_naive_pass_of_its_text_alone(name, block_size, budget, sharing, pool):
    met = serve(name, block_size, budget, sharing, pool).scheduler.met
    assert (met["preemptions"] > 0) == (pool == "forcing")
    assert (met["drafts given up"] > 0) == (pool == "forcing")
    assert (met["cache hits"] > 0) == sharing
    if budget < 64:
        assert met["chunks"] > 0


@pytest.mark.parametrize(("k", "budget"), [(1, 16), (8, 16), (3, 1)])
def test_long_and_short_rounds_share_a_small_pool(k, budget):
    serve("a near model", 3, budget, True, "forcing", k)


def test_a_sampled_text_of_the_engine_is_that_of_its_seed():
    texts = []
    for seed in (1, 1, 2):
        engine = Listening(MODEL, None, 60, 4, drafter=ModelDrafter(NEAR))
        request = engine.add(PROMPTS[1], SamplingParams(temperature=0.8, seed=seed, max_tokens=24))
        run(engine)
        texts.append(request.generation.tokens)
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_drafter_that_can_choose_nothing_guesses_nothing_and_hurts_nobody(temperature):
    broken = random_model(seed=1)
    broken.norm.weight.fill_(torch.nan)
    engine = Listening(MODEL, None, 60, 4, drafter=ModelDrafter(broken))
    requests = [engine.add(prompt, replace(GREEDY, temperature=temperature, seed=0)) for prompt in PROMPTS]
    run(engine)
    for request in requests:
        assert request.finish_reason == "length"
        plain = generation.generate(MODEL, None, request.writer.prompt, request.writer.params)
        assert request.generation.tokens == plain.tokens  # without a guess the random numbers are the same too


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_text_that_cannot_go_on_ends_with_its_sentence_and_the_others_go_on(name):
    """All tokens are barred from the fourth on: no drafter can guess there, and the model cannot choose."""

    class Barred(Writer):
        def distribution(self, logits, guesses=()):
            return super().distribution(self.bar(logits, guesses), guesses)

        def choose(self, logits, guesses=()):
            return super().choose(self.bar(logits, guesses), guesses)

        def bar(self, logits, guesses):
            return logits - torch.inf if len(self.output) + len(guesses) >= 3 else logits

    engine = Listening(MODEL, None, 60, 4, drafter=DRAFTERS[name]())
    other, barred = (engine.add(prompt, GREEDY) for prompt in PROMPTS)
    barred.writer.__class__ = Barred
    run(engine)
    assert (barred.finish_reason, len(barred.pieces)) == ("error", 3)
    assert "no token can be chosen" in barred.error
    require_greedy(PROMPTS[0], other.generation)


# --- The end, wherever in a round it comes. ---

ENDS = {
    **{f"max_tokens {n}": {"max_tokens": n} for n in (0, 1, 2, 3, 5, 8, 9, 10)},
    **{f"end token at {n}": {"stop_ids": n} for n in (0, 1, 2, 4, 7, 8)},  # replaced by the token at this place
    **{f"stop string at {n}": {"stop": n} for n in (0, 1, 4, 7)},
    "barred end token": {"stop_ids": 3, "min_tokens": 6},
    "context": {"max_tokens": 60},
}


def ending(name: str) -> tuple[list[int], SamplingParams]:
    """A prompt, and rules that end its text in the middle of a round."""
    rnd = random.Random(8)
    prompt = [rnd.randrange(37) for _ in range(TINY.max_context - 12 if name == "context" else 9)]
    wanted = dict(ENDS[name])
    plain = generation.generate(MODEL, None, prompt, SamplingParams(temperature=0, max_tokens=12)).tokens
    if "stop_ids" in wanted:
        wanted["stop_ids"] = plain[wanted["stop_ids"]]
    if "stop" in wanted:
        wanted["stop"] = LETTERS.decode(plain[wanted["stop"] : wanted["stop"] + 2])
    return prompt, SamplingParams(**{"temperature": 0, "max_tokens": 30, "logprobs": 2, **wanted})


def require_equal(done: Generation, plain: Generation) -> None:
    """But for the times."""
    close = [pytest.approx(each, abs=TOLERANCE) for each in plain.logprobs]
    assert replace(done, seconds=[], logprobs=None, top_logprobs=None) == replace(
        plain, seconds=[], logprobs=None, top_logprobs=None
    )
    assert done.logprobs == close
    for ours, theirs in zip(done.top_logprobs, plain.top_logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=TOLERANCE)
    assert len(done.seconds) == len(done.tokens)


@pytest.mark.parametrize(("slips", "k"), [(False, 3), (False, 8), (True, 3)])
@pytest.mark.parametrize("name", ENDS)
def test_a_text_ends_where_it_ends_without_guesses(name, slips, k):
    prompt, params = ending(name)
    plain = generation.generate(MODEL, LETTERS, prompt, params)
    if name != "barred end token":
        assert plain.finish_reason == {"m": "length", "e": "stop", "s": "stop", "c": "context"}[name[0]]
    for store in STORES:
        kv = ContiguousKV(TINY, 128, torch.float64) if store == "cached" else NoCache()
        watching = Watching(Knowing(slips))
        require_equal(speculative.generate(MODEL, LETTERS, prompt, watching, params, kv, k), plain)
        pieces = list(stream(MODEL, LETTERS, prompt, Watching(Knowing(slips)), params, k=k))
        assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert "".join(piece.text for piece in pieces) == plain.text
    engine = Listening(MODEL, LETTERS, 80, 4, drafter=Watching(Knowing(slips)), k=k)
    request = engine.add(prompt, params)
    other = engine.add(PROMPTS[1], GREEDY)
    while request.finish_reason is None:
        engine.step()
    if name != "max_tokens 0":
        assert request.block_table == []
    run(engine)
    require_equal(request.generation, plain)
    require_greedy(PROMPTS[1], other.generation)
    require_the_same_rows(engine)


def test_a_store_that_ends_before_the_context_ends_the_text():
    kv = ContiguousKV(TINY, 20, torch.float64)
    done = speculative.generate(MODEL, None, PROMPTS[1], Watching(Knowing()), replace(GREEDY, max_tokens=40), kv, 8)
    assert (len(done.tokens), done.finish_reason) == (12, "context")
    require_greedy(PROMPTS[1], done)


def test_a_store_with_the_beginning_of_the_prompt_goes_on_from_there():
    for name in DRAFTERS:
        kv = rows_of(PROMPTS[1][:5])
        room = ContiguousKV(TINY, 40, torch.float64)
        room.k[:, :, :5], room.v[:, :, :5], room.length = kv.k, kv.v, 5
        require_greedy(PROMPTS[1], speculative.generate(MODEL, None, PROMPTS[1], DRAFTERS[name](), GREEDY, room))


def test_a_text_left_in_the_middle_is_released():
    watching = Watching(ModelDrafter(NEAR))
    pieces = stream(MODEL, None, PROMPTS[0], watching, GREEDY)
    for _ in range(5):
        next(pieces)
    pieces.close()
    assert watching.met["released"] == 1
    assert not watching.inner.caches


@pytest.mark.parametrize("seen", range(1, 9))
def test_a_stream_left_inside_a_round_leaves_a_store_to_go_on_with(seen):
    """It holds what the caller has seen but for the last token, though the round had decided more."""
    kv, prompt = ContiguousKV(TINY, 60, torch.float64), PROMPTS[1]
    pieces = stream(MODEL, None, prompt, Knowing(), GREEDY, kv, k=4)
    tokens = [next(pieces).token for _ in range(seen)]
    pieces.close()
    assert kv.length == len(prompt) + seen - 1
    longer = [*prompt, *tokens, 7, 8, 9, 10, 11]
    require_greedy(longer, speculative.generate(MODEL, None, longer, NgramDrafter(), GREEDY, kv))


def test_a_store_that_is_used_for_another_text_meanwhile_is_noticed():
    kv = ContiguousKV(TINY, 60, torch.float64)
    first, second = (stream(MODEL, None, prompt, NgramDrafter(), GREEDY, kv) for prompt in PROMPTS)
    next(first)
    with pytest.raises(ValueError, match="used for another text meanwhile"):
        next(second)
    next(first)  # the first is not hurt
    kv.truncate(0)
    with pytest.raises(ValueError, match="used for another text meanwhile"):
        list(first)


# --- What the drafters guess. ---


def made(tokens: list[int], params: SamplingParams = GREEDY, limit: int = 128) -> Writer:
    """A text that has come so far."""
    writer = Writer(None, tokens[:1], params, limit)
    writer.tokens += tokens[1:]
    return writer


def looked_up(tokens: list[int], most: int, least: int, count: int) -> list[int]:
    """The definition of prompt lookup, slowly: of all earlier places that end like the text, the one with the longest
    end, and of these the last."""
    places = [
        (n, end)
        for n in range(least, most + 1)
        for end in range(n, len(tokens))
        if n < len(tokens) and tokens[end - n : end] == tokens[len(tokens) - n :]
    ]
    return tokens[max(places)[1] :][:count] if places else []


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=14),
    least=st.integers(1, 3),
    more=st.integers(0, 3),
    count=st.integers(0, 6),
)
def test_the_n_gram_drafter_guesses_what_followed_the_longest_ending(tokens, least, more, count):
    drafter = NgramDrafter(least + more, least)
    (proposal,) = drafter.propose([made(tokens)], [count])
    assert proposal == Proposal(looked_up(tokens, least + more, least, count))


def test_n_gram_examples():
    assert NgramDrafter().look_up([1, 2, 3, 4, 1, 2, 3], 3) == [4, 1, 2]
    assert NgramDrafter().look_up([1, 2, 9, 1, 2, 8, 1, 2], 1) == [8]  # the last place
    assert NgramDrafter(most=1).look_up([5, 5, 5], 9) == [5]  # what followed is the end itself
    assert NgramDrafter(least=2).look_up([1, 7, 2, 7], 3) == []


def continued(model: Transformer, tokens: list[int], count: int) -> list[int]:
    """The greedy text of a model, from a fresh pass for each token."""
    text = list(tokens)
    for _ in range(count):
        text.append(int(naive(text, model)[1][-1].argmax()))
    return text[len(tokens) :]


def test_a_model_drafter_guesses_its_models_greedy_text_wherever_the_text_has_turned():
    """Texts grow by some of the guesses, and then otherwise, at random; other texts are guessed in between."""
    rnd = random.Random(4)
    for drafter, model in ((ModelDrafter(OTHER), OTHER), (LayerSkipDrafter(MODEL, 1), first_layers(MODEL, 1))):
        watching = Watching(drafter)
        writers = [made([rnd.randrange(37) for _ in range(n)]) for n in (1, 4, 9)]
        for _ in range(12):
            some = rnd.sample(writers, rnd.randint(1, 3))
            counts = [rnd.randint(0, 4) for _ in some]
            for writer, count, proposal in zip(some, counts, watching.propose(some, counts), strict=True):
                assert proposal.ids == continued(model, writer.tokens, count)
                right = rnd.randint(0, len(proposal.ids))
                writer.tokens += [*proposal.ids[:right], *(rnd.randrange(37) for _ in range(rnd.randint(1, 2)))]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(old=st.lists(st.integers(0, 2), max_size=9), text=st.lists(st.integers(0, 2), min_size=1, max_size=9))
def test_a_rewound_cache_holds_the_longest_common_beginning_but_never_the_whole_text(old, text):
    cache = Cache(ContiguousKV(TINY, 12, torch.float64), list(old))
    cache.kv.commit(len(old))
    cache.rewind(text)
    same = next((i for i in range(len(old)) if old[: i + 1] != text[: i + 1]), len(old))
    assert cache.tokens == text[: min(same, len(text) - 1)]
    assert cache.kv.length == len(cache.tokens)


def drawn(drafter, writers: list[Writer], counts: list[int]) -> list[tuple[list[int], torch.Tensor | None]]:
    return [(p.ids, p.probabilities) for p in drafter.propose(writers, counts)]


def three_writers() -> list[Writer]:
    rules = ({"temperature": 0}, {"temperature": 0.9, "top_k": 9}, {"temperature": 1.3, "top_p": 0.8})
    texts = ([4, 5, 6, 7], [9], [1, 2, 3, 1, 2, 3, 8, 9, 9, 1])
    return [made(list(t), SamplingParams(seed=i, max_tokens=60, **rules[i])) for i, t in enumerate(texts)]


@pytest.mark.parametrize("name", DRAFTERS)
def test_texts_guessed_together_get_what_each_gets_alone(name):
    together, alone = DRAFTERS[name](), DRAFTERS[name]()
    for drafter, writers in ((together, three_writers()), (alone, three_writers())):
        for writer in writers:
            drafter.observe(writer, 0, naive(writer.tokens)[0][:-1])
        counts = [4, 0, 3] if name == "features" else [4, 2, 3]  # a text of one token has no row yet
        if drafter is together:
            found = drawn(drafter, writers, counts)
        else:
            wanted = [drawn(drafter, [w], [n])[0] for w, n in zip(writers, counts, strict=True)]
    assert [len(ids) for ids, _ in found] == counts or name == "n-gram"
    for (ids, q), (own_ids, own_q) in zip(found, wanted, strict=True):
        assert ids == own_ids
        assert (q is None) == (own_q is None)
        if q is not None:
            assert (q - own_q).abs().max() <= TOLERANCE


def test_the_probabilities_are_those_of_the_drafters_rows_under_the_texts_rules():
    """With penalties on what was guessed before, and end tokens barred until enough is written."""
    params = SamplingParams(
        temperature=0.7, top_k=6, presence_penalty=2.0, seed=5, stop_ids=(35, 7), min_tokens=5, max_tokens=30
    )
    writer = made([4, 35, 6, 7], params)
    (proposal,) = ModelDrafter(OTHER).propose([writer], [4])
    for i, row in enumerate(proposal.probabilities):
        logits = naive(writer.tokens + proposal.ids[:i], OTHER)[1][-1]
        fresh = made([4, 35, 6, 7], params).distribution(logits, proposal.ids[:i])
        assert (row - fresh).abs().max() <= TOLERANCE
        assert row[proposal.ids[i]] > 0
        assert not (3 + i < 5 and (row[35] or row[7])), "an end token is barred until then"


def test_a_drafter_with_a_shorter_context_stops_guessing_there():
    short = random_model(replace(TINY, max_context=20), seed=1)
    watching = Watching(ModelDrafter(short))
    writer = made(list(range(18)))
    assert [len(p.ids) for p in watching.propose([writer], [5])] == [2]
    writer.tokens += [1, 2, 3]
    assert watching.propose([writer], [5]) == [Proposal()]
    done = speculative.generate(MODEL, None, PROMPTS[1], Watching(ModelDrafter(short)), replace(GREEDY, max_tokens=30))
    require_greedy(PROMPTS[1], done)
    engine = Listening(MODEL, None, 40, 4, drafter=Watching(ModelDrafter(short)))
    request = engine.add(PROMPTS[1], replace(GREEDY, max_tokens=30))
    run(engine)
    require_greedy(PROMPTS[1], request.generation)


def test_the_first_layers_are_the_models_own_weights_and_rows():
    part = first_layers(MODEL, 1)
    assert part.config == replace(TINY, n_layers=1)
    theirs = {id(p) for p in MODEL.parameters()}
    assert all(id(p) in theirs for p in part.parameters())
    x = MODEL.embed(torch.tensor(PROMPTS[1]))
    rope = MODEL.rope(torch.arange(len(x)), x.dtype)
    store = NoCache()
    x = MODEL.blocks[0](x, rope, lambda q, k, v: store.attend(0, q, k, v))
    assert torch.equal(naive(PROMPTS[1], part)[1], MODEL.head(MODEL.norm(x)))


@torch.inference_mode()
def test_a_cache_of_the_first_layers_shares_memory_and_counts_for_itself():
    kv = rows_of(PROMPTS[1])
    part = kv.first_layers(1)
    assert (part.length, part.k.shape[0]) == (8, 1)
    part.truncate(3)
    part.k[0, :, 5] = 7.0
    assert kv.length == 8
    assert (kv.k[0, :, 5] == 7.0).all()


# --- The feature drafter, against its definition. ---


@torch.inference_mode()
def feature_guesses(tokens: list[int], start: int, count: int) -> list[int]:
    """What it guesses greedily after `tokens`, if it has seen the rows from `start` on: all computed anew each time."""
    hidden = naive(tokens)[0][start : len(tokens) - 1]
    ids = []
    for _ in range(count):
        following = torch.tensor([*tokens, *ids])[start + 1 :]
        places = torch.arange(start, start + len(hidden))
        predicted = FEATURES(hidden, MODEL.embed(following), places, NoCache())[-1:]
        scores = predicted @ MODEL.head.weight[FEATURES.vocabulary].T
        ids.append(int(FEATURES.vocabulary[scores[0].argmax()]))
        hidden = torch.cat([hidden, predicted])
    return ids


def show(drafter: FeatureDrafter, writer: Writer, start: int, end: int) -> None:
    drafter.observe(writer, start, naive(writer.tokens)[0][start:end])


def test_a_feature_drafter_guesses_what_its_definition_says_round_after_round():
    rnd = random.Random(2)
    drafter, writer, seen, texts = FeatureDrafter(MODEL, FEATURES), made([3, 1, 4, 1, 5, 9]), 0, set()
    for _ in range(14):
        while seen < len(writer.tokens) - 1:  # the rows come in any portions
            end = rnd.randint(seen + 1, len(writer.tokens) - 1)
            show(drafter, writer, seen, end)
            seen = end
        if rnd.random() < 0.2:  # a round without guesses: the rows wait
            writer.tokens.append(rnd.randrange(37))
            continue
        count = rnd.randint(1, 5)
        (proposal,) = drafter.propose([writer], [count])
        assert proposal.ids == feature_guesses(writer.tokens, 0, count)
        assert set(proposal.ids) <= set(FEATURES.vocabulary.tolist())
        texts.add(tuple(proposal.ids[:1]))
        assert drafter.memories[writer].cached == len(writer.tokens) - 1, "predicted rows became past"
        writer.tokens += [*proposal.ids[: rnd.randint(0, count)], rnd.randrange(37)]
    assert len(texts) > 3


def test_a_feature_drafter_begins_anew_after_a_gap_and_after_a_step_back():
    drafter, writer = FeatureDrafter(MODEL, FEATURES), made([3, 1, 4, 1, 5, 9, 2, 6])
    show(drafter, writer, 3, 7)  # the first rows were found in a shared cache
    assert drafter.propose([writer], [3])[0].ids == feature_guesses(writer.tokens, 3, 3)
    writer.tokens += [5, 3, 5]
    show(drafter, writer, 8, 10)  # one row is missing
    assert drafter.propose([writer], [3])[0].ids == feature_guesses(writer.tokens, 8, 3)
    writer.tokens.append(8)
    show(drafter, writer, 0, 6)  # a preemption: all is computed again, in two chunks
    assert drafter.propose([writer], [3]) == [Proposal()], "it has not seen the last rows"
    show(drafter, writer, 6, 11)
    assert drafter.propose([writer], [3])[0].ids == feature_guesses(writer.tokens, 0, 3)


def test_a_feature_drafter_that_has_seen_nothing_new_guesses_nothing():
    drafter, writer = FeatureDrafter(MODEL, FEATURES), made([3, 1, 4, 1])
    assert drafter.propose([writer], [3]) == [Proposal()]
    show(drafter, writer, 0, 3)
    assert len(drafter.propose([writer], [3])[0].ids) == 3
    assert drafter.propose([writer], [3]) == [Proposal()]
    writer.tokens += [5, 9]
    show(drafter, writer, 3, 4)
    assert drafter.propose([writer], [3]) == [Proposal()]


def test_tokens_outside_the_short_vocabulary_have_no_probability():
    drafter, writer = FeatureDrafter(MODEL, FEATURES), made([3, 1, 4], SamplingParams(seed=0, temperature=3.0))
    show(drafter, writer, 0, 2)
    (proposal,) = drafter.propose([writer], [4])
    outside = [i for i in range(37) if i not in FEATURES.vocabulary]
    assert (proposal.probabilities[:, outside] == 0).all()
    assert torch.allclose(proposal.probabilities.sum(-1).double(), torch.ones(4, dtype=torch.float64), atol=1e-6)


def test_guesses_of_the_feature_drafter_in_the_engine_are_those_of_its_definition():
    """Whole prompts without sharing: it has seen every row, also after it was preempted."""

    class Comparing(Watching):
        def propose(self, writers, counts):
            proposals = super().propose(writers, counts)
            for writer, count, proposal in zip(writers, counts, proposals, strict=True):
                if proposal.ids:
                    assert proposal.ids == feature_guesses(writer.tokens, 0, count)
                    self.met["compared"] += 1
            return proposals

    drafter = Comparing(FeatureDrafter(MODEL, FEATURES))
    engine = Listening(MODEL, None, 16, 3, 4, 9, sharing=False, drafter=drafter)
    for prompt, n in WORKLOAD[:5]:
        engine.add(prompt, replace(GREEDY, max_tokens=n))
    run(engine)
    assert engine.scheduler.met["preemptions"] > 0
    assert drafter.met["compared"] > 15


# --- Weights on disk. ---


def test_a_saved_drafter_guesses_as_the_one_in_memory(tmp_path):
    save(FEATURES, tmp_path / "drafter.safetensors")
    loaded = load_drafter(MODEL, tmp_path / "drafter.safetensors")
    assert loaded.features.join.weight.dtype == MODEL.dtype and not any(
        p.requires_grad for p in loaded.features.parameters()
    )
    for name, values in loaded.features.state_dict().items():
        assert torch.allclose(values, FEATURES.state_dict()[name].to(values.dtype), rtol=1e-3), name
    rounded = FeatureModel(TINY, FEATURES.vocabulary, dtype=torch.float64)
    rounded.load_state_dict({k: v.half() if v.is_floating_point() else v for k, v in FEATURES.state_dict().items()})
    writer, rows = made([3, 1, 4, 1, 5]), 0.3 * torch.randn(4, TINY.d_model, dtype=torch.float64)
    guesses = []
    for drafter in (loaded, FeatureDrafter(MODEL, rounded)):
        drafter.observe(writer, 0, rows)
        guesses.append(drafter.propose([writer], [4])[0].ids)
    assert guesses[0] == guesses[1] and len(guesses[0]) == 4


@pytest.mark.parametrize("supported", [True, False])
def test_on_a_cpu_with_16_bit_products_it_guesses_by_them(supported, monkeypatch, tmp_path):
    save(FEATURES, tmp_path / "drafter.safetensors")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported, raising=False)
    models = {dtype: random_model().to(dtype) for dtype in (torch.float64, torch.float32, torch.float16)}
    chosen = {d: load_drafter(m, tmp_path / "drafter.safetensors").dtype for d, m in models.items()}
    assert chosen == {d: torch.bfloat16 if supported and d == torch.float32 else d for d in models}


def test_a_drafter_in_16_bits_changes_no_text(tmp_path):
    """And hardly a guess: the differences of its logits are those of rounding."""
    save(FEATURES, tmp_path / "drafter.safetensors")
    model = random_model().to(torch.float32)
    exact, rounded = (load_drafter(model, tmp_path / "drafter.safetensors", t) for t in (torch.float32, torch.bfloat16))
    assert (exact.head.weight.dtype, rounded.head.weight.dtype) == (torch.float32, torch.bfloat16)
    rows = torch.randn(40, TINY.d_model, generator=torch.Generator().manual_seed(0))
    error = (rounded.logits(rows.bfloat16()) - exact.logits(rows))[:, FEATURES.vocabulary].abs()
    assert 0 < float(error.max()) < 0.05 * float(exact.logits(rows)[:, FEATURES.vocabulary].abs().max())
    for prompt in PROMPTS:
        text = speculative.generate(model, None, prompt, watched := Watched(rounded), GREEDY, k=3)
        assert text.tokens == generation.generate(model, None, prompt, GREEDY).tokens
        assert any(r.guesses for r in watched.rounds)


def test_a_file_that_is_no_drafter_for_the_model_is_refused(tmp_path):
    good, file = FEATURES.state_dict(), tmp_path / "drafter.safetensors"
    wide = FeatureModel(replace(TINY, d_model=12), torch.arange(5)).state_dict()
    for weights, sentence in (
        (wide, "is no drafter for this model: size mismatch"),
        ({k: v for k, v in good.items() if k != "norm.weight"}, "no drafter for this model: Missing key.*norm.weight"),
        ({k: v for k, v in good.items() if k != "vocabulary"}, "no drafter for a vocabulary of 37 tokens"),
        (good | {"vocabulary": good["vocabulary"] + TINY.vocab_size}, "no drafter for a vocabulary of 37 tokens"),
        (good | {"vocabulary": -good["vocabulary"]}, "no drafter for a vocabulary of 37 tokens"),
        (good | {"vocabulary": good["vocabulary"][:0]}, "no drafter for a vocabulary of 37 tokens"),
        (good | {"vocabulary": good["vocabulary"].float()}, "no drafter for a vocabulary of 37 tokens"),
    ):
        save_file({k: v.contiguous() for k, v in weights.items()}, file)
        with pytest.raises(ValueError, match=sentence):
            load_drafter(MODEL, file)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="is damaged or no safetensors file"):
        load_drafter(MODEL, file)
    with pytest.raises(OSError):
        load_drafter(MODEL, tmp_path / "nothing.safetensors")
    with pytest.raises(ValueError, match="no drafter for a vocabulary of 37 tokens"):
        load_drafter(MODEL)  # the package's own is for SmolLM2
    for dtype in ("bfloat16", torch.int8, torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match="dtype must be one of"):
            load_drafter(MODEL, dtype=dtype)
    with pytest.raises(ValueError, match=r"a Transformer, as minillm.load\(\) gives, not tuple"):
        load_drafter((MODEL, None))


# --- Errors, and the formulas. ---

WRONG = {
    "k of 0": (lambda: stream(MODEL, None, [1], NgramDrafter(), k=0), "k must be"),
    "k of 0, to the end": (lambda: speculative.generate(MODEL, None, [1], NgramDrafter(), k=0), "k must be"),
    "k of 0 in the engine": (lambda: Engine(MODEL, drafter=NgramDrafter(), k=0), "k must be"),
    "half a k": (lambda: stream(MODEL, None, [1], NgramDrafter(), k=1.5), "k must be"),
    "no layer": (lambda: LayerSkipDrafter(MODEL, 0), "n_layers must be"),
    "all layers": (lambda: LayerSkipDrafter(MODEL, 2), "n_layers must be below the model's 2, not 2"),
    "least above most": (lambda: NgramDrafter(2, 3), r"least \(3\) must not be above most \(2\)"),
    "least of 0": (lambda: NgramDrafter(2, 0), "least must be"),
    "another width": (
        lambda: FeatureDrafter(MODEL, FeatureModel(replace(TINY, d_model=12), torch.arange(5))),
        "hidden rows of 12 numbers, the model's have 24",
    ),
    "an empty prompt": (lambda: stream(MODEL, None, [], NgramDrafter()), "the prompt is empty"),
    "params in a dict": (lambda: stream(MODEL, None, [1], NgramDrafter(), {}), "params must be SamplingParams"),
    "text without a tokenizer": (lambda: stream(MODEL, None, "a", NgramDrafter()), "needs a tokenizer"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_get_their_sentence_at_the_call(name):
    make, sentence = WRONG[name]
    with pytest.raises(ValueError, match=sentence):
        make()


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
def test_the_expected_tokens_of_a_round_are_those_of_many_rounds(alpha, k):
    n = 40_000
    right = torch.rand(n, k, generator=torch.Generator().manual_seed(k)) < alpha
    tokens = 1 + right.long().cumprod(-1).sum(-1).double()
    error = 5 * float(tokens.std()) / n**0.5  # five standard errors
    assert abs(expected_tokens(alpha, k) - float(tokens.mean())) <= error + 1e-12
    closed = k + 1 if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)
    assert expected_tokens(alpha, k) == pytest.approx(closed, rel=1e-12)


def test_the_speed_up_is_tokens_by_cost():
    assert speedup(0.0, 3, 0.0, 1.0) == 1
    assert speedup(1.0, 3, 0.0, 1.0) == 4
    assert speedup(0.5, 2, 0.25, 1.25) == 1.0
    assert speedup(0.0, 4, 0.1, 1.6) == 0.5


# --- The text's own part: the writer, and what a call begins with. ---


def test_a_writer_counts_the_tokens_that_are_left():
    writer = Writer(None, [1, 2, 3], SamplingParams(max_tokens=6), 100)
    assert writer.left == 6
    writer.append(5)
    assert writer.left == 5
    assert Writer(None, [1, 2, 3], SamplingParams(max_tokens=6), 7).left == 4


def test_to_choose_changes_nothing_and_to_take_appends():
    logits = naive([1, 2, 3])[1][-1]
    params = SamplingParams(temperature=1.5, seed=3, presence_penalty=3.0, logprobs=2)
    writer, twin = (Writer(None, [1, 2, 3], params, 100) for _ in range(2))
    token = writer.choose(logits)
    assert writer.tokens == [1, 2, 3]
    piece = writer.take(token, logits, 0.5)
    assert twin.write(logits, 0.5) == piece
    assert (writer.tokens, piece.token, piece.seconds) == ([1, 2, 3, token], token, 0.5)
    assert piece.logprob == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-12)


def test_guesses_count_as_written_for_penalties_and_for_min_tokens():
    logits = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)
    penalties = SamplingParams(presence_penalty=1.5)
    writer = Writer(None, [0], penalties, 100)
    plain, after = writer.distribution(logits), writer.distribution(logits, [0])
    assert torch.allclose(plain, logits.softmax(-1))
    assert torch.allclose(after, (logits - torch.tensor([1.5, 0, 0])).softmax(-1))
    assert Writer(None, [0], replace(penalties, temperature=0), 100).choose(logits, [0]) == 1
    late = Writer(None, [0], SamplingParams(stop_ids=0, min_tokens=2), 100)
    assert late.distribution(logits, [1])[0] == 0
    assert late.distribution(logits, [1, 1])[0] > 0


def test_a_call_begins_with_a_writer_and_a_store_of_the_size_needed():
    writer, kv = generation.begin(MODEL, None, [1, 2, 3], SamplingParams(max_tokens=9), None)
    assert (writer.tokens, writer.limit, kv.capacity, kv.length) == ([1, 2, 3], 12, 12, 0)
    own = ContiguousKV(TINY, 7, torch.float64)
    writer, kv = generation.begin(MODEL, None, [1, 2, 3], None, own)
    assert kv is own
    assert (writer.limit, writer.params) == (7, SamplingParams())
    own.commit(3)
    with pytest.raises(ValueError, match="nothing to compute"):
        generation.begin(MODEL, None, [1, 2, 3], None, own)


# --- The properties reject planted mistakes. Each takes monkeypatch. ---


def stale_cache(patch):
    """What was rejected stays: only the length is right."""

    def rewind(self, tokens):
        length = min(len(self.tokens), len(tokens) - 1)
        self.kv.truncate(length)
        del self.tokens[length:]

    patch.setattr(Cache, "rewind", rewind)


def stale_rows(patch):
    """The tokens are forgotten, their rows are not."""
    real = Cache.rewind

    def rewind(self, tokens):
        length = self.kv.length
        real(self, tokens)
        self.kv.length = length

    patch.setattr(Cache, "rewind", rewind)


def lost_first_token(patch):
    real = Writer.take

    def take(self, token, logits, seconds=0.0):
        piece = real(self, token, logits, seconds)
        if len(self.output) == 1 and not self.finish_reason:
            del self.tokens[-1]
            self.tokens.append(int(logits.topk(2).indices[1]))
        return piece

    patch.setattr(Writer, "take", take)


def rejected_rows_are_kept(patch):
    real = ContiguousKV.commit
    patch.setattr(ContiguousKV, "commit", lambda self, n: real(self, n + (self.length > 0 and n < 3)))


def rejected_rows_are_kept_by_the_engine(patch):
    real = Scheduler.computed

    def computed(self, request, n):
        real(self, request, n)
        request.num_computed += bool(request.pieces)

    patch.setattr(Scheduler, "computed", computed)


def observed_off_by_one(patch):
    real = Watching.observe
    patch.setattr(Watching, "observe", lambda self, writer, start, hidden: real(self, writer, start + 1, hidden))


def observed_without_the_last(patch):
    real = Watching.observe
    patch.setattr(Watching, "observe", lambda self, writer, start, hidden: real(self, writer, start, hidden[:-1]))


def the_first_guesses_are_given_up(patch):
    """Then the others stand at the wrong place, and beside the wrong distribution."""
    real = Scheduler.cut_guesses

    def cut_guesses(self, now):
        old = {request: list(request.draft) for request in self.running}
        real(self, now)
        for request, draft in old.items():
            request.draft = draft[len(draft) - len(request.draft) :]

    patch.setattr(Scheduler, "cut_guesses", cut_guesses)


def guesses_of_another_text(patch):
    real = ModelDrafter.feed
    patch.setattr(ModelDrafter, "feed", lambda self, drafts: real(self, drafts).roll(1, 0))


def draft_kept_after_a_preemption(patch):
    real = Scheduler.give_back

    def give_back(self, request):
        draft = request.draft
        real(self, request)
        request.draft = draft

    patch.setattr(Scheduler, "give_back", give_back)


def tokens_after_the_end(patch):
    def verify(writer, logits, proposal, seconds=0.0):
        for i, row in enumerate(logits):
            token, right = writer.choose(row), False
            if i < len(proposal.ids):
                right = token == proposal.ids[i]
            yield writer.take(token, row, seconds)
            if not right:
                return

    patch.setattr(speculative, "verify", verify)


def judged_by_the_row_before(patch):
    real = speculative.verify
    patch.setattr(speculative, "verify", lambda w, logits, p, s=0.0: real(w, logits.roll(1, 0), p, s))


def a_last_guess_that_is_not_fed(patch):
    """After a round in which all was accepted, the last guess's row is missing."""
    real = ContiguousKV.attend

    def attend(self, layer, q, k, v):
        out = real(self, layer, q, k, v)
        if self.length and len(k) > 2:
            self.k[layer, :, self.length + len(k) - 1] = 0.0
        return out

    patch.setattr(ContiguousKV, "attend", attend)


def predicted_rows_become_past(patch):
    real = ContiguousKV.truncate
    patch.setattr(ContiguousKV, "truncate", lambda self, n: None if self.k.shape[0] == 1 and n else real(self, n))


def features_of_the_wrong_token(patch):
    real = FeatureDrafter.feed

    def feed(self, drafts, rows):
        moved = [replace(draft, writer=draft.writer) for draft in drafts]
        for draft in moved:
            draft.ids = [*draft.ids[:-1], 0] if draft.ids else []
        return real(self, moved, rows)

    patch.setattr(FeatureDrafter, "feed", feed)


def alone_near():
    write_alone("a near model", "cached", 3)


def alone_slips():
    write_alone("slips", "cached", 3)


def in_the_engine():
    serve("slips", 3, 7, True, "forcing")


def ends():
    test_a_text_ends_where_it_ends_without_guesses("end token at 4", False, 8)


MUTANTS = {
    "the drafter's cache keeps what was rejected": (
        stale_cache,
        test_a_model_drafter_guesses_its_models_greedy_text_wherever_the_text_has_turned,
    ),
    "the drafter's rows are never rewound": (stale_rows, alone_near),
    "the first token is lost": (lost_first_token, alone_slips),
    "rejected rows are kept": (rejected_rows_are_kept, alone_slips),
    "rejected rows are kept by the engine": (rejected_rows_are_kept_by_the_engine, in_the_engine),
    "rows are observed one place off": (observed_off_by_one, alone_slips),
    "the last row is not observed": (observed_without_the_last, alone_slips),
    "the first guesses are given up": (
        the_first_guesses_are_given_up,
        lambda: serve("a near model", 3, 7, True, "forcing"),
    ),
    "another text's guesses": (
        guesses_of_another_text,
        lambda: test_texts_guessed_together_get_what_each_gets_alone("another model"),
    ),
    "guesses are kept after a preemption": (
        draft_kept_after_a_preemption,
        lambda: serve("slips", 1, 64, True, "forcing"),  # a small budget would leave those who lose none to keep
    ),
    "tokens after the end token": (tokens_after_the_end, ends),
    "each guess is judged by the row before": (judged_by_the_row_before, alone_slips),
    "the last guess is not in the cache": (a_last_guess_that_is_not_fed, alone_slips),
    "predicted rows become past": (
        predicted_rows_become_past,
        test_a_feature_drafter_guesses_what_its_definition_says_round_after_round,
    ),
    "features of the wrong token": (
        features_of_the_wrong_token,
        test_a_feature_drafter_guesses_what_its_definition_says_round_after_round,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_properties_reject_a_planted_mistake(name, monkeypatch):
    plant, prop = MUTANTS[name]
    prop()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        prop()


# --- The real model. ---

REAL = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def real_texts(smollm2) -> list[tuple[list[int], list[int]]]:
    """Twenty prompts of several kinds, with the model's plain greedy texts."""
    model, tokenizer = smollm2
    kinds = read_json("speculative")
    chats = kinds["question answering"]
    prompts = [p for kind in ("prose", "code", "copying") for p in kinds[kind]]
    prompts += ["1, 2, 3, 4,", "Once upon a time", "E = mc", "def fibonacci(n):\n"]
    ids = [tokenizer.encode(p) for p in prompts] + [tokenizer.encode_chat(chat) for chat in chats]
    assert len(ids) == 20
    return [(prompt, generation.generate(model, None, prompt, REAL).tokens) for prompt in ids]


REAL_DRAFTERS = {
    "n-gram": lambda model: NgramDrafter(),
    "first layers": lambda model: LayerSkipDrafter(model, 6),
    "trained": load_drafter,
}


@pytest.mark.parametrize("name", REAL_DRAFTERS)
def test_greedy_texts_of_the_real_model_are_the_plain_ones(name, smollm2, real_texts):
    model, drafter = smollm2[0], REAL_DRAFTERS[name](smollm2[0])
    texts = real_texts if name == "trained" else real_texts[::5]
    for prompt, plain in texts:
        assert speculative.generate(model, None, prompt, drafter, REAL).tokens == plain
    done = Engine(model, drafter=drafter, max_num_seqs=6).generate([prompt for prompt, _ in texts], REAL)
    assert [d.tokens for d in done] == [plain for _, plain in texts]


QUESTIONS = ["What is photosynthesis?", "Write a short poem about the sea.", "How do I learn to cook?"]


def test_the_trained_drafter_has_learned(smollm2):
    """On new questions a fair share of its guesses is right; one whose first weights are random knows little."""
    model, tokenizer = smollm2
    shares = []
    without = load_drafter(model, dtype=torch.float32).features
    torch.nn.init.normal_(without.join.weight, std=0.02, generator=torch.Generator().manual_seed(0))
    for drafter in (load_drafter(model), FeatureDrafter(model, without)):
        watched = Watched(drafter)
        for question in QUESTIONS:
            prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
            speculative.generate(model, None, prompt, watched, replace(REAL, max_tokens=24))
        shares.append(watched.acceptance)
    assert shares[0] > 0.25 and shares[0] > 5 * shares[1], shares


def test_what_cannot_guess_for_the_model_is_refused():
    model, other = tiny_model(0), tiny_model(1, replace(TINY, vocab_size=TINY.vocab_size + 1))
    for call in (
        lambda drafter: stream(model, None, [1], drafter),
        lambda drafter: speculative.generate(model, None, [1], drafter),
        lambda drafter: Engine(model, drafter=drafter),
    ):
        with pytest.raises(ValueError, match="drafter must be an object such as"):
            call(NgramDrafter)
        for drafter in (
            ModelDrafter(other),
            AdaptiveK(ModelDrafter(other), 0.1, [1, 1.1]),
            Watched(ModelDrafter(other)),
        ):
            with pytest.raises(ValueError, match="vocabulary has 38 tokens, the model's 37"):
                call(drafter)
        with pytest.raises(ValueError, match="drafter must be an object such as"):
            call(AdaptiveK(None, 0.1, [1, 1.1]))
        deep = tiny_model(1, replace(TINY, n_layers=4))
        wide = tiny_model(1, replace(TINY, d_model=12))
        features = FeatureModel(wide.config, torch.arange(5), dtype=torch.float64)
        for drafter in (LayerSkipDrafter(deep, 3), FeatureDrafter(wide, features)):
            with pytest.raises(ValueError, match="made for a model of other dimensions"):
                call(drafter)
