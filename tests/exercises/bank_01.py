"""Answers to exercise 01, autoregression."""

from __future__ import annotations

import torch
from bank import Bank

BANK = Bank()


# ---------------------------------------------------------------- softmax_with_temperature


@BANK.wrong("softmax_with_temperature", says=r"NaN at index \[0\]; did exp overflow")
def exp_of_large_logits(logits, temperature):
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).to(logits.dtype)
    weights = (logits / temperature).exp()
    return weights / weights.sum()


@BANK.wrong("softmax_with_temperature", says="temperature 0 puts everything on the best token.*NaN")
def divides_by_zero(logits, temperature):
    return (logits / temperature).softmax(-1)


@BANK.wrong("softmax_with_temperature", says="below 1 sharper, above 1 flatter")
def multiplies(logits, temperature):
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).to(logits.dtype)
    return (logits * temperature).softmax(-1)


@BANK.wrong("softmax_with_temperature", says="below 1 sharper, above 1 flatter")
def divides_the_probabilities(logits, temperature):
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).to(logits.dtype)
    weights = logits.softmax(-1) / temperature
    return weights / weights.sum()


@BANK.wrong(
    "softmax_with_temperature", says="temperature 0 puts everything on the best token.*yours 0.077.*, expected 0"
)
def zero_means_one(logits, temperature):
    return (logits / (temperature or 1.0)).softmax(-1)


@BANK.wrong("softmax_with_temperature", says="temperature 0 puts everything on the best token.*dtype torch.int64")
def one_hot_of_integers(logits, temperature):
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits))
    return (logits / temperature).softmax(-1)


@BANK.wrong("softmax_with_temperature", says="changed its input at index 0")
def divides_in_place(logits, temperature):
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).to(logits.dtype)
    logits /= temperature
    return logits.softmax(-1)


@BANK.wrong("softmax_with_temperature", says=r"-inf gets probability 0.*NaN at index")
def forgets_that_infinity_times_zero_is_nan(logits, temperature):
    if temperature == 0:
        weights = (logits == logits.max()).to(logits.dtype)
        return weights * logits / logits.max()
    return (logits / temperature).softmax(-1)


@BANK.right("softmax_with_temperature")
def with_torchs_softmax(logits, temperature):
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).to(logits.dtype)
    return ((logits - logits.max()) / temperature).softmax(-1)


@BANK.right("softmax_with_temperature")
def by_logsumexp(logits, temperature):
    if temperature == 0:
        result = torch.zeros_like(logits)
        result[logits.argmax()] = 1
        return result
    scaled = logits / temperature
    return (scaled - scaled.logsumexp(-1)).exp()


# ---------------------------------------------------------------- keep_best_k


@BANK.wrong("keep_best_k", says="exactly k: .*keeps tokens .*token 3 should be -inf")
def threshold_keeps_equals(logits, k):
    if k == 0:
        return logits
    smallest = logits.topk(min(k, len(logits))).values[-1]
    return logits.masked_fill(logits < smallest, -torch.inf)


@BANK.wrong("keep_best_k", says="k = 0 is off.*keeps no token at all")
def zero_keeps_nothing(logits, k):
    best = logits.sort(descending=True, stable=True).indices[:k]
    return torch.full_like(logits, -torch.inf).scatter(0, best, logits[best])


@BANK.wrong("keep_best_k", says="token 0 should be -inf")
def zeros_instead_of_infinity(logits, k):
    if k == 0:
        return logits
    best = logits.sort(descending=True, stable=True).indices[:k]
    return torch.zeros_like(logits).scatter(0, best, logits[best])


@BANK.wrong("keep_best_k", says="k = 2 of 4: drops token 1, the best one")
def keeps_the_worst(logits, k):
    if k == 0:
        return logits
    best = logits.sort(stable=True).indices[:k]
    return torch.full_like(logits, -torch.inf).scatter(0, best, logits[best])


@BANK.wrong("keep_best_k", says="larger.*RuntimeError.*out of range")
def k_larger_than_the_vocabulary(logits, k):
    if k == 0:
        return logits
    best = logits.sort(descending=True, stable=True).indices[: logits.topk(k).indices.numel()]
    return torch.full_like(logits, -torch.inf).scatter(0, best, logits[best])


@BANK.wrong("keep_best_k", says="shape \\[2\\], expected \\[4\\]")
def only_the_survivors(logits, k):
    return logits.topk(k).values if k else logits


@BANK.wrong("keep_best_k", says="the logit of token 1 stays as it was: 4, yours 1")
def writes_them_back_at_the_front(logits, k):
    if k == 0:
        return logits
    best = logits.sort(descending=True, stable=True)
    result = torch.full_like(logits, -torch.inf)
    result[best.indices[:k]] = logits[:k]
    return result


