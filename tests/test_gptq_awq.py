"""GPTQ against two oracles in float64, AWQ against a search by hand, and what both know of a layer's inputs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import pytest
import torch
from conftest import mutant, random_model

from minillm import awq as awq_module
from minillm import calibrate
from minillm import gptq as gptq_module
from minillm.awq import awq, scaled
from minillm.calibrate import hessians, linear_layers, output_error
from minillm.gptq import DAMPING, gptq
from minillm.linear import Linear
from minillm.model import NoCache, Transformer
from minillm.quantize import Grid, Quantized, round_to_nearest


def problem(seed: int, n_out: int = 7, n_in: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix, and the Hessian of inputs that depend on each other, some of them ten times as large as others."""
    generator = torch.Generator().manual_seed(seed)
    w = 0.1 * torch.randn(n_out, n_in, generator=generator)
    mix = torch.eye(n_in) + 0.5 * torch.randn(n_in, n_in, generator=generator)
    sizes = torch.logspace(-1, 0, n_in)[torch.randperm(n_in, generator=generator)]
    x = torch.randn(200, n_in, generator=generator) @ mix * sizes
    return w, x.T @ x / len(x)


# GPTQ.


def by_inverse(w: torch.Tensor, hessian: torch.Tensor) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """The textbook: after column j, subtract e / [H^-1]_jj [H^-1]_j,: and eliminate row and column j from H^-1."""
    left, inverse = w.clone(), torch.linalg.inv(hessian)

    def next_columns(j: int, rounded: torch.Tensor) -> torch.Tensor:
        nonlocal inverse
        if j:
            i = j - 1
            error = (left[:, i] - rounded[:, i]) / inverse[i, i]
            left.sub_(torch.outer(error, inverse[i]))
            inverse = inverse - torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]
        return left[:, j:]

    return next_columns


def by_least_squares(w: torch.Tensor, hessian: torch.Tensor) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """No recursion: the errors so far are fixed; the columns to come go where the error of the outputs is least."""

    def next_columns(j: int, rounded: torch.Tensor) -> torch.Tensor:
        fixed = w[:, :j] - rounded[:, :j]
        return w[:, j:] + torch.linalg.solve(hessian[j:, j:], hessian[j:, :j] @ fixed.T).T

    return next_columns


def oracle(w: torch.Tensor, grid: Grid, hessian: torch.Tensor, rule: Callable) -> tuple[torch.Tensor, torch.Tensor]:
    """-> codes, scales [out, groups], by looking at all levels."""
    w, hessian = w.double(), hessian.double()
    n_in = w.shape[1]
    damped = hessian + DAMPING * hessian.diagonal().mean() * torch.eye(n_in)
    next_columns, rounded = rule(w, damped), torch.zeros_like(w)
    codes, scales, size = [], [], grid.group or n_in
    for j in range(n_in):
        left = next_columns(j, rounded)
        if j % size == 0:
            least, most = left[:, :size].amin(1), left[:, :size].amax(1)
            if grid.symmetric:
                half = 2 ** (grid.bits - 1)
                scale = torch.maximum(most / (half - 1), -least / half).half().double()
                minimum = -half * scale
            else:
                minimum = least.half().double()
                scale = ((most - minimum) / (2**grid.bits - 1)).half().double()
            scales.append(scale)
        levels = torch.arange(2**grid.bits) * scale[:, None] + minimum[:, None]
        codes.append((levels - left[:, :1]).abs().argmin(1))
        rounded[:, j] = levels.gather(1, codes[-1][:, None])[:, 0]
    return torch.stack(codes, 1), torch.stack(scales, 1)


GRIDS = [Grid(4, 8), Grid(3, 24), Grid(3, None), Grid(2, 3), Grid(8, 12), Grid(4, 8, symmetric=True)]


