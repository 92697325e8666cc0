"""A trace that a model wrote, read back as typed steps. What is in the file: docs/tracing.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from triton_inflight.errors import TraceError
from triton_inflight.trace_events import FIRST_ROW_TRACK, STEPS_TRACK

Kind = Literal["prefill", "decode"]

_HEAD = ("model", "scheduler", "num_rows", "blocks_total", "unix_offset_seconds")


@dataclass(frozen=True)
class RowRun:
    """What one sequence ran in one step.

    Attributes:
        row: which row of the batch it holds, from 0; the same one from its first step until it ends or gives its
            blocks back. Never two sequences hold a row at a time.
        sequence_id: Triton's correlation ID, or one from 2^63 up where the backend draws them.
        choice: which of the answers of the sequence; each has a row of its own.
        tokens: tokens that ran.
        kind: ``decode`` for its newest token alone, ``prefill`` for a prompt or for what is computed again.
        blocks: blocks that its tokens fill; those shared with others count for each.
    """

    row: int
    sequence_id: int
    choice: int
    tokens: int
    kind: Kind
    blocks: int


@dataclass(frozen=True)
class TracedStep:
    """One forward pass, with its planning, sampling and the bookkeeping after it.

    Attributes:
        number: of the step, from 0, since the model was loaded.
        trip: number of the trip that it belongs to, from 0.
        start_seconds: by the machine's monotonic clock, which is ``time.monotonic()`` of any process on it.
        duration_seconds: from the beginning of its planning to its last token.
        rows: who ran, by row.
        waiting: live sequences that hold no blocks while it runs.
        preempted: (sequence ID, choice) of those that gave their blocks back to make room for it.
        finished: (sequence ID, choice) of those that got their last token, or failed, in it.
        blocks_used: blocks of the store held while it ran.
        blocks_total: blocks of the store.
    """

    number: int
    trip: int
    start_seconds: float
    duration_seconds: float
    rows: tuple[RowRun, ...]
    waiting: int
    preempted: tuple[tuple[int, int], ...]
    finished: tuple[tuple[int, int], ...]
    blocks_used: int
    blocks_total: int

    @property
    def end_seconds(self) -> float:
        return self.start_seconds + self.duration_seconds

    @property
    def num_tokens(self) -> int:
        """Tokens of all its rows."""
        return sum(run.tokens for run in self.rows)


@dataclass(frozen=True)
class Hold:
    """A sequence's stay in a row: from its first step there until it ended or gave its blocks back.

    ``end_seconds`` is None where the trace ends earlier than the stay.
    """

    row: int
    sequence_id: int
    choice: int
    start_seconds: float
    end_seconds: float | None


@dataclass(frozen=True)
class Trace:
    """What one model instance wrote.

    Attributes:
        model: the model's name.
        scheduler: ``iterative``, ``dynamic``, ``sequence`` or ``decoupled``.
        num_rows: most sequences that may run at a time (max_running_sequences).
        blocks_total: blocks of its store.
        unix_offset_seconds: what to add to the seconds of the trace to get Unix time.
        steps: in order; complete ones only. The first one's number is above 0 where the file was begun anew
            because it had grown to its bound.
        holds: in order of their beginning.
        blocks_used: (seconds, blocks held) whenever it changed at a step or an end.
    """

    model: str
    scheduler: str
    num_rows: int
    blocks_total: int
    unix_offset_seconds: float
    steps: tuple[TracedStep, ...]
    holds: tuple[Hold, ...]
    blocks_used: tuple[tuple[float, int], ...]

    def busy_share(self, begin_seconds: float | None = None, end_seconds: float | None = None) -> float:
        """Share of the rows' time in which something ran, between two moments (else the first step and the last)."""
        if not self.steps:
            return 0.0
        begin = self.steps[0].start_seconds if begin_seconds is None else begin_seconds
        end = self.steps[-1].end_seconds if end_seconds is None else end_seconds
        if end <= begin:
            return 0.0
        ran = 0.0
        for step in self.steps:
            ran += len(step.rows) * max(0.0, min(step.end_seconds, end) - max(step.start_seconds, begin))
        return ran / (self.num_rows * (end - begin))


