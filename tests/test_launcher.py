"""Protects the life of a tritonserver: it starts, says why it does not, and leaves nothing behind.

The server is the real one; the models are small Python models, so that a start takes a second or two.
"""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from triton_inflight.launcher import TritonServer
from triton_inflight.processes import pause
from triton_inflight.server_log import failure_reason
from triton_inflight.server_options import choose_ports
from triton_inflight.supervisor import SHARED_MEMORY
from triton_inflight.triton_home import LaunchError, find_triton, needed_libpython

pytestmark = pytest.mark.server

CONFIG = """
backend: "python"
max_batch_size: 4
input [ { name: "a", data_type: TYPE_STRING, dims: [ 1 ] } ]
output [ { name: "a", data_type: TYPE_STRING, dims: [ 1 ] } ]
"""
ECHO = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "a") for request in requests]
        return [pb_utils.InferenceResponse([tensor]) for tensor in tensors]
"""
REFUSES = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        raise pb_utils.TritonModelException("model 'x' does not fit:\\n  - dtype: float99 is not allowed")
"""
LOADS_FOR_EVER = """
import time
class TritonPythonModel:
    def initialize(self, args):
        time.sleep(1e6)
"""


def make_repository(directory: Path, **models: str) -> Path:
    """A model repository with these models, name=source."""
    for name, source in models.items():
        (directory / name / "1").mkdir(parents=True)
        (directory / name / "config.pbtxt").write_text(CONFIG)
        (directory / name / "1" / "model.py").write_text(source)
    return directory


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen: {what}"
        time.sleep(0.05)


