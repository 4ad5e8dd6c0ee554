"""The number of guesses follows what a text has shown, and is the best of those that the costs allow."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import minillm
from minillm.adaptive_k import AdaptiveK
from minillm.drafters import ModelDrafter
from minillm.engine import Engine
from minillm.lab.tiny import tiny_model
from minillm.sampling import SamplingParams
from minillm.speculative import Proposal, generate, speedup

COSTS = [1.0, 1.0, 1.1, 1.2, 1.5, 2.0]


class Scripted:
    """Always guesses 1, and remembers how often it was asked for how many."""

    def __init__(self):
        self.counts = []

    def propose(self, writers, counts):
        self.counts += counts
        return [Proposal([1] * n) for n in counts]


class Text:
    def __init__(self):
        self.tokens = [0]


def counts(tokens: list[list[int]], **options) -> list[int]:
    """What is asked for while a text grows by these tokens, round by round."""
    drafter, text = Scripted(), Text()
    adaptive = AdaptiveK(drafter, 0.05, COSTS, **options)
    for more in [*tokens, []]:
        adaptive.propose([text], [99])
        text.tokens += more
    return drafter.counts


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_the_first_guess_is_the_best_for_the_start(alpha):
    best = max(range(1, 6), key=lambda k: speedup(alpha, k, 0.05, COSTS[k]))
    assert counts([], start=alpha) == [best]


def test_a_text_that_is_always_right_gets_more_and_one_that_never_is_gets_one():
    rising = counts([[1] * 6] * 9, start=0.2)
    assert rising[0] < rising[-1] == max(rising)
    falling = counts([[2]] * 30, start=1.0)
    assert falling[0] > falling[-1] == 1 and falling == sorted(falling, reverse=True)


def test_guesses_behind_a_wrong_one_teach_nothing():
    """One right, one wrong, whatever was guessed after that: two lessons."""
    text, adaptive = Text(), AdaptiveK(Scripted(), 0.05, COSTS, start=0.5, memory=0.8)
    adaptive.asked[text] = (1, [1, 1, 7, 7])
    text.tokens += [1, 2]
    adaptive.learn(text)
    assert adaptive.acceptance[text] == pytest.approx((0.5 * 0.8 + 0.2) * 0.8)


def test_nobody_asks_for_more_than_is_wanted_and_texts_do_not_share_their_luck():
    drafter, lucky, other = Scripted(), Text(), Text()
    adaptive = AdaptiveK(drafter, 0.0, COSTS, start=0.1)
    for _ in range(20):
        adaptive.propose([lucky], [99])
        lucky.tokens += [1] * 6
    drafter.counts.clear()
    adaptive.propose([lucky, other], [2, 99])
    assert drafter.counts == [2, 1]


@pytest.mark.parametrize("engine", [False, True])
def test_the_text_is_the_plain_one(engine):
    model = tiny_model(0)
    params = SamplingParams(temperature=0, max_tokens=30)
    plain = minillm.generate(model, None, [3, 1, 4], params)
    drafter = AdaptiveK(ModelDrafter(tiny_model(1)), 0.1, COSTS)
    if engine:
        (done,) = Engine(model, n_blocks=40, drafter=drafter, k=5).generate([[3, 1, 4]], params)
    else:
        done = generate(model, None, [3, 1, 4], drafter, params, k=5)
    assert done.tokens == plain.tokens


@pytest.mark.parametrize(
    "wrong",
    [
        {"cost_draft": -1},
        {"cost_verify": [1.0]},
        {"cost_verify": [1.0, 0.0]},
        {"start": 2.0},
        {"memory": 1.0},
        {"cost_draft": float("nan")},
        {"cost_verify": [1.0, float("nan"), 1.0]},
    ],
)
def test_odd_costs_are_refused(wrong):
    with pytest.raises(ValueError, match=r"cost_draft must be 0|start must be from 0"):
        AdaptiveK(SimpleNamespace(), **{"cost_draft": 0.1, "cost_verify": COSTS, **wrong})
