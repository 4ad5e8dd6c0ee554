"""What the inputs of each linear layer look like, on some text: weights that meet large inputs matter most.

For the error of a layer's outputs, ||X W^T - X Q^T||^2, all that is needed of the inputs X is X^T X: the error is the
trace of (W - Q) X^T X (W - Q)^T. X^T X / rows is called the Hessian, since up to a factor it is that of the squared
error (Frantar et al., "GPTQ", 2023, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.linear import Linear
from minillm.model import NoCache, Transformer


@torch.inference_mode()
def hessians(model: Transformer, texts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """For each linear layer in the blocks, by name: X^T X / rows [in, in] in float32, over all tokens of the texts.

    Each text begins anew, without a past.
    """
    require_texts(model, texts)
    sums: dict[str, Tensor] = {}
    handles = []
    for name, layer in linear_layers(model):

        def add(module, inputs, name=name):
            x = inputs[0].float()
            sums[name] = x.T @ x + sums.get(name, 0)

        handles.append(layer.register_forward_pre_hook(add))
    try:
        for text in filter(len, texts):
            tokens = torch.tensor(text, device=model.device)
            model(tokens, torch.arange(len(tokens), device=model.device), NoCache())
    finally:
        for handle in handles:
            handle.remove()
    rows = sum(len(text) for text in texts)
    return {name: total / rows for name, total in sums.items()}


def require_texts(model: Transformer, texts: Sequence[Sequence[int]]) -> None:
    try:
        ids = [int(token) for text in texts for token in text]
    except (TypeError, ValueError):
        raise ValueError("calibration is a list of texts, each a list of token ids") from None
    if not ids:
        raise ValueError("calibration needs at least one token of text")
    if not 0 <= min(ids) <= max(ids) < model.config.vocab_size:
        raise ValueError(f"calibration holds token ids beyond the vocabulary of {model.config.vocab_size}")


def linear_layers(model: Transformer) -> list[tuple[str, Linear]]:
    """The matrices of the blocks, by name. The head is no part of them."""
    return [(f"blocks.{name}", m) for name, m in model.blocks.named_modules() if isinstance(m, Linear)]


def output_error(weight: Tensor, approximation: Tensor, hessian: Tensor) -> float:
    """The mean squared error of the layer's outputs: the mean over rows of W of e H e^T, with e the row's error."""
    error = (weight - approximation).float()
    return float(torch.einsum("oi,ij,oj->o", error, hessian, error).mean())


def known_inputs(weight: Tensor, hessian: Tensor | None, method: str) -> tuple[Tensor, Tensor]:
    """weight and hessian in float32, for a method that cannot work without the second."""
    if hessian is None:
        raise ValueError(f"{method} needs to know the layer's inputs: give calibration text")
    n_in = weight.shape[-1]
    if weight.ndim != 2 or hessian.shape != (n_in, n_in):
        raise ValueError(
            f"{method} wants a matrix [out, in] and a Hessian [in, in], not {[*weight.shape]} and {[*hessian.shape]}"
        )
    if not torch.isfinite(hessian).all():
        raise ValueError("the Hessian holds numbers that are not finite")
    return weight.detach().float(), hessian.float()
