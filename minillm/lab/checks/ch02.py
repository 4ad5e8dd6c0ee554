"""Exercise 02, the KV cache: the mask, the attention over a cache, its memory, the loop, and reuse between turns."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.generation import next_logits
from minillm.lab.check import Chapter, expect_close, expect_equal, expect_number, seeded
from minillm.lab.tiny import tiny_model
from minillm.model import NoCache, Transformer

CHAPTER = Chapter("02")
MOST_PASSES = 100


mask = CHAPTER.task(
    "causal_mask",
    hints=(
        "How many tokens lie before the first query? Write that number down first.",
        "Query i is the token at position past + i, with past = n_keys - n_queries; it sees itself too.",
    ),
)


def oracle_mask(n_queries: int, n_keys: int) -> list[list[bool]]:
    """Token by token: which keys are not in the future."""
    return [[key <= n_keys - n_queries + query for key in range(n_keys)] for query in range(n_queries)]


def check_mask(fn, n_queries: int, n_keys: int) -> None:
    got = fn(n_queries, n_keys)
    label = f"causal_mask({n_queries}, {n_keys})"
    assert got is not None, f"{label}: your function returned None; is a `return` missing?"
    assert isinstance(got, Tensor), f"{label}: expected a tensor, got {type(got).__name__}"
    assert got.dtype == torch.bool, f"{label}: dtype {got.dtype}, expected torch.bool (True: may be seen)"
    assert list(got.shape) == [n_queries, n_keys], f"{label}: shape {list(got.shape)}, expected {[n_queries, n_keys]}"
    for i, (mine, want) in enumerate(zip(got.tolist(), oracle_mask(n_queries, n_keys), strict=True)):
        assert mine == want, f"{label}: query {i} may see keys {seen(want)}, yours sees {seen(mine)}"


def seen(row: list[bool]) -> list[int]:
    return [i for i, visible in enumerate(row) if visible]


@mask
def without_a_past(fn):
    """without a past: each token sees itself and what is before it"""
    check_mask(fn, 4, 4)


@mask
def one_token_on_a_past(fn):
    """one new token on a past sees everything"""
    check_mask(fn, 1, 5)
    check_mask(fn, 1, 1)


@mask
def a_chunk_on_a_past(fn):
    """a chunk on a past: the mask is aligned to the lower right corner"""
    check_mask(fn, 3, 7)
    check_mask(fn, 2, 3)


attend = CHAPTER.task(
    "attend",
    hints=(
        "What must have happened to the new rows before a query can see itself?",
        "The cache is [heads, tokens, head_dim], the new rows are [tokens, heads, head_dim]: transpose one of them.",
        "Write k and v behind the past, look at the first length + T rows of the cache, transpose, attend.",
    ),
)


def random_rows(seed: int, tokens: int, n_heads: int, n_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seeded(seed))
    q = torch.randn(tokens, n_heads, head_dim, generator=g)
    k, v = (torch.randn(tokens, n_kv_heads, head_dim, generator=g) for _ in range(2))
    return 3 * q, k, v


def oracle_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention written as loops over tokens and heads. All rows of the sequence are given."""
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for t in range(len(q)):
        for h in range(q.shape[1]):
            keys, values = k[: t + 1, h // group], v[: t + 1, h // group]
            weights = (keys @ q[t, h] / q.shape[2] ** 0.5).softmax(0)
            out[t, h] = weights @ values
    return out


def check_chunks(fn, cuts: list[int], n_heads: int, n_kv_heads: int, capacity: int) -> None:
    """Feed a text in chunks that end at `cuts`; unused slots hold NaN, so reading one shows."""
    q, k, v = random_rows(len(cuts), cuts[-1], n_heads, n_kv_heads, 8)
    want = oracle_rows(q, k, v)
    k_cache = torch.full((n_kv_heads, capacity, 8), torch.nan)
    v_cache = k_cache.clone()
    start = 0
    for end in cuts:
        got = fn(k_cache, v_cache, start, q[start:end], k[start:end], v[start:end])
        expect_close(got, want[start:end], f"tokens {start} to {end - 1}, on a past of {start}", rtol=1e-4, atol=1e-5)
        start = end
    expect_close(k_cache[:, :start], k.transpose(0, 1).contiguous(), "k_cache after all tokens")
    expect_close(v_cache[:, :start], v.transpose(0, 1).contiguous(), "v_cache after all tokens")
    assert k_cache[:, start:].isnan().all(), "k_cache: slots behind the last token were written"


@attend
def whole_prompt(fn):
    """a prompt on an empty cache"""
    check_chunks(fn, [5], n_heads=4, n_kv_heads=4, capacity=9)


@attend
def token_by_token(fn):
    """then one token at a time"""
    check_chunks(fn, [3, 4, 5, 6], n_heads=4, n_kv_heads=4, capacity=9)


@attend
def grouped_heads(fn):
    """grouped heads: several query heads share one key and value head"""
    check_chunks(fn, [4, 5], n_heads=6, n_kv_heads=2, capacity=8)


@attend
def chunks(fn):
    """chunks of several tokens on top of a past, until the cache is full"""
    check_chunks(fn, [1, 4, 5, 9], n_heads=6, n_kv_heads=3, capacity=9)


@attend
def overwritten_guess(fn):
    """rows that did not become past are overwritten by the next call"""
    q, k, v = random_rows(7, 5, 2, 1, 8)
    k_cache, v_cache = torch.full((1, 6, 8), torch.nan), torch.full((1, 6, 8), torch.nan)
    fn(k_cache, v_cache, 0, q[:3], k[:3], v[:3])
    fn(k_cache, v_cache, 3, q[:2] + 1, k[:2] + 1, v[:2] - 1)  # a guess that is given up
    got = fn(k_cache, v_cache, 3, q[3:], k[3:], v[3:])
    expect_close(got, oracle_rows(q, k, v)[3:], "tokens 3 to 4 after a guess at the same place", rtol=1e-4, atol=1e-5)


memory = CHAPTER.task(
    "kv_bytes",
    hints=(
        "What is written down for one token in one layer? Count the numbers, then multiply.",
        "A key and a value, each n_kv_heads x head_dim numbers. Query heads do not matter.",
    ),
)


def config_of(n_layers: int, n_heads: int, n_kv_heads: int, head_dim: int):
    from minillm.config import ModelConfig

    return ModelConfig(1000, n_heads * head_dim, n_layers, n_heads, n_kv_heads, head_dim, 512, 4096)


@memory
def one_token(fn):
    """one token of Llama-2-7B in 16 bits takes 512 KiB"""
    expect_number(fn(config_of(32, 32, 32, 128), 1, 2), 512 * 1024, "kv_bytes(Llama-2-7B, 1 token, 2 bytes)")


@memory
def grouped(fn):
    """with grouped heads only the key and value heads count"""
    expect_number(fn(config_of(32, 32, 8, 128), 1, 2), 128 * 1024, "kv_bytes(Mistral-7B, 1 token, 2 bytes)")


@memory
def odd_sizes(fn):
    """it is what the tensors take, at any sizes"""
    for layers, heads, kv_heads, dim, tokens, dtype in (
        (3, 6, 2, 10, 7, torch.float32),
        (5, 9, 3, 64, 11, torch.float16),
    ):
        k = torch.empty(layers, kv_heads, tokens, dim, dtype=dtype)
        got = fn(config_of(layers, heads, kv_heads, dim), tokens, dtype.itemsize)
        expect_number(
            got, 2 * k.nbytes, f"{layers} layers, {kv_heads} of {heads} heads of {dim}, {tokens} tokens in {dtype}"
        )


loop = CHAPTER.task(
    "decode_greedy",
    hints=(
        "At each step: which tokens does kv not hold yet? kv.length says how many it holds.",
        "model(new, positions, kv) takes tensors; the first new token stands at position kv.length, not at 0.",
        "After the pass kv.commit(how many were fed), then model.logits(hidden[-1:]) for the last row only.",
    ),
)


class Recorder:
    """A store that keeps everything itself and notes what the loop does to it."""

    def __init__(self, n_layers: int):
        self.rows: list[tuple[Tensor, Tensor] | None] = [None] * n_layers
        self.length, self.capacity, self.fed = 0, MOST_PASSES, []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from minillm.attention import reference_attention

        past = self.rows[layer]
        if past is not None and self.length:
            k = torch.cat([past[0][: self.length], k])
            v = torch.cat([past[1][: self.length], v])
        self.rows[layer] = (k, v)
        if layer == 0:
            self.fed.append(len(q))
            assert len(self.fed) <= MOST_PASSES, f"your loop does not end: the model was called {MOST_PASSES} times"
        return reference_attention(q, k, v)

    def commit(self, n: int) -> None:
        self.length += n

    def truncate(self, length: int) -> None:
        self.length = length


def naive_text(model: Transformer, prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(next_logits(model, tokens, NoCache()).argmax()))
    return tokens[len(prompt) :]


class Watched:
    """A model that notes the positions at which it is fed."""

    def __init__(self, model: Transformer):
        self.model = model
        self.positions: list[list[int]] = []

    def __getattr__(self, name: str):
        return getattr(self.model, name)

    def __call__(self, tokens: Tensor, positions: Tensor, kv: Recorder) -> Tensor:
        self.positions.append(positions.tolist())
        return self.model(tokens, positions, kv)


@loop
def positions(fn):
    """the prompt goes in once, then one token a step, each at its place in the text"""
    model = Watched(tiny_model(seeded(3)))
    fn(model, [5, 6, 7, 8], 4, Recorder(model.config.n_layers))
    for i, (mine, want) in enumerate(zip(model.positions, [[0, 1, 2, 3], [4], [5], [6]], strict=False)):
        assert mine == want, f"pass {i + 1} of the model: fed at positions {mine}, expected {want}"


def check_loop(fn, seed: int, prompt: list[int], max_tokens: int) -> Recorder:
    model = tiny_model(seeded(seed))
    kv = Recorder(model.config.n_layers)
    got = fn(model, list(prompt), max_tokens, kv)
    label = f"{max_tokens} tokens after a prompt of {len(prompt)}"
    assert got is not None, f"{label}: your function returned None; is a `return` missing?"
    assert isinstance(got, list), f"{label}: expected a list of ids, got {type(got).__name__}"
    expect_equal([int(t) for t in got], naive_text(model, prompt, max_tokens), label)
    return kv


@loop
def same_text(fn):
    """the text is that of the loop without a cache"""
    check_loop(fn, 0, [3, 1, 4, 1, 5], 12)
    check_loop(fn, 1, [9], 9)


@loop
def counts(fn):
    """max_tokens tokens, neither more nor fewer; 0 gives none"""
    check_loop(fn, 2, [2, 7], 1)
    check_loop(fn, 2, [2, 7], 0)


@loop
def number_of_passes(fn):
    """as many passes as tokens; the last token is not fed"""
    kv = check_loop(fn, 3, [5, 6, 7, 8], 6)
    expect_equal(kv.fed, [4, 1, 1, 1, 1, 1], "tokens fed at each pass")
    expect_equal(kv.length, 9, "tokens in the cache at the end")


@loop
def prompt_untouched(fn):
    """the caller's prompt list is not changed"""
    model, prompt = tiny_model(seeded(4)), [1, 2, 3]
    fn(model, prompt, 3, Recorder(model.config.n_layers))
    expect_equal(prompt, [1, 2, 3], "the prompt after the call")


reuse = CHAPTER.task(
    "reuse",
    hints=(
        "Count how many tokens at the front are the same in both lists.",
        "Something must be fed, or there is no row to take logits from: keep at most len(prompt) - 1.",
    ),
)


def check_reuse(fn, cached: list[int], prompt: list[int], keep: int) -> None:
    got = fn(list(cached), list(prompt))
    label = f"reuse({cached}, {prompt})"
    assert got is not None, f"{label}: your function returned None; is a `return` missing?"
    assert isinstance(got, tuple) and len(got) == 2, f"{label}: expected (keep, feed), got {got!r}"
    expect_equal(got[0], keep, f"{label}: tokens to keep")
    expect_equal(list(got[1]), prompt[keep:], f"{label}: tokens to feed")


@reuse
def next_turn(fn):
    """the next turn repeats the conversation and adds to it"""
    check_reuse(fn, [1, 2, 3], [1, 2, 3, 4, 5], 3)


@reuse
def edited(fn):
    """an edited conversation is kept up to the edit"""
    check_reuse(fn, [1, 2, 3, 4], [1, 2, 9, 4, 5], 2)
    check_reuse(fn, [1, 2], [3, 4], 0)


@reuse
def same_after_a_difference(fn):
    """tokens that are equal again after a difference do not count"""
    check_reuse(fn, [1, 8, 3, 4], [1, 9, 3, 4, 5], 1)


@reuse
def all_cached(fn):
    """a prompt that is wholly cached still feeds its last token"""
    check_reuse(fn, [1, 2, 3], [1, 2, 3], 2)
    check_reuse(fn, [1, 2, 3, 4, 5], [1, 2, 3], 2)


@reuse
def nothing_cached(fn):
    """with nothing cached everything is fed"""
    check_reuse(fn, [], [7, 8], 0)
