"""Teach a drafter to guess what the model will say, on text that the model itself wrote.

    python -m minillm.lab.distill FOLDER      # an hour or two on two cores; can be stopped and started again

1. `write_texts`. The model invents the questions too: after the words that open a user's turn in its chat template it
   writes one (Xu et al., "Magpie", 2024). Then it answers, half of the texts greedily, half at a temperature.
2. `read_features`. One pass over each text keeps the last hidden rows, in 16 bits.
3. `train`. The feature drafter learns the next hidden row (smooth L1) and the model's distribution (cross-entropy),
   from true rows first, later from its own predictions too, as it must when it guesses on.

Everything is seeded. What the folder holds already is not made again.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
STEPS, LATER = 3, 0.7  # guesses in a chain that is learned, and the weight of each against the one before


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


def answer_counts(folder: Path, shards: range) -> Counter[int]:
    return Counter(token for shard in shards for _, answer in texts_of(folder, shard) for token in answer)


def frequent_tokens(folder: Path, shards: int) -> tuple[Tensor, float]:
    """The tokens that answers use most, and the share of the held-out answers that they cover."""
    counts, new = answer_counts(folder, range(HELD_OUT, shards)), answer_counts(folder, range(HELD_OUT))
    best = [token for token, _ in counts.most_common(SHORT_VOCABULARY)]
    best += sorted(set(range(2 * SHORT_VOCABULARY)) - set(best))[: SHORT_VOCABULARY - len(best)]
    return torch.tensor(sorted(best), dtype=torch.int32), sum(new[token] for token in best) / new.total()


@dataclass(frozen=True)
class Batch:
    """Whole texts, one below the other."""

    tokens: Tensor  # [T]
    hidden: Tensor  # [T, d_model]
    lengths: list[int]
    answers: Tensor  # [T]: whether the token behind it is part of an answer, that is, one which will be guessed


def batches(folder: Path, shards: range, tokens: int, seed: int) -> Iterator[Batch]:
    """All texts in a shuffled order, at least `tokens` together (but for the last of a shard)."""
    order = torch.randperm(len(shards), generator=torch.Generator().manual_seed(seed))
    for shard in (shards[i] for i in order):
        texts = texts_of(folder, shard)
        lengths = [len(prompt) + len(answer) for prompt, answer in texts]
        hidden = load_file(folder / f"features-{shard}.safetensors")["hidden"].split(lengths)
        chosen: list[int] = []
        for i in torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed + shard)).tolist():
            chosen.append(i)
            if sum(lengths[j] for j in chosen) >= tokens:
                yield together([texts[j] for j in chosen], [hidden[j] for j in chosen])
                chosen = []
        if chosen:
            yield together([texts[j] for j in chosen], [hidden[j] for j in chosen])


def together(texts: Sequence[tuple[list[int], list[int]]], hidden: Sequence[Tensor]) -> Batch:
    lengths = [len(prompt) + len(answer) for prompt, answer in texts]
    ids = [token for prompt, answer in texts for token in prompt + answer]
    answers = [i >= len(p) - 1 for (p, _), n in zip(texts, lengths, strict=True) for i in range(n)]
    return Batch(torch.tensor(ids), torch.cat(list(hidden)).float(), lengths, torch.tensor(answers))


class Unrolled:
    """The drafter's cache for all its chains of guesses at once: one begins at each row of each text.

    In step s, row t belongs to the chain from row t - s + 1. It sees the true rows up to there, and then the chain's
    own: of step 2 at the next place, and so on. (After Zhang et al., "HASS", 2024.)
    """

    def __init__(self, lengths: list[int]):
        self.lengths = lengths
        self.steps: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        self.steps.append(tuple(x.repeat_interleave(group, 1).split(self.lengths) for x in (k, v)))
        texts = enumerate(q.split(self.lengths))
        return torch.cat([self.one(q, [k[i] for k, _ in self.steps], [v[i] for _, v in self.steps]) for i, q in texts])

    @staticmethod
    def one(q: Tensor, ks: list[Tensor], vs: list[Tensor]) -> Tensor:
        """q, and k and v of each step so far: [n, heads, head_dim]"""
        n, behind = len(q), len(ks) - 1
        seen = torch.ones(n, n, dtype=torch.bool).tril(-behind)
        true = torch.einsum("ihd,jhd->ihj", q, ks[0]).masked_fill(~seen[:, None], -torch.inf)
        own = [(k.roll(behind - s, 0), v.roll(behind - s, 0)) for s, (k, v) in enumerate(zip(ks, vs, strict=True)) if s]
        scores = torch.cat([true, *((q * k).sum(-1, keepdim=True) for k, _ in own)], dim=-1)
        weights = (scores.float() / q.shape[-1] ** 0.5).softmax(-1).to(q.dtype)
        out = torch.einsum("ihj,jhd->ihd", weights[..., :n], vs[0])
        return out + sum(weights[..., n + i, None] * v for i, (_, v) in enumerate(own))


def losses(
    model: Transformer, head: Tensor, drafter: FeatureModel, batch: Batch, steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each step of guessing on: the loss, and the share of rows whose best token is the model's best of the short
    vocabulary.

    In step 1 row t is the model's own of token t; in step s it is what the drafter predicted in step s - 1. With the
    token t + 1 it has to give the model's row of that token. Tokens of answers count.
    """
    positions = torch.cat([torch.arange(n) for n in batch.lengths])
    to_come = torch.cat([torch.arange(n - 1, -1, -1) for n in batch.lengths])  # tokens of its text behind each row
    embedded = model.embed(batch.tokens.roll(-1)).detach()
    following, given, cache = batch.hidden.roll(-1, 0), batch.hidden, Unrolled(batch.lengths)
    with torch.no_grad():
        distribution = (following @ head.T).float().softmax(-1)
    for step in range(1, steps + 1):
        predicted = drafter(given, embedded, positions, cache).float()
        real = (to_come > 0) & batch.answers & (positions >= step - 1)
        wanted, logits = distribution[real], (predicted[real] @ head.T).float()
        right = (logits.argmax(-1) == wanted.argmax(-1)).float().mean()
        yield F.cross_entropy(logits, wanted) + F.smooth_l1_loss(predicted[real], following[real]), right
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
    epochs: int = 12,
    tokens: int = 256,
    rate: float = 1e-3,
    dtype: torch.dtype = torch.bfloat16,
) -> FeatureModel:
    """Learn from all shards but the held-out ones: first single guesses, in the second half of the epochs to guess on.

    The state after each epoch lies in state.pt, to go on from. dtype: of the matrix products.
    """
    vocabulary, covered = frequent_tokens(folder, shards)
    print(f"{len(vocabulary)} tokens of the vocabulary are {covered:.1%} of the held-out answers")
    head = model.head.weight[vocabulary].detach().clone()
    drafter = new_drafter(model, vocabulary)
    optimizer = torch.optim.AdamW(drafter.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.01)
    learned = range(HELD_OUT, shards)
    per_epoch = sum(1 for _ in batches(folder, learned, tokens, 0))  # in another order it can be a few more
    total = epochs * (per_epoch + len(learned))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=total, pct_start=0.05)
    parts = {"drafter": drafter, "optimizer": optimizer, "schedule": schedule}
    for epoch in range(restore(parts, folder), epochs):
        for batch in tqdm(batches(folder, learned, tokens, epoch), f"epoch {epoch}", per_epoch):
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                steps = losses(model, head, drafter, batch, 1 if epoch < epochs // 2 else STEPS)
                loss = sum(LATER**i * each for i, (each, _) in enumerate(steps))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 0.5)
            optimizer.step()
            schedule.step()
        torch.save(
            {name: part.state_dict() for name, part in parts.items()} | {"epoch": epoch + 1}, folder / "state.pt"
        )
        print(
            f"epoch {epoch}: right on held-out rows, step by step:", *shares(model, head, drafter, folder), flush=True
        )
    return drafter


