"""`triton` and `tl` for notebooks, also on systems that Triton does not serve (macOS, Windows).

There, a cell that defines a kernel still runs, and one that launches it says SKIP inside `attempt`.
"""

from __future__ import annotations

from types import SimpleNamespace

from minillm.lab.check import Skip


class StandIn:
    """A kernel that cannot run."""

    def __init__(self, fn):
        self.fn, self.__name__ = fn, fn.__name__

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **kwargs):
        raise Skip("it needs Triton, which this system does not have")


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = SimpleNamespace(
        jit=StandIn, cdiv=lambda n, m: -(-n // m), next_power_of_2=lambda n: 1 << (n - 1).bit_length()
    )
    tl = SimpleNamespace(constexpr=int)
