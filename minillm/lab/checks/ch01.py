"""Exercise 01, autoregression: the softmax, the cuts, the penalty, the loop, and the probability of a text."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minillm.generation import next_logits
from minillm.lab.check import Chapter, expect_close, expect_equal, expect_number, seeded
from minillm.lab.tiny import tiny_model
from minillm.model import NoCache

CHAPTER = Chapter("01")

softmax = CHAPTER.task(
    "softmax_with_temperature",
    hints=(
        "Three steps: subtract the largest logit, divide by the temperature, exponentiate and normalise.",
        "Softmax does not change when the same number is subtracted from all logits. After that the largest is 0.",
        "Treat temperature 0 apart, before anything is divided: 1 at the place of the argmax, 0 elsewhere.",
    ),
)


def oracle_softmax(logits: list[float], temperature: float) -> list[float]:
    """In plain Python, from differences to the largest."""
    best = max(logits)
    if temperature == 0:
        return [1.0 if i == logits.index(best) else 0.0 for i in range(len(logits))]
    weights = [math.exp((x - best) / temperature) for x in logits]
    return [w / math.fsum(weights) for w in weights]


def check_softmax(
    fn, logits: list[float], temperature: float, dtype: torch.dtype = torch.float64, rtol: float = 1e-5
) -> None:
    given = torch.tensor(logits, dtype=dtype)
    got = fn(given.clone(), temperature)
    label = f"logits {logits} at temperature {temperature}"
    if isinstance(got, Tensor) and got.isnan().any():
        raise AssertionError(
            f"{label}: NaN at index {got.isnan().nonzero()[0].tolist()}; did exp overflow, or 0 divide?"
        )
    expect_close(got, torch.tensor(oracle_softmax(logits, temperature), dtype=dtype), label, rtol=rtol)


@softmax
def plain(fn):
    """at temperature 1 it is the softmax"""
    check_softmax(fn, [0.0, math.log(3)], 1)
    check_softmax(fn, [0.3, -1.2, 2.5, 0.0, -4.0], 1.0)


@softmax
def temperatures(fn):
    """the logits are divided by the temperature: below 1 sharper, above 1 flatter"""
    check_softmax(fn, [0.0, math.log(3)], 0.5)
    check_softmax(fn, [0.3, -1.2, 2.5, 0.0, -4.0], 2.0)


@softmax
def large_logits(fn):
    """large logits, or a tiny temperature, do not overflow"""
    for logits, temperature in (
        ([1000.0, 999.0, -1000.0], 1.0),
        ([-1000.0, -1001.0], 1.0),
        ([3.0, 2.0, 1.0], 0.001),
    ):  # neighbouring float32 numbers near 3000 lie 0.0002 apart, so a right answer may be off by that much
        check_softmax(fn, logits, temperature, torch.float32, rtol=1e-3)


@softmax
def zero_temperature(fn):
    """temperature 0 puts everything on the best token"""
    check_softmax(fn, [1.0, -2.0, 3.0, 2.5], 0)
    check_softmax(fn, [-5.0, -1.0, -3.0], 0.0, torch.float32)


@softmax
def barred_tokens(fn):
    """a token with the logit -inf gets probability 0"""
    check_softmax(fn, [-math.inf, 1.0, 2.0], 0.7)
    check_softmax(fn, [-math.inf, -1.0, -2.0], 0)


@softmax
def softmax_input(fn):
    """the caller's logits are not changed"""
    untouched(lambda logits: fn(logits, 0.5))


def untouched(call) -> None:
    logits = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    before = logits.clone()
    call(logits)
    changed = (logits != before).nonzero().flatten().tolist()
    assert not changed, f"your function changed its input at index {changed[0]}; work on a copy"


