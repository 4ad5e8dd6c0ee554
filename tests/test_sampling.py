"""The sampling rules against a second writing of them in plain Python, and their order against every other order.

The oracle works on lists of Python floats and shares no line with the code under test. Inputs are adversarial: ties,
logits of minus infinity, single survivors, extreme temperatures. What cannot be sampled from is an error.
"""

from __future__ import annotations

import math
from itertools import permutations, product

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from minillm.sampling import (
    SamplingParams,
    distribution,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    new_generator,
    penalize,
    sample,
    top_logprobs,
)

INF = math.inf


def tensor(logits: list[float]) -> torch.Tensor:
    return torch.tensor(logits, dtype=torch.float64)


def support(values: torch.Tensor) -> set[int]:
    """Ids with a probability above 0, or a logit above minus infinity."""
    return {i for i, value in enumerate(values.tolist()) if value > (0 if values.min() >= 0 else -INF)}


def left(logits: torch.Tensor) -> set[int]:
    return {i for i, value in enumerate(logits.tolist()) if value > -INF}


# --- The oracle. Each rule: list of logits -> list of logits, with -inf for what is out. ---


def softmax(logits: list[float]) -> list[float]:
    best = max(logits)
    weights = [math.exp(x - best) for x in logits]
    total = math.fsum(weights)
    return [w / total for w in weights]


def ranked(logits: list[float]) -> list[int]:
    """Ids from best to worst, of equals the lower id first."""
    return sorted(range(len(logits)), key=lambda i: (-logits[i], i))


def only(logits: list[float], kept) -> list[float]:
    return [x if i in kept else -INF for i, x in enumerate(logits)]


def oracle_temperature(logits: list[float], t: float) -> list[float]:
    best = max(logits)
    return [(x - best) / t for x in logits]


def oracle_top_k(logits: list[float], k: int) -> list[float]:
    return only(logits, set(ranked(logits)[: k or None]))


def oracle_top_p(logits: list[float], p: float) -> list[float]:
    if p == 1:
        return logits
    probabilities, kept = softmax(logits), []
    for i in ranked(logits):
        kept.append(i)
        if math.fsum(probabilities[j] for j in kept) >= p:
            break
    return only(logits, set(kept))


def oracle_min_p(logits: list[float], m: float) -> list[float]:
    probabilities = softmax(logits)
    return only(logits, {i for i, q in enumerate(probabilities) if q >= m * max(probabilities)})


def oracle_penalties(logits: list[float], params: SamplingParams, prompt, output) -> list[float]:
    logits = list(logits)
    for i in range(len(logits)):
        if i in prompt or i in output:
            r = params.repetition_penalty
            logits[i] = logits[i] / r if logits[i] > 0 else logits[i] * r
        for _ in range(output.count(i)):
            logits[i] -= params.frequency_penalty
        if i in output:
            logits[i] -= params.presence_penalty
    return logits


def oracle(logits: list[float], params: SamplingParams, prompt=(), output=(), end_ids=()) -> list[float]:
    """All rules in the documented order. -> probabilities"""
    logits = oracle_penalties(logits, params, list(prompt), list(output))
    if len(output) < params.min_tokens:
        logits = only(logits, set(range(len(logits))) - set(end_ids))
    if params.temperature == 0:
        best = ranked(logits)[0]
        return [float(i == best) for i in range(len(logits))]
    logits = oracle_temperature(logits, params.temperature)
    logits = oracle_top_k(logits, params.top_k)
    logits = oracle_top_p(logits, params.top_p)
    return softmax(oracle_min_p(logits, params.min_p))


def near_a_border(logits: list[float], params: SamplingParams, prompt=(), output=(), end_ids=()) -> bool:
    """Whether rounding may decide a rule: two correct programs may then differ."""
    logits = oracle_penalties(logits, params, list(prompt), list(output))
    if len(output) < params.min_tokens:
        logits = only(logits, set(range(len(logits))) - set(end_ids))
    if params.temperature == 0:
        return False
    logits = oracle_top_k(oracle_temperature(logits, params.temperature), params.top_k)
    probabilities = sorted(softmax(logits), reverse=True)
    sums = [math.fsum(probabilities[: n + 1]) for n in range(len(probabilities))]
    best = max(probabilities)
    top_p = params.top_p < 1 and any(abs(s - params.top_p) < 1e-9 for s in sums)
    min_p = params.min_p > 0 and any(abs(q - params.min_p * best) < 1e-9 * best for q in probabilities)
    return top_p or min_p


