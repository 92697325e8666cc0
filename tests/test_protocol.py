"""The client's contract: what is accepted, what is refused and with which words, what is sent back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from triton_inflight.errors import RequestError
from triton_inflight.fields import FIELDS, FOREIGN
from triton_inflight.outputs import OUTPUTS, Result, output_tensors
from triton_inflight.protocol import GenerationRequest, model_defaults, parse_request
from triton_inflight.reference import reference
from triton_inflight.sampling_params import SamplingParams
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


def json_parameters(**values: object) -> dict[str, object]:
    return {"sampling_parameters": json.dumps(values)}


def test_every_field_of_the_table_has_its_place_in_the_request_with_the_same_default() -> None:
    request = dataclasses.asdict(GenerationRequest("Hi", 77, max_time=9.5))
    places = {**request["sampling"], **request}
    derived = {"do_sample", "num_return_sequences", "sampling_parameters"}
    names = {field.name for field in FIELDS} - derived
    assert names == places.keys() - {"sampling", "response_per_choice"}
    assert {name: places[name] for name in names} == {
        **{field.name: field.default for field in FIELDS if field.name in names},
        "text_input": "Hi",
        "messages": (),
        "input_ids": (),
        "max_tokens": 77,
        "max_time": 9.5,
        "logit_bias": {},
        "best_of": 1,
        "stream_interval": 1,
    }


def test_no_name_is_in_the_tables_twice() -> None:
    names = [name for row in (*FIELDS, *FOREIGN) for name in row.names]
    assert len(set(names)) == len(names)


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


_NUMERIC = [(field.name, field.kind) for field in FIELDS if field.kind in ("int", "float", "ints", "bias")]
_NO_NUMBERS = [
    "\u0661",
    "\uff11",
    "1\u0660",
    "\u00b2",
    "1_0",
    "0_1",
    "1__0",
    "\u20031",
    "1\u00a0",
    "1\x0b",
    "\u22121",
]


@pytest.mark.parametrize(("name", "kind"), _NUMERIC)
@pytest.mark.parametrize("text", _NO_NUMBERS)
def test_numbers_in_text_are_decimal_and_ascii(name: str, kind: str, text: str) -> None:
    """Python reads digits of other scripts, underscores between digits and blanks of any kind as numbers too."""
    values: dict[str, list[object]] = {
        "int": [text],
        "float": [text, f"{text}.0", f"1e{text}"],
        "ints": [text, json.dumps([text]), f"[{text}]"],
        "bias": [{text: 1}, {"1": text}, json.dumps({text: 1}), json.dumps({"1": text})],
    }
    prompt = {"text_input": None} if name == "input_ids" else {}
    for value in values[kind]:
        assert name in refusal({name: value}, **prompt)
        assert name in refusal(json_parameters(**{name: value}), **prompt)


def test_a_neutral_number_in_text_is_decimal_and_ascii() -> None:
    parse({"beam_width": " 1.0 "})
    assert "beam_width" in refusal({"beam_width": "\u0661"})


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
        ("seed", float(-(2**63)), ["seed: -9.22", "as text", "an integer"]),
        ("max_tokens", float("inf"), ["max_tokens: inf", "an integer"]),
        ("max_tokens", True, ["max_tokens: True", "an integer"]),
        ("max_tokens", "many", ["max_tokens: 'many'", "an integer"]),
        ("max_tokens", "9" * 5000, ["max_tokens: '999", "an integer"]),
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
    assert len(message.encode()) < 1100  # the list of all parameters is the longest


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("text_input", None, ["text_input is missing", "input tensor", "messages or input_ids"]),
        ("text_input", strings(b""), ["text_input is empty", "messages or input_ids"]),
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
_NAMES = st.one_of(
    st.sampled_from([name for row in (*FIELDS, *FOREIGN) for name in row.names]), st.text(max_size=5)
)
_TENSORS = st.one_of(
    st.none(),
    npst.arrays(npst.scalar_dtypes(), npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=2)),
    st.lists(st.one_of(st.binary(), st.text(st.characters()), st.none()), max_size=2).map(
        lambda values: np.array([values], dtype=object)
    ),
)


_JSON = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)


@settings(max_examples=400)
@given(
    st.dictionaries(_NAMES, _TENSORS, max_size=3),
    st.dictionaries(_NAMES, _SCALARS | _JSON.map(json.dumps), max_size=3),
    st.none() | st.dictionaries(_NAMES, _JSON, max_size=3),
    st.booleans(),
)
def test_whatever_arrives_is_a_request_or_a_request_error(
    tensors: dict[str, Any],
    parameters: dict[str, object],
    in_json: dict[str, object] | None,
    with_prompt: bool,
) -> None:
    """Anything else would end the step for every sequence in it."""
    if with_prompt:
        tensors["text_input"] = strings(b"Hi")
    if in_json is not None:
        parameters["sampling_parameters"] = json.dumps(in_json)
    try:
        request = parse_request(tensors, parameters, SETTINGS)
    except RequestError as error:
        str(error).encode("utf-8")  # what cannot be encoded cannot be sent
    else:
        assert bool(request.text_input) + bool(request.messages) + bool(request.input_ids) == 1
        assert 0 <= request.sampling.min_tokens <= request.max_tokens
        assert 1 <= request.n <= request.best_of


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, '{"seed": ' + "9" * 5000 + "}"]
)
@pytest.mark.parametrize("name", ["sampling_parameters", "messages", "logit_bias", "stop_token_ids", "stop"])
def test_json_that_python_itself_gives_up_on_is_an_error_like_others(name: str, text: str) -> None:
    refusal({name: text})


# -- where a value comes from -------------------------------------------------------------------------------


def test_a_tensor_wins_over_json_and_json_over_a_parameter_and_that_over_the_models_default() -> None:
    model = Settings(model="unused", defaults={"top_k": 4})
    temperature = {"temperature": np.array([[0.9]], dtype=np.float32)}
    sources: list[tuple[dict[str, Any], dict[str, object]]] = [
        ({"top_k": np.array([[1]], dtype=np.int32)}, {"top_k": 3, **json_parameters(top_k=2)}),
        ({}, {"top_k": 3, **json_parameters(top_k=2)}),
        ({}, {"top_k": 3}),
        ({}, {}),
    ]
    found = [
        parse_request({"text_input": strings(b"Hi"), **temperature, **tensors}, parameters, model)
        for tensors, parameters in sources
    ]
    assert [request.sampling.top_k for request in found] == [1, 2, 3, 4]


def test_sampling_parameters_is_a_tensor_or_a_parameter_and_the_tensor_wins() -> None:
    tensor = strings(b'{"temperature": "0.1", "top_p": "0.95", "max_tokens": "100", "ignore_eos": "true"}')
    request = parse(json_parameters(max_tokens=3, seed=5), sampling_parameters=tensor)
    assert request.max_tokens == 100
    assert request.sampling == SamplingParams(temperature=0.1, top_p=0.95, ignore_eos=True)


def test_a_null_in_json_counts_as_not_said() -> None:
    assert parse(json_parameters(seed=None, stop=None, max_tokens=None)) == parse()
    assert parse({"max_tokens": None}) == parse()


def test_names_of_one_field_may_differ_between_sources_but_not_within_one() -> None:
    assert parse({"max_new_tokens": 3, **json_parameters(max_tokens=2)}).max_tokens == 2
    assert "max_tokens and max_new_tokens" in refusal(json_parameters(max_new_tokens=3, max_tokens=3))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["sampling_parameters is not valid JSON", "character 1"]),
        ("[]", ["sampling_parameters: '[]'", "a JSON object"]),
        ('{"temperatur": 1}', ["'temperatur'", 'did you mean "temperature"']),
        ('{"top_p": 0}', ["top_p: 0 is out of range", "above 0, up to 1"]),
        ('{"sampling_parameters": {}}', ["sampling_parameters again"]),
        ('{"beam_width": 4}', ["beam_width: 4", "allowed: 1", "no beam search"]),
    ],
)
def test_what_is_wrong_inside_sampling_parameters_is_named(text: str, words: list[str]) -> None:
    for message in (
        refusal({"sampling_parameters": text}),
        refusal(sampling_parameters=strings(text.encode())),
    ):
        assert [word for word in words if word not in message] == []


def test_a_model_can_be_lenient_about_unknown_names() -> None:
    lenient = Settings(model="unused", unknown_parameters="warn")
    warnings: list[str] = []
    tensors = {"text_input": strings(b"Hi")}
    parameters: dict[str, object] = {"max_token": 3, **json_parameters(top_kk=1)}
    assert parse_request(tensors, parameters, lenient, warn=warnings.append).max_tokens == 256
    assert [message.split(" is ")[0] for message in warnings] == ["ignored: 'max_token'", "ignored: 'top_kk'"]
    with pytest.raises(RequestError):  # lenient about names, not about values
        parse_request(tensors, {"max_tokens": "many"}, lenient)


# -- lists, objects, prompts --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stop", "stop_words", "stop_strings", "sampling_param_stop"])
def test_stops_come_as_one_string_as_json_text_as_a_list_or_as_a_tensor(name: str) -> None:
    assert parse({name: "###"}).stop == ("###",)
    assert parse({name: '["###", "User:"]'}).stop == ("###", "User:")
    assert parse(json_parameters(**{name: ["###", "User:"]})).stop == ("###", "User:")
    assert parse(**{name: strings(b"###", "Zürich".encode(), shape=(1, 2))}).stop == ("###", "Zürich")
    assert parse(**{name: strings(b"###", shape=(1,))}).stop == ("###",)


def test_a_bracket_can_be_a_stop() -> None:
    assert parse({"stop": "[INST]"}).stop == ("[INST]",)
    assert parse(json_parameters(stop='["a"]')).stop == ('["a"]',)


def test_empty_strings_are_no_stops() -> None:
    """What TensorRT-LLM's examples send: "bad_words": "", "stop_words": ""."""
    request = parse({"stop_words": "", "bad_words": '["", "x"]'}, stop_words=strings(b"", b"", shape=(1, 2)))
    assert (request.stop, request.bad_words) == ((), ("x",))


