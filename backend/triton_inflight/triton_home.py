"""Where a tritonserver stands, and what it needs to run models of ``backend: "inflight"``."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from triton_inflight.errors import InflightError

BACKEND_NAME = "inflight"
ENTRY = Path(__file__).parent / "entry" / "model.py"
SERVER_VARIABLE = "TRITON_INFLIGHT_SERVER"


class LaunchError(InflightError):
    """A tritonserver cannot be found, started, or kept running; the message says why."""


@dataclass(frozen=True)
class TritonHome:
    """One installed Triton.

    Attributes:
        server: the tritonserver program.
        backends: its backend directory; holds ``python/``.
        stub: the Python backend's stub, the program that runs a Python model.
        libraries: shared libraries that the stub needs beside the system's, if they stand apart.
    """

    server: Path
    backends: Path
    stub: Path
    libraries: Path | None

    @property
    def is_wheel(self) -> bool:
        """Whether this is the Triton of the nvidia-pytriton wheel, with one stub for each Python."""
        return self.libraries is not None


def find_triton(server: Path | str | None = None) -> TritonHome:
    """Find a Triton whose Python stub fits the running Python.

    Looked for in this order: ``server``, the variable TRITON_INFLIGHT_SERVER, ``tritonserver`` on PATH, the
    nvidia-pytriton wheel (whose package is located, never imported).

    Raises:
        LaunchError: there is none, or its Python backend is missing or is for another Python.
    """
    chosen = server or os.environ.get(SERVER_VARIABLE)
    program = Path(chosen) if chosen else _on_path() or _in_wheel()
    if program is None:
        raise LaunchError(
            "no tritonserver: none on PATH, none named by the variable "
            f"{SERVER_VARIABLE}, and the nvidia-pytriton wheel is not installed in {sys.prefix}. "
            "Get one with: pip install 'triton-inflight[server]'"
        )
    if not os.access(program, os.X_OK) or program.is_dir():
        raise LaunchError(f"'{program}' is not a program; {SERVER_VARIABLE} must name a tritonserver")
    program = program.resolve()
    root = program.parent.parent
    if (root / "python_backend_stubs").is_dir():
        stub = _wheel_stub(root / "python_backend_stubs")
        libraries: Path | None = root.parent.parent / "nvidia_pytriton.libs"
    else:
        stub = root / "backends" / "python" / "triton_python_backend_stub"
        libraries = None
        check_stub(stub)
    return TritonHome(program, root / "backends", stub, libraries)


def _on_path() -> Path | None:
    found = shutil.which("tritonserver")
    return Path(found) if found else None


def _in_wheel() -> Path | None:
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "tritonserver" / "bin" / "tritonserver"


def _wheel_stub(stubs: Path) -> Path:
    stub = stubs / _running_python() / "triton_python_backend_stub"
    if not stub.is_file():
        there = ", ".join(sorted((d.name for d in stubs.iterdir()), key=lambda name: int(name.split(".")[1])))
        raise LaunchError(
            f"{stubs.parent} has no Python stub for the running Python {_running_python()} ({sys.executable}); "
            f"it has stubs for {there}"
        )
    return stub


def check_stub(stub: Path) -> None:
    """Make sure that a stub runs models with the Python version that runs now.

    Raises:
        LaunchError: the stub is not there, or is for another Python.
    """
    if not stub.is_file():
        raise LaunchError(f"'{stub}' is not there: this Triton has no Python backend, which models run in")
    library = needed_libpython(stub)
    wanted = re.search(r"3(?:-\w+)?\.(\d+)", library)
    if wanted is None or f"3.{wanted[1]}" != _running_python():
        raise LaunchError(
            f"'{stub}' runs models with {library}, but this is Python {_running_python()} ({sys.executable}); "
            "install triton-inflight into an environment of the stub's Python version and use it from there, "
            "or build a stub for this one"
        )


def needed_libpython(stub: Path) -> str:
    """The file name of the Python library that a stub is linked to, such as ``libpython3.11.so.1.0``.

    Raises:
        LaunchError: it names none.
    """
    # The names of needed libraries stand in an ELF file's string table, each ended by a zero byte.
    found = re.search(rb"\0(libpython3[-.\w]*\.so[.\d]*)\0", stub.read_bytes())
    if found is None:
        raise LaunchError(f"'{stub}' names no libpython: it is not a stub of Triton's Python backend")
    return found[1].decode()


def assemble_backends(home: TritonHome, directory: Path) -> None:
    """Make a backend directory with everything that Triton has, and ours.

    Triton refuses a backend library that is a link out of its directory (so the wheel's is copied), but takes a
    link to a whole directory.

    Args:
        directory: where to make it; must not be there yet.
    """
    directory.mkdir(parents=True)
    for backend in home.backends.iterdir():
        if backend.is_dir() and backend.name not in (BACKEND_NAME, "python"):
            (directory / backend.name).symlink_to(backend)
    if home.is_wheel:
        python = directory / "python"
        shutil.copytree(home.backends / "python", python, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(home.stub, python)
    else:
        (directory / "python").symlink_to(home.backends / "python")
    (directory / BACKEND_NAME).mkdir()
    shutil.copyfile(ENTRY, directory / BACKEND_NAME / "model.py")


def server_environment(home: TritonHome) -> dict[str, str]:
    """The environment in which tritonserver's stubs run this Python with this environment's packages.

    Raises:
        LaunchError: the running Python has no shared library.
    """
    libpython = needed_libpython(home.stub)
    libraries = [] if home.libraries is None else [str(home.libraries)]
    if home.libraries is None or not (home.libraries / libpython).exists():
        # First of all: another Python's library of the same name misses symbols that our packages were built for.
        libraries.insert(0, str(_directory_of_libpython(libpython)))
    environment = dict(os.environ)
    environment["LD_LIBRARY_PATH"] = _joined(libraries, environment.get("LD_LIBRARY_PATH"))
    # The stub embeds Python, which takes its packages from where the first `python3` on PATH has them.
    environment["PATH"] = _joined([str(Path(sys.executable).parent)], environment.get("PATH"))
    if sys.prefix != sys.base_prefix:
        environment["VIRTUAL_ENV"] = sys.prefix
    return environment


def _directory_of_libpython(name: str) -> Path:
    multiarch = sysconfig.get_config_var("MULTIARCH") or "."
    libdir = Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib")
    places = [libdir, libdir / multiarch, Path(sys.base_prefix) / "lib"]
    for place in places:
        if (place / name).exists():
            return place
    raise LaunchError(
        f"Triton's Python stub needs {name}, which the running Python {sys.executable} does not have: it was built "
        f"without a shared library (looked in {', '.join(map(str, places))}). Use a Python that has it: "
        "Debian's with the package libpython3-dev, conda's, uv's, or one configured with --enable-shared"
    )


def _joined(first: list[str], rest: str | None) -> str:
    return os.pathsep.join([*first, *([rest] if rest else [])])


def _running_python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"
