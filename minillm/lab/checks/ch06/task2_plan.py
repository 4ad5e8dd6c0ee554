"""Task 2 of exercise 06: who computes how many tokens in the next step."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from minillm.lab.check import seeded
from minillm.lab.checks.ch06.base import CHAPTER, count_of, named, new_request, pairs_of, some_requests
from minillm.request import Request

plan = CHAPTER.task(
    "plan_step",
    hints=(
        "Three groups, one after the other: running and decoding; running and in its prompt; waiting.",
        "Walk through them with the tokens that are left of the budget. Nobody gets more than `wanted`.",
        "How many may join? That follows from max_num_seqs and those that run already, planned or not.",
    ),
)


def check_plan(fn: Callable, running: list[Request], waiting: list[Request], budget: int, seqs: int) -> list:
    """All that a plan has to keep. Together these rules leave one plan only. -> the plan"""
    label = (
        f"running want {[r.wanted for r in running]}, waiting {[r.wanted for r in waiting]}, "
        f"budget {budget}, at most {seqs} run"
    )
    lists = list(running), list(waiting)
    state = {request: (request.tokens[:], request.num_computed) for request in running + waiting}
    got = pairs_of(fn(running, waiting, budget, seqs), lists[0] + lists[1], label)
    assert (running, waiting) == lists, f"{label}: a plan only says what to do; your function changed the lists"
    for request, before in state.items():
        same = (request.tokens, request.num_computed) == before
        assert same, f"{label}: a plan only says what to do; your function changed {named(request)}"
    counts = dict.fromkeys(state, 0)
    for request, count in got:
        assert count >= 1, f"{label}: {named(request)} gets {count_of(count, 'token')}; leave out who computes nothing"
        most = f"{named(request)} gets {count_of(count, 'token')}, and wants {request.wanted}"
        assert count <= request.wanted, f"{label}: {most}; what is in the cache is not computed again"
        counts[request] = count
    total = sum(counts.values())
    assert total <= budget, f"{label}: {count_of(total, 'token')}; the budget of {budget} is for all of them together"
    joined = [request for request in waiting if counts[request]]
    places = max(0, seqs - len(running))
    beside = f"{len(joined)} join beside {len(running)} that run already"
    assert len(joined) <= places, f"{label}: {beside}; that is more than {seqs}"
    decoding = [request for request in running if request.wanted == 1]
    reading = [request for request in running if request.wanted > 1]
    for request in decoding:
        for other in reading + waiting:
            instead = f"while {named(other)} computes {count_of(counts[other], 'token')} of its prompt"
            starved = f"{named(request)} only wants its next token and gets none, {instead}"
            assert counts[request] or not counts[other], f"{label}: {starved}"
    for request in reading:
        for other in waiting:
            behind = f"{named(other)} joins, while {named(request)}, which runs already, gets {counts[request]}"
            assert counts[request] == request.wanted or not counts[other], f"{label}: {behind} of {request.wanted}"
    for group in (decoding, reading, waiting):
        for i, request in enumerate(group):
            for other in group[i + 1 :]:
                late = f"{named(other)} is served before {named(request)}, which came first and gets {counts[request]}"
                assert counts[request] == request.wanted or not counts[other], f"{label}: {late} of {request.wanted}"
    assert got or not waiting or running, f"{label}: nobody computes anything, while somebody waits"
    for request in decoding + reading + waiting[:places]:
        wants = f"{named(request)} gets {counts[request]} of {request.wanted} tokens that it wants"
        done = total == budget or counts[request] == request.wanted
        assert done, f"{label}: {wants}, and {budget - total} of the budget are left unused"
    return got


def running_and_waiting(run: list[tuple[int, int]], wait: list[int]) -> tuple[list[Request], list[Request]]:
    """Requests from (tokens, computed) of those that run, and the tokens of those that wait."""
    running = [new_request(i, n, computed) for i, (n, computed) in enumerate(run)]
    return running, [new_request(len(run) + i, n) for i, n in enumerate(wait)]


@plan
def a_mixed_step(fn):
    """decodes, a prompt in the middle and a new one share a step"""
    check_plan(fn, *running_and_waiting([(5, 4), (20, 8), (9, 8)], [6]), budget=16, seqs=4)
    check_plan(fn, *running_and_waiting([(5, 4), (20, 8), (9, 8)], [6]), budget=10, seqs=4)


@plan
def all_waiting(fn):
    """nobody runs yet: those who wait join in their order"""
    check_plan(fn, [], running_and_waiting([], [7, 2, 3])[1], budget=9, seqs=4)
    check_plan(fn, [], running_and_waiting([], [7, 2, 3])[1], budget=100, seqs=2)
    check_plan(fn, [], running_and_waiting([], [30])[1], budget=8, seqs=1)


@plan
def short_prompts(fn):
    """a prompt of one token that waits is no decode: it comes after the running prompts"""
    check_plan(fn, *running_and_waiting([(20, 8)], [1, 1]), budget=5, seqs=4)
    check_plan(fn, *running_and_waiting([(20, 8)], [1, 1]), budget=13, seqs=4)


@plan
def tight_budgets(fn):
    """a budget of 1, of the number of decodes, and of one more"""
    for budget in (1, 2, 3, 4):
        check_plan(fn, *running_and_waiting([(40, 8), (5, 4), (9, 8), (6, 5)], [6]), budget=budget, seqs=9)


@plan
def several_prompts(fn):
    """two running prompts: the first in order is read first, however long"""
    for prompts in ([(20, 8), (10, 5)], [(10, 5), (20, 8)], [(9, 2), (30, 8), (6, 1)]):
        check_plan(fn, *running_and_waiting(prompts, []), budget=13, seqs=4)


@plan
def no_place(fn):
    """when all places are taken nobody joins, however large the budget"""
    check_plan(fn, *running_and_waiting([(5, 4), (9, 3)], [6, 1]), budget=100, seqs=2)
    check_plan(fn, *running_and_waiting([(5, 4), (9, 3)], [6, 1]), budget=100, seqs=3)


@plan
def nobody(fn):
    """nobody is there: an empty plan"""
    check_plan(fn, [], [], budget=8, seqs=4)


@plan
def until_all_are_done(fn):
    """step after step, until every text is written"""
    random = Random(seeded(1))
    for budget, seqs in ((1, 1), (3, 5), (7, 3), (64, 4)):
        running, waiting = [], some_requests(random, range(8), computed=False)
        while running or waiting:
            for request, count in check_plan(fn, running, waiting, budget, seqs):
                if request in waiting:
                    waiting.remove(request)
                    running.append(request)
                request.num_computed += count
                if request.wanted == 0:
                    request.tokens.append(random.randrange(1000))
                    if len(request.tokens) == request.limit:
                        running.remove(request)


@plan
def any_state(fn):
    """any state, any budget"""
    random = Random(seeded(2))
    for _ in range(40):
        n_running, n_waiting = random.randint(0, 4), random.randint(0, 4)
        running = some_requests(random, range(n_running), computed=True)
        waiting = some_requests(random, range(n_running, n_running + n_waiting), computed=False)
        check_plan(fn, running, waiting, random.randint(1, 25), max(1, n_running + random.randint(0, 2)))