@pytest.mark.parametrize("value", [2, "2", "[2]", " [2] "])
def test_token_ids_come_one_by_one_or_as_json_text(value: object) -> None:
    assert parse({"stop_token_ids": value}).sampling.stop_token_ids == (2,)
    assert parse(json_parameters(stop_token_ids=[2, "3"])).sampling.stop_token_ids == (2, 3)
    assert parse(end_id=np.array([[2]], dtype=np.int32)).sampling.stop_token_ids == (2,)


def test_biases_are_an_object_or_its_text() -> None:
    for parameters in (
        {"logit_bias": '{"50": -100, "7": "1.5"}'},
        json_parameters(logit_bias={50: -100, 7: 1.5}),
    ):
        assert parse(parameters).sampling.logit_bias == {50: -100.0, 7: 1.5}


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def test_a_prompt_can_be_messages_or_token_ids() -> None:
    """Where the config requires text_input, an empty one goes along."""
    for text in (None, strings(b"")):
        request = parse({"messages": json.dumps(MESSAGES)}, text_input=text)
        assert (request.text_input, request.messages) == ("", tuple(MESSAGES))
        request = parse(text_input=text, input_ids=np.array([[5, 6, 7]], dtype=np.int32))
        assert (request.text_input, request.input_ids) == ("", (5, 6, 7))
    assert parse(json_parameters(messages=MESSAGES), text_input=None).messages == tuple(MESSAGES)


