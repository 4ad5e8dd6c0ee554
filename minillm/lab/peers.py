"""Other people's code on the same weights, the same text and the same threads, in turn with ours in one process.

transformers: `generate`, float32, scaled_dot_product_attention, its dynamic cache; the very tensors of our model.
llama.cpp: the GGUF file itself in 4 bits, where llama-cpp-python is installed. Our own 4-bit weights are those of the
same file; both read less than a fifth of float32's bytes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Callable

import torch

from minillm.checkpoint import destinations
from minillm.fetch import default_model
from minillm.generation import generate
from minillm.lab.bench import alternate
from minillm.lab.machine import version
from minillm.model import Transformer
from minillm.sampling import SamplingParams

TASK = "one request, 64 tokens in, 128 out"
PROMPT_TOKENS, NEW_TOKENS = 64, 128
REPEATS = 5
WIDE, SMALL = "minillm float32", "minillm Q4_1, products in bfloat16"
RATIOS = {  # the rate of the first over that of the second; by how their names begin
    "single_stream_vs_transformers": (WIDE, "transformers"),
    "w4a16_vs_own_float32": (SMALL, WIDE),
    "w4a16_vs_llama_cpp": (SMALL, "llama.cpp"),
}


def compare(
    model: Transformer, small: Transformer | None, prompt: list[int], progress: bool = True
) -> dict[str, object]:
    """Tokens per second of every peer that is installed, and the ratios; a ratio is null where a side is missing.

    small: the model with the file's own 4-bit weights.
    """
    if len(prompt) != PROMPT_TOKENS:
        raise ValueError(f"the prompt must have {PROMPT_TOKENS} tokens, not {len(prompt)}")
    contestants = {WIDE: lambda: ours(model, prompt)}
    if small is not None:
        contestants[SMALL] = lambda: ours(small, prompt)
    if installed("transformers"):
        peer = to_transformers(model)
        contestants[f"transformers {version('transformers')} float32"] = lambda: transformers_generate(peer, prompt)
    if installed("llama_cpp"):
        peer_file = llama_cpp()
        contestants[f"llama.cpp ({version('llama-cpp-python')}) Q4_1"] = lambda: llama_cpp_generate(peer_file, prompt)
    measured = alternate(contestants, REPEATS, progress)
    results = [
        {"name": name, "task": TASK, "tokens_per_s": runs.median(float), "spread": runs.spread(float)}
        for name, runs in measured.items()
    ]
    ratios = {name: ratio(results, *pair) for name, pair in RATIOS.items()}
    return {"results": results, "ratios": ratios}


def ratio(results: list[dict], first: str, second: str) -> float | None:
    rates = [next((r["tokens_per_s"] for r in results if r["name"].startswith(name)), None) for name in (first, second)]
    return None if None in rates else rates[0] / rates[1]


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def per_second(run: Callable[[], int]) -> float:
    """Tokens per second of the whole request, prefill included."""
    start = time.perf_counter()
    tokens = run()
    if tokens != NEW_TOKENS:
        raise RuntimeError(f"a contestant gave {tokens} tokens, not {NEW_TOKENS}")
    return tokens / (time.perf_counter() - start)


def ours(model: Transformer, prompt: list[int]) -> float:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return per_second(lambda: len(generate(model, None, prompt, params).tokens))


def to_transformers(model: Transformer) -> torch.nn.Module:
    """The same model as a `LlamaForCausalLM` that shares our tensors: no second copy, no other numbers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = model.config
    if c.qk_norm or c.qkv_bias or c.out_bias or c.mlp_bias or c.rope_scaling:
        raise ValueError("only a plain Llama model can be handed to transformers' LlamaForCausalLM")
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.d_model,
        intermediate_size=c.d_ff,
        num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads,
        num_key_value_heads=c.n_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_context,
        rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=c.tied_embeddings,
        eos_token_id=None,  # nothing ends the text early, as `ignore_eos` does for us
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        peer = LlamaForCausalLM(config)
    weights = destinations(model)
    weights.setdefault("lm_head.weight", model.head.weight.detach())
    peer.load_state_dict(weights, assign=True)
    peer.model.rotary_emb = type(peer.model.rotary_emb)(config)  # its buffer is not in the state dict
    return peer.eval().requires_grad_(False)


@torch.inference_mode()
def transformers_generate(peer: torch.nn.Module, prompt: list[int]) -> float:
    ids = torch.tensor([prompt])

    def run() -> int:
        done = peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        return done.shape[1] - len(prompt)

    return per_second(run)


def llama_cpp():
    from llama_cpp import Llama

    threads = torch.get_num_threads()
    return Llama(
        str(default_model()),
        n_ctx=PROMPT_TOKENS + NEW_TOKENS,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )


def llama_cpp_generate(peer, prompt: list[int]) -> float:
    def run() -> int:
        peer.reset()
        with contextlib.closing(peer.generate(prompt, temp=0.0)) as tokens:
            return sum(1 for _, _ in zip(range(NEW_TOKENS), tokens, strict=False))

    return per_second(run)