def check_gptq(seed: int, grid: Grid, rule: Callable, module=gptq_module) -> None:
    w, hessian = problem(seed)
    q = module.gptq(w, grid, hessian)
    codes, scales = oracle(w, grid, hessian, rule)
    assert torch.equal(q.codes.long(), codes) and torch.equal(q.scale.double(), scales)
    assert q.codes.dtype == torch.uint8 and q.scale.dtype == q.minimum.dtype == torch.float16 and q.bits == grid.bits


@pytest.mark.parametrize("rule", [by_inverse, by_least_squares])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_gptq_is_the_textbooks(grid, rule):
    for seed in range(3):
        check_gptq(seed, grid, rule)


@pytest.mark.parametrize("n_in, group", [(192, 64), (192, 96), (128, None), (160, None), (65, None)])
def test_blocks_of_columns_change_nothing(n_in, group):
    """More than one block in a group, more than one group, and blocks of one column."""
    w, hessian = problem(5, 3, n_in)
    codes, scales = oracle(w, Grid(4, group), hessian, by_least_squares)
    q = gptq(w, Grid(4, group), hessian)
    assert torch.equal(q.codes.long(), codes) and torch.equal(q.scale.double(), scales)


@pytest.mark.parametrize(
    "old, new",
    [
        ("left[:, j - start :] -= torch.outer(errors[:, j], feed[j, j:end])", "pass"),  # not fed forward
        ("- errors[:, :start] @ feed[:start, start:end]", ""),  # not from block to block
        ("left[:, j - start :] -= torch", "left[:, j - start :] += torch"),  # the wrong sign
        ("- errors[:, :start] @", "+ errors[:, :start] @"),
        ("upper=True).float()", "upper=False).float()"),  # L instead of U
        ("upper=True).float()", "upper=True).flip(0, 1).T.float()"),  # the factor of columns from the other end
        ("/ feed[j, j]", "* feed[j, j]"),
        ("found[-1]", "found[0]"),  # the scale of another group
        (
            "scales(moved(start, start + size), grid)",
            "scales(weight[:, start : start + size], grid)",
        ),  # before the move
        ("* DAMPING * mean", "* DAMPING"),
        ("+ minimum.float()", "+ minimum.float() - scale.float()"),  # zero point off by one
    ],
)
def test_a_planted_mistake_in_gptq_is_found(old, new):
    broken = mutant(gptq_module, old, new)
    with pytest.raises((AssertionError, ValueError)):
        for grid in GRIDS:
            check_gptq(0, grid, by_least_squares, broken)


@pytest.mark.parametrize(
    "hessian", [torch.eye(64), 1e-6 * torch.eye(64), torch.diag(torch.arange(64.0)), torch.zeros(64, 64)]
)
@pytest.mark.parametrize("grid", [Grid(4, 32), Grid(3, None), Grid(8, 16, True)], ids=str)
def test_inputs_that_do_not_depend_on_each_other_leave_gptq_with_rounding(grid, hessian):
    """With a diagonal Hessian no column can make up for another; one of zeros knows nothing."""
    w, _ = problem(1, 9, 64)
    q, plain = gptq(w, grid, hessian), round_to_nearest(w, grid)
    assert torch.equal(q.codes, plain.codes) and torch.equal(q.scale, plain.scale)
    assert torch.equal(q.minimum, plain.minimum)


def test_gptq_lowers_the_error_of_the_outputs():
    for seed in range(5):
        w, hessian = problem(seed, 32, 64)
        for grid in (Grid(4, 32), Grid(3, None), Grid(2, 16)):
            errors = [output_error(w, f(w, grid, hessian).dequantize(), hessian) for f in (gptq, round_to_nearest)]
            assert errors[0] < errors[1]