def test_who_sends_token_ids_gets_token_ids_unless_the_model_or_the_request_says_no() -> None:
    assert not parse().return_output_ids
    ids: dict[str, object] = {"text_input": "", "input_ids": "[5, 6]"}
    request = parse_request({}, ids, SETTINGS)
    assert (request.return_output_ids, request.return_sequence_length) == (True, True)
    request = parse_request({}, {**ids, "return_output_ids": False}, SETTINGS)
    assert (request.return_output_ids, request.return_sequence_length) == (False, True)
    texts = Settings(model="unused", outputs=("text_output",))
    assert not parse_request({}, ids, texts).return_output_ids


def test_exactly_one_prompt_is_taken() -> None:
    assert "text_input and messages are both sent" in refusal({"messages": json.dumps(MESSAGES)})
    assert "messages and input_ids are both sent" in refusal(
        {"messages": json.dumps(MESSAGES), "input_ids": "[1]"}, text_input=None
    )


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("stop", json.dumps(["a"] * 65), ["stop: a list of 65", "up to 64 strings"]),
        ("stop", "x" * 1001, ["stop: a string of 1001 characters", "up to 1000 characters"]),
        ("stop", 5, ["stop: 5", "a string, or a list"]),
        ("stop", "a\ud800", ["stop", "lone surrogate"]),
        ("stop_token_ids", "[1, -1]", ["stop_token_ids: -1", "from 0 to 2147483647"]),
        ("stop_token_ids", "[1", ["stop_token_ids is not valid JSON"]),
        ("stop_token_ids", "[true]", ["stop_token_ids: True", "an integer"]),
        ("logit_bias", '{"a": 1}', ["logit_bias: 'a'", "token id to a number from -100 to 100"]),
        ("logit_bias", '{"1": 101}', ["logit_bias: 101 is out of range", "-100 to 100"]),
        ("logit_bias", '{"1": NaN}', ["logit_bias: '1': nan", "-100 to 100"]),
        ("logit_bias", json.dumps(dict.fromkeys(range(1025), 1)), ["1025 entries", "up to 1024"]),
        ("messages", "[]", ["messages: '[]'", "a role and a content"]),
        ("messages", '{"role": "user"}', ["messages: ", "a JSON list"]),
        ("messages", '[{"content": "x"}]', ["is no message", "a role and a content"]),
        ("messages", '[{"role": "user"}]', ["has no content"]),
        ("messages", '[{"role": "user", "content": "\\ud800"}]', ["messages", "lone surrogate"]),
    ],
)
def test_a_bad_list_or_object_names_itself_and_what_is_allowed(
    name: str, value: object, words: list[str]
) -> None:
    message = refusal({name: value}, **({"text_input": None} if name == "messages" else {}))
    assert [word for word in words if word not in message] == []


