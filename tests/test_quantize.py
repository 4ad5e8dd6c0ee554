"""Grids and packing against an oracle in float64 that looks at every level, and the values where float16 ends."""

from __future__ import annotations

import pytest
import torch
from conftest import mutant

from minillm import packing, quantize
from minillm.calibrate import linear_layers
from minillm.packing import pack_nibbles, unpack_nibbles
from minillm.quantize import Grid, Quantized, nearest, round_to_nearest

BITS = range(2, 9)
GROUPS = (16, 32, 64, 128, None)


def weights(seed: int = 0, n_out: int = 6, n_in: int = 384, size: float = 0.05) -> torch.Tensor:
    """Bell-shaped, with a few outliers, and a row that does not surround 0."""
    generator = torch.Generator().manual_seed(seed)
    w = size * torch.randn(n_out, n_in, generator=generator)
    w[:, ::37] *= 6
    w[0] = w[0].abs() + size
    w[1] = -w[1].abs() - size
    return w


def levels(q: Quantized) -> torch.Tensor:
    """All levels of each group in float64: [out, groups, levels]"""
    return torch.arange(2**q.bits, dtype=torch.float64) * q.scale.double()[..., None] + q.minimum.double()[..., None]


def errors(w: torch.Tensor, q: Quantized) -> torch.Tensor:
    """|w - the level that was chosen|: [out, groups, group]"""
    chosen = levels(q).gather(-1, q.codes.long().unflatten(-1, (q.scale.shape[-1], -1)))
    return (w.double().unflatten(-1, (q.scale.shape[-1], -1)) - chosen).abs()


def least_errors(w: torch.Tensor, q: Quantized) -> torch.Tensor:
    """The same for the best level, by looking at all."""
    groups = w.double().unflatten(-1, (q.scale.shape[-1], -1))
    return (groups[..., None] - levels(q)[..., None, :]).abs().amin(-1)


