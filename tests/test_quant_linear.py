"""A layer on a grid multiplies by exactly the matrix that `dequantize` shows, in every layout and on every grid.

In float64 the products are compared to rounding. PyTorch's operator rounds scales, zeros and results to bfloat16; the
bound on that is computed, not chosen. The mistakes planted below (a nibble in the other half, a zero point that is off
by one, ...) break it.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from conftest import mutant
from torch import Tensor

from minillm import packing, quant_linear
from minillm.packing import pack_nibbles, unpack_nibbles
from minillm.quant_linear import BLOCK, QuantEmbedding, QuantLinear
from minillm.quantize import Grid, Quantized, round_to_nearest

N_IN, N_OUT = 256, 128
EPS = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}  # rounding, relative: at most
GRIDS = [
    Grid(bits, group, symmetric) for bits in range(2, 9) for group in (32, 64, 128, None) for symmetric in (False, True)
]
OPERATOR = pytest.mark.skipif(
    not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"), reason="this PyTorch has no operator for 4-bit weights"
)


def name_of(grid: Grid) -> str:
    return f"{grid.bits} bits, {grid.group or 'row'}, {'symmetric' if grid.symmetric else 'with minima'}"


def quantized(grid: Grid, n_out: int = N_OUT, n_in: int = N_IN, seed: int = 0) -> Quantized:
    """Of a random matrix whose groups have different means and sizes."""
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randn(n_out, grid.groups(n_in), n_in // grid.groups(n_in), generator=generator)
    size, mean = (torch.randn(*groups.shape[:2], 1, generator=generator) for _ in range(2))
    return round_to_nearest((groups * size.exp() + mean).flatten(1), grid)


def inputs(rows: int = 5, n_in: int = N_IN, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(rows, n_in, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def exact(x: Tensor, weight: Quantized) -> Tensor:
    return x.double() @ weight.dequantize(torch.float64).T


def sum_bound(x: Tensor, weight: Quantized) -> Tensor:
    """How far a float32 sum may be off, in any order: n u |x||W|, and each weight is made in three roundings."""
    size = weight.codes.shape[1] // weight.scale.shape[1]
    scale, minimum = (t.double().repeat_interleave(size, dim=1) for t in (weight.scale, weight.minimum))
    magnitude = x.double().abs() @ (weight.codes * scale + minimum.abs()).T
    return 1.01 * (weight.codes.shape[1] + 3) * EPS[torch.float32] * magnitude


def operator_bound(x: Tensor, weight: Quantized, product: Tensor) -> Tensor:
    """How far the operator may be off: it adds pieces (code - 8) * scale + zero, with scale and zero in bfloat16, and
    rounds the result to it. Of codes of more than 4 bits there are two pieces, the halves."""
    size, half = weight.codes.shape[1] // weight.scale.shape[1], 2 ** (weight.bits - 1)
    scale, minimum = (t.double().repeat_interleave(size, dim=1) for t in (weight.scale, weight.minimum))
    pieces = half * scale + (minimum + half * scale).abs()
    if weight.bits > 4:
        pieces += 31 * scale  # 16 |high - 8| is up to 15 more than |code - 128|; |low - 8| <= 8; zero has 8 scales more
    return 1.01 * EPS[torch.bfloat16] * (x.double().abs() @ pieces.T + product.abs())


def prepared(weight: Quantized, module: ModuleType = quant_linear, **kwargs) -> QuantLinear:
    layer = module.QuantLinear(weight, **kwargs)
    layer.choose_layout(torch.bfloat16)
    assert layer.pairs is not None, "the operator should have served"
    return layer


def same(a: Quantized, b: Quantized) -> bool:
    fields = ("codes", "scale", "minimum")
    return all(torch.equal(getattr(a, f), getattr(b, f)) for f in fields) and a.bits == b.bits


# -------------------------------------------------------------------------------------------- the product, by every way


@pytest.mark.parametrize("grid", GRIDS, ids=name_of)
def test_the_plain_product_is_that_of_the_dequantized_matrix(grid):
    for n_out in (N_OUT, 1, 300):  # 300: more rows than are expanded at once, and not a multiple
        weight = quantized(grid, n_out)
        layer = QuantLinear(weight)
        for rows in (0, 1, 5):
            x = inputs(rows)
            assert layer(x).shape == (rows, n_out)
            torch.testing.assert_close(layer(x), exact(x, weight), rtol=0, atol=1e-10)
        x = inputs(dtype=torch.float32)
        assert ((layer(x) - exact(x, weight)).abs() <= sum_bound(x, weight)).all()


@OPERATOR
@pytest.mark.parametrize("grid", GRIDS, ids=name_of)
def test_the_operators_product_is_within_the_bound(grid):
    for n_out in (BLOCK, 5 * BLOCK):
        weight = quantized(grid, n_out)
        layer = prepared(weight)
        for rows in (0, 1, 7):
            x = inputs(rows, dtype=torch.bfloat16)
            product = exact(x, weight)
            assert layer(x).dtype == torch.bfloat16
            assert ((layer(x).double() - product).abs() <= operator_bound(x, weight, product)).all()


@OPERATOR
@pytest.mark.parametrize("grid", GRIDS, ids=name_of)
def test_the_operators_layout_takes_no_more_memory_and_loses_nothing(grid):
    weight = quantized(grid)
    layer = QuantLinear(weight)
    size = layer.codes.nbytes
    assert size == N_OUT * N_IN // (2 if grid.bits <= 4 else 1)
    layer.choose_layout(torch.bfloat16)
    assert layer.codes.nbytes == size
    assert same(layer.weight, weight)
    ids = torch.tensor([[3, 0], [N_OUT - 1, 3]])
    assert torch.equal(layer.rows(ids, torch.float32), weight.dequantize()[ids])
    x = inputs(2)  # in another dtype than the layout's: slow, and right
    torch.testing.assert_close(layer(x), exact(x, weight), rtol=0, atol=1e-10)


def pattern(bits: int, n_out: int = BLOCK, n_in: int = 64) -> Quantized:
    """All codes in order, beginning one later in each row: no two places in a block are alike for long."""
    codes = (torch.arange(n_in)[None] + torch.arange(n_out)[:, None]) % 2**bits
    scale = 0.5 + torch.arange(n_out * 2).view(n_out, 2) / 64
    return Quantized(codes.to(torch.uint8), scale.half(), (-3 * scale + 1).half(), bits)


@OPERATOR
@pytest.mark.parametrize("bits", range(2, 9))
def test_each_code_of_an_asymmetric_pattern_is_in_its_place(bits):
    """With the rows of an identity matrix as inputs the product is the matrix itself."""
    weight = pattern(bits)
    eye = torch.eye(64, dtype=torch.float64)
    assert torch.equal(QuantLinear(weight)(eye), weight.dequantize(torch.float64).T)
    layer = prepared(weight)
    assert same(layer.weight, weight)
    product = exact(eye, weight)
    out = layer(eye.bfloat16()).double()
    assert ((out - product).abs() <= operator_bound(eye, weight, product)).all()


@pytest.mark.parametrize("n_in", [1, 7, 30, 33])
@pytest.mark.parametrize("bits", [2, 4, 5, 8])
def test_odd_shapes_are_served_by_the_plain_product(n_in, bits):
    """Rows that are odd, or no multiple of what the operator takes."""
    weight = quantized(Grid(bits, None), n_out=5, n_in=n_in)
    layer = QuantLinear(weight)
    layer.choose_layout(torch.bfloat16)
    assert layer.pairs is None
    x = inputs(3, n_in)
    torch.testing.assert_close(layer(x), exact(x, weight), rtol=0, atol=1e-10)
    assert same(layer.weight, weight)


@OPERATOR
def test_a_group_that_the_operator_does_not_know_is_cut_into_some_that_it_does():
    for n_in, group, served in [(576, None, 64), (576, 96, 32), (768, 384, 128), (576, 48, None), (576, 16, None)]:
        weight = quantized(Grid(4, group), n_in=n_in)
        layer = QuantLinear(weight)
        layer.choose_layout(torch.bfloat16)
        assert (layer.pairs is None) == (served is None)
        if served:
            assert layer.pairs.shape == (n_in // served, N_OUT, 2)
            x = inputs(2, n_in, torch.bfloat16)
            product = exact(x, weight)
            assert ((layer(x).double() - product).abs() <= operator_bound(x, weight, product)).all()


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("ready", [False, True])
def test_a_bias_and_the_factors_of_columns_are_applied(bits, ready):
    weight = replace(quantized(Grid(bits, 64)), channel=torch.linspace(0.5, 2, N_IN))
    bias = torch.linspace(-30, 30, N_OUT)
    layer = QuantLinear(weight, bias)
    if ready:
        layer.choose_layout(torch.bfloat16)
    x = inputs()
    torch.testing.assert_close(layer(x), exact(x, weight) + bias, rtol=0, atol=1e-10)
    assert torch.equal(layer.weight.channel, weight.channel)
    assert torch.equal(layer.rows(torch.tensor([1, 0]), torch.float64), weight.dequantize(torch.float64)[[1, 0]])
    if ready:
        scaled = x.bfloat16() * weight.channel.bfloat16()
        plain = replace(weight, channel=None)
        product = exact(scaled, plain)
        out = layer(x.bfloat16()) - bias  # added in float32
        assert ((out - product).abs() <= operator_bound(scaled, plain, product) + 1e-5).all()


@pytest.mark.parametrize("compute", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_product_runs_in_the_dtype_asked_for_and_returns_that_of_x(compute, bits):
    """Weights, inputs and results are rounded once each; sums are kept in float32."""
    weight = quantized(Grid(bits, 32, symmetric=True))
    layer = QuantLinear(weight, compute=compute)
    x = inputs(dtype=torch.float32)
    out, product = layer(x), exact(x, weight)
    assert out.dtype == torch.float32
    eps = EPS.get(compute, EPS[torch.float32])
    magnitude = x.double().abs() @ weight.dequantize(torch.float64).abs().T
    rounded = 1.01 * eps * (2 * magnitude + product.abs())
    assert ((out - product).abs() <= rounded + sum_bound(x, weight)).all()
    if compute in (torch.float16, torch.bfloat16):
        assert (out - product).abs().max() > 0.1 * eps * magnitude.mean()  # it did run there


# ------------------------------------------------------------------------------------------------ without the operator


@pytest.mark.parametrize("error", [AttributeError, RuntimeError, NotImplementedError])
def test_without_the_operator_the_plain_layout_stays_and_is_right(error, monkeypatch):
    def missing(codes):
        raise error("no such operator")

    monkeypatch.setattr(quant_linear, "to_operator", missing)
    for bits in (4, 8):
        weight = quantized(Grid(bits, 64))
        layer = QuantLinear(weight)
        layer.choose_layout(torch.bfloat16)
        assert layer.pairs is None and same(layer.weight, weight)
        x = inputs()
        torch.testing.assert_close(layer(x), exact(x, weight), rtol=0, atol=1e-10)


@pytest.mark.parametrize("change", [lambda packed: packed.flip(0), lambda packed: packed & 240])
def test_an_operator_with_another_kind_of_layout_is_not_used(change, monkeypatch):
    """Blocks of rows that are not by themselves; a layout that is no order of the codes at all."""
    monkeypatch.setattr(quant_linear, "to_operator", lambda codes: change(pack_nibbles(codes)))
    quant_linear.order.cache_clear()
    try:
        layer = QuantLinear(quantized(Grid(4, 64)))
        layer.choose_layout(torch.bfloat16)
        assert layer.pairs is None
    finally:
        quant_linear.order.cache_clear()


def test_only_bfloat16_asks_for_the_operator():
    for dtype in (torch.float64, torch.float32, torch.float16):
        layer = QuantLinear(quantized(Grid(4, 64)))
        layer.choose_layout(dtype)
        assert layer.pairs is None


# --------------------------------------------------------------------------------------------------- dtypes and devices


@pytest.mark.parametrize("bits", [4, 8])
def test_another_dtype_rounds_the_bias_and_never_the_grid(bits):
    weight = replace(quantized(Grid(bits, 64)), channel=torch.linspace(0.5, 2, N_IN))
    layer = QuantLinear(weight, torch.linspace(-1, 1, N_OUT))
    layer.choose_layout(torch.bfloat16)
    layer.to(torch.bfloat16)
    assert layer.pairs is None  # plain again: `prepare` chooses anew
    assert same(layer.weight, weight) and torch.equal(layer.weight.channel, weight.channel)
    assert layer.bias.dtype == torch.bfloat16
    assert layer.to("meta").scale.device.type == "meta"


@pytest.mark.parametrize(
    "grid", [Grid(4, 32), Grid(3, None, symmetric=True), Grid(4, 64, dtype=torch.float32)], ids=name_of
)
@pytest.mark.parametrize("served", [True, False])
def test_on_a_gpu_the_kernel_gets_the_plain_nibbles(grid, served, monkeypatch):
    """Here in Triton's interpreter. What the kernel does not know goes the plain way."""
    pytest.importorskip("triton")
    from kernels import w4a16

    calls = []
    kernel = w4a16.linear
    monkeypatch.setattr(w4a16, "linear", lambda *tensors: calls.append(tensors) or kernel(*tensors))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    grid = grid if served else replace(grid, bits=8)
    weight, bias = quantized(grid), torch.linspace(-3, 3, N_OUT)
    layer = QuantLinear(weight, bias)
    for rows in (1, 17):
        x = inputs(rows, dtype=torch.float32)
        assert ((layer(x) - bias - exact(x, weight)).abs() <= 2 * sum_bound(x, weight) + 1e-5).all()
    assert len(calls) == (2 if served else 0)
    for other in (Grid(4, 16), Grid(4, 64, dtype=torch.bfloat16)):
        layer = QuantLinear(quantized(other))
        torch.testing.assert_close(layer(inputs()), exact(inputs(), quantized(other)), rtol=0, atol=1e-10)
        layer(inputs(dtype=torch.float32))
    assert len(calls) == (2 if served else 0)