@BANK.wrong("keep_best_k", says="changed its input")
def cuts_in_place(logits, k):
    if k:
        logits[logits.sort(descending=True, stable=True).indices[k:]] = -torch.inf
    return logits


@BANK.right("keep_best_k")
def mask_of_ranks(logits, k):
    ranks = logits.sort(descending=True, stable=True).indices.argsort()
    return logits.masked_fill(ranks >= (k or len(logits)), -torch.inf)


@BANK.right("keep_best_k")
def with_python_lists(logits, k):
    if k == 0:
        return logits.clone()
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i].item(), i))
    result = logits.clone()
    result[ranked[k:]] = -torch.inf
    return result


# ---------------------------------------------------------------- keep_nucleus


def nucleus(logits, p, drop):
    """The usual frame; `drop` says from the sorted probabilities which go."""
    if p == 1:
        return logits
    probabilities, order = logits.softmax(-1).sort(descending=True, stable=True)
    result = logits.clone()
    result[order[drop(probabilities)]] = -torch.inf
    return result


@BANK.wrong(
    "keep_nucleus",
    says=r"p = 0.7 .*keeps tokens \[1\], expected .*: token 2 should stay .the token that reaches p is missing",
)
def without_the_crossing_token(logits, p):
    def drop(probabilities):
        gone = probabilities.cumsum(-1) > p
        gone[0] = False
        return gone

    return nucleus(logits, p, drop)


@BANK.wrong("keep_nucleus", says="p = 0.5 .*keeps no token at all; the best one must stay")
def shifts_but_forgets_the_first(logits, p):
    def drop(probabilities):
        gone = probabilities.cumsum(-1) > p
        gone[1:] = gone[:-1].clone()
        return gone

    return nucleus(logits, p, drop)


@BANK.wrong("keep_nucleus", says="a sum that is exactly p is enough.*token 2 should be -inf")
def one_more_when_exactly_reached(logits, p):
    return nucleus(logits, p, lambda x: x.cumsum(-1) - x > p)


@BANK.wrong("keep_nucleus", says="p = 1 is off, even where rounding.*should stay")
def one_is_not_off(logits, p):
    probabilities, order = logits.softmax(-1).sort(descending=True, stable=True)
    drop = probabilities.cumsum(-1) - probabilities >= p
    return logits.scatter(0, order[drop], -torch.inf)


@BANK.wrong("keep_nucleus", says="were places in the sorted row taken for token ids")
def forgets_to_sort_back(logits, p):
    if p == 1:
        return logits
    probabilities = logits.softmax(-1).sort(descending=True, stable=True).values
    return logits.masked_fill(probabilities.cumsum(-1) - probabilities >= p, -torch.inf)


@BANK.wrong("keep_nucleus", says="was it added up from the least probable on")
def from_the_least_probable(logits, p):
    if p == 1:
        return logits
    probabilities, order = logits.softmax(-1).sort(stable=True)
    return logits.scatter(0, order[probabilities.cumsum(-1) - probabilities >= p], -torch.inf)


@BANK.wrong("keep_nucleus", says="was exp.logits. added up without being normalised")
def exponentials_not_normalised(logits, p):
    if p == 1:
        return logits
    weights, order = logits.exp().sort(descending=True, stable=True)
    return logits.scatter(0, order[weights.cumsum(-1) - weights >= p], -torch.inf)


@BANK.wrong("keep_nucleus", says="changed its input")
def nucleus_in_place(logits, p):
    if p < 1:
        probabilities, order = logits.softmax(-1).sort(descending=True, stable=True)
        logits[order[probabilities.cumsum(-1) - probabilities >= p]] = -torch.inf
    return logits


@BANK.right("keep_nucleus")
def token_by_token(logits, p):
    if p == 1:
        return logits.clone()
    probabilities = logits.double().softmax(-1).tolist()
    result, total = torch.full_like(logits, -torch.inf), 0.0
    for token in sorted(range(len(logits)), key=lambda i: (-probabilities[i], i)):
        if total >= p:
            break
        result[token] = logits[token]
        total += probabilities[token]
    return result


@BANK.right("keep_nucleus")
def by_counting(logits, p):
    if p == 1:
        return logits
    probabilities, order = logits.softmax(-1).sort(descending=True, stable=True)
    count = int((probabilities.cumsum(-1) < p).sum()) + 1
    return torch.full_like(logits, -torch.inf).scatter(0, order[:count], logits[order[:count]])


# ---------------------------------------------------------------- penalize_repeats


@BANK.wrong("penalize_repeats", says="negative logit is multiplied.*token 1 occurs 1 times: yours -2, expected -8")
def divides_everything(logits, tokens, penalty):
    result = logits.clone()
    seen = sorted(set(tokens))
    result[seen] = result[seen] / penalty
    return result


