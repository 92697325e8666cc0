"""What clients send and get: input tensors and parameters -> GenerationRequest, result -> output tensors.

Every name a client can see stands in two tables here, FIELDS and OUTPUTS. Triton loads this file in a process
that only completes configurations, so it imports nothing heavier than numpy.
"""

from __future__ import annotations

import difflib
import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from triton_inflight.errors import RequestError

if TYPE_CHECKING:
    from triton_inflight.settings import Settings

Kind = Literal["string", "int", "float", "bool"]

# Triton's data types that can carry a field of each kind as a tensor; the first is the one we recommend.
TENSOR_TYPES: dict[Kind, tuple[str, ...]] = {
    "string": ("TYPE_STRING",),
    "int": ("TYPE_INT32", "TYPE_INT64", "TYPE_UINT32", "TYPE_UINT64"),
    "float": ("TYPE_FP32", "TYPE_FP64"),
    "bool": ("TYPE_BOOL",),
}
_NUMPY_KINDS: dict[Kind, str] = {"string": "OS", "int": "iu", "float": "f", "bool": "b"}
_LONGEST_TIME = 7 * 24 * 3600
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class Field:
    """One thing a client may say about its request, as an input tensor or as a request parameter.

    Attributes:
        name: as the client writes it, and the attribute of GenerationRequest.
        kind: type of the value.
        doc: one line for the reference page.
        default: value where the client says nothing; None: see ``default_setting``.
        default_setting: attribute of Settings that holds the default; None too: the field is required.
        minimum, maximum: range of an ``int``, both ends included; of a ``float``, without the minimum itself.
        aliases: other names for the same field.
    """

    name: str
    kind: Kind
    doc: str
    default: bool | int | None = None
    default_setting: str | None = None
    minimum: int = 0
    maximum: int = 2**31 - 1
    aliases: tuple[str, ...] = ()

    @property
    def required(self) -> bool:
        return self.default is None and self.default_setting is None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def allowed(self) -> str:
        """What a value may be, for messages and the reference page."""
        if self.kind == "int":
            return f"an integer from {self.minimum} to {self.maximum}"
        if self.kind == "float":
            return f"a number above {self.minimum}, up to {self.maximum}"
        return "true or false" if self.kind == "bool" else "a string, not empty"


FIELDS: tuple[Field, ...] = (
    Field("text_input", "string", "The prompt, used as it is: the server applies no chat template."),
    Field(
        "max_tokens",
        "int",
        "Most tokens to generate; the context may end the text earlier.",
        default_setting="default_max_tokens",
        minimum=1,
        aliases=("max_new_tokens",),
    ),
    Field(
        "stream", "bool", "Send each piece of text as it appears, rather than one response.", default=False
    ),
    Field("return_finish_reason", "bool", "Send finish_reason with the last response.", default=False),
    Field("return_num_input_tokens", "bool", "Send num_input_tokens with every response.", default=False),
    Field("return_num_output_tokens", "bool", "Send num_output_tokens with every response.", default=False),
    Field(
        "max_time",
        "float",
        "Seconds after which the generation is ended.",
        default_setting="max_time",
        maximum=_LONGEST_TIME,
    ),
    Field(
        "request_priority",
        "int",
        "Of the sequences that wait to run, those with the largest go first.",
        default=0,
        minimum=-1000,
        maximum=1000,
    ),
)

# Parameters that Triton or its clients put beside ours, as fnmatch patterns; `ignored_parameters` adds more.
IGNORED_PARAMETERS: tuple[str, ...] = (
    "id",
    "sequence_*",
    "priority",
    "timeout",
    "binary_data",
    "binary_data_output",
    "binary_data_size",
    "triton_*",
)


@dataclass(frozen=True)
class Output:
    """One output tensor: its name, Triton's data type, one line for the reference page. All have dims [1]."""

    name: str
    data_type: str
    doc: str