def restore(parts: dict, folder: Path) -> int:
    """Load what an earlier run has left. -> its epochs"""
    if not (folder / "state.pt").exists():
        return 0
    saved = torch.load(folder / "state.pt", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return saved["epoch"]


@torch.no_grad()
def shares(model: Transformer, head: Tensor, drafter: FeatureModel, folder: Path, steps: int = 5) -> list[str]:
    """Of the held-out rows, how many guesses are right, the tokens before them in the chain being the true ones."""
    each = [[right for _, right in losses(model, head, drafter, b, steps)] for b in held_out(folder)]
    return [f"{float(torch.stack(column).mean()):.1%}" for column in zip(*each, strict=True)]


def held_out(folder: Path) -> Iterator[Batch]:
    return batches(folder, range(HELD_OUT), 4096, 0)


def save(drafter: FeatureModel, file: Path) -> None:
    """In 16 bits, with what is needed to build it again."""
    tensors = {name: t.half() if t.is_floating_point() else t for name, t in drafter.state_dict().items()}
    save_file({name: t.contiguous() for name, t in tensors.items()}, file)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m minillm.lab.distill", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="for texts, features, and the drafter; kept between runs")
    parser.add_argument("--shards", type=int, default=16, help=f"of {TEXTS} texts each (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--float32", action="store_true", help="for processors without bfloat16 products")
    options = parser.parse_args(arguments)
    if options.shards <= HELD_OUT or options.epochs < 1:
        parser.error(f"at least {HELD_OUT + 1} shards and one epoch")
    options.folder.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load(device="cpu", packed=True)
    write_texts(model, tokenizer, options.folder, options.shards)
    read_features(model, options.folder, options.shards)
    dtype = torch.float32 if options.float32 else torch.bfloat16
    drafter = train(model, options.folder, options.shards, options.epochs, dtype=dtype)
    save(drafter, options.folder / "drafter.safetensors")


if __name__ == "__main__":
    main()
