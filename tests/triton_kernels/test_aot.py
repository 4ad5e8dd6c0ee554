"""`python -m kernels.aot` compiles every kernel for three GPUs that are not here, and none of its findings goes unseen.

In this process kernels are interpreted and cannot be compiled; all that compiles runs in a process of its own. Each
fault that the command looks for (an error of the compiler, a spill, no tensor cores, narrow loads) is planted, either
for the real compiler or in a text as it writes it, and must end in status 1.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
PART = ["--target", "sm_90", "--model", "SmolLM2-135M"]
TILES = ("w4a16 16x", "w4a16 64x", "w4a16 128x")
ATTENTION = ("flash_attention", "paged_attention, 1 row", "paged_attention, 5 rows")


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Run Python with these arguments, without the interpreter and with an empty store of compiled kernels."""
    hidden = ("TRITON_INTERPRET", "TRITON_DEFAULT_FP_FUSION")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))

    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment | more, capture_output=True, text=True)

    return run


@pytest.fixture(scope="module")
def everything(python) -> subprocess.CompletedProcess:
    return python("-m", "kernels.aot")


@pytest.fixture(scope="module")
def aot() -> ModuleType:
    """The module in this process: for all of it that does not compile."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TRITON_INTERPRET", "TRITON_DEFAULT_FP_FUSION"):
            patch.setenv(name, "0")  # the module sets them; this puts them back afterwards
        return importlib.import_module("kernels.aot")


def table(output: str) -> list[dict[str, str]]:
    lines = [line for line in output.split("\n") if line.startswith("|")]
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(header, row, strict=True)) for row in rows]


# --- The command. ---


def test_every_kernel_compiles_for_every_gpu(everything, aot):
    """No spill anywhere, tensor cores in attention, 16 bytes a load."""
    assert everything.returncode == 0, everything.stdout + everything.stderr
    rows = table(everything.stdout)
    prefills = {
        (row["kernel"].endswith("float32"), row["model"], row["target"]) for row in rows if "flash" in row["kernel"]
    }
    assert prefills == set(product((False, True), (model.name for model in aot.MODELS), aot.TARGETS))
    assert len(rows) == 150 and "150 of 150 ok." in everything.stdout
    for row in rows:
        assert row["verdict"] == "ok" and row["spills"] == "0"
        assert 0 < int(row["registers"]) <= (512 if row["target"] == "gfx942" else 255)
        narrow = row["kernel"] == "store_kv" and row["target"] == "gfx942" and row["model"] == "SmolLM2-135M"
        assert row["widest load B"] == ("8" if narrow else "16")  # 4 x 64 numbers among the 64 threads of one warp
        if row["kernel"].endswith("float32"):
            assert "mma" not in row["tensor cores"]  # NVIDIA's would round the factors to 10 bits; AMD's have float32
        elif row["kernel"].startswith((*ATTENTION, *TILES)):
            family = {"sm_80": "mma", "sm_90": "mma", "gfx942": "mfma"}[row["target"]]
            assert row["tensor cores"].endswith(family)
        else:
            assert row["tensor cores"] == ""
    assert all(
        "wgmma" in row["tensor cores"]
        for row in rows
        if row["kernel"].startswith(("flash_attention 128x64", *TILES))
        and row["target"] == "sm_90"
        and not row["kernel"].endswith("float32")
    )


def test_one_gpu_and_one_model(everything, python):
    """A part of the whole table, and the same numbers; also where the caller's environment asks for the interpreter."""
    part = python("-m", "kernels.aot", *PART, TRITON_INTERPRET="1")
    assert part.returncode == 0, part.stdout + part.stderr
    wanted = [row for row in table(everything.stdout) if (row["target"], row["model"]) == ("sm_90", "SmolLM2-135M")]
    assert table(part.stdout) == wanted and len(wanted) == 17


def test_an_unknown_gpu_is_an_error(aot, capsys):
    with pytest.raises(SystemExit, match="2"):
        aot.main(["--target", "sm_1"])
    assert "invalid choice: 'sm_1'" in capsys.readouterr().err


