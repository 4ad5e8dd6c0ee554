"""The contestants take turns, the warm-up does not count, and the median and spread are those of the runs."""

from __future__ import annotations

import pytest

from minillm.lab.bench import Measured, alternate


def contestants(log: list[str]):
    """Two that write down when they run; their results count their own runs, the warm-up being 0."""

    def runner(name: str):
        def run() -> int:
            log.append(name)
            return log.count(name) - 1

        return run

    return {"A": runner("A"), "B": runner("B")}


@pytest.mark.parametrize("progress", [True, False])
def test_contestants_alternate_after_one_warm_up_each_that_does_not_count(progress):
    log = []
    measured = alternate(contestants(log), 3, progress)
    assert "".join(log) == "AB" + "AB" * 3
    assert {name: runs.runs for name, runs in measured.items()} == {"A": [1, 2, 3], "B": [1, 2, 3]}


def test_without_a_warm_up_the_first_run_counts():
    log = []
    measured = alternate(contestants(log), 2, progress=False, warm_up=False)
    assert "".join(log) == "ABAB"
    assert measured["A"].runs == measured["B"].runs == [0, 1]


def test_the_median_is_not_moved_by_one_slow_run_and_the_spread_shows_it():
    measured = Measured([3.0, 1.0, 100.0, 2.0, 4.0])
    assert measured.median(float) == 3.0
    assert measured.spread(float) == (1.0, 100.0)


def test_median_and_spread_are_of_the_number_asked_for():
    measured = Measured([{"a": 1, "b": -5}, {"a": 4, "b": -6}])
    assert measured.median(lambda run: run["a"]) == 2.5  # between the two of an even number of runs
    assert measured.spread(lambda run: run["b"]) == (-6, -5)


@pytest.mark.parametrize("repeats", [0, -1])
def test_no_run_is_no_measurement(repeats):
    with pytest.raises(ValueError, match=f"repeats must be at least 1, not {repeats}"):
        alternate({"A": lambda: pytest.fail("it must not run")}, repeats)


def test_a_contestant_that_fails_is_not_passed_over():
    def fails():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        alternate({"A": lambda: 1, "B": fails}, 1, progress=False)
