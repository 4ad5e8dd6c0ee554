"""A drafter of one layer that guesses the model's next hidden row, and from it the next token.

The model's last hidden row says much about more than one token to come. `FeatureModel` takes that row together with the
embedding of the token that was then chosen, and predicts the next hidden row; the model's own head turns it into
logits. Its own predictions are its next input, so it can go on guessing. One layer, and a head that keeps the frequent
tokens only: guesses cost little, and what is never guessed is simply never accepted.

Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (2024), section 3.1; the short head:
Zhao et al., "FR-Spec" (2025).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from minillm.checkpoint import require_usable
from minillm.config import ModelConfig
from minillm.drafters import Guesses, Together
from minillm.kv_cache import ContiguousKV
from minillm.linear import Linear, adopt_choices, pack_all
from minillm.model import Block, KVStore, RMSNorm, Rope, Transformer
from minillm.speculative import Drafter, Proposal
from minillm.writing import Writer

TRAINED = Path(__file__).parent / "weights" / "smollm2-135m-drafter.safetensors"


class FeatureModel(nn.Module):
    """(hidden row of token t, embedding of token t + 1) -> hidden row of token t + 1, with one decoder layer.

    vocabulary: [short] the ids of the tokens that it may guess.
    """

    def __init__(self, config: ModelConfig, vocabulary: Tensor, **kwargs):
        super().__init__()
        self.config = replace(config, n_layers=1)
        self.hidden_norm = RMSNorm(config.d_model, config.norm_eps, **kwargs)
        self.embedding_norm = RMSNorm(config.d_model, config.norm_eps, **kwargs)
        self.join = Linear(2 * config.d_model, config.d_model, bias=False, **kwargs)
        self.block = Block(config, **kwargs)
        self.norm = RMSNorm(config.d_model, config.norm_eps, **kwargs)
        self.rope = Rope(config.head_dim, config.rope_theta, config.rope_scaling)
        self.register_buffer("vocabulary", vocabulary)

    def forward(self, hidden: Tensor, embedded: Tensor, positions: Tensor, kv: KVStore) -> Tensor:
        """hidden, embedded: [T, d_model]; positions: [T], of the hidden rows. -> [T, d_model]"""
        x = self.join(torch.cat([self.hidden_norm(hidden), self.embedding_norm(embedded)], dim=-1))
        x = self.block(x, self.rope(positions, x.dtype), partial(kv.attend, 0))
        return self.norm(x)


def guessing_dtype(model: Transformer) -> torch.dtype:
    """The model's, or 16 bits where a CPU multiplies them: half the bytes to read. It rounds guesses, never a text."""
    on_cpu = model.device.type == "cpu" and model.dtype == torch.float32
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", bool)  # absent where PyTorch has no oneDNN
    return torch.bfloat16 if on_cpu and supported() else model.dtype


def load_drafter(
    model: Transformer, file: str | os.PathLike = TRAINED, dtype: torch.dtype | None = None
) -> FeatureDrafter:
    """A trained drafter, on the model's device. The one that comes with the package is for SmolLM2 135M
    (weights/README.md). On another model of that size its guesses are of no use, and do no harm.

    dtype: what it computes in; by default `guessing_dtype`.

    Raises OSError where there is no such file, ValueError for another dtype than load's, and if the file is damaged or
    made for a model of other dimensions.
    """
    if not isinstance(model, Transformer):
        raise ValueError(f"model must be a Transformer, as minillm.load() gives, not {type(model).__name__}")
    dtype = guessing_dtype(model) if dtype is None else dtype
    require_usable(dtype, model.device)
    try:
        weights = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or no safetensors file ({error})") from None
    ids = weights.get("vocabulary", torch.empty(0))
    sound = ids.ndim == 1 and len(ids) > 0 and ids.dtype in (torch.int32, torch.int64)
    if not sound or not 0 <= int(ids.min()) <= int(ids.max()) < model.config.vocab_size:
        raise ValueError(f"{file} is no drafter for a vocabulary of {model.config.vocab_size} tokens")
    features = FeatureModel(model.config, ids, dtype=dtype, device=model.device)
    try:
        features.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip()
        raise ValueError(f"{file} is no drafter for this model: {reason}") from None
    return FeatureDrafter(model, features.requires_grad_(False).to(model.device))


