"""What a deployment costs at least: memory, TTFT, TPOT and tokens a second, by the roofline, for a batch of any size.

A model on a machine under a demand. Requests join as others leave, so in the mean the texts of a batch stand in the
middle of their outputs. A prompt goes through alone, while the others wait; then all take their decode steps. With P
the seconds of a prompt, D(b) those of a step of b texts, and n output tokens:

    TTFT = D(b - 1) + P at most, with a free place      TPOT = D(b) + (b - 1) P / (n - 1)
    tokens a second = b n / (b P + (n - 1) D(b))

All times are those of `roofline.step_work`, the least that the limits allow. Each technique is a field here, so what it
brings is the same deployment with that field changed (techniques.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from minillm.config import ModelConfig
from minillm.lab.advice.demand import Demand, Hardware, find_model
from minillm.lab.kv_memory import Text, paged_room
from minillm.lab.roofline import Work, step_work
from minillm.quantize import Grid

BLOCK = 16  # tokens in a block of the paged cache
GRIDS = {4: Grid(4, 64), 8: Grid(8, 64, symmetric=True)}  # groups of 64 divide the rows of every model of the catalogue
LEFT_OUT = (
    "launches, sampling, the tokenizer and everything else between the products of a step",
    "kernels that stay below the limits: --efficiency scales both limits, and is 1 unless you give it",
    "activations, and the memory for them: a fused kernel keeps them on the chip",
    "expanding 4-bit and 8-bit codes, looking up block tables, and a drafter's own memory",
    "the queue: a request that finds no free place waits, and no TTFT here counts that",
)


@dataclass(frozen=True)
class Estimate:
    """A batch in the steady state. Seconds and bytes. bound: of its decode step, "memory" or "compute"."""

    batch: int
    ttft: float
    tpot: float
    tokens_per_s: float
    requests_per_s: float
    memory: float
    bound: str


@dataclass(frozen=True)
class Deployment:
    """A model on some hardware under a demand, and which techniques are on.

    weight_bits: of the matrices of the layers; embedding and head keep the hardware's. kv_bits: of a cached number.
    """

    model: str
    config: ModelConfig
    hardware: Hardware
    demand: Demand
    weight_bits: int
    kv_bits: int
    paged: bool = True
    sharing: bool = True

    @property
    def layer_weight_bits(self) -> float:
        """Of a weight of a layer, with its share of the scales."""
        grid = GRIDS.get(self.weight_bits)
        return grid.bits_a_weight(grid.group) if grid else self.weight_bits

    @property
    def weights(self) -> float:
        """Bytes of all matrices in memory."""
        config = self.config
        others = config.head_parameters * (1 if config.tied_embeddings else 2)
        return (config.layer_parameters * self.layer_weight_bits + others * self.hardware.bits) / 8

    @property
    def sizes(self) -> dict[str, float]:
        """Bytes of a weight that a step reads, in the mean over layers and head, and of a cached number."""
        config = self.config
        read = config.layer_parameters * self.layer_weight_bits + config.head_parameters * self.hardware.bits
        mean = read / 8 / (config.layer_parameters + config.head_parameters)
        return {"weight_bytes": mean, "kv_bytes": self.kv_bits / 8}

    @property
    def kv_token(self) -> float:
        """Bytes of one token's keys and values."""
        return self.config.kv_elements_per_token * self.kv_bits / 8

    @property
    def found(self) -> int:
        """Tokens of a prompt that are in the cache already: whole blocks, and never its last token."""
        known = min(self.demand.shared, self.demand.prompt - 1)
        return known // BLOCK * BLOCK if self.sharing and self.paged else 0

    @property
    def slots(self) -> int:
        """Slots of one request at its end. All are counted so, and nobody need be preempted."""
        if not self.paged:
            return self.demand.reserve or self.config.max_context
        return paged_room(BLOCK)(Text(self.demand.prompt, self.demand.output))

    @property
    def middle(self) -> int:
        """Cached tokens of a text in the middle of its output."""
        return self.demand.prompt + (self.demand.output - 2) // 2

    def memory(self, batch: int) -> float:
        """Bytes of the weights and of the caches; what all prompts share is there once."""
        return self.weights + self.kv_token * (self.found + batch * (self.slots - self.found))

    @cached_property
    def fits(self) -> int:
        """Requests for which there is memory."""
        left = self.hardware.memory - self.memory(0)
        return max(0, math.floor(left / (self.kv_token * (self.slots - self.found))))

    def seconds(self, work: Work) -> float:
        return work.seconds(self.hardware.reached)

    def step_work(self, batch: int, rows: int = 1) -> Work:
        """A decode step; with more rows, one that verifies rows - 1 guesses of each text."""
        return step_work(self.config, rows, self.middle, batch, rows, **self.sizes)

    def step(self, batch: int, rows: int = 1) -> float:
        return self.seconds(self.step_work(batch, rows))

    @cached_property
    def prefill(self) -> float:
        """Seconds of a prompt, but for what the cache holds of it."""
        return self.seconds(step_work(self.config, self.demand.prompt - self.found, self.found, **self.sizes))

    def estimate(self, batch: int) -> Estimate:
        gaps, step = self.demand.output - 1, self.step(batch)
        turn = batch * self.prefill + gaps * step  # in which `batch` requests come and go
        return Estimate(
            batch,
            ttft=self.prefill + (self.step(batch - 1) if batch > 1 else 0),
            tpot=step + (batch - 1) * self.prefill / gaps,
            tokens_per_s=batch * self.demand.output / turn,
            requests_per_s=batch / turn,
            memory=self.memory(batch),
            bound=self.step_work(batch).bound(self.hardware.reached),
        )

    def meets(self, batch: int) -> bool:
        """Both goals, where there are any."""
        at, demand = self.estimate(batch), self.demand
        return (demand.ttft is None or at.ttft <= demand.ttft) and (demand.tpot is None or at.tpot <= demand.tpot)

    @cached_property
    def within_goals(self) -> int:
        """The largest batch that fits and meets the goals; 0 if even one request does not."""
        return largest(self.meets, self.fits)

    @property
    def most(self) -> int:
        """The largest batch that is of use: within the goals, or what fits where nothing meets them."""
        return self.within_goals or self.fits

    def wanted(self, limit: int) -> int:
        """The batch that is asked for, up to the limit."""
        if self.demand.concurrency is not None:
            return min(self.demand.concurrency, limit)
        return min(limit, 1 + largest(lambda b: self.estimate(b).requests_per_s < self.demand.rate, limit))

    @cached_property
    def batch(self) -> int:
        """The batch to run: what is asked for, as far as goals and memory allow."""
        return self.wanted(self.most)

    @property
    def short(self) -> bool:
        """Whether memory keeps out some that should run. It does not where the goals end the batch first."""
        if self.most < self.fits:
            return False
        if self.demand.concurrency is not None:
            return self.demand.concurrency > self.fits
        return self.fits == 0 or self.estimate(self.fits).requests_per_s < self.demand.rate


