"""What happened in a model, as events of the Chrome trace format: one line of JSON each.

docs/tracing.md describes them; trace_reading.py reads them back. Numbers and fixed words only: nothing of what
clients wrote or got is in them. Sequence IDs are text, since viewers keep numbers as doubles.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

TRIPS_TRACK, STEPS_TRACK, FIRST_ROW_TRACK = 1, 2, 10

Key = tuple[int, int]
"""Sequence ID and choice."""


class Head(NamedTuple):
    """What a trace says of its model; see trace_reading.Trace."""

    model: str
    scheduler: str
    num_rows: int
    blocks_total: int
    unix_offset_seconds: float
    process: int


class Entered(NamedTuple):
    """A sequence took a row."""

    seconds: float
    row: int
    key: Key


class Left(NamedTuple):
    """A sequence left its row."""

    seconds: float
    row: int


class Levels(NamedTuple):
    """How much is held from now on."""

    seconds: float
    blocks: int
    running: int
    waiting: int


class Ran(NamedTuple):
    """A sequence's part of a step."""

    row: int
    key: Key
    tokens: int
    decodes: bool
    blocks: int


class Stepped(NamedTuple):
    """A step ended."""

    number: int
    trip: int
    started: float
    ended: float
    ran: list[Ran]
    waiting: int
    blocks: int
    preempted: list[Key]
    finished: list[Key]


class Tripped(NamedTuple):
    """A trip ended."""

    number: int
    started: float
    ended: float


Record = Entered | Left | Levels | Stepped | Tripped


def key_text(key: Key) -> str:
    """A sequence ID, with its choice where that is not the first."""
    sequence_id, choice = key
    return f"{sequence_id}.{choice}" if choice else str(sequence_id)


class EventWriter:
    """Makes events of records, which come in order.

    Args:
        head: of the trace.
    """

    def __init__(self, head: Head) -> None:
        self._head = head
        self._holders: dict[int, Entered] = {}
        self._named: set[int] = set()

    def opening(self) -> list[str]:
        """The events that a file begins with: names, and who holds a row at this moment."""
        head = self._head
        self._named.clear()
        events = [
            self._metadata("process_name", 0, {"name": f"{head.model} ({head.scheduler})", **head._asdict()}),
            *self._track(TRIPS_TRACK, "trips"),
            *self._track(STEPS_TRACK, "steps"),
        ]
        for holder in self._holders.values():
            events += self._entered(holder)
        return events

    def events(self, record: Record) -> list[str]:
        """The events of one record."""
        if isinstance(record, Stepped):
            return self._stepped(record)
        if isinstance(record, Entered):
            self._holders[record.row] = record
            return self._entered(record)
        if isinstance(record, Left):
            del self._holders[record.row]
            return [self._event("E", FIRST_ROW_TRACK + record.row, record.seconds)]
        if isinstance(record, Levels):
            counts = f'"running":{record.running},"waiting":{record.waiting}'
            return [
                self._counter("blocks", record.seconds, f'"used":{record.blocks}'),
                self._counter("sequences", record.seconds, counts),
            ]
        trip = self._slice(
            f"trip {record.number}", TRIPS_TRACK, record.started, record.ended, f'"trip":{record.number}'
        )
        return [trip, self._tokens(record.ended, 0, 0)]

    def _entered(self, record: Entered) -> list[str]:
        track = FIRST_ROW_TRACK + record.row
        named = [] if record.row in self._named else self._track(track, f"row {record.row}")
        self._named.add(record.row)
        name = key_text(record.key)
        rest = f',"name":"#{name}","args":{{"sequence":"{name}"}}'
        return [*named, self._event("B", track, record.seconds, rest)]

    def _stepped(self, record: Stepped) -> list[str]:
        """The rows come before their step, so that a step that can be read is whole."""
        events = [
            self._slice(
                "decode" if ran.decodes else "prefill",
                FIRST_ROW_TRACK + ran.row,
                record.started,
                record.ended,
                f'"sequence":"{key_text(ran.key)}","tokens":{ran.tokens},"blocks":{ran.blocks}',
            )
            for ran in record.ran
        ]
        decode = sum(ran.tokens for ran in record.ran if ran.decodes)
        prefill = sum(ran.tokens for ran in record.ran) - decode
        events.append(self._tokens(record.started, prefill, decode))
        args = (
            f'"step":{record.number},"trip":{record.trip},"sequences":{len(record.ran)},'
            f'"prefill_tokens":{prefill},"decode_tokens":{decode},'
            f'"waiting":{record.waiting},"blocks":{record.blocks},'
            f'"preempted":{_keys(record.preempted)},"finished":{_keys(record.finished)}'
        )
        events.append(self._slice(f"step {record.number}", STEPS_TRACK, record.started, record.ended, args))
        return events

    def _tokens(self, seconds: float, prefill: int, decode: int) -> str:
        return self._counter("tokens", seconds, f'"prefill":{prefill},"decode":{decode}')

    def _track(self, track: int, name: str) -> list[str]:
        return [
            self._metadata("thread_name", track, {"name": name}),
            self._metadata("thread_sort_index", track, {"sort_index": track}),
        ]

    def _metadata(self, name: str, track: int, args: dict[str, object]) -> str:
        return json.dumps({"name": name, "ph": "M", "pid": self._head.process, "tid": track, "args": args})

    def _counter(self, name: str, seconds: float, args: str) -> str:
        return self._event("C", 0, seconds, f',"name":"{name}","args":{{{args}}}')

    def _slice(self, name: str, track: int, started: float, ended: float, args: str) -> str:
        duration = _microseconds(ended) - _microseconds(started)
        return self._event("X", track, started, f',"dur":{duration},"name":"{name}","args":{{{args}}}')

    def _event(self, phase: str, track: int, seconds: float, rest: str = "") -> str:
        place = f'"pid":{self._head.process},"tid":{track}'
        return f'{{"ph":"{phase}",{place},"ts":{_microseconds(seconds)}{rest}}}'


def _microseconds(seconds: float) -> int:
    return int(seconds * 1e6)


def _keys(keys: Iterable[Key]) -> str:
    return "[" + ",".join(f'"{key_text(key)}"' for key in keys) + "]"
