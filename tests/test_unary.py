"""Plain infer calls: an iterative model with ``decoupled: false`` gives one response, and still batches in flight."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from conftest import byte_tokenizer, random_prompt, solo
from idle import assert_slots_usable, endless_model
from serving import add_model, generate, save_model, settled
from triton_inflight.launcher import TritonServer
from triton_inflight.scrape import scrape

pytestmark = pytest.mark.server

SLOTS = 8
LONG = 3000  # tokens: some seconds of generation


@pytest.fixture(scope="module")
def model():
    return endless_model()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("models")
    add_model(
        repository,
        "unary",
        save_model(tmp_path_factory.mktemp("weights"), model),
        slots=SLOTS,
        dtype="float32",
        max_tokens_in_paged_kv_cache=32768,
        edit=lambda text: text + "\nmodel_transaction_policy { decoupled: false }\n",
    )
    with TritonServer(repository, options=["--exit-timeout-secs=60"]) as running:
        yield running
        assert running.stop() == 0, (
            "the model unloaded, and nothing was left for Triton's exit timeout to end"
        )


class _Infer:
    """A gRPC `infer` call on its way, that can be cancelled."""

    def __init__(self, server: TritonServer, name: str, max_tokens: int) -> None:
        self._client = grpcclient.InferenceServerClient(server.grpc_url)
        tensor = grpcclient.InferInput("text_input", [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[b"cancelled"]], dtype=object))
        self._call = self._client.async_infer(
            name, [tensor], callback=lambda **_: None, parameters={"max_tokens": max_tokens}
        )

    def leave(self) -> None:
        """Cancel the call."""
        self._call.cancel()
        self._client.close()


def _infer(kind, url: str, text: str, **parameters: object) -> str:
    with kind.InferenceServerClient(url) as client:
        tensor = kind.InferInput("text_input", [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[text.encode()]], dtype=object))
        result = client.infer("unary", [tensor], parameters=parameters)
        return result.as_numpy("text_output").item().decode()


def test_http_and_grpc_infer_answer_with_one_response_and_share_steps(server: TritonServer, model) -> None:
    tokenizer = byte_tokenizer()
    prompts = [random_prompt(i, 5 + 7 * i) for i in range(8)]
    http = server.http_url.removeprefix("http://")

    def ask(index: int) -> str:
        if index % 2:
            return _infer(httpclient, http, prompts[index], max_tokens=60)
        return _infer(grpcclient, server.grpc_url, prompts[index], max_tokens=60)

    with ThreadPoolExecutor(len(prompts)) as pool:
        texts = list(pool.map(ask, range(len(prompts))))
    expected = [solo(model, tokenizer.encode(prompt), 60) for prompt in prompts]
    assert texts == [tokenizer.decode(ids, skip_special_tokens=True) for ids in expected]
    samples = settled(server, lambda s: s.value("inflight_sequences_total") >= len(prompts))
    assert max(bound for bound, count in samples.histogram("inflight_step_sequences").items() if count) > 1


def test_generate_works_and_stream_is_refused(server: TritonServer) -> None:
    assert generate(server, "unary", "x", max_tokens=5)["status"] == 200
    reply = generate(server, "unary", "x", max_tokens=5, stream=True)
    assert "stream needs several responses" in reply["error"]


def test_an_error_is_the_one_response(server: TritonServer) -> None:
    assert "max_tokens" in generate(server, "unary", "x", max_tokens=0)["error"]
    assert generate(server, "unary", "x", max_tokens=8000, max_time=0.2, return_finish_reason=True)[
        "finish_reason"
    ] in (
        "timeout",
        "stop",
    )
    settled(server, lambda s: s.value("inflight_kv_blocks", state="used") == 0)


def test_cancelled_infer_calls_leave_nothing(server: TritonServer) -> None:
    """Whether before its first trip, in a step, between two trips, in the backlog or at its last token.

    Triton drops a cancelled request that waits for a trip without a word to the model, and keeps its slot.
    """

    def cancel(seed: int) -> None:
        dice = random.Random(seed)
        call = _Infer(server, "unary", dice.choice([1, 2, 3, 5, 50, LONG]))
        time.sleep(dice.uniform(0, dice.choice([0.01, 0.1])))
        call.leave()

    before = scrape(server.metrics_url).value("inflight_sequences_total", outcome="cancelled")
    with ThreadPoolExecutor(2 * SLOTS) as pool:
        list(pool.map(cancel, range(300)))
    assert_slots_usable(server, "unary", SLOTS, client=_Infer)
    settled(server, lambda s: s.value("inflight_sequences_total", outcome="cancelled") > before)
