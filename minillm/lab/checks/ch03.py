"""Exercise 03, prefill and decode: intensity, the roofline, the cost of a step, the times of a request, the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise

from minillm.config import ModelConfig
from minillm.lab.check import Chapter, expect_equal, expect_number
from minillm.lab.roofline import Limits, step_work
from minillm.lab.tiny import TINY

CHAPTER = Chapter("03")


def expect_named(got: object, want: float, label: str, mistakes: Mapping[str, float]) -> None:
    """A number. One that a known mistake would give is called by that mistake's name."""
    is_number = isinstance(got, (int, float)) and not isinstance(got, bool)
    if is_number and math.isnan(want):
        assert math.isnan(got), f"{label}: yours {got:.6g}, expected NaN: there is no such time"
        return
    if is_number and math.isnan(got):
        raise AssertionError(f"{label}: yours NaN, expected {want:.6g}")
    if is_number and not near(got, want):
        made = [mistake for mistake, value in mistakes.items() if near(got, value)]
        assert not made, f"{label}: yours {got:.6g}, expected {want:.6g}; yours is what comes out {', or '.join(made)}"
    expect_number(got, want, label, rtol=1e-9)


def near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9)


def expect_tuple(got: object, names: tuple[str, ...], label: str) -> tuple:
    assert got is not None, f"{label}: your function returned None; is a `return` missing?"
    right = isinstance(got, tuple) and len(got) == len(names)
    assert right, f"{label}: expected a tuple ({', '.join(names)}), got {got!r}"
    return got


intensity = CHAPTER.task(
    "matmul_intensity",
    hints=(
        "Two counts: how many operations, and how many numbers cross the border between memory and chip?",
        "Every weight meets every row: one multiplication and one addition each time.",
        "Three things move: the matrix [n_in, n_out], the input [rows, n_in], the output [rows, n_out].",
    ),
)


def check_intensity(fn: Callable, rows: int, n_in: int, n_out: int, size: float) -> None:
    flops = sum(2 for _ in range(rows) for _ in range(n_in) for _ in range(n_out))
    matrix, inputs, outputs = n_in * n_out, rows * n_in, rows * n_out
    want = flops / ((matrix + inputs + outputs) * size)
    mistakes = {
        "when a multiplication and an addition are counted as one operation": want / 2,
        "when only the matrix is moved, without the rows in and out": flops / (matrix * size),
        "when the rows that come out are not counted": flops / ((matrix + inputs) * size),
        "when the rows that go in are not counted": flops / ((matrix + outputs) * size),
        "when the matrix is read anew for each row": flops / ((rows * matrix + inputs + outputs) * size),
        "when numbers are counted, not bytes": want * size,
        "when bits are counted, not bytes": want / 8,
        "when bytes are divided by FLOP": 1 / want,
    }
    label = f"{rows} rows, a {n_in} x {n_out} matrix, {size} bytes a number"
    expect_named(fn(rows, n_in, n_out, size), want, label, mistakes)


@intensity
def the_example(fn):
    """one row: every weight is used once"""
    check_intensity(fn, 1, 2, 3, 4)
    check_intensity(fn, 1, 7, 5, 2)


@intensity
def many_rows(fn):
    """many rows: the matrix is read once for all of them"""
    check_intensity(fn, 11, 3, 8, 4)
    check_intensity(fn, 40, 9, 2, 2)


@intensity
def four_bits(fn):
    """half a byte a number (4 bits)"""
    check_intensity(fn, 3, 8, 5, 0.5)


roof = CHAPTER.task(
    "attainable_flops",
    hints=(
        "How many operations a second can the memory feed, if each byte it brings is good for `intensity` of them?",
        "Two limits hold at once. Which of them is felt?",
    ),
)


def check_roof(fn: Callable, value: float, flops: float, bandwidth: float) -> None:
    fed = value * bandwidth
    want = flops if fed > flops else fed
    mistakes = {
        "when the larger of the two limits is taken": fed if fed > flops else flops,
        "when memory is not looked at": flops,
        "when arithmetic is not looked at": fed,
        "when the two limits are added": fed + flops,
        "when bandwidth is divided by the intensity": bandwidth / value,
        "when bandwidth is not multiplied with the intensity": bandwidth,
        "when the intensity is multiplied with the FLOP/s": value * flops,
        "when it is given as a share of the FLOP/s": want / flops,
    }
    expect_named(
        fn(value, flops, bandwidth), want, f"intensity {value:g} on {flops:g} FLOP/s, {bandwidth:g} B/s", mistakes
    )


