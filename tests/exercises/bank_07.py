"""Answers to exercise 07, speculative sampling."""

from __future__ import annotations

import random
from itertools import takewhile

import torch
from bank import Bank

from minillm.speculative import one_hot, residual

BANK = Bank()
NUMBERS = random.Random(0)


# ---------------------------------------------------------------- accept_guess


@BANK.wrong("accept_guess", says="it looks as if every guess is accepted")
def accept_all(p, q, guess, u):
    return True


@BANK.wrong("accept_guess", says="the model can never say this token.*the border belongs to the rejected")
def border_accepted(p, q, guess, u):
    return bool(u * q[guess] <= p[guess])


@BANK.wrong("accept_guess", says="the ratio is the other way round")
def ratio_inverted(p, q, guess, u):
    return p[guess] == 0 or bool(u < q[guess] / p[guess])


@BANK.wrong("accept_guess", says="p and q are only compared, without the random number")
def compared_only(p, q, guess, u):
    return bool(p[guess] >= q[guess])


@BANK.wrong("accept_guess", says="u is compared with p alone")
def forgets_q(p, q, guess, u):
    return bool(u < p[guess])


@BANK.wrong("accept_guess", says="accepted and rejected are exchanged")
def exchanged(p, q, guess, u):
    return bool(u * q[guess] >= p[guess])


@BANK.wrong("accept_guess", says="only the model's most probable token is accepted")
def greedy_rule(p, q, guess, u):
    return int(p.argmax()) == guess


@BANK.wrong("accept_guess", says="u is compared with p - q")
def difference(p, q, guess, u):
    return bool(u < p[guess] - q[guess])


@BANK.wrong("accept_guess", says="expected True or False, got 0.5")
def the_probability(p, q, guess, u):
    return min(1.0, float(p[guess] / q[guess]))


@BANK.wrong("accept_guess", says="with the same u = 0.375; is there a second random number?")
def draws_its_own_number(p, q, guess, u):
    return NUMBERS.random() * float(q[guess]) < float(p[guess])


@BANK.right("accept_guess")
def with_a_ratio(p, q, guess, u):
    return u < min(1.0, (p[guess] / q[guess]).item())


@BANK.right("accept_guess")
def in_two_cases(p, q, guess, u):
    if p[guess] >= q[guess]:
        return True
    return p[guess] / q[guess] > u


# ---------------------------------------------------------------- residual_distribution


def full(q, guess, p):
    return one_hot(guess, p) if q is None else q


@BANK.wrong("residual_distribution", says="yours is p itself: tokens that q proposes too often would come twice")
def no_residual(p, q, guess):
    return p


@BANK.wrong("residual_distribution", says=r"max\(0, p - q\) without the division by its sum")
def not_normalised(p, q, guess):
    return (p - full(q, guess, p)).clamp(min=0)


@BANK.wrong("residual_distribution", says="negative entries: nothing is clamped")
def not_clamped(p, q, guess):
    return p - full(q, guess, p)


@BANK.wrong("residual_distribution", says=r"p - q\| divided by its sum: entries below 0 have to be 0")
def absolute(p, q, guess):
    rest = (p - full(q, guess, p)).abs()
    return rest / rest.sum() if rest.sum() > 0 else p


@BANK.wrong("residual_distribution", says="the other way round")
def exchanged_rows(p, q, guess):
    return residual(full(q, guess, p), p)


@BANK.wrong("residual_distribution", says="p = q.*NaN at index 0: nothing is missing of p")
def nan_if_equal(p, q, guess):
    rest = (p - full(q, guess, p)).clamp(min=0)
    return rest / rest.sum()


@BANK.wrong("residual_distribution", says="p = q.*expected p: nothing is missing of p")
def zeros_if_equal(p, q, guess):
    rest = (p - full(q, guess, p)).clamp(min=0)
    return rest / rest.sum().clamp(min=1e-30)


