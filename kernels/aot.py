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
from dataclasses import dataclass, replace
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"  # before triton is imported: an interpreted kernel cannot be compiled

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # a * b + c in one instruction, as on every GPU so far

import triton
from tabulate import tabulate
from triton.compiler import CompiledKernel

from kernels.specs import BLOCK_SIZE, MODELS, PACKED, TARGETS, Model, Spec, specs


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