OUTPUTS: tuple[Output, ...] = (
    Output("text_output", "TYPE_STRING", "New text of this response; the whole text where stream is false."),
    Output(
        "finish_reason",
        "TYPE_STRING",
        "Why the text ended: stop, length, cancelled or timeout. In the last response.",
    ),
    Output("num_input_tokens", "TYPE_UINT32", "Tokens of the prompt. In every response."),
    Output("num_output_tokens", "TYPE_UINT32", "Tokens this response adds. In every response."),
)


@dataclass(frozen=True)
class GenerationRequest:
    """A validated request. Its attributes are the names of FIELDS."""

    text_input: str
    max_tokens: int
    stream: bool = False
    return_finish_reason: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    max_time: float = 600.0
    request_priority: int = 0


@dataclass(frozen=True)
class Result:
    """What one response says.

    Attributes:
        text: new text.
        finish_reason: set in the last response only.
        num_input_tokens: tokens of the prompt.
        num_output_tokens: tokens generated since the previous response.
    """

    text: str
    finish_reason: str | None
    num_input_tokens: int
    num_output_tokens: int


def parse_request(
    tensors: Mapping[str, npt.NDArray[Any] | None], parameters: Mapping[str, object], settings: Settings
) -> GenerationRequest:
    """Turn what a client sent into a GenerationRequest. A tensor wins over a parameter, and both over
    the default.

    Args:
        tensors: input tensors by name. One value each, of shape (1,) or (1, 1): bytes in an object array for
            strings, any integer type, bool. None counts as not sent. Names outside of FIELDS are Triton's
            control tensors: Triton refuses inputs that config.pbtxt does not declare, and Settings refuses
            to declare unknown ones.
        parameters: the request's parameters: str, int, float or bool; numbers and booleans also as text.
        settings: the model's; gives defaults and ``ignored_parameters``.

    Raises:
        RequestError: a field is missing, unknown, or has a value it cannot have; the message names it.
    """
    sent = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    _refuse_unknown_parameters(parameters, settings.ignored_parameters)
    return GenerationRequest(**{field.name: _value(field, sent, parameters, settings) for field in FIELDS})


def output_tensors(result: Result, request: GenerationRequest) -> dict[str, npt.NDArray[Any]]:
    """The tensors of one response, each of shape (1, 1): text always, the others where the client asked.

    Strings are object arrays of UTF-8 bytes, counts are uint32.
    """
    tensors = {"text_output": _string_tensor(result.text)}
    if request.return_finish_reason and result.finish_reason is not None:
        tensors["finish_reason"] = _string_tensor(result.finish_reason)
    if request.return_num_input_tokens:
        tensors["num_input_tokens"] = np.array([[result.num_input_tokens]], dtype=np.uint32)
    if request.return_num_output_tokens:
        tensors["num_output_tokens"] = np.array([[result.num_output_tokens]], dtype=np.uint32)
    return tensors


