"""What clients send and get: input tensors and parameters -> GenerationRequest, result -> output tensors.

Every name a client can see stands in two tables, FIELDS (fields.py) and OUTPUTS (outputs.py). Triton loads this
file in a process that only completes configurations, so it imports nothing heavier than numpy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from triton_inflight.errors import RequestError
from triton_inflight.fields import (
    FIELDS,
    FOREIGN,
    IGNORED_PARAMETERS,
    Field,
    Foreign,
    did_you_mean,
    field_names,
    find_field,
    find_foreign,
)
from triton_inflight.outputs import OUTPUTS, Result, output_tensors
from triton_inflight.sampling_params import GREEDY_BELOW, SamplingParams
from triton_inflight.values import number_in_text, read_tensor, read_value, show

if TYPE_CHECKING:
    from triton_inflight.settings import Settings

__all__ = [
    "FIELDS",
    "FOREIGN",
    "OUTPUTS",
    "GenerationRequest",
    "Result",
    "model_defaults",
    "output_tensors",
    "parse_request",
]

Warn = Callable[[str], None]

# SamplingParams holds bad words as token ids; a request holds them as text.
_SAMPLING = frozenset(field.name for field in dataclasses.fields(SamplingParams)) - {"bad_words"}
# A request that says one of these, with another value than these, wants to sample even if it says no temperature.
_ASKS_TO_SAMPLE_UNLESS: dict[str, tuple[float, ...]] = {
    "top_k": (0, -1),
    "top_p": (1,),
    "min_p": (0,),
    "typical_p": (1,),
    "n": (1,),
    "num_return_sequences": (1,),
    "best_of": (1,),
}
_TABLE_DEFAULTS = {field.name: field.default for field in FIELDS}
# transformers' name in a generation config -> our field.
_GENERATION_CONFIG = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repetition_penalty",
    "min_new_tokens": "min_tokens",
}


@dataclass(frozen=True)
class GenerationRequest:
    """A validated request. Its attributes, and those of ``sampling``, are explained in FIELDS.

    Token ids (of ``input_ids``, ``sampling.logit_bias`` and ``sampling.stop_token_ids``) are not checked against
    the vocabulary, and ``bad_words`` is text: both need the model's tokenizer, so the engine sees to them.

    Attributes:
        text_input: the prompt; empty where it comes as ``messages`` or ``input_ids``.
        sampling: how tokens are chosen; ``logprobs`` is set where any output needs log probabilities.
        n: choices to send.
        best_of: choices to generate, n or more.
        response_per_choice: each choice has responses of its own; else one response holds all of them.
    """

    text_input: str
    max_tokens: int
    stream: bool = False
    return_finish_reason: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    max_time: float = 600.0
    request_priority: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    messages: tuple[Mapping[str, Any], ...] = ()
    input_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    exclude_input_in_output: bool = True
    n: int = 1
    best_of: int = 1
    response_per_choice: bool = False
    stream_interval: int = 1
    return_stop_reason: bool = False
    return_output_ids: bool = False
    return_sequence_length: bool = False
    return_cumulative_logprob: bool = False
    return_logprobs: bool = False
    return_log_probs: bool = False

    @property
    def sends_sequence_index(self) -> bool:
        """Whether responses have to say which choice they belong to."""
        return self.response_per_choice and self.n > 1


def parse_request(
    tensors: Mapping[str, npt.NDArray[Any] | None],
    parameters: Mapping[str, object],
    settings: Settings,
    defaults: Mapping[str, Any] | None = None,
    warn: Warn | None = None,
) -> GenerationRequest:
    """Turn what a client sent into a GenerationRequest. A tensor wins over the JSON of ``sampling_parameters``,
    that over a request parameter, and all of them over the default.

    Args:
        tensors: input tensors by name, as ``read_tensor`` takes them. None counts as not sent. Names outside of
            the tables are Triton's control tensors: Triton refuses inputs that config.pbtxt does not declare, and
            Settings refuses to declare unknown ones.
        parameters: the request's parameters: str, int, float or bool; everything also as text, lists and objects
            as JSON. None counts as not sent.
        settings: the model's.
        defaults: by name of the field, from ``model_defaults``; None: those of the settings alone.
        warn: takes what is not refused only because ``unknown_parameters`` is ``warn``.

    Raises:
        RequestError: something is missing, unknown, not served here, or has a value it cannot have, alone or
            beside another one; the message names it.
    """
    if defaults is None:
        defaults = model_defaults(settings)
    said = _what_is_said(tensors, parameters, settings, warn)
    values = {**_TABLE_DEFAULTS, **defaults, **said}
    _choose_prompt(values)
    _choose_temperature(values, said, defaults)
    _settle_choices(values, said)
    _settle_lengths(values, said)
    _settle_logprobs(values)
    _settle_ids(values, said, settings)
    request = _request(values)
    _check_outputs_are_declared(said, request, settings)
    return request


def model_defaults(
    settings: Settings, generation_config: Mapping[str, Any] | None = None, warn: Warn | None = None
) -> dict[str, Any]:
    """What a model's requests get where they say nothing: config.pbtxt before the generation config.

    Args:
        generation_config: what the model's generation config says by itself, in transformers' names. Used unless
            ``use_generation_config`` is false: temperature (with ``do_sample`` only, else the model is greedy),
            top_k, top_p, min_p, typical_p, repetition_penalty and min_new_tokens.
        warn: takes what is wrong with the generation config; such values are left out.

    Returns:
        Values by the name of the field; fields without any default are left out.
    """
    values: dict[str, Any] = {
        row.name: getattr(settings, row.default_setting) for row in FIELDS if row.default_setting is not None
    }
    if settings.use_generation_config:
        values |= _from_generation_config(generation_config or {}, warn)
    return {**values, **settings.defaults}


def _from_generation_config(config: Mapping[str, Any], warn: Warn | None) -> Iterator[tuple[str, Any]]:
    stated = {name: value for name, value in config.items() if value is not None}
    if not stated.get("do_sample"):
        stated.pop("temperature", None)
    elif "temperature" not in stated:
        stated["temperature"] = 1.0
    for name, field_name in _GENERATION_CONFIG.items():
        if name not in stated:
            continue
        try:
            yield field_name, read_value(_field(field_name), name, stated[name])
        except RequestError as error:
            if warn is not None:
                warn(f"the model's generation config is not followed in this: {error}")


# -- what the client said -----------------------------------------------------------------------------------


def _what_is_said(
    tensors: Mapping[str, npt.NDArray[Any] | None],
    parameters: Mapping[str, object],
    settings: Settings,
    warn: Warn | None,
) -> dict[str, Any]:
    """The values that the request says, by the name of their field, the first source that has one winning."""
    in_tensors = _fields_of({name: tensor for name, tensor in tensors.items() if tensor is not None})
    in_parameters = _fields_of(_known(parameters, settings, warn))
    for foreign, name, tensor in _foreign_of(tensors):
        _refuse_foreign(foreign, name, None if tensor is None else np.asarray(tensor).reshape(-1).tolist())
    for foreign, name, value in _foreign_of(parameters):
        _refuse_foreign(foreign, name, value)
    said = {row.name: read_value(row, name, value, list_as_text=True) for row, name, value in in_parameters}
    from_tensors = {row.name: read_tensor(row, name, tensor) for row, name, tensor in in_tensors}
    json_object = {**said, **from_tensors}.get("sampling_parameters", {})
    said |= _from_json(json_object, settings, warn)
    return {**said, **from_tensors}


def _from_json(values: Mapping[str, object], settings: Settings, warn: Warn | None) -> dict[str, Any]:
    for foreign, name, value in _foreign_of(values):
        _refuse_foreign(foreign, name, value)
    if "sampling_parameters" in values:
        raise RequestError("sampling_parameters holds sampling_parameters again; allowed: once")
    return {
        row.name: read_value(row, name, value)
        for row, name, value in _fields_of(_known(values, settings, warn))
    }


def _fields_of(source: Mapping[str, Any]) -> list[tuple[Field, str, Any]]:
    """(field, name as the client wrote it, value) of everything in a source that a field has the name of."""
    found: dict[str, tuple[Field, str, Any]] = {}
    for name, value in source.items():
        row = find_field(name)
        if row is None:
            continue
        if row.name in found:
            names = " and ".join(sorted((found[row.name][1], name), key=row.names.index))
            raise RequestError(f"{names} are two names of one field: send one of them")
        found[row.name] = (row, name, value)
    return list(found.values())


def _known(source: Mapping[str, object], settings: Settings, warn: Warn | None) -> dict[str, object]:
    """What is said of names that are known. Others are refused, or ignored with or without a warning."""
    known = {}
    for name, value in source.items():
        if find_field(name) is not None:
            if value is not None:
                known[name] = value
        elif find_foreign(name) is None and not _is_ignored(name, settings.ignored_parameters):
            message = _unknown(name)
            if settings.unknown_parameters == "error":
                raise RequestError(message)
            if warn is not None:
                warn(f"ignored: {message}")
    return known


def _unknown(name: str) -> str:
    return (
        f"{show(name)} is no parameter of this backend{did_you_mean(name, field_names())}; "
        f"parameters: {', '.join(row.name for row in FIELDS)}. Names that are not for the model, such as those of "
        f"forwarded headers, can be listed in ignored_parameters in config.pbtxt"
    )


def _is_ignored(name: str, patterns: Iterable[str]) -> bool:
    """HTTP/2 lowers the case of header names and HTTP/1 does not, so case does not count."""
    return any(fnmatchcase(name.lower(), pattern.lower()) for pattern in (*IGNORED_PARAMETERS, *patterns))


def _foreign_of(source: Mapping[str, Any]) -> Iterator[tuple[Foreign, str, Any]]:
    for name, value in source.items():
        foreign = find_foreign(name)
        if foreign is not None:
            yield foreign, name, value


def _refuse_foreign(foreign: Foreign, name: str, value: object) -> None:
    """Let through only what asks for nothing."""
    if foreign.neutral is None:
        return
    for item in value if isinstance(value, (list, tuple)) else [value]:
        if not _is_neutral(foreign.neutral, item):
            allowed = " or ".join(str(neutral).lower() for neutral in foreign.neutral) or "nothing"
            raise RequestError(f"{name}: {show(item)} is not allowed; allowed: {allowed}; {foreign.why}")


def _is_neutral(neutral: Iterable[object], value: object) -> bool:
    if value is None or value in ("", b""):
        return True
    return value in neutral or (isinstance(value, str) and _number(value) in neutral)


def _number(text: str) -> float | None:
    """Also of "true" and "false", which are 1 and 0."""
    return number_in_text({"true": "1", "false": "0"}.get(text.strip().lower(), text))


# -- what the values mean together --------------------------------------------------------------------------


def _choose_prompt(values: dict[str, Any]) -> None:
    """Exactly one of the three ways to send a prompt."""
    ways = ("text_input", "messages", "input_ids")
    sent = [name for name in ways if values[name]]
    if len(sent) > 1:
        raise RequestError(f"{' and '.join(sent)} are both sent; allowed: exactly one of {', '.join(ways)}")
    if not sent:
        problem = "is missing" if values["text_input"] is None else "is empty"
        raise RequestError(
            f"text_input {problem}: send it as an input tensor, {_field('text_input').allowed}; or send messages or "
            f"input_ids"
        )
    for name, nothing in (("text_input", ""), ("messages", ()), ("input_ids", ())):
        values[name] = values[name] or nothing


def _choose_temperature(values: dict[str, Any], said: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """0 where nobody says anything, 1 where the request only says that it wants to sample."""
    if said.get("do_sample") is False:
        values["temperature"] = 0.0
    elif "temperature" in said:
        return
    elif said.get("do_sample") and not values["temperature"]:
        values["temperature"] = 1.0
    elif "temperature" not in defaults:
        asks = any(
            name in said and said[name] not in _ASKS_TO_SAMPLE_UNLESS[name] for name in _ASKS_TO_SAMPLE_UNLESS
        )
        values["temperature"] = 1.0 if asks else 0.0


def _settle_choices(values: dict[str, Any], said: Mapping[str, Any]) -> None:
    if "n" in said and "num_return_sequences" in said:
        raise RequestError("n and num_return_sequences are both sent: send one of them")
    n = values["num_return_sequences"] or values["n"]
    best_of = values["best_of"] or n
    if best_of < n:
        raise RequestError(f"best_of: {best_of} is less than n: {n}; allowed: n or more")
    if best_of > n and values["stream"]:
        raise RequestError(
            f"best_of: {best_of} is more than n: {n}, so what is sent is not known before all of them end; allowed "
            f"with stream: best_of equal to n"
        )
    if best_of > 1 and values["temperature"] < GREEDY_BELOW:
        name = "n" if n > 1 else "best_of"
        raise RequestError(
            f"{name}: {best_of} answers with temperature: 0 would all be the same; send a temperature above 0, or "
            f"one answer"
        )
    values["n"], values["best_of"] = n, best_of
    values["response_per_choice"] = values["stream"] or values["num_return_sequences"] is not None


def _settle_lengths(values: dict[str, Any], said: Mapping[str, Any]) -> None:
    """The model's own min_tokens gives way to the request's max_tokens; the request's must fit."""
    most = values["max_tokens"]
    if "min_tokens" not in said:
        values["min_tokens"] = min(values["min_tokens"], most)
    elif values["min_tokens"] > most:
        source = "" if "max_tokens" in said else " (default_max_tokens in config.pbtxt)"
        raise RequestError(
            f"min_tokens: {values['min_tokens']} is more than max_tokens: {most}{source}; allowed: 0 to max_tokens"
        )