@BANK.wrong(
    "residual_distribution",
    says="nearly equal.*the entries add up to 0.9.*is .*, the sum of what is missing, all that you divide by",
)
def an_epsilon(p, q, guess):
    if q is not None and torch.equal(p, q):
        return p
    rest = (p - full(q, guess, p)).clamp(min=0)
    return rest / (rest.sum() + 1e-8) if rest.sum() > 0 else p


@BANK.wrong("residual_distribution", says="p without the guess, divided by its sum: that is right for a certain guess")
def only_the_guess_removed(p, q, guess):
    return residual(p, one_hot(guess, p))


@BANK.wrong("residual_distribution", says=r"a softmax of max\(0, p - q\)")
def softmax_instead(p, q, guess):
    return (p - full(q, guess, p)).clamp(min=0).softmax(-1)


@BANK.wrong("residual_distribution", says="a certain guess.*TypeError")
def none_forgotten(p, q, guess):
    return residual(p, q)


@BANK.wrong("residual_distribution", says="a certain guess.*p itself")
def none_means_no_residual(p, q, guess):
    return p if q is None else residual(p, q)


@BANK.wrong("residual_distribution", says="your function changed a row that it was given")
def in_place(p, q, guess):
    return residual(p.sub_(full(q, guess, p)).clamp_(min=0), torch.zeros_like(p))


@BANK.wrong("residual_distribution", says="token .8. has 0, expected .*: is a rule used a second time")
def filtered_again(p, q, guess):
    rest = residual(p, full(q, guess, p))
    return residual(rest.where(rest > 0.07, 0), torch.zeros_like(p))


@BANK.wrong("residual_distribution", says=r"shape \[\], expected \[3\]")
def of_the_guess_alone(p, q, guess):
    return (p[guess] - full(q, guess, p)[guess]).clamp(min=0)


@BANK.wrong("residual_distribution", says="dtype torch.float32, expected torch.float64")
def another_dtype(p, q, guess):
    return residual(p, full(q, guess, p)).float()


@BANK.right("residual_distribution")
def entry_by_entry(p, q, guess):
    rest = torch.zeros_like(p)
    for x in range(len(p)):
        if q is not None:
            rest[x] = max(0.0, float(p[x] - q[x]))
        elif x != guess:
            rest[x] = p[x]
    return rest.div(rest.sum()) if rest.sum() != 0 else p.clone()


@BANK.right("residual_distribution")
def what_both_have_taken_away(p, q, guess):
    rest = p - torch.minimum(p, full(q, guess, p))
    return p if torch.count_nonzero(rest) == 0 else rest / rest.sum()


# ---------------------------------------------------------------- verify_round


def q_row(q, guesses, i, p):
    return one_hot(guesses[i], p[0]) if q is None else q[i]


def a_round(guesses, p, q, uniform, draw, judge=None, rest=residual, bonus=None):
    """The round, with parts that can be exchanged. judge: the rows that guesses are judged by."""
    tokens = []
    for i, guess in enumerate(guesses):
        proposed = q_row(q, guesses, i, p)
        if uniform() * proposed[guess] >= (p if judge is None else judge)[i][guess]:
            return [*tokens, draw(rest(p[i], proposed))]
        tokens.append(guess)
    return [*tokens, draw(p[-1] if bonus is None else bonus)]


@BANK.wrong("verify_round", says="all guesses are accepted.*the bonus is missing")
def gives_the_guesses(guesses, p, q, uniform, draw):
    return guesses


@BANK.wrong("verify_round", says="0 of 3 guesses are accepted.*it looks as if every guess were accepted")
def accepts_all(guesses, p, q, uniform, draw):
    return [*guesses, draw(p[-1])]


@BANK.wrong("verify_round", says="drawn from row 3 of p, ends the round; the bonus is missing")
def no_bonus(guesses, p, q, uniform, draw):
    return a_round(guesses, p, q, uniform, draw)[: max(1, len(guesses))]