def test_inputs_that_are_always_zero_are_rounded_and_move_nothing():
    w, hessian = problem(2, 6, 32)
    w[:, [5, 20]] *= 0.01  # in the middle of the range: the scale does not depend on them
    hessian[5] = hessian[:, 5] = hessian[20] = hessian[:, 20] = 0
    q = gptq(w, Grid(4, None), hessian)
    others = [j for j in range(32) if j not in (5, 20)]
    left = w.clone()
    left[:, 5] = left[:, 20] = 0
    q_others = gptq(left, Grid(4, None), hessian)
    assert torch.equal(q.scale, q_others.scale) and torch.equal(q.codes[:, others], q_others.codes[:, others])
    step = q.scale.float()
    assert bool(((q.dequantize() - w)[:, [5, 20]].abs() <= 0.51 * step).all())


# AWQ.


def outliers(seed: int, n_in: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix, and the Hessian of inputs of which four are 30 times as large as the others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(300, n_in, generator=generator)
    x[:, ::16] *= 30
    return 0.1 * torch.randn(24, n_in, generator=generator), x.T @ x / len(x)


def check_awq(seed: int, grid: Grid, module=awq_module) -> None:
    """The best of the scalings, looked for by hand in float64."""
    w, hessian = outliers(seed)
    q = module.awq(w, grid, hessian)
    size = hessian.double().diagonal().sqrt()
    errors = []
    for alpha in torch.arange(20, dtype=torch.float64) / 20:
        factor = size**alpha
        factor = factor / (factor.max() * factor.min()).sqrt()
        approximation = round_to_nearest(w.double() * factor, grid).dequantize(torch.float64) / factor
        errors.append(float(((w - approximation) @ hessian.double() * (w - approximation)).sum(1).mean()))
    found = output_error(w, q.dequantize(), hessian)
    assert found == pytest.approx(min(errors), rel=1e-3) and found < 0.9 * errors[0]
    assert found <= output_error(w, round_to_nearest(w, grid).dequantize(), hessian)


@pytest.mark.parametrize("grid", [Grid(4, 32), Grid(3, 64), Grid(3, None), Grid(4, 16, True)], ids=str)
def test_awq_is_the_best_scaling(grid):
    for seed in range(3):
        check_awq(seed, grid)


@pytest.mark.parametrize(
    "old, new",
    [
        ("channel=1 / factor", "channel=factor"),
        ("weight * factor", "weight / factor"),
        ("return min(candidates", "return max(candidates"),
        ("size ** (step / STEPS)", "size ** (-step / STEPS)"),
        (
            "hessian.diagonal().clamp(min=torch.finfo(hessian.dtype).tiny).sqrt()",
            "weight.abs().mean(0)",
        ),  # of the weights, not of the inputs
        ("replace(round_to_nearest(weight * factor, grid), channel=1 / factor)", "round_to_nearest(weight, grid)"),
    ],
)
def test_a_planted_mistake_in_awq_is_found(old, new):
    broken = mutant(awq_module, old, new)
    with pytest.raises(AssertionError):
        check_awq(0, Grid(3, 64), broken)


def test_awq_is_never_worse_than_rounding():
    for seed in range(10):
        for w, hessian in (problem(seed, 16, 32), outliers(seed, 32)):
            for grid in (Grid(4, 16), Grid(3, None), Grid(2, 8, True)):
                plain = round_to_nearest(w, grid)
                errors = [output_error(w, q.dequantize(), hessian) for q in (awq(w, grid, hessian), plain)]
                assert errors[0] <= errors[1]


def test_the_channels_undo_the_scaling_exactly_where_nothing_is_rounded():
    generator = torch.Generator().manual_seed(0)
    on_grid = torch.randint(-128, 128, (8, 32), generator=generator).float() / 128
    on_grid[:, 0], on_grid[:, 1] = -1, 127 / 128  # both ends of every row
    factor = 2.0 ** torch.randint(-3, 4, (32,), generator=generator)
    factor[0], factor[1] = 2.0**-4, 2.0**4
    w = on_grid / factor
    q = scaled(w, Grid(8, None), factor)
    assert torch.equal(q.dequantize(), w) and torch.equal(q.channel, 1 / factor)
    assert torch.equal(scaled(w, Grid(8, None), 4 * factor).channel, 1 / factor)  # only the proportions count
    x = torch.randn(5, 32, generator=generator)
    without = Quantized(q.codes, q.scale, q.minimum, q.bits)
    torch.testing.assert_close((x * q.channel) @ without.dequantize().T, x @ w.T)


@pytest.mark.parametrize("sizes", [[0.0] * 32, [0.0] * 31 + [1.0], [1e-12] * 16 + [1e4] * 16, [1e30] * 32])
def test_inputs_that_are_never_used_get_no_factor_out_of_proportion(sizes):
    w, _ = problem(3, 8, 32)
    hessian = torch.diag(torch.tensor(sizes))
    q = awq(w, Grid(4, None), hessian)
    assert torch.isfinite(q.dequantize()).all()
    assert q.channel is None or (bool((q.channel > 1e-5).all()) and bool((q.channel < 1e5).all()))
    plain = round_to_nearest(w, Grid(4, None))
    assert output_error(w, q.dequantize(), hessian) <= output_error(w, plain.dequantize(), hessian)
    if not any(sizes):
        assert torch.equal(q.codes, plain.codes)


def test_where_no_scaling_helps_there_is_no_factor():
    w, _ = problem(0)
    q, plain = awq(w, Grid(4, 8), torch.eye(w.shape[1])), round_to_nearest(w, Grid(4, 8))
    assert q.channel is None and torch.equal(q.codes, plain.codes)


# Both.


@pytest.mark.parametrize("method, name", [(awq, "AWQ"), (gptq, "GPTQ")])
def test_both_say_what_is_missing(method, name):
    w, hessian = problem(0)
    with pytest.raises(ValueError, match=f"{name} needs to know the layer's inputs: give calibration text"):
        method(w, Grid(4, 8), None)
    for wrong in (hessian[:8, :8], hessian[:, :8], hessian[0], torch.eye(7)):
        with pytest.raises(ValueError, match=rf"{name} wants a matrix \[out, in\] and a Hessian \[in, in\]"):
            method(w, Grid(4, 8), wrong)
    with pytest.raises(ValueError, match="wants a matrix"):
        method(w[0], Grid(4, 8), hessian)
    with pytest.raises(ValueError, match="groups of 5 do not divide rows of 24"):
        method(w, Grid(4, 5), hessian)
    for value in (float("nan"), float("inf")):
        spoilt = hessian.clone()
        spoilt[3, 4] = value
        with pytest.raises(ValueError, match="the Hessian holds numbers that are not finite"):
            method(w, Grid(4, 8), spoilt)
        spoilt_w = w.clone()
        spoilt_w[2, 3] = value
        with pytest.raises(ValueError, match="the weights hold numbers that are not finite"):
            method(spoilt_w, Grid(4, 8), hessian)


def test_a_hessian_of_no_inputs_is_refused():
    w, hessian = problem(0)
    with pytest.raises(ValueError, match="it is not positive"):
        gptq(w, Grid(4, 8), -hessian)


@pytest.mark.parametrize("method", [awq, gptq, round_to_nearest])
def test_weights_and_hessians_are_left_alone(method):
    w, hessian = problem(0)
    w, hessian = w.double().requires_grad_(), hessian.double()
    before, known = w.detach().clone(), hessian.clone()
    q = method(w, Grid(4, 8), hessian)
    assert torch.equal(w.detach(), before) and torch.equal(hessian, known)
    assert not any(t.requires_grad for t in (q.scale, q.minimum))
    assert torch.equal(q.codes, method(before.float(), Grid(4, 8), known.float()).codes)


# What is known of the inputs.

TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5], [8]]


