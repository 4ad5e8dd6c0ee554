"""Which technique pays for this deployment? Each is judged by what it gains, computed, with the numbers that decide.

A gain is a ratio: the deployment with the technique against the same one without it, all else as it is. The others are
those of the deployment: a KV cache, paging, continuous batching, the prefix shared. So gains do not multiply.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist, fmean

from minillm.config import ModelConfig
from minillm.gqa import with_kv_heads
from minillm.lab.advice.deployment import Deployment, largest
from minillm.lab.advice.verdicts import MARGIN, Advice, Verdict, advice, better, carried, duration, gb, steps, texts
from minillm.lab.roofline import Work, step_work
from minillm.speculative import speedup

MOST_GUESSES = 16
QUANTILES = 4000  # at which the lengths of outputs are looked at


def examine(deployment: Deployment) -> list[Advice]:
    return [technique(deployment) for technique in TECHNIQUES]


# --- cache and memory ---


def kv_cache(d: Deployment) -> Advice:
    """Against computing the whole text anew for each token."""
    size = d.sizes["weight_bytes"]
    lengths = range(d.demand.prompt, d.demand.prompt + d.demand.output)
    again = sum(d.seconds(step_work(d.config, n, 0, d.batch, 1, size, 0)) for n in lengths)
    turn = d.batch / d.estimate(d.batch).requests_per_s
    reason = (
        f"A turn of {texts(d.batch)} takes {duration(turn)}, and {duration(again)} if each token computes its whole "
        f"text anew; the caches take {gb(d.memory(d.batch) - d.weights)}."
    )
    return advice("KV cache", again / turn, "speed", reason)


def paging(d: Deployment) -> Advice:
    """Against one piece for each request, as large as it may become, in which nothing can be shared."""
    pieces = replace(d, paged=False)
    whole = " (the whole context; --reserve N for less)" if d.demand.reserve is None else ""
    reason = (
        f"{texts(d.fits)} fit in blocks ({d.slots:,} slots each), {pieces.fits:,} if each reserves {pieces.slots:,}"
        f"{whole}; {texts(d.batch)} run."
    )
    return advice("paging", carried(d, pieces), "tokens/s", reason)


def prefix_sharing(d: Deployment) -> Advice:
    """Against computing and keeping the shared beginning for each request."""
    alone = replace(d, sharing=False)
    if not d.found:
        shared = d.demand.shared
        reason = f"Prompts share {shared:,} tokens, less than a block." if shared else "Prompts share nothing."
        return advice("prefix sharing", 1.0, "prompt speed", reason)
    reason = (
        f"{d.found:,} of {d.demand.prompt:,} tokens are found: a prompt takes {duration(d.prefill)} and not "
        f"{duration(alone.prefill)}, {d.fits:,} texts fit and not {alone.fits:,}."
    )
    return advice("prefix sharing", alone.prefill / d.prefill, "prompt speed", reason)


def grouped_heads(d: Deployment) -> Advice:
    """What the model has against a KV head for each query head; of a model without groups, what four would bring."""
    config, chosen = d.config, d.batch
    if config.group_size > 1:
        other = replace(d, config=same_weights(config, config.n_heads))
        (gain, what), fits = better(d, other, chosen), f"{d.fits:,} texts fit and not {other.fits:,}"
        has = f"The model has {config.n_kv_heads} KV heads for {config.n_heads} query heads"
    elif config.n_heads % 4:
        return advice("GQA", 1.0, "decode speed", f"{config.n_heads} heads cannot be shared by four.")
    else:
        other = d
        d = replace(d, config=same_weights(config, config.n_heads // 4))
        (gain, what), fits = better(d, other, chosen), f"{d.fits:,} texts would fit and not {other.fits:,}"
        has = f"The model has none, and would have to be trained so; with {d.config.n_kv_heads} KV heads"
    return advice("GQA", gain, what, f"{has}: {steps(d, other, chosen)}; {fits}.")


def same_weights(config: ModelConfig, n_kv_heads: int) -> ModelConfig:
    """With other KV heads, and d_ff so that there are as many weights: only the cache is compared."""
    fewer = 2 * (config.n_kv_heads - n_kv_heads) * config.head_dim / 3  # three matrices have d_ff, two have KV heads
    return replace(with_kv_heads(config, n_kv_heads), d_ff=max(1, config.d_ff + round(fewer)))


def small_cache(d: Deployment) -> Advice:
    """Keys and values in 8 bits, without scales. What it costs in quality is to be measured."""
    small = replace(d, kv_bits=8)
    reason = f"In {d.kv_bits} and 8 bits, {steps(small, d, d.batch)}; {small.fits:,} texts fit and not {d.fits:,}."
    return advice("8-bit KV cache", *better(small, d, d.batch), reason)


# --- batching ---


def continuous_batching(d: Deployment) -> Advice:
    """Against batches that end with their longest text. Lengths are log-normal, as far as the context allows."""
    longest = longest_of(d)
    ended = d.demand.output * longest
    turn = d.batch / d.estimate(d.batch).requests_per_s
    static = turn + (ended - d.demand.output) * d.step(d.batch)
    reason = (
        f"Of {texts(d.batch)} the longest output is {longest:.2f} times the mean ({ended:,.0f} tokens of at "
        f"most {room(d):,}; log-normal, sigma {d.demand.spread:g}), and a static batch takes as many steps."
    )
    return advice("continuous batching", static / turn, "tokens/s", reason)


def room(d: Deployment) -> int:
    """Tokens of the longest output that the context allows."""
    return d.config.max_context - d.demand.prompt


def longest_of(d: Deployment) -> float:
    """The expected length of the longest of the batch's outputs over the mean.

    Every length is cut where the context ends. The lengths are scaled so that those that are cut have the mean asked.
    """
    cut = room(d) / d.demand.output
    one = logarithms(1, d.demand.spread)

    def mean(scale: float, logs: list[float]) -> float:
        return fmean(min(cut, math.exp(scale + log)) for log in logs)

    low, high = -max(one), math.log(cut) - min(one)  # the logarithm of the scale: all at most 1, all cut
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean(middle, one) < 1 else (low, middle)
    return mean(high, logarithms(d.batch, d.demand.spread))


def logarithms(n: int, spread: float) -> list[float]:
    """Quantiles of the logarithm of the longest of n lengths: its share p is each length's share p^(1/n)."""
    shares = (-math.expm1(math.log((i + 0.5) / QUANTILES) / n) for i in range(QUANTILES))  # 1 - p^(1/n)
    return [-spread * NormalDist().inv_cdf(share) for share in shares]


