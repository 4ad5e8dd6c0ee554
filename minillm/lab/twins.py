"""What do fewer KV heads cost? Small twins that differ in nothing else, and a trained model whose heads are pooled.

    python -m minillm.lab.twins [--json FILE] [--steps N] [--healing N]     # about 20 minutes on two cores

1. Twins: byte-level transformers of nine query heads with 9, 3 or 1 KV heads. What the keys and values give up, the MLP
   gets, so all have the same number of parameters; the same text in the same order, two seeds.
2. SmolLM2 with its 3 KV heads pooled to 1: as it is, and after a short healing, in which its attention learns to give
   what the original model's gives, first layer by layer, then the model's distributions (distillation, so that the text
   teaches it nothing new).

The text is the language reference that comes with Python (`pydoc_data.topics`): every machine has it, in the version of
its Python. Every tenth topic is held out. Everything is seeded. What the file holds already is not made again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from tabulate import tabulate
from torch import Tensor
from tqdm import trange

from minillm.checkpoint import load
from minillm.config import ModelConfig
from minillm.gqa import kv_bytes_a_token, pool_heads
from minillm.lab.distill import write_json
from minillm.lab.machine import counted, describe
from minillm.lab.stored import read_stored
from minillm.model import Transformer

Falling = torch.optim.lr_scheduler.LambdaLR

KV_HEADS, SEEDS = (9, 3, 1), (0, 1)
WINDOW, BATCH = 256, 4  # bytes of a window; windows of a training step
LONG = 512  # tokens of a window of SmolLM2's
RATE, LAYER_RATE, HEALING_RATE = 3e-3, 3e-3, 1e-3  # the highest, of AdamW
END_TO_END = 3  # steps layer by layer for each step of the healing end to end, which takes as long
STD = 0.06  # of the weights at the start: about 0.7 over the root of d_model
TWIN = ModelConfig(256, 144, 3, 9, 9, 24, 384, WINDOW, tied_embeddings=True)


class Windows:
    """The store of equal windows of text side by side, for training: nothing is kept, all go through attention at once.

    The same as `NoCache([length] * n)`, in one call instead of n.
    """

    def __init__(self, length: int):
        self.length = length

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        q = rearrange(q, "(b t) h d -> b h t d", t=self.length)
        k, v = (repeat(x, "(b t) g d -> b (g r) t d", t=self.length, r=group) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return rearrange(out, "b h t d -> (b t) h d")


def read_text() -> tuple[str, str]:
    """The topics in the order of their names: to learn from, and every tenth to test with. Some topics repeat others:
    paragraphs to test with are not learned."""
    names = sorted(topics)
    kept = {paragraph for name in names[::10] for paragraph in paragraphs(topics[name])}
    learned = [p for i, name in enumerate(names) if i % 10 for p in paragraphs(topics[name]) if p not in kept]
    return "\n\n".join(learned), "\n".join(topics[name] for name in names[::10])


def paragraphs(text: str) -> list[str]:
    return [paragraph.strip() for paragraph in text.split("\n\n")]


def twin(n_kv_heads: int) -> ModelConfig:
    """The twin with that many KV heads. Its MLP is wider by as many weights as its keys and values are fewer."""
    fewer = 2 * (TWIN.n_kv_heads - n_kv_heads) * TWIN.head_dim
    if fewer % 3:
        raise ValueError(f"{fewer} rows cannot be given to the three matrices of the MLP evenly")
    return replace(TWIN, n_kv_heads=n_kv_heads, d_ff=TWIN.d_ff + fewer // 3)


def window_logits(model: Transformer, windows: Tensor) -> Tensor:
    """windows: [n, length] -> logits [n * length, vocab_size]"""
    n, length = windows.shape
    positions = torch.arange(length).repeat(n)
    return model.logits(model(windows.flatten(), positions, Windows(length)))


def cut(ids: Tensor, length: int) -> Tensor:
    """ids: [T] -> [n, length + 1]: windows of `length` tokens, and the one that follows each."""
    return ids.unfold(0, length + 1, length)


@torch.inference_mode()
def window_losses(model: Transformer, windows: Tensor) -> list[float]:
    """windows: [n, length + 1] -> for each, the mean loss of a token, in nats."""
    losses = []
    for part in windows.split(max(1, WINDOW * BATCH // windows.shape[1])):
        each = F.cross_entropy(window_logits(model, part[:, :-1]), part[:, 1:].flatten(), reduction="none")
        losses += [round(loss, 5) for loss in each.view(len(part), -1).mean(1).tolist()]
    return losses


def random_windows(ids: Tensor, length: int, n: int, steps: int, seed: int) -> Iterator[Tensor]:
    """`steps` times n windows [n, length + 1] from anywhere in the text."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(ids) - length, (n,), generator=generator)
        yield ids[starts[:, None] + torch.arange(length + 1)]


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> Falling:
    """A tenth of the steps upwards, then down to nothing."""
    warm = max(1, steps // 10)
    return Falling(optimizer, lambda i: min((i + 1) / warm, (steps - i) / max(1, steps - warm)))


def train_twin(n_kv_heads: int, seed: int, steps: int, ids: Tensor) -> Transformer:
    """The seed decides the weights at the start and the order of the text; it is the same order for all twins."""
    model = Transformer(twin(n_kv_heads)).init_weights(seed, std=STD)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.1)
    falling = schedule(optimizer, steps)
    batches = random_windows(ids, WINDOW, BATCH, steps, seed)
    for _ in trange(steps, desc=f"{n_kv_heads} KV heads, seed {seed}", leave=False):
        windows = next(batches)
        loss = F.cross_entropy(window_logits(model, windows[:, :-1]), windows[:, 1:].flatten())
        step(loss, optimizer, falling, list(model.parameters()))
    return model.requires_grad_(False)


