"""Runs a real tritonserver: finds it, starts it, waits until it is ready, and takes it down with its parent."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import psutil

from triton_inflight import stopping, supervisor
from triton_inflight.server_log import failure_reason, last_message, lost_a_port
from triton_inflight.server_options import SERVICES, choose_ports, read_options
from triton_inflight.stub_watch import StubWatch
from triton_inflight.triton_home import LaunchError, assemble_backends, find_triton, server_environment

_DRAIN_SHARE = 0.5  # of the exit timeout: then sequences are ended, and models have the rest of it to unload
_GRACE_SECONDS = 5  # past the exit timeout, before the server is killed
_ATTEMPTS_AT_FREE_PORTS = 3
_SECONDS_BETWEEN_LOOKS = 1.0


class TritonServer:
    """A tritonserver that serves models of ``backend: "inflight"`` and ends with this process at the latest.

    As a context manager it is ready inside the block and gone after it. Between this process and tritonserver
    stands a supervisor process (see ``supervisor.py``) that cleans up in every case.

    Args:
        model_repository: one model repository, or several.
        models: names of the models to load; none names all of them.
        http_port, grpc_port, metrics_port: None or 0 takes a free one, known once the server is ready.
        host: address to listen on.
        options: further options of tritonserver.
        server: the tritonserver program, if not the one that ``find_triton`` finds.
        log_path: where server and models log to. By default a file in the temporary directory, which is
            removed after a clean stop.

    Raises:
        LaunchError: there is no tritonserver that can be used here, or an option is not for it.
    """

    def __init__(
        self,
        model_repository: Path | str | Sequence[Path | str],
        *,
        models: Sequence[str] = (),
        http_port: int | None = None,
        grpc_port: int | None = None,
        metrics_port: int | None = None,
        host: str = "127.0.0.1",
        options: Sequence[str] = (),
        server: Path | str | None = None,
        log_path: Path | str | None = None,
    ) -> None:
        if isinstance(model_repository, str | Path):
            model_repository = [model_repository]
        self._repositories = [Path(repository) for repository in model_repository]
        self._models = list(models)
        self._wanted_ports = [port or None for port in (http_port, grpc_port, metrics_port)]
        self._ports = [0, 0, 0]
        self._options = list(options)
        self.host = host
        self._home = find_triton(server)
        self._environment = server_environment(self._home)
        self._name = f"triton-inflight-{uuid.uuid4().hex[:12]}"
        self._keep_log = log_path is not None
        self.log_path = Path(log_path or Path(tempfile.gettempdir(), f"{self._name}.log"))
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._server: psutil.Process | None = None
        self._stubs: StubWatch | None = None
        self._known_options = read_options(self._options)
        for repository in self._repositories:
            if not repository.is_dir():
                raise LaunchError(f"model repository '{repository}' is not a directory")

    # -- what it is -------------------------------------------------------------------------------------------

    @property
    def http_port(self) -> int:
        """Port of the HTTP endpoint."""
        return self._ports[0]

    @property
    def grpc_port(self) -> int:
        """Port of the gRPC endpoint."""
        return self._ports[1]

    @property
    def metrics_port(self) -> int:
        """Port of the Prometheus metrics endpoint."""
        return self._ports[2]

    @property
    def http_url(self) -> str:
        """Address for HTTP clients, such as ``http://127.0.0.1:8000``."""
        return f"http://{self._client_host}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        """Address for gRPC clients, such as ``127.0.0.1:8001``."""
        return f"{self._client_host}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        """Address of the metrics, such as ``http://127.0.0.1:8002/metrics``."""
        return f"http://{self._client_host}:{self.metrics_port}/metrics"

    @property
    def pid(self) -> int | None:
        """PID of tritonserver; None before it was started."""
        return None if self._server is None else self._server.pid

    @property
    def supervisor_pid(self) -> int | None:
        """PID of the supervisor between this process and tritonserver; None before it was started."""
        return None if self._supervisor is None else self._supervisor.pid

    @property
    def shm_prefix(self) -> str:
        """What the names of the stubs' files in /dev/shm start with."""
        return f"{self._name}-"

    @property
    def runtime_directory(self) -> Path:
        """The server's private backend directory, there while it runs."""
        return Path(tempfile.gettempdir(), self._name)

    # -- what it does -----------------------------------------------------------------------------------------

    def __enter__(self) -> TritonServer:
        self.start()
        self.wait_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server's process; returns before its models are loaded.

        Raises:
            LaunchError: it runs already, a port is taken, the host's address is not this machine's, or the
                process cannot be started.
        """
        if self._supervisor is not None:
            raise LaunchError("this server was started already")
        self._ports = choose_ports(self.host, self._wanted_ports)
        assemble_backends(self._home, self.runtime_directory / "backends")
        with self.log_path.open("wb") as log:
            self._supervisor = subprocess.Popen(
                self._supervisor_command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**self._environment, stopping.VARIABLE: str(self._stop_file)},
                start_new_session=True,  # Ctrl-C in a terminal reaches this process alone, which then stops the others
            )
        assert self._supervisor.stdout is not None
        server_pid = self._supervisor.stdout.readline()
        if not server_pid:
            self.stop()
            raise LaunchError(f"'{self._home.server}' cannot be started; {self._reason()}")
        with contextlib.suppress(psutil.NoSuchProcess):  # then it is gone already, and wait_ready says why
            self._server = psutil.Process(int(server_pid))

    def wait_ready(self, timeout: float | None = 600.0, progress: bool = False) -> None:
        """Wait until the server answers and its models are loaded.

        Args:
            timeout: seconds; None waits as long as it takes.
            progress: show on the terminal how long it has taken and what the server does.

        Raises:
            LaunchError: a model does not load, a port is taken, the server ends, or the time is over. The
                message has the reason from the server's log; the server is stopped.
        """
        from rich.console import Console
        from rich.markup import escape

        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            with Console(stderr=True, quiet=not progress).status("starting tritonserver") as status:
                started = time.monotonic()
                for attempt in range(1, _ATTEMPTS_AT_FREE_PORTS + 1):
                    while self.is_running():
                        if self._is_ready():
                            assert self._server is not None
                            self._stubs = StubWatch(self._server)
                            self._stubs.look(self.ready_models())
                            return
                        if deadline is not None and time.monotonic() > deadline:
                            raise LaunchError(
                                f"tritonserver was not ready after {timeout:g} s; {self._reason()}"
                            )
                        if progress:
                            seconds = f"{time.monotonic() - started:.0f} s"
                            status.update(escape(f"{seconds}  {last_message(self.log_path)[:120]}"))
                        time.sleep(0.1)
                    if attempt == _ATTEMPTS_AT_FREE_PORTS or not self._lost_a_free_port():
                        raise LaunchError(f"tritonserver did not start; {self._reason()}")
                    self.stop()
                    self.start()
        except BaseException as error:
            self._keep_log |= isinstance(error, LaunchError)
            self.stop()
            raise

    def ready_models(self) -> list[str]:
        """Names of the models that can be used now, sorted."""
        request = urllib.request.Request(f"{self.http_url}/v2/repository/index", method="POST")
        with urllib.request.urlopen(request, timeout=30) as response:
            return sorted({model["name"] for model in json.load(response) if model.get("state") == "READY"})

    def is_running(self) -> bool:
        """Whether the server's process is there."""
        return self._supervisor is not None and self._supervisor.poll() is None

    def watch(self) -> LaunchError:
        """Wait until the server ends by itself, or the Python process of one of its models does; what to raise then.

        The server may still run then: it goes on with its other models, if it has any.
        """
        assert self._stubs is not None, "the server was not waited for"
        while not self.wait(_SECONDS_BETWEEN_LOOKS):
            try:
                dead = self._stubs.look(self.ready_models())
            except OSError:  # it does not answer: it is about to end, or busy
                continue
            if dead:
                self._keep_log = True
                return LaunchError(
                    f"the Python process of {', '.join(map(repr, dead))} has died, killed by a signal or for want of "
                    f"memory; Triton does not start another; {self._reason()}"
                )
        return self.failure()

    def keep_ports(self) -> None:
        """When it is started again, take the ports that it had."""
        self._wanted_ports = list(self._ports)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the server to end by itself, at most ``timeout`` seconds; whether it has."""
        assert self._supervisor is not None, "the server was not started"
        try:
            self._supervisor.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def failure(self) -> LaunchError:
        """What to raise when a server that was ready has ended by itself."""
        self._keep_log = True
        code = None if self._supervisor is None else self._supervisor.returncode
        return LaunchError(f"tritonserver ended by itself with exit code {code}; {self._reason()}")

    def stop(self) -> int | None:
        """Stop the server and wait until nothing of it is left; Triton's exit code, None if it did not run.

        Triton waits for requests in flight and for clients that keep HTTP connections open, at most its
        exit timeout (10 s, or ``--exit-timeout-secs`` in the options). A second Ctrl-C cuts that short.
        """
        process, self._supervisor = self._supervisor, None
        if process is None:
            return None
        assert process.stdin is not None
        process.stdin.close()  # what the supervisor waits for
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.terminate()
            code = process.wait()
        if code < 0:
            self._clean_up_after_killed_supervisor()
        if code == 0 and not self._keep_log:
            self.log_path.unlink(missing_ok=True)
        return code

    # -- how --------------------------------------------------------------------------------------------------

    @property
    def _client_host(self) -> str:
        return "127.0.0.1" if self.host in ("0.0.0.0", "") else self.host

    @property
    def _stop_file(self) -> Path:
        return self.runtime_directory / "stopping"

    @property
    def _seconds_to_stop(self) -> int:
        return self._known_options.exit_timeout_seconds + _GRACE_SECONDS

    def _supervisor_command(self) -> list[str]:
        return [
            # -I, -S: nothing of the environment is read, which makes it quick and safe.
            sys.executable, "-I", "-S", supervisor.__file__,
            f"--parent-pid={os.getpid()}",
            f"--grace-seconds={self._seconds_to_stop}",
            f"--stop-file={self._stop_file}",
            f"--drain-seconds={_DRAIN_SHARE * self._known_options.exit_timeout_seconds}",
            f"--shm-prefix={self.shm_prefix}",
            f"--runtime-directory={self.runtime_directory}",
            "--",
            *self._server_command(),
        ]  # fmt: skip

    def _server_command(self) -> list[str]:
        return [
            str(self._home.server),
            f"--backend-directory={self.runtime_directory / 'backends'}",
            *(f"--model-repository={repository.resolve()}" for repository in self._repositories),
            *(f"--{service}-port={port}" for service, port in zip(SERVICES, self._ports, strict=True)),
            *(f"--{service}-address={self.host}" for service in SERVICES),
            *(["--model-control-mode=explicit"] if self._models else []),
            *(f"--load-model={model}" for model in self._models),
            # Python-based backends take this one from "python", not from their own name.
            f"--backend-config=python,shm-region-prefix-name={self.shm_prefix}",
            f"--exit-timeout-secs={self._known_options.exit_timeout_seconds}",
            *self._options,
        ]

    def _is_ready(self) -> bool:
        # With --exit-on-error=false the server is to serve what did load; it is never "ready" then.
        asked = "ready" if self._known_options.exit_on_error else "live"
        try:
            with urllib.request.urlopen(f"{self.http_url}/v2/health/{asked}", timeout=5) as response:
                return response.status == 200 and self._listens()
        except (urllib.error.URLError, OSError):
            return False

    def _listens(self) -> bool:
        """Whether it is our server that answers on the HTTP port, and not one that was quicker to take it."""
        assert self._server is not None
        try:
            connections = self._server.net_connections(kind="tcp")
        except psutil.Error:
            return False
        return any(c.status == psutil.CONN_LISTEN and c.laddr.port == self.http_port for c in connections)

    def _lost_a_free_port(self) -> bool:
        return None in self._wanted_ports and lost_a_port(self.log_path)

    def _reason(self) -> str:
        return f"its log says:\n{failure_reason(self.log_path)}\n(the whole log: {self.log_path})"

    def _clean_up_after_killed_supervisor(self) -> None:
        """Do the supervisor's last duties. tritonserver itself got SIGTERM when its parent died."""
        if self._server is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                stubs = self._server.children(recursive=True)
                try:
                    self._server.wait(self._seconds_to_stop)
                except psutil.TimeoutExpired:
                    self._server.kill()
                for stub in stubs:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        stub.send_signal(signal.SIGKILL)
        supervisor.remove_leftovers(self.shm_prefix, self.runtime_directory)
