"""Go through the ledger: measure or reuse, judge, print."""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules

from tqdm import tqdm

from minillm.lab import claims as package
from minillm.lab import machine
from minillm.lab.claims.ledger import SOURCES, Claim, Figures, Finding
from minillm.lab.claims.workbench import Workbench
from minillm.lab.stored import read_stored

STORED = "claims.json"


@dataclass(frozen=True)
class Row:
    """A claim and what was found. stored: the machine and date of figures that were not measured now."""

    claim: Claim
    figures: Figures
    finding: Finding
    stored: str | None = None


def all_claims() -> dict[str, Claim]:
    """Every row, from the files that begin with a_ (arithmetic), b_ (algorithms) and c_ (speed)."""
    names = [module.name for module in iter_modules(package.__path__) if module.name[1] == "_"]
    modules = [import_module(f"{package.__name__}.{name}") for name in names]
    found = {id: claim for module in modules for id, claim in module.ledger.claims.items()}
    return dict(sorted(found.items(), key=lambda entry: (entry[0][0], int(entry[0][1:]))))


def examine(claims: Iterable[Claim], bench: Workbench, progress: bool = True) -> list[Row]:
    known = {} if bench.fresh else stored_figures()
    return [examine_one(claim, bench, known) for claim in tqdm(list(claims), "claims", disable=not progress)]


def examine_one(claim: Claim, bench: Workbench, known: Mapping) -> Row:
    if claim.measure is None:
        return Row(claim, {}, claim.judge())
    if claim.slow and claim.id in known.get("figures", {}):
        figures = known["figures"][claim.id]
        return Row(claim, figures, claim.judge(figures), f"{known['machine']}, {known['date']}")
    figures = claim.measure(bench)
    return Row(claim, figures, claim.judge(figures))


def choose(ids: Sequence[str] | None) -> list[Claim]:
    """The claims with these ids; all of them, if none is given."""
    claims = all_claims()
    unknown = [id for id in ids or () if id.upper() not in claims]
    if unknown:
        raise ValueError(f"there is no claim {unknown[0]!r}; the ids are {', '.join(claims)}")
    return [claims[id.upper()] for id in ids] if ids else [*claims.values()]


def stored_figures() -> dict:
    """Figures of slow claims from a full run, with its machine and date; empty if there was none yet."""
    run = read_stored(STORED)
    if not run:
        return {}
    figures = {row["id"]: row["figures"] for row in run["claims"]}
    return {"machine": machine.one_line(run["machine"]), "date": run["date"], "figures": figures}


def as_json(rows: Sequence[Row], described: Mapping[str, object], quick: bool) -> dict[str, object]:
    claims = [
        {
            "id": row.claim.id,
            "claim": row.claim.text,
            "figure": row.finding.figure,
            "unit": row.finding.unit,
            "verdict": row.finding.verdict.value,
            "condition": row.finding.condition,
            "notebook": row.claim.notebook,
            "scope": row.claim.scope,
            "sources": list(row.claim.sources),
            "stored": row.stored,
            "figures": dict(row.figures),
        }
        for row in rows
    ]
    return {
        "machine": dict(described),
        "date": machine.today(),
        "quick": quick,
        "source_titles": dict(SOURCES),
        "claims": claims,
    }


def number(finding: Finding) -> str:
    """The figure with its unit, as a reader would write it."""
    if finding.figure is None:
        return "no figure"
    digits = f"{finding.figure:,.0f}" if abs(finding.figure) >= 1000 else f"{finding.figure:.3g}"
    return f"{digits} {finding.unit}".strip()


def report(rows: Sequence[Row], width: int = 110) -> str:
    key = "\n".join(["Sources:", *(f"    {source}  {printable(title)}" for source, title in SOURCES.items())])
    return "\n\n".join([*(paragraph(row, width) for row in rows), summary(rows), key])


def printable(text: str) -> str:
    """As standard output can hold it: a pipe or an old console may know no Chinese."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def paragraph(row: Row, width: int) -> str:
    claim, finding = row.claim, row.finding
    where = f"Notebook {claim.notebook}; {claim.scope}" + (f"; stored figures of {row.stored}" if row.stored else "")
    lines = [
        f"{claim.id}  {finding.verdict.value.upper()}  {number(finding)}",
        f'"{claim.text}" ({", ".join(claim.sources)})',
        finding.condition,
        where + ".",
    ]
    head, *rest = lines
    return "\n".join(
        [head, *(textwrap.fill(line, width, initial_indent="    ", subsequent_indent="    ") for line in rest)]
    )


def summary(rows: Sequence[Row]) -> str:
    counts = Counter(row.finding.verdict.value for row in rows)
    return f"{len(rows)} claims: " + ", ".join(f"{n} {verdict!r}" for verdict, n in counts.most_common()) + "."
