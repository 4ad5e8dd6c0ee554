"""Inputs that punish a read beside them, outputs that show a write beside them, and answers worked out on their own.

Every input is a view into a larger buffer of NaN: in front of it, behind it, and, with a `gap`, between its rows. One
number too many, and the result is NaN, even where it was multiplied by a weight of 0. Unused rows and blocks of a pool
are NaN too, and table entries that no request may follow name such a block. Every tensor that a wrapper allocates lies
between canaries, and starts as NaN, so that a number that was never written shows.

Triton's interpreter runs one program after the other and fills masked loads with zeros: no test here can show a race
between programs, nor a masked load without `other=` (test_source_rules.py looks for that in the source).
"""

from __future__ import annotations

import importlib.util
import math
import mmap
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

BAND = 8192  # numbers; more than a wrong program of these tests can run past an end
CANARY = 777.0
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3}
DTYPES = tuple(TOLERANCE)


def guarded(x: Tensor, gap: int = 3, fill: float = math.nan) -> Tensor:
    """A copy of x inside a buffer of `fill`. gap: columns between rows, and one row between all larger pieces."""
    padded = [*x.shape]
    if gap:
        padded = [size + (i > 0) for i, size in enumerate(padded)]
        padded[-1] = x.shape[-1] + gap
    size = math.prod(padded)
    buffer = torch.full((size + 2 * BAND,), fill, dtype=x.dtype)
    view = buffer[BAND : BAND + size].view(padded)[tuple(slice(size) for size in x.shape)]
    return view.copy_(x)


def far_apart(x: Tensor) -> Tensor:
    """A copy of a pool in float16 whose heads lie so far apart that 32 bits cannot count the numbers between them.

    Between them, and where an offset of 32 bits would lead, are zeros; the system gives them no memory (Linux).
    """
    stride, start, no_reserve = 2**31 // (x.shape[1] - 1) + 64, 2**31, 0x4000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    buffer = torch.frombuffer(mmap.mmap(-1, 2 * (start + x.shape[1] * stride), flags), dtype=torch.float16)
    return buffer.as_strided(x.shape, (x[0, 0].numel(), stride, x.shape[3], 1), start).copy_(x)


def memory(x: Tensor) -> bytes:
    """All of the buffer that x is a view into."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).numpy().tobytes()


class GuardedTorch:
    """Stands in for `torch` in a kernel's module: what is allocated there lies between canaries."""

    def __init__(self):
        self.allocated: list[Tensor] = []

    def __getattr__(self, name: str):
        return getattr(torch, name)

    def empty(self, *shape, dtype: torch.dtype, device: torch.device) -> Tensor:
        shape = shape if isinstance(shape[0], int) else shape[0]
        size = math.prod(shape)
        buffer = torch.full((size + 2 * BAND,), CANARY, dtype=dtype, device=device)
        self.allocated.append(buffer)
        return buffer[BAND : BAND + size].fill_(math.nan).view(shape)

    def empty_like(self, x: Tensor) -> Tensor:
        return self.empty(x.shape, dtype=x.dtype, device=x.device)


@contextmanager
def guarded_outputs(*modules: ModuleType) -> Iterator[None]:
    """Inside, the modules allocate between canaries. At the end all of these must be alive."""
    guards = GuardedTorch()
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "torch", guards)
        yield
    for buffer in guards.allocated:
        assert (buffer[:BAND] == CANARY).all() and (buffer[-BAND:] == CANARY).all(), "written beside an output"


def run(module: ModuleType, function: Callable, *arguments):
    """The function's result, where it wrote nothing beside its outputs and left its arguments as they were."""
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    before = [memory(x) for x in tensors]
    with guarded_outputs(module):
        result = function(*arguments)
    assert [memory(x) for x in tensors] == before, "an input was changed"
    return result


