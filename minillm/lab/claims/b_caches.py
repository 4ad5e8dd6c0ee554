"""The ledger's rows on what a cache must keep: sketches of prefill, decode and a block manager; padded batches.

Each mistake is written as shortly as it can be, in the place where it belongs, and runs beside the right thing on a
small model in float64. What comes out is compared as distributions of the next token, or as text.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm import ContiguousKV, NoCache, SamplingParams
from minillm.blocks import BlockPool
from minillm.engine import Engine, EngineRequest
from minillm.generation import next_logits
from minillm.lab.claims.decide import decide
from minillm.lab.claims.ledger import ALGORITHM, Figures, Finding, Ledger
from minillm.lab.claims.workbench import Workbench
from minillm.lab.tiny import tiny_model
from minillm.model import SequenceStore
from minillm.request import Span
from minillm.scheduler import Scheduler

ledger = Ledger()
ROUNDING = 1e-9  # of float64, generously: larger distances are mistakes
PROMPT = [3, 14, 15, 9, 2, 6, 5, 35, 8]
BLOCK = 4


def without_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every query sees every key, those behind it too."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(0, 1)


class AttendsFirst(ContiguousKV):
    """A decode step looks at the past, and writes its own row down afterwards."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = super().attend(layer, q, k, v)
        if len(q) > 1:  # the prompt is read as it should be
            return out
        past = (x[layer, :, : self.length].transpose(0, 1) for x in (self.k, self.v))
        return self.attention(q, *past)


