"""Rules of the kernels' source that no result in the interpreter can show.

A masked load without `other=` gives whatever lies in a register on a GPU; the interpreter fills zeros in. So the rule
is read from the source, and it is shown here that it would find an omission. (A race between programs cannot be seen
either way: the kernels avoid it by giving every program outputs of its own.)
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kernels

FILES = sorted(Path(kernels.__file__).parent.glob("*.py"))
SOURCES = {path.name: path.read_text() for path in FILES}
KERNELS = ("rmsnorm.py", "flash_attention.py", "paged_attention.py", "store_kv.py", "w4a16.py")


def calls(source: str, name: str) -> list[ast.Call]:
    """All calls of `tl.<name>`, or of `<name>` where it was imported alone."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        node
        for node in nodes
        if (isinstance(node.func, ast.Attribute) and node.func.attr == name and ast.unparse(node.func.value) == "tl")
        or (isinstance(node.func, ast.Name) and node.func.id == name)
    ]


def is_masked(load: ast.Call) -> bool:
    """tl.load(pointer, mask, other, ...)"""
    return len(load.args) > 1 or any(keyword.arg in ("mask", None) for keyword in load.keywords)


def masked_without_other(source: str) -> list[str]:
    return [
        ast.unparse(load)
        for load in calls(source, "load")
        if is_masked(load) and not any(keyword.arg == "other" for keyword in load.keywords)
    ]


@pytest.mark.parametrize("name", SOURCES)
def test_every_masked_load_says_what_it_gives_where_it_reads_nothing(name):
    assert masked_without_other(SOURCES[name]) == []


def test_the_rule_sees_every_masked_load_of_the_kernels():
    """Counted in the text: where one `other=` is taken away, the rule names just that load."""
    n_loads = 0
    for source in SOURCES.values():
        tree = ast.parse(source)
        for load in (node for node in calls(source, "load") if is_masked(node)):
            n_loads += 1
            (other,) = (keyword for keyword in load.keywords if keyword.arg == "other")
            lines = source.split("\n")
            line = lines[other.value.lineno - 1]
            start = line.encode()[: other.col_offset].decode().rstrip().removesuffix(",")
            end = line.encode()[other.value.end_col_offset :].decode()
            lines[other.value.lineno - 1] = start + end
            without = "\n".join(lines)
            assert ast.dump(ast.parse(without)) != ast.dump(tree)
            assert len(masked_without_other(without)) == 1
    assert n_loads == sum(source.count("other=") for source in SOURCES.values()) >= 13


@pytest.mark.parametrize(
    ("load", "found"),
    [
        ("tl.load(p)", False),
        ("tl.load(p, mask=m, other=0.0)", False),
        ("tl.load(p, mask=m)", True),
        ("tl.load(p, m)", True),
        ("tl.load(p + 1, mask=m & (a < b), cache_modifier='.cg')", True),
        ("load(p, mask=m)", True),
        ("tl.load(p, **options)", True),
        ("torch.load(p, mask=m)", False),
    ],
)
def test_the_rule_knows_each_way_to_write_a_load(load, found):
    assert bool(masked_without_other(f"def kernel():\n    x = {load}\n")) == found


@pytest.mark.parametrize("name", SOURCES)
def test_kernels_import_nothing_from_the_engine(name):
    for node in ast.walk(ast.parse(SOURCES[name])):
        if isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "minillm" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module.split(".")[0] != "minillm"


@pytest.mark.parametrize("name", KERNELS)
def test_each_kernel_stands_beside_its_reference_wrapper_and_counts(name):
    tree = ast.parse(SOURCES[name])
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    docstring = ast.get_docstring(tree)
    assert "\nProblem: " in docstring and "Bytes: " in docstring
    wrapper = "linear" if name == "w4a16.py" else Path(name).stem
    assert {"reference", wrapper, "bytes_moved"} <= set(functions)
    assert "flops" in functions or name == "store_kv.py"  # which computes nothing
    assert any("triton.jit" in map(ast.unparse, node.decorator_list) for node in functions.values())


@pytest.mark.parametrize("name", KERNELS)
def test_no_two_programs_add_to_one_number(name):
    """A program that updates what another one reads would race. None does: there are no atomics, and no barrier."""
    for word in ("atomic", "barrier"):
        assert word not in SOURCES[name]