def find_field(name: str) -> Field | None:
    """The field of that name or alias."""
    return next((field for field in FIELDS if name in field.names), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` (did you mean "x"?)`` with the nearest known name, or nothing."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f' (did you mean "{nearest[0]}"?)' if nearest else ""


def field_names() -> list[str]:
    """Every name of every field, aliases included."""
    return [name for field in FIELDS for name in field.names]


def _refuse_unknown_parameters(parameters: Mapping[str, object], ignored: tuple[str, ...]) -> None:
    for name in parameters:
        if find_field(name) is None and not _is_ignored(name, (*IGNORED_PARAMETERS, *ignored)):
            raise RequestError(
                f"{_show(name)} is no parameter of this backend{did_you_mean(name, field_names())}; "
                f"parameters: {', '.join(field_names())}. Names that are not for the model, such as those of "
                f"forwarded headers, can be listed in ignored_parameters in config.pbtxt"
            )


def _is_ignored(name: str, patterns: tuple[str, ...]) -> bool:
    """HTTP/2 lowers the case of header names and HTTP/1 does not, so case does not count."""
    return any(fnmatchcase(name.lower(), pattern.lower()) for pattern in patterns)


def _value(
    field: Field,
    tensors: Mapping[str, npt.NDArray[Any]],
    parameters: Mapping[str, object],
    settings: Settings,
) -> Any:
    name = _sent_name(field, tensors)
    if name is not None:
        return _checked(field, name, _element(field, name, tensors[name]))
    name = _sent_name(field, parameters)
    if name is not None:
        return _checked(field, name, parameters[name])
    if field.required:
        raise RequestError(f"{field.name} is missing: send it as an input tensor, {field.allowed}")
    return field.default if field.default_setting is None else getattr(settings, field.default_setting)


def _sent_name(field: Field, source: Mapping[str, object]) -> str | None:
    """Under which of its names the field was sent, if it was."""
    sent = [name for name in field.names if name in source]
    if len(sent) > 1:
        raise RequestError(f"{' and '.join(sent)} are two names of one field: send one of them")
    return sent[0] if sent else None


def _element(field: Field, name: str, tensor: npt.NDArray[Any]) -> object:
    """The one value of a tensor of shape (1,) or (1, 1)."""
    if tensor.dtype.kind not in _NUMPY_KINDS[field.kind]:
        types = " or ".join(data_type.removeprefix("TYPE_") for data_type in TENSOR_TYPES[field.kind])
        raise RequestError(f"{name} came as a tensor of {tensor.dtype}; allowed: {types}, {field.allowed}")
    if tensor.ndim > 1 and tensor.shape[0] > 1:
        raise RequestError(
            f"{name} has a batch dimension of {tensor.shape[0]} (shape {list(tensor.shape)}); "
            f"allowed: 1, send one request for each prompt"
        )
    if tensor.size != 1:
        raise RequestError(
            f"{name} holds {tensor.size} values (shape {list(tensor.shape)}); allowed: exactly 1"
        )
    return tensor.reshape(-1)[0]


def _checked(field: Field, name: str, value: object) -> str | int | float | bool:
    """The value as the type of its field. Raises RequestError where it is none, or out of range."""
    if field.kind == "string":
        return _text(field, name, value)
    parsed = {"int": _as_int, "float": _as_float, "bool": _as_bool}[field.kind](value)
    if parsed is None:
        raise RequestError(f"{name}: {_show(value)} is not allowed; allowed: {field.allowed}")
    too_small = parsed <= field.minimum if field.kind == "float" else parsed < field.minimum
    if field.kind != "bool" and (too_small or parsed > field.maximum):
        raise RequestError(f"{name}: {_show(value)} is out of range; allowed: {field.allowed}")
    return parsed


def _as_int(value: object) -> int | None:
    if isinstance(value, (bool, np.bool_)):
        return None
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        return int(value)
    return None


def _as_float(value: object) -> float | None:
    """A finite number; one that is too large for a float is none."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.number, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _as_bool(value: object) -> bool | None:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, int) and value in (0, 1):
        return value == 1
    if isinstance(value, str):
        return _BOOLEANS.get(value.strip().lower())
    return None


def _text(field: Field, name: str, value: object) -> str:
    if isinstance(value, bytes):
        text = _decoded(name, value)
    elif isinstance(value, str):
        text = _without_surrogates(name, value)
    else:
        raise RequestError(f"{name}: {_show(value)} is not allowed; allowed: {field.allowed}")
    if not text:
        raise RequestError(f"{name} is empty; allowed: {field.allowed}")
    return text


def _decoded(name: str, value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name} is not valid UTF-8: byte {value[error.start]:#04x} at offset {error.start}"
        ) from None


def _without_surrogates(name: str, value: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} is not valid UTF-8: a lone surrogate at character {error.start}"
        ) from None
    return value


def _string_tensor(text: str) -> npt.NDArray[Any]:
    return np.array([[text.encode("utf-8")]], dtype=np.object_)


def _show(value: object) -> str:
    """A value for a message, cut short. repr() escapes what cannot be sent as UTF-8."""
    if isinstance(value, int) and value.bit_length() > 128:
        return "a number of more than 38 digits"  # Python refuses to print the largest ones
    return _SHORT.repr(value.item() if isinstance(value, np.generic) else value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
