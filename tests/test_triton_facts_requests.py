"""What is known of how Triton makes requests of what clients send, on the real server, and what comes of it here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from conftest import byte_tokenizer
from idle import assert_at_rest, assert_slots_usable, endless_model, expected_text, post, wait_until
from serving import add_model, generate, generate_stream, http_client, save_model, settled
from test_clients import joined, stream
from triton_inflight.launcher import TritonServer
from triton_inflight.scaffold import init_model
from triton_inflight.scrape import Samples, scrape

pytestmark = pytest.mark.server

SLOTS = 4
CONTEXT = 65_536
LONG = 60_000  # tokens: more than the fastest machine generates while a test runs


@pytest.fixture(scope="module")
def model():
    return endless_model(max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model) -> Iterator[TritonServer]:
    folder = save_model(tmp_path_factory.mktemp("weights"), model)
    repository = tmp_path_factory.mktemp("models")
    add_model(repository, "tiny", folder, slots=SLOTS, dtype="float32", max_tokens_in_paged_kv_cache=CONTEXT)
    compat = init_model(repository, "compat", str(folder), "float32", max_batch_size=SLOTS, compat=True)
    compat.write_text(
        re.sub(r'(paged_kv_cache" value \{ string_value: ")\d+', rf"\g<1>{CONTEXT}", compat.read_text())
    )
    with TritonServer(repository, log_path=tmp_path_factory.mktemp("log") / "server.log") as running:
        yield running


# -- HTTP generate ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True])
def test_a_key_is_a_tensor_where_one_is_declared_and_a_parameter_elsewhere(
    server: TritonServer, model, nested: bool
) -> None:
    """At the top of the body as well as under `parameters`."""
    fields = {"max_tokens": 7, "top_k": 1}
    body = {"parameters": fields} if nested else fields
    for name in ("tiny", "compat"):
        assert generate(server, name, "key", **body)["text_output"] == expected_text(model, "key", 7)


def test_what_steers_sequences_elsewhere_does_nothing_over_generate(server: TritonServer, model) -> None:
    """Triton makes parameters of these; each request gets an ID of its own, also where all say the same."""
    fields = {"sequence_id": 5, "sequence_start": True, "sequence_end": True, "priority": 2, "id": "same"}

    def ask(prompt: str) -> dict[str, object]:
        return generate(server, "tiny", prompt, max_tokens=100, **fields)

    prompts = ["one", "two", "three"]
    with ThreadPoolExecutor(len(prompts)) as pool:
        replies = list(pool.map(ask, prompts))
    for prompt, reply in zip(prompts, replies, strict=True):
        assert (reply["id"], reply["text_output"]) == ("same", expected_text(model, prompt, 100))


def test_a_timeout_over_generate_is_a_deadline_in_microseconds(server: TritonServer) -> None:
    """Triton does not act on it, so we do."""
    fields = {"timeout": 200_000, "max_tokens": LONG, "return_finish_reason": True}
    reply = generate(server, "tiny", "late", parameters=fields)
    assert reply["finish_reason"] == "timeout"


def test_generate_takes_one_response(server: TritonServer, model) -> None:
    """Of a stream it makes an error, with status 200; the sequence costs no slot."""
    reply = generate(server, "tiny", "one", max_tokens=20, stream=True)
    assert (reply["status"], "exactly 1 response" in reply["error"]) == (200, True)
    assert generate(server, "tiny", "one", max_tokens=20)["text_output"] == expected_text(model, "one", 20)
    assert_slots_usable(server, "tiny", SLOTS)


def test_a_stream_on_the_wire_has_nothing_but_events_with_text(server: TritonServer) -> None:
    """Neither an empty event nor `[DONE]` says that it is over: the end of the connection does."""
    body = {"text_input": "wire", "stream": True, "max_tokens": 9}
    connection = post(server, "/v2/models/tiny/generate_stream", json.dumps(body).encode())
    wire = connection.getresponse().read().decode()
    connection.close()
    events = wire.split("\n\n")
    assert events.pop() == ""
    assert all(json.loads(event.removeprefix("data: "))["text_output"] for event in events)


def test_an_error_before_the_first_token_is_status_400_and_an_event(server: TritonServer) -> None:
    body = json.dumps({"text_input": "x", "stream": True, "max_tokens": 0}).encode()
    connection = post(server, "/v2/models/tiny/generate_stream", body)
    response = connection.getresponse()
    event = response.read().decode()
    connection.close()
    assert response.status == 400
    assert "max_tokens" in json.loads(event.removeprefix("data: "))["error"]


def test_nul_in_the_answer_arrives(server: TritonServer) -> None:
    """Over HTTP and gRPC; Triton's OpenAI frontend cuts the text there."""
    (nul,) = byte_tokenizer().encode("\0")
    only_nul = {"sampling_parameters": json.dumps({"logit_bias": {str(nul): 100}}), "max_tokens": 3}
    assert generate(server, "tiny", "nul", **only_nul)["text_output"] == "\0\0\0"
    assert "".join(e["text_output"] for e in generate_stream(server, "tiny", "nul", **only_nul)) == "\0\0\0"
    (answer,) = stream(server, "tiny", {"text_input": "nul"}, only_nul)
    assert answer.as_numpy("text_output").item() == b"\0\0\0"