def assert_equals(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """To the tolerance of the dtype. NaN equals nothing."""
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=TOLERANCE[dtype])


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass
class Requests:
    """Packed requests over a pool, as the attention kernels take them, and the answer."""

    q: Tensor
    keys: Tensor
    values: Tensor
    tables: Tensor
    cu_seqlens: Tensor
    lengths: Tensor
    max_queries: int
    expected: Tensor  # float64, from the tokens' own keys and values: it knows no pool and no table

    @property
    def cache(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.keys, self.values, self.tables


def requests(
    counts: Sequence[int],
    lengths: Sequence[int],
    heads: tuple[int, int] = (3, 1),
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    gap: int = 3,
    seed: int = 0,
    tokens: Sequence[tuple[Tensor, Tensor, Tensor]] | None = None,
) -> Requests:
    """Request r has counts[r] query rows, the last of lengths[r] tokens. heads: query heads and key heads.

    tokens: q [count, n_heads, head_dim] and k, v [length, n_kv_heads, head_dim] of each request, else random ones.
    """
    n_heads, n_kv_heads = heads
    if tokens is None:
        tokens = [
            (
                numbers(count, n_heads, head_dim, dtype=dtype, seed=1000 * seed + 3 * r),
                numbers(length, n_kv_heads, head_dim, dtype=dtype, seed=1000 * seed + 3 * r + 1),
                numbers(length, n_kv_heads, head_dim, dtype=dtype, seed=1000 * seed + 3 * r + 2),
            )
            for r, (count, length) in enumerate(zip(counts, lengths, strict=True))
        ]
    needed = [-(-length // block_size) for length in lengths]
    free = list(range(sum(needed) + 3))
    random.Random(seed).shuffle(free)
    tables = [[free.pop() for _ in range(n)] for n in needed]
    nobodys = free[0]
    pool = torch.full((2, sum(needed) + 3, n_kv_heads, block_size, head_dim), math.nan, dtype=dtype)
    for table, (_, k, v) in zip(tables, tokens, strict=True):
        for position in range(len(k)):
            pool[0, table[position // block_size], :, position % block_size] = k[position]
            pool[1, table[position // block_size], :, position % block_size] = v[position]
    width = max([*needed, 0]) + 1
    table = torch.full((len(counts), width), nobodys, dtype=torch.int32)
    for r, blocks in enumerate(tables):
        table[r, : len(blocks)] = integers(*blocks)
    ends = integers(*[sum(counts[:r]) for r in range(len(counts) + 1)])
    empty = torch.zeros(0, n_heads, head_dim)
    return Requests(
        q=guarded(torch.cat([empty.to(dtype), *(q for q, _, _ in tokens)]), gap),
        keys=guarded(pool[0], gap),
        values=guarded(pool[1], gap),
        tables=guarded(table, gap, nobodys),
        cu_seqlens=guarded(ends, 0, nobodys),
        lengths=guarded(integers(*lengths), 0, nobodys),
        max_queries=max([*counts, 0]),
        expected=torch.cat([empty.double(), *(attend(*each) for each in tokens)]),
    )


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one request: one row of one head after the other, in float64. A row may see nothing."""
    n_queries, n_heads, head_dim = q.shape
    n_keys, n_kv_heads, _ = k.shape
    q, k, v = (x.double().numpy() for x in (q, k, v))
    out = np.zeros(q.shape)
    for row in range(n_queries):
        sees = n_keys - n_queries + row + 1
        for head in range(n_heads):
            group = head // (n_heads // n_kv_heads)
            if sees > 0:
                scores = k[:sees, group] @ q[row, head] / math.sqrt(head_dim)
                weights = np.exp(scores - scores.max())
                out[row, head] = weights @ v[:sees, group] / weights.sum()
    return torch.from_numpy(out)


def steep(n_keys: int, order: str, heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v of one request whose scores are huge, and exact in every float that they pass through.

    Each score is at least 64 away from the next (its exponential is nothing beside it), or equal to it.
    """
    n_heads, n_kv_heads = heads
    steps = torch.arange(n_keys)
    factor = {"rising": 64 * steps, "falling": -64 * steps, "equal": 0 * steps + 160, "equal, below": 0 * steps - 160}
    q = torch.zeros(n_keys, n_heads, head_dim)
    q[..., 0] = 64 * math.sqrt(head_dim) if "equal" in order else math.sqrt(head_dim)
    k = torch.zeros(n_keys, n_kv_heads, head_dim)
    k[..., 0] = factor[order][:, None]
    return q.to(dtype), k.to(dtype), numbers(n_keys, n_kv_heads, head_dim, dtype=dtype)


def changed_copy(module: ModuleType, folder: Path, *changes: tuple[str, str]) -> ModuleType:
    """The module with some of its text replaced, imported anew. Triton reads a kernel's source from its file."""
    source = Path(module.__file__).read_text()
    for old, new in changes:
        assert source.count(old) == 1, f"{old!r} must stand exactly once in {module.__name__}"
        source = source.replace(old, new)
    name = module.__name__.rpartition(".")[2] + "_changed"
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy
