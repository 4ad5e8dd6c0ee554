"""From figures to a verdict: the two expressions that most rows of the ledger share."""

from __future__ import annotations

from collections.abc import Mapping

from minillm.lab.claims.ledger import Verdict


def close(figure: float, stated: float, tolerance: float = 0.05) -> bool:
    """Is the figure what was stated, within a share of it? Stated numbers are rounded, often to one or two digits."""
    return abs(figure - stated) <= tolerance * abs(stated)


def decide(right: bool, always: bool = True) -> Verdict:
    """right: true where the claim's own example says it, or somewhere at least. always: true in the other cases too."""
    if not right:
        return Verdict.DOES_NOT_HOLD
    return Verdict.HOLDS if always else Verdict.HOLDS_IF


def borderline(figures: Mapping[str, float], threshold: float, within: float = 0.1) -> str:
    """A sentence that names the figures near the threshold that decides, where another run may decide otherwise."""
    near = [f"{name} ({figure:.2f})" for name, figure in figures.items() if close(figure, threshold, within)]
    return f" Borderline, within {within:.0%} of the threshold of {threshold:g}: {', '.join(near)}." if near else ""
