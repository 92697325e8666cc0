"""Stop strings end a text at the same place however it is cut, and never show through."""

from __future__ import annotations

import itertools
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_inflight.stops import Released, StopStrings


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[list[str], str | None]:
    """The deltas a client gets, and the stop."""
    matcher = StopStrings(stops, include=include)
    deltas = []
    for piece in pieces:
        text, stop = matcher.push(piece)
        deltas.append(text)
        if stop is not None:
            assert matcher.flush() == ""
            return deltas, stop
    return [*deltas, matcher.flush()], None


def test_stop_inside_a_piece_drops_the_rest() -> None:
    assert run(["X"], ["one", " twoXthree"]) == (["one", " two"], "X")


def test_stop_over_three_pieces_is_held_back() -> None:
    assert run(["<end>"], ["Hi <", "en", "d> more"]) == (["Hi ", "", ""], "<end>")


def test_stop_at_the_very_first_piece_leaves_no_text() -> None:
    assert run(["Hello"], ["Hello", " world"]) == ([""], "Hello")


def test_false_beginning_is_shown_once_it_cannot_be_a_stop() -> None:
    assert run(["\n\nUser:"], ["a\n", "\nU", "nited"]) == (["a", "", "\n\nUnited", ""], None)


def test_a_beginning_inside_a_false_beginning_stays_held() -> None:
    matcher = StopStrings(["aab"])
    assert matcher.push("aa") == Released("", None)
    assert matcher.push("a") == Released("a", None)
    assert matcher.held == "aa"
    assert matcher.push("b") == Released("", "aab")


def test_the_end_of_the_text_gives_back_what_was_held() -> None:
    assert run(["stop"], ["don't st"]) == (["don't ", "st"], None)


@pytest.mark.parametrize("pieces", [["xabcd"], list("xabcd"), ["xab", "cd"], ["xa", "bcd"]])
def test_of_overlapping_stops_the_first_complete_one_wins(pieces: list[str]) -> None:
    deltas, stop = run(["abcd", "bc"], pieces)
    assert ("".join(deltas), stop) == ("xa", "bc")


@pytest.mark.parametrize("stops", [["bc", "abc", "c"], ["c", "abc", "bc"]])
def test_of_stops_complete_together_the_longest_wins(stops: list[str]) -> None:
    deltas, stop = run(stops, ["xa", "bc"])
    assert ("".join(deltas), stop) == ("x", "abc")


def test_stop_can_be_kept_in_the_text() -> None:
    assert run(["</s>"], ["Hi<", "/s", ">!"], include=True) == (["Hi", "", "</s>"], "</s>")


def test_without_stops_everything_is_shown_at_once() -> None:
    assert run([], ["a", "b"]) == (["a", "b", ""], None)


def first_complete(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The rule itself, character by character over the whole text."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    text=st.text("ab\N{GRINNING FACE}", max_size=30),
    stops=st.lists(st.text("ab\N{GRINNING FACE}", min_size=1, max_size=5), max_size=4),
    cuts=st.sets(st.integers(0, 30)),
    include=st.booleans(),
)
def test_cutting_changes_nothing_and_nothing_leaks(
    text: str, stops: list[str], cuts: set[int], include: bool
) -> None:
    bounds = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    expected, expected_stop = first_complete(text, stops, include)
    deltas, stop = run(stops, pieces, include)
    assert ("".join(deltas), stop) == (expected, expected_stop)

    # What is shown is never taken back, whatever may still come: it is shown of every way to go on.
    matcher = StopStrings(stops)
    shown = ""
    for piece in pieces:
        released = matcher.push(piece)
        shown += released.text
        if released.stop is not None:
            break
        for ending in stops:
            for cut in range(len(ending)):
                longer = shown + matcher.held + ending[cut:]
                assert first_complete(longer, stops, False)[0].startswith(shown)


def test_held_text_is_shorter_than_the_longest_stop_after_a_long_text() -> None:
    matcher = StopStrings(["aaaaab"])
    total = sum(len(matcher.push("a").text) for _ in range(10_000))
    assert (total, matcher.held) == (10_000 - 5, "aaaaa")


def calls_of_a_push(length: int) -> int:
    """Python and C calls of one push after a text of that length: the same for any."""
    matcher = StopStrings(["stop", "halt"])
    for _ in range(length):
        matcher.push("some text ")
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        matcher.push("some text ")
    finally:
        sys.setprofile(None)
    return calls


def test_a_push_does_not_look_at_the_text_before() -> None:
    assert calls_of_a_push(10) == calls_of_a_push(5_000)
