"""Places the backend into an existing Triton, and takes it out again."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from triton_inflight.triton_home import BACKEND_NAME, ENTRY, LaunchError, check_stub


def install(backend_directory: Path, force: bool = False) -> Path:
    """Make a Triton serve models of ``backend: "inflight"``.

    Args:
        backend_directory: the Triton's backend directory, such as /opt/tritonserver/backends.
        force: replace an ``inflight`` backend that is not this package's.

    Returns:
        The installed file.

    Raises:
        LaunchError: the directory is not a Triton's backend directory, its Python stub is for another Python
            than the one this package runs in, another ``inflight`` is there, or the place is not writable.
    """
    python_backend = backend_directory / "python"
    if not (python_backend / "libtriton_python.so").is_file():
        raise LaunchError(
            f"'{backend_directory}' holds no python/libtriton_python.so, so it is not the backend directory of a "
            "Triton with the Python backend; in NVIDIA's container that is /opt/tritonserver/backends"
        )
    check_stub(python_backend / "triton_python_backend_stub")
    target = _target(backend_directory)
    content = ENTRY.read_bytes()
    if target.exists() and target.read_bytes() != content and not force:
        raise LaunchError(f"'{target}' is there already and is not this version's; --force replaces it")
    try:
        target.parent.mkdir(exist_ok=True)
        _write_atomically(target, content)
    except OSError as error:
        raise LaunchError(f"cannot write '{target}': {error.strerror}") from error
    return target


def uninstall(backend_directory: Path) -> Path:
    """Take the backend out of a Triton; returns the file that was removed.

    Raises:
        LaunchError: it is not there, or cannot be removed.
    """
    target = _target(backend_directory)
    try:
        target.unlink()
        # What Python or a person put beside it decides whether the folder goes too.
        with contextlib.suppress(OSError):
            for compiled in (target.parent / "__pycache__").glob("model.*.pyc"):
                compiled.unlink()
            (target.parent / "__pycache__").rmdir()
        with contextlib.suppress(OSError):
            target.parent.rmdir()
    except FileNotFoundError as error:
        raise LaunchError(f"'{target}' is not there: nothing to uninstall") from error
    except OSError as error:
        raise LaunchError(f"cannot remove '{target}': {error.strerror}") from error
    return target


def _target(backend_directory: Path) -> Path:
    return backend_directory / BACKEND_NAME / "model.py"


def _write_atomically(target: Path, content: bytes) -> None:
    """A server that starts meanwhile finds the old file or the new one, never a part."""
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=".model-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(name).chmod(0o644)  # tritonserver may run as another user
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
