"""Reads one value of a request as the kind of its field, from a tensor, from JSON or from a request parameter."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from triton_inflight.errors import RequestError
from triton_inflight.fields import TENSOR_TYPES, Field, Kind

_NUMPY_KINDS: dict[Kind, str] = {
    "string": "OSU",
    "strings": "OSU",
    "int": "iu",
    "ints": "iu",
    "float": "fiu",
    "bool": "b",
    "object": "OSU",
    "bias": "OSU",
    "messages": "OSU",
}
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_LARGEST_EXACT_FLOAT = 2**53  # integers beyond it share floats
_BLANKS = " \t\r\n"  # around a number or a boolean in text
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def read_tensor(field: Field, name: str, tensor: npt.NDArray[Any]) -> Any:
    """The value of an input tensor.

    Args:
        name: as the client wrote it.
        tensor: bytes in an object array for strings, any integer type, any float type, bool. One value, of shape
            (1,) or (1, 1); for a list any number N of them, of shape (N,) or (1, N).

    Raises:
        RequestError: type, shape or value is not allowed; the message names it.
    """
    if tensor.dtype.kind not in _NUMPY_KINDS[field.kind]:
        types = " or ".join(data_type.removeprefix("TYPE_") for data_type in TENSOR_TYPES[field.kind])
        raise RequestError(f"{name} came as a tensor of {tensor.dtype}; allowed: {types}, {field.allowed}")
    if tensor.ndim > 1 and tensor.shape[0] > 1:
        raise RequestError(
            f"{name} has a batch dimension of {tensor.shape[0]} (shape {list(tensor.shape)}); "
            f"allowed: 1, send one request for each prompt"
        )
    if field.is_list:
        return read_value(field, name, tensor.reshape(-1).tolist())
    if tensor.size != 1:
        raise RequestError(
            f"{name} holds {tensor.size} values (shape {list(tensor.shape)}); allowed: exactly 1"
        )
    return read_value(field, name, tensor.reshape(-1)[0])


def read_value(field: Field, name: str, value: object, *, list_as_text: bool = False) -> Any:
    """A value as the type of its field: lists become tuples, objects become dicts. Numbers, booleans, JSON
    objects and lists of numbers are also taken as text.

    Args:
        name: as the client wrote it.
        list_as_text: take a text that is a JSON list for the list, also where a single string is allowed; for
            places that cannot hold lists.

    Raises:
        RequestError: it is none, or out of range; the message names it.
    """
    if isinstance(value, bytes):
        value = _decoded(name, value)
    match field.kind:
        case "string":
            return _string(field, name, value)
        case "strings":
            return _strings(field, name, value, list_as_text)
        case "int" | "float":
            return _number(field, name, value)
        case "ints":
            items = _as_items(_json_or_text(name, value, "["))
            return tuple(_number(field, name, item) for item in _bounded(field, name, items))
        case "bool":
            parsed = _as_bool(value)
            if parsed is None:
                raise _not_allowed(field, name, value)
            return parsed
        case "object":
            return _object(field, name, value)
        case "bias":
            return _bias(field, name, value)
        case "messages":
            return _messages(field, name, value)


def number_in_text(text: str) -> float | None:
    """A decimal number in ASCII: Python itself would read digits of any script, and underscores between them."""
    text = text.strip(_BLANKS)
    return float(text) if _NUMBER.fullmatch(text) else None


def show(value: object) -> str:
    """A value for a message, cut short. repr() escapes what cannot be sent as UTF-8."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "backslashreplace")
    if isinstance(value, int) and value.bit_length() > 128:
        return "a number of more than 38 digits"  # Python refuses to print the largest ones
    return _SHORT.repr(value.item() if isinstance(value, np.generic) else value)


def _not_allowed(field: Field, name: str, value: object) -> RequestError:
    return RequestError(f"{name}: {show(value)} is not allowed; allowed: {field.allowed}")


def _number(field: Field, name: str, value: object) -> float:
    whole = field.kind in ("int", "ints")
    parsed = _as_int(value) if whole else _as_float(value)
    if parsed is None and isinstance(value, float) and value.is_integer():
        raise RequestError(
            f"{name}: {show(value)} came as a float, which may have rounded it; send so large a number as text; "
            f"allowed: {field.allowed}"
        )
    if parsed is None:
        raise _not_allowed(field, name, value)
    return _in_range(field, name, value, parsed)


def _in_range(field: Field, name: str, value: object, parsed: float) -> float:
    too_small = parsed <= field.minimum if field.above_minimum else parsed < field.minimum
    if too_small or parsed > field.maximum:
        raise RequestError(f"{name}: {show(value)} is out of range; allowed: {field.allowed}")
    return parsed


