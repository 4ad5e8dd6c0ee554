"""The ledger's rows on speculation: which rule leaves the model's distribution as it is, and which slips change it.

In a world of three tokens every random choice is taken in all of its ways, so the distribution of what comes out is
computed and not estimated. Distances are total variation: the greatest difference in the probability of anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from unittest.mock import patch

import torch
from torch import Tensor

from minillm import SamplingParams, speculative
from minillm.lab.checks.ch07.all_ways import Round, Tree, chain_rule, model_row
from minillm.lab.checks.ch07.base import random_rows
from minillm.lab.claims.decide import decide
from minillm.lab.claims.ledger import ALGORITHM, Figures, Finding, Ledger
from minillm.lab.claims.workbench import Workbench
from minillm.speculative import Proposal, residual, verify
from minillm.writing import Writer

ledger = Ledger()
ROUNDING = 1e-9  # of float64, generously: larger distances are mistakes
MODEL, DRAFTER, TOKENS = 0, 1, 3  # seeds of two unlike distributions, over three tokens
ROWS, SCALAR, BONUS, DRAFT = SLIPS = (
    "judging guess i by row i of the whole text",
    "a residual of the guess's own two probabilities",
    "a bonus after a rejection too",
    "a draft context that never grows",
)


def distance(found: Mapping[tuple, float], length: int) -> float:
    """Total variation from the model's own texts of this length."""
    own = {text: p for text, p in chain_rule(length, MODEL, TOKENS).items() if len(text) == length}
    return sum(abs(found.get(text, 0.0) - own.get(text, 0.0)) for text in {*found, *own}) / 2


def sketch(
    decide: Callable[[Sequence[float]], int], slips: Set[str], k: int = 2, length: int = 3
) -> tuple[list[int], int]:
    """Speculative decoding from text to text, with some slips. -> its first tokens; how many the first round gave"""
    text: list[int] = []
    first_round = 0
    while len(text) < length:
        guesses: list[int] = []
        drawn_from = []
        for _ in range(k):
            seen = text if DRAFT in slips else [*text, *guesses]
            drawn_from.append(model_row(tuple(seen), DRAFTER, TOKENS))
            guesses.append(decide(drawn_from[-1].tolist()))
        whole = (*text, *guesses)
        rows = [model_row(whole[:i], MODEL, TOKENS) for i in range(len(whole) + 1)]  # row i: what follows i tokens
        judges = rows if ROWS in slips else rows[len(text) :]
        for guess, p, q in zip(guesses, judges, drawn_from, strict=False):
            chance = min(1.0, float(p[guess] / q[guess]))
            passed = decide([1 - chance, chance]) == 1
            lacking = (p - (q[guess] if SCALAR in slips else q)).clamp(min=0)
            instead = lacking / lacking.sum() if lacking.sum() > 0 else p
            text.append(guess if passed else decide(instead.tolist()))
            if not passed:
                break
        if passed or BONUS in slips:
            text.append(decide(rows[-1].tolist()))
        first_round = first_round or len(text)
    return text[:length], first_round


def all_ways_through(slips: Set[str]) -> dict[str, float]:
    tree, found, tokens = Tree(), defaultdict(float), 0.0
    for (text, first_round), weight in tree.ways(lambda: sketch(tree.decide, slips)):
        found[tuple(text)] += weight
        tokens += weight * first_round
    return {"distance": distance(found, 3), "tokens": tokens}


def slips_one_by_one(bench: Workbench) -> Figures:
    one = {slip: all_ways_through({slip}) for slip in SLIPS}
    return {"one": one, "none": all_ways_through(set()), "all": all_ways_through({*SLIPS})}


@ledger.claim(
    "B4",
    sources="T1",
    text="A sketch of speculative decoding in some twenty lines writes what the model alone would write",
    notebook="07_speculative_sampling",
    scope=ALGORITHM,
    measure=slips_one_by_one,
)
def lossless_sketch(figures: Figures) -> Finding:
    one, none = figures["one"], figures["none"]
    changing = [slip for slip in one if one[slip]["distance"] > ROUNDING]
    costing = [slip for slip in one if slip not in changing and one[slip]["tokens"] < none["tokens"] - ROUNDING]
    changed = "; ".join(f"{slip} ({one[slip]['distance']:.2f})" for slip in changing) or "none"
    cost = "; ".join(f"{slip} ({one[slip]['tokens']:.2f} and not {none['tokens']:.2f})" for slip in costing) or "none"
    return Finding(
        len(changing),
        f"of {len(one)} slips change the distribution",
        decide(not changing),
        f"By the distance from the model's distribution over texts of three tokens, these change it: {changed}. These "
        f"only cost tokens in a round: {cost}. All slips together: {figures['all']['distance']:.2f}. The same sketch "
        f"without them: {none['distance']:.1g}.",
    )