def test_preparing_twice_changes_nothing():
    weight = quantized(Grid(4, 64))
    layer = QuantLinear(weight)
    layer.choose_layout(torch.bfloat16)
    codes = layer.codes
    layer.choose_layout(torch.bfloat16)
    assert layer.codes is codes


def test_the_matrix_it_was_made_of_is_not_changed():
    weight = quantized(Grid(8, 64))
    before = weight.codes.clone()
    QuantLinear(weight).choose_layout(torch.bfloat16)
    assert torch.equal(weight.codes, before)


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_an_embedding_looks_rows_up_and_shares_the_heads_memory(ready, bits):
    weight = quantized(Grid(bits, 32, symmetric=True))
    head = QuantLinear(weight)
    embed = QuantEmbedding(head, torch.float32)
    if ready:
        head.choose_layout(torch.bfloat16)
    tokens = torch.tensor([5, 5, 0, N_OUT - 1])
    assert torch.equal(embed(tokens), weight.dequantize()[tokens])
    assert embed(tokens[:0]).shape == (0, N_IN)
    assert embed.matrix.codes.data_ptr() == head.codes.data_ptr() and same(embed.weight, weight)
    assert embed.to(torch.float64)(tokens).dtype == torch.float64


def test_a_symmetric_grid_keeps_no_minimum():
    assert QuantLinear(quantized(Grid(4, 64, symmetric=True))).minimum is None
    assert QuantLinear(quantized(Grid(4, 64))).minimum is not None


