"""Plain infer calls: an iterative model with ``decoupled: false`` gives one response, and still batches in flight."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from conftest import byte_tokenizer, random_prompt, solo, tiny_model
from serving import add_model, generate, save_model, settled
from triton_inflight.launcher import TritonServer

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("models")
    add_model(
        repository,
        "unary",
        save_model(tmp_path_factory.mktemp("weights"), model),
        dtype="float32",
        max_tokens_in_paged_kv_cache=8192,
        edit=lambda text: text + "\nmodel_transaction_policy { decoupled: false }\n",
    )
    with TritonServer(repository) as running:
        yield running


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
