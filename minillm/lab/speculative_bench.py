"""When does speculation pay? Each drafter on several kinds of text, temperatures, numbers of guesses and batch sizes.

A line compares texts written with guesses with the same texts without, in turn. It also predicts: tokens a round, times
the seconds of a plain step, over the seconds of a round. Those are measured by themselves, at the same context and
batch: a plain step, a verifying step, and the drafter's guessing (in another run than the one that is compared). The
formula of Leviathan et al. stands beside it: it takes each guess to be accepted with the same probability.

For a batch the costs are those of contiguous caches. The engine's paged cache gathers a text's past for a pass of
several rows; that is not counted, so predictions for batches are too high.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median

import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

from minillm import speculative
from minillm.chat import common_prefix
from minillm.drafters import LayerSkipDrafter, NgramDrafter, Together
from minillm.engine import Engine
from minillm.feature_drafter import load_drafter
from minillm.generation import stream
from minillm.kv_cache import ContiguousKV
from minillm.lab.bench import alternate
from minillm.lab.workload import read_json
from minillm.model import KVStore, Transformer
from minillm.sampling import SamplingParams
from minillm.speculative import Drafter, Proposal, expected_tokens
from minillm.tokenizer import Tokenizer
from minillm.writing import Writer


@dataclass(frozen=True)
class Round:
    """One proposal: how many guesses, how many of them were taken, and how many tokens the text got."""

    guesses: int
    accepted: int
    tokens: int

    @property
    def judged(self) -> int:
        """Guesses that were looked at: those behind a rejected one are not."""
        return min(self.guesses, self.accepted + (self.tokens > self.accepted))


class Watched:
    """A drafter with a clock and a notebook."""

    def __init__(self, drafter: Drafter):
        self.drafter = drafter
        self.seconds: list[float] = []
        self.rounds: list[Round] = []
        self.open: dict[Writer, tuple[int, list[int]]] = {}

    def propose(self, writers: Sequence[Writer], counts: Sequence[int]) -> list[Proposal]:
        start = time.perf_counter()
        proposals = self.drafter.propose(writers, counts)
        self.seconds.append(time.perf_counter() - start)
        self.open |= {w: (len(w.tokens), p.ids) for w, p in zip(writers, proposals, strict=True)}
        return proposals

    def begin(self, writer: Writer, kv: KVStore) -> None:
        self.drafter.begin(writer, kv)

    def observe(self, writer: Writer, start: int, hidden: Tensor) -> None:
        self.note(writer)
        self.drafter.observe(writer, start, hidden)

    def release(self, writer: Writer) -> None:
        self.note(writer)
        self.drafter.release(writer)

    def note(self, writer: Writer) -> None:
        """What became of the guesses of the last round."""
        length, ids = self.open.pop(writer, (0, None))
        if ids is None:
            return
        new = writer.tokens[length:]
        same = common_prefix(ids, new)
        self.rounds.append(Round(len(ids), same, len(new)))

    @property
    def acceptance(self) -> float:
        """The share of the guesses that were looked at."""
        judged = sum(r.judged for r in self.rounds)
        return sum(r.accepted for r in self.rounds) / judged if judged else 0.0

    @property
    def tokens_per_round(self) -> float:
        return mean(r.tokens for r in self.rounds)


@dataclass(frozen=True)
class Line:
    """One result. predicted_speedup: from tokens a round and the costs; formula_speedup: from the acceptance alone."""

    drafter: str
    workload: str
    temperature: float
    k: int
    batch: int
    acceptance: float
    tokens_per_round: float
    predicted_speedup: float
    formula_speedup: float
    speedup: float
    spread: tuple[float, float]


def compare(
    model: Transformer, name: str, make: Callable[[], Drafter], workload: str, prompts: Sequence[list[int]],
    temperature: float, k: int, new_tokens: int, repeats: int,
) -> Line:  # fmt: skip
    """The prompts together, with guesses and without, in turn."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=new_tokens, ignore_eos=True, seed=i)
        for i in range(len(prompts))
    ]
    watched: list[Watched] = []

    def guessing() -> float:
        watched.append(Watched(make()))
        return rate(model, prompts, params, watched[-1], k)

    measured = alternate({"plain": lambda: rate(model, prompts, params), "guessing": guessing}, repeats, progress=False)
    seen = watched[-1]
    context, batch = len(prompts[0]) + new_tokens // 2, len(prompts)
    passes = {rows: step_seconds(model, context, batch, rows) for rows in {1, *(1 + r.guesses for r in seen.rounds)}}
    drafting = median(watched[0].seconds)  # of the run that warmed up, which is not compared
    cost = (drafting + mean(passes[1 + r.guesses] for r in seen.rounds)) / passes[1]
    ratios = [g / p for g, p in zip(measured["guessing"].runs, measured["plain"].runs, strict=True)]
    return Line(
        name, workload, temperature, k, len(prompts), seen.acceptance, seen.tokens_per_round,
        seen.tokens_per_round / cost, expected_tokens(seen.acceptance, k) / cost, median(ratios),
        (min(ratios), max(ratios)),
    )  # fmt: skip


