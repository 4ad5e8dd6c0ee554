"""Every way through a round, with its probability: the distribution of what comes out is computed, not estimated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from minillm.lab.checks.ch07.base import certain, random_rows, require_tokens, short

VOCABULARY = 3


class Tree:
    """All ways through a random process: each decision is taken in every direction, with its probability."""

    def __init__(self):
        self.path: list[list[int]] = []  # of each decision: the way taken, and how many there are

    def ways(self, run: Callable[[], list[int]]) -> Iterator[tuple[list[int], float]]:
        """(result, probability) of every way."""
        while True:
            self.depth, self.weight = 0, 1.0
            result = run()
            yield result, self.weight
            while self.path and self.path[-1][0] == self.path[-1][1] - 1:
                self.path.pop()
            if not self.path:
                return
            self.path[-1][0] += 1

    def decide(self, probabilities: Sequence[float]) -> int:
        """Take one of the ways that have a probability above 0."""
        possible = [i for i, p in enumerate(probabilities) if p > 0]
        if self.depth == len(self.path):
            self.path.append([0, len(possible)])
        way = possible[self.path[self.depth][0]]
        self.depth += 1
        self.weight *= probabilities[way]
        return way


@cache
def model_row(text: tuple[int, ...], seed: int, kept: int) -> Tensor:
    """A model for nothing but checks: every text of three tokens has a random distribution of its own."""
    number = int("1" + "".join(map(str, text)), VOCABULARY + 1)
    return random_rows(torch.Generator().manual_seed(1000 * seed + number), 1, VOCABULARY, kept)[0]


def chain_rule(length: int, seed: int, kept: int) -> dict[tuple[int, ...], float]:
    """The probability of each text of 1 to `length` tokens."""
    chances = {(): 1.0}
    texts = [()]
    for text in texts:
        if len(text) < length:
            for token, p in enumerate(model_row(text, seed, kept).tolist()):
                longer = (*text, token)
                chances[longer] = chances[text] * p
                texts.append(longer)
    del chances[()]
    return chances


class Round:
    """One round of k guesses in a world of three tokens, whose random acts are decisions of a tree."""

    def __init__(self, fn: Callable, tree: Tree, k: int, sure: bool, kept: int, seed: int):
        self.fn, self.tree, self.k, self.sure, self.kept, self.seed = fn, tree, k, sure, kept, seed
        self.label = f"every way through a round of {k} {'certain' if sure else 'drawn'} guesses"

    def run(self) -> list[int]:
        """The tokens that come out."""
        guesses, q = [], []
        for _ in range(self.k):
            row = model_row(tuple(guesses), self.seed + 1, VOCABULARY)
            q.append(certain(int(row.argmax()), VOCABULARY) if self.sure else row)
            guesses.append(self.tree.decide(q[-1].tolist()))
        p = torch.stack([model_row(tuple(guesses[:i]), self.seed, self.kept) for i in range(self.k + 1)])
        borders = {min(1.0, float(p[i][guess] / q[i][guess])) for i, guess in enumerate(guesses)}
        cells = list(pairwise(sorted({0.0, 1.0, *borders})))  # all random numbers in a cell have the same fate

        def uniform() -> float:
            a, b = cells[self.tree.decide([b - a for a, b in cells])]
            return (a + b) / 2

        given = None if self.sure else torch.stack(q)
        got = require_tokens(self.fn(list(guesses), p, given, uniform, self.draw), self.label)
        assert 1 <= len(got) <= self.k + 1, f"{self.label}: {len(got)} tokens; a round gives 1 to {self.k + 1}"
        return got

    def draw(self, row: Tensor) -> int:
        right = isinstance(row, Tensor) and row.shape == (VOCABULARY,)
        assert right, f"{self.label}: `draw` wants a distribution [{VOCABULARY}], got {row!r}"
        good = bool((row >= 0).all()) and 0 < float(row.sum()) < float("inf")
        assert good, f"{self.label}: nothing can be drawn from {short(row)}"
        return self.tree.decide((row / row.sum()).tolist())


def check_all_ways(fn: Callable, k: int, sure: bool, kept: int, seed: int) -> None:
    """What comes out, completed by the model to k + 1 tokens, has the model's own distribution."""
    tree, found, want = Tree(), defaultdict(float), chain_rule(k + 1, seed, kept)
    a_round = Round(fn, tree, k, sure, kept, seed)
    for tokens, weight in tree.ways(a_round.run):
        came = tuple(tokens)
        for length in range(1, len(came) + 1):
            found[came[:length]] += weight
        for text, chance in want.items():  # what the model writes behind it
            if len(text) > len(came) and text[: len(came)] == came and chance:
                found[text] += weight * chance / want[came]
    for text in sorted({*found, *want}, key=lambda text: (len(text), text)):
        mine, right = found[text], want.get(text, 0.0)
        assert abs(mine - right) < 1e-5, (
            f"{a_round.label}: a text begins with {list(text)} with probability {mine:.6g}, "
            f"and the model gives {right:.6g}"
        )
