"""What is asked of a deployment, and what it runs on: the inputs of the decision guide, checked at the door.

A demand is lengths, requests at a time or a second, and goals. Hardware is two limits and a memory: those of a GPU of
the catalogue, as published, or those of this machine, as measured.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass

import psutil
import torch

from minillm.blocks import require_counts
from minillm.config import ModelConfig
from minillm.lab.catalogue import GPUS, MODELS
from minillm.lab.roofline import Limits, gpu_limits, this_machine

MOST = 10**9  # of anything that is counted
MOST_SPREAD = 5
LEAST_EFFICIENCY = 0.001
MOST_MEMORY = 10**15  # bytes


@dataclass(frozen=True)
class Demand:
    """What is asked for. Exactly one of `concurrency` (requests at a time) and `rate` (arriving a second).

    prompt, output: tokens of a request, in the mean. shared: tokens with which all prompts begin. ttft, tpot: goals in
    seconds. spread: sigma of the outputs' log-normal lengths. reserve: slots of a request where nothing is paged; None
    is the model's context. acceptance: of a drafter's guess, if known. draft_cost: of a guess, in plain steps.
    """

    prompt: int = 512
    output: int = 128
    concurrency: int | None = None
    rate: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    shared: int = 0
    spread: float = 0.8
    reserve: int | None = None
    acceptance: float | None = None
    draft_cost: float = 0.0

    def __post_init__(self) -> None:
        for name in ("prompt", "output", "concurrency", "shared", "reserve"):
            value = getattr(self, name)
            if isinstance(value, int) and abs(value) > MOST:
                raise ValueError(f"{name} must be a whole number of at most {MOST:,}")
        require_counts(prompt=self.prompt, output=self.output)
        if self.output < 2:
            raise ValueError("an output of one token has no TPOT: give at least two")
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError("give either the requests at a time or those that arrive a second")
        if self.concurrency is not None:
            require_counts(concurrency=self.concurrency)
        for option, value in (("rate", self.rate), ("ttft-ms", in_ms(self.ttft)), ("tpot-ms", in_ms(self.tpot))):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{option} must be a finite number above 0, not {value:g}")
        if not 0 <= self.spread <= MOST_SPREAD:
            raise ValueError(f"spread must be from 0 to {MOST_SPREAD}, not {self.spread:g}")
        if not 0 <= self.draft_cost < math.inf:
            raise ValueError(f"draft-cost must be a finite number of at least 0, not {self.draft_cost:g}")
        if isinstance(self.shared, bool) or not isinstance(self.shared, int) or not 0 <= self.shared <= self.prompt:
            raise ValueError(f"from 0 to all {self.prompt} tokens of the prompt can be shared, not {self.shared}")
        if self.acceptance is not None and not 0 <= self.acceptance <= 1:
            raise ValueError(f"an acceptance is from 0 to 1, not {self.acceptance:g}")


def in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


@dataclass(frozen=True)
class Hardware:
    """limits: as published or measured. memory: bytes. bits: of a number, before anything is quantized.

    kind: "nvidia", "amd", "apple" or "cpu". efficiency: the share of both limits that is reached.
    """

    limits: Limits
    memory: float
    bits: int
    kind: str
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        check_hardware(self.memory, self.efficiency)

    @property
    def reached(self) -> Limits:
        share = self.efficiency
        return Limits(self.limits.name, share * self.limits.flops, share * self.limits.bandwidth)


def check_hardware(memory: float | None, efficiency: float) -> None:
    if not LEAST_EFFICIENCY <= efficiency <= 1:
        raise ValueError(f"an efficiency is from {LEAST_EFFICIENCY} to 1, not {efficiency:g}")
    if memory is not None and not 0 < memory <= MOST_MEMORY:
        most = f"{MOST_MEMORY / 1e9:,.0f}"
        raise ValueError(f"the memory must be above 0 GB and at most {most}, not {memory / 1e9:g}")


def find_hardware(gpu: str | None = None, memory: float | None = None, efficiency: float = 1.0) -> Hardware:
    """A GPU of the catalogue in 16 bits, or this machine, measured: its GPU in 16 bits, else its CPU in 32."""
    if gpu is not None:
        limits = gpu_limits(known_name("GPU", gpu, GPUS))
        kind = "amd" if GPUS[limits.name].source.startswith("AMD") else "nvidia"
        return Hardware(limits, GPUS[limits.name].memory if memory is None else memory, 16, kind, efficiency)
    if torch.cuda.is_available():
        limits, kind, bits = this_machine(torch.float16, "cuda"), "amd" if torch.version.hip else "nvidia", 16
        total = torch.cuda.get_device_properties(0).total_memory
    else:
        limits, bits, total = this_machine(), 32, psutil.virtual_memory().total
        kind = "apple" if (platform.system(), platform.machine()) == ("Darwin", "arm64") else "cpu"
    return Hardware(limits, float(total) if memory is None else memory, bits, kind, efficiency)


def find_model(name: str, demand: Demand) -> tuple[str, ModelConfig]:
    """A model of the catalogue whose context is long enough: its name as it is spelled there, and its shape."""
    name = known_name("model", name, MODELS)
    longest, context = demand.prompt + demand.output, MODELS[name].max_context
    if longest > context:
        raise ValueError(f"{longest} tokens of prompt and output are more than {name}'s context, {context}")
    if demand.reserve is not None and not longest <= demand.reserve <= context:
        raise ValueError(f"a request reserves from {longest} to {context} tokens, not {demand.reserve}")
    return name, MODELS[name]


def known_name(what: str, name: str, names: Mapping[str, object]) -> str:
    """The name as the catalogue spells it, however its letters' case was written."""
    found = {known.lower(): known for known in names}.get(name.lower())
    if found is None:
        raise ValueError(f"unknown {what} {name!r}; known: {', '.join(names)}")
    return found
