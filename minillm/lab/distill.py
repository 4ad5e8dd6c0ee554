"""Teach a drafter to guess what the model will say, on text that the model itself wrote.

    python -m minillm.lab.distill FOLDER      # an hour or two on two cores; can be stopped and started again

1. `write_texts`. The model invents the questions too: after the words that open a user's turn in its chat template it
   writes one (Xu et al., "Magpie", 2024). Then it answers, half of the texts greedily, half at a temperature.
2. `read_features`. One pass over each text keeps the last hidden rows, in 16 bits.
3. `train`. The feature drafter learns the next hidden row (smooth L1) and the model's distribution (cross-entropy),
   from true rows and, a second time, from its own predictions, as it must when it guesses on.

Everything is seeded. What the folder holds already is not made again.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm, trange

from minillm.checkpoint import load
from minillm.engine import Engine
from minillm.feature_drafter import FeatureModel
from minillm.model import NoCache, Transformer
from minillm.sampling import SamplingParams
from minillm.tokenizer import Tokenizer

TEXTS = 96  # in a shard
QUESTION = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=96)
GREEDY = SamplingParams(temperature=0.0, max_tokens=256)
WARM = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=256)
SHORT_VOCABULARY = 8192
HELD_OUT = 1  # shards that are not learned from, the first


def write_texts(model: Transformer, tokenizer: Tokenizer, folder: Path, shards: int) -> None:
    """texts-N.json: a list of [prompt ids, answer ids]."""
    opening = tokenizer.render_chat([{"role": "user", "content": "?"}], False).split("?")[0]
    for shard in trange(shards, desc="texts"):
        file = folder / f"texts-{shard}.json"
        if file.exists():
            continue
        engine = Engine(model, tokenizer, n_blocks=2048, max_num_seqs=48)
        seeded = replace(QUESTION, seed=1_000_000 * (shard + 1))
        questions = engine.add_samples(tokenizer.encode(opening), TEXTS, seeded)
        for _ in engine.stream(*questions):
            pass
        chats = [[{"role": "user", "content": q.text}] for q in questions if q.finish_reason == "stop"]
        prompts = [tokenizer.encode_chat(chat) for chat in chats]
        params = [GREEDY if i % 2 else replace(WARM, seed=seeded.seed + i) for i in range(len(prompts))]
        answers = engine.generate(prompts, params)
        write_json(file, [[prompt, answer.tokens] for prompt, answer in zip(prompts, answers, strict=True)])


def write_json(file: Path, data: object) -> None:
    """All of it or nothing: an interrupted run leaves no half file."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(data))
    part.replace(file)


def texts_of(folder: Path, shard: int) -> list[tuple[list[int], list[int]]]:
    return [tuple(text) for text in json.loads((folder / f"texts-{shard}.json").read_text())]


@torch.inference_mode()
def read_features(model: Transformer, folder: Path, shards: int) -> None:
    """features-N.safetensors: the hidden rows of all texts of the shard, one below the other, in float16."""
    for shard in trange(shards, desc="features"):
        file = folder / f"features-{shard}.safetensors"
        if file.exists():
            continue
        rows = []
        for prompt, answer in texts_of(folder, shard):
            tokens = torch.tensor(prompt + answer, device=model.device)
            rows.append(model(tokens, torch.arange(len(tokens), device=model.device), NoCache()).half())
        save_file({"hidden": torch.cat(rows)}, file.with_suffix(".part"))
        file.with_suffix(".part").replace(file)


def frequent_tokens(folder: Path, shards: int) -> tuple[Tensor, float]:
    """The tokens that answers use most, and the share of the answers that they cover."""
    counts = Counter(token for shard in range(HELD_OUT, shards) for _, a in texts_of(folder, shard) for token in a)
    best = [token for token, _ in counts.most_common(SHORT_VOCABULARY)]
    covered = sum(counts[token] for token in best) / counts.total()
    best += sorted(set(range(2 * SHORT_VOCABULARY)) - set(best))[: SHORT_VOCABULARY - len(best)]
    return torch.tensor(sorted(best), dtype=torch.int32), covered


def batches(folder: Path, shards: range, tokens: int, seed: int) -> Iterator[tuple[Tensor, Tensor, list[int]]]:
    """(tokens [T], hidden [T, d_model], lengths) of whole texts, about `tokens` together, in a shuffled order."""
    order = torch.randperm(len(shards), generator=torch.Generator().manual_seed(seed))
    for shard in (shards[i] for i in order):
        texts = texts_of(folder, shard)
        lengths = [len(prompt) + len(answer) for prompt, answer in texts]
        hidden = load_file(folder / f"features-{shard}.safetensors")["hidden"].split(lengths)
        batch: list[int] = []
        for i in torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed + shard)).tolist():
            batch.append(i)
            if sum(lengths[j] for j in batch) >= tokens:
                yield together(texts, hidden, batch)
                batch = []
        if batch:
            yield together(texts, hidden, batch)