# Few values, so that ties are the rule; -inf among them.
LOGITS = st.lists(st.sampled_from([-INF, -3.0, -1.0, 0.0, 0.5, 1.0, 2.0, 4.0]), min_size=1, max_size=9).filter(
    lambda logits: max(logits) > -INF
)
FEW_RUNS = settings(max_examples=300, deadline=None, derandomize=True, database=None)


# --- Each rule alone. ---


@FEW_RUNS
@given(LOGITS, st.integers(0, 12))
@example([1.0, 1.0, 1.0, 1.0], 2)  # of equals, the lower ids
@example([0.0, -INF, 1.0], 3)
def test_top_k_keeps_the_k_best(logits, k):
    assert keep_top_k(tensor(logits), k).tolist() == oracle_top_k(logits, k)


@FEW_RUNS
@given(LOGITS, st.sampled_from([1e-300, 1e-9, 0.1, 0.3, 0.5, 0.77, 0.9, 0.999999, 1.0]))
@example([0.0, 0.0, 0.0, 0.0], 0.3)
def test_top_p_keeps_the_fewest_that_reach_p(logits, p):
    params = SamplingParams(top_p=p)
    assume(not near_a_border(logits, params))
    assert keep_top_p(tensor(logits), p).tolist() == oracle_top_p(logits, p)


@FEW_RUNS
@given(LOGITS, st.sampled_from([0.0, 1e-300, 0.01, 0.2, 0.5, 0.9, 1.0]))
def test_min_p_keeps_what_is_near_the_best(logits, m):
    kept = left(keep_min_p(tensor(logits), m))
    assume(m == 1 or not near_a_border(logits, SamplingParams(min_p=m)))
    assert kept == left(tensor(oracle_min_p(logits, m)))


@pytest.mark.parametrize(("p", "n"), [(0.25, 1), (0.2500001, 2), (0.5, 2), (0.75, 3), (0.7500001, 4)])
def test_top_p_stops_at_the_token_that_reaches_p(p, n):
    """Four equals have 1/4 each, and their sums are exact in binary: to reach p is enough."""
    assert left(keep_top_p(torch.zeros(4), p)) == set(range(n))


@pytest.mark.parametrize("p", [1e-300, 1e-30, 1e-9, 0.1])
def test_a_tiny_top_p_keeps_the_best_token(p):
    logits = torch.tensor([0.0, 3.0, 1.0])
    assert support(distribution(logits, SamplingParams(top_p=p))) == {1}
    assert support(distribution(torch.zeros(5), SamplingParams(top_p=p))) == {0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_defaults_are_all_off(dtype):
    logits = torch.linspace(-9, 9, 50, dtype=dtype)
    assert torch.equal(distribution(logits, SamplingParams()), logits.softmax(-1))
    off = SamplingParams(top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    assert support(distribution(logits, off, prompt=[1, 2], output=[3])) == set(range(50))


@pytest.mark.parametrize("k", [3, 4, 1000])
def test_a_top_k_beyond_the_vocabulary_is_no_limit(k):
    assert support(distribution(torch.tensor([1.0, 2.0, 3.0]), SamplingParams(top_k=k))) == {0, 1, 2}


@pytest.mark.parametrize("rule", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.01}, {"temperature": 1e300}])
def test_logits_of_minus_infinity_never_come_back(rule):
    probabilities = distribution(torch.tensor([-INF, 1.0, -INF, 0.0]), SamplingParams(**rule))
    assert support(probabilities) <= {1, 3} and probabilities.sum().item() == pytest.approx(1)


