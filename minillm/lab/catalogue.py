"""GPUs and models with published numbers, to compute with. Each row names its source."""

from __future__ import annotations

from dataclasses import dataclass

from minillm.config import ModelConfig, RopeScaling


@dataclass(frozen=True)
class GPU:
    """flops: dense 16-bit tensor-core rate with 32-bit accumulation, FLOP/s (no sparsity). bandwidth: bytes/s.
    memory: bytes (vendors' decimal GB)."""

    name: str
    flops: float
    bandwidth: float
    memory: float
    source: str


def gpu(name: str, tflops: float, gb_per_s: float, gb: float, source: str) -> tuple[str, GPU]:
    return name, GPU(name, tflops * 1e12, gb_per_s * 1e9, gb * 1e9, source)


GPUS = dict(
    (
        gpu("T4", 65, 320, 16, "NVIDIA T4 data sheet"),
        gpu("RTX 4090", 165.2, 1008, 24, "NVIDIA Ada GPU architecture whitepaper, appendix A"),
        gpu("L4", 121, 300, 24, "NVIDIA L4 data sheet (halved: quoted with sparsity)"),
        gpu("A100 80GB SXM", 312, 2039, 80, "NVIDIA A100 data sheet"),
        gpu("H20", 148, 4000, 96, "NVIDIA H20 specification as published by vendors"),
        gpu("H100 SXM", 989, 3350, 80, "NVIDIA H100 data sheet (halved: quoted with sparsity)"),
        gpu("H200 SXM", 989, 4800, 141, "NVIDIA H200 data sheet (halved: quoted with sparsity)"),
        gpu("MI300X", 1307, 5300, 192, "AMD Instinct MI300X data sheet"),
    )
)

# From each model's published config.json (Qwen2.5: the Instruct model's).
MODELS = {
    "SmolLM2-135M": ModelConfig(49152, 576, 30, 9, 3, 64, 1536, 8192, 100000.0, tied_embeddings=True),
    "Qwen3-0.6B": ModelConfig(
        151936, 1024, 28, 16, 8, 128, 3072, 40960, 1e6, None, 1e-6, tied_embeddings=True, qk_norm=True
    ),
    "Llama-2-7B": ModelConfig(32000, 4096, 32, 32, 32, 128, 11008, 4096),
    "Mistral-7B": ModelConfig(32000, 4096, 32, 32, 8, 128, 14336, 32768),
    "Llama-3.1-8B": ModelConfig(128256, 4096, 32, 32, 8, 128, 14336, 131072, 500000.0, RopeScaling(8, 1, 4, 8192)),
    "Qwen2.5-32B": ModelConfig(152064, 5120, 64, 40, 8, 128, 27648, 32768, 1e6, None, 1e-6, qkv_bias=True),
    "Llama-2-70B": ModelConfig(32000, 8192, 80, 64, 8, 128, 28672, 4096),
}
