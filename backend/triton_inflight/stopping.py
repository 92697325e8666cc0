"""How the models of a server learn that it is about to stop: Triton does not tell them.

The supervisor writes a file right before it asks tritonserver to end; the models look for it. It holds the seconds
that sequences may still take; after them they are ended with what they have, before Triton's exit timeout cuts
their clients off without a word.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

VARIABLE = "TRITON_INFLIGHT_STOP_FILE"


class StopNotice:
    """Looks for the file that the environment names; there is none where a server was started by other means.

    Attributes:
        end: by the monotonic clock, when sequences have to be ended; None while no stop is announced.
    """

    def __init__(self) -> None:
        name = os.environ.get(VARIABLE)
        self._path = Path(name) if name else None
        self.end: float | None = None

    def look(self) -> None:
        """Look once."""
        if self.end is None and self._path is not None and self._path.exists():
            self.end = time.monotonic() + float(self._path.read_text(encoding="ascii"))
