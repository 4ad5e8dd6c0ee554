"""RMSNorm equals the formula in float64 for every row length, with and without a residual, and touches nothing else.

guards.py says what lies beside inputs and outputs. The interpreter runs one program after the other and cannot show a
race; here each program has a row of its own. Stored mutants of the kernel must be rejected.
"""

from __future__ import annotations

import math

import pytest

pytest.importorskip("triton")

import torch
from guards import DTYPES, assert_equals, changed_copy, guarded, numbers, run
from torch import Tensor

from kernels import rmsnorm as module


def in_loops(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """One number after the other, in Python's own floats. The sum is rounded to x's dtype, since it is stored so."""
    total = x if residual is None else (x.double() + residual.double()).to(x.dtype)
    normed = []
    for row in total.tolist():
        scale = 1 / math.sqrt(math.fsum(a * a for a in row) / len(row) + eps)
        normed.append([a * scale * w for a, w in zip(row, weight.tolist(), strict=True)])
    return torch.tensor(normed, dtype=torch.float64).view(x.shape), total.double()


def check(
    rows: int,
    columns: int,
    residual: bool,
    dtype: torch.dtype = torch.float32,
    gap: int = 3,
    eps: float = 1e-5,
    size: float = 1.0,
    module=module,
) -> None:
    x, given = (guarded(size * numbers(rows, columns, dtype=dtype, seed=s), n) for s, n in [(1, gap), (2, 2 * gap)])
    weight = guarded(1 + 0.3 * numbers(columns, dtype=dtype, seed=3), 0)
    given = given if residual else None
    expected = in_loops(x, weight, eps, given)
    y, total = run(module, module.rmsnorm, x, weight, eps, given)
    assert y.dtype == total.dtype == dtype and y.shape == total.shape == x.shape and y.is_contiguous()
    assert_equals(y, expected[0], dtype)
    assert torch.equal(total.double(), expected[1])
    assert (total is x) == (not residual)
    reference = module.reference(x, weight, eps, given)
    for ours, theirs in zip(reference, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 576, 1000, 4097])
def test_rows_of_any_length(columns, dtype, residual):
    check(3, columns, residual, dtype)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 33])
@pytest.mark.parametrize("gap", [0, 3])
def test_any_number_of_rows(gap, rows, residual):
    check(rows, 20, residual, gap=gap)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("eps", [0.0, 1e-6, 1e-5, 0.1, 3.0])
def test_eps_counts(eps, residual):
    check(2, 20, residual, eps=eps)
    check(2, 20, residual, eps=eps, size=0.01)


@pytest.mark.parametrize("residual", [False, True])
def test_squares_beyond_the_range_of_16_bits(residual):
    """1000 squared is too large for float16, and 1e-4 squared is nothing there."""
    check(2, 20, residual, torch.float16, size=1000)
    check(2, 20, residual, torch.float16, size=1e-4, eps=0.0)


def test_a_row_of_zeros_gives_zeros():
    x, weight = torch.zeros(2, 20), torch.ones(20)
    assert not module.rmsnorm(x, weight, 1e-5)[0].any()
    assert not module.rmsnorm(x, weight, 1e-5, torch.zeros(2, 20))[0].any()


def test_rows_without_columns():
    y, total = module.rmsnorm(torch.zeros(3, 0), torch.zeros(0), 1e-5, torch.zeros(3, 0))
    assert y.shape == total.shape == (3, 0)


def test_the_longest_row():
    check(1, module.MAX_COLUMNS, False)


@pytest.mark.parametrize("residual", [False, True])
def test_bytes_moved_counts_each_tensor_once(residual):
    x, weight = numbers(5, 20, dtype=torch.float16), numbers(20, dtype=torch.float16)
    tensors = [x, *module.rmsnorm(x, weight, 1e-5, x), x, weight] if residual else [x, x, weight]
    assert module.bytes_moved(5, 20, 2, residual) == sum(tensor.nbytes for tensor in tensors)


def test_flops_count_four_for_each_number():
    assert module.flops(5, 20, False) == 5 * 20 * 4
    assert module.flops(5, 20, True) == 5 * 20 * 5


@pytest.mark.parametrize(("target", "threads"), [("sm_80", 32), ("sm_90", 32), ("gfx942", 64), ("cpu", 32)])
def test_threads_have_16_bytes_to_load(target, threads):
    for block in (2**i for i in range(16)):
        warps = module.warps(block, target)
        assert warps >= 1 and warps * threads <= 1024
        assert warps == 1 or block // (warps * threads) >= 8


MUTANTS = {
    "the mean over the padded row": ("axis=0) / n_columns", "axis=0) / BLOCK"),
    "eps is forgotten": ("/ n_columns + eps)", "/ n_columns)"),
    "eps beside the root": ("tl.rsqrt(tl.sum(wide * wide, axis=0) / n_columns + eps)",
                            "tl.rsqrt(tl.sum(wide * wide, axis=0) / n_columns) + eps"),
    "squares in 16 bits": ("wide = x.to(tl.float32)", "wide = x"),
    "the weight is forgotten": ("(wide * scale * weight)", "(wide * scale)"),
    "padding is written": ("(wide * scale * weight).to(x.dtype), mask=inside", "(wide * scale * weight).to(x.dtype)"),
    "the padding of the sum is written": ("columns, x, mask=inside)", "columns, x)"),
    "one column too many": ("inside = columns < n_columns", "inside = columns <= n_columns"),
    "one column too few": ("inside = columns < n_columns", "inside = columns < n_columns - 1"),
    "rows lie side by side": ("x_ptr + row * stride_x", "x_ptr + row * n_columns"),
    "the residual lies as x does": ("row * stride_residual", "row * stride_x"),
    "the residual is not added": ("x += tl.load(residual_ptr", "tl.load(residual_ptr"),
    "all rows are the first": ("tl.program_id(0).to(tl.int64)", "0 * tl.program_id(0)"),
}  # fmt: skip


def hard_cases(module) -> None:
    check(3, 20, True, torch.float16, eps=0.1, module=module)
    check(3, 20, False, torch.float16, size=1000, module=module)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy does not like what some of them compute
@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_mutant_is_rejected(mutant, tmp_path):
    with pytest.raises(AssertionError):
        hard_cases(changed_copy(module, tmp_path, MUTANTS[mutant]))


def test_the_unchanged_copy_passes(tmp_path):
    hard_cases(changed_copy(module, tmp_path))
