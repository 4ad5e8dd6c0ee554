"""How many guesses pay for this text? Watch how many were right lately, and weigh that against what guesses cost.

The text's acceptance rate is estimated from its last guesses. If each new guess is accepted with that probability, the
speed-up of k guesses is known (`speculative.speedup`), and the best k is taken. It is at least one: a text for which
nothing is guessed could not show that it has become easier.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), section 3.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from torch import Tensor

from minillm.model import KVStore
from minillm.speculative import Drafter, Proposal, speedup
from minillm.writing import Writer


class AdaptiveK(Drafter):
    """A drafter that asks another one, for as many guesses as pay.

    cost_draft: the cost of one guess. cost_verify[i]: the cost of a pass of i + 1 tokens. Both: in plain decode steps.
    There are at most len(cost_verify) - 1 guesses. start: the acceptance rate assumed for a new text. memory: what the
    old estimate weighs when a guess has been judged; the new guess weighs the rest of 1.
    """

    def __init__(
        self, drafter: Drafter, cost_draft: float, cost_verify: Sequence[float], start: float = 0.7, memory: float = 0.9
    ):
        positive = cost_draft >= 0 and all(cost > 0 for cost in cost_verify)  # no NaN either
        if len(cost_verify) < 2 or not positive:
            raise ValueError("cost_draft must be 0 or more, and cost_verify at least two numbers above 0")
        if not (0 <= start <= 1 and 0 <= memory < 1):
            raise ValueError(f"start must be from 0 to 1 and memory from 0 to below 1, not {start} and {memory}")
        self.drafter, self.start, self.memory = drafter, start, memory
        self.cost_draft, self.cost_verify = cost_draft, list(cost_verify)
        self.acceptance: WeakKeyDictionary[Writer, float] = WeakKeyDictionary()
        self.asked: WeakKeyDictionary[Writer, tuple[int, list[int]]] = WeakKeyDictionary()

    def propose(self, writers: Sequence[Writer], counts: Sequence[int]) -> list[Proposal]:
        for writer in writers:
            self.learn(writer)
        fewer = [min(n, self.best_k(writer)) for writer, n in zip(writers, counts, strict=True)]
        proposals = self.drafter.propose(writers, fewer)
        for writer, proposal in zip(writers, proposals, strict=True):
            self.asked[writer] = (len(writer.tokens), proposal.ids)
        return proposals

    def best_k(self, writer: Writer) -> int:
        alpha, most = self.acceptance.get(writer, self.start), len(self.cost_verify) - 1
        return max(range(1, most + 1), key=lambda k: speedup(alpha, k, self.cost_draft, self.cost_verify[k]))

    def learn(self, writer: Writer) -> None:
        """Compare the last guesses with what was written. Those behind a wrong one were not judged."""
        length, guesses = self.asked.pop(writer, (0, []))
        for guess, token in zip(guesses, writer.tokens[length:], strict=False):
            before = self.acceptance.get(writer, self.start)
            self.acceptance[writer] = self.memory * before + (1 - self.memory) * (guess == token)
            if guess != token:
                return

    def begin(self, writer: Writer, kv: KVStore) -> None:
        self.drafter.begin(writer, kv)

    def observe(self, writer: Writer, start: int, hidden: Tensor) -> None:
        self.drafter.observe(writer, start, hidden)

    def release(self, writer: Writer) -> None:
        self.drafter.release(writer)
