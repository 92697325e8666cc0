"""Malformed requests on the real server: each gets an error that names what is wrong, and nobody else notices."""

from __future__ import annotations

import json
import queue
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from conftest import random_prompt
from idle import assert_at_rest, endless_model, expected_text, post
from serving import Disconnecting, add_model, generate, save_model
from triton_inflight.fields import FIELDS, Field
from triton_inflight.launcher import TritonServer
from triton_inflight.scaffold import init_model

pytestmark = pytest.mark.server

SEED = 11
GOOD = ("a good request", 12)
CONTEXT = 512


@pytest.fixture(scope="module")
def model():
    return endless_model(max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model) -> Iterator[TritonServer]:
    folder = save_model(tmp_path_factory.mktemp("weights"), model)
    repository = tmp_path_factory.mktemp("models")
    add_model(repository, "tiny", folder, slots=8, dtype="float32", max_tokens_in_paged_kv_cache=8192)
    path = init_model(repository, "compat", str(folder), "float32", max_batch_size=8, compat=True)
    with TritonServer(repository) as running:
        assert path.is_file()
        yield running


@pytest.fixture(scope="module")
def good(model) -> str:
    return expected_text(model, *GOOD)


def _assert_serves(server: TritonServer, good: str) -> None:
    assert generate(server, "tiny", GOOD[0], max_tokens=GOOD[1])["text_output"] == good


# -- over HTTP generate -------------------------------------------------------------------------------------


def _raw(
    server: TritonServer, body: bytes, endpoint: str = "generate", model: str = "tiny"
) -> tuple[int, str]:
    """Status and body of the answer to a body that is sent as it is."""
    connection = post(server, f"/v2/models/{model}/{endpoint}", body)
    response = connection.getresponse()
    answer = response.read().decode(errors="replace")
    connection.close()
    return response.status, answer


# (body, what the error has to say): these reach the backend.
OURS = {
    "an empty prompt": (b'{"text_input": "", "temperature": 0.5}', "text_input is empty"),
    "NaN as text": (b'{"text_input": "x", "temperature": "nan"}', "temperature"),
    "infinity as text": (b'{"text_input": "x", "top_p": "inf"}', "top_p"),
    "NaN": (b'{"text_input": "x", "temperature": NaN}', "temperature"),
    "negative": (b'{"text_input": "x", "max_tokens": -3}', "max_tokens"),
    "huge integer": (b'{"text_input": "x", "max_tokens": 18446744073709551615}', "max_tokens"),
    "huger number": (b'{"text_input": "x", "max_tokens": 1e300}', "max_tokens"),
    "fraction for an integer": (b'{"text_input": "x", "top_k": 2.5}', "top_k"),
    "boolean for a number": (b'{"text_input": "x", "temperature": true}', "temperature"),
    "number for a boolean": (b'{"text_input": "x", "ignore_eos": 7}', "ignore_eos"),
    "unknown key": (b'{"text_input": "x", "max_tokns": 3}', "did you mean"),
    "unknown key in parameters": (b'{"text_input": "x", "parameters": {"foo": 1}}', "foo"),
    "two names of one field": (b'{"text_input": "x", "max_tokens": 1, "max_new_tokens": 2}', "max_new_tokens"),
    "invalid UTF-8 in the prompt": (b'{"text_input": "ab\xff\xfecd"}', "text_input is not valid UTF-8"),
    "encoded surrogate in the prompt": (b'{"text_input": "\xed\xa0\x80"}', "text_input is not valid UTF-8"),
    "no JSON in sampling_parameters": (b'{"text_input": "x", "sampling_parameters": "{"}', "sampling_parameters"),
    "a list as sampling_parameters": (b'{"text_input": "x", "sampling_parameters": "[1]"}', "sampling_parameters"),
    "deep JSON": (
        b'{"text_input": "x", "sampling_parameters": "' + b"[" * 100_000 + b'"}', "sampling_parameters"
    ),
    "NaN in JSON": (b'{"text_input": "x", "sampling_parameters": "{\\"temperature\\": NaN}"}', "temperature"),
    "lone surrogate in JSON": (
        b'{"text_input": "x", "sampling_parameters": "{\\"stop\\": \\"\\\\ud800\\"}"}', "stop is not valid UTF-8"
    ),
    "too many stops": (
        json.dumps({"text_input": "x", "stop": json.dumps([str(i) for i in range(65)])}).encode(), "stop"
    ),
    "a prompt of 1 MB": (json.dumps({"text_input": "x" * 2**20}).encode(), "text_input"),
    "a prompt that is as long as the context": (json.dumps({"text_input": "x" * CONTEXT}).encode(), "text_input"),
    "a stop of 1 MB": (json.dumps({"text_input": "x", "stop": "y" * 2**20}).encode(), "stop"),
    "no messages": (b'{"text_input": "x", "messages": "[]"}', "messages"),
}  # fmt: skip

