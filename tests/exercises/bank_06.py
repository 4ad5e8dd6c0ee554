"""Answers to exercise 06, continuous batching."""

from __future__ import annotations

import heapq
import math
from itertools import accumulate, chain

import torch
from bank import Bank

BANK = Bank()


# ---------------------------------------------------------------- batch_steps


def static_steps(lengths, size):
    return sum(max(lengths[i : i + size]) for i in range(0, len(lengths), size))


def continuous_steps(lengths, size):
    places = [0] * size
    for length in lengths:
        heapq.heapreplace(places, places[0] + length)
    return max(places)


@BANK.wrong("batch_steps", says="continuous steps.*no place is ever idle: at the end there is nobody to fill them")
def never_idle(lengths, batch_size):
    return static_steps(lengths, batch_size), math.ceil(sum(lengths) / batch_size)


@BANK.wrong("batch_steps", says="continuous steps.*the largest of two lower bounds is taken")
def a_lower_bound(lengths, batch_size):
    bound = max([math.ceil(sum(lengths) / batch_size), *lengths])
    return static_steps(lengths, batch_size), bound


@BANK.wrong("batch_steps", says="continuous steps.*text i has to wait for place i % batch size")
def places_dealt_out(lengths, batch_size):
    return static_steps(lengths, batch_size), max(sum(lengths[i::batch_size]) for i in range(batch_size))


@BANK.wrong("batch_steps", says="continuous steps.*nobody joins before the whole batch is done")
def collects_and_clears(lengths, batch_size):
    return static_steps(lengths, batch_size), static_steps(lengths, batch_size)


@BANK.wrong("batch_steps", says="continuous steps.*a free place stays empty for a step")
def joins_one_step_late(lengths, batch_size):
    return static_steps(lengths, batch_size), max(0, continuous_steps([n + 1 for n in lengths], batch_size) - 1)


