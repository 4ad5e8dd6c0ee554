"""Task 2: two codes of 4 bits in a byte."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minillm.lab.check import seeded
from minillm.lab.checks.ch09.base import CHAPTER, expect_refusal, expect_tensor, packed, random_codes

pack = CHAPTER.task(
    "pack_codes",
    hints=(
        "Neighbours share a byte: codes 0 and 1, codes 2 and 3. Slices with a step of 2 give you all the even ones and "
        "all the odd ones.",
        "The high half of a byte counts 16 for each one: a code gets there by a shift of 4 bits to the left.",
        "Look at the codes first: if one needs more than 4 bits, or one is left over without a neighbour, raise a "
        "ValueError.",
    ),
)


def check_pack(fn: Callable, codes: Tensor, label: str) -> None:
    given = codes.clone()
    got = fn(codes)
    label = f"{label}, codes {list(codes.shape)}"
    expect_tensor(got, [*codes.shape[:-1], codes.shape[-1] // 2], torch.uint8, label)
    assert torch.equal(codes, given), f"{label}: the codes that were given were changed"
    want = packed(codes)
    wrong = (got != want).nonzero().tolist()
    if wrong:
        at, byte = tuple(wrong[0]), wrong[0][-1]
        row = codes[at[:-1]].tolist()
        made = [what for what, value in mistakes(codes).items() if torch.equal(value, got)]
        reason = f"; yours is what comes out {', or '.join(made)}" if made else ""
        raise AssertionError(
            f"{label}: byte {list(at)} holds code {2 * byte}, which is {row[2 * byte]}, in its low half and code "
            f"{2 * byte + 1}, which is {row[2 * byte + 1]}, in its high half: yours {int(got[at]):#04x}, "
            f"expected {int(want[at]):#04x}{reason}"
        )


def mistakes(codes: Tensor) -> dict[str, Tensor]:
    """What comes out of mistakes that people make."""
    wide = codes.int()
    even, odd, half = wide[..., 0::2], wide[..., 1::2], wide.shape[-1] // 2
    first, second = wide[..., :half], wide[..., half:]
    made = {
        "when the halves change places: the even code belongs into the low half": odd + 16 * even,
        "when code i shares a byte with code i + n / 2, and not with its neighbour": first + 16 * second,
        "when code i shares a byte with code i + n / 2, the first half high": second + 16 * first,
        "when the codes are added, and none is shifted": even + odd,
        "when both halves hold the even code": even + 16 * even,
        "when both halves hold the odd code": odd + 16 * odd,
        "when the shift is 3 bits": even | odd << 3,
        "when the shift is 8 bits, past the end of the byte": even,
        "when it is multiplied by 15, and not by 16": even + 15 * odd,
        "when the order of the bytes is reversed": (even + 16 * odd).flip(-1),
    }
    return {what: (value % 256).to(torch.uint8) for what, value in made.items()}


@pack
def the_example(fn):
    """the example of the text"""
    check_pack(fn, torch.tensor([1, 2, 3, 15], dtype=torch.uint8), "[1, 2, 3, 15]")


@pack
def counting(fn):
    """the codes 0 to 15 in order, and their greatest ones"""
    check_pack(fn, torch.arange(16, dtype=torch.uint8), "0, 1, 2, ... 15")
    check_pack(fn, torch.full((4,), 15, dtype=torch.uint8), "15 everywhere")
    check_pack(fn, torch.tensor([0, 15, 15, 0], dtype=torch.uint8), "[0, 15, 15, 0]")


@pack
def matrices(fn):
    """a matrix row by row, and more dimensions"""
    check_pack(fn, random_codes(seeded(0), 3, 6), "a matrix")
    check_pack(fn, random_codes(seeded(1), 5, 2), "one byte a row")
    check_pack(fn, random_codes(seeded(2), 2, 3, 4), "three dimensions")


@pack
def every_pair(fn):
    """each pair of codes has a byte of its own"""
    pairs = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(torch.uint8)
    check_pack(fn, pairs, "all pairs")


@pack
def refused(fn):
    """a code that does not fit, or one too many, is refused"""
    for value in (16, 17, 255):
        for at in (1, 4):
            codes = torch.arange(6, dtype=torch.uint8)
            codes[at] = value
            expect_refusal(lambda codes=codes: fn(codes), f"codes {codes.tolist()}, and 4 bits hold no {value}")
    expect_refusal(lambda: fn(torch.zeros(2, 5, dtype=torch.uint8)), "rows of 5 codes, an odd number")
