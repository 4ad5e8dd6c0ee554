"""Throughput on many ragged requests: our engine, our loop one by one, and transformers in each way that it offers.

The same float32 tensors, prompts, lengths and threads, in turn within one process. Counted are *useful* tokens: those
that were asked for. A static batch of padded tensors goes on until its longest text is done, and what it computes for
the others meanwhile counts for nothing. transformers' continuous batching is timed from the first request to the last
result, its start left out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from minillm.engine import Engine
from minillm.generation import generate
from minillm.lab.bench import alternate
from minillm.lab.machine import version
from minillm.lab.peers import installed, to_transformers
from minillm.lab.serving import Arrival
from minillm.lab.workload import Requests
from minillm.model import Transformer

STATIC_BATCHES = (8, 16, 32)
OURS, ONE_BY_ONE = "minillm engine", "minillm one by one"
RATIOS = ("throughput_vs_transformers_best", "throughput_vs_own_one_by_one")


def compare_batches(model: Transformer, workload: Requests, progress: bool = True) -> dict[str, object]:
    """Useful tokens per second of everybody, and the ratios; a ratio is null where a side is missing."""
    trace = workload.trace
    contestants: dict[str, Callable[[Sequence[Arrival]], tuple[int, float]]] = {
        OURS: partial(ours, model, workload.block_size),
        ONE_BY_ONE: partial(one_by_one, model),
    }
    if installed("transformers"):
        peer, name = to_transformers(model), f"transformers {version('transformers')}"
        for size in STATIC_BATCHES:
            contestants[f"{name} generate, batches of {size}"] = partial(static_batches, peer, size)
        contestants[f"{name} continuous batching"] = partial(continuous_batching, peer, workload.block_size)
    for run in contestants.values():
        run([Arrival(0.0, trace[0].prompt, 2)] * 2)  # warm up: thread pools, allocators, first-call imports
    rated = {name: partial(per_second, run, trace) for name, run in contestants.items()}
    measured = alternate(rated, workload.repeats, progress, warm_up=False)
    task = f"{len(trace)} ragged requests, useful tokens"
    results = [
        {"name": name, "task": task, "tokens_per_s": runs.median(float), "spread": runs.spread(float)}
        for name, runs in measured.items()
    ]
    rates = {result["name"]: result["tokens_per_s"] for result in results}
    theirs = [rate for name, rate in rates.items() if name.startswith("transformers")]
    ratios = dict.fromkeys(RATIOS)
    ratios["throughput_vs_own_one_by_one"] = rates[OURS] / rates[ONE_BY_ONE]
    if theirs:
        ratios["throughput_vs_transformers_best"] = rates[OURS] / max(theirs)
    return {"results": results, "ratios": ratios}


def per_second(run: Callable[[Sequence[Arrival]], tuple[int, float]], trace: Sequence[Arrival]) -> float:
    useful, seconds = run(trace)
    wanted = sum(arrival.max_tokens for arrival in trace)
    if useful != wanted:
        raise RuntimeError(f"a contestant gave {useful} of the {wanted} tokens that were asked for")
    return useful / seconds


def ours(model: Transformer, block_size: int, trace: Sequence[Arrival]) -> tuple[int, float]:
    """All requests at once, in a pool with room for all."""
    n_blocks = sum(-(-(len(a.prompt) + a.max_tokens) // block_size) for a in trace)
    start = time.perf_counter()
    engine = Engine(model, None, n_blocks=n_blocks, block_size=block_size, max_num_seqs=len(trace))
    done = engine.generate([a.prompt for a in trace], [a.params for a in trace])
    return sum(len(text.tokens) for text in done), time.perf_counter() - start


def one_by_one(model: Transformer, trace: Sequence[Arrival]) -> tuple[int, float]:
    start = time.perf_counter()
    useful = sum(len(generate(model, None, a.prompt, a.params).tokens) for a in trace)
    return useful, time.perf_counter() - start


@torch.inference_mode()
def static_batches(peer: torch.nn.Module, size: int, trace: Sequence[Arrival]) -> tuple[int, float]:
    """`generate` on batches in order of arrival, prompts padded on the left, each as long as its longest text."""
    start, useful = time.perf_counter(), 0
    for first in range(0, len(trace), size):
        batch = trace[first : first + size]
        longest = max(len(a.prompt) for a in batch)
        ids = torch.tensor([[0] * (longest - len(a.prompt)) + a.prompt for a in batch])
        mask = torch.tensor([[0] * (longest - len(a.prompt)) + [1] * len(a.prompt) for a in batch])
        most = max(a.max_tokens for a in batch)
        done = peer.generate(ids, attention_mask=mask, max_new_tokens=most, do_sample=False, pad_token_id=0)
        useful += sum(min(a.max_tokens, done.shape[1] - longest) for a in batch)
    return useful, time.perf_counter() - start


def continuous_batching(peer: torch.nn.Module, block_size: int, trace: Sequence[Arrival]) -> tuple[int, float]:
    """The manager behind `generate_batch`, which itself takes one length for all. Room for all requests at once."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    logging.getLogger("transformers").setLevel(logging.ERROR)
    n_blocks = sum(-(-(len(a.prompt) + a.max_tokens) // block_size) + 1 for a in trace)
    settings = ContinuousBatchingConfig(page_size=block_size, num_blocks=n_blocks, max_batch_tokens=512)
    manager = peer.continuous_batching_context_manager(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=settings,
        warmup=False,
    )
    with manager as running:
        start, useful, left = time.perf_counter(), 0, len(trace)
        for arrival in trace:
            running.add_request(arrival.prompt, max_new_tokens=arrival.max_tokens)
        while left:
            result = running.get_result(timeout=1)
            if result is None and not running.is_running():
                raise RuntimeError("transformers' continuous batching stopped before it was done")
            if result is not None and result.is_finished():
                useful, left = useful + len(result.generated_tokens), left - 1
        return useful, time.perf_counter() - start
