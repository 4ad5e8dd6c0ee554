"""Task 5 of exercise 06: the tokens of all requests as one flat list, and the rows that choose a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import torch
from torch import Tensor

from minillm.lab.check import seeded
from minillm.lab.checks.ch03 import expect_tuple
from minillm.lab.checks.ch06.base import CHAPTER, is_count, named, new_request, some_requests
from minillm.request import Request, Span

flat = CHAPTER.task(
    "flat_batch",
    hints=(
        "Write the example's list out by hand, with the number of each row beside it.",
        "A position is a place in its own text. It depends neither on the step nor on the other requests.",
        "Which row has seen a text to its end? Compare the span's end with the number of tokens.",
        "A row's number counts the rows of all spans before it.",
    ),
)


def check_flat(fn: Callable, spans: Sequence[Span]) -> None:
    label = f"spans {[(f'{s.start} to {s.end} of {len(s.request.tokens)}') for s in spans]}"
    before = [list(span.request.tokens) for span in spans]
    tokens, positions, rows = expect_tuple(fn(list(spans)), ("tokens", "positions", "rows"), label)
    assert [span.request.tokens for span in spans] == before, f"{label}: your function changed a request's tokens"
    owners = [(span, i) for span in spans for i in range(span.count)]
    check_column(
        tokens,
        [span.request.tokens[span.start + i] for span, i in owners],
        owners,
        f"{label}: tokens",
        {"the tokens are taken from the beginning of the text": [s.request.tokens[i] for s, i in owners]},
    )
    check_column(
        positions,
        [span.start + i for span, i in owners],
        owners,
        f"{label}: positions",
        {
            "each span begins at position 0, as if it had no past": [i for _, i in owners],
            "positions count the rows of the batch, not the places in each text": list(range(len(owners))),
            "positions are one too large": [span.start + i + 1 for span, i in owners],
        },
    )
    check_rows(rows, spans, label)


def check_column(got: object, want: list[int], owners: list, label: str, mistakes: dict[str, list[int]]) -> None:
    assert isinstance(got, Tensor), f"{label}: expected a tensor, got {type(got).__name__}"
    assert got.dtype == torch.int64, f"{label}: dtype {got.dtype}, expected torch.int64"
    assert got.dim() == 1, f"{label}: shape {list(got.shape)}, expected one dimension: all spans one after another"
    mine = got.tolist()
    assert len(mine) == len(want), f"{label}: {len(mine)} rows, expected {len(want)}: one for each token of each span"
    why = "".join(f"; {text}" for text, values in mistakes.items() if mine == values)
    for i, (span, _) in enumerate(owners):
        place = f"row {i} (of {named(span.request)})"
        assert mine[i] == want[i], f"{label}: {place}: yours {mine[i]}, expected {want[i]}{why}"


def check_rows(got: object, spans: Sequence[Span], label: str) -> None:
    assert isinstance(got, dict), f"{label}: rows: expected a dict from request to row, got {type(got).__name__}"
    ends: dict[Request, tuple[int, Span]] = {}
    total = 0
    for span in spans:
        total += span.count
        if len(span.request.tokens) <= span.end:
            ends[span.request] = (total - 1, span)
    for span in spans:
        missing = f"{named(span.request)} has been read to its end, so it chooses a token"
        assert span.request not in ends or span.request in got, f"{label}: rows: {missing}; it has no row"
    for request, row in got.items():
        known = isinstance(request, Request) and any(request is span.request for span in spans)
        assert known and is_count(row), f"{label}: rows: expected request: whole number, got {request!r}: {row!r}"
        early = f"{named(request)} is still in the middle of its prompt; the next token is known already"
        assert request in ends, f"{label}: rows: {early}"
        want, span = ends[request]
        why = ""
        if row == span.count - 1:
            why = ": count the rows of the spans before it too"
        elif row == want + 1:
            why = ": rows are counted from 0"
        elif row == want - span.count + 1:
            why = ": the first row of its span has seen only the text's beginning; the last one counts"
        elif row == len(span.request.tokens) - 1:
            why = ": that is its position; the row is its place in the batch"
        assert row == want, f"{label}: rows: {named(request)} chooses from row {row}, expected {want}{why}"
    order = f"{[r.number for r in got]}, expected {[r.number for r in ends]}"
    assert list(got) == list(ends), f"{label}: rows: the order of requests is {order}: that of the spans"


def spans_of(*rows: tuple[int, int, int]) -> list[Span]:
    """Spans of (tokens of the request, start, count)."""
    return [Span(new_request(i + 1, n, start), start, count) for i, (n, start, count) in enumerate(rows)]


@flat
def the_mixed_step(fn):
    """a decode, the middle of a prompt, and the end of another one"""
    check_flat(fn, spans_of((6, 5, 1), (20, 4, 3), (9, 5, 4)))


@flat
def whole_prompts(fn):
    """whole prompts side by side"""
    check_flat(fn, spans_of((3, 0, 3), (1, 0, 1), (4, 0, 4)))


@flat
def a_single_row_in_a_prompt(fn):
    """a chunk of one token in the middle of a prompt is no decode"""
    check_flat(fn, spans_of((9, 3, 1), (9, 8, 1)))


@flat
def nobody_chooses(fn):
    """nobody is at the end of a text: no row at all"""
    check_flat(fn, spans_of((9, 0, 4), (12, 4, 7)))


@flat
def one_request(fn):
    """one request alone"""
    check_flat(fn, spans_of((5, 4, 1)))
    check_flat(fn, spans_of((1, 0, 1)))


@flat
def any_step(fn):
    """any step"""
    random = Random(seeded(5))
    for _ in range(25):
        requests = some_requests(random, range(1, random.randint(2, 6)), computed=True)
        check_flat(
            fn, [Span(r, r.num_computed, random.choice([r.wanted, random.randint(1, r.wanted)])) for r in requests]
        )
