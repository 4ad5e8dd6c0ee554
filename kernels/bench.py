"""How fast are the kernels on this GPU? `python -m kernels.bench [--json FILE]`, a few minutes.

First each kernel is checked against its float64 reference. Then it is timed beside the best that PyTorch offers. Both
are set against what the card was just measured to do: the bytes a second of a large copy, and the FLOPs a second of a
large matrix product. Times are medians of many runs, with the cache flushed between them.

Without a GPU there is nothing to time: it says so, and prints what the published limits of a chosen GPU (--gpu) allow
at best for the same sizes. With TRITON_INTERPRET=1 it runs the checks in the interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from tabulate import tabulate

from kernels.cases import W4A16, Attention, RMSNorm, StoreKV
from kernels.checks import INTERPRETED

Case = RMSNorm | StoreKV | Attention | W4A16
DTYPE = torch.bfloat16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}  # absolute, for results of order one


def equal(requests: int, count: int, length: int, *heads: int, decode: bool = False) -> Attention:
    """`requests` requests of the same size."""
    return Attention((count,) * requests, (length,) * requests, *heads, decode=decode)


# Small and ragged: every kernel against its reference, before anything is timed.
CHECKS = (
    RMSNorm(3, 77),
    RMSNorm(2, 576, residual=True),
    StoreKV(5, 3, 80),
    Attention((1, 33, 7), (1, 50, 39), 9, 3, 64),
    Attention((20, 1), (20, 17), 4, 4, 80),
    Attention((5, 5), (5, 40), 9, 3, 128, decode=True),
    Attention((1, 1, 1), (1, 17, 130), 9, 3, 64, decode=True),
    W4A16(1, 70, 320, 32, bias=True),
    W4A16(5, 70, 192, 64),
    W4A16(17, 130, 128, bias=True),
)

# Large: far beyond any cache of a GPU, or long enough to keep it busy.
TIMED = (
    RMSNorm(65536, 4096),
    RMSNorm(65536, 4096, residual=True),
    RMSNorm(32768, 8192, residual=True),
    StoreKV(65536, 8, 128),
    equal(1, 8192, 8192, 32, 8, 128),
    equal(16, 1024, 1024, 32, 8, 128),
    equal(4, 2048, 2048, 32, 32, 128),
    equal(8, 2048, 2048, 9, 3, 64),
    equal(8, 256, 4096, 32, 8, 128),
    equal(1, 1, 131072, 32, 8, 128, decode=True),
    equal(64, 1, 8192, 32, 8, 128, decode=True),
    equal(64, 1, 4096, 32, 32, 128, decode=True),
    equal(64, 5, 8192, 64, 8, 128, decode=True),
    equal(256, 1, 2048, 9, 3, 64, decode=True),
    W4A16(1, 4096, 14336),
    W4A16(1, 14336, 4096, 32),
    W4A16(1, 28672, 8192),
    W4A16(4, 4096, 14336),
    W4A16(16, 4096, 14336),
    W4A16(64, 4096, 14336),
    W4A16(512, 4096, 14336),
    W4A16(4096, 4096, 14336),
)


@dataclass(frozen=True)
class Limits:
    """What a GPU can do in a second. bytes_per_s: read and written together. flops: of dense 16-bit products."""

    name: str
    bytes_per_s: float
    flops: float

    def seconds(self, case: Case) -> float:
        """The roofline: the longer of moving the bytes and doing the arithmetic."""
        return max(case.bytes(DTYPE.itemsize) / self.bytes_per_s, case.flops() / self.flops)


# Published: NVIDIA's data sheets of A100 80GB SXM, H100 SXM and H200 SXM, AMD's of MI300X (no sparsity).
PUBLISHED = {
    "A100": Limits("A100", 2039e9, 312e12),
    "H100": Limits("H100", 3350e9, 989e12),
    "H200": Limits("H200", 4800e9, 989e12),
    "MI300X": Limits("MI300X", 5300e9, 1307e12),
}


@dataclass(frozen=True)
class Result:
    """Seconds; shares of the measured limits. best: PyTorch's quickest, None where it offers nothing."""

    kernel: str
    sizes: str
    seconds: float
    spread: tuple[float, float]
    best: str | None
    best_seconds: float | None
    bandwidth_share: float
    matmul_share: float


def check(device: str, dtypes: Sequence[torch.dtype]) -> list[list[object]]:
    """A row for each check: the largest difference from the float64 reference. Raises where it is too large."""
    rows = []
    for case in CHECKS:
        for dtype in dtypes:
            built = case.build(device, dtype)
            error = (built.ours().double() - built.reference().double()).abs().max().item()
            rows.append([case.kernel, str(case), str(dtype).removeprefix("torch."), f"{error:.1e}"])
            if not error <= TOLERANCE[dtype]:
                raise RuntimeError(f"{case.kernel}, {case}, {dtype}: off by {error:.1e}, more than {TOLERANCE[dtype]}")
    return rows


