"""From scores to a token: the sampling rules, in one fixed and documented order.

The model gives one logit for each token of the vocabulary. The rules below turn a row of logits into a distribution
(`distribution`), from which one token is drawn (`sample`). They apply in this order, each to what the last one left:

1. penalties on tokens seen before: repetition, then presence and frequency;
2. end tokens are barred until `min_tokens` have been generated;
3. temperature: logits are divided by it; 0 means the single best token, and nothing below matters;
4. top-k: only the k best stay;
5. top-p: of these, renormalised, the smallest set of best tokens whose probabilities reach p (Holtzman et al. 2020,
   "The Curious Case of Neural Text Degeneration"); the best token always stays;
6. min-p: of these, tokens with at least min_p times the best one's probability (Nguyen et al. 2024).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class SamplingParams:
    """What a caller may ask for. The defaults sample from the model's own distribution until it ends.

    temperature:  0 is greedy; 1 leaves the distribution as it is; higher is flatter.
    top_k:        0 is off.            top_p: 1 is off.            min_p: 0 is off.
    repetition_penalty: 1 is off; divides the positive and multiplies the negative logits of each token that occurs in
                  prompt or output, once (Keskar et al. 2019, "CTRL").
    presence_penalty, frequency_penalty: 0 is off; subtracted once, or once for each occurrence, from the logits of
                  tokens that occur in the output.
    seed:         None draws a fresh one. The same seed gives the same tokens from the same logits.
    max_tokens, min_tokens: how many tokens are generated at most and, unless the context ends, at least.
    stop_ids:     tokens that end the text, besides the tokenizer's own end tokens; one id or several.
    stop:         strings that end the text; they are not part of it.
    ignore_eos:   do not end at the tokenizer's end tokens.
    logprobs:     also give the logarithm of each chosen token's probability under the model's own logits, before any
                  rule, and that many of the most probable tokens with theirs; None is off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int = 128
    min_tokens: int = 0
    stop_ids: tuple[int, ...] | int = ()
    stop: tuple[str, ...] | str = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        one_or_many(self, "stop_ids", int)
        one_or_many(self, "stop", str)
        for name in NUMBERS:
            check(name, getattr(self, name), True, "a finite number")
        check("temperature", self.temperature, self.temperature >= 0, "0 (greedy) or more")
        whole("top_k", self.top_k, "0 (off) or a positive whole number")
        check("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1 (off)")
        check("min_p", self.min_p, 0 <= self.min_p <= 1, "between 0 (off) and 1")
        check("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "above 0 (1 is off)")
        whole("max_tokens", self.max_tokens, "0 or a positive whole number")
        whole("min_tokens", self.min_tokens, "0 or a positive whole number")
        check(
            "min_tokens", self.min_tokens, self.min_tokens <= self.max_tokens, f"at most max_tokens ({self.max_tokens})"
        )
        if self.seed is not None:
            whole("seed", self.seed, "None, 0 or a positive whole number")
            check("seed", self.seed, self.seed < 2**64, "below 2**64")
        if self.logprobs is not None:
            whole("logprobs", self.logprobs, "None (off), 0 or a positive whole number")
        if "" in self.stop:
            raise ValueError("stop strings must not be empty")

    @property
    def needs_history(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


def one_or_many(params: SamplingParams, name: str, kind: type) -> None:
    """Let one value stand for a tuple of one."""
    value = getattr(params, name)
    value = (value,) if isinstance(value, kind) or not isinstance(value, Iterable) else tuple(value)
    if not all(isinstance(item, kind) for item in value):
        raise ValueError(f"{name} must be {kind.__name__} values, not {value!r}")
    object.__setattr__(params, name, value)


def check(name: str, value: float, good: bool, wanted: str) -> None:
    if not isinstance(value, (int, float)) or not math.isfinite(value) or not good:
        raise ValueError(f"{name} must be {wanted}, not {value!r}")


def whole(name: str, value: int, wanted: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be {wanted}, not {value!r}")


def penalize(logits: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """Rule 1. logits: [vocab] -> a new [vocab]."""
    logits = logits.clone()
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt, *output}), dtype=torch.long, device=logits.device)
        old = logits[seen]
        logits[seen] = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
    if output:
        ids = torch.tensor(list(output), dtype=torch.long, device=logits.device)
        counts = torch.bincount(ids, minlength=len(logits)).to(logits.dtype)
        logits -= params.frequency_penalty * counts + params.presence_penalty * counts.sign()
    return logits


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Rule 4: the k largest stay, the rest become -inf. Of equals at the border, the lower ids stay."""
    if k == 0 or k >= len(logits):
        return logits
    keep = logits.sort(descending=True, stable=True).indices[:k]
    return torch.full_like(logits, -torch.inf).scatter(0, keep, logits[keep])


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Rule 5: the smallest set of most probable tokens that reaches p stays, the one that crosses p included."""
    if p == 1:
        return logits
    probabilities, order = logits.softmax(-1).sort(descending=True, stable=True)
    before = probabilities.cumsum(-1) - probabilities  # the mass of all better tokens
    drop = before >= p
    drop[0] = False  # in float32 a tiny p is 0, and would drop even the best
    return logits.scatter(0, order[drop], -torch.inf)


def keep_min_p(logits: Tensor, min_p: float) -> Tensor:
    """Rule 6: tokens at least min_p times as probable as the best stay."""
    if min_p == 0:
        return logits
    return logits.masked_fill(logits < logits.max() + math.log(min_p), -torch.inf)


def with_history(
    logits: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], end_ids: Sequence[int]
) -> Tensor:
    """Rules 1 and 2, which look at the tokens so far. Refuses logits from which no token can be chosen."""
    require_numbers(logits, "the weights or an earlier computation are broken")
    if params.needs_history:
        logits = penalize(logits, params, prompt, output)
    if len(output) < params.min_tokens and end_ids:
        logits = logits.clone()
        logits[list(end_ids)] = -torch.inf
    require_numbers(logits, "the penalties are too large, or every token is barred")
    return logits


