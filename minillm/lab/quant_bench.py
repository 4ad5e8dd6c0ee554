"""What does quantization cost, and what does it bring? The sweep over methods, bits, groups; and speed by batch size.

Quality is quality.py's. Speed is that of a step of the model, the formats in turn.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

import torch
from tabulate import tabulate
from tqdm import tqdm

from minillm.lab.bench import alternate
from minillm.lab.commands import QUANT_PARTS
from minillm.lab.perplexity import WINDOW, split
from minillm.lab.quality import Quality, layer_kl, method_seconds
from minillm.lab.results import Results
from minillm.lab.speculative_bench import step_seconds
from minillm.lab.workload import read_json
from minillm.linear import Linear
from minillm.model import Transformer
from minillm.quantize import Grid
from minillm.quantized_model import METHODS, quantize
from minillm.tokenizer import Tokenizer

SENSITIVE = Grid(3, 64)  # for a layer at a time: with 4 bits there is little to see
SPEED_GRIDS = {"4 bits": Grid(4, 64), "8 bits": Grid(8, None, symmetric=True)}
HEAD = Grid(8, 32, symmetric=True)  # of the embedding and the head, for speed


@dataclass(frozen=True)
class Case:
    """full: on the whole text; for the others its first windows must do."""

    method: str
    grid: Grid
    full: bool = False

    @property
    def name(self) -> str:
        group = f"groups of {self.grid.group}" if self.grid.group else "rows"
        return f"{self.method}, {self.grid.bits} bits, {group}{', symmetric' if self.grid.symmetric else ''}"


def cases() -> list[Case]:
    """All methods where they differ. In 4 bits and groups of 32 rounding loses nothing of weights from a Q4_1 file."""
    found = [Case(method, grid, True) for grid in (Grid(4, 64), Grid(4, None), Grid(3, 64)) for method in METHODS]
    found += [Case(method, grid) for grid in (Grid(3, 32), Grid(3, None)) for method in METHODS]
    found += [Case(method, Grid(2, 64)) for method in ("rtn", "gptq")]
    rounded = (Grid(4, 32), Grid(4, 64, symmetric=True), Grid(8, 64), Grid(8, None))
    return found + [Case("rtn", grid) for grid in rounded]


QUICK = [Case("rtn", Grid(4, 64), True), Case("gptq", Grid(4, 64), True), Case("rtn", Grid(8, 64), True)]


def sweep(
    model: Transformer, tokenizer: Tokenizer, machine: Mapping[str, object],
    quick: bool = False, file: str | None = None, only: Sequence[str] = QUANT_PARTS,
) -> Results:  # fmt: skip
    raw = read_json("quality", quick)
    text = split(tokenizer, raw["predicted"], raw["calibration"]).describe()
    pinned = hashlib.sha256(json.dumps(raw).encode()).hexdigest()  # sizes and questions: others are other results
    results = Results(machine, text | {"workload": pinned}, file)
    quality = cache(lambda: Quality(model, tokenizer, raw))  # not made where all rows are known
    if "quality" in only:
        results.row("reference", reference, quality)
        for case in tqdm(QUICK if quick else cases(), "quality", leave=False):
            results.row(case.name, judged, quality, case)
    if "methods" in only:
        results.row("methods", seconds_of_methods, quality, raw["repeats"])
    if "layers" in only:
        results.row("layers", sensitivity, model, tokenizer, raw["layer_windows"])
    if "speed" in only:
        models = cache(lambda: formats(model))
        for batch in tqdm(raw["batches"], "speed", leave=False):
            results.row(f"speed, batch {batch}", speed, models, batch, raw["context"], raw["repeats"])
    return results


def reference(quality: Callable[[], Quality]) -> dict[str, object]:
    return {"kind": "quality", "method": "none", **quality().reference()}


def judged(quality: Callable[[], Quality], case: Case) -> dict[str, object]:
    grid = case.grid
    about = {"method": case.method, "bits": grid.bits, "group": grid.group, "symmetric": grid.symmetric}
    return {"kind": "quality", **about, **quality().measure(case.method, grid, case.full)}


def seconds_of_methods(quality: Callable[[], Quality], repeats: int) -> dict[str, object]:
    measured = method_seconds(quality().model, quality().hessians, Grid(4, 64), repeats=repeats)
    return {"kind": "methods"} | {name: runs.median(float) for name, runs in measured.items()}


def sensitivity(model: Transformer, tokenizer: Tokenizer, windows: int) -> dict[str, object]:
    tokens = split(tokenizer, WINDOW * windows, 0).evaluation
    about = {"kind": "layers", "bits": SENSITIVE.bits, "group": SENSITIVE.group}
    return about | {"kl": layer_kl(model, tokens, SENSITIVE)}


def formats(model: Transformer) -> dict[str, Transformer]:
    """The same model in each format. The quantized ones compute products in bfloat16, and all else in float32."""
    packed = copy.deepcopy(model).prepare(packed=True)  # a second copy of the matrices, which serves large batches
    found = {"float32": model, "float32 packed": packed, "bfloat16": copy.deepcopy(model).to(torch.bfloat16).prepare()}
    for name, grid in SPEED_GRIDS.items():
        found[name] = quantize(copy.deepcopy(model), grid, compute=torch.bfloat16, head=HEAD).prepare()
    return found


def speed(models: Callable[[], Mapping[str, Transformer]], batch: int, context: int, repeats: int) -> dict[str, object]:
    """Seconds of a step that gives each of `batch` texts a token, and each format's times as fast as float32."""

    def step(model: Transformer) -> Callable[[], float]:
        return lambda: step_seconds(model, context, batch, 1, repeats=3)

    measured = alternate({name: step(model) for name, model in models().items()}, repeats, progress=False)
    base = measured["float32"].runs
    ratios = {name: [b / s for b, s in zip(base, found.runs, strict=True)] for name, found in measured.items()}
    return {
        "kind": "speed",
        "batch": batch,
        "seconds": {name: found.median(float) for name, found in measured.items()},
        "speedup": {name: median(found) for name, found in ratios.items()},
        "bytes": {name: bytes_of(model) for name, model in models().items()},
        "spread": {name: (min(found), max(found)) for name, found in ratios.items()},
    }


