"""Stop strings: where a text ends, found while it grows, without ever showing the beginning of a stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Released(NamedTuple):
    """What a piece of text leads to.

    Attributes:
        text: what can be shown now.
        stop: the stop string that ended the text; None while it goes on.
    """

    text: str
    stop: str | None


class StopStrings:
    """Finds the stop strings of one text, piece by piece.

    The stop that is complete first ends the text; of those complete at the same character the longest. So the
    text and its stop do not depend on how the text was cut into pieces. What comes after the stop is dropped.

    A push costs as much as its piece and the longest stop, however long the text is.

    Args:
        stops: none of them empty.
        include: keep the stop itself in the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        assert all(stops), stops
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self._stopped = False

    @property
    def held(self) -> str:
        """The end of the text so far that may be the beginning of a stop, and is not shown yet."""
        return self._held

    def push(self, piece: str) -> Released:
        """Take the next piece of text, of any length."""
        assert not self._stopped
        text = self._held + piece
        # (end, start, stop) of each stop's first match.
        matches = [
            (start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0
        ]
        if matches:
            end, start, stop = min(matches)
            self._held, self._stopped = "", True
            return Released(text[: end if self._include else start], stop)
        shown = self._beginning_of_a_stop(text)
        self._held = text[shown:]
        return Released(text[:shown], None)

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _beginning_of_a_stop(self, text: str) -> int:
        """Where the longest end of the text starts that some stop begins with; its length if there is none."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            end_of_text = text[start:]
            if any(stop.startswith(end_of_text) for stop in self._stops):
                return start
        return len(text)