@BANK.wrong("verify_round", says="2 tokens were drawn; .*no bonus, and nothing after it")
def bonus_after_a_rejection(guesses, p, q, uniform, draw):
    tokens = a_round(guesses, p, q, uniform, draw)
    n = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(tokens, guesses, strict=False))))
    return [*tokens, draw(p[-1])] if n < len(guesses) else tokens


@BANK.wrong("verify_round", says="the first guess is rejected.*no bonus, and nothing after it")
def goes_on_after_a_rejection(guesses, p, q, uniform, draw):
    tokens = []
    for i, guess in enumerate(guesses):
        proposed = q_row(q, guesses, i, p)
        right = uniform() * proposed[guess] < p[i][guess]
        tokens.append(guess if right else draw(residual(p[i], proposed)))
    return [*tokens, draw(p[-1])]


@BANK.wrong("verify_round", says="yours goes on to .* with guesses made after a token that is not there")
def later_guesses_stay(guesses, p, q, uniform, draw):
    tokens = a_round(guesses, p, q, uniform, draw)
    return tokens + guesses[len(tokens) :]


@BANK.wrong("verify_round", says="yours, .0., ends with the rejected guess itself")
def the_rejected_guess_stays(guesses, p, q, uniform, draw):
    tokens = []
    for i, guess in enumerate(guesses):
        tokens.append(guess)
        if uniform() * q_row(q, guesses, i, p)[guess] >= p[i][guess]:
            return tokens
    return [*tokens, draw(p[-1])]


@BANK.wrong("verify_round", says="the first guess is rejected.*no token came out; a round gives at least one")
def accepted_guesses_only(guesses, p, q, uniform, draw):
    tokens = []
    for i, guess in enumerate(guesses):
        if uniform() * q_row(q, guesses, i, p)[guess] >= p[i][guess]:
            return tokens
        tokens.append(guess)
    return [*tokens, draw(p[-1])]


@BANK.wrong("verify_round", says=r"yours are \[2, 0\]: the first token is lost")
def the_first_token_is_lost(guesses, p, q, uniform, draw):
    tokens = a_round(guesses, p, q, uniform, draw)
    return tokens[1:] if len(tokens) > 1 else tokens


@BANK.wrong("verify_round", says="it looks as if guess i were judged by row i . 1 of p")
def judged_by_the_next_row(guesses, p, q, uniform, draw):
    return a_round(guesses, p, q, uniform, draw, judge=p[1:])


@BANK.wrong("verify_round", says="it looks as if guess i were judged by row i - 1")
def judged_by_the_row_before(guesses, p, q, uniform, draw):
    return a_round(guesses, p, q, uniform, draw, judge=torch.cat([p[:1], p]))


@BANK.wrong("verify_round", says="row 0 of p itself, and not what is missing of it")
def drawn_from_p(guesses, p, q, uniform, draw):
    return a_round(guesses, p, q, uniform, draw, rest=lambda p, q: p)


@BANK.wrong("verify_round", says=r"that is max\(0, p - q\), without the division by its sum")
def drawn_without_a_division(guesses, p, q, uniform, draw):
    return a_round(guesses, p, q, uniform, draw, rest=lambda p, q: (p - q).clamp(min=0))


@BANK.wrong("verify_round", says="the bonus is drawn from .*: that is row 2 of p")
def bonus_from_the_row_before(guesses, p, q, uniform, draw):
    return a_round(guesses, p, q, uniform, draw, bonus=p[len(guesses) - 1])


@BANK.wrong(
    "verify_round", says="3 judged guesses that p and q leave open, and 1 random number: each needs one of its own"
)
def one_random_number(guesses, p, q, uniform, draw):
    u = uniform()
    return a_round(guesses, p, q, lambda: u, draw)


@BANK.wrong("verify_round", says="the bonus.*yours, .*, was chosen without `draw`")
def most_probable_instead(guesses, p, q, uniform, draw):
    return a_round(guesses, p, q, uniform, lambda row: int(row.argmax()))


