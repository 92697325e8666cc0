"""A model on a real tritonserver, and rounds through its gRPC and HTTP endpoints."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from triton_inflight import bench_grpc, bench_sse
from triton_inflight.bench_rounds import Round
from triton_inflight.bench_sse import Event, StreamError
from triton_inflight.bench_work import Workload
from triton_inflight.config_text import BACKEND
from triton_inflight.errors import InflightError, SettingsError
from triton_inflight.launcher import TritonServer
from triton_inflight.processes import cpu_seconds
from triton_inflight.scaffold import read_config
from triton_inflight.scrape import Samples, scrape
from triton_inflight.settings import Settings, completed
from triton_inflight.weights import resolve

_METRICS_LAG_SECONDS = 10
_METRICS_PERIOD_SECONDS = 0.25  # longer than that of the models' reports
_GENERATED = "inflight_generated_tokens_total"


def copy_model(repository: Path, model: str, changes: Mapping[str, str], directory: Path) -> Settings:
    """Copy a model of a repository, with some of its parameters changed; the settings of the copy.

    Args:
        changes: parameters of config.pbtxt by key.
        directory: the repository that the copy is put into.

    Raises:
        SettingsError, ModelError: there is no such model, or it could not be served.
    """
    folder = repository / model
    path = folder / "config.pbtxt"
    if not path.is_file():
        there = sorted(each.parent.name for each in repository.glob("*/config.pbtxt"))
        raise SettingsError(f"{path} does not exist; models of this repository: {', '.join(there) or 'none'}")
    settings = _settings(folder, model)
    # The copy lies elsewhere, so what it serves must not be relative to its own folder.
    changes = {"model": resolve(settings.model, folder).location, **changes}
    message = text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())
    for key, value in changes.items():
        message.parameters[key].string_value = value
    copy = directory / model
    (copy / "1").mkdir(parents=True)
    (copy / "config.pbtxt").write_text(text_format.MessageToString(message))
    return _settings(copy, model)


def _settings(folder: Path, model: str) -> Settings:
    try:
        config = read_config(folder / "config.pbtxt")
        if config["backend"] != BACKEND:
            raise SettingsError(
                f'backend "{config["backend"]}" is not "{BACKEND}"; only such models are measured'
            )
        return Settings.from_model_config(completed({**config, "name": model}), folder)[0]
    except SettingsError as error:
        raise SettingsError(f"model {model!r}: {error}") from error


class ServedModel:
    """One model on a server of its own, for as long as the ``with`` block lasts."""

    def __init__(self, repository: Path, model: str, progress: bool = False) -> None:
        self.model = model
        self._server = TritonServer(repository, models=[model])
        self._progress = progress

    def __enter__(self) -> ServedModel:
        self._server.start()
        self._server.wait_ready(progress=self._progress)
        self._samples = scrape(self._server.metrics_url)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop()

    def run_grpc(self, workload: Workload, prompts: Sequence[list[int]]) -> Round:
        """A round over one gRPC stream."""
        requests = [workload.fields(prompt) for prompt in prompts]
        with CpuAccount(self.pid) as account:
            sent, events = bench_grpc.stream_all(self._server.grpc_url, self.model, requests)
        return self._round(workload, sent, events, account)

    def run_http(self, workload: Workload, prompts: Sequence[list[int]]) -> Round:
        """A round through ``generate_stream``, a connection for each sequence."""
        bodies = [json.dumps({"text_input": "", **workload.fields(prompt)}).encode() for prompt in prompts]
        path = f"/v2/models/{self.model}/generate_stream"
        with CpuAccount(self.pid) as account:
            sent, events = bench_sse.stream_all(self._server.host, self._server.http_port, path, bodies)
        for event in (event for stream in events for event in stream):
            if b'"error"' in event.data and "error" in (reply := json.loads(event.data)):
                raise StreamError(f"{path}: {reply['error']}")
        return self._round(workload, sent, events, account)

    @property
    def pid(self) -> int:
        """PID of tritonserver."""
        assert self._server.pid is not None
        return self._server.pid

    def _round(
        self,
        workload: Workload,
        sent: Sequence[float],
        events: Sequence[Sequence[Event]],
        account: CpuAccount,
    ) -> Round:
        measured = round_of(workload, sent, events, account)
        return replace(measured, parts=self._parts(measured))

    def _parts(self, measured: Round) -> dict[str, float]:
        """Where the time of a round went, by the server's own metrics, which are waited for.

        ``engine_seconds`` are the model and what surrounds it, ``adapter_seconds`` the rest of the time within
        the backend, and ``triton_seconds`` the time in which the backend waits for Triton.
        """
        before = self._samples
        expected = before.value(_GENERATED, model=self.model) + sum(map(sum, measured.tokens))
        self._samples = self._wait_for_samples(round(expected))

        def grown(name: str) -> float:
            return self._samples.value(name, model=self.model) - before.value(name, model=self.model)

        engine, adapter = grown("inflight_forward_seconds_sum"), grown("inflight_loop_seconds_sum")
        return {
            "engine_seconds": engine,
            "adapter_seconds": adapter,
            "triton_seconds": measured.seconds - engine - adapter,
            "trips": grown("inflight_loop_seconds_count"),
        }

    def _wait_for_samples(self, generated: int) -> Samples:
        """The server's metrics once they count so many generated tokens and have come to rest.

        They lag the responses a little, and the server takes them in one by one.

        Raises:
            InflightError: they never do, so some sequence was shorter or longer than asked.
        """
        deadline = time.monotonic() + _METRICS_LAG_SECONDS
        trips = -1.0
        while True:
            samples = scrape(self._server.metrics_url)
            counted = samples.value(_GENERATED, model=self.model)
            before, trips = trips, samples.value("inflight_loop_seconds_count", model=self.model)
            if counted == generated and trips == before:
                return samples
            if counted > generated or time.monotonic() > deadline:
                raise InflightError(
                    f"the server counts {counted:.0f} generated tokens where {generated} were asked for"
                )
            time.sleep(_METRICS_PERIOD_SECONDS)


class CpuAccount:
    """CPU time of this process and of a server's processes while a ``with`` block lasts, in seconds."""

    def __init__(self, server_pid: int) -> None:
        self._pid = server_pid
        self.client = self.server = 0.0

    def __enter__(self) -> CpuAccount:
        self._before = time.process_time(), cpu_seconds(self._pid)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client = time.process_time() - self._before[0]
        self.server = cpu_seconds(self._pid) - self._before[1]


def round_of(
    workload: Workload, sent: Sequence[float], events: Sequence[Sequence[Event]], account: CpuAccount
) -> Round:
    """A round from its responses. They do not say how many tokens they bring, so each counts for as many.

    Raises:
        StreamError: a stream brought nothing.
    """
    if not all(events):
        raise StreamError("a stream ended without any response")
    tokens = [[workload.output_tokens / len(stream)] * len(stream) for stream in events]
    arrivals = [[event.time for event in stream] for stream in events]
    return Round(sent, arrivals, tokens, account.client, account.server)
