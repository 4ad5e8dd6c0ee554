"""What an interpreted Triton kernel touches: the addresses of every load and store, program by program.

The interpreter makes each load and store of a program through one object. `Watch` listens there. So the bytes of a
kernel can be counted, not only computed; and two programs of a launch of which one writes where the other reads or
writes can be found, though the interpreter runs them one after the other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

Program = tuple[int, int, int]


@dataclass(frozen=True)
class Touch:
    """One load or store of one program. addresses: of the lanes that are not masked."""

    launch: int
    program: Program
    kind: str  # "load" or "store"
    addresses: np.ndarray
    itemsize: int


class Watch:
    """`with Watch() as watch:` and then launch kernels on CPU tensors."""

    def __init__(self):
        self.touches: list[Touch] = []
        self.launches = 0

    def __enter__(self) -> Watch:
        builder = interpreter_builder
        load, store, begin = builder.create_masked_load, builder.create_masked_store, builder.set_grid_dim

        def note(kind: str, pointers, mask) -> None:
            size = pointers.get_element_ty().primitive_bitwidth // 8
            addresses = pointers.data[mask.data.astype(bool)].ravel().astype(np.int64)
            self.touches.append(Touch(self.launches, tuple(builder.grid_idx), kind, addresses, size))

        def watched_load(pointers, mask, *rest):
            note("load", pointers, mask)
            return load(pointers, mask, *rest)

        def watched_store(pointers, value, mask, *rest):
            note("store", pointers, mask)
            return store(pointers, value, mask, *rest)

        def watched_begin(*grid):
            self.launches += 1
            return begin(*grid)

        builder.create_masked_load, builder.create_masked_store = watched_load, watched_store
        builder.set_grid_dim = watched_begin
        return self

    def __exit__(self, *_) -> None:
        for name in ("create_masked_load", "create_masked_store", "set_grid_dim"):
            delattr(interpreter_builder, name)  # the class's own is seen again

    def asked(self, kind: str) -> int:
        """Bytes that all loads, or all stores, ask for together."""
        return sum(touch.itemsize * len(touch.addresses) for touch in self.touches if touch.kind == kind)

    def distinct(self, kind: str) -> int:
        """Bytes at different addresses: what must come from memory if a cache keeps all that was touched before."""
        return sum({int(a): t.itemsize for t in self.touches if t.kind == kind for a in t.addresses}.values())

    def working(self) -> dict[Program, int]:
        """The programs that store something, with the number of their stores."""
        return dict(Counter(touch.program for touch in self.touches if touch.kind == "store"))

    def offsets(self, tensor: Tensor, program: Program, kind: str = "load") -> list[int]:
        """Where in a tensor's memory a program loads (or stores), in elements, in order, without repetition."""
        low, high = tensor.data_ptr(), tensor.data_ptr() + tensor.untyped_storage().nbytes()
        mine = [t.addresses for t in self.touches if t.program == program and t.kind == kind]
        found = {(int(a) - low) // tensor.itemsize for addresses in mine for a in addresses if low <= a < high}
        return sorted(found)

    def conflicts(self) -> int:
        """Addresses that one program stores to while another one of the same launch loads or stores there."""
        users, written = defaultdict(set), set()
        for touch in self.touches:
            for address in touch.addresses.tolist():
                users[touch.launch, address].add(touch.program)
                if touch.kind == "store":
                    written.add((touch.launch, address))
        return sum(len(users[place]) > 1 for place in written)
