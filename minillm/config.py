"""What shape a model has: the one description that every stage reads.

A decoder-only transformer of the Llama family is fixed by a dozen numbers. `ModelConfig` holds them under the
field's usual names, whatever the file they came from called them, and refuses what this code cannot compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretch of the rotary frequencies, as in the code released with that model."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_context: int


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama, Mistral, Qwen2 or Qwen3 style decoder.

    `n_kv_heads < n_heads` is grouped-query attention (Ainslie et al. 2023). `qk_norm` is Qwen3's RMSNorm on each
    query and key head; `qkv_bias`, `out_bias` and `mlp_bias` say which linear layers add a bias.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    max_context: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "max_context")
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive whole number, not {value!r}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads ({self.n_heads}) must be a multiple of n_kv_heads ({self.n_kv_heads}): "
                "each key/value head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, not {self.head_dim}")

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.n_heads // self.n_kv_heads

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers that the KV cache keeps for one token: a key and a value in every layer."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Weights in the matrices of all layers; each token is multiplied with all of them."""
        qkv = self.d_model * (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
        out = self.n_heads * self.head_dim * self.d_model
        return self.n_layers * (qkv + out + 3 * self.d_model * self.d_ff)

    @property
    def head_parameters(self) -> int:
        """Weights in the output matrix; only rows that are sampled are multiplied with it."""
        return self.vocab_size * self.d_model


def config_from_hf(raw: Mapping[str, Any], max_context: int | None = None) -> ModelConfig:
    """Read a Hugging Face `config.json`. `max_context` lowers the context limit (see the sliding window below)."""
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type {family!r} is not supported; minillm reads {', '.join(FAMILIES)}")
    try:
        n_heads, d_model = raw["num_attention_heads"], raw["hidden_size"]
        limit = min(max_context or raw["max_position_embeddings"], raw["max_position_embeddings"])
        refuse_other_activations(raw)
        refuse_sliding_window(raw, family, limit)
        theta, scaling = rope_from_hf(raw)
        attention_bias = bool(raw.get("attention_bias", False))
        return ModelConfig(
            vocab_size=raw["vocab_size"],
            d_model=d_model,
            n_layers=raw["num_hidden_layers"],
            n_heads=n_heads,
            n_kv_heads=raw.get("num_key_value_heads") or n_heads,
            head_dim=raw.get("head_dim") or d_model // n_heads,
            d_ff=raw["intermediate_size"],
            max_context=limit,
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or attention_bias,
            out_bias=family != "qwen2" and attention_bias,
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
        )
    except KeyError as missing:
        raise ValueError(f"config.json has no {missing}") from None
    except (TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"config.json holds a value of the wrong kind ({error})") from None


def refuse_other_activations(raw: Mapping[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {raw['hidden_act']!r} is not supported; these families use 'silu'")


def refuse_sliding_window(raw: Mapping[str, Any], family: str, max_context: int) -> None:
    """A window hides far tokens, which this code does not do. Texts no longer than the window are not affected."""
    window = raw.get("sliding_window", 4096 if family == "mistral" else None)  # a Mistral that names none has 4096
    used = family == "mistral" or raw.get("use_sliding_window", False)
    if used and window is not None and window < max_context:
        raise ValueError(
            f"this model attends through a sliding window of {window} tokens, which minillm does not compute; "
            f"texts of up to {window} tokens are not changed by it: load(..., max_context={window})"
        )


def rope_from_hf(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling, as `rope_parameters` (new files) or `rope_theta` and `rope_scaling` (older ones)."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if raw.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"rope scaling {kind!r} is not supported; minillm computes 'default' and 'llama3'")
    return theta, RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_context=rope["original_max_position_embeddings"],
    )


def config_from_gguf(
    fields: Mapping[str, Any], vocab_size: int, tied: bool, max_context: int | None = None
) -> ModelConfig:
    """Read the metadata of a GGUF file (`general.architecture`, `llama.block_count`, ...)."""
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"GGUF architecture {architecture!r} is not supported; minillm reads 'llama' from GGUF files")
    if fields.get("llama.rope.scaling.type") not in (None, "none"):
        raise ValueError(
            "this GGUF file scales its rotary positions, which minillm reads from Hugging Face folders only"
        )
    try:
        n_heads, d_model = fields["llama.attention.head_count"], fields["llama.embedding_length"]
        return ModelConfig(
            vocab_size=vocab_size,
            d_model=d_model,
            n_layers=fields["llama.block_count"],
            n_heads=n_heads,
            n_kv_heads=fields.get("llama.attention.head_count_kv", n_heads),
            head_dim=fields.get("llama.attention.key_length", d_model // n_heads),
            d_ff=fields["llama.feed_forward_length"],
            max_context=min(max_context or fields["llama.context_length"], fields["llama.context_length"]),
            rope_theta=fields.get("llama.rope.freq_base", 10000.0),
            norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
            tied_embeddings=tied,
        )
    except KeyError as missing:
        raise ValueError(f"the GGUF file has no field {missing}") from None
    except (TypeError, ZeroDivisionError) as error:
        raise ValueError(f"the GGUF file holds a value of the wrong kind ({error})") from None