@FEW_RUNS
@given(LOGITS)
def test_temperature_zero_is_the_best_token_whatever_else_is_asked_for(logits):
    best = ranked(logits)[0]
    for params in (
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, top_k=2, top_p=0.1, min_p=1.0, seed=3),
    ):
        assert distribution(tensor(logits), params).tolist() == [float(i == best) for i in range(len(logits))]
        assert sample(tensor(logits), params, new_generator(params)) == best


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-46, 1e-38, 1e-9])
def test_a_tiny_temperature_is_greedy(temperature, dtype):
    logits = torch.tensor([1.0, 3e4, 2.9e4, -INF], dtype=dtype)
    assert distribution(logits, SamplingParams(temperature=temperature)).tolist() == [0, 1, 0, 0]
    tied = torch.tensor([2.0, 2.0, 1.0], dtype=dtype)
    assert distribution(tied, SamplingParams(temperature=temperature)).tolist() == [0.5, 0.5, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1e9, 1e38, 1e39, 1e308])
def test_a_huge_temperature_is_uniform_over_what_is_possible(temperature, dtype):
    logits = torch.tensor([50.0, -50.0, 0.0, -INF], dtype=dtype)
    probabilities = distribution(logits, SamplingParams(temperature=temperature))
    torch.testing.assert_close(probabilities, torch.tensor([1, 1, 1, 0], dtype=dtype) / 3)


def test_a_temperature_divides_the_logits():
    logits = tensor([0.3, -1.2, 2.5])
    torch.testing.assert_close(distribution(logits, SamplingParams(temperature=0.7)), (logits / 0.7).softmax(-1))


# --- Penalties and barred tokens. ---


def test_the_repetition_penalty_divides_positive_and_multiplies_negative_logits_once():
    """Token 0 occurs in the prompt and twice in the output; it is penalized once. Token 4 does not occur."""
    logits = tensor([4.0, -4.0, 0.0, -INF, 3.0])
    params = SamplingParams(repetition_penalty=2.0)
    assert penalize(logits, params, [0, 1, 2, 3, 0], [0, 0]).tolist() == [2.0, -8.0, 0.0, -INF, 3.0]
    assert penalize(logits, params, [], []).tolist() == logits.tolist()
    assert logits.tolist() == [4.0, -4.0, 0.0, -INF, 3.0]  # the caller's row is left alone


def test_presence_and_frequency_count_the_output_only():
    logits = tensor([4.0, 4.0, 4.0])
    once = penalize(logits, SamplingParams(presence_penalty=0.5), [0, 0], [1, 1, 1])
    each = penalize(logits, SamplingParams(frequency_penalty=0.5), [0, 0], [1, 1, 1])
    both = penalize(logits, SamplingParams(presence_penalty=1.0, frequency_penalty=-0.25), [0], [1, 2, 1])
    assert once.tolist() == [4.0, 3.5, 4.0]
    assert each.tolist() == [4.0, 2.5, 4.0]
    assert both.tolist() == [4.0, 3.5, 3.25]


@pytest.mark.parametrize("params", [{"repetition_penalty": 4.0}, {"presence_penalty": 3.0}, {"frequency_penalty": 3.0}])
def test_penalties_change_the_greedy_token_too(params):
    logits = tensor([2.0, 1.0])
    assert sample(logits, SamplingParams(temperature=0, **params), prompt=[], output=[0]) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_end_tokens_are_barred_until_min_tokens_have_been_generated(temperature):
    logits = tensor([9.0, 8.0, 1.0, 0.0])
    params = SamplingParams(temperature=temperature, min_tokens=2)
    for output, barred in [([], True), ([2], True), ([2, 3], False), ([2, 3, 2], False)]:
        kept = support(distribution(logits, params, [0], output, end_ids=[0, 1]))
        assert kept == ({2} if temperature == 0 else {2, 3}) if barred else 0 in kept


# --- The order of the rules. ---

RULES = {"temperature": oracle_temperature, "top_k": oracle_top_k, "top_p": oracle_top_p, "min_p": oracle_min_p}
ORDER = ("temperature", "top_k", "top_p", "min_p")
SAME = ("top_k", "temperature", "top_p", "min_p")  # a temperature keeps the ranks, so top-k may come before it


def in_order(order: tuple[str, ...], logits: list[float], values: dict[str, float]) -> set[int]:
    for name in order:
        logits = RULES[name](logits, values[name])
    return left(tensor(logits))


