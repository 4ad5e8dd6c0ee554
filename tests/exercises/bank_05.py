"""Answers to exercise 05, PagedAttention."""

from __future__ import annotations

import itertools

import torch
from bank import Bank
from einops import rearrange

from minillm.attention import attention, reference_attention
from minillm.block_attention import BlockAttention
from minillm.blocks import BlockPool

BANK = Bank()


# ---------------------------------------------------------------- find_slots


@BANK.wrong("find_slots", says="the quotient is taken for the block, without the table")
def without_the_table(block_table, start, count, block_size):
    return [divmod(position, block_size) for position in range(start, start + count)]


@BANK.wrong("find_slots", says="the position is not reduced to a row of its block")
def position_as_row(block_table, start, count, block_size):
    return [(block_table[position // block_size], position) for position in range(start, start + count)]


@BANK.wrong("find_slots", says="a chunk on a past.*positions are counted from 0 instead of from start")
def forgets_start(block_table, start, count, block_size):
    return [(block_table[i // block_size], i % block_size) for i in range(count)]


@BANK.wrong("find_slots", says="positions are counted from 1")
def counts_from_one(block_table, start, count, block_size):
    positions = range(start + 1, start + count + 1)
    return [(block_table[p // block_size], p % block_size) for p in positions]


@BANK.wrong("find_slots", says="quotient and remainder are swapped")
def swapped_division(block_table, start, count, block_size):
    return [(block_table[p % block_size], p // block_size) for p in range(start, start + count)]


@BANK.wrong("find_slots", says="block and row change places")
def row_first(block_table, start, count, block_size):
    return [(p % block_size, block_table[p // block_size]) for p in range(start, start + count)]


@BANK.wrong("find_slots", says="slots are numbered through the pool")
def flat_numbers(block_table, start, count, block_size):
    return [block_table[p // block_size] * block_size + p % block_size for p in range(start, start + count)]


@BANK.wrong("find_slots", says="all tokens up to the last new one are given")
def the_past_too(block_table, start, count, block_size):
    return [(block_table[p // block_size], p % block_size) for p in range(start + count)]


@BANK.wrong("find_slots", says=r"first chunk goes over the edge of a block.*yours \(7, 4\), expected \(2, 0\)")
def one_block_for_the_chunk(block_table, start, count, block_size):
    block = block_table[start // block_size]
    return [(block, start % block_size + i) for i in range(count)]


@BANK.right("find_slots")
def with_divmod(block_table, start, count, block_size):
    return [(block_table[i], row) for i, row in (divmod(p, block_size) for p in range(start, start + count))]


@BANK.right("find_slots")
def by_laying_all_slots_out(block_table, start, count, block_size):
    return list(itertools.product(block_table, range(block_size)))[start : start + count]


# ---------------------------------------------------------------- resize_table


def needed_blocks(pool, n_tokens):
    return (n_tokens + pool.block_size - 1) // pool.block_size


def grow(pool, block_table, needed):
    if needed - len(block_table) > len(pool.free):
        raise ValueError("no room")
    while len(block_table) < needed:
        block_table.append(pool.free.pop())
        pool.references[block_table[-1]] = 1


def let_go(pool, block):
    if not pool.references[block]:
        raise ValueError("released twice")
    pool.references[block] -= 1
    if not pool.references[block]:
        pool.free.append(block)


@BANK.wrong("resize_table", says="only when both have let go.*in the free list, and still in the table of b and c")
def frees_without_counting(pool, block_table, n_tokens):
    needed = needed_blocks(pool, n_tokens)
    grow(pool, block_table, needed)
    while len(block_table) > needed:
        block = block_table.pop()
        if not pool.references[block]:
            raise ValueError("released twice")
        pool.references[block] = 0
        pool.free.append(block)


@BANK.wrong("resize_table", says="to give a block back twice is an error.*was accepted, expected ValueError")
def accepts_a_second_release(pool, block_table, n_tokens):
    needed = needed_blocks(pool, n_tokens)
    grow(pool, block_table, needed)
    while len(block_table) > needed:
        block = block_table.pop()
        pool.references[block] = max(0, pool.references[block] - 1)
        if pool.references[block] == 0 and block not in pool.free:
            pool.free.append(block)


@BANK.wrong("resize_table", says=r"references\[\d+\] is 0, and 1 table\(s\) point at")
def forgets_the_first_reference(pool, block_table, n_tokens):
    needed = needed_blocks(pool, n_tokens)
    while len(block_table) < needed:
        block_table.append(pool.free.pop())
    while len(block_table) > needed:
        let_go(pool, block_table.pop())


@BANK.wrong("resize_table", says="has 0 blocks, expected 1")
def rounds_down(pool, block_table, n_tokens):
    needed = n_tokens // pool.block_size
    grow(pool, block_table, needed)
    while len(block_table) > needed:
        let_go(pool, block_table.pop())


@BANK.wrong("resize_table", says=r"resized to 4 tokens, blocks of 4: it has 2 blocks, expected 1: blocks are left over")
def a_block_in_advance(pool, block_table, n_tokens):
    needed = n_tokens // pool.block_size + 1
    grow(pool, block_table, needed)
    while len(block_table) > needed:
        let_go(pool, block_table.pop())


@BANK.wrong("resize_table", says="was refused, and yet blocks were moved")
def notices_too_late(pool, block_table, n_tokens):
    needed = needed_blocks(pool, n_tokens)
    while len(block_table) < needed:
        if not pool.free:
            raise ValueError("no room")
        grow(pool, block_table, len(block_table) + 1)
    while len(block_table) > needed:
        let_go(pool, block_table.pop())


@BANK.wrong("resize_table", says=r"the first \d blocks hold the first tokens and must stay")
def lets_the_first_block_go(pool, block_table, n_tokens):
    needed = needed_blocks(pool, n_tokens)
    grow(pool, block_table, needed)
    while len(block_table) > needed:
        let_go(pool, block_table.pop(0))


@BANK.wrong("resize_table", says="is lost: no table points at it, and it is not in the free list")
def never_frees(pool, block_table, n_tokens):
    needed = needed_blocks(pool, n_tokens)
    grow(pool, block_table, needed)
    while len(block_table) > needed:
        pool.references[block_table.pop()] -= 1


@BANK.wrong("resize_table", says="is in the free list, and still in the table of a")
def leaves_it_in_the_free_list(pool, block_table, n_tokens):
    needed = needed_blocks(pool, n_tokens)
    while len(block_table) < needed:
        block_table.append(pool.free[-1])
        pool.references[block_table[-1]] += 1
    while len(block_table) > needed:
        let_go(pool, block_table.pop())


@BANK.wrong("resize_table", says="you returned a table, and the one that was given is as before")
def a_new_list(pool, block_table, n_tokens):
    table = list(block_table)
    grow(pool, table, needed_blocks(pool, n_tokens))
    return table


@BANK.wrong("resize_table", says="its blocks are free again: ValueError: no room")
def needs_all_blocks_anew(pool, block_table, n_tokens):
    needed = needed_blocks(pool, n_tokens)
    if needed > len(pool.free):
        raise ValueError("no room")
    grow(pool, block_table, needed)
    while len(block_table) > needed:
        let_go(pool, block_table.pop())


@BANK.right("resize_table")
def with_slices(pool, block_table, n_tokens):
    needed = needed_blocks(pool, n_tokens)
    surplus = block_table[needed:]
    missing = max(0, needed - len(block_table))
    if missing > len(pool.free) or any(pool.references[block] < 1 for block in surplus):
        raise ValueError("cannot be done")
    del block_table[needed:]
    for block in surplus:
        pool.references[block] -= 1
    pool.free += [block for block in surplus if not pool.references[block]]
    block_table += pool.free[:missing]
    del pool.free[:missing]
    for block in block_table[len(block_table) - missing :]:
        pool.references[block] = 1


@BANK.right("resize_table")
def through_the_packages_pool(pool, block_table, n_tokens):
    blocks = BlockPool(len(pool.references), pool.block_size)
    blocks.free, blocks.references = pool.free, pool.references
    needed = blocks.blocks_for(n_tokens)
    if needed - len(block_table) > blocks.available:
        raise ValueError("no room")
    while len(block_table) < needed:
        block_table.append(blocks.take())
    while len(block_table) > needed:
        blocks.release(block_table.pop())


# ---------------------------------------------------------------- cached_prefix


def walk(tokens, block_size, known, key_of, last, parent_of=lambda key: key, is_hit=None):
    found, key = [], None
    for end in range(block_size, last + 1, block_size):
        key = key_of(parent_of(key), tokens[end - block_size : end])
        hit = known.get(key)
        if hit is None or not (is_hit or (lambda hit, end: hit.prefix == tokens[:end]))(hit, end):
            break
        found.append(hit.block)
    return found


@BANK.wrong("cached_prefix", says="nothing is left to compute: its rows end with the last token")
def a_full_hit(tokens, block_size, known, key_of):
    return walk(tokens, block_size, known, key_of, len(tokens))


@BANK.wrong("cached_prefix", says="asked key_of for their key, but not after the key of the block before")
def key_of_the_own_tokens(tokens, block_size, known, key_of):
    return walk(tokens, block_size, known, key_of, len(tokens) - 1, parent_of=lambda key: None)


@BANK.wrong("cached_prefix", says="holds the same tokens after another beginning, .*: its rows are others")
def own_tokens_without_verifying(tokens, block_size, known, key_of):
    last = len(tokens) - 1
    return walk(tokens, block_size, known, key_of, last, parent_of=lambda key: None, is_hit=lambda hit, end: True)


@BANK.wrong("cached_prefix", says="the same key can be.*other tokens with the same key: a hit must be verified")
def trusts_the_key(tokens, block_size, known, key_of):
    return walk(tokens, block_size, known, key_of, len(tokens) - 1, is_hit=lambda hit, end: True)


@BANK.wrong("cached_prefix", says="the same key can be.*holds the same tokens after another beginning")
def verifies_the_own_tokens_only(tokens, block_size, known, key_of):
    def same_own(hit, end):
        return hit.prefix[-block_size:] == tokens[end - block_size : end]

    return walk(tokens, block_size, known, key_of, len(tokens) - 1, is_hit=same_own)


@BANK.wrong("cached_prefix", says="a block before it is not known: its rows would be missing")
def jumps_over_a_hole(tokens, block_size, known, key_of):
    found, key = [], None
    for end in range(block_size, len(tokens), block_size):
        key = key_of(key, tokens[end - block_size : end])
        if key in known and known[key].prefix == tokens[:end]:
            found.append(known[key].block)
    return found


@BANK.wrong("cached_prefix", says="you never asked key_of for the key of these tokens, by themselves")
def key_of_the_whole_beginning(tokens, block_size, known, key_of):
    found = []
    for end in range(block_size, len(tokens), block_size):
        hit = known.get(key_of(None, tokens[:end]))
        if hit is None or hit.prefix != tokens[:end]:
            break
        found.append(hit.block)
    return found


@BANK.wrong("cached_prefix", says="you never asked key_of for the key of these tokens, by themselves")
def leaves_a_whole_block(tokens, block_size, known, key_of):
    return walk(tokens, block_size, known, key_of, len(tokens) - 1 - block_size)


@BANK.wrong("cached_prefix", says="expected a list of blocks, got int")
def a_number_of_tokens(tokens, block_size, known, key_of):
    return len(walk(tokens, block_size, known, key_of, len(tokens) - 1)) * block_size


@BANK.wrong("cached_prefix", says="nothing is left to compute")
def partial_block_too(tokens, block_size, known, key_of):
    found, key = [], None
    for start in range(0, len(tokens), block_size):
        key = key_of(key, tokens[start : start + block_size])
        hit = known.get(key)
        if hit is None or hit.prefix != tokens[: start + block_size]:
            break
        found.append(hit.block)
    return found


@BANK.right("cached_prefix")
def with_a_while_loop(tokens, block_size, known, key_of):
    found, key, start = [], None, 0
    while start + block_size <= len(tokens) - 1:
        key = key_of(key, tuple(tokens[start : start + block_size]))
        start += block_size
        if key not in known or known[key].prefix != list(tokens[:start]):
            return found
        found.append(known[key].block)
    return found


@BANK.right("cached_prefix")
def all_keys_first(tokens, block_size, known, key_of):
    keys: list[int | None] = [None]
    for i in range((len(tokens) - 1) // block_size):
        keys.append(key_of(keys[-1], tokens[i * block_size : (i + 1) * block_size]))
    hits = [(known.get(key), (i + 1) * block_size) for i, key in enumerate(keys[1:])]
    good = itertools.takewhile(lambda pair: pair[0] and pair[0].prefix == tokens[: pair[1]], hits)
    return [hit.block for hit, _ in good]


# ---------------------------------------------------------------- append_row


def new_block(pool):
    block = pool.free.pop()
    pool.references[block] = 1
    return block


def unshare(pool, rows, block_table, index):
    old, block_table[index] = block_table[index], new_block(pool)
    rows[block_table[index]] = rows[old]
    pool.references[old] -= 1


@BANK.wrong("append_row", says="b finds another row at its token 6: you wrote into a block that it reads")
def writes_into_the_shared_block(pool, rows, block_table, length, row):
    if length % pool.block_size == 0:
        block_table.append(new_block(pool))
    rows[block_table[-1], length % pool.block_size] = row


@BANK.wrong("append_row", says="it lost its token 4: a new block must begin with a copy of the rows before")
def own_block_without_the_rows(pool, rows, block_table, length, row):
    index, slot = divmod(length, pool.block_size)
    if slot == 0:
        block_table.append(new_block(pool))
    elif pool.references[block_table[index]] > 1:
        pool.references[block_table[index]] -= 1
        block_table[index] = new_block(pool)
    rows[block_table[index], slot] = row


@BANK.wrong("append_row", says=r"references\[\d\] is 2, and 1 table\(s\) point at")
def old_block_keeps_its_count(pool, rows, block_table, length, row):
    index, slot = divmod(length, pool.block_size)
    if slot == 0:
        block_table.append(new_block(pool))
    elif pool.references[block_table[index]] > 1:
        old, block_table[index] = block_table[index], new_block(pool)
        rows[block_table[index]] = rows[old]
    rows[block_table[index], slot] = row


@BANK.wrong("append_row", says="is in the free list, and still in the table of a")
def frees_the_old_block(pool, rows, block_table, length, row):
    index, slot = divmod(length, pool.block_size)
    if slot == 0:
        block_table.append(new_block(pool))
    elif pool.references[block_table[index]] > 1:
        old = block_table[index]
        unshare(pool, rows, block_table, index)
        pool.free.append(old)
    rows[block_table[index], slot] = row


@BANK.wrong(
    "append_row", says="shares a block with a longer one.*a finds another row at its token 5: you wrote into a block"
)
def copies_after_writing(pool, rows, block_table, length, row):
    index, slot = divmod(length, pool.block_size)
    if slot == 0:
        block_table.append(new_block(pool))
    rows[block_table[index], slot] = row
    if pool.references[block_table[index]] > 1:
        unshare(pool, rows, block_table, index)


@BANK.wrong("append_row", says="a text alone.*a block was exchanged that nobody else reads")
def always_copies(pool, rows, block_table, length, row):
    index, slot = divmod(length, pool.block_size)
    if slot == 0:
        block_table.append(new_block(pool))
    else:
        old = block_table[index]
        unshare(pool, rows, block_table, index)
        if pool.references[old] == 0:
            pool.free.append(old)
    rows[block_table[index], slot] = row


@BANK.wrong("append_row", says="a full block is shared on.*a block was exchanged .*or that is not written to")
def copies_the_full_block(pool, rows, block_table, length, row):
    if block_table and pool.references[block_table[-1]] > 1:
        unshare(pool, rows, block_table, len(block_table) - 1)
    if length % pool.block_size == 0:
        block_table.append(new_block(pool))
    rows[block_table[-1], length % pool.block_size] = row


@BANK.wrong("append_row", says="a full block is shared on.*its table has 2 blocks, expected 3")
def overwrites_the_full_block(pool, rows, block_table, length, row):
    slot = length % pool.block_size
    if block_table and pool.references[block_table[-1]] > 1:
        unshare(pool, rows, block_table, len(block_table) - 1)
    elif slot == 0:
        block_table.append(new_block(pool))
    rows[block_table[-1], slot] = row


@BANK.wrong("append_row", says=r"references\[\d\] is 0, and 1 table\(s\) point at")
def new_block_without_a_reference(pool, rows, block_table, length, row):
    index, slot = divmod(length, pool.block_size)
    if slot == 0:
        block_table.append(pool.free.pop())
    elif pool.references[block_table[index]] > 1:
        unshare(pool, rows, block_table, index)
    rows[block_table[index], slot] = row


@BANK.wrong("append_row", says="a block was exchanged that nobody else reads or that is not written to")
def copies_all_blocks(pool, rows, block_table, length, row):
    index, slot = divmod(length, pool.block_size)
    for i in range(len(block_table)):
        if pool.references[block_table[i]] > 1:
            unshare(pool, rows, block_table, i)
    if slot == 0:
        block_table.append(new_block(pool))
    rows[block_table[index], slot] = row


@BANK.wrong("append_row", says="it lost its token 1: the new row was written over it")
def off_by_one(pool, rows, block_table, length, row):
    index, slot = divmod(length, pool.block_size)
    if slot == 0:
        block_table.append(new_block(pool))
    elif pool.references[block_table[index]] > 1:
        unshare(pool, rows, block_table, index)
    rows[block_table[index], slot - 1] = row


@BANK.right("append_row")
def copies_only_the_filled_rows(pool, rows, block_table, length, row):
    index, slot = divmod(length, pool.block_size)
    if slot == 0:
        block_table.append(new_block(pool))
    old = block_table[index]
    if pool.references[old] > 1:
        pool.references[old] -= 1
        block_table[index] = new_block(pool)
        rows[block_table[index], :slot] = rows[old, :slot]
    rows[block_table[index], slot] = row


@BANK.right("append_row")
def always_a_new_block_kept_only_if_needed(pool, rows, block_table, length, row):
    index, slot = divmod(length, pool.block_size)
    if slot and pool.references[block_table[index]] == 1:
        rows[block_table[index], slot] = row
        return
    own = pool.free.pop(0)
    pool.references[own] = 1
    if slot:
        rows[own].copy_(rows[block_table[index]])
        pool.references[block_table.pop()] -= 1
    block_table.append(own)
    rows[own, slot] = row


# ---------------------------------------------------------------- attend_blocks


def gather(pool, block_table, length):
    return rearrange(pool[block_table], "n g s d -> (n s) g d")[:length]


def partials(k_pool, v_pool, block_table, length, q):
    """(scores, values) of each block in use, for a query at a time, heads repeated."""
    size, group = k_pool.shape[2], q.shape[1] // k_pool.shape[1]
    for i in range(-(-length // size)):
        rows = min(size, length - i * size)
        k, v = (pool[block_table[i], :, :rows].repeat_interleave(group, 0) for pool in (k_pool, v_pool))
        scores = torch.einsum("thd,hsd->ths", q, k) / q.shape[2] ** 0.5
        last_seen = length - len(q) + torch.arange(len(q))[:, None, None]
        yield scores.masked_fill(i * size + torch.arange(rows) > last_seen, -torch.inf), v


@BANK.wrong("attend_blocks", says="the blocks are read in the order of the pool, without the table")
def ignores_the_table(k_pool, v_pool, block_table, length, q):
    order = list(range(-(-length // k_pool.shape[2])))
    return attention(q, gather(k_pool, order, length), gather(v_pool, order, length))


@BANK.wrong("attend_blocks", says="NaN: a number from an unused slot.*unused slots of the last block count as tokens")
def reads_whole_blocks(k_pool, v_pool, block_table, length, q):
    return attention(q, gather(k_pool, block_table, None), gather(v_pool, block_table, None))


@BANK.wrong("attend_blocks", says=r"it had the weight 0, but 0 \* NaN is NaN: leave such rows out")
def hides_unused_rows_by_weight_zero(k_pool, v_pool, block_table, length, q):
    k, v = gather(k_pool, block_table, None), gather(v_pool, block_table, None)
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(group, 1)) / q.shape[2] ** 0.5
    last_seen = length - len(q) + torch.arange(len(q))[:, None]
    scores = scores.masked_fill(torch.arange(len(k)) > last_seen, -torch.inf)
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v.repeat_interleave(group, 1))


@BANK.wrong("attend_blocks", says="when each block has its own softmax and the results are added up")
def adds_the_blocks_up(k_pool, v_pool, block_table, length, q):
    parts = partials(k_pool, v_pool, block_table, length, q)
    return sum(torch.einsum("ths,hsd->thd", scores.softmax(-1), v) for scores, v in parts)


@BANK.wrong("attend_blocks", says="when each block has its own softmax and the mean is taken")
def mean_of_the_blocks(k_pool, v_pool, block_table, length, q):
    parts = list(partials(k_pool, v_pool, block_table, length, q))
    return sum(torch.einsum("ths,hsd->thd", scores.softmax(-1), v) for scores, v in parts) / len(parts)


@BANK.wrong("attend_blocks", says=r"scores so large that exp.*not from an unused slot: does exp\(\) overflow")
def sums_without_the_maximum(k_pool, v_pool, block_table, length, q):
    total, weighted = 0, 0
    for scores, v in partials(k_pool, v_pool, block_table, length, q):
        total = total + scores.exp().sum(-1, keepdim=True)
        weighted = weighted + torch.einsum("ths,hsd->thd", scores.exp(), v)
    return weighted / total


@BANK.wrong("attend_blocks", says="when only the text's last block is looked at")
def only_the_last_block(k_pool, v_pool, block_table, length, q):
    scores, v = list(partials(k_pool, v_pool, block_table, length, q))[-1]
    return torch.einsum("ths,hsd->thd", scores.softmax(-1), v)


@BANK.wrong("attend_blocks", says="when a last block that is filled in part is left out")
def only_full_blocks(k_pool, v_pool, block_table, length, q):
    size = k_pool.shape[2]
    used = block_table[: length // size]
    return attention(q, gather(k_pool, used, length), gather(v_pool, used, length))


@BANK.wrong("attend_blocks", says="when each query sees all tokens, also those after it")
def no_causal_mask(k_pool, v_pool, block_table, length, q):
    k, v = gather(k_pool, block_table, length), gather(v_pool, block_table, length)
    return torch.cat([attention(row[None], k, v) for row in q])


@BANK.wrong("attend_blocks", says="when query 0 is taken for the first token of the text")
def upper_left(k_pool, v_pool, block_table, length, q):
    k, v = gather(k_pool, block_table, length), gather(v_pool, block_table, length)
    if len(q) == 1:
        return attention(q, k, v)
    return torch.cat([attention(row[None], k[: i + 1], v[: i + 1]) for i, row in enumerate(q)])


@BANK.wrong("attend_blocks", says="when a block is flattened with its heads before its rows")
def reshapes_without_turning(k_pool, v_pool, block_table, length, q):
    n_kv_heads, head_dim = k_pool.shape[1], k_pool.shape[3]
    k, v = (pool[block_table].reshape(-1, n_kv_heads, head_dim)[:length] for pool in (k_pool, v_pool))
    return attention(q, k, v)


@BANK.right("attend_blocks")
def row_by_row(k_pool, v_pool, block_table, length, q):
    size = k_pool.shape[2]
    slots = [(block_table[p // size], p % size) for p in range(length)]
    k, v = (torch.stack([pool[block, :, row] for block, row in slots]) for pool in (k_pool, v_pool))
    return reference_attention(q, k, v)


@BANK.right("attend_blocks")
def block_by_block_with_a_running_maximum(k_pool, v_pool, block_table, length, q):
    top = torch.full((*q.shape[:2], 1), -torch.inf)
    total, weighted = torch.zeros_like(top), torch.zeros_like(q)
    for scores, v in partials(k_pool, v_pool, block_table, length, q):
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        scale, weights = (top - new_top).exp(), (scores - new_top).exp()
        total = total * scale + weights.sum(-1, keepdim=True)
        weighted = weighted * scale + torch.einsum("ths,hsd->thd", weights, v)
        top = new_top
    return weighted / total


@BANK.right("attend_blocks")
def with_the_packages_block_attention(k_pool, v_pool, block_table, length, q):
    k_pool, v_pool = k_pool.nan_to_num(), v_pool.nan_to_num()
    lengths = range(length - len(q) + 1, length + 1)
    tables = [block_table[: -(-n // k_pool.shape[2])] for n in lengths]
    return BlockAttention(tables, list(lengths), like=k_pool)(q, k_pool, v_pool)
