"""Answers to exercise 04, FlashAttention."""

from __future__ import annotations

from dataclasses import replace

import torch
from bank import Bank
from einops import rearrange, repeat

from minillm.attention import OnlineSoftmax, attention, reference_attention, tiled_attention
from minillm.lab.checks.ch04 import Partial
from minillm.lab.maybe_triton import tl, triton

BANK = Bank()


# ---------------------------------------------------------------- online_softmax


@BANK.wrong(
    "online_softmax",
    says="raises the largest score.*comes out when the sums so far are not scaled down as the top rises",
)
def never_rescales(blocks, rows, width):
    top, total, weighted = torch.full((rows,), -torch.inf), torch.zeros(rows), torch.zeros(rows, width)
    for scores, values in blocks:
        top = torch.maximum(top, scores.amax(1))
        weights = (scores - top[:, None]).exp()
        total, weighted = total + weights.sum(1), weighted + weights @ values
    return weighted / total[:, None]


@BANK.wrong("online_softmax", says="`total` is scaled down as the top rises, and `weighted` is not")
def rescales_total_alone(blocks, rows, width):
    top, total, weighted = torch.full((rows,), -torch.inf), torch.zeros(rows), torch.zeros(rows, width)
    for scores, values in blocks:
        new = torch.maximum(top, scores.amax(1))
        weights = (scores - new[:, None]).exp()
        total = total * (top - new).exp() + weights.sum(1)
        weighted, top = weighted + weights @ values, new
    return weighted / total[:, None]


@BANK.wrong("online_softmax", says="`weighted` is scaled down as the top rises, and `total` is not")
def rescales_weighted_alone(blocks, rows, width):
    top, total, weighted = torch.full((rows,), -torch.inf), torch.zeros(rows), torch.zeros(rows, width)
    for scores, values in blocks:
        new = torch.maximum(top, scores.amax(1))
        weights = (scores - new[:, None]).exp()
        total = total + weights.sum(1)
        weighted, top = weighted * (top - new).exp()[:, None] + weights @ values, new
    return weighted / total[:, None]


@BANK.wrong("online_softmax", says="far below.*its largest score \\*so far\\*, and must not fall")
def top_of_the_block(blocks, rows, width):
    top, total, weighted = torch.full((rows,), -torch.inf), torch.zeros(rows), torch.zeros(rows, width)
    for scores, values in blocks:
        new = scores.amax(1)
        weights = (scores - new[:, None]).exp()
        total = total * (top - new).exp() + weights.sum(1)
        weighted, top = weighted * (top - new).exp()[:, None] + weights @ values, new
    return weighted / total[:, None]


@BANK.wrong("online_softmax", says="each block has its own top, and its sums are added up without regard to it")
def tops_of_their_own(blocks, rows, width):
    total, weighted = torch.zeros(rows), torch.zeros(rows, width)
    for scores, values in blocks:
        weights = (scores - scores.amax(1, keepdim=True)).exp()
        total, weighted = total + weights.sum(1), weighted + weights @ values
    return weighted / total[:, None]


@BANK.wrong("online_softmax", says="each block is divided by the total so far, instead of once at the end")
def divides_at_each_block(blocks, rows, width):
    top, total, out = torch.full((rows,), -torch.inf), torch.zeros(rows), torch.zeros(rows, width)
    for scores, values in blocks:
        new = torch.maximum(top, scores.amax(1))
        weights = (scores - new[:, None]).exp()
        total = total * (top - new).exp() + weights.sum(1)
        out = (out * (top - new).exp()[:, None] + weights @ values) / total[:, None]
        top = new
    return out


@BANK.wrong("online_softmax", says="each block has its own softmax and the results are added up")
def adds_softmaxes(blocks, rows, width):
    return sum(scores.softmax(1) @ values for scores, values in blocks)


@BANK.wrong("online_softmax", says=r"overflows.*exp\(score\) overflows: subtract the largest score first")
def without_a_top(blocks, rows, width):
    total, weighted = torch.zeros(rows), torch.zeros(rows, width)
    for scores, values in blocks:
        weights = scores.exp()
        total, weighted = total + weights.sum(1), weighted + weights @ values
    return weighted / total[:, None]


