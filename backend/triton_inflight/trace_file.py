"""A file of trace events that is complete JSON whenever somebody looks, and bounded in size."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

log = logging.getLogger(__name__)

SMALLEST_BOUND = 64 * 2**10
"""Bytes that leave room for a head and some steps of many sequences."""

_SEPARATOR = b",\n"
_END = b"\n]\n"


class TraceFile:
    """A JSON array with one event a line.

    The closing bracket stands in the file all the time: each write begins at its place and ends with a new one, in a
    single system call. So viewers read the file while it is written, and after a crash. (The format allows the
    bracket to be missing, but not every viewer does.)

    A file that has grown to its bound becomes ``NAME.older.json``, and a new one begins; a file that an earlier
    server left is moved there as well. So two files are kept at most.

    Args:
        path: of the file; its folder is made if need be.
        max_bytes: bound of the file's size.
        head: gives the events that every file begins with.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, max_bytes: int, head: Callable[[], Iterable[str]]) -> None:
        assert max_bytes >= SMALLEST_BOUND, max_bytes
        self.path = path
        self.older_path = path.with_suffix(".older.json")
        self._max_bytes = max_bytes
        self._head = head
        path.parent.mkdir(parents=True, exist_ok=True)
        self._begin()

    def write(self, events: list[str]) -> None:
        """Add events, which stay together in one file.

        Raises:
            OSError: the disk is full, or otherwise at fault.
        """
        data = _SEPARATOR + _SEPARATOR.join(event.encode() for event in events) + _END
        if self._end + len(data) > self._max_bytes:
            os.close(self._file)
            self._begin()
            log.info(
                "trace %s has grown to trace_max_bytes (%d): it is %s now, and begins anew",
                self.path, self._max_bytes, self.older_path.name,
            )  # fmt: skip
        self._put(data, self._end)
        self._end += len(data) - len(_END)

    def close(self) -> None:
        """Write no more."""
        os.close(self._file)

    def _begin(self) -> None:
        """Make a new file of the head's events."""
        if self.path.exists():
            self.path.replace(self.older_path)
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        data = b"[\n" + _SEPARATOR.join(event.encode() for event in self._head())
        self._put(data + _END, 0)
        self._end = len(data)

    def _put(self, data: bytes, place: int) -> None:
        if os.pwrite(self._file, data, place) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