def chunked_prefill(d: Deployment) -> Advice:
    """Against a whole prompt at once, for which all others wait.

    The chunk is the largest whose step keeps the goal for the gap; without a goal, the smallest that makes a step
    compute-bound, as smaller ones read the weights for little. It pays if there is a goal, or if the gap shrinks by
    more than the prompt takes longer; and if the goal for TTFT is kept.
    """
    name, what, tokens, goal = "chunked prefill", "steadiness", d.demand.prompt - d.found, d.demand.tpot
    gap = d.prefill + d.step(d.batch)
    if d.batch == 1:
        return advice(name, 1.0, what, "Nobody else waits while a prompt is read.")
    if goal is not None and gap <= goal:
        reason = (
            f"A whole prompt makes the others wait for {duration(gap)}, which is within the goal of {duration(goal)}."
        )
        return advice(name, 1.0, what, reason)
    chunk = chunk_within(d, goal, tokens) if goal is not None else chunk_at_ridge(d, tokens)
    if not chunk:
        reason = (
            f"Even with one token of a prompt a step takes {duration(last_chunk(d, 1))}; the goal is {duration(goal)}."
        )
        return Advice(name, Verdict.DOES_NOT_PAY, 1.0, what, reason)
    gain = gap / last_chunk(d, chunk)
    reading = sum(d.seconds(mixed(d, min(chunk, tokens - i), d.found + i)) for i in range(0, tokens, chunk))
    price, ttft = reading / d.prefill, reading + d.step(d.batch - 1)
    by = f"the goal of {duration(goal)}" if goal is not None else "the ridge"
    reason = (
        f"The gap is {duration(gap)} with a whole prompt and {duration(last_chunk(d, chunk))} with {chunk:,} tokens of "
        f"it a step (by {by}); the prompt takes {price:.2f} times as long, so TTFT is {duration(ttft)}."
    )
    enough = (goal is not None or gain >= price) and (d.demand.ttft is None or ttft <= d.demand.ttft)
    return advice(name, gain, what, reason) if enough else Advice(name, Verdict.DOES_NOT_PAY, gain, what, reason)


def mixed(d: Deployment, tokens: int, past: int) -> Work:
    """A step of `tokens` of one prompt and a token of each of the others; the weights are read once."""
    part = step_work(d.config, tokens, past, **d.sizes)
    others = step_work(d.config, 1, d.middle, d.batch - 1, weight_bytes=0, kv_bytes=d.sizes["kv_bytes"])
    return Work(part.flops + others.flops, part.bytes + others.bytes)


