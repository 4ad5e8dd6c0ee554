"""What a kernel would read as addresses is checked before: each wrong argument gets a sentence that names it."""

from __future__ import annotations

import re
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

import torch
from guards import integers, numbers

from kernels import checks
from kernels.flash_attention import flash_attention
from kernels.paged_attention import paged_attention
from kernels.rmsnorm import MAX_COLUMNS, rmsnorm
from kernels.store_kv import store_kv


def wide(*shape: int) -> torch.Tensor:
    """The last dimension in steps of two."""
    return numbers(*shape[:-1], 2 * shape[-1])[..., ::2]


def pool(n_kv_heads: int = 2, head_dim: int = 16, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: numbers(3, n_kv_heads, 4, head_dim, dtype=dtype) for name in ("keys", "values")}


TABLES = {"block_tables": torch.zeros(2, 3, dtype=torch.int32), "lengths": integers(4, 9)}
VALID = {
    rmsnorm: {"x": numbers(3, 20), "weight": numbers(20), "eps": 1e-5, "residual": numbers(3, 20)},
    flash_attention: {"q": numbers(5, 4, 16), **pool(), **TABLES, "cu_seqlens": integers(0, 2, 5), "max_queries": 3},
    paged_attention: {"q": numbers(2, 1, 4, 16), **pool(), **TABLES, "max_length": 9},
    store_kv: {"k": numbers(5, 2, 16), "v": numbers(5, 2, 16), **pool(), "slots": integers(0, 1, 2, 3, 4)},
}

