"""Small changes to a solution, made by a program: swapped comparisons, numbers off by one, dropped lines, ..."""

from __future__ import annotations

import ast
import contextlib
import copy
import io
import itertools
import linecache
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import TypeVar

import nbformat

from minillm.lab.build_exercises import BEGIN

T = TypeVar("T")
SECONDS = 20  # a change may make a loop endless

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
}  # fmt: skip
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}

# Changes that leave the function as it is, by task; each with the reason.
EQUIVALENT: dict[str, dict[str, str]] = {
    "penalize_repeats": {
        "result[token] > 0 -> result[token] >= 0": "a logit of 0 stays 0, divided or multiplied",
    },
    "online_softmax": {"0 -> 1": "what is subtracted from -inf"},
    "merge_partials": {"0 -> 1": "what is subtracted from -inf"},
    "norm_kernel": {"0.0 -> 1.0": "the weight of hidden columns (a stored answer has other=1.0 for x)"},
    "gather_kernel": {
        "0 -> 1": "a hidden entry of the table is not followed",
        "0.0 -> 1.0": "a hidden number is not stored",
    },
    "w4_kernel": {
        "0 -> 1": "a hidden code meets an x of 0",
        "0.0 -> 1.0": "a hidden x meets a scale and minimum of 0, and these an x of 0 (a stored answer has both wrong)",
    },
}


def task_sources(root: Path, number: str) -> tuple[dict[str, object], dict[str, str]]:
    """The names that a solution notebook's first code cell defines (without loading a model), and the source of each
    task's cell."""
    (path,) = (root / "solutions").glob(f"{number}_*.ipynb")
    code = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    setup: dict[str, object] = {}
    imports = [node for node in ast.parse(code[0]).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    exec(compile(ast.Module(imports, []), path.name, "exec"), setup)
    sources = {}
    for source in code:
        if BEGIN in source:
            (function,) = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
            sources[function.name] = source
    return setup, sources


def mutants(source: str, name: str) -> Iterator[tuple[str, CodeType]]:
    """(what was changed, the changed code) for every change that can be made in one place."""
    tree = ast.parse(source)
    places = [node for node in ast.walk(tree) if not isinstance(node, ast.Module)]
    for i, node in enumerate(places):
        for change in changes(node):
            changed = copy.deepcopy(tree)
            target = [n for n in ast.walk(changed) if not isinstance(n, ast.Module)][i]
            before = ast.unparse(target).split("\n")[0]
            change(target)
            ast.fix_missing_locations(changed)
            description = f"{before} -> {ast.unparse(target).split(chr(10))[0]}"
            if ast.unparse(changed) != ast.unparse(tree):
                yield description, compiled(ast.unparse(changed), f"{name}: {description}")


NUMBERS = itertools.count()


def compiled(source: str, name: str) -> CodeType:
    """Code whose source can be read again: Triton reads that of a kernel."""
    file = f"<{name}, {next(NUMBERS)}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    return compile(source, file, "exec")


def changes(node: ast.AST) -> Iterator[Callable[[ast.AST], None]]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield lambda n: n.ops.__setitem__(0, COMPARISONS[type(n.ops[0])]())
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield lambda n: setattr(n, "op", OPERATORS[type(n.op)]())
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield lambda n: setattr(n, "value", n.value + 1)
    if isinstance(node, (ast.FunctionDef, ast.For, ast.While, ast.If)):
        for i, statement in enumerate(node.body):
            if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
                yield lambda n, i=i: n.body.__setitem__(i, ast.Pass())


class Endless(BaseException):
    """Not an Exception, so that no check mistakes it for the learner's."""


def timed(work: Callable[[], T]) -> T:
    """Run, with output thrown away, and stop an endless loop. (Where there are no alarm signals it is just run.)"""
    with contextlib.redirect_stdout(io.StringIO()):
        if not hasattr(signal, "SIGALRM"):
            return work()

        def stop(*_):
            raise Endless

        old = signal.signal(signal.SIGALRM, stop)
        signal.alarm(SECONDS)
        try:
            return work()
        except Endless:
            from minillm.lab.check import Result

            return Result("ERROR", "it ends", "the code does not come to an end")
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, old)
