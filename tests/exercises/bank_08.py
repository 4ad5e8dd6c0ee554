"""Answers to exercise 08, grouped heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from bank import Bank

BANK = Bank()


# ---------------------------------------------------------------- spread_heads


@BANK.wrong("spread_heads", says="query head 1 finds KV head 1, expected 0: the 3 query heads that share")
def repeats_the_row(k, n_heads):
    return k.repeat(1, n_heads // k.shape[1], 1)


@BANK.wrong("spread_heads", says=r"shape \[6, 2, 3\], expected \[2, 6, 3\]")
def spreads_the_tokens(k, n_heads):
    return k.repeat_interleave(n_heads // k.shape[1], 0)


@BANK.wrong("spread_heads", says=r"shape \[2, 2, 9\], expected \[2, 6, 3\]")
def spreads_the_coordinates(k, n_heads):
    return k.repeat_interleave(n_heads // k.shape[1], -1)


@BANK.wrong("spread_heads", says=r"shape \[2, 12, 3\], expected \[2, 6, 3\]")
def n_heads_times(k, n_heads):
    return k.repeat_interleave(n_heads, 1)


@BANK.wrong("spread_heads", says="at query head 0, token 0, stands .*: not the row of any one KV head")
def reshaped_coordinates(k, n_heads):
    wide = k.repeat_interleave(n_heads // k.shape[1], -1)
    return wide.reshape(len(k), n_heads, -1)


@BANK.wrong("spread_heads", says=r"shape \[2, 2, 3, 3\], expected \[2, 6, 3\]")
def an_axis_too_many(k, n_heads):
    return k[:, :, None].repeat(1, 1, n_heads // k.shape[1], 1)


@BANK.wrong("spread_heads", says="query head 3 finds KV head 0, expected 1")
def all_the_first(k, n_heads):
    return k[:, :1].repeat(1, n_heads, 1)


@BANK.right("spread_heads")
def by_index(k, n_heads):
    return k[:, torch.arange(n_heads) // (n_heads // k.shape[1])]


@BANK.right("spread_heads")
def by_expand(k, n_heads):
    s, g, d = k.shape
    return k[:, :, None].expand(s, g, n_heads // g, d).reshape(s, n_heads, d)


# ---------------------------------------------------------------- grouped_attention


def split(q, k, v):
    return q.unflatten(0, (k.shape[1], -1)), k.transpose(0, 1), v.transpose(0, 1)


@BANK.wrong("grouped_attention", says="query head h reads KV head h % n_kv_heads; neighbours share one")
def group_before_kv_heads(q, k, v):
    n = k.shape[1]
    q, k, v = q.unflatten(0, (-1, n)).transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
    return ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(0, 1).flatten(0, 1)


@BANK.wrong("grouped_attention", says="with the heads of the result in another order")
def result_in_another_order(q, k, v):
    q, k, v = split(q, k, v)
    return ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(0, 1).flatten(0, 1)


@BANK.wrong("grouped_attention", says=r"without the division by sqrt\(head_dim\)")
def no_scale(q, k, v):
    q, k, v = split(q, k, v)
    return ((q @ k.mT).softmax(-1) @ v).flatten(0, 1)


@BANK.wrong("grouped_attention", says="with a division by head_dim, not by its square root")
def scaled_too_much(q, k, v):
    q, k, v = split(q, k, v)
    return ((q @ k.mT / q.shape[-1]).softmax(-1) @ v).flatten(0, 1)


@BANK.wrong("grouped_attention", says="softmax runs over the queries of a group, not over the keys")
def softmax_over_queries(q, k, v):
    q, k, v = split(q, k, v)
    return ((q @ k.mT / q.shape[-1] ** 0.5).softmax(1) @ v).flatten(0, 1)


@BANK.wrong("grouped_attention", says="the keys were repeated for each query head")
def keys_repeated(q, k, v):
    group = len(q) // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    weights = (torch.einsum("hd,shd->hs", q, k) / q.shape[1] ** 0.5).softmax(-1)
    return torch.einsum("hs,shd->hd", weights, v)


@BANK.wrong("grouped_attention", says="the keys were repeated for each query head")
def multiplied_out(q, k, v):
    q = q.unflatten(0, (k.shape[1], -1))
    weights = ((q * k[:, :, None]).sum(-1) / q.shape[-1] ** 0.5).softmax(0)
    return (weights[..., None] * v[:, :, None]).sum(0).flatten(0, 1)


@BANK.wrong("grouped_attention", says="the queries of a group are averaged to one")
def one_query_a_group(q, k, v):
    group = len(q) // k.shape[1]
    q, k, v = split(q, k, v)
    out = (q.mean(1, keepdim=True) @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
    return out.expand(-1, group, -1).flatten(0, 1)


@BANK.wrong("grouped_attention", says="the keys are taken for the values")
def keys_for_values(q, k, v):
    q, k, v = split(q, k, v)
    return ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ k).flatten(0, 1)


@BANK.wrong("grouped_attention", says="the softmax must not overflow: .*NaN")
def softmax_by_hand(q, k, v):
    q, k, v = split(q, k, v)
    e = (q @ k.mT / q.shape[-1] ** 0.5).exp()
    return (e / e.sum(-1, keepdim=True) @ v).flatten(0, 1)


@BANK.wrong("grouped_attention", says=r"shape \[2, 3, 4\], expected \[6, 4\]")
def heads_not_joined(q, k, v):
    q, k, v = split(q, k, v)
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


@BANK.right("grouped_attention")
def by_einsum(q, k, v):
    q = q.unflatten(0, (k.shape[1], -1))
    weights = (torch.einsum("grd,sgd->grs", q, k) / q.shape[-1] ** 0.5).softmax(-1)
    return torch.einsum("grs,sgd->grd", weights, v).flatten(0, 1)


@BANK.right("grouped_attention")
def group_by_group(q, k, v):
    group, scale = len(q) // k.shape[1], q.shape[1] ** -0.5
    rows = []
    for i in range(k.shape[1]):
        rows.append(F.softmax(q[i * group : (i + 1) * group] @ k[:, i].T * scale, dim=1) @ v[:, i])
    return torch.cat(rows)


# ---------------------------------------------------------------- cache_budget


def budget(one, context, memory, weights, texts=None):
    return one, max(0, (memory - weights) // (one * context)) if texts is None else texts


@BANK.wrong("cache_budget", says="bytes a token.*for keys alone: values are kept too")
def keys_alone(n_layers, n_kv_heads, head_dim, bytes_a_number, context, memory, weights):
    return budget(n_layers * n_kv_heads * head_dim * bytes_a_number, context, memory, weights)


@BANK.wrong("cache_budget", says="bytes a token.*for a single layer")
def one_layer(n_layers, n_kv_heads, head_dim, bytes_a_number, context, memory, weights):
    return budget(2 * n_kv_heads * head_dim * bytes_a_number, context, memory, weights)


@BANK.wrong("cache_budget", says="bytes a token.*without the bytes of a number")
def numbers_not_bytes(n_layers, n_kv_heads, head_dim, bytes_a_number, context, memory, weights):
    return budget(2 * n_layers * n_kv_heads * head_dim, context, memory, weights)


@BANK.wrong("cache_budget", says="texts.*if the weights took no memory")
def weights_forgotten(n_layers, n_kv_heads, head_dim, bytes_a_number, context, memory, weights):
    return budget(2 * n_layers * n_kv_heads * head_dim * bytes_a_number, context, memory, 0)


@BANK.wrong("cache_budget", says="texts.*if a text of which a part fits counted")
def rounded_up(n_layers, n_kv_heads, head_dim, bytes_a_number, context, memory, weights):
    one = 2 * n_layers * n_kv_heads * head_dim * bytes_a_number
    return budget(one, context, memory, weights, max(0, -(-(memory - weights) // (one * context))))


@BANK.wrong("cache_budget", says="texts.*when it is rounded to the nearest")
def rounded(n_layers, n_kv_heads, head_dim, bytes_a_number, context, memory, weights):
    one = 2 * n_layers * n_kv_heads * head_dim * bytes_a_number
    return budget(one, context, memory, weights, max(0, round((memory - weights) / (one * context))))


@BANK.wrong("cache_budget", says="is no whole number")
def a_part_of_a_text(n_layers, n_kv_heads, head_dim, bytes_a_number, context, memory, weights):
    one = 2 * n_layers * n_kv_heads * head_dim * bytes_a_number
    return budget(one, context, memory, weights, (memory - weights) / (one * context))


@BANK.wrong("cache_budget", says="expected 0: the weights alone do not fit")
def fewer_than_none(n_layers, n_kv_heads, head_dim, bytes_a_number, context, memory, weights):
    one = 2 * n_layers * n_kv_heads * head_dim * bytes_a_number
    return budget(one, context, memory, weights, (memory - weights) // (one * context))


@BANK.wrong("cache_budget", says="texts.*for a context of one token")
def context_forgotten(n_layers, n_kv_heads, head_dim, bytes_a_number, context, memory, weights):
    return budget(2 * n_layers * n_kv_heads * head_dim * bytes_a_number, 1, memory, weights)


@BANK.right("cache_budget")
def in_steps(n_layers, n_kv_heads, head_dim, bytes_a_number, context, memory, weights):
    key = n_kv_heads * head_dim * bytes_a_number
    return budget((key + key) * n_layers, context, memory, weights)


@BANK.right("cache_budget")
def by_counting(n_layers, n_kv_heads, head_dim, bytes_a_number, context, memory, weights):
    one, texts = 2 * n_layers * n_kv_heads * head_dim * bytes_a_number, 0
    while weights + (texts + 1) * one * context <= memory:
        texts += 1
    return one, texts


# ---------------------------------------------------------------- pool_kv_heads


def in_heads(rows, n_groups, head_dim):
    return rows.unflatten(0, (n_groups, -1, head_dim))


@BANK.wrong("pool_kv_heads", says="when heads 0, n, 2 n, ... are pooled; neighbours belong together")
def every_nth_head(rows, n_groups, head_dim):
    return rows.unflatten(0, (-1, n_groups, head_dim)).mean(0).flatten(0, 1)


@BANK.wrong("pool_kv_heads", says="with the sum in place of the mean")
def summed(rows, n_groups, head_dim):
    return in_heads(rows, n_groups, head_dim).sum(1).flatten(0, 1)


@BANK.wrong("pool_kv_heads", says="if only the first head of each group is kept")
def the_first(rows, n_groups, head_dim):
    return in_heads(rows, n_groups, head_dim)[:, 0].flatten(0, 1)


@BANK.wrong("pool_kv_heads", says="if neighbouring rows are averaged, and not whole heads")
def neighbouring_rows(rows, n_groups, head_dim):
    return rows.unflatten(0, (n_groups * head_dim, -1)).mean(1)


@BANK.wrong("pool_kv_heads", says="if the heads keep an axis of their own")
def not_flattened(rows, n_groups, head_dim):
    return in_heads(rows, n_groups, head_dim).mean(1)


@BANK.wrong("pool_kv_heads", says="with as many rows as before: the cache would not shrink")
def as_many_as_before(rows, n_groups, head_dim):
    heads = in_heads(rows, n_groups, head_dim)
    return heads.mean(1, keepdim=True).expand_as(heads).flatten(0, 2)


@BANK.wrong("pool_kv_heads", says="with the coordinates of the heads interleaved")
def interleaved(rows, n_groups, head_dim):
    return in_heads(rows, n_groups, head_dim).mean(1).transpose(0, 1).flatten(0, 1)


@BANK.wrong("pool_kv_heads", says="a bias: rows without a second axis: ")
def matrices_only(rows, n_groups, head_dim):
    _, d_model = rows.shape
    return rows.view(n_groups, -1, head_dim, d_model).mean(1).view(-1, d_model)


@BANK.wrong("pool_kv_heads", says="your function changed its argument 1")
def in_place(rows, n_groups, head_dim):
    rows /= len(rows) // (n_groups * head_dim)
    return in_heads(rows, n_groups, head_dim).sum(1).flatten(0, 1)


@BANK.right("pool_kv_heads")
def slice_by_slice(rows, n_groups, head_dim):
    heads = rows.split(head_dim)
    group = len(heads) // n_groups
    return torch.cat([sum(heads[i : i + group]) / group for i in range(0, len(heads), group)])


@BANK.right("pool_kv_heads")
def by_a_matrix(rows, n_groups, head_dim):
    group = len(rows) // (n_groups * head_dim)
    mix = torch.eye(n_groups, dtype=rows.dtype).repeat_interleave(group, 1) / group
    return torch.tensordot(mix, rows.unflatten(0, (-1, head_dim)), 1).flatten(0, 1)


# ---------------------------------------------------------------- attention_roofline


def counted(n_heads, n_kv_heads, head_dim, context, batch, size):
    return 4 * batch * n_heads * head_dim * context, 2 * batch * n_kv_heads * head_dim * context * size


@BANK.wrong("attention_roofline", says="if every query head had keys of its own")
def keys_for_each_query_head(n_heads, n_kv_heads, head_dim, context, batch, bytes_a_number, flops, bandwidth):
    work, read = counted(n_heads, n_heads, head_dim, context, batch, bytes_a_number)
    return work / read, max(work / flops, read / bandwidth)


@BANK.wrong("attention_roofline", says="where a multiplication and an addition are two")
def multiplications_only(n_heads, n_kv_heads, head_dim, context, batch, bytes_a_number, flops, bandwidth):
    work, read = counted(n_heads, n_kv_heads, head_dim, context, batch, bytes_a_number)
    return work / read / 2, max(work / 2 / flops, read / bandwidth)


@BANK.wrong("attention_roofline", says="if only keys were read")
def only_keys_read(n_heads, n_kv_heads, head_dim, context, batch, bytes_a_number, flops, bandwidth):
    work, read = counted(n_heads, n_kv_heads, head_dim, context, batch, bytes_a_number)
    return work / read * 2, max(work / flops, read / 2 / bandwidth)


@BANK.wrong("attention_roofline", says="without the bytes of a number")
def numbers_for_bytes(n_heads, n_kv_heads, head_dim, context, batch, bytes_a_number, flops, bandwidth):
    work, read = counted(n_heads, n_kv_heads, head_dim, context, batch, 1)
    return work / read, max(work / flops, read / bandwidth)


@BANK.wrong("attention_roofline", says="the other way round: bytes over FLOP")
def upside_down(n_heads, n_kv_heads, head_dim, context, batch, bytes_a_number, flops, bandwidth):
    work, read = counted(n_heads, n_kv_heads, head_dim, context, batch, bytes_a_number)
    return read / work, max(work / flops, read / bandwidth)


@BANK.wrong("attention_roofline", says="when both times are added: they overlap")
def added(n_heads, n_kv_heads, head_dim, context, batch, bytes_a_number, flops, bandwidth):
    work, read = counted(n_heads, n_kv_heads, head_dim, context, batch, bytes_a_number)
    return work / read, work / flops + read / bandwidth


@BANK.wrong("attention_roofline", says="with the shorter of the two times")
def the_shorter(n_heads, n_kv_heads, head_dim, context, batch, bytes_a_number, flops, bandwidth):
    work, read = counted(n_heads, n_kv_heads, head_dim, context, batch, bytes_a_number)
    return work / read, min(work / flops, read / bandwidth)


@BANK.wrong("attention_roofline", says="seconds.*for one text of the batch")
def one_text(n_heads, n_kv_heads, head_dim, context, batch, bytes_a_number, flops, bandwidth):
    work, read = counted(n_heads, n_kv_heads, head_dim, context, 1, bytes_a_number)
    return work / read, max(work / flops, read / bandwidth)


@BANK.wrong("attention_roofline", says="one KV head on a machine with a low ridge.*with the shorter of the two times")
def always_memory(n_heads, n_kv_heads, head_dim, context, batch, bytes_a_number, flops, bandwidth):
    work, read = counted(n_heads, n_kv_heads, head_dim, context, batch, bytes_a_number)
    return work / read, read / bandwidth


@BANK.wrong("attention_roofline", says="if the keys were read once for the whole batch: each text has its own")
def one_cache_for_all(n_heads, n_kv_heads, head_dim, context, batch, bytes_a_number, flops, bandwidth):
    work, read = counted(n_heads, n_kv_heads, head_dim, context, batch, bytes_a_number)
    return work * batch / read, max(work / flops, read / batch / bandwidth)


@BANK.right("attention_roofline")
def from_counts(n_heads, n_kv_heads, head_dim, context, batch, bytes_a_number, flops, bandwidth):
    work, read = counted(n_heads, n_kv_heads, head_dim, context, batch, bytes_a_number)
    return work / read, max(work / flops, read / bandwidth)


@BANK.right("attention_roofline")
def from_the_ridge(n_heads, n_kv_heads, head_dim, context, batch, bytes_a_number, flops, bandwidth):
    intensity = 2 * n_heads / n_kv_heads / bytes_a_number
    read = 2 * batch * context * n_kv_heads * head_dim * bytes_a_number
    return intensity, read / bandwidth * max(1, intensity / (flops / bandwidth))
