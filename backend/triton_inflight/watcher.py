"""The watcher: finds sequences whose clients are gone, also between trips, where Triton tells the model nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger(__name__)


class ResponseSender(Protocol):
    """What the watcher needs of Triton's response sender."""

    def is_cancelled(self) -> bool: ...


class Watcher:
    """A thread that looks at the newest response sender of every live sequence, once a period.

    Triton drops a cancelled sequence that waits between steps without another trip, so asking in the trip
    is not enough. A response sender that outlives its sequence keeps the model from unloading, so
    only the newest is held, and none while the thread sleeps outside of the dictionary.

    Args:
        period: seconds between two looks.
        on_cancelled: called from the watcher's thread with the IDs of cancelled sequences.
        on_period: called from the watcher's thread after each look.
    """

    def __init__(
        self, period: float, on_cancelled: Callable[[list[int]], None], on_period: Callable[[], None]
    ) -> None:
        self._period = period
        self._on_cancelled = on_cancelled
        self._on_period = on_period
        self._senders: dict[int, ResponseSender] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="triton-inflight-watcher", daemon=True)

    def start(self) -> None:
        """Start looking."""
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Stop, and drop every sender; returns when the thread has ended."""
        self._stopping.set()
        self._thread.join()
        self._senders.clear()

    def hold(self, sequence_id: int, sender: ResponseSender) -> None:
        """Watch a sequence through this sender, instead of an older one."""
        with self._lock:
            self._senders[sequence_id] = sender

    def release(self, sequence_id: int) -> None:
        """The sequence has ended: hold its sender no longer."""
        with self._lock:
            self._senders.pop(sequence_id, None)

    def _watch(self) -> None:
        while not self._stopping.wait(self._period):
            try:
                if cancelled := self._cancelled():
                    self._on_cancelled(cancelled)
                self._on_period()
            except Exception:
                log.exception("the watcher goes on after an error")

    def _cancelled(self) -> list[int]:
        # The lock is held while senders are asked, so that none can outlive its sequence in this frame.
        with self._lock:
            return [sequence_id for sequence_id, sender in self._senders.items() if sender.is_cancelled()]
