"""What tests on the real server share: repositories with variations of a model, and the clients."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from triton_inflight.client import Answer, GenerationStream
from triton_inflight.launcher import TritonServer
from triton_inflight.scaffold import init_model
from triton_inflight.scrape import Samples, scrape


def add_model(
    repository: Path,
    name: str,
    model: str,
    *,
    slots: int = 32,
    edit: Callable[[str], str] = str,
    **parameters: object,
) -> None:
    """Put a model into a repository: what `init` writes, with some of its parameters changed or added.

    Args:
        edit: changes the rest of config.pbtxt.
    """
    path = init_model(repository, name, model, max_batch_size=slots)
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
    server: TritonServer, path: str, body: dict[str, Any], timeout: float
) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(urlsplit(server.http_url).netloc, timeout=timeout)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection


def grpc_generate(server: TritonServer, model: str, text: str, **parameters: Any) -> Answer:
    """One prompt over a gRPC stream."""
    *_, answers = GenerationStream(server.grpc_url, model, parameters).run([text])
    return answers[0]


def settled(server: TritonServer, condition: Callable[[Samples], bool], timeout: float = 30) -> Samples:
    """The metrics once they fulfil a condition; they lag the requests a little. Fails when they never do."""
    deadline = time.monotonic() + timeout
    while True:
        samples = scrape(server.metrics_url)
        if condition(samples):
            return samples
        assert time.monotonic() < deadline, "the metrics never came to say so"
        time.sleep(0.05)
