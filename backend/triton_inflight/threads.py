"""How torch's threads wait for each other on the CPU."""

from __future__ import annotations

import os

_SPIN_COUNT = 2000  # some tens of microseconds: about what a sleeping thread needs to wake up


def bound_spinning() -> None:
    """Let OpenMP threads spin only briefly before they sleep; to be called before torch is imported.

    By default they spin for milliseconds, which wins little on an idle machine. But where another process wants
    a core, a spinning thread keeps the one it waits for from running, and a step takes ten times as long.
    What the user set in the environment (``GOMP_SPINCOUNT``, ``OMP_WAIT_POLICY``) wins.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPIN_COUNT))
