"""Answers to exercise 02, the KV cache."""

from __future__ import annotations

import itertools

import torch
from bank import Bank

from minillm.attention import attention, reference_attention

BANK = Bank()


# ---------------------------------------------------------------- causal_mask


@BANK.wrong("causal_mask", says=r"query 0 may see keys \[0, 1, 2, 3, 4\], yours sees \[0\]")
def upper_left(n_queries, n_keys):
    return torch.ones(n_queries, n_keys, dtype=torch.bool).tril()


@BANK.wrong("causal_mask", says=r"query 0 may see keys \[0\], yours sees \[\]")
def not_itself(n_queries, n_keys):
    return torch.ones(n_queries, n_keys, dtype=torch.bool).tril(n_keys - n_queries - 1)


@BANK.wrong("causal_mask", says=r"query 0 may see keys \[0\], yours sees \[0, 1\]")
def one_ahead(n_queries, n_keys):
    return torch.ones(n_queries, n_keys, dtype=torch.bool).tril(n_keys - n_queries + 1)


@BANK.wrong("causal_mask", says=r"query 0 may see keys \[0\], yours sees \[1, 2, 3\]")
def true_means_hidden(n_queries, n_keys):
    return ~torch.ones(n_queries, n_keys, dtype=torch.bool).tril(n_keys - n_queries)


@BANK.wrong("causal_mask", says=r"query 0 may see keys \[0\], yours sees \[0, 1, 2, 3\]")
def no_mask(n_queries, n_keys):
    return torch.ones(n_queries, n_keys, dtype=torch.bool)


@BANK.wrong("causal_mask", says="dtype torch.float32")
def additive(n_queries, n_keys):
    return torch.zeros(n_queries, n_keys).masked_fill(torch.ones(n_queries, n_keys).triu(1) > 0, -torch.inf)


@BANK.right("causal_mask")
def by_tril(n_queries, n_keys):
    return torch.ones(n_queries, n_keys, dtype=torch.bool).tril(n_keys - n_queries)


@BANK.right("causal_mask")
def by_last_rows_of_the_square(n_queries, n_keys):
    return torch.ones(n_keys, n_keys, dtype=torch.bool).tril()[n_keys - n_queries :]


# ---------------------------------------------------------------- attend


def write(k_cache, v_cache, length, k, v):
    k_cache[:, length : length + len(k)] = k.transpose(0, 1)
    v_cache[:, length : length + len(v)] = v.transpose(0, 1)


def read(k_cache, v_cache, end):
    return k_cache[:, :end].transpose(0, 1), v_cache[:, :end].transpose(0, 1)


@BANK.wrong("attend", says="tokens 3 to 3, on a past of 3: 32 of 32 values differ")
def forgets_the_past(k_cache, v_cache, length, q, k, v):
    write(k_cache, v_cache, length, k, v)
    return attention(q, k, v)


@BANK.wrong("attend", says="NaN at index")
def reads_the_whole_capacity(k_cache, v_cache, length, q, k, v):
    write(k_cache, v_cache, length, k, v)
    return attention(q, *read(k_cache, v_cache, k_cache.shape[1]))


@BANK.wrong("attend", says="cannot be the last rows|empty|on a past of 0")
def attends_before_it_writes(k_cache, v_cache, length, q, k, v):
    out = attention(q, *read(k_cache, v_cache, length))
    write(k_cache, v_cache, length, k, v)
    return out


@BANK.wrong("attend", says=r"tokens 0 to 4, on a past of 0: .*first at index \[0, 0, 0\]")
def no_causal_mask(k_cache, v_cache, length, q, k, v):
    write(k_cache, v_cache, length, k, v)
    keys, values = read(k_cache, v_cache, length + len(k))
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (keys, values))
    scores = torch.einsum("thd,shd->hts", q, keys) / q.shape[2] ** 0.5
    return torch.einsum("hts,shd->thd", scores.softmax(-1), values)


