"""What the checks of kernels do with a kernel that touches what is not its own: it stops, and the words say where.

The interpreter itself follows every address; without the look beforehand the far one would end the whole process.
"""

from __future__ import annotations

import pytest
import torch

from minillm.lab.checks.ch04.guarded import Guarded, launch
from minillm.lab.maybe_triton import tl, triton

pytest.importorskip("triton")


@triton.jit
def reads_at(x_ptr, y_ptr, offset):
    tl.store(y_ptr, tl.load(x_ptr + offset))


@triton.jit
def writes_at(x_ptr, y_ptr, offset):
    tl.store(y_ptr + offset, tl.load(x_ptr))


def run(kernel, offset: int) -> Guarded:
    x = Guarded("x", (2, 4), gap=3).filled(torch.arange(8.0).view(2, 4))
    y = Guarded("y", (1,))
    launch(kernel, 1, [x], [y], offset)
    return y


def test_a_number_of_its_own_is_read_and_written():
    assert [run(reads_at, offset).data.item() for offset in (0, 3, 7)] == [0, 3, 4]  # a row begins 7 after the other


STRAY = [
    (reads_at, 4, r"program 0 reads x\[0, 4\], and its shape is \[2, 4\]"),
    (reads_at, -1, r"program 0 reads x\[-1, 6\], "),
    (reads_at, 14, r"program 0 reads x\[2, 0\], "),
    (reads_at, 10**9, "program 0 reads an address far from x and y"),
    (writes_at, 1, r"program 0 writes y\[1\], "),
    (writes_at, -(10**9), "program 0 writes an address far from y"),
]


@pytest.mark.parametrize(("kernel", "offset", "says"), STRAY, ids=range(len(STRAY)))
def test_what_is_not_its_own_is_named(kernel, offset, says):
    with pytest.raises(AssertionError, match=says):
        run(kernel, offset)


def test_inputs_may_not_be_written_and_outputs_must_be():
    @triton.jit
    def into_the_input(x_ptr, y_ptr, offset):
        tl.store(x_ptr, 1.0)

    @triton.jit
    def does_nothing(x_ptr, y_ptr, offset):
        tl.program_id(0)

    with pytest.raises(AssertionError, match="program 0 writes into x, which is only to be read"):
        run(into_the_input, 0)
    with pytest.raises(AssertionError, match="nothing was written at all"):
        run(does_nothing, 0)


def test_the_interpreter_is_as_before_after_a_failure():
    from triton.runtime.interpreter import InterpreterBuilder

    before = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    with pytest.raises(AssertionError):
        run(reads_at, 4)
    assert (InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store) == before


def test_a_kernel_that_would_be_compiled_gets_a_sentence(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # the next line sets it, also when it is undone: this takes it away
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    compiled = triton.jit(reads_at.fn)
    with pytest.raises(AssertionError, match=r"restart, and run the first cell \(TRITON_INTERPRET=1\) first"):
        run(compiled, 0)
    with pytest.raises(AssertionError, match=r"is @triton\.jit above it missing"):
        run(reads_at.fn, 0)