def cases():
    """A small grid of rows and settings on which no border is near."""
    rows = [[math.log(x) for x in row] for row in ([40, 25, 15, 12, 8], [30, 28, 26, 10, 6], [60, 20, 12, 5, 3])]
    for logits, t, k, p, m in product(rows, (0.5, 2.0), (2, 3, 4), (0.52, 0.7, 0.85), (0.1, 0.35, 0.6)):
        values = {"temperature": t, "top_k": k, "top_p": p, "min_p": m}
        yield logits, values


def test_the_rules_apply_in_the_documented_order_and_in_no_other():
    """Each of the 22 orders that are another function gives other tokens somewhere; the code agrees with its own."""
    told_apart = set()
    for logits, values in cases():
        kept = support(distribution(tensor(logits), SamplingParams(**values)))
        assert kept == in_order(ORDER, logits, values) == in_order(SAME, logits, values)
        told_apart |= {order for order in permutations(ORDER) if in_order(order, logits, values) != kept}
    assert told_apart == set(permutations(ORDER)) - {ORDER, SAME}


@pytest.mark.parametrize(
    ("values", "right", "wrong_order", "wrong"),
    [
        # 40, 25, 15, 12, 8 per cent. Top-k 2 leaves 40 : 25, so the best has 62 per cent and alone reaches 0.6.
        ({"top_k": 2, "top_p": 0.6}, {0}, ("temperature", "top_p", "top_k", "min_p"), {0, 1}),
        # Top-p 0.75 leaves three tokens; after min-p 0.5 only 40 : 25 are left and the best has 62 per cent.
        ({"top_p": 0.6, "min_p": 0.5}, {0, 1}, ("temperature", "top_k", "min_p", "top_p"), {0}),
        # At temperature 2 the distribution is flatter: the first two have 49 per cent instead of 65.
        ({"temperature": 2.0, "top_p": 0.6}, {0, 1, 2}, ("top_p", "temperature", "top_k", "min_p"), {0, 1}),
        # ... and the third is 0.61 times as probable as the first instead of 0.375.
        ({"temperature": 2.0, "min_p": 0.6}, {0, 1, 2}, ("min_p", "temperature", "top_k", "top_p"), {0, 1}),
    ],
)
def test_an_example_for_each_pair_of_rules_whose_order_matters(values, right, wrong_order, wrong):
    logits = [math.log(x) for x in (40, 25, 15, 12, 8)]
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **values}
    assert support(distribution(tensor(logits), SamplingParams(**values))) == right
    assert in_order(wrong_order, logits, values) == wrong


def test_penalties_come_before_the_temperature():
    """2 - 1 = 1 and 0.5: divided by 0.1 that is 10 against 5. The other way round it would be 19 against 5."""
    params = SamplingParams(temperature=0.1, presence_penalty=1.0)
    probabilities = distribution(tensor([2.0, 0.5]), params, output=[0])
    torch.testing.assert_close(probabilities, tensor([10.0, 5.0]).softmax(-1))


def test_penalties_and_bars_come_before_top_k():
    """Token 0 is the best one, then penalized behind 2, or barred: top-k must not spend its places on it."""
    logits = tensor([3.0, 2.0, 1.0, 0.0])
    penalized = distribution(logits, SamplingParams(top_k=2, presence_penalty=5.0), output=[0])
    barred = distribution(logits, SamplingParams(top_k=2, min_tokens=1), end_ids=[0])
    assert support(penalized) == support(barred) == {1, 2}


@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(st.data(), LOGITS)
def test_all_rules_together_equal_the_second_writing(data, logits):
    ids = st.lists(st.integers(0, len(logits) - 1), max_size=5)
    prompt, output, end_ids = data.draw(ids), data.draw(ids), data.draw(ids)
    params = SamplingParams(
        temperature=data.draw(st.sampled_from([0, 0.3, 1.0, 1.7])),
        top_k=data.draw(st.integers(0, 10)),
        top_p=data.draw(st.sampled_from([0.2, 0.6, 0.9, 1.0])),
        min_p=data.draw(st.sampled_from([0.0, 0.05, 0.4])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 0.8, 1.9])),
        presence_penalty=data.draw(st.sampled_from([0.0, 0.7, -0.4])),
        frequency_penalty=data.draw(st.sampled_from([0.0, 0.3])),
        min_tokens=data.draw(st.integers(0, 3)),
    )
    assume(any(x > -INF and (i not in end_ids or len(output) >= params.min_tokens) for i, x in enumerate(logits)))
    assume(not near_a_border(logits, params, prompt, output, end_ids))
    probabilities = distribution(tensor(logits), params, prompt, output, end_ids)
    expected = tensor(oracle(logits, params, prompt, output, end_ids))
    torch.testing.assert_close(probabilities, expected, rtol=1e-9, atol=1e-12)
    assert support(probabilities) == support(expected)