@BANK.wrong("penalize_repeats", says="however often it occurs.*token 0 occurs 3 times: yours 0.5, expected 2")
def once_for_each_occurrence(logits, tokens, penalty):
    result = logits.clone()
    for token in tokens:
        result[token] = result[token] / penalty if result[token] > 0 else result[token] * penalty
    return result


@BANK.wrong(
    "penalize_repeats", says="token 0 occurs 1 times: yours 2, expected 2|yours 1.7, expected 2.3|yours -6, exp"
)
def subtracts(logits, tokens, penalty):
    result = logits.clone()
    result[sorted(set(tokens))] -= penalty
    return result


@BANK.wrong("penalize_repeats", says="token 1 does not occur: yours 1.5, expected 3")
def penalizes_all_tokens(logits, tokens, penalty):
    return torch.where(logits > 0, logits / penalty, logits * penalty)


@BANK.wrong("penalize_repeats", says="token 0 occurs 1 times: yours 8, expected 2")
def the_wrong_way_round(logits, tokens, penalty):
    result = logits.clone()
    for token in set(tokens):
        result[token] = result[token] * penalty if result[token] > 0 else result[token] / penalty
    return result


@BANK.wrong("penalize_repeats", says="changed its input")
def penalizes_in_place(logits, tokens, penalty):
    for token in set(tokens):
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    return logits


@BANK.wrong("penalize_repeats", says="empty text.*IndexError")
def cannot_take_an_empty_text(logits, tokens, penalty):
    seen = torch.tensor(tokens).unique()
    result = logits.clone()
    result[seen] = torch.where(result[seen] > 0, result[seen] / penalty, result[seen] * penalty)
    return result


@BANK.right("penalize_repeats")
def with_a_mask(logits, tokens, penalty):
    seen = torch.zeros(len(logits), dtype=torch.bool)
    seen[list(tokens)] = True
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


@BANK.right("penalize_repeats")
def smaller_of_the_two(logits, tokens, penalty):
    result = logits.clone()
    ids = torch.tensor(list(tokens), dtype=torch.long)
    result[ids] = torch.minimum(logits[ids] / penalty, logits[ids] * penalty)
    return result


# ---------------------------------------------------------------- generate_greedy


def best(scores, tokens):
    return int(scores(tokens).argmax())


@BANK.wrong("generate_greedy", says=r"max_tokens=3, .*4 new tokens \[3, 4, 5, 6\], expected 3")
def one_token_too_late(scores, prompt, max_tokens, end_ids):
    tokens = list(prompt)
    while True:
        tokens.append(best(scores, tokens))
        if tokens[-1] in end_ids or len(tokens) - len(prompt) > max_tokens:
            return tokens[len(prompt) :]


@BANK.wrong("generate_greedy", says=r"max_tokens = 0 gives none.*1 new tokens \[3\], expected 0")
def writes_before_it_looks(scores, prompt, max_tokens, end_ids):
    tokens = list(prompt)
    while True:
        tokens.append(best(scores, tokens))
        if tokens[-1] in end_ids or len(tokens) - len(prompt) >= max_tokens:
            return tokens[len(prompt) :]


@BANK.wrong("generate_greedy", says="max_tokens new tokens, neither more nor fewer.*1 new tokens .*expected 3")
def counts_the_prompt(scores, prompt, max_tokens, end_ids):
    tokens = list(prompt)
    while len(tokens) < max_tokens:
        tokens.append(best(scores, tokens))
        if tokens[-1] in end_ids:
            break
    return tokens[len(prompt) :]


@BANK.wrong("generate_greedy", says=r"after \[6\].*several|after \[6\], max_tokens=10.*expected 3: \[7, 8, 9\]")
def knows_only_the_first_end(scores, prompt, max_tokens, end_ids):
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(best(scores, tokens))
        if end_ids and tokens[-1] == end_ids[0]:
            break
    return tokens[len(prompt) :]


@BANK.wrong("generate_greedy", says=r"is its last token.*2 new tokens \[3, 4\], expected 3")
def leaves_the_end_token_out(scores, prompt, max_tokens, end_ids):
    tokens = list(prompt)
    for _ in range(max_tokens):
        token = best(scores, tokens)
        if token in end_ids:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


@BANK.wrong("generate_greedy", says="an end token in the prompt does not end anything.*0 new tokens")
def stopped_by_the_prompt(scores, prompt, max_tokens, end_ids):
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens and tokens[-1] not in end_ids:
        tokens.append(best(scores, tokens))
    return tokens[len(prompt) :]