def distribution(
    logits: Tensor,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    end_ids: Sequence[int] = (),
) -> Tensor:
    """All rules in order. logits: [vocab], prompt and output: the tokens so far. -> probabilities [vocab]

    `end_ids` are barred while fewer than `min_tokens` were generated. At temperature 0 the result is one-hot.
    """
    logits = with_history(logits, params, prompt, output, end_ids)
    if params.temperature == 0:
        return torch.zeros_like(logits).scatter(0, logits.argmax(-1, keepdim=True), 1.0)
    wide = (logits - logits.max()).double()  # the best is 0; in float32 a tiny temperature would be 0, a huge one inf
    logits = (wide / params.temperature).to(logits.dtype)
    logits = keep_top_k(logits, params.top_k)
    logits = keep_top_p(logits, params.top_p)
    logits = keep_min_p(logits, params.min_p)
    return logits.softmax(-1)


def require_numbers(logits: Tensor, cause: str) -> None:
    """A NaN compares false with everything, so an argmax over it would quietly pick some token."""
    best = logits.max()  # NaN if any entry is
    if not torch.isfinite(best):
        raise ValueError(
            f"the best logit is {'NaN' if best.isnan() else best.item()}: no token can be chosen from them; {cause}"
        )


def sample(
    logits: Tensor,
    params: SamplingParams,
    generator: torch.Generator | None = None,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    end_ids: Sequence[int] = (),
) -> int:
    """Draw one token from `distribution(...)`. `generator` is on the CPU, so that a seed means the same anywhere."""
    if params.temperature == 0:  # without the way over 0 and 1 for each token of the vocabulary
        return int(with_history(logits, params, prompt, output, end_ids).argmax())
    probabilities = distribution(logits, params, prompt, output, end_ids)
    return draw(probabilities.cpu(), generator)


def draw(probabilities: Tensor, generator: torch.Generator | None) -> int:
    """One token. probabilities: [vocab], on the CPU; they need not add up to 1."""
    return int(torch.multinomial(probabilities, 1, generator=generator))


def new_generator(params: SamplingParams) -> torch.Generator:
    """The random numbers of one request, and of no other: its tokens do not depend on its neighbours."""
    generator = torch.Generator()
    if params.seed is None:
        generator.seed()
    else:
        generator.manual_seed(params.seed)
    return generator


def top_logprobs(logits: Tensor, token: int, n: int) -> tuple[float, dict[int, float]]:
    """The chosen token's log-probability under the model's own logits, and those of the n most probable tokens."""
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(min(n, len(logprobs)))
    return float(logprobs[token]), dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
