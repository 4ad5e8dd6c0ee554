"""Task 2 of exercise 10: the times of a batch of answers, by the roofline."""

from __future__ import annotations

import math
from collections.abc import Callable

from minillm.config import ModelConfig
from minillm.lab.catalogue import MODELS
from minillm.lab.checks.ch03 import expect_named, expect_tuple
from minillm.lab.checks.ch10.base import CHAPTER, SLOW_ARITHMETIC, SLOW_MEMORY, SMALL, TIED
from minillm.lab.roofline import Limits, Work, gpu_limits, request_steps, step_work

times = CHAPTER.task(
    "answer_times",
    hints=(
        "Write down the passes for 4 tokens in and 3 out: new tokens, past tokens, texts. How many gaps are there?",
        "step_work counts a whole batch: give it the batch, and both sizes. It is wrong to multiply afterwards.",
        "A pass takes the longer of its two times: that is what .seconds(limits) gives, for each pass anew.",
        "Tokens a second count what all texts wrote, over the time from the start to the last token.",
    ),
)

BETWEEN = Limits("between", 3e8, 1e6)  # SMALL's prefill is limited by arithmetic here, its decode by memory


def total(works: list[Work]) -> Work:
    return Work(sum(w.flops for w in works), sum(w.bytes for w in works))


def check_times(
    fn: Callable, c: ModelConfig, prompt: int, output: int, batch: int, size: float, kv: float, limits: Limits
) -> None:
    label = f"a batch of {batch}, {prompt} in, {output} out ({limits.name}, weights of {size:g} bytes, keys of {kv:g})"
    got = expect_tuple(fn(c, prompt, output, batch, size, kv, limits), ("TTFT", "TPOT", "latency", "tokens/s"), label)
    first, *rest = request_steps(c, prompt, output, batch, size, kv)
    alone, *alone_rest = request_steps(c, prompt, output, 1, size, kv)
    n = len(rest)

    def seconds(works: list[Work], limits: Limits = limits) -> float:
        return sum(w.seconds(limits) for w in works)

    def both(w: Work) -> float:
        return w.flops / limits.flops + w.bytes / limits.bandwidth

    def shorter(w: Work) -> float:
        return min(w.flops / limits.flops, w.bytes / limits.bandwidth)

    def step(past: int, **sizes: float) -> float:
        return step_work(c, 1, past, **{"batch": batch, "weight_bytes": size, "kv_bytes": kv, **sizes}).seconds(limits)

    ttft, gaps = first.seconds(limits), seconds(rest)
    all_logits = step_work(c, prompt, 0, batch, prompt, size, kv).seconds(limits)
    expect_named(
        got[0],
        ttft,
        f"TTFT of {label}",
        {
            "for a single text": alone.seconds(limits),
            "if each text had a prefill of its own: one pass takes them all": batch * alone.seconds(limits),
            "when both times are added: they overlap": both(first),
            "with the shorter of the two times": shorter(first),
            "with the logits of all rows: only the last row of a prompt is sampled": all_logits,
            "with one token of the prompt": step_work(c, 1, prompt - 1, batch, 1, size, kv).seconds(limits),
            "when the first decode step is counted in": ttft + step(prompt),
            "with step_work's own 4 bytes for both": step_work(c, prompt, batch=batch).seconds(limits),
            "when the two sizes are exchanged": step_work(c, prompt, 0, batch, 1, kv, size).seconds(limits),
        },
    )
    count = max(n, 1)
    expect_named(
        got[1],
        gaps / n if n else math.nan,
        f"TPOT of {label}",
        {
            "for a single text": seconds(alone_rest) / count,
            "when it is divided by the batch: a reader waits for the whole step": gaps / count / batch,
            "when it is divided by n tokens: they have n - 1 gaps": gaps / (n + 1),
            "when the last token is fed too": (gaps + step(prompt + n)) / (n + 1),
            "when the past does not grow": step(prompt),
            "with the longest past for all": step(prompt + n - 1),
            "when the past begins one token too long": sum(step(prompt + 1 + i) for i in range(n)) / count,
            "when the prompt is not past": sum(step(i) for i in range(n)) / count,
            "when the prefill is counted in": (ttft + gaps) / (n + 1),
            "when the sum of the gaps is given, not their mean": gaps,
            "when both times are added: they overlap": sum(map(both, rest)) / count,
            "with the shorter of the two times": sum(map(shorter, rest)) / count,
            "with step_work's own 4 bytes for both": sum(
                step(prompt + i, weight_bytes=4, kv_bytes=4) for i in range(n)
            ) / count,
            "when the two sizes are exchanged": sum(
                step(prompt + i, weight_bytes=kv, kv_bytes=size) for i in range(n)
            ) / count,
        },
    )  # fmt: skip
    latency = ttft + gaps
    expect_named(
        got[2],
        latency,
        f"latency of {label}",
        {
            "with n gaps for n tokens: there are n - 1": ttft + gaps / count * (n + 1),
            "without the prefill": gaps,
            "with one gap only": ttft + gaps / count,
            "if the longer time were taken once, of the sums of all passes": total([first, *rest]).seconds(limits),
            "when it is multiplied by the batch": batch * latency,
        },
    )
    tokens = batch * output
    expect_named(
        got[3],
        tokens / latency,
        f"tokens a second of {label}",
        {
            "for a single text": output / latency,
            "when the prompts are counted too: they were not written": batch * (prompt + output) / latency,
            "without the time of the prefill": tokens / gaps if n else 0,
            "with n - 1 tokens for a text": (tokens - batch) / latency,
            "with n - 1 tokens over the time of the gaps": (tokens - batch) / gaps if n else 0,
            "the other way round: seconds a token": latency / tokens,
        },
    )


@times
def slow_memory(fn):
    """memory is the limit: the weights are read once for all texts"""
    check_times(fn, SMALL, 7, 4, 3, 2, 2, SLOW_MEMORY)
    check_times(fn, TIED, 12, 9, 5, 0.5, 2, SLOW_MEMORY)


@times
def slow_arithmetic(fn):
    """arithmetic is the limit: every text is computed"""
    check_times(fn, SMALL, 9, 5, 4, 2, 2, SLOW_ARITHMETIC)


@times
def each_pass_its_limit(fn):
    """the prefill is limited by arithmetic, decode by memory: each pass has its own limit"""
    check_times(fn, SMALL, 900, 6, 2, 2, 1, BETWEEN)


@times
def one_text(fn):
    """a batch of one"""
    check_times(fn, TIED, 5, 8, 1, 4, 4, SLOW_MEMORY)


@times
def one_token_out(fn):
    """one output token: no gap, so no TPOT"""
    check_times(fn, SMALL, 6, 1, 3, 2, 2, SLOW_MEMORY)


@times
def two_tokens_out(fn):
    """two output tokens have one gap"""
    check_times(fn, SMALL, 6, 2, 3, 2, 2, SLOW_ARITHMETIC)


@times
def a_real_gpu(fn):
    """Llama-3.1-8B on an H100, weights of 4.5 bits"""
    check_times(fn, MODELS["Llama-3.1-8B"], 1000, 20, 16, 4.5 / 8, 2, gpu_limits("H100 SXM"))
