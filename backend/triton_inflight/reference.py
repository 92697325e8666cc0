"""Prints docs/reference.md from the tables: ``python -m triton_inflight.reference > docs/reference.md``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from triton_inflight.errors import RequestError
from triton_inflight.fields import (
    COMPATIBLE_INPUTS,
    FIELDS,
    FOREIGN,
    GROUPS,
    IGNORED_PARAMETERS,
    Field,
    Group,
)
from triton_inflight.outputs import OUTPUTS
from triton_inflight.protocol import parse_request
from triton_inflight.settings import PARAMETERS, Parameter, Settings

_HEAD = """\
# Reference: what clients send and get

Written by `python -m triton_inflight.reference` from the tables that the server itself reads.

## How a value is said

The first of these that says it wins:

1. an **input tensor** of that name, if config.pbtxt declares it; `text_input` always is;
2. a key of the JSON object **`sampling_parameters`**, itself a tensor or a request parameter;
3. a **request parameter**: over HTTP `generate`, any key of the body that is no tensor; over gRPC, `parameters`;
4. the **model's default**: `default_NAME` in config.pbtxt, then the model's generation config, then this page.

Names in brackets are aliases. Within one source only one name of a field may be used. A `null` counts as not said.

Numbers and booleans are also taken as text (`"0.7"`, `"true"`). Triton takes neither lists nor objects as request
parameters: send them as JSON text (`"stop": "[\\"###\\", \\"User:\\"]"`), or inside `sampling_parameters`. A single
string or number stands for a list of one.

Tensors have shape `[1, 1]`, lists `[1, N]`. Requests with different sets of optional tensors never share a batch of
Triton's; requests with different parameters do. So config.pbtxt should declare no more tensors than the
clients at hand send. `triton-inflight init --compat` declares those of clients written for Triton's vLLM and
TensorRT-LLM backends, marked † here.

A name that is not known is an error that suggests the nearest one, or a warning in the server's log with
`unknown_parameters: warn` in config.pbtxt.
"""

_SAMPLING_NOTE = """\
Where neither the request nor config.pbtxt nor the model's generation config says a temperature, it is 0 (the most
likely token), but 1 for requests that say one of `top_k`, `top_p`, `min_p`, `typical_p`, `n` or `best_of` with a
value that means sampling. From a generation config come `top_k`, `top_p`, `min_p`, `typical_p`,
`repetition_penalty`, `min_new_tokens`, and, where it says `do_sample: true`, `temperature` (1 if it says none);
`use_generation_config: false` in config.pbtxt leaves it aside.