def last_chunk(d: Deployment, tokens: int) -> float:
    """Seconds of the slowest step: the prompt's end, on all that was read before."""
    return d.seconds(mixed(d, tokens, d.demand.prompt - tokens))


def chunk_within(d: Deployment, goal: float, tokens: int) -> int:
    return largest(lambda n: last_chunk(d, n) <= goal, tokens)


def chunk_at_ridge(d: Deployment, tokens: int) -> int:
    reached = d.hardware.reached
    below = largest(lambda n: mixed(d, n, d.demand.prompt - n).bound(reached) == "memory", tokens)
    return min(below + 1, tokens)


# --- speculation ---


def speculation(d: Deployment) -> Advice:
    """With as many guesses as pay most. A round of K guesses costs K drafts and a pass of K + 1 rows for each text."""
    costs = [d.step(d.batch, rows) / d.step(d.batch) for rows in range(1, MOST_GUESSES + 2)]

    def best(acceptance: float) -> tuple[float, int]:
        return max((speedup(acceptance, k, d.demand.draft_cost, costs[k]), k) for k in range(1, MOST_GUESSES + 1))

    def priced(k: int) -> str:
        return f"K = {k}, verified in {costs[k]:.2f} plain steps, a guess for {d.demand.draft_cost:g}"

    acceptance = d.demand.acceptance
    if acceptance is not None:
        gain, k = best(acceptance)
        reason = f"At batch {d.batch:,} and an acceptance of {acceptance:g} the best is {priced(k)}."
        return advice("speculation", gain, "decode speed", reason)
    gain, k = best(1.0)
    if gain <= 1 + MARGIN:
        return advice("speculation", gain, "decode speed", f"Even if every guess were right: {priced(k)}.")
    least = 1 - largest(lambda n: best(1 - n / 1000)[0] > 1 + MARGIN, 1000) / 1000
    reason = (
        f"the acceptance is at least {least:.0%} ({priced(best(least)[1])}). If every guess were right: "
        f"{gain:.2f} times, K = {k}."
    )
    return Advice("speculation", Verdict.PAYS_IF, None, "decode speed", reason)


# --- fewer bits ---


def faster_weights(bits: int) -> Callable[[Deployment], Advice]:
    def technique(d: Deployment) -> Advice:
        small, plain = with_weights(d, bits), with_weights(d, d.hardware.bits)
        gain = plain.step(d.batch) / small.step(d.batch)
        before = f"in {d.hardware.bits} bits"
        reason = (
            f"A step of {texts(d.batch)} takes {duration(small.step(d.batch))}, {before} "
            f"{duration(plain.step(d.batch))}; a prompt {duration(small.prefill)}, {before} {duration(plain.prefill)}."
        )
        return advice(f"{bits}-bit weights (speed)", gain, "decode speed", reason)

    return technique


def smaller_weights(bits: int) -> Callable[[Deployment], Advice]:
    def technique(d: Deployment) -> Advice:
        small, plain = with_weights(d, bits), with_weights(d, d.hardware.bits)
        name, what = f"{bits}-bit weights (memory)", "texts that run" if d.demand.rate is None else "tokens/s"
        sizes = f"Weights of {gb(small.weights)} and not {gb(plain.weights)}"
        if not plain.fits:
            return advice(name, None, what, f"{sizes}: in {d.hardware.bits} bits not even one text fits.")
        if plain.most < plain.fits:
            goals = f"the goals allow a batch of {plain.most:,}, and {plain.fits:,} fit"
            return advice(name, 1.0, what, f"{sizes}, but {goals}.")
        if not plain.short:
            return advice(name, 1.0, what, f"{sizes}, but all that run fit anyway ({plain.fits:,} texts would).")
        if not plain.within_goals:  # then the goals end no batch
            small, plain = without_goals(small), without_goals(plain)
        gain = small.batch / plain.batch if d.demand.rate is None else carried(small, plain)
        fit = f"{small.fits:,} texts fit and not {plain.fits:,}; {small.batch:,} run and not {plain.batch:,}"
        return advice(name, gain, what, f"{sizes}: {fit}.")

    return technique


def with_weights(d: Deployment, bits: int) -> Deployment:
    return replace(d, weight_bits=bits)


def without_goals(d: Deployment) -> Deployment:
    return replace(d, demand=replace(d.demand, ttft=None, tpot=None))


TECHNIQUES = (
    kv_cache,
    paging,
    continuous_batching,
    chunked_prefill,
    prefix_sharing,
    speculation,
    grouped_heads,
    small_cache,
    faster_weights(4),
    smaller_weights(4),
    faster_weights(8),
    smaller_weights(8),
)
