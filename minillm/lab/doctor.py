"""What this machine has, what can run on it and what cannot, and how to mend it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import psutil
import torch
from platformdirs import user_cache_path

from minillm.fetch import ENVIRONMENT_VARIABLE, FILE_NAME, default_model
from minillm.lab.machine import busy_warning, describe, one_line, version

PACKAGES = (
    "minillm", "torch", "triton", "numpy", "einops", "tokenizers", "safetensors", "gguf", "jinja2", "jupyterlab",
    "ipywidgets", "matplotlib", "pytest", "nbval", "hypothesis", "transformers", "llama-cpp-python",
)  # fmt: skip
NEEDED_BYTES = 3e9  # weights in float32, their file, PyTorch, and room for a notebook


@dataclass(frozen=True)
class Finding:
    """`state` is "ok", "SKIP" (works without) or "FAIL"."""

    state: str
    what: str
    mend: str = ""


def examine(busy: float) -> list[Finding]:
    return [python(), memory(), idle(busy), model_file(), triton(), gpu(), tests(), jupyter()]


def report() -> tuple[str, bool]:
    """The text to print, and whether nothing failed."""
    machine = describe()
    findings = examine(float(machine["busy"]))
    lines = [one_line(machine), ""]
    lines += [f"{name:18} {version(name) or 'not installed'}" for name in PACKAGES]
    lines.append("")
    for finding in findings:
        lines.append(f"[{finding.state:4}] {finding.what}")
        if finding.mend:
            lines.append(f"       {finding.mend}")
    return "\n".join(lines), all(finding.state != "FAIL" for finding in findings)


def python() -> Finding:
    in_venv = sys.prefix != sys.base_prefix
    where = "in a virtual environment" if in_venv else "not in a virtual environment"
    return Finding("ok", f"Python {sys.version.split()[0]}, {where}")


def memory() -> Finding:
    free = psutil.virtual_memory().available
    if free >= NEEDED_BYTES:
        return Finding("ok", f"{free / 1e9:.1f} GB of memory available")
    return Finding("FAIL", f"only {free / 1e9:.1f} GB of memory available", "close other programs; 3 GB are enough")


def idle(busy: float) -> Finding:
    warning = busy_warning(busy)
    return Finding("SKIP", warning) if warning else Finding("ok", "the machine is idle: timings can be trusted")


def model_file() -> Finding:
    if os.environ.get(ENVIRONMENT_VARIABLE):
        try:
            return Finding("ok", f"the default model is at {default_model()} ({ENVIRONMENT_VARIABLE})")
        except OSError as error:
            return Finding("FAIL", str(error), f"correct or unset {ENVIRONMENT_VARIABLE}")
    cached = user_cache_path("minillm") / FILE_NAME
    if cached.is_file():
        return Finding("ok", f"the default model is at {cached}")
    return Finding(
        "SKIP", "the default model is not here yet", "it is fetched when first used, or now by: minillm fetch"
    )


def triton() -> Finding:
    if sys.platform != "linux":
        return Finding("SKIP", "Triton runs on Linux only; everything but the kernels works here")
    if version("triton") is None:
        return Finding("SKIP", "Triton is not installed; everything but the kernels works", "pip install triton")
    if torch.cuda.is_available():
        return Finding("ok", f"Triton {version('triton')} compiles kernels for this GPU")
    return Finding("ok", f"Triton {version('triton')}: without a GPU its kernels run in the interpreter, slowly")


def gpu() -> Finding:
    if torch.cuda.is_available():
        return Finding("ok", f"GPU: {torch.cuda.get_device_name()}")
    return Finding("SKIP", "no GPU: everything runs on the CPU, and GPU timings are skipped")


def tests() -> Finding:
    missing = [name for name in ("pytest", "nbval", "hypothesis", "transformers") if version(name) is None]
    if missing:
        return Finding("SKIP", f"the tests need {', '.join(missing)}", 'pip install -e ".[test]"')
    return Finding("ok", "the tests can run: pytest")


def jupyter() -> Finding:
    missing = [name for name in ("jupyterlab", "ipywidgets", "matplotlib") if version(name) is None]
    if missing:
        return Finding("FAIL", f"the notebooks need {', '.join(missing)}", "pip install -e .")
    return Finding("ok", "the notebooks can run: jupyter lab")
