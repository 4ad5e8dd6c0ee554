"""Who guesses for speculative sampling: the text's own past, a smaller model, the model's own first layers.

* `NgramDrafter` looks the last tokens up in the text, and guesses what followed them there. It costs next to nothing,
  and is good where a text repeats itself: code, quotations, answers about a given text.
* `ModelDrafter` lets a second model with the same vocabulary write on. All texts of a step go through it together.
* `LayerSkipDrafter` takes the model's own first layers and its head for that second model.

Saxena, "Prompt Lookup Decoding" (2023); Leviathan et al. (2023), section 3.6; Elhoushi et al., "LayerSkip" (2024),
where a model is trained so that its first layers guess well; with layers left out in the middle, Zhang et al.,
"Draft & Verify" (2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from minillm.blocks import require_counts
from minillm.chat import common_prefix
from minillm.kv_cache import ContiguousKV
from minillm.model import KVStore, Transformer
from minillm.sampling import draw
from minillm.speculative import Drafter, Proposal
from minillm.writing import Writer


class NgramDrafter(Drafter):
    """Guess what followed the text's last n tokens where they occurred last: the longest n from `most` to `least`."""

    def __init__(self, most: int = 3, least: int = 1):
        require_counts(most=most, least=least)
        if least > most:
            raise ValueError(f"least ({least}) must not be above most ({most})")
        self.most, self.least = most, least

    def propose(self, writers: Sequence[Writer], counts: Sequence[int]) -> list[Proposal]:
        return [Proposal(self.look_up(w.tokens, n)) for w, n in zip(writers, counts, strict=True)]

    def look_up(self, tokens: list[int], count: int) -> list[int]:
        for n in range(min(self.most, len(tokens) - 1), self.least - 1, -1):
            wanted = tokens[-n:]
            for at in range(len(tokens) - n - 1, -1, -1):
                if tokens[at : at + n] == wanted:
                    return tokens[at + n : at + n + count]
        return []


@dataclass
class Guesses:
    """What is guessed for one text so far."""

    writer: Writer
    count: int  # guesses that are wanted
    ids: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)

    def add(self, logits: Tensor) -> None:
        """Guess one more token from the drafter's logits [vocab_size], by the text's own rules. Where these leave
        nothing to choose, no more is guessed: if something is wrong, the model's own rows will say it."""
        writer = self.writer
        try:
            if writer.params.temperature == 0:
                self.ids.append(writer.choose(logits, self.ids))
            else:
                self.rows.append(writer.distribution(logits, self.ids).cpu())
                self.ids.append(draw(self.rows[-1], writer.generator))
        except ValueError:
            self.count = len(self.ids)

    @property
    def proposal(self) -> Proposal:
        return Proposal(self.ids, torch.stack(self.rows) if self.rows else None)


@dataclass
class Cache:
    """The drafter's past of one text: which tokens are in its store."""

    kv: ContiguousKV
    tokens: list[int] = field(default_factory=list)

    def rewind(self, tokens: list[int]) -> None:
        """Forget what is not the beginning of `tokens`, and always the last of them: it gives the first guess."""
        same = common_prefix(self.tokens, tokens[:-1])
        self.kv.truncate(same)
        del self.tokens[same:]


class Together:
    """The stores of several texts as the one store of a pass over all of them."""

    def __init__(self, stores: Sequence[KVStore], counts: Sequence[int]):
        self.stores, self.counts = stores, list(counts)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(self.stores, q.split(self.counts), k.split(self.counts), v.split(self.counts), strict=True)
        return torch.cat([kv.attend(layer, *part) for kv, *part in parts])


class ModelDrafter(Drafter):
    """A smaller model that writes on, with a cache of its own for each text."""

    def __init__(self, model: Transformer):
        self.model = model
        self.caches: WeakKeyDictionary[Writer, Cache] = WeakKeyDictionary()

    @torch.inference_mode()
    def propose(self, writers: Sequence[Writer], counts: Sequence[int]) -> list[Proposal]:
        context = self.model.config.max_context
        drafts = [Guesses(w, min(n, context - len(w.tokens))) for w, n in zip(writers, counts, strict=True)]
        at_work = [draft for draft in drafts if draft.count > 0]
        for draft in at_work:
            self.cache_of(draft.writer).rewind(draft.writer.tokens)
        while at_work:
            for draft, row in zip(at_work, self.feed(at_work), strict=True):
                draft.add(row)
            at_work = [draft for draft in at_work if len(draft.ids) < draft.count]
        return [draft.proposal for draft in drafts]

    def feed(self, drafts: Sequence[Guesses]) -> Tensor:
        """Send all tokens that the caches do not hold through the model. -> logits [texts, vocab_size]"""
        caches = [self.cache_of(draft.writer) for draft in drafts]
        new = [(d.writer.tokens + d.ids)[len(c.tokens) :] for d, c in zip(drafts, caches, strict=True)]
        counts, device = [len(ids) for ids in new], self.model.device
        tokens = torch.tensor([i for ids in new for i in ids], device=device)
        places = [torch.arange(len(c.tokens), len(c.tokens) + n) for c, n in zip(caches, counts, strict=True)]
        hidden = self.model(tokens, torch.cat(places).to(device), Together([cache.kv for cache in caches], counts))
        for cache, ids in zip(caches, new, strict=True):
            cache.kv.commit(len(ids))
            cache.tokens += ids
        return self.model.logits(hidden[torch.tensor(counts, device=device).cumsum(0) - 1])

    def cache_of(self, writer: Writer) -> Cache:
        if writer not in self.caches:
            capacity = min(writer.limit, self.model.config.max_context)
            self.caches[writer] = Cache(ContiguousKV(self.model.config, capacity, self.model.dtype, self.model.device))
        return self.caches[writer]

    def release(self, writer: Writer) -> None:
        self.caches.pop(writer, None)


class LayerSkipDrafter(ModelDrafter):
    """The model's own first `n_layers`, then its last norm and its head.

    These layers' keys and values of decided tokens are the model's own. Where a text has a store for itself
    (`ContiguousKV`), the drafter reads and writes there: rows of guesses lie behind the past, and the verification
    writes the same again.
    """

    def __init__(self, model: Transformer, n_layers: int):
        require_counts(n_layers=n_layers)
        if n_layers >= model.config.n_layers:
            raise ValueError(f"n_layers must be below the model's {model.config.n_layers}, not {n_layers}")
        super().__init__(first_layers(model, n_layers))
        self.target = model
        self.stores: WeakKeyDictionary[Writer, ContiguousKV] = WeakKeyDictionary()

    def begin(self, writer: Writer, kv: KVStore) -> None:
        if isinstance(kv, ContiguousKV):
            self.stores[writer] = kv

    def propose(self, writers: Sequence[Writer], counts: Sequence[int]) -> list[Proposal]:
        for writer in writers:
            if writer in self.stores:
                kv = self.stores[writer]
                self.caches[writer] = Cache(kv.first_layers(self.model.config.n_layers), writer.tokens[: kv.length])
        return super().propose(writers, counts)

    def release(self, writer: Writer) -> None:
        super().release(writer)
        self.stores.pop(writer, None)


def first_layers(model: Transformer, n_layers: int) -> Transformer:
    """A model of the first layers, with the same weights in the same memory."""
    part = Transformer(replace(model.config, n_layers=n_layers), model.dtype, device="meta")
    part.embed, part.rope, part.norm, part.head = model.embed, model.rope, model.norm, model.head
    part.blocks = nn.ModuleList(model.blocks[:n_layers])
    return part
