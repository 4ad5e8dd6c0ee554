"""The machine that a number was measured on. Every result carries this description."""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata
from pathlib import Path

import psutil
import torch

BUSY = 0.15  # share of all cores used by others beyond which timings are marked


def describe() -> dict[str, object]:
    """Processor, cores, threads, memory, software, GPU, and how busy the machine is right now."""
    return {
        "cpu": cpu_name(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "busy": round(busy(), 2),
    }


def today() -> str:
    """For the result of a run. Not part of `describe`: a run that goes on the next day is on the same machine."""
    return datetime.date.today().isoformat()


def busy(seconds: float = 0.5) -> float:
    """Share of all cores in use during the next half second, while this process only waits."""
    return psutil.cpu_percent(interval=seconds) / 100


def busy_warning(share: float) -> str | None:
    if share <= BUSY:
        return None
    return (
        f"the machine was busy ({share:.0%} of all cores in use before the start): timings may be wrong by any factor; "
        "close other programs and measure again"
    )


def one_line(machine: dict[str, object]) -> str:
    gpu = f", {machine['gpu']}" if machine["gpu"] else ""
    parts = f"{counted(machine['cores'], 'core')}, {counted(machine['threads'], 'thread')}"
    return (
        f"{machine['cpu']}, {parts}, {machine['memory_gb']} GB{gpu}; "
        f"{machine['os']}, Python {machine['python']}, torch {machine['torch']}"
    )


def counted(n: object, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
