"""Answers to exercise 03, prefill and decode."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import mean, median

from bank import Bank

from minillm.lab.metrics import RequestTimes
from minillm.lab.roofline import Limits, Work, request_steps, step_work

BANK = Bank()


# ---------------------------------------------------------------- matmul_intensity


@BANK.wrong("matmul_intensity", says="a multiplication and an addition are counted as one operation")
def one_flop_a_weight(rows, n_in, n_out, bytes_per_number):
    return rows * n_in * n_out / ((n_in * n_out + rows * (n_in + n_out)) * bytes_per_number)


@BANK.wrong("matmul_intensity", says="only the matrix is moved, without the rows in and out")
def only_the_matrix(rows, n_in, n_out, bytes_per_number):
    return 2 * rows / bytes_per_number


@BANK.wrong("matmul_intensity", says="the rows that come out are not counted")
def forgets_to_write(rows, n_in, n_out, bytes_per_number):
    return 2 * rows * n_in * n_out / ((n_in * n_out + rows * n_in) * bytes_per_number)


@BANK.wrong("matmul_intensity", says="the matrix is read anew for each row")
def reads_the_matrix_for_each_row(rows, n_in, n_out, bytes_per_number):
    return 2 * n_in * n_out / ((n_in * n_out + n_in + n_out) * bytes_per_number)


@BANK.wrong("matmul_intensity", says="numbers are counted, not bytes")
def counts_numbers(rows, n_in, n_out, bytes_per_number):
    return 2 * rows * n_in * n_out / (n_in * n_out + rows * (n_in + n_out))


@BANK.wrong("matmul_intensity", says="bytes are divided by FLOP")
def upside_down(rows, n_in, n_out, bytes_per_number):
    return (n_in * n_out + rows * (n_in + n_out)) * bytes_per_number / (2 * rows * n_in * n_out)


@BANK.right("matmul_intensity")
def in_one_line(rows, n_in, n_out, bytes_per_number):
    return 2 / bytes_per_number / (1 / rows + 1 / n_out + 1 / n_in)


@BANK.right("matmul_intensity")
def with_the_packages_work(rows, n_in, n_out, bytes_per_number):
    moved = sum(a * b for a, b in ((n_in, n_out), (rows, n_in), (rows, n_out)))
    return Work(2 * rows * n_in * n_out, bytes_per_number * moved).intensity


# ---------------------------------------------------------------- attainable_flops


@BANK.wrong("attainable_flops", says="the larger of the two limits is taken")
def the_larger(intensity, flops, bandwidth):
    return max(flops, intensity * bandwidth)


@BANK.wrong("attainable_flops", says="memory is not looked at")
def the_printed_peak(intensity, flops, bandwidth):
    return flops


@BANK.wrong("attainable_flops", says="much intensity.*arithmetic is not looked at")
def no_roof(intensity, flops, bandwidth):
    return intensity * bandwidth


@BANK.wrong("attainable_flops", says="bandwidth is divided by the intensity")
def divides(intensity, flops, bandwidth):
    return min(flops, bandwidth / intensity)


@BANK.wrong("attainable_flops", says="as a share of the FLOP/s")
def a_share(intensity, flops, bandwidth):
    return min(1.0, intensity * bandwidth / flops)


@BANK.right("attainable_flops")
def by_the_ridge(intensity, flops, bandwidth):
    return flops if intensity >= flops / bandwidth else intensity * bandwidth


@BANK.right("attainable_flops")
def by_the_time_of_one_byte(intensity, flops, bandwidth):
    return intensity / Work(intensity, 1).seconds(Limits("", flops, bandwidth))


# ---------------------------------------------------------------- step_cost


def cost(config, new, past, w, b, *, mac=2, head_rows=1, keys=None, heads=None, reads=1, kv_rows=None, kv_size=None):
    """The right count, with a part of it exchanged."""
    keys = new * past + new * (new + 1) / 2 if keys is None else keys
    kv_rows = past + 2 * new if kv_rows is None else kv_rows
    flops = mac * (config.layer_parameters * new + config.head_parameters * head_rows)
    flops += 2 * mac * config.n_layers * (heads or config.n_heads) * config.head_dim * keys
    weights = (config.layer_parameters + config.head_parameters) * w * reads
    return flops, weights + kv_rows * config.kv_elements_per_token * (kv_size or b)


@BANK.wrong("step_cost", says="FLOP .*a multiplication and an addition are counted as one operation")
def multiply_adds(config, new_tokens, past, weight_bytes, kv_bytes):
    return cost(config, new_tokens, past, weight_bytes, kv_bytes, mac=1)


@BANK.wrong("step_cost", says="without the causal mask")
def everything_sees_everything(config, new_tokens, past, weight_bytes, kv_bytes):
    return cost(config, new_tokens, past, weight_bytes, kv_bytes, keys=new_tokens * (past + new_tokens))


@BANK.wrong("step_cost", says="a token does not see itself")
def blind_to_itself(config, new_tokens, past, weight_bytes, kv_bytes):
    keys = sum(past + i for i in range(new_tokens))
    return cost(config, new_tokens, past, weight_bytes, kv_bytes, keys=keys)


@BANK.wrong("step_cost", says="the output matrix is applied to every row")
def logits_for_all_rows(config, new_tokens, past, weight_bytes, kv_bytes):
    return cost(config, new_tokens, past, weight_bytes, kv_bytes, head_rows=new_tokens)


@BANK.wrong("step_cost", says="attention counts the key and value heads")
def grouped_queries(config, new_tokens, past, weight_bytes, kv_bytes):
    return cost(config, new_tokens, past, weight_bytes, kv_bytes, heads=config.n_kv_heads)


@BANK.wrong("step_cost", says="the past is not seen")
def forgets_the_past(config, new_tokens, past, weight_bytes, kv_bytes):
    return cost(config, new_tokens, past, weight_bytes, kv_bytes, keys=new_tokens * (new_tokens + 1) / 2)


@BANK.wrong("step_cost", says="bytes .*the weights are read anew for each token")
def weights_for_each_token(config, new_tokens, past, weight_bytes, kv_bytes):
    return cost(config, new_tokens, past, weight_bytes, kv_bytes, reads=new_tokens)


@BANK.wrong("step_cost", says="not written and read, but only one of the two")
def new_rows_once(config, new_tokens, past, weight_bytes, kv_bytes):
    return cost(config, new_tokens, past, weight_bytes, kv_bytes, kv_rows=past + new_tokens)


@BANK.wrong("step_cost", says="without the past's keys and values")
def only_new_rows(config, new_tokens, past, weight_bytes, kv_bytes):
    return cost(config, new_tokens, past, weight_bytes, kv_bytes, kv_rows=2 * new_tokens)


@BANK.wrong("step_cost", says="keys and values have the weights' bytes")
def one_size_for_all(config, new_tokens, past, weight_bytes, kv_bytes):
    return cost(config, new_tokens, past, weight_bytes, kv_bytes, kv_size=weight_bytes)


@BANK.wrong("step_cost", says="without attention")
def twice_the_parameters(config, new_tokens, past, weight_bytes, kv_bytes):
    return cost(config, new_tokens, past, weight_bytes, kv_bytes, keys=0)


@BANK.wrong("step_cost", says=r"expected a tuple \(FLOP, bytes\)")
def the_intensity(config, new_tokens, past, weight_bytes, kv_bytes):
    flops, moved = cost(config, new_tokens, past, weight_bytes, kv_bytes)
    return flops / moved


@BANK.right("step_cost")
def with_the_packages_count(config, new_tokens, past, weight_bytes, kv_bytes):
    work = step_work(config, new_tokens, past, weight_bytes=weight_bytes, kv_bytes=kv_bytes)
    return work.flops, work.bytes


@BANK.right("step_cost")
def token_by_token(config, new_tokens, past, weight_bytes, kv_bytes):
    flops, moved = 2 * config.head_parameters, (config.layer_parameters + config.head_parameters) * weight_bytes
    moved += past * config.kv_elements_per_token * kv_bytes
    for i in range(new_tokens):
        flops += 2 * config.layer_parameters
        flops += config.n_layers * config.n_heads * (past + i + 1) * 4 * config.head_dim
        moved += 2 * config.kv_elements_per_token * kv_bytes
    return flops, moved


# ---------------------------------------------------------------- estimate_latency


def step(config, new, past, limits, size):
    return step_work(config, new, past, weight_bytes=size, kv_bytes=size).seconds(limits)


def decode(config, first_past, count, limits, size):
    return [step(config, 1, first_past + i, limits, size) for i in range(count)]


@BANK.wrong("estimate_latency", says=r"TPOT .*divided by the tokens: n tokens have n - 1 gaps")
def divides_by_n(config, n_prompt, n_output, limits, number_bytes):
    ttft = step(config, n_prompt, 0, limits, number_bytes)
    gaps = decode(config, n_prompt, n_output - 1, limits, number_bytes)
    return ttft, sum(gaps) / n_output, ttft + sum(gaps)


@BANK.wrong("estimate_latency", says="the last token is fed too")
def one_step_too_many(config, n_prompt, n_output, limits, number_bytes):
    ttft = step(config, n_prompt, 0, limits, number_bytes)
    gaps = decode(config, n_prompt, n_output, limits, number_bytes)
    return ttft, mean(gaps), ttft + sum(gaps)


@BANK.wrong("estimate_latency", says="the past does not grow")
def frozen_past(config, n_prompt, n_output, limits, number_bytes):
    ttft = step(config, n_prompt, 0, limits, number_bytes)
    tpot = step(config, 1, n_prompt, limits, number_bytes)
    return ttft, tpot, ttft + (n_output - 1) * tpot


@BANK.wrong("estimate_latency", says="the prefill is counted into TPOT")
def everything_over_n(config, n_prompt, n_output, limits, number_bytes):
    ttft = step(config, n_prompt, 0, limits, number_bytes)
    latency = ttft + sum(decode(config, n_prompt, n_output - 1, limits, number_bytes))
    return ttft, latency / n_output, latency


@BANK.wrong("estimate_latency", says="latency .*with n gaps for n tokens")
def n_gaps(config, n_prompt, n_output, limits, number_bytes):
    ttft = step(config, n_prompt, 0, limits, number_bytes)
    tpot = mean(decode(config, n_prompt, n_output - 1, limits, number_bytes))
    return ttft, tpot, ttft + n_output * tpot


@BANK.wrong("estimate_latency", says="past begins one token too long")
def first_token_already_past(config, n_prompt, n_output, limits, number_bytes):
    ttft = step(config, n_prompt, 0, limits, number_bytes)
    gaps = decode(config, n_prompt + 1, n_output - 1, limits, number_bytes)
    return ttft, mean(gaps), ttft + sum(gaps)


@BANK.wrong("estimate_latency", says="the prompt goes in token by token")
def no_prefill(config, n_prompt, n_output, limits, number_bytes):
    ttft = sum(decode(config, 0, n_prompt, limits, number_bytes))
    gaps = decode(config, n_prompt, n_output - 1, limits, number_bytes)
    return ttft, mean(gaps), ttft + sum(gaps)


@BANK.wrong("estimate_latency", says="with step_work's own 4 bytes")
def always_four_bytes(config, n_prompt, n_output, limits, number_bytes):
    ttft = step(config, n_prompt, 0, limits, 4)
    gaps = decode(config, n_prompt, n_output - 1, limits, 4)
    return ttft, mean(gaps), ttft + sum(gaps)


@BANK.wrong("estimate_latency", says="one output token: no gap.*(ZeroDivisionError|StatisticsError|at least one)")
def mean_of_nothing(config, n_prompt, n_output, limits, number_bytes):
    ttft = step(config, n_prompt, 0, limits, number_bytes)
    gaps = decode(config, n_prompt, n_output - 1, limits, number_bytes)
    return ttft, mean(gaps), ttft + sum(gaps)


@BANK.wrong("estimate_latency", says="expected NaN: there is no such time")
def zero_for_nothing(config, n_prompt, n_output, limits, number_bytes):
    ttft = step(config, n_prompt, 0, limits, number_bytes)
    gaps = decode(config, n_prompt, n_output - 1, limits, number_bytes)
    return ttft, sum(gaps) / max(len(gaps), 1), ttft + sum(gaps)


@BANK.right("estimate_latency")
def with_request_steps(config, n_prompt, n_output, limits, number_bytes):
    steps = request_steps(config, n_prompt, n_output, weight_bytes=number_bytes, kv_bytes=number_bytes)
    first, *rest = (s.seconds(limits) for s in steps)
    return first, mean(rest) if rest else math.nan, first + sum(rest)


@BANK.right("estimate_latency")
def by_a_clock(config, n_prompt, n_output, limits, number_bytes):
    times, past, new = [0.0], 0, n_prompt
    for _ in range(n_output):
        times.append(times[-1] + step(config, new, past, limits, number_bytes))
        past, new = past + new, 1
    run = RequestTimes(0.0, tuple(times[1:]))
    return run.ttft, run.tpot, run.latency


# ---------------------------------------------------------------- serving_metrics


@BANK.wrong("serving_metrics", says="divided by n tokens: there are n - 1")
def gaps_over_n(arrival, token_times):
    n = len(token_times)
    return token_times[0] - arrival, (token_times[-1] - token_times[0]) / n, token_times[-1] - arrival


@BANK.wrong("serving_metrics", says="TPOT.*the wait for the first token is counted in")
def latency_over_n(arrival, token_times):
    latency = token_times[-1] - arrival
    return token_times[0] - arrival, latency / len(token_times), latency


@BANK.wrong("serving_metrics", says="TTFT.*the arrival is taken as 0")
def clock_starts_at_zero(arrival, token_times):
    run = RequestTimes(0.0, tuple(token_times))
    return run.ttft, run.tpot, run.latency


@BANK.wrong("serving_metrics", says="the median is taken, not the mean")
def median_gap(arrival, token_times):
    run = RequestTimes(arrival, tuple(token_times))
    return run.ttft, median(run.gaps) if len(run.gaps) % 2 else sorted(run.gaps)[len(run.gaps) // 2], run.latency


@BANK.wrong("serving_metrics", says="latency.*it begins at the first token")
def latency_without_the_wait(arrival, token_times):
    run = RequestTimes(arrival, tuple(token_times))
    return run.ttft, run.tpot, token_times[-1] - token_times[0]


@BANK.wrong("serving_metrics", says="one token: TTFT and latency, no TPOT.*ZeroDivisionError")
def one_token_divides_by_zero(arrival, token_times):
    gaps = len(token_times) - 1
    return token_times[0] - arrival, (token_times[-1] - token_times[0]) / gaps, token_times[-1] - arrival


@BANK.wrong("serving_metrics", says="no token: nothing to measure.*IndexError")
def no_token_is_an_error(arrival, token_times):
    gaps = [b - a for a, b in pairwise(token_times)]
    return token_times[0] - arrival, mean(gaps) if gaps else math.nan, token_times[-1] - arrival


@BANK.wrong("serving_metrics", says="TPOT.*expected NaN: there is no such time")
def zero_gap_for_one_token(arrival, token_times):
    run = RequestTimes(arrival, tuple(token_times))
    return run.ttft, 0.0 if len(token_times) < 2 else run.tpot, run.latency


@BANK.right("serving_metrics")
def with_the_packages_class(arrival, token_times):
    run = RequestTimes(arrival, tuple(token_times))
    return run.ttft, run.tpot, run.latency


@BANK.right("serving_metrics")
def mean_of_the_gaps(arrival, token_times):
    nan = float("nan")
    gaps = [b - a for a, b in pairwise(token_times)]
    waits = [t - arrival for t in token_times]
    return (waits or [nan])[0], mean(gaps) if gaps else nan, (waits or [nan])[-1]


# ---------------------------------------------------------------- largest_batch


@BANK.wrong("largest_batch", says="yours 5, expected 3: 5 texts need 35 bytes more")
def forgets_the_weights(memory, weights_bytes, kv_bytes_per_token, tokens):
    return memory // (kv_bytes_per_token * tokens)


@BANK.wrong("largest_batch", says="expected a whole number, got 3.25")
def a_fraction(memory, weights_bytes, kv_bytes_per_token, tokens):
    return (memory - weights_bytes) / (kv_bytes_per_token * tokens)


@BANK.wrong("largest_batch", says="4 texts need 1 bytes more than there are")
def rounds_to_the_nearest(memory, weights_bytes, kv_bytes_per_token, tokens):
    return max(0, round((memory - weights_bytes) / (kv_bytes_per_token * tokens)))


@BANK.wrong("largest_batch", says="yours 32, expected 3: 32 texts need 575 bytes more")
def one_token_each(memory, weights_bytes, kv_bytes_per_token, tokens):
    return max(0, (memory - weights_bytes) // kv_bytes_per_token)


@BANK.wrong("largest_batch", says="yours -5, expected 0: a batch is never negative")
def below_zero(memory, weights_bytes, kv_bytes_per_token, tokens):
    return (memory - weights_bytes) // (kv_bytes_per_token * tokens)


@BANK.wrong("largest_batch", says="yours 1, expected 0: 1 texts need 20 bytes more")
def at_least_one(memory, weights_bytes, kv_bytes_per_token, tokens):
    return max(1, (memory - weights_bytes) // (kv_bytes_per_token * tokens))


@BANK.wrong("largest_batch", says="yours 6, expected 7: one more would fit")
def keeps_one_byte_free(memory, weights_bytes, kv_bytes_per_token, tokens):
    return max(0, (memory - weights_bytes - 1) // (kv_bytes_per_token * tokens))


@BANK.right("largest_batch")
def by_filling_up(memory, weights_bytes, kv_bytes_per_token, tokens):
    count, used = 0, weights_bytes + kv_bytes_per_token * tokens
    while used <= memory:
        count, used = count + 1, used + kv_bytes_per_token * tokens
    return count


@BANK.right("largest_batch")
def clipped_memory(memory, weights_bytes, kv_bytes_per_token, tokens):
    return math.floor(max(memory - weights_bytes, 0) / (kv_bytes_per_token * tokens))
