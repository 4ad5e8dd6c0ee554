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

import torch
from torch import Tensor

from minillm.kv_cache import ContiguousKV
from minillm.model import SequenceStore, Transformer
from minillm.sampling import SamplingParams
from minillm.tokenizer import Tokenizer
from minillm.writing import Generation, Piece, Writer


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
    writer, kv = begin(model, tokenizer, prompt, params, kv)
    return pieces(model, writer, kv, kv.length, start)


def begin(
    model: Transformer,
    tokenizer: Tokenizer | None,
    prompt: str | Sequence[int],
    params: SamplingParams | None,
    kv: SequenceStore | None,
) -> tuple[Writer, SequenceStore]:
    """Check what `stream` is given. -> the text that is to be written, and its store"""
    writer = new_writer(model, tokenizer, prompt, params, getattr(kv, "capacity", sys.maxsize))
    if kv is None:
        kv = ContiguousKV(model.config, writer.limit, model.dtype, model.device)
    n = len(writer.prompt)
    if kv.length >= n:
        raise ValueError(f"the store holds {kv.length} tokens, and the prompt has only {n}: nothing to compute")
    return writer, kv


def new_writer(
    model: Transformer,
    tokenizer: Tokenizer | None,
    prompt: str | Sequence[int],
    params: SamplingParams | None,
    capacity: int = sys.maxsize,
) -> Writer:
    """A text that can be written with room for `capacity` tokens, or ValueError with what is wrong with it."""
    params = SamplingParams() if params is None else params
    ids = prompt_ids(model, tokenizer, prompt)
    require_params(model, tokenizer, params)
    limit = min(model.config.max_context, capacity)
    if len(ids) > limit:
        raise ValueError(f"the prompt has {len(ids)} tokens; the context ends at {limit}")
    return Writer(tokenizer, ids, params, min(limit, room(model, ids, params)))


def pieces(model: Transformer, writer: Writer, kv: SequenceStore, held: int, start: float) -> Iterator[Piece]:
    """The loop itself, behind the checks of `stream`. held: the store's length; another number later means another
    user."""
    while writer.finish_reason is None:
        if kv.length != held:
            raise ValueError("the store was used for another text meanwhile; each stream needs a store of its own")
        logits = next_logits(model, writer.tokens, kv)
        held = kv.length
        yield writer.write(logits, time.perf_counter() - start)


def generate(
    model: Transformer,
    tokenizer: Tokenizer | None,
    prompt: str | Sequence[int],
    params: SamplingParams | None = None,
    kv: SequenceStore | None = None,
) -> Generation:
    """Generate to the end. The arguments are those of `stream`."""
    start = time.perf_counter()
    writer, kv = begin(model, tokenizer, prompt, params, kv)
    done = list(pieces(model, writer, kv, kv.length, start))
    return Generation.of(writer, done, writer.finish_reason)


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


def require_params(model: Transformer, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
    """Refuse what this model and tokenizer cannot do."""
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params must be SamplingParams, not {type(params).__name__}")
    if params.stop and tokenizer is None:
        raise ValueError("stop strings need a tokenizer")
    if any(not 0 <= token < model.config.vocab_size for token in params.stop_ids):
        raise ValueError(f"stop_ids {params.stop_ids} must be token ids from 0 to {model.config.vocab_size - 1}")


def room(model: Transformer, prompt: list[int], params: SamplingParams) -> int:
    """Tokens that a store needs for this request."""
    return min(len(prompt) + params.max_tokens, model.config.max_context)
