"""One engine under each of Triton's schedulers: the same greedy texts, and what is peculiar to each."""

from __future__ import annotations

import queue
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from conftest import byte_tokenizer, make_engine, random_prompt, solo, tiny_model
from serving import Disconnecting, add_model, generate, generate_stream, save_model, settled
from test_clients import joined, stream
from triton_inflight.launcher import TritonServer
from triton_inflight.metrics import Metrics
from triton_inflight.protocol import model_defaults
from triton_inflight.schedulers import ClientDriven
from triton_inflight.settings import Settings

pytestmark = pytest.mark.server

SLOTS = 4
_BATCHING = re.compile(r"sequence_batching \{.*?^\}", re.DOTALL | re.MULTILINE)
EDITS = {
    "iterative": lambda text: text,
    "dynamic": lambda text: _BATCHING.sub("dynamic_batching { }", text),
    "sequence": lambda text: text.replace("iterative_sequence: true", ""),
    "decoupled": lambda text: _BATCHING.sub("", text).replace(
        f"max_batch_size: {SLOTS}", "max_batch_size: 0"
    ),
}
WHOLE_REQUESTS = ("iterative", "dynamic", "decoupled")


@pytest.fixture(scope="module")
def model():
    model = tiny_model("llama", max_position_embeddings=8192, tie_word_embeddings=False)
    model.lm_head.weight.data[-1] = 0  # the end-of-sequence token is never the most likely
    return model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model) -> Iterator[TritonServer]:
    folder = save_model(tmp_path_factory.mktemp("weights"), model)
    repository = tmp_path_factory.mktemp("models")
    for name, edit in EDITS.items():
        add_model(
            repository,
            name,
            folder,
            slots=SLOTS,
            edit=edit,
            dtype="float32",
            max_tokens_in_paged_kv_cache=32768,
            max_running_sequences=SLOTS,
        )
    with TritonServer(repository) as running:
        yield running


def _expected(model, prompt: str, max_tokens: int) -> str:
    tokenizer = byte_tokenizer()
    return tokenizer.decode(solo(model, tokenizer.encode(prompt), max_tokens), skip_special_tokens=True)


@pytest.mark.parametrize("scheduler", WHOLE_REQUESTS)
@pytest.mark.parametrize("stream", [False, True])
def test_texts_are_those_of_the_oracle(server: TritonServer, model, scheduler: str, stream: bool) -> None:
    prompts = [random_prompt(i, 4 + 9 * i) for i in range(2 * SLOTS)]
    max_tokens = [10 + 7 * i for i in range(2 * SLOTS)]

    def ask(index: int) -> str:
        fields = {"max_tokens": max_tokens[index]}
        if stream:
            events = generate_stream(server, scheduler, prompts[index], **fields)
            return "".join(event["text_output"] for event in events)
        return generate(server, scheduler, prompts[index], **fields)["text_output"]

    with ThreadPoolExecutor(len(prompts)) as pool:
        texts = list(pool.map(ask, range(len(prompts))))
    assert texts == [_expected(model, p, n) for p, n in zip(prompts, max_tokens, strict=True)]
    settled(server, lambda s: s.value("inflight_kv_blocks", model=scheduler, state="used") == 0)


def test_without_a_batcher_tensors_have_no_batch_dimension(server: TritonServer, model) -> None:
    """What clients of Triton's vLLM backend send; a model that batches cannot take it."""
    tensors = {"text_input": np.array([b"one dimension"], np.object_)}
    (answer,) = stream(server, "decoupled", tensors, {"max_tokens": 9})
    assert joined([answer]) == _expected(model, "one dimension", 9)


@pytest.mark.parametrize("scheduler", WHOLE_REQUESTS)
def test_several_sequences_shared_steps(server: TritonServer, scheduler: str) -> None:
    """Reads what the requests above left in the metrics."""
    samples = settled(server, lambda s: s.value("inflight_sequences_total", model=scheduler) >= 4 * SLOTS)
    histogram = samples.histogram("inflight_step_sequences", model=scheduler)
    assert max(bound for bound, count in histogram.items() if count) > 1


@pytest.mark.parametrize("scheduler", WHOLE_REQUESTS)
def test_a_client_that_leaves_frees_its_blocks(server: TritonServer, scheduler: str) -> None:
    stream = Disconnecting(server, scheduler, "x", max_tokens=8000)
    stream.read_event()
    stream.leave()
    settled(server, lambda s: s.value("inflight_kv_blocks", model=scheduler, state="used") == 0)
    assert generate(server, scheduler, "next", max_tokens=3)["status"] == 200


