"""Answers to exercise 09, W4A16."""

from __future__ import annotations

import torch
from bank import Bank
from mutants import compiled

from minillm.lab.maybe_triton import tl, triton
from minillm.quantize import Grid, round_to_nearest

BANK = Bank()


# ---------------------------------------------------------------- quantize_group


def group_by(weights, bits, steps=None, round_=torch.round, low=0, high=None):
    """A group on its grid, with the places where people go wrong as arguments."""
    weights, top = weights.float(), 2**bits - 1
    minimum = weights.min().half()
    scale = ((weights.max() - weights.min()) / (steps or top)).half()
    if scale == 0:
        return torch.zeros(len(weights), dtype=torch.uint8), scale, minimum
    places = round_((weights - minimum.float()) / scale.float())
    return (places.clamp(low, top if high is None else high).long() % 256).to(torch.uint8), scale, minimum


@BANK.wrong("quantize_group", says=r"scale: .*divided by 2\^bits levels, and not by the 2\^bits - 1 steps")
def group_of_16_steps(weights, bits):
    return group_by(weights, bits, steps=2**bits)


@BANK.wrong("quantize_group", says="when it is rounded down, and not to the nearest")
def group_rounded_down(weights, bits):
    return group_by(weights, bits, round_=torch.floor)


@BANK.wrong("quantize_group", says="when it is rounded up, and not to the nearest")
def group_rounded_up(weights, bits):
    return group_by(weights, bits, round_=torch.ceil)


@BANK.wrong("quantize_group", says="minimum: .*comes out when the grid begins at 0")
def group_from_zero(weights, bits):
    weights, top = weights.float(), 2**bits - 1
    scale = (weights.max() / top).half()
    codes = (weights / scale.float()).round().clamp(0, top)
    return codes.to(torch.uint8), scale, torch.zeros((), dtype=torch.float16)


@BANK.wrong("quantize_group", says="when nothing is clamped, and a uint8 goes round")
def group_without_a_clamp(weights, bits):
    return group_by(weights, bits, low=-1000, high=100000)


@BANK.wrong("quantize_group", says="when codes below 0 are not clamped, and a uint8 goes round")
def group_clamped_above_alone(weights, bits):
    return group_by(weights, bits, low=-1000)


@BANK.wrong("quantize_group", says="when codes above the greatest are not clamped|when nothing is clamped")
def group_clamped_below_alone(weights, bits):
    return group_by(weights, bits, high=100000)


@BANK.wrong("quantize_group", says=r"clamped to 2\^bits, one code too many|codes above the greatest are not clamped")
def group_clamped_to_16(weights, bits):
    return group_by(weights, bits, high=2**bits)


@BANK.wrong("quantize_group", says="when the codes are one too high")
def group_one_too_high(weights, bits):
    return group_by(weights, bits, round_=lambda places: places.round() + 1)


@BANK.wrong("quantize_group", says="when the codes are chosen for the scale and minimum before they became float16")
def group_for_the_unstored_grid(weights, bits):
    weights = weights.float()
    minimum, scale = weights.min(), (weights.max() - weights.min()) / (2**bits - 1)
    if scale.half() == 0:
        return torch.zeros(len(weights), dtype=torch.uint8), scale.half(), minimum.half()
    codes = ((weights - minimum) / scale).round().clamp(0, 2**bits - 1)
    return codes.to(torch.uint8), scale.half(), minimum.half()


@BANK.wrong("quantize_group", says="the scale is 0, so code 0 is expected")
def group_divided_by_zero(weights, bits):
    weights = weights.float()
    minimum, scale = weights.min().half(), ((weights.max() - weights.min()) / (2**bits - 1)).half()
    codes = ((weights - minimum.float()) / scale.float()).round().clamp(0, 2**bits - 1)
    return codes.to(torch.uint8), scale, minimum


@BANK.wrong("quantize_group", says="the range is computed in float16, which holds nothing above 65504")
def group_in_float16(weights, bits):
    scale = (weights.max() - weights.min()) / (2**bits - 1)
    return group_by(weights, bits)[0], scale.half(), weights.min().half()


@BANK.wrong("quantize_group", says="minimum: .*the grid is symmetric around 0")
def group_symmetric(weights, bits):
    weights = weights.float()
    most = weights.abs().max()
    minimum, scale = (-most).half(), (2 * most / (2**bits - 1)).half()
    codes = ((weights - minimum.float()) / scale.float()).round().clamp(0, 2**bits - 1)
    return codes.to(torch.uint8), scale, minimum


