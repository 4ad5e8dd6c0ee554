"""Memory for a kernel under test: between the rows and around the whole lies what nobody may touch.

Triton's interpreter follows every address that it is given, as a GPU does. So the checks look at the addresses first: a
load or store of something that is not the kernel's own stops it, with words. It also shows what the interpreter's
results cannot: a masked load without `other=`, whose hidden numbers a GPU leaves undefined.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from minillm.lab.check import unwrapped

BAND = 64  # numbers before and after


class Guarded:
    """A tensor of this shape whose rows lie apart. All that is not its own holds NaN (floats) or -1 (whole numbers)."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, gap: int = 3):
        self.name, self.shape = name, shape
        self.strides = [1]
        for size in reversed(shape[1:]):
            self.strides.insert(0, size * self.strides[0] + gap)
        size = shape[0] * self.strides[0]
        self.memory = torch.full((size + 2 * BAND,), torch.nan if dtype.is_floating_point else -1, dtype=dtype)
        self.data = self.memory.as_strided(shape, self.strides, BAND)
        self.usable = torch.zeros(len(self.memory), dtype=torch.bool)
        self.usable.as_strided(shape, self.strides, BAND).fill_(True)
        self.explain: Callable[[list[int]], str] = lambda place: (
            f"and its shape is {list(shape)}: is a lane not masked, or an offset wrong?"
        )

    def filled(self, values: Tensor) -> Guarded:
        self.data.copy_(values)
        return self

    def restrict(self, usable: Tensor) -> None:
        """Only these of its numbers may be touched."""
        self.usable.as_strided(self.shape, self.strides, BAND).copy_(usable)

    def place(self, number: int) -> list[int]:
        """[i, j, ...] of a number of the memory; beyond the shape if it lies in a gap."""
        found = []
        for stride in self.strides:
            index, number = divmod(number, stride)
            found.append(index)
        return found

    def holds(self, addresses: np.ndarray) -> np.ndarray:
        start = self.memory.data_ptr()
        return (addresses >= start) & (addresses < start + self.memory.nbytes)

    def examine(self, addresses: np.ndarray, verb: str, program: tuple[int, ...]) -> None:
        numbers = (addresses - self.memory.data_ptr()) // self.memory.element_size()
        strange = numbers[~self.usable.numpy()[numbers]]
        if len(strange):
            place = self.place(int(strange[0]) - BAND)
            more = f" (and {len(strange) - 1} more)" if len(strange) > 1 else ""
            raise AssertionError(f"program {program[0]} {verb} {self.name}{place}{more}, {self.explain(place)}")


@contextlib.contextmanager
def watched(inputs: list[Guarded], outputs: list[Guarded]) -> Iterator[None]:
    """Look at the address of each load and store of the interpreter."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def look(self, addresses: np.ndarray, buffers: list[Guarded], verb: str) -> None:
        addresses, program = addresses.astype(np.int64), tuple(self.grid_idx)
        rest = np.ones(len(addresses), dtype=bool)
        for buffer in buffers:
            own = buffer.holds(addresses)
            buffer.examine(addresses[own], verb, program)
            rest &= ~own
        names = " and ".join(buffer.name for buffer in buffers)
        assert not rest.any(), f"program {program[0]} {verb} an address far from {names}: is an offset or stride wrong?"

    def watched_load(self, ptrs, mask, other, *options):
        hidden = not mask.data.all()
        look(self, ptrs.data[mask.data], inputs + outputs, "reads")
        assert not hidden or other is not None, (
            "a masked load without other=: the interpreter fills in zeros, on a GPU the hidden numbers are undefined"
        )
        return load(self, ptrs, mask, other, *options)

    def watched_store(self, ptrs, value, mask, *options):
        addresses = ptrs.data[mask.data]
        for buffer in inputs:
            own = buffer.holds(addresses)
            assert not own.any(), f"program {self.grid_idx[0]} writes into {buffer.name}, which is only to be read"
        look(self, addresses, outputs, "writes")
        return store(self, ptrs, value, mask, *options)

    builder.create_masked_load, builder.create_masked_store = watched_load, watched_store
    try:
        yield
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store


def launch(kernel: object, programs: int, inputs: list[Guarded], outputs: list[Guarded], *args, **constants) -> None:
    """Run a kernel on buffers (inputs first, then outputs, then the other arguments)."""
    from triton.runtime.errors import InterpreterError
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    assert not isinstance(kernel, JITFunction), (
        "this kernel would be compiled for a GPU: restart, and run the first cell (TRITON_INTERPRET=1) first"
    )
    assert isinstance(kernel, InterpretedFunction), "this is no kernel: is @triton.jit above it missing?"
    buffers = [buffer.data for buffer in inputs + outputs]
    try:
        with watched(inputs, outputs), np.errstate(all="ignore"):
            kernel[(programs,)](*buffers, *args, **constants)
    except InterpreterError as error:
        if isinstance(unwrapped(error)[-1], AssertionError):
            raise unwrapped(error)[-1] from None
        raise
    for buffer in outputs:
        written = buffer.data.isnan().nonzero().tolist()
        everything = len(written) == buffer.data.numel()
        missing = "at all" if everything else f"to {buffer.name}{written[0]}" if written else ""
        assert not missing, f"nothing was written {missing}, or NaN"
