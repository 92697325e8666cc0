"""Ends a Python stub whose tritonserver is gone, together with its file in /dev/shm."""

from __future__ import annotations

import os
import select
import threading
from pathlib import Path


def end_with_parent() -> None:
    """From now on this process ends as soon as its parent has, in whatever way that was.

    Triton's own stub looks whether its parent's PID exists, which stays true while a dead parent waits to be
    collected, and it leaves its shared memory behind.
    """
    parent = os.getppid()
    threading.Thread(target=_watch, args=(parent,), name="triton-inflight-parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    process = os.pidfd_open(parent)
    if os.getppid() == parent:  # else it died before we looked, and the PID may be another's by now
        ended = select.poll()
        ended.register(process, select.POLLIN)
        ended.poll()
    _remove_shared_memory()
    os._exit(1)


def _remove_shared_memory() -> None:
    # A stub's command line: stub, model.py, name of its shared memory, sizes, PID of tritonserver, ...
    arguments = Path("/proc/self/cmdline").read_bytes().split(b"\0")
    if len(arguments) > 3 and b"stub" in arguments[0]:
        name = os.fsdecode(arguments[2]).lstrip("/")
        if name and "/" not in name:
            Path("/dev/shm", name).unlink(missing_ok=True)
