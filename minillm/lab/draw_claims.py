"""A picture of the ledger: what became of the claims, by the kind of test that decides them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from matplotlib.ticker import MaxNLocator

from minillm.lab.claims.ledger import Verdict
from minillm.lab.claims.run import Row
from minillm.lab.plots import BLUE, GREEN, INK, RED, WHITE, YELLOW, Kind, Picture, picture

GROUPS = {"A": "arithmetic", "B": "algorithms", "C": "speed and memory"}
LOOKS = {
    Verdict.HOLDS: Kind("holds", GREEN, "///"),
    Verdict.HOLDS_IF: Kind("holds if", BLUE),
    Verdict.DOES_NOT_HOLD: Kind("does not hold", RED, "xxx"),
    Verdict.NOT_TESTABLE: Kind("not testable here", YELLOW, "..."),
}


def draw_verdicts(rows: Sequence[Row]) -> Picture:
    """A bar for each group of claims, divided by verdict."""
    counts = {letter: Counter(r.finding.verdict for r in rows if r.claim.id[0] == letter) for letter in GROUPS}
    plain = sum(r.finding.verdict is Verdict.HOLDS for r in rows)
    title = f"{plain} of {len(rows)} claims hold as they are stated"
    said = "; ".join(
        f"{GROUPS[letter]}: " + ", ".join(f"{count[v]} {look.label}" for v, look in LOOKS.items() if count[v])
        for letter, count in counts.items()
    )
    figure, axes = picture(8.5, 2.8, title, f"Bars divided by verdict. {said}.")
    for verdict, look in LOOKS.items():
        left = [
            sum(count[v] for v in LOOKS if list(LOOKS).index(v) < list(LOOKS).index(verdict))
            for count in counts.values()
        ]
        bars = axes.barh(
            range(len(GROUPS)), [count[verdict] for count in counts.values()], left=left, height=0.6,
            color=look.color, hatch=look.hatch, edgecolor=WHITE, label=look.label,
        )  # fmt: skip
        texts = [str(count[verdict] or "") for count in counts.values()]
        for label in axes.bar_label(bars, texts, label_type="center", color=INK):
            label.set_bbox({"facecolor": WHITE, "edgecolor": "none", "pad": 1} if label.get_text() else None)
    axes.set_yticks(range(len(GROUPS)), [f"{letter}: {name}" for letter, name in GROUPS.items()])
    axes.invert_yaxis()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("claims")
    figure.legend(loc="outside lower center", ncols=len(LOOKS), frameon=False, fontsize=9)
    return figure


def draw_formats(values: Mapping[str, Sequence[float]]) -> Picture:
    """values: by format, the positive numbers that it can write. On a logarithmic axis an even grid gets denser to the
    right, a floating one is equally dense everywhere."""
    counts = {name: sum(1 <= x < 2 for x in numbers) for name, numbers in values.items()}
    title = "Numbers from 1 to 2: " + ", ".join(f"{name} has {n}" for name, n in counts.items())
    said = "; ".join(f"{name} from {min(v):.3g} to {max(v):,.0f}" for name, v in values.items())
    figure, axes = picture(9, 0.8 + 0.6 * len(values), title, f"Marks on a logarithmic axis, one a number. {said}.")
    axes.eventplot(list(values.values()), linelengths=0.6, linewidths=0.8, colors=INK)
    axes.set_xscale("log", base=2)
    axes.set_yticks(range(len(values)), values)
    axes.invert_yaxis()
    axes.set_xlabel("positive numbers that can be written (INT8: in steps of its scale)")
    return figure