ANY_POOL = "[any, any, any, 16]"
NO_ROOM = {name: torch.zeros(3, 2, 0, 16) for name in ("keys", "values")}
WRONG = [
    (flash_attention, NO_ROOM, "a block of the pool must have room for at least one token"),
    (store_kv, NO_ROOM, "a block of the pool must have room for at least one token"),
    # rmsnorm
    (rmsnorm, {"x": numbers(20)}, "x must have the shape [any, any], not [20]"),
    (rmsnorm, {"x": numbers(2, 3, 20)}, "x must have the shape [any, any], not [2, 3, 20]"),
    (rmsnorm, {"x": wide(3, 20)}, "x must have its last dimension in one piece, not with stride 2"),
    (rmsnorm, {"x": numbers(3, 20).int()}, "x must be float32, float16 or bfloat16, not torch.int32"),
    (rmsnorm, {"x": numbers(3, 20).double()}, "x must be float32, float16 or bfloat16, not torch.float64"),
    (rmsnorm, {"x": [[1.0]]}, "x must be a tensor, not list"),
    (rmsnorm, {"x": numbers(3, 20).bfloat16()}, "x is bfloat16, which Triton's interpreter computes wrongly"),
    (rmsnorm, {"x": numbers(3, 20).to("meta")}, "x is on meta: a Triton kernel needs a GPU"),
    (rmsnorm, {"weight": numbers(19)}, "weight must have the shape [20], not [19]"),
    (rmsnorm, {"weight": numbers(3, 20)}, "weight must have the shape [20], not [3, 20]"),
    (rmsnorm, {"weight": wide(20)}, "weight must have its last dimension in one piece"),
    (rmsnorm, {"weight": numbers(20).half()}, "weight is torch.float16 on cpu, and must be torch.float32 on cpu"),
    (rmsnorm, {"weight": [1.0] * 20}, "weight must be a tensor, not list"),
    (rmsnorm, {"weight": numbers(20).to("meta")}, "weight is torch.float32 on meta, and must be torch.float32 on cpu"),
    (rmsnorm, {"residual": numbers(2, 20)}, "residual must have the shape [3, 20], not [2, 20]"),
    (rmsnorm, {"residual": numbers(3, 20).half()}, "residual is torch.float16 on cpu"),
    (rmsnorm, {"residual": wide(3, 20)}, "residual must have its last dimension in one piece"),
    (
        rmsnorm,
        {"x": numbers(1, MAX_COLUMNS + 1), "weight": numbers(MAX_COLUMNS + 1)},
        "a row may have at most 32768 columns, not 32769",
    ),
    # flash_attention
    (flash_attention, {"q": numbers(5, 64)}, "q must have the shape [any, any, any], not [5, 64]"),
    (flash_attention, {"q": wide(5, 4, 16)}, "q must have its last dimension in one piece, not with stride 2"),
    (flash_attention, {"q": 5}, "q must be a tensor, not int"),
    (flash_attention, {"cu_seqlens": integers(0, 5)}, "cu_seqlens must have the shape [3], not [2]"),
    (flash_attention, {"cu_seqlens": integers(0, 2, 5).long()}, "cu_seqlens must be int32 on cpu, not torch.int64"),
    (flash_attention, {"cu_seqlens": integers(0, 2, 5).to("meta")}, "cu_seqlens must be int32 on cpu, not torch.int32"),
    # paged_attention
    (paged_attention, {"q": numbers(2, 4, 16)}, "q must have the shape [2, any, any, any], not [2, 4, 16]"),
    (paged_attention, {"q": numbers(3, 1, 4, 16)}, "q must have the shape [2, any, any, any], not [3, 1, 4, 16]"),
    (paged_attention, {"q": wide(2, 1, 4, 16)}, "q must have its last dimension in one piece, not with stride 2"),
    (
        paged_attention,
        {"q": numbers(2, 33, 4, 16)},
        "33 query rows of 2 heads a group are more than 64: use flash_attention",
    ),
    # store_kv
    (store_kv, {"k": numbers(5, 16)}, "k must have the shape [any, any, any], not [5, 16]"),
    (store_kv, {"k": numbers(5, 2, 16).double()}, "k must be float32, float16 or bfloat16, not torch.float64"),
    (store_kv, {"k": numbers(5, 2, 16).bfloat16()}, "k is bfloat16, which Triton's interpreter computes wrongly"),
    (store_kv, {"k": wide(5, 2, 16)}, "k must have its last dimension in one piece"),
    (store_kv, {"k": None}, "k must be a tensor, not NoneType"),
    (store_kv, {"v": numbers(4, 2, 16)}, "v must have the shape [5, 2, 16], not [4, 2, 16]"),
    (store_kv, {"v": wide(5, 2, 16)}, "v must have its last dimension in one piece"),
    (store_kv, {"v": numbers(5, 2, 16).half()}, "v is torch.float16 on cpu, and must be torch.float32 on cpu"),
    (store_kv, pool(n_kv_heads=3), "keys must have the shape [any, 2, any, 16], not [3, 3, 4, 16]"),
    (store_kv, pool(head_dim=20), "keys must have the shape [any, 2, any, 16], not [3, 2, 4, 20]"),
    (store_kv, {"slots": integers(0, 1)}, "slots must have the shape [5], not [2]"),
    (store_kv, {"slots": integers(0, 1, 2, 3, 4).long()}, "slots must be int32 on cpu, not torch.int64 on cpu"),
    (store_kv, {"slots": [0, 1, 2, 3, 4]}, "slots must be a tensor, not list"),
]
for attend in (flash_attention, paged_attention):  # what both ask of the cache
    q = VALID[attend]["q"]
    WRONG += [
        (attend, {"q": q.double()}, "q must be float32, float16 or bfloat16, not torch.float64"),
        (attend, {"q": q.bfloat16()}, "q is bfloat16, which Triton's interpreter computes wrongly; use float32"),
        (attend, {"q": numbers(*q.shape[:-1], 129), **pool(head_dim=129)}, "head_dim may be at most 128, not 129"),
        (attend, pool(head_dim=20), f"keys must have the shape {ANY_POOL}, not [3, 2, 4, 20]"),
        (attend, {"keys": numbers(3, 2, 16)}, f"keys must have the shape {ANY_POOL}, not [3, 2, 16]"),
        (attend, {"keys": wide(3, 2, 4, 16)}, "keys must have its last dimension in one piece"),
        (attend, {"keys": numbers(3, 2, 4, 16).half()}, "keys is torch.float16 on cpu, and must be torch.float32"),
        (attend, {"keys": numbers(3, 2, 4, 16).to("meta")}, "keys is torch.float32 on meta, and must be"),
        (attend, {"values": numbers(3, 2, 5, 16)}, "values must have the shape [3, 2, 4, 16], not [3, 2, 5, 16]"),
        (attend, {"values": numbers(3, 2, 4, 16).half()}, "values is torch.float16 on cpu, and must be torch.float32"),
        (
            attend,
            {"values": numbers(3, 4, 2, 16).transpose(1, 2)},
            "keys and values must lie alike, not with the strides (128, 64, 16, 1) and (128, 16, 32, 1)",
        ),
        (attend, pool(n_kv_heads=3), "4 query heads cannot share 3 key heads evenly"),
        (attend, pool(n_kv_heads=8), "4 query heads cannot share 8 key heads evenly"),
        (attend, pool(n_kv_heads=0), "4 query heads cannot share 0 key heads evenly"),
        (attend, {"lengths": integers(4, 9).long()}, "lengths must be int32 on cpu, not torch.int64 on cpu"),
        (attend, {"lengths": integers(4, 9)[:, None]}, "lengths must have the shape [any], not [2, 1]"),
        (attend, {"lengths": torch.tensor(4).int()}, "lengths must have the shape [any], not []"),
        (attend, {"lengths": None}, "lengths must be a tensor, not NoneType"),
        (attend, {"block_tables": torch.zeros(2, 3).long()}, "block_tables must be int32 on cpu, not torch.int64"),
        (attend, {"block_tables": TABLES["block_tables"][:1]}, "block_tables must have the shape [2, any], not [1, 3]"),
        (attend, {"block_tables": TABLES["block_tables"][0]}, "block_tables must have the shape [2, any], not [3]"),
        (attend, {"block_tables": [[0], [1]]}, "block_tables must be a tensor, not list"),
    ]


