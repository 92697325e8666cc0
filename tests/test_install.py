"""Protects `triton-inflight install`: an existing Triton serves our models afterwards, or is told why not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from conftest import byte_tokenizer, tiny_model
from test_launcher import alive, wait_until
from triton_inflight.cli import app
from triton_inflight.config_text import config_text
from triton_inflight.installer import install, uninstall
from triton_inflight.server_options import choose_ports
from triton_inflight.supervisor import SHARED_MEMORY
from triton_inflight.triton_home import ENTRY, LaunchError, find_triton, server_environment


def existing_triton(directory: Path, python: str | None = None) -> Path:
    """A backend directory as a Triton has it, with the stub for a Python version (default: the running one)."""
    home = find_triton()
    stub = home.stub if python is None else home.stub.parent.parent / python / home.stub.name
    shutil.copytree(home.backends / "python", directory / "python")
    shutil.copy(stub, directory / "python")
    return directory


def test_installs_replaces_its_own_and_goes_without_a_trace(tmp_path: Path) -> None:
    backends = existing_triton(tmp_path)
    target = install(backends)
    assert target == backends / "inflight" / "model.py"
    assert target.read_bytes() == ENTRY.read_bytes()
    assert [file.name for file in target.parent.iterdir()] == ["model.py"], (
        "nothing may shadow a standard module"
    )
    assert target.stat().st_mode & 0o444 == 0o444, "tritonserver may run as another user"
    install(backends)
    uninstall(backends)
    assert [directory.name for directory in backends.iterdir()] == ["python"]
    with pytest.raises(LaunchError, match="nothing to uninstall"):
        uninstall(backends)


def test_another_backend_of_the_name_is_replaced_only_by_force(tmp_path: Path) -> None:
    backends = existing_triton(tmp_path)
    (backends / "inflight").mkdir()
    (backends / "inflight" / "model.py").write_text("somebody else's")
    with pytest.raises(LaunchError, match="--force replaces it"):
        install(backends)
    assert install(backends, force=True).read_bytes() == ENTRY.read_bytes()


def test_a_stub_for_another_python_is_refused_with_both_versions(tmp_path: Path) -> None:
    other = "3.12" if sys.version_info[:2] != (3, 12) else "3.10"
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    with pytest.raises(LaunchError, match=rf"libpython{other}.so.1.0, but this is Python {running} "):
        install(existing_triton(tmp_path, python=other))
    assert not (tmp_path / "inflight").exists()


def test_a_directory_that_is_no_backend_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="not the backend directory of a Triton"):
        install(tmp_path)


def test_the_command_says_what_it_did(tmp_path: Path) -> None:
    backends = existing_triton(tmp_path)
    runner = CliRunner()
    done = runner.invoke(app, ["install", "--backend-directory", str(backends)])
    assert done.exit_code == 0
    assert str(backends / "inflight" / "model.py") in done.output
    undone = runner.invoke(app, ["install", "--backend-directory", str(backends), "--uninstall"])
    assert undone.exit_code == 0
    assert not (backends / "inflight").exists()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one random model of backend "inflight"."""
    folder = tmp_path / "repository" / "tiny"
    (folder / "1").mkdir(parents=True)
    tiny_model("llama").save_pretrained(folder / "weights")
    byte_tokenizer().save_pretrained(folder / "weights")
    (folder / "config.pbtxt").write_text(config_text("weights", dtype="float32", max_batch_size=4))
    return folder.parent


@pytest.mark.server
def test_plain_tritonserver_runs_the_installed_backend_and_its_stub_dies_with_it(
    tmp_path: Path, repository: Path
) -> None:
    """No launcher and no supervisor here: the stub itself has to see that its killed tritonserver is gone.

    The dead tritonserver stays uncollected meanwhile, so that its PID still exists: what misleads Triton's stub.
    """
    backends = existing_triton(tmp_path / "backends")
    install(backends)
    home = find_triton()
    ports = choose_ports("127.0.0.1", [None, None, None])
    prefix = f"triton-inflight-test-{os.getpid()}-"
    command = [
        str(home.server),
        f"--backend-directory={backends}",
        f"--model-repository={repository}",
        f"--backend-config=python,shm-region-prefix-name={prefix}",
        *(f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), ports, strict=True)),
        *(f"--{name}-address=127.0.0.1" for name in ("http", "grpc", "metrics")),
    ]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, env=server_environment(home), stdout=log, stderr=log)
    stubs: list[psutil.Process] = []
    try:
        answer = generate_when_ready(f"http://127.0.0.1:{ports[0]}/v2/models/tiny/generate", server)
        assert isinstance(answer["text_output"], str), (tmp_path / "log").read_text()
        stubs = psutil.Process(server.pid).children(recursive=True)
        assert stubs
        assert list(SHARED_MEMORY.glob(prefix + "*"))
        os.kill(server.pid, signal.SIGKILL)
        # Nobody may collect an orphan that has ended, so what counts is that it runs no more.
        wait_until(lambda: not any(alive(stub) for stub in stubs), "the stub has ended")
        assert psutil.Process(server.pid).status() == psutil.STATUS_ZOMBIE
        assert not list(SHARED_MEMORY.glob(prefix + "*"))
    finally:
        for process in [*stubs, server]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        server.wait()


def generate_when_ready(url: str, server: subprocess.Popen[bytes]) -> dict[str, str]:
    """What the model answers as soon as it is there."""
    request = urllib.request.Request(url, json.dumps({"text_input": "hello", "max_tokens": 4}).encode())
    deadline = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return dict(json.load(response))
        except OSError:
            assert server.poll() is None, "tritonserver ended"
            assert time.monotonic() < deadline, "the model does not answer"
            time.sleep(0.1)