@BANK.wrong("attend", says="k_cache after all tokens|NaN|on a past of 3")
def always_writes_at_the_front(k_cache, v_cache, length, q, k, v):
    write(k_cache, v_cache, 0, k, v)
    return attention(q, *read(k_cache, v_cache, length + len(k)))


@BANK.wrong("attend", says="v_cache after all tokens|NaN")
def forgets_the_values(k_cache, v_cache, length, q, k, v):
    k_cache[:, length : length + len(k)] = k.transpose(0, 1)
    return attention(q, *read(k_cache, v_cache, length + len(k)))


@BANK.wrong("attend", says="tokens 0 to 3, on a past of 0")
def heads_in_the_wrong_groups(k_cache, v_cache, length, q, k, v):
    write(k_cache, v_cache, length, k, v)
    keys, values = read(k_cache, v_cache, length + len(k))
    group = q.shape[1] // k.shape[1]
    return reference_attention(q, keys.repeat(1, group, 1), values.repeat(1, group, 1))


@BANK.right("attend")
def step_by_step(k_cache, v_cache, length, q, k, v):
    for i in range(len(k)):
        k_cache[:, length + i], v_cache[:, length + i] = k[i], v[i]
    return reference_attention(q, *read(k_cache, v_cache, length + len(k)))


@BANK.right("attend")
def row_by_row(k_cache, v_cache, length, q, k, v):
    write(k_cache, v_cache, length, k, v)
    rows = [attention(q[i : i + 1], *read(k_cache, v_cache, length + i + 1)) for i in range(len(q))]
    return torch.cat(rows)


# ---------------------------------------------------------------- kv_bytes


@BANK.wrong("kv_bytes", says="yours is 0.5 times that")
def only_the_keys(config, tokens, bytes_per_number):
    return tokens * config.n_layers * config.n_kv_heads * config.head_dim * bytes_per_number


@BANK.wrong("kv_bytes", says="yours is 4 times")
def all_query_heads(config, tokens, bytes_per_number):
    return 2 * tokens * config.n_layers * config.n_heads * config.head_dim * bytes_per_number


@BANK.wrong("kv_bytes", says="yours is 0.03125 times")
def one_layer(config, tokens, bytes_per_number):
    return 2 * tokens * config.n_kv_heads * config.head_dim * bytes_per_number


@BANK.wrong("kv_bytes", says="3 layers")
def always_two_bytes(config, tokens, bytes_per_number):
    return 2 * tokens * config.n_layers * config.n_kv_heads * config.head_dim * 2


@BANK.wrong("kv_bytes", says="yours is 8 times")
def bits(config, tokens, bytes_per_number):
    return 16 * tokens * config.n_layers * config.n_kv_heads * config.head_dim * bytes_per_number


@BANK.right("kv_bytes")
def with_the_property(config, tokens, bytes_per_number):
    return config.kv_elements_per_token * tokens * bytes_per_number


@BANK.right("kv_bytes")
def by_adding_up(config, tokens, bytes_per_number):
    return sum(2 * tokens * config.n_kv_heads * config.head_dim * bytes_per_number for _ in range(config.n_layers))


# ---------------------------------------------------------------- decode_greedy


def step(model, new, first_position, kv, commit=None):
    positions = torch.arange(first_position, first_position + len(new))
    hidden = model(torch.tensor(new), positions, kv)
    kv.commit(len(new) if commit is None else commit)
    return int(model.logits(hidden[-1:]).argmax())


@BANK.wrong("decode_greedy", says=r"pass 2 of the model: fed at positions \[0\], expected \[4\]")
def position_starts_at_zero(model, prompt, max_tokens, kv):
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(step(model, tokens[kv.length :], 0, kv))
    return tokens[len(prompt) :]


@BANK.wrong("decode_greedy", says=r"pass 2 of the model: fed at positions \[0, 1, 2, 3, 4\], expected \[4\]")
def never_commits(model, prompt, max_tokens, kv):
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(step(model, tokens[kv.length :], kv.length, kv, commit=0))
    return tokens[len(prompt) :]


