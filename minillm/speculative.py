"""Stage 7: speculative sampling. Guess several tokens cheaply, and verify them all in one pass of the model.

A decode step reads all weights for one token. Computing four tokens costs little more, but they must be known before.
So a *drafter* guesses them, and the model computes what it would have said at each place. A guess x, drawn from the
drafter's distribution q, is accepted with probability min(1, p(x) / q(x)), where p is the model's own; at the first
rejection the token is drawn from what q was missing of p, the normalised max(0, p - q), and the round ends. If all
guesses pass, the last row gives one more token for nothing. Every token then has the model's distribution, exactly,
however bad the guesses are: they decide only how many tokens a round gives.

p and q are the distributions after the sampling rules. At temperature 0 both are certain: a guess is accepted if it is
the model's own choice.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), algorithm 1; Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling" (2023), algorithm 2.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from minillm.blocks import require_counts
from minillm.generation import begin
from minillm.model import SequenceStore, Transformer
from minillm.sampling import SamplingParams, draw
from minillm.tokenizer import Tokenizer
from minillm.writing import Generation, Piece, Writer


@dataclass(frozen=True)
class Proposal:
    """Guesses for the next tokens of one text, and the distributions that they were drawn from.

    probabilities: [len(ids), vocab_size]; None if each guess was certain (q = 1): greedy, or looked up.
    """

    ids: list[int] = field(default_factory=list)
    probabilities: Tensor | None = None

    def q(self, i: int) -> Tensor | None:
        """The distribution of guess i; None if it was certain."""
        return None if self.probabilities is None else self.probabilities[i]


class Drafter(Protocol):
    """Who guesses. It may be as wrong as it likes, but must say truly what its guesses were drawn from.

    Texts are known by their writers. A drafter with a cache of its own compares it with `writer.tokens` first: what was
    rejected is forgotten there, and nothing else needs to be undone. Only `propose` has to be written: the other
    methods do nothing, for a drafter that does not care.
    """

    def propose(self, writers: Sequence[Writer], counts: Sequence[int]) -> list[Proposal]:
        """Guess up to counts[i] tokens for each text, by the text's own rules and random numbers."""
        ...

    def begin(self, writer: Writer, kv: SequenceStore) -> None:
        """A text with a store for itself begins. (An engine's texts have none, and are not announced.)"""

    def observe(self, writer: Writer, start: int, hidden: Tensor) -> None:
        """hidden: [n, d_model], the model's last hidden rows of a text's decided tokens start to start + n - 1."""

    def release(self, writer: Writer) -> None:
        """The text is finished."""


def require_drafter(drafter: Drafter, model: Transformer, k: int) -> None:
    """Refuse what cannot guess for this model."""
    require_counts(k=k)
    while hasattr(drafter, "drafter"):  # it asks another one, as AdaptiveK does
        drafter = drafter.drafter
    if isinstance(drafter, type) or not hasattr(drafter, "propose"):
        raise ValueError(f"drafter must be an object such as NgramDrafter(), not {drafter!r}")
    other = getattr(drafter, "model", model)
    if other.config.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"the drafter's vocabulary has {other.config.vocab_size} tokens, the model's {model.config.vocab_size}"
        )
    if getattr(drafter, "target", model).config != model.config:
        raise ValueError("the drafter was made for a model of other dimensions")


def verify(writer: Writer, logits: Tensor, proposal: Proposal, seconds: float = 0.0) -> Iterator[Piece]:
    """Let a text take in what of a proposal is right, and one token of its own. After its end it takes nothing.

    logits: [len(ids) + 1, vocab_size], the rows after the last decided token and after each guess.
    """
    for i, row in enumerate(logits):
        if i < len(proposal.ids):
            token, right = judge(writer, row, proposal.ids[i], proposal.q(i))
        else:
            token, right = writer.choose(row), False  # the bonus: nobody guessed it
        yield writer.take(token, row, seconds)
        if not right or writer.finish_reason:
            return