def step(loss: Tensor, optimizer: torch.optim.Optimizer, falling: Falling, parameters: list[Tensor]) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    falling.step()


def attention_of(model: Transformer) -> list[Tensor]:
    """The weights of all layers' attention, and only they, set to learn."""
    model.requires_grad_(False)
    learning = [p for block in model.blocks for p in block.attention.parameters()]
    for parameter in learning:
        parameter.requires_grad_(True)
    return learning


def heal_layers(
    model: Transformer, teacher: Transformer, ids: Tensor, steps: int, length: int = LONG, rate: float = LAYER_RATE
) -> None:
    """Let each layer's attention learn by itself, from what the teacher's gets, to give what the teacher's gives.

    Nothing is carried from layer to layer, so a step is cheap, and no layer has to learn from the others' mistakes.
    """
    learning, seen = attention_of(model), {}
    optimizer = torch.optim.AdamW(learning, rate, betas=(0.9, 0.95), weight_decay=0.0)
    falling, store = schedule(optimizer, steps), Windows(length)
    hooks = [
        block.attention.register_forward_hook(lambda _, given, out, i=i: seen.__setitem__(i, (given, out)))
        for i, block in enumerate(teacher.blocks)
    ]
    batches = random_windows(ids, length, 1, steps, seed=0)
    for _ in trange(steps, desc="healing layer by layer", leave=False):
        with torch.no_grad():
            teacher(next(batches)[0, :-1], torch.arange(length), store)
        optimizer.zero_grad()
        for i, block in enumerate(model.blocks):
            (x, rope, _), wanted = seen[i]
            got = block.attention(x, rope, partial(store.attend, i))
            ((got - wanted).square().mean() / wanted.square().mean()).backward()
        optimizer.step()
        falling.step()
    for hook in hooks:
        hook.remove()
    model.requires_grad_(False)