@BANK.wrong("generate_greedy", says=r"call 2 of scores: asked with \[3\], expected \[1, 2, 3\]")
def asks_with_the_last_token_only(scores, prompt, max_tokens, end_ids):
    new, out = list(prompt), []
    while len(out) < max_tokens:
        new = [best(scores, new)]
        out += new
        if new[0] in end_ids:
            break
    return out


@BANK.wrong("generate_greedy", says=r"the prompt is \[1, 2, 3, 4, 5\] after the call")
def grows_the_prompt(scores, prompt, max_tokens, end_ids):
    start = len(prompt)
    for _ in range(max_tokens):
        prompt.append(best(scores, prompt))
        if prompt[-1] in end_ids:
            break
    return prompt[start:]


@BANK.wrong("generate_greedy", says=r"5 new tokens \[1, 2, 3, 4, 5\], expected 3")
def gives_the_prompt_too(scores, prompt, max_tokens, end_ids):
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(best(scores, tokens))
        if tokens[-1] in end_ids:
            break
    return tokens


@BANK.wrong("generate_greedy", says="called more than 100 times: the loop does not stop")
def ignores_the_count(scores, prompt, max_tokens, end_ids):
    tokens = list(prompt)
    while tokens[-1] not in end_ids or len(tokens) == len(prompt):
        tokens.append(best(scores, tokens))
    return tokens[len(prompt) :]


@BANK.wrong("generate_greedy", says="calls of scores for 3 tokens: yours 4, expected 3")
def asks_once_too_often(scores, prompt, max_tokens, end_ids):
    tokens = list(prompt)
    logits = scores(tokens)
    for _ in range(max_tokens):
        tokens.append(int(logits.argmax()))
        if tokens[-1] in end_ids:
            break
        logits = scores(tokens)
    return tokens[len(prompt) :]


@BANK.right("generate_greedy")
def with_a_for(scores, prompt, max_tokens, end_ids):
    out = []
    for _ in range(max_tokens):
        out.append(best(scores, prompt + out))
        if out[-1] in end_ids:
            return out
    return out


@BANK.right("generate_greedy")
def by_recursion(scores, prompt, max_tokens, end_ids):
    if max_tokens == 0:
        return []
    token = best(scores, prompt)
    rest = [] if token in end_ids else by_recursion(scores, [*prompt, token], max_tokens - 1, end_ids)
    return [token, *rest]


# ---------------------------------------------------------------- text_logprob


@BANK.wrong("text_logprob", says="row i was taken for token i: it scores token i . 1")
def not_shifted(logits, tokens):
    return sum(logits.log_softmax(-1)[i, token].item() for i, token in enumerate(tokens))


@BANK.wrong("text_logprob", says=r"row i was taken for token i \(from token 1 on\)")
def not_shifted_without_the_first(logits, tokens):
    return sum(logits.log_softmax(-1)[i, tokens[i]].item() for i in range(1, len(tokens)))


@BANK.wrong("text_logprob", says="the logits are not normalised")
def adds_logits(logits, tokens):
    return sum(logits[i, tokens[i + 1]].item() for i in range(len(tokens) - 1))


@BANK.wrong("text_logprob", says="this is the mean, not the sum")
def takes_the_mean(logits, tokens):
    picked = logits.log_softmax(-1)[torch.arange(len(tokens) - 1), tokens[1:]]
    return picked.mean().item()


@BANK.wrong("text_logprob", says="the sign is wrong")
def gives_a_loss(logits, tokens):
    return torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]), reduction="sum").item()


@BANK.wrong("text_logprob", says="this is the probability, not its logarithm")
def multiplies_probabilities(logits, tokens):
    product = 1.0
    for i in range(len(tokens) - 1):
        product *= logits.softmax(-1)[i, tokens[i + 1]].item()
    return product


@BANK.wrong("text_logprob", says="long and improbable text has a finite logarithm.*yours -inf")
def logarithm_of_the_product(logits, tokens):
    picked = logits.softmax(-1)[torch.arange(len(tokens) - 1), tokens[1:]]
    return picked.prod().log().item()


@BANK.wrong("text_logprob", says="large logits do not overflow.*(nan|inf)")
def exponentials_overflow(logits, tokens):
    weights = logits.exp()
    logprobs = weights.log() - weights.sum(-1, keepdim=True).log()
    return sum(logprobs[i, tokens[i + 1]].item() for i in range(len(tokens) - 1))


@BANK.right("text_logprob")
def with_gather(logits, tokens):
    targets = torch.tensor(tokens[1:], dtype=torch.long)
    return logits[:-1].log_softmax(-1).gather(1, targets[:, None]).sum().item()


@BANK.right("text_logprob")
def with_cross_entropy(logits, tokens):
    return -torch.nn.functional.cross_entropy(
        logits[:-1], torch.tensor(tokens[1:], dtype=torch.long), reduction="sum"
    ).item()
