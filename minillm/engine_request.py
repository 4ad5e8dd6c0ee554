"""A request of the engine: what the scheduler needs to know (`Request`), the text itself (`Writer`), and its times."""

from __future__ import annotations

from minillm.request import Request
from minillm.speculative import Proposal
from minillm.writing import Generation, Piece, Writer


class EngineRequest(Request):
    """A request as its caller sees it: what is written so far, when, and why it ended.

    arrival, admitted: seconds on the engine's clock. pieces: as `stream` gives them, their `seconds` since arrival.
    """

    def __init__(self, writer: Writer, priority: int, arrival: float):
        super().__init__(writer.tokens, writer.limit, priority, arrival)
        self.writer = writer
        self.pieces: list[Piece] = []
        self.proposal = Proposal()  # where the guesses in `draft` came from
        self.admitted: float | None = None
        self.finish_reason = writer.finish_reason
        self.error: str | None = None  # the sentence, where finish_reason is "error"

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token; NaN before it."""
        return self.pieces[0].seconds if self.pieces else float("nan")

    @property
    def tpot(self) -> float:
        """Mean seconds between tokens; NaN with fewer than two."""
        n = len(self.pieces)
        return (self.pieces[-1].seconds - self.pieces[0].seconds) / (n - 1) if n > 1 else float("nan")

    @property
    def queue_time(self) -> float:
        """Seconds from arrival to the first step that it took part in; NaN before it."""
        return float("nan") if self.admitted is None else self.admitted - self.arrival

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were found in the cache, and not computed."""
        return self.num_cached or 0

    @property
    def generation(self) -> Generation:
        """What is written so far, in the form of `minillm.generate`."""
        return Generation.of(self.writer, self.pieces, self.finish_reason or "unfinished")