@BANK.wrong("batch_steps", says="static steps.*the last batch, which is not full, is left out")
def full_batches_only(lengths, batch_size):
    full = lengths[: len(lengths) // batch_size * batch_size]
    return static_steps(full, batch_size), continuous_steps(lengths, batch_size)


@BANK.wrong("batch_steps", says="static steps.*as long as the longest text of all")
def one_longest_for_all(lengths, batch_size):
    static = math.ceil(len(lengths) / batch_size) * max(lengths)
    return static, continuous_steps(lengths, batch_size)


@BANK.wrong("batch_steps", says="static steps.*the longest first: nobody knows the lengths before")
def sorts_first(lengths, batch_size):
    lengths = sorted(lengths, reverse=True)
    return static_steps(lengths, batch_size), continuous_steps(lengths, batch_size)


@BANK.wrong("batch_steps", says="no text.*ValueError: max")
def needs_a_text(lengths, batch_size):
    places = [0] * min(batch_size, len(lengths))
    for length in lengths:
        places[places.index(min(places))] += length
    return static_steps(lengths, batch_size), max(places)


@BANK.right("batch_steps")
def with_a_heap(lengths, batch_size):
    return static_steps(lengths, batch_size), continuous_steps(lengths, batch_size)


@BANK.right("batch_steps")
def token_by_token(lengths, batch_size):
    counts = []
    for joins in (False, True):
        waiting, running, steps = list(lengths), [], 0
        while waiting or running:
            if joins or not running:
                free = batch_size - len(running)
                running, waiting = running + waiting[:free], waiting[free:]
            running = [n - 1 for n in running if n - 1]
            steps += 1
        counts.append(steps)
    return tuple(counts)


# ---------------------------------------------------------------- plan_step


def fill(requests, budget):
    """Each in turn takes what it wants, or what is left."""
    plan = []
    for request in requests:
        count = min(request.wanted, budget)
        budget -= count
        plan += [(request, count)] if count else []
    return plan


def in_groups(running, waiting, max_num_seqs):
    decoding = [r for r in running if r.wanted == 1]
    return decoding, [r for r in running if r.wanted > 1], waiting[: max(0, max_num_seqs - len(running))]


@BANK.wrong("plan_step", says="request 2 only wants its next token and gets none, while request 1 computes")
def in_order_of_arrival(running, waiting, budget, max_num_seqs):
    return fill(running + waiting[: max_num_seqs - len(running)], budget)


@BANK.wrong("plan_step", says="the budget of 16 is for all of them together")
def a_budget_each(running, waiting, budget, max_num_seqs):
    both = running + waiting[: max_num_seqs - len(running)]
    return [(request, min(request.wanted, budget)) for request in both]


@BANK.wrong("plan_step", says="a budget of 1.*3 tokens; the budget of 1 is for all of them together")
def decodes_are_free(running, waiting, budget, max_num_seqs):
    decoding, reading, joining = in_groups(running, waiting, max_num_seqs)
    return [(r, 1) for r in decoding] + fill(reading + joining, max(0, budget - len(decoding)))


@BANK.wrong("plan_step", says="request 3 gets 0 of 6 tokens that it wants, and 2 of the budget are left unused")
def whole_prompts_only(running, waiting, budget, max_num_seqs):
    plan = []
    for request in chain(*in_groups(running, waiting, max_num_seqs)):
        if request.wanted <= budget:
            plan.append((request, request.wanted))
            budget -= request.wanted
    return plan


@BANK.wrong("plan_step", says="request 3 gets 0 of 6 tokens that it wants, and 2 of the budget are left unused")
def nobody_joins_in_mid_flight(running, waiting, budget, max_num_seqs):
    decoding, reading, joining = in_groups(running, waiting, max_num_seqs)
    return fill(decoding + reading, budget) if running else fill(joining, budget)


@BANK.wrong("plan_step", says="3 join beside 0 that run already; that is more than 2")
def no_limit_of_requests(running, waiting, budget, max_num_seqs):
    decoding, reading, _ = in_groups(running, waiting, max_num_seqs)
    return fill(decoding + reading + waiting, budget)


@BANK.wrong("plan_step", says="when all places are taken.*2 join beside 2 that run already; that is more than 2")
def running_ones_do_not_count(running, waiting, budget, max_num_seqs):
    decoding, reading, _ = in_groups(running, waiting, max_num_seqs)
    return fill(decoding + reading + waiting[:max_num_seqs], budget)


@BANK.wrong("plan_step", says="request 3 joins, while request 1, which runs already, gets 8 of 12")
def new_ones_before_old_prompts(running, waiting, budget, max_num_seqs):
    decoding, reading, joining = in_groups(running, waiting, max_num_seqs)
    return fill(decoding + joining + reading, budget)


@BANK.wrong("plan_step", says="that waits is no decode.*request 1 joins, while request 0, which runs already, gets")
def short_prompts_count_as_decodes(running, waiting, budget, max_num_seqs):
    both = running + waiting[: max_num_seqs - len(running)]
    return fill(sorted(both, key=lambda r: r.wanted > 1), budget)


@BANK.wrong("plan_step", says="is served before request 0, which came first")
def shortest_first(running, waiting, budget, max_num_seqs):
    decoding, reading, joining = in_groups(running, waiting, max_num_seqs)
    return fill(decoding + reading + sorted(joining, key=lambda r: r.wanted), budget)


@BANK.wrong("plan_step", says="request 3 joins, while request 1, which runs already, gets 4 of 12")
def equal_shares(running, waiting, budget, max_num_seqs):
    everybody = list(chain(*in_groups(running, waiting, max_num_seqs)))
    share = max(1, budget // max(1, len(everybody)))
    return [(request, min(request.wanted, share)) for request in everybody[:budget]]


@BANK.wrong("plan_step", says="request 0 gets 5 tokens, and wants 1; what is in the cache is not computed again")
def forgets_the_cache(running, waiting, budget, max_num_seqs):
    plan = []
    for request in chain(*in_groups(running, waiting, max_num_seqs)):
        count = min(len(request.tokens), budget)
        budget -= count
        plan += [(request, count)] if count else []
    return plan


@BANK.wrong("plan_step", says="gets 0 tokens; leave out who computes nothing")
def keeps_those_with_nothing(running, waiting, budget, max_num_seqs):
    plan = []
    for request in chain(*in_groups(running, waiting, max_num_seqs)):
        plan.append((request, min(request.wanted, budget)))
        budget -= plan[-1][1]
    return plan


@BANK.wrong("plan_step", says="a plan only says what to do; your function changed the lists")
def takes_them_off_the_list(running, waiting, budget, max_num_seqs):
    plan = fill([r for group in in_groups(running, waiting, max_num_seqs) for r in group], budget)
    while waiting and any(waiting[0] is request for request, _ in plan):
        running.append(waiting.pop(0))
    return plan


@BANK.wrong("plan_step", says="nobody computes anything, while somebody waits")
def waits_for_somebody_to_run(running, waiting, budget, max_num_seqs):
    return fill(chain(*in_groups(running, waiting, max_num_seqs)), budget) if running else []


@BANK.right("plan_step")
def group_after_group(running, waiting, budget, max_num_seqs):
    plan = []
    for group in in_groups(running, waiting, max_num_seqs):
        plan += fill(group, budget - sum(count for _, count in plan))
    return plan


@BANK.right("plan_step")
def one_token_at_a_time(running, waiting, budget, max_num_seqs):
    counts = {}
    for _ in range(budget):
        first = [r for r in running if r.wanted == 1 and r not in counts]
        second = [r for r in running if counts.get(r, 0) < r.wanted]
        places = max(0, max_num_seqs - len(running))
        third = [r for r in waiting[:places] if counts.get(r, 0) < r.wanted]
        for request in (first + second + third)[:1]:
            counts[request] = counts.get(request, 0) + 1
    return list(counts.items())


# ---------------------------------------------------------------- chunk_prompt


def chunked(n_prompt, decodes, budget, room=None, out=None):
    """The right steps, with a part of the rule exchanged. room: (step, writing); out: (writing, end)."""
    room = room or (lambda step, writing: budget - writing)
    out = out or (lambda writing, end: writing + (end == n_prompt))
    steps, start = [], 0
    while start < n_prompt:
        writing = sum(left > len(steps) for left in decodes)
        end = min(n_prompt, start + room(len(steps), writing))
        steps.append((start, end, out(writing, end)))
        start = end
    return steps


@BANK.wrong("chunk_prompt", says="4 tokens of the prompt beside 2 running texts: more than the budget of 4")
def chunks_of_the_whole_budget(n_prompt, decodes, budget):
    return chunked(n_prompt, decodes, budget, room=lambda step, writing: budget)


@BANK.wrong("chunk_prompt", says="texts that have ended leave their share")
def nobody_ever_ends(n_prompt, decodes, budget):
    return chunked(n_prompt, decodes, budget, room=lambda step, writing: budget - len(decodes))


@BANK.wrong("chunk_prompt", says="a chunk that does not end the prompt gives no token")
def each_chunk_gives_one(n_prompt, decodes, budget):
    return chunked(n_prompt, decodes, budget, out=lambda writing, end: writing + 1)


@BANK.wrong("chunk_prompt", says="the chunk that ends the prompt gives the prompt's first token")
def the_last_chunk_gives_none(n_prompt, decodes, budget):
    return chunked(n_prompt, decodes, budget, out=lambda writing, end: writing)


@BANK.wrong("chunk_prompt", says="the running texts write one each")
def only_the_prompts_own(n_prompt, decodes, budget):
    return chunked(n_prompt, decodes, budget, out=lambda writing, end: int(end == n_prompt))


@BANK.wrong("chunk_prompt", says="ends at 11, behind the prompt's 10 tokens")
def runs_over_the_end(n_prompt, decodes, budget):
    steps, start = [], 0
    while start < n_prompt:
        writing = sum(left > len(steps) for left in decodes)
        end = start + budget - writing
        steps.append((start, end, writing + (end >= n_prompt)))
        start = end
    return steps


@BANK.wrong("chunk_prompt", says="where they fit exactly.*the prompt is computed after 2 steps, and yours go on")
def one_empty_chunk_more(n_prompt, decodes, budget):
    steps = chunked(n_prompt, decodes, budget)
    return steps if n_prompt % budget else [*steps, (n_prompt, n_prompt, 0)]


@BANK.wrong(
    "chunk_prompt",
    says="step 0: 2 running texts.*gets nothing in this step, and the step counts",
)
def leaves_steps_without_a_chunk_out(n_prompt, decodes, budget):
    return [step for step in chunked(n_prompt, decodes, budget) if step[0] < step[1]]


@BANK.wrong("chunk_prompt", says="step 1: starts at 3, but the tokens up to 2 are computed")
def ends_included(n_prompt, decodes, budget):
    steps, start = [], 0
    while start < n_prompt:
        writing = sum(left > len(steps) for left in decodes)
        end = min(n_prompt, start + budget - writing)
        steps.append((start, end, writing + (end == n_prompt)))
        start = end + 1
    return steps


@BANK.wrong("chunk_prompt", says="the prompt's last token is computed too; its row gives the first token")
def keeps_the_last_token_for_later(n_prompt, decodes, budget):
    return chunked(n_prompt - 1, decodes, budget)


@BANK.wrong("chunk_prompt", says="2 running texts, a budget of 2: the prompt gets nothing in this step")
def at_least_one_token(n_prompt, decodes, budget):
    return chunked(n_prompt, decodes, budget, room=lambda step, writing: max(1, budget - writing))


@BANK.wrong("chunk_prompt", says="your loop does not end")
def start_stays_where_it_is(n_prompt, decodes, budget):
    steps, start = [], 0
    while start < n_prompt:
        writing = sum(left > len(steps) for left in decodes)
        steps.append((start, start + budget - writing, writing))
    return steps


@BANK.right("chunk_prompt")
def from_the_decodes_that_are_left(n_prompt, decodes, budget):
    left, steps, start = list(decodes), [], 0
    while start < n_prompt:
        size = min(budget - len(left), n_prompt - start)
        steps.append((start, start + size, len(left) + int(start + size == n_prompt)))
        start += size
        left = [n - 1 for n in left if n > 1]
    return steps


@BANK.right("chunk_prompt")
def by_the_sum_of_rooms(n_prompt, decodes, budget):
    horizon = range(max([0, *decodes]) + n_prompt)
    writing = [sum(n > step for n in decodes) for step in horizon]
    ends = [min(n_prompt, end) for end in accumulate(budget - n for n in writing)]
    last = ends.index(n_prompt)
    return [([0, *ends][i], ends[i], writing[i] + (i == last)) for i in range(last + 1)]


# ---------------------------------------------------------------- make_room


def last_in_order(running):
    return max(running, key=lambda r: (-r.priority, r.number))


def put_back(waiting, victim):
    waiting.append(victim)
    waiting.sort(key=lambda r: r.order)


def preempting(running, waiting, free, needed, choose=last_in_order, again=None, queue=put_back, stay=1, keep=()):
    """The right loop, with a part exchanged. keep: fields of the victim that stay as they are."""
    lost = []
    while len(free) < needed and len(running) > stay:
        victim = choose(running)
        running.remove(victim)
        free += victim.block_table
        lost.append((victim, again(victim) if again else victim.num_computed))
        if "block_table" not in keep:
            victim.block_table = []
        if "num_computed" not in keep:
            victim.num_computed = 0
        queue(waiting, victim)
    return lost


@BANK.wrong("make_room", says=r"request 0 \(priority 0\) loses its blocks, and not request 2 .*the newest goes first")
def the_oldest(running, waiting, free, needed):
    return preempting(running, waiting, free, needed, choose=lambda rs: min(rs, key=lambda r: (r.priority, r.number)))


@BANK.wrong("make_room", says="the newest goes first among equals")
def the_last_of_the_list(running, waiting, free, needed):
    return preempting(running, waiting, free, needed, choose=lambda rs: rs[-1])


@BANK.wrong("make_room", says="loses its blocks, but request 0 .* has a lower priority")
def the_newest_of_all(running, waiting, free, needed):
    return preempting(running, waiting, free, needed, choose=lambda rs: max(rs, key=lambda r: r.number))


@BANK.wrong("make_room", says=r"request 1 \(priority 2\) loses its blocks, but request 0 .* has a lower priority")
def the_highest_priority(running, waiting, free, needed):
    return preempting(running, waiting, free, needed, choose=lambda rs: max(rs, key=lambda r: (r.priority, r.number)))


@BANK.wrong("make_room", says=r"request 0 \(priority 0\) loses its blocks, and not request 2")
def who_frees_most(running, waiting, free, needed):
    return preempting(running, waiting, free, needed, choose=lambda rs: max(rs, key=lambda r: len(r.block_table)))


@BANK.wrong("make_room", says="after 1 preemption 3 blocks free, and 4 are needed")
def only_one(running, waiting, free, needed):
    return preempting(running, waiting, free, min(needed, len(free) + 1))


@BANK.wrong("make_room", says="that is enough")
def one_too_many(running, waiting, free, needed):
    return preempting(running, waiting, free, needed + 1)


@BANK.wrong("make_room", says="the last one that runs must stay, or nobody gets on")
def everybody_goes(running, waiting, free, needed):
    return preempting(running, waiting, free, needed, stay=0)


@BANK.wrong("make_room", says="num_computed 5, but all its rows lie in blocks given back")
def rows_still_counted(running, waiting, free, needed):
    return preempting(running, waiting, free, needed, keep=("num_computed",))


@BANK.wrong("make_room", says="its blocks belong to others from now on")
def blocks_in_two_places(running, waiting, free, needed):
    return preempting(running, waiting, free, needed, keep=("block_table",))


@BANK.wrong("make_room", says="belong to nobody now, and are not in `free`")
def blocks_lost(running, waiting, free, needed):
    return preempting(running, waiting, list(free), needed)


@BANK.wrong("make_room", says="keeps 5 of 6 tokens.*would be generated a second time")
def the_token_without_a_row_is_dropped(running, waiting, free, needed):
    def drop(victim):
        victim.tokens = victim.tokens[: victim.num_computed]
        return victim.num_computed

    return preempting(running, waiting, free, needed, again=drop)


@BANK.wrong("make_room", says="keeps 0 of 6 tokens.*would be generated a second time")
def starts_from_nothing(running, waiting, free, needed):
    def clear(victim):
        victim.tokens.clear()
        return victim.num_computed

    return preempting(running, waiting, free, needed, again=clear)


@BANK.wrong("make_room", says="6 tokens to compute again, expected 5: request 2 has 6 tokens, and 5 of them had been")
def all_tokens_again(running, waiting, free, needed):
    return preempting(running, waiting, free, needed, again=lambda victim: len(victim.tokens))


@BANK.wrong("make_room", says="`waiting` holds requests .*higher priority first, then who came first")
def to_the_end_of_the_queue(running, waiting, free, needed):
    return preempting(running, waiting, free, needed, queue=list.append)


@BANK.wrong("make_room", says="`waiting` holds requests .*higher priority first, then who came first")
def to_the_front_of_the_queue(running, waiting, free, needed):
    return preempting(running, waiting, free, needed, queue=lambda waiting, victim: waiting.insert(0, victim))


@BANK.wrong("make_room", says="is nowhere: it has to wait, or it never ends")
def never_seen_again(running, waiting, free, needed):
    return preempting(running, waiting, free, needed, queue=lambda waiting, victim: None)


@BANK.wrong("make_room", says="request 2 has no blocks, and is still in `running`")
def still_running(running, waiting, free, needed):
    rest = list(running)
    return preempting(rest, waiting, free, needed)


@BANK.right("make_room")
def sorted_once(running, waiting, free, needed):
    lost = []
    for victim in sorted(running, key=lambda r: r.order)[:0:-1]:
        if len(free) < needed:
            running.remove(victim)
            free.extend(reversed(victim.block_table))
            lost.append((victim, victim.num_computed))
            victim.block_table, victim.num_computed = [], 0
            put_back(waiting, victim)
    return lost


@BANK.right("make_room")
def into_its_place(running, waiting, free, needed):
    def insert(waiting, victim):
        before = [r for r in waiting if (-r.priority, r.number) < (-victim.priority, victim.number)]
        waiting.insert(len(before), victim)

    def lowest(running):
        low = min(r.priority for r in running)
        return sorted((r for r in running if r.priority == low), key=lambda r: r.number)[-1]

    return preempting(running, waiting, free, needed, choose=lowest, queue=insert)


# ---------------------------------------------------------------- flat_batch


def batch(spans, *, ids=None, positions=None, row=None, chooses=None):
    """The right batch, with a part exchanged. row: (start in the batch, span) -> row."""
    ids = ids or (lambda span: span.request.tokens[span.start : span.end])
    positions = positions or (lambda at, span: range(span.start, span.end))
    row = row or (lambda at, span: at + span.count - 1)
    chooses = chooses or (lambda span: span.end == len(span.request.tokens))
    starts = [0, *accumulate(span.count for span in spans)]
    return (
        torch.tensor([token for span in spans for token in ids(span)]),
        torch.tensor([p for at, span in zip(starts, spans, strict=False) for p in positions(at, span)]),
        {span.request: row(at, span) for at, span in zip(starts, spans, strict=False) if chooses(span)},
    )


@BANK.wrong("flat_batch", says="positions.*each span begins at position 0, as if it had no past")
def no_past(spans):
    return batch(spans, positions=lambda at, span: range(span.count))


@BANK.wrong("flat_batch", says="positions count the rows of the batch, not the places in each text")
def positions_of_the_batch(spans):
    return batch(spans, positions=lambda at, span: range(at, at + span.count))


@BANK.wrong("flat_batch", says="positions are one too large")
def positions_from_one(spans):
    return batch(spans, positions=lambda at, span: range(span.start + 1, span.end + 1))


@BANK.wrong("flat_batch", says="the tokens are taken from the beginning of the text")
def tokens_from_the_front(spans):
    return batch(spans, ids=lambda span: span.request.tokens[: span.count])


@BANK.wrong("flat_batch", says="tokens: 35 rows, expected 8: one for each token of each span")
def whole_texts(spans):
    return batch(spans, ids=lambda span: span.request.tokens)


@BANK.wrong("flat_batch", says="request 2 is still in the middle of its prompt; the next token is known already")
def everybody_chooses(spans):
    return batch(spans, chooses=lambda span: True)


@BANK.wrong("flat_batch", says="request 3 has been read to its end, so it chooses a token; it has no row")
def only_single_rows_choose(spans):
    return batch(spans, chooses=lambda span: span.count == 1)


@BANK.wrong("flat_batch", says="chunk of one token.*request 1 is still in the middle of its prompt")
def single_rows_choose_too(spans):
    return batch(spans, chooses=lambda span: span.count == 1 or span.end == len(span.request.tokens))


@BANK.wrong("flat_batch", says="chooses from row 3, expected 7: count the rows of the spans before it too")
def rows_of_each_span(spans):
    return batch(spans, row=lambda at, span: span.count - 1)


@BANK.wrong("flat_batch", says="chooses from row 1, expected 0: rows are counted from 0")
def rows_from_one(spans):
    return batch(spans, row=lambda at, span: at + span.count)


@BANK.wrong("flat_batch", says="the first row of its span has seen only the text's beginning")
def first_rows(spans):
    return batch(spans, row=lambda at, span: at)


@BANK.wrong("flat_batch", says="chooses from row 5, expected 0: that is its position")
def positions_as_rows(spans):
    return batch(spans, row=lambda at, span: span.end - 1)


@BANK.wrong("flat_batch", says="dtype torch.float32, expected torch.int64")
def floats(spans):
    tokens, positions, rows = batch(spans)
    return tokens.float(), positions, rows


@BANK.wrong("flat_batch", says="expected one dimension: all spans one after another")
def padded(spans):
    tokens, positions, rows = batch(spans)
    return tokens[None], positions[None], rows


@BANK.right("flat_batch")
def from_parts(spans):
    return batch(spans)


@BANK.right("flat_batch")
def by_concatenation(spans):
    tokens = torch.cat([torch.tensor(span.ids) for span in spans])
    positions = torch.cat([torch.arange(span.start, span.end) for span in spans])
    last = (torch.tensor([span.count for span in spans]).cumsum(0) - 1).tolist()
    ends = [span.end == len(span.request.tokens) for span in spans]
    return tokens, positions, {span.request: row for span, row, end in zip(spans, last, ends, strict=True) if end}