@BANK.wrong("decode_greedy", says="13 items, expected 12")
def one_token_too_many(model, prompt, max_tokens, kv):
    tokens = list(prompt)
    while len(tokens) <= len(prompt) + max_tokens:
        tokens.append(step(model, tokens[kv.length :], kv.length, kv))
    return tokens[len(prompt) :]


@BANK.wrong("decode_greedy", says="differs first at index 0|items, expected")
def loses_the_first_token(model, prompt, max_tokens, kv):
    tokens = [*prompt, step(model, prompt, 0, kv)]
    out = []
    for _ in range(max_tokens):
        tokens.append(step(model, tokens[kv.length :], kv.length, kv))
        out.append(tokens[-1])
    return out


@BANK.wrong("decode_greedy", says=r"pass 2 of the model: fed at positions \[0, 1, 2, 3, 4\], expected \[4\]")
def feeds_everything_again(model, prompt, max_tokens, kv):
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(step(model, tokens, 0, kv))
    return tokens[len(prompt) :]


@BANK.wrong("decode_greedy", says="differs first at index 0|items, expected")
def returns_the_prompt_too(model, prompt, max_tokens, kv):
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(step(model, tokens[kv.length :], kv.length, kv))
    return tokens


@BANK.wrong("decode_greedy", says="the prompt after the call")
def grows_the_callers_list(model, prompt, max_tokens, kv):
    start = len(prompt)
    for _ in range(max_tokens):
        prompt.append(step(model, prompt[kv.length :], kv.length, kv))
    return prompt[start:]


@BANK.right("decode_greedy")
def prefill_then_decode(model, prompt, max_tokens, kv):
    out = []
    new, position = list(prompt), 0
    for _ in range(max_tokens):
        token = step(model, new, position, kv)
        position += len(new)
        new = [token]
        out.append(token)
    return out


@BANK.right("decode_greedy")
def with_the_packages_step(model, prompt, max_tokens, kv):
    from minillm.generation import next_logits

    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(next_logits(model, tokens, kv).argmax()))
    return tokens[len(prompt) :]


# ---------------------------------------------------------------- reuse


@BANK.wrong("reuse", says=r"reuse\(\[1, 2, 3, 4\], \[1, 2, 9, 4, 5\]\): tokens to keep: yours 4, expected 2")
def trusts_the_length(cached, prompt):
    keep = min(len(cached), len(prompt) - 1)
    return keep, prompt[keep:]


@BANK.wrong("reuse", says="tokens to keep: yours 3, expected 2")
def feeds_nothing(cached, prompt):
    keep = 0
    while keep < min(len(cached), len(prompt)) and cached[keep] == prompt[keep]:
        keep += 1
    return keep, prompt[keep:]


@BANK.wrong("reuse", says=r"\[1, 2, 9, 4, 5\]\): tokens to keep: yours 3, expected 2")
def counts_equal_tokens_anywhere(cached, prompt):
    keep = min(sum(a == b for a, b in zip(cached, prompt, strict=False)), len(prompt) - 1)
    return keep, prompt[keep:]


@BANK.wrong("reuse", says="tokens to keep: yours 2, expected 3")
def keeps_one_too_few(cached, prompt):
    keep = 0
    while keep < min(len(cached), len(prompt) - 1) and cached[keep] == prompt[keep]:
        keep += 1
    return max(keep - 1, 0), prompt[max(keep - 1, 0) :]


@BANK.wrong("reuse", says="tokens to feed")
def feeds_the_kept_part(cached, prompt):
    keep = 0
    while keep < min(len(cached), len(prompt) - 1) and cached[keep] == prompt[keep]:
        keep += 1
    return keep, prompt


@BANK.right("reuse")
def from_the_longest_down(cached, prompt):
    for keep in range(min(len(cached), len(prompt) - 1), -1, -1):
        if cached[:keep] == prompt[:keep]:
            break
    return keep, prompt[keep:]


@BANK.right("reuse")
def with_takewhile(cached, prompt):
    keep = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(cached, prompt[:-1], strict=False))))
    return keep, prompt[keep:]
