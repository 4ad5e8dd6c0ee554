"""Stop strings: whatever the cuts, the text shown ends where the stop string begins, and not a letter later."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minillm.stopping import StopStrings

RUNS = settings(max_examples=500, deadline=None, derandomize=True, database=None, report_multiple_bugs=False)
PIECES = st.lists(st.text("abc", max_size=4), max_size=12)  # three letters, so that near misses abound
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def run(pieces: list[str], stop: list[str], armed: bool = True) -> tuple[list[str], bool]:
    """Feed the pieces until one of them stops. -> what was shown after each piece, and whether it stopped"""
    stop_strings, shown = StopStrings(stop), []
    for piece in pieces:
        text, stopped = stop_strings.add(piece, armed)
        shown.append(text)
        if stopped:
            return shown, True
    return shown, False


@RUNS
@given(PIECES, STOPS)
def test_the_shown_text_ends_where_the_first_stop_string_begins(pieces, stop):
    """Oracle: the whole text after each piece, searched afresh."""
    shown, stopped = run(pieces, stop)
    for n in range(len(pieces) + 1):
        text = "".join(pieces[:n])
        begins = [text.find(s) for s in stop if s in text]
        if begins:
            assert stopped and len(shown) == n  # stopped at this piece, no later
            assert "".join(shown) == text[: min(begins)]
            return
    assert not stopped
    rest = "".join(pieces)[len("".join(shown)) :]
    assert "".join(shown) + rest == "".join(pieces)
    assert rest == "" or any(s.startswith(rest) for s in stop)  # only a possible beginning is held back


@RUNS
@given(PIECES, STOPS)
def test_the_cuts_make_no_difference(pieces, stop):
    """Unless one stop string lies within another: then the shorter one may be complete before the longer one is."""
    assume(not any(a != b and a in b for a in stop for b in stop))
    text = "".join(pieces)
    begins = [text.find(s) for s in stop if s in text]
    for cut in (pieces, [text], list(text)):
        shown, stopped = run(cut, stop)
        assert stopped == bool(begins)
        if begins:
            assert "".join(shown) == text[: min(begins)]


@RUNS
@given(PIECES, STOPS)
def test_no_text_is_held_longer_than_needed_and_none_of_a_stop_string_is_shown(pieces, stop):
    shown, stopped = run(pieces, stop)
    for n in range(1, len(shown) + (not stopped)):
        text, so_far = "".join(pieces[:n]), "".join(shown[:n])
        held = [k for k in range(1, len(text) + 1) if any(s.startswith(text[-k:]) for s in stop)]
        assert so_far == text[: len(text) - max(held, default=0)]
        assert not any(s in so_far for s in stop)


@RUNS
@given(PIECES, STOPS)
def test_everything_passes_while_not_armed(pieces, stop):
    assert run(pieces, stop, armed=False) == (pieces, False)


@RUNS
@given(PIECES, PIECES, STOPS)
def test_what_is_held_comes_out_when_it_is_no_longer_armed(pieces, later, stop):
    """As at the end of a text that stopped for another reason: nothing is lost."""
    stop_strings = StopStrings(stop)
    shown = ""
    for piece in pieces:
        text, stopped = stop_strings.add(piece)
        assume(not stopped)
        shown += text
    for piece in ["", *later]:
        shown += stop_strings.add(piece, armed=False)[0]
    assert shown == "".join(pieces) + "".join(later)


@RUNS
@given(PIECES, PIECES, STOPS)
def test_a_stop_string_counts_only_from_where_it_is_armed(before, after, stop):
    """Text that was let through is gone: a stop string cannot begin in it."""
    stop_strings = StopStrings(stop)
    for piece in before:
        stop_strings.add(piece, armed=False)
    fresh = StopStrings(stop)
    for piece in after:
        assert stop_strings.add(piece) == fresh.add(piece)


@pytest.mark.parametrize(
    ("pieces", "stop", "shown", "stopped"),
    [
        (["a", "b", "c"], ["bc"], ["a", "", ""], True),
        (["ab", "ab", "abc"], ["abc"], ["", "ab", "ab"], True),  # a false start, a false start, the real one
        (["aa", "ab"], ["aab"], ["", "a"], True),  # the start is not the first candidate
        (["x END y"], ["END"], ["x "], True),  # and what follows in the same piece is gone too
        (["b", "abc"], ["c", "bc"], ["", "ba"], True),  # the earliest beginning wins, not the first in the list
        (["ab", "c"], ["abc", "b"], ["a"], True),  # a complete one is not kept waiting for a longer one
        (["a", "b"], [], ["a", "b"], False),
        ([], ["a"], [], False),
    ],
)
def test_examples(pieces, stop, shown, stopped):
    assert run(pieces, stop) == (shown, stopped)


@pytest.mark.parametrize("wrong", ["shows the beginning", "forgets a longer candidate", "searches one piece alone"])
def test_a_planted_mistake_is_noticed(wrong, monkeypatch):
    """Stored mutants; one of the properties above must reject each."""
    if wrong == "shows the beginning":
        monkeypatch.setattr(StopStrings, "could_begin", lambda self: 0)
    elif wrong == "forgets a longer candidate":
        monkeypatch.setattr(
            StopStrings, "could_begin", lambda self: int(any(self.held.endswith(s[0]) for s in self.stop))
        )
    else:
        real = StopStrings.add

        def add(self, text, armed=True):
            before, self.held = self.held, ""
            shown, stopped = real(self, text, armed)
            return before + shown, stopped

        monkeypatch.setattr(StopStrings, "add", add)
    with pytest.raises(AssertionError):
        test_the_shown_text_ends_where_the_first_stop_string_begins()
