"""Claims about bytes: how large are the weights, and the keys and values; and what fits?

Nothing here but counting. KiB and GiB are powers of two, GB is decimal: the texts write GB for both.
"""

from __future__ import annotations

from minillm.config import ModelConfig
from minillm.gqa import kv_bytes_a_token, with_kv_heads
from minillm.lab.catalogue import GPUS, MODELS
from minillm.lab.claims.decide import close, decide
from minillm.lab.claims.ledger import Finding, Ledger
from minillm.lab.kv_memory import Text, contiguous, paged, room_of

KiB, MiB, GiB = 2**10, 2**20, 2**30
ledger = Ledger()


def parameters(config: ModelConfig) -> int:
    """Weights of a model: its layers, its head, and its embedding where that is another matrix. (Not the norms.)"""
    return config.layer_parameters + config.head_parameters * (1 if config.tied_embeddings else 2)


def weight_bytes(config: ModelConfig) -> int:
    """In 16 bits."""
    return 2 * parameters(config)


@ledger.claim(
    "A1",
    sources="T1",
    text="The keys and values of a token take 2 x layers x hidden size x bytes: 0.5 MB for a 7B Llama in 16 bits, so "
    "2 GB for 4,096 tokens and 20 GB for ten such texts",
    notebook="08_gqa",
)
def cache_by_hidden_size() -> Finding:
    def stated(config: ModelConfig) -> int:
        return 2 * config.n_layers * config.d_model * 2

    token = kv_bytes_a_token(MODELS["Llama-2-7B"])
    ten = 10 * 4096 * token
    factors = {name: stated(config) / kv_bytes_a_token(config) for name, config in MODELS.items()}
    wrong = [f"{name} ({factor:.0f} times)" for name, factor in factors.items() if factor != 1]
    right = (token, 4096 * token, ten) == (0.5 * MiB, 2 * GiB, 20 * GiB) and factors["Llama-2-7B"] == 1
    return Finding(
        ten / GiB,
        "GiB for ten texts of 4,096 tokens of Llama-2-7B",
        decide(right, always=not wrong),
        "The condition: KV heads times their size are the hidden size. In general a token takes 2 x layers x KV "
        f"heads x head size x bytes; as stated the formula gives too much for {', '.join(wrong) or 'no model'}. The "
        f"units are binary: {ten / GiB:.0f} GiB are {ten / 1e9:.1f} GB.",
    )


