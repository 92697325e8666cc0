"""Memory of this process."""

from __future__ import annotations

import ctypes

import psutil


def resident_bytes() -> int:
    """Memory of the process that is in use and in RAM, files that it has mapped included."""
    return int(psutil.Process().memory_info().rss)


def return_freed_memory() -> None:
    """Give freed memory back to the system, which glibc otherwise keeps for later; elsewhere, nothing.

    Loading frees weights of more than one copy of a model; serving does not need their room again.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