@BANK.wrong("quantize_group", says=r"expected \(codes, scale, minimum\), got a tuple of 2")
def group_without_its_minimum(weights, bits):
    return group_by(weights, bits)[:2]


@BANK.wrong("quantize_group", says="scale: dtype torch.float32, expected torch.float16")
def group_with_a_scale_in_float32(weights, bits):
    codes, scale, minimum = group_by(weights, bits)
    return codes, scale.float(), minimum


@BANK.right("quantize_group")
def group_by_half_a_step(weights, bits):
    weights = weights.double()
    minimum = weights.min().to(torch.float16)
    scale = (weights.sub(weights.min()).max() / (2**bits - 1)).to(torch.float16)
    step = scale.double()
    places = torch.where(step > 0, (weights - minimum.double()) / step, 0.0)
    return (places + 0.5).floor().clamp(0, 2**bits - 1).to(torch.uint8), scale, minimum


@BANK.right("quantize_group")
def group_by_comparing(weights, bits):
    weights = weights.float()
    low, high = weights.aminmax()
    minimum, scale = low.half(), ((high - low) / (2**bits - 1)).half()
    levels = minimum.double() + scale.double() * torch.arange(2**bits).double()
    return (weights[:, None] - levels).abs().argmin(1).to(torch.uint8), scale, minimum


@BANK.right("quantize_group")
def group_by_the_package(weights, bits):
    """Its scale is measured from the stored minimum, and rounded up where it would end short of the greatest weight."""
    found = round_to_nearest(weights[None], Grid(bits, group=None))
    return found.codes[0], found.scale[0, 0], found.minimum[0, 0]


# ---------------------------------------------------------------- pack_codes


def refuse(codes):
    if codes.shape[-1] % 2 or codes.max() > 15:
        raise ValueError("two codes a byte, of 4 bits each")


@BANK.wrong("pack_codes", says="the halves change places: the even code belongs into the low half")
def pack_high_first(codes):
    refuse(codes)
    return codes[..., 0::2] << 4 | codes[..., 1::2]


@BANK.wrong("pack_codes", says=r"code i shares a byte with code i \+ n / 2, and not with its neighbour")
def pack_in_halves(codes):
    refuse(codes)
    low, high = codes.chunk(2, -1)
    return low | high << 4


@BANK.wrong("pack_codes", says="the codes are added, and none is shifted")
def pack_without_a_shift(codes):
    refuse(codes)
    return codes[..., 0::2] + codes[..., 1::2]


@BANK.wrong("pack_codes", says="multiplied by 15, and not by 16")
def pack_times_15(codes):
    refuse(codes)
    return codes[..., 0::2] + 15 * codes[..., 1::2]


@BANK.wrong("pack_codes", says="past the end of the byte")
def pack_shifted_by_a_byte(codes):
    refuse(codes)
    return (codes[..., 0::2].int() | codes[..., 1::2].int() << 8).to(torch.uint8)


@BANK.wrong("pack_codes", says="and 4 bits hold no 16: expected a ValueError, and there was a result")
def pack_anything(codes):
    return codes[..., 0::2] | codes[..., 1::2] << 4


@BANK.wrong("pack_codes", says="rows of 5 codes, an odd number: expected a ValueError of yours; RuntimeError")
def pack_an_odd_number(codes):
    if codes.max() > 15:
        raise ValueError("4 bits hold codes up to 15")
    return codes[..., 0::2] | codes[..., 1::2] << 4


@BANK.wrong("pack_codes", says="4 bits hold no 16")
def pack_up_to_16(codes):
    if codes.shape[-1] % 2 or codes.max() > 16:
        raise ValueError("two codes a byte")
    return codes[..., 0::2] | codes[..., 1::2] << 4


@BANK.wrong("pack_codes", says="dtype torch.int32, expected torch.uint8")
def pack_into_int32(codes):
    refuse(codes)
    return codes[..., 0::2].int() | codes[..., 1::2].int() << 4


@BANK.wrong("pack_codes", says="a matrix row by row.*shape")
def pack_flat(codes):
    refuse(codes)
    flat = codes.flatten()
    return flat[0::2] | flat[1::2] << 4