# --- What cannot be sampled from. ---


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "logits",
    [[1.0, math.nan, 0.0], [math.nan] * 3, [math.nan, -INF, -INF], [0.0, INF, 0.0], [INF, -INF, 0.0], [-INF] * 3],
)
def test_broken_logits_are_an_error_and_never_token_zero(logits, temperature):
    params = SamplingParams(temperature=temperature, seed=0)
    for call in (lambda row: sample(row, params, new_generator(params)), lambda row: distribution(row, params)):
        with pytest.raises(ValueError, match=r"no token can be chosen .* weights"):
            call(torch.tensor(logits))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_barring_every_possible_token_is_an_error(temperature):
    params = SamplingParams(temperature=temperature, min_tokens=1, seed=0)
    with pytest.raises(ValueError, match="barred"):
        sample(torch.tensor([1.0, -INF, 2.0]), params, new_generator(params), end_ids=[0, 2])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_that_overflows_is_an_error(temperature):
    params = SamplingParams(temperature=temperature, repetition_penalty=1e-300, seed=0)
    with pytest.raises(ValueError, match="penalties"):
        sample(torch.tensor([1.0, 2.0]), params, new_generator(params), prompt=[1])


# --- Drawing. ---


def draws(params: SamplingParams, n: int, logits: torch.Tensor) -> list[int]:
    generator = new_generator(params)
    return [sample(logits, params, generator) for _ in range(n)]


def test_the_same_seed_gives_the_same_tokens():
    logits = torch.linspace(0, 1, 50)
    one, again, other = (draws(SamplingParams(seed=seed), 40, logits) for seed in (7, 7, 8))
    assert one == again != other


def test_without_a_seed_every_request_draws_its_own():
    torch.manual_seed(0)
    one = draws(SamplingParams(), 40, torch.linspace(0, 1, 50))
    torch.manual_seed(0)  # the global generator has no say
    assert draws(SamplingParams(), 40, torch.linspace(0, 1, 50)) != one


def test_a_request_does_not_touch_the_random_numbers_of_another():
    logits = torch.linspace(0, 1, 50)
    params = SamplingParams(seed=1), SamplingParams(seed=2)
    alone = [draws(p, 20, logits) for p in params]
    generators = [new_generator(p) for p in params]
    together = [[], []]
    for turn in range(40):
        which = turn % 2
        together[which].append(sample(logits, params[which], generators[which]))
    assert together == alone


# The chi-square test. 12,000 draws; eight tokens, of which top-k leaves six: five degrees of freedom. The critical
# value is that of a false alarm in a thousand. A wrong version whose distribution is q instead of p moves the statistic
# by n sum (q - p)^2 / p; at 45 or more, it is caught with probability over 0.99 (noncentral chi-square, 5 df).
DRAWS, CRITICAL, ENOUGH = 12_000, 20.515, 45.0
ROW = tensor([1.0, 0.4, 2.0, -0.3, 1.2, 0.0, -0.7, 1.6])
ASKED = SamplingParams(temperature=1.3, top_k=6, seed=11)
WRONG = {
    "temperature left out": SamplingParams(top_k=6, seed=11),
    "a slightly other temperature": SamplingParams(temperature=1.5, top_k=6, seed=11),
    "penalty on one token": SamplingParams(temperature=1.3, top_k=6, presence_penalty=0.3, seed=11),
}