def planted(python, change: str, *arguments: str) -> list[dict[str, str]]:
    """The rows at fault after a change to the package; the command must end in status 1."""
    code = (
        f"import sys; from kernels import aot, flash_attention, paged_attention, w4a16; {change}; sys.exit(aot.main())"
    )
    result = python("-c", code, *arguments)
    assert result.returncode == 1, result.stdout + result.stderr
    rows = table(result.stdout)
    faults = [row for row in rows if row["verdict"] != "ok"]
    assert f"{len(rows) - len(faults)} of {len(rows)} ok." in result.stdout
    return faults


def test_a_real_spill_is_seen(everything, python):
    """Tiles of 128 x 64 at head_dim 128 need more registers than a thread of an A100 has."""
    change = "flash_attention.tiles = lambda *_: flash_attention.Tiles(128, 64, 8, 3)"
    rows = planted(python, change, "--target", "sm_80", "--model", "Llama-2-7B")
    assert rows[0]["kernel"] == "flash_attention 128x64" and len(rows) <= 2  # or in float32 too
    assert all(int(row["spills"]) > 0 and row["verdict"].startswith(f"spills {row['spills']}") for row in rows)


def test_what_the_compiler_refuses_is_seen(everything, python):
    """The interpreter would take tiles of 48 keys; the compiler wants a power of two. The other kernels go on."""
    rows = planted(python, "paged_attention.BLOCK_N = 48", *PART)
    assert [row["kernel"] for row in rows] == ["paged_attention, 1 row", "paged_attention, 5 rows"]
    assert all("Error" in row["verdict"] and row["registers"] == "" for row in rows)


# --- Its parts, on texts made by hand. ---

USAGE = " Function kernel:\n  REG:{registers} STACK:{stack} SHARED:0 LOCAL:{local} TEXTURE:0 SURFACE:0\n"
PTX = """
    ld.global.b32 { %r1 }, [ %rd1 + 0 ];
    @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    cp.async.cg.shared.global [ %r5 + 0 ], [ %rd2 + 0 ], 0x10, %r6;
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %f1 }, { %r1 }, { %r2 }, { %f1 };
"""
AMD = """
    global_load_dwordx4 v[0:3], v4, s[0:1]
    buffer_load_ushort v5, v6, s[4:7], 0 offen
    v_mfma_f32_32x32x8_bf16_1k v[0:15], v[16:17], v[18:19], v[0:15]
    .sgpr_spill_count: 0
    .vgpr_count:     {registers}
    .vgpr_spill_count: {spills}
"""


@pytest.fixture
def read_cuda(aot, monkeypatch):
    def read(ptx: str = PTX, registers: int = 40, stack: int = 0, local: int = 0):
        usage = USAGE.format(registers=registers, stack=stack, local=local)
        monkeypatch.setattr(aot.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=usage))
        compiled = SimpleNamespace(asm={"cubin": b"", "ptx": ptx}, metadata=SimpleNamespace(shared=1024))
        return aot.read_cuda(compiled)

    return read


@pytest.fixture
def read_amd(aot):
    def read(assembly: str = AMD, registers: int = 40, spills: int = 0):
        assembly = assembly.format(registers=registers, spills=spills)
        return aot.read_amd(SimpleNamespace(asm={"amdgcn": assembly}, metadata=SimpleNamespace(shared=1024)))

    return read


@pytest.fixture
def spec(aot):
    """A kernel that should use the tensor cores and load 16 bytes."""
    return aot.Spec("a kernel", None, {}, {}, tensor_cores=True)


def test_what_is_read_from_nvidias_compiler(aot, read_cuda, spec):
    finding = read_cuda()
    assert finding == aot.Finding(registers=40, spills=0, shared=1024, matrix="1 mma", widest_load=16)
    assert finding.faults(spec) == []


def test_what_is_read_from_amds_compiler(aot, read_amd, spec):
    finding = read_amd()
    assert finding == aot.Finding(registers=40, spills=0, shared=1024, matrix="1 mfma", widest_load=16)
    assert finding.faults(spec) == []


