"""A conversation of several turns that keeps its cache.

Each turn renders the whole conversation with the model's own template. What the store already holds of it is a
prefix of the new text, so only the rest is computed: the cost of a turn does not grow with the turns before it,
apart from attention.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

from minillm.generation import Piece, stream
from minillm.kv_cache import ContiguousKV
from minillm.model import Transformer
from minillm.sampling import SamplingParams
from minillm.tokenizer import Tokenizer

MAX_KEPT = 8192  # tokens of room for the cache, where the model's own context is longer


class Chat:
    """`messages` is the conversation so far; `kv` holds the tokens `cached`."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, system: str | None = None):
        self.model, self.tokenizer = model, tokenizer
        self.messages = [{"role": "system", "content": system}] if system is not None else []
        self.kv = ContiguousKV(model.config, min(model.config.max_context, MAX_KEPT), model.dtype, model.device)
        self.cached: list[int] = []
        self.answering: Callable[[], Iterator[Piece] | None] = lambda: None  # held weakly: `break` still closes it

    def send(self, text: str, params: SamplingParams | None = None) -> Iterator[Piece]:
        """Stream the answer. The turn becomes part of the conversation when the stream ends or is closed."""
        if (left_open := self.answering()) is not None:
            left_open.close()  # two open turns would write over each other
        turn = [*self.messages, {"role": "user", "content": text}]
        prompt = self.tokenizer.encode_chat(turn)
        self.kv.truncate(min(common_prefix(self.cached, prompt), len(prompt) - 1))
        self.cached = self.cached[: self.kv.length]
        answer = stream(self.model, self.tokenizer, prompt, params, self.kv)  # refuses a conversation that is too long
        recorded = self.record(turn, prompt, answer)
        self.answering = weakref.ref(recorded)
        return recorded

    def record(self, turn: list[dict[str, str]], prompt: list[int], answer: Iterator[Piece]) -> Iterator[Piece]:
        text, tokens = "", []
        try:
            for piece in answer:
                text += piece.text
                tokens.append(piece.token)
                yield piece
        except Exception:
            turn = None  # a turn that failed did not take place
            raise
        finally:
            self.cached = (prompt + tokens)[: self.kv.length]
            if turn is not None:
                self.messages = [*turn, {"role": "assistant", "content": text}]


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many leading tokens two lists share."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