@roof
def left_of_the_ridge(fn):
    """little intensity: memory is the limit"""
    check_roof(fn, 2.0, 100.0, 10.0)
    check_roof(fn, 0.5, 3e12, 1.5e11)


@roof
def right_of_the_ridge(fn):
    """much intensity: arithmetic is the limit"""
    check_roof(fn, 50.0, 100.0, 10.0)
    check_roof(fn, 1e4, 3e12, 1.5e11)


@roof
def at_the_ridge(fn):
    """at the ridge both limits are the same"""
    check_roof(fn, 10.0, 100.0, 10.0)


cost = CHAPTER.task(
    "step_cost",
    hints=(
        "Begin with one new token and no past; then ask of each part whether it grows with new_tokens or with past.",
        "Token i of the new ones sees past + i + 1 keys: the past, those before it, itself. Add them up.",
        "Weights are read once. A past token's key and value are read; a new one's are written and read.",
        "FLOP follow the query heads (n_heads), bytes follow the key and value heads (kv_elements_per_token).",
    ),
)

ONE_LAYER = ModelConfig(10, 4, 1, 2, 1, 2, 3, 64)
WIDE = ModelConfig(50, 12, 3, 4, 2, 6, 20, 64)  # heads that are together wider than the model


def check_cost(fn: Callable, c: ModelConfig, new: int, past: int, w: float, b: float) -> None:
    """Count in loops, and name what a part left out or counted twice would give."""
    label = f"{new} new on {past} past ({c.n_layers} layers, {w:g} and {b:g} bytes)"
    flops, moved = expect_tuple(fn(c, new, past, w, b), ("FLOP", "bytes"), label)
    layers = c.n_layers * c.d_model * ((2 * c.n_heads + 2 * c.n_kv_heads) * c.head_dim + 3 * c.d_ff)
    head = c.vocab_size * c.d_model
    keys = sum(1 for i in range(new) for _ in range(past + i + 1))
    one_key = 4 * c.n_layers * c.n_heads * c.head_dim
    matrices = 2 * layers * new + 2 * head
    want = matrices + one_key * keys
    expect_named(
        flops,
        want,
        f"FLOP of {label}",
        {
            "when a multiplication and an addition are counted as one operation": want / 2,
            "when the output matrix is applied to every row": want + 2 * head * (new - 1),
            "without the output matrix": want - 2 * head,
            "without attention": matrices,
            "without the causal mask: every new token sees all of them": matrices + one_key * new * (past + new),
            "when a token does not see itself": matrices + one_key * (keys - new),
            "when only the past is seen, not the new tokens": matrices + one_key * new * past,
            "when the past is not seen": matrices + one_key * new * (new + 1) / 2,
            "when attention counts the key and value heads": matrices + one_key * keys * c.n_kv_heads / c.n_heads,
            "when attention counts the keys but not the values": matrices + one_key * keys / 2,
            "when attention is counted for one layer only": matrices + one_key * keys / c.n_layers,
        },
    )
    weights, row = (layers + head) * w, 2 * c.n_layers * c.n_kv_heads * c.head_dim * b
    expect_named(
        moved,
        weights + (past + 2 * new) * row,
        f"bytes of {label}",
        {
            "when the weights are read anew for each token": weights * new + (past + 2 * new) * row,
            "without the output matrix": layers * w + (past + 2 * new) * row,
            "without any keys and values": weights,
            "when new keys and values are not written and read, but only one of the two": weights + (past + new) * row,
            "without the past's keys and values": weights + 2 * new * row,
            "when each new token reads the past for itself": weights + (new * past + 2 * new) * row,
            "without the new tokens' keys and values": weights + past * row,
            "when the query heads are stored": weights + (past + 2 * new) * row * c.n_heads / c.n_kv_heads,
            "when keys are counted and values are not": weights + (past + 2 * new) * row / 2,
            "when keys and values have the weights' bytes": weights + (past + 2 * new) * row / b * w,
            "when the weights have the bytes of keys and values": weights / w * b + (past + 2 * new) * row,
        },
    )


@cost
def one_token_alone(fn):
    """one token without a past"""
    check_cost(fn, ONE_LAYER, 1, 0, 4, 4)
    check_cost(fn, TINY, 1, 0, 2, 2)


