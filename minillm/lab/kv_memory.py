"""Where the memory of many texts goes: slots that are set aside for keys and values, and slots that are used.

A slot is the room for one token's keys and values. A text of `prompt` + `output` tokens fills `kept` slots in the end
(its last token is chosen, and never fed). A cache in one piece sets all slots of a text aside when it begins, as many
as it may come to need; a cache of blocks sets aside one block at a time. `contiguous` and `paged` count what that comes
to when each text has ended. `run_lengths` sends the texts through the real scheduler and the real block pool, without
a model, and measures it, at each text's end and over time.

Kwon et al., "PagedAttention" (2023), sections 3.1 and 4.2; the lengths: section 6.1, figure 11.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources

from minillm.blocks import BlockPool
from minillm.policies import Policy
from minillm.request import Request
from minillm.scheduler import Scheduler


@dataclass(frozen=True)
class Text:
    """The lengths of one request."""

    prompt: int
    output: int

    def __post_init__(self) -> None:
        if self.prompt < 1 or self.output < 1:
            raise ValueError(f"a text needs a prompt and an output, not {self.prompt} and {self.output} tokens")

    @property
    def kept(self) -> int:
        """Tokens in the cache when it ends."""
        return self.prompt + self.output - 1


@dataclass(frozen=True)
class Slots:
    """Slots set aside, and those of them that hold a token's keys and values."""

    reserved: int
    used: int

    @property
    def waste(self) -> float:
        """The share of what is set aside that holds nothing."""
        return 1 - self.used / self.reserved


Room = Callable[[Text], int]  # how many slots a text's one piece has


def room_of(slots: int) -> Room:
    """The same room for every text: the longest that is allowed, or the longest of a batch."""
    return lambda text: slots


def exact_room(text: Text) -> int:
    """What the text will need, as if somebody knew it when it begins."""
    return text.kept


def power_of_two_room(text: Text) -> int:
    """The output's length rounded up to a power of two, as if it were known so far."""
    return text.prompt + 2 ** math.ceil(math.log2(text.output)) - 1


def paged_room(block_size: int) -> Room:
    """As many whole blocks as the text's tokens need."""
    if block_size < 1:
        raise ValueError(f"a block has at least one slot, not {block_size}")
    return lambda text: -(-text.kept // block_size) * block_size


def contiguous(texts: Sequence[Text], room: Room) -> Slots:
    """One piece for each text, seen at the text's end."""
    for text in texts:
        if room(text) < text.kept:
            raise ValueError(f"a text keeps {text.kept} tokens, and its room is {room(text)}")
    return Slots(sum(map(room, texts)), sum(text.kept for text in texts))


def paged(texts: Sequence[Text], block_size: int) -> Slots:
    """As many blocks as each text needs, seen at its end: only its last block can be partly empty."""
    return contiguous(texts, paged_room(block_size))


@dataclass(frozen=True)
class Run:
    """What `run_lengths` saw. ends: each text's slots in blocks and tokens at its end, in the order of the texts.
    steps: for each step, (text, tokens kept, slots in blocks) of every running text."""

    texts: Sequence[Text]
    ends: list[Slots]
    steps: list[list[tuple[int, int, int]]]
    preemptions: int

    @property
    def at_the_end(self) -> Slots:
        return Slots(sum(end.reserved for end in self.ends), sum(end.used for end in self.ends))

    def over_time(self, room: Room | None = None) -> Slots:
        """Summed over all steps. With a room: what the same steps would have set aside in one piece for each text."""
        parts = [part for step in self.steps for part in step]
        reserved = sum(slots if room is None else room(self.texts[i]) for i, _, slots in parts)
        return Slots(reserved, sum(kept for _, kept, _ in parts))


def run_lengths(
    texts: Sequence[Text],
    n_blocks: int,
    block_size: int,
    max_num_seqs: int = 32,
    max_num_batched_tokens: int = 512,
    policy: Policy | None = None,
) -> Run:
    """Send texts of these lengths through the scheduler, all waiting at the start. No model: each step is simply done.

    Nothing is shared here: every slot holds a token of one text.
    """
    pool = BlockPool(n_blocks, block_size, sharing=False)
    scheduler = Scheduler(pool, max_num_seqs, max_num_batched_tokens, policy)
    requests = [Request([0] * text.prompt, text.prompt + text.output) for text in texts]
    for request in requests:
        scheduler.add(request)
    ends: dict[int, Slots] = {}
    steps = []
    while not scheduler.idle:
        spans = scheduler.schedule().spans
        if not spans:
            raise RuntimeError("nobody can run, and somebody waits")
        for span in spans:
            scheduler.computed(span.request, span.count)
        steps.append([(r.number, r.num_computed, len(r.block_table) * block_size) for r in scheduler.running])
        for span in spans:
            request = span.request
            if span.end == len(request.tokens):
                request.tokens.append(0)
                if len(request.tokens) == request.limit:
                    ends[request.number] = Slots(len(request.block_table) * block_size, request.num_computed)
                    scheduler.finish(request)
    pool.check_integrity([])
    return Run(texts, [ends[i] for i in range(len(texts))], steps, scheduler.met["preemptions"])


def random_lengths(
    n: int, seed: int, prompt_mean: float, output_mean: float, sigma: float, most: int
) -> list[tuple[int, int]]:
    """n pairs (prompt, output): log-normal lengths with these means; a pair with more than `most` tokens is drawn anew.

    This is how `workloads/lengths.json` was made.
    """
    numbers = random.Random(seed)

    def length(mean: float) -> int:
        return max(1, round(numbers.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))

    pairs: list[tuple[int, int]] = []
    while len(pairs) < n:
        pair = length(prompt_mean), length(output_mean)
        if sum(pair) <= most:
            pairs.append(pair)
    return pairs


def read_lengths(shape: str) -> list[Text]:
    """The pinned lengths of a shape: "chat" (means of several hundred tokens) or "instructions" (short texts)."""
    file = resources.files("minillm.lab") / "workloads" / "lengths.json"
    shapes = json.loads(file.read_text(encoding="utf-8"))["shapes"]
    if shape not in shapes:
        raise ValueError(f"there is no shape {shape!r}; known: {', '.join(shapes)}")
    return [Text(*pair) for pair in shapes[shape]["lengths"]]