def check(w: torch.Tensor, grid: Grid, module=quantize) -> None:
    """Every promise about a grid: the nearest level, half a step, the scale's value, and what is stored."""
    q = module.round_to_nearest(w, grid)
    n_groups = w.shape[-1] // (grid.group or w.shape[-1])
    assert q.codes.shape == w.shape and q.codes.dtype == torch.uint8 and int(q.codes.max()) < 2**grid.bits
    assert q.scale.shape == q.minimum.shape == (len(w), n_groups)
    assert q.scale.dtype == q.minimum.dtype == grid.dtype and q.bits == grid.bits and bool((q.scale >= 0).all())
    step = q.scale.double()[..., None]
    torch.testing.assert_close(errors(w, q), least_errors(w, q), rtol=0, atol=1e-4 * float(step.max()))
    groups = w.double().unflatten(-1, (n_groups, -1))
    least, most = groups.amin(-1), groups.amax(-1)
    if grid.symmetric:
        half = 2 ** (grid.bits - 1)
        exact = torch.maximum(most / (half - 1), -least / half)
        assert torch.equal(q.minimum.double(), -half * q.scale.double())  # so 0 is a level
        begins = 0.0
    else:
        exact = (most - least) / (2**grid.bits - 1)
        begins = (q.minimum.double() - least).abs()
        assert bool((begins <= least.abs() * torch.finfo(grid.dtype).eps / 2).all())
    # Half a step, and what the rounding of the stored numbers moved the levels by.
    moved = (q.scale.double() - exact).abs() * (2**grid.bits - 1) + begins
    assert bool((errors(w, q) <= step / 2 * (1 + 1e-4) + moved[..., None] + 1e-12).all())
    info = torch.finfo(grid.dtype)
    assert bool((moved <= 2 * begins + 2**grid.bits * (exact + info.tiny) * info.eps).all())
    expanded = q.dequantize(torch.float64)
    torch.testing.assert_close((w.double() - expanded).abs(), errors(w, q).flatten(-2), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", BITS)
def test_each_weight_goes_to_the_nearest_of_all_levels(bits, group, symmetric):
    check(weights(bits), Grid(bits, group, symmetric))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_can_be_stored_in_other_numbers(dtype):
    for symmetric in (False, True):
        for bits in (2, 4, 8):
            check(weights(), Grid(bits, 64, symmetric, dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_weights_can_be_of_any_float_and_are_left_alone(dtype):
    w = weights().to(dtype).requires_grad_()
    before = w.detach().clone()
    q = round_to_nearest(w, Grid(4, 64))
    assert torch.equal(q.codes, round_to_nearest(w.detach().float(), Grid(4, 64)).codes)
    assert torch.equal(w.detach(), before) and not q.scale.requires_grad
    assert q.dequantize(torch.bfloat16).dtype == torch.bfloat16


# Faults that are planted.


@pytest.mark.parametrize(
    "old, new",
    [
        ("steps.round().clamp(0, levels - 1)", "steps.round()"),  # beyond the last level: not stored
        ("steps.round()", "steps.floor()"),
        ("-least / half)", "-least / (half - 1))"),  # symmetric: a step larger than needed
        ("most / (half - 1)", "most / half"),  # symmetric: no level for the largest
        ("(grid.levels - 1), grid)", "grid.levels, grid)"),
        ("minimum = -scale * half", "minimum = -scale * (half - 1)"),  # zero point off by one
        ("(groups - minimum) / scale", "(groups - minimum) / scale + 1"),
        ("groups * self.scale[..., None]", "groups * self.scale.roll(1, -1)[..., None]"),  # of the group before
    ],
)
def test_a_planted_mistake_is_found(old, new):
    broken = mutant(quantize, old, new)
    with pytest.raises(AssertionError):
        for bits in (2, 4, 8):
            for symmetric in (False, True):
                check(edge_of_the_range(), broken.Grid(bits, 32, symmetric), broken)
                check(weights(), broken.Grid(bits, 32, symmetric), broken)


def edge_of_the_range() -> torch.Tensor:
    """A scale that float16 rounds down far enough that, with 8 bits, the largest weight rounds to level 256 of 255."""
    w = torch.linspace(0, 1, 32).repeat(8, 1) * torch.linspace(1, 1.001, 8)[:, None]
    w[:, 0] = -1e-4 * w[:, -1]
    w[4:] *= 1e-7 / 4  # here scales have so few digits that rounding down would lose whole levels
    return w


def test_a_weight_above_the_last_level_gets_the_last_level():
    """Without the clamp, 15.6 steps would be code 16, and in 8 bits 256 would be stored as 0 (B15)."""
    scale, minimum = torch.tensor([1.0]), torch.tensor([0.0])
    assert nearest(torch.tensor([[15.6, -0.6, 300.0]]), scale, minimum, 16).tolist() == [[15, 0, 15]]
    assert nearest(torch.tensor([[255.6, 256.0, -1.0]]), scale, minimum, 256).tolist() == [[255, 255, 0]]


# The ends of the range.


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_group_of_zeros_stays_zero(bits, symmetric):
    w = weights()
    w[2, 64:128] = 0
    w[3] = 0
    expanded = round_to_nearest(w, Grid(bits, 64, symmetric)).dequantize()
    assert not expanded[2, 64:128].any() and not expanded[3].any() and expanded[2, :64].any()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("value", [0.7, -0.7, 1.0, -3e-3, 1e-8, -1e-8, 5e-7, 2.0**-24, 3e4, -3e4])
def test_a_group_of_equal_weights_keeps_its_value(value, symmetric, bits):
    """To the precision of the stored number: 11 bits, or 2^-25 where float16 has no more."""
    expanded = round_to_nearest(torch.full((2, 64), value), Grid(bits, 32, symmetric)).dequantize(torch.float64)
    allowed = max(abs(value) * 2**-11, 2**bits * 2**-25 if symmetric else 2**-25)
    assert float((expanded - value).abs().max()) <= allowed * 1.001


def test_zero_is_a_level_of_a_symmetric_grid():
    w = weights()
    w[:, 5::7] = 0
    for bits in BITS:
        assert not round_to_nearest(w, Grid(bits, 64, True)).dequantize()[:, 5::7].any()


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("size", [1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4])
def test_tiny_weights_are_within_half_of_the_smallest_step(size, symmetric):
    """float16 ends at 2^-24. A scale that was rounded to it, or to 0, would leave most of a group without a level."""
    w = weights(size=size)
    for bits in BITS:
        q = round_to_nearest(w, Grid(bits, 32, symmetric))
        step = q.scale.double()[..., None]
        covered = step / 2 + 2**bits * step * 2**-11 + 2**-25  # the last: the minimum's own rounding
        assert bool((errors(w, q) <= covered).all())


def test_a_scale_that_is_rounded_down_to_nothing_is_found():
    broken = mutant(quantize, "low * (1 + info.eps) + info.tiny * info.eps", "scale")
    w = weights(size=1e-8)
    assert round_to_nearest(w, Grid(4, 32)).codes.any()
    assert (errors(w, broken.round_to_nearest(w, broken.Grid(4, 32))) > 2**-24).any()


def test_huge_weights_have_scales_or_a_clear_error():
    w = torch.tensor([[6e4, -6e4] * 16])
    q = round_to_nearest(w, Grid(4, 32))
    assert torch.allclose(q.dequantize(), w, rtol=1e-3)
    constant = round_to_nearest(torch.full((1, 32), 6e4), Grid(4, 32))
    assert torch.allclose(constant.dequantize(), torch.tensor(6e4), rtol=1e-3)
    for pair, symmetric in (((6e4, 0), True), ((-7e4, 0), False), ((1e6, -1e6), True), ((3e38, -3e38), False)):
        w = torch.tensor([pair * 16])
        with pytest.raises(ValueError, match=r"too large for scales in torch\.float16"):
            round_to_nearest(w, Grid(4, 32, symmetric))
        if w.max() < 1e38:
            check(w, Grid(4, 32, symmetric, torch.float32))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("symmetric", [False, True])
def test_numbers_that_are_not_finite_are_refused(value, symmetric):
    w = weights()
    w[3, 17] = value
    with pytest.raises(ValueError, match="not finite"):
        round_to_nearest(w, Grid(4, 32, symmetric))


@pytest.mark.parametrize("n_in, group", [(576, 128), (100, 32), (32, 64), (33, 32)])
def test_a_group_that_does_not_divide_the_row_is_refused(n_in, group):
    with pytest.raises(ValueError, match=f"groups of {group} do not divide rows of {n_in} weights"):
        round_to_nearest(torch.zeros(2, n_in), Grid(4, group))


@pytest.mark.parametrize("group", [1, 3, 7, 21, None])
def test_rows_of_an_odd_length_have_groups_too(group):
    check(weights(n_in=21), Grid(4, group))


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"bits": 1}, "bits"),
        ({"bits": 9}, "bits"),
        ({"bits": 4.0}, "bits"),
        ({"bits": True}, "bits"),
        ({"group": 0}, "group"),
        ({"group": -32}, "group"),
        ({"group": 32.0}, "group"),
        ({"group": True}, "group"),
        ({"dtype": torch.int8}, "scales are stored"),
        ({"dtype": torch.float64}, "scales are stored"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        Grid(**wrong)


# What it saves.


def test_bits_a_weight_count_scales_and_minima():
    assert Grid(4, 128).bits_a_weight(4096) == 4.25 and Grid(4, 32).bits_a_weight(4096) == 5.0  # Q4_1: 5 bits
    assert 1 - Grid(4, 128).bits_a_weight(4096) / 16 == pytest.approx(0.734, abs=5e-4)  # A8
    assert 1 - Grid(4, 32).bits_a_weight(4096) / 16 == pytest.approx(0.688, abs=6e-4)
    assert Grid(8, None, symmetric=True).bits_a_weight(64) == 8.25
    assert Grid(4, None, dtype=torch.float32).bits_a_weight(64) == 5.0


@pytest.mark.parametrize("grid", [Grid(4, 32), Grid(8, 64, True), Grid(4, None), Grid(4, 64, dtype=torch.float32)])
def test_bits_a_weight_are_those_of_the_tensors(grid):
    q = round_to_nearest(weights(), grid)
    codes = pack_nibbles(q.codes) if grid.bits == 4 else q.codes
    stored = codes.nbytes + q.scale.nbytes + (0 if grid.symmetric else q.minimum.nbytes)
    assert 8 * stored / q.codes.numel() == grid.bits_a_weight(384)


# Quantizing again loses nothing.


def on_a_grid(seed: int, n_out: int = 64, n_in: int = 256) -> torch.Tensor:
    """Values as a Q4_1 file holds them: float16 d and m for each 32, and both end codes used."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n_out, n_in // 32, 32), generator=generator)
    codes[..., 3], codes[..., 20] = 0, 15
    d = (0.02 * torch.rand(n_out, n_in // 32, 1, generator=generator)).half().float()
    m = (-8 * d + 0.05 * torch.randn(d.shape, generator=generator)).half().float()
    return (codes * d + m).flatten(-2)


def test_weights_on_a_grid_of_groups_of_32_come_back_exactly():
    for seed in range(4):
        w = on_a_grid(seed)
        assert torch.equal(round_to_nearest(w, Grid(4, 32)).dequantize(), w)
    assert not torch.equal(round_to_nearest(w, Grid(4, 64)).dequantize(), w)


def test_where_the_end_codes_are_not_used_the_grid_is_another():
    w = on_a_grid(0, 1, 32)
    w[w == w.max()] = w.min()  # now the largest code is at most 14
    assert not torch.equal(round_to_nearest(w, Grid(4, 32)).dequantize(), w)


def test_quantizing_the_real_model_again_loses_nothing(smollm2):
    """Its file holds Q4_1: every group of every matrix uses both end codes, and all 106 million weights come back."""
    layers = linear_layers(smollm2[0])
    assert len(layers) == 4 * 30
    for name, layer in layers:
        again = round_to_nearest(layer.weight, Grid(4, 32))
        assert torch.equal(again.dequantize(), layer.weight), name


# Two codes a byte.


def test_the_first_code_is_in_the_low_half():
    codes = torch.arange(16, dtype=torch.uint8)
    assert pack_nibbles(codes).tolist() == [16 * (2 * i + 1) + 2 * i for i in range(8)]
    assert pack_nibbles(codes)[:2].tolist() == [0x10, 0x32]


@pytest.mark.parametrize("shape", [(16,), (2,), (0,), (3, 0), (0, 4), (1, 2), (5, 18), (2, 3, 4), (7, 1536)])
def test_codes_survive_packing_at_every_shape(shape):
    codes = torch.arange(torch.Size(shape).numel()).remainder(16).to(torch.uint8).reshape(shape)
    packed = pack_nibbles(codes)
    assert packed.shape == (*shape[:-1], shape[-1] // 2) and packed.dtype == torch.uint8
    assert torch.equal(unpack_nibbles(packed), codes)
    scattered = torch.stack([codes, codes], -1)[..., 0]  # not in one piece
    assert torch.equal(pack_nibbles(scattered), packed)


def test_every_pair_of_codes_survives():
    pairs = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(pairs)), pairs)
    assert len(pack_nibbles(pairs).unique()) == 256


@pytest.mark.parametrize(
    "old, new",
    [("low | (high << 4)", "high | (low << 4)"), ("[packed & 15, packed >> 4]", "[packed >> 4, packed & 15]")],
)
def test_the_other_order_of_halves_is_found(old, new):
    broken = mutant(packing, old, new)
    codes = torch.arange(16, dtype=torch.uint8)
    packed = broken.pack_nibbles(codes)
    assert packed[0] != 0x10 or not torch.equal(broken.unpack_nibbles(packed), codes)


@pytest.mark.parametrize(
    "codes, words",
    [
        (torch.zeros(3, dtype=torch.uint8), "even in number"),
        (torch.zeros(2, 5, dtype=torch.uint8), "even in number"),
        (torch.zeros(4, dtype=torch.int32), "must be uint8"),
        (torch.tensor([0, 16], dtype=torch.uint8), "from 0 to 15, not 16"),
    ],
)
def test_codes_that_do_not_fit_are_refused(codes, words):
    with pytest.raises(ValueError, match=words):
        pack_nibbles(codes)


def test_only_bytes_are_unpacked():
    with pytest.raises(ValueError, match=r"must be uint8, not torch\.int8"):
        unpack_nibbles(torch.zeros(4, dtype=torch.int8))
