"""What a long piece of work is at, in the log, and how long each of its phases took."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

_REPORT_SECONDS = 10.0


class Phases:
    """Seconds by phase.

    Args:
        subject: what is worked at, for the log.

    Attributes:
        seconds: of each phase that has ended, in their order.
    """

    def __init__(self, subject: str) -> None:
        self.seconds: dict[str, float] = {}
        self._subject = subject

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase; while it lasts, a line in the log every ten seconds says so."""
        started, ended = time.perf_counter(), threading.Event()

        def report() -> None:
            while not ended.wait(_REPORT_SECONDS):
                log.info("%s: %s, for %.0f s so far", self._subject, name, time.perf_counter() - started)

        thread = threading.Thread(target=report, name="phases", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def __str__(self) -> str:
        """Such as ``8.1 s: model 1.2, probe 3.0, packing 3.9``."""
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"{sum(self.seconds.values()):.1f} s: {parts}"