def together(texts: list, hidden: list[Tensor], batch: list[int]) -> tuple[Tensor, Tensor, list[int]]:
    ids = [torch.tensor(texts[i][0] + texts[i][1]) for i in batch]
    return torch.cat(ids), torch.cat([hidden[i] for i in batch]).float(), [len(x) for x in ids]


def losses(
    model: Transformer, head: Tensor, drafter: FeatureModel, batch: tuple[Tensor, Tensor, list[int]], steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each step of guessing on: the loss, and the share of rows whose best token is the model's.

    In step 1 row t is the model's own of token t; in step s it is what the drafter predicted in step s - 1. With the
    token t + 1 it has to give the model's row of that token.
    """
    tokens, hidden, lengths = batch
    positions = torch.cat([torch.arange(n) for n in lengths])
    to_come = torch.cat([torch.arange(n - 1, -1, -1) for n in lengths])  # tokens of its text behind each row
    embedded = model.embed(tokens.roll(-1)).detach()
    given = hidden
    for step in range(1, steps + 1):
        predicted = drafter(given, embedded, positions, NoCache(lengths))
        real = (to_come > 0) & (positions >= step - 1)
        target, guessed = hidden.roll(-1, 0)[real], predicted[real]
        wanted, logits = (target @ head.T), guessed @ head.T
        cross = -(wanted.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
        yield (
            cross + F.smooth_l1_loss(guessed, target),
            (logits.argmax(-1) == wanted.argmax(-1)).float().mean().detach(),
        )
        given = predicted.roll(1, 0)


def new_drafter(model: Transformer, vocabulary: Tensor, seed: int = 0) -> FeatureModel:
    drafter = FeatureModel(model.config, vocabulary)
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.02, generator=generator)
    return drafter


def train(
    model: Transformer,
    folder: Path,
    shards: int,
    epochs: int = 8,
    tokens: int = 2048,
    rate: float = 1e-3,
    steps: int = 2,
) -> FeatureModel:
    """Learn from all shards but the held-out ones. The state after each epoch lies in state.pt, to go on from."""
    vocabulary, covered = frequent_tokens(folder, shards)
    print(f"{len(vocabulary)} tokens of the vocabulary are {covered:.1%} of the answers")
    head = model.head.weight[vocabulary].detach().clone()
    drafter = new_drafter(model, vocabulary)
    optimizer = torch.optim.AdamW(drafter.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.01)
    learned, held_out = range(HELD_OUT, shards), range(HELD_OUT)
    per_epoch = sum(1 for _ in batches(folder, learned, tokens, 0))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=epochs * (per_epoch + 2), pct_start=0.05
    )
    parts = {"drafter": drafter, "optimizer": optimizer, "schedule": schedule}
    state, first = folder / "state.pt", 0
    if state.exists():
        saved = torch.load(state, weights_only=True)
        first = saved.pop("epoch")
        for name, values in saved.items():
            parts[name].load_state_dict(values)
    for epoch in range(first, epochs):
        for batch in tqdm(batches(folder, learned, tokens, epoch), f"epoch {epoch}", per_epoch):
            loss = sum(0.5**i * each for i, (each, _) in enumerate(losses(model, head, drafter, batch, steps)))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 0.5)
            optimizer.step()
            schedule.step()
        torch.save({name: part.state_dict() for name, part in parts.items()} | {"epoch": epoch + 1}, state)
        print(f"epoch {epoch}: right on held-out rows, step by step:", *shares(model, head, drafter, folder, held_out))
    return drafter


@torch.no_grad()
def shares(model: Transformer, head: Tensor, drafter: FeatureModel, folder: Path, shards: range) -> list[str]:
    """Of the held-out rows, how many a guess of step 1, 2 and 3 meets."""
    each = [[right for _, right in losses(model, head, drafter, b, 3)] for b in batches(folder, shards, 4096, 0)]
    return [f"{float(torch.stack(column).mean()):.1%}" for column in zip(*each, strict=True)]


def save(drafter: FeatureModel, file: Path) -> None:
    """In 16 bits, with what is needed to build it again."""
    tensors = {name: t.half() if t.is_floating_point() else t for name, t in drafter.state_dict().items()}
    save_file({name: t.contiguous() for name, t in tensors.items()}, file)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m minillm.lab.distill", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="for texts, features, and the drafter; kept between runs")
    parser.add_argument("--shards", type=int, default=16, help=f"of {TEXTS} texts each (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args(arguments)
    if options.shards <= HELD_OUT or options.epochs < 1:
        parser.error(f"at least {HELD_OUT + 1} shards and one epoch")
    options.folder.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load(device="cpu", packed=True)
    write_texts(model, tokenizer, options.folder, options.shards)
    read_features(model, options.folder, options.shards)
    save(train(model, options.folder, options.shards, options.epochs), options.folder / "drafter.safetensors")


if __name__ == "__main__":
    main()
