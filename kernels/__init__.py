"""Triton kernels, one a file, each beside its plain PyTorch reference. They arrive with stage 4 (FlashAttention)."""
