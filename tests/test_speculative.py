"""Speculative sampling changes no distribution: enumerated exactly, and counted over the whole path.

A random process is explored in every direction: each decision of the real code (accept or not, which token) is taken
both ways, with its probability. So the distribution of the tokens that come out is computed, not estimated.

The enumeration calls `verify`. What is around it, drafters, loop and engine, is counted: texts of a small model are
written with seeds, and tuples of three tokens are compared with their exact probabilities by a chi-square test at the
level 0.001. 400 texts written alone find any distribution that is 0.2 away (in total variation), and 800 texts of the
engine any that is 0.15 away, with a probability of at least 0.97, whatever its form; `test_the_power...` computes that.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import islice, product

import pytest
import torch
from conftest import TINY, random_model
from torch import Tensor

from minillm import speculative
from minillm.drafters import LayerSkipDrafter, ModelDrafter, NgramDrafter
from minillm.engine import Engine
from minillm.lab.checks.ch07.all_ways import Tree
from minillm.model import NoCache
from minillm.sampling import SamplingParams, distribution
from minillm.speculative import Proposal, judge, one_hot, residual
from minillm.writing import Writer


class Uniform:
    """A random number u from [0, 1) of which only `u * q < p` is asked."""

    def __init__(self, tree: Tree, times: float = 1.0):
        self.tree, self.times = tree, times

    def __mul__(self, q: float) -> Uniform:
        return Uniform(self.tree, self.times * q)

    def __lt__(self, p: float) -> bool:
        chance = min(1.0, p / self.times) if self.times else float(p > 0)
        return self.tree.decide([1 - chance, chance]) == 1

    __le__ = __lt__


@pytest.fixture
def tree(monkeypatch) -> Tree:
    """The module's two random acts, taken in every direction."""
    tree = Tree()
    monkeypatch.setattr(speculative, "uniform", lambda generator: Uniform(tree))
    monkeypatch.setattr(speculative, "draw", lambda p, generator: tree.decide((p / p.sum()).tolist()))
    monkeypatch.setattr(Writer, "choose", lambda self, logits: tree.decide(self.distribution(logits).tolist()))
    return tree


VOCABULARY = 3


@cache
def logits_after(text: tuple[int, ...], seed: int) -> Tensor:
    """A model for nothing but tests: each text of three tokens has its own random logits."""
    number = int("1" + "".join(map(str, text)), VOCABULARY + 1)
    generator = torch.Generator().manual_seed(1000 * seed + number)
    return 2 * torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)


@cache
def target(params: SamplingParams, length: int) -> dict[tuple[int, ...], float]:
    """The probability of each text of `length` tokens, by the chain rule."""
    chances = {(): 1.0}
    for _ in range(length):
        ended = {text: chance for text, chance in chances.items() if {*text} & {*params.stop_ids}}
        chances = ended | {
            (*text, token): chance * p
            for text, chance in chances.items()
            if text not in ended
            for token, p in enumerate(writer(params, text).distribution(logits_after(text, 1)).tolist())
        }
    return {text: chance for text, chance in chances.items() if chance}


def writer(params: SamplingParams, output: tuple[int, ...] = ()) -> Writer:
    made = Writer(None, [0], params, 100)
    made.tokens += output
    return made


def a_round(tree: Tree, params: SamplingParams, k: int, certain: bool, before: tuple[int, ...]) -> tuple[int, ...]:
    """Write on from `before` with k guesses, by the real `verify`. -> the text after it"""
    text = writer(params, before)
    ids, rows = [], []
    for _ in range(k):
        q = text.distribution(logits_after((*before, *ids), 2), ids)
        if certain:
            q = torch.zeros_like(q).index_fill_(0, q.argmax(), 1.0)
        ids.append(tree.decide(q.tolist()))
        rows.append(q)
    logits = torch.stack([logits_after((*before, *ids[:i]), 1) for i in range(k + 1)])
    proposal = Proposal(ids, None if certain else torch.stack(rows))
    assert list(speculative.verify(text, logits, proposal))
    return tuple(text.output)


