"""What `check` says to a learner: the right one of four words, where the fault is, and a hint that grows.

The tasks are small ones made here; those of the course have their own tests in tests/exercises.
"""

from __future__ import annotations

import re

import pytest
import torch

from minillm.lab import check as check_module
from minillm.lab import progress
from minillm.lab.check import Chapter, Skip, attempt, chapters, check, expect_close, expect_equal, expect_number, run

CHAPTER = Chapter("98")
double = CHAPTER.task("double", hints=("a nudge", "a push", "nearly the idea"))
unhinted = CHAPTER.task("unhinted", hints=())
elsewhere = CHAPTER.task("elsewhere", hints=("a nudge",), needs="a_module_of_other_systems")
here = CHAPTER.task("here", hints=("a nudge",), needs="torch")


@double
def one_number(fn):
    """one number is doubled"""
    expect_number(fn(2), 4, "double(2)")


@double
def a_row(fn):
    """a row of numbers is doubled"""
    expect_close(fn(torch.tensor([1.0, 2.0])), torch.tensor([2.0, 4.0]), "double of a row")


@unhinted
def a_constant(fn):
    """it is 1"""
    expect_equal(fn(), 1)


@elsewhere
@here
def any_answer(fn):
    """it is called"""
    assert fn(1) == 2, "it is not 2"


@pytest.fixture(autouse=True)
def one_chapter(monkeypatch, tmp_path):
    monkeypatch.setattr(check_module, "chapters", lambda: [CHAPTER])
    monkeypatch.setenv(progress.ENVIRONMENT_VARIABLE, str(tmp_path / "progress.json"))


def right(x):
    return 2 * x


def stub(x):
    # YOUR CODE HERE
    raise NotImplementedError()


def wrong_number(x):
    return x + 1


def wrong_row(x):
    return 2 * x if isinstance(x, int) else x + 1


def raises(x):
    y = x + 1
    raise ValueError(f"no {y}")


def raises_in_pytorch(x):
    ones = torch.ones(2)
    return torch.einsum("i,i", ones, torch.ones(3))


def wrong_dtype(x):  # PyTorch raises NotImplementedError, as a stub does
    row = torch.tensor([1, 2])
    return row.softmax(0)


STATES = [
    (right, "PASS", "2 properties hold", None),
    (stub, "TODO", "not written yet", None),
    (wrong_number, "FAIL", "one number is doubled", r"double\(2\): yours 3, expected 4 .*0\.75 times.*"),
    (
        wrong_row,
        "FAIL",
        "a row of numbers is doubled",
        r"double of a row: 1 of 2 values differ; first at index \[1\]: yours 3, expected 4",
    ),
    (
        raises,
        "ERROR",
        "one number is doubled",
        r"ValueError: no 3 in line 3 of raises: raise ValueError\(f\"no \{y\}\"\)",
    ),
    (
        raises_in_pytorch,
        "ERROR",
        "one number is doubled",
        r"RuntimeError: .* in line 3 of raises_in_pytorch: return torch\.einsum\(.*",
    ),
    (
        wrong_dtype,
        "ERROR",
        "one number is doubled",
        r"NotImplementedError: .*'Long' in line 3 of wrong_dtype: return row\.softmax\(0\)",
    ),
]


@pytest.mark.parametrize(("fn", "state", "what", "message"), STATES, ids=[fn.__name__ for fn, *_ in STATES])
def test_each_state_has_its_report_and_no_traceback(fn, state, what, message, capsys):
    assert check(fn, "double") is (state == "PASS")
    printed = capsys.readouterr()
    first, *rest = printed.out.splitlines()
    assert first == f"[{state}] double: {what}"
    if message is None:
        assert not rest
    else:
        diagnosis, hint = rest
        assert re.fullmatch(f"       {message}", diagnosis), diagnosis
        assert hint == "       hint 1 of 3: a nudge"
    assert not printed.err
    assert progress.read()["98"]["double"]["state"] == state


def hint_after(fn, capsys) -> str | None:
    check(fn, "double")
    found = re.search(r"hint (\d of \d: .*)", capsys.readouterr().out)
    return found and found[1]


