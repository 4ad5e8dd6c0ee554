"""Attention equals the formula written out in loops, and its mask is aligned to the last row of the past."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from minillm import attention as module
from minillm.attention import attention, causal_mask, reference_attention, tiled_attention

HEADS = [(1, 1), (4, 4), (6, 2), (6, 3), (5, 1)]  # n_heads, n_kv_heads
FUNCTIONS = [reference_attention, attention, tiled_attention, partial(tiled_attention, rows=2, columns=3)]
SHAPES = [(1, 1), (1, 2), (1, 9), (2, 2), (7, 7), (2, 3), (3, 8), (8, 9), (5, 40)]  # T new rows of S


def rows(n_queries: int, n_keys: int, n_heads: int, n_kv_heads: int, head_dim: int = 6) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(n_queries * 1000 + n_keys * 10 + n_heads)
    shapes = [(n_queries, n_heads, head_dim), (n_keys, n_kv_heads, head_dim), (n_keys, n_kv_heads, head_dim)]
    return tuple(2 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def in_loops(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One number after the other, in Python's own floats: shares nothing with the code under test."""
    n_queries, n_heads, head_dim = q.shape
    n_keys, n_kv_heads, _ = k.shape
    q, k, v = q.tolist(), k.tolist(), v.tolist()
    out = []
    for row in range(n_queries):
        sees = n_keys - n_queries + row + 1
        out.append([])
        for head in range(n_heads):
            group = head // (n_heads // n_kv_heads)
            scores = [
                sum(a * b for a, b in zip(q[row][head], k[j][group], strict=True)) / math.sqrt(head_dim)
                for j in range(sees)
            ]
            weights = [math.exp(score - max(scores)) for score in scores]
            total = math.fsum(weights)
            out[row].append(
                [math.fsum(w * v[j][group][d] for j, w in enumerate(weights)) / total for d in range(head_dim)]
            )
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_attention_equals_the_formula_in_loops(function, shape, heads):
    q, k, v = rows(*shape, *heads)
    torch.testing.assert_close(function(q, k, v), in_loops(q, k, v), rtol=0, atol=1e-12)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_fused_kernel_equals_the_reference(shape, heads):
    q, k, v = rows(*shape, *heads)
    torch.testing.assert_close(attention(q, k, v), reference_attention(q, k, v), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("n_queries", "n_keys"), SHAPES)
def test_row_i_sees_the_past_itself_and_nothing_else(n_queries, n_keys):
    mask = causal_mask(n_queries, n_keys)
    past = n_keys - n_queries
    assert mask.shape == (n_queries, n_keys) and mask.dtype == torch.bool
    for i, row in enumerate(mask.tolist()):
        assert row == [True] * (past + i + 1) + [False] * (n_queries - i - 1)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("n_queries", "n_keys"), [(1, 5), (3, 8), (6, 6)])
def test_a_row_depends_on_every_key_it_sees_and_on_no_later_one(function, n_queries, n_keys):
    q, k, v = rows(n_queries, n_keys, 4, 2)
    before = function(q, k, v)
    for j in range(n_keys):
        for tensor in (k, v):
            kept = tensor[j].clone()
            tensor[j] += 1 + torch.arange(tensor[j].numel(), dtype=tensor.dtype).view_as(tensor[j])
            changed = (function(q, k, v) != before).flatten(1).any(1).tolist()
            tensor[j] = kept
            past = n_keys - n_queries
            sees = [j <= past + i for i in range(n_queries)]
            if tensor is k:  # a row that sees a single key gives it all its weight, whatever the key
                sees = [see and past + i > 0 for i, see in enumerate(sees)]
            assert changed == sees


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("n_queries", "n_keys"), [(2, 1), (5, 4), (3, 0)])
def test_more_queries_than_keys_is_an_error(function, n_queries, n_keys):
    with pytest.raises(ValueError, match=f"{n_queries} queries .* {n_keys} keys"):
        function(*rows(n_queries, n_keys, 2, 1))


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_mask_that_is_off_by_one_is_noticed(shift, monkeypatch):
    """A stored mutant: the comparison with the loops must reject it."""

    def shifted(n_queries, n_keys, device=None):
        return torch.ones(n_queries, n_keys, dtype=torch.bool).tril(n_keys - n_queries + shift)

    monkeypatch.setattr(module, "causal_mask", shifted)
    q, k, v = rows(3, 8, 6, 2)
    for function in (reference_attention, attention):
        assert (function(q, k, v) - in_loops(q, k, v)).abs().max() > 1e-3


def test_a_mask_aligned_to_the_upper_left_is_noticed():
    """The trap that the module's docstring names: the `is_causal` flag of PyTorch's kernel, used on top of a past."""
    q, k, v = rows(3, 8, 4, 4)
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    wrong = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True)[0].transpose(0, 1)
    assert (wrong - in_loops(q, k, v)).abs().max() > 1e-3


def test_heads_share_keys_in_neighbouring_groups():
    """Query heads 0, 1, 2 use the first key head and 3, 4, 5 the second; not 0, 2, 4 and 1, 3, 5."""
    q, k, v = rows(2, 5, 6, 2)
    for function in FUNCTIONS:
        whole = function(q, k, v)
        for group in range(2):
            part = function(q[:, 3 * group : 3 * group + 3], k[:, group : group + 1], v[:, group : group + 1])
            torch.testing.assert_close(whole[:, 3 * group : 3 * group + 3], part, rtol=0, atol=1e-12)