def check_kept(got: object, logits: Tensor, want: list[int], label: str, slips: dict[str, list[int]]) -> None:
    """Which tokens stay, and that what stays is as it was. slips: what would stay after a usual mistake."""
    assert got is not None, f"{label}: your function returned None; is a `return` missing?"
    assert isinstance(got, Tensor), f"{label}: expected a tensor, got {type(got).__name__}"
    assert got.shape == logits.shape, f"{label}: shape {list(got.shape)}, expected {list(logits.shape)}"
    assert not got.isnan().any(), f"{label}: NaN at index {got.isnan().nonzero()[0].tolist()}"
    kept = (got > -torch.inf).nonzero().flatten().tolist()
    assert kept or not want, f"{label}: keeps no token at all; the best one must stay"
    best = logits.tolist().index(logits.max().item())
    assert best in kept, f"{label}: drops token {best}, the best one"
    if kept != want:
        more, fewer = sorted(set(kept) - set(want)), sorted(set(want) - set(kept))
        wrong = f"token {more[0]} should be -inf" if more else f"token {fewer[0]} should stay"
        slip = next((f" ({name})" for name, ids in slips.items() if kept == sorted(ids)), "")
        raise AssertionError(f"{label}: keeps {short(kept)}, expected {short(want)}: {wrong}{slip}")
    moved = (got != logits).logical_and(got > -torch.inf).nonzero().flatten().tolist()
    if moved:
        at = moved[0]
        raise AssertionError(f"{label}: the logit of token {at} stays as it was: {logits[at]:.6g}, yours {got[at]:.6g}")


def short(ids: list[int]) -> str:
    """A list of ids for a message; of a long one the number and the first."""
    return f"tokens {ids}" if len(ids) <= 10 else f"{len(ids)} tokens from {ids[0]} on"


def random_logits(seed: int, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return 3 * torch.randn(size, generator=torch.Generator().manual_seed(seeded(seed)), dtype=torch.float64).to(dtype)


top_k = CHAPTER.task(
    "keep_best_k",
    hints=(
        "Find the ids of the k best first, then build a row of -inf and put only those back.",
        "A threshold (everything below the k-th value) keeps too many when values are equal. Work with ids.",
        "sort(descending=True, stable=True) keeps equals in the order of their ids.",
    ),
)


def check_top_k(fn, logits: Tensor, k: int) -> None:
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i].item(), i))
    want = sorted(ranked[:k]) if k else sorted(ranked)
    want = [i for i in want if logits[i] > -torch.inf]
    slips = {
        "were places in the sorted row taken for token ids?": list(range(k)),
        "these are the worst": ranked[-k:],
        "one too few": ranked[: k - 1],
        "one too many": ranked[: k + 1],
    }
    check_kept(fn(logits.clone(), k), logits, want, f"k = {k} of {len(logits)}", slips)


@top_k
def best_stay(fn):
    """the k best stay as they were, the rest becomes -inf"""
    check_top_k(fn, torch.tensor([1.0, 4.0, 3.0, 2.0]), 2)
    check_top_k(fn, random_logits(0, 20), 7)


@top_k
def only_one(fn):
    """k = 1 keeps the best, also when all logits are negative"""
    check_top_k(fn, torch.tensor([-5.0, -2.0, -9.0]), 1)


@top_k
def off(fn):
    """k = 0 is off"""
    check_top_k(fn, random_logits(1, 6), 0)


@top_k
def large_k(fn):
    """k may be as large as the vocabulary, or larger"""
    check_top_k(fn, random_logits(2, 6), 6)
    check_top_k(fn, random_logits(2, 6), 50)


@top_k
def equal_logits(fn):
    """of equal logits at the border the lower ids stay: exactly k"""
    check_top_k(fn, torch.tensor([1.0, 2.0, 2.0, 2.0, 5.0]), 3)
    check_top_k(fn, torch.zeros(300), 40)


@top_k
def after_another_cut(fn):
    """tokens that were cut off before stay so"""
    check_top_k(fn, torch.tensor([-math.inf, 1.0, -math.inf, 0.5]), 3)


@top_k
def top_k_input(fn):
    """the caller's logits are not changed"""
    untouched(lambda logits: fn(logits, 2))


nucleus = CHAPTER.task(
    "keep_nucleus",
    hints=(
        "Go from the most probable token to the least and add up. When do you stop?",
        "A token stays if the sum of all better ones, without itself, is still below p. So the best one always stays.",
        "sort gives the values and where they came from; cumsum gives sums that include each token itself.",
    ),
)


