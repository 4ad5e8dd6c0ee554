"""Exercise 08, grouped heads: sharing, attention without a copy, the cache's budget, pooling, the time of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.lab.check import Chapter, expect_close, seeded
from minillm.lab.checks.ch03 import expect_named, expect_tuple

CHAPTER = Chapter("08")


def expect_result(got: object, want: Tensor, label: str, mistakes: Mapping[str, Callable[[], Tensor]]) -> None:
    """A tensor. One that a known mistake would give is called by that mistake's name."""
    if isinstance(got, Tensor):
        wrong = got.shape != want.shape or not torch.allclose(got.to(want.dtype), want, rtol=1e-6, atol=1e-8)
        made = [name for name, make in mistakes.items() if wrong and same(got, make())]
        assert not made, f"{label}: yours is what comes out {made[0]}"
    expect_close(got, want, label, rtol=1e-6, atol=1e-8)


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.to(b.dtype), b, rtol=1e-6, atol=1e-8)


def call(fn: Callable, *arguments: object) -> object:
    """Call with copies, and see that they stay as they are."""
    given = [x.clone() if isinstance(x, Tensor) else x for x in arguments]
    got = fn(*given)
    for i, (before, after) in enumerate(zip(arguments, given, strict=True)):
        untouched = not isinstance(before, Tensor) or torch.equal(before, after)
        assert untouched, f"your function changed its argument {i + 1}: that belongs to the caller"
    return got.contiguous() if isinstance(got, Tensor) else got


# ---------------------------------------------------------------- spread_heads


spread = CHAPTER.task(
    "spread_heads",
    hints=(
        "Write down, for 6 query heads and 2 KV heads, which KV head stands at place 0, 1, ..., 5.",
        "Neighbours share: the first n_heads / n_kv_heads query heads read KV head 0, the next ones KV head 1.",
        "Two functions of PyTorch repeat. One puts copies of a thing side by side, the other repeats the whole row.",
    ),
)