def heal(
    model: Transformer, teacher: Transformer, ids: Tensor, steps: int, length: int = LONG, rate: float = HEALING_RATE
) -> None:
    """Let the attention of all layers together learn to give the teacher's distributions, one window a step."""
    learning = attention_of(model)
    optimizer = torch.optim.AdamW(learning, rate, betas=(0.9, 0.95), weight_decay=0.0)
    falling = schedule(optimizer, steps)
    batches = random_windows(ids, length, 1, steps, seed=1)
    for _ in trange(steps, desc="healing end to end", leave=False):
        window = next(batches)[:, :-1]
        with torch.no_grad():
            wanted = window_logits(teacher, window).log_softmax(-1)
        loss = F.kl_div(window_logits(model, window).log_softmax(-1), wanted, reduction="batchmean", log_target=True)
        step(loss, optimizer, falling, learning)
    model.requires_grad_(False)


def run_twins(results: dict, file: Path, learned: Tensor, held_out: Tensor) -> None:
    windows = cut(held_out, WINDOW)
    for n_kv_heads in KV_HEADS:
        for seed in SEEDS:
            if any((run["kv_heads"], run["seed"]) == (n_kv_heads, seed) for run in results["twins"]):
                continue
            started = time.perf_counter()
            model = train_twin(n_kv_heads, seed, results["steps"], learned)
            results["twins"].append(
                {
                    "kv_heads": n_kv_heads,
                    "seed": seed,
                    "parameters": sum(p.numel() for p in model.parameters()),
                    "kv_bytes_a_token": kv_bytes_a_token(model.config),
                    "losses": window_losses(model, windows),
                    "seconds": round(time.perf_counter() - started, 1),
                }
            )
            write_json(file, results)


def measure(what: str, model: Transformer, windows: Tensor) -> dict:
    config, losses = model.config, window_losses(model, windows)
    size = kv_bytes_a_token(config)
    return {"what": what, "kv_heads": config.n_kv_heads, "kv_bytes_a_token": size, "losses": losses}


def run_smollm2(results: dict, file: Path, learned: str, held_out: str) -> None:
    """The model as it is, pooled, and pooled and healed in two ways one after the other, on the same windows."""
    if results["smollm2"]:
        return
    started = time.perf_counter()
    model, tokenizer = load(device="cpu", prepare=False)
    model.requires_grad_(False)
    # Topics are held out for its sake too, though it has surely read many of them before: only differences count.
    windows = cut(torch.tensor(tokenizer.encode(held_out)), LONG)[: results["windows"]]
    student, ids, steps = pool_heads(model, 1), torch.tensor(tokenizer.encode(learned)), results["healing"]
    results["smollm2"] = [measure("as it is", model, windows), measure("pooled", student, windows)]
    heal_layers(student, model, ids, steps)
    results["smollm2"].append(measure("healed layer by layer", student, windows))
    heal(student, model, ids, results["healing_end_to_end"])
    results["smollm2"].append(measure("then end to end", student, windows))
    results["smollm2_seconds"] = round(time.perf_counter() - started, 1)
    write_json(file, results)


def mean_and_error(numbers: Sequence[float]) -> tuple[float, float]:
    """The mean, and its standard error over windows."""
    x = torch.tensor(numbers, dtype=torch.float64)
    return float(x.mean()), float(x.std() / len(x) ** 0.5) if len(x) > 1 else float("nan")


def difference(run: Mapping, other: Mapping) -> tuple[float, float]:
    """Of the losses, window by window: most of what differs from window to window drops out."""
    return mean_and_error([a - b for a, b in zip(run["losses"], other["losses"], strict=True)])


def as_it_was(mean: float, error: float) -> str:
    return f"{mean:+.3f} ± {error:.3f}"


def twins_table(results: Mapping, style: str = "simple") -> str:
    """Loss in bits a byte; differences from the twin with most KV heads and the same seed."""
    first = {run["seed"]: run for run in results["twins"] if run["kv_heads"] == KV_HEADS[0]}
    bits = 1 / torch.tensor(2.0).log().item()
    body = []
    for run in results["twins"]:
        loss, error = mean_and_error(run["losses"])
        base = first.get(run["seed"])
        more = "" if base in (None, run) else as_it_was(*(bits * x for x in difference(run, base)))
        body.append(
            [run["kv_heads"], run["seed"], f"{run['parameters']:,}", f"{run['kv_bytes_a_token']:,}",
             f"{bits * loss:.3f} ± {bits * error:.3f}", more]
        )  # fmt: skip
    head = ["KV heads", "seed", "parameters", "cache, bytes a token", "bits a byte", "more than 9 heads"]
    return tabulate(body, headers=head, tablefmt=style, disable_numparse=True)