def rate(
    model: Transformer, prompts: Sequence[list[int]], params: Sequence[SamplingParams],
    drafter: Drafter | None = None, k: int = 3,
) -> float:  # fmt: skip
    """Tokens a second after the first: one text by the loop, several by the engine."""
    if len(prompts) == 1:
        if drafter is None:
            pieces = list(stream(model, None, prompts[0], params[0]))
        else:
            pieces = list(speculative.stream(model, None, prompts[0], drafter, params[0], k=k))
        return (len(pieces) - 1) / (pieces[-1].seconds - pieces[0].seconds)
    engine = Engine(model, drafter=drafter, k=k, max_num_batched_tokens=2048)
    requests = [engine.add(p, each) for p, each in zip(prompts, params, strict=True)]
    for _ in engine.stream(*requests):
        pass
    pieces = [piece.seconds + r.arrival for r in requests for piece in r.pieces]
    return (len(pieces) - len(requests)) / (max(pieces) - min(pieces))


@torch.inference_mode()
def step_seconds(model: Transformer, context: int, batch: int, rows: int, repeats: int = 7) -> float:
    """The median time of a pass of `rows` tokens for each of `batch` texts of `context` tokens, with their logits."""
    stores = [ContiguousKV(model.config, context + rows, model.dtype, model.device) for _ in range(batch)]
    for kv in stores:
        kv.k.normal_()
        kv.v.normal_()
        kv.commit(context)
    tokens = torch.zeros(batch * rows, dtype=torch.long, device=model.device)
    positions = torch.arange(context, context + rows, device=model.device).repeat(batch)
    store = Together(stores, [rows] * batch)
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        model.logits(model(tokens, positions, store)).argmax(-1).tolist()
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])


KINDS = ("prose", "code", "copying", "question answering")
TEMPERATURES, KS, BATCHES = (0.7, 1.0), (1, 5), (4,)  # beside the usual 0, 3 and 1
VARIED = ("prose", "copying")  # the kinds for which these are tried


def sweep(
    model: Transformer, tokenizer: Tokenizer, drafters: Mapping[str, Callable[[], Drafter]], quick: bool = False
) -> list[Line]:
    """Every drafter on every kind of text; then one thing changed at a time."""
    raw = read_json("speculative", quick)
    prompts = {
        kind: [tokenizer.encode(p) if isinstance(p, str) else tokenizer.encode_chat(p) for p in raw[kind]]
        for kind in KINDS
    }
    cases = [(kind, 0.0, 3, 1) for kind in KINDS]
    for kind in VARIED:
        cases += [(kind, t, 3, 1) for t in TEMPERATURES] + [(kind, 0.0, k, 1) for k in KS]
        cases += [(kind, 0.0, 3, batch) for batch in BATCHES]
    todo = [(name, *case) for case in cases for name in drafters]
    return [
        compare(model, name, drafters[name], kind, prompts[kind][:batch], t, k, raw["new_tokens"], raw["repeats"])
        for name, kind, t, k, batch in tqdm(todo, leave=False)
    ]


def drafters(model: Transformer) -> dict[str, Callable[[], Drafter]]:
    """Those that come with the package, each made anew for a run."""
    return {
        "n-gram": NgramDrafter,
        "trained": lambda: load_drafter(model),
        "layer skip": lambda: LayerSkipDrafter(model, model.config.n_layers // 3),
    }


def table(lines: Sequence[Line], style: str = "simple") -> str:
    head = ["drafter", "text", "temperature", "K", "batch", "accepted", "tokens a round", "predicted", "formula"]
    body = [
        [
            line.drafter, line.workload, f"{line.temperature:g}", line.k, line.batch, f"{line.acceptance:.0%}",
            f"{line.tokens_per_round:.2f}", f"{line.predicted_speedup:.2f}", f"{line.formula_speedup:.2f}",
            f"{line.speedup:.2f} ({line.spread[0]:.2f} to {line.spread[1]:.2f})",
        ]
        for line in lines
    ]  # fmt: skip
    return tabulate(body, headers=[*head, "measured"], tablefmt=style, disable_numparse=True)


def as_json(lines: Sequence[Line], machine: dict[str, object]) -> dict[str, object]:
    return {"machine": machine, "results": [asdict(line) for line in lines]}


def median_error(lines: Sequence[Line]) -> float:
    """Of the predicted speed-ups, as a share of the measured ones."""
    return median(abs(line.predicted_speedup / line.speedup - 1) for line in lines)
