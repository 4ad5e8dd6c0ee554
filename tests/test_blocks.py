"""The block pool: each block is free, cached or owned; what a block holds is known by all tokens before it."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from minillm.blocks import BlockPool, Prefix


def filled(pool: BlockPool, tokens: list[int]) -> list[int]:
    """The block table of a text that was computed from its beginning."""
    found = pool.find(tokens)
    for block in found:
        pool.share(block)
    table = found + [pool.take() for _ in range(pool.blocks_for(len(tokens)) - len(found))]
    pool.remember(tokens, table, len(found) * pool.block_size, len(tokens))
    return table


def release_all(pool: BlockPool, table: list[int]) -> None:
    for block in reversed(table):
        pool.release(block)


# --- Prefix ---


def chain(*blocks: tuple[int, ...]) -> Prefix | None:
    prefix = None
    for tokens in blocks:
        prefix = Prefix(prefix, tokens)
    return prefix


def test_equal_texts_are_equal_prefixes_and_have_equal_hashes():
    a, b = chain((1, 2), (3, 4)), chain((1, 2), (3, 4))
    assert a == b
    assert hash(a) == hash(b)
    assert {a: 1}[b] == 1


@pytest.mark.parametrize(
    "other",
    [
        chain((3, 4)),  # the same block without its beginning
        chain((2, 1), (3, 4)),  # after another beginning
        chain((1, 2), (3, 4), (5, 6)),  # longer
        chain((1, 2), (1, 2), (3, 4)),  # longer in front
        chain((1, 2), (4, 3)),
        chain((1, 2)),
        chain((1,), (2,), (3,), (4,)),  # other blocks
        None,
        "text",
    ],
)
def test_other_texts_are_other_prefixes_even_where_the_hashes_agree(other):
    one = chain((1, 2), (3, 4))
    assert one != other
    if isinstance(other, Prefix):
        assert hash(one) != hash(other)
        other.digest = one.digest
        assert one != other
        assert other != one


def test_chains_that_meet_are_compared_up_to_where_they_meet():
    class Untouchable(Prefix):
        @property
        def tokens(self):
            raise AssertionError("this one need not be looked at")

        @tokens.setter
        def tokens(self, value):
            pass

    shared = Untouchable(None, (1,))
    assert Prefix(shared, (2,)) == Prefix(shared, (2,))


# --- BlockPool ---


@pytest.mark.parametrize("name", ["n_blocks", "block_size"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "3", None])
def test_a_pool_of_nothing_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, not {value!r}"):
        BlockPool(**{"n_blocks": 1, "block_size": 1, name: value})


@pytest.mark.parametrize(("n", "blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for_counts_the_last_one_in_part(n, blocks):
    assert BlockPool(1, 4).blocks_for(n) == blocks


def test_every_block_can_be_taken_once_and_has_one_owner():
    pool = BlockPool(5, 4)
    taken = [pool.take() for _ in range(5)]
    assert sorted(taken) == [0, 1, 2, 3, 4]
    assert pool.references == [1] * 5
    assert pool.available == 0
    with pytest.raises(ValueError, match="all 5 blocks are in use"):
        pool.take()
    pool.release(taken[2])
    assert pool.available == 1
    assert pool.take() == taken[2]


def test_a_block_released_twice_is_an_error():
    pool = BlockPool(2, 4)
    block = pool.take()
    pool.share(block)
    pool.release(block)
    pool.release(block)
    with pytest.raises(ValueError, match=f"block {block} has no owner: it was released twice"):
        pool.release(block)
    assert pool.available == 2
    pool.check_integrity([])


def test_a_free_block_cannot_be_shared():
    pool = BlockPool(2, 4)
    with pytest.raises(ValueError, match="block 1 is free"):
        pool.share(1)


def test_only_full_blocks_are_found_and_never_the_last_token():
    pool = BlockPool(8, 4)
    table = filled(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert set(pool.prefix_of) == set(table[:2])
    for length, blocks in [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2)]:
        assert pool.find(list(range(1, length + 1))) == table[:blocks], length
    assert pool.find([1, 2, 3, 0, 5, 6, 7, 8, 9]) == []
    assert pool.find([1, 2, 3, 4, 5, 6, 7, 0, 9]) == table[:1]
    assert pool.find([5, 6, 7, 8, 9]) == []  # the same block at the beginning of a text


def test_what_is_computed_in_parts_is_known_as_soon_as_a_block_is_full():
    pool = BlockPool(8, 3)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    table = [pool.take() for _ in range(3)]
    known = []
    for start in range(7):
        pool.remember(tokens[: start + 1], table, start, start + 1)
        known.append(len(pool.find([*tokens[: start + 1], 0])))
    assert known == [0, 0, 1, 1, 1, 2, 2]


def test_content_that_is_known_already_stays_known_by_the_first():
    pool = BlockPool(8, 2)
    first, second = [pool.take(), pool.take()], [pool.take(), pool.take()]
    pool.remember([1, 2, 3, 4], first, 0, 4)
    pool.remember([1, 2, 3, 4], second, 0, 4)
    assert pool.find([1, 2, 3, 4, 5]) == first
    release_all(pool, second)
    assert pool.available == 6
    assert not pool.cached  # nobody would ever look for it
    pool.remember([1, 2, 3, 4, 5, 6], [*second[:1], first[1], pool.take()], 4, 6)
    assert len(pool.find([1, 2, 3, 4, 5, 6, 7])) == 3


def test_a_prefix_behind_a_block_that_is_not_known_itself_is_built_from_the_start():
    """The second holder of a beginning has blocks of its own, unknown; what it adds is known for the whole text."""
    pool = BlockPool(8, 2)
    filled(pool, [1, 2, 3, 4])
    table = [pool.take() for _ in range(3)]
    pool.remember([1, 2, 3, 4, 5, 6], table, 0, 4)
    pool.remember([1, 2, 3, 4, 5, 6], table, 4, 6)
    assert pool.find([1, 2, 3, 4, 5, 6, 7])[2] == table[2]
    assert pool.find([3, 4, 5, 6, 7]) == []


@pytest.mark.parametrize("value", ["no", "yes", 0, 1, None])
def test_sharing_is_a_yes_or_a_no(value):
    with pytest.raises(ValueError, match=f"sharing must be True or False, not {value!r}"):
        BlockPool(8, 2, sharing=value)


def test_without_sharing_nothing_is_remembered():
    pool = BlockPool(8, 2, sharing=False)
    table = filled(pool, [1, 2, 3, 4])
    assert pool.find([1, 2, 3, 4, 5]) == []
    release_all(pool, table)
    assert len(pool.free) == 8


def test_a_cached_block_is_found_until_it_is_taken_for_something_else():
    pool = BlockPool(3, 2)
    release_all(pool, filled(pool, [1, 2, 3, 4]))
    assert pool.available == 3
    assert len(pool.find([1, 2, 3, 4, 5])) == 2
    pool.take()  # the free one
    assert len(pool.find([1, 2, 3, 4, 5])) == 2
    pool.take()  # the end of the text first: released first
    assert len(pool.find([1, 2, 3, 4, 5])) == 1
    assert pool.evictions == 1
    pool.take()
    assert pool.find([1, 2, 3, 4, 5]) == []
    assert (pool.evictions, pool.block_of, pool.prefix_of) == (2, {}, {})


def test_the_least_recently_used_is_taken_first():
    pool = BlockPool(3, 1)
    a, b, c = (filled(pool, [i]) for i in range(3))
    for table in (b, a, c):
        release_all(pool, table)
    pool.share(b[0])  # used again
    pool.release(b[0])
    assert [pool.take() for _ in range(3)] == [*a, *c, *b]


def test_a_shared_block_is_cached_only_when_its_last_owner_is_gone():
    pool = BlockPool(4, 2)
    one = filled(pool, [1, 2, 3])
    two = filled(pool, [1, 2, 4])
    assert one[0] == two[0]
    assert pool.references[one[0]] == 2
    pool.check_integrity([one, two])
    release_all(pool, one)
    assert one[0] not in pool.cached
    pool.check_integrity([two])
    release_all(pool, two)
    assert list(pool.cached) == [one[0]]
    pool.check_integrity([])


def test_random_texts_come_and_go_and_each_block_stays_in_one_place():
    """A model of the pool that knows only texts: what is found must have been the beginning of one of them."""
    met: Counter = Counter()
    for seed in range(20):
        rnd = random.Random(seed)
        size = rnd.choice([1, 2, 3, 5])
        pool = BlockPool(rnd.randint(6, 20), size)
        tables: list[tuple[list[int], list[int]]] = []
        content: dict[int, tuple[int, ...]] = {}  # the whole text up to the end of a full block
        for _ in range(100):
            tokens = [rnd.randrange(2) for _ in range(rnd.randint(1, 12))]
            found = pool.find(tokens)
            for i, block in enumerate(found):
                assert content[block] == tuple(tokens[: (i + 1) * size])
            met["found"] += len(found)
            revived = sum(pool.references[block] == 0 for block in found)
            if pool.blocks_for(len(tokens)) - len(found) + revived <= pool.available:
                table = filled(pool, tokens)
                assert table[: len(found)] == found
                for i in range(len(found), len(tokens) // size):
                    content[table[i]] = tuple(tokens[: (i + 1) * size])
                tables.append((tokens, table))
            else:
                met["full"] += 1
            while tables and (rnd.random() < 0.3 or pool.available < 2):
                _, table = tables.pop(rnd.randrange(len(tables)))
                release_all(pool, table)
            pool.check_integrity(table for _, table in tables)
        met["evictions"] += pool.evictions
    assert met["found"] > 500
    assert met["evictions"] > 500
    assert met["full"] > 20


# --- check_integrity must see each kind of disorder. ---


def two_texts() -> tuple[BlockPool, list[list[int]]]:
    pool = BlockPool(8, 2)
    release_all(pool, filled(pool, [9, 9, 9, 9]))
    return pool, [filled(pool, [1, 2, 3]), filled(pool, [1, 2, 4])]


def a_lost_block(pool, tables):
    pool.free.pop()


def a_block_that_is_free_twice(pool, tables):
    pool.free.append(pool.free[0])


def a_block_that_is_free_and_owned(pool, tables):
    pool.free.append(tables[0][1])


def a_block_that_is_free_and_cached(pool, tables):
    pool.free.append(next(iter(pool.cached)))


def a_reference_too_many(pool, tables):
    pool.references[tables[0][0]] += 1


def a_reference_too_few(pool, tables):
    pool.references[tables[0][0]] -= 1


def a_table_that_forgot_a_block(pool, tables):
    tables[0].pop()


def an_owned_block_that_is_cached(pool, tables):
    pool.cached[tables[0][0]] = None


def a_free_block_that_is_known(pool, tables):
    prefix = Prefix(None, (7, 7))
    pool.block_of[prefix], pool.prefix_of[pool.free[0]] = pool.free[0], prefix


def a_cached_block_that_nobody_knows(pool, tables):
    del pool.block_of[pool.prefix_of.pop(next(iter(pool.cached)))]


def content_known_from_one_side_only(pool, tables):
    del pool.prefix_of[tables[0][0]]


def a_stale_mapping(pool, tables):
    pool.block_of[Prefix(None, (7, 7))] = tables[0][0]


DISORDER = [
    a_lost_block,
    a_block_that_is_free_twice,
    a_block_that_is_free_and_owned,
    a_block_that_is_free_and_cached,
    a_reference_too_many,
    a_reference_too_few,
    a_table_that_forgot_a_block,
    an_owned_block_that_is_cached,
    a_free_block_that_is_known,
    a_cached_block_that_nobody_knows,
    content_known_from_one_side_only,
    a_stale_mapping,
]


@pytest.mark.parametrize("disturb", DISORDER)
def test_check_integrity_sees(disturb):
    pool, tables = two_texts()
    pool.check_integrity(tables)
    disturb(pool, tables)
    with pytest.raises(AssertionError):
        pool.check_integrity(tables)
