"""Stage 5: who owns which block of the cache. No tensors here: only numbers of blocks.

Memory for keys and values is cut into blocks of `block_size` tokens, and each request has a *block table*: the block of
its first tokens, of the next, and so on. So a request takes a block when it needs one, not its longest possible length
in advance, and at most its last block is partly empty. Blocks can be shared, since a full block never changes: requests
that begin with the same tokens point at the same blocks, counted by reference. A block that nobody refers to keeps its
content until it is needed for something else, the least recently used first; until then a later request may find it.

What a block holds depends on all tokens before it, so a full block is known by its `Prefix`: its own tokens and the
prefix in front of them. A hash finds it; comparing the tokens proves it.

Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention" (2023), sections 4.2 to 4.4; keeping the
blocks of finished requests for later ones, evicted in this order: Zheng et al., "SGLang" (2024), section 3.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


def require_counts(**counts: int) -> None:
    """ValueError with the argument's name unless each is a whole number of at least 1."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")


class Prefix:
    """The tokens of a text up to the end of a full block, as a chain: this block's tokens, after `parent`'s.

    Equal prefixes have equal hashes. Equal hashes prove nothing, so `==` compares the tokens of the whole chain.
    """

    __slots__ = ("digest", "parent", "tokens")

    def __init__(self, parent: Prefix | None, tokens: tuple[int, ...]):
        self.parent, self.tokens = parent, tokens
        self.digest = hash((parent and parent.digest, tokens))

    def __hash__(self) -> int:
        return self.digest

    def __eq__(self, other: object) -> bool:
        a, b = self, other
        while a is not b:  # two chains that meet are the same from there on
            if not (isinstance(a, Prefix) and isinstance(b, Prefix) and a.tokens == b.tokens):
                return False
            a, b = a.parent, b.parent
        return True


class BlockPool:
    """`n_blocks` blocks, each free, cached (no owner, content still good), or owned by `references[block]` tables.

    block_size: tokens in a block. sharing: whether full blocks are remembered, so that later texts can find them.
    """

    def __init__(self, n_blocks: int, block_size: int, sharing: bool = True):
        require_counts(n_blocks=n_blocks, block_size=block_size)
        if not isinstance(sharing, bool):
            raise ValueError(f"sharing must be True or False, not {sharing!r}")
        self.n_blocks, self.block_size, self.sharing = n_blocks, block_size, sharing
        self.references = [0] * n_blocks
        self.free = list(reversed(range(n_blocks)))  # a stack: what was just freed is used again first
        self.cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.block_of: dict[Prefix, int] = {}
        self.prefix_of: dict[int, Prefix] = {}
        self.evictions = 0

    @property
    def available(self) -> int:
        """Blocks that can be taken."""
        return len(self.free) + len(self.cached)

    def blocks_for(self, n_tokens: int) -> int:
        """Blocks that so many tokens fill, the last one perhaps in part."""
        return -(-n_tokens // self.block_size)

    def take(self) -> int:
        """A block of one's own: a free one, or else the cached one that was not used for longest."""
        if not self.available:
            raise ValueError(f"all {self.n_blocks} blocks are in use")
        if self.free:
            block = self.free.pop()
        else:
            block, _ = self.cached.popitem(last=False)
            del self.block_of[self.prefix_of.pop(block)]  # nobody may find content that is about to be overwritten
            self.evictions += 1
        self.references[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more table points at this block, which is owned or cached."""
        if self.references[block] == 0:
            if block not in self.cached:
                raise ValueError(f"block {block} is free: there is nothing in it to share")
            del self.cached[block]
        self.references[block] += 1

    def release(self, block: int) -> None:
        """One table less points at this block. With no owner left it is cached if its content is known, else free."""
        if self.references[block] == 0:
            raise ValueError(f"block {block} has no owner: it was released twice")
        self.references[block] -= 1
        if self.references[block] == 0:
            if block in self.prefix_of:
                self.cached[block] = None
            else:
                self.free.append(block)

    def find(self, tokens: Sequence[int]) -> list[int]:
        """The blocks that already hold the beginning of `tokens`.

        They end before the last token, even if it is known too: its row must be computed to say what comes next.
        """
        found: list[int] = []
        prefix = None
        for i in range((len(tokens) - 1) // self.block_size):
            prefix = self.extended(prefix, tokens, i)
            block = self.block_of.get(prefix)
            if block is None:
                break
            found.append(block)
            prefix = self.prefix_of[block]  # equal, and shared: the next comparison ends after one block
        return found

    def remember(self, tokens: Sequence[int], block_table: Sequence[int], start: int, end: int) -> None:
        """Rows `start` to `end` of a text are computed now: blocks that they fill up can be found from here on.

        Content that another block is known for already stays known by that one.
        """
        if not self.sharing:
            return
        first = start // self.block_size
        prefix = self.prefix_before(tokens, block_table, first)
        for i in range(first, end // self.block_size):
            prefix = self.extended(prefix, tokens, i)
            if prefix not in self.block_of:
                self.block_of[prefix] = block_table[i]
                self.prefix_of[block_table[i]] = prefix

    def prefix_before(self, tokens: Sequence[int], block_table: Sequence[int], index: int) -> Prefix | None:
        """The prefix that ends where block `index` of a table begins: known, or built anew from the start."""
        if index and block_table[index - 1] in self.prefix_of:
            return self.prefix_of[block_table[index - 1]]
        prefix = None
        for i in range(index):
            prefix = self.extended(prefix, tokens, i)
        return prefix

    def extended(self, prefix: Prefix | None, tokens: Sequence[int], index: int) -> Prefix:
        """The prefix with the tokens of block `index` behind it."""
        return Prefix(prefix, tuple(tokens[index * self.block_size : (index + 1) * self.block_size]))

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Every block is in exactly one place, and each reference is one table's. Raises AssertionError."""
        owners = Counter(block for table in block_tables for block in table)
        assert self.references == [owners[b] for b in range(self.n_blocks)], "references differ from the block tables"
        places = [*self.free, *self.cached, *owners]
        assert sorted(places) == list(range(self.n_blocks)), "a block is lost, or in two places"
        assert {block: prefix for prefix, block in self.block_of.items()} == self.prefix_of, "two accounts of content"
        assert not any(block in self.prefix_of for block in self.free), "a free block is still known for its content"
        assert all(block in self.prefix_of for block in self.cached), "a cached block is not known by any content"
