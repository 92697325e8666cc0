"""What tests on the real server share: repositories with variations of a model, and the clients."""

from __future__ import annotations

import http.client
import json
import queue
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from transformers import PreTrainedModel

from conftest import byte_tokenizer
from triton_inflight.client import Answer, GenerationStream
from triton_inflight.launcher import TritonServer
from triton_inflight.scaffold import init_model
from triton_inflight.scrape import Samples, scrape


def http_client(server: TritonServer) -> httpclient.InferenceServerClient:
    """For loading and unloading: on a busy machine a model takes longer to load than the usual minute."""
    address = server.http_url.removeprefix("http://")
    return httpclient.InferenceServerClient(address, connection_timeout=600.0, network_timeout=600.0)


def add_model(
    repository: Path,
    name: str,
    model: str | Path,
    *,
    slots: int = 32,
    edit: Callable[[str], str] = str,
    **parameters: object,
) -> None:
    """Put a model into a repository: what `init` writes, with some of its parameters changed or added.

    Args:
        edit: changes the rest of config.pbtxt.
    """
    path = init_model(repository, name, str(model), max_batch_size=slots)
    text = edit(path.read_text())
    for key, value in parameters.items():
        entry = f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        text, found = re.subn(rf'^parameters {{ key: "{key}".*$', entry, text, flags=re.MULTILINE)
        text = text if found else f"{text}\n{entry}\n"
    path.write_text(text)


def generate(
    server: TritonServer, model: str, text: str, timeout: float = 120, **fields: Any
) -> dict[str, Any]:
    """POST to `generate`; the reply's JSON, with the HTTP status as `status`."""
    connection = _post(server, f"/v2/models/{model}/generate", {"text_input": text, **fields}, timeout)
    response = connection.getresponse()
    reply = {"status": response.status, **json.loads(response.read())}
    connection.close()
    return reply


def generate_stream(
    server: TritonServer, model: str, text: str, timeout: float = 120, **fields: Any
) -> list[dict[str, Any]]:
    """POST to `generate_stream` with `stream` set; the events in order."""
    body = {"text_input": text, "stream": True, **fields}
    connection = _post(server, f"/v2/models/{model}/generate_stream", body, timeout)
    lines = connection.getresponse().read().decode().split("\n\n")
    connection.close()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def _post(
    server: TritonServer | str, path: str, body: dict[str, Any], timeout: float
) -> http.client.HTTPConnection:
    url = server if isinstance(server, str) else server.http_url
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout)
    # An idle connection would keep a stopping server waiting.
    headers = {"Content-Type": "application/json", "Connection": "close"}
    connection.request("POST", path, json.dumps(body), headers)
    return connection


def grpc_generate(server: TritonServer, model: str, text: str, **parameters: Any) -> Answer:
    """One prompt over a gRPC stream."""
    *_, answers = GenerationStream(server.grpc_url, model, parameters).run([text])
    return answers[0]


class Call:
    """One gRPC request on a stream of its own, with Triton's sequence flags; collects what comes back."""

    def __init__(
        self,
        server: TritonServer,
        model: str | Path,
        text: str,
        *,
        sequence_id: int = 0,
        start: bool = False,
        end: bool = False,
        timeout_us: int | None = None,
        **parameters: Any,
    ) -> None:
        self.text = ""
        self.error: str | None = None
        self.finish_reason: str | None = None
        self._results: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client = grpcclient.InferenceServerClient(server.grpc_url)
        self._client.start_stream(callback=lambda result, error: self._results.put((result, error)))
        tensor = grpcclient.InferInput("text_input", [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[text.encode()]], dtype=object))
        self._client.async_stream_infer(
            model,
            [tensor],
            sequence_id=sequence_id,
            sequence_start=start,
            sequence_end=end,
            timeout=timeout_us,
            parameters={"return_finish_reason": True, "stream": True, **parameters},
        )

    @property
    def done(self) -> bool:
        return self.error is not None or self.finish_reason is not None

    def take(self, timeout: float = 60) -> None:
        """Wait for one response; fails where none comes, which is how a hanging client looks."""
        try:
            result, error = self._results.get(timeout=timeout)
        except queue.Empty:
            raise AssertionError(f"the client hangs; it has got {self.text!r} so far") from None
        if error is not None:
            self.error = error.message()
            return
        self.text += result.as_numpy("text_output").item().decode()
        if (reason := result.as_numpy("finish_reason")) is not None:
            self.finish_reason = reason.item().decode()

    def wait(self, timeout: float = 60) -> Call:
        """Wait for the end."""
        while not self.done:
            self.take(timeout)
        self._client.stop_stream()
        self._client.close()
        return self


class Disconnecting:
    """A streaming HTTP client that can leave at any time."""

    def __init__(self, server: TritonServer | str, model: str, text: str, **fields: Any) -> None:
        body = {"text_input": text, "stream": True, **fields}
        self._connection = _post(server, f"/v2/models/{model}/generate_stream", body, timeout=60)
        self._response = self._connection.getresponse()

    def read_event(self) -> dict[str, Any] | None:
        """The next event; None at the end."""
        while line := self._response.readline():
            if line.startswith(b"data: "):
                return json.loads(line.removeprefix(b"data: "))
        return None

    def leave(self) -> None:
        """Close the connection as a client does that goes away."""
        self._response.close()
        self._connection.close()


def save_model(folder: Path, model: PreTrainedModel) -> Path:
    """Write a tiny model with the byte tokenizer to a folder, as a user's own model would stand there."""
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def settled(server: TritonServer, condition: Callable[[Samples], bool], timeout: float = 30) -> Samples:
    """The metrics once they fulfil a condition; they lag the requests a little. Fails when they never do."""
    deadline = time.monotonic() + timeout
    while True:
        samples = scrape(server.metrics_url)
        if condition(samples):
            return samples
        assert time.monotonic() < deadline, "the metrics never came to say so"
        time.sleep(0.05)
