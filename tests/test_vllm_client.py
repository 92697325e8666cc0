"""A `--scheduler decoupled` model answers what vllm_backend's sample client sends, to the last shape and field."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as grpcclient
from transformers import PreTrainedModel

from conftest import byte_tokenizer, printable_model, solo
from serving import save_model, settled
from triton_inflight.launcher import TritonServer
from triton_inflight.scaffold import init_model

pytestmark = pytest.mark.server

MODEL = "vllm_model"  # the client's default
# Lines of a file, with their ends.
PROMPTS = ["Good morning, my\n", "Rivers run to\n", "One and one makes\n", "In a hundred years\n"]
# Numbers are text there, and the same parameters go as a tensor and as request parameters.
SAMPLING = {"temperature": "0.1", "top_p": "0.95", "max_tokens": "100"}
GREEDY = {"temperature": "0", "top_p": "0.95", "max_tokens": "30"}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return printable_model()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: PreTrainedModel) -> Iterator[TritonServer]:
    folder = save_model(tmp_path_factory.mktemp("weights"), model)
    repository = tmp_path_factory.mktemp("models")
    init_model(repository, MODEL, str(folder), "float32", max_batch_size=8, scheduler="decoupled")
    with TritonServer(repository) as running:
        yield running


def _tensor(name: str, value: bool | str) -> Any:
    """One value in the shape [1]."""
    data_type, array = (
        ("BOOL", np.array([value], bool))
        if isinstance(value, bool)
        else ("BYTES", np.array([value.encode()], object))
    )
    tensor = grpcclient.InferInput(name, [1], data_type)
    tensor.set_data_from_numpy(array)
    return tensor


def _request(
    number: int, stream: bool, sampling: dict[str, str], without_prompt: bool | None
) -> dict[str, Any]:
    tensors: dict[str, bool | str] = {
        "text_input": PROMPTS[number % len(PROMPTS)],
        "stream": stream,
        "sampling_parameters": json.dumps(sampling),
    }
    if without_prompt is not None:  # older versions of the client do not send it
        tensors["exclude_input_in_output"] = without_prompt
    return {
        "model_name": MODEL,
        "inputs": [_tensor(name, value) for name, value in tensors.items()],
        "outputs": [grpcclient.InferRequestedOutput("text_output")],
        "request_id": str(number),
        "parameters": sampling,
    }


def ask(
    server: TritonServer,
    stream: bool,
    sampling: dict[str, str],
    without_prompt: bool | None,
    times: int = 1,
) -> dict[str, list[str]]:
    """Send every prompt ``times`` times on one stream; the pieces of text by the id of their request."""

    async def run() -> dict[str, list[str]]:
        async def requests() -> AsyncIterator[dict[str, Any]]:
            for number in range(times * len(PROMPTS)):
                yield _request(number, stream, sampling, without_prompt)

        pieces = defaultdict(list)
        async with grpcclient.InferenceServerClient(server.grpc_url) as client:
            async for result, error in client.stream_infer(requests(), stream_timeout=60):
                assert error is None
                # The client goes through the texts of every response: none may come without.
                pieces[result.get_response().id] += [text.decode() for text in result.as_numpy("text_output")]
        return pieces

    return asyncio.run(run())


@pytest.mark.parametrize("without_prompt", [None, False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_every_prompt_gets_its_greedy_text(
    server: TritonServer, model: PreTrainedModel, stream: bool, without_prompt: bool | None
) -> None:
    answers = ask(server, stream, GREEDY, without_prompt)
    assert len(answers) == len(PROMPTS)
    for number, prompt in enumerate(PROMPTS):
        pieces = answers[str(number)]
        text = byte_tokenizer().decode(solo(model, byte_tokenizer().encode(prompt), 30))
        assert "".join(pieces) == (prompt if without_prompt is False else "") + text
        assert len(pieces) == (30 if stream else 1)


def test_what_it_sends_by_default_is_sampled_as_long_as_it_says(server: TritonServer) -> None:
    answers = ask(server, stream=True, sampling=SAMPLING, without_prompt=False, times=3)
    assert len(answers) == 3 * len(PROMPTS)
    for number, pieces in answers.items():
        assert len("".join(pieces)) == len(PROMPTS[int(number) % len(PROMPTS)]) + 100


def test_its_requests_share_steps(server: TritonServer) -> None:
    """Reads what the requests above left in the metrics."""
    samples = settled(server, lambda s: s.value("inflight_sequences_total", model=MODEL) >= len(PROMPTS))
    histogram = samples.histogram("inflight_step_sequences", model=MODEL)
    assert max(bound for bound, count in histogram.items() if count) > 1


def test_a_lora_adapter_is_refused_with_a_message(server: TritonServer) -> None:
    """The client prints the error and goes on."""

    async def run() -> list[str]:
        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield _request(0, True, {**GREEDY, "lora_name": "alpha"}, False)

        async with grpcclient.InferenceServerClient(server.grpc_url) as client:
            return [str(error) async for _, error in client.stream_infer(requests(), stream_timeout=60)]

    (message,) = asyncio.run(run())
    assert "this backend has no LoRA adapters" in message