def measure(run: Callable[[], object]) -> tuple[float, float, float]:
    """Seconds: the median, and the bounds of the middle 60 %."""
    return tuple(t / 1e3 for t in triton.testing.do_bench(run, warmup=50, rep=300, quantiles=(0.5, 0.2, 0.8)))


def measured_limits() -> Limits:
    """What this card does: a copy of 2 GiB (read and written), a product of two 8192 x 8192 matrices."""
    source = torch.ones(2**30, dtype=DTYPE, device="cuda")
    target = torch.empty_like(source)
    copying = measure(lambda: target.copy_(source))[0]
    n = 8192
    a = torch.randn(n, n, device="cuda").to(DTYPE)
    return Limits(torch.cuda.get_device_name(), 2 * source.nbytes / copying, 2 * n**3 / measure(lambda: a @ a)[0])


def time_case(case: Case, limits: Limits, device: str = "cuda") -> Result:
    built = case.build(device, DTYPE)
    median, low, high = measure(built.ours)
    best, best_seconds = None, None
    for name, run in built.peers.items():
        try:
            seconds = measure(run)[0]
        except RuntimeError:  # a backend that does not take these sizes
            continue
        if best_seconds is None or seconds < best_seconds:
            best, best_seconds = name, seconds
    return Result(
        case.kernel, str(case), median, (low, high), best, best_seconds,
        case.bytes(DTYPE.itemsize) / median / limits.bytes_per_s, case.flops() / median / limits.flops,
    )  # fmt: skip


def table(results: Sequence[Result]) -> str:
    rows = [
        [r.kernel, r.sizes, f"{1e6 * r.seconds:.0f} ({1e6 * r.spread[0]:.0f} to {1e6 * r.spread[1]:.0f})"]
        + [f"{r.bandwidth_share:.0%}", f"{r.matmul_share:.0%}"]
        + ([r.best, f"{1e6 * r.best_seconds:.0f}", f"{r.best_seconds / r.seconds:.2f}"] if r.best else ["", "", ""])
        for r in results
    ]
    headers = ("kernel", "sizes", "us", "of copy", "of matmul", "best of PyTorch", "its us", "times as fast")
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def predictions(limits: Limits) -> list[list[object]]:
    rows = []
    for case in TIMED:
        moving, computing = case.bytes(DTYPE.itemsize) / limits.bytes_per_s, case.flops() / limits.flops
        bound = "bytes" if moving >= computing else "arithmetic"
        rows.append([case.kernel, str(case), f"{1e6 * limits.seconds(case):.0f}", bound])
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--gpu", choices=PUBLISHED, default="H100", help="without a GPU: predict for this one")
    options = parser.parse_args(arguments)
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"the folder of --json {options.json} does not exist")
    if options.json and options.json.is_dir():
        parser.error(f"--json {options.json} is a folder, not a file")
    on_gpu = torch.cuda.is_available() and not INTERPRETED
    if on_gpu or INTERPRETED:
        dtypes = [torch.float32, torch.float16, *([DTYPE] if on_gpu else [])]
        rows = check("cuda" if on_gpu else "cpu", dtypes)
        print(tabulate(rows, ("kernel", "sizes", "dtype", "off by"), tablefmt="github", disable_numparse=True), "\n")
    if on_gpu:
        limits = measured_limits()
        results = [time_case(case, limits) for case in TIMED]
        print(table(results))
        print(f"\n{limits.name}, measured: copy {limits.bytes_per_s / 1e9:.0f} GB/s, matmul {limits.flops / 1e12:.0f} "
              f"TFLOP/s. {DTYPE}, torch {torch.__version__}, Triton {triton.__version__}.")  # fmt: skip
        found = {"gpu": asdict(limits), "results": [asdict(result) for result in results]}
    else:
        print("Nothing was timed: " + ("kernels are interpreted." if INTERPRETED else "there is no GPU here."))
        limits = PUBLISHED[options.gpu]
        print(f"At best, by the published limits of {limits.name}:\n")
        print(tabulate(predictions(limits), ("kernel", "sizes", "us at best", "bound by"), tablefmt="github"))
        found = {"gpu": None, "predicted_for": asdict(limits), "predictions": predictions(limits)}
    if options.json:
        found |= {"torch": torch.__version__, "triton": triton.__version__, "interpreted": INTERPRETED}
        options.json.write_text(json.dumps(found, indent=1) + os.linesep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