@BANK.wrong("online_softmax", says="so small that it is 0.*divided by 0.*starts at -inf")
def top_starts_at_0(blocks, rows, width):
    top, total, weighted = torch.zeros(rows), torch.zeros(rows), torch.zeros(rows, width)
    for scores, values in blocks:
        new = torch.maximum(top, scores.amax(1))
        weights, factor = (scores - new[:, None]).exp(), (top - new).exp()
        total = total * factor + weights.sum(1)
        weighted, top = weighted * factor[:, None] + weights @ values, new
    return weighted / total[:, None]


@BANK.wrong("online_softmax", says="one block is a softmax.*divided by 0")
def forgets_the_total(blocks, rows, width):
    top, total, weighted = torch.full((rows,), -torch.inf), torch.zeros(rows), torch.zeros(rows, width)
    for scores, values in blocks:
        new = torch.maximum(top, scores.amax(1))
        weighted = weighted * (top - new).exp()[:, None] + (scores - new[:, None]).exp() @ values
        top = new
    return weighted / total[:, None]


@BANK.wrong("online_softmax", says="a row saw only -inf so far, and -inf - -inf is NaN")
def forgets_hidden_blocks(blocks, rows, width):
    top, total, weighted = torch.full((rows,), -torch.inf), torch.zeros(rows), torch.zeros(rows, width)
    for scores, values in blocks:
        new = torch.maximum(top, scores.amax(1))
        weights, factor = (scores - new[:, None]).exp(), (top - new).exp()
        total = total * factor + weights.sum(1)
        weighted, top = weighted * factor[:, None] + weights @ values, new
    return weighted / total[:, None]


@BANK.wrong("online_softmax", says="a block was read after the next had been asked for")
def keeps_all_blocks(blocks, rows, width):
    every = list(blocks)
    scores, values = (torch.cat([block[i] for block in every], 1 - i) for i in (0, 1))
    return scores.softmax(1) @ values


@BANK.wrong("online_softmax", says="it is not divided by the total")
def forgets_to_divide(blocks, rows, width):
    top, weighted = torch.full((rows,), -torch.inf), torch.zeros(rows, width)
    for scores, values in blocks:
        new = torch.maximum(top, scores.amax(1))
        weighted = weighted * (top - new).exp()[:, None] + (scores - new[:, None]).exp() @ values
        top = new
    return weighted


@BANK.right("online_softmax")
def with_the_class(blocks, rows, width):
    softmax = OnlineSoftmax(torch.empty(rows, width))
    for scores, values in blocks:
        softmax.add(scores, values)
    return softmax.result()


@BANK.right("online_softmax")
def with_logarithms(blocks, rows, width):
    """What is kept is divided already, beside the logarithm of the sum."""
    log_total, out = torch.full((rows,), -torch.inf), torch.zeros(rows, width)
    for scores, values in blocks:
        new = torch.logaddexp(log_total, scores.logsumexp(1))
        base = new.nan_to_num(neginf=0)
        out = out * (log_total - base).exp()[:, None] + (scores - base[:, None]).exp() @ values
        log_total = new
    return out


# ---------------------------------------------------------------- attend_in_tiles


def walk(
    q, k, v, rows, columns, *, past=None, scale=None, heads="(g r)", columns_end=None, rows_end=None, hides=None,
    softmax=OnlineSoftmax,
):  # fmt: skip
    """The right walk; each option puts one mistake in. hides(row of q, key, past) -> whether it is hidden."""
    past = len(k) - len(q) if past is None else past
    scale = q.shape[2] ** -0.5 if scale is None else scale
    hides = hides or (lambda row, key, past, first: key > past + row)
    shape = {"g": k.shape[1]}
    out = torch.zeros_like(q)
    for first in range(0, len(q) if rows_end is None else rows_end, rows):
        tile = rearrange(q[first : first + rows], f"t {heads} d -> g r t d", **shape) * scale
        row = torch.arange(first, first + tile.shape[2])[:, None]
        state = softmax(tile)
        for start in range(0, len(k) if columns_end is None else columns_end, columns):
            keys, values = (rearrange(x[start : start + columns], "s g d -> g 1 s d") for x in (k, v))
            key = torch.arange(start, start + keys.shape[2])
            state.add((tile @ keys.mT).masked_fill(hides(row, key, past, first), -torch.inf), values)
        out[first : first + rows] = rearrange(state.result(), f"g r t d -> t {heads} d")
    return out