@cost
def a_prefill(fn):
    """prefill: many tokens, no past"""
    check_cost(fn, TINY, 6, 0, 2, 2)
    check_cost(fn, WIDE, 9, 0, 4, 4)


@cost
def a_decode_step(fn):
    """decode: one token on a past"""
    check_cost(fn, TINY, 1, 17, 2, 2)
    check_cost(fn, WIDE, 1, 40, 4, 4)


@cost
def a_chunk(fn):
    """a chunk: several tokens on a past"""
    check_cost(fn, WIDE, 5, 8, 4, 4)


@cost
def two_sizes(fn):
    """weights of 4 bits, keys and values of 16"""
    check_cost(fn, WIDE, 3, 7, 0.5, 2)


latency = CHAPTER.task(
    "estimate_latency",
    hints=(
        "Write down the passes of a small case: which tokens are new, and how many are past?",
        "n_output tokens have n_output - 1 gaps. The first gap's step stands on a past of n_prompt tokens.",
        "A mean of no numbers does not exist: with one token TPOT is NaN, and latency is TTFT.",
    ),
)

MEMORY_BOUND, COMPUTE_BOUND = Limits("slow memory", 1e15, 1e6), Limits("slow arithmetic", 1e6, 1e15)
BALANCED = Limits("both", 5e6, 1e6)  # the prefill is limited by arithmetic, decode by memory


def check_latency(fn: Callable, n_prompt: int, n_output: int, limits: Limits, size: float) -> None:
    label = f"{n_prompt} in, {n_output} out ({limits.name}, {size:g} bytes)"
    got = expect_tuple(fn(WIDE, n_prompt, n_output, limits, size), ("TTFT", "TPOT", "latency"), label)

    def seconds(new: int, past: int, b: float = size) -> float:
        return step_work(WIDE, new, past, weight_bytes=b, kv_bytes=b).seconds(limits)

    def total(first_past: int, count: int, grows: int = 1) -> float:
        return sum(seconds(1, first_past + grows * i) for i in range(count))

    n = n_output - 1
    first, rest = seconds(n_prompt, 0), total(n_prompt, n)
    expect_named(
        got[0],
        first,
        f"TTFT of {label}",
        {
            "when the first decode step is counted in": first + seconds(1, n_prompt),
            "when the prompt goes in token by token": total(0, n_prompt),
            "when one token of the prompt is fed": seconds(1, n_prompt - 1),
            "with step_work's own 4 bytes, not number_bytes": seconds(n_prompt, 0, 4),
        },
    )
    expect_named(
        got[1],
        rest / n if n else math.nan,
        f"TPOT of {label}",
        {
            "when the gaps are divided by the tokens: n tokens have n - 1 gaps": rest / n_output,
            "when the prefill is counted into TPOT": (first + rest) / n_output,
            "when the past does not grow": seconds(1, n_prompt),
            "when the past begins one token too long": total(n_prompt + 1, n) / max(n, 1),
            "when the last token is fed too": total(n_prompt, n + 1) / (n + 1),
            "when the prompt is not past": total(0, n) / max(n, 1),
            "when the sum of the gaps is given, not their mean": rest,
            "with step_work's own 4 bytes, not number_bytes": sum(seconds(1, n_prompt + i, 4) for i in range(n))
            / max(n, 1),
        },
    )
    expect_named(
        got[2],
        first + rest,
        f"latency of {label}",
        {
            "with n gaps for n tokens: there are n - 1": first + (rest / n if n else 0) * n_output,
            "when the last token is fed too": first + total(n_prompt, n + 1),
            "without the prefill": rest,
            "with one gap only": first + (rest / n if n else 0),
        },
    )


@latency
def slow_memory(fn):
    """on a machine with slow memory"""
    check_latency(fn, 5, 3, MEMORY_BOUND, 4)
    check_latency(fn, 9, 12, MEMORY_BOUND, 4)


@latency
def slow_arithmetic(fn):
    """on a machine with slow arithmetic"""
    check_latency(fn, 7, 5, COMPUTE_BOUND, 4)


@latency
def each_phase_its_limit(fn):
    """prefill limited by arithmetic, decode by memory, numbers of 2 bytes"""
    check_latency(fn, 20, 6, BALANCED, 2)


@latency
def one_token_out(fn):
    """one output token: no gap, so no TPOT"""
    check_latency(fn, 5, 1, MEMORY_BOUND, 4)