def read_trace(path: Path) -> Trace:
    """Read a trace, also one whose server is running or has crashed.

    Raises:
        TraceError: the file is not a trace of this backend.
        OSError: the file cannot be read.
    """
    reading = _Reading(path)
    for event in _events(path):
        reading.take(event)
    return reading.trace()


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a file, up to the bracket that closes it, or to where a crash cut it off."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        text = line.strip().rstrip(",")
        if text == "]":
            return
        if text in ("", "["):
            continue
        try:
            event = json.loads(text)
        except ValueError as error:
            if number == len(lines):
                return
            raise TraceError(f"{path}, line {number}: is no trace event: {text!r:.80}") from error
        if not isinstance(event, dict):
            raise TraceError(f"{path}, line {number}: is no trace event: {text!r:.80}")
        yield event


class _Reading:
    """A trace in the making."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._head: dict[str, Any] = {}
        self._rows: list[RowRun] = []  # of the step that comes next
        self._steps: list[TracedStep] = []
        self._holds: dict[tuple[int, float], Hold] = {}
        self._open: dict[int, Hold] = {}
        self._blocks: list[tuple[float, int]] = []

    def take(self, event: dict[str, Any]) -> None:
        try:
            self._take(event)
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{self._path}: is not a trace of this backend: {event!r:.200}") from error

    def trace(self) -> Trace:
        """What was taken.

        Raises:
            TraceError: the event that says whose trace it is was not among it.
        """
        if not self._head:
            raise TraceError(f"{self._path}: is not a trace of this backend: it names no model")
        head = self._head
        return Trace(
            head["model"],
            head["scheduler"],
            head["num_rows"],
            head["blocks_total"],
            head["unix_offset_seconds"],
            tuple(self._steps),
            tuple(self._holds.values()),
            tuple(self._blocks),
        )

    def _take(self, event: dict[str, Any]) -> None:
        phase, track, args = event["ph"], event["tid"], event.get("args", {})
        if phase == "M":
            if "model" in args:
                self._head = {key: args[key] for key in _HEAD}
            return
        seconds = event["ts"] / 1e6
        if phase == "X" and track >= FIRST_ROW_TRACK:
            key = _key(args["sequence"])
            row = track - FIRST_ROW_TRACK
            self._rows.append(RowRun(row, *key, args["tokens"], event["name"], args["blocks"]))
        elif phase == "X" and track == STEPS_TRACK:
            self._step(seconds, event["dur"] / 1e6, args)
        elif phase == "B":
            self._enters(Hold(track - FIRST_ROW_TRACK, *_key(args["sequence"]), seconds, None))
        elif phase == "E":
            hold = replace(self._open.pop(track - FIRST_ROW_TRACK), end_seconds=seconds)
            self._holds[hold.row, hold.start_seconds] = hold
        elif phase == "C" and event["name"] == "blocks":
            self._blocks.append((seconds, args["used"]))

    def _step(self, seconds: float, duration: float, args: dict[str, Any]) -> None:
        rows, self._rows = tuple(sorted(self._rows, key=lambda run: run.row)), []
        step = TracedStep(
            args["step"],
            args["trip"],
            seconds,
            duration,
            rows,
            args["waiting"],
            tuple(_key(text) for text in args["preempted"]),
            tuple(_key(text) for text in args["finished"]),
            args["blocks"],
            self._head["blocks_total"],
        )
        self._steps.append(step)

    def _enters(self, hold: Hold) -> None:
        self._open[hold.row] = hold
        self._holds[hold.row, hold.start_seconds] = hold


def _key(text: str) -> tuple[int, int]:
    sequence_id, _, choice = text.partition(".")
    return int(sequence_id), int(choice or 0)