def bytes_of(model: Transformer) -> int:
    """Of its parameters and buffers, each piece of memory once, and of packed copies."""
    storages = [tensor.untyped_storage() for tensor in [*model.parameters(), *model.buffers()]]
    second = [layer.weight for layer in model.modules() if isinstance(layer, Linear) and layer.packed is not None]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values()) + sum(weight.nbytes for weight in second)


def report(results: Results, style: str = "simple") -> str:
    """The tables of all parts that there are."""
    parts = [quality_table(results.of("quality"), style), speed_table(results.of("speed"), style)]
    for row in results.of("methods"):
        parts.append(f"Quantizing the first block: AWQ {row['awq']:.1f} s, GPTQ {row['gptq']:.1f} s.")
    for row in results.of("layers"):
        order = sorted(range(len(row["kl"])), key=lambda i: -row["kl"][i])
        worst = ", ".join(f"{i} ({row['kl'][i]:.4f})" for i in order[:5])
        parts.append(f"One layer alone at {row['bits']} bits, the most sensitive by KL: {worst}.")
    return "\n\n".join(part for part in parts if part)


def caption(results: Results) -> str:
    text = results.head["text"]
    return (
        f"Text: Python's language reference, {text['tokens']} tokens, SHA-256 {text['sha256'][:12]}; "
        f"{text['calibration']} tokens of it, from its end, for calibration. Nats a token above the model as it was "
        "loaded; after +- the standard error, by windows. KL: on the first windows. In brackets: nats of an answer."
    )


def quality_table(rows: Sequence[dict], style: str = "simple") -> str:
    head = ["method", "tokens", "perplexity", "nats above", "KL", "MB", "bits a weight", "recall", "arithmetic"]
    body = [
        [
            row["name"], row["tokens"], f"{row['perplexity']:.3f}",
            f"{row['nats_above']:+.4f} +- {row['standard_error']:.4f}", f"{row['kl']:.4f}", f"{row['bytes'] / 1e6:.1f}",
            f"{row['bits_a_weight']:.2f}", f"{row['recall']:.0%} ({row['recall_nats']:.2f})",
            f"{row['arithmetic']:.0%} ({row['arithmetic_nats']:.2f})",
        ]
        for row in rows
    ]  # fmt: skip
    return tabulate(body, headers=head, tablefmt=style, disable_numparse=True) if rows else ""


def speed_table(rows: Sequence[dict], style: str = "simple") -> str:
    if not rows:
        return ""
    names = [*rows[0]["seconds"]]
    head = ["batch", *(f"{name}, {rows[0]['bytes'][name] / 1e6:.0f} MB" for name in names)]
    body = [
        [row["batch"], *(f"{row['seconds'][n] * 1e3:.1f} ms ({row['speedup'][n]:.2f} x)" for n in names)]
        for row in rows
    ]
    return tabulate(body, headers=head, tablefmt=style, disable_numparse=True)
