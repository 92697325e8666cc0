"""Stands between a launcher and its tritonserver, so that nothing outlives either of them.

A process of its own, run by this file's path and with nothing but the standard library. It reads a pipe that
only the launcher's process can write to: when the launcher closes it, or dies in whatever way, tritonserver is
stopped. When tritonserver ends, by itself or not, what it leaves behind is removed: Python stubs, files in
/dev/shm, and the runtime directory. Its exit code is tritonserver's (128 + n for signal n).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # from linux/prctl.h
_SECONDS_FOR_KILLED_CHILDREN = 10.0
_libc = ctypes.CDLL(None, use_errno=True)


def supervise(
    command: list[str], parent_pid: int, grace_seconds: float, stop_file: Path, drain_seconds: float
) -> int:
    """Run a command until it ends, or until the parent is gone or asks for its end.

    The parent's end is the end of standard input, on which nothing is ever written. A process that the parent
    forked holds that pipe open too, so the parent's PID is looked at as well.

    Args:
        grace_seconds: between SIGTERM and SIGKILL. A second request to stop ends the wait.
        stop_file: written right before SIGTERM, for the models (see stopping.py).
        drain_seconds: what it says: how long sequences may still take.

    Returns:
        The command's exit code.
    """
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # stubs whose tritonserver has died become our children
    signals = _Signals()
    server = _start(command)
    print(server, flush=True)  # the launcher reads the server's PID here
    events = select.poll()
    events.register(sys.stdin.fileno(), select.POLLIN)
    events.register(signals.fileno, select.POLLIN)
    deadline: float | None = None
    while (status := _reap(server)) is None:
        ready = {fd for fd, _ in events.poll(1000)}
        orphaned = sys.stdin.fileno() in ready or os.getppid() != parent_pid
        asked = signals.stop_requested()
        if deadline is None and (orphaned or asked):
            events.unregister(sys.stdin.fileno())
            deadline = time.monotonic() + grace_seconds
            with contextlib.suppress(OSError):
                _announce_stop(stop_file, drain_seconds)
            os.kill(server, signal.SIGTERM)
            _resume(server)
        elif deadline is not None and (asked or time.monotonic() > deadline):
            os.kill(server, signal.SIGKILL)
    _kill_children()
    return status


def _announce_stop(stop_file: Path, drain_seconds: float) -> None:
    """Tell the models, which Triton does not. Renamed into place, so that nobody reads half a number."""
    written = stop_file.with_suffix(".new")
    written.write_text(str(drain_seconds), encoding="ascii")
    written.rename(stop_file)


class _Signals:
    """Turns signals into something to poll for: the end of a child, and requests to stop."""

    _STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def __init__(self) -> None:
        self.fileno, write_end = os.pipe()
        os.set_blocking(self.fileno, False)
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end)
        for number in (signal.SIGCHLD, *self._STOP):
            signal.signal(number, lambda _number, _frame: None)

    def stop_requested(self) -> bool:
        """Whether a signal that asks for an end has come since the last look."""
        try:
            arrived = os.read(self.fileno, 4096)
        except BlockingIOError:
            return False
        return any(number in arrived for number in self._STOP)


def _start(command: list[str]) -> int:
    supervisor = os.getpid()

    def die_with_supervisor() -> None:
        # Sent when the thread that forked ends; this process has one thread only.
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != supervisor:
            os._exit(1)

    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=sys.stderr, preexec_fn=die_with_supervisor
    ).pid


def _reap(server: int) -> int | None:
    """Collect children that have ended; the server's exit code if it is one of them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            if ended[0] == server:
                code = os.waitstatus_to_exitcode(ended[1])
                status = code if code >= 0 else 128 - code
    return status


def _kill_children() -> None:
    """Kill what the server left behind, until there is nothing: a killed child's children become ours."""
    give_up = time.monotonic() + _SECONDS_FOR_KILLED_CHILDREN
    while (children := _children(os.getpid())) and time.monotonic() < give_up:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        _reap(0)
        time.sleep(0.01)


def _resume(server: int) -> None:
    """Let a server that was paused (SIGSTOP) run, and its stubs, or they could not do what SIGTERM asks for."""
    for process in (server, *_children(server)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)


def _children(parent: int) -> list[int]:
    found = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with contextlib.suppress(OSError):
                # "pid (name) state ppid ..."; the name may hold spaces and parentheses.
                fields = (directory / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == parent:
                    found.append(int(directory.name))
    return found


def remove_leftovers(shm_prefix: str, runtime_directory: Path) -> None:
    """Remove the shared memory of stubs that cannot do it any more, and the runtime directory."""
    for file in SHARED_MEMORY.glob(shm_prefix + "*"):
        file.unlink(missing_ok=True)
    shutil.rmtree(runtime_directory, ignore_errors=True)


def main() -> int:
    """Read the command line, supervise, clean up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--grace-seconds", type=float, required=True)
    parser.add_argument("--stop-file", type=Path, required=True)
    parser.add_argument("--drain-seconds", type=float, required=True)
    parser.add_argument("--shm-prefix", required=True)
    parser.add_argument("--runtime-directory", type=Path, required=True)
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    try:
        return supervise(
            arguments.command,
            arguments.parent_pid,
            arguments.grace_seconds,
            arguments.stop_file,
            arguments.drain_seconds,
        )
    finally:
        remove_leftovers(arguments.shm_prefix, arguments.runtime_directory)


if __name__ == "__main__":
    sys.exit(main())