def oracle_nucleus(logits: Tensor, p: float) -> list[int]:
    """Take the best tokens one by one until they reach p."""
    probabilities = oracle_softmax(logits.tolist(), 1)
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i].item(), i))
    kept, total = [], 0.0
    for i in ranked:
        if kept and total >= p:
            break
        kept.append(i)
        total += probabilities[i]
    return sorted(i for i in kept if logits[i] > -torch.inf)


def check_nucleus(fn, logits: Tensor, p: float) -> None:
    want = oracle_nucleus(logits, p) if p < 1 else (logits > -torch.inf).nonzero().flatten().tolist()
    shown = f" of probabilities {[round(x, 3) for x in logits.softmax(-1).tolist()]}" if len(logits) <= 6 else ""
    ranked = sorted(want, key=lambda i: -logits[i].item())
    sums = logits.exp().sort(descending=True, stable=True)
    slips = {
        "was exp(logits) added up without being normalised?": sums.indices[sums.values.cumsum(-1) - sums.values < p],
        "were places in the sorted row taken for token ids?": range(len(want)),
        "was it added up from the least probable on?": upwards(logits, p),
        "the token that reaches p is missing": ranked[:-1],
    }
    check_kept(
        fn(logits.clone(), p), logits, want, f"p = {p}{shown}", {n: [int(i) for i in s] for n, s in slips.items()}
    )


def upwards(logits: Tensor, p: float) -> Tensor:
    """What a nucleus of the least probable tokens would be."""
    probabilities, order = logits.softmax(-1).sort(stable=True)
    return order[probabilities.cumsum(-1) - probabilities < p]


THREE = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64).log()


@nucleus
def crossing(fn):
    """the token that reaches p stays, the next one does not"""
    check_nucleus(fn, THREE, 0.7)
    check_nucleus(fn, THREE, 0.95)
    for p in (0.3, 0.8, 0.99):
        check_nucleus(fn, random_logits(3, 50), p)


@nucleus
def never_empty(fn):
    """a p smaller than the best token's probability keeps that token"""
    check_nucleus(fn, THREE, 0.5)
    check_nucleus(fn, THREE, 1e-6)


@nucleus
def reached_exactly(fn):
    """a sum that is exactly p is enough; of equals the lower ids stay"""
    check_nucleus(fn, torch.zeros(4), 0.5)
    check_nucleus(fn, torch.zeros(64), 0.25)


@nucleus
def nucleus_off(fn):
    """p = 1 is off, even where rounding makes the sum reach 1 early"""
    check_nucleus(fn, THREE, 1.0)
    check_nucleus(fn, random_logits(4, 20_000, torch.float32), 1)


@nucleus
def not_logits(fn):
    """probabilities are meant: adding a number to all logits changes nothing"""
    check_nucleus(fn, THREE + 100, 0.7)
    check_nucleus(fn, THREE - 100, 0.7)


@nucleus
def nucleus_after_another_cut(fn):
    """after another cut the rest is renormalised, and what was cut stays so"""
    check_nucleus(fn, torch.tensor([-math.inf, 0.0, 0.0, -math.inf, -1.0]), 0.6)


@nucleus
def nucleus_input(fn):
    """the caller's logits are not changed"""
    untouched(lambda logits: fn(logits, 0.6))


penalty = CHAPTER.task(
    "penalize_repeats",
    hints=(
        "Every penalized logit must become smaller. What makes a negative number smaller, dividing or multiplying?",
        "However often a token occurs, it is penalized once. Which Python type holds each value once?",
    ),
)


def check_penalty(fn, logits: list[float], tokens: list[int], factor: float) -> None:
    label = f"logits {logits}, text {tokens}, penalty {factor}"
    got = fn(torch.tensor(logits, dtype=torch.float64), list(tokens), factor)
    assert got is not None, f"{label}: your function returned None; is a `return` missing?"
    assert isinstance(got, Tensor), f"{label}: expected a tensor, got {type(got).__name__}"
    assert list(got.shape) == [len(logits)], f"{label}: shape {list(got.shape)}, expected {[len(logits)]}"
    for i, old in enumerate(logits):
        want = old if i not in tokens else old / factor if old > 0 else old * factor
        what = f"token {i} occurs {tokens.count(i)} times" if i in tokens else f"token {i} does not occur"
        assert math.isclose(got[i], want, rel_tol=1e-9), f"{label}: {what}: yours {got[i]:.6g}, expected {want:.6g}"


