"""The transformer equals a second writing of it in numpy, keeps sequences apart, and can be trained.

Also: rotary positions are relative, norms keep their range in half precision, random weights come from a seed.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import TINY, random_model, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.config import RopeScaling
from minillm.model import NoCache, RMSNorm, Rope, Transformer, rotate, stretch

LLAMA3 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_context=64)
CONFIGS = {
    "plain": TINY,
    "every head its own": replace(TINY, n_kv_heads=6),
    "one key head": replace(TINY, n_kv_heads=1),
    "normed queries and keys": replace(TINY, qk_norm=True),
    "biases": replace(TINY, qkv_bias=True, out_bias=True, mlp_bias=True),
    "stretched positions": replace(TINY, rope_scaling=LLAMA3),
    "tied head": replace(TINY, tied_embeddings=True),
}
TOKENS = [3, 14, 15, 9, 26, 5, 35, 8, 9]


def logits(model: Transformer, tokens: list[int], lengths: list[int] | None = None) -> torch.Tensor:
    positions = torch.cat([torch.arange(n) for n in (lengths or [len(tokens)])])
    return model.logits(model(torch.tensor(tokens), positions, NoCache(lengths)))


# --- The second writing: numpy, one token and one head at a time, complex numbers for rotary positions. ---


def numpy_logits(model: Transformer, tokens: list[int]) -> np.ndarray:
    config = model.config
    weights = {name: parameter.numpy() for name, parameter in model.named_parameters()}
    head = weights["embed.weight"] if config.tied_embeddings else weights["head.weight"]
    x = weights["embed.weight"][tokens]

    def linear(name, rows):
        return rows @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)

    def norm(name, rows):
        return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + config.norm_eps) * weights[f"{name}.weight"]

    for layer in range(config.n_layers):
        at = f"blocks.{layer}"
        x = x + linear(f"{at}.attention.out", numpy_attention(config, at, linear, norm, x))
        gate, up = np.split(linear(f"{at}.mlp.gate_up", norm(f"{at}.mlp_norm", x)), 2, axis=-1)
        x = x + linear(f"{at}.mlp.down", gate / (1 + np.exp(-gate)) * up)
    return norm("norm", x) @ head.T


def numpy_attention(config, at, linear, norm, x):
    heads = linear(f"{at}.attention.qkv", norm(f"{at}.attention_norm", x)).reshape(len(x), -1, config.head_dim)
    q, k, v = np.split(heads, [config.n_heads, config.n_heads + config.n_kv_heads], axis=1)
    if config.qk_norm:
        q, k = norm(f"{at}.attention.q_norm", q), norm(f"{at}.attention.k_norm", k)
    q, k = turned(config, q), turned(config, k)
    out = np.zeros_like(q)
    for t in range(len(x)):
        for h in range(config.n_heads):
            g = h // config.group_size
            scores = k[: t + 1, g] @ q[t, h] / math.sqrt(config.head_dim)
            w = np.exp(scores - scores.max())
            out[t, h] = w / w.sum() @ v[: t + 1, g]
    return out.reshape(len(x), -1)


def turned(config, x):
    """The pair (i, i + half) is a complex number, multiplied by e^(i angle)."""
    half = config.head_dim // 2
    frequencies = np.array([numpy_frequency(config, i) for i in range(half)])
    angles = np.arange(len(x))[:, None, None] * frequencies
    pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def numpy_frequency(config, i):
    """As Llama 3.1's own code says it, with wavelengths."""
    frequency = config.rope_theta ** (-2 * i / config.head_dim)
    s = config.rope_scaling
    if s is None:
        return frequency
    wavelength = 2 * math.pi / frequency
    if wavelength < s.original_max_context / s.high_freq_factor:
        return frequency
    if wavelength > s.original_max_context / s.low_freq_factor:
        return frequency / s.factor
    smooth = (s.original_max_context / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    return (1 - smooth) * frequency / s.factor + smooth * frequency


@pytest.mark.parametrize("name", CONFIGS)
def test_the_logits_equal_a_second_writing_in_numpy(name):
    model = random_model(CONFIGS[name])
    torch.testing.assert_close(
        logits(model, TOKENS), torch.from_numpy(numpy_logits(model, TOKENS)), rtol=1e-11, atol=1e-11
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_matters(name):
    """The comparison above says something about a parameter only if the logits depend on it."""
    model = random_model(CONFIGS[name])
    before = logits(model, TOKENS)
    for parameter_name, parameter in model.named_parameters():
        kept = parameter.clone()
        parameter.add_(torch.linspace(0.1, 0.5, parameter.numel(), dtype=parameter.dtype).view_as(parameter))
        assert (logits(model, TOKENS) - before).abs().max() > 1e-3, parameter_name
        parameter.copy_(kept)


# --- Several sequences in one flat list. ---


@pytest.mark.parametrize("lengths", [[3, 1, 5], [9], [1] * 9, [1, 8]])
def test_ragged_sequences_get_their_solo_logits(lengths):
    model = random_model()
    together = logits(model, TOKENS, lengths)
    alone = [logits(model, list(part)) for part in torch.tensor(TOKENS).split(lengths)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-12)


def test_ragged_sequences_would_differ_if_they_saw_each_other():
    """The guard of the test above: without `lengths` the same tokens and positions give other logits."""
    model = random_model()
    positions = torch.cat([torch.arange(n) for n in (3, 1, 5)])
    mixed = model.logits(model(torch.tensor(TOKENS), positions, NoCache()))
    difference = (mixed - logits(model, TOKENS, [3, 1, 5])).abs().amax(-1)
    assert difference[:3].max() < 1e-12 and difference[3:].min() > 1e-3


@pytest.mark.parametrize("lengths", [[], [3, 1], [3, 1, 6]])
def test_lengths_that_do_not_add_up_are_refused(lengths):
    with pytest.raises(ValueError, match="but 9 tokens were given"):
        random_model()(torch.tensor(TOKENS), torch.arange(9), NoCache(lengths))


def test_no_cache_never_holds_anything(tiny):
    kv = NoCache()
    before = logits(tiny, TOKENS)
    kv.commit(5)
    kv.truncate(2)
    assert kv.length == 0 and kv.fork().length == 0
    assert torch.equal(tiny.logits(tiny(torch.tensor(TOKENS), torch.arange(9), kv)), before)


# --- Training. ---


def next_token_loss(model: Transformer, tokens: list[int], lengths: list[int] | None = None) -> torch.Tensor:
    """The sum over all rows of the loss for some target; which one does not matter here."""
    targets = (torch.tensor(tokens) * 7 + 1) % model.config.vocab_size
    return torch.nn.functional.cross_entropy(logits(model, tokens, lengths), targets, reduction="sum")


def gradients(model: Transformer, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_gets_a_finite_gradient(name):
    model = random_model(CONFIGS[name]).requires_grad_(True)
    next_token_loss(model, TOKENS, [3, 1, 5]).backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.any(), parameter_name


def test_ragged_gradients_are_the_sum_of_the_separate_ones():
    model = random_model(CONFIGS["biases"]).requires_grad_(True)
    lengths = [3, 1, 5]
    parts = torch.tensor(TOKENS).split(lengths)
    together = gradients(model, next_token_loss(model, TOKENS, lengths))
    separate = gradients(model, sum(next_token_loss(model, part.tolist()) for part in parts))
    for name in together:
        torch.testing.assert_close(together[name], separate[name], rtol=1e-9, atol=1e-11, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("name", ["plain", "normed queries and keys", "biases"])
def test_gradients_equal_finite_differences(name):
    """Along a random direction in the space of all weights: (f(w + h d) - f(w - h d)) / 2h = gradient . d + O(h^2)."""
    model = random_model(CONFIGS[name]).requires_grad_(True)
    gradient = gradients(model, next_token_loss(model, TOKENS, [3, 1, 5]))
    generator = torch.Generator().manual_seed(1)
    direction = {n: torch.randn(g.shape, generator=generator, dtype=g.dtype) for n, g in gradient.items()}
    slope = sum((gradient[n] * direction[n]).sum() for n in gradient).item()

    def moved(step: float) -> float:
        with torch.no_grad():
            for n, parameter in model.named_parameters():
                parameter.add_(direction[n], alpha=step)
            loss = next_token_loss(model, TOKENS, [3, 1, 5]).item()
            for n, parameter in model.named_parameters():
                parameter.sub_(direction[n], alpha=step)
        return loss

    h = 1e-6
    assert (moved(h) - moved(-h)) / (2 * h) == pytest.approx(slope, rel=1e-5)


# --- Rotary positions. ---


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 100_000), st.booleans())
def test_scores_depend_on_the_distance_only(i, j, shift, stretched):
    rope = Rope(8, 10000.0, LLAMA3 if stretched else None)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 8, generator=generator, dtype=torch.float64)

    def score(a, b):
        return (rotate(q, *rope(torch.tensor([a]), q.dtype)) * rotate(k, *rope(torch.tensor([b]), k.dtype))).sum()

    # An angle of 1e5 carries a rounding error of 1e5 x 1.1e-16; a few dozen of those make up the score.
    assert abs(score(i, j) - score(i + shift, j + shift)) < 1e-9


def test_scores_do_depend_on_the_distance():
    rope = Rope(8, 10000.0, None)
    q = torch.ones(1, 1, 8, dtype=torch.float64)
    scores = [(rotate(q, *rope(torch.tensor([n]), q.dtype)) * q).sum().item() for n in range(20)]
    assert len({round(s, 6) for s in scores}) == 20 and scores[0] == 8


def test_position_zero_turns_nothing_and_the_pairs_are_half_a_head_apart():
    rope = Rope(4, 100.0, None)  # frequencies 1 and 1/10
    x = torch.tensor([[[1.0, 2.0, 0.0, 0.0]]], dtype=torch.float64)
    assert torch.equal(rotate(x, *rope(torch.tensor([0]), x.dtype)), x)
    turned_by_three = rotate(x, *rope(torch.tensor([3]), x.dtype))
    expected = [math.cos(3), 2 * math.cos(0.3), math.sin(3), 2 * math.sin(0.3)]
    torch.testing.assert_close(turned_by_three.flatten(), torch.tensor(expected, dtype=torch.float64))


def test_far_positions_are_exact_in_low_precision():
    """Angles are computed in float64 whatever the model's type: position 8191 in bfloat16 would be 8192."""
    exact = Rope(8, 10000.0, None)(torch.tensor([8191]), torch.float64)
    rounded = Rope(8, 10000.0, None)(torch.tensor([8191]), torch.bfloat16)
    for a, b in zip(exact, rounded, strict=True):
        assert torch.equal(a.to(torch.bfloat16), b)


def test_changing_the_type_of_a_model_does_not_round_its_frequencies(tiny):
    before = tiny.rope(torch.tensor([1000]), torch.float64)
    tiny.to(torch.bfloat16)
    for a, b in zip(before, tiny.rope(torch.tensor([1000]), torch.float64), strict=True):
        assert torch.equal(a, b)


def test_the_stretch_keeps_fast_frequencies_and_divides_slow_ones():
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_context=8192)
    turns = torch.tensor([1000.0, 4.0, 2.5, 1.0, 0.01], dtype=torch.float64)  # within the original context
    frequencies = turns * 2 * math.pi / 8192
    ratio = stretch(frequencies, scaling) / frequencies
    blended = 0.5 + 0.5 / 8  # halfway between 1 and 4 turns: half kept, half divided
    torch.testing.assert_close(ratio, torch.tensor([1, 1, blended, 1 / 8, 1 / 8], dtype=torch.float64))


