"""Small random models that hide no bug: for tests, for checks, and to look into."""

from __future__ import annotations

import torch

from minillm.config import ModelConfig
from minillm.model import Transformer

TINY = ModelConfig(
    vocab_size=37,
    d_model=24,
    n_layers=2,
    n_heads=6,
    n_kv_heads=2,
    head_dim=4,
    d_ff=40,
    max_context=128,
    rope_theta=100.0,
)


def tiny_model(seed: int = 0, config: ModelConfig = TINY, dtype: torch.dtype = torch.float64) -> Transformer:
    """A random model whose text depends on everything it has read.

    The head is untied and peaked, and the layers' weights are large: tied or timid random models repeat one token
    whatever happens in attention, and a test on their text would pass with many a bug.
    """
    model = Transformer(config, dtype=dtype).init_weights(seed, std=0.25)
    with torch.no_grad():
        model.embed.weight.mul_(4)
        model.head.weight.mul_(3)
    return model.requires_grad_(False)