# -- sampling -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0, "0.7", 100], [-0.1, 101, "nan", float("inf"), True, "hot"]),
        ("top_k", [0, -1, 1, "50"], [-2, 0.5]),
        ("top_p", [0.01, 1, "0.9"], [0, 1.01, float("nan")]),
        ("min_p", [0, 1], [-0.1, 1.1]),
        ("typical_p", [0.2, 1], [0, 1.1]),
        ("repetition_penalty", [0.5, 1.2], [0, -1]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1]),
        ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
        ("min_tokens", [0, 77], [-1]),
        ("logprobs", [0, 20], [-1, 21]),
        ("prompt_logprobs", [0, 20], [-1, 21]),
        ("stream_interval", [1, 1024], [0, 1025]),
        ("seed", [0, 2**64 - 1, -(2**63)], [2**64, -(2**63) - 1, 1.5]),
        ("n", [1, 128], [0, 129]),
        ("best_of", [1, 128], [0, 129]),
    ],
)
def test_ranges_end_where_the_error_says(name: str, good: list[object], bad: list[object]) -> None:
    (allowed,) = [field.allowed for field in FIELDS if field.name == name]
    for value in good:
        parse({name: value})
    for value in bad:
        assert allowed in refusal({name: value})


def test_minus_one_and_zero_are_no_top_k() -> None:
    assert parse({"top_k": -1}).sampling == parse({"top_k": 0}).sampling == SamplingParams()


@pytest.mark.parametrize(("seed", "expected"), [(-1, None), (0, 0), (-2, 2**64 - 2), (2**64 - 1, 2**64 - 1)])
def test_any_seed_of_64_bits_is_one_and_minus_one_is_none(seed: int, expected: int | None) -> None:
    assert parse({"seed": seed}).sampling.seed == expected
    if seed >= 0:
        assert parse(random_seed=np.array([[seed]], dtype=np.uint64)).sampling.seed == expected