# --- Norms and number types. ---


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_norm_of_large_half_precision_rows_does_not_overflow(dtype):
    """300 squared is beyond float16."""
    x = torch.tensor([[300.0, -300.0, 6e4, 0.0]], dtype=dtype)
    assert dtype == torch.bfloat16 or x.pow(2).isinf().any()  # a mean in float16 would be infinite
    exact = x.double() / x.double().pow(2).mean(-1, keepdim=True).sqrt()
    normed = RMSNorm(4, 1e-5, dtype=dtype)(x)
    assert normed.dtype == dtype
    torch.testing.assert_close(normed.double(), exact, rtol=torch.finfo(dtype).eps, atol=0)


def test_the_norm_of_zeros_is_zero():
    assert torch.equal(RMSNorm(4, 1e-5)(torch.zeros(1, 4)), torch.zeros(1, 4))


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_logits_are_at_least_float32(dtype, wanted):
    model = tiny_model(dtype=dtype)
    hidden = model(torch.tensor(TOKENS), torch.arange(9), NoCache())
    assert model.dtype == hidden.dtype == dtype
    assert model.logits(hidden).dtype == wanted


# --- Random weights. ---


def test_random_weights_come_from_the_seed_alone():
    config = replace(TINY, qk_norm=True, qkv_bias=True)
    one, again, other = (Transformer(config).init_weights(seed) for seed in (5, 5, 6))
    torch.manual_seed(99)  # the global generator has no say
    late = Transformer(config).init_weights(5)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)) and torch.equal(parameter, late.get_parameter(name))
        assert parameter.ndim == 1 or not torch.equal(parameter, other.get_parameter(name))


def test_random_weights_have_the_size_that_was_asked_for():
    model = Transformer(replace(TINY, qkv_bias=True, d_ff=400), dtype=torch.float64).init_weights(0, std=0.5)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:  # the standard error of a standard deviation of n normals is std / sqrt(2 n)
            assert parameter.std().item() == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(2 * parameter.numel())), name
        else:
            assert torch.equal(parameter, torch.full_like(parameter, 0.0 if name.endswith("bias") else 1.0)), name


def test_a_tied_head_is_the_embedding():
    tied, untied = (Transformer(replace(TINY, tied_embeddings=flag)) for flag in (True, False))
    assert tied.head.weight is tied.embed.weight
    assert untied.head.weight is not untied.embed.weight
    one_matrix_less = TINY.vocab_size * TINY.d_model
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in (untied, tied)]
    assert sizes[0] - sizes[1] == one_matrix_less


def test_prepare_ends_training(tiny):
    tiny.requires_grad_(True)
    assert tiny.prepare() is tiny
    assert not any(parameter.requires_grad for parameter in tiny.parameters())