class KeysOnly(ContiguousKV):
    """A decode step keeps its new key, and never computes its value. The two are lists that grow, as in a sketch."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = super().attend(layer, q, k, v)
        if len(q) > 1:
            self.prompt = len(q)
            return out
        k, v = self.k[layer, :, : self.length + 1], self.v[layer, :, : self.prompt]
        return F.scaled_dot_product_attention(q.transpose(0, 1), k, v, enable_gqa=True).transpose(0, 1)


def next_token(store: SequenceStore) -> Tensor:
    """The distribution after the prompt and two more tokens, each fed in a step of its own."""
    model = tiny_model(seed=0)
    for n in (0, 1, 2):
        logits = next_logits(model, [*PROMPT, 7, 21][: len(PROMPT) + n], store)
    return logits.softmax(-1)


def distance(store: SequenceStore) -> float | str:
    """Total variation from the right distribution, or the error that the sketch ends with."""
    try:
        return float((next_token(store) - next_token(NoCache())).abs().sum() / 2)
    except RuntimeError as error:
        return type(error).__name__


class Forgetful(BlockPool):
    """Whoever ends frees a block, whoever else may need it."""

    def release(self, block: int) -> None:
        self.block_of.pop(self.prefix_of.pop(block, None), None)
        self.references[block] = 0
        self.free.append(block)


class CannotGrow(Scheduler):
    """Blocks are given out when a text begins, and none later."""

    def give(self, request: EngineRequest, count: int, spans: list[Span]) -> int:
        if request.num_computed == 0:
            return super().give(request, count, spans)
        spans.append(Span(request, request.num_computed, count))
        return count


def greedy(n: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=n)


def second_owner(pool: type[BlockPool]) -> list[int]:
    """A text that shares its beginning with one that ends early, while a third one takes free blocks."""
    engine = Engine(tiny_model(seed=0), n_blocks=24, block_size=BLOCK, max_num_seqs=4)
    engine.scheduler.blocks = pool(24, BLOCK)
    first = engine.add([*PROMPT, 1], greedy(2))
    engine.step()
    second = engine.add([*PROMPT, 2], greedy(24))
    while first.finish_reason is None:
        engine.step()
    engine.add([11] * 16, greedy(8))
    while second.finish_reason is None:
        engine.step()
    return second.generation.tokens


def tokens_before_the_end(wanted: int) -> int:
    """How many tokens are written when the block table cannot grow."""
    engine = Engine(tiny_model(seed=0), n_blocks=24, block_size=BLOCK)
    engine.scheduler = CannotGrow(engine.blocks)
    request = engine.add(PROMPT, greedy(wanted))
    try:
        for _ in engine.stream(request):
            pass
    except IndexError:
        pass
    return len(request.pieces)


def sketches(bench: Workbench) -> Figures:
    room = tiny_model().config, len(PROMPT) + 2, torch.float64
    right, wrong = second_owner(BlockPool), second_owner(Forgetful)
    return {
        "right": distance(ContiguousKV(*room)),
        "no mask": distance(ContiguousKV(*room, attention=without_mask)),
        "attends first": distance(AttendsFirst(*room)),
        "keys only": distance(KeysOnly(*room)),
        "astray": sum(a != b for a, b in zip(right, wrong, strict=True)),
        "shared text": len(right),
        "written": tokens_before_the_end(20),
        "wanted": 20,
    }


@ledger.claim(
    "B11",
    sources="T1",
    text="Prefill without a mask, decode that attends and then appends its key, and a block manager that gives blocks "
    "at the start and frees them at the end do what is needed",
    notebook="02_kv_cache",
    scope=ALGORITHM,
    measure=sketches,
)
def five_slips(figures: Figures) -> Finding:
    distances = {name: figures[name] for name in ("no mask", "attends first", "keys only")}
    wrong = sum(isinstance(d, str) or d > ROUNDING for d in distances.values())
    wrong += (figures["astray"] > 0) + (figures["written"] < figures["wanted"])
    told = {name: d if isinstance(d, str) else f"{d:.2f}" for name, d in distances.items()}
    return Finding(
        wrong,
        "of five slips do harm",
        decide(not wrong),
        f"By the distance of the next token's distribution (a right cache: {figures['right']:.1g}): no causal mask in "
        f"the prefill {told['no mask']}; a decode step that attends before it appends {told['attends first']}; one "
        f"that keeps its key and computes no value {told['keys only']}, with more keys than values. A block that is "
        f"freed without counting its owners: {figures['astray']} of {figures['shared text']} tokens of the other owner "
        f"are others. A table that cannot grow: {figures['written']} of {figures['wanted']} tokens are written.",
    )


def padded_attention(rows: Tensor, lengths: list[int], masked: bool) -> Tensor:
    """rows: [3 for q, k, v, requests, heads, most tokens, head_dim], padded on the left; causal. -> like q"""
    most = rows.shape[3]
    seen = torch.ones(most, most, dtype=torch.bool).tril().expand(len(lengths), 1, most, most)
    if masked:
        real = torch.arange(most) >= most - torch.tensor(lengths)[:, None]
        seen = seen & (real[:, None, None] | torch.eye(most, dtype=torch.bool))  # padding sees itself: no row is empty
    return F.scaled_dot_product_attention(*rows, attn_mask=seen)


def in_a_batch(bench: Workbench) -> Figures:
    """The largest change of a short request's output when only its neighbour, or only its padding, is another.

    flat: the same for two requests in one list of tokens, with their lengths unknown to the store.
    """
    lengths, generator = [4, 9], torch.Generator().manual_seed(0)
    rows = torch.randn(3, 2, 2, 9, 8, generator=generator, dtype=torch.float64)
    neighbour, padding = rows.clone(), rows.clone()
    neighbour[:, 1] += 1
    padding[:, 0, :, : 9 - lengths[0]] += 1
    found = {}
    for masked in (False, True):
        own = [padded_attention(x, lengths, masked)[0, :, -lengths[0] :] for x in (rows, neighbour, padding)]
        name = "mask" if masked else "no mask"
        found[f"neighbour, {name}"] = float((own[1] - own[0]).abs().max())
        found[f"padding, {name}"] = float((own[2] - own[0]).abs().max())
    flat = [torch.cat([x[:, 1], x[:, 0, :, -lengths[0] :]], dim=2).transpose(1, 2) for x in (rows, neighbour)]
    for name, store in (("unknown", NoCache()), ("known", NoCache([9, lengths[0]]))):
        a, b = (store.attend(0, *x)[9:] for x in flat)
        found[f"flat, lengths {name}"] = float((a - b).abs().max())
    return found


@ledger.claim(
    "B13",
    sources="T3",
    text="In a padded batch, masks keep the requests apart",
    notebook="06_continuous_batching",
    scope=ALGORITHM,
    measure=in_a_batch,
)
def masks_in_a_batch(figures: Figures) -> Finding:
    leak = figures["neighbour, no mask"]
    return Finding(
        leak,
        "is the change of a request's output when its neighbour is another, without any padding mask",
        decide(leak > ROUNDING),
        "The batch axis keeps requests apart. The mask hides a request's own padding: if that is another, the output "
        f"changes by {figures['padding, no mask']:.2f} without the mask, by {figures['padding, mask']:.1g} with it. In "
        "one flat list of tokens there is no such axis, and something must say whose token is whose: a neighbour "
        f"changes the output by {figures['flat, lengths unknown']:.2f} if nothing does, and by "
        f"{figures['flat, lengths known']:.1g} if the lengths are known.",
    )
