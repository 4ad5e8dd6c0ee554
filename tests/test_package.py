"""The package's borders: what an import costs, what the public names are, and who may import whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import minillm

ROOT = Path(minillm.__file__).parent
KERNELS = ROOT.parent / "kernels"
COMMAND_LINE = {"cli.py", "commands.py", "__main__.py"}  # the one part of the top folder that may use the lab
ENGINE = sorted(path for path in ROOT.glob("*.py") if path.name not in COMMAND_LINE)


def child(code: str) -> str:
    """Run code in a fresh interpreter, where nothing is imported yet. -> what it printed"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout


def imports(path: Path) -> Iterator[str]:
    """Full names of all modules that a file imports, anywhere in it; of `from a import b` both a and a.b."""
    package = path.relative_to(ROOT.parent).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_importing_minillm_imports_nothing_heavy():
    loaded = child("import sys, minillm; print(*sys.modules)").split()
    assert "minillm" in loaded
    heavy = ("torch", "triton", "matplotlib", "numpy", "tokenizers", "transformers", "minillm.model")
    assert not [name for name in loaded if any(within(name, package) for package in heavy)]


def test_the_engine_works_without_triton_matplotlib_and_notebooks():
    """None in sys.modules makes an import fail as if the package were not installed."""
    names = [f"minillm.{path.stem}" for path in ENGINE if path.stem != "__init__"]
    child(
        "import importlib, sys\n"
        "sys.modules.update(dict.fromkeys(['triton', 'matplotlib', 'ipywidgets', 'IPython', 'transformers']))\n"
        f"for name in {names}: importlib.import_module(name)\n"
        "import minillm, torch\n"
        "config = minillm.ModelConfig(8, 8, 1, 2, 1, 4, 8, 16)\n"
        "model = minillm.Transformer(config).init_weights(0).prepare()\n"
        "assert len(minillm.generate(model, None, [1, 2], minillm.SamplingParams(max_tokens=3)).tokens) == 3\n"
    )


def test_every_public_name_resolves():
    assert len(minillm.__all__) == len(set(minillm.__all__)) > 10
    for name in minillm.__all__:
        assert getattr(minillm, name).__name__ == name
        assert name in dir(minillm)


def test_star_import_gives_the_public_names():
    printed = child("from minillm import *\nimport minillm; print(set(minillm.__all__) <= set(globals()))")
    assert printed.strip() == "True"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'minillm' has no attribute 'transformer'"):
        _ = minillm.transformer
    assert not hasattr(minillm, "_no_such_name")


def test_the_version_is_that_of_the_installed_package():
    from importlib.metadata import version

    assert minillm.__version__ == version("minillm")


@pytest.mark.parametrize("path", ENGINE, ids=lambda path: path.name)
def test_the_engine_imports_nothing_from_the_lab(path):
    assert not [name for name in imports(path) if within(name, "minillm.lab")]


def test_kernels_import_nothing_from_minillm():
    files = sorted(KERNELS.rglob("*.py"))
    assert files
    for path in files:
        assert not [name for name in imports(path) if within(name, "minillm")], path.name


@pytest.mark.parametrize(
    "line",
    [
        "import minillm.lab.bench",
        "from minillm.lab import bench",
        "from minillm import lab",
        "from .lab.bench import run",
        "from . import lab",
        "def f():\n    from minillm.lab.plots import draw",
    ],
)
def test_the_scan_sees_every_way_to_import_the_lab(line, tmp_path, monkeypatch):
    """Stored mutants: a file of the engine with one such line."""
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path / "minillm")
    file = tmp_path / "minillm" / "model.py"
    file.parent.mkdir()
    file.write_text(line)
    assert [name for name in imports(file) if within(name, "minillm.lab")]
