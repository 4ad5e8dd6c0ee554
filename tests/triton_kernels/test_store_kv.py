"""The store writes each row to its slot, and no other byte of the pool changes: not in its bands, nor between its rows.

The interpreter runs one program after the other, so two programs that write to one slot cannot be seen to race.
Stored mutants of the kernel must be rejected.
"""

from __future__ import annotations

import random

import pytest

pytest.importorskip("triton")

import torch
from guards import CANARY, DTYPES, changed_copy, far_apart, guarded, integers, memory, numbers

from kernels import store_kv as module


def check(
    slots: list[int],
    n_kv_heads: int = 3,
    head_dim: int = 20,
    block_size: int = 3,
    dtype: torch.dtype = torch.float32,
    gap: int = 3,
    n_blocks: int = 7,
    store=module.store_kv,
    transpose: bool = False,
) -> None:
    """Store into a pool of canaries, and compare every byte of both pools with rows that were put there one by one."""
    k = guarded(numbers(len(slots), n_kv_heads, head_dim, dtype=dtype, seed=1), gap)
    v = guarded(numbers(len(slots), n_kv_heads, head_dim, dtype=dtype, seed=2), 2 * gap)  # strides of its own
    where = guarded(integers(*slots), 0, fill=0)
    inputs = [memory(x) for x in (k, v, where)]

    def pool() -> torch.Tensor:
        empty = torch.full((n_blocks, n_kv_heads, block_size, head_dim), CANARY, dtype=dtype)
        if transpose:
            return guarded(empty.transpose(1, 2), gap, CANARY).transpose(1, 2)
        return guarded(empty, gap, CANARY)

    actual, expected = (pool(), pool()), (pool(), pool())
    for token, slot in enumerate(slots):
        for x, rows in zip(expected, (k, v), strict=True):
            for head in range(n_kv_heads):
                x[slot // block_size, head, slot % block_size] = rows[token, head]
    store(k, v, *actual, where)
    assert memory(actual[0]) == memory(expected[0]), "keys"
    assert memory(actual[1]) == memory(expected[1]), "values"
    assert [memory(x) for x in (k, v, where)] == inputs, "an input was changed"


def some_slots(count: int, n_slots: int, seed: int = 0) -> list[int]:
    return random.Random(seed).sample(range(n_slots), count)


@pytest.mark.parametrize("store", [module.store_kv, module.reference])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 8, 20, 64, 80, 96, 128])
def test_head_dims(head_dim, dtype, store):
    check(some_slots(5, 21), head_dim=head_dim, dtype=dtype, store=store)


@pytest.mark.parametrize("n_kv_heads", [1, 2, 3, 5, 8, 9])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_heads_and_block_sizes(block_size, n_kv_heads):
    check(some_slots(6, 7 * block_size), n_kv_heads, block_size=block_size)


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17])
@pytest.mark.parametrize("gap", [0, 3])
def test_any_number_of_tokens(tokens, gap):
    check(some_slots(tokens, 7 * 16), block_size=16, gap=gap)


def test_the_first_and_the_last_slot_of_the_pool():
    check([20, 0])


def test_heads_and_rows_of_the_pool_may_lie_in_any_order():
    check(some_slots(6, 21), transpose=True)


def test_heads_may_lie_farther_apart_than_32_bits_count():
    pool = [far_apart(torch.zeros(7, 4, 3, 20, dtype=torch.float16)) for _ in range(2)]
    k, slots = numbers(5, 4, 20, dtype=torch.float16), some_slots(5, 21)
    module.store_kv(k, -k, *pool, integers(*slots))
    for x, rows in zip(pool, (k, -k), strict=True):
        assert torch.equal(torch.stack([x[slot // 3, :, slot % 3] for slot in slots]), rows)


def test_bytes_moved_counts_each_row_read_and_written():
    k = numbers(5, 3, 20, dtype=torch.float16)
    assert module.bytes_moved(5, 3, 20, 2) == 2 * (k.nbytes + k.nbytes)


@pytest.mark.parametrize(("block", "warps"), [(16, 1), (1023, 1), (1024, 1), (2048, 2), (8192, 8), (65536, 8)])
def test_threads_have_16_bytes_to_load(block, warps):
    assert module.warps(block) == warps
    assert warps == 1 or block // (32 * warps) * 2 >= 16  # bytes a thread, in 16 bits


MUTANTS = {
    "the row in the block is forgotten": ("slot % BLOCK_SIZE * stride_kr", "0 * stride_kr"),
    "the block is forgotten": ("slot // BLOCK_SIZE * stride_kb", "0 * stride_kb"),
    "the slot behind": ("slot = tl.load(slots_ptr + token).to(tl.int64)", "slot = tl.load(slots_ptr + token) + 1"),
    "the padding of a head is written": ("(groups < n_kv_heads) & (dims < HEAD_DIM)", "(groups < n_kv_heads)"),
    "heads that are not there are written": ("(groups < n_kv_heads) & (dims < HEAD_DIM)", "(dims < HEAD_DIM)"),
    "values are keys": ("tl.store(values_ptr + target, v", "tl.store(values_ptr + target, k"),
    "values lie as keys do": ("token * stride_vt", "token * stride_kt"),
    "heads of values lie as those of keys": ("groups * stride_vg", "groups * stride_kg"),
    "all tokens are the first": ("k_ptr + token * stride_kt", "k_ptr"),
    "all slots are the first": ("slots_ptr + token", "slots_ptr"),
    "the last token is left out": ("store_kv_kernel[(tokens,)]", "store_kv_kernel[(tokens - 1,)]"),
    "heads follow one another in the pool": ("groups * stride_kh", "groups * HEAD_DIM"),
}


def hard_case(module) -> None:
    check([16, 3, 20, 1, 11], store=module.store_kv)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_mutant_is_rejected(mutant, tmp_path):
    with pytest.raises(AssertionError):
        hard_case(changed_copy(module, tmp_path, MUTANTS[mutant]))


def test_the_unchanged_copy_passes(tmp_path):
    hard_case(changed_copy(module, tmp_path))