def chi_square(tokens: list[int], probabilities: list[float]) -> float:
    """Infinite where a token came that cannot come."""
    total = 0.0
    for token, p in enumerate(probabilities):
        count, expected = tokens.count(token), len(tokens) * p
        if expected == 0:
            total += INF if count else 0
        else:
            total += (count - expected) ** 2 / expected
    return total


def test_tokens_are_drawn_as_often_as_the_distribution_says():
    assert chi_square(draws(ASKED, DRAWS, ROW), oracle(ROW.tolist(), ASKED)) < CRITICAL


@pytest.mark.parametrize("name", WRONG)
def test_the_same_test_catches_a_wrong_distribution(name):
    right, wrong = oracle(ROW.tolist(), ASKED), oracle(ROW.tolist(), WRONG[name], output=[2])
    shift = DRAWS * sum((q - p) ** 2 / p for p, q in zip(right, wrong, strict=True) if p > 0)
    assert shift > ENOUGH
    generator = new_generator(WRONG[name])
    tokens = [sample(ROW, WRONG[name], generator, output=[2]) for _ in range(DRAWS)]
    assert chi_square(tokens, right) > CRITICAL


# --- Log-probabilities. ---


def test_logprobs_are_those_of_the_bare_logits():
    logits = tensor([0.5, 2.0, -1.0, 1.0])
    exact = [math.log(p) for p in softmax(logits.tolist())]
    chosen, best = top_logprobs(logits, 2, 3)
    assert chosen == pytest.approx(exact[2])
    assert list(best) == [1, 3, 0] and best == pytest.approx({i: exact[i] for i in (1, 3, 0)})
    assert top_logprobs(logits, 2, 0)[1] == {}
    assert set(top_logprobs(logits, 2, 100)[1]) == {0, 1, 2, 3}


# --- What a caller may ask for. ---

NOT_A_NUMBER = ("warm", None, math.nan, INF, [1.0])
NOT_A_COUNT = (-1, 1.5, "three", True)
INVALID = {
    "temperature": (-0.1, *NOT_A_NUMBER),
    "top_k": (None, *NOT_A_COUNT),
    "top_p": (0, -0.5, 1.1, *NOT_A_NUMBER),
    "min_p": (-0.1, 1.1, *NOT_A_NUMBER),
    "repetition_penalty": (0, -1, *NOT_A_NUMBER),
    "presence_penalty": NOT_A_NUMBER,
    "frequency_penalty": NOT_A_NUMBER,
    "seed": NOT_A_COUNT,
    "max_tokens": (None, *NOT_A_COUNT),
    "min_tokens": (None, 129, *NOT_A_COUNT),  # 129 is more than max_tokens
    "stop_ids": ("a", 1.5, (1, "a"), (None,), None),
    "stop": ("", ("a", ""), 3, (b"a",), (1,), None),
    "logprobs": NOT_A_COUNT,
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in INVALID.items() for value in values])
def test_an_invalid_value_is_refused_by_the_name_of_its_field(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


def test_every_field_with_limits_has_its_invalid_values_tested():
    assert set(SamplingParams.__dataclass_fields__) - set(INVALID) == {"ignore_eos"}


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0, "top_p": 1, "min_p": 1, "top_k": 0},
        {"max_tokens": 0},
        {"max_tokens": 5, "min_tokens": 5},
        {"seed": 0, "logprobs": 0},
        {"repetition_penalty": 1e-9, "presence_penalty": -2, "frequency_penalty": -2.5},
    ],
)
def test_values_at_the_border_are_taken(values):
    params = SamplingParams(**values)
    assert {name: getattr(params, name) for name in values} == values


@pytest.mark.parametrize(
    ("given_ids", "kept"), [(5, (5,)), ([5, 6], (5, 6)), ((), ()), ({7}, (7,)), (range(2), (0, 1))]
)
def test_one_end_token_or_several_or_none(given_ids, kept):
    assert SamplingParams(stop_ids=given_ids).stop_ids == kept


@pytest.mark.parametrize(("strings", "kept"), [("end", ("end",)), (["a", "b"], ("a", "b")), ((), ())])
def test_one_stop_string_or_several_or_none(strings, kept):
    """One string is one stop string, not one for each of its letters."""
    assert SamplingParams(stop=strings).stop == kept