def test_a_request_that_says_nothing_takes_the_most_likely_token() -> None:
    assert parse().sampling == SamplingParams()
    assert parse().sampling.is_greedy


@pytest.mark.parametrize(
    ("parameters", "temperature"),
    [
        ({"top_p": 0.9}, 1.0),
        ({"top_k": 40}, 1.0),
        ({"min_p": 0.1}, 1.0),
        ({"typical_p": 0.5}, 1.0),
        ({"n": 2}, 1.0),
        ({"do_sample": True}, 1.0),
        ({"top_p": 1.0, "top_k": -1, "n": 1, "seed": 3}, 0.0),
        ({"top_p": 0.9, "temperature": 0}, 0.0),
        ({"temperature": 0.5, "do_sample": True}, 0.5),
        ({"temperature": 0.5, "do_sample": False}, 0.0),
    ],
)
def test_who_asks_to_sample_without_a_temperature_gets_one(
    parameters: dict[str, object], temperature: float
) -> None:
    assert parse(parameters).sampling.temperature == temperature


CHAT_MODEL = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1, "top_k": None}


def test_the_models_generation_config_gives_defaults() -> None:
    def sampling(model: Settings, parameters: dict[str, object], **config: Any) -> SamplingParams:
        defaults = model_defaults(model, config)
        return parse_request({"text_input": strings(b"Hi")}, parameters, model, defaults).sampling

    plain = Settings(model="unused")
    chat = SamplingParams(temperature=0.6, top_p=0.9, repetition_penalty=1.1)
    assert sampling(plain, {}, **CHAT_MODEL) == chat
    assert sampling(plain, {"temperature": 0}, **CHAT_MODEL) == dataclasses.replace(chat, temperature=0)
    assert sampling(plain, {}, do_sample=True).temperature == 1.0
    # Without do_sample a model is greedy, whatever temperature its config carries along.
    assert sampling(plain, {}, temperature=0.6, top_p=0.9).temperature == 0
    assert sampling(plain, {}, min_new_tokens=1000).min_tokens == 256  # gives way to max_tokens
    # config.pbtxt wins over it, or switches it off.
    colder = Settings(model="unused", defaults={"temperature": 0.2})
    assert sampling(colder, {}, **CHAT_MODEL) == dataclasses.replace(chat, temperature=0.2)
    off = Settings(model="unused", use_generation_config=False)
    assert sampling(off, {}, **CHAT_MODEL) == SamplingParams()


def test_a_temperature_of_0_in_the_config_holds_until_a_request_says_otherwise() -> None:
    greedy = Settings(model="unused", defaults={"temperature": 0.0})
    tensors = {"text_input": strings(b"Hi")}
    assert parse_request(tensors, {"top_p": 0.9}, greedy).sampling.temperature == 0
    assert parse_request(tensors, {"do_sample": True}, greedy).sampling.temperature == 1


def test_what_is_wrong_in_a_generation_config_is_left_out_with_a_warning() -> None:
    warnings: list[str] = []
    defaults = model_defaults(Settings(model="unused"), {"top_p": 1.5, "top_k": 5}, warnings.append)
    assert (defaults["top_k"], "top_p" in defaults) == (5, False)
    (message,) = warnings
    assert "generation config" in message
    assert "top_p: 1.5" in message


# -- what goes together -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"min_tokens": 78}, ["min_tokens: 78", "max_tokens: 77 (default_max_tokens in config.pbtxt)"]),
        ({"min_tokens": 9, "max_tokens": 8}, ["min_tokens: 9", "max_tokens: 8;"]),
        ({"n": 3, "best_of": 2}, ["best_of: 2 is less than n: 3"]),
        ({"n": 1, "best_of": 2, "stream": True}, ["best_of: 2 is more than n: 1", "with stream"]),
        ({"n": 2, "temperature": 0}, ["n: 2", "temperature: 0", "above 0"]),
        ({"best_of": 2, "temperature": 0}, ["best_of: 2", "temperature: 0", "above 0"]),
        ({"n": 2, "num_return_sequences": 2}, ["n and num_return_sequences"]),
    ],
)
def test_values_that_do_not_go_together_are_named(parameters: dict[str, object], words: list[str]) -> None:
    message = refusal(parameters)
    assert [word for word in words if word not in message] == []


