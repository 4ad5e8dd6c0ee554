"""How well a model predicts a pinned text, and whether another model does it worse: perplexity, paired, and KL.

The text lies on every machine that has Python: the language reference as the standard library keeps it for `help()`,
under Python's own licence (PSF-2.0). It differs a little from version to version, so results carry its hash.

Nats are compared token by token on the same text, where nearly all of their variance cancels. Tokens that are close to
each other are not independent, so the standard error is that of the means of whole windows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.model import NoCache, Transformer
from minillm.tokenizer import Tokenizer

WINDOW = 512  # tokens that are predicted one after the other, before the model starts anew


def reference_text() -> str:
    """Python's language reference, topic by topic; a paragraph that stands in several topics is kept once."""
    from pydoc_data.topics import topics

    paragraphs = "\n\n".join(topics[name].strip() for name in sorted(topics)).split("\n\n")
    return "\n\n".join(dict.fromkeys(paragraphs))


@dataclass(frozen=True)
class Split:
    """Two parts of one text. evaluation: from its beginning. calibration: texts of WINDOW tokens, from its end."""

    evaluation: list[int]
    calibration: list[list[int]]
    sha256: str
    total: int

    def describe(self) -> dict[str, object]:
        calibration = sum(len(text) for text in self.calibration)
        return {
            "sha256": self.sha256,
            "tokens": self.total,
            "predicted": len(self.evaluation) - 1,
            "calibration": calibration,
        }


def split(tokenizer: Tokenizer, predicted: int, calibration: int, text: str | None = None) -> Split:
    """predicted: tokens to be predicted, beside the first, which is only read. calibration: tokens; both in WINDOWs."""
    text = reference_text() if text is None else text
    tokens = tokenizer.encode(text)
    if predicted % WINDOW or calibration % WINDOW or predicted < WINDOW:
        raise ValueError(f"the numbers of tokens must be multiples of {WINDOW}, not {predicted} and {calibration}")
    if predicted + 1 + calibration > len(tokens):
        raise ValueError(f"the text has {len(tokens)} tokens, fewer than {predicted} + 1 + {calibration}")
    starts = range(len(tokens) - calibration, len(tokens), WINDOW)
    return Split(
        tokens[: predicted + 1],
        [tokens[start : start + WINDOW] for start in starts],
        hashlib.sha256(text.encode()).hexdigest(),
        len(tokens),
    )


@torch.inference_mode()
def log_probabilities(
    model: Transformer, tokens: Sequence[int], window: int = WINDOW
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each whole window: the log-probabilities [window, vocab] of what comes next, and what came [window].

    Each window is read without a past; its last target is the first token of the next one, so each is predicted once.
    """
    if window < 1 or len(tokens) <= window:
        raise ValueError(f"{len(tokens)} tokens hold no window of {window} and the token behind it")
    ids = torch.tensor(tokens, device=model.device)
    positions = torch.arange(window, device=model.device)
    for start in range(0, len(ids) - window, window):
        logits = model.logits(model(ids[start : start + window], positions, NoCache()))
        yield logits.log_softmax(-1), ids[start + 1 : start + window + 1]


def judge(
    model: Transformer, tokens: Sequence[int], others: Sequence[Tensor] = (), window: int = WINDOW
) -> tuple[Tensor, Tensor]:
    """-> nats [windows, window] of each token, and for the first windows the KL from `others` [len(others), window].

    others: log-probabilities [window, vocab] of another model on the first windows.
    """
    nats, kls = [], []
    for i, (log_p, targets) in enumerate(log_probabilities(model, tokens, window)):
        nats.append(-log_p.gather(-1, targets[:, None])[:, 0])
        if i < len(others):
            kls.append(divergence(others[i], log_p))
    return torch.stack(nats), torch.stack(kls) if kls else torch.empty(0, window)


def text_nll(model: Transformer, tokens: Sequence[int], window: int = WINDOW) -> Tensor:
    """Nats of each predicted token [windows, window]. The perplexity is the exponential of their mean."""
    return judge(model, tokens, window=window)[0]


def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) of each row, in nats."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def kl(a: Transformer, b: Transformer, tokens: Sequence[int], window: int = WINDOW) -> Tensor:
    """KL(a || b) of the distributions of each next token [windows, window], in nats."""
    pairs = zip(log_probabilities(a, tokens, window), log_probabilities(b, tokens, window), strict=True)
    return torch.stack([divergence(log_p, log_q) for (log_p, _), (log_q, _) in pairs])


@dataclass(frozen=True)
class Difference:
    """error: standard error of the mean, nan where there is only one window."""

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:+.4f} +- {self.error:.4f}"


def paired(a: Tensor, b: Tensor) -> Difference:
    """How many nats a token `a` is above `b`, both [windows, window] on the same text."""
    if a.shape != b.shape or a.ndim != 2:
        raise ValueError(f"paired results must be of the same windows, not {[*a.shape]} and {[*b.shape]}")
    means = (a.double() - b.double()).mean(-1)
    error = float(means.std() / len(means) ** 0.5) if len(means) > 1 else math.nan
    return Difference(float(means.mean()), error)
