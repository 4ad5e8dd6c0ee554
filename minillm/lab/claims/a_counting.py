"""Claims that count tokens: the gaps of a text, and what a round of guesses gives.

The formulas are compared with what they are the sum of: token times one by one, all patterns of accepted and rejected
guesses, and a real round through the package's own `verify`.
"""

from __future__ import annotations

from itertools import product

import torch
from torch.nn.functional import one_hot

from minillm.lab.claims.decide import close, decide
from minillm.lab.claims.ledger import ALGORITHM, Finding, Ledger
from minillm.lab.metrics import RequestTimes
from minillm.sampling import SamplingParams
from minillm.speculative import Proposal, expected_tokens, verify
from minillm.writing import Writer

ledger = Ledger()


@ledger.claim(
    "A6",
    sources="T2",
    text="Latency is TTFT + TPOT x output tokens, and tokens/s are output / latency: with TTFT 0.73 s and TPOT 0.72 "
    "ms, 1,024 tokens come at 1,380 a second",
    notebook="03_prefill_and_decode",
)
def latency_of_a_text() -> Finding:
    ttft, tpot, tokens, printed = 0.73, 0.72e-3, 1024, 1380
    example = RequestTimes(0.0, tuple(ttft + i * tpot for i in range(tokens)))
    stated = ttft + tpot * tokens
    rate = tokens / stated
    return Finding(
        rate,
        f"tokens/s by its own formula, printed as {printed:,}",
        decide(close(stated, example.latency) and close(rate, printed), always=close(stated, example.latency, 1e-9)),
        f"Its figures contradict each other: {printed:,} is 1 / TPOT ({1 / tpot:,.0f}) with the wait for the first "
        "token left out. And n tokens have n - 1 gaps: the latency is one TPOT too long, "
        f"{stated / example.latency - 1:.2%} here.",
    )


def tokens_over_patterns(chances: list[float]) -> float:
    """Mean tokens a round, over all patterns of accepted and rejected guesses. chances: of each guess."""
    total = 0.0
    for pattern in product((True, False), repeat=len(chances)):
        chance = 1.0
        for accepted, a in zip(pattern, chances, strict=True):
            chance *= a if accepted else 1 - a
        total += chance * ((*pattern, False).index(False) + 1)
    return total


@ledger.claim(
    "A7",
    sources="T1",
    text="A round of K guesses, each accepted with probability a, gives (1 - a^(K+1)) / (1 - a) tokens on average",
    notebook="07_speculative_sampling",
)
def tokens_of_a_round() -> Finding:
    a, k, easy, hard = 0.7, 4, 0.9, 0.5
    right = all(
        close(tokens_over_patterns([x] * n), expected_tokens(x, n), 1e-12)
        and (x == 1 or close(expected_tokens(x, n), (1 - x ** (n + 1)) / (1 - x), 1e-12))
        for x, n in product((0.0, 0.3, 0.7, 1.0), range(1, 7))
    )
    stated = expected_tokens(a, k)
    mixed = (tokens_over_patterns([easy] * k) + tokens_over_patterns([hard] * k)) / 2
    return Finding(
        stated,
        "tokens a round at a = 0.7 and K = 4",
        decide(right, always=close(mixed, stated, 1e-9)),
        "The condition: guesses pass independently, and all with the same a; then summing over all patterns gives "
        f"the same. If half of the rounds have a = {easy} and half {hard}, the mean a is {a} too, and a round gives "
        f"{mixed:.2f}, not {stated:.2f}. At a = 1 the quotient is 0 / 0, and the limit is K + 1 = "
        f"{expected_tokens(1, k):.0f}.",
    )


@ledger.claim(
    "A19",
    sources="T4",
    text="If 3 of 5 guesses are accepted, one pass has given 3 tokens",
    notebook="07_speculative_sampling",
    scope=ALGORITHM,
)
def tokens_of_three_accepted() -> Finding:
    guesses, accepted, stated = 5, 3, 3

    def given(accepted: int) -> int:
        """Tokens of a real greedy round whose first `accepted` guesses are right."""
        own = torch.arange(1, guesses + 2)
        proposal = Proposal([int(token) if i < accepted else 0 for i, token in enumerate(own[:guesses])])
        writer = Writer(None, [0], SamplingParams(temperature=0, max_tokens=2 * guesses), limit=4 * guesses)
        return len(list(verify(writer, 9.0 * one_hot(own, guesses + 2), proposal)))

    tokens = [given(n) for n in range(guesses + 1)]
    return Finding(
        tokens[accepted],
        f"tokens in one pass with {accepted} of {guesses} guesses accepted",
        decide(tokens[accepted] == stated),
        "The row after the last accepted guess gives the model's own token, whether it corrects a guess or follows "
        f"the last: {', '.join(map(str, tokens))} tokens for 0 to {guesses} accepted.",
    )