class Memory:
    """What is known of one text: the layer's cache of the tokens from `start` on, and `pending`, the model's hidden
    rows of the tokens behind those."""

    def __init__(self, kv: ContiguousKV, start: int, hidden: Tensor):
        self.kv, self.start, self.pending = kv, start, hidden

    @property
    def cached(self) -> int:
        """The text's tokens that the cache ends with."""
        return self.start + self.kv.length

    @property
    def known(self) -> int:
        return self.cached + len(self.pending)


class FeatureDrafter(Drafter):
    """Guesses with a trained `FeatureModel`. It sees the rows that `observe` gives, and guesses on top of them."""

    def __init__(self, model: Transformer, features: FeatureModel):
        if features.config.d_model != model.config.d_model:
            raise ValueError(
                f"the drafter is made for hidden rows of {features.config.d_model} numbers, the model's have "
                f"{model.config.d_model}"
            )
        self.model = self.target = model
        self.features, self.dtype = features, features.norm.weight.dtype
        rows = nn.Parameter(model.head.rows(features.vocabulary, self.dtype).detach(), requires_grad=False)
        self.head = Linear(*rows.shape[::-1], weight=rows)
        for module in (features, self.head):
            if self.dtype == model.dtype:
                adopt_choices(module, model.head)
            else:
                pack_all(module)
        self.memories: WeakKeyDictionary[Writer, Memory] = WeakKeyDictionary()

    def observe(self, writer: Writer, start: int, hidden: Tensor) -> None:
        """After a gap (tokens found in a shared cache) or a step back (a preemption) it begins anew from there."""
        memory, hidden = self.memories.get(writer), hidden.to(self.dtype)
        if memory is not None and memory.known == start:
            memory.pending = torch.cat([memory.pending, hidden])
        else:
            kv = ContiguousKV(self.features.config, max(1, writer.limit - start), self.dtype, self.model.device)
            self.memories[writer] = Memory(kv, start, hidden)

    @torch.inference_mode()
    def propose(self, writers: Sequence[Writer], counts: Sequence[int]) -> list[Proposal]:
        drafts = [Guesses(w, n if self.ready(w) else 0) for w, n in zip(writers, counts, strict=True)]
        at_work = [draft for draft in drafts if draft.count > 0]
        memories = [self.memories[draft.writer] for draft in at_work]
        rows = [memory.pending for memory in memories]
        certain = [memory.kv.length + len(memory.pending) for memory in memories]
        while at_work:
            predicted = self.feed(at_work, rows)
            for draft, logits in zip(at_work, self.logits(predicted), strict=True):
                draft.add(logits)
            going_on = [i for i, draft in enumerate(at_work) if len(draft.ids) < draft.count]
            at_work, rows = [at_work[i] for i in going_on], [predicted[i : i + 1] for i in going_on]
        for memory, length in zip(memories, certain, strict=True):  # predicted rows are no part of the past
            memory.kv.truncate(length)
            memory.pending = memory.pending[:0]
        return [draft.proposal for draft in drafts]

    def feed(self, drafts: Sequence[Guesses], rows: Sequence[Tensor]) -> Tensor:
        """Take hidden rows in, each with the token that follows it. -> the next hidden row of each text, predicted"""
        memories = [self.memories[draft.writer] for draft in drafts]
        counts, device = [len(r) for r in rows], self.model.device
        texts = [draft.writer.tokens + draft.ids for draft in drafts]
        following = [t[m.cached + 1 : m.cached + 1 + n] for t, m, n in zip(texts, memories, counts, strict=True)]
        embedded = self.model.embed(torch.tensor([i for ids in following for i in ids], device=device)).to(self.dtype)
        positions = [torch.arange(m.cached, m.cached + n, device=device) for m, n in zip(memories, counts, strict=True)]
        store = Together([memory.kv for memory in memories], counts)
        predicted = self.features(torch.cat(list(rows)), embedded, torch.cat(positions), store)
        for memory, n in zip(memories, counts, strict=True):
            memory.kv.commit(n)
        return predicted[torch.tensor(counts, device=device).cumsum(0) - 1]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [texts, d_model] -> [texts, vocab_size], -inf for tokens that are never guessed"""
        logits = self.head(hidden).float()
        nothing = logits.new_full((len(hidden), self.model.config.vocab_size), -torch.inf)
        return nothing.index_copy_(1, self.features.vocabulary.long(), logits)

    def ready(self, writer: Writer) -> bool:
        """Whether it has seen the rows of all tokens but the last, and not guessed from them yet."""
        memory = self.memories.get(writer)
        return memory is not None and len(memory.pending) > 0 and memory.known == len(writer.tokens) - 1

    def release(self, writer: Writer) -> None:
        self.memories.pop(writer, None)
