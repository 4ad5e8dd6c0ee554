"""What aot.py compiles: every kernel, as its wrapper would launch it for some models on some GPUs.

A kernel is compiled for the types of its arguments, for its constants (`tl.constexpr`: tile sizes, head_dim), and for
options such as the number of warps. The wrappers' own functions choose them here too, so that what is looked at is what
will run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import flash_attention, paged_attention, rmsnorm, store_kv, w4a16
from kernels.nibbles import PIECE
from kernels.online_softmax import padded, precision

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),  # A100
    "sm_90": GPUTarget("cuda", 90, 32),  # H100, H200
    "gfx942": GPUTarget("hip", "gfx942", 64),  # MI300
}
INTEGERS = ("tables_ptr", "cu_seqlens_ptr", "lengths_ptr", "slots_ptr")
PACKED = ("codes_ptr",)  # 8 codes in a word
GRID = ("scale_ptr", "minimum_ptr")  # of packed weights, in float16
FLOATS = ("scale", "eps")
SCRATCH = ("acc_ptr", "top_ptr", "total_ptr", "parts_ptr")
BLOCK_SIZE = 16
WIDE = 16  # bytes that a thread can load at once
VERIFIED = 5  # query rows a request, when four guesses are verified


@dataclass(frozen=True)
class Model:
    """The sizes that kernels are compiled for. group: weights that share a scale; each model has another usual size."""

    name: str
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    group: int


MODELS = (
    Model("SmolLM2-135M", 576, 9, 3, 64, 32),
    Model("Llama-2-7B", 4096, 32, 32, 128, 64),
    Model("Llama-3-70B", 8192, 64, 8, 128, 128),
)


@dataclass(frozen=True)
class Spec:
    """A kernel to compile as its wrapper would. scratch: its pointers to float32. wide: bytes that a load should have.

    sizes: the values of whole-number arguments, where they are known. From them the compiler is told which arguments
    are multiples of 16.
    """

    name: str
    kernel: triton.JITFunction
    constants: dict[str, object]
    options: dict[str, int]
    scratch: tuple[str, ...] = ()
    tensor_cores: bool = False
    wide: int = WIDE
    dtype: str = "bf16"
    sizes: dict[str, int] = field(default_factory=dict)

    def source(self) -> ASTSource:
        """Types for all arguments. Where `sizes` is silent, addresses, strides and n_columns are multiples of 16."""
        signature, attributes = {}, {}
        for i, argument in enumerate(self.kernel.arg_names):
            if argument in self.constants:
                signature[argument] = "constexpr"
            elif argument.endswith("_ptr"):
                signature[argument] = "*" + self.pointee(argument)
            else:
                signature[argument] = "fp32" if argument in FLOATS else "i32"
            even = argument.endswith("_ptr") or argument.startswith("stride") or argument == "n_columns"
            if self.sizes.get(argument, 0 if even else 1) % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        return ASTSource(self.kernel, signature=signature, constexprs=self.constants, attrs=attributes)

    def pointee(self, argument: str) -> str:
        if argument in INTEGERS:
            return "i32"
        if argument in PACKED:
            return "u32"
        if argument in GRID:
            return "fp16"
        return "fp32" if argument in self.scratch else self.dtype


def specs(model: Model, target: str) -> Iterator[Spec]:
    """Every kernel, with the constants and options that its wrapper would choose for this model."""
    block = triton.next_power_of_2(model.d_model)
    for residual in (False, True):
        name = "rmsnorm, residual" if residual else "rmsnorm"
        constants = {"HAS_RESIDUAL": residual, "BLOCK": block}
        yield Spec(name, rmsnorm.rmsnorm_kernel, constants, {"num_warps": rmsnorm.warps(block, target)})

    heads = {"HEAD_DIM": model.head_dim, "BLOCK_D": padded(model.head_dim)}
    groups = triton.next_power_of_2(model.n_kv_heads)
    block, constants = groups * heads["BLOCK_D"], heads | {"BLOCK_SIZE": BLOCK_SIZE, "BLOCK_G": groups}
    options = {"num_warps": store_kv.warps(block)}
    wide = min(WIDE, 2 * block // TARGETS[target].warp_size)  # three heads of 64 leave an AMD thread 8 bytes to load
    yield Spec("store_kv", store_kv.store_kv_kernel, constants, options, wide=wide)

    for dtype in (torch.bfloat16, torch.float32):
        yield from attention_specs(model, target, dtype)

    rows = paged_attention.padded_rows(VERIFIED, model.n_heads // model.n_kv_heads)
    constants = heads | {"ROWS": rows, "SPLITS": paged_attention.MAX_SPLITS}
    yield Spec(
        "paged_attention, merge", paged_attention.merge_kernel, constants, paged_attention.MERGE_OPTIONS, SCRATCH
    )
    for dtype in (torch.bfloat16, torch.float32):
        yield from w4a16_specs(model, target, dtype)
    constants = {"BLOCK_N": w4a16.MERGE_COLUMNS, "SPLITS": w4a16.MAX_SPLITS, "HAS_BIAS": True}
    yield Spec("w4a16, merge", w4a16.merge_kernel, constants, w4a16.MERGE_OPTIONS, SCRATCH)


def attention_specs(model: Model, target: str, dtype: torch.dtype) -> Iterator[Spec]:
    """Prefill and decode. Tensor cores have no products in full float32."""
    half = dtype != torch.float32
    sort = {"tensor_cores": half, "dtype": "bf16" if half else "fp32"}
    suffix = "" if half else ", float32"
    heads = {"HEAD_DIM": model.head_dim, "BLOCK_D": padded(model.head_dim)}
    attention = heads | {"BLOCK_SIZE": BLOCK_SIZE, "PRECISION": precision(dtype)}
    tiles = flash_attention.tiles(model.head_dim, dtype, target)
    yield Spec(
        f"flash_attention {tiles.rows}x{tiles.columns}{suffix}",
        flash_attention.flash_attention_kernel,
        attention | {"BLOCK_M": tiles.rows, "BLOCK_N": tiles.columns},
        {"num_warps": tiles.warps, "num_stages": tiles.stages},
        **sort,
    )
    tile = paged_attention.tile(dtype, target)
    for n_queries in (1, VERIFIED):
        rows = paged_attention.padded_rows(n_queries, model.n_heads // model.n_kv_heads)
        if rows <= tile.rows:  # else the wrapper refuses them
            constants = attention | {"ROWS": rows, "BLOCK_N": tile.columns}
            options = {"num_warps": tile.warps, "num_stages": tile.stages}
            name = f"paged_attention, {n_queries} row{'s' * (n_queries > 1)}{suffix}"
            yield Spec(name, paged_attention.split_kernel, constants, options, SCRATCH, **sort)


def w4a16_specs(model: Model, target: str, dtype: torch.dtype) -> Iterator[Spec]:
    """d_model x d_model weights, and x of one row and of more."""
    half = dtype != torch.float32
    suffix = "" if half else ", float32"
    sizes = {"stride_codes": model.d_model // PIECE.value, "n_pieces": model.d_model // PIECE.value}
    sizes |= {"stride_scale": model.d_model // model.group, "stride_minimum": model.d_model // model.group}
    sort = {"dtype": "bf16" if half else "fp32", "sizes": sizes}
    columns, k = w4a16.SKINNY
    constants = {"GROUP": model.group, "HAS_BIAS": True}
    block = {"BLOCK_N": columns, "BLOCK_K": k, "STAGES": w4a16.SKINNY_STAGES}
    yield Spec(f"w4a16, 1 row{suffix}", w4a16.skinny_kernel, constants | block, w4a16.SKINNY_OPTIONS, **sort)
    for choice in dict.fromkeys(w4a16.blocks(rows, dtype, target) for rows in (16, 64, 128)):
        block = {"BLOCK_M": choice.rows, "BLOCK_N": choice.columns, "BLOCK_K": choice.k, "PRECISION": precision(dtype)}
        options = {"num_warps": choice.warps, "num_stages": choice.stages}
        name = f"w4a16 {choice.rows}x{choice.columns}{suffix}"
        yield Spec(name, w4a16.tile_kernel, constants | block, options, tensor_cores=half, **sort)