# (body, status): these Triton refuses by itself; docs/lifecycle.md lists them.
TRITONS = {
    "an empty body": (b"", 500),
    "no JSON": (b"text_input=x", 500),
    "cut off": (b'{"text_input": "x"', 500),
    "a list": (b'["x"]', 500),
    "a number that is too large": (b'{"text_input": "x", "temperature": 1e999}', 500),
    "a lone surrogate": (b'{"text_input": "\\ud800"}', 500),
    "a number as the prompt": (b'{"text_input": 3}', 500),
    "null as the prompt": (b'{"text_input": null}', 500),
    "an object as the prompt": (b'{"text_input": {}}', 500),
    "null as a parameter": (b'{"text_input": "x", "seed": null}', 400),
    "a list as a parameter": (b'{"text_input": "x", "stop": ["a"]}', 400),
    "an object as a parameter": (b'{"text_input": "x", "logit_bias": {"1": 2}}', 400),
    "no input at all": (b'{"max_tokens": 3}', 400),
    "two prompts": (b'{"text_input": ["a", "b"]}', 400),
    "no prompt in the list": (b'{"text_input": []}', 400),
}


@pytest.mark.parametrize("name", OURS)
def test_what_reaches_the_backend_is_answered_with_the_name(
    server: TritonServer, good: str, name: str
) -> None:
    body, named = OURS[name]
    for endpoint in ("generate", "generate_stream"):
        status, answer = _raw(server, body, endpoint)
        assert status == 400, answer[:300]
        assert named in answer, answer[:300]
    _assert_serves(server, good)


@pytest.mark.parametrize("name", TRITONS)
def test_what_triton_refuses_by_itself(server: TritonServer, good: str, name: str) -> None:
    body, expected = TRITONS[name]
    status, answer = _raw(server, body)
    assert status == expected, answer[:300]
    assert "error" in answer
    _assert_serves(server, good)


def test_a_tensor_of_the_wrong_type_over_generate_is_tritons_status_500(server: TritonServer) -> None:
    status, answer = _raw(server, b'{"text_input": "x", "max_tokens": "2"}', model="compat")
    assert (status, "max_tokens" in answer or "JSON" in answer) == (500, True), answer


def test_nul_and_odd_characters_are_served(server: TritonServer) -> None:
    for text in ("a\0b", "\x7f", "\ufeff", "\U0001f600", "\u202e"):
        assert generate(server, "tiny", text, max_tokens=3)["status"] == 200


@pytest.mark.parametrize("key", [b'"stop": "\xff"', b'"\xff": 1', b'"id": "\xff"'])
def test_parameters_that_are_no_utf8_harm_nobody(server: TritonServer, model, key: bytes) -> None:
    """Triton hands them over unchecked, beside the requests of others."""
    prompt = random_prompt(3, 20)
    with _Neighbour(server, prompt, 300) as neighbour:
        status, answer = _raw(server, b'{"text_input": "x", "max_tokens": 3, ' + key + b"}")
        assert (status, "not valid UTF-8" in answer) == (400, True), answer
    assert neighbour.text == expected_text(model, prompt, 300)