def _settle_logprobs(values: dict[str, Any]) -> None:
    """``return_logprobs`` follows from ``logprobs``, and ``logprobs`` from every output that needs them."""
    if values["logprobs"] is not None:
        values["return_logprobs"] = True
    needed = ("return_logprobs", "return_log_probs", "return_cumulative_logprob")
    if any(values[name] for name in needed) or values["best_of"] > values["n"]:
        values["logprobs"] = values["logprobs"] or 0


def _settle_ids(values: dict[str, Any], said: Mapping[str, Any], settings: Settings) -> None:
    """A client that sends token ids has a tokenizer of its own, and gets token ids."""
    if values["input_ids"]:
        for asked, output in (
            ("return_output_ids", "output_ids"),
            ("return_sequence_length", "sequence_length"),
        ):
            values[asked] = said.get(asked, output in settings.outputs)


def _request(values: dict[str, Any]) -> GenerationRequest:
    values["top_k"] = max(values["top_k"], 0)
    values["logit_bias"] = values["logit_bias"] or {}
    values["seed"] = _generator_seed(values["seed"])
    sampling = SamplingParams(**{name: values[name] for name in _SAMPLING})
    return GenerationRequest(sampling=sampling, **{name: values[name] for name in _REQUEST})


_REQUEST = [row.name for row in dataclasses.fields(GenerationRequest) if row.name != "sampling"]


def _generator_seed(seed: int | None) -> int | None:
    """64 bits: negative ones in two's complement, as a client's signed number; -1 is vLLM's word for none."""
    return None if seed is None or seed == -1 else seed % 2**64


def _check_outputs_are_declared(
    said: Mapping[str, Any], request: GenerationRequest, settings: Settings
) -> None:
    """What a request asks for must be able to be sent."""
    for output in OUTPUTS:
        if output.name in settings.outputs or not output.asked_by:
            continue
        asks = [name for name in output.asked_by if said.get(name, False) is not False]
        if output.name == "sequence_index" and not request.sends_sequence_index:
            asks = []
        if asks:
            raise RequestError(
                f"{asks[0]} asks for the output {output.name}, which this model does not have; declare it in "
                f'config.pbtxt: output {{ name: "{output.name}" data_type: {output.data_type} dims: '
                f"{list(output.dims)} }}"
            )


def _field(name: str) -> Field:
    row = find_field(name)
    assert row is not None, name
    return row
