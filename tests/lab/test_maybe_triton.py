"""Cells with kernels on a system without Triton: they run, a launch says SKIP, and the checks say why."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from minillm.lab import check as check_module
from minillm.lab import maybe_triton
from minillm.lab.check import attempt, find, run
from minillm.lab.checks import ch04


@pytest.fixture
def without(monkeypatch) -> ModuleType:
    """The module as it is where `import triton` fails."""
    monkeypatch.setitem(sys.modules, "triton", None)
    spec = importlib.util.spec_from_file_location("maybe_triton_without", maybe_triton.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_with_triton_it_is_triton():
    triton = pytest.importorskip("triton")
    assert maybe_triton.triton is triton and maybe_triton.tl is triton.language


def test_without_triton_a_kernel_can_be_defined_and_a_launch_is_skipped(without, capsys):
    tl = without.tl

    @without.triton.jit
    def kernel(x_ptr, BLOCK: tl.constexpr):
        raise AssertionError("it ran")

    assert kernel.__name__ == "kernel" and callable(kernel)
    with attempt("the kernel"):
        kernel[(3,)](1, BLOCK=2)
    assert capsys.readouterr().out == "[SKIP] the kernel: it needs Triton, which this system does not have\n"
    with attempt("the kernel, called"):
        kernel(1)
    assert capsys.readouterr().out.startswith("[SKIP] the kernel, called: it needs Triton")
    assert [without.triton.cdiv(n, 4) for n in (1, 4, 5)] == [1, 1, 2]
    assert [without.triton.next_power_of_2(n) for n in (1, 2, 3, 576)] == [1, 2, 4, 1024]


def test_without_triton_the_two_kernel_tasks_are_skipped_and_the_others_checked(without, monkeypatch):
    monkeypatch.setattr(check_module, "find_spec", lambda name: None)
    states = {name: run(find(name)[1], lambda *args: None).state for name in ch04.CHAPTER.tasks}
    assert [name for name, state in states.items() if state == "SKIP"] == ["norm_kernel", "gather_kernel"]
    assert set(states.values()) == {"SKIP", "FAIL"}