def test_a_product_that_is_not_prepared_can_be_differentiated():
    weight = quantized(Grid(4, 64))
    x = inputs(2).requires_grad_()
    QuantLinear(weight)(x).sum().backward()
    torch.testing.assert_close(x.grad, weight.dequantize(torch.float64).sum(0).expand(2, -1))


# ------------------------------------------------------------------------------------------------------------- refusals


def test_a_group_that_does_not_divide_the_rows_is_refused():
    with pytest.raises(ValueError, match="groups of 128 do not divide rows of 576 weights"):
        round_to_nearest(torch.randn(4, 576), Grid(4, 128))
    good = quantized(Grid(4, 64), n_in=576)
    with pytest.raises(ValueError, match="do not divide a matrix of 128 rows of 576"):
        QuantLinear(replace(good, scale=good.scale[:, :5], minimum=good.minimum[:, :5]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q: {"codes": q.codes.int()}, "codes must be a matrix in uint8"),
        (lambda q: {"codes": q.codes[0]}, "codes must be a matrix in uint8"),
        (lambda q: {"codes": q.codes[:0]}, "codes must be a matrix in uint8"),
        (lambda q: {"codes": q.codes + 8}, "4 bits hold codes below 16, not 23"),
        (lambda q: {"scale": q.scale[1:]}, "do not divide"),
        (lambda q: {"scale": q.scale[:, :0]}, "do not divide"),
        (lambda q: {"minimum": q.minimum[:, 1:]}, "minima of shape .* do not fit"),
        (lambda q: {"channel": torch.ones(N_IN - 1)}, "255 factors do not fit|do not fit rows of 256"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, words):
    good = quantized(Grid(4, 64))
    with pytest.raises(ValueError, match=words):
        QuantLinear(replace(good, **change(good)))


def test_a_bias_or_a_dtype_that_does_not_fit_is_refused():
    good = quantized(Grid(4, 64))
    with pytest.raises(ValueError, match="a bias of shape"):
        QuantLinear(good, torch.zeros(3))
    with pytest.raises(ValueError, match="compute must be None or one of"):
        QuantLinear(good, compute=torch.int8)


# -------------------------------------------------------------------------------------------------------------- mutants


def agrees(module: ModuleType) -> bool:
    """Whether all that is claimed above holds for the layers of this module, on a few grids."""
    for grid in (Grid(3, 32), Grid(4, 96), Grid(4, None, symmetric=True), Grid(6, 64), Grid(8, 32, symmetric=True)):
        weight = quantized(grid, n_in=192)
        x, ids = (
            torch.cat([inputs(n_in=192), torch.eye(192)]).bfloat16(),
            torch.tensor([1, 70]),
        )  # sums, and single weights
        product = exact(x, weight)
        layer = module.QuantLinear(weight)
        plain = (layer(x.double()) - product).abs().max() <= 1e-10
        layer.choose_layout(torch.bfloat16)
        bounded = ((layer(x).double() - product).abs() <= operator_bound(x, weight, product)).all()
        shown = torch.equal(layer.rows(ids, torch.float32), weight.dequantize()[ids])
        if not (plain and bounded and shown and same(layer.weight, weight)):
            return False
    return True


MUTANTS = [
    ("codes >> 4, codes & 15", "codes & 15, codes >> 4"),  # the halves of a code exchanged
    ("minimum + 2 ** (self.bits - 1) * scale", "minimum + (2 ** (self.bits - 1) - 1) * scale"),  # zero off by one
    ("zero + 8 * scale", "zero + 7 * scale"),
    ("[16 * scale, scale]", "[scale, 16 * scale]"),
    ("place % 2 * 4", "(1 - place % 2) * 4"),  # the nibble in the other half of its byte
    (" - self.shift", ""),
    ("+ self.shift\n", "\n"),
    ("ids % BLOCK]", "(ids + 1) % BLOCK]"),
    (".transpose(0, 1).contiguous()", ".flip(0).transpose(0, 1).contiguous()"),  # scales of other rows
    ("repeat_interleave(self.n_in // n_groups // group, dim=1)", "repeat(1, self.n_in // n_groups // group, 1)"),
    ("self.minimum[rows]", "self.minimum[rows].flip(0)"),
    ("symmetric = torch.equal(weight.minimum, symmetric_minimum(weight.scale, weight.bits))", "symmetric = True"),
]


@OPERATOR
def test_the_layer_without_a_mistake_agrees():
    assert agrees(quant_linear)


@OPERATOR
@pytest.mark.parametrize(("old", "new"), MUTANTS, ids=[f"{old} -> {new}" for old, new in MUTANTS])
def test_a_planted_mistake_is_found(old, new):
    assert not agrees(mutant(quant_linear, old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [("[packed & 15, packed >> 4]", "[packed >> 4, packed & 15]"), ("(high << 4)", "(high << 3)")],
)
def test_nibbles_in_the_wrong_order_do_not_come_back(old, new):
    codes = pattern(4).codes
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)
    assert pack_nibbles(codes)[0, :3].tolist() == [0x10, 0x32, 0x54]  # low half first
    wrong = mutant(packing, old, new)
    assert not torch.equal(wrong.unpack_nibbles(wrong.pack_nibbles(codes)), codes)


def test_the_bytes_that_a_product_reads_are_those_of_the_layout_that_serves():
    weight = round_to_nearest(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)), Grid(4, 32))
    layer = QuantLinear(weight, torch.zeros(64), compute=torch.bfloat16)
    plain = 64 * 64 // 2 + 64 * 4
    assert layer.bytes_read == plain + 2 * 2 * (64 * 2)  # scale and minimum
    layer.choose_layout(torch.bfloat16)
    pairs = 0 if layer.pairs is None else layer.pairs.nbytes
    assert layer.bytes_read == plain + (pairs or 2 * 2 * (64 * 2))
