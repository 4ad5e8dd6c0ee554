"""Task 3: which blocks already hold the beginning of a text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from minillm.lab.check import seeded
from minillm.lab.checks.ch05.base import CHAPTER, CachedBlock

prefix = CHAPTER.task(
    "cached_prefix",
    hints=(
        "Go through the text block by block. What a block's rows hold depends on the tokens before it, too.",
        "The key of a block is made of the key of the block before it (None for the first) and its own tokens.",
        "An entry that has the right key may be another text's: compare all tokens up to the end of the block.",
        "Stop at the first block that is not known, and before a block that contains the last token.",
    ),
)

KeyOf = Callable[[object, Sequence[int]], int]


def good_key(parent: object, tokens: Sequence[int]) -> int:
    return hash((parent, tuple(tokens)))


def weak_key(parent: object, tokens: Sequence[int]) -> int:
    """Many texts have the same one."""
    return ((parent or 0) + sum(tokens)) % 7


class Cache:
    """The full blocks of some texts. Where two blocks have one key, the first stays known."""

    def __init__(self, size: int, texts: Sequence[list[int]], key_of: KeyOf = good_key, seed: int = 0):
        self.size, self.key_of = size, key_of
        self.known: dict[int, CachedBlock] = {}
        self.held: dict[tuple[int, ...], int] = {}  # the oracle: a whole beginning -> its block
        numbers = list(range(100))
        random.Random(seeded(seed)).shuffle(numbers)
        for text in texts:
            for i in range(len(text) // size):
                beginning, key = text[: (i + 1) * size], self.key(text, i)
                if key not in self.known:
                    self.known[key] = CachedBlock(numbers.pop(), beginning)
                    self.held[tuple(beginning)] = self.known[key].block

    def key(self, text: list[int], index: int) -> int:
        parent = None
        for i in range(index + 1):
            parent = self.key_of(parent, tuple(text[i * self.size : (i + 1) * self.size]))
        return parent

    def evict(self, beginning: list[int]) -> None:
        del self.held[tuple(beginning)]
        del self.known[self.key(beginning, len(beginning) // self.size - 1)]

    def find(self, tokens: list[int]) -> list[int]:
        found = []
        while (len(found) + 1) * self.size < len(tokens):
            block = self.held.get(tuple(tokens[: (len(found) + 1) * self.size]))
            if block is None:
                break
            found.append(block)
        return found


def check_find(fn: Callable, cache: Cache, tokens: list[int]) -> None:
    asked = []

    def key_of(parent: object, block_tokens: Sequence[int]) -> int:
        asked.append((parent, tuple(block_tokens)))
        return cache.key_of(parent, tuple(block_tokens))

    got = fn(list(tokens), cache.size, dict(cache.known), key_of)
    want = cache.find(tokens)
    label = f"the text {tokens} in blocks of {cache.size}"
    assert got is not None, f"{label}: your function returned None; is a `return` missing?"
    assert isinstance(got, list), f"{label}: expected a list of blocks, got {type(got).__name__}"
    for i, block in enumerate(got):
        if i >= len(want) or block != want[i]:
            raise AssertionError(f"{label}: yours {got}, expected {want}; {why_not(cache, tokens, i, block)}")
    if len(got) < len(want):
        i = len(got)
        own = tuple(tokens[i * cache.size : (i + 1) * cache.size])
        call = (cache.key(tokens, i - 1) if i else None, own)
        times = sum(block_tokens == own for _, block_tokens in asked)
        earlier = sum(tuple(tokens[s : s + cache.size]) == own for s in range(0, i * cache.size, cache.size))
        why = f"block {want[i]} holds tokens {i * cache.size} to {(i + 1) * cache.size - 1} after the same beginning"
        if call not in asked and times > earlier:
            why += f"; you asked key_of for their key, but not after {'the key of the block before' if i else 'None'}"
        elif call not in asked:
            why += "; you never asked key_of for the key of these tokens, by themselves, after the block before"
        raise AssertionError(f"{label}: yours {got}, expected {want}; {why}")


def why_not(cache: Cache, tokens: list[int], i: int, block: object) -> str:
    """Why this block must not be the i-th of this text."""
    end = (i + 1) * cache.size
    by_block = {entry.block: entry.prefix for entry in cache.known.values()}
    if block not in by_block:
        return f"there is no block {block!r} among the known"
    beginning = by_block[block]
    if beginning == tokens[: len(beginning)]:
        if len(beginning) == len(tokens):
            return f"with block {block} nothing is left to compute: its rows end with the last token"
        if block not in cache.find(tokens):
            return f"block {block} is right by itself, but a block before it is not known: its rows would be missing"
        return f"block {block} ends with token {len(beginning) - 1}, and stands where one should end with {end - 1}"
    if beginning[-cache.size :] == tokens[end - cache.size : end]:
        return f"block {block} holds the same tokens after another beginning, {beginning}: its rows are others"
    return f"block {block} holds {beginning}, other tokens with the same key: a hit must be verified"


@prefix
def after_another_beginning(fn):
    """the same tokens after another beginning are another block"""
    cache = Cache(2, [[8, 8, 3, 4], [3, 4], [1, 2]])
    check_find(fn, cache, [1, 2, 3, 4, 5])
    cache = Cache(2, [[1, 2, 1, 2, 1, 2, 5]])
    check_find(fn, cache, [1, 2, 1, 2, 1, 2, 6])


@prefix
def known_beginning(fn):
    """a beginning that is known is found, block by block"""
    cache = Cache(2, [[1, 2, 3, 4, 5, 6, 7]])
    check_find(fn, cache, [1, 2, 3, 4, 5, 6, 8])
    check_find(fn, cache, [1, 2, 3, 4, 9, 9, 9])
    check_find(fn, cache, [1, 2, 9])
    check_find(fn, cache, [9, 2, 3, 4, 5])
    check_find(fn, Cache(3, []), [1, 2, 3, 4])


@prefix
def only_full_blocks(fn):
    """a block that the text fills only in part is not asked for"""
    cache = Cache(4, [[1, 2, 3, 4, 5, 6, 7, 8]])
    for length in (1, 3, 5, 7):
        check_find(fn, cache, [1, 2, 3, 4, 5, 6, 7, 8][:length])


@prefix
def all_known(fn):
    """a text that is wholly known leaves its last token to compute"""
    cache = Cache(2, [[1, 2, 3, 4, 5, 6]])
    check_find(fn, cache, [1, 2, 3, 4])
    check_find(fn, cache, [1, 2])
    cache = Cache(1, [[5, 6, 7]])
    check_find(fn, cache, [5, 6, 7])
    check_find(fn, cache, [5])


@prefix
def a_hole(fn):
    """behind a block that is gone, nothing can be used"""
    cache = Cache(2, [[1, 2, 3, 4, 5, 6, 7, 8]])
    cache.evict([1, 2, 3, 4])
    check_find(fn, cache, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    cache.evict([1, 2])
    check_find(fn, cache, [1, 2, 3, 4, 5, 6, 7, 8, 9])


@prefix
def same_key(fn):
    """the same key can be another text's: a hit is verified"""
    check_find(fn, Cache(2, [[1, 2]], weak_key), [2, 1, 5])
    check_find(fn, Cache(2, [[1, 2], [2, 1, 3, 5]], weak_key), [1, 2, 3, 5, 5])  # own tokens equal, not the beginning


@prefix
def random_texts(fn):
    """any texts, with keys that are often the same"""
    rng = random.Random(seeded(7))
    for round_ in range(30):
        size = rng.randint(1, 4)
        texts = [[rng.randint(0, 2) for _ in range(rng.randint(1, 14))] for _ in range(6)]
        cache = Cache(size, texts[:5], weak_key if round_ % 2 else good_key, seed=round_)
        for text in texts:
            check_find(fn, cache, text)
            check_find(fn, cache, [*text, 3])