def test_infer_is_for_models_of_one_response(server: TritonServer) -> None:
    """Triton refuses it for others; test_unary.py has a model that takes it."""
    with http_client(server) as client:
        tensor = httpclient.InferInput("text_input", [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[b"x"]], np.object_))
        with pytest.raises(InferenceServerException) as refused:
            client.infer("tiny", [tensor])
    assert refused.value.status() == "501"


def test_a_client_of_one_response_that_leaves_unseen_ends_at_the_deadline(server: TritonServer) -> None:
    """Triton 2.51 does not notice that it has gone."""
    body = json.dumps({"text_input": "unseen", "max_tokens": LONG, "max_time": 1}).encode()
    before = scrape(server.metrics_url).value("inflight_sequences_total", model="tiny")

    def has_ended(samples: Samples) -> bool:
        return samples.value("inflight_sequences_total", model="tiny") > before

    connection = post(server, "/v2/models/tiny/generate", body)
    settled(server, lambda s: s.value("inflight_sequences", model="tiny") == 1 or has_ended(s))
    connection.close()
    settled(server, has_ended)
    assert_slots_usable(server, "tiny", SLOTS)


# -- what shares a step -------------------------------------------------------------------------------------------

SETS = [
    {},
    {"temperature": 0.0},
    {"top_k": 1},
    {"seed": np.array([[7]], np.uint64)},
]


def _ask(
    server: TritonServer, name: str, tensors: list[dict[str, object]], **parameters: object
) -> list[str]:
    """The answers to these requests, sent at once."""
    with ThreadPoolExecutor(SLOTS) as pool:
        return list(pool.map(lambda each: joined(stream(server, name, each, parameters)), tensors))


def _fill_a_step(server: TritonServer, name: str, ask: Callable[[], object]) -> None:
    """Do something until it made a step of as many sequences as there are slots; fails where it never does."""

    def full_steps() -> float:
        return scrape(server.metrics_url).histogram("inflight_step_sequences", model=name).get(SLOTS, 0.0)

    def try_once() -> bool:
        before = full_steps()
        ask()
        assert_at_rest(server, name)
        return full_steps() > before

    assert_at_rest(server, name)
    wait_until(try_once, "all in one step")


def test_requests_share_steps_whatever_parameters_they_have(server: TritonServer, model) -> None:
    parameters = [{k: str(v) for k, v in each.items()} for each in SETS[:3]] + [{"seed": "7"}]

    def ask() -> None:
        with ThreadPoolExecutor(SLOTS) as pool:
            tensors = {"text_input": "same"}
            answers = pool.map(
                lambda p: stream(server, "tiny", tensors, {"max_tokens": 200, **p}), parameters
            )
            texts = [joined(answer) for answer in answers]
        assert texts == [expected_text(model, "same", 200)] * SLOTS

    _fill_a_step(server, "tiny", ask)


def test_different_sets_of_tensors_share_steps_and_are_warned_of(server: TritonServer, model) -> None:
    """Triton never puts them into one trip: they are stepped beside each other's. The log says what it costs."""

    def ask() -> None:
        tensors = [{"text_input": "sets", "max_tokens": 200, **each} for each in SETS]
        assert _ask(server, "compat", tensors) == [expected_text(model, "sets", 200)] * SLOTS

    _fill_a_step(server, "compat", ask)
    warning = "Requests that send different sets of optional inputs never share a trip"
    assert warning in server.log_path.read_text()


def test_lists_of_different_length_share_steps(server: TritonServer, model) -> None:
    stops = [np.array([[b"never\0comes"] * (i + 1)], np.object_) for i in range(SLOTS)]

    def ask() -> None:
        tensors = [{"text_input": "lists", "max_tokens": 200, "stop_words": stop} for stop in stops]
        assert _ask(server, "compat", tensors) == [expected_text(model, "lists", 200)] * SLOTS

    _fill_a_step(server, "compat", ask)