def test_each_way_to_spill_counts(read_cuda, read_amd, spec):
    assert read_cuda(stack=8).faults(spec) == ["spills 8"]
    assert read_cuda(local=16).faults(spec) == ["spills 16"]
    assert read_cuda(stack=8, local=16).faults(spec) == ["spills 24"]
    assert read_amd(spills=3).faults(spec) == ["spills 3"]
    assert read_amd(AMD.replace("sgpr_spill_count: 0", "sgpr_spill_count: 5")).faults(spec) == ["spills 5"]


def test_matrix_products_without_tensor_cores_are_a_fault(read_cuda, read_amd, spec):
    for finding in (read_cuda(PTX.replace("mma.sync", "fma.rn")), read_amd(AMD.replace("v_mfma", "v_fma"))):
        assert finding.matrix == "" and finding.faults(spec) == ["no tensor cores"]
        assert finding.faults(replace(spec, tensor_cores=False)) == []


def test_hoppers_products_have_a_name_of_their_own(read_cuda):
    wgmma = "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {}, %rd1, %rd2;\n"
    assert read_cuda(PTX + 2 * wgmma).matrix == "2 wgmma, 1 mma"
    assert read_cuda(PTX.replace("mma.sync", "fma.rn") + wgmma).matrix == "1 wgmma"


@pytest.mark.parametrize(
    ("load", "width"),
    [
        ("ld.global.b16 %rs1, [ %rd1 ];", 2),
        ("ld.global.b32 { %r1 }, [ %rd1 + 0 ];", 4),
        ("ld.global.v2.b32 { %r1, %r2 }, [ %rd1 + 0 ];", 8),
        ("ld.global.L1::evict_last.v4.b32 { %r1 }, [ %rd1 + 0 ];", 16),
        ("ld.global.nc.b64 { %rd3 }, [ %rd1 + 0 ];", 8),
        ("cp.async.ca.shared.global [ %r5 + 0 ], [ %rd2 + 0 ], 0x4, %r6;", 4),
        ("cp.async.ca.shared.global [ %r5 + 0 ], [ %rd2 + 0 ], 0x8;", 8),
        ("cp.async.cg.shared.global [ %r5 + 0 ], [ %rd2 + 0 ], 0x10, 0x10;", 16),
    ],
)
def test_the_width_of_nvidias_loads(load, width, read_cuda, spec):
    finding = read_cuda(f"{load}\nmma.sync.aligned")
    assert finding.widest_load == width
    assert finding.faults(spec) == ([] if width == 16 else [f"loads of at most {width} bytes"])
    assert finding.faults(replace(spec, wide=width)) == []


@pytest.mark.parametrize(
    ("load", "width"),
    [
        ("global_load_ubyte", 1),
        ("global_load_ushort", 2),
        ("buffer_load_dword", 4),
        ("buffer_load_dwordx2", 8),
        ("global_load_dwordx3", 12),
        ("buffer_load_dwordx4", 16),
        ("global_load_lds_dwordx4", 16),
    ],
)
def test_the_width_of_amds_loads(load, width, read_amd, spec):
    finding = read_amd(AMD.replace("global_load_dwordx4", load).replace("buffer_load_ushort", load))
    assert finding.widest_load == width
    assert finding.faults(spec) == ([] if width == 16 else [f"loads of at most {width} bytes"])


LAYOUTS = """
#blocked = #ttg.blocked<{sizePerThread = [1, 4], threadsPerWarp = [4, 8], warpsPerCTA = [4, 1], order = [1, 0]}>
#blocked1 = #ttg.blocked<{sizePerThread = [1, 2], threadsPerWarp = [16, 4], warpsPerCTA = [4, 1], order = [1, 0]}>
#blocked2 = #ttg.blocked<{sizePerThread = [1, 1], threadsPerWarp = [16, 4], warpsPerCTA = [4, 1], order = [1, 0]}>
    %x = tt.load %a, %b, %c : tensor<16x64x!tt.ptr<bf16>, #blocked2> loc(#loc)
"""
COPY = "%w = ttg.async_copy_global_to_local %a, %b mask %m other %o : tensor<64x8x!tt.ptr<i32>, {}> -> <64x8>"
LOAD = "%words = tt.load %a, %b, %c : tensor<64x8x!tt.ptr<i32>, {}> loc(#loc1)"


