"""The watch sees every load and store of an interpreted kernel, whose it is, and where two programs meet."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import interpreter_builder

from kernels import paged_attention, rmsnorm, store_kv
from minillm.lab.kernel_watch import Watch


@triton.jit
def halves_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(out_ptr + at, (x / 2).to(tl.float16), mask=at < n)


@triton.jit
def count_kernel(total_ptr):
    tl.store(total_ptr, tl.load(total_ptr) + 1)


@triton.jit
def left_neighbour_kernel(x_ptr, n):
    i = tl.program_id(0)
    left = tl.load(x_ptr + i - 1, mask=i > 0, other=0.0)
    tl.store(x_ptr + i, left, mask=i < n)


def test_masked_lanes_are_not_counted_and_sizes_are_those_of_the_numbers():
    x, out = torch.ones(11), torch.empty(11, dtype=torch.float16)
    with Watch() as watch:
        halves_kernel[(3,)](x, out, 11, BLOCK=4)
    assert watch.asked("load") == watch.distinct("load") == 11 * 4
    assert watch.asked("store") == watch.distinct("store") == 11 * 2
    assert watch.offsets(x, (2, 0, 0)) == [8, 9, 10] == watch.offsets(out, (2, 0, 0), "store")
    assert watch.offsets(out, (2, 0, 0)) == []
    assert watch.working() == {(i, 0, 0): 1 for i in range(3)}
    assert watch.launches == 1 and watch.conflicts() == 0
    assert (out == 0.5).all()


@pytest.mark.parametrize("residual", [False, True])
def test_rmsnorm_moves_the_bytes_that_it_claims_and_asks_for_the_weight_in_every_row(residual):
    x, weight = torch.randn(5, 6), torch.randn(6)
    with Watch() as watch:
        rmsnorm.rmsnorm(x, weight, 1e-5, torch.randn(5, 6) if residual else None)
    moved = watch.distinct("load") + watch.distinct("store")
    assert moved == rmsnorm.bytes_moved(5, 6, 4, residual)
    assert watch.asked("load") + watch.asked("store") == moved + 4 * weight.nbytes


def test_a_counter_without_atomics_is_a_conflict_though_the_interpreter_counts_right():
    total = torch.zeros(1)
    with Watch() as watch:
        count_kernel[(9,)](total)
    assert total == 9 and watch.conflicts() == 1


def test_reading_what_another_program_writes_is_a_conflict():
    with Watch() as watch:
        left_neighbour_kernel[(5,)](torch.arange(5.0), 5)
    assert watch.conflicts() == 4  # all but the last are written by one and read by the next


def test_launches_are_kept_apart():
    x = torch.zeros(2)
    with Watch() as watch:
        halves_kernel[(1,)](x, x.half(), 2, BLOCK=2)
        count_kernel[(1,)](x)
        count_kernel[(1,)](x)
    assert watch.launches == 3 and watch.conflicts() == 0
    with watch:
        count_kernel[(2,)](x)
    assert watch.launches == 4 and watch.conflicts() == 1


def test_the_packages_kernels_have_no_conflict():
    q, (keys, values) = torch.randn(2, 1, 4, 16), torch.randn(2, 6, 2, 16, 16)
    tables, lengths = torch.arange(6).view(2, 3).int(), torch.tensor([40, 17]).int()
    with Watch() as watch:
        paged_attention.paged_attention(q, keys, values, tables, lengths, 40)
        k, v = torch.randn(2, 3, 2, 16)
        store_kv.store_kv(k, v, keys, values, torch.tensor([1, 17, 30]).int())
    assert watch.launches == 3 and watch.conflicts() == 0


def test_two_tokens_with_one_slot_are_a_conflict():
    keys, values = torch.randn(2, 2, 1, 4, 8)
    k, v = torch.randn(2, 2, 1, 8)
    with Watch() as watch:
        store_kv.store_kv(k, v, keys, values, torch.tensor([5, 5]).int())
    assert watch.conflicts() == 2 * 8


def test_the_interpreter_is_left_as_it_was():
    before = interpreter_builder.create_masked_load
    with pytest.raises(RuntimeError, match="in the middle"), Watch() as watch:
        raise RuntimeError("in the middle")
    assert interpreter_builder.create_masked_load == before
    count_kernel[(1,)](torch.zeros(1))
    assert not watch.touches
