"""How fast can it possibly be? The roofline: the slower of computing and reading (Williams et al. 2009).

A step does some floating-point operations and moves some bytes. A machine has a rate for each, and the step takes at
least the longer of the two times. Prefill does much work for each byte of weights and is bound by the arithmetic;
decode reads all the weights for one token and is bound by the memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from minillm.config import ModelConfig
from minillm.lab.catalogue import GPUS

BANDWIDTH_BYTES = 2**30  # far more than any cache holds, also one that a server shares among its guests
MATMUL_SIZE = 1024
BUDGET = 0.8  # seconds for each of the two measurements


@dataclass(frozen=True)
class Limits:
    """flops: FLOP/s. bandwidth: bytes/s."""

    name: str
    flops: float
    bandwidth: float

    @property
    def ridge(self) -> float:
        """FLOP per byte beyond which arithmetic is the limit."""
        return self.flops / self.bandwidth


@dataclass(frozen=True)
class Work:
    """What a step has to do at least: floating-point operations, and bytes read and written."""

    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes

    def seconds(self, limits: Limits) -> float:
        return max(self.flops / limits.flops, self.bytes / limits.bandwidth)

    def bound(self, limits: Limits) -> str:
        return "compute" if self.intensity >= limits.ridge else "memory"


def step_work(
    config: ModelConfig,
    new_tokens: int,
    past: int = 0,
    batch: int = 1,
    sampled_rows: int = 1,
    weight_bytes: float = 4,
    kv_bytes: float = 4,
) -> Work:
    """One pass of `batch` sequences, each with `new_tokens` on top of `past` cached ones.

    Prefill is many new tokens on no past, decode one new token on a long one. Counted: every matrix product (2 FLOP a
    weight and token), causal attention (4 FLOP a query head, coordinate, and visible key), the weights read once, keys
    and values read once and the new ones written. Not counted: activations, which a fused kernel keeps on the chip.
    sampled_rows: rows a sequence for which logits are computed. weight_bytes, kv_bytes: bytes of one number.
    """
    if new_tokens < 1 or past < 0 or batch < 1 or not 0 <= sampled_rows <= new_tokens:
        raise ValueError(f"impossible step: {new_tokens} new on {past} past, batch {batch}, {sampled_rows} sampled")
    visible = new_tokens * past + new_tokens * (new_tokens + 1) / 2  # keys seen, summed over the new tokens
    flops = 2 * config.layer_parameters * new_tokens + 2 * config.head_parameters * sampled_rows
    flops += 4 * config.n_layers * config.n_heads * config.head_dim * visible
    weights = config.layer_parameters + (config.head_parameters if sampled_rows else 0)
    kv_rows = past + 2 * new_tokens  # the past is read, the new is written and read
    return Work(batch * flops, weights * weight_bytes + batch * kv_rows * config.kv_elements_per_token * kv_bytes)


def request_steps(
    config: ModelConfig, prompt: int, output: int, batch: int = 1, weight_bytes: float = 4, kv_bytes: float = 4
) -> list[Work]:
    """The passes that `batch` equal requests take: the prefill gives each its first token, then a step for each further
    one, on a past that grows. As many passes as output tokens; the last token is not fed."""
    if prompt < 1 or output < 0:
        raise ValueError(f"impossible request: a prompt of {prompt} tokens, an output of {output}")
    sizes = {"batch": batch, "weight_bytes": weight_bytes, "kv_bytes": kv_bytes}
    decode = [step_work(config, 1, past, **sizes) for past in range(prompt, prompt + output - 1)]
    return [step_work(config, prompt, **sizes), *decode] if output else []


def gpu_limits(name: str) -> Limits:
    """The published limits of a GPU of the catalogue, at 16 bits."""
    if name not in GPUS:
        raise ValueError(f"unknown GPU {name!r}; known: {', '.join(GPUS)}")
    gpu = GPUS[name]
    return Limits(gpu.name, gpu.flops, gpu.bandwidth)


@cache
def this_machine(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Limits:
    """Measure this machine once, in a second or two: the best rates that plain PyTorch reaches.

    Bandwidth is that of reading an array once (its sum); arithmetic is a square matrix product.
    """
    data = torch.ones(BANDWIDTH_BYTES // dtype.itemsize, dtype=dtype, device=device)
    a = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device).to(dtype)
    reading = best_seconds(data.sum, device)
    matmul = best_seconds(lambda: a @ a, device)
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "this machine"
    return Limits(name, 2 * MATMUL_SIZE**3 / matmul, data.nbytes / reading)


def best_seconds(work: Callable[[], object], device: str) -> float:
    """The shortest of the runs that fit the time budget, after one to warm up: noise only ever adds time."""
    synchronize = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    times = []
    deadline = time.perf_counter() + BUDGET
    while len(times) < 3 or time.perf_counter() < deadline:
        start = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])