def _as_int(value: object) -> int | None:
    if isinstance(value, (bool, np.bool_)):
        return None
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, float):  # what Triton makes of integers in JSON that have no place in 64 bits
        return int(value) if value.is_integer() and abs(value) <= _LARGEST_EXACT_FLOAT else None
    if isinstance(value, str) and _INTEGER.fullmatch(value.strip(_BLANKS)):
        return int(value)
    return None


def _as_float(value: object) -> float | None:
    """A finite number; one that is too large for a float is none."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.number, str)):
        return None
    try:
        number = number_in_text(value) if isinstance(value, str) else float(value)
    except OverflowError:
        return None
    return number if number is not None and math.isfinite(number) else None


def _as_bool(value: object) -> bool | None:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, int) and value in (0, 1):
        return value == 1
    if isinstance(value, str):
        return _BOOLEANS.get(value.strip(_BLANKS).lower())
    return None


def _string(field: Field, name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _not_allowed(field, name, value)
    return _encodable(name, value)


def _strings(field: Field, name: str, value: object, list_as_text: bool) -> tuple[str, ...]:
    """Empty strings are left out: clients of TensorRT-LLM send "" for no stop words."""
    if list_as_text and isinstance(value, str) and value.lstrip().startswith("["):
        try:
            parsed = _parsed_json(name, value)
        except RequestError:
            parsed = None
        if isinstance(parsed, list) and all(isinstance(item, str) for item in parsed):
            value = parsed
    found = []
    for item in _bounded(field, name, _as_items(value)):
        text = _decoded(name, item) if isinstance(item, bytes) else item
        if not isinstance(text, str):
            raise _not_allowed(field, name, item)
        if len(text) > field.max_length:
            raise RequestError(f"{name}: a string of {len(text)} characters; allowed: {field.allowed}")
        if text:
            found.append(_encodable(name, text))
    return tuple(found)


def _as_items(value: object) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _bounded(field: Field, name: str, items: list[Any]) -> Iterable[Any]:
    if len(items) > field.max_items:
        raise RequestError(f"{name}: a list of {len(items)}; allowed: {field.allowed}")
    return items


def _object(field: Field, name: str, value: object) -> dict[str, Any]:
    parsed = _json_or_text(name, value, "")
    if not isinstance(parsed, dict):
        raise _not_allowed(field, name, value)
    return parsed


def _bias(field: Field, name: str, value: object) -> dict[int, float]:
    parsed = _json_or_text(name, value, "{")
    if not isinstance(parsed, dict):
        raise _not_allowed(field, name, value)
    if len(parsed) > field.max_items:
        raise RequestError(f"{name}: an object of {len(parsed)} entries; allowed: {field.allowed}")
    bias: dict[int, float] = {}
    for key, amount in parsed.items():
        token_id, number = _as_int(key), _as_float(amount)
        if token_id is None or not 0 <= token_id < 2**31 or number is None:
            raise RequestError(
                f"{name}: {show(key)}: {show(amount)} is not allowed; allowed: {field.allowed}"
            )
        bias[token_id] = _in_range(field, name, amount, number)
    return bias


def _messages(field: Field, name: str, value: object) -> tuple[dict[str, Any], ...]:
    messages = _json_or_text(name, value, "")
    if not isinstance(messages, (list, tuple)) or not messages:
        raise _not_allowed(field, name, value)
    _bounded(field, name, list(messages))
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(f"{name}: {show(message)} is no message; allowed: {field.allowed}")
        if message.get("content") is None and "tool_calls" not in message:
            raise RequestError(f"{name}: {show(message)} has no content; allowed: {field.allowed}")
    _encodable(name, _printed_json(name, messages))
    return tuple(messages)


def _json_or_text(name: str, value: object, start: str) -> Any:
    """The parsed JSON of a text that begins with ``start``; anything else as it is."""
    if isinstance(value, str) and value.lstrip().startswith(start):
        return _parsed_json(name, value)
    return value


def _parsed_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"{name} is not valid JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError):
        raise RequestError(
            f"{name} is not usable JSON: a number is too long, or it is nested too deep"
        ) from None


def _printed_json(name: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise RequestError(f"{name} cannot be written as JSON") from None


def _decoded(name: str, value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name} is not valid UTF-8: byte {value[error.start]:#04x} at offset {error.start}"
        ) from None


def _encodable(name: str, value: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} is not valid UTF-8: a lone surrogate at character {error.start}"
        ) from None
    return value


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
