"""The serving metrics are what their definitions say, by hand and for random times."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.lab.metrics import RequestTimes, duration, goodput, percentile, throughput

FIXED = settings(derandomize=True, deadline=None, database=None)  # the same examples every time, and no time asserted

# Whole numbers as floats: every difference is exact, so a mean gap is off by one rounding at most.
TIMES = st.lists(st.integers(0, 10**6).map(float), min_size=1, max_size=20).map(sorted)


def test_a_request_by_hand():
    times = RequestTimes(arrival=10.0, tokens=(12.0, 12.5, 13.5, 14.0))
    assert times.ttft == 2.0
    assert times.gaps == [0.5, 1.0, 0.5]
    assert times.tpot == pytest.approx(2.0 / 3)  # three gaps, not four tokens
    assert times.latency == 4.0


@FIXED
@given(TIMES)
def test_latency_is_ttft_and_a_gap_for_each_token_after_the_first(times):
    arrival, *tokens = times
    request = RequestTimes(arrival, tuple(tokens))
    n = len(tokens)
    assert len(request.gaps) == max(n - 1, 0)
    if n == 0:
        assert math.isnan(request.latency)
        return
    decode = (n - 1) * request.tpot if n > 1 else 0
    assert request.latency == pytest.approx(request.ttft + decode, rel=1e-12)
    assert request.ttft + sum(request.gaps) == request.latency


def test_no_token_has_no_times():
    request = RequestTimes(1.0, ())
    assert math.isnan(request.ttft) and math.isnan(request.tpot) and math.isnan(request.latency)
    assert request.gaps == []


def test_one_token_has_a_first_but_no_gap():
    request = RequestTimes(1.0, (3.0,))
    assert request.ttft == request.latency == 2.0
    assert math.isnan(request.tpot) and request.gaps == []


@pytest.mark.parametrize(("arrival", "tokens"), [(2.0, (1.0,)), (0.0, (3.0, 2.0)), (0.0, (1.0, 4.0, 3.9, 5.0))])
def test_times_that_go_backwards_are_refused(arrival, tokens):
    with pytest.raises(ValueError, match="backwards"):
        RequestTimes(arrival, tokens)


def test_tokens_that_arrive_together_are_allowed():
    """A verified guess gives several tokens at one moment."""
    assert RequestTimes(0.0, (1.0, 1.0, 1.0)).gaps == [0.0, 0.0]


def test_lists_of_times_work_as_tuples_do():
    assert RequestTimes(0, [1, 3]).tpot == 2


def percentile_in_words(values: list[float], q: float) -> float:
    """Sort; the q-th percentile lies q % of the way from the first to the last, on a straight line between two."""
    values = sorted(values)
    place = (len(values) - 1) * q / 100
    below = math.floor(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (place - below)


@FIXED
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 100))
def test_a_percentile_is_interpolated_between_the_two_nearest(values, q):
    assert percentile(values, q) == pytest.approx(percentile_in_words(values, q), rel=1e-9, abs=1e-6)


def test_percentiles_by_hand():
    values = [4.0, 1.0, 3.0, 2.0, 5.0]
    assert [percentile(values, q) for q in (0, 25, 50, 90, 100)] == pytest.approx([1, 2, 3, 4.6, 5])


def test_a_percentile_leaves_out_requests_that_have_no_such_time():
    assert percentile([math.nan, 2.0, math.nan, 4.0], 50) == 3.0
    assert math.isnan(percentile([math.nan], 50))
    assert math.isnan(percentile([], 50))


THREE = [RequestTimes(1.0, (2.0, 3.0)), RequestTimes(0.5, (4.5,)), RequestTimes(2.0, (2.5, 2.5, 4.0))]


def test_throughput_counts_from_the_first_arrival_to_the_last_token():
    assert duration(THREE) == 4.0
    assert throughput(THREE) == 6 / 4.0
    assert throughput([*THREE, RequestTimes(0.0, ())]) == 6 / 4.5  # it waited, and got nothing


@pytest.mark.parametrize("requests", [[], [RequestTimes(0.0, ())]])
def test_without_a_token_there_is_no_throughput(requests):
    for function in (throughput, lambda r: goodput(r, 1, 1)):
        with pytest.raises(ValueError, match="no request has produced a token"):
            function(requests)


@pytest.mark.parametrize(
    ("ttft", "tpot", "met"),
    [
        (4.0, 1.0, 3),  # the targets are met at exactly their value
        (3.9, 1.0, 2),  # the second request's first token is late
        (4.0, 0.9, 2),  # the first request's gaps are too long
        (0.5, 0.75, 1),
        (1.0, 0.7, 0),  # the first and third meet only TTFT, the second only TPOT
        (0.4, 9.0, 0),
    ],
)
def test_goodput_counts_only_requests_that_met_both_targets(ttft, tpot, met):
    assert goodput(THREE, ttft, tpot) == met / 4.0


def test_goodput_does_not_count_a_request_without_tokens():
    assert goodput([*THREE, RequestTimes(1.0, ())], 100, 100) == 3 / 4.0


@FIXED
@given(st.lists(TIMES, min_size=1, max_size=6), st.floats(0, 1e6), st.floats(0, 1e6))
def test_goodput_is_at_most_the_rate_of_requests_and_falls_with_tighter_targets(lists, ttft, tpot):
    requests = [RequestTimes(times[0], (*times[1:], times[-1] + 1)) for times in lists]
    rate = len(requests) / duration(requests)
    assert goodput(requests, math.inf, math.inf) == rate
    assert goodput(requests, ttft / 2, tpot / 2) <= goodput(requests, ttft, tpot) <= rate


def test_no_rate_where_no_time_has_passed():
    with pytest.raises(ValueError, match="no rate can be computed"):
        throughput([RequestTimes(1.0, (1.0,))])