def captured(model: Transformer, texts: list[list[int]]) -> dict[str, torch.Tensor]:
    """Inputs of every linear layer in the blocks [rows, in], one text after the other."""
    rows: dict[str, list[torch.Tensor]] = {}

    def watch(name, layer):
        forward = layer.forward
        layer.forward = lambda x: (rows.setdefault(name, []).append(x), forward(x))[1]

    layers = {f"blocks.{name}": m for name, m in model.blocks.named_modules() if isinstance(m, Linear)}
    for name, layer in layers.items():
        watch(name, layer)
    for text in texts:
        model(torch.tensor(text), torch.arange(len(text)), NoCache())
    for layer in layers.values():
        del layer.forward
    return {name: torch.cat(parts) for name, parts in rows.items()}


def check_hessians(module=calibrate) -> None:
    model = random_model()
    inputs = captured(model, TEXTS)
    found = module.hessians(model, TEXTS)
    assert list(found) == list(inputs) == [name for name, _ in linear_layers(model)]
    assert len(found) == 8 and "head" not in "".join(found)
    for name, x in inputs.items():
        assert len(x) == 12 and found[name].dtype == torch.float32
        torch.testing.assert_close(found[name].double(), x.T @ x / 12, rtol=1e-5, atol=1e-6)
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_hessians_are_those_of_the_inputs():
    check_hessians()