@pytest.mark.parametrize("function", VALID)
def test_the_valid_arguments_are_accepted(function):
    function(**{name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in VALID[function].items()})


@pytest.mark.parametrize(
    ("function", "wrong", "sentence"),
    WRONG,
    ids=[f"{function.__name__}: {sentence}" for function, _, sentence in WRONG],
)
def test_a_wrong_argument_gets_a_sentence(function, wrong, sentence):
    with pytest.raises(ValueError, match="^" + re.escape(sentence)):
        function(**VALID[function] | wrong)


@pytest.mark.parametrize("function", VALID)
def test_kernels_are_launched_on_the_gpu_of_their_tensors(function, monkeypatch):
    """Triton takes the current one. There is none here, so what is seen is which tensor's GPU is made current."""
    current, launched = [None], []

    @contextmanager
    def device_of(x):
        current.append(x)
        yield
        current.pop()

    class Kernel:
        def __getitem__(self, grid):
            return lambda x, *args, **kwargs: launched.append(current[-1])

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    module = sys.modules[function.__module__]
    for name in [name for name in vars(module) if name.endswith("_kernel")]:
        monkeypatch.setattr(module, name, Kernel())
    function(**VALID[function])
    assert launched and all(x is next(iter(VALID[function].values())) for x in launched)


EMPTY = [
    (rmsnorm, "rmsnorm_kernel", {"x": numbers(0, 20), "residual": None}),
    (rmsnorm, "rmsnorm_kernel", {"x": numbers(3, 0), "weight": numbers(0), "residual": numbers(3, 0)}),
    (flash_attention, "flash_attention_kernel", {"q": numbers(0, 4, 16), "max_queries": 0}),
    (paged_attention, "split_kernel", {"q": numbers(2, 0, 4, 16)}),
    (store_kv, "store_kv_kernel", {"k": numbers(0, 2, 16), "v": numbers(0, 2, 16), "slots": integers()}),
]


@pytest.mark.parametrize(("function", "kernel", "empty"), EMPTY)
def test_nothing_to_do_launches_nothing(function, kernel, empty, monkeypatch):
    """A GPU refuses a grid without programs; the interpreter does not mind."""
    monkeypatch.setattr(sys.modules[function.__module__], kernel, None)
    function(**VALID[function] | empty)


@pytest.mark.parametrize(
    ("function", "name"), [(rmsnorm, "x"), (flash_attention, "q"), (paged_attention, "q"), (store_kv, "k")]
)
def test_without_the_interpreter_a_tensor_on_the_cpu_gets_a_sentence(function, name, monkeypatch):
    monkeypatch.setattr(checks, "INTERPRETED", False)
    with pytest.raises(ValueError, match=f"^{name} is on cpu: a Triton kernel needs a GPU, or TRITON_INTERPRET=1"):
        function(**VALID[function])


def test_without_the_interpreter_bfloat16_is_welcome(monkeypatch):
    monkeypatch.setattr(checks, "INTERPRETED", False)
    with pytest.raises(ValueError, match="needs a GPU"):  # which is all that is wrong
        checks.require_floats("x", numbers(3).bfloat16())


def test_one_dimension_may_be_any_but_their_number_may_not():
    checks.require_tensor("x", numbers(3, 4), (None, 4))
    for shape in [(None,), (None, None, None), (4, None)]:
        with pytest.raises(ValueError, match="x must have the shape"):
            checks.require_tensor("x", numbers(3, 4), shape)


def test_a_tensor_without_numbers_may_have_any_stride():
    checks.require_tensor("x", wide(0, 4), (None, 4))


def test_the_target_on_a_cpu_is_the_interpreter():
    assert checks.target(torch.device("cpu")) == "cpu"


@pytest.mark.parametrize(
    ("major", "arch", "hip", "name"), [(9, "", None, "sm_90"), (9, "gfx942:sramecc+:xnack-", "7.0", "gfx942")]
)
def test_the_target_of_a_gpu_has_the_compilers_name(major, arch, hip, name, monkeypatch):
    properties = SimpleNamespace(major=major, minor=0, gcnArchName=arch)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert checks.target(torch.device("cuda")) == name