The order of operations is transformers': `logit_bias`, `repetition_penalty`, `presence_penalty` and
`frequency_penalty`, `bad_words`, `min_tokens`, `temperature`, `top_k`, `top_p`, `min_p`, `typical_p`. Log
probabilities are those of the model's own scores, before all of these.
"""

_CHOICES_NOTE = """\
With `stream`, and with `num_return_sequences`, every response is of one choice, and `sequence_index` says which.
Otherwise one response holds all of them, and its outputs have one value for each.
"""

_DEFAULTS_NOTE = """\
`default_NAME` sets the model's default of a field, with the same values as a request parameter: {names}. As in
TensorRT-LLM's configurations, `exclude_input_in_output` and `skip_special_tokens` need no prefix.
"""

_TEXT_NOTE = """\
No prompt is sent back unless a request asks for it. (Triton's vLLM backend sends it by default where it does not
stream, TensorRT-LLM's always.)
"""

_NOTES: dict[Group, str] = {"sampling": _SAMPLING_NOTE, "choices": _CHOICES_NOTE, "text": _TEXT_NOTE}

# What is said once a request has been read: code and when.
_OTHER_ERRORS = (
    ("INVALID_ARG", "The prompt has no tokens, or is too long for `max_seq_len`."),
    ("INVALID_ARG", "Token ids that the model does not have."),
    ("INVALID_ARG", "No `sequence_start`, for a sequence that is not live."),
    (
        "INVALID_ARG",
        "`sequence_start` and `sequence_end` together, for more tokens than `max_tokens_in_one_trip`.",
    ),
    ("ALREADY_EXISTS", "A second request for a sequence ID that is live. Both end."),
    ("UNAVAILABLE", "More sequences wait than `max_queue_size`."),
    ("UNAVAILABLE", "No token came within `max_time`."),
    ("UNAVAILABLE", "The KV-state store is full and the request cannot wait."),
    ("INTERNAL", "A fault while this request was served; others go on."),
)

# What is sent beside a prompt -> the error: (input tensors, request parameters). Without a prompt where it is in them.
_BAD_REQUESTS: tuple[tuple[Mapping[str, Any], Mapping[str, object]], ...] = (
    ({"text_input": None}, {}),
    ({"text_input": [[b""]]}, {}),
    ({"text_input": [[b"a\xff"]]}, {}),
    ({"text_input": [[b"a"], [b"b"]]}, {}),
    ({}, {"messages": '[{"role": "user", "content": "Hi"}]'}),
    ({"max_tokens": [[1.0]]}, {}),
    ({}, {"max_tokens": 0}),
    ({}, {"max_tokens": "many"}),
    ({}, {"max_tokens": 5, "max_new_tokens": 6}),
    ({}, {"top_p": 1.5}),
    ({}, {"stream": "maybe"}),
    ({}, {"stop_token_ids": "[1"}),
    ({}, {"temprature": 1}),
    ({}, {"sampling_parameters": '{"top_k": -5}'}),
    ({}, {"beam_width": 4}),
    ({}, {"guided_decoding_guide": "{}"}),
    ({}, {"min_tokens": 9, "max_tokens": 8}),
    ({}, {"n": 2, "temperature": 0}),
    ({}, {"n": 2, "best_of": 1}),
    ({}, {"best_of": 2, "stream": True}),
    ({}, {"n": 2, "num_return_sequences": 2}),
)


def reference() -> str:
    """The text of docs/reference.md."""
    return "\n".join(_sections()).rstrip() + "\n"


def _sections() -> Iterator[str]:
    yield _HEAD
    yield "## Inputs and parameters\n"
    for group, title in GROUPS.items():
        yield f"### {title}\n"
        yield _table(
            ("name", "tensor", "default", "allowed", "meaning"),
            (_field_row(field) for field in FIELDS if field.group == group),
        )
        if group in _NOTES:
            yield _NOTES[group]
    yield "## Names of other backends\n"
    yield "Taken where they ask for nothing, refused otherwise; never ignored.\n"
    yield _table(
        ("name", "allowed", "why"),
        ((_names(f.names), _neutral(f.neutral), f.why) for f in FOREIGN),
    )
    ignored = ", ".join(f"`{name}`" for name in IGNORED_PARAMETERS)
    yield (
        f"Ignored, because Triton or its clients add them: {ignored}, and what `ignored_parameters` lists. "
        "(A `timeout`, in microseconds, still bounds the time as `max_time` does.)\n"
    )
    yield "## Outputs\n"
    yield "`text_output` is in every response; the others only where they are asked for.\n"
    yield _table(
        ("name", "type", "asked for by", "meaning"),
        ((f"`{o.name}`", o.data_type[5:], ", ".join(f"`{n}`" for n in o.asked_by), o.doc) for o in OUTPUTS),
    )
    yield "## config.pbtxt\n"
    yield 'This backend\'s parameters, each `parameters { key: "NAME" value { string_value: "VALUE" } }`.\n'
    yield _table(("name", "default", "allowed", "meaning"), (_parameter_row(p) for p in PARAMETERS))
    yield _DEFAULTS_NOTE.format(
        names=", ".join(f"`default_{field.name}`" for field in FIELDS if field.configurable)
    )
    yield "## Errors\n"
    yield (
        "A request that is refused harms no other. Triton's code for all of these is `INVALID_ARG` (HTTP 400); "
        '"sent" is beside a good prompt.\n'
    )
    yield _table(("sent", "error"), (_error_row(*bad) for bad in _BAD_REQUESTS))
    yield "Others come once the request has been read, and likewise say what to change:\n"
    yield _table(("code", "when"), ((f"`{code}`", when) for code, when in _OTHER_ERRORS))


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return (
        "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines) + "\n"
    )


def _field_row(field: Field) -> tuple[str, ...]:
    return (_names(field.names), _tensor(field), _default(field), field.allowed, field.doc)


def _names(names: tuple[str, ...]) -> str:
    marked = [f"`{name}`{' †' if name in COMPATIBLE_INPUTS else ''}" for name in names]
    return marked[0] + (f" ({', '.join(marked[1:])})" if names[1:] else "")


def _tensor(field: Field) -> str:
    return field.data_type.removeprefix("TYPE_") + (" [N]" if field.is_list else "")


def _default(field: Field) -> str:
    if field.default_setting is not None:
        (parameter,) = [p for p in PARAMETERS if p.name == field.default_setting]
        return f"`{parameter.name}` in config.pbtxt: {_written(parameter.default)}"
    return "" if field.default in (None, ()) else _written(field.default)


def _written(value: object) -> str:
    """A value as clients write it."""
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)


def _neutral(values: tuple[object, ...] | None) -> str:
    if values is None:
        return "anything"
    return " or ".join(_written(value) for value in values) or "empty"


def _parameter_row(parameter: Parameter) -> tuple[str, ...]:
    default = (
        parameter.unset or _written(parameter.default).strip('"') if not parameter.required else "required"
    )
    return f"`{parameter.name}`", default, parameter.kind.allowed, parameter.doc


def _error_row(tensors: Mapping[str, Any], parameters: Mapping[str, object]) -> tuple[str, str]:
    sent = {**tensors, **parameters}
    arrays = {
        name: None if value is None else np.array(value, object if name == "text_input" else None)
        for name, value in {"text_input": [[b"Hi"]], **tensors}.items()
    }
    try:
        parse_request(arrays, parameters, Settings(model="m"))
    except RequestError as error:
        shown = ", ".join(f"{name}: {_as_sent(value)}" for name, value in sent.items())
        return f"`{shown}`", str(error)
    raise AssertionError(sent)


def _as_sent(value: object) -> str:
    if value is None:
        return "not sent"
    return str(value) if isinstance(value, list) else json.dumps(value)


if __name__ == "__main__":
    print(reference(), end="")