@BANK.wrong("verify_round", says="q is None.*TypeError")
def none_not_known(guesses, p, q, uniform, draw):
    tokens = []
    for i, guess in enumerate(guesses):
        if uniform() * q[i][guess] >= p[i][guess]:
            return [*tokens, draw(residual(p[i], q[i]))]
        tokens.append(guess)
    return [*tokens, draw(p[-1])]


@BANK.wrong("verify_round", says="q is None.*it looks as if every guess were accepted")
def certain_guesses_pass(guesses, p, q, uniform, draw):
    return [*guesses, draw(p[-1])] if q is None else a_round(guesses, p, q, uniform, draw)


@BANK.wrong("verify_round", says="every way through a round.*a text begins with .* and the model gives")
def a_second_chance(guesses, p, q, uniform, draw):
    return a_round(guesses, p, q, lambda: min(uniform(), uniform()), draw)


@BANK.wrong("verify_round", says="p and q were only compared, without a random number")
def accepted_by_comparison(guesses, p, q, uniform, draw):
    return a_round(guesses, p, q, lambda: float(uniform() >= 0) or 1.0, draw)


@BANK.right("verify_round")
def all_numbers_first(guesses, p, q, uniform, draw):
    numbers = [uniform() for _ in guesses]
    q = torch.stack([one_hot(g, p[0]) for g in guesses]) if q is None and guesses else q
    n = 0
    while n < len(guesses) and numbers[n] < p[n, guesses[n]] / q[n, guesses[n]]:
        n += 1
    last = p[n] if n == len(guesses) else residual(p[n], q[n])
    return [*guesses[:n], draw(last)]


@BANK.right("verify_round")
def no_number_where_p_is_larger(guesses, p, q, uniform, draw):
    tokens = []
    for i, guess in enumerate(guesses):
        proposed = 1.0 if q is None else float(q[i, guess])
        if p[i, guess] < proposed and uniform() >= p[i, guess] / proposed:
            rest = p[i].clone()
            if q is None:
                rest[guess] = 0
            else:
                rest = torch.maximum(rest - q[i], torch.zeros_like(rest))
            tokens.append(draw(rest / rest.sum()))
            return tokens
        tokens.append(guess)
    tokens.append(draw(p[len(guesses)]))
    return tokens


# ---------------------------------------------------------------- look_up


def search(tokens, sizes, count, last=True, overlap=True):
    for n in sizes:
        at = [i for i in range(len(tokens) - n) if tokens[i : i + n] == tokens[-n:]]
        at = [i for i in at if overlap or i + 2 * n <= len(tokens)]
        if at:
            start = at[-1 if last else 0] + n
            return tokens[start : start + count]
    return []


def down(most):
    return range(most, 0, -1)


@BANK.wrong("look_up", says="if the last tokens are found at the end itself, where nothing follows")
def finds_itself(tokens, most, count):
    for n in down(most):
        for at in range(len(tokens) - n, -1, -1):
            if tokens[at : at + n] == tokens[-n:]:
                return tokens[at + n : at + n + count]
    return []


@BANK.wrong("look_up", says="yours is what followed the first place; the last one, nearest to the end, is wanted")
def the_first_place(tokens, most, count):
    return search(tokens, down(most), count, last=False)


@BANK.wrong("look_up", says="yours is what follows a single token; a longer match, if there is one, goes first")
def one_token_only(tokens, most, count):
    return search(tokens, [1], count)


@BANK.wrong("look_up", says="if no shorter match is tried")
def the_longest_only(tokens, most, count):
    return search(tokens, [most], count)


@BANK.wrong("look_up", says="the matched tokens themselves, and not what follows them")
def the_match_itself(tokens, most, count):
    for n in down(most):
        for at in range(len(tokens) - n - 1, -1, -1):
            if tokens[at : at + n] == tokens[-n:]:
                return tokens[at : at + count]
    return []


