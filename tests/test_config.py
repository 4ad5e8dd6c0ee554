"""The shape of a model: read from both kinds of file as written, and refused where it cannot be computed.

What the numbers do is proved against transformers in test_checkpoint.py; here, that none of them is read wrongly.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from conftest import TINY

from minillm.config import ModelConfig, RopeScaling, config_from_gguf, config_from_hf
from minillm.model import Transformer

SIZES = ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "max_context")

# Each number occurs once, so that no field can be read in another's place unnoticed.
HF = {
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 72,
    "max_position_embeddings": 256,
    "rms_norm_eps": 0.02,
    "rope_theta": 300.0,
    "hidden_act": "silu",
}
SHAPE = ModelConfig(101, 48, 3, 6, 2, 10, 72, 256, rope_theta=300.0, norm_eps=0.02)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 4.5,
    "original_max_position_embeddings": 64,
}
STRETCHED = RopeScaling(factor=8.0, low_freq_factor=1.5, high_freq_factor=4.5, original_max_context=64)

GGUF = {
    "general.architecture": "llama",
    "llama.embedding_length": 48,
    "llama.block_count": 3,
    "llama.attention.head_count": 6,
    "llama.attention.head_count_kv": 2,
    "llama.attention.key_length": 10,
    "llama.feed_forward_length": 72,
    "llama.context_length": 256,
    "llama.attention.layer_norm_rms_epsilon": 0.02,
    "llama.rope.freq_base": 300.0,
}


def without(mapping: dict, *names: str) -> dict:
    return {name: value for name, value in mapping.items() if name not in names}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -2, 2.0, "4", None])
def test_every_size_must_be_a_positive_whole_number(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be a positive whole number"):
        replace(TINY, **{name: value})


def test_query_heads_must_share_key_value_heads_evenly():
    with pytest.raises(ValueError, match=r"n_heads \(6\) must be a multiple of n_kv_heads \(4\)"):
        replace(TINY, n_kv_heads=4)


def test_an_odd_head_dim_has_no_rotary_pairs():
    with pytest.raises(ValueError, match="head_dim must be even for rotary positions, not 5"):
        replace(TINY, head_dim=5)


@pytest.mark.parametrize("tied", [False, True])
def test_the_counted_parameters_are_those_of_the_model(tied):
    config = replace(TINY, tied_embeddings=tied)
    model = Transformer(config)
    assert config.layer_parameters == sum(p.numel() for p in model.blocks.parameters() if p.ndim == 2)
    assert config.head_parameters == model.head.weight.numel()


def test_the_cache_of_a_token_holds_a_key_and_a_value_of_each_layer():
    assert TINY.kv_elements_per_token == 2 * 2 * 2 * 4  # (key, value) x layers x heads x head_dim
    assert TINY.group_size == 3


def test_each_field_of_config_json_is_read():
    assert config_from_hf(HF) == SHAPE


@pytest.mark.parametrize(
    ("family", "settings", "expected"),
    [
        ("llama", {}, {}),
        ("llama", {"attention_bias": True}, {"qkv_bias": True, "out_bias": True}),
        ("llama", {"mlp_bias": True}, {"mlp_bias": True}),
        ("mistral", {}, {}),
        ("qwen2", {}, {"qkv_bias": True}),  # always, and never on the output
        ("qwen3", {}, {"qk_norm": True}),
        ("qwen3", {"attention_bias": True}, {"qk_norm": True, "qkv_bias": True, "out_bias": True}),
        ("llama", {"tie_word_embeddings": True}, {"tied_embeddings": True}),
    ],
)
def test_each_family_has_its_own_parts(family, settings, expected):
    assert config_from_hf({**HF, "model_type": family, **settings}) == replace(SHAPE, **expected)


@pytest.mark.parametrize(
    ("absent", "expected"),
    [
        ("num_key_value_heads", {"n_kv_heads": 6}),  # ordinary multi-head attention
        ("head_dim", {"head_dim": 8}),  # d_model / n_heads
        ("rope_theta", {"rope_theta": 10000.0}),
        ("rms_norm_eps", {"norm_eps": 1e-6}),
        ("hidden_act", {}),
    ],
)
def test_fields_that_older_files_leave_out_have_the_family_defaults(absent, expected):
    assert config_from_hf(without(HF, absent)) == replace(SHAPE, **expected)


@pytest.mark.parametrize("null", ["num_key_value_heads", "head_dim"])
def test_null_is_read_as_absent(null):
    assert config_from_hf({**HF, null: None}) == config_from_hf(without(HF, null))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {**LLAMA3, "rope_theta": 300.0}},  # transformers 5
        {"rope_scaling": LLAMA3, "rope_theta": 300.0},  # transformers 4
        {"rope_scaling": {**without(LLAMA3, "rope_type"), "type": "llama3"}, "rope_theta": 300.0},  # older still
    ],
)
def test_rotary_settings_are_read_in_new_and_old_style(rope):
    assert config_from_hf({**without(HF, "rope_theta"), **rope}) == replace(SHAPE, rope_scaling=STRETCHED)


@pytest.mark.parametrize(
    "rope", [{"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}, {"rope_scaling": {}}]
)
def test_default_rotary_positions_are_not_scaled(rope):
    assert config_from_hf({**HF, **rope}) == SHAPE


@pytest.mark.parametrize(
    "missing",
    [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "max_position_embeddings",
    ],
)
def test_a_missing_field_is_named(missing):
    with pytest.raises(ValueError, match=f"config.json has no '{missing}'"):
        config_from_hf(without(HF, missing))


def test_a_missing_field_of_the_scaling_is_named():
    with pytest.raises(ValueError, match=r"config\.json has no 'low_freq_factor'"):
        config_from_hf({**HF, "rope_scaling": without(LLAMA3, "low_freq_factor")})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; minillm reads llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling 'linear' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling 'yarn' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor other than 1"),
        ({"num_key_value_heads": 4}, r"n_heads \(6\) must be a multiple of n_kv_heads \(4\)"),
        ({"num_attention_heads": 0, "head_dim": None}, "config.json holds a value of the wrong kind"),
        ({"num_attention_heads": "6"}, "n_heads must be a positive whole number"),
        ({"hidden_size": "48", "head_dim": None}, "config.json holds a value of the wrong kind"),
        ({"max_position_embeddings": None}, "config.json holds a value of the wrong kind"),
        ({"rope_scaling": "llama3"}, "config.json holds a value of the wrong kind"),
    ],
)
def test_what_cannot_be_computed_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        config_from_hf({**HF, **settings})


def test_max_context_lowers_the_limit_and_never_raises_it():
    assert config_from_hf(HF, max_context=100).max_context == 100
    assert config_from_hf(HF, max_context=1000).max_context == 256
    assert config_from_gguf(GGUF, 101, tied=False, max_context=100).max_context == 100
    assert config_from_gguf(GGUF, 101, tied=False, max_context=1000).max_context == 256


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("mistral", {"sliding_window": 32}),
        ("qwen2", {"sliding_window": 32, "use_sliding_window": True}),
        ("qwen3", {"sliding_window": 32, "use_sliding_window": True}),
    ],
)
def test_a_window_shorter_than_the_context_is_refused_and_the_way_out_works(family, settings):
    raw = {**HF, "model_type": family, **settings}
    for max_context in (None, 33):
        with pytest.raises(ValueError, match=r"sliding window of 32 tokens.*max_context=32"):
            config_from_hf(raw, max_context)
    assert config_from_hf(raw, max_context=32).max_context == 32


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("mistral", {"sliding_window": None}),
        ("mistral", {}),  # 4096 then
        ("mistral", {"sliding_window": 256}),  # as long as the context: hides nothing
        ("qwen2", {"sliding_window": 32, "use_sliding_window": False}),
        ("qwen3", {"sliding_window": 32}),
        ("llama", {"sliding_window": 32}),  # no model of this family has one
    ],
)
def test_a_window_that_hides_nothing_is_no_obstacle(family, settings):
    assert config_from_hf({**HF, "model_type": family, **settings}).max_context == 256


def test_a_mistral_config_that_names_no_window_has_the_one_of_4096():
    raw = {**HF, "model_type": "mistral", "max_position_embeddings": 8192}
    with pytest.raises(ValueError, match=r"sliding window of 4096 tokens"):
        config_from_hf(raw)


def test_each_field_of_a_gguf_file_is_read():
    assert config_from_gguf(GGUF, 101, tied=False) == SHAPE
    assert config_from_gguf(GGUF, 101, tied=True) == replace(SHAPE, tied_embeddings=True)


@pytest.mark.parametrize(
    ("absent", "expected"),
    [
        ("llama.attention.head_count_kv", {"n_kv_heads": 6}),
        ("llama.attention.key_length", {"head_dim": 8}),
        ("llama.rope.freq_base", {"rope_theta": 10000.0}),
    ],
)
def test_gguf_fields_that_may_be_absent_have_defaults(absent, expected):
    assert config_from_gguf(without(GGUF, absent), 101, tied=False) == replace(SHAPE, **expected)


@pytest.mark.parametrize(
    "missing",
    [
        "llama.embedding_length",
        "llama.block_count",
        "llama.attention.head_count",
        "llama.feed_forward_length",
        "llama.context_length",
        "llama.attention.layer_norm_rms_epsilon",
    ],
)
def test_a_missing_gguf_field_is_named(missing):
    with pytest.raises(ValueError, match=f"the GGUF file has no field '{missing}'"):
        config_from_gguf(without(GGUF, missing), 101, tied=False)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"general.architecture": "qwen2"}, "GGUF architecture 'qwen2' is not supported"),
        ({"general.architecture": None}, "GGUF architecture None is not supported"),
        ({"llama.rope.scaling.type": "linear"}, "scales its rotary positions"),
        ({"llama.attention.head_count_kv": 4}, r"n_heads \(6\) must be a multiple of n_kv_heads \(4\)"),
        ({"llama.attention.head_count": 0}, "the GGUF file holds a value of the wrong kind"),
        ({"llama.attention.head_count": [6, 6, 4]}, "the GGUF file holds a value of the wrong kind"),
    ],
)
def test_what_cannot_be_computed_from_gguf_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        config_from_gguf({**GGUF, **settings}, 101, tied=False)


def test_a_gguf_file_that_says_it_does_not_scale_is_read():
    assert config_from_gguf({**GGUF, "llama.rope.scaling.type": "none"}, 101, tied=False) == SHAPE