def test_hints_grow_with_failed_tries_and_stop_at_the_last(capsys):
    steps = [
        (stub, None),  # not written is no try
        (wrong_number, "1 of 3: a nudge"),
        (stub, None),
        (raises, "2 of 3: a push"),  # an error is a try
        (right, None),  # neither is a success
        (wrong_row, "3 of 3: nearly the idea"),
        (wrong_row, "3 of 3: nearly the idea"),
    ]
    assert [hint_after(fn, capsys) for fn, _ in steps] == [hint for _, hint in steps]
    assert progress.read() == {"98": {"double": {"state": "FAIL", "tries": 4}}}


def test_a_task_without_hints_gives_none(capsys):
    assert not check(lambda: 2, "unhinted")
    assert capsys.readouterr().out == "[FAIL] unhinted: it is 1\n       result: yours 2, expected 1\n"


def test_the_task_is_found_by_the_name_of_the_function(capsys):
    def double(x):
        return 2 * x

    assert check(double)
    with pytest.raises(ValueError, match="there is no task 'right'; give"):
        check(right)
    assert "right" not in str(progress.read())


def test_a_case_must_name_its_property():
    with pytest.raises(ValueError, match="case nameless of task double needs a docstring"):

        @double
        def nameless(fn):
            pass

    assert len(CHAPTER.tasks["double"].cases) == 2


def test_an_error_of_the_case_itself_names_no_line_of_the_learner():
    chapter = Chapter("97")

    @chapter.task("odd", hints=())
    def broken(fn):
        """broken by what the function returns"""
        len(fn())

    result = run(chapter.tasks["odd"], lambda: 3)
    assert (result.state, result.message) == ("ERROR", "TypeError: object of type 'int' has no len()")


def test_a_check_keeps_no_gradients_and_says_when_it_was_interrupted():
    seen = []
    run(CHAPTER.tasks["unhinted"], lambda: seen.append(torch.is_grad_enabled()))
    assert seen == [False] and torch.is_grad_enabled()

    def interrupted():
        raise KeyboardInterrupt

    result = run(CHAPTER.tasks["unhinted"], interrupted)
    assert result.state == "ERROR" and "does your loop end?" in result.message


def test_attempt_says_todo_for_a_stub_and_lets_other_errors_through(capsys):
    with attempt("the model"):
        stub(1)
    assert capsys.readouterr().out == "[TODO] the model: needs the function above\n"
    with pytest.raises(ValueError, match="no 2"), attempt("the model"):
        raises(1)
    with pytest.raises(NotImplementedError, match="Long"), attempt("the model"):
        wrong_dtype(1)
    with attempt("the model"):
        right(1)
    assert capsys.readouterr().out == ""


def test_a_task_that_this_system_cannot_check_is_skipped_whatever_the_answer(capsys):
    """A grading cell goes on; it is no failed try, and no PASS."""
    for answer in (right, wrong_number, raises, stub):
        assert check(answer, "elsewhere")
        says = "[SKIP] elsewhere: it needs A_module_of_other_systems, which this system does not have\n"
        assert capsys.readouterr().out == says
    assert progress.read()["98"]["elsewhere"] == {"state": "SKIP", "tries": 0}


def test_a_task_whose_needs_are_there_is_checked(capsys):
    assert check(right, "here") and not check(raises, "here") and not check(stub, "here")
    assert re.findall(r"^\[(\w+)\]", capsys.readouterr().out, re.M) == ["PASS", "ERROR", "TODO"]


def test_attempt_says_skip_for_what_this_system_lacks(capsys):
    with attempt("the kernel"):
        raise Skip("it needs a GPU")
    assert capsys.readouterr().out == "[SKIP] the kernel: it needs a GPU\n"


class InterpreterError(Exception):
    """As Triton's interpreter raises it, around what a kernel raised."""


def as_a_kernel(fn):
    def launched(x):
        try:
            return fn(x)
        except Exception as error:
            raise InterpreterError(repr(error)) from error

    launched.fn = fn
    return launched


def test_what_a_kernel_raises_is_seen_through_the_interpreter(capsys):
    task = CHAPTER.tasks["double"]
    assert run(task, as_a_kernel(stub)).state == "TODO"
    assert run(task, as_a_kernel(as_a_kernel(stub))).state == "TODO"
    result = run(task, as_a_kernel(raises))
    assert result.state == "ERROR" and result.message.startswith("ValueError: no 3 in line 3 of ")
    with attempt("the kernel"):
        as_a_kernel(stub)(1)
    assert capsys.readouterr().out == "[TODO] the kernel: needs the function above\n"
    with pytest.raises(InterpreterError), attempt("the kernel"):
        as_a_kernel(raises)(1)


