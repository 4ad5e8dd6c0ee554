"""Stop strings: end the text at a string that may arrive in parts, and never show any of it.

A stop string can straddle tokens. Text is let through only when it can no longer be the beginning of one.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Hands text on as soon as it is sure that no stop string begins in it."""

    def __init__(self, stop: Sequence[str]):
        self.stop = tuple(stop)
        self.held = ""

    def add(self, text: str, armed: bool = True) -> tuple[str, bool]:
        """-> (text to show now, whether a stop string was found). Not `armed`: let everything through."""
        self.held += text
        if not armed:
            return self.release(len(self.held)), False
        found = [at for at in (self.held.find(s) for s in self.stop) if at >= 0]
        if found:
            return self.release(min(found)), True
        return self.release(len(self.held) - self.could_begin()), False

    def could_begin(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(s) - 1 for s in self.stop), default=0)
        for length in range(min(longest, len(self.held)), 0, -1):
            if any(s.startswith(self.held[-length:]) for s in self.stop):
                return length
        return 0

    def release(self, length: int) -> str:
        shown, self.held = self.held[:length], self.held[length:]
        return shown
