"""The cache changes nothing: whatever is fed, guessed, forgotten or forked, every row has the naive pass's logits.

One property carries the file. A plan is a list of random operations on some branches of a text; each pass over the
cache must give, row by row, the logits of a pass without one. Float64, small models, to 1e-9. The plans count what
they met, so that a property that never met the hard cases cannot pass. Stored mutants of the real code, each a
mistake that such code is known for, must be rejected by this same property.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from conftest import TINY, random_model
from einops import repeat
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from minillm.attention import attention, causal_mask
from minillm.kv_cache import ContiguousKV
from minillm.model import NoCache, Rope, Transformer, rotate

ROOM = 48
TOLERANCE = 1e-9

CONFIGS = {
    "grouped heads": TINY,
    "every head its own": replace(TINY, n_kv_heads=6),
    "one key head": replace(TINY, n_kv_heads=1, n_layers=3),
    "normed queries and keys": replace(TINY, qk_norm=True),
    "biases": replace(TINY, qkv_bias=True, out_bias=True, mlp_bias=True),
}


def naive_logits(model: Transformer, tokens: list[int]) -> torch.Tensor:
    return model.logits(model(torch.tensor(tokens), torch.arange(len(tokens)), NoCache()))


# One operation: what to do, on which branch, with which tokens, and a number to be read as the operation likes.
OPERATIONS = st.tuples(
    st.sampled_from(["feed", "feed", "guess", "truncate", "fork"]),
    st.integers(0, 3),
    st.lists(st.integers(0, TINY.vocab_size - 1), min_size=1, max_size=6),
    st.integers(0, 1000),
)
PLANS = st.lists(OPERATIONS, min_size=3, max_size=14)


def follow(model: Transformer, plan: list[tuple[str, int, list[int], int]], met: Counter) -> None:
    """Carry out a plan and compare every row. The test keeps its own account of what each branch holds."""
    branches = [(ContiguousKV(model.config, ROOM, model.dtype), [])]
    guessed, forked = set(), set()  # branches with overwritable rows behind their past; that share an origin
    for operation, which, tokens, number in plan:
        index = which % len(branches)
        kv, held = branches[index]
        if operation == "truncate":
            length = number % (len(held) + 1)
            met["truncations"] += length < len(held)
            kv.truncate(length)
            del held[length:]
        elif operation == "fork":
            if len(branches) < 4 and held:
                branches.append((kv.fork(), list(held)))
                forked |= {index, len(branches) - 1}
        elif len(held) + len(tokens) <= ROOM:
            hidden = model(torch.tensor(tokens), torch.arange(len(held), len(held) + len(tokens)), kv)
            expected = naive_logits(model, held + tokens)[len(held) :]
            error = (model.logits(hidden) - expected).abs().max()
            assert error <= TOLERANCE, f"{len(tokens)} tokens on a past of {len(held)} are off by {error}"
            met["rows"] += len(tokens)
            met["chunks on a past"] += len(tokens) > 1 and len(held) > 0
            met["guesses overwritten"] += index in guessed
            met["passes on a forked branch"] += index in forked
            keep = len(tokens) if operation == "feed" else number % len(tokens)
            guessed.discard(index)
            if keep < len(tokens):
                guessed.add(index)
                met["uncommitted passes"] += 1
            kv.commit(keep)
            held += tokens[:keep]


def check(model: Transformer, examples: int, phases=(Phase.generate, Phase.shrink)) -> Counter:
    """The property. -> what was met"""
    met = Counter()

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
    @given(PLANS)
    @torch.inference_mode()
    def every_row_equals_the_naive_pass(plan):
        follow(model, plan, met)

    every_row_equals_the_naive_pass()
    return met


@pytest.mark.parametrize("name", CONFIGS)
def test_every_row_equals_the_naive_pass(name):
    met = check(random_model(CONFIGS[name]), examples=150)
    assert met["rows"] > 500
    assert met["chunks on a past"] > 100
    assert met["truncations"] > 40
    assert met["uncommitted passes"] > 40
    assert met["guesses overwritten"] > 20
    assert met["passes on a forked branch"] > 60


# --- The stored mutants. Each takes monkeypatch and the model, and plants one mistake in the real code. ---


def attend_by(patch, attention):
    """Every cache that is made from now on attends by this function."""
    make = ContiguousKV.__init__
    patch.setattr(ContiguousKV, "__init__", lambda self, *args: make(self, *args, attention=attention))


def attention_with(mask=causal_mask, heads="s g d -> s (g r) d"):
    """The reference attention with a wrong mask or a wrong map of heads, for the cached path only."""

    def wrong(q, k, v):
        k, v = (repeat(x, heads, r=q.shape[1] // k.shape[1]) for x in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) / q.shape[2] ** 0.5
        scores = scores.masked_fill(~mask(len(q), len(k)), -torch.inf)
        return torch.einsum("hts,shd->thd", scores.softmax(-1), v)

    return wrong


def mask_too_wide(patch, model):
    def mask(t, s):
        return torch.ones(t, s, dtype=torch.bool).tril(s - t + 1)

    attend_by(patch, attention_with(mask=mask))


def mask_too_narrow(patch, model):
    def mask(t, s):
        return torch.ones(t, s, dtype=torch.bool).tril(max(s - t - 1, 0))  # the first row of all keeps itself

    attend_by(patch, attention_with(mask=mask))


def mask_upper_left(patch, model):
    def mask(t, s):
        return torch.ones(t, s, dtype=torch.bool).tril(0 if t > 1 else s - 1)  # right for one row, and without a past

    attend_by(patch, attention_with(mask=mask))


def heads_interleaved(patch, model):
    attend_by(patch, attention_with(heads="s g d -> s (r g) d"))


def position_off_by_one(shift):
    def plant(patch, model):
        real = Transformer.forward

        def forward(self, tokens, positions, kv):  # only on top of a past: a shift of all positions changes nothing
            return real(self, tokens, positions + shift * (kv.length > 0), kv)

        patch.setattr(Transformer, "forward", forward)

    return plant


def keys_turned(sign):
    """-1 undoes the rotation before K is stored, as if K were stored before rope; +1 rotates it twice."""

    def plant(patch, model):
        real = ContiguousKV.attend
        rope = Rope(model.config.head_dim, model.config.rope_theta, model.config.rope_scaling)

        def attend(self, layer, q, k, v):
            cos, sin = rope(torch.arange(self.length, self.length + len(k)), k.dtype)
            return real(self, layer, q, rotate(k, cos, sign * sin), v)

        patch.setattr(ContiguousKV, "attend", attend)

    return plant


def slot_skipped(slot):
    """One cached slot is not read."""

    def plant(patch, model):
        def skipping(q, k, v):
            past = len(k) - len(q)
            if past > 1:
                gone = slot % past
                k, v = (torch.cat([x[:gone], x[gone + 1 :]]) for x in (k, v))
            return attention(q, k, v)

        attend_by(patch, skipping)

    return plant


def truncate_does_nothing(patch, model):
    patch.setattr(ContiguousKV, "truncate", lambda self, length: None)


def truncate_keeps_one_more(patch, model):
    def truncate(self, length):
        self.length = min(length + 1, self.length)

    patch.setattr(ContiguousKV, "truncate", truncate)


def fork_shares_memory(patch, model):
    def fork(self):
        copy = object.__new__(ContiguousKV)
        copy.k, copy.v, copy.length, copy.attention = self.k, self.v, self.length, self.attention
        return copy

    patch.setattr(ContiguousKV, "fork", fork)


def fork_shares_values(patch, model):
    real = ContiguousKV.fork

    def fork(self):
        copy = real(self)
        copy.v = self.v
        return copy

    patch.setattr(ContiguousKV, "fork", fork)


def fork_copies_one_token_less(patch, model):
    real = ContiguousKV.fork

    def fork(self):
        copy = real(self)
        copy.k[:, :, self.length - 1] = 0
        copy.v[:, :, self.length - 1] = 0
        return copy

    patch.setattr(ContiguousKV, "fork", fork)


def commit_counts(shift):
    def plant(patch, model):
        def commit(self, n):
            self.length = max(0, min(self.length + n + shift, self.capacity))

        patch.setattr(ContiguousKV, "commit", commit)

    return plant


def guesses_become_past(patch, model):
    """The pass itself commits all it was given."""
    real = ContiguousKV.attend

    def attend(self, layer, q, k, v):
        out = real(self, layer, q, k, v)
        if layer == len(model.blocks) - 1:
            self.length += len(k)
        return out

    patch.setattr(ContiguousKV, "attend", attend)
    patch.setattr(ContiguousKV, "commit", lambda self, n: None)


def not_written(which):
    """New rows are used in their own pass, but never reach the memory of K or of V."""

    def plant(patch, model):
        real = ContiguousKV.attend

        def attend(self, layer, q, k, v):
            memory = getattr(self, which)
            before = memory.clone()
            out = real(self, layer, q, k, v)
            memory.copy_(before.nan_to_num())
            return out

        patch.setattr(ContiguousKV, "attend", attend)

    return plant


def layers_share_memory(patch, model):
    real = ContiguousKV.attend
    patch.setattr(ContiguousKV, "attend", lambda self, layer, q, k, v: real(self, 0, q, k, v))


MUTANTS = {
    "the mask shows one key too many": mask_too_wide,
    "the mask shows one key too few": mask_too_narrow,
    "the mask is aligned to the upper left": mask_upper_left,
    "query heads are dealt out to key heads in turn": heads_interleaved,
    "positions on a past are one too low": position_off_by_one(-1),
    "positions on a past are one too high": position_off_by_one(1),
    "K is stored before rope": keys_turned(-1),
    "K is rotated twice": keys_turned(1),
    "the first cached slot is skipped": slot_skipped(0),
    "the last cached slot is skipped": slot_skipped(-1),
    "a cached slot in the middle is skipped": slot_skipped(5),
    "truncate does nothing": truncate_does_nothing,
    "truncate keeps one token too many": truncate_keeps_one_more,
    "fork shares its memory": fork_shares_memory,
    "fork shares the values": fork_shares_values,
    "fork copies one token too few": fork_copies_one_token_less,
    "commit counts one too many": commit_counts(1),
    "commit counts one too few": commit_counts(-1),
    "guesses become past": guesses_become_past,
    "V is not written": not_written("v"),
    "K is not written": not_written("k"),
    "all layers share one memory": layers_share_memory,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_property_rejects_a_planted_mistake(name, monkeypatch):
    model = random_model()
    MUTANTS[name](monkeypatch, model)
    with pytest.raises(AssertionError, match="are off by"):
        check(model, examples=1000, phases=(Phase.generate,))


@pytest.mark.parametrize("slot", range(6))
def test_every_cached_slot_is_read(slot, monkeypatch):
    """Slot by slot, on one text: skipping any of them moves the logits far more than rounding does."""
    model = random_model()
    slot_skipped(slot)(monkeypatch, model)  # of the past, so not yet in the first pass
    kv = ContiguousKV(TINY, 8, torch.float64)
    tokens = [3, 14, 15, 9, 26, 5, 35]
    with torch.inference_mode():
        model(torch.tensor(tokens[:6]), torch.arange(6), kv)
        kv.commit(6)
        last = model.logits(model(torch.tensor(tokens[6:]), torch.arange(6, 7), kv))
        assert (last - naive_logits(model, tokens)[6:]).abs().max() > 1e-3


# --- What the cache refuses, and its arithmetic. ---


@pytest.mark.parametrize("capacity", [0, -3])
def test_a_cache_without_room_is_refused(capacity):
    with pytest.raises(ValueError, match=f"not {capacity}"):
        ContiguousKV(TINY, capacity)


def test_more_tokens_than_there_is_room_for_are_refused(tiny):
    kv = ContiguousKV(TINY, 5, torch.float64)
    tiny(torch.arange(5), torch.arange(5), kv)  # exactly full is fine
    kv.commit(3)
    tiny(torch.arange(2), torch.arange(3, 5), kv)
    with pytest.raises(ValueError, match=r"room for 5 tokens, and 6"):
        tiny(torch.arange(3), torch.arange(3, 6), kv)
    assert kv.length == 3


@pytest.mark.parametrize("n", [-1, 3, 6])
def test_commits_out_of_range_are_refused(n):
    kv = ContiguousKV(TINY, 5)
    kv.commit(3)
    with pytest.raises(ValueError, match=f"cannot commit {n} tokens"):
        kv.commit(n)
    assert kv.length == 3


@pytest.mark.parametrize("length", [-1, 4, 6])
def test_truncations_out_of_range_are_refused(length):
    kv = ContiguousKV(TINY, 5)
    kv.commit(3)
    with pytest.raises(ValueError, match=f"cannot truncate a cache of 3 tokens to {length}"):
        kv.truncate(length)
    assert kv.length == 3


def test_lengths_follow_commit_truncate_and_fork():
    kv = ContiguousKV(TINY, 5)
    lengths = [kv.length]
    for step in (lambda: kv.commit(4), lambda: kv.commit(0), lambda: kv.truncate(4), lambda: kv.truncate(2)):
        step()
        lengths.append(kv.length)
    assert lengths == [0, 4, 4, 4, 2]
    fork = kv.fork()
    assert (fork.length, fork.capacity) == (2, 5)
    fork.commit(1)
    assert (kv.length, fork.length) == (2, 3)
    kv.truncate(0)
    assert (kv.length, fork.length) == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_bytes_are_those_of_the_tensors(name, dtype):
    config = CONFIGS[name]
    kv = ContiguousKV(config, 7, dtype)
    assert kv.k.dtype == kv.v.dtype == dtype
    assert kv.nbytes_reserved == sum(x.numel() * x.element_size() for x in (kv.k, kv.v))
    assert kv.nbytes == 0
    kv.commit(3)
    kept = [x[:, :, :3] for x in (kv.k, kv.v)]
    assert kv.nbytes == sum(x.numel() * x.element_size() for x in kept)
    assert kv.nbytes == 3 * config.kv_elements_per_token * dtype.itemsize
    kv.commit(4)
    assert kv.nbytes == kv.nbytes_reserved


def test_grouped_heads_take_less_room():
    """Six query heads on two key heads: a third of the bytes of six on six."""
    grouped, full = (ContiguousKV(CONFIGS[name], 10) for name in ("grouped heads", "every head its own"))
    assert 3 * grouped.nbytes_reserved == full.nbytes_reserved