@penalty
def positive(fn):
    """a positive logit is divided, and tokens that do not occur stay as they are"""
    check_penalty(fn, [4.0, 3.0, 2.0], [0], 2.0)
    check_penalty(fn, [4.0, 3.0, 0.5, 8.0], [3, 1, 2], 1.3)


@penalty
def negative(fn):
    """a negative logit is multiplied: it becomes smaller too"""
    check_penalty(fn, [4.0, -4.0, 2.0], [1], 2.0)
    check_penalty(fn, [-1.0, -4.0, 2.0], [0, 1, 2], 1.5)


@penalty
def once(fn):
    """once for each token, however often it occurs"""
    check_penalty(fn, [4.0, -4.0, 2.0], [0, 0, 0, 1, 1], 2.0)


@penalty
def nothing_to_do(fn):
    """an empty text or a penalty of 1 changes nothing; 0 and -inf stay"""
    check_penalty(fn, [4.0, -4.0], [], 2.0)
    check_penalty(fn, [4.0, -4.0], [0, 1], 1.0)
    check_penalty(fn, [0.0, -math.inf, 1.0], [0, 1], 2.0)


@penalty
def penalty_input(fn):
    """the caller's logits are not changed"""
    untouched(lambda logits: fn(logits, [0, 1], 2.0))


loop = CHAPTER.task(
    "generate_greedy",
    hints=(
        "Look before you write: how many tokens may still come? With max_tokens = 0 the model is not even asked.",
        "scores wants the whole text each time: the prompt and all that you have written.",
        "Start from a copy of the prompt, append the argmax, stop at the count or at an end token, cut the prompt off.",
    ),
)


class Counting:
    """A model that continues 1, 2, 3, ... by the last token, and notes what it is asked."""

    def __init__(self):
        self.asked: list[list[int]] = []

    def __call__(self, tokens: list[int]) -> Tensor:
        self.asked.append([int(t) for t in tokens])
        assert len(self.asked) <= 100, "scores was called more than 100 times: the loop does not stop"
        return torch.nn.functional.one_hot(torch.tensor((self.asked[-1][-1] + 1) % 50), 50).double()


def check_loop(fn, prompt: list[int], max_tokens: int, end_ids: tuple[int, ...], want: list[int]) -> Counting:
    scores = Counting()
    got = fn(scores, list(prompt), max_tokens, end_ids)
    label = f"after {prompt}, max_tokens={max_tokens}, end_ids={end_ids}"
    assert got is not None, f"{label}: your function returned None; is a `return` missing?"
    assert isinstance(got, list), f"{label}: expected a list of ids, got {type(got).__name__}"
    if len(got) != len(want):
        raise AssertionError(f"{label}: {len(got)} new tokens {got}, expected {len(want)}: {want}")
    expect_equal([int(t) for t in got], want, label)
    return scores


@loop
def as_many_as_asked(fn):
    """max_tokens new tokens, neither more nor fewer"""
    check_loop(fn, [1, 2], 3, (), [3, 4, 5])
    check_loop(fn, [7], 1, (), [8])


@loop
def none_at_all(fn):
    """max_tokens = 0 gives none"""
    check_loop(fn, [1, 2], 0, (), [])


@loop
def ends(fn):
    """each of several end tokens ends the text, and is its last token"""
    check_loop(fn, [1, 2], 10, (5, 9), [3, 4, 5])
    check_loop(fn, [6], 10, (5, 9), [7, 8, 9])
    check_loop(fn, [1, 2], 10, (3,), [3])


@loop
def end_in_the_prompt(fn):
    """an end token in the prompt does not end anything"""
    check_loop(fn, [5, 1, 5], 3, (5,), [6, 7, 8])


@loop
def whole_text(fn):
    """the model is asked once a token, each time with the whole text"""
    scores = check_loop(fn, [1, 2], 3, (), [3, 4, 5])
    for i, (mine, want) in enumerate(zip(scores.asked, [[1, 2], [1, 2, 3], [1, 2, 3, 4]], strict=False)):
        assert mine == want, f"call {i + 1} of scores: asked with {mine}, expected {want}"
    expect_equal(len(scores.asked), 3, "calls of scores for 3 tokens")


