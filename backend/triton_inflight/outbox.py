"""Responses of a step, sent side by side.

Sending one is mostly waiting for the server's process to take it over. Doing so while the next step runs would not
pay where the step uses every core: whatever wakes up there stops one of the threads that all others wait for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait

log = logging.getLogger(__name__)

_THREADS = 3  # the calling one included; more gain nothing measurable
_WORTH_A_THREAD = 4  # requests with something to send

Send = Callable[[], None]


class Outbox:
    """Collects responses and sends them, those of one request in order; for any threads."""

    def __init__(self) -> None:
        self._posted: dict[int, list[Send]] = {}
        self._posting = threading.Lock()
        self._flushing = threading.Lock()
        self._pool = ThreadPoolExecutor(_THREADS - 1, thread_name_prefix="triton-inflight-outbox")

    def post(self, request: int, send: Send) -> None:
        """Have this done by the next ``flush``; an exception of it is logged.

        Args:
            request: number of the request that it answers.
        """
        with self._posting:
            self._posted.setdefault(request, []).append(send)

    def flush(self) -> None:
        """Send what was posted; it has been sent when this returns."""
        with self._flushing:
            with self._posting:
                posted, self._posted = self._posted, {}
            requests = list(posted.values())
            if len(requests) < _WORTH_A_THREAD:
                _send_all(requests)
                return
            others = [self._pool.submit(_send_all, requests[i::_THREADS]) for i in range(1, _THREADS)]
            _send_all(requests[::_THREADS])
            wait(others)

    def close(self) -> None:
        """Send what is left, and end the threads."""
        self.flush()
        self._pool.shutdown()


def _send_all(requests: Iterable[list[Send]]) -> None:
    for sends in requests:
        for send in sends:
            try:
                send()
            except Exception:
                log.exception("a response could not be sent")