metrics = CHAPTER.task(
    "serving_metrics",
    hints=(
        "Mark the arrival and the tokens on a line. How many gaps lie between n tokens?",
        "The mean gap needs only the first and the last token; the wait for the first is not a gap.",
        "Treat no token and one token first: what is there to measure?",
    ),
)


def check_metrics(fn: Callable, arrival: float, tokens: list[float]) -> None:
    label = f"arrival {arrival:g}, tokens at {tokens}"
    got = expect_tuple(fn(arrival, list(tokens)), ("TTFT", "TPOT", "latency"), label)
    n = len(tokens)
    gaps = sorted(b - a for a, b in pairwise(tokens))
    first, last = (tokens[0], tokens[-1]) if tokens else (math.nan, math.nan)
    expect_named(got[0], first - arrival, f"TTFT, {label}", {"when the arrival is taken as 0": first})
    expect_named(
        got[1],
        sum(gaps) / len(gaps) if gaps else math.nan,
        f"TPOT, {label}",
        {
            "when the gaps are divided by n tokens: there are n - 1": sum(gaps) / max(n, 1),
            "when the wait for the first token is counted in": (last - arrival) / max(n, 1),
            "when the wait counts as a gap": (last - arrival) / max(n - 1, 1),
            "when the median is taken, not the mean": gaps[len(gaps) // 2] if gaps else 0,
            "when only the last gap is taken": tokens[-1] - tokens[-2] if gaps else 0,
        },
    )
    expect_named(
        got[2],
        last - arrival,
        f"latency, {label}",
        {"when the arrival is taken as 0": last, "when it begins at the first token": last - first},
    )


@metrics
def three_tokens(fn):
    """several tokens with unequal gaps"""
    check_metrics(fn, 10.0, [12.0, 12.5, 14.0])
    check_metrics(fn, 0.5, [1.0, 1.25, 1.5, 9.5])


@metrics
def two_tokens(fn):
    """two tokens have one gap"""
    check_metrics(fn, 1.0, [4.0, 4.5])


@metrics
def one_token(fn):
    """one token: TTFT and latency, no TPOT"""
    check_metrics(fn, 2.0, [5.0])


@metrics
def no_token(fn):
    """no token: nothing to measure"""
    check_metrics(fn, 2.0, [])


batch = CHAPTER.task(
    "largest_batch",
    hints=(
        "What is left when the weights are in, and what does one whole text take of it?",
        "Half a text cannot be served: round down. And a batch is never negative.",
    ),
)


def check_batch(fn: Callable, memory: int, weights: int, per_token: int, tokens: int) -> None:
    label = f"{memory} bytes, {weights} of weights, {tokens} tokens of {per_token}"
    got = fn(memory, weights, per_token, tokens)
    assert got is not None, f"{label}: your function returned None; is a `return` missing?"
    assert isinstance(got, int), f"{label}: expected a whole number, got {got!r}"
    fits = 0
    while weights + (fits + 1) * per_token * tokens <= memory:
        fits += 1
    assert got >= 0, f"{label}: yours {got}, expected {fits}: a batch is never negative"
    over = weights + got * per_token * tokens - memory
    assert got <= fits, f"{label}: yours {got}, expected {fits}: {got} texts need {over} bytes more than there are"
    assert got == fits, f"{label}: yours {got}, expected {fits}: one more would fit"
    expect_equal(got, fits, label)


@batch
def with_room_left(fn):
    """whole texts only"""
    check_batch(fn, 105, 40, 2, 10)
    check_batch(fn, 119, 40, 2, 10)


@batch
def exactly_full(fn):
    """memory that is full to the last byte is enough, one byte less is not"""
    check_batch(fn, 40 + 7 * 30, 40, 3, 10)
    check_batch(fn, 100, 40, 2, 10)
    check_batch(fn, 40 + 7 * 30 - 1, 40, 3, 10)


@batch
def weights_too_large(fn):
    """weights that fill the memory, or do not fit, leave room for none"""
    check_batch(fn, 100, 100, 2, 10)
    check_batch(fn, 100, 190, 2, 10)


@batch
def a_real_gpu(fn):
    """Llama-2-7B in 16 bits on 80 GB, 4096 tokens each"""
    check_batch(fn, 80 * 10**9, 13_476_300_000, 512 * 1024, 4096)