@loop
def prompt_untouched(fn):
    """the caller's prompt is not changed"""
    prompt = [1, 2]
    fn(Counting(), prompt, 3, ())
    assert prompt == [1, 2], f"the prompt is {prompt} after the call, expected [1, 2]; work on a copy"


@loop
def a_real_model(fn):
    """the text of a small transformer, token by token the best"""
    model = tiny_model(5)
    tokens = [3, 1, 4]
    for _ in range(8):
        tokens.append(int(next_logits(model, tokens, NoCache()).argmax()))
    got = fn(lambda text: next_logits(model, text, NoCache()), [3, 1, 4], 8, ())
    expect_equal([int(t) for t in got], tokens[3:], "8 tokens of a small model")


chain = CHAPTER.task(
    "text_logprob",
    hints=(
        "Which row scores tokens[1]? The one that has read tokens[0] and nothing more.",
        "T rows, but only T - 1 of them score a token of the text. Which one is left over?",
        "Logits are no log-probabilities yet: each row has to be normalised over the vocabulary first.",
    ),
)


def check_chain(fn, logits: Tensor, tokens: list[int]) -> None:
    """Try the usual slips too, so that the message can name one."""
    rows = [[math.log(x) if x else -math.inf for x in oracle_softmax(row, 1)] for row in logits.tolist()]
    n = len(tokens)
    want = math.fsum(rows[i][tokens[i + 1]] for i in range(n - 1))
    got = fn(logits.clone(), list(tokens))
    label = f"a text of {n} tokens"
    slips = {
        "row i was taken for token i: it scores token i + 1": sum(rows[i][t] for i, t in enumerate(tokens)),
        "row i was taken for token i (from token 1 on): it scores token i + 1": sum(
            rows[i][tokens[i]] for i in range(1, n)
        ),
        "the logits are not normalised": sum(logits[i, tokens[i + 1]].item() for i in range(n - 1)),
        "this is the mean, not the sum": want / max(n - 1, 1),
        "this is the mean over all T tokens, not the sum": want / n,
        "the sign is wrong: log-probabilities are negative": -want,
        "this is the probability, not its logarithm": math.exp(want),
        "these are logarithms to the base 2": want / math.log(2),
    }
    for slip, value in slips.items():
        if (
            isinstance(got, float)
            and math.isclose(got, value, rel_tol=1e-6)
            and not math.isclose(got, want, rel_tol=1e-6)
        ):
            raise AssertionError(f"{label}: {slip}: yours {got:.6g}, expected {want:.6g}")
    expect_number(got, want, label)


@chain
def shifted(fn):
    """row i scores token i + 1, after log_softmax"""
    check_chain(fn, random_logits(6, 3 * 5).reshape(3, 5), [4, 0, 2])
    check_chain(fn, random_logits(7, 6 * 9).reshape(6, 9), [8, 1, 1, 3, 0, 5])


@chain
def one_token(fn):
    """a text of one token has log-probability 0"""
    check_chain(fn, random_logits(8, 4).reshape(1, 4), [2])


@chain
def improbable(fn):
    """a long and improbable text has a finite logarithm"""
    logits = random_logits(9, 400 * 7).reshape(400, 7)
    tokens = [0, *logits[:-1].argmin(-1).tolist()]
    check_chain(fn, logits, tokens)


@chain
def huge_logits(fn):
    """large logits do not overflow"""
    check_chain(fn, 1000 + random_logits(10, 4 * 6).reshape(4, 6), [0, 5, 2, 3])
    check_chain(fn, random_logits(11, 4 * 6).reshape(4, 6) - 1000, [0, 5, 2, 3])


@chain
def as_the_model_says(fn):
    """it is what a small transformer says, asked for one token at a time"""
    model, tokens = tiny_model(6), [3, 1, 4, 1, 5, 9]
    want = sum(
        next_logits(model, tokens[:i], NoCache()).log_softmax(-1)[tokens[i]].item() for i in range(1, len(tokens))
    )
    rows = model.logits(model(torch.tensor(tokens), torch.arange(len(tokens)), NoCache()))
    expect_number(fn(rows, tokens), want, "6 tokens of a small model", rtol=1e-9)
