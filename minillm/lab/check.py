"""Self-checks: `check(fn)` runs the properties of one exercise task and says what is wrong in words.

A task is a set of cases, each a property tested against an independent oracle. The answer to a check is one of five
words: TODO (not written yet), FAIL (a property does not hold: which, where, yours, expected), ERROR (the code raised),
PASS, or SKIP (this system lacks what the task needs; neither passed nor failed). No traceback is shown, and no solution
lies in here. Hints grow with the number of tries.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules

import torch
from torch import Tensor

from minillm.lab import checks
from minillm.lab.progress import record

Case = Callable[[Callable], None]
VARIANT = "MINILLM_VARIANT"  # a number in the environment: other random inputs, for a grading that nobody has seen


@dataclass
class Task:
    """One function that the learner writes. needs: a module that not every system has, or nothing."""

    name: str
    hints: Sequence[str]
    needs: str = ""
    cases: list[Case] = field(default_factory=list)


class Chapter:
    """The tasks of one exercise notebook; a module of `minillm.lab.checks` holds one as CHAPTER."""

    def __init__(self, number: str):
        self.number = number
        self.tasks: dict[str, Task] = {}

    def task(self, name: str, hints: Sequence[str], needs: str = "") -> Callable[[Case], Case]:
        """A decorator for each case of the task; its docstring names the property that it tests."""
        task = self.tasks.setdefault(name, Task(name, hints, needs))

        def add(case: Case) -> Case:
            if not case.__doc__:
                raise ValueError(f"case {case.__name__} of task {name} needs a docstring that names its property")
            task.cases.append(case)
            return case

        return add


def seeded(number: int) -> int:
    """A seed of a case, other in each variant of the checks."""
    text = os.environ.get(VARIANT, "0")
    if not text.isdecimal():
        raise ValueError(f"{VARIANT} must be a whole number, not {text!r}")
    return number + 1000 * int(text)


@dataclass(frozen=True)
class Result:
    """state: "TODO", "FAIL", "ERROR", "PASS" or "SKIP"; what: the property; message: the diagnosis."""

    state: str
    what: str = ""
    message: str = ""


class Skip(Exception):
    """This system lacks what the code needs; the message says what."""


def run(task: Task, fn: Callable) -> Result:
    """The first case that does not hold, or PASS."""
    if task.needs and find_spec(task.needs) is None:
        return Result("SKIP", message=f"it needs {task.needs.capitalize()}, which this system does not have")
    for case in task.cases:
        try:
            with torch.no_grad():
                case(fn)
        except AssertionError as error:
            return Result("FAIL", case.__doc__, str(error) or describe_error(error, fn))
        except KeyboardInterrupt:
            return Result("ERROR", case.__doc__, "interrupted; if it took long: does your loop end?")
        except (Exception, SystemExit) as error:
            if is_stub(error):
                return Result("TODO", message="not written yet")
            return Result("ERROR", case.__doc__, describe_error(error, fn))
    return Result("PASS", message=f"{len(task.cases)} properties hold")


def is_stub(error: BaseException) -> bool:
    """Whether a stub raised it. PyTorch raises the same class, with a message, for a dtype that it cannot handle."""
    error = unwrapped(error)[-1]
    return isinstance(error, NotImplementedError) and not error.args


def unwrapped(error: BaseException) -> list[BaseException]:
    """The error, and what it wraps: Triton's interpreter wraps what a kernel raises, once for each call on the way."""
    errors = [error]
    while type(errors[-1]).__name__ == "InterpreterError" and errors[-1].__cause__:
        errors.append(errors[-1].__cause__)
    return errors


def describe_error(error: BaseException, fn: Callable) -> str:
    """The error and, if it was raised in the learner's function, the line."""
    errors = unwrapped(error)
    error = errors[-1]
    code = getattr(getattr(fn, "fn", fn), "__code__", None)  # a Triton kernel holds its function as `fn`
    frames = [frame for each in errors for frame in traceback.extract_tb(each.__traceback__)]
    own = [frame for frame in frames if code and frame.filename == code.co_filename and frame.name == code.co_name]
    where = f" in line {own[-1].lineno - code.co_firstlineno + 1} of {fn.__name__}: {own[-1].line}" if own else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}"


