"""A peer's process and its descendants: started with a log, paused while others are measured, and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from triton_inflight.processes import pause, resume, tree


class PeerError(Exception):
    """A peer is not installed, does not start, or fails; the message says why."""


def own_environment() -> dict[str, str]:
    """The environment without what somebody set for another program: each engine chooses its threads itself."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "KMP_", "GOMP_"))
    }


class PeerProcess:
    """A process with all that it starts; to be measured, nothing else of the kind may use the cores.

    Args:
        command: what to run.
        log: where its errors, and its output unless ``pipes``, are written to.
        environment: variables set besides those of this process.
        pipes: connect its input and output to this process.
    """

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str], pipes: bool = False
    ) -> None:
        self.log = log
        if not Path(command[0]).exists():
            raise PeerError(f"{command[0]} does not exist; install the peers with --setup")
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else file,
                stderr=file,
                text=True,
                env={**own_environment(), **environment},
                start_new_session=True,
            )

    def pause(self) -> None:
        """Keep all of it from running."""
        pause(self.process.pid)

    def resume(self) -> None:
        """Let it run again."""
        resume(self.process.pid)

    def stop(self) -> None:
        """End it, at first gently."""
        self.resume()
        processes = tree(self.process.pid)
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        else:
            self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()

    def failure(self, what: str) -> PeerError:
        """The error for a process that did not do what it should, with the end of its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return PeerError(f"{what}; the end of {self.log}:\n" + "\n".join(lines[-15:]))
