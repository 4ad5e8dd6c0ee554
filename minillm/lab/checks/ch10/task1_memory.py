"""Task 1 of exercise 10: what weights and keys and values take, and how many texts fit."""

from __future__ import annotations

from collections.abc import Callable

from minillm.config import ModelConfig
from minillm.lab.catalogue import MODELS
from minillm.lab.checks.ch03 import expect_named, expect_tuple
from minillm.lab.checks.ch10.base import CHAPTER, SMALL, TIED, expect_whole
from minillm.lab.kv_memory import Text, paged_room

memory = CHAPTER.task(
    "deployment_memory",
    hints=(
        "Three parts, one after the other: weights, a block, texts. Which of your three numbers is wrong?",
        "Weights: codes of the layers, then a scale and a minimum for each group, then what stays at 16 bits.",
        "A text takes whole blocks, for the tokens that it keeps in the end. Is its last token ever fed?",
        "What is left beside the weights is cut into texts. Half a text cannot be served, and a batch is not negative.",
    ),
)


def layer_weights(c: ModelConfig) -> int:
    """Matrix by matrix."""
    matrices = [(c.n_heads * c.head_dim, c.d_model), *[(c.n_kv_heads * c.head_dim, c.d_model)] * 2]
    matrices += [(c.d_model, c.n_heads * c.head_dim), *[(c.d_ff, c.d_model)] * 2, (c.d_model, c.d_ff)]
    return c.n_layers * sum(rows * columns for rows, columns in matrices)


def check_memory(
    fn: Callable, c: ModelConfig, bits: int, group: int | None, kv_bits: int, block_size: int, text: Text, room: int
) -> None:
    how = f"{bits} bits in groups of {group}" if group else f"{bits} bits"
    tied = "tied" if c.tied_embeddings else "untied"
    label = (
        f"{c.n_layers} layers ({tied}), {how}, keys and values of {kv_bits} bits, blocks of {block_size}, "
        f"{text.prompt} in, {text.output} out, {room:,} bytes"
    )
    got = fn(c, bits, group, kv_bits, block_size, text.prompt, text.output, room)
    weights, block, texts = expect_tuple(got, ("weights", "a block", "texts"), label)
    for name, value in (("weights", weights), ("a block", block), ("texts", texts)):
        expect_whole(value, f"{name}, {label}")
    true_weights = check_weights(weights, c, bits, group, f"bytes of the weights, {label}")
    true_block = check_block(block, c, kv_bits, block_size, f"bytes of a block, {label}")
    check_texts(texts, true_weights, true_block, block_size, text, room, f"texts, {label}")


def check_weights(got: int, c: ModelConfig, bits: int, group: int | None, label: str) -> int:
    layers, table = layer_weights(c), c.vocab_size * c.d_model
    tables = table if c.tied_embeddings else 2 * table
    codes, scales = layers * bits // 8, 4 * (layers // group) if group else 0
    want = codes + scales + 2 * tables
    expect_named(
        got,
        want,
        label,
        {
            "without the scales and minimums of the groups": codes + 2 * tables,
            "when a group has a scale and no minimum": codes + scales // 2 + 2 * tables,
            "when a scale and a minimum have 4 bytes each": codes + 2 * scales + 2 * tables,
            "with a scale and a minimum for each layer only": codes + 4 * c.n_layers + 2 * tables,
            "when the embeddings have as few bits as the layers": codes + scales + tables * bits // 8,
            "without the embeddings and the output matrix": codes + scales,
            "when the embeddings of a tied model are counted twice": codes + scales + 4 * table,
            "with one matrix for embeddings and output, which are two in this model": codes + scales + 2 * table,
            "in bits, not bytes": 8 * want,
            "when all weights have 16 bits": 2 * layers + 2 * tables,
        },
    )
    return want