@BANK.wrong("look_up", says="IndexError: list index out of range")
def beyond_the_end(tokens, most, count):
    for n in down(most):
        for at in range(len(tokens) - n - 1, -1, -1):
            if tokens[at : at + n] == tokens[-n:]:
                return [tokens[at + n + i] for i in range(count)]
    return []


@BANK.wrong("look_up", says="the guess padded to `count`")
def padded(tokens, most, count):
    found = search(tokens, down(most), count)
    return found + found[-1:] * (count - len(found))


@BANK.wrong("look_up", says="more than `count`: the text up to its end")
def no_limit(tokens, most, count):
    return search(tokens, down(most), len(tokens))


@BANK.wrong("look_up", says="a place that does not touch the last tokens; it may overlap them")
def no_overlap(tokens, most, count):
    return search(tokens, down(most), count, overlap=False)


@BANK.wrong("look_up", says="one token too few")
def one_too_few(tokens, most, count):
    return search(tokens, down(most), count - 1)


@BANK.wrong("look_up", says="without its first token")
def skips_one(tokens, most, count):
    return search(tokens, down(most), count + 1)[1:]


@BANK.right("look_up")
def by_lists_of_places(tokens, most, count):
    return search(tokens, down(most), count)


@BANK.right("look_up")
def by_the_longest_common_end(tokens, most, count):
    best, best_length = 0, 0
    for end in range(1, len(tokens)):
        length = 0
        while length < min(most, end) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length and length >= best_length:
            best, best_length = end, length
    return tokens[best : best + count] if best_length else []


# ---------------------------------------------------------------- rewind_draft


def same_start(cached, tokens):
    n = 0
    while n < min(len(cached), len(tokens)) and cached[n] == tokens[n]:
        n += 1
    return n


@BANK.wrong("rewind_draft", says="row 4 was computed for token 11, and the text has 20 there: it is stale")
def nothing_is_forgotten(cached, tokens):
    keep = min(len(cached), len(tokens) - 1)
    return len(cached), tokens[keep:]


@BANK.wrong("rewind_draft", says="row 4 was computed for token 11, and the text has 20 there: it is stale")
def one_row_too_many(cached, tokens):
    keep = min(same_start(cached, tokens) + 1, len(cached))
    return keep, tokens[keep:] or tokens[-1:]


@BANK.wrong("rewind_draft", says="are in the cache, and would be computed again")
def one_row_too_few(cached, tokens):
    keep = max(0, min(same_start(cached, tokens), len(tokens) - 1) - 1)
    return keep, tokens[keep:]


@BANK.wrong("rewind_draft", says="are in the cache, and would be computed again")
def starts_anew(cached, tokens):
    return 0, list(tokens)


@BANK.wrong("rewind_draft", says="no token is left to feed: the last one goes in again")
def all_kept(cached, tokens):
    keep = same_start(cached, tokens)
    return keep, tokens[keep:]


@BANK.wrong("rewind_draft", says=r"\[30\] to feed, expected \[12, 30\]: the cache would have no row for \[12\]")
def only_the_last_goes_in(cached, tokens):
    return min(same_start(cached, tokens), len(tokens) - 1), tokens[-1:]


@BANK.wrong("rewind_draft", says="tokens that agree again.*it is stale")
def counts_all_that_agree(cached, tokens):
    keep = sum(a == b for a, b in zip(cached, tokens[:-1], strict=False))
    return keep, tokens[keep:]


@BANK.wrong("rewind_draft", says="the first of them are in the cache already")
def feeds_everything(cached, tokens):
    return min(same_start(cached, tokens), len(tokens) - 1), list(tokens)


@BANK.wrong("rewind_draft", says="no token to feed, expected")
def feeds_nothing_but_new_ones(cached, tokens):
    same = same_start(cached, tokens)
    return min(same, len(tokens) - 1), tokens[same:]


