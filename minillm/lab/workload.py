"""Pinned workloads: what is measured lies in a file, so that numbers of different days and machines can be compared."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources

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


def read_workload(name: str, tokenizer: Tokenizer, quick: bool = False) -> Workload:
    """A workload of this package by name; `quick` takes the smaller sizes that the file gives."""
    file = resources.files("minillm.lab") / "workloads" / f"{name}.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    raw |= raw["quick"] if quick else {}
    ids = tokenizer.encode(raw["prompt"])
    if len(ids) < raw["prompt_tokens"]:
        raise ValueError(f"the text of workload {name!r} has {len(ids)} tokens, fewer than {raw['prompt_tokens']}")
    if raw["new_tokens"] < 2:
        raise ValueError(f"workload {name!r} must generate at least two tokens: a gap needs two")
    return Workload(raw["name"], ids[: raw["prompt_tokens"]], raw["new_tokens"], raw["repeats"])
