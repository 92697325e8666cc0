"""Finals: final responses, sent once Triton has let go of their requests.

Triton (2.51, and its core of 2026) keeps the slot of a request that is cancelled by the time it is released for good.
Writing to a client that is gone is how Triton learns that it is, so a final response that is sent within the trip can
be the cause by itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from triton_inflight.watcher import ResponseSender

log = logging.getLogger(__name__)

# What tritonserver's process takes to release the requests of a trip, and each of them, with much to spare.
_SECONDS_TO_RELEASE = 0.002
_SECONDS_FOR_EACH = 0.0005
# The next trip begins after it, and sends what is held back. It is waited for where it is sure to come.
_SECONDS_TO_NEXT_TRIP = 0.05


class Finals:
    """A thread that sends what was held back.

    Args:
        cancelled: told the correlation ID of a sequence whose client was gone before its final response.
    """

    def __init__(self, cancelled: Callable[[int | str], None]) -> None:
        self._cancelled = cancelled
        self._held: deque[tuple[int | str, ResponseSender, Callable[[], None]]] = deque()
        self._work = threading.Event()
        self._not_before = 0.0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="triton-inflight-finals", daemon=True)
        self._thread.start()

    def hold_back(self, correlation_id: int | str, sender: ResponseSender, final: Callable[[], None]) -> None:
        """Send the final response of a request once it is released."""
        self._held.append((correlation_id, sender, final))

    def trip_begins(self) -> None:
        """The requests of earlier trips are released."""
        self._send()

    def trip_ended(self, num_requests: int, next_is_near: bool) -> None:
        """The requests of a trip are about to be released; ``next_is_near``: some of them go on."""
        if self._held:
            wait = _SECONDS_TO_RELEASE + _SECONDS_FOR_EACH * num_requests
            self._not_before = time.monotonic() + (_SECONDS_TO_NEXT_TRIP if next_is_near else wait)
            self._work.set()

    def close(self) -> None:
        """Send what is left, and end the thread."""
        self._closing = True
        self._work.set()
        self._thread.join()
        self._send()

    def _run(self) -> None:
        while not self._closing:
            self._work.wait()
            self._work.clear()
            while self._held and (wait := self._not_before - time.monotonic()) > 0:
                time.sleep(min(wait, _SECONDS_TO_RELEASE))
            self._send()

    def _send(self) -> None:
        while self._held:
            try:
                correlation_id, sender, final = self._held.popleft()
            except IndexError:  # the other thread was quicker
                return
            try:
                # Once the final response is out, asking the sender would crash tritonserver 2.51.
                if sender.is_cancelled():  # since before the release or after it, nobody knows
                    self._cancelled(correlation_id)
                final()
            except Exception:
                log.exception("the final response of sequence %s could not be sent", correlation_id)
