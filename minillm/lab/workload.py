"""Pinned workloads: what is measured lies in a file, so that numbers of different days and machines can be compared."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources

from minillm.lab.serving import STRIDE, Arrival, cut
from minillm.sampling import SamplingParams
from minillm.tokenizer import Tokenizer


@dataclass(frozen=True)
class Workload:
    """One request: `prompt` token ids, `new_tokens` generated greedily and to the full, `repeats` measurements."""

    name: str
    prompt: list[int]
    new_tokens: int
    repeats: int

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=self.new_tokens, ignore_eos=True)


@dataclass(frozen=True)
class Requests:
    """Many requests, all there at the start, for an engine with these limits.

    reserve: tokens that a cache in one piece sets aside for each request: the longest that any may become.
    """

    name: str
    trace: list[Arrival]
    max_num_seqs: int
    block_size: int
    n_blocks: int
    reserve: int
    repeats: int


def read_requests(name: str, tokenizer: Tokenizer, quick: bool = False) -> Requests:
    """Many requests by name; `quick` takes the fewer and shorter ones that the file gives."""
    raw = read_json(name, quick)
    ids = tokenizer.encode(read_json(raw["text"])["prompt"])
    trace = [
        Arrival(0.0, cut(ids, STRIDE * i, n_prompt), n_output) for i, (n_prompt, n_output) in enumerate(raw["requests"])
    ]
    sizes = {key: raw[key] for key in ("name", "max_num_seqs", "block_size", "n_blocks", "reserve", "repeats")}
    if max(len(a.prompt) + a.max_tokens for a in trace) > raw["reserve"]:
        raise ValueError(
            f"a request of workload {name!r} is longer than the {raw['reserve']} tokens set aside for each"
        )
    return Requests(trace=trace, **sizes)


def read_json(name: str, quick: bool = False) -> dict:
    file = resources.files("minillm.lab") / "workloads" / f"{name}.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    return raw | raw["quick"] if quick else raw


def read_workload(name: str, tokenizer: Tokenizer, quick: bool = False) -> Workload:
    """A workload of this package by name; `quick` takes the smaller sizes that the file gives."""
    raw = read_json(name, quick)
    ids = tokenizer.encode(raw["prompt"])
    if len(ids) < raw["prompt_tokens"]:
        raise ValueError(f"the text of workload {name!r} has {len(ids)} tokens, fewer than {raw['prompt_tokens']}")
    if raw["new_tokens"] < 2:
        raise ValueError(f"workload {name!r} must generate at least two tokens: a gap needs two")
    return Workload(raw["name"], ids[: raw["prompt_tokens"]], raw["new_tokens"], raw["repeats"])
