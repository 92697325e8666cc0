"""The client's contract: what is accepted, what is refused and with which words, what is sent back."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from triton_inflight.errors import RequestError
from triton_inflight.protocol import (
    FIELDS,
    OUTPUTS,
    GenerationRequest,
    Result,
    output_tensors,
    parse_request,
)
from triton_inflight.settings import Settings

SETTINGS = Settings(model="unused", default_max_tokens=77, max_time=9.5, ignored_parameters=("x-*", "Trace*"))


def strings(*values: bytes | str, shape: tuple[int, ...] = (1, 1)) -> np.ndarray:
    return np.array(values, dtype=object).reshape(shape)


def parse(parameters: dict[str, object] | None = None, **tensors: Any) -> GenerationRequest:
    return parse_request({"text_input": strings(b"Hi"), **tensors}, parameters or {}, SETTINGS)


def refusal(parameters: dict[str, object] | None = None, **tensors: Any) -> str:
    with pytest.raises(RequestError) as caught:
        parse(parameters, **tensors)
    assert caught.value.code == "INVALID_ARG"
    return str(caught.value)


def test_the_table_and_the_request_have_the_same_fields_and_defaults() -> None:
    table = {field.name: field.default for field in FIELDS if field.default is not None}
    request = {field.name: field.default for field in dataclasses.fields(GenerationRequest)}
    assert [field.name for field in FIELDS] == list(request)
    assert table.items() <= request.items()


def test_a_prompt_alone_takes_every_default() -> None:
    assert parse() == GenerationRequest("Hi", max_tokens=77, max_time=9.5)


@pytest.mark.parametrize("shape", [(1, 1), (1,), ()])
def test_one_value_is_taken_whatever_its_shape(shape: tuple[int, ...]) -> None:
    assert parse(text_input=strings(b"one", shape=shape)).text_input == "one"


@pytest.mark.parametrize("text", ["a\x00b", " ", "\n", "\u202e", "\U0001f600 \u0438", "x" * 1_000_000])
def test_unusual_text_is_just_text(text: str) -> None:
    assert parse(text_input=strings(text.encode())).text_input == text


@pytest.mark.parametrize(
    ("value", "expected"), [(3, 3), (2.0, 2), ("12", 12), (" 12 ", 12), ("+7", 7), (2**31 - 1, 2**31 - 1)]
)
def test_integers_come_as_numbers_or_text(value: object, expected: int) -> None:
    assert parse({"max_tokens": value}).max_tokens == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(True, True), (False, False), (1, True), (0, False), ("true", True), ("False", False), ("1", True)],
)
def test_booleans_come_as_booleans_bits_or_text(value: object, expected: bool) -> None:
    assert parse({"stream": value}).stream is expected


@pytest.mark.parametrize(
    ("value", "expected"), [(3, 3.0), (0.5, 0.5), (" 1e2 ", 100.0), ("604800", 604800.0)]
)
def test_numbers_come_as_numbers_or_text(value: object, expected: float) -> None:
    request = parse({"max_time": value})
    assert (request.max_time, type(request.max_time)) == (expected, float)
    assert parse(max_time=np.array([[expected]], dtype=np.float32)).max_time == expected


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint64])
def test_integer_tensors_of_any_width_are_taken(dtype: type) -> None:
    assert parse(max_tokens=np.array([[9]], dtype=dtype)).max_tokens == 9


def test_a_tensor_wins_over_a_parameter_and_a_parameter_over_the_default() -> None:
    assert parse({"max_tokens": 3}, max_tokens=np.array([[9]], dtype=np.int32)).max_tokens == 9
    assert parse({"max_tokens": 3}).max_tokens == 3


def test_an_alias_means_the_same_in_either_place() -> None:
    assert parse({"max_new_tokens": 3}).max_tokens == 3
    assert parse({"max_tokens": 3}, max_new_tokens=np.array([[9]], dtype=np.int32)).max_tokens == 9
    message = refusal({"max_new_tokens": 3, "max_tokens": 3})
    assert "max_tokens and max_new_tokens" in message


def test_control_tensors_are_no_business_of_the_client() -> None:
    assert parse(START=np.array([[True]]), CORRID=np.array([[7]], dtype=np.uint64)) == parse()


def test_an_absent_optional_tensor_counts_as_not_sent() -> None:
    assert parse(max_tokens=None).max_tokens == 77


@pytest.mark.parametrize(
    "name",
    ["id", "sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output",
     "triton_enable_empty_final_response", "x-request-id", "X-Request-Id", "traceparent"],
)  # fmt: skip
def test_names_of_triton_and_ignored_patterns_are_no_error(name: str) -> None:
    assert parse({name: "anything"}) == parse()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_tokens", 0, ["max_tokens: 0", "out of range", "1 to 2147483647"]),
        ("max_tokens", -3, ["max_tokens: -3", "1 to 2147483647"]),
        ("max_tokens", 2**31, ["max_tokens: 2147483648", "1 to 2147483647"]),
        ("max_tokens", 10**300, ["max_tokens: a number of more than 38 digits", "1 to 2147483647"]),
        ("max_tokens", 1e300, ["max_tokens: 1e+300", "1 to 2147483647"]),
        ("max_tokens", 2.5, ["max_tokens: 2.5", "an integer"]),
        ("max_tokens", float("nan"), ["max_tokens: nan", "an integer"]),
        ("max_tokens", float("inf"), ["max_tokens: inf", "an integer"]),
        ("max_tokens", True, ["max_tokens: True", "an integer"]),
        ("max_tokens", "many", ["max_tokens: 'many'", "an integer"]),
        ("max_tokens", "9" * 5000, ["max_tokens: '999", "an integer"]),
        ("max_tokens", None, ["max_tokens: None", "an integer"]),
        ("max_new_tokens", 0, ["max_new_tokens: 0", "1 to 2147483647"]),
        ("stream", "maybe", ["stream: 'maybe'", "true or false"]),
        ("stream", 2, ["stream: 2", "true or false"]),
        ("stream", 1.0, ["stream: 1.0", "true or false"]),
        ("max_time", 0, ["max_time: 0", "out of range", "a number above 0, up to 604800"]),
        ("max_time", 604801, ["max_time: 604801", "up to 604800"]),
        ("max_time", float("nan"), ["max_time: nan", "a number above 0"]),
        ("max_time", "inf", ["max_time: 'inf'", "a number above 0"]),
        ("max_time", 10**400, ["max_time: a number of more than 38 digits", "a number above 0"]),
        ("request_priority", 1001, ["request_priority: 1001", "-1000 to 1000"]),
        ("max_token", 3, ["'max_token'", 'did you mean "max_tokens"', "ignored_parameters", "config.pbtxt"]),
        ("max-tokens", 3, ["'max-tokens'", 'did you mean "max_tokens"']),
        ("\ud800", 3, [r"'\ud800'", "no parameter", "return_finish_reason"]),
    ],
)
def test_a_bad_parameter_names_itself_its_value_and_what_is_allowed(
    name: str, value: object, words: list[str]
) -> None:
    message = refusal({name: value})
    assert [word for word in words if word not in message] == []
    assert len(message.encode()) < 500


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("text_input", None, ["text_input is missing", "input tensor"]),
        ("text_input", strings(b""), ["text_input is empty"]),
        ("text_input", strings(b"ab\xffc"), ["text_input is not valid UTF-8", "0xff", "offset 2"]),
        ("text_input", strings(b"ab\xf0\x9f"), ["text_input is not valid UTF-8", "offset 2"]),
        ("text_input", strings("ab\ud800"), ["text_input", "lone surrogate at character 2"]),
        ("text_input", strings(b"ab\xed\xa0\x80"), ["text_input is not valid UTF-8", "offset 2"]),
        ("text_input", strings(b"a", b"b", shape=(2, 1)), ["text_input", "batch dimension of 2", "[2, 1]"]),
        ("text_input", strings(b"a", b"b", shape=(1, 2)), ["text_input holds 2 values", "exactly 1"]),
        ("text_input", strings(b"a", b"b", shape=(2,)), ["text_input holds 2 values", "exactly 1"]),
        ("text_input", strings(shape=(1, 0)), ["text_input holds 0 values", "exactly 1"]),
        ("text_input", np.array([[1]]), ["text_input", "int64", "STRING"]),
        ("text_input", strings(None), ["text_input: None", "a string"]),  # type: ignore[arg-type]
        ("max_tokens", np.array([[1.0]]), ["max_tokens", "float64", "INT32"]),
        ("max_tokens", np.array([[True]]), ["max_tokens", "bool", "INT32"]),
        ("max_tokens", np.array([[0]], dtype=np.int32), ["max_tokens: 0", "1 to 2147483647"]),
        ("stream", np.array([[1]], dtype=np.int32), ["stream", "int32", "BOOL"]),
    ],
)
def test_a_bad_tensor_names_itself_its_value_and_what_is_allowed(
    name: str, tensor: np.ndarray | None, words: list[str]
) -> None:
    message = refusal(**{name: tensor})
    assert [word for word in words if word not in message] == []


_SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text())
_NAMES = st.one_of(st.sampled_from([name for field in FIELDS for name in field.names]), st.text())
_TENSORS = st.one_of(
    st.none(),
    npst.arrays(npst.scalar_dtypes(), npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=2)),
    st.lists(st.one_of(st.binary(), st.text(st.characters()), st.none()), max_size=2).map(
        lambda values: np.array([values], dtype=object)
    ),
)


@given(
    st.dictionaries(_NAMES, _TENSORS, max_size=3),
    st.dictionaries(_NAMES, _SCALARS, max_size=3),
    st.booleans(),
)
def test_whatever_arrives_is_a_request_or_a_request_error(
    tensors: dict[str, Any], parameters: dict[str, object], with_prompt: bool
) -> None:
    """Anything else would end the step for every sequence in it."""
    if with_prompt:
        tensors["text_input"] = strings(b"Hi")
    try:
        request = parse_request(tensors, parameters, SETTINGS)
    except RequestError as error:
        str(error).encode("utf-8")  # what cannot be encoded cannot be sent
    else:
        assert request.text_input
        assert request.max_tokens >= 1


def test_text_is_always_sent_and_nothing_that_was_not_asked_for() -> None:
    tensors = output_tensors(Result("h\u00e9\x00", "stop", 5, 2), parse())
    assert list(tensors) == ["text_output"]
    assert tensors["text_output"].shape == (1, 1)
    assert tensors["text_output"][0, 0] == b"h\xc3\xa9\x00"


def test_everything_asked_for_is_sent_with_the_types_that_are_declared() -> None:
    request = parse(
        {"return_finish_reason": True, "return_num_input_tokens": True, "return_num_output_tokens": "true"}
    )
    last = output_tensors(Result("x", "length", 5, 2), request)
    assert list(last) == [output.name for output in OUTPUTS]
    assert last["finish_reason"][0, 0] == b"length"
    assert (last["num_input_tokens"].item(), last["num_output_tokens"].item()) == (5, 2)
    for output in OUTPUTS:
        assert last[output.name].shape == (1, 1)
        assert last[output.name].dtype == (np.uint32 if output.data_type == "TYPE_UINT32" else np.object_)
    assert "finish_reason" not in output_tensors(Result("x", None, 5, 2), request)
