"""A process and all that it started: paused while something else is measured."""

from __future__ import annotations

import contextlib

import psutil


def tree(pid: int) -> list[psutil.Process]:
    """A process and its descendants; none if it is gone."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def pause(pid: int) -> None:
    """Keep a process and its descendants from running: even idle, some servers wait by spinning."""
    for process in tree(pid):
        with contextlib.suppress(psutil.Error):
            process.suspend()


def resume(pid: int) -> None:
    """Let them run again."""
    for process in tree(pid):
        with contextlib.suppress(psutil.Error):
            process.resume()


def cpu_seconds(pid: int) -> float:
    """CPU time so far of a process and its descendants."""
    total = 0.0
    for process in tree(pid):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def memory_bytes(pid: int) -> int:
    """Memory that a process and its descendants hold for themselves alone or share among them, counted once."""
    total = 0
    for process in tree(pid):
        with contextlib.suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total
