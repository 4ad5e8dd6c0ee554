"""The kernels on packed 4-bit weights equal sums worked out code by code in float64, and touch nothing else.

guards.py says what lies beside inputs, outputs and partial results. Codes are whole numbers, and no NaN can lie beside
them: so every address that a kernel reads is looked at, too. The interpreter runs one program after the other, and
cannot show a race; each program has a place of its own. Stored mutants of all kernels must be rejected.
"""

from __future__ import annotations

import math
import mmap
from contextlib import contextmanager

import pytest

pytest.importorskip("triton")

import numpy as np
import torch
from guards import changed_copy, guarded, numbers, run
from torch import Tensor
from triton.runtime import interpreter

from kernels import nibbles
from kernels import w4a16 as module
from kernels.w4a16 import Blocks
from minillm.packing import pack_nibbles
from minillm.quantize import Quantized

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}  # of the largest output
DTYPES = tuple(TOLERANCE)


def codes_for(columns: int, k: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (columns, k // 2), dtype=torch.uint8, generator=generator)


def oracle(x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, bias: Tensor | None) -> Tensor:
    """One code after the other, from bytes as Python's own numbers."""
    k = x.shape[1]
    group = k // scale.shape[1]
    scales, minima = scale.double().tolist(), minimum.double().tolist()
    weight = [
        [
            (row[i // 2] >> 4 if i % 2 else row[i // 2] % 16) * scales[n][i // group] + minima[n][i // group]
            for i in range(k)
        ]
        for n, row in enumerate(codes.tolist())
    ]
    out = x.double().numpy() @ np.array(weight, dtype=np.float64).reshape(len(codes), k).T
    return torch.from_numpy(out) + (0 if bias is None else bias.double())


@contextmanager
def watched(*tensors: Tensor):
    """Whatever is read from the memory around an input must be a number of that input."""
    real, bands, strays = interpreter._interpreter, [], []
    for x in tensors:
        storage, index = x.untyped_storage(), np.zeros(x.shape, dtype=np.int64)
        for axis, size in enumerate(x.shape):
            steps = np.arange(size).reshape([-1 if i == axis else 1 for i in range(x.ndim)])
            index += steps * x.stride(axis) * x.element_size()
        own = np.unique(x.data_ptr() + index)
        bands.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes(), own))

    class Watcher:
        def __getattr__(self, name: str):
            return getattr(real, name)

        def load(self, addresses, mask, other, dtype):
            read = addresses[np.broadcast_to(mask, addresses.shape)].astype(np.int64)
            for first, end, own in bands:
                near = read[(read >= first) & (read < end)]
                strays.extend(near[~np.isin(near, own)])
            return real.load(addresses, mask, other, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_interpreter", Watcher())
        yield
    assert not strays, "read beside an input"


def check(
    rows: int,
    columns: int,
    k: int,
    group: int,
    dtype: torch.dtype = torch.float32,
    grid_dtype: torch.dtype = torch.float32,
    bias: bool = True,
    gap: int = 3,
    module=module,
    **given: Tensor,
) -> None:
    x = guarded(given.get("x", numbers(rows, k, dtype=dtype)), gap)
    codes = guarded(given.get("codes", codes_for(columns, k)), 16 * bool(gap), 255)
    scale = guarded(given.get("scale", 0.1 + numbers(columns, k // group, seed=1).abs()).to(grid_dtype), gap)
    minimum = given.get("minimum", numbers(columns, k // group, seed=2) - 5).to(grid_dtype)
    minimum = guarded(minimum, 2 * gap)
    b = guarded(10 * numbers(columns, dtype=dtype, seed=3), 0) if bias else None
    inputs = [x, codes, scale, minimum] + ([b] if bias else [])
    with watched(*inputs):
        out = run(module, module.linear, x, codes, scale, minimum, b)
    assert out.dtype == dtype and out.shape == (rows, columns) and out.is_contiguous()
    expected = oracle(x, codes, scale, minimum, b)
    size = expected.abs().max().item() if expected.numel() else 0
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[dtype] * size)


@pytest.fixture
def small(monkeypatch):
    """Small tiles, and as many splits as there may be: several of all at small sizes."""
    make_small(module, monkeypatch.setattr)


def make_small(module, setattr=setattr) -> None:
    setattr(module, "SKINNY", (16, 64))
    setattr(module, "blocks", lambda *_: Blocks(16, 16, 64, 4, 2))
    setattr(module, "LEAST_SPLIT", 64)
    setattr(module, "processors", lambda _: 1000)


# --- The product. ---


def test_the_modules_reference_equals_the_oracle():
    for rows, columns, k, group in [(1, 1, 32, 32), (3, 5, 96, 32), (2, 4, 128, 64)]:
        grids = [numbers(columns, k // group, seed=seed) for seed in (1, 2)]
        case = numbers(rows, k), codes_for(columns, k), *grids
        for bias in (None, numbers(columns, seed=3)):
            torch.testing.assert_close(module.reference(*case, bias), oracle(*case, bias), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 15, 16, 17, 33, 64, 65])
def test_any_number_of_rows(rows, dtype):
    check(rows, 70, 96, 32, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129])
def test_any_number_of_columns(columns, dtype):
    check(1, columns, 64, 32, dtype)
    check(5, columns, 64, 32, dtype)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    ("k", "group"),
    [
        (32, 32),
        (64, 64),
        (128, 128),
        (96, 96),
        (96, 32),
        (128, 64),
        (192, 64),
        (256, 128),
        (384, 128),
        (288, 288),
        (544, 32),
    ],
)
@pytest.mark.parametrize("grid_dtype", [torch.float16, torch.float32])
def test_one_group_and_several(k, group, rows, grid_dtype):
    check(rows, 20, k, group, grid_dtype=grid_dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("rows", [1, 5])
def test_rows_that_do_not_lie_side_by_side_and_no_bias(rows, gap, bias):
    check(rows, 20, 96, 32, bias=bias, gap=gap)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 5, 17])
def test_several_tiles_and_splits(rows, bias, dtype, small):
    check(rows, 39, 288, 32, dtype, bias=bias)


@pytest.mark.parametrize("n_splits", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [1, 17])
def test_any_number_of_splits_gives_the_same(rows, n_splits, small, monkeypatch):
    monkeypatch.setattr(module, "MAX_SPLITS", n_splits)
    assert module.splits(6, 10, 1000)[0] == n_splits
    check(rows, 39, 320, 64)


@pytest.mark.parametrize("n_processors", [1, 3, 132])
def test_any_number_of_processors_gives_the_same(n_processors, small, monkeypatch):
    monkeypatch.setattr(module, "processors", lambda _: n_processors)
    check(1, 39, 288, 96)


@pytest.mark.parametrize("rows", [1, 5])
def test_groups_of_equal_weights_and_minima_of_both_signs(rows):
    """A scale of zero leaves the minimum; a scale below zero is unusual, and no mistake."""
    scale, minimum = numbers(20, 3, seed=1), 8 * numbers(20, 3, seed=2)
    scale[::2, 1] = 0
    scale[5] = 0
    check(rows, 20, 96, 32, scale=scale, minimum=minimum)
    check(rows, 20, 96, 32, scale=scale, minimum=torch.zeros(20, 3))
    check(rows, 20, 96, 32, scale=torch.zeros(20, 3), minimum=minimum)


def test_no_rows_and_no_columns():
    for rows, columns in [(0, 20), (1, 0), (5, 0), (0, 0)]:
        check(rows, columns, 64, 32)


@pytest.mark.parametrize("rows", [4, 8])
@pytest.mark.parametrize("start", [0, 3])
def test_every_code_lies_where_it_should(rows, start):
    """Columns of 0 to 15, each row from another code on, and x that picks one weight: it comes out as it is."""
    k, columns = 64, 16
    levels = (torch.arange(k) + start + torch.arange(columns)[:, None]) % 16
    codes = pack_nibbles(levels.to(torch.uint8))
    scale, minimum = (torch.full((columns, 2), value) for value in (0.25, -3.0))
    scale[:, 1], minimum[:, 1] = 0.5, 7.0
    expected = torch.cat([levels[:, :32] * 0.25 - 3, levels[:, 32:] * 0.5 + 7], dim=1)
    for picked in torch.eye(k).split(rows):
        assert torch.equal(module.linear(picked, codes, scale, minimum), picked @ expected.T)


def test_the_engines_packed_weights_are_these():
    levels = torch.randint(0, 16, (24, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    weight = Quantized(levels, numbers(24, 2, seed=1), numbers(24, 2, seed=2), bits=4)
    x = numbers(3, 64)
    out = module.linear(x, pack_nibbles(levels), weight.scale, weight.minimum)
    torch.testing.assert_close(out, x @ weight.dequantize().T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 5])
def test_rows_may_lie_farther_apart_than_32_bits_count(rows):
    """The system gives no memory to what lies between them (Linux)."""
    columns, k, apart, no_reserve = 3, 64, 2**33, 0x4000
    size = columns * apart
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    near = codes_for(columns, k)
    far = torch.frombuffer(memory, dtype=torch.uint8).as_strided(near.shape, (apart, 1)).copy_(near)
    x, scale, minimum = numbers(rows, k), numbers(columns, 2, seed=1), numbers(columns, 2, seed=2)
    out = module.linear(x, far, scale, minimum)
    torch.testing.assert_close(out, oracle(x, near, scale, minimum, None).float(), rtol=1e-4, atol=1e-4)


# --- Which kernel, which tiles, how many splits. ---


def test_the_kernel_is_chosen_by_rows_and_dtype(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "blocks", lambda *arguments: asked.append(arguments) or Blocks(16, 16, 32, 4, 2))
    for dtype, few in [(torch.float16, 1), (torch.float32, 4)]:
        check(few, 20, 32, 32, dtype)
        assert not asked
        check(few + 1, 20, 32, 32, dtype)
        assert asked.pop() == (few + 1, dtype, "cpu") and not asked


@pytest.mark.parametrize(("target", "threads"), [("sm_80", 32), ("sm_90", 32), ("gfx942", 64), ("cpu", 32)])
def test_threads_have_16_bytes_of_codes_to_load(target, threads):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows in (1, 16, 17, 64, 65, 4096):
            choice = module.blocks(rows, dtype, target)
            assert choice.columns * choice.k // 2 // (choice.warps * threads) >= 16
            assert choice.rows >= min(rows, 16 if dtype == torch.float32 else 128)
    columns, k = module.SKINNY
    assert columns * k // 2 // (module.SKINNY_OPTIONS["num_warps"] * threads) >= 16


def test_splits_cover_the_walk_and_none_is_empty():
    least = module.LEAST_SPLIT // 32
    for programs in (1, 2, 7, 64, 1000):
        for n_processors in (1, 4, 108, 132, 1000):
            for n_pieces in (1, least - 1, least, least + 1, 18, 48, 448, 10_000):
                n_splits, size = module.splits(programs, n_pieces, n_processors)
                assert size % least == 0 and 1 <= n_splits <= module.MAX_SPLITS
                assert (n_splits - 1) * size < n_pieces <= n_splits * size
                wanted = module.PROGRAMS_PER_PROCESSOR * n_processors
                assert n_splits == 1 or (n_splits - 1) * programs < wanted  # no more than it takes to fill the GPU


def test_one_row_fills_the_gpu():
    """4096 columns are 64 programs; 132 processors want 528."""
    assert module.splits(4096 // module.SKINNY[0], 14336 // 32, 132)[0] >= 8
    assert module.splits(4096, 14336 // 32, 132)[0] == 1


@pytest.mark.parametrize("grid_dtype", [torch.float16, torch.float32])
def test_bytes_moved_counts_each_tensor_once(grid_dtype):
    x, codes = numbers(3, 128, dtype=torch.float16), codes_for(20, 128)
    grids = [numbers(20, 4, dtype=grid_dtype, seed=seed) for seed in (1, 2)]
    tensors = [x, codes, *grids, module.linear(x, codes, *grids)]
    assert module.bytes_moved(3, 20, 128, 32, 2, grid_dtype.itemsize) == sum(tensor.nbytes for tensor in tensors)


def test_flops_count_a_product_and_a_sum_for_each_weight_and_row():
    assert module.flops(3, 20, 128) == 2 * 3 * 20 * 128


# --- Wrong arguments. ---


def valid() -> dict[str, Tensor | None]:
    return {
        "x": numbers(3, 64),
        "codes": codes_for(20, 64),
        "scale": numbers(20, 2),
        "minimum": numbers(20, 2),
        "bias": numbers(20),
    }


OFFSET = torch.zeros(20 * 48 + 16, dtype=torch.uint8)
WRONG = [
    ({"x": numbers(64)}, "x must have the shape [any, any], not [64]"),
    ({"x": numbers(3, 128)[:, ::2]}, "x must have its last dimension in one piece, not with stride 2"),
    ({"x": numbers(3, 64).double()}, "x must be float32, float16 or bfloat16, not torch.float64"),
    ({"x": numbers(3, 64).bfloat16()}, "x is bfloat16, which Triton's interpreter computes wrongly"),
    ({"x": numbers(3, 64).to("meta")}, "x is on meta: a Triton kernel needs a GPU"),
    ({"x": [[1.0]]}, "x must be a tensor, not list"),
    ({"x": numbers(3, 63)}, "x must have an even number of columns, for codes of two a byte, and at least 2, not 63"),
    ({"x": numbers(3, 0)}, "x must have an even number of columns, for codes of two a byte, and at least 2, not 0"),
    ({"x": numbers(3, 66)}, "codes must have the shape [any, 33], not [20, 32]"),
    ({"codes": codes_for(20, 64).int()}, "codes must be uint8 on cpu, not torch.int32 on cpu"),
    ({"codes": codes_for(20, 64).to("meta")}, "codes must be uint8 on cpu, not torch.uint8 on meta"),
    ({"codes": codes_for(20, 128)}, "codes must have the shape [any, 32], not [20, 64]"),
    ({"codes": codes_for(20, 128)[:, ::2]}, "codes must have its last dimension in one piece, not with stride 2"),
    ({"codes": None}, "codes must be a tensor, not NoneType"),
    ({"codes": OFFSET[: 20 * 40].view(20, 40)[:, :32]}, "codes must have rows that start at multiples of 16 bytes"),
    (
        {"codes": OFFSET[8 : 8 + 20 * 48].view(20, 48)[:, :32]},
        "codes must have rows that start at multiples of 16 bytes",
    ),
    ({"scale": numbers(19, 2)}, "scale must have the shape [20, any], not [19, 2]"),
    ({"scale": numbers(20)}, "scale must have the shape [20, any], not [20]"),
    ({"scale": numbers(20, 2).bfloat16()}, "scale must be float16 or float32 on cpu, not torch.bfloat16 on cpu"),
    ({"scale": numbers(20, 2).to("meta")}, "scale must be float16 or float32 on cpu, not torch.float32 on meta"),
    ({"minimum": numbers(20, 1)}, "minimum must have the shape [20, 2], not [20, 1]"),
    ({"minimum": numbers(20, 2).half()}, "minimum is torch.float16 on cpu, and must be torch.float32 on cpu"),
    ({"minimum": numbers(20, 4)[:, ::2]}, "minimum must have its last dimension in one piece"),
    ({"bias": numbers(19)}, "bias must have the shape [20], not [19]"),
    ({"bias": numbers(20).half()}, "bias is torch.float16 on cpu, and must be torch.float32 on cpu"),
]
WRONG += [
    ({"scale": numbers(20, n), "minimum": numbers(20, n)}, f"{n} groups do not cut 64 weights into multiples of 32")
    for n in (0, 3, 4, 64)
]


def test_the_valid_arguments_are_valid():
    assert module.linear(**valid()).shape == (3, 20)


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_each_wrong_argument_gets_a_sentence_that_names_it(changes, message):
    with pytest.raises(ValueError) as caught:
        module.linear(**valid() | changes)
    assert str(caught.value).startswith(message)


# --- The stored mutants. ---


def hard_cases(module) -> None:
    """Several tiles, several splits, the last shorter than a tile; and, below, no split."""
    check(1, 39, 288, 32, module=module)
    make_small(module)
    for rows in (2, 19):
        check(rows, 39, 288, 32, module=module)
    module.MAX_SPLITS = 1
    for rows in (2, 19):
        check(rows, 39, 192, 64, module=module)


SKINNY = {
    "minimum forgotten": ("axis=1)[None, :] * minimum", "axis=1)[None, :] * (0 * minimum)"),
    "scale forgotten": ("axis=2) * scale", "axis=2) * (0 * scale + 1)"),
    "codes as large as they are read": (" * (1.0 / (1 << (4 * j))))", ")"),
    "the last nibble lost": ("for j in tl.static_range(8)", "for j in tl.static_range(7)"),
    "x beyond the end": ("+ ks, mask=ks < end * PIECE, other=0.0)", "+ ks)"),
    "one row for all": ("x_ptr + row * stride_x + ks", "x_ptr + ks"),
    "splits run to the end": (
        "end = tl.minimum(n_pieces, start + split_size)\n    acc = tl.zeros([BLOCK_N, BLOCK_K // PIECE]",
        "end = n_pieces\n    acc = tl.zeros([BLOCK_N, BLOCK_K // PIECE]",
    ),
    "splits in one place": ("split.to(tl.int64) * stride_split + row * stride_out", "row * stride_out"),
    "padding is written": ("to(out_ptr.dtype.element_ty), mask=column_inside)", "to(out_ptr.dtype.element_ty))"),
    "bias added twice": ("HAS_BIAS=has_bias and whole, STAGES", "HAS_BIAS=has_bias, STAGES"),
    "bias beyond the end": (
        "bias_ptr + columns, mask=column_inside, other=0.0).to(tl.float32)\n    out_ptr",
        "bias_ptr + columns).to(tl.float32)\n    out_ptr",
    ),
    "only the first columns": (
        "columns = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)\n    column_inside",
        "columns = tl.arange(0, BLOCK_N)\n    column_inside",
    ),
}

TILE = {
    "minimum forgotten": ("pieces * scale[:, :, None] + minimum[:, :, None]", "pieces * scale[:, :, None]"),
    "scale forgotten": ("pieces * scale[:, :, None] + minimum", "pieces + minimum"),
    "rows beyond the last": ("inside = row_inside & (ks", "inside = (rows >= 0)[:, None] & (ks"),
    "x beyond the end": (
        "inside = row_inside & (ks < end * PIECE)[None, :]",
        "inside = row_inside & (ks >= 0)[None, :]",
    ),
    "rows lie side by side": ("x_ptr + tall * stride_x", "x_ptr + tall * n_pieces * PIECE"),
    "every tile takes the first rows": ("tl.program_id(0) * BLOCK_M + tl", "tl"),
    "splits run to the end": (
        "end = tl.minimum(n_pieces, start + split_size)\n    acc = tl.zeros([BLOCK_N, BLOCK_M]",
        "end = n_pieces\n    acc = tl.zeros([BLOCK_N, BLOCK_M]",
    ),
    "splits in one place": ("split.to(tl.int64) * stride_split\n    inside", "0\n    inside"),
    "padding of columns is written": (
        "inside = row_inside & column_inside[None, :]",
        "inside = row_inside & (columns >= 0)[None, :]",
    ),
    "padding of rows is written": (
        "inside = row_inside & column_inside[None, :]",
        "inside = (rows >= 0)[:, None] & column_inside[None, :]",
    ),
    "bias added twice": ("BLOCK_K=choice.k, HAS_BIAS=has_bias and whole", "BLOCK_K=choice.k, HAS_BIAS=has_bias"),
    "only the last step counts": ("tl.trans(x), acc, input", "tl.trans(x), 0 * acc, input"),
}

MERGE = {
    "the last split lost": ("(splits < n_splits)", "(splits < n_splits - 1)"),
    "one split too many": ("(splits < n_splits)", "(splits <= n_splits)"),
    "bias forgotten": ("HAS_BIAS=has_bias, **MERGE_OPTIONS", "HAS_BIAS=False, **MERGE_OPTIONS"),
    "every row is the first": ("row, splits = tl.program_id(0)", "row, splits = 0 * tl.program_id(0)"),
    "padding is written": (
        "tl.store(out_ptr + row + columns, out.to(out_ptr.dtype.element_ty), mask=inside)",
        "tl.store(out_ptr + row + columns, out.to(out_ptr.dtype.element_ty))",
    ),
    "codes lie side by side": ("codes.stride(0) // 16", "x.shape[1] // 32"),
    "minima lie as scales do": ("minimum.stride(0), n_columns", "scale.stride(0), n_columns"),
}

NIBBLES = {
    "nibbles of the skinny kernel swapped": ("return x0, x1, x2", "return x1, x0, x2"),
    "nibbles of the tile kernel swapped": (
        "tl.interleave(tl.interleave(c04, c26), tl.interleave(c15, c37))",
        "tl.interleave(tl.interleave(c15, c37), tl.interleave(c04, c26))",
    ),
    "words in another order": (
        "tl.interleave(words & 15, (words >> 16) & 15)",
        "tl.interleave((words >> 16) & 15, words & 15)",
    ),
    "a nibble not masked": ("(words >> 4) & 15", "(words >> 4)"),
    "codes of rows beyond the last": ("mask=row_inside[:, None] & (at <", "mask=(at < at + 1)[None, :] & (at <"),
    "codes beyond the end": (
        "row_inside[:, None] & (at < end * (PIECE // 8))[None, :]",
        "row_inside[:, None] & (at >= 0)[None, :]",
    ),
    "scales beyond the end": (
        "row_inside[:, None] & (pieces < end)[None, :]",
        "row_inside[:, None] & (pieces >= 0)[None, :]",
    ),
    "scales of rows beyond the last": ("row_inside[:, None] & (pieces < end)[None, :]", "(pieces < end)[None, :]"),
    "the first group's scale for all": ("(pieces // (GROUP // PIECE))", "(0 * pieces)"),
    "a scale for each piece": ("(pieces // (GROUP // PIECE))", "pieces"),
    "the next group's scale": ("(pieces // (GROUP // PIECE))", "((pieces + 1) // (GROUP // PIECE))"),
}
MUTANTS = {
    f"{part}: {name}": change
    for part, mutants in {"skinny": SKINNY, "tile": TILE, "merge": MERGE}.items()
    for name, change in mutants.items()
}


def with_nibbles(folder, *changes):
    """The kernels on a changed copy of nibbles.py."""
    copy, helpers = changed_copy(module, folder), changed_copy(nibbles, folder, *changes)
    for name in ("load_words", "load_grid", "by_nibble", "codes_of"):
        setattr(copy, name, getattr(helpers, name))  # before the first call: the interpreter keeps what it then finds
    return copy


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy does not like what some of them compute
@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_mutant_is_rejected(mutant, tmp_path):
    with pytest.raises(AssertionError):
        hard_cases(changed_copy(module, tmp_path, MUTANTS[mutant]))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("mutant", NIBBLES)
def test_each_mutant_of_the_nibbles_is_rejected(mutant, tmp_path):
    with pytest.raises(AssertionError):
        hard_cases(with_nibbles(tmp_path, NIBBLES[mutant]))


def test_the_unchanged_copy_passes(tmp_path):
    hard_cases(with_nibbles(tmp_path))


def test_a_grid_of_no_number_shows():
    """What the guards rest on: one NaN among the scales reaches the output."""
    x, codes, minimum = numbers(1, 64), codes_for(4, 64), numbers(4, 2)
    scale = numbers(4, 2)
    scale[2, 1] = math.nan
    assert module.linear(x, codes, scale, minimum).isnan().tolist() == [[False, False, True, False]]
