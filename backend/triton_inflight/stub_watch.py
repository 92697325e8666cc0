"""Finds models whose Python process has died: Triton 2.51 goes on calling them ready, and never starts another."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import psutil


class StubWatch:
    """Looks at the Python stubs of a tritonserver, of which each serves one instance of a model.

    Args:
        server: tritonserver's process.
    """

    def __init__(self, server: psutil.Process) -> None:
        self._server = server
        self._seen: set[tuple[str, str]] = set()
        self._suspects: set[str] = set()

    def look(self, ready_models: Collection[str]) -> list[str]:
        """Names of the ready models that lack a stub they had; only what is so twice, since models may be reloaded.

        Args:
            ready_models: names of the models that Triton says are ready.
        """
        alive = {stub for process in self._children() if (stub := _stub(process)) is not None}
        self._seen |= alive
        lacking = {model for model, _ in self._seen - alive if model in ready_models}
        self._seen = {stub for stub in self._seen if stub[0] in ready_models}
        confirmed = sorted(lacking & self._suspects)
        self._suspects = lacking
        return confirmed

    def _children(self) -> list[psutil.Process]:
        try:
            return list(self._server.children(recursive=True))
        except psutil.NoSuchProcess:
            return []


def _stub(process: psutil.Process) -> tuple[str, str] | None:
    """(model, instance) of a live stub; None for anything else.

    Its command line: the stub, MODEL/VERSION/model.py, the name of its shared memory, sizes, a PID, a directory, ...,
    the instance's name, the backend's directory. One that only completes a configuration has the model's name there.
    """
    try:
        arguments = process.cmdline()
    except psutil.Error:
        return None
    if len(arguments) < 4 or not Path(arguments[0]).name.startswith("triton_python_backend_stub"):
        return None  # among others a zombie, which has no command line
    model, instance = Path(arguments[1]).parent.parent.name, arguments[-2]
    return None if instance == model else (model, instance)