@BANK.wrong("rewind_draft", says="your function changed a list that it was given")
def cuts_the_cache(cached, tokens):
    keep = min(same_start(cached, tokens), len(tokens) - 1)
    del cached[keep:]
    return keep, tokens[keep:]


@BANK.right("rewind_draft")
def with_a_loop(cached, tokens):
    keep = min(same_start(cached, tokens), len(tokens) - 1)
    return keep, tokens[keep:]


@BANK.right("rewind_draft")
def by_slices(cached, tokens):
    keep = max(n for n in range(min(len(cached), len(tokens) - 1) + 1) if cached[:n] == tokens[:n])
    return keep, [*tokens[keep:]]


# ---------------------------------------------------------------- draft_gain


def gained(tokens, cost):
    return tokens, tokens / cost


def per_round(alpha, k):
    return sum(alpha**i for i in range(k + 1))


@BANK.wrong("draft_gain", says="tokens a round.*with k terms: the token that the model adds itself is missing")
def k_terms(alpha, k, cost_draft, cost_verify):
    return gained(sum(alpha**i for i in range(k)), k * cost_draft + cost_verify)


@BANK.wrong("draft_gain", says="tokens a round.*with accepted guesses only")
def accepted_ones_only(alpha, k, cost_draft, cost_verify):
    return gained(per_round(alpha, k) - 1, k * cost_draft + cost_verify)


@BANK.wrong("draft_gain", says="alpha = 1.*a division by zero; at alpha = 1 every guess is accepted")
def closed_form_only(alpha, k, cost_draft, cost_verify):
    return gained((1 - alpha ** (k + 1)) / (1 - alpha), k * cost_draft + cost_verify)


@BANK.wrong("draft_gain", says="if guesses after a rejection counted too")
def guesses_on_their_own(alpha, k, cost_draft, cost_verify):
    return gained(1 + k * alpha, k * cost_draft + cost_verify)


@BANK.wrong("draft_gain", says="if either all guesses were accepted or none")
def all_or_none(alpha, k, cost_draft, cost_verify):
    return gained(1 + k * alpha**k, k * cost_draft + cost_verify)


@BANK.wrong("draft_gain", says="if the guesses were never cut off at k")
def without_an_end(alpha, k, cost_draft, cost_verify):
    return gained(1 / (1 - alpha), k * cost_draft + cost_verify)


@BANK.wrong("draft_gain", says="times as fast.*without the cost of the guesses")
def guesses_for_nothing(alpha, k, cost_draft, cost_verify):
    return gained(per_round(alpha, k), cost_verify)


@BANK.wrong("draft_gain", says="times as fast.*with the cost of one guess only")
def one_guess_paid(alpha, k, cost_draft, cost_verify):
    return gained(per_round(alpha, k), cost_draft + cost_verify)


@BANK.wrong("draft_gain", says="a verification that costs no more than a plain step")
def verification_for_a_step(alpha, k, cost_draft, cost_verify):
    return gained(per_round(alpha, k), k * cost_draft + 1)


@BANK.wrong("draft_gain", says="the other way round: cost over tokens")
def upside_down(alpha, k, cost_draft, cost_verify):
    tokens = per_round(alpha, k)
    return tokens, (k * cost_draft + cost_verify) / tokens


@BANK.wrong("draft_gain", says="with a verification for each guess: one pass verifies all")
def verified_one_by_one(alpha, k, cost_draft, cost_verify):
    return gained(per_round(alpha, k), k * (cost_draft + cost_verify) or cost_verify)


@BANK.right("draft_gain")
def closed_form(alpha, k, cost_draft, cost_verify):
    tokens = k + 1 if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)
    return gained(tokens, k * cost_draft + cost_verify)


@BANK.right("draft_gain")
def by_horner(alpha, k, cost_draft, cost_verify):
    tokens = 1.0
    for _ in range(k):
        tokens = 1 + alpha * tokens
    return gained(tokens, cost_verify + cost_draft * k)