def test_a_prompt_of_one_megabyte_does_not_disturb_its_neighbours(server: TritonServer, model) -> None:
    prompt = random_prompt(4, 20)
    with _Neighbour(server, prompt, 400) as neighbour:
        for _ in range(3):
            status, answer = _raw(server, json.dumps({"text_input": "long " * 210_000}).encode())
            assert status == 400, answer[:300]
    assert neighbour.text == expected_text(model, prompt, 400)


class _Neighbour:
    """Another client, whose stream has begun, and goes on until the end of the block at least."""

    def __init__(self, server: TritonServer, prompt: str, max_tokens: int) -> None:
        self._stream = Disconnecting(server, "tiny", prompt, max_tokens=max_tokens)
        self.text = ""

    def __enter__(self) -> _Neighbour:
        self._read()
        return self

    def __exit__(self, *_: object) -> None:
        while self._read():
            pass
        self._stream.leave()

    def _read(self) -> bool:
        event = self._stream.read_event()
        self.text += "" if event is None else event["text_output"]
        return event is not None


# -- over gRPC ----------------------------------------------------------------------------------------------


@dataclass
class _Tensor:
    name: str
    shape: list[int]
    datatype: str
    data: np.ndarray

    def as_input(self) -> grpcclient.InferInput:
        result = grpcclient.InferInput(self.name, self.shape, self.datatype)
        result.set_data_from_numpy(self.data)
        return result


@dataclass
class _Case:
    """A request over gRPC, and what its error has to say."""

    named: str
    tensors: list[_Tensor] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    prompt: bytes | None = b"x"


def _text(data: bytes | list[bytes], shape: list[int] | None = None, name: str = "text_input") -> _Tensor:
    items = data if isinstance(data, list) else [data]
    shape = shape or [1, len(items)]
    return _Tensor(name, shape, "BYTES", np.array(items, dtype=object).reshape(shape))


def _number(name: str, value: float, datatype: str, dtype: type, shape: tuple[int, ...] = (1, 1)) -> _Tensor:
    return _Tensor(name, list(shape), datatype, np.full(shape, value, dtype))


GRPC_OURS = {
    "invalid UTF-8": _Case("text_input is not valid UTF-8", prompt=b"\xff\xfe"),
    "encoded surrogate": _Case("text_input is not valid UTF-8", prompt="\ud800".encode(errors="surrogatepass")),
    "empty prompt": _Case("text_input is empty", prompt=b""),
    "a prompt of 1 MB": _Case("text_input", prompt=b"x" * 2**20),
    "missing prompt": _Case("text_input is missing", [_number("max_tokens", 3, "INT32", np.int32)], prompt=None),
    "NaN": _Case("temperature", [_number("temperature", np.nan, "FP32", np.float32)]),
    "infinity": _Case("top_p", [_number("top_p", np.inf, "FP32", np.float32)]),
    "negative": _Case("max_tokens", [_number("max_tokens", -1, "INT32", np.int32)]),
    "zero": _Case("max_tokens", [_number("max_tokens", 0, "INT32", np.int32)]),
    "beams": _Case("beam_width", [_number("beam_width", 4, "INT32", np.int32)]),
    "invalid UTF-8 in a list": _Case("stop_words is not valid UTF-8", [_text([b"a", b"\xff"], name="stop_words")]),
    "too many in a list": _Case("stop_words", [_text([b"a"] * 65, name="stop_words")]),
    "unknown parameter": _Case("no_such_name", parameters={"no_such_name": 1}),
    "parameter of the wrong type": _Case("top_k", parameters={"top_k": "many"}),
    "parameter out of range": _Case("presence_penalty", parameters={"presence_penalty": "3"}),
}  # fmt: skip