@pytest.mark.parametrize(
    "old, new",
    [
        ("x.T @ x + sums.get(name, 0)", "x.T @ x"),
        ("total / rows", "total / len(texts)"),
        ("handle.remove()", "pass"),
        ("torch.arange(len(tokens), device", "torch.zeros(len(tokens), dtype=torch.long, device"),
    ],
)
def test_a_planted_mistake_in_the_hessians_is_found(old, new):
    with pytest.raises(AssertionError):
        check_hessians(mutant(calibrate, old, new))


def test_empty_texts_count_for_nothing():
    model = random_model()
    some, more = hessians(model, TEXTS), hessians(model, [[], *TEXTS, []])
    assert all(torch.equal(some[name], more[name]) for name in some)
    for nothing in ([], [[]], [[], []]):
        with pytest.raises(ValueError, match="at least one token"):
            hessians(model, nothing)


def test_no_hook_is_left_when_a_pass_is_cut_off():
    model = random_model()

    def cut_off(x):
        raise KeyboardInterrupt

    model.blocks[1].mlp.down.forward = cut_off
    with pytest.raises(KeyboardInterrupt):
        hessians(model, [[1, 2]])
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_the_error_of_the_outputs_is_that_of_the_outputs():
    model = random_model()
    known, inputs = hessians(model, TEXTS), captured(model, TEXTS)
    for name, layer in linear_layers(model):
        q = round_to_nearest(layer.weight, Grid(3, None)).dequantize()
        x = inputs[name]
        direct = float((x @ (layer.weight - q.double()).T).pow(2).mean())
        assert output_error(layer.weight, q, known[name]) == pytest.approx(direct, rel=1e-4)


# The real model.


def test_both_beat_rounding_on_text_that_they_have_not_seen(smollm2):
    """Two of the first block's matrices, by the error of their outputs on other text than that of the calibration."""
    model, tokenizer = smollm2
    text = tokenizer.encode((calibrate.__doc__ + gptq_module.__doc__ + awq_module.__doc__) * 2)
    first = Transformer.__new__(Transformer)
    first.__dict__.update(model.__dict__)
    first.__dict__["_modules"] = model._modules | {"blocks": model.blocks[:1]}
    seen, unseen = hessians(first, [text[:400]]), hessians(first, [text[400:600]])
    for name, layer in islice(linear_layers(first), 2):
        w = layer.weight.detach()
        for grid in (Grid(4, 64), Grid(3, None)):
            rounded, scaled_, fed = (
                output_error(w, method(w, grid, seen[name]).dequantize(), unseen[name])
                for method in (round_to_nearest, awq, gptq)
            )
            assert fed < 0.8 * rounded and scaled_ < rounded, (name, grid)
