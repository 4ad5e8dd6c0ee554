"""The chapter of exercise 07, and what the checks of its tasks share."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.lab.check import Chapter

CHAPTER = Chapter("07")


def random_rows(generator: torch.Generator, n: int, vocab_size: int, kept: int) -> Tensor:
    """n distributions over `vocab_size` tokens, each with `kept` entries above 0. -> float64 [n, vocab_size]"""
    logits = 2 * torch.randn(n, vocab_size, generator=generator, dtype=torch.float64)
    barred = logits.argsort(-1)[:, : vocab_size - kept]
    return logits.scatter(-1, barred, -torch.inf).softmax(-1)


def certain(token: int, vocab_size: int) -> Tensor:
    """The distribution that gives this token always."""
    row = torch.zeros(vocab_size, dtype=torch.float64)
    row[token] = 1.0
    return row


def missing(p: Tensor, q: Tensor) -> Tensor:
    """What q lacks of p, as a distribution."""
    rest = (p - q).clamp(min=0)
    return rest / rest.sum() if rest.sum() > 0 else p


def short(row: Tensor) -> str:
    """A row of numbers for a message."""
    return "[" + ", ".join(f"{value:.4g}" for value in row.tolist()) + "]"


def same_row(a: Tensor, b: Tensor) -> bool:
    """Equal up to what float32 can hold: a solution may compute in it."""
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-6)


def require_tokens(got: object, label: str) -> list[int]:
    """A list of whole numbers."""
    assert got is not None, f"{label}: your function returned None; is a `return` missing?"
    assert isinstance(got, list), f"{label}: expected a list of token ids, got {type(got).__name__}"
    for i, token in enumerate(got):
        whole = isinstance(token, int) and not isinstance(token, bool)
        assert whole, f"{label}: index {i} is {token!r}, expected a token id (an int)"
    return got
