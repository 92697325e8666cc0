"""Memory of this process."""

from __future__ import annotations

import ctypes
import gc

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


def keep_out_of_collections() -> None:
    """Tell the garbage collector that all there is now stays: for a process that has loaded what it serves.

    It would look through the modules of torch and transformers again and again, a few percent of every step.
    """
    gc.collect()
    gc.freeze()
