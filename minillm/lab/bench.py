"""Comparing speeds so that the comparison can be trusted.

A machine's speed drifts, so only ratios within one run mean anything. The contestants take turns (A B A B ...), each
after one run to warm up; medians are compared, and the spread is shown beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Generic, TypeVar

from tqdm import tqdm

Result = TypeVar("Result")


@dataclass(frozen=True)
class Measured(Generic[Result]):
    """The results of one contestant's runs, in order, without the warm-up."""

    runs: list[Result]

    def median(self, number: Callable[[Result], float]) -> float:
        return median(number(run) for run in self.runs)

    def spread(self, number: Callable[[Result], float]) -> tuple[float, float]:
        """Smallest and largest."""
        numbers = [number(run) for run in self.runs]
        return min(numbers), max(numbers)


def alternate(
    contestants: Mapping[str, Callable[[], Result]], repeats: int, progress: bool = True, warm_up: bool = True
) -> dict[str, Measured[Result]]:
    """Run all contestants in turn, `repeats` times, after one run of each to warm up with the same shapes."""
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, not {repeats}")
    runs: dict[str, list[Result]] = {name: [] for name in contestants}
    rounds = range(0 if warm_up else 1, repeats + 1)
    with tqdm(total=len(rounds) * len(contestants), disable=not progress, leave=False) as bar:
        for turn in rounds:
            for name, run in contestants.items():
                bar.set_description(f"{name} ({f'run {turn} of {repeats}' if turn else 'warm-up'})")
                result = run()
                if turn:
                    runs[name].append(result)
                bar.update()
    return {name: Measured(results) for name, results in runs.items()}