def judge(writer: Writer, logits: Tensor, guess: int, q: Tensor | None) -> tuple[int, bool]:
    """The next token, and whether it is the guess. logits: [vocab_size]; q: the guess's distribution, None: certain."""
    if writer.params.temperature == 0:
        token = writer.choose(logits)
        return token, token == guess
    p = writer.distribution(logits).cpu()
    q = one_hot(guess, p) if q is None else q.cpu()
    if uniform(writer.generator) * float(q[guess]) < float(p[guess]):
        return guess, True
    return draw(residual(p, q), writer.generator), False


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What q was missing of p: the distribution after a rejection. p, q: [vocab_size] -> [vocab_size]"""
    missing = (p - q).clamp(min=0)
    total = missing.sum()
    return missing / total if total > 0 else p  # p = q: only rounding can have rejected


def one_hot(token: int, like: Tensor) -> Tensor:
    """All probability on one token. like: [vocab_size] -> [vocab_size]"""
    return torch.zeros_like(like).index_fill_(0, torch.tensor(token), 1.0)


def uniform(generator: torch.Generator) -> float:
    """A random number from [0, 1)."""
    return float(torch.rand((), generator=generator, dtype=torch.float64))


def stream(
    model: Transformer,
    tokenizer: Tokenizer | None,
    prompt: str | Sequence[int],
    drafter: Drafter,
    params: SamplingParams | None = None,
    kv: SequenceStore | None = None,
    k: int = 3,
) -> Iterator[Piece]:
    """Generate with guesses. The other arguments are those of `minillm.stream`; at temperature 0 so is the text.

    k: guesses in a round at most. With a temperature above 0 a seed gives other texts than without a drafter, of the
    same distribution: more random numbers are drawn. Raises ValueError at the call.
    """
    require_drafter(drafter, model, k)
    start = time.perf_counter()
    writer, kv = begin(model, tokenizer, prompt, params, kv)
    return rounds(model, drafter, writer, kv, kv.length, k, start)


def generate(
    model: Transformer,
    tokenizer: Tokenizer | None,
    prompt: str | Sequence[int],
    drafter: Drafter,
    params: SamplingParams | None = None,
    kv: SequenceStore | None = None,
    k: int = 3,
) -> Generation:
    """Generate to the end. The arguments are those of `stream`."""
    require_drafter(drafter, model, k)
    start = time.perf_counter()
    writer, kv = begin(model, tokenizer, prompt, params, kv)
    done = list(rounds(model, drafter, writer, kv, kv.length, k, start))
    return Generation.of(writer, done, writer.finish_reason)


@torch.inference_mode()
def rounds(
    model: Transformer, drafter: Drafter, writer: Writer, kv: SequenceStore, held: int, k: int, start: float
) -> Iterator[Piece]:
    """The loop behind the checks of `stream`. A round is one pass of the model.

    held: the store's length; another number later means another user.
    """
    drafter.begin(writer, kv)
    try:
        while writer.finish_reason is None:
            require_untouched(kv, held)
            proposal = Proposal()
            most = min(k, writer.left - 1)  # a round gives one token more than it has guesses
            if writer.output and most > 0:  # in the first round the model reads the prompt
                proposal = drafter.propose([writer], [most])[0]
            first, known = kv.length, len(writer.tokens) - kv.length
            new = writer.tokens[first:] + proposal.ids
            hidden = model(torch.tensor(new, device=model.device), positions(first, len(new), model.device), kv)
            logits = model.logits(hidden[known - 1 :])
            pieces = list(verify(writer, logits, proposal, time.perf_counter() - start))
            for rows, piece in zip([known] + [1] * len(pieces), pieces, strict=False):
                require_untouched(kv, held)
                kv.commit(rows)  # a stream that is left early holds what its caller has seen, and no more
                held = kv.length
                yield piece
            drafter.observe(writer, first, hidden[: known + len(pieces) - 1])  # the last token's row is yet to come
    finally:
        drafter.release(writer)


def require_untouched(kv: SequenceStore, held: int) -> None:
    if kv.length != held:
        raise ValueError("the store was used for another text meanwhile; each stream needs a store of its own")


def positions(start: int, n: int, device: torch.device) -> Tensor:
    return torch.arange(start, start + n, device=device)


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens a round, if each of k guesses is accepted with probability alpha, whatever happened before.

    1 + alpha + ... + alpha^k (Leviathan et al., equation 1).
    """
    return float(sum(alpha**i for i in range(k + 1)))


def speedup(alpha: float, k: int, cost_draft: float, cost_verify: float) -> float:
    """Times as fast as plain decoding. Costs in units of a plain step: of one guess, and of verifying k + 1 tokens."""
    return expected_tokens(alpha, k) / (k * cost_draft + cost_verify)