def by_package(guesses: list[int], p: Tensor, q: Tensor | None, uniform: Callable, draw: Callable) -> list[int]:
    """The package's round, with its random acts handed in."""
    writer = Writer(None, [0], SamplingParams(seed=0), limit=99)
    acts = {"uniform": lambda _: uniform(), "draw": lambda row, _: draw(row)}
    with patch.multiple(speculative, **acts), patch.object(Writer, "choose", lambda _, row: draw(row.softmax(-1))):
        return [piece.token for piece in verify(writer, p.log(), Proposal(guesses, q))]


def untrue(guesses: list[int], p: Tensor, q: Tensor, uniform: Callable, draw: Callable) -> list[int]:
    """The same, but the drafter reports its distribution at half the temperature at which it drew."""
    return by_package(guesses, p, q.square() / q.square().sum(-1, keepdim=True), uniform, draw)


def distance_of_round(fn: Callable, k: int, sure: bool = False) -> float:
    """One round in all of its ways, completed by the model to k + 1 tokens."""
    tree, found = Tree(), defaultdict(float)
    own = chain_rule(k + 1, MODEL, TOKENS)
    for tokens, weight in tree.ways(Round(fn, tree, k, sure, TOKENS, MODEL).run):
        begun = tuple(tokens)
        for text, chance in own.items():
            if len(text) == k + 1 and text[: len(begun)] == begun:
                found[text] += weight * chance / own[begun]
    return distance(found, k + 1)


def rounds_in_all_ways(bench: Workbench) -> Figures:
    counts = (1, 2, 3)
    return {
        "guesses": list(counts),
        "drawn": [distance_of_round(by_package, k) for k in counts],
        "certain": [distance_of_round(by_package, k, sure=True) for k in counts],
        "untrue": distance_of_round(untrue, 2),
    }


@ledger.claim(
    "B5",
    sources="T1 T4",
    text="Speculative sampling leaves the model's distribution unchanged",
    notebook="07_speculative_sampling",
    scope=ALGORITHM,
    measure=rounds_in_all_ways,
)
def unchanged(figures: Figures) -> Finding:
    largest = max(*figures["drawn"], *figures["certain"])
    return Finding(
        largest,
        "is the total variation distance from the model's distribution",
        decide(largest < ROUNDING),
        f"Enumerated for rounds of {', '.join(map(str, figures['guesses']))} guesses, drawn or certain, from a drafter "
        "that knows nothing of the model. It must report what its guesses were really drawn from: reported at half the "
        f"temperature, the distance is {figures['untrue']:.2f}. And the model must give the same numbers in a pass of "
        "several tokens as in a pass of one, which in low precision is nearly true.",
    )


def rule_as_stated(p: Tensor, q: Tensor) -> Tensor:
    """What comes out of one guess, if p >= q is accepted, else with p / q, and the positive part of p - q is scaled."""
    accepted = q * torch.where(p >= q, 1.0, p / q)
    lacking = (p - q).clamp(min=0)
    return accepted + (1 - accepted.sum(-1, keepdim=True)) * lacking / lacking.sum(-1, keepdim=True)


def rule_on_random_rows(bench: Workbench) -> Figures:
    """above: a q that is p but for one number, which is larger by its last digit, as rounding makes them."""
    p, q = (random_rows(torch.Generator().manual_seed(seed), 1000, 8, 8) for seed in (0, 1))
    above = p[0].clone()
    above[0] = torch.nextafter(above[0], torch.tensor(1.0, dtype=p.dtype))
    return {
        "gap": float((rule_as_stated(p, q) - p).abs().max()),
        "rejected_above": float((above - p[0]).clamp(min=0).sum()),
        "positive_part": float((p[0] - above).clamp(min=0).sum()),
        "off_in_package": float((residual(p[0], above) - p[0]).abs().max()),
    }


@ledger.claim(
    "B6",
    sources="T4",
    text="A guess is accepted if p >= q, else with p / q; else a token is drawn from the scaled positive part of p - q",
    notebook="07_speculative_sampling",
    scope=ALGORITHM,
    measure=rule_on_random_rows,
)
def acceptance_rule(figures: Figures) -> Finding:
    return Finding(
        figures["gap"],
        "is the largest error of a probability",
        decide(figures["gap"] < ROUNDING),
        "On 1,000 pairs of random distributions. Where p = q nothing is rejected. A program must expect rounding: "
        f"with one number of q larger by its last digit a guess is rejected with probability "
        f"{figures['rejected_above']:.1g}, and the positive part sums to {figures['positive_part']:.1g}, which cannot "
        f"be scaled. The package then draws from p (largest difference {figures['off_in_package']:.1g}).",
    )
