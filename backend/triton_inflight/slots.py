"""Slots: gets back those that Triton has kept of sequences which it dropped.

Triton (2.51, and its core of 2026) drops a request that is cancelled while it waits for a trip, without a word to the
model, and keeps its slot until ``max_sequence_idle_microseconds``. A request of our own that starts a sequence with the
same ID gets that slot, and gives it back when it is answered. Which IDs those are is known in two ways:

* A sequence that was on trips before is found by the watcher, or as its final response is sent.
* One that was dropped before its first trip is missing in the numbers that Triton gives: 1, 2, 3, ... They come in that
  order, but for threads that overtake each other. So a request of our own that has no ID queues up behind it; if that
  one comes first, the missing one will not come. An ID of a client's own cannot be missed, and one of a model with
  several instances may have gone to another: their slots stay taken until the idle time.

An ID that is on a trip again belongs to somebody else, and is left alone.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable

log = logging.getLogger(__name__)

RECLAIMING = f"reclaiming-{uuid.uuid4()}"  # the ID of our own requests, which no client can guess

# A model that is about to unload drops its sequences too, and must not be sent requests then.
_SECONDS_TO_RECLAIM = 0.4
_MOST_MISSING = 1000  # in a row; more of them, and an ID is rather a client's own
# Triton's backlog is no place to reclaim a slot from: who has to wait there holds none.
_MICROSECONDS_TO_RECLAIM = 1000
_MICROSECONDS_TO_QUEUE_UP = 1_000_000

SendStart = Callable[[int | str, int], bool]


class Slots:
    """A thread that reclaims slots.

    Args:
        send_start: sends this model a request that starts a sequence with an ID, or with the next one that Triton
            gives if it is 0, and waits for the answer. Its request ID is RECLAIMING; it may wait for so many
            microseconds in the backlog. Returns whether it has come to the model.
        sees_all: whether all sequences of the model come here, and Triton gives them IDs.
    """

    def __init__(self, send_start: SendStart, sees_all: bool) -> None:
        self._send_start = send_start
        self._sees_all = sees_all
        self._lock = threading.Lock()
        self._dropped: dict[int | str, float] = {}  # when to reclaim the slot
        self._missing: dict[int | str, float] = {}  # when to find out
        self._highest = 0  # of Triton's IDs that were seen
        self._trips = 0
        self._work = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="triton-inflight-slots", daemon=True)
        self._thread.start()

    def trip_begins(self, correlation_ids: Iterable[int | str]) -> None:
        """The sequences of these IDs are alive."""
        with self._lock:
            self._trips += 1
            for correlation_id in correlation_ids:
                self._dropped.pop(correlation_id, None)
                self._missing.pop(correlation_id, None)
                if self._sees_all and isinstance(correlation_id, int):
                    self._count_up_to(correlation_id)

    def reclaim(self, correlation_id: int | str) -> None:
        """Triton may have dropped this sequence and kept its slot."""
        with self._lock:
            self._dropped[correlation_id] = time.monotonic() + _SECONDS_TO_RECLAIM
        self._work.set()

    def close(self) -> None:
        """End the thread."""
        self._closing = True
        self._work.set()
        self._thread.join(
            _SECONDS_TO_RECLAIM
        )  # a request of ours may be on its way to a model that takes no more

    def _count_up_to(self, correlation_id: int) -> None:
        if self._highest < correlation_id <= self._highest + _MOST_MISSING:
            if skipped := range(self._highest + 1, correlation_id):
                self._missing.update(dict.fromkeys(skipped, time.monotonic() + _SECONDS_TO_RECLAIM))
                self._work.set()
            self._highest = correlation_id

    def _run(self) -> None:
        while not self._closing:
            self._work.wait(self._seconds_to_wait())
            self._work.clear()
            try:
                self._reclaim_dropped()
                self._look_for_missing()
            except Exception:
                log.exception("some slots may stay taken")

    def _seconds_to_wait(self) -> float | None:
        with self._lock:
            due = min([*self._dropped.values(), *self._missing.values()], default=None)
        return None if due is None else max(0.0, due - time.monotonic())

    def _reclaim_dropped(self) -> None:
        for correlation_id in self._due(self._dropped):
            with self._lock:
                still = self._dropped.pop(correlation_id, None) is not None
            if still and not self._closing:
                self._send_start(correlation_id, _MICROSECONDS_TO_RECLAIM)

    def _look_for_missing(self) -> None:
        if not (due := self._due(self._missing)) or self._closing:
            return
        trips = self._trips
        came = self._send_start(0, _MICROSECONDS_TO_QUEUE_UP)
        if came or trips == self._trips:  # no trip at all, since nobody has a slot
            for correlation_id in due:
                with self._lock:
                    if self._missing.pop(correlation_id, None) is not None:
                        self._dropped[correlation_id] = 0
            self._reclaim_dropped()
        else:
            with self._lock:
                again = time.monotonic() + _SECONDS_TO_RECLAIM
                self._missing.update((i, again) for i in due if i in self._missing)

    def _due(self, times: dict[int | str, float]) -> list[int | str]:
        now = time.monotonic()
        with self._lock:
            return [correlation_id for correlation_id, due in times.items() if due <= now]