def check_block(got: int, c: ModelConfig, kv_bits: int, block_size: int, label: str) -> int:
    want = sum(c.n_kv_heads * c.head_dim * kv_bits // 8 for _ in ("keys", "values") for _ in range(c.n_layers))
    want *= block_size
    expect_named(
        got,
        want,
        label,
        {
            "for keys alone: values are kept too": want / 2,
            "for a single layer": want / c.n_layers,
            "for one token: a block holds several": want / block_size,
            "when the query heads are stored": want * c.n_heads / c.n_kv_heads,
            "in bits, not bytes": 8 * want,
            "with 16 bits a number": want * 16 / kv_bits,
            "when numbers are counted, not bytes": want * 8 / kv_bits,
            "with keys and values as wide as the model": want * c.d_model / (c.n_kv_heads * c.head_dim),
        },
    )
    return want


def check_texts(got: int, weights: int, block: int, block_size: int, text: Text, room: int, label: str) -> None:
    each = paged_room(block_size)(text) // block_size * block
    free, token = room - weights, block // block_size
    want = 0
    while weights + (want + 1) * each <= room:
        want += 1
    if free < 0:
        assert got == 0, f"{label}: yours {got}, expected 0: the weights alone do not fit"
    one_more = -(-(text.kept + 1) // block_size) * block
    expect_named(
        got,
        want,
        label,
        {
            "if the last token were kept too: it is chosen, and never fed": free // one_more,
            "if a text took no whole blocks, but only its tokens": free // (text.kept * token),
            "if a text's last block, which is not full, were left out": free // (text.kept // block_size * block or 1),
            "for the prompt alone: the output is kept too": free // (-(-text.prompt // block_size) * block),
            "for the output alone": free // (-(-text.output // block_size) * block),
            "if the weights took no memory": room // each,
            "if a text of which a part fits counted": -(-free // each),
            "if each text had weights of its own": room // (each + weights),
            "when blocks are counted, not texts": free // block,
        },
    )


def room_for(c: ModelConfig, bits: int, group: int | None, kv_bits: int, block_size: int, blocks: int) -> int:
    """Bytes for the weights and so many blocks."""
    tables = c.vocab_size * c.d_model * (1 if c.tied_embeddings else 2)
    scales = 4 * (layer_weights(c) // group) if group else 0
    kept = 2 * c.n_layers * c.n_kv_heads * c.head_dim * block_size * kv_bits // 8
    return layer_weights(c) * bits // 8 + scales + 2 * tables + blocks * kept


@memory
def at_16_bits(fn):
    """16 bits: no groups, two matrices beside the layers"""
    check_memory(fn, SMALL, 16, None, 16, 16, Text(100, 30), room_for(SMALL, 16, None, 16, 16, 700))


@memory
def in_groups(fn):
    """4 and 8 bits: a scale and a minimum for each group"""
    check_memory(fn, SMALL, 4, 16, 16, 16, Text(90, 41), room_for(SMALL, 4, 16, 16, 16, 950))
    check_memory(fn, SMALL, 8, 48, 16, 8, Text(20, 50), room_for(SMALL, 8, 48, 16, 8, 411))


@memory
def tied(fn):
    """a tied model: embeddings and output are one matrix"""
    check_memory(fn, TIED, 4, 64, 8, 16, Text(30, 300), room_for(TIED, 4, 64, 8, 16, 2220))


@memory
def whole_blocks(fn):
    """a text takes whole blocks"""
    check_memory(fn, SMALL, 4, 16, 16, 32, Text(60, 10), room_for(SMALL, 4, 16, 16, 32, 611))
    check_memory(fn, SMALL, 4, 16, 8, 64, Text(3, 4), room_for(SMALL, 4, 16, 8, 64, 90))


@memory
def last_token(fn):
    """the last token is chosen, and never fed"""
    check_memory(fn, SMALL, 16, None, 16, 16, Text(17, 16), room_for(SMALL, 16, None, 16, 16, 300))
    check_memory(fn, TIED, 8, 32, 16, 16, Text(16, 1), room_for(TIED, 8, 32, 16, 16, 120))


@memory
def to_the_byte(fn):
    """a memory that is just enough, and one byte less"""
    full = room_for(TIED, 4, 32, 16, 16, 6 * 5)
    check_memory(fn, TIED, 4, 32, 16, 16, Text(60, 21), full)
    check_memory(fn, TIED, 4, 32, 16, 16, Text(60, 21), full - 1)


@memory
def nothing_fits(fn):
    """weights that do not fit: no text, and no negative number of texts"""
    check_memory(fn, SMALL, 16, None, 16, 16, Text(20, 20), room_for(SMALL, 16, None, 16, 16, -20))
    check_memory(fn, SMALL, 16, None, 16, 16, Text(20, 20), room_for(SMALL, 16, None, 16, 16, 0))


@memory
def real_models(fn):
    """Llama-3.1-8B and Qwen3-0.6B on a GPU of 24 GB"""
    check_memory(fn, MODELS["Llama-3.1-8B"], 4, 64, 16, 16, Text(1000, 300), 24 * 10**9)
    check_memory(fn, MODELS["Qwen3-0.6B"], 8, 128, 8, 16, Text(3000, 700), 24 * 10**9)
