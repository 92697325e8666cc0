"""Slots: makes Triton give back the slot of every sequence, whenever its client goes.

Triton (2.51, and its core of 2026) keeps a slot until ``max_sequence_idle_microseconds`` in two cases:

* The request is cancelled by the time it is released for good. Writing to a client that is gone is how Triton
  learns that it is, so a final response sent within the trip can be the cause by itself. Final responses are
  therefore held back until Triton has let go of the request.
* The request is cancelled while it waits for its next trip. Triton drops it, without a word to the model. A
  request of our own that starts a sequence with the same ID gets that slot, and gives it back when it is answered.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

RECLAIMING = f"reclaiming-{uuid.uuid4()}"  # the ID of our own requests, which no client can guess

# What tritonserver's process takes to release the requests of a trip, and each of them, with much to spare.
_SECONDS_TO_RELEASE = 0.002
_SECONDS_FOR_EACH = 0.0005
# The next trip begins after it, and sends what is held back. It is waited for where it is sure to come.
_SECONDS_TO_NEXT_TRIP = 0.05
# A model that is about to unload drops its sequences too, and must not be sent requests then.
_SECONDS_TO_RECLAIM = 0.4


class Slots:
    """A thread that sends what was held back, and gets back what Triton has dropped.

    Args:
        send_start: sends this model a request that starts a sequence with an ID of Triton's, and waits for the
            answer. Its request ID is RECLAIMING.
    """

    def __init__(self, send_start: Callable[[int | str], None]) -> None:
        self._send_start = send_start
        self._finals: deque[tuple[int | str, Any, Callable[[], None]]] = deque()
        self._dropped: deque[tuple[float, int | str]] = deque()
        self._work = threading.Event()
        self._not_before = 0.0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="triton-inflight-slots", daemon=True)
        self._thread.start()

    def hold_back(self, correlation_id: int | str, sender: Any, final: Callable[[], None]) -> None:
        """Send the final response of a request once it is released."""
        self._finals.append((correlation_id, sender, final))

    def trip_begins(self) -> None:
        """The requests of earlier trips are released."""
        self._send_finals()

    def trip_ended(self, num_requests: int, next_is_near: bool) -> None:
        """The requests of a trip are about to be released; ``next_is_near``: some of them go on."""
        if self._finals:
            wait = _SECONDS_TO_RELEASE + _SECONDS_FOR_EACH * num_requests
            self._not_before = time.monotonic() + (_SECONDS_TO_NEXT_TRIP if next_is_near else wait)
            self._work.set()

    def reclaim(self, correlation_id: int | str) -> None:
        """Triton may have dropped this sequence and kept its slot."""
        self._dropped.append((time.monotonic() + _SECONDS_TO_RECLAIM, correlation_id))
        self._work.set()

    def close(self) -> None:
        """Send what is left, and end the thread."""
        self._closing = True
        self._work.set()
        self._thread.join(
            _SECONDS_TO_RECLAIM
        )  # a request of ours may be on its way to a model that takes no more
        self._send_finals()

    def _run(self) -> None:
        while not self._closing:
            self._work.wait(self._dropped[0][0] - time.monotonic() if self._dropped else None)
            self._work.clear()
            while self._finals and (wait := self._not_before - time.monotonic()) > 0:
                time.sleep(min(wait, _SECONDS_TO_RELEASE))
            self._send_finals()
            while self._dropped and self._dropped[0][0] <= time.monotonic() and not self._closing:
                _, correlation_id = self._dropped.popleft()
                try:
                    self._send_start(correlation_id)
                except Exception:
                    log.exception("the slot of sequence %s may stay taken", correlation_id)

    def _send_finals(self) -> None:
        while self._finals:
            try:
                correlation_id, sender, final = self._finals.popleft()
            except IndexError:  # the other thread was quicker
                return
            try:
                # Once the final response is out, asking the sender would crash tritonserver 2.51.
                if sender.is_cancelled():  # since before the release or after it, nobody knows
                    self.reclaim(correlation_id)
                final()
            except Exception:
                log.exception("the final response of sequence %s could not be sent", correlation_id)