def test_choices_share_a_response_unless_each_has_to_have_its_own() -> None:
    """vLLM's n: one response without stream. TensorRT-LLM's num_return_sequences: a response for each."""
    together = parse({"n": 2})
    assert (together.n, together.best_of, together.response_per_choice) == (2, 2, False)
    for parameters in ({"n": 2, "stream": True}, {"num_return_sequences": 2}):
        apart = parse(parameters)
        assert (apart.n, apart.best_of, apart.response_per_choice) == (2, 2, True)
    assert (parse({"n": 2, "best_of": 5}).n, parse({"best_of": 5}).best_of) == (2, 5)


@pytest.mark.parametrize(
    ("parameters", "logprobs", "sent"),
    [
        ({}, None, False),
        ({"logprobs": 3}, 3, True),
        ({"return_logprobs": True}, 0, True),
        ({"return_logprobs": True, "logprobs": 3}, 3, True),
        ({"return_log_probs": True}, 0, False),
        ({"return_cumulative_logprob": True}, 0, False),
        ({"best_of": 2}, 0, False),
        ({"n": 2}, None, False),
        ({"prompt_logprobs": 2}, None, False),
    ],
)
def test_log_probabilities_are_computed_for_whatever_needs_them_and_nothing_else(
    parameters: dict[str, object], logprobs: int | None, sent: bool
) -> None:
    request = parse(parameters)
    assert (request.sampling.logprobs, request.return_logprobs) == (logprobs, sent)


# -- names of other backends --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "tensors"),
    [
        ({"beam_width": 1, "length_penalty": "1.0", "early_stopping": False, "use_beam_search": "false"}, {}),
        ({}, {"beam_width": np.array([[1]], np.int32), "length_penalty": np.array([[1]], np.float32)}),
        ({"pad_id": 2, "lora_name": "", "guided_json": None}, {"pad_id": np.array([[50256]], np.int32)}),
        ({}, {"return_context_logits": np.array([[False]]), "embedding_bias_weights": np.zeros((1, 0))}),
        ({}, {"guided_decoding_guide": strings(b""), "lora_task_id": np.array([[0]], np.uint64)}),
    ],
)
def test_what_asks_for_nothing_is_let_through(parameters: dict[str, object], tensors: dict[str, Any]) -> None:
    assert parse(parameters, **tensors) == parse()


@pytest.mark.parametrize("foreign", [foreign for foreign in FOREIGN if foreign.neutral is not None])
def test_what_this_backend_does_not_have_is_refused_in_every_source(foreign: Any) -> None:
    for name in foreign.names:
        sources: list[tuple[dict[str, object], dict[str, Any]]] = [
            ({name: "7"}, {}),
            (json_parameters(**{name: [7]}), {}),
            ({}, {name: np.array([[7]])}),
        ]
        for parameters, tensors in sources:
            message = refusal(parameters, **tensors)
            assert message.startswith(f"{name}: ")
            assert foreign.why in message


# -- what is sent back --------------------------------------------------------------------------------------


EVERYTHING: dict[str, object] = {field.name: True for field in FIELDS if field.name.startswith("return_")}
TYPES = {"TYPE_STRING": np.object_, "TYPE_UINT32": np.uint32, "TYPE_INT32": np.int32, "TYPE_FP32": np.float32}


def test_text_is_always_sent_and_nothing_that_was_not_asked_for() -> None:
    tensors = output_tensors(Result("h\u00e9\x00", "stop", 5, 2, "###", prompt_logprobs="[null]"), parse())
    assert list(tensors) == ["text_output"]
    assert tensors["text_output"].shape == (1,)
    assert tensors["text_output"][0] == b"h\xc3\xa9\x00"


