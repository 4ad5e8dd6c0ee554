"""Every form of the matrix product gives the same product, and the table of choices always has an answer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY
from torch import nn

from minillm import linear as module
from minillm.linear import (
    PACKED,
    PLAIN,
    SIZES,
    Linear,
    adopt_choices,
    choose_products,
    columns_product,
    pack,
    quickest,
)
from minillm.model import NoCache, Transformer

N_IN, N_OUT = 48, 40


def layer_and_input(rows: int, bias: bool) -> tuple[Linear, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    layer = Linear(N_IN, N_OUT, bias=bias).requires_grad_(False)
    for parameter in layer.parameters():
        parameter.normal_(generator=generator)
    return layer, torch.randn(rows, N_IN, generator=generator)


def rounding(layer: Linear, x: torch.Tensor) -> torch.Tensor:
    """The most that a float32 sum of n products, in any order, can be off: n u |x||W|, u = 2^-24, and the bias."""
    bound = x.double().abs() @ layer.weight.double().abs().T
    if layer.bias is not None:
        bound = bound + layer.bias.double().abs()
    return 1.01 * (N_IN + 1) * 2**-24 * bound


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("choice", [PLAIN, *SIZES])
def test_every_product_equals_the_exact_one_to_float32_rounding(choice, bias):
    for rows in range(1, 71):
        layer, x = layer_and_input(rows, bias)
        layer.choices = [choice] * (SIZES[-1] + 2)
        exact = F.linear(x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double())
        out = layer(x)
        assert out.shape == (rows, N_OUT) and out.dtype == torch.float32
        assert out.is_contiguous()
        assert ((out - exact).abs() <= rounding(layer, x)).all(), f"{rows} rows"


def test_the_table_is_read_at_the_number_of_rows(monkeypatch):
    """Beyond the timed sizes the last entry holds; an entry of 0 is the plain product."""
    padded_to = []

    def spy(x, weight, padded_rows):
        padded_to.append(padded_rows)
        return columns_product(x, weight, padded_rows)

    monkeypatch.setattr(module, "columns_product", spy)
    for rows, entry in [(1, 1), (5, 5), (64, 64), (65, 65), (66, 65), (500, 65)]:
        layer, x = layer_and_input(rows, bias=False)
        layer.choices = [100 + n for n in range(SIZES[-1] + 2)]
        layer(x)
        assert padded_to.pop() == 100 + entry
        layer.choices[entry] = PLAIN
        assert torch.equal(layer(x), F.linear(x, layer.weight)) and not padded_to


def test_choosing_sets_one_valid_table_in_every_layer(monkeypatch):
    monkeypatch.setattr(module, "SAMPLE_BYTES", 1)  # as if this small model were a large one
    model = Transformer(TINY).init_weights(0)
    choose_products(model)
    layers = [layer for layer in model.modules() if isinstance(layer, Linear)]
    assert len(layers) == 4 * TINY.n_layers + 1
    tables = [layer.choices for layer in layers]
    assert all(table == tables[0] for table in tables)
    assert len(tables[0]) == SIZES[-1] + 2  # 0 to 64 rows, and "more"
    for rows, choice in enumerate(tables[0][:-1]):
        assert choice == PLAIN or (choice in SIZES and choice >= rows)
    assert tables[0][-1] in (PLAIN, 1)


def test_a_chosen_model_gives_the_logits_of_the_plain_one(monkeypatch, tiny):
    """With a table that takes another form for every number of rows, in a whole model, in float64."""

    def logits(rows):
        return tiny.logits(tiny(torch.arange(rows) % TINY.vocab_size, torch.arange(rows), NoCache()))

    plain = [logits(rows) for rows in (1, 3, 9, 33, 70)]
    table = [next((n for n in reversed(SIZES) if n >= rows), 1) if rows % 2 else PLAIN for rows in range(66)]
    for layer in tiny.modules():
        if isinstance(layer, Linear):
            layer.choices = table
    for rows, expected in zip((1, 3, 9, 33, 70), plain, strict=True):
        torch.testing.assert_close(logits(rows), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_models_keep_the_plain_product(dtype):
    model = Transformer(TINY, dtype=dtype).init_weights(0)
    choose_products(model)
    assert all(layer.choices is None for layer in model.modules() if isinstance(layer, Linear))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types_than_float32_keep_the_plain_product(dtype, monkeypatch):
    monkeypatch.setattr(module, "SAMPLE_BYTES", 1)
    model = Transformer(TINY, dtype=dtype).init_weights(0)
    choose_products(model)
    assert all(layer.choices is None for layer in model.modules() if isinstance(layer, Linear))


def test_a_model_without_linear_layers_has_nothing_to_choose():
    choose_products(nn.ReLU())


def test_the_quickest_form_is_chosen():
    """Made-up times, in seconds: the columns are quick at 4 and 16 rows, the plain form elsewhere."""
    plain = {n: 3.0 + 0.1 * n for n in SIZES} | {1: 1.0}
    columns = dict.fromkeys(SIZES, 99.0) | {4: 2.0, 16: 4.0}
    table = [quickest(rows, plain, columns) for rows in range(66)]
    assert table[1] == PLAIN
    assert table[2] == table[3] == table[4] == 4  # two rows padded to four
    assert table[5] == table[8] == PLAIN  # padding to 16 would be slower
    assert table[9] == table[12] == table[16] == 16
    assert table[17] == table[64] == PLAIN  # never padded to fewer rows than there are


@pytest.mark.parametrize(("columns_time", "choice"), [(2.0, PLAIN), (1.0, PLAIN), (0.5, 1)])
def test_beyond_the_timed_sizes_nothing_is_padded(columns_time, choice):
    plain, columns = dict.fromkeys(SIZES, 1.0), dict.fromkeys(SIZES, columns_time)
    assert quickest(SIZES[-1] + 1, plain, columns) == choice


def test_a_given_weight_is_used_and_not_copied():
    weight = nn.Parameter(torch.randn(3, 2))
    assert Linear(2, 3, weight=weight).weight is weight


def test_padding_adds_nothing_to_the_rows_that_were_there():
    """The stored mutant pads in front instead of behind: the rows that come back would be the zeros."""
    layer, x = layer_and_input(3, bias=False)
    in_front = (layer.weight @ F.pad(x, (0, 0, 5, 0)).T)[:, :3].T
    exact = F.linear(x.double(), layer.weight.double())
    assert not ((in_front - exact).abs() <= rounding(layer, x)).all()
    assert ((columns_product(x, layer.weight, 8) - exact).abs() <= rounding(layer, x)).all()


# The packed copy.

needs_packing = pytest.mark.skipif(pack(torch.ones(8, 8)) is None, reason="this PyTorch cannot pack weights")


@needs_packing
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 5, 33, 70])
def test_the_packed_product_is_the_plain_one_up_to_rounding(rows, bias):
    layer, x = layer_and_input(rows, bias)
    layer.packed, layer.choices = pack(layer.weight.detach()), [PACKED] * (SIZES[-1] + 2)
    exact = F.linear(x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double())
    with torch.inference_mode():
        assert ((layer(x) - exact).abs() <= rounding(layer, x)).all()


@needs_packing
def test_only_who_asks_for_it_gets_a_second_copy(monkeypatch):
    monkeypatch.setattr(module, "SAMPLE_BYTES", 1)
    for packed in (False, True):
        model = Transformer(TINY).init_weights(0).prepare(packed)
        layers = [layer for layer in model.modules() if isinstance(layer, Linear)]
        assert all((layer.packed is not None) == packed for layer in layers)
        assert packed or all(PACKED not in layer.choices for layer in layers)


def test_where_nothing_can_be_packed_the_other_forms_are_chosen(monkeypatch):
    monkeypatch.setattr(module, "SAMPLE_BYTES", 1)
    monkeypatch.setattr(module, "pack", lambda weight: None)
    model = Transformer(TINY).init_weights(0).prepare(packed=True)
    assert PACKED not in model.head.choices and len(model.head.choices) == SIZES[-1] + 2


def test_the_packed_form_is_chosen_where_it_is_the_quickest():
    plain, columns = dict.fromkeys(SIZES, 2.0), dict.fromkeys(SIZES, 3.0) | {4: 1.0}
    table = [quickest(rows, plain, columns, dict.fromkeys(SIZES, 1.5)) for rows in range(66)]
    assert table[1] == table[4] == 4 and table[5] == table[64] == table[65] == PACKED


def test_no_row_needs_no_weight():
    assert quickest(0, dict.fromkeys(SIZES, 9.0), dict.fromkeys(SIZES, 1.0), dict.fromkeys(SIZES, 1.0)) == PLAIN


@needs_packing
def test_another_dtype_forgets_what_was_packed_and_measured_for_the_old_one(monkeypatch):
    monkeypatch.setattr(module, "SAMPLE_BYTES", 1)
    model = Transformer(TINY).init_weights(0).prepare(packed=True).to(torch.bfloat16)
    assert all(m.packed is None and m.choices is None for m in model.modules() if isinstance(m, Linear))


def test_a_small_module_adopts_the_choices_of_another_but_no_packed_copy():
    like, module = Linear(4, 4), nn.Sequential(Linear(4, 4), nn.Sequential(Linear(4, 2)))
    adopt_choices(module, like)
    assert module[0].choices is None and module[1][0].choices is None
    like.choices = [PLAIN, PACKED, 2, 4]
    adopt_choices(module, like)
    assert module[0].choices == module[1][0].choices == [PLAIN, PLAIN, 2, 4]
    assert like.choices == [PLAIN, PACKED, 2, 4]
