"""The engine changes nothing but the time: each text is the one that its request gets alone.

Every row of logits from which a token is chosen equals, in float64 to 1e-9, that of a pass without any cache over the
same text alone, whatever shares the batch and the pool. Then the engine's promises to its callers: what is wrong with a
request is said and hurts nobody, what is given up leaves nothing behind, and a text is handed out once, as it comes.
"""

from __future__ import annotations

import gc
import math
import random
import tracemalloc
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from conftest import TINY, random_model

from minillm import writing
from minillm.blocks import Prefix
from minillm.engine import Engine
from minillm.engine_request import EngineRequest
from minillm.generation import generate
from minillm.lab.tiny import tiny_model
from minillm.model import NoCache, Transformer
from minillm.paged_kv import PagedKV, PagedView
from minillm.policies import Static
from minillm.request import Span
from minillm.sampling import SamplingParams
from minillm.scheduler import Scheduler
from minillm.tokenizer import bpe_tokenizer
from minillm.writing import Piece, Writer

TOLERANCE = 1e-9
GREEDY = SamplingParams(temperature=0, max_tokens=8)
LETTERS = bpe_tokenizer(list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJK"), [1] * 37, [], "gpt-2")  # token i: letter i
MODEL = random_model()


class Listening(Engine):
    """Keeps each row of logits that a token is chosen from, and the text it belongs to. Its pool is full of NaN."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.kv.k.fill_(torch.nan)
        self.kv.v.fill_(torch.nan)
        self.rows: list[tuple[EngineRequest, int, torch.Tensor]] = []
        self.fed = Counter()  # tokens through the model, by request

    def step(self):
        written = super().step()
        for span in self.last_step.spans:
            self.fed[span.request] += span.count
        self.blocks.check_integrity(request.block_table for request in self.scheduler.running)
        return written

    def write(self, request, logits):
        self.rows.append((request, len(request.tokens), logits.clone()))
        return super().write(request, logits)


def small(n_blocks: int = 60, block_size: int = 4, **kwargs) -> Listening:
    return Listening(MODEL, None, n_blocks, block_size, **kwargs)


def alone(prompt, params, tokenizer=None):
    return generate(MODEL, tokenizer, prompt, params)


def run(engine: Engine) -> None:
    for _ in engine.stream():
        pass
    assert engine.idle
    engine.blocks.check_integrity([])


@torch.inference_mode()
def require_the_same_rows(engine: Listening) -> None:
    """Each row that was chosen from, against one naive pass over its whole text."""
    naive = {}
    for request, length, row in engine.rows:
        if request not in naive:
            n = len(request.tokens)
            naive[request] = MODEL.logits(MODEL(torch.tensor(request.tokens), torch.arange(n), NoCache()))
        error = (row - naive[request][length - 1]).abs().max()
        assert error <= TOLERANCE, f"the logits after {length} tokens are off by {error}"


# --- The same logits and the same texts. ---


def workload() -> list[tuple[list[int], SamplingParams]]:
    """Ragged requests; many begin alike. Sampled ones stand among greedy ones."""
    rnd = random.Random(0)
    base = [rnd.randrange(TINY.vocab_size) for _ in range(16)]
    result = []
    for i in range(9):
        own = [rnd.randrange(TINY.vocab_size) for _ in range(rnd.randint(0, 9))]
        prompt = base[: rnd.choice([1, 6, 12, 16])] + own
        params = SamplingParams(temperature=0, max_tokens=rnd.randint(1, 18))
        if i % 3 == 1:
            params = replace(params, temperature=1.0, seed=i, top_p=0.9)
        if i % 3 == 2:
            params = replace(params, temperature=0.7, seed=i, repetition_penalty=1.2)
        result.append((prompt, params))
    result.append((base, replace(GREEDY, max_tokens=18)))  # whole blocks of any size, all known by now
    return result


WORKLOAD = workload()
SAMPLES = ([*WORKLOAD[-1][0], 5], 3, SamplingParams(seed=11, max_tokens=32))  # can just grow to 48 cached tokens
SOLO = [alone(prompt, params).tokens for prompt, params in WORKLOAD]
SOLO += [alone(SAMPLES[0], replace(SAMPLES[2], seed=seed)).tokens for seed in (11, 12, 13)]
POOLS = {"ample": 400, "forcing": 48}


def serve(block_size: int, budget: int, sharing: bool, pool: str) -> Listening:
    """The workload under one setting. Texts and logits must be those of each request alone."""
    engine = small(
        POOLS[pool] // block_size, block_size, max_num_seqs=5, max_num_batched_tokens=budget, sharing=sharing
    )
    requests = [engine.add(prompt, params) for prompt, params in WORKLOAD]
    requests += engine.add_samples(*SAMPLES)
    run(engine)
    for request, solo in zip(requests, SOLO, strict=True):
        assert request.generation.tokens == solo, "a text differs from the one written alone"
    require_the_same_rows(engine)
    assert len(engine.rows) == sum(map(len, SOLO))
    return engine


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("budget", [1, 7, 64])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_every_sampled_row_equals_the_naive_pass_of_its_text_alone(block_size, budget, sharing, pool):
    engine = serve(block_size, budget, sharing, pool)
    met = engine.scheduler.met
    if (block_size, budget) == (1, 1):  # one at a time, and no block half filled: nobody holds what another needs
        assert met["preemptions"] == 0
    else:
        assert (met["preemptions"] > 0) == (pool == "forcing")
    assert (met["cache hits"] > 0) == sharing
    if budget < 64:
        assert met["chunks"] > 0


def test_a_request_in_a_full_house_is_still_itself():
    """The real default settings of a step: one pass for all prompts, then one row each."""
    engine = small(200, 16)
    requests = [engine.add(prompt, params) for prompt, params in WORKLOAD]
    run(engine)
    assert [r.generation.tokens for r in requests] == SOLO[: len(requests)]
    require_the_same_rows(engine)


# Stored mutants: each takes monkeypatch, and plants one mistake that the property above must reject.


def positions_from_zero(patch):
    real = Transformer.forward

    def forward(self, tokens, positions, kv):
        return real(self, tokens, positions - positions[0], kv)

    patch.setattr(Transformer, "forward", forward)


def tokens_of_the_wrong_place(patch):
    patch.setattr(Span, "ids", property(lambda self: self.request.tokens[-self.count :]))


def another_row(patch):
    real = Engine.write

    def write(self, request, logits):
        return real(self, request, logits.roll(1))

    patch.setattr(Engine, "write", write)


def one_generator_for_all(patch):
    shared = torch.Generator().manual_seed(0)
    patch.setattr(writing, "new_generator", lambda params: shared)


def keys_not_written(patch):
    real = PagedView.attend

    def attend(self, layer, q, k, v):
        before = self.pool.k.clone()
        out = real(self, layer, q, k, v)
        self.pool.k.copy_(before.nan_to_num())
        return out

    patch.setattr(PagedView, "attend", attend)


def layers_share_memory(patch):
    real = PagedView.attend
    patch.setattr(PagedView, "attend", lambda self, layer, q, k, v: real(self, 0, q, k, v))


def tails_are_not_cleared(patch):
    patch.setattr(PagedView, "clear_new_tails", lambda self, spans: None)


def a_preempted_text_loses_its_last_token(patch):
    real = Scheduler.preempt

    def preempt(self, request):
        real(self, request)
        if request.wanted > 1 and request.pieces:
            del request.tokens[-1]

    patch.setattr(Scheduler, "preempt", preempt)


def prefix_without_its_parent(patch):
    def init(self, parent, tokens):
        self.parent, self.tokens, self.digest = None, tokens, hash(tokens)

    patch.setattr(Prefix, "__init__", init)


MUTANTS = {
    "positions start at 0 on a cached beginning": positions_from_zero,
    "the wrong tokens are fed": tokens_of_the_wrong_place,
    "logits are shifted": another_row,
    "all requests draw from one generator": one_generator_for_all,
    "K is not written": keys_not_written,
    "all layers share one memory": layers_share_memory,
    "tails are not cleared": tails_are_not_cleared,
    "a preempted text loses its last token": a_preempted_text_loses_its_last_token,
    "a prefix is its own tokens only": prefix_without_its_parent,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_property_rejects_a_planted_mistake(name, monkeypatch):
    MUTANTS[name](monkeypatch)
    with pytest.raises(AssertionError, match=r"differs from the one written alone|are off by"):
        serve(3 if "prefix" not in name else 1, 7, True, "forcing")


# --- Several samples of one prompt. ---


@pytest.mark.parametrize(("block_size", "length"), [*product([1, 3, 4, 16], [1, 7, 8, 16])])
def test_samples_are_the_texts_of_their_seeds_and_the_prompt_is_computed_once(block_size, length):
    n, prompt = 4, [token % 37 for token in range(5, 5 + 3 * length, 3)]
    params = SamplingParams(seed=2**64 - 2, max_tokens=6)  # seeds wrap around
    engine = small(80, block_size, max_num_batched_tokens=5)
    samples = engine.add_samples(prompt, n, params)
    run(engine)
    seeds = [2**64 - 2, 2**64 - 1, 0, 1]
    assert [s.generation.tokens for s in samples] == [alone(prompt, replace(params, seed=s)).tokens for s in seeds]
    assert len({tuple(s.generation.tokens) for s in samples}) == n
    assert sum(engine.fed.values()) == length + n * 5  # the last token of each is never fed
    assert engine.scheduler.met["copies"] == (n - 1 if length % block_size else 0)
    assert [s.cached_tokens for s in samples] == [0, length, length, length]
    require_the_same_rows(engine)


def test_samples_that_find_no_place_wait_and_lose_nothing():
    prompt, params = [3, 1, 4, 1, 5, 9, 2], SamplingParams(seed=5, max_tokens=7)
    engine = small(max_num_seqs=2)
    samples = engine.add_samples(prompt, 5, params)
    run(engine)
    assert engine.scheduler.met["forks"] == 1
    for i, sample in enumerate(samples):
        assert sample.generation.tokens == alone(prompt, replace(params, seed=5 + i)).tokens
    require_the_same_rows(engine)


def test_samples_without_a_seed_differ_and_greedy_ones_agree():
    engine = small()
    free = engine.add_samples([1, 2, 3], 3, SamplingParams(max_tokens=20))
    greedy = engine.add_samples([1, 2, 3], 3, GREEDY)
    run(engine)
    assert len({tuple(s.generation.tokens) for s in free}) == 3
    assert [s.generation.tokens for s in greedy] == 3 * [alone([1, 2, 3], GREEDY).tokens]


# --- What is wrong with a request is said, and hurts nobody. ---


def three_in_flight(engine: Engine) -> list[EngineRequest]:
    requests = [engine.add(prompt, params) for prompt, params in WORKLOAD[:3]]
    for _ in range(3):
        engine.step()
    return requests


def state(engine: Engine):
    scheduler, pool = engine.scheduler, engine.blocks
    tables = [list(r.block_table) for r in scheduler.running]
    waiting, running = list(scheduler.waiting), list(scheduler.running)
    return waiting, running, tables, list(pool.free), list(pool.cached), list(pool.references), scheduler.arrived


BAD_REQUESTS = {
    "an empty prompt": (([],), "the prompt is empty"),
    "a prompt longer than the context": (([1] * 129, GREEDY), "the prompt has 129 tokens; the context ends at 128"),
    "a request that can never fit": (
        ([1] * 60, replace(GREEDY, max_tokens=22)),
        "may grow to 82 tokens, and needs 21 blocks of 4; the pool has 20",
    ),
    "a token past the vocabulary": (([1, 37],), "whole numbers from 0 to 36"),
    "a negative token": (([-1],), "whole numbers from 0 to 36"),
    "a half token": (([1.5],), "list of token ids"),
    "words for tokens": ((["one"],), "list of token ids"),
    "a number for a prompt": ((7,), "list of token ids"),
    "no prompt": ((None,), "list of token ids"),
    "bytes": ((b"abc",), "not bytes"),
    "a mapping": (({1: 2},), "not dict"),
    "text without a tokenizer": (("abc",), "needs a tokenizer"),
    "params in a dict": (([1], {"temperature": 0}), "params must be SamplingParams, not dict"),
    "a number for params": (([1], 7), "params must be SamplingParams, not int"),
    "stop strings without a tokenizer": (([1], SamplingParams(stop="x")), "stop strings need a tokenizer"),
    "a stop id past the vocabulary": (([1], SamplingParams(stop_ids=37)), "token ids from 0 to 36"),
    "a word for a priority": (([1], GREEDY, "high"), "priority must be a whole number, not 'high'"),
    "half a priority": (([1], GREEDY, 0.5), "priority must be a whole number, not 0.5"),
    "a truth for a priority": (([1], GREEDY, True), "priority must be a whole number, not True"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_gets_its_sentence_and_hurts_nobody(name):
    arguments, sentence = BAD_REQUESTS[name]
    engine = small(n_blocks=20)
    requests = three_in_flight(engine)
    before = state(engine)
    with pytest.raises(ValueError, match=sentence):
        engine.add(*arguments)
    assert state(engine) == before
    run(engine)
    assert [r.generation.tokens for r in requests] == SOLO[:3]


@pytest.mark.parametrize("n", [0, -1, 1.5, True, "2", None])
def test_a_bad_number_of_samples_gets_its_sentence_and_hurts_nobody(n):
    engine = small()
    before = state(engine)
    with pytest.raises(ValueError, match="n must be a whole number of at least 1"):
        engine.add_samples([1, 2], n, GREEDY)
    assert state(engine) == before


@pytest.mark.parametrize(
    ("prompts", "params", "sentence"),
    [
        ("text", None, r"for a single one give \[prompt\]"),
        (b"text", None, r"for a single one give \[prompt\]"),
        ([[1], []], GREEDY, "the prompt is empty"),
        ([[1], [2], [99]], GREEDY, "from 0 to 36"),
        ([[1], [2], [3] * 129], GREEDY, "the context ends at 128"),
        ([[1], [2] * 100], [GREEDY, replace(GREEDY, max_tokens=28)], "needs 32 blocks of 4; the pool has 20"),
        ([[1], [2]], [GREEDY], "2 prompts and 1 params"),
        ([[1]], [GREEDY, GREEDY], "1 prompts and 2 params"),
        ([[1], [2]], [GREEDY, 3], "params must be SamplingParams, not int"),
        ([[1], [2]], {"temperature": 0, "top_k": 1}, "params must be SamplingParams or a list of them, not dict"),
    ],
)
def test_one_bad_prompt_among_good_ones_runs_nothing(prompts, params, sentence):
    engine = small(n_blocks=20)
    with pytest.raises(ValueError, match=sentence):
        engine.generate(prompts, params)
    assert engine.idle
    assert not engine.fed
    assert engine.scheduler.arrived == 0


@pytest.mark.parametrize("name", ["n_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2", None])
def test_an_engine_without_room_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, not {value!r}"):
        Engine(MODEL, **{name: value})


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 9])
def test_max_tokens_is_how_many_there_are(max_tokens):
    engine = small()
    params = replace(GREEDY, max_tokens=max_tokens)
    one, *samples = [engine.add([1, 2, 3], params), *engine.add_samples([4, 5], 3, params)]
    run(engine)
    for request in (one, *samples):
        assert len(request.generation.tokens) == len(request.pieces) == max_tokens
        assert request.finish_reason == "length"
    assert engine.generate([[1, 2, 3]], params)[0].tokens == alone([1, 2, 3], params).tokens


def test_not_a_single_token_takes_no_place_in_the_pool():
    engine = small()
    request = engine.add([1, 2, 3], replace(GREEDY, max_tokens=0))
    assert (request.finish_reason, request.text, engine.idle) == ("length", "", True)
    assert math.isnan(request.ttft)
    assert list(engine.stream(request)) == []


def test_a_text_ends_where_the_context_ends_cached_or_not():
    params = replace(GREEDY, max_tokens=500)
    engine = small(n_blocks=100)
    full, nearly, long = (engine.add([1] * n, params) for n in (128, 127, 120))
    run(engine)
    assert [len(r.pieces) for r in (full, nearly, long)] == [0, 1, 8]
    assert {r.finish_reason for r in (full, nearly, long)} == {"context"}
    for request, n in ((nearly, 127), (long, 120)):
        assert request.generation.tokens == alone([1] * n, params).tokens
    require_the_same_rows(engine)


def test_generate_gives_all_texts_in_the_order_of_their_prompts():
    engine = small(max_num_seqs=3)
    prompts, params = zip(*WORKLOAD, strict=True)
    done = engine.generate(prompts, params)
    assert [g.tokens for g in done] == SOLO[: len(prompts)]
    assert [g.prompt for g in done] == list(prompts)
    assert engine.generate([], GREEDY) == []


def test_a_generation_is_that_of_the_loop_for_one_text():
    params = SamplingParams(seed=3, max_tokens=9, logprobs=2)
    engine = Engine(MODEL, LETTERS, 60, 4)
    done, solo = engine.generate(["head"], params)[0], alone("head", params, LETTERS)
    assert (done.prompt, done.tokens, done.text, done.finish_reason) == (
        solo.prompt,
        solo.tokens,
        solo.text,
        solo.finish_reason,
    )
    assert done.logprobs == pytest.approx(solo.logprobs, abs=TOLERANCE)
    assert [list(each) for each in done.top_logprobs] == [list(each) for each in solo.top_logprobs]
    assert done.seconds == sorted(done.seconds)


# --- Stop strings and end tokens. ---


def test_stop_strings_and_end_tokens_end_the_same_text_as_alone():
    free = SamplingParams(seed=1, max_tokens=24)
    text = alone("abc", free, LETTERS).text
    tokens = alone("abc", free, LETTERS).tokens
    params = [free]
    params += [replace(free, stop=text[i : i + 2]) for i in range(0, 20, 3)]  # straddle two tokens
    params += [replace(free, stop=(text[5:8], "never"), min_tokens=7)]
    params += [replace(free, stop_ids=tokens[i]) for i in (0, 4, 9)]
    params += [replace(free, stop_ids=tokens[4], min_tokens=8)]
    engine = Engine(MODEL, LETTERS, 200, 3, max_num_seqs=5)
    requests = [engine.add("abc", p) for p in params]
    shown = Counter()
    for request, piece in engine.stream():
        shown[request] += len(piece.text)
        for stop in request.writer.params.stop:  # what was shown is never part of a stop string that ended the text
            assert request.finish_reason != "stop" or stop not in request.text
    for request, p in zip(requests, params, strict=True):
        solo = alone("abc", p, LETTERS)
        assert (request.text, request.generation.tokens, request.finish_reason) == (
            solo.text,
            solo.tokens,
            solo.finish_reason,
        )
    assert Counter(r.finish_reason for r in requests)["stop"] >= 10
    engine.blocks.check_integrity([])


def test_an_end_token_of_the_tokenizer_ends_a_text_unless_it_is_to_be_ignored():
    tokens = alone([1, 2, 3], replace(GREEDY, max_tokens=12)).tokens
    end = next(t for i, t in enumerate(tokens) if i >= 3 and t not in tokens[:i])
    tokenizer = bpe_tokenizer(list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJK"), [1] * 37, [], "gpt-2", end_ids=(end,))
    engine = Engine(MODEL, tokenizer, 60, 4)
    stopped, ignored = (
        engine.add([1, 2, 3], replace(GREEDY, max_tokens=12, ignore_eos=ignore)) for ignore in (False, True)
    )
    run(engine)
    assert stopped.generation.tokens == tokens[: tokens.index(end) + 1]
    assert (stopped.finish_reason, ignored.finish_reason) == ("stop", "length")
    assert ignored.generation.tokens == tokens


# --- Giving up. ---


def at_some_point(engine: Engine, point: str) -> tuple[EngineRequest, list[EngineRequest]]:
    """(the one to give up, the others) when it is at that point of its life."""
    long = [(7 * i) % 37 for i in range(24)]
    if point == "waiting":
        others = [engine.add(*WORKLOAD[i]) for i in range(4)]
        victim = engine.add(long, GREEDY)
        engine.step()
        assert victim in engine.scheduler.waiting
    elif point == "mid-prefill":
        victim = engine.add(long, GREEDY)
        others = [engine.add(*WORKLOAD[i]) for i in range(4)]
        engine.step()
        assert 0 < victim.num_computed < len(long)
    elif point == "decoding":
        victim = engine.add([1, 2], GREEDY)
        others = [engine.add(*WORKLOAD[i]) for i in range(4)]
        for _ in range(3):
            engine.step()
        assert 0 < len(victim.pieces) < 8
    elif point == "before the first step":
        victim = engine.add([1, 2], GREEDY)
        others = [engine.add(*WORKLOAD[i]) for i in range(4)]
    return victim, others


@pytest.mark.parametrize("point", ["waiting", "mid-prefill", "decoding", "before the first step"])
def test_giving_up_frees_the_blocks_at_once_and_changes_no_other_text(point):
    engine = small(n_blocks=60, max_num_seqs=4, max_num_batched_tokens=9)
    victim, others = at_some_point(engine, point)
    written = len(victim.pieces)
    engine.abort(victim)
    assert victim.finish_reason == "abort"
    assert victim.block_table == []
    engine.blocks.check_integrity(r.block_table for r in engine.scheduler.running)
    run(engine)
    assert [r.generation.tokens for r in others] == SOLO[:4]
    assert len(victim.pieces) == written  # nothing more was written
    assert victim.generation.finish_reason == "abort"
    require_the_same_rows(engine)


def test_giving_up_twice_or_after_the_end_changes_nothing():
    engine = small()
    gone, done = engine.add([1, 2], GREEDY), engine.add([3], GREEDY)
    engine.abort(gone)
    engine.abort(gone)
    run(engine)
    engine.abort(gone)
    engine.abort(done)
    assert (gone.finish_reason, done.finish_reason) == ("abort", "length")
    assert done.generation.tokens == alone([3], GREEDY).tokens
    engine.blocks.check_integrity([])


def test_giving_up_anothers_request_is_refused():
    mine, yours = small(), small()
    request = yours.add([1, 2], GREEDY)
    with pytest.raises(ValueError, match="belongs to another engine"):
        mine.abort(request)
    run(yours)
    assert request.generation.tokens == alone([1, 2], GREEDY).tokens


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_any_of_several_samples_can_be_given_up_at_any_time(which, steps):
    """Of the leader, the others get its place; of a follower that has not joined yet, it never does."""
    prompt, params = [5, 3, 1, 2, 4, 6, 8], SamplingParams(seed=1, max_tokens=6)
    engine = small(max_num_batched_tokens=3)
    samples = engine.add_samples(prompt, 4, params)
    for _ in range(steps):
        engine.step()
    written = len(samples[which].pieces)
    engine.abort(samples[which])
    assert samples[which] not in engine.requests
    run(engine)
    assert len(samples[which].pieces) == written
    assert samples[which].finish_reason == "abort"
    for i, sample in enumerate(samples):
        if i != which:
            assert sample.generation.tokens == alone(prompt, replace(params, seed=1 + i)).tokens
    require_the_same_rows(engine)


# --- Broken numbers, and a broken step. ---


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("sharing", [True, False])
def test_a_request_whose_numbers_break_ends_with_a_sentence_and_spoils_nobody(samples, sharing):
    """Its blocks are full of NaN when others inherit them."""
    engine = small(n_blocks=36, block_size=4, max_num_seqs=6, sharing=sharing)
    others = [engine.add(*WORKLOAD[i]) for i in range(3)]
    broken = engine.add_samples([9, 8, 7, 6, 5], samples, replace(GREEDY, max_tokens=20))
    engine.step()
    engine.step()
    for request in broken:
        engine.kv.v[:, request.block_table[-1], :, :] = torch.nan
        engine.kv.k[:, request.block_table[-1], :, :] = torch.nan
    engine.step()
    for request in broken:
        assert request.finish_reason == "error"
        assert "NaN: no token can be chosen" in request.error
        assert len(request.pieces) == 2
        assert request.generation.finish_reason == "error"
    engine.blocks.check_integrity(r.block_table for r in engine.scheduler.running)
    heirs = [engine.add([9, 8, 7, 6, 5, 4 + i], replace(GREEDY, max_tokens=15)) for i in range(4)]
    del engine.rows[:]
    run(engine)
    assert [r.generation.tokens for r in others] == SOLO[:3]
    for i, heir in enumerate(heirs):
        assert heir.generation.tokens == alone([9, 8, 7, 6, 5, 4 + i], replace(GREEDY, max_tokens=15)).tokens
    assert all(r.error is None for r in (*others, *heirs))
    require_the_same_rows(engine)


def test_penalties_that_leave_nothing_to_choose_end_one_text_only():
    engine = small()
    others = [engine.add(*WORKLOAD[i]) for i in range(3)]
    barred = engine.add([1, 2], SamplingParams(stop_ids=tuple(range(37)), min_tokens=2, max_tokens=5))
    run(engine)
    assert barred.finish_reason == "error"
    assert "every token is barred" in barred.error
    assert [r.generation.tokens for r in others] == SOLO[:3]


def interrupted(engine: Engine, monkeypatch, owner, name: str, at: int) -> bool:
    """Run the engine to the end, with Ctrl-C at the call number `at` of a function. -> whether it came to that"""
    calls = Counter()
    real = getattr(owner, name)

    def function(*args, **kwargs):
        calls["made"] += 1
        if calls["made"] == at:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, function)
    try:
        run(engine)
        return False
    except KeyboardInterrupt:
        run(engine)
        return True
    finally:
        monkeypatch.undo()


@pytest.mark.parametrize(
    "place", ["before the copies", "in the first layer", "in the last layer", "before a token is chosen"]
)
def test_a_step_that_was_interrupted_is_simply_done_again(place, monkeypatch):
    owner, name = {
        "before the copies": (PagedKV, "copy"),
        "in the first layer": (MODEL.blocks[0].mlp, "forward"),
        "in the last layer": (MODEL.blocks[-1].mlp, "forward"),
        "before a token is chosen": (writing, "sample"),
    }[place]
    times = 0
    for at in range(1, 20):
        engine = small(n_blocks=24, block_size=3, max_num_seqs=6, max_num_batched_tokens=12)
        samples = engine.add_samples([4, 4, 2, 1], 3, SamplingParams(seed=1, max_tokens=6))
        requests = [engine.add(*WORKLOAD[i]) for i in range(4)]
        times += interrupted(engine, monkeypatch, owner, name, at)
        assert [r.generation.tokens for r in requests] == SOLO[:4]
        for i, sample in enumerate(samples):
            solo = alone([4, 4, 2, 1], SamplingParams(seed=1 + i, max_tokens=6))
            assert (sample.generation.tokens, sample.finish_reason) == (solo.tokens, "length")
        require_the_same_rows(engine)
    assert times > 10


# --- Streams. ---


def test_two_streams_at_once_each_give_their_own_pieces():
    engine = small(max_num_seqs=2)
    first, second = engine.add(*WORKLOAD[0]), engine.add(*WORKLOAD[1])
    third = engine.add(*WORKLOAD[2])
    a, b = engine.stream(first), engine.stream(second, third)
    got = {first: [], second: [], third: []}
    for turn in range(200):
        for request, piece in [next(a if turn % 3 else b, (None, None))]:
            if request:
                got[request].append(piece)
    assert [[p.token for p in got[r]] for r in (first, second, third)] == SOLO[:3]
    assert all(got[r] == r.pieces for r in got)


def test_a_finished_request_can_be_streamed_again():
    engine = small()
    request, other = engine.add(*WORKLOAD[0]), engine.add(*WORKLOAD[1])
    once = list(engine.stream(request))
    assert [r for r, _ in once] == [request] * len(once)
    assert list(engine.stream(request)) == once
    rest = list(engine.stream(other))
    assert [p.token for _, p in rest] == SOLO[1]  # what was written meanwhile is not lost
    assert list(engine.stream()) == []  # nobody is here now


def test_a_stream_left_alone_runs_on_with_the_next_one():
    engine = small()
    request, other = engine.add(*WORKLOAD[0]), engine.add(*WORKLOAD[1])
    for _ in engine.stream(request):
        break
    run(engine)
    assert [request.generation.tokens, other.generation.tokens] == SOLO[:2]


def test_a_stream_ends_when_its_request_is_given_up():
    engine = small()
    request = engine.add([1, 2], replace(GREEDY, max_tokens=30))
    got = []
    for _, piece in engine.stream(request):
        got.append(piece.token)
        if len(got) == 4:
            engine.abort(request)
    assert got == alone([1, 2], replace(GREEDY, max_tokens=30)).tokens[:4]


def test_a_stream_of_anothers_request_is_refused():
    mine, yours = small(), small()
    request = yours.add([1, 2], GREEDY)
    with pytest.raises(ValueError, match="belongs to another engine"):
        next(mine.stream(request))


def test_a_step_with_nobody_there_gives_nothing():
    engine = small()
    assert engine.step() == []
    assert not engine.last_step.spans


def test_tokens_that_were_streamed_are_never_written_anew():
    """Preempted again and again: each text's pieces are its tokens, each once and in order, at rising times."""
    engine = small(n_blocks=16, block_size=3, max_num_seqs=5)
    requests = [engine.add(*WORKLOAD[i]) for i in range(9)]
    streamed = {r: [] for r in requests}
    for request, piece in engine.stream():
        streamed[request].append(piece.token)
    assert engine.scheduler.met["preemptions"] > 3
    assert [streamed[r] for r in requests] == SOLO[:9]
    for request in requests:
        times = [piece.seconds for piece in request.pieces]
        assert times == sorted(times)


# --- The faults that block pools and schedulers are known for, through the whole engine. ---


def test_a_block_that_was_taken_for_another_text_is_not_found_by_its_old_one():
    engine = small(n_blocks=6, block_size=4)
    params = replace(GREEDY, max_tokens=4)
    old, new = [1, 2, 3, 4, 5, 6, 7, 8, 9], [9] * 17
    for prompt in (old, new, old):
        assert engine.generate([prompt], params)[0].tokens == alone(prompt, params).tokens
    assert engine.blocks.evictions > 0
    require_the_same_rows(engine)


def test_the_same_block_of_tokens_after_another_beginning_is_another_block():
    engine = small(block_size=2)
    for prompt in ([1, 2, 3, 4, 5], [3, 4, 3, 4, 5], [1, 2, 1, 2, 3, 4, 5], [3, 4, 1, 2, 5]):
        assert engine.generate([prompt], GREEDY)[0].tokens == alone(prompt, GREEDY).tokens
    require_the_same_rows(engine)


@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
def test_a_prompt_that_is_wholly_cached_computes_its_last_block_into_one_of_its_own(block_size):
    engine = small(block_size=block_size)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    first = engine.add(prompt, replace(GREEDY, max_tokens=20))
    engine.step()
    before = list(first.block_table)
    second = engine.add(prompt, GREEDY)
    engine.step()
    assert second.cached_tokens == 8 - block_size
    assert engine.fed[second] == block_size
    shared = set(first.block_table) & set(second.block_table)
    assert shared == set(before[: 8 // block_size - 1])
    run(engine)
    for request, n in ((first, 20), (second, 8)):
        assert request.generation.tokens == alone(prompt, replace(GREEDY, max_tokens=n)).tokens
    require_the_same_rows(engine)


def test_a_second_request_on_a_live_beginning_starts_behind_it():
    engine = small(block_size=3)
    base = [2, 7, 1, 8, 2, 8, 1, 8]
    first = engine.add([*base, 4], replace(GREEDY, max_tokens=12))
    engine.step()
    second = engine.add([*base, 5], GREEDY)
    engine.step()
    (span,) = [span for span in engine.last_step.spans if span.request is second]
    assert (span.start, span.count, second.cached_tokens) == (6, 3, 6)
    run(engine)
    assert first.generation.tokens == alone([*base, 4], replace(GREEDY, max_tokens=12)).tokens
    assert second.generation.tokens == alone([*base, 5], GREEDY).tokens
    require_the_same_rows(engine)


def test_a_request_preempted_and_readmitted_with_a_hit_computes_what_is_missing_and_no_more():
    """The tokens of its step are counted after its blocks are given: the rest of its text, not all of it."""
    engine = small(n_blocks=12, block_size=2, max_num_seqs=3)
    base = [3, 1, 4, 1, 5, 9]
    requests = [engine.add([*base, i], replace(GREEDY, max_tokens=14)) for i in range(3)]
    readmissions = 0
    lost = set()
    while not engine.idle:
        waiting = set(engine.scheduler.waiting)
        lost |= {r for r in waiting if r.pieces}
        engine.step()
        for span in engine.last_step.spans:
            if span.request in lost and span.request in waiting:
                assert span.start >= len(base)
                assert span.end == len(span.request.tokens) - (span.request in engine.scheduler.running)
                readmissions += 1
    assert readmissions > 0
    for i, request in enumerate(requests):
        assert request.generation.tokens == alone([*base, i], replace(GREEDY, max_tokens=14)).tokens
    require_the_same_rows(engine)


def test_two_growing_requests_in_a_small_pool_both_come_to_their_end():
    params = replace(GREEDY, max_tokens=30)
    engine = small(n_blocks=17, block_size=2, max_num_seqs=2)  # room for one of them, and not for a second
    requests = [engine.add([i, i], params) for i in (1, 2)]
    steps = 0
    while not engine.idle:
        engine.step()
        steps += 1
        assert steps <= 2 * 32
    assert engine.scheduler.met["preemptions"] > 0
    assert [r.generation.tokens for r in requests] == [alone([i, i], params).tokens for i in (1, 2)]


def test_only_full_blocks_can_be_found_and_each_block_starts_with_one_owner():
    engine = small(block_size=4)
    request = engine.add([1, 2, 3, 4, 5, 6], replace(GREEDY, max_tokens=12))
    engine.step()
    assert [engine.blocks.references[b] for b in request.block_table] == [1, 1]
    assert set(engine.blocks.prefix_of) == {request.block_table[0]}
    run(engine)
    with pytest.raises(ValueError, match="released twice"):
        engine.blocks.release(next(iter(engine.blocks.cached)))


def test_the_random_numbers_of_a_request_do_not_depend_on_its_neighbours():
    params = SamplingParams(seed=42, max_tokens=15)
    solo = alone([1, 2, 3], params).tokens
    rnd = random.Random(1)
    for _ in range(5):
        engine = small(200, 4, max_num_seqs=rnd.randint(1, 6), max_num_batched_tokens=rnd.randint(3, 40))
        around = [
            engine.add([rnd.randrange(37) for _ in range(5)], SamplingParams(seed=rnd.randrange(99), max_tokens=9))
            for _ in range(rnd.randint(0, 6))
        ]
        for _ in range(rnd.randint(0, 4)):
            engine.step()
        request = engine.add([1, 2, 3], params)
        engine.add([1, 2, 3], replace(params, seed=43))
        if around:
            engine.abort(around[0])
        run(engine)
        assert request.generation.tokens == solo


# --- Order and times. ---


class Clock:
    """A second passes with each pass of the model."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed(Engine):
    def forward(self, step):
        self.clock.now += 1.0
        return super().forward(step)


def test_the_times_of_a_request_are_those_of_the_clock():
    clock = Clock()
    engine = Timed(MODEL, None, 60, 4, max_num_seqs=1, max_num_batched_tokens=7, clock=clock)
    clock.now = 100.0
    prompt = list(range(20))
    first = engine.add(prompt, replace(GREEDY, max_tokens=5))
    second = engine.add(prompt, replace(GREEDY, max_tokens=3))
    assert math.isnan(first.ttft) and math.isnan(first.queue_time) and math.isnan(first.tpot)
    assert first.generation.finish_reason == "unfinished"
    run(engine)
    # First: three passes for the prompt (7, 7, 6), then one for each of four tokens.
    assert (first.arrival, first.queue_time, first.ttft, first.tpot) == (100.0, 0.0, 3.0, 1.0)
    assert [piece.seconds for piece in first.pieces] == [3.0, 4.0, 5.0, 6.0, 7.0]
    assert first.cached_tokens == 0
    # Second: waits for seven passes, finds 16 of its 20 tokens, and needs a single pass for the rest.
    assert (second.queue_time, second.ttft, second.tpot, second.cached_tokens) == (7.0, 8.0, 1.0, 16)
    assert (first.finish_reason, second.finish_reason) == ("length", "length")


def test_a_preempted_request_keeps_its_times():
    clock = Clock()
    engine = Timed(MODEL, None, 9, 2, max_num_seqs=2, clock=clock)
    first, second = (engine.add([i], replace(GREEDY, max_tokens=14)) for i in (1, 2))
    while not engine.scheduler.met["preemptions"]:
        engine.step()
    assert (second.queue_time, second.ttft, second.cached_tokens) == (0.0, 1.0, 0)
    run(engine)
    assert (second.queue_time, second.ttft, second.cached_tokens) == (0.0, 1.0, 0)
    assert second.tpot > first.tpot == 1.0


def test_one_token_has_no_time_between_tokens():
    clock = Clock()
    engine = Timed(MODEL, None, 9, 2, clock=clock)
    request = engine.add([1], replace(GREEDY, max_tokens=1))
    run(engine)
    assert request.ttft == 1.0
    assert math.isnan(request.tpot)


def test_a_higher_priority_is_served_first_and_equals_in_the_order_of_arrival():
    engine = small(max_num_seqs=1)
    priorities = [0, 0, 5, -3, 5, 0]
    requests = [engine.add([i], replace(GREEDY, max_tokens=2), priority) for i, priority in enumerate(priorities)]
    finished = [r for r, piece in engine.stream() if piece.finish_reason]
    assert [requests.index(r) for r in finished] == [2, 4, 0, 1, 5, 3]


def test_the_lowest_priority_loses_its_blocks_first_and_of_these_the_newest():
    engine = small(n_blocks=12, block_size=2, max_num_seqs=4)
    for i, priority in enumerate([0, 1, 0, 1]):
        engine.add([i, i], replace(GREEDY, max_tokens=12), priority)
    lost = []
    while not engine.idle:
        running = list(engine.scheduler.running)
        engine.step()
        lost += [r.tokens[0] for r in running if r in engine.scheduler.waiting]
    assert lost[:2] == [2, 0]
    assert 1 not in lost


# --- The soak. ---


def alive(*kinds: type) -> Counter:
    gc.collect()
    return Counter(type(thing).__name__ for thing in gc.get_objects() if type(thing) in kinds)


def soak(n: int) -> Engine:
    """n requests, many given up. After a quarter of them, and at the end, all is as it was."""
    model = tiny_model(0, replace(TINY, n_layers=1), torch.float32)
    engine = Engine(model, None, n_blocks=24, block_size=4, max_num_seqs=16, max_num_batched_tokens=64)
    rnd = random.Random(0)
    bases = [[rnd.randrange(37) for _ in range(12)] for _ in range(4)]
    ends: Counter = Counter()
    kinds = (EngineRequest, Writer, Piece, Prefix, torch.Generator)
    memory, counts = [], []
    came = 0

    def look():
        while not engine.idle:
            step()
        engine.blocks.check_integrity([])
        assert engine.blocks.available == 24
        counts.append(alive(*kinds))
        memory.append(tracemalloc.get_traced_memory()[0])

    def step():
        for request, piece in engine.step():
            ends[piece.finish_reason] += piece.finish_reason is not None
            if rnd.random() < 0.02 and request.finish_reason is None:
                engine.abort(request)
                ends["abort"] += 1

    while came < n:
        prompt = rnd.choice(bases)[: rnd.randint(1, 12)] + [rnd.randrange(37) for _ in range(rnd.randint(0, 4))]
        params = SamplingParams(seed=came, max_tokens=rnd.randint(1, 6))
        samples = engine.add_samples(prompt, rnd.choice([1, 1, 1, 2]), params)
        came += len(samples)
        if rnd.random() < 0.05:
            engine.abort(rnd.choice(samples))
            ends["abort"] += 1
        del samples
        if len(engine.scheduler.waiting) > 12:
            step()
        if came >= n // 4 and not counts:
            tracemalloc.start()
            look()
    look()
    tracemalloc.stop()
    assert ends["abort"] > n // 20
    assert sum(ends.values()) == came
    for count in counts:
        assert count["EngineRequest"] <= 16, "an EngineRequest stays"  # those of the last step
        assert count["Prefix"] <= 24 * 6  # those of the pool's blocks, and what stands before them
    assert counts[1]["Piece"] <= counts[0]["Piece"] + 100
    assert memory[1] - memory[0] < 100_000, "the memory grew"
    return engine


def test_two_thousand_requests_with_aborts_leave_nothing_behind():
    engine = soak(2000)
    assert engine.scheduler.met["preemptions"] > 50


def test_the_soak_rejects_an_engine_that_remembers_its_requests(monkeypatch):
    kept = []
    real = Engine.submit

    def submit(self, samples):
        kept.extend(samples)
        real(self, samples)

    monkeypatch.setattr(Engine, "submit", submit)
    with pytest.raises(AssertionError, match="EngineRequest"):
        soak(200)


def test_the_soak_rejects_an_engine_that_keeps_what_was_given_up(monkeypatch):
    real = Scheduler.give_back

    def give_back(self, request):
        if request.finish_reason != "abort":
            real(self, request)

    monkeypatch.setattr(Scheduler, "give_back", give_back)
    with pytest.raises((AssertionError, ValueError)):
        soak(200)


def test_two_streams_and_a_generate_in_turn_give_every_piece():
    """Whoever runs the engine between two pieces of a stream takes none of them away."""
    engine = small()
    a, b = engine.add(*WORKLOAD[0]), engine.add(*WORKLOAD[1])
    seen = {a: [], b: []}
    streams = [engine.stream(a), engine.stream(b)]
    while streams:
        for one in list(streams):
            piece = next(one, None)
            if piece is None:
                streams.remove(one)
            else:
                seen[piece[0]].append(piece[1])
    assert seen == {a: a.pieces, b: b.pieces} and [a.generation.tokens, b.generation.tokens] == SOLO[:2]
    c, pieces = engine.add(*WORKLOAD[2]), []
    for _, piece in engine.stream(c):
        pieces.append(piece)
        engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=40))
    assert pieces == c.pieces and c.generation.tokens == SOLO[2]


@pytest.mark.parametrize(
    "make, sentence",
    [
        (lambda: Engine("model"), "model must be a Transformer"),
        (lambda: Engine(MODEL, "tokenizer"), "tokenizer must be a Tokenizer or None"),
        (lambda: Engine(MODEL, policy="static"), "policy must be an object such as"),
        (lambda: Engine(MODEL, policy=Static), "policy must be an object such as"),
        (lambda: Engine(MODEL, sharing="no"), "sharing must be True or False, not 'no'"),
        (lambda: Engine(MODEL, n_blocks=10**14), r"a pool of 1\d{14} blocks of 16 tokens takes .* take fewer blocks"),
        (lambda: small().stream([1]), r"expected a request, not list; .* write \*requests"),
        (lambda: small().abort("r"), "expected a request, not str"),
        (lambda: small().generate(None), "prompts is a list of prompts"),
    ],
)
def test_what_an_engine_cannot_work_with_is_refused_at_the_call(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_generate_warns_of_a_text_that_could_not_go_on():
    every = tuple(range(MODEL.config.vocab_size))
    barred = SamplingParams(temperature=0, max_tokens=5, min_tokens=5, stop_ids=every)
    with pytest.warns(UserWarning, match="prompt 1 ended early: .* every token is barred"):
        done = small().generate([WORKLOAD[0][0], [1, 2]], [WORKLOAD[0][1], barred])
    assert done[0].tokens == SOLO[0] and (done[1].tokens, done[1].finish_reason) == ([], "error")
