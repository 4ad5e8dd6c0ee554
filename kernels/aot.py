"""Compile every kernel for GPUs that are not here, and read what the compiler made of it: `python -m kernels.aot`.

The interpreter shows that a kernel computes the right numbers. It accepts what a compiler refuses, and knows nothing of
registers. This needs no GPU either: Triton's compilers and NVIDIA's assembler come with the package. The table says for
each kernel, model and target: registers of a thread, what was spilled from them into memory, shared memory, matrix
instructions (mma, wgmma, mfma: the tensor cores), and the widest load from global memory; where weights are packed,
that of theirs if it is narrower. A kernel that does not compile, spills, loads in narrow pieces, or should use the
tensor cores and does not, ends in status 1.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"  # before triton is imported: an interpreted kernel cannot be compiled

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # a * b + c in one instruction, as on every GPU so far

import torch
import triton
from tabulate import tabulate
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

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
    """The sizes that kernels are compiled for. group: weights that share a scale, another of the usual for each."""

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
    """A kernel to compile as its wrapper would. scratch: its pointers to float32. wide: bytes of a load.

    sizes: what whole numbers will be, where not all strides are multiples of 16: the compiler is told which are.
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
        """Types for all arguments. Addresses, strides and n_columns are multiples of 16, where `sizes` is silent."""
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
    """Prefill and decode. Products in full float32 are none for tensor cores."""
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


@dataclass(frozen=True)
class Finding:
    """What the compiler made of a kernel. spills: bytes of a thread's stack on CUDA, registers on AMD."""

    registers: int
    spills: int
    shared: int  # bytes of a program
    matrix: str
    widest_load: int  # bytes

    def faults(self, spec: Spec) -> list[str]:
        faults = [f"spills {self.spills}"] if self.spills else []
        if spec.tensor_cores and not self.matrix:
            faults.append("no tensor cores")
        if self.widest_load < spec.wide:
            faults.append(f"loads of at most {self.widest_load} bytes")
        return faults


def examine(spec: Spec, target: str) -> Finding:
    """Compile for a target, and read the result. Raises whatever the compiler raises."""
    compiled = triton.compile(spec.source(), target=TARGETS[target], options=spec.options)
    finding = read_cuda(compiled) if "cubin" in compiled.asm else read_amd(compiled)
    if not set(PACKED) & set(spec.kernel.arg_names):
        return finding
    return replace(finding, widest_load=min(finding.widest_load, packed_load(compiled.asm["ttgir"])))


def packed_load(ttgir: str) -> int:
    """Bytes of packed weights that lie side by side in a thread, where they are loaded: Triton's layout says so.

    In the final instructions a load of weights looks like one of x. `ttgir`: Triton's own language, after its passes.
    """
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.blocked<\{sizePerThread = \[([\d, ]+)\]", ttgir, re.MULTILINE))
    loads = re.findall(r"= (?:tt\.load|ttg\.async_copy_global_to_local) .*?: tensor<\w+x!tt\.ptr<i32>, (#\w+)>", ttgir)
    if not loads:
        raise ValueError("no load of packed weights is in Triton's output: this Triton writes it in another way")
    return min(4 * int(layouts[layout].split(",")[-1]) for layout in loads)


def read_cuda(compiled: CompiledKernel) -> Finding:
    """Registers and stack from the binary, by NVIDIA's own tool; instructions from PTX, the assembler's input."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        usage = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    ptx = compiled.asm["ptx"]
    found = {"wgmma": ptx.count("wgmma.mma_async"), "mma": len(re.findall(r"\bmma\.sync", ptx))}
    loads = [int(n, 16) for n in re.findall(r"cp\.async\.\w+\.shared\.global[^;]*?, 0x([0-9a-f]+)", ptx)]
    loads += [int(n or 1) * int(bits) // 8 for n, bits in re.findall(r"ld\.global[.\w:]*?(?:\.v(\d))?\.b(\d+)", ptx)]
    return Finding(
        registers=number(r"REG:(\d+)", usage),
        spills=number(r"STACK:(\d+)", usage) + number(r"LOCAL:(\d+)", usage),
        shared=compiled.metadata.shared,
        matrix=", ".join(f"{n} {name}" for name, n in found.items() if n),
        widest_load=max(loads),
    )


def read_amd(compiled: CompiledKernel) -> Finding:
    """All of it stands in the assembly text and its notes."""
    assembly = compiled.asm["amdgcn"]
    words = {"ubyte": 1, "ushort": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
    loads = re.findall(r"(?:global|buffer)_load_(?:lds_)?(\w+)", assembly)
    n_mfma = assembly.count("v_mfma")
    return Finding(
        registers=number(r"\.vgpr_count:\s+(\d+)", assembly),
        spills=number(r"\.vgpr_spill_count:\s+(\d+)", assembly) + number(r"\.sgpr_spill_count:\s+(\d+)", assembly),
        shared=compiled.metadata.shared,
        matrix=f"{n_mfma} mfma" if n_mfma else "",
        widest_load=max(words[load] for load in loads if load in words),
    )


def number(pattern: str, text: str) -> int:
    """What the compiler's own account says. A pattern that is not there is an error, not a zero."""
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"{pattern!r} is not in the compiler's output: this Triton writes it in another way")
    return int(found.group(1))


def report(models: list[Model], targets: list[str]) -> tuple[list[list[object]], int]:
    """A row for each kernel, model and target, and how many of them are at fault."""
    rows, n_faults = [], 0
    for target in targets:
        for model in models:
            for spec in specs(model, target):
                try:
                    finding = examine(spec, target)
                    faults = finding.faults(spec)
                    values = [finding.registers, finding.spills, finding.shared, finding.matrix, finding.widest_load]
                except Exception as error:  # whatever a compiler raises is the finding
                    sentence = str(error).split("\n")[0]
                    values, faults = [""] * 5, [f"{type(error).__name__}: {sentence}"]
                n_faults += bool(faults)
                rows.append([spec.name, model.name, target, *values, "; ".join(faults) or "ok"])
    return rows, n_faults


HEADERS = ("kernel", "model", "target", "registers", "spills", "shared B", "tensor cores", "widest load B", "verdict")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.aot", description=__doc__.splitlines()[0])
    names = [model.name for model in MODELS]
    parser.add_argument("--target", choices=TARGETS, action="append", help="only this GPU (may be repeated)")
    parser.add_argument("--model", choices=names, action="append", help="only this model's sizes (may be repeated)")
    options = parser.parse_args(arguments)
    models = [model for model in MODELS if model.name in (options.model or names)]
    rows, n_faults = report(models, options.target or list(TARGETS))
    print(tabulate(rows, HEADERS, tablefmt="github"))
    print(f"\nTriton {triton.__version__}, bfloat16 unless float32 is said, blocks of {BLOCK_SIZE}.")
    print(f"{len(rows) - n_faults} of {len(rows)} ok.")
    return 1 if n_faults else 0


if __name__ == "__main__":
    sys.exit(main())
