"""Which existing engine suits which case? By what it runs on and how many requests it is made for; no order of merit.

Facts from each project's own documentation, of 2025 and 2026. Speed is not among them: it has to be measured on the
machine at hand (`minillm bench peers` does so for two of them).
"""

from __future__ import annotations

from dataclasses import dataclass

from minillm.lab.advice.deployment import Deployment

FEW = 8  # requests at a time up to which an engine that is made for few is taken to suit


@dataclass(frozen=True)
class Engine:
    """hardware: the kinds of `Hardware` that it runs on. many: built to serve many requests at a time.

    llama.cpp and transformers also let requests join a running batch; they are meant for a moderate load.
    """

    name: str
    hardware: tuple[str, ...]
    many: bool
    formats: str
    prefixes: str


ENGINES = (
    Engine("vLLM", ("nvidia", "amd", "cpu"), True, "AWQ, GPTQ, FP8, INT8", "found by hash, block by block"),
    Engine("SGLang", ("nvidia", "amd", "cpu"), True, "AWQ, GPTQ, FP8", "a prefix tree over all requests"),
    Engine("TensorRT-LLM", ("nvidia",), True, "FP8, FP4, AWQ and GPTQ with 4 bits", "blocks are reused"),
    Engine("llama.cpp", ("cpu", "apple", "nvidia", "amd"), False, "GGUF, 2 to 8 bits", "each slot keeps its last text"),
    Engine(
        "transformers",
        ("nvidia", "amd", "cpu", "apple"),
        False,
        "bitsandbytes, AWQ, GPTQ, and others",
        "a cache object that the caller keeps",
    ),
    Engine("MLX (mlx-lm)", ("apple",), False, "its own, 4 and 8 bits among them", "a prompt's cache is kept"),
)


@dataclass(frozen=True)
class Suit:
    engine: Engine
    suits: bool
    why: str


def suits(deployment: Deployment) -> list[Suit]:
    """Each engine: does it suit this hardware and this many requests at a time?"""
    return [suit(engine, deployment.hardware.kind, deployment.batch) for engine in ENGINES]


def suit(engine: Engine, kind: str, batch: int) -> Suit:
    if kind not in engine.hardware:
        return Suit(engine, False, f"does not run on this hardware ({kind})")
    if batch > FEW and not engine.many:
        return Suit(engine, False, f"runs here, but is made for few at a time, and {batch:,} are to run")
    return Suit(engine, True, "made for many at a time" if engine.many else "few at a time, as here")
