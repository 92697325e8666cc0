"""What is true of a server at rest, for tests that put it under pressure first."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol
from urllib.parse import urlsplit

import psutil
from transformers import PreTrainedModel

from conftest import byte_tokenizer, solo, tiny_model
from serving import Disconnecting, settled
from triton_inflight.launcher import TritonServer
from triton_inflight.scrape import scrape

_ENDLESS = 3000  # tokens


def endless_model(**changes: object) -> PreTrainedModel:
    """A tiny model with a long context that never ends by itself."""
    model = tiny_model("llama", **{"max_position_embeddings": 8192, "tie_word_embeddings": False, **changes})
    model.lm_head.weight.data[-1] = 0  # the end-of-sequence token is never the most likely
    return model


def expected_text(model: PreTrainedModel, prompt: str, max_tokens: int) -> str:
    """The oracle's text: what the stock model generates for this prompt alone."""
    tokenizer = byte_tokenizer()
    return tokenizer.decode(solo(model, tokenizer.encode(prompt), max_tokens), skip_special_tokens=True)


def assert_at_rest(server: TritonServer, name: str) -> None:
    """Nothing is held and nobody lives."""
    settled(server, lambda s: s.value("inflight_kv_blocks", model=name, state="used") == 0)
    settled(server, lambda s: s.value("inflight_sequences", model=name) == 0)


class Leaving(Protocol):
    """A client that runs until it leaves."""

    def leave(self) -> None: ...


def assert_slots_usable(
    server: TritonServer,
    name: str,
    slots: int,
    max_tokens: int = _ENDLESS,
    client: Callable[[TritonServer, str, int], Leaving] | None = None,
) -> None:
    """As many new sequences as there are slots run in one step; a slot that leaked makes that impossible.

    Args:
        client: starts a client of a model for so many tokens; a stream over HTTP unless something else is said.
    """

    def full_steps() -> float:
        histogram = scrape(server.metrics_url).histogram("inflight_step_sequences", model=name)
        return histogram.get(slots, 0.0)  # absent before the first step

    def start() -> Leaving:
        return (client or _stream)(server, name, max_tokens)

    assert_at_rest(server, name)
    before = full_steps()
    wait_until(lambda: _fill(slots, start, lambda: full_steps() > before), "all slots in a step")
    assert_at_rest(server, name)


def _stream(server: TritonServer, name: str, max_tokens: int) -> Leaving:
    return Disconnecting(server, name, "slot", max_tokens=max_tokens)


def _fill(slots: int, start: Callable[[], Leaving], condition: Callable[[], bool]) -> bool:
    """Start a client for every slot; whether the condition comes true while they run or shortly after."""
    with ThreadPoolExecutor(slots) as pool:
        clients = list(pool.map(lambda _: start(), range(slots)))
    try:
        for _ in range(10):  # the metrics lag by a period of the watcher
            if condition():
                return True
            time.sleep(0.05)
        return False
    finally:
        for client in clients:
            client.leave()


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
    """Wait for something that has to come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen: {what}"
        time.sleep(0.05)


def stub_of(server: TritonServer, model: str) -> psutil.Process:
    """The Python process that serves a model of one instance."""
    found = [
        process
        for process in psutil.Process(server.pid).children(recursive=True)
        if f"{model}_0_0" in process.cmdline()
    ]
    assert len(found) == 1, found
    return found[0]


def post(server: TritonServer, path: str, body: bytes, timeout: float = 60) -> http.client.HTTPConnection:
    """Send a body as it is; the connection, to read the reply from or to leave at once."""
    connection = http.client.HTTPConnection(urlsplit(server.http_url).netloc, timeout=timeout)
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    return connection