def check(fn: Callable, name: str | None = None) -> bool:
    """Check a solution of the task that has its name; print the result, remember it, and say whether it passed.

    A skipped task counts as done here, so that a grading cell goes on; reports and progress do not count it.
    """
    if not callable(fn):
        raise ValueError(f"give check() the function itself, without calling it, not {fn!r}")
    name = name or getattr(fn, "__name__", "")
    chapter, task = find(name)
    seeded(0)  # a bad variant is the teacher's mistake, not the learner's
    result = run(task, fn)
    tries = record(chapter.number, name, result.state)
    print(f"[{result.state}] {name}: {result.what or result.message}")
    if result.state in ("FAIL", "ERROR"):
        print(f"       {result.message}")
        if task.hints:
            shown = min(tries, len(task.hints))
            print(f"       hint {shown} of {len(task.hints)}: {task.hints[shown - 1]}")
    return result.state in ("PASS", "SKIP")


def find(name: str) -> tuple[Chapter, Task]:
    for chapter in chapters():
        if name in chapter.tasks:
            return chapter, chapter.tasks[name]
    raise ValueError(f"there is no task {name!r}; give check() the function that the notebook asks for")


def chapters() -> list[Chapter]:
    """All chapters, in order."""
    modules = sorted(module.name for module in iter_modules(checks.__path__))
    return [import_module(f"{checks.__name__}.{module}").CHAPTER for module in modules]


@contextlib.contextmanager
def attempt(what: str) -> Iterator[None]:
    """Run cells that use the learner's code: before it is written they say TODO instead of failing."""
    try:
        yield
    except Skip as reason:
        print(f"[SKIP] {what}: {reason}")
    except Exception as error:
        if not is_stub(error):
            raise
        print(f"[TODO] {what}: needs the function above")


def expect_close(got: object, want: Tensor, label: str = "result", rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Same kind, shape, dtype and values; says where they first differ."""
    assert got is not None, f"{label}: your function returned None; is a `return` missing?"
    assert isinstance(got, Tensor), f"{label}: expected a tensor, got {type(got).__name__}"
    assert got.shape == want.shape, f"{label}: shape {list(got.shape)}, expected {list(want.shape)}"
    assert got.dtype == want.dtype, f"{label}: dtype {got.dtype}, expected {want.dtype}"
    nan = (got.isnan() & ~want.isnan()).nonzero().tolist()
    assert not nan, f"{label}: NaN at index {nan[0]}, expected {want[tuple(nan[0])].item():.6g}"
    wrong = (~torch.isclose(got, want, rtol=rtol, atol=atol)).nonzero().tolist()
    if wrong:
        at = tuple(wrong[0])
        raise AssertionError(
            f"{label}: {len(wrong)} of {got.numel()} values differ; first at index {list(at)}: "
            f"yours {got[at].item():.6g}, expected {want[at].item():.6g}"
        )


def expect_equal(got: object, want: object, label: str = "result") -> None:
    """Exactly equal plain values (numbers, lists, booleans)."""
    assert got is not None or want is None, f"{label}: your function returned None; is a `return` missing?"
    plain = not isinstance(got, Tensor) or got.numel() == 1
    assert plain, f"{label}: expected {type(want).__name__}, got a tensor of shape {list(got.shape)}"
    if all(isinstance(value, Sequence) and not isinstance(value, str) for value in (got, want)):
        for i, (mine, theirs) in enumerate(zip(got, want, strict=False)):
            assert mine == theirs, f"{label}: differs first at index {i}: yours {mine!r}, expected {theirs!r}"
        assert len(got) == len(want), f"{label}: {len(got)} items, expected {len(want)}"
        return
    assert got == want, f"{label}: yours {got!r}, expected {want!r}"


def expect_number(got: object, want: float, label: str = "result", rtol: float = 1e-6) -> None:
    """A number, right to a relative tolerance."""
    assert got is not None, f"{label}: your function returned None; is a `return` missing?"
    assert isinstance(got, (int, float)), f"{label}: expected a number, got {type(got).__name__}"
    close = abs(got - want) <= rtol * abs(want)
    assert close, f"{label}: yours {got:.6g}, expected {want:.6g} (yours is {ratio(got, want)} that)"


def ratio(got: float, want: float) -> str:
    return f"{got / want:.4g} times" if want else "no multiple of"