def infer(http_url: str, model: str) -> Any:
    body = {"inputs": [{"name": "a", "shape": [1, 1], "datatype": "BYTES", "data": ["hello"]}]}
    request = urllib.request.Request(f"{http_url}/v2/models/{model}/infer", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)["outputs"][0]["data"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_repository(tmp_path_factory.mktemp("repository"), echo=ECHO, other=ECHO)


class Remains:
    """Everything that a running server consists of, to look for after its end."""

    def __init__(self, pid: int, supervisor_pid: int, shm_prefix: str, runtime_directory: str) -> None:
        server = psutil.Process(pid)
        self.server, self.supervisor = server, psutil.Process(supervisor_pid)
        self.stubs = server.children(recursive=True)
        self._shm_prefix, self._runtime_directory = shm_prefix, Path(runtime_directory)
        assert self.stubs, "the server has no stub"
        assert list(self._shared_memory()), "the stub has no shared memory under our prefix"
        assert self._runtime_directory.exists()

    @classmethod
    def of(cls, server: TritonServer) -> Remains:
        assert server.pid is not None
        assert server.supervisor_pid is not None
        return cls(server.pid, server.supervisor_pid, server.shm_prefix, str(server.runtime_directory))

    def _shared_memory(self) -> Iterator[Path]:
        return SHARED_MEMORY.glob(self._shm_prefix + "*")

    def processes_are_gone(self) -> bool:
        return not any(alive(process) for process in (self.server, self.supervisor, *self.stubs))

    def all_is_gone(self) -> bool:
        files = [
            *self._shared_memory(),
            *([self._runtime_directory] if self._runtime_directory.exists() else []),
        ]
        return self.processes_are_gone() and not files


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -- starting and stopping ------------------------------------------------------------------------------------


def test_serves_every_model_then_leaves_nothing(repository: Path) -> None:
    with TritonServer(repository) as server:
        remains = Remains.of(server)
        assert len({server.http_port, server.grpc_port, server.metrics_port}) == 3
        assert infer(server.http_url, "echo") == infer(server.http_url, "other") == ["hello"]
        with urllib.request.urlopen(server.metrics_url, timeout=30) as metrics:
            assert b"nv_inference_request_success" in metrics.read()
        listening = {
            c.laddr.ip for c in remains.server.net_connections("tcp") if c.status == psutil.CONN_LISTEN
        }
        assert listening <= {"127.0.0.1", "::ffff:127.0.0.1"}  # the second is how gRPC says it
    assert remains.all_is_gone()
    assert not server.log_path.exists()


def test_named_models_alone_are_loaded_and_options_reach_triton(repository: Path, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with TritonServer(repository, models=["other"], options=["--id=of-a-test"], log_path=log) as server:
        with urllib.request.urlopen(f"{server.http_url}/v2", timeout=30) as metadata:
            assert json.load(metadata)["name"] == "of-a-test"
        assert infer(server.http_url, "other") == ["hello"]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            infer(server.http_url, "echo")
    assert "successfully loaded 'other'" in log.read_text(), "a log that was asked for stays"


def test_a_triton_on_path_is_used_with_all_of_its_backends(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel's Triton, laid out as one that stands on its own: in NVIDIA's container, for one."""
    wheel = find_triton()
    (tmp_path / "bin").mkdir()
    (tmp_path / "backends" / "another").mkdir(parents=True)
    shutil.copy(wheel.server, tmp_path / "bin")
    shutil.copytree(wheel.backends / "python", tmp_path / "backends" / "python")
    shutil.copy(wheel.stub, tmp_path / "backends" / "python")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(wheel.libraries))
    with TritonServer(repository, models=["echo"]) as server:
        assert infer(server.http_url, "echo") == ["hello"]
        assert server.pid is not None
        assert psutil.Process(server.pid).exe() == str(tmp_path / "bin" / "tritonserver")
        assert (server.runtime_directory / "backends" / "another").is_dir()


def test_stop_does_not_wait_for_a_model_that_never_loads(tmp_path: Path) -> None:
    server = TritonServer(make_repository(tmp_path, slow=LOADS_FOR_EVER))
    server.start()
    with pytest.raises(LaunchError, match="not ready after 3 s"):
        server.wait_ready(timeout=3)
    assert not server.is_running()
    assert not server.runtime_directory.exists()
    server.log_path.unlink()


# -- reasons --------------------------------------------------------------------------------------------------


def test_the_reason_of_a_model_is_in_the_error(tmp_path: Path) -> None:
    repository = make_repository(tmp_path, good=ECHO, bad=REFUSES, broken="import nowhere_to_be_found")
    server = TritonServer(repository)
    with pytest.raises(LaunchError) as failure, server:
        pass
    message = str(failure.value)
    assert "bad: model 'x' does not fit:\n  - dtype: float99 is not allowed" in message
    assert "broken: ModuleNotFoundError: No module named 'nowhere_to_be_found'" in message
    assert str(server.log_path) in message
    assert "good" not in message
    assert not server.runtime_directory.exists()
    server.log_path.unlink()


def test_what_did_load_is_served_when_errors_are_tolerated(tmp_path: Path) -> None:
    repository = make_repository(tmp_path, good=ECHO, bad=REFUSES)
    with TritonServer(repository, options=["--exit-on-error", "false"]) as server:
        assert infer(server.http_url, "good") == ["hello"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            "E1130 main.cc:1] \"x\"\ntritonserver: unrecognized option '--nope'",
            "unrecognized option '--nope'",
        ),
        (
            "tritonserver: error while loading shared libraries: libx.so: no such file",
            "libx.so: no such file",
        ),
        (
            "E1130 20:02:17.751139 11779 repo.cc:14] \"failed to poll model 'z': model not found.\"\n"
            "error: creating server: Internal - failed to load all models",
            "z: model not found.",
        ),
        (
            "E1130 20:02:20.96 11 main.cc:25] \"failed to start HTTP service: Socket 'h:1' already in use \"",
            "Socket 'h:1' already in use",
        ),
        ("something nobody has seen before", "something nobody has seen before"),
        ("", "wrote nothing"),
    ],
)
def test_reasons_in_the_words_of_triton(tmp_path: Path, line: str, reason: str) -> None:
    (tmp_path / "log").write_text(line)
    assert reason in failure_reason(tmp_path / "log")


def test_a_taken_port_is_named_before_anything_starts(repository: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        server = TritonServer(repository, grpc_port=taken)
        with pytest.raises(LaunchError, match=f"port {taken} of 127.0.0.1 is in use"):
            server.start()
    assert not server.is_running()
    assert not server.runtime_directory.exists()


def test_a_free_port_lost_to_another_is_replaced(repository: Path) -> None:
    server = TritonServer(repository)
    server.start()
    lost = server.http_port
    with socket.socket() as quicker:
        quicker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        quicker.bind(("127.0.0.1", lost))
        quicker.listen()
        server.wait_ready()
        assert server.http_port != lost
        assert infer(server.http_url, "echo") == ["hello"]
    server.stop()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"cannot listen on 192\.0\.2\.1"):
        choose_ports("192.0.2.1", [None])


def test_what_cannot_be_served_is_refused_at_once(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"'.*nowhere' is not a directory"):
        TritonServer(tmp_path / "nowhere")
    with pytest.raises(LaunchError, match="--http-port before the --"):
        TritonServer(repository, options=["--http-port=1"])
    with pytest.raises(LaunchError, match="exit-timeout-secs: invalid int value: 'soon'"):
        TritonServer(repository, options=["--exit-timeout-secs", "soon"])
    with pytest.raises(LaunchError, match="nothing' is not a program"):
        TritonServer(repository, server=tmp_path / "nothing")


def test_a_triton_for_another_python_is_refused_with_both_versions(tmp_path: Path) -> None:
    """A Triton that stands on its own has one stub; here it is the wheel's for another Python."""
    wheel = find_triton()
    other = "3.12" if sys.version_info[:2] != (3, 12) else "3.11"
    stub = wheel.stub.parent.parent / other / wheel.stub.name
    (tmp_path / "bin").mkdir()
    (tmp_path / "backends" / "python").mkdir(parents=True)
    (tmp_path / "backends" / "python" / stub.name).write_bytes(stub.read_bytes())
    program = tmp_path / "bin" / "tritonserver"
    program.write_bytes(b"")
    program.chmod(0o755)
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    with pytest.raises(LaunchError, match=rf"libpython{other}.so.1.0, but this is Python {running}"):
        find_triton(program)


def test_the_stub_of_the_wheel_needs_the_running_python() -> None:
    assert f"{sys.version_info.minor}" in needed_libpython(find_triton().stub)


# -- the end, whoever dies ------------------------------------------------------------------------------------

PARENT = """
import json, os, sys, time
from triton_inflight.launcher import TritonServer
server = TritonServer(sys.argv[1], log_path=sys.argv[2])
server.start()
server.wait_ready()
if child := os.fork():
    remains = [server.pid, server.supervisor_pid, server.shm_prefix, str(server.runtime_directory)]
    print(json.dumps([child, remains]), flush=True)
time.sleep(1e6)
"""


def test_nothing_outlives_a_killed_parent(repository: Path, tmp_path: Path) -> None:
    """Not even where a forked child of the parent lives on and holds everything open that the parent had."""
    command = [sys.executable, "-c", PARENT, str(repository), str(tmp_path / "log")]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child, arguments = json.loads(parent.stdout.readline())
    try:
        remains = Remains(*arguments)
        parent.kill()
        parent.wait()
        wait_until(remains.all_is_gone, "server, stubs, supervisor and files are gone")
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_paused_server_stops_in_order_when_its_parent_is_killed(repository: Path, tmp_path: Path) -> None:
    """As `compare` leaves its servers between their turns. One that stays paused cannot stop, and is killed later."""
    log = tmp_path / "log"
    command = [sys.executable, "-c", PARENT, str(repository), str(log)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child, arguments = json.loads(parent.stdout.readline())
    try:
        remains = Remains(*arguments)
        pause(remains.server.pid)
        parent.kill()
        parent.wait()
        wait_until(remains.all_is_gone, "server, stubs, supervisor and files are gone")
    finally:
        os.kill(child, signal.SIGKILL)
    assert "Signal (15) received" in log.read_text()


def test_nothing_outlives_a_killed_tritonserver(repository: Path) -> None:
    with TritonServer(repository) as server:
        remains = Remains.of(server)
        remains.server.kill()
        assert server.wait(60)
        assert remains.all_is_gone()
        assert "ended by itself with exit code 137" in str(server.failure())
    server.log_path.unlink()


def test_nothing_outlives_a_killed_supervisor(repository: Path) -> None:
    with TritonServer(repository) as server:
        remains = Remains.of(server)
        remains.supervisor.kill()
        wait_until(remains.processes_are_gone, "server and stubs are gone")
    assert remains.all_is_gone()
    server.log_path.unlink()


# -- triton-inflight serve ------------------------------------------------------------------------------------


class Serve:
    """`triton-inflight serve` in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        command = [Path(sys.executable).parent / "triton-inflight", "serve", *arguments]
        self._terminal, inner = pty.openpty()
        self.process = subprocess.Popen(
            command, stdin=inner, stdout=inner, stderr=inner, start_new_session=True, preexec_fn=take_terminal
        )
        os.close(inner)
        os.set_blocking(self._terminal, False)
        self.output = ""

    def read(self) -> str:
        try:
            while piece := os.read(self._terminal, 65536):
                self.output += piece.decode(errors="replace")
        except OSError:  # nothing now, or the other side is gone
            pass
        return self.output

    def press_ctrl_c(self) -> None:
        os.write(self._terminal, b"\x03")

    def exit_code(self) -> int:
        wait_until(lambda: self.read() is not None and self.process.poll() is not None, "serve ends")
        self.read()
        assert self.process.returncode is not None
        return self.process.returncode

    def log_path(self) -> Path:
        named = re.search(r"^log +(\S+)", self.read(), re.MULTILINE)
        assert named is not None
        return Path(named[1])

    def log(self) -> str:
        return self.log_path().read_text()

    def remains(self) -> Remains:
        wait_until(lambda: "Ctrl-C" in self.read(), f"serve is ready\n{self.output}")
        supervisor = psutil.Process(self.process.pid).children()[0]
        options = dict(word.split("=", 1) for word in supervisor.cmdline() if "=" in word)
        server = supervisor.children()[0]
        return Remains(server.pid, supervisor.pid, options["--shm-prefix"], options["--runtime-directory"])


def take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")


def test_ctrl_c_again_does_not_wait_for_an_open_connection(repository: Path) -> None:
    """Triton itself would wait out its exit timeout, which is an hour here."""
    serve = Serve("--model-repository", str(repository), *PORTS, "--", "--exit-timeout-secs=3600")
    remains = serve.remains()
    url = re.search(r"HTTP +http://127\.0\.0\.1:(\d+)", serve.output)
    assert url is not None
    with socket.create_connection(("127.0.0.1", int(url[1]))) as idle:
        idle.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert idle.recv(64).startswith(b"HTTP/1.1 200")
        serve.press_ctrl_c()
        wait_until(lambda: "HTTP service connections" in serve.log(), "Triton waits for the connection")
        assert alive(remains.server)
        serve.press_ctrl_c()
        assert serve.exit_code() == 0, serve.output
    assert remains.all_is_gone()
    serve.log_path().unlink()


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_serve_ends_cleanly(repository: Path, how: str) -> None:
    serve = Serve("--model-repository", str(repository), "--model", "echo", *PORTS, "--", "--id=x")
    remains = serve.remains()
    if how == "Ctrl-C":
        serve.press_ctrl_c()
    else:
        serve.process.send_signal(signal.SIGTERM)
    assert serve.exit_code() == 0, serve.output
    assert remains.all_is_gone()
    assert "Traceback" not in serve.output


def test_serve_fails_when_its_server_dies(repository: Path, tmp_path: Path) -> None:
    serve = Serve("--model-repository", str(repository), *PORTS, "--log-file", str(tmp_path / "log"))
    remains = serve.remains()
    remains.server.kill()
    assert serve.exit_code() == 1, serve.output
    assert "exit code 137" in serve.output
    assert "Traceback" not in serve.output
    assert remains.all_is_gone()