def test_the_chapters_of_the_course_are_in_order_and_no_name_is_used_twice():
    numbers = [chapter.number for chapter in chapters()]
    assert numbers == sorted(set(numbers)) and "02" in numbers
    names = [name for chapter in chapters() for name in chapter.tasks]
    assert len(names) == len(set(names))


NAN = float("nan")
ROW = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
DIAGNOSES = [
    (expect_close, None, ROW, r"x: your function returned None; is a `return` missing\?"),
    (expect_close, [1.0], ROW, "x: expected a tensor, got list"),
    (expect_close, ROW[0], ROW, r"x: shape \[2\], expected \[2, 2\]"),
    (expect_close, ROW.double(), ROW, r"x: dtype torch\.float64, expected torch\.float32"),
    (expect_close, torch.tensor([[1.0, 2.0], [NAN, 9.0]]), ROW, r"x: NaN at index \[1, 0\], expected 3"),
    (
        expect_close,
        torch.tensor([[1.0, 2.5], [3.0, 9.0]]),
        ROW,
        r"x: 2 of 4 values differ; first at index \[0, 1\]: yours 2\.5, expected 2",
    ),
    (expect_close, torch.tensor(1.0), torch.tensor(2.0), r"x: 1 of 1 values differ.*yours 1, expected 2"),
    (expect_close, torch.tensor([1.0]), torch.tensor([NAN]), r"x: 1 of 1 values differ.*yours 1, expected nan"),
    (expect_equal, None, 0, r"x: your function returned None; is a `return` missing\?"),
    (expect_equal, 3, 4, "x: yours 3, expected 4"),
    (expect_equal, 3, [3], r"x: yours 3, expected \[3\]"),
    (expect_equal, "ab", ["a", "b"], r"x: yours 'ab', expected \['a', 'b'\]"),
    (expect_equal, [1, 5, 6], [1, 2, 3], "x: differs first at index 1: yours 5, expected 2"),
    (expect_equal, [1, 2], [1, 2, 3], "x: 2 items, expected 3"),
    (expect_equal, [1, 2, 3], [1, 2], "x: 3 items, expected 2"),
    (expect_equal, torch.tensor([1, 2]), [1, 2], r"x: expected list, got a tensor of shape \[2\]"),
    (expect_equal, torch.tensor([1, 2]), 1, r"x: expected int, got a tensor of shape \[2\]"),
    (expect_number, None, 1, r"x: your function returned None; is a `return` missing\?"),
    (expect_number, torch.tensor(1.0), 1, "x: expected a number, got Tensor"),
    (expect_number, 1.5, 1.0, r"x: yours 1\.5, expected 1 .*1\.5 times"),
    (expect_number, NAN, 1.0, "x: yours nan, expected 1 "),
    (expect_number, 1.0, 0.0, "x: yours 1, expected 0 .*no multiple of that"),
]


@pytest.mark.parametrize(("expect", "got", "want", "says"), DIAGNOSES, ids=range(len(DIAGNOSES)))
def test_a_diagnosis_names_the_fault(expect, got, want, says):
    with pytest.raises(AssertionError) as caught:
        expect(got, want, "x")
    message = str(caught.value).split("\n")[0]  # pytest adds lines of its own to an assertion in a test's folder
    assert re.match(says, message), message


def test_what_is_right_is_accepted():
    expect_close(ROW.clone(), ROW)
    expect_close(ROW * (1 + 5e-6), ROW)
    expect_close(torch.tensor(1), torch.tensor(1))
    expect_equal([1, 2], (1, 2))
    expect_equal("ab", "ab")
    expect_equal(None, None)
    expect_equal(torch.tensor(3), 3)
    expect_number(3, 3.0)
    expect_number(1 + 5e-7, 1)
    expect_number(1e9 + 500, 1e9)
    expect_number(0, 0)


def test_tolerances_are_those_that_are_asked_for():
    expect_close(ROW * 1.01, ROW, rtol=0.02)
    with pytest.raises(AssertionError, match="4 of 4"):
        expect_close(ROW * 1.01, ROW)
    expect_number(1.01, 1, rtol=0.02)
    with pytest.raises(AssertionError, match=r"yours 1\.01"):
        expect_number(1.01, 1)