PARAMS = {
    "plain": SamplingParams(max_tokens=50),
    "temperature": SamplingParams(temperature=0.6, max_tokens=50),
    "top-k": SamplingParams(top_k=2, max_tokens=50),
    "top-p": SamplingParams(temperature=3, top_p=0.7, max_tokens=50),
    "penalties": SamplingParams(repetition_penalty=1.5, presence_penalty=0.3, max_tokens=50),
    "end tokens, barred at first": SamplingParams(stop_ids=1, min_tokens=2, max_tokens=50),
    "greedy": SamplingParams(temperature=0, max_tokens=50),
}


def largest_difference(tree: Tree, params: SamplingParams, k: int, certain: bool, length: int = 3) -> float:
    """Between the probabilities of a text's first tokens, in rounds and by the chain rule."""
    found, going_on = defaultdict(float), {(): 1.0}
    while going_on:
        before = min(going_on, key=len)  # nothing leads to it any more
        chance = going_on.pop(before)
        if len(before) >= length or {*before} & {*params.stop_ids}:
            found[before[:length]] += chance
            continue
        for text, weight in tree.ways(lambda before=before: a_round(tree, params, k, certain, before)):
            going_on[text] = going_on.get(text, 0.0) + chance * weight
    wanted = target(params, length)
    return max(abs(found[text] - wanted.get(text, 0.0)) for text in {*found, *wanted})


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
@pytest.mark.parametrize("name", PARAMS)
def test_the_distribution_is_the_models_own(tree, name, certain, k):
    assert largest_difference(tree, PARAMS[name], k, certain) < 1e-12


# --- Wrong versions: the enumeration must see each. ---


def accept_all(writer, logits, guess, q):
    return guess, True


def never_accept(writer, logits, guess, q):
    """Tokens are the model's own, but the guess is taken for right where it happens to be the same."""
    token = speculative.draw(writer.distribution(logits), writer.generator)
    return token, False


def judging(accept=None, after=None, rules=None, guess_rules=None):
    """`judge` with a part of it replaced."""

    def judge(writer, logits, guess, q):
        p = (rules or Writer.distribution)(writer, logits)
        q = one_hot(guess, p) if q is None else q
        if accept:
            right = accept(speculative.uniform(writer.generator), float(p[guess]), float(q[guess]))
        else:
            right = speculative.uniform(writer.generator) * float(q[guess]) < float(p[guess])
        if right:
            return guess, True
        return speculative.draw((after or residual)(p, q), writer.generator), False

    return judge


def raw(writer, logits):
    return logits.softmax(-1)


def wrong_residual(make):
    def judge(writer, logits, guess, q):
        p = writer.distribution(logits)
        q = one_hot(guess, p) if q is None else q
        if speculative.uniform(writer.generator) * float(q[guess]) < float(p[guess]):
            return guess, True
        return speculative.draw(make(writer, logits, p, q), writer.generator), False

    return judge


def residual_of_raw(writer, logits, p, q):
    return (logits.softmax(-1) - q).clamp(min=0) + 1e-30


def filtered_again(writer, logits, p, q):
    return distribution(residual(p, q).log(), replace(writer.params, temperature=1.0))


def tempered_again(writer, logits, p, q):
    return distribution(residual(p, q).log(), writer.params)


def verifying(row_of=lambda i, n: i, q_of=lambda i, n: i, bonus_row=-1, stops=True, bonus_always=False, choose=None):
    """`verify` with other indices: which row judges guess i, with which q, and where the bonus comes from."""

    def verify(writer, logits, proposal, seconds=0.0):
        n, right = len(proposal.ids), True
        for i, guess in enumerate(proposal.ids):
            q = None if proposal.probabilities is None else proposal.probabilities[q_of(i, n)]
            token, right = speculative.judge(writer, logits[row_of(i, n)], guess, q)
            yield writer.take(token, logits[i])
            if (not right and stops) or writer.finish_reason:
                break
        if (right or bonus_always) and not writer.finish_reason:
            yield writer.take(writer.choose(logits[bonus_row]), logits[bonus_row])

    return verify