@ledger.claim(
    "A2",
    sources="T4",
    text="A token's keys and values take 512 KB in a 7B model with MHA, 320 KB in a 70B with 8 KV heads, 128 KB in "
    "Mistral-7B; 4,096 tokens take 2, 1.25 and 0.5 GB; the 7B takes 32 GB at batch 16 and 128 GB at batch 64",
    notebook="08_gqa",
)
def cache_by_kv_heads() -> Finding:
    names = "Llama-2-7B", "Llama-2-70B", "Mistral-7B"
    tokens = [kv_bytes_a_token(MODELS[name]) for name in names]
    text = 4096 * tokens[0]
    card = GPUS["A100 80GB SXM"]
    weights = weight_bytes(MODELS["Llama-2-7B"])
    batch = int((card.memory - weights) // text)
    right = [token / KiB for token in tokens] == [512, 320, 128]
    right &= [4096 * token / GiB for token in tokens] == [2, 1.25, 0.5]
    right &= (16 * text, 64 * text) == (32 * GiB, 128 * GiB)
    return Finding(
        64 * text / GiB,
        "GiB for 64 texts of 4,096 tokens of Llama-2-7B",
        decide(right),
        f"In binary units: {', '.join(f'{token / KiB:.0f}' for token in tokens)} KiB a token. But beside "
        f"{weights / 1e9:.1f} GB of weights no more than {batch} such texts fit into the {card.memory / 1e9:.0f} GB "
        f"of an {card.name}.",
    )


@ledger.claim(
    "A9",
    sources="T1",
    text="GQA with 8 of 32 heads makes the cache 4 times smaller, MQA 32 times",
    notebook="08_gqa",
)
def cache_of_fewer_heads() -> Finding:
    config = MODELS["Llama-2-7B"]
    full, gqa, mqa = (kv_bytes_a_token(with_kv_heads(config, n)) for n in (config.n_heads, 8, 1))
    lighter = 1 - weight_bytes(with_kv_heads(config, 8)) / weight_bytes(config)
    return Finding(
        full / gqa,
        "times smaller with 8 KV heads",
        decide((full / gqa, full / mqa) == (4, 32)),
        f"{full / KiB:.0f} KiB a token of Llama-2-7B become {gqa / KiB:.0f}, and {mqa / KiB:.0f} with one KV head "
        f"({full / mqa:.0f} times smaller). That is the cache alone: all query heads stay, and the weights become "
        f"{lighter:.0%} smaller with 8 KV heads.",
    )


def activation_bytes(config: ModelConfig, tokens: int) -> int:
    """More than a prefill ever holds at once, in 16 bits: all that one layer computes, its scores written out as well,
    and the logits of every token in 32 bits."""
    layer = 6 * config.d_model + 3 * config.d_ff + 2 * config.n_kv_heads * config.head_dim
    scores = 2 * tokens * config.n_heads  # before and after the softmax
    return tokens * (2 * (layer + scores) + 4 * config.vocab_size)


@ledger.claim(
    "A12",
    sources="T2",
    text="A 70B model at 16 bits needs 140 GB; a 32B model needs another 10 to 20 GB for the keys, values and "
    "activations of 2,048 tokens",
    notebook="10_evidence",
)
def what_a_large_model_needs() -> Finding:
    tokens, low, high = 2048, 10e9, 20e9
    seventy, config = weight_bytes(MODELS["Llama-2-70B"]), MODELS["Qwen2.5-32B"]
    kv = tokens * kv_bytes_a_token(config)
    most = kv + activation_bytes(config, tokens)
    return Finding(
        most / 1e9,
        "GB of keys, values and activations at most, for 2,048 tokens of Qwen2.5-32B",
        decide(close(seventy, 140e9) and low <= most <= high),
        f"The weights of Llama-2-70B are {seventy / 1e9:.0f} GB. The 32B with its {config.n_kv_heads} KV heads keeps "
        f"{kv / 1e9:.2f} GB for one text, and needs {most / 1e9:.1f} GB even if a layer's scores are written out and "
        f"the logits of every token are kept. {low / 1e9:.0f} GB of keys and values are {low / kv:.0f} such texts.",
    )


@ledger.claim("A14", sources="T1", text="Speculation doubles the memory, for the draft model", notebook="10_evidence")
def memory_of_a_draft() -> Finding:
    target, draft, length = MODELS["Llama-2-70B"], MODELS["Llama-2-7B"], 4096

    def held(config: ModelConfig, texts: int) -> int:
        return weight_bytes(config) + texts * length * kv_bytes_a_token(config)

    added = {texts: held(draft, texts) / held(target, texts) for texts in (1, 16)}
    slopes = length * (kv_bytes_a_token(draft) - kv_bytes_a_token(target))
    level = (weight_bytes(target) - weight_bytes(draft)) / slopes if slopes > 0 else float("inf")
    doubles = [share >= 0.9 for share in (*added.values(), 0.0)]  # 0: guesses that are looked up in the text
    return Finding(
        100 * added[1],
        "% more memory with Llama-2-7B as the draft of Llama-2-70B, one text of 4,096 tokens",
        decide(any(doubles), always=all(doubles)),
        f"The draft's weights are {weight_bytes(draft) / weight_bytes(target):.1%} of the target's. Its cache counts "
        f"too: for 16 texts it is {added[16]:.0%}, since this draft has {draft.n_kv_heads} KV heads and keeps "
        f"{kv_bytes_a_token(draft) / KiB:.0f} KiB a token, the target {kv_bytes_a_token(target) / KiB:.0f}. Only from "
        f"{level:.0f} texts on would the memory double; looked-up guesses take none.",
    )


@ledger.claim(
    "A16",
    sources="T4",
    text="Reserving room for 4,096 tokens each wastes 60 to 80 % when two requests use 1,024 and 2,048",
    notebook="05_paged_attention",
)
def waste_of_a_reservation() -> Finding:
    room, low, high = 4096, 0.6, 0.8
    texts = [Text(1024, 1), Text(2048, 1)]
    waste = contiguous(texts, room_of(room)).waste
    alone = [contiguous([text], room_of(room)).waste for text in texts]
    return Finding(
        100 * waste,
        "% of the reserved slots stay empty",
        decide(low <= waste <= high),
        f"One alone wastes {alone[0]:.0%}, the other {alone[1]:.0%}. The range of 60 to 80 % belongs to texts of "
        f"{(1 - high) * room:,.0f} to {(1 - low) * room:,.0f} tokens on average; a well guessed reservation wastes "
        f"less. In blocks of 16 these two waste {paged(texts, 16).waste:.1%}.",
    )
