"""Stage 1: the loop. Ask for scores, choose a token, append it, ask again.

A language model gives the probability of the next token after those so far; a text's probability is the product of
these (the chain rule), so text is written one token at a time. `next_logits` feeds the model all tokens that the
store does not hold yet: with `NoCache` that is the whole text at every step, with `ContiguousKV` the prompt once
(prefill) and then one token a step (decode). The loop is the same.

Bengio et al., "A Neural Probabilistic Language Model" (2003), section 1.
"""

from __future__ import annotations

import operator
import sys
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minillm.kv_cache import ContiguousKV
from minillm.model import SequenceStore, Transformer
from minillm.sampling import SamplingParams, new_generator, sample, top_logprobs
from minillm.stopping import StopStrings
from minillm.tokenizer import Detokenizer, Tokenizer


@dataclass(frozen=True)
class Piece:
    """One generated token. `text` is what it lets us show now: none while a character or a stop string may be half
    done. `seconds` since the call. `finish_reason` is set on the last piece."""

    token: int
    text: str
    seconds: float
    finish_reason: str | None = None
    logprob: float | None = None
    top_logprobs: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Generation:
    """A finished text. `tokens` includes an end token that ended it; `text` shows neither that nor a stop string.

    finish_reason: "stop" (an end token or a stop string), "length" (max_tokens), or "context" (the model's context
    or the store is full).
    """

    prompt: list[int]
    tokens: list[int]
    text: str
    finish_reason: str
    seconds: list[float]
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None


@torch.inference_mode()
def next_logits(model: Transformer, tokens: Sequence[int], kv: SequenceStore) -> Tensor:
    """Scores for the token after `tokens`. Feeds what `kv` does not hold, and keeps it there. -> [vocab_size]"""
    new = torch.tensor(tokens[kv.length :], device=model.device)
    positions = torch.arange(kv.length, len(tokens), device=model.device)
    hidden = model(new, positions, kv)
    kv.commit(len(new))
    return model.logits(hidden[-1:])[0]


def stream(
    model: Transformer,
    tokenizer: Tokenizer | None,
    prompt: str | Sequence[int],
    params: SamplingParams | None = None,
    kv: SequenceStore | None = None,
) -> Iterator[Piece]:
    """Generate token by token. Mistakes raise ValueError at the call, not at the first token.

    prompt: text, or token ids (then tokenizer may be None, and no text comes out).
    kv: the store to use; `NoCache()` recomputes everything; None makes a `ContiguousKV` of the size needed. A store
        that already holds the first tokens of the prompt goes on from there. That they are the same tokens is the
        caller's word; `kv.truncate(0)` starts anew.
    """
    start = time.perf_counter()
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params must be SamplingParams, not {type(params).__name__}")
    ids = prompt_ids(model, tokenizer, prompt)
    if params.stop and tokenizer is None:
        raise ValueError("stop strings need a tokenizer")
    if any(not 0 <= token < model.config.vocab_size for token in params.stop_ids):
        raise ValueError(f"stop_ids {params.stop_ids} must be token ids from 0 to {model.config.vocab_size - 1}")
    if kv is None:
        kv = ContiguousKV(model.config, room(model, ids, params), model.dtype, model.device)
    limit = min(model.config.max_context, getattr(kv, "capacity", sys.maxsize))
    if len(ids) > limit:
        raise ValueError(f"the prompt has {len(ids)} tokens; the context ends at {limit}")
    if kv.length >= len(ids):
        raise ValueError(f"the store holds {kv.length} tokens, and the prompt has only {len(ids)}: nothing to compute")
    return pieces(model, tokenizer, ids, params, kv, kv.length, limit, start)


def pieces(
    model: Transformer,
    tokenizer: Tokenizer | None,
    prompt: list[int],
    params: SamplingParams,
    kv: SequenceStore,
    held: int,
    limit: int,
    start: float,
) -> Iterator[Piece]:
    """The loop itself, behind the checks of `stream`. held: tokens in the store; another number means another user."""
    own_ends = tokenizer.end_ids if tokenizer and not params.ignore_eos else ()
    end_ids = sorted({*own_ends, *params.stop_ids})
    generator = new_generator(params)
    detokenizer = Detokenizer(tokenizer) if tokenizer else None
    stop_strings = StopStrings(params.stop)
    tokens, finish_reason = list(prompt), None
    while finish_reason is None and len(tokens) < min(limit, len(prompt) + params.max_tokens):
        if kv.length != held:
            raise ValueError("the store was used for another text meanwhile; each stream needs a store of its own")
        logits = next_logits(model, tokens, kv)
        held = kv.length
        output = tokens[len(prompt) :]
        token = sample(logits, params, generator, prompt, output, end_ids)
        tokens.append(token)
        n = len(output) + 1

        text = "" if detokenizer is None or token in end_ids else detokenizer.add(token)
        text, stopped = stop_strings.add(text, armed=n > params.min_tokens)
        if stopped or token in end_ids:
            finish_reason = "stop"
        elif n == params.max_tokens:
            finish_reason = "length"
        elif len(tokens) == limit:
            finish_reason = "context"
        if finish_reason and not stopped:
            rest, _ = stop_strings.add(detokenizer.finish() if detokenizer else "", armed=False)
            text += rest
        chosen, best = (None, {}) if params.logprobs is None else top_logprobs(logits, token, params.logprobs)
        yield Piece(token, text, time.perf_counter() - start, finish_reason, chosen, best)


def generate(
    model: Transformer,
    tokenizer: Tokenizer | None,
    prompt: str | Sequence[int],
    params: SamplingParams | None = None,
    kv: SequenceStore | None = None,
) -> Generation:
    """Generate to the end. The arguments are those of `stream`."""
    params = params or SamplingParams()
    ids = prompt_ids(model, tokenizer, prompt)
    done = list(stream(model, tokenizer, ids, params, kv))
    at_once = "length" if params.max_tokens == 0 else "context"  # why there is not a single piece
    return Generation(
        prompt=ids,
        tokens=[piece.token for piece in done],
        text="".join(piece.text for piece in done),
        finish_reason=done[-1].finish_reason if done else at_once,
        seconds=[piece.seconds for piece in done],
        logprobs=None if params.logprobs is None else [piece.logprob for piece in done],
        top_logprobs=None if params.logprobs is None else [piece.top_logprobs for piece in done],
    )


def prompt_ids(model: Transformer, tokenizer: Tokenizer | None, prompt: str | Sequence[int]) -> list[int]:
    """Token ids of a prompt given as text or as ids; at least one."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("a prompt in text needs a tokenizer; without one, give token ids")
        ids = tokenizer.encode(prompt)
    else:
        if isinstance(prompt, (bytes, Mapping, Set)):
            raise ValueError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")
        try:
            ids = [operator.index(i) for i in prompt]  # takes NumPy's and PyTorch's whole numbers too
        except TypeError:
            raise ValueError(f"a prompt is text or a list of token ids (whole numbers), not {prompt!r}") from None
        if not all(0 <= i < model.config.vocab_size for i in ids):
            raise ValueError(f"a prompt of ids must be whole numbers from 0 to {model.config.vocab_size - 1}")
    if not ids:
        raise ValueError("the prompt is empty: there is no token to continue")
    return ids


def room(model: Transformer, prompt: list[int], params: SamplingParams) -> int:
    """Tokens that a store needs for this request."""
    return min(len(prompt) + params.max_tokens, model.config.max_context)
