"""Tracing: every step as it happened, for people to look at and for pictures; see docs/tracing.md."""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from triton_inflight.errors import SettingsError
from triton_inflight.generation import Update
from triton_inflight.kv_store import KVStore
from triton_inflight.planner import Plan
from triton_inflight.sequence import Sequence
from triton_inflight.settings import Settings
from triton_inflight.trace_events import (
    Entered,
    EventWriter,
    Head,
    Key,
    Left,
    Levels,
    Ran,
    Record,
    Stepped,
    Tripped,
)
from triton_inflight.trace_file import TraceFile

log = logging.getLogger(__name__)


class _Running(NamedTuple):
    """A sequence in a step that is not over."""

    row: int
    sequence: Sequence
    num_computed: int
    decodes: bool


class _Begun(NamedTuple):
    """A step that is not over."""

    started: float
    running: list[_Running]
    waiting: int
    blocks: int
    preempted: list[Key]


class Tracer:
    """Notes down what steps and trips do; writes it to a file when flushed.

    What notes is called by one thread at a time and takes no text apart and none together, so that a step waits as
    little as can be; ``flush`` is called by a thread that has time. Seconds are those of ``time.perf_counter()``,
    which on Linux is the machine's monotonic clock.

    Args:
        path: of the file.
        head: what the trace says of its model.
        store: the store of the engine that is traced.
        max_bytes: bound of the file's size.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, head: Head, store: KVStore, max_bytes: int) -> None:
        self._store = store
        self._records: deque[Record] = deque()
        self._rows: dict[Key, int] = {}
        self._free_rows: list[int] = []
        self._step_numbers = itertools.count()
        self._trip = 0
        self._begun: _Begun | None = None
        self._dropped: list[int] = []
        self._writer = EventWriter(head)
        self._file: TraceFile | None = TraceFile(path, max_bytes, self._writer.opening)

    # -- what the engine and the life of sequences tell ---------------------------------------------------

    def step_begins(self, started: float, plan: Plan, num_live: int) -> None:
        """A step is planned, and its cells are reserved. Only one that runs something will end.

        Args:
            started: when its planning began.
            num_live: live sequences.
        """
        preempted = [_key(sequence) for sequence in plan.preempted]
        for key in preempted:
            self._leave(key, started)
        running = [self._join(run.sequence, started) for run in plan.runs]
        self._level(started, num_live)
        if running:
            self._begun = _Begun(started, running, self._waiting(num_live), self._store.num_held, preempted)

    def step_ends(self, updates: Iterable[Update], num_live: int) -> None:
        """The step is over, and what has ended gave its blocks back; so many sequences live on."""
        begun, self._begun = self._begun, None
        assert begun is not None
        ended = time.perf_counter()
        tokens_per_block = self._store.tokens_per_block
        ran = [
            Ran(
                row,
                _key(sequence),
                sequence.num_computed - num_computed,
                decodes,
                -(-sequence.num_computed // tokens_per_block),
            )
            for row, sequence, num_computed, decodes in begun.running
        ]
        finished = [(u.sequence_id, u.choice) for u in updates if u.finish_reason is not None]
        self._records.append(
            Stepped(
                next(self._step_numbers),
                self._trip,
                begun.started,
                ended,
                ran,
                begun.waiting,
                begun.blocks,
                begun.preempted,
                finished,
            )
        )
        for key in finished:
            self._leave(key, ended)
        dropped, self._dropped = self._dropped, []
        for sequence_id in dropped:
            self._drop(sequence_id, ended)
        if finished or dropped:
            self._level(ended, num_live)

    def dropped(self, sequence_id: int, num_live: int) -> None:
        """A sequence is forgotten, in a step or between two; so many live on."""
        if self._begun is not None:
            self._dropped.append(sequence_id)  # its row is drawn to the end of the step
            return
        now = time.perf_counter()
        self._drop(sequence_id, now)
        self._level(now, num_live)

    def trip_ends(self, started: float) -> None:
        """A trip is over."""
        self._records.append(Tripped(self._trip, started, time.perf_counter()))
        self._trip += 1

    # -- the file -----------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write what is noted; call it from one thread at a time."""
        while self._records:
            record = self._records.popleft()
            if self._file is not None:
                self._write(self._file, record)

    def close(self) -> None:
        """Write what is left."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, file: TraceFile, record: Record) -> None:
        try:
            file.write(self._writer.events(record))
        except OSError as error:
            log.error("tracing stops, %s cannot be written: %s", file.path, error)
            self._file = None

    # -- rows ---------------------------------------------------------------------------------------------

    def _join(self, sequence: Sequence, seconds: float) -> _Running:
        """A sequence runs: in the row it has, or else the lowest that is free."""
        key = _key(sequence)
        row = self._rows.get(key)
        if row is None:
            row = heapq.heappop(self._free_rows) if self._free_rows else len(self._rows)
            self._rows[key] = row
            self._records.append(Entered(seconds, row, key))
        decodes = sequence.num_output > 0 and sequence.num_pending == 1
        return _Running(row, sequence, sequence.num_computed, decodes)

    def _leave(self, key: Key, seconds: float) -> None:
        row = self._rows.pop(key, None)
        if row is not None:
            heapq.heappush(self._free_rows, row)
            self._records.append(Left(seconds, row))

    def _drop(self, sequence_id: int, seconds: float) -> None:
        for key in [key for key in self._rows if key[0] == sequence_id]:
            self._leave(key, seconds)

    def _waiting(self, num_live: int) -> int:
        return num_live - len({sequence_id for sequence_id, _ in self._rows})

    def _level(self, seconds: float, num_live: int) -> None:
        levels = Levels(seconds, self._store.num_held, len(self._rows), self._waiting(num_live))
        self._records.append(levels)


def open_tracer(settings: Settings, store: KVStore, instance: str, version: str) -> Tracer | None:
    """The tracer of a model instance, if its config asks for one.

    Args:
        settings: the model's.
        store: of its engine.
        instance, version: the names that Triton gives them.

    Raises:
        SettingsError: the folder cannot be written.
    """
    if settings.trace_directory is None:
        return None
    folder = (settings.model_directory or Path()).absolute() / Path(settings.trace_directory).expanduser()
    path = folder / trace_name(settings, instance, version)
    head = Head(
        settings.model_name,
        settings.scheduler,
        settings.max_running_sequences,
        store.num_blocks,
        time.time() - time.perf_counter(),
        os.getpid(),
    )
    try:
        tracer = Tracer(path, head, store, settings.trace_max_bytes)
    except OSError as error:
        raise SettingsError(
            f"parameters.trace_directory: {path} cannot be written: {error}. Name a folder that the server may "
            "write to, or delete it"
        ) from error
    log.info("%s: every step is traced to %s", settings.model_name, path)
    return tracer


def trace_name(settings: Settings, instance: str, version: str) -> str:
    """The name of a trace's file: MODEL.json; with the version if it is not 1, the instance if there are several."""
    parts = [settings.model_name]
    if version != "1":
        parts.append(f"v{version}")
    if settings.instances.count > 1:
        parts.append(instance.removeprefix(f"{settings.model_name}_"))
    return ".".join([*parts, "json"])


def _key(sequence: Sequence) -> Key:
    return sequence.sequence_id, sequence.choice