GRPC_TRITONS = {
    "no inputs": _Case("expected", prompt=None),
    "a batch of two": _Case("batch-size 1", [_text([b"a", b"b"], [2, 1])], prompt=None),
    "wrong type": _Case("data-type", [_number("text_input", 1, "INT32", np.int32)], prompt=None),
    "wrong type of an option": _Case("data-type", [_number("max_tokens", 1, "INT64", np.int64)]),
    "wrong shape": _Case("shape", [_text(b"x", [1])], prompt=None),
    "wrong shape of an option": _Case("shape", [_number("max_tokens", 1, "INT32", np.int32, (1, 2))]),
    "an unknown tensor": _Case("unexpected inference input", [_number("no_such", 1, "INT32", np.int32)]),
}


@pytest.mark.parametrize("name", [*GRPC_OURS, *GRPC_TRITONS])
def test_malformed_over_grpc(server: TritonServer, good: str, name: str) -> None:
    case = {**GRPC_OURS, **GRPC_TRITONS}[name]
    assert case.named in _grpc_error(server, "compat", case)
    _assert_serves(server, good)


def _grpc_error(server: TritonServer, model: str, case: _Case) -> str:
    """The error that a request is answered with; fails where it is answered otherwise, or not at all."""
    results: queue.Queue[tuple[Any, Any]] = queue.Queue()
    tensors = [tensor.as_input() for tensor in case.tensors]
    if case.prompt is not None:
        tensors.append(_text(case.prompt).as_input())
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(callback=lambda result, error: results.put((result, error)))
        client.async_stream_infer(model, tensors, parameters=case.parameters)
        _, error = results.get(timeout=60)
        client.stop_stream()
    assert error is not None, "it was served"
    return str(error.message())


# -- by the seeded generator --------------------------------------------------------------------------------

_WAYS = ("parameter", "in parameters", "in sampling_parameters", "over gRPC")


@pytest.mark.parametrize(
    "count", [pytest.param(180, id="short"), pytest.param(1000, id="full", marks=pytest.mark.long)]
)
def test_random_malformed_requests(server: TritonServer, good: str, count: int) -> None:
    """Any field, by any of its names, with a value that it cannot have, said in any way."""
    dice = random.Random(SEED)
    for number in range(count):
        row = dice.choice([row for row in FIELDS if row.kind in ("int", "float", "bool", "ints")])
        name, value, way = dice.choice(row.names), _bad_value(row, dice), dice.choice(_WAYS)
        shown = f"{way}: {name}={value!r}"
        if way == "over gRPC":
            case = _Case(name, parameters={name: value if isinstance(value, (str, bool)) else str(value)})
            assert name in _grpc_error(server, "tiny", case), shown
        else:
            body = {
                "parameter": {name: value},
                "in parameters": {"parameters": {name: value}},
                "in sampling_parameters": {"sampling_parameters": json.dumps({name: value})},
            }[way]
            status, answer = _raw(server, json.dumps({"text_input": "x", **body}).encode())
            assert (status, name in answer) == (400, True), f"{shown}: {answer[:300]}"
        if number % 50 == 0:
            _assert_serves(server, good)
    _assert_serves(server, good)
    assert_at_rest(server, "tiny")


def _bad_value(row: Field, dice: random.Random) -> str | float | bool:
    """A value that no field of this kind and range has."""
    garbage = [
        "",
        " ",
        "nan",
        "inf",
        "-inf",
        "1e400",
        "x",
        "\0",
        "1,5",
        "0x10",
        "[",
        "{}",
        "\u0663",
        "1_0",
        "\uff11",
        "null",
        "None",
    ]
    if row.kind == "bool":
        return dice.choice([*garbage, 2, -1, 0.5])
    if row.kind == "ints":
        return dice.choice([*garbage[6:11], -1, 1.5, "-1", "[1, -2]", "[true]", '["x"]'])
    beyond = [row.minimum - 1, row.maximum + 1, row.minimum - dice.randint(2, 10**6), 1e300, -1e300]
    wrong = [True, *garbage, *(["1.5", 0.5] if row.kind == "int" else [])]
    return dice.choice([dice.choice(beyond), str(dice.choice(beyond)), dice.choice(wrong)])