@pytest.mark.parametrize("scheduler", WHOLE_REQUESTS)
def test_a_bad_request_harms_only_itself(server: TritonServer, scheduler: str) -> None:
    neighbour = Disconnecting(server, scheduler, "x", max_tokens=200, return_finish_reason=True)
    neighbour.read_event()
    assert "max_tokens" in generate(server, scheduler, "x", max_tokens=0)["error"]
    *_, last = iter(neighbour.read_event, None)
    assert last["finish_reason"] == "length"


class Driver:
    """A client that asks for each token of a sequence by a request of its own."""

    def __init__(self, server: TritonServer, sequence_id: int) -> None:
        self._client = grpcclient.InferenceServerClient(server.grpc_url)
        self._sequence_id = sequence_id
        self._results: list[object] = []

    def ask(
        self, text: str = "", start: bool = False, end: bool = False, **parameters: object
    ) -> dict[str, object]:
        results: queue.Queue[tuple[object, object]] = queue.Queue()
        self._client.start_stream(callback=lambda result, error: results.put((result, error)))
        tensor = grpcclient.InferInput("text_input", [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[text.encode()]], dtype=object))
        self._client.async_stream_infer(
            "sequence",
            [tensor],
            sequence_id=self._sequence_id,
            sequence_start=start,
            sequence_end=end,
            parameters=parameters,
        )
        result, error = results.get(timeout=60)
        self._client.stop_stream()
        if error is not None:
            return {"error": error.message()}
        names = ("text_output", "finish_reason")
        arrays = {name: result.as_numpy(name) for name in names}
        return {name: array.item().decode() for name, array in arrays.items() if array is not None}

    def close(self) -> None:
        self._client.close()


def test_a_client_drives_its_sequence_token_by_token(server: TritonServer, model) -> None:
    drivers = [Driver(server, 100 + i) for i in range(3)]
    prompts = [random_prompt(i, 5 + 20 * i) for i in range(3)]
    texts = ["", "", ""]
    for i, driver in enumerate(drivers):
        texts[i] += driver.ask(prompts[i], start=True, max_tokens=12, return_finish_reason=True)[
            "text_output"
        ]
    reasons = set()
    for step in range(11):
        for i, driver in enumerate(drivers):
            reply = driver.ask()
            texts[i] += reply["text_output"]
            assert ("finish_reason" in reply) == (step == 10)
            reasons.add(reply.get("finish_reason"))
    assert texts == [_expected(model, prompt, 12) for prompt in prompts]
    assert reasons == {None, "length"}
    for driver in drivers:
        assert driver.ask(end=True) == {}, "END only frees"
        driver.close()


def test_the_end_of_a_client_driven_sequence_frees_it(server: TritonServer) -> None:
    driver = Driver(server, 200)
    driver.ask("x" * 40, start=True, max_tokens=100)
    settled(server, lambda s: s.value("inflight_kv_blocks", model="sequence", state="used") == 2)
    driver.ask(end=True)
    settled(server, lambda s: s.value("inflight_kv_blocks", model="sequence", state="used") == 0)
    driver.close()


class _Carrier:
    """A request that did not come through Triton."""

    correlation_id, starts, ends, identity = 1, True, False, ("", "")

    def __init__(self) -> None:
        self.sender = self
        self.sent: list[dict[str, object]] = []

    def is_padding(self) -> bool:
        return False

    def is_cancelled(self) -> bool:
        return False

    def tensors(self) -> dict[str, object]:
        return {"text_input": np.array([[b"abandoned"]], dtype=object)}

    def parameters(self) -> dict[str, object]:
        return {"max_tokens": 50}

    def timeout_microseconds(self) -> int:
        return 0

    def send(self, tensors: dict[str, object], final: bool) -> None:
        assert final
        self.sent.append(tensors)


class _Noted:
    """A metric that is not reported anywhere."""

    def increment(self, value: float) -> None: ...

    def set(self, value: float) -> None: ...

    def observe(self, value: float) -> None: ...


def test_an_abandoned_client_driven_sequence_is_dropped_by_our_own_clock(model) -> None:
    settings = Settings("none", scheduler="sequence", max_sequence_idle=0.3, cancellation_check_period_ms=20)
    engine = make_engine(model)
    lifecycle = ClientDriven(settings, engine, model_defaults(settings), Metrics(lambda *_: _Noted()))
    carrier = _Carrier()
    lifecycle.trip([carrier])
    assert len(carrier.sent) == 1
    assert engine.store.num_held == 1
    deadline = time.monotonic() + 30
    while engine.store.num_held:
        assert time.monotonic() < deadline, "it is still held"
        time.sleep(0.02)
    lifecycle.close()