@BANK.right("pack_codes")
def pack_by_arithmetic(codes):
    refuse(codes)
    pairs = codes.unflatten(-1, (-1, 2)).int()
    return (pairs * torch.tensor([1, 16])).sum(-1).to(torch.uint8)


@BANK.right("pack_codes")
def pack_in_a_loop(codes):
    refuse(codes)
    out = torch.zeros(*codes.shape[:-1], codes.shape[-1] // 2, dtype=torch.uint8)
    for k in range(codes.shape[-1]):
        out[..., k // 2] |= codes[..., k] << (4 if k % 2 else 0)
    return out


# ---------------------------------------------------------------- quant_linear


def unpacked(packed):
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def product(x, codes, scale, minimum, bias, group_of=None):
    """The right one, for codes [out, in]; group_of: weight -> group."""
    n_in, groups = codes.shape[1], scale.shape[1]
    if n_in % groups:
        raise ValueError(f"{groups} groups do not divide a row of {n_in}")
    size = n_in // groups
    at = [k // size if group_of is None else group_of(k, size) % groups for k in range(n_in)]
    out = x @ (codes.float() * scale.float()[:, at] + minimum.float()[:, at]).T
    return out if bias is None else out + bias


@BANK.wrong("quant_linear", says="the two halves of a byte change places")
def linear_high_first(x, packed, scale, minimum, bias):
    return product(x, torch.stack([packed >> 4, packed & 15], -1).flatten(-2), scale, minimum, bias)


@BANK.wrong("quant_linear", says="all low halves come first, and then all high ones")
def linear_in_halves(x, packed, scale, minimum, bias):
    return product(x, torch.cat([packed & 15, packed >> 4], -1), scale, minimum, bias)


@BANK.wrong("quant_linear", says="takes the scale of group k % groups")
def linear_scales_in_turns(x, packed, scale, minimum, bias):
    return product(x, unpacked(packed), scale, minimum, bias, lambda k, size: k)


@BANK.wrong("quant_linear", says="takes the scale of the group behind it")
def linear_next_group(x, packed, scale, minimum, bias):
    return product(x, unpacked(packed), scale, minimum, bias, lambda k, size: k // size + 1)


@BANK.wrong("quant_linear", says="the minimum is forgotten")
def linear_without_a_minimum(x, packed, scale, minimum, bias):
    return product(x, unpacked(packed), scale, 0 * minimum, bias)


@BANK.wrong("quant_linear", says="8 is subtracted from the codes, as for a symmetric grid|minimum 0.*values differ")
def linear_with_a_zero_point(x, packed, scale, minimum, bias):
    return product(x, unpacked(packed).int() - 8, scale, minimum, bias)


@BANK.wrong("quant_linear", says="the codes are one too high")
def linear_zero_point_off_by_one(x, packed, scale, minimum, bias):
    return product(x, unpacked(packed).int() + 1, scale, minimum, bias)


@BANK.wrong("quant_linear", says="the minimum is added before the product with the scale")
def linear_minimum_scaled(x, packed, scale, minimum, bias):
    return product(x, unpacked(packed), scale, scale.float() * minimum, bias)


@BANK.wrong("quant_linear", says="the bias is forgotten")
def linear_without_a_bias(x, packed, scale, minimum, bias):
    return product(x, unpacked(packed), scale, minimum, None)


@BANK.wrong("quant_linear", says="without one nothing is|NoneType")
def linear_always_with_a_bias(x, packed, scale, minimum, bias):
    return product(x, unpacked(packed), scale, minimum, None) + bias


@BANK.wrong("quant_linear", says="the weights are computed in float16")
def linear_in_float16(x, packed, scale, minimum, bias):
    if 2 * packed.shape[1] % scale.shape[1]:
        raise ValueError("groups do not divide the row")
    groups = unpacked(packed).unflatten(1, (scale.shape[1], -1))
    weight = (groups * scale[..., None] + minimum[..., None]).flatten(1).float()
    out = x @ weight.T
    return out if bias is None else out + bias


@BANK.wrong("quant_linear", says="3 groups in a row of 8: expected a ValueError of yours; RuntimeError")
def linear_refuses_nothing(x, packed, scale, minimum, bias):
    groups = unpacked(packed).float().unflatten(1, (scale.shape[1], -1))
    out = x @ (groups * scale[..., None].float() + minimum[..., None].float()).flatten(1).T
    return out if bias is None else out + bias


@BANK.wrong("quant_linear", says="3 groups in a row of 8: expected a ValueError, and there was a result")
def linear_with_a_ragged_group(x, packed, scale, minimum, bias):
    """The last group just takes what is left."""
    codes, groups = unpacked(packed), scale.shape[1]
    size = max(codes.shape[1] // groups, 1)
    at = [min(k // size, groups - 1) for k in range(codes.shape[1])]
    out = x @ (codes.float() * scale.float()[:, at] + minimum.float()[:, at]).T
    return out if bias is None else out + bias


@BANK.right("quant_linear")
def linear_expanded_with_repeats(x, packed, scale, minimum, bias):
    n_out, n_in = packed.shape[0], 2 * packed.shape[1]
    size, rest = divmod(n_in, scale.shape[1])
    if rest:
        raise ValueError(f"a row of {n_in} has no {scale.shape[1]} equal groups")
    codes = torch.empty(n_out, n_in)
    codes[:, 0::2], codes[:, 1::2] = packed % 16, packed // 16
    weight = codes * scale.float().repeat_interleave(size, 1) + minimum.float().repeat_interleave(size, 1)
    return torch.nn.functional.linear(x, weight, bias)


@BANK.right("quant_linear")
def linear_without_expanded_weights(x, packed, scale, minimum, bias):
    """Group by group: the codes' product, scaled afterwards, and the sum of x times the minimum."""
    n_in, groups = 2 * packed.shape[1], scale.shape[1]
    if n_in % groups:
        raise ValueError("the groups do not divide the row")
    size = n_in // groups
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).to(x.dtype)
    out = torch.zeros(len(x), len(packed))
    for g in range(groups):
        part = x[:, g * size : (g + 1) * size]
        out += part @ codes[:, g * size : (g + 1) * size].T * scale[:, g].float()
        out += part.sum(1, keepdim=True) * minimum[:, g].float()
    return out if bias is None else out + bias


# ---------------------------------------------------------------- search_alpha


def rms(x):
    return x.pow(2).mean(0).sqrt().clamp(min=1e-6)


def search(weight, x, rounded, alphas, size=rms, error=None, undo=torch.div):
    """The right search, with the places where people go wrong as arguments."""
    error = error or (lambda candidate: (x @ (weight - candidate).T).pow(2).mean())
    best = None
    for alpha in alphas:
        factor = size(x) ** alpha
        candidate = undo(rounded(weight * factor), factor)
        found = float(error(candidate))
        if best is None or found < best[0]:
            best = found, alpha, candidate
    return best[1:]


@BANK.wrong("search_alpha", says="the error of the weights is compared, and not that of the outputs")
def search_by_weights(weight, x, rounded, alphas):
    return search(weight, x, rounded, alphas, error=lambda candidate: (weight - candidate).pow(2).mean())


@BANK.wrong("search_alpha", says="the largest error is taken")
def search_the_worst(weight, x, rounded, alphas):
    return search(weight, x, rounded, alphas, error=lambda candidate: -(x @ (weight - candidate).T).pow(2).mean())


@BANK.wrong("search_alpha", says="the factors are not divided out again")
def search_left_scaled(weight, x, rounded, alphas):
    return search(weight, x, rounded, alphas, undo=lambda w, factor: w)


@BANK.wrong("search_alpha", says="the factors are multiplied a second time, and not divided out")
def search_scaled_twice(weight, x, rounded, alphas):
    return search(weight, x, rounded, alphas, undo=torch.mul)


@BANK.wrong("search_alpha", says="columns are divided by their factor before rounding")
def search_divided_first(weight, x, rounded, alphas):
    return search(weight, x, rounded, alphas, size=lambda x: 1 / rms(x))


@BANK.wrong("search_alpha", says=r"the size of an input is the mean of \|x\|")
def search_by_the_mean_size(weight, x, rounded, alphas):
    return search(weight, x, rounded, alphas, size=lambda x: x.abs().mean(0).clamp(min=1e-6))


@BANK.wrong("search_alpha", says="the root of the mean square is forgotten")
def search_by_the_mean_square(weight, x, rounded, alphas):
    return search(weight, x, rounded, alphas, size=lambda x: x.pow(2).mean(0).clamp(min=1e-6))


@BANK.wrong("search_alpha", says="the best alpha comes with the approximation of the last one")
def search_with_the_last_candidate(weight, x, rounded, alphas):
    alpha, _ = search(weight, x, rounded, alphas)
    factor = rms(x) ** alphas[-1]
    return alpha, rounded(weight * factor) / factor


@BANK.wrong("search_alpha", says="the last alpha is always taken")
def search_nothing(weight, x, rounded, alphas):
    factor = rms(x) ** alphas[-1]
    return alphas[-1], rounded(weight * factor) / factor


@BANK.wrong("search_alpha", says="an input that is always 0 has the size 0: 0 / 0 is NaN")
def search_with_sizes_of_zero(weight, x, rounded, alphas):
    return search(weight, x, rounded, alphas, size=lambda x: x.pow(2).mean(0).sqrt())


@BANK.wrong("search_alpha", says="the alphas .* are equally good: the first was asked for")
def search_the_last_of_equals(weight, x, rounded, alphas):
    return search(weight, x, rounded, tuple(reversed(alphas)))


@BANK.wrong("search_alpha", says="size of tensor a|must match|rounded\\(\\) takes a matrix")
def search_rows(weight, x, rounded, alphas):
    return search(weight, x, rounded, alphas, size=lambda x: x.pow(2).mean(1).sqrt().clamp(min=1e-6))


@BANK.right("search_alpha")
def search_with_proportions(weight, x, rounded, alphas):
    """As the package does: from X^T X, and with factors near 1."""
    hessian = x.T.double() @ x.double() / len(x)
    candidates = []
    for alpha in alphas:
        factor = rms(x) ** alpha
        factor = factor / (factor.max() * factor.min()).sqrt()
        candidates.append(rounded(weight * factor) / factor)
    errors = [float(torch.einsum("oi,ij,oj->", e, hessian, e)) for e in ((weight - c).double() for c in candidates)]
    best = errors.index(min(errors))
    return alphas[best], candidates[best]


@BANK.right("search_alpha")
def search_by_the_norm(weight, x, rounded, alphas):
    size = torch.linalg.vector_norm(x, dim=0) / len(x) ** 0.5
    size = torch.maximum(size, torch.full_like(size, 1e-6))
    want = x @ weight.T

    def candidate(alpha):
        return rounded(weight * size.pow(alpha)[None, :]) * size.pow(-alpha)[None, :]

    alpha = min(alphas, key=lambda a: float((want - x @ candidate(a).T).norm()))
    return alpha, candidate(alpha)


# ---------------------------------------------------------------- gptq_column


def column_codes(weights, scale, minimum, bits, round_=torch.round, low=0, high=None):
    top = 2**bits - 1
    places = torch.where(scale == 0, 0, (weights - minimum) / scale)
    return (round_(places).clamp(low, top if high is None else high).long() % 256).to(torch.uint8)


def column(left, j, scale, minimum, bits, row, columns=None, codes=None):
    """row: what each column gets of the error."""
    codes = column_codes(left[:, j], scale, minimum, bits) if codes is None else codes
    new = left.clone()
    new[:, j] = codes * scale + minimum
    columns = columns or slice(j + 1, None)
    new[:, columns] -= torch.outer(left[:, j] - new[:, j], row[columns])
    return codes, new


@BANK.wrong("gptq_column", says="the error is fed forward with the wrong sign")
def column_wrong_sign(left, j, scale, minimum, bits, factor):
    return column(left, j, scale, minimum, bits, -factor[j] / factor[j, j])


@BANK.wrong("gptq_column", says="only the next column gets something of the error")
def column_next_alone(left, j, scale, minimum, bits, factor):
    return column(left, j, scale, minimum, bits, factor[j] / factor[j, j], slice(j + 1, j + 2))


@BANK.wrong("gptq_column", says=r"nothing is fed forward \(is it column j of U")
def column_of_the_factor(left, j, scale, minimum, bits, factor):
    return column(left, j, scale, minimum, bits, factor[:, j] / factor[j, j])


@BANK.wrong("gptq_column", says="wrong triangle")
def column_wrong_triangle(left, j, scale, minimum, bits, factor):
    return column(left, j, scale, minimum, bits, factor[:, j] / factor[j, j], slice(0, j))


@BANK.wrong("gptq_column", says=r"the error is not divided by U\[j, j\]")
def column_without_the_diagonal(left, j, scale, minimum, bits, factor):
    return column(left, j, scale, minimum, bits, factor[j])


@BANK.wrong("gptq_column", says=r"the error is divided by U\[j, j\] twice")
def column_divided_twice(left, j, scale, minimum, bits, factor):
    return column(left, j, scale, minimum, bits, factor[j] / factor[j, j] ** 2)


@BANK.wrong("gptq_column", says="column j keeps its weights")
def column_kept(left, j, scale, minimum, bits, factor):
    codes, new = column(left, j, scale, minimum, bits, factor[j] / factor[j, j])
    new[:, j] = left[:, j]
    return codes, new


@BANK.wrong("gptq_column", says="nothing is fed forward")
def column_rounded_alone(left, j, scale, minimum, bits, factor):
    return column(left, j, scale, minimum, bits, 0 * factor[j])


@BANK.wrong("gptq_column", says="the inverse Hessian itself is taken for U")
def column_of_the_inverse(left, j, scale, minimum, bits, factor):
    inverse = factor.T @ factor
    return column(left, j, scale, minimum, bits, inverse[j] / inverse[j, j])


@BANK.wrong("gptq_column", says="codes: .*rounded down, and not to the nearest")
def column_rounded_down(left, j, scale, minimum, bits, factor):
    codes = column_codes(left[:, j], scale, minimum, bits, round_=torch.floor)
    return column(left, j, scale, minimum, bits, factor[j] / factor[j, j], codes=codes)


@BANK.wrong("gptq_column", says="when nothing is clamped|below 0 are not clamped|above the greatest are not clamped")
def column_without_a_clamp(left, j, scale, minimum, bits, factor):
    codes = column_codes(left[:, j], scale, minimum, bits, low=-1000, high=1000)
    return column(left, j, scale, minimum, bits, factor[j] / factor[j, j], codes=codes)


@BANK.wrong("gptq_column", says="left, which was given, was changed: give a new matrix")
def column_in_place(left, j, scale, minimum, bits, factor):
    codes, new = column(left, j, scale, minimum, bits, factor[j] / factor[j, j])
    return codes, left.copy_(new)


@BANK.wrong("gptq_column", says="the scale of this row is 0, so code 0 is expected")
def column_divided_by_zero(left, j, scale, minimum, bits, factor):
    codes = ((left[:, j] - minimum) / scale).round().clamp(0, 2**bits - 1).to(torch.uint8)
    return column(left, j, scale, minimum, bits, factor[j] / factor[j, j], codes=codes)


@BANK.right("gptq_column")
def column_by_all_columns(left, j, scale, minimum, bits, factor):
    """As the package does: row j of U is 0 before j, and turns column j into what its codes stand for."""
    steps = (left[:, j] - minimum) / scale.where(scale > 0, 1)
    codes = (steps.round().clamp(0, 2**bits - 1) * (scale > 0)).to(torch.uint8)
    error = (left[:, j] - (codes * scale + minimum)) / factor[j, j]
    return codes, left - error[:, None] * factor[j]


@BANK.right("gptq_column")
def column_in_a_loop(left, j, scale, minimum, bits, factor):
    left = left.clone()
    codes = torch.zeros(len(left), dtype=torch.uint8)
    for row in range(len(left)):
        levels = minimum[row] + scale[row] * torch.arange(2**bits)
        codes[row] = (levels - left[row, j]).abs().argmin()
        error = left[row, j] - levels[codes[row].long()]
        left[row, j] -= error
        for k in range(j + 1, left.shape[1]):
            left[row, k] -= error * factor[j, k] / factor[j, j]
    return codes, left


# ---------------------------------------------------------------- w4_kernel

RIGHT = """
@triton.jit
def NAME(
    x_ptr, packed_ptr, scale_ptr, minimum_ptr, y_ptr, n_out, n_in, stride_packed, stride_scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, n_in // 2, BLOCK):
        at = first + tl.arange(0, BLOCK)[None, :]
        here = at < n_in // 2
        inside = (rows < n_out) & here
        even = tl.load(x_ptr + 2 * at, mask=here, other=0.0).to(tl.float32)
        odd = tl.load(x_ptr + 2 * at + 1, mask=here, other=0.0).to(tl.float32)
        codes = tl.load(packed_ptr + rows * stride_packed + at, mask=inside, other=0)
        groups = rows * stride_scale + 2 * at // GROUP
        scale = tl.load(scale_ptr + groups, mask=inside, other=0.0).to(tl.float32)
        minimum = tl.load(minimum_ptr + groups, mask=inside, other=0.0).to(tl.float32)
        low, high = (codes & 15) * scale + minimum, (codes >> 4) * scale + minimum
        total += tl.sum(low * even + high * odd, axis=1)
    out = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(y_ptr + out, total, mask=out < n_out)
"""


def changed(name: str, says: str, *changes: tuple[str, str]) -> None:
    """A wrong answer: the right kernel, changed in a few places."""
    source = RIGHT.replace("NAME", name)
    for old, new in changes:
        assert old in source, f"{name} changes {old!r}, which is not there"
        source = source.replace(old, new)
    namespace = {"triton": triton, "tl": tl}
    exec(compiled(source, name), namespace)
    BANK.wrong("w4_kernel", says)(namespace[name])


changed(
    "kernel_high_first",
    "the two halves of a byte change places",
    ("(codes & 15) *", "(codes >> 4) *@"),
    ("(codes >> 4) * scale", "(codes & 15) * scale"),
    ("*@", "*"),
)
changed(
    "kernel_x_in_halves",
    "x is taken in halves, and not every other number",
    ("x_ptr + 2 * at,", "x_ptr + at,"),
    ("x_ptr + 2 * at + 1,", "x_ptr + n_in // 2 + at,"),
)
changed(
    "kernel_same_x",
    "both halves meet the same x",
    ("high * odd", "high * even"),
)
changed(
    "kernel_without_the_high_halves",
    "the high halves are forgotten",
    ("low * even + high * odd", "low * even"),
)
changed(
    "kernel_without_a_minimum",
    "the minimum is forgotten",
    ("* scale + minimum", "* scale"),
)
changed(
    "kernel_minimum_once",
    "the minimum is added for one of the two halves only",
    ("(codes >> 4) * scale + minimum", "(codes >> 4) * scale"),
)
changed(
    "kernel_zero_point",
    "8 is subtracted from the codes, as for a symmetric grid",
    ("codes & 15)", "codes & 15) - 8.0)"),
    ("codes >> 4)", "codes >> 4) - 8.0)"),
    ("low, high = ", "low, high = ("),
    ("minimum, (", "minimum, (("),
)
changed(
    "kernel_group_of_a_byte",
    r"the group of byte i is i // GROUP, and not 2 \* i // GROUP",
    ("2 * at // GROUP", "at // GROUP"),
)
changed(
    "kernel_first_group",
    "the first group's scale serves all",
    ("rows * stride_scale + 2 * at // GROUP", "rows * stride_scale + 0 * at"),
)
changed(
    "kernel_group_of_a_block",
    "each block of bytes takes the scale of its first group",
    ("2 * at // GROUP", "(2 * first) // GROUP + 0 * at"),
)
changed(
    "kernel_last_bytes_lost",
    "the bytes behind the last full block are lost",
    ("range(0, n_in // 2, BLOCK)", "range(0, n_in // 2 // BLOCK * BLOCK, BLOCK)"),
)
changed(
    "kernel_last_block_alone",
    "only the last block of bytes is kept, and not added",
    ("total += ", "total = "),
)
changed(
    "kernel_without_other",
    "a masked load without other=",
    (", other=0.0", ""),
    (", other=0", ""),
)
changed(
    "kernel_x_not_masked",
    r"no multiple of a block of bytes.*reads x\[",
    ("2 * at, mask=here, other=0.0", "2 * at"),
    ("2 * at + 1, mask=here, other=0.0", "2 * at + 1"),
)
changed(
    "kernel_hidden_ones",
    "hidden inputs count as ones",
    ("2 * at, mask=here, other=0.0", "2 * at, mask=here, other=1.0"),
    ("2 * at + 1, mask=here, other=0.0", "2 * at + 1, mask=here, other=1.0"),
    (
        "minimum_ptr + groups, mask=inside, other=0.0",
        "minimum_ptr + rows * stride_scale + tl.minimum(2 * at, n_in - 1) // GROUP, mask=rows < n_out, other=0.0",
    ),
)
changed(
    "kernel_bytes_not_masked",
    r"no multiple of a block of bytes.*reads packed\[",
    ("at, mask=inside, other=0)", "at, mask=rows < n_out, other=0)"),
)
changed(
    "kernel_rows_not_masked",
    r"no multiple of ROWS.*reads packed\[8?7?, 0\]",
    ("inside = (rows < n_out) & here", "inside = (rows >= 0) & here"),
)
changed(
    "kernel_writes_past_the_end",
    r"no multiple of ROWS.*program 1 writes y\[7\]",
    (", mask=out < n_out", ""),
)
changed(
    "kernel_rows_without_gaps",
    "is a lane not masked, or an offset wrong",
    ("rows * stride_packed", "rows * (n_in // 2)"),
)
changed(
    "kernel_in_float16",
    "products are taken in float16, which has three digits",
    (".to(tl.float32)\n        codes", ".to(tl.float16)\n        codes"),
    ("other=0.0).to(tl.float32)\n        odd", "other=0.0).to(tl.float16)\n        odd"),
    ("scale_ptr + groups, mask=inside, other=0.0).to(tl.float32)", "scale_ptr + groups, mask=inside, other=0.0)"),
    ("minimum_ptr + groups, mask=inside, other=0.0).to(tl.float32)", "minimum_ptr + groups, mask=inside, other=0.0)"),
    ("(codes & 15)", "(codes & 15).to(tl.float16)"),
    ("(codes >> 4)", "(codes >> 4).to(tl.float16)"),
)
changed(
    "kernel_not_shifted",
    "the high half is not shifted down, and counts 16 times",
    ("(codes >> 4)", "(codes & 240)"),
)


@BANK.right("w4_kernel")
@triton.jit
def kernel_group_by_group(
    x_ptr, packed_ptr, scale_ptr, minimum_ptr, y_ptr, n_out, n_in, stride_packed, stride_scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A walk inside each group: its scale and minimum are loaded once, and applied to sums."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float32)
    for group in range(n_in // GROUP):
        scale = tl.load(scale_ptr + rows * stride_scale + group, mask=rows < n_out, other=0.0).to(tl.float32)
        minimum = tl.load(minimum_ptr + rows * stride_scale + group, mask=rows < n_out, other=0.0).to(tl.float32)
        for first in range(0, GROUP // 2, BLOCK):
            inner = first + tl.arange(0, BLOCK)
            here, at = inner < GROUP // 2, group * (GROUP // 2) + inner
            even = tl.load(x_ptr + 2 * at, mask=here, other=0.0).to(tl.float32)[None, :]
            odd = tl.load(x_ptr + 2 * at + 1, mask=here, other=0.0).to(tl.float32)[None, :]
            place = packed_ptr + rows[:, None] * stride_packed + at[None, :]
            codes = tl.load(place, mask=(rows < n_out)[:, None] & here[None, :], other=0).to(tl.int32)
            total += scale * tl.sum((codes % 16) * even + (codes // 16) * odd, axis=1)
            total += minimum * tl.sum(even + odd, axis=1)
    tl.store(y_ptr + rows, total, mask=rows < n_out)


@BANK.right("w4_kernel")
@triton.jit
def kernel_weight_by_weight(
    x_ptr, packed_ptr, scale_ptr, minimum_ptr, y_ptr, n_out, n_in, stride_packed, stride_scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each byte is loaded twice, once for each of its weights; the tile is added up at the end."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, n_in, BLOCK):
        k = first + tl.arange(0, BLOCK)[None, :]
        inside = (rows < n_out) & (k < n_in)
        x = tl.load(x_ptr + k, mask=k < n_in, other=0.0).to(tl.float32)
        byte = tl.load(packed_ptr + rows * stride_packed + k // 2, mask=inside, other=0).to(tl.int32)
        code = (byte >> (k % 2 * 4)) & 15
        scale = tl.load(scale_ptr + rows * stride_scale + k // GROUP, mask=inside, other=1.0).to(tl.float32)
        minimum = tl.load(minimum_ptr + rows * stride_scale + k // GROUP, mask=inside, other=1.0).to(tl.float32)
        total += (code * scale + minimum) * x
    out = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(y_ptr + out, tl.sum(total, axis=1), mask=out < n_out)