@BANK.wrong("attend_in_tiles", says="on top of a past.*the mask at the upper left, the past forgotten")
def upper_left(q, k, v, rows, columns):
    return walk(q, k, v, rows, columns, past=0)


@BANK.wrong("attend_in_tiles", says="rows are counted from the beginning of their tile")
def counts_rows_in_the_tile(q, k, v, rows, columns):
    return walk(q, k, v, rows, columns, hides=lambda row, key, past, first: key > past + row - first)


@BANK.wrong("attend_in_tiles", says="each query sees all keys, also those after it")
def without_a_mask(q, k, v, rows, columns):
    return walk(q, k, v, rows, columns, hides=lambda row, key, past, first: (key < 0) & (row < 0))


@BANK.wrong("attend_in_tiles", says="all rows of a tile see what its last row sees")
def mask_of_whole_tiles(q, k, v, rows, columns):
    return walk(q, k, v, rows, columns, hides=lambda row, key, past, first: (key > past + row.amax()) & (row >= 0))


@BANK.wrong("attend_in_tiles", says="a query sees the token after it")
def off_by_one(q, k, v, rows, columns):
    return walk(q, k, v, rows, columns, hides=lambda row, key, past, first: key > past + row + 1)


@BANK.wrong("attend_in_tiles", says="last tiles.*a last tile of keys that is not full is left out")
def drops_the_last_keys(q, k, v, rows, columns):
    return walk(q, k, v, rows, columns, columns_end=len(k) // columns * columns)


@BANK.wrong("attend_in_tiles", says="only the rows 6 to 6 are wrong: the last tile of queries, which is not full")
def drops_the_last_rows(q, k, v, rows, columns):
    return walk(q, k, v, rows, columns, rows_end=len(q) // rows * rows)


@BANK.wrong("attend_in_tiles", says="head h reads key head h % n_kv_heads")
def interleaves_heads(q, k, v, rows, columns):
    return walk(q, k, v, rows, columns, heads="(r g)")


@BANK.wrong("attend_in_tiles", says=r"the scores are not divided by sqrt\(head_dim\)")
def forgets_the_scale(q, k, v, rows, columns):
    return walk(q, k, v, rows, columns, scale=1)


class Sketch:
    """A softmax in each block, and the blocks added up."""

    def __init__(self, q):
        self.out = torch.zeros_like(q)

    def add(self, scores, values):
        self.out = self.out + scores.softmax(-1).nan_to_num() @ values

    def result(self):
        return self.out


@BANK.wrong("attend_in_tiles", says="each tile has its own softmax and the results are added up")
def the_famous_sketch(q, k, v, rows, columns):
    return walk(q, k, v, rows, columns, softmax=Sketch)


@BANK.wrong("attend_in_tiles", says=r"grows with the length.*you made a tensor of shape \[4, 16, 320\]")
def materialises(q, k, v, rows, columns):
    return reference_attention(q, k.clone(), v) if len(k) < 300 else scores_of_all(q, k, v)


def scores_of_all(q, k, v):
    k, v = (repeat(x, "s g d -> s (g r) d", r=q.shape[1] // k.shape[1]) for x in (k, v))
    return torch.einsum("hts,shd->thd", torch.einsum("thd,shd->hts", q, k).softmax(-1), v)


@BANK.wrong("attend_in_tiles", says="grows with the length.*you made a tensor of shape")
def a_strip_for_each_tile(q, k, v, rows, columns):
    past = len(k) - len(q)
    return torch.cat(
        [attention(q[i : i + rows], k[: past + i + rows], v[: past + i + rows]) for i in range(0, len(q), rows)]
    )


@BANK.wrong("attend_in_tiles", says="you call PyTorch's scaled_dot_product_attention: write the walk yourself")
def leaves_it_to_pytorch(q, k, v, rows, columns):
    past = len(k) - len(q)
    return torch.cat([attention(q[i : i + 1], k[: past + i + 1], v[: past + i + 1]) for i in range(len(q))])


class Collects(OnlineSoftmax):
    """Keeps all scores to the end."""

    def __init__(self, q):
        super().__init__(q)
        self.kept = []

    def add(self, scores, values):
        super().add(scores, values)
        self.kept.append(scores.clone())


@BANK.wrong("attend_in_tiles", says="grows with the length.*do not collect the tiles")
def collects_the_tiles(q, k, v, rows, columns):
    return walk(q, k, v, rows, columns, softmax=Collects)


@BANK.right("attend_in_tiles")
def over_all_tiles(q, k, v, rows, columns):
    return walk(q, k, v, rows, columns)


@BANK.right("attend_in_tiles")
def by_the_package(q, k, v, rows, columns):
    return tiled_attention(q, k, v, rows, columns)


@BANK.right("attend_in_tiles")
def head_by_head(q, k, v, rows, columns):
    group, past, out = q.shape[1] // k.shape[1], len(k) - len(q), torch.empty_like(q)
    for head in range(q.shape[1]):
        for first in range(0, len(q), rows):
            tile = q[first : first + rows, head] / q.shape[2] ** 0.5
            softmax = OnlineSoftmax(tile)
            for start in range(0, past + first + len(tile), columns):
                scores = tile @ k[start : start + columns, head // group].T
                seen = torch.ones_like(scores).tril(past + first - start) > 0
                softmax.add(torch.where(seen, scores, -torch.inf), v[start : start + columns, head // group])
            out[first : first + rows, head] = softmax.result()
    return out


# ---------------------------------------------------------------- causal_bounds


@BANK.wrong("causal_bounds", says="full tiles: .*the past is forgotten")
def full_without_the_past(first, rows, columns, past, length):
    return (first + 1) // columns, min(past + first + rows, length)


@BANK.wrong("causal_bounds", says="full tiles: .*the diagonal is forgotten: a row sees itself too")
def off_at_the_diagonal(first, rows, columns, past, length):
    return (past + first) // columns, min(past + first + rows, length)


@BANK.wrong("causal_bounds", says="full tiles: .*a tile that is seen in part counts as full")
def rounds_up(first, rows, columns, past, length):
    return -(-(past + first + 1) // columns), min(past + first + rows, length)


@BANK.wrong("causal_bounds", says="full tiles: .*the last row of the tile is asked instead of the first")
def asks_the_last_row(first, rows, columns, past, length):
    return (past + first + rows) // columns, min(past + first + rows, length)


@BANK.wrong("causal_bounds", says="full tiles: .*keys are counted instead of tiles")
def gives_the_first_masked_key(first, rows, columns, past, length):
    return (past + first + 1) // columns * columns, min(past + first + rows, length)


@BANK.wrong("causal_bounds", says="sticks out.*end: .*rows beyond the length count")
def beyond_the_length(first, rows, columns, past, length):
    return (past + first + 1) // columns, past + first + rows


@BANK.wrong("causal_bounds", says="on top of a past.*end: .*the past is forgotten")
def end_without_the_past(first, rows, columns, past, length):
    return (past + first + 1) // columns, min(first + rows, length)


@BANK.wrong("causal_bounds", says="end: .*keys after the tile's last row are walked over too")
def to_the_end_of_the_text(first, rows, columns, past, length):
    return (past + first + 1) // columns, length


@BANK.wrong("causal_bounds", says="end: .*the last row does not see itself")
def end_is_the_last_position(first, rows, columns, past, length):
    return (past + first + 1) // columns, min(past + first + rows, length) - 1


@BANK.right("causal_bounds")
def by_looking_at_the_rows(first, rows, columns, past, length):
    positions = [p for p in range(past + first, past + first + rows) if p < length]
    return (positions[0] + 1) // columns, positions[-1] + 1


@BANK.right("causal_bounds")
def by_counting_tiles(first, rows, columns, past, length):
    full = 0
    while (full + 1) * columns - 1 <= past + first:
        full += 1
    return full, past + min(first + rows, length - past)


# ---------------------------------------------------------------- merge_partials


def merge(a, b, factor_a=None, factor_b=None):
    """The right merge, with other factors where they are given."""
    top = torch.maximum(a.top, b.top)
    base = top.masked_fill(top == -torch.inf, 0)
    fa, fb = (a.top - base).exp(), (b.top - base).exp()
    fa, fb = (fa if factor_a is None else factor_a), (fb if factor_b is None else factor_b)
    return Partial(top, a.total * fa + b.total * fb, a.weighted * fa[..., None] + b.weighted * fb[..., None])


@BANK.wrong("merge_partials", says="the two are added without making them relative to one top")
def adds(a, b):
    return Partial(torch.maximum(a.top, b.top), a.total + b.total, a.weighted + b.weighted)


@BANK.wrong("merge_partials", says="the mean of the two is taken")
def averages(a, b):
    return Partial(torch.maximum(a.top, b.top), (a.total + b.total) / 2, (a.weighted + b.weighted) / 2)


@BANK.wrong("merge_partials", says="only `a` is scaled to the new top")
def scales_a_alone(a, b):
    return merge(a, b, factor_b=torch.tensor(1.0))


@BANK.wrong("merge_partials", says="only `b` is scaled to the new top")
def scales_b_alone(a, b):
    return merge(a, b, factor_a=torch.tensor(1.0))


@BANK.wrong("merge_partials", says="only the totals are scaled")
def scales_totals_alone(a, b):
    return replace(merge(a, b), weighted=a.weighted + b.weighted)


@BANK.wrong("merge_partials", says="the result is divided by the total already")
def divides_already(a, b):
    both = merge(a, b)
    return replace(both, weighted=both.weighted / both.total[:, None])


@BANK.wrong("merge_partials", says=r"total: NoneType, expected a tensor of shape \[4\]")
def merges_tops_alone(a, b):
    return Partial(torch.maximum(a.top, b.top), None, None)


@BANK.wrong("merge_partials", says=r"total: shape \[4, 1\], expected a tensor of shape \[4\]")
def keeps_a_dimension(a, b):
    top = torch.maximum(a.top, b.top)
    old, new = (torch.where(x.top == -torch.inf, 0.0, (x.top - top).exp())[:, None] for x in (a, b))
    return Partial(top, a.total[:, None] * old + b.total[:, None] * new, a.weighted * old + b.weighted * new)


@BANK.wrong("merge_partials", says=r"two parts without any key.*a and b saw no key, and -inf - -inf is NaN")
def nan_for_two_empty_parts(a, b):
    top = torch.maximum(a.top, b.top)
    return merge(a, b, (a.top - top).exp(), (b.top - top).exp())


@BANK.wrong("merge_partials", says="a part without any key.*a saw no key, and -inf - -inf is NaN")
def scales_by_the_difference(a, b):
    """The smaller one by exp(-|difference|), where the sign says which it is: -inf has no place on that line."""
    gap = b.top - a.top
    centre = a.top + gap.clamp(min=0)
    return replace(merge(a, b, (a.top - centre).exp(), (b.top - centre).exp()), top=torch.maximum(a.top, b.top))


@BANK.wrong("merge_partials", says=r"top \(the larger of the two\)")
def keeps_the_top_of_a(a, b):
    factor = (b.top - a.top).exp()
    return Partial(a.top, a.total + b.total * factor, a.weighted + b.weighted * factor[:, None])


@BANK.right("merge_partials")
def with_factors(a, b):
    return merge(a, b)


@BANK.right("merge_partials")
def stacked(a, b):
    tops, totals, weighted = (
        torch.stack(pair) for pair in ((a.top, b.top), (a.total, b.total), (a.weighted, b.weighted))
    )
    top = tops.amax(0)
    factors = torch.where(tops == -torch.inf, 0.0, (tops - top).exp())
    return Partial(top, (totals * factors).sum(0), (weighted * factors[..., None]).sum(0))


# ---------------------------------------------------------------- norm_kernel


@BANK.wrong(
    "norm_kernel", says=r"no power of two: 1 row\(s\) of 5 columns.*program 0 reads x\[0, 5\].*is a lane not masked"
)
@triton.jit
def norm_without_a_mask(x_ptr, weight_ptr, y_ptr, stride_x, stride_y, n_columns, eps, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_x + columns).to(tl.float32)
    weight = tl.load(weight_ptr + columns).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / n_columns + eps) * weight
    tl.store(y_ptr + row * stride_y + columns, y, mask=columns < n_columns)


@BANK.wrong("norm_kernel", says=r"program 0 writes y\[0, 5\] \(and 2 more\), and its shape is \[1, 5\]")
@triton.jit
def norm_stores_without_a_mask(x_ptr, weight_ptr, y_ptr, stride_x, stride_y, n_columns, eps, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    inside = columns < n_columns
    x = tl.load(x_ptr + row * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * stride_y + columns, x * tl.rsqrt(tl.sum(x * x, axis=0) / n_columns + eps) * weight)


@BANK.wrong("norm_kernel", says="a masked load without other=: the interpreter fills in zeros")
@triton.jit
def norm_without_other(x_ptr, weight_ptr, y_ptr, stride_x, stride_y, n_columns, eps, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    inside = columns < n_columns
    x = tl.load(x_ptr + row * stride_x + columns, mask=inside).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / n_columns + eps) * weight
    tl.store(y_ptr + row * stride_y + columns, y, mask=inside)


@BANK.wrong("norm_kernel", says="the hidden columns count as ones in the sum")
@triton.jit
def norm_hidden_ones(x_ptr, weight_ptr, y_ptr, stride_x, stride_y, n_columns, eps, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    inside = columns < n_columns
    x = tl.load(x_ptr + row * stride_x + columns, mask=inside, other=1.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / n_columns + eps) * weight
    tl.store(y_ptr + row * stride_y + columns, y, mask=inside)


@BANK.wrong("norm_kernel", says="the sum is divided by BLOCK, and not by n_columns")
@triton.jit
def norm_mean_of_the_block(x_ptr, weight_ptr, y_ptr, stride_x, stride_y, n_columns, eps, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    inside = columns < n_columns
    x = tl.load(x_ptr + row * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * stride_y + columns, x * tl.rsqrt(tl.sum(x * x, axis=0) / BLOCK + eps) * weight, mask=inside)


@BANK.wrong("norm_kernel", says="eps is added outside of the root")
@triton.jit
def norm_eps_outside(x_ptr, weight_ptr, y_ptr, stride_x, stride_y, n_columns, eps, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    inside = columns < n_columns
    x = tl.load(x_ptr + row * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    y = x / (tl.sqrt(tl.sum(x * x, axis=0) / n_columns) + eps) * weight
    tl.store(y_ptr + row * stride_y + columns, y, mask=inside)


@BANK.wrong("norm_kernel", says="the weight is forgotten")
@triton.jit
def norm_without_weight(x_ptr, weight_ptr, y_ptr, stride_x, stride_y, n_columns, eps, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    inside = columns < n_columns
    x = tl.load(x_ptr + row * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / n_columns + eps)
    tl.store(y_ptr + row * stride_y + columns, y, mask=inside)


@BANK.wrong("norm_kernel", says="squares are taken in float16, where 256 \\* 256 is infinite")
@triton.jit
def norm_in_float16(x_ptr, weight_ptr, y_ptr, stride_x, stride_y, n_columns, eps, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    inside = columns < n_columns
    x = tl.load(x_ptr + row * stride_x + columns, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    mean = tl.sum(x * x, axis=0).to(tl.float32) / n_columns
    tl.store(y_ptr + row * stride_y + columns, x * tl.rsqrt(mean + eps) * weight, mask=inside)


@BANK.wrong("norm_kernel", says=r"rows that lie apart.*program 1 reads x\[0, 6\].*or an offset wrong")
@triton.jit
def norm_rows_without_gaps(x_ptr, weight_ptr, y_ptr, stride_x, stride_y, n_columns, eps, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    inside = columns < n_columns
    x = tl.load(x_ptr + row * n_columns + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / n_columns + eps) * weight
    tl.store(y_ptr + row * stride_y + columns, y, mask=inside)


@BANK.wrong("norm_kernel", says="is @triton.jit above it missing")
def norm_is_no_kernel(x_ptr, weight_ptr, y_ptr, stride_x, stride_y, n_columns, eps, BLOCK):
    return x_ptr


@BANK.right("norm_kernel")
@triton.jit
def norm_with_a_root(x_ptr, weight_ptr, y_ptr, stride_x, stride_y, n_columns, eps, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    inside = columns < n_columns
    x = tl.load(x_ptr + row * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, inside, 0.0)
    y = x / tl.sqrt(tl.sum(x * x, axis=0) / n_columns + eps)
    tl.store(y_ptr + row * stride_y + columns, y.to(y_ptr.dtype.element_ty) * weight, mask=inside)


@BANK.right("norm_kernel")
@triton.jit
def norm_in_chunks(x_ptr, weight_ptr, y_ptr, stride_x, stride_y, n_columns, eps, BLOCK: tl.constexpr):
    """Twice over the row, two numbers at a time: as one does for rows that do not fit into registers."""
    row, pair = tl.program_id(0), tl.arange(0, 2)
    total = tl.zeros([2], tl.float32)
    for first in range(0, n_columns, 2):
        columns = first + pair
        x = tl.load(x_ptr + row * stride_x + columns, mask=columns < n_columns, other=0.0).to(tl.float32)
        total += x * x
    scale = tl.rsqrt(tl.sum(total, axis=0) / n_columns + eps)
    for first in range(0, n_columns, 2):
        columns = first + pair
        inside = columns < n_columns
        x = tl.load(x_ptr + row * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * stride_y + columns, x * scale * weight, mask=inside)


# ---------------------------------------------------------------- gather_kernel


@BANK.wrong("gather_kernel", says="never followed.*an entry of the table beyond the length: do not follow it")
@triton.jit
def gather_without_a_length(
    pool_ptr, table_ptr, out_ptr, length, stride_block, stride_row, stride_out,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    at, dims = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK_D)[None, :]
    blocks = tl.load(table_ptr + at // BLOCK_SIZE)
    offsets = (blocks * stride_block + at % BLOCK_SIZE * stride_row)[:, None] + dims
    rows = tl.load(pool_ptr + offsets, mask=dims < HEAD_DIM, other=0.0)
    tl.store(out_ptr + at[:, None] * stride_out + dims, rows, mask=(at < length)[:, None] & (dims < HEAD_DIM))


@BANK.wrong("gather_kernel", says="no multiple of a tile.*a row beyond the length, whose slot is not written yet")
@triton.jit
def gather_reads_whole_blocks(
    pool_ptr, table_ptr, out_ptr, length, stride_block, stride_row, stride_out,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    at, dims = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK_D)[None, :]
    in_blocks = at < tl.cdiv(length, BLOCK_SIZE) * BLOCK_SIZE
    blocks = tl.load(table_ptr + at // BLOCK_SIZE, mask=in_blocks, other=0)
    offsets = (blocks * stride_block + at % BLOCK_SIZE * stride_row)[:, None] + dims
    rows = tl.load(pool_ptr + offsets, mask=in_blocks[:, None] & (dims < HEAD_DIM), other=0.0)
    tl.store(out_ptr + at[:, None] * stride_out + dims, rows, mask=(at < length)[:, None] & (dims < HEAD_DIM))


@BANK.wrong("gather_kernel", says=r"is the row position % BLOCK_SIZE")
@triton.jit
def gather_position_as_row(
    pool_ptr, table_ptr, out_ptr, length, stride_block, stride_row, stride_out,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    at, dims = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK_D)[None, :]
    inside = (at < length)[:, None] & (dims < HEAD_DIM)
    blocks = tl.load(table_ptr + at // BLOCK_SIZE, mask=at < length, other=0)
    offsets = (blocks * stride_block + at * stride_row)[:, None] + dims
    tl.store(
        out_ptr + at[:, None] * stride_out + dims, tl.load(pool_ptr + offsets, mask=inside, other=0.0), mask=inside
    )


@BANK.wrong("gather_kernel", says="each stride with its own index|is an offset or stride wrong|is the block read from")
@triton.jit
def gather_strides_exchanged(
    pool_ptr, table_ptr, out_ptr, length, stride_block, stride_row, stride_out,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    at, dims = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK_D)[None, :]
    inside = (at < length)[:, None] & (dims < HEAD_DIM)
    blocks = tl.load(table_ptr + at // BLOCK_SIZE, mask=at < length, other=0)
    offsets = (blocks * stride_row + at % BLOCK_SIZE * stride_block)[:, None] + dims
    tl.store(
        out_ptr + at[:, None] * stride_out + dims, tl.load(pool_ptr + offsets, mask=inside, other=0.0), mask=inside
    )


@BANK.wrong("gather_kernel", says="is the block read from the table")
@triton.jit
def gather_without_the_table(
    pool_ptr, table_ptr, out_ptr, length, stride_block, stride_row, stride_out,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    at, dims = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK_D)[None, :]
    inside = (at < length)[:, None] & (dims < HEAD_DIM)
    offsets = (at // BLOCK_SIZE * stride_block + at % BLOCK_SIZE * stride_row)[:, None] + dims
    tl.store(
        out_ptr + at[:, None] * stride_out + dims, tl.load(pool_ptr + offsets, mask=inside, other=0.0), mask=inside
    )


@BANK.wrong("gather_kernel", says="reaches beyond the length.*program 0 writes out\\[4, 0\\] .*is a lane not masked")
@triton.jit
def gather_stores_without_a_length(
    pool_ptr, table_ptr, out_ptr, length, stride_block, stride_row, stride_out,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    at, dims = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK_D)[None, :]
    inside = (at < length)[:, None] & (dims < HEAD_DIM)
    blocks = tl.load(table_ptr + at // BLOCK_SIZE, mask=at < length, other=0)
    offsets = (blocks * stride_block + at % BLOCK_SIZE * stride_row)[:, None] + dims
    rows = tl.load(pool_ptr + offsets, mask=inside, other=0.0)
    tl.store(out_ptr + at[:, None] * stride_out + dims, rows, mask=dims < HEAD_DIM)


@BANK.wrong("gather_kernel", says="head_dim that is no power of two.*and head_dim is 5: mask the dimensions")
@triton.jit
def gather_without_a_head_dim(
    pool_ptr, table_ptr, out_ptr, length, stride_block, stride_row, stride_out,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    at, dims = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK_D)[None, :]
    inside = (at < length)[:, None]
    blocks = tl.load(table_ptr + at // BLOCK_SIZE, mask=at < length, other=0)
    offsets = (blocks * stride_block + at % BLOCK_SIZE * stride_row)[:, None] + dims
    rows = tl.load(pool_ptr + offsets, mask=inside, other=0.0)
    tl.store(out_ptr + at[:, None] * stride_out + dims, rows, mask=inside & (dims < HEAD_DIM))


@BANK.wrong("gather_kernel", says="a masked load without other=")
@triton.jit
def gather_without_other(
    pool_ptr, table_ptr, out_ptr, length, stride_block, stride_row, stride_out,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    at, dims = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK_D)[None, :]
    inside = (at < length)[:, None] & (dims < HEAD_DIM)
    blocks = tl.load(table_ptr + at // BLOCK_SIZE, mask=at < length)
    offsets = (blocks * stride_block + at % BLOCK_SIZE * stride_row)[:, None] + dims
    tl.store(out_ptr + at[:, None] * stride_out + dims, tl.load(pool_ptr + offsets, mask=inside), mask=inside)


@BANK.wrong("gather_kernel", says="one block serves a whole tile")
@triton.jit
def gather_one_block_for_a_tile(
    pool_ptr, table_ptr, out_ptr, length, stride_block, stride_row, stride_out,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    first, dims = tl.program_id(0) * TILE, tl.arange(0, BLOCK_D)[None, :]
    at = first + tl.arange(0, TILE)
    inside = (at < length)[:, None] & (dims < HEAD_DIM)
    block = tl.load(table_ptr + first // BLOCK_SIZE)
    offsets = (block * stride_block + at % BLOCK_SIZE * stride_row)[:, None] + dims
    tl.store(
        out_ptr + at[:, None] * stride_out + dims, tl.load(pool_ptr + offsets, mask=inside, other=0.0), mask=inside
    )


@BANK.right("gather_kernel")
@triton.jit
def gather_row_by_row(
    pool_ptr, table_ptr, out_ptr, length, stride_block, stride_row, stride_out,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A loop over the rows of the tile: no mask for the positions, but an end."""
    first, dims = tl.program_id(0) * TILE, tl.arange(0, BLOCK_D)
    for at in range(first, min(first + TILE, length)):
        block = tl.load(table_ptr + at // BLOCK_SIZE)
        source = pool_ptr + block * stride_block + at % BLOCK_SIZE * stride_row + dims
        row = tl.load(source, mask=dims < HEAD_DIM, other=0.0)
        tl.store(out_ptr + at * stride_out + dims, row, mask=dims < HEAD_DIM)


@BANK.right("gather_kernel")
@triton.jit
def gather_with_addresses(
    pool_ptr, table_ptr, out_ptr, length, stride_block, stride_row, stride_out,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Blocks of addresses instead of offsets; hidden positions read the table's first entry."""
    at, dims = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK_D)
    here = at < length
    blocks = tl.load(table_ptr + tl.where(here, at // BLOCK_SIZE, 0)).to(tl.int64)
    starts = pool_ptr + blocks * stride_block + (at - at // BLOCK_SIZE * BLOCK_SIZE) * stride_row
    inside = here[:, None] & (dims < HEAD_DIM)[None, :]
    rows = tl.load(starts[:, None] + dims[None, :], mask=inside, other=1.0)
    tl.store(out_ptr + at[:, None] * stride_out + dims[None, :], rows, mask=inside)