def smollm2_table(results: Mapping, style: str = "simple") -> str:
    """Perplexity, and the difference of the loss from the model as it is, in nats a token."""
    body = []
    for row in results["smollm2"]:
        loss, _ = mean_and_error(row["losses"])
        base = results["smollm2"][0]
        more = "" if row is base else as_it_was(*difference(row, base))
        perplexity = torch.tensor(loss).exp().item()
        body.append([row["what"], row["kv_heads"], f"{row['kv_bytes_a_token']:,}", f"{perplexity:,.1f}", more])
    head = ["SmolLM2-135M", "KV heads", "cache, bytes a token", "perplexity", "nats a token more"]
    return tabulate(body, headers=head, tablefmt=style, disable_numparse=True)


def about(results: Mapping) -> str:
    """Where and when the results were made, in one line."""
    m = results["machine"]
    size = (
        f"{results['steps']} steps of {results['bytes_a_step']:,} bytes for each twin; healing: {results['healing']} "
    )
    minutes = (sum(run["seconds"] for run in results["twins"]) + results["smollm2_seconds"]) / 60
    size += f"and {results['healing_end_to_end']} steps of {LONG} tokens; {minutes:.0f} minutes"
    machine = f"{m['cpu']}, {counted(m['cores'], 'core')}, {counted(m['threads'], 'thread')}"
    return f"made on {results['date']}, {machine}; {size}"


def read_results() -> dict:
    """What is stored with the package."""
    return read_stored("twins.json")


def begin(file: Path, steps: int, healing: int, windows: int) -> dict:
    """The results so far, if they were made with these sizes from this text; or none yet."""
    learned, held_out = read_text()
    made = {
        "command": "python -m minillm.lab.twins",
        "steps": steps,
        "bytes_a_step": BATCH * WINDOW,
        "healing": healing,
        "healing_end_to_end": max(1, healing // END_TO_END),
        "windows": windows,
        "text": {
            "what": "pydoc_data.topics",
            "python": platform.python_version(),
            "sha256": hashlib.sha256((learned + held_out).encode()).hexdigest(),
            "learned_bytes": len(learned.encode()),
            "held_out_bytes": len(held_out.encode()),
        },
    }
    if not file.exists():
        return made | {"date": str(date.today()), "machine": describe(), "twins": [], "smollm2": []}
    found = json.loads(file.read_text(encoding="utf-8"))
    other = [key for key in made if found.get(key) != made[key]]
    if other:
        raise ValueError(f"{file} holds results with another {' and '.join(other)}; name another file, or remove it")
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m minillm.lab.twins", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", type=Path, default=Path("twins.json"), help="kept between runs (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=800, help="of training, for each twin (default: %(default)s)")
    parser.add_argument("--healing", type=int, default=60, help="steps of healing SmolLM2 (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=16, help="to test SmolLM2 with (default: %(default)s)")
    options = parser.parse_args(arguments)
    if min(options.steps, options.healing, options.windows) < 1:
        parser.error("at least one step and one window")
    try:
        results = begin(options.json, options.steps, options.healing, options.windows)
    except ValueError as problem:
        parser.error(str(problem))
    learned, held_out = read_text()
    as_bytes = [torch.tensor(list(text.encode())) for text in (learned, held_out)]
    run_twins(results, options.json, *as_bytes)
    run_smollm2(results, options.json, learned, held_out)
    print(about(results), twins_table(results), smollm2_table(results), sep="\n\n")


if __name__ == "__main__":
    main()