@pytest.mark.parametrize(
    ("loads", "width"),
    [
        ([COPY.replace("{}", "#blocked")], 16),
        ([LOAD.replace("{}", "#blocked")], 16),
        ([LOAD.replace("{}", "#blocked1")], 8),
        ([COPY.replace("{}", "#blocked"), COPY.replace("{}", "#blocked1")], 8),
        ([LOAD.replace("{}", "#blocked"), LOAD.replace("{}", "#blocked2")], 4),
    ],
)
def test_the_narrowest_load_of_packed_weights_counts(loads, width, aot):
    assert aot.packed_load("\n".join([LAYOUTS, *loads])) == width


def test_packed_weights_that_nobody_loads_are_an_error(aot):
    with pytest.raises(ValueError, match="no load of packed weights"):
        aot.packed_load(LAYOUTS)


def test_narrow_loads_of_packed_weights_are_seen_beside_wide_ones_of_x(everything, python):
    """64 columns of 64 weights leave 8 bytes to each of an MI300's 256 threads, and x still comes in wide."""
    change = "w4a16.blocks = lambda *_: w4a16.Blocks(64, 64, 64, 4, 2)"
    rows = planted(python, change, "--target", "gfx942", "--model", "SmolLM2-135M")
    assert {row["verdict"] for row in rows} == {"loads of at most 8 bytes"}
    assert [row["kernel"] for row in rows] == ["w4a16 64x64", "w4a16 64x64, float32"]


def test_several_faults_are_all_named(read_cuda, spec):
    finding = read_cuda("ld.global.b32 { %r1 }, [ %rd1 ];", stack=8)
    assert finding.faults(spec) == ["spills 8", "no tensor cores", "loads of at most 4 bytes"]


def test_a_number_that_is_not_there_is_an_error_and_no_zero(aot, read_amd):
    assert aot.number(r"REG:(\d+)", "STACK:1 REG:23") == 23
    with pytest.raises(ValueError, match="is not in the compiler's output: this Triton writes it in another way"):
        aot.number(r"REG:(\d+)", "registers: 23")
    with pytest.raises(ValueError, match="vgpr_spill_count"):
        read_amd(AMD.replace("vgpr_spill_count", "spilled"))


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        (None, "ok"),
        ({"stack": 8}, "spills 8"),
        ({"ptx": PTX.replace("mma.sync", "fma.rn")}, "no tensor cores"),
        ({"ptx": "ld.global.b32 %r1, [ %rd1 ]; mma.sync"}, "loads of at most 4 bytes"),
        (RuntimeError("PTXAS error\nand more"), "RuntimeError: PTXAS error"),
        (ValueError(""), "ValueError"),
    ],
)
def test_a_single_fault_ends_in_status_1(fault, verdict, aot, read_cuda, monkeypatch, capsys):
    """In one kernel of seventeen; the others are reported all the same."""
    faulty = "flash_attention 128x64"

    def examine(spec, target):
        if spec.name != faulty:
            return read_cuda()
        if isinstance(fault, Exception):
            raise fault
        return read_cuda(**fault or {})

    monkeypatch.setattr(aot, "examine", examine)
    assert aot.main(PART) == (fault is not None)
    output = capsys.readouterr().out
    rows = table(output)
    assert [row["verdict"].rstrip(": ") for row in rows if row["kernel"] == faulty] == [verdict]
    assert [row["verdict"] for row in rows if row["kernel"] != faulty] == ["ok"] * 16
    assert f"{17 - (fault is not None)} of 17 ok." in output


def test_what_is_compiled_is_what_the_wrappers_launch(aot):
    """Each kernel's constants and types are its own arguments; the options are those that the wrapper would choose."""
    for target in aot.TARGETS:
        for model in aot.MODELS:
            for spec in aot.specs(model, target):
                names = spec.kernel.arg_names
                assert set(spec.constants) <= set(names)
                constants = {name for name in names if name.isupper()}
                assert set(spec.constants) == constants
                for name in names:
                    if name.endswith("_ptr"):
                        integer = name in ("tables_ptr", "cu_seqlens_ptr", "lengths_ptr", "slots_ptr")
                        assert (spec.pointee(name) == "i32") == integer
                        assert (spec.pointee(name) == "u32") == (name == "codes_ptr")
