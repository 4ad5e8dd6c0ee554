"""From a row of logits to the next piece of one text: choose a token, decide whether the text ends, hand out the text.

Whoever runs the model, a loop for one text or an engine for many, has one `Writer` a text. It owns what belongs to that
text alone: its tokens, its random numbers, its half-finished characters and stop strings. So a text does not depend on
what else is being written at the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from minillm.sampling import SamplingParams, distribution, new_generator, sample, top_logprobs
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

    finish_reason: "stop" (an end token or a stop string), "length" (max_tokens), "context" (the model's context or the
    store is full), or, from an engine only, "abort" (the caller gave it up) and "error" (no token could be chosen).
    """

    prompt: list[int]
    tokens: list[int]
    text: str
    finish_reason: str
    seconds: list[float]
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None

    @classmethod
    def of(cls, writer: Writer, pieces: Sequence[Piece], reason: str) -> Generation:
        """Put the pieces of a text together."""
        wanted = writer.params.logprobs is not None
        return cls(
            prompt=list(writer.prompt),
            tokens=[piece.token for piece in pieces],
            text="".join(piece.text for piece in pieces),
            finish_reason=reason,
            seconds=[piece.seconds for piece in pieces],
            logprobs=[piece.logprob for piece in pieces] if wanted else None,
            top_logprobs=[piece.top_logprobs for piece in pieces] if wanted else None,
        )


class Writer:
    """One text in the making. `tokens`: the prompt and what was generated. `limit`: the longest it may become."""

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int], params: SamplingParams, limit: int):
        own_ends = tokenizer.end_ids if tokenizer and not params.ignore_eos else ()
        self.end_ids = sorted({*own_ends, *params.stop_ids})
        self.prompt, self.tokens, self.params, self.limit = list(prompt), list(prompt), params, limit
        self.generator = new_generator(params)
        self.detokenizer = Detokenizer(tokenizer) if tokenizer else None
        self.stop_strings = StopStrings(params.stop)
        self.finish_reason = "length" if params.max_tokens == 0 else "context" if len(prompt) >= limit else None

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def left(self) -> int:
        """Tokens that may still be written."""
        return min(self.limit, len(self.prompt) + self.params.max_tokens) - len(self.tokens)

    def write(self, logits: Tensor, seconds: float = 0.0) -> Piece:
        """Choose the next token from `logits` [vocab_size] and append it."""
        return self.take(self.choose(logits), logits, seconds)

    def choose(self, logits: Tensor, guesses: Sequence[int] = ()) -> int:
        """Draw the token after the text so far and `guesses` (stage 7: tokens that may follow it)."""
        return sample(logits, self.params, self.generator, self.prompt, [*self.output, *guesses], self.end_ids)

    def distribution(self, logits: Tensor, guesses: Sequence[int] = ()) -> Tensor:
        """What `choose` draws from. -> [vocab_size]"""
        return distribution(logits, self.params, self.prompt, [*self.output, *guesses], self.end_ids)

    def take(self, token: int, logits: Tensor, seconds: float = 0.0) -> Piece:
        """Append a token that was chosen from `logits`."""
        text = self.append(token)
        chosen, best = None, {}
        if self.params.logprobs is not None:
            chosen, best = top_logprobs(logits, token, self.params.logprobs)
        return Piece(token, text, seconds, self.finish_reason, chosen, best)

    def append(self, token: int) -> str:
        """Take a token in, set `finish_reason` if it is the last. -> the text to show now"""
        self.tokens.append(token)
        n = len(self.tokens) - len(self.prompt)
        text = "" if self.detokenizer is None or token in self.end_ids else self.detokenizer.add(token)
        text, stopped = self.stop_strings.add(text, armed=n > self.params.min_tokens)
        if stopped or token in self.end_ids:
            self.finish_reason = "stop"
        elif n == self.params.max_tokens:
            self.finish_reason = "length"
        elif len(self.tokens) == self.limit:
            self.finish_reason = "context"
        if self.finish_reason and not stopped:
            rest, _ = self.stop_strings.add(self.detokenizer.finish() if self.detokenizer else "", armed=False)
            text += rest
        return text
