"""The form of the ledger: claims, what was found about each, and how that is printed.

A claim is measured first and judged afterwards. `measure` gives plain figures, which can be stored and read again.
`judge` looks at the figures alone and says what becomes of the claim. So no verdict is typed by hand: other figures
give another verdict. A claim that is pure arithmetic has nothing to measure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from minillm.lab.claims.workbench import Workbench

SOURCES = {
    "T1": "大模型推理的三维本质：原理解析与工程实践",  # noqa: RUF001
    "T2": "LLM Inference (survey notes)",
    "T3": "大模型推理机制深度解析：从架构到优化的完整链路",  # noqa: RUF001
    "T4": "大模型推理与部署入门",
}
ARITHMETIC = "any machine, by arithmetic"
ALGORITHM = "any machine, by running it"
THIS_MACHINE = "this machine"

Figures = Mapping[str, object]  # as JSON can hold them


class Verdict(str, Enum):
    HOLDS = "holds"
    HOLDS_IF = "holds if"
    DOES_NOT_HOLD = "does not hold"
    NOT_TESTABLE = "not testable here"


@dataclass(frozen=True)
class Finding:
    """figure, unit: the number that decides. condition: when it holds, or why it does not and what is right."""

    figure: float | None
    unit: str
    verdict: Verdict
    condition: str

    def __post_init__(self) -> None:
        if self.figure is None and self.verdict is not Verdict.NOT_TESTABLE:
            raise ValueError(f"a claim that {self.verdict.value!r} needs a figure")
        if self.figure is not None and not math.isfinite(self.figure):
            raise ValueError(f"a figure must be a finite number, not {self.figure}")
        if not self.condition.strip():
            raise ValueError("say under which condition, or why")


@dataclass(frozen=True)
class Claim:
    """notebook: the lecture that shows it. slow: worth reusing a stored measurement for."""

    id: str
    sources: tuple[str, ...]
    text: str
    scope: str
    notebook: str
    judge: Callable[..., Finding]
    measure: Callable[[Workbench], Figures] | None = None
    slow: bool = False


class Ledger:
    """Claims in the order in which they were entered."""

    def __init__(self) -> None:
        self.claims: dict[str, Claim] = {}

    def claim(
        self,
        id: str,
        sources: str,
        text: str,
        notebook: str,
        scope: str = ARITHMETIC,
        measure: Callable[[Workbench], Figures] | None = None,
        slow: bool = False,
    ) -> Callable[[Callable[..., Finding]], Callable[..., Finding]]:
        """Enter a claim. Decorates its judge, which takes the figures of `measure`, or nothing where there is none."""

        def enter(judge: Callable[..., Finding]) -> Callable[..., Finding]:
            assert id not in self.claims and set(sources.split()) <= SOURCES.keys() and (measure or not slow)
            entry = Claim(id, tuple(sources.split()), text, scope, notebook, judge, measure, slow)
            self.claims[id] = entry
            return judge

        return enter
