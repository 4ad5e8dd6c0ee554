"""What does quantization cost? Nats a token on a text, the KL from the model as it was, and two small tasks.

Each result is compared with the reference, the model in float32 as it was loaded. The quantized matrices are expanded
into a second float32 model: that changes no result, and is quick.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn
from tqdm import tqdm

from minillm.calibrate import hessians, linear_layers
from minillm.lab.bench import Measured, alternate
from minillm.lab.perplexity import WINDOW, divergence, judge, log_probabilities, paired, split
from minillm.linear import Linear
from minillm.model import NoCache, Transformer
from minillm.quant_linear import QuantLinear
from minillm.quantize import Grid, Quantized, round_to_nearest
from minillm.quantized_model import METHODS
from minillm.tokenizer import Tokenizer


@dataclass(frozen=True)
class Item:
    """A question of a task: tokens, of which the last `answer` are the answer."""

    tokens: list[int]
    answer: int


def read_tasks(tokenizer: Tokenizer, tasks: Mapping[str, dict]) -> dict[str, list[Item]]:
    """tasks: of each, `before` (what stands in front of every question) and `items`, [question, answer]."""
    found: dict[str, list[Item]] = {name: [] for name in tasks}
    for name, task in tasks.items():
        for question, answer in task["items"]:
            asked, whole = (tokenizer.encode(task["before"] + text) for text in (question, question + answer))
            if whole[: len(asked)] != asked or len(whole) == len(asked):
                raise ValueError(f"{question + answer!r}: the answer must begin with a token of its own")
            found[name].append(Item(whole, len(whole) - len(asked)))
    return found


@torch.inference_mode()
def ask(model: Transformer, items: Sequence[Item]) -> tuple[float, float]:
    """The share of answers that greedy decoding gives, and the mean nats of a right answer."""
    lengths, answers = [len(item.tokens) for item in items], [item.answer for item in items]
    tokens = torch.tensor([token for item in items for token in item.tokens], device=model.device)
    positions = torch.cat([torch.arange(n, device=model.device) for n in lengths])
    hidden = model(tokens, positions, NoCache(lengths)).split(lengths)
    rows = torch.cat([h[-1 - n : -1] for h, n in zip(hidden, answers, strict=True)])  # each one before an answer's
    wanted = torch.cat([t[-n:] for t, n in zip(tokens.split(lengths), answers, strict=True)])
    log_p = model.logits(rows).log_softmax(-1)
    right = (log_p.argmax(-1) == wanted).split(answers)
    nats = -log_p.gather(-1, wanted[:, None]).sum() / len(items)
    return sum(bool(r.all()) for r in right) / len(items), float(nats)


class Quality:
    """The reference's results, and a second model that gets quantized weights in turn. raw: workloads/quality.json"""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, raw: Mapping):
        self.model, self.work = model, copy.deepcopy(model)
        self.text = split(tokenizer, raw["predicted"], raw["calibration"])
        self.tasks = read_tasks(tokenizer, raw["tasks"])
        self.short = self.text.evaluation[: WINDOW * raw["short"] + 1]
        self.others = [log_p for log_p, _ in log_probabilities(model, self.short)]
        self.nats, _ = judge(model, self.text.evaluation)
        self.hessians = hessians(model, self.text.calibration)

    def reference(self) -> dict[str, object]:
        layers = linear_layers(self.model)
        bits = 8.0 * layers[0][1].weight.element_size()
        size = sum(layer.weight.nbytes for _, layer in layers)
        return {"bits_a_weight": bits, "bytes": size} | self.results(self.model, self.nats, torch.zeros(1))

    def measure(self, method: str, grid: Grid, full: bool) -> dict[str, object]:
        """full: on the whole text, not only on the windows that give the KL."""
        size = weights = seconds = bits = 0
        layers = dict(linear_layers(self.work))
        for name, layer in tqdm(linear_layers(self.model), f"{method}, {grid.bits} bits", leave=False):
            start = time.perf_counter()
            found = METHODS[method](layer.weight, grid, self.hessians[name])
            seconds += time.perf_counter() - start
            put(layers[name], found)
            size += sum(t.nbytes for t in QuantLinear(found).buffers())
            weights += layer.weight.numel()
            bits += layer.weight.numel() * grid.bits_a_weight(layer.weight.shape[1])
        judged = judge(self.work, self.text.evaluation if full else self.short, self.others)
        row = {"bits_a_weight": bits / weights, "bytes": size, "quantizing_s": seconds}
        return row | self.results(self.work, *judged)

    def results(self, model: Transformer, nats: Tensor, kls: Tensor) -> dict[str, object]:
        above = paired(nats, self.nats[: len(nats)])
        row = {"tokens": nats.numel(), "perplexity": float(nats.double().mean().exp())}
        row |= {"nats_above": above.mean, "standard_error": above.error, "kl": float(kls.mean())}
        for name, items in self.tasks.items():
            row[name], row[f"{name}_nats"] = ask(model, items)
        return row


@torch.no_grad()
def put(layer: Linear, found: Quantized) -> None:
    layer.weight.copy_(found.dequantize(layer.weight.dtype))


@torch.no_grad()
def layer_kl(model: Transformer, tokens: Sequence[int], grid: Grid, window: int = WINDOW) -> list[float]:
    """Which layers are sensitive? For each block: the mean KL when its matrices alone are rounded to nearest."""
    expected = [log_p for log_p, _ in log_probabilities(model, tokens, window)]
    work = copy.deepcopy(model)
    found = []
    for block, original in tqdm([*zip(work.blocks, model.blocks, strict=True)], "a layer at a time", leave=False):
        for layer in layers_of(block):
            put(layer, round_to_nearest(layer.weight, grid))
        got = log_probabilities(work, tokens, window)
        kls = [divergence(log_p, log_q).mean() for log_p, (log_q, _) in zip(expected, got, strict=True)]
        found.append(float(torch.stack(kls).mean()))
        for layer, before in zip(layers_of(block), layers_of(original), strict=True):
            layer.weight.copy_(before.weight)
    return found


def layers_of(block: nn.Module) -> list[Linear]:
    return [module for module in block.modules() if isinstance(module, Linear)]


def method_seconds(
    model: Transformer, known: Mapping[str, Tensor], grid: Grid, layers: int = 4, repeats: int = 3
) -> dict[str, Measured[float]]:
    """AWQ and GPTQ on the first matrices, in turn. Neither needs a gradient: which takes longer? known: hessians"""

    def run(method: str) -> float:
        start = time.perf_counter()
        for name, layer in islice(linear_layers(model), layers):
            METHODS[method](layer.weight, grid, known[name])
        return time.perf_counter() - start

    return alternate({name: lambda name=name: run(name) for name in ("awq", "gptq")}, repeats, progress=False)