def largest(holds: Callable[[int], bool], limit: int) -> int:
    """The largest number from 1 to limit for which it holds, if it holds up to there and not beyond; 0 if for none."""
    low, high = 0, limit + 1  # it holds at low, and does not at high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def deploy(model: str, hardware: Hardware, demand: Demand, weight_bits: int | None = None) -> Deployment:
    """Refuses, in one sentence, what cannot be run at all."""
    name, config = find_model(model, demand)
    bits = hardware.bits if weight_bits is None else weight_bits
    allowed = sorted({*GRIDS, 16, hardware.bits})
    if bits not in allowed or bits > hardware.bits:
        known = ", ".join(str(n) for n in allowed if n <= hardware.bits)
        raise ValueError(f"a weight has {known} bits here, not {bits}")
    found = Deployment(name, config, hardware, demand, bits, hardware.bits)
    if found.fits < 1:
        small = replace(found, weight_bits=4).memory(1)
        hint = f"; with 4-bit weights it needs {small / 1e9:.1f}" if small < found.memory(1) else ""
        raise ValueError(
            f"{name} with {bits}-bit weights does not fit: one request needs {found.memory(1) / 1e9:.1f} GB, "
            f"and {hardware.limits.name} has {hardware.memory / 1e9:.1f}{hint}"
        )
    return found
