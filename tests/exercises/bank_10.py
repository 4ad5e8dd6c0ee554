"""Answers to exercise 10, the exam."""

from __future__ import annotations

import math

from bank import Bank

from minillm.lab.roofline import request_steps, step_work
from minillm.speculative import expected_tokens

BANK = Bank()


def ceil_div(a, b):
    return -(-a // b)


# ---------------------------------------------------------------- deployment_memory


def weight_bytes_of(config, bits, group, scale_bytes=4, tables=None):
    scales = scale_bytes * (config.layer_parameters // group) if group else 0
    tables = (1 if config.tied_embeddings else 2) if tables is None else tables
    return config.layer_parameters * bits // 8 + scales + 2 * tables * config.head_parameters


def planned(config, bits, group, kv_bits, block_size, prompt, output, memory, weights=None, block=None, texts=None):
    """The right answer, but for the part that is given."""
    weights = weight_bytes_of(config, bits, group) if weights is None else weights
    block = block_size * config.kv_elements_per_token * kv_bits // 8 if block is None else block
    if texts is None:
        texts = max(0, (memory - weights) // (ceil_div(prompt + output - 1, block_size) * block))
    return weights, block, texts


@BANK.wrong("deployment_memory", says="bytes of the weights.*without the scales and minimums of the groups")
def scales_forgotten(config, bits, group, *rest):
    return planned(config, bits, group, *rest, weights=weight_bytes_of(config, bits, None))


@BANK.wrong("deployment_memory", says="when a group has a scale and no minimum")
def no_minimum(config, bits, group, *rest):
    return planned(config, bits, group, *rest, weights=weight_bytes_of(config, bits, group, scale_bytes=2))


@BANK.wrong("deployment_memory", says="when the embeddings of a tied model are counted twice")
def always_two_tables(config, bits, group, *rest):
    return planned(config, bits, group, *rest, weights=weight_bytes_of(config, bits, group, tables=2))


@BANK.wrong("deployment_memory", says="one matrix for embeddings and output, which are two in this model")
def always_one_table(config, bits, group, *rest):
    return planned(config, bits, group, *rest, weights=weight_bytes_of(config, bits, group, tables=1))


@BANK.wrong("deployment_memory", says="without the embeddings and the output matrix")
def no_tables(config, bits, group, *rest):
    return planned(config, bits, group, *rest, weights=weight_bytes_of(config, bits, group, tables=0))


@BANK.wrong("deployment_memory", says="when the embeddings have as few bits as the layers")
def all_quantized(config, bits, group, *rest):
    tables = (1 if config.tied_embeddings else 2) * config.head_parameters * bits // 8
    return planned(config, bits, group, *rest, weights=weight_bytes_of(config, bits, group, tables=0) + tables)


@BANK.wrong("deployment_memory", says="bytes of a block.*for one token: a block holds several")
def block_of_one_token(config, bits, group, kv_bits, *rest):
    return planned(config, bits, group, kv_bits, *rest, block=config.kv_elements_per_token * kv_bits // 8)


@BANK.wrong("deployment_memory", says="bytes of a block.*for keys alone: values are kept too")
def block_of_keys(config, bits, group, kv_bits, block_size, *rest):
    block = block_size * config.n_layers * config.n_kv_heads * config.head_dim * kv_bits // 8
    return planned(config, bits, group, kv_bits, block_size, *rest, block=block)


@BANK.wrong("deployment_memory", says="bytes of a block.*with 16 bits a number")
def block_of_16_bits(config, bits, group, kv_bits, block_size, *rest):
    block = 2 * block_size * config.kv_elements_per_token
    return planned(config, bits, group, kv_bits, block_size, *rest, block=block)


def with_texts(config, bits, group, kv_bits, block_size, prompt, output, memory, texts):
    weights, block, _ = planned(config, bits, group, kv_bits, block_size, prompt, output, memory)
    return weights, block, texts(block_size, prompt, output, memory - weights, block)


@BANK.wrong("deployment_memory", says="texts.*if the last token were kept too: it is chosen, and never fed")
def last_token_kept(*given):
    return with_texts(*given, lambda size, p, o, free, block: max(0, free // (ceil_div(p + o, size) * block)))


@BANK.wrong("deployment_memory", says="texts.*if a text took no whole blocks, but only its tokens")
def no_whole_blocks(*given):
    return with_texts(*given, lambda size, p, o, free, block: max(0, free * size // ((p + o - 1) * block)))


@BANK.wrong("deployment_memory", says="texts.*last block, which is not full, were left out")
def only_full_blocks(*given):
    return with_texts(*given, lambda size, p, o, free, block: max(0, free // (max(1, (p + o - 1) // size) * block)))


@BANK.wrong("deployment_memory", says="texts.*for the prompt alone: the output is kept too")
def room_for_the_prompt(*given):
    return with_texts(*given, lambda size, p, o, free, block: max(0, free // (ceil_div(p, size) * block)))


@BANK.wrong("deployment_memory", says="texts.*if a text of which a part fits counted")
def texts_rounded_up(*given):
    return with_texts(*given, lambda size, p, o, free, block: max(0, ceil_div(free, ceil_div(p + o - 1, size) * block)))


@BANK.wrong("deployment_memory", says="texts.*when blocks are counted, not texts")
def blocks_for_texts(*given):
    return with_texts(*given, lambda size, p, o, free, block: max(0, free // block))


@BANK.wrong("deployment_memory", says="expected 0: the weights alone do not fit")
def fewer_texts_than_none(*given):
    return with_texts(*given, lambda size, p, o, free, block: free // (ceil_div(p + o - 1, size) * block))


@BANK.wrong("deployment_memory", says="weights.* is no whole number")
def bytes_in_fractions(config, bits, group, *rest):
    weights, block, texts = planned(config, bits, group, *rest)
    return weights / 1, block, texts


@BANK.right("deployment_memory")
def part_by_part(config, bits, group, kv_bits, block_size, prompt, output, memory):
    per_weight = bits + (32 / group if group else 0)
    tables = config.head_parameters + (0 if config.tied_embeddings else config.vocab_size * config.d_model)
    weights = round(config.layer_parameters * per_weight / 8) + 2 * tables
    block = 2 * config.n_layers * config.n_kv_heads * config.head_dim * block_size * kv_bits // 8
    n_blocks = max(0, memory - weights) // block
    return weights, block, n_blocks // math.ceil((prompt + output - 1) / block_size)


@BANK.right("deployment_memory")
def by_filling(config, bits, group, kv_bits, block_size, prompt, output, memory):
    weights, block, texts = weight_bytes_of(config, bits, group), 0, 0
    for _ in range(block_size):
        block += config.kv_elements_per_token * kv_bits // 8
    blocks = 1
    while blocks * block_size < prompt + output - 1:
        blocks += 1
    while weights + (texts + 1) * blocks * block <= memory:
        texts += 1
    return weights, block, texts


# ---------------------------------------------------------------- answer_times


def passes(config, prompt, output, batch, size, kv, limits):
    first, *rest = [w.seconds(limits) for w in request_steps(config, prompt, output, batch, size, kv)]
    return first, rest


def timed_answer(config, prompt, output, batch, size, kv, limits, **other):
    """The right answer, but for the parts that are given."""
    first, rest = passes(config, prompt, output, batch, size, kv, limits)
    ttft = other.get("ttft", first)
    tpot = other.get("tpot", sum(rest) / len(rest) if rest else math.nan)
    latency = other.get("latency", first + sum(rest))
    return ttft, tpot, latency, other.get("rate", batch * output / latency)


@BANK.wrong("answer_times", says="TTFT.*for a single text")
def prefill_of_one(config, prompt, output, batch, size, kv, limits):
    first, _ = passes(config, prompt, output, 1, size, kv, limits)
    return timed_answer(config, prompt, output, batch, size, kv, limits, ttft=first)


@BANK.wrong("answer_times", says="TTFT.*if each text had a prefill of its own: one pass takes them all")
def one_prefill_after_the_other(config, prompt, output, batch, size, kv, limits):
    first, _ = passes(config, prompt, output, 1, size, kv, limits)
    return timed_answer(config, prompt, output, batch, size, kv, limits, ttft=batch * first)


@BANK.wrong("answer_times", says="TTFT.*when both times are added: they overlap")
def computing_then_reading(config, prompt, output, batch, size, kv, limits):
    works = request_steps(config, prompt, output, batch, size, kv)
    first, *rest = [w.flops / limits.flops + w.bytes / limits.bandwidth for w in works]
    latency = first + sum(rest)
    return first, sum(rest) / len(rest) if rest else math.nan, latency, batch * output / latency


@BANK.wrong("answer_times", says="TTFT.*with the logits of all rows")
def logits_of_the_whole_prompt(config, prompt, output, batch, size, kv, limits):
    first = step_work(config, prompt, 0, batch, prompt, size, kv).seconds(limits)
    return timed_answer(config, prompt, output, batch, size, kv, limits, ttft=first)


@BANK.wrong("answer_times", says="TTFT.*when the two sizes are exchanged|with step_work's own 4 bytes")
def default_sizes(config, prompt, output, batch, size, kv, limits):
    return timed_answer(config, prompt, output, batch, 4, 4, limits)


@BANK.wrong("answer_times", says="TPOT.*when it is divided by n tokens: they have n - 1 gaps")
def gaps_by_tokens(config, prompt, output, batch, size, kv, limits):
    _, rest = passes(config, prompt, output, batch, size, kv, limits)
    return timed_answer(config, prompt, output, batch, size, kv, limits, tpot=sum(rest) / output)


@BANK.wrong("answer_times", says="TPOT.*when it is divided by the batch: a reader waits for the whole step")
def tpot_of_the_server(config, prompt, output, batch, size, kv, limits):
    _, rest = passes(config, prompt, output, batch, size, kv, limits)
    tpot = sum(rest) / len(rest) / batch if rest else math.nan
    return timed_answer(config, prompt, output, batch, size, kv, limits, tpot=tpot)


@BANK.wrong("answer_times", says="TPOT.*when the past does not grow")
def frozen_past(config, prompt, output, batch, size, kv, limits):
    gap = step_work(config, 1, prompt, batch, 1, size, kv).seconds(limits)
    return timed_answer(config, prompt, output, batch, size, kv, limits, tpot=gap if output > 1 else math.nan)


@BANK.wrong("answer_times", says="TPOT.*when the past begins one token too long")
def past_too_long(config, prompt, output, batch, size, kv, limits):
    gaps = [step_work(config, 1, prompt + 1 + i, batch, 1, size, kv).seconds(limits) for i in range(output - 1)]
    tpot = sum(gaps) / len(gaps) if gaps else math.nan
    return timed_answer(config, prompt, output, batch, size, kv, limits, tpot=tpot)


@BANK.wrong("answer_times", says="one output token: no gap, so no TPOT: .*division by zero")
def no_gap_forgotten(config, prompt, output, batch, size, kv, limits):
    first, rest = passes(config, prompt, output, batch, size, kv, limits)
    return first, sum(rest) / (output - 1), first + sum(rest), batch * output / (first + sum(rest))


@BANK.wrong("answer_times", says="one output token: no gap, so no TPOT: .*expected NaN")
def no_gap_is_zero(config, prompt, output, batch, size, kv, limits):
    _, rest = passes(config, prompt, output, batch, size, kv, limits)
    return timed_answer(config, prompt, output, batch, size, kv, limits, tpot=sum(rest) / max(1, len(rest)))


@BANK.wrong("answer_times", says="latency.*with n gaps for n tokens: there are n - 1")
def a_gap_too_many(config, prompt, output, batch, size, kv, limits):
    first, rest = passes(config, prompt, output, batch, size, kv, limits)
    tpot = sum(rest) / max(1, len(rest))
    return timed_answer(config, prompt, output, batch, size, kv, limits, latency=first + output * tpot)


@BANK.wrong("answer_times", says="latency.*if the longer time were taken once, of the sums of all passes")
def one_roofline_for_all(config, prompt, output, batch, size, kv, limits):
    works = request_steps(config, prompt, output, batch, size, kv)
    flops, moved = sum(w.flops for w in works), sum(w.bytes for w in works)
    latency = max(flops / limits.flops, moved / limits.bandwidth)
    return timed_answer(config, prompt, output, batch, size, kv, limits, latency=latency)


@BANK.wrong("answer_times", says="tokens a second.*for a single text")
def rate_of_one(config, prompt, output, batch, size, kv, limits):
    first, rest = passes(config, prompt, output, batch, size, kv, limits)
    return timed_answer(config, prompt, output, batch, size, kv, limits, rate=output / (first + sum(rest)))


@BANK.wrong("answer_times", says="tokens a second.*when the prompts are counted too: they were not written")
def rate_with_prompts(config, prompt, output, batch, size, kv, limits):
    first, rest = passes(config, prompt, output, batch, size, kv, limits)
    rate = batch * (prompt + output) / (first + sum(rest))
    return timed_answer(config, prompt, output, batch, size, kv, limits, rate=rate)


@BANK.wrong("answer_times", says="tokens a second.*with n - 1 tokens over the time of the gaps")
def rate_of_decode(config, prompt, output, batch, size, kv, limits):
    _, rest = passes(config, prompt, output, batch, size, kv, limits)
    rate = batch * len(rest) / sum(rest) if rest else math.nan
    return timed_answer(config, prompt, output, batch, size, kv, limits, rate=rate)


@BANK.right("answer_times")
def by_request_steps(config, prompt, output, batch, size, kv, limits):
    return timed_answer(config, prompt, output, batch, size, kv, limits)


@BANK.right("answer_times")
def by_marks_on_a_clock(config, prompt, output, batch, size, kv, limits):
    clock, marks = 0.0, []
    for i in range(output):
        new, past = (prompt, 0) if i == 0 else (1, prompt + i - 1)
        work = step_work(config, new, past, batch, 1, size, kv)
        clock += max(work.flops / limits.flops, work.bytes / limits.bandwidth)
        marks.append(clock)
    tpot = (marks[-1] - marks[0]) / (output - 1) if output > 1 else float("nan")
    return marks[0], tpot, marks[-1], output / marks[-1] * batch


# ---------------------------------------------------------------- batch_for_goal


def grow(blocks, each, seconds, goal):
    """Add texts as long as one more has its blocks and its step is quick enough."""
    batch = 0
    while True:
        if (batch + 1) * each > blocks:
            return batch, "memory"
        if seconds(batch + 1) > goal:
            return batch, "goal"
        batch += 1


def step_time(config, context, size, kv, limits):
    return lambda batch: step_work(config, 1, context, batch, 1, size, kv).seconds(limits)


@BANK.wrong("batch_for_goal", says="if only the room counted")
def goal_forgotten(config, context, blocks, block_size, goal, size, kv, limits):
    return blocks // ceil_div(context + 1, block_size), "memory"


@BANK.wrong("batch_for_goal", says="if only the goal counted")
def room_forgotten(config, context, blocks, block_size, goal, size, kv, limits):
    return grow(10**9, 1, step_time(config, context, size, kv, limits), goal)


@BANK.wrong("batch_for_goal", says="if the new token needed no room")
def no_slot_for_the_new_token(config, context, blocks, block_size, goal, size, kv, limits):
    return grow(blocks, ceil_div(context, block_size), step_time(config, context, size, kv, limits), goal)


@BANK.wrong("batch_for_goal", says="if texts shared blocks")
def slots_not_blocks(config, context, blocks, block_size, goal, size, kv, limits):
    return grow(blocks * block_size, context + 1, step_time(config, context, size, kv, limits), goal)


@BANK.wrong("batch_for_goal", says="when the step's time is divided by its texts")
def time_a_text(config, context, blocks, block_size, goal, size, kv, limits):
    seconds = step_time(config, context, size, kv, limits)
    return grow(blocks, ceil_div(context + 1, block_size), lambda b: seconds(b) / b, goal)


@BANK.wrong("batch_for_goal", says="if each text read the weights for itself")
def one_after_the_other(config, context, blocks, block_size, goal, size, kv, limits):
    seconds = step_time(config, context, size, kv, limits)
    return grow(blocks, ceil_div(context + 1, block_size), lambda b: b * seconds(1), goal)


@BANK.wrong("batch_for_goal", says="when the goal has to be beaten, and not just met")
def goal_to_be_beaten(config, context, blocks, block_size, goal, size, kv, limits):
    seconds = step_time(config, context, size, kv, limits)
    return grow(blocks, ceil_div(context + 1, block_size), seconds, math.nextafter(goal, 0))


@BANK.wrong("batch_for_goal", says="when one text too many is counted: the last one that was tried did not hold")
def one_too_many(config, context, blocks, block_size, goal, size, kv, limits):
    batch, stop = grow(blocks, ceil_div(context + 1, block_size), step_time(config, context, size, kv, limits), goal)
    return batch + 1, stop


@BANK.wrong("batch_for_goal", says="when one text is counted in any case")
def one_at_least(config, context, blocks, block_size, goal, size, kv, limits):
    batch, stop = grow(blocks, ceil_div(context + 1, block_size), step_time(config, context, size, kv, limits), goal)
    return max(batch, 1), stop


@BANK.wrong("batch_for_goal", says="what stops the batch of .*yours 'goal', expected 'memory'")
def goal_asked_first(config, context, blocks, block_size, goal, size, kv, limits):
    seconds = step_time(config, context, size, kv, limits)
    batch, _ = grow(blocks, ceil_div(context + 1, block_size), seconds, goal)
    return batch, "goal" if seconds(batch + 1) > goal else "memory"


@BANK.wrong("batch_for_goal", says="expected a tuple")
def number_alone(config, context, blocks, block_size, goal, size, kv, limits):
    return grow(blocks, ceil_div(context + 1, block_size), step_time(config, context, size, kv, limits), goal)[0]


@BANK.right("batch_for_goal")
def one_by_one(config, context, blocks, block_size, goal, size, kv, limits):
    return grow(blocks, ceil_div(context + 1, block_size), step_time(config, context, size, kv, limits), goal)


@BANK.right("batch_for_goal")
def by_halving(config, context, blocks, block_size, goal, size, kv, limits):
    seconds = step_time(config, context, size, kv, limits)
    most = blocks // ceil_div(context + 1, block_size)
    low, high = 0, most + 1  # low meets the goal, high does not, or has no room
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if seconds(middle) <= goal else (low, middle)
    return low, "memory" if low == most else "goal"


# ---------------------------------------------------------------- choose_guesses


def pick(most, times):
    values = [times(k) for k in range(most + 1)]
    return values.index(max(values)), max(values)


def pass_time(config, batch, context, size, kv, limits, sampled=None):
    return lambda k: step_work(config, k + 1, context, batch, sampled or k + 1, size, kv).seconds(limits)


@BANK.wrong("choose_guesses", says="when the token that the model adds itself is missing")
def accepted_only(config, batch, context, alpha, guess, most, size, kv, limits):
    cost = pass_time(config, batch, context, size, kv, limits)
    return pick(most, lambda k: (expected_tokens(alpha, k) - 1) * cost(0) / (k * guess + cost(k)))


@BANK.wrong("choose_guesses", says="if guesses after a rejection counted too")
def each_guess_for_itself(config, batch, context, alpha, guess, most, size, kv, limits):
    cost = pass_time(config, batch, context, size, kv, limits)
    return pick(most, lambda k: (1 + k * alpha) * cost(0) / (k * guess + cost(k)))


@BANK.wrong("choose_guesses", says="when the guesses cost nothing")
def free_guesses(config, batch, context, alpha, guess, most, size, kv, limits):
    cost = pass_time(config, batch, context, size, kv, limits)
    return pick(most, lambda k: expected_tokens(alpha, k) * cost(0) / cost(k))


@BANK.wrong("choose_guesses", says="when verifying costs no more than a plain step")
def free_rows(config, batch, context, alpha, guess, most, size, kv, limits):
    cost = pass_time(config, batch, context, size, kv, limits)
    return pick(most, lambda k: expected_tokens(alpha, k) * cost(0) / (k * guess + cost(0)))


@BANK.wrong("choose_guesses", says="when verifying takes K rows: it takes K")
def a_row_too_few(config, batch, context, alpha, guess, most, size, kv, limits):
    cost = pass_time(config, batch, context, size, kv, limits)
    return pick(most, lambda k: expected_tokens(alpha, k) * cost(0) / (k * guess + cost(max(k - 1, 0))))


@BANK.wrong(
    "choose_guesses", says="each row has its logits: .*with logits for the last row only: every row is compared"
)
def last_row_only(config, batch, context, alpha, guess, most, size, kv, limits):
    cost = pass_time(config, batch, context, size, kv, limits, sampled=1)
    return pick(most, lambda k: expected_tokens(alpha, k) * cost(0) / (k * guess + cost(k)))


@BANK.wrong("choose_guesses", says="for a single text")
def batch_forgotten(config, batch, context, alpha, guess, most, size, kv, limits):
    cost = pass_time(config, 1, context, size, kv, limits)
    return pick(most, lambda k: expected_tokens(alpha, k) * cost(0) / (k * guess + cost(k)))


@BANK.wrong("choose_guesses", says="slower than plain decoding, and 0 is a choice too")
def always_guessing(config, batch, context, alpha, guess, most, size, kv, limits):
    cost = pass_time(config, batch, context, size, kv, limits)
    return max(
        (expected_tokens(alpha, k) * cost(0) / (k * guess + cost(k)), -k, k) for k in range(min(1, most), most + 1)
    )[::-2]


@BANK.wrong("choose_guesses", says="yours 6 is .* times as fast; expected 3")
def as_many_as_allowed(config, batch, context, alpha, guess, most, size, kv, limits):
    cost = pass_time(config, batch, context, size, kv, limits)
    return most, expected_tokens(alpha, most) * cost(0) / (most * guess + cost(most))


@BANK.wrong("choose_guesses", says="as tokens a round: their cost is missing")
def most_tokens(config, batch, context, alpha, guess, most, size, kv, limits):
    return pick(most, lambda k: expected_tokens(alpha, k))


@BANK.wrong("choose_guesses", says="as tokens a second")
def a_rate(config, batch, context, alpha, guess, most, size, kv, limits):
    cost = pass_time(config, batch, context, size, kv, limits)
    return pick(most, lambda k: expected_tokens(alpha, k) / (k * guess + cost(k)))


@BANK.wrong("choose_guesses", says="which is as fast with fewer guesses")
def the_last_of_equals(config, batch, context, alpha, guess, most, size, kv, limits):
    cost = pass_time(config, batch, context, size, kv, limits)
    return max((expected_tokens(alpha, k) * cost(0) / (k * guess + cost(k)), k) for k in range(most + 1))[::-1]


@BANK.wrong("choose_guesses", says="the other way round: the times as slow")
def upside_down(config, batch, context, alpha, guess, most, size, kv, limits):
    cost = pass_time(config, batch, context, size, kv, limits)
    k, times = pick(most, lambda k: expected_tokens(alpha, k) * cost(0) / (k * guess + cost(k)))
    return k, 1 / times


@BANK.right("choose_guesses")
def by_the_rate(config, batch, context, alpha, guess, most, size, kv, limits):
    def rate(k):
        tokens, p = 0.0, 1.0
        for _ in range(k + 1):
            tokens, p = tokens + p, p * alpha
        return tokens / (k * guess + step_work(config, k + 1, context, batch, k + 1, size, kv).seconds(limits))

    best = 0
    for k in range(1, most + 1):
        if rate(k) > rate(best) * (1 + 1e-13):
            best = k
    return best, rate(best) / rate(0)


@BANK.right("choose_guesses")
def by_relative_costs(config, batch, context, alpha, guess, most, size, kv, limits):
    cost = pass_time(config, batch, context, size, kv, limits)
    found = 0, 1.0
    for k in range(1, most + 1):
        tokens = k + 1.0 if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)
        times = tokens / ((k * guess + cost(k)) / cost(0))
        if times > found[1]:
            found = k, times
    return found


# ---------------------------------------------------------------- choose_quantization


def smallest(options, admitted):
    left = [option for option in options if admitted(option)]
    return min(left, key=lambda option: (option.bits, option.loss)).name if left else None


def in_room(option, parameters, room):
    return parameters * option.bits / 8 <= room


@BANK.wrong("choose_quantization", says="two errors more are .*, and that is not below")
def errors_ignored(options, parameters, room, goal, limit):
    return smallest(options, lambda o: in_room(o, parameters, room) and o.seconds <= goal and o.loss < limit)


@BANK.wrong("choose_quantization", says="two errors more are .*, and that is not below")
def one_error(options, parameters, room, goal, limit):
    return smallest(options, lambda o: in_room(o, parameters, room) and o.seconds <= goal and o.loss + o.error < limit)


@BANK.wrong("choose_quantization", says="two errors more are .*, and that is not below")
def errors_subtracted(options, parameters, room, goal, limit):
    return smallest(
        options, lambda o: in_room(o, parameters, room) and o.seconds <= goal and o.loss - 2 * o.error < limit
    )


@BANK.wrong("choose_quantization", says="reach the limit exactly.*two errors more are 0.5, and that is not below 0.5")
def reaching_is_enough(options, parameters, room, goal, limit):
    return smallest(
        options, lambda o: in_room(o, parameters, room) and o.seconds <= goal and o.loss + 2 * o.error <= limit
    )


@BANK.wrong("choose_quantization", says="bytes, not bits.*yours None, expected '8 bits', which is admitted")
def bits_in_the_room(options, parameters, room, goal, limit):
    return smallest(
        options, lambda o: parameters * o.bits <= room and o.seconds <= goal and o.loss + 2 * o.error < limit
    )


@BANK.wrong("choose_quantization", says="it takes 1,700 bytes, and there is room for 1,699")
def room_ignored(options, parameters, room, goal, limit):
    return smallest(options, lambda o: o.seconds <= goal and o.loss + 2 * o.error < limit)


@BANK.wrong("choose_quantization", says="a step takes 0.03 s, and the goal is 0.025")
def goal_ignored(options, parameters, room, goal, limit):
    return smallest(options, lambda o: in_room(o, parameters, room) and o.loss + 2 * o.error < limit)


def admitted_ones(options, parameters, room, goal, limit):
    return [o for o in options if in_room(o, parameters, room) and o.seconds <= goal and o.loss + 2 * o.error < limit]


@BANK.wrong("choose_quantization", says="yours '8 bits' has 8.5 bits, expected '4 bits', which is admitted and smaller")
def least_loss(options, parameters, room, goal, limit):
    left = admitted_ones(options, parameters, room, goal, limit)
    return min(left, key=lambda o: o.loss).name if left else None


@BANK.wrong("choose_quantization", says="has 8.5 bits, expected '4 bits', which is admitted and smaller")
def first_in_the_list(options, parameters, room, goal, limit):
    left = admitted_ones(options, parameters, room, goal, limit)
    return left[0].name if left else None


@BANK.wrong("choose_quantization", says="which has as many bits and loses less")
def first_of_equals(options, parameters, room, goal, limit):
    left = admitted_ones(options, parameters, room, goal, limit)
    return min(left, key=lambda o: o.bits).name if left else None


@BANK.wrong("choose_quantization", says="which has as many bits and loses less")
def upper_bound_of_equals(options, parameters, room, goal, limit):
    left = admitted_ones(options, parameters, room, goal, limit)
    return min(left, key=lambda o: (o.bits, o.loss + 2 * o.error)).name if left else None


@BANK.wrong("choose_quantization", says="iterable argument is empty|empty sequence|arg is an empty")
def nothing_left_forgotten(options, parameters, room, goal, limit):
    return min(admitted_ones(options, parameters, room, goal, limit), key=lambda o: (o.bits, o.loss)).name


@BANK.wrong("choose_quantization", says="expected the name of an option or None")
def option_not_name(options, parameters, room, goal, limit):
    return min(admitted_ones(options, parameters, room, goal, limit), key=lambda o: (o.bits, o.loss), default=None)


@BANK.wrong("choose_quantization", says="your function changed the list: that belongs to the caller")
def sorted_in_place(options, parameters, room, goal, limit):
    options.sort(key=lambda o: (o.bits, o.loss))
    left = admitted_ones(options, parameters, room, goal, limit)
    return left[0].name if left else None


@BANK.right("choose_quantization")
def sorted_first(options, parameters, room, goal, limit):
    for name, bits, loss, error, seconds in sorted(options, key=lambda o: (o.bits, o.loss)):
        if bits * parameters <= 8 * room and seconds <= goal and loss < limit - 2 * error:
            return name
    return None


@BANK.right("choose_quantization")
def best_so_far(options, parameters, room, goal, limit):
    best = None
    for o in options:
        if o.seconds > goal or parameters * o.bits / 8 > room or (limit - o.loss) / 2 <= o.error:
            continue
        if best is None or (o.bits, o.loss) < (best.bits, best.loss):
            best = o
    return None if best is None else best.name


# ---------------------------------------------------------------- read_profile


def least_times(row, limits, calls=None):
    """Microseconds of arithmetic and of bytes."""
    calls = row.calls if calls is None else calls
    return 1e6 * calls * row.flops / limits.flops, 1e6 * calls * row.bytes / limits.bandwidth


def name_of(arithmetic, reading, took, far):
    if took > far * max(arithmetic, reading):
        return "overhead"
    return "compute" if arithmetic >= reading else "memory"


def pairs_of(rows, limits, far, x, bound=None, whole=None):
    total = sum(row.microseconds for row in rows)
    bound = bound or (lambda row: name_of(*least_times(row, limits), row.microseconds, far))
    whole = whole or (lambda row, total: total / (total - row.microseconds + row.microseconds / x))
    return [(bound(row), whole(row, total)) for row in rows]


@BANK.wrong("read_profile", says="with the work of one call against the time of all")
def calls_forgotten(rows, limits, far, x):
    return pairs_of(rows, limits, far, x, lambda r: name_of(*least_times(r, limits, 1), r.microseconds, far))


@BANK.wrong("read_profile", says="with the time divided by the calls, and the work not")
def time_of_one_call(rows, limits, far, x):
    return pairs_of(rows, limits, far, x, lambda r: name_of(*least_times(r, limits), r.microseconds / r.calls, far))


@BANK.wrong("read_profile", says="if being far from both limits did not count")
def no_overhead(rows, limits, far, x):
    return pairs_of(rows, limits, far, x, lambda r: name_of(*least_times(r, limits), 0, far))


@BANK.wrong("read_profile", says="with the two limits exchanged")
def limits_exchanged(rows, limits, far, x):
    return pairs_of(rows, limits, far, x, lambda r: name_of(*least_times(r, limits)[::-1], r.microseconds, far))


@BANK.wrong("read_profile", says="with the shorter of the two least times for both questions")
def far_from_one(rows, limits, far, x):
    def bound(row):
        arithmetic, reading = least_times(row, limits)
        if row.microseconds > far * min(arithmetic, reading):
            return "overhead"
        return "compute" if arithmetic >= reading else "memory"

    return pairs_of(rows, limits, far, x, bound)


@BANK.wrong("read_profile", says="one without FLOP, one without bytes: .*ZeroDivisionError")
def by_intensity(rows, limits, far, x):
    def bound(row):
        if row.microseconds > far * max(least_times(row, limits)):
            return "overhead"
        return "compute" if row.flops / row.bytes >= limits.ridge else "memory"

    return pairs_of(rows, limits, far, x, bound)


@BANK.wrong(
    "read_profile",
    says="at exactly that distance it is not: .*yours 'overhead', expected 'compute'.*exactly `far` times",
)
def far_already_there(rows, limits, far, x):
    return pairs_of(
        rows, limits, far, x, lambda r: name_of(*least_times(r, limits), math.nextafter(r.microseconds, math.inf), far)
    )


@BANK.wrong("read_profile", says="compute is the answer: .*yours 'memory', expected 'compute'")
def memory_at_the_ridge(rows, limits, far, x):
    def bound(row):
        arithmetic, reading = least_times(row, limits)
        word = name_of(arithmetic, reading, row.microseconds, far)
        return "memory" if word == "compute" and arithmetic <= reading else word

    return pairs_of(rows, limits, far, x, bound)


@BANK.wrong("read_profile", says="when the whole becomes as much faster as the row")
def the_row_is_all(rows, limits, far, x):
    return pairs_of(rows, limits, far, x, whole=lambda row, total: float(x))


@BANK.wrong("read_profile", says="when gains are averaged by their shares: times are to be added, not rates")
def averaged_gains(rows, limits, far, x):
    return pairs_of(
        rows, limits, far, x, whole=lambda row, total: 1 + row.microseconds / total * (x - 1) if total else 1.0
    )


@BANK.wrong("read_profile", says="the other way round: the new time over the old")
def what_is_left(rows, limits, far, x):
    return pairs_of(
        rows, limits, far, x, whole=lambda row, total: (total - row.microseconds + row.microseconds / x) / total
    )


@BANK.wrong("read_profile", says="for the whole if the row took no time at all")
def row_removed(rows, limits, far, x):
    return pairs_of(rows, limits, far, x, whole=lambda row, total: total / ((total - row.microseconds) or 1))


@BANK.wrong("read_profile", says="when microseconds are multiplied by calls: they are those of all calls")
def times_calls(rows, limits, far, x):
    total = sum(row.microseconds * row.calls for row in rows)

    def whole(row, _):
        mine = row.microseconds * row.calls
        return total / (total - mine + mine / x)

    return pairs_of(rows, limits, far, x, whole=whole)


@BANK.wrong("read_profile", says="expected a list of pairs, got dict")
def by_name(rows, limits, far, x):
    return {row.name: pair for row, pair in zip(rows, pairs_of(rows, limits, far, x), strict=True)}


@BANK.right("read_profile")
def by_shares(rows, limits, far, x):
    whole = math.fsum(row.microseconds for row in rows)
    found = []
    for row in rows:
        share = row.microseconds / whole
        arithmetic, reading = least_times(row, limits)
        found.append((name_of(arithmetic, reading, row.microseconds, far), 1 / (1 - share + share / x)))
    return found


@BANK.right("read_profile")
def row_by_row(rows, limits, far, x):
    found = []
    for i, (_, calls, took, flops, moved) in enumerate(rows):
        compute, memory = calls * flops / limits.flops, calls * moved / limits.bandwidth
        far_away = took / 1e6 > far * compute and took / 1e6 > far * memory
        word = "overhead" if far_away else "memory" if memory > compute else "compute"
        others = sum(other.microseconds for other in [*rows[:i], *rows[i + 1 :]])
        found.append((word, (others + took) / (others + took / x)))
    return found
