"""The chapter of exercise 09, and what the checks of its tasks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from minillm.lab.check import Chapter, expect_close, is_stub
from minillm.lab.checks.ch04.base import named

CHAPTER = Chapter("09")


def random_codes(seed: int, *shape: int, bits: int = 4) -> Tensor:
    """uint8"""
    return torch.randint(2**bits, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def packed(codes: Tensor) -> Tensor:
    """By plain arithmetic on Python's numbers: code 2i + 16 * code (2i + 1)."""
    rows = codes.reshape(-1, codes.shape[-1]).tolist()
    joined = [[low + 16 * high for low, high in zip(row[0::2], row[1::2], strict=True)] for row in rows]
    return torch.tensor(joined, dtype=torch.uint8).reshape(*codes.shape[:-1], -1)


def expect_tensor(got: object, shape: list[int], dtype: torch.dtype, label: str) -> None:
    assert got is not None, f"{label}: your function returned None; is a `return` missing?"
    assert isinstance(got, Tensor), f"{label}: expected a tensor, got {type(got).__name__}"
    assert list(got.shape) == shape, f"{label}: shape {list(got.shape)}, expected {shape}"
    assert got.dtype == dtype, f"{label}: dtype {got.dtype}, expected {dtype}"


def expect_pair(got: object, names: tuple[str, ...], label: str) -> None:
    assert got is not None, f"{label}: your function returned None; is a `return` missing?"
    right = isinstance(got, tuple) and len(got) == len(names)
    kind = f"a tuple of {len(got)}" if isinstance(got, tuple) else type(got).__name__
    assert right, f"{label}: expected ({', '.join(names)}), got {kind}"


def expect_refusal(call: Callable[[], object], label: str) -> None:
    """A ValueError, and not a result or an error from somewhere below."""
    try:
        call()
    except ValueError:
        return
    except Exception as error:
        if is_stub(error):
            raise
        kind = type(error).__name__
        raise AssertionError(f"{label}: expected a ValueError of yours; {kind} came from an operation below") from None
    raise AssertionError(f"{label}: expected a ValueError, and there was a result")


def expect_values(
    got: Tensor, want: Tensor, mistakes: Callable[[], Mapping[str, Tensor]], label: str, rtol: float, atol: float
) -> None:
    """Says where the values first differ, yours and expected, and which mistake comes to yours."""
    try:
        expect_close(got, want.float(), label, rtol, atol)
    except AssertionError as error:
        made = named(got, want, mistakes, rtol, atol)
        raise AssertionError(f"{error}; {made}" if made else str(error)) from None
