"""What the tasks of exercise 04 are given, and how their checks name a mistake."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.lab.check import Chapter

CHAPTER = Chapter("04")


@dataclass(frozen=True)
class Partial:
    """What is known of the attention of some rows after some of the keys."""

    top: Tensor  # [rows], the largest score; -inf where no key was seen
    total: Tensor  # [rows], sum of exp(score - top)
    weighted: Tensor  # [rows, width], sum of exp(score - top) * value


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def named(
    got: object,
    want: Tensor,
    mistakes: Callable[[], Mapping[str, Tensor]],
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> str:
    """The mistakes that come to `got`: "yours is what comes out when ..."; "" where none does, or `got` is right."""

    def same(other: Tensor) -> bool:
        return other.shape == got.shape and torch.allclose(got.double(), other.double(), rtol, atol, equal_nan=True)

    if not isinstance(got, Tensor) or got.shape != want.shape or same(want):
        return ""
    made = [what for what, value in mistakes().items() if same(value)]
    return f"yours is what comes out {', or '.join(made)}" if made else ""
