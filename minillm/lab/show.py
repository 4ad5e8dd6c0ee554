"""What all notebooks share: the start, the notation, the package's own code, a guess beside a measurement."""

from __future__ import annotations

import inspect
import os
import textwrap
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from IPython.display import Code, Markdown
from tabulate import tabulate

from minillm.lab.machine import describe, one_line
from minillm.lab.plots import show_pictures_as_they_are

NOTATION = """
| symbol | name in the code | meaning | SmolLM2-135M |
|---|---|---|---|
| T | `len(tokens)` | tokens that go through the model in this step | |
| S | `length` | tokens that a query may see: the past and the new ones | |
| V | `vocab_size` | different tokens | 49,152 |
| d | `d_model` | numbers that describe a token between layers | 576 |
| L | `n_layers` | layers | 30 |
| H | `n_heads` | query heads | 9 |
| G | `n_kv_heads` | key and value heads; H / G query heads share one | 3 |
| D | `head_dim` | numbers in a head | 64 |
| F | `d_ff` | units of the MLP | 1,536 |

`q` is `[T, H, D]`, `k` and `v` are `[T, G, D]`, `hidden` is `[T, d]`, `logits` is `[rows, V]`. There is no batch axis.
"""


def begin(seed: int = 0) -> tuple[bool, str]:
    """Seed PyTorch, print the machine. -> (whether sizes are to be small: MINILLM_FAST=1, the device to use)"""
    torch.manual_seed(seed)
    show_pictures_as_they_are()
    fast = os.environ.get("MINILLM_FAST", "0") not in ("", "0")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{one_line(describe())}\ndevice {device}, seed {seed}, {'fast mode: small sizes' if fast else 'full sizes'}")
    return fast, device


def needs_triton() -> bool:
    """Whether Triton is installed. If not, say so: the cell is skipped, and its stored output is there to read."""
    if find_spec("triton"):
        return True
    print("SKIP: this cell needs Triton, which is not on this system. The output stored in the notebook can be read.")
    return False


def notation() -> Markdown:
    """The symbols and shapes that all notebooks use."""
    return Markdown(NOTATION)


def source(thing: Callable | type, *methods: str) -> Code:
    """The code of a function, a class, or some methods of a class, as it stands in the package."""
    parts = [getattr(thing, name) for name in methods] if methods else [thing]
    text = "\n".join(textwrap.dedent(inspect.getsource(getattr(part, "fget", part))) for part in parts)
    file = Path(inspect.getsourcefile(inspect.unwrap(thing))).name  # not that of a decorator
    return Code(f"# {file}\n{text}", language="python")


def predicted_and_measured(unit: str, rows: Sequence[tuple[str, float | None, float, float]]) -> None:
    """Print (what, your guess or None, what the formula gives, what was measured) side by side, in one unit."""
    body = [
        [
            what,
            "no guess" if guess is None else f"{guess:.3g}",
            f"{formula:.3g}",
            f"{measured:.3g}",
            f"{measured / formula:.3g}",
        ]
        for what, guess, formula, measured in rows
    ]
    head = [f"in {unit}", "your guess", "formula", "measured", "measured / formula"]
    print(tabulate(body, headers=head, disable_numparse=True))


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a plain table; numbers are to be formatted by the caller."""
    print(tabulate(rows, headers=head, disable_numparse=True))
