"""Beam search: keep the few most probable texts, not one.

Greedy decoding takes the best token at each step, and may miss a text that is more probable as a whole. Beam search
extends `n_beams` texts at once and keeps the best of all extensions. Each beam has its own store, forked where one
text becomes two. With one beam it is greedy decoding; with enough beams it is exhaustive.

Graves, "Sequence Transduction with Recurrent Neural Networks" (2012); Wu et al. (2016), section 7, for a length penalty
(theirs has another form; here it is the plain power of the length).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minillm.generation import next_logits, prompt_ids
from minillm.kv_cache import ContiguousKV
from minillm.model import SequenceStore, Transformer


@dataclass(frozen=True)
class Beam:
    """A continuation, its log-probability, and its score: logprob / len(tokens) ** length_penalty."""

    tokens: list[int]
    logprob: float
    score: float


def beam_search(
    model: Transformer,
    prompt: Sequence[int],
    n_beams: int,
    max_tokens: int,
    end_ids: Sequence[int] = (),
    length_penalty: float = 1.0,
) -> list[Beam]:
    """The n_beams best continuations found, by score, best first. One ends with an end token or after `max_tokens`.

    The search is over as soon as n_beams of them have ended with an end token ("early stopping" elsewhere).
    With length_penalty 0 the score is the log-probability; with 1 its mean over the tokens.
    """
    if n_beams < 1 or max_tokens < 1:
        raise ValueError(f"n_beams and max_tokens must be at least 1, not {n_beams} and {max_tokens}")
    ids = prompt_ids(model, None, prompt)
    if len(ids) + max_tokens > model.config.max_context:
        raise ValueError(f"{len(ids)} + {max_tokens} tokens do not fit the context of {model.config.max_context}")
    store = ContiguousKV(model.config, len(ids) + max_tokens, model.dtype, model.device)
    live: list[tuple[float, list[int], SequenceStore]] = [(0.0, [], store)]
    done: list[Beam] = []

    def finish(logprob: float, tokens: list[int]) -> None:
        done.append(Beam(tokens, logprob, logprob / len(tokens) ** length_penalty))

    for _ in range(max_tokens):
        extensions = []
        for parent, (logprob, tokens, kv) in enumerate(live):
            logprobs = next_logits(model, ids + tokens, kv).log_softmax(-1)
            best = logprobs.topk(min(2 * n_beams, len(logprobs)))  # twice: half of them may end
            for token_logprob, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                extensions.append((logprob + token_logprob, parent, token))
        extensions.sort(key=lambda extension: -extension[0])
        parents, live = live, []
        for logprob, parent, token in extensions:
            _, tokens, kv = parents[parent]
            if token in end_ids:
                finish(logprob, [*tokens, token])
            else:
                live.append((logprob, [*tokens, token], kv.fork()))
            if len(live) == n_beams:
                break
        if len(done) >= n_beams or not live:
            break
    else:
        for logprob, tokens, _ in live:
            finish(logprob, tokens)
    return sorted(done, key=lambda beam: -beam.score)[:n_beams]
