"""minillm: how LLM inference works, one technique a file.

    import minillm

    model, tokenizer = minillm.load()
    print(minillm.generate(model, tokenizer, "The capital of France is").text)

Names below are imported when they are first used, so that `import minillm` and `minillm --help` answer at once.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "load": "checkpoint",
    "ModelConfig": "config",
    "Tokenizer": "tokenizer",
    "Transformer": "model",
    "KVStore": "model",
    "NoCache": "model",
    "ContiguousKV": "kv_cache",
    "flash_attention": "kernel_attention",
    "SamplingParams": "sampling",
    "sample": "sampling",
    "BlockPool": "blocks",
    "PagedKV": "paged_kv",
    "Scheduler": "scheduler",
    "Engine": "engine",
    "NgramDrafter": "drafters",
    "ModelDrafter": "drafters",
    "LayerSkipDrafter": "drafters",
    "FeatureDrafter": "feature_drafter",
    "load_drafter": "feature_drafter",
    "AdaptiveK": "adaptive_k",
    "generate": "generation",
    "stream": "generation",
    "Generation": "writing",
    "beam_search": "beam",
    "Chat": "chat",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'minillm' has no attribute {name!r}")
    value = getattr(import_module(f"minillm.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return [*__all__, "__version__"]
