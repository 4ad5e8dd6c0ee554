"""The bank of answers: for each task mistakes that people really make, and right answers of different kinds.

A wrong answer must be rejected with a diagnosis that names the fault (`says`, a regular expression); a right one must
pass. `bank_NN.py` holds those of one exercise notebook.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """`says` is None for a right answer."""

    task: str
    fn: Callable
    says: str | None = None

    @property
    def id(self) -> str:
        return f"{self.task}-{self.fn.__name__}"


class Bank:
    """The answers to one chapter's tasks."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []

    def wrong(self, task: str, says: str) -> Callable[[Callable], Callable]:
        def add(fn: Callable) -> Callable:
            self.answers.append(Answer(task, fn, says))
            return fn

        return add

    def right(self, task: str) -> Callable[[Callable], Callable]:
        def add(fn: Callable) -> Callable:
            self.answers.append(Answer(task, fn))
            return fn

        return add
