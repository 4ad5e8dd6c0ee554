"""From figures to a verdict: the two expressions that most rows of the ledger share."""

from __future__ import annotations

from minillm.lab.claims.ledger import Verdict


def close(figure: float, stated: float, tolerance: float = 0.05) -> bool:
    """Is the figure what was stated, within a share of it? Stated numbers are rounded, often to one or two digits."""
    return abs(figure - stated) <= tolerance * abs(stated)


def decide(right: bool, always: bool = True) -> Verdict:
    """right: true where the claim's own example says it, or somewhere at least. always: true in the other cases too."""
    if not right:
        return Verdict.DOES_NOT_HOLD
    return Verdict.HOLDS if always else Verdict.HOLDS_IF