def rules_of_the_round_before(writer, logits):
    """Penalties and barred tokens as if nothing had been accepted in this round."""
    return distribution(logits, writer.params, writer.prompt, writer.output[:-1], writer.end_ids)


WRONG = {
    "every guess is accepted": ("judge", accept_all, "temperature"),
    "a guess is accepted if it is likelier than not": (
        "judge",
        judging(accept=lambda u, p, q: p > 0.5),
        "temperature",
    ),
    "after a rejection the model's own distribution": ("judge", wrong_residual(lambda w, x, p, q: p), "temperature"),
    "after a rejection the drafter's distribution": ("judge", wrong_residual(lambda w, x, p, q: q), "temperature"),
    "after a rejection what p was missing": (
        "judge",
        wrong_residual(lambda w, x, p, q: residual(q, p)),
        "temperature",
    ),
    "the residual's absolute value": ("judge", wrong_residual(lambda w, x, p, q: (p - q).abs() + 1e-30), "temperature"),
    "the residual of raw distributions": ("judge", wrong_residual(residual_of_raw), "top-k"),
    "the residual filtered again": ("judge", wrong_residual(filtered_again), "top-p"),
    "the residual tempered again": ("judge", wrong_residual(tempered_again), "temperature"),
    "p before the rules": ("judge", judging(rules=raw), "top-k"),
    "penalties of the round before": ("judge", judging(rules=rules_of_the_round_before), "penalties"),
    "end tokens are free too late": ("judge", judging(rules=rules_of_the_round_before), "end tokens, barred at first"),
    "q of another row": ("verify", verifying(q_of=lambda i, n: (i + 1) % n), "temperature"),
    "the first guess is judged by the second row": ("verify", verifying(row_of=lambda i, n: i + 1), "temperature"),
    "all guesses are judged by the first row": ("verify", verifying(row_of=lambda i, n: 0), "temperature"),
    "the bonus comes from the first row": ("verify", verifying(bonus_row=0), "temperature"),
    "the bonus comes from the last guess's own row": ("verify", verifying(bonus_row=-2), "temperature"),
    "a bonus after a rejection too": ("verify", verifying(bonus_always=True), "temperature"),
    "a rejection does not end the round": ("verify", verifying(stops=False), "temperature"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_enumeration_rejects_a_wrong_version(tree, monkeypatch, name):
    what, wrong, params = WRONG[name]
    monkeypatch.setattr(speculative, what, wrong)
    assert largest_difference(tree, PARAMS[params], 2, False) > 1e-6


@pytest.mark.parametrize("what", ["judge", "verify"])
def test_the_scaffold_of_the_wrong_versions_is_right(tree, monkeypatch, what):
    """So each of them is wrong by its one change."""
    monkeypatch.setattr(speculative, what, judging() if what == "judge" else verifying())
    assert largest_difference(tree, PARAMS["temperature"], 2, False) < 1e-12


# --- The borders: u = 0, p = 0, q = 0, p = q. ---

ROWS = torch.tensor([[2.0, 1.0, 0.0], [0.5, 0.5, 3.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
ALMOST_ONE = 1 - 2**-53


def test_what_has_no_probability_is_never_accepted_even_at_a_random_number_of_zero(monkeypatch):
    monkeypatch.setattr(speculative, "uniform", lambda generator: 0.0)
    for q in (None, torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64), torch.tensor([1.0, 0.0, 0.0])):
        for seed in range(20):
            token, right = judge(writer(SamplingParams(top_k=2, seed=seed)), ROWS[0], 2, q)
            assert (token in (0, 1), right) == (True, False)


def test_a_guess_that_is_at_least_as_likely_as_it_was_drawn_is_always_accepted(monkeypatch):
    monkeypatch.setattr(speculative, "uniform", lambda generator: ALMOST_ONE)
    generator = torch.Generator().manual_seed(0)
    seen = 0
    for _ in range(300):
        p, q = torch.randn(2, 3, generator=generator, dtype=torch.float64).softmax(-1)
        for guess in range(3):
            accepted = judge(writer(SamplingParams(seed=0)), p.log(), guess, q) == (guess, True)
            if p[guess] >= q[guess] * (1 + 1e-12):
                assert accepted
                seen += 1
            elif p[guess] < q[guess] * (1 - 1e-12):
                assert not accepted
    assert seen > 100


def test_a_guess_that_its_drafter_gave_no_probability_is_accepted_where_the_model_has_some():
    q = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    assert judge(writer(SamplingParams(seed=0)), ROWS[0], 0, q) == (0, True)
    assert judge(writer(SamplingParams(seed=0, top_k=1)), ROWS[0], 2, q) == (0, False)


def test_identical_distributions_reject_by_rounding_only_and_then_go_on():
    params = SamplingParams(temperature=0.8, max_tokens=100)
    for seed in range(100):
        text = writer(replace(params, seed=seed))
        q = torch.stack([text.distribution(row) for row in ROWS[:2]])
        ids = [speculative.draw(row, text.generator) for row in q]
        assert [piece.token for piece in speculative.verify(text, ROWS, Proposal(ids, q))][:2] == ids
        assert len(text.output) == 3


def test_a_rejection_without_a_residual_draws_from_the_models_distribution(monkeypatch):
    monkeypatch.setattr(speculative, "uniform", lambda generator: 1.0)  # as if rounding had rejected
    p = ROWS[1].softmax(-1)
    for q in (p, p + 1e-17, torch.nextafter(p, torch.ones_like(p))):
        assert torch.equal(residual(p, q), p)
    drawn = [judge(writer(SamplingParams(seed=seed)), ROWS[1], 2, p) for seed in range(300)]
    assert {right for _, right in drawn} == {False}
    assert {token for token, _ in drawn} == {0, 1, 2}


def test_a_residual_is_what_was_missing_and_adds_up_to_one():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.1, 0.7])
    assert torch.allclose(residual(p, q), torch.tensor([0.6, 0.4, 0.0]))
    assert torch.allclose(residual(p, one_hot(0, p)), torch.tensor([0.0, 0.6, 0.4]))
    assert torch.equal(p, torch.tensor([0.5, 0.3, 0.2]))


def test_the_residual_is_made_of_processed_distributions_and_not_filtered_again(monkeypatch):
    drawn = []
    monkeypatch.setattr(speculative, "uniform", lambda generator: ALMOST_ONE)
    monkeypatch.setattr(speculative, "draw", lambda p, generator: drawn.append(p) or 0)
    params = SamplingParams(temperature=0.5, top_k=2)
    q = torch.tensor([0.05, 0.05, 0.9], dtype=torch.float64)
    judge(writer(params), torch.tensor([1.0, 0.8, 0.0], dtype=torch.float64), 2, q)
    both = torch.tensor([2.0, 1.6], dtype=torch.float64).softmax(-1) - 0.05
    assert torch.allclose(drawn[0], torch.cat([both / both.sum(), torch.zeros(1)]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_end_tokens_are_barred_in_the_rows_of_guesses_too(temperature):
    """Three tokens at least: the guessed ends before are refused, the one after is taken, and nothing follows."""
    params = SamplingParams(temperature=temperature, stop_ids=2, min_tokens=3, max_tokens=9, seed=0)
    ends = torch.tensor([0.0, 0.0, 60.0], dtype=torch.float64).expand(3, 3)
    text = writer(params)
    for _ in range(3):
        (piece,) = speculative.verify(text, ends, Proposal([2, 2]))
        assert piece.token != 2
        assert piece.finish_reason is None
    (piece,) = speculative.verify(text, ends, Proposal([2, 2]))
    assert (piece.token, piece.finish_reason) == (2, "stop")


def test_penalties_count_the_guesses_that_were_accepted_in_the_same_round():
    params = SamplingParams(temperature=0, presence_penalty=1.5, max_tokens=9)
    rows = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64).expand(3, 3)
    text = writer(params)
    assert [piece.token for piece in speculative.verify(text, rows, Proposal([0, 0]))] == [0, 1]
    text = writer(params)
    assert [piece.token for piece in speculative.verify(text, rows, Proposal([0, 1]))] == [0, 1, 0]


def test_a_round_without_guesses_is_a_plain_step():
    params = SamplingParams(seed=4, max_tokens=9)
    plain, text = writer(params), writer(params)
    wanted = [plain.write(row) for row in ROWS]
    assert [next(speculative.verify(text, row[None], Proposal())) for row in ROWS] == wanted


# --- Counted over the whole path. ---

THREE = replace(TINY, vocab_size=3, d_model=12, n_heads=2, n_kv_heads=1, head_dim=4, d_ff=16)
MODEL, OTHER = random_model(THREE), random_model(THREE, seed=1)
PROMPT = [0, 2, 1, 0]
LEVEL = 1e-3
ALONE, SERVED = 400, 800  # texts that are counted
SAMPLED = {
    "temperature": SamplingParams(temperature=2.5),
    "top-k": SamplingParams(temperature=3.0, top_k=2),
    "top-p": SamplingParams(temperature=3.0, top_p=0.8),
}


def chi_square_below(x: float, df: float) -> float:
    """The probability that a chi-square variable is below x."""
    return float(torch.special.gammainc(torch.tensor(df / 2).double(), torch.tensor(x / 2).double()))


def critical(df: int) -> float:
    low, high = 0.0, 1e4
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if chi_square_below(middle, df) > 1 - LEVEL else (middle, high)
    return high


def power(n: int, df: int, distance: float) -> float:
    """The least probability of a rejection at this total-variation distance.

    The statistic is about noncentral chi-square, with n * sum(d^2 / p) >= n * (sum |d|)^2 = 4 n distance^2 (Cauchy and
    Schwarz); such a variable is a Poisson mixture of chi-squares with more degrees of freedom.
    """
    half, x = 2 * n * distance**2, critical(df)
    weights = torch.distributions.Poisson(torch.tensor(half).double()).log_prob(torch.arange(0.0, 400).double()).exp()
    return 1 - sum(float(w) * chi_square_below(x, df + 2 * j) for j, w in enumerate(weights))


def test_the_power_that_is_stated_is_the_tests_own():
    assert power(ALONE, 3**3 - 1, 0.2) > 0.97
    assert power(SERVED, 3**3 - 1, 0.15) > 0.97


@torch.inference_mode()
def tuple_chances(params: SamplingParams, first: int) -> dict[tuple[int, ...], float]:
    """The probability of each (token `first`, the next, and the next), from naive passes over all texts."""
    length = first + 3
    texts = list(product(range(3), repeat=length))
    tokens = torch.tensor([[*PROMPT, *text[:-1]] for text in texts])
    places = torch.arange(tokens.shape[1]).repeat(len(texts))
    logits = MODEL.logits(MODEL(tokens.flatten(), places, NoCache([tokens.shape[1]] * len(texts))))
    logits = logits.view(len(texts), -1, 3)[:, len(PROMPT) - 1 :]
    rows: dict[tuple[int, ...], list[float]] = {}
    chances: dict[tuple[int, ...], float] = defaultdict(float)
    for text, own in zip(texts, logits, strict=True):
        chance = 1.0
        for i, token in enumerate(text):
            if text[:i] not in rows:
                rows[text[:i]] = distribution(own[i], params).tolist()
            chance *= rows[text[:i]][token]
        chances[text[first:]] += chance
    assert sum(chances.values()) == pytest.approx(1, abs=1e-12)
    return chances


def statistic(found: list[tuple[int, ...]], chances: dict[tuple[int, ...], float]) -> tuple[float, int]:
    """(chi-square, degrees of freedom). Tuples that are expected less than five times are counted together."""
    assert all(chances[each] > 0 for each in found), "a tuple that cannot be"
    expected, counts, rare = [], [], [0.0, 0]
    for each, chance in chances.items():
        if len(found) * chance >= 5:
            expected.append(len(found) * chance)
            counts.append(found.count(each))
        else:
            rare = [rare[0] + len(found) * chance, rare[1] + found.count(each)]
    if rare[0] >= 1:
        expected.append(rare[0])
        counts.append(rare[1])
    return sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True)), len(expected) - 1


def alone(drafter, params: SamplingParams, k: int, n: int) -> list[tuple[int, ...]]:
    """Token k - 1 (the first is 0) and the next two: guesses, and in a good round the bonus."""
    result = []
    for seed in range(n):
        pieces = speculative.stream(MODEL, None, PROMPT, drafter, replace(params, seed=seed, max_tokens=k + 4), k=k)
        result.append(tuple(piece.token for piece in islice(pieces, k - 1, k + 2)))
        pieces.close()
    return result


def in_the_engine(drafter, params: SamplingParams, k: int, n: int) -> list[tuple[int, ...]]:
    """Many at once, with a budget and a pool that take guesses away."""
    engine = Engine(MODEL, None, 24, 3, 16, 40, drafter=drafter, k=k)
    requests = [engine.add(PROMPT, replace(params, seed=seed, max_tokens=k + 4)) for seed in range(n)]
    for _ in engine.stream():
        pass
    assert engine.scheduler.met["drafts given up"] > 0
    return [tuple(r.generation.tokens[k - 1 : k + 2]) for r in requests]


def test_the_counted_models_are_no_easy_case():
    """No rule is idle, guesses are often wrong, and no token is nearly certain."""
    logits = MODEL.logits(MODEL(torch.tensor(PROMPT), torch.arange(4), NoCache()))[-1]
    assert 0.02 < float(distribution(logits, SAMPLED["temperature"]).min()) < 0.33
    for name in ("top-k", "top-p"):
        assert float(distribution(logits, SAMPLED[name]).min()) == 0


COUNTED = [(1, "temperature"), (2, "top-k"), (3, "top-p"), (4, "temperature"), (5, "top-p")]
COUNTED_DRAFTERS = {
    "another model": lambda: ModelDrafter(OTHER),
    "first layers": lambda: LayerSkipDrafter(MODEL, 1),
    "n-gram": NgramDrafter,
}


@pytest.mark.parametrize(("k", "name", "drafter"), [(*c, list(COUNTED_DRAFTERS)[i % 2]) for i, c in enumerate(COUNTED)])
def test_counted_tuples_of_one_text_have_the_models_distribution(k, name, drafter):
    found = alone(COUNTED_DRAFTERS[drafter](), SAMPLED[name], k, ALONE)
    value, df = statistic(found, tuple_chances(SAMPLED[name], k - 1))
    assert value < critical(df)


@pytest.mark.parametrize(
    ("k", "name", "drafter"),
    [(*c, list(COUNTED_DRAFTERS)[i % 3]) for i, c in enumerate([*COUNTED, (3, "temperature")])],
)
def test_counted_tuples_of_the_engine_have_the_models_distribution(k, name, drafter):
    found = in_the_engine(COUNTED_DRAFTERS[drafter](), SAMPLED[name], k, SERVED)
    value, df = statistic(found, tuple_chances(SAMPLED[name], k - 1))
    assert value < critical(df)


@pytest.mark.parametrize("name", ["every guess is accepted", "after a rejection the model's own distribution"])
def test_the_counting_rejects_a_wrong_version(name, monkeypatch):
    what, wrong, _ = WRONG[name]
    monkeypatch.setattr(speculative, what, wrong)
    chances = tuple_chances(SAMPLED["temperature"], 1)
    for write, n in ((alone, ALONE), (in_the_engine, SERVED)):
        value, df = statistic(write(ModelDrafter(OTHER), SAMPLED["temperature"], 2, n), chances)
        assert value > critical(df)