def check_spread(fn: Callable, tokens: int, n_kv_heads: int, n_heads: int, head_dim: int) -> None:
    """Each number says which token, KV head and coordinate it is."""
    s, g, d = (torch.arange(n, dtype=torch.float64) for n in (tokens, n_kv_heads, head_dim))
    k = 10000 * (s[:, None, None] + 1) + 100 * g[:, None] + d
    label = f"{n_heads} query heads, k {list(k.shape)}"
    got = call(fn, k, n_heads)
    assert isinstance(got, Tensor), f"{label}: expected a tensor, got {type(got).__name__}"
    shape = [tokens, n_heads, head_dim]
    assert list(got.shape) == shape, f"{label}: shape {list(got.shape)}, expected {shape} (tokens, heads, head_dim)"
    group = n_heads // n_kv_heads
    for h in range(n_heads):
        row = got[0, h]
        found = [i for i in range(n_kv_heads) if torch.equal(row, k[0, i])]
        assert found, f"{label}: at query head {h}, token 0, stands {row.tolist()}: not the row of any one KV head"
        wanted = h // group
        assert found[0] == wanted, (
            f"{label}: query head {h} finds KV head {found[0]}, expected {wanted}: "
            f"the {group} query heads that share a KV head stand side by side"
        )
    expect_close(got, torch.stack([k[:, h // group] for h in range(n_heads)], 1), label)


@spread
def three_share(fn):
    """query heads that share a KV head stand side by side"""
    check_spread(fn, 2, 2, 6, 3)
    check_spread(fn, 5, 3, 9, 4)


@spread
def all_tokens(fn):
    """tokens and coordinates stay in their places"""
    check_spread(fn, 7, 2, 4, 6)
    check_spread(fn, 1, 4, 8, 2)


@spread
def nobody_shares(fn):
    """with as many KV heads as query heads nothing changes"""
    check_spread(fn, 3, 4, 4, 2)


@spread
def all_share(fn):
    """with one KV head all query heads read it"""
    check_spread(fn, 3, 1, 5, 2)


# ---------------------------------------------------------------- grouped_attention


grouped = CHAPTER.task(
    "grouped_attention",
    hints=(
        "Give the queries of a group an axis: [n_heads, D] becomes [n_kv_heads, group, D]. Why in this order?",
        "Each KV head meets its own group only. Bring k to [n_kv_heads, S, D], and it is a batched product.",
        "Scores are [n_kv_heads, group, S]. Divide by sqrt(D), softmax over the keys, and weigh the values.",
    ),
)


def oracle(q: Tensor, k: Tensor, v: Tensor, reads: Callable[[int], int] | None = None, scale: float = 1.0) -> Tensor:
    """Head by head, in loops. reads: which KV head a query head looks at."""
    group = len(q) // k.shape[1]
    rows = []
    for h in range(len(q)):
        i = h // group if reads is None else reads(h)
        weights = (k[:, i] @ q[h] * scale / q.shape[1] ** 0.5).softmax(0)
        rows.append(weights @ v[:, i])
    return torch.stack(rows)


def over_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The softmax over the queries of a group in place of the keys."""
    q, k, v = q.unflatten(0, (k.shape[1], -1)), k.transpose(0, 1), v.transpose(0, 1)
    return ((q @ k.mT / q.shape[-1] ** 0.5).softmax(1) @ v).flatten(0, 1)


def check_grouped(fn: Callable, seed: int, n_heads: int, n_kv_heads: int, keys: int, head_dim: int, size: float = 1):
    g = torch.Generator().manual_seed(seeded(seed))
    q, k, v = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in (
        (n_heads, head_dim), (keys, n_kv_heads, head_dim), (keys, n_kv_heads, head_dim)))  # fmt: skip
    q, label = size * q, f"q {[n_heads, head_dim]}, k and v {[keys, n_kv_heads, head_dim]}"
    want, group = oracle(q, k, v), n_heads // n_kv_heads
    got = call(fn, q, k, v)
    expect_result(
        got,
        want,
        label,
        {
            "if query head h reads KV head h % n_kv_heads; neighbours share one": (
                lambda: oracle(q, k, v, lambda h: h % n_kv_heads)
            ),
            "if every query head reads the first KV head": lambda: oracle(q, k, v, lambda h: 0),
            "without the division by sqrt(head_dim)": lambda: oracle(q, k, v, scale=head_dim**0.5),
            "with a division by head_dim, not by its square root": lambda: oracle(q, k, v, scale=head_dim**-0.5),
            "if the softmax runs over the queries of a group, not over the keys": lambda: over_heads(q, k, v),
            "if the keys are taken for the values": lambda: oracle(q, k, k),
            "if the values are taken for the keys": lambda: oracle(q, v, v),
            "with the heads of the result in another order": (
                lambda: want.unflatten(0, (n_kv_heads, group)).transpose(0, 1).flatten(0, 1)
            ),
            "if the queries of a group are averaged to one": (
                lambda: oracle(q.unflatten(0, (n_kv_heads, group)).mean(1).repeat_interleave(group, 0), k, v)
            ),
            "without the softmax": lambda: torch.stack(
                [(k[:, h // group] @ q[h] / head_dim**0.5) @ v[:, h // group] for h in range(n_heads)]
            ),
        },
    )


@grouped
def groups(fn):
    """several query heads share a KV head, and attend to all keys"""
    check_grouped(fn, 0, 6, 2, 5, 4)
    check_grouped(fn, 1, 9, 3, 7, 8)


@grouped
def one_for_each(fn):
    """as many KV heads as query heads: plain attention"""
    check_grouped(fn, 2, 4, 4, 6, 2)


@grouped
def one_for_all(fn):
    """one KV head for all"""
    check_grouped(fn, 3, 5, 1, 3, 6)


@grouped
def one_key(fn):
    """a single key"""
    check_grouped(fn, 4, 6, 3, 1, 4)


@grouped
def large_scores(fn):
    """large scores: the softmax must not overflow"""
    check_grouped(fn, 5, 6, 2, 5, 4, size=1e4)


class Largest(TorchDispatchMode):
    """Notes the most numbers that any operation has written to new memory."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor):
                self.most = max(self.most, x.untyped_storage().nbytes() // x.element_size())
        return result


@grouped
def no_copies(fn):
    """the keys are shared, not copied: no tensor is larger than k"""
    q, k, v = torch.randn(8, 16), torch.randn(50, 2, 16), torch.randn(50, 2, 16)
    with Largest() as seen:
        fn(q, k, v)
    assert seen.most <= k.numel(), (
        f"q [8, 16], k [50, 2, 16]: you made a tensor of {seen.most} numbers, and k has {k.numel()}: "
        "the keys were repeated for each query head, and what grouping saves in reading is lost"
    )


# ---------------------------------------------------------------- cache_budget


budget = CHAPTER.task(
    "cache_budget",
    hints=(
        "What is kept for one token? Count tensors, layers, heads, coordinates; then bytes.",
        "The memory holds the weights once, and a whole cache for every text.",
        "A text of which only a part fits does not fit. And a batch is never negative.",
    ),
)


def check_budget(fn: Callable, layers: int, heads: int, dim: int, size: int, context: int, memory: int, weights: int):
    label = (
        f"{layers} layers, {heads} KV heads of {dim}, {size} bytes a number, {context} tokens, "
        f"{memory:,} bytes of memory, {weights:,} of weights"
    )
    got = expect_tuple(fn(layers, heads, dim, size, context, memory, weights), ("bytes a token", "texts"), label)
    one = 2 * layers * heads * dim * size
    expect_named(
        got[0],
        one,
        f"bytes a token, {label}",
        {
            "for keys alone: values are kept too": one // 2,
            "for a single layer": one // layers,
            "for a single head": one // heads,
            "without the bytes of a number": one // size,
            "in bits": 8 * one,
            "for all tokens": one * context,
            "without head_dim": one // dim,
        },
    )
    free = memory - weights
    texts = max(0, free // (one * context))
    for name, value in zip(("bytes a token", "texts"), got, strict=True):
        whole = isinstance(value, int) and not isinstance(value, bool)
        assert whole, f"{name}, {label}: {value!r} is no whole number (int)"
    if free < 0:
        assert got[1] == 0, f"texts, {label}: yours {got[1]}, expected 0: the weights alone do not fit"
    expect_named(
        got[1],
        texts,
        f"texts, {label}",
        {
            "if the weights took no memory": memory // (one * context),
            "if a text of which a part fits counted": -(-free // (one * context)),
            "when it is rounded to the nearest": round(free / (one * context)),
            "for a context of one token": free // one,
            "if the batch shared one set of weights per text": memory // (one * context + weights),
        },
    )


@budget
def a_model(fn):
    """Llama-2-7B in 80 GB, 4096 tokens each"""
    check_budget(fn, 32, 32, 128, 2, 4096, 80 * 10**9, 13_500_000_000)


@budget
def grouped_model(fn):
    """a grouped model, another context, another number of bytes"""
    check_budget(fn, 30, 3, 64, 4, 1000, 10**9, 540_000_000)
    check_budget(fn, 80, 8, 128, 1, 777, 80 * 10**9, 70_000_000_000)


@budget
def to_the_byte(fn):
    """a memory that is just enough, and one byte less"""
    one = 2 * 3 * 2 * 5 * 2
    check_budget(fn, 3, 2, 5, 2, 7, 1000 + 4 * 7 * one, 1000)
    check_budget(fn, 3, 2, 5, 2, 7, 1000 + 4 * 7 * one - 1, 1000)


@budget
def nothing_fits(fn):
    """weights that do not fit: no text, and no negative number of texts"""
    check_budget(fn, 4, 4, 8, 2, 16, 10**6, 2 * 10**6)
    check_budget(fn, 4, 4, 8, 2, 16, 10**6, 10**6)


# ---------------------------------------------------------------- pool_kv_heads


pool = CHAPTER.task(
    "pool_kv_heads",
    hints=(
        "Give heads and coordinates an axis each: rows are [heads * head_dim, ...], the heads come first.",
        "The heads that become one are neighbours. Split the axis of heads in two; which part comes first?",
        "Mean over the members of a group. Coordinate i of the new head is made of coordinates i of the old ones.",
        "A bias has no second axis: let the shape behind the rows be anything.",
    ),
)


def check_pool(fn: Callable, seed: int, heads: int, groups: int, dim: int, width: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(seeded(seed))
    rows = torch.randn(heads * dim, *width, generator=g, dtype=torch.float64)
    group, label = heads // groups, f"{heads} heads of {dim} to {groups}, rows {[heads * dim, *width]}"
    each = [rows[i * dim : (i + 1) * dim] for i in range(heads)]

    def pooled(members: Callable[[int], list[int]]) -> Tensor:
        return torch.cat([sum(each[i] for i in members(j)) / len(members(j)) for j in range(groups)])

    want = pooled(lambda j: list(range(j * group, (j + 1) * group)))
    expect_result(
        call(fn, rows, groups, dim),
        want,
        label,
        {
            "when heads 0, n, 2 n, ... are pooled; neighbours belong together": (
                lambda: pooled(lambda j: list(range(j, heads, groups)))
            ),
            "with the sum in place of the mean": lambda: want * group,
            "if only the first head of each group is kept": lambda: pooled(lambda j: [j * group]),
            "if neighbouring rows are averaged, and not whole heads": (
                lambda: rows.reshape(groups * dim, group, *width).mean(1)
            ),
            "if the mean is taken over all heads": lambda: torch.cat([sum(each) / heads] * groups),
            "if the heads keep an axis of their own: the rows are wanted one below the other": (
                lambda: want.reshape(groups, dim, *width)
            ),
            "with the coordinates of the heads interleaved": (
                lambda: want.reshape(groups, dim, *width).transpose(0, 1).reshape(groups * dim, *width)
            ),
            "with as many rows as before: the cache would not shrink": lambda: torch.cat(
                [want[i // group * dim : (i // group + 1) * dim] for i in range(heads)]
            ),
        },
    )


@pool
def neighbours(fn):
    """the heads of a group are neighbours, and become their mean"""
    check_pool(fn, 0, 6, 2, 3, (4,))
    check_pool(fn, 1, 8, 4, 2, (5,))


@pool
def all_to_one(fn):
    """all heads become one"""
    check_pool(fn, 2, 3, 1, 4, (7,))


@pool
def a_bias(fn):
    """a bias: rows without a second axis"""
    check_pool(fn, 3, 6, 3, 2, ())


@pool
def unchanged(fn):
    """as many groups as heads: nothing changes"""
    check_pool(fn, 4, 4, 4, 3, (2,))


# ---------------------------------------------------------------- attention_roofline


roof = CHAPTER.task(
    "attention_roofline",
    hints=(
        "Take one number of one key: how often is it read, and what does each query head do with it?",
        "Keys: a multiplication and an addition for each query head and number; values just the same.",
        "Bytes: keys and values, of KV heads. Operations: of query heads. The ratio forgets context and batch.",
        "Reading and computing go on at the same time: the step takes the longer of the two.",
    ),
)


def check_roof(
    fn: Callable, heads: int, kv: int, dim: int, context: int, batch: int, size: int, flops: float, bw: float
):
    label = (
        f"{heads} query heads on {kv} KV heads of {dim}, {batch} x {context} tokens, {size} bytes a number, "
        f"{flops:g} FLOP/s, {bw:g} bytes/s"
    )
    result = fn(heads, kv, dim, context, batch, size, flops, bw)
    got = expect_tuple(result, ("FLOP a byte", "seconds"), label)
    work, read = 4 * batch * heads * dim * context, 2 * batch * kv * dim * context * size
    value = work / read
    expect_named(
        got[0],
        value,
        f"FLOP a byte, {label}",
        {
            "if every query head had keys of its own": 2 / size,
            "with one operation for each number, where a multiplication and an addition are two": value / 2,
            "if only keys were read: values are too": 2 * value,
            "if only the scores were computed: the values are weighed too": value / 2,
            "without the bytes of a number": value * size,
            "the other way round: bytes over FLOP": read / work,
            "with the size of a group the other way round": 2 * kv / heads / size,
            "with the context counted twice": value * context,
            "if the keys were read once for the whole batch: each text has its own": value * batch,
        },
    )
    seconds = {"computing": work / flops, "reading": read / bw}
    longer = max(seconds.values())
    expect_named(
        got[1],
        longer,
        f"seconds, {label}",
        {
            "when both times are added: they overlap": sum(seconds.values()),
            "with the shorter of the two times": min(seconds.values()),
            "for one text of the batch": longer / batch,
            "for one token of the context": longer / context,
            "for a single head": longer / heads,
            "in milliseconds": 1e3 * longer,
        },
    )


@roof
def a_gpu(fn):
    """8 KV heads of 32 on a GPU: memory is the limit"""
    check_roof(fn, 32, 8, 128, 4096, 16, 2, 312e12, 2039e9)


@roof
def nobody_shares_a_head(fn):
    """as many KV heads as query heads"""
    check_roof(fn, 32, 32, 128, 1000, 3, 2, 312e12, 2039e9)
    check_roof(fn, 9, 9, 64, 100, 2, 4, 1e11, 2e10)


@roof
def all_share_a_head(fn):
    """one KV head on a machine with a low ridge: arithmetic is the limit"""
    check_roof(fn, 9, 1, 64, 300, 2, 2, 1e11, 2e10)


@roof
def eight_bits(fn):
    """a cache of one byte a number, and a single text"""
    check_roof(fn, 64, 8, 128, 500, 1, 1, 989e12, 3350e9)
