"""A trace that a model wrote, read back as typed steps. What is in the file: docs/tracing.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["prefill", "decode"]


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


def read_trace(path: Path) -> Trace:
    """Read a trace, also one whose server is running or has crashed.

    Raises:
        TraceError: the file is not a trace of this backend.
        OSError: the file cannot be read.
    """
    raise NotImplementedError