def test_everything_asked_for_is_sent_with_the_types_that_are_declared() -> None:
    request = parse({**EVERYTHING, "prompt_logprobs": 1, "num_return_sequences": 2})
    result = Result("x", "length", 5, 2, 7, 1, (8, 9), (-0.5, -1.0), -1.5, '[{"8": {}}]', "[null]")
    tensors = output_tensors(result, request)
    assert list(tensors) == [output.name for output in OUTPUTS]
    for output in OUTPUTS:
        assert tensors[output.name].dtype == TYPES[output.data_type]
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        "text_output": [b"x"],
        "finish_reason": [b"length"],
        "stop_reason": [b"7"],
        "num_input_tokens": [5],
        "num_output_tokens": [2],
        "output_ids": [[[8, 9]]],
        "sequence_length": [[2]],
        "cumulative_logprob": [-1.5],
        "logprobs": [b'[{"8": {}}]'],
        "prompt_logprobs": [b"[null]"],
        "cum_log_probs": [[-1.5]],
        "output_log_probs": [[[-0.5, -1.0]]],
        "sequence_index": [[1]],
    }


def test_reasons_are_sent_only_at_the_end() -> None:
    tensors = output_tensors(Result("x", None, 5, 2), parse({**EVERYTHING}))
    assert not {"finish_reason", "stop_reason", "prompt_logprobs", "sequence_index"} & tensors.keys()
    tensors = output_tensors(Result("x", "stop", 5, 2), parse({**EVERYTHING}))
    assert tensors["stop_reason"].tolist() == [b""]


def test_one_response_can_hold_all_choices() -> None:
    request = parse({**EVERYTHING, "n": 2})
    results = [
        Result("a", "stop", 5, 1, "#", 0, (8,), (-0.5,), -0.5, "[{}]"),
        Result("bc", "length", 5, 2, None, 1, (8, 9), (-0.5, -1.0), -1.5, "[{}, {}]"),
    ]
    sent = {name: tensor.tolist() for name, tensor in output_tensors(results, request).items()}
    assert sent == {
        "text_output": [b"a", b"bc"],
        "finish_reason": [b"stop", b"length"],
        "stop_reason": [b"#", b""],
        "num_input_tokens": [5],
        "num_output_tokens": [1, 2],
        "output_ids": [[[8, 0], [8, 9]]],
        "sequence_length": [[1, 2]],
        "cumulative_logprob": [-0.5, -1.5],
        "logprobs": [b"[{}]", b"[{}, {}]"],
        "cum_log_probs": [[-0.5, -1.5]],
        "output_log_probs": [[[-0.5, 0.0], [-0.5, -1.0]]],
    }


@pytest.mark.parametrize(
    ("name", "output"), [(name, output) for output in OUTPUTS for name in output.asked_by]
)
def test_an_output_that_the_config_does_not_declare_cannot_be_asked_for(name: str, output: Any) -> None:
    names = tuple(other.name for other in OUTPUTS if other != output)
    lean = Settings(model="unused", outputs=names)
    tensors = {"text_input": strings(b"Hi")}
    parse_request(tensors, {}, lean)
    value: object = {"n": 2, "num_return_sequences": 2, "logprobs": 0, "prompt_logprobs": 0}.get(name, True)
    with pytest.raises(RequestError, match=f"{name} asks for the output {output.name}.*config.pbtxt"):
        parse_request(tensors, {name: value, "stream": True}, lean)


def test_an_output_needs_no_other_one_to_be_declared() -> None:
    sums = Settings(model="unused", outputs=("text_output", "cumulative_logprob"))
    parameters: dict[str, object] = {"return_cumulative_logprob": True, "return_logprobs": False, "n": 2}
    request = parse_request({"text_input": strings(b"Hi")}, parameters, sums)
    assert (request.return_cumulative_logprob, request.return_logprobs) == (True, False)


def test_the_reference_page_is_what_the_tables_say() -> None:
    page = Path(__file__).parent.parent / "docs" / "reference.md"
    assert page.read_text() == reference(), "python -m triton_inflight.reference > docs/reference.md"
