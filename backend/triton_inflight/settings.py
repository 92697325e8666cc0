"""config.pbtxt -> one typed, validated Settings. Each error names the key, the value, what is allowed, the remedy.

PARAMETERS is the one table of this backend's own parameters: parsing, `init`'s comments and the suggestions for
misspelt keys come from it. Triton's own part of the configuration is judged in triton_config.py.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from triton_inflight.errors import SettingsError
from triton_inflight.protocol import OUTPUTS, did_you_mean
from triton_inflight.triton_config import (
    Config,
    Controls,
    Findings,
    Instances,
    Scheduler,
    check_triton_settings,
    controls_of,
    instances_of,
    scheduler_of,
)

Dtype = Literal["float32", "bfloat16", "float16"]
BatchSchedulerPolicy = Literal["max_utilization", "guaranteed_no_evict"]

_DEFAULT_POOL_TOKENS_PER_SEQUENCE = 1024

# Parameters of Triton's own Python backend, which stand in the same place as ours.
_TRITONS_PARAMETERS = frozenset(
    {"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS", "TRITON_BATCH_STRATEGY_PATH"}
)


@dataclass(frozen=True)
class Settings:
    """Everything the backend reads from a model's config.pbtxt. Only ``model`` has no default.

    The fields up to ``outputs`` are Triton's own settings; the rest are described in PARAMETERS.
    Exactly one of ``max_tokens_in_paged_kv_cache`` and ``kv_cache_bytes`` is set, and
    ``max_running_sequences`` is at least 1: what was left open is filled in when the object is made.

    Raises:
        SettingsError: values that cannot go together.
    """

    model: str
    model_name: str = "model"
    model_directory: Path | None = None
    scheduler: Scheduler = "iterative"
    max_batch_size: int = 32
    decoupled: bool = True
    instances: Instances = field(default_factory=Instances)
    controls: Controls = field(default_factory=Controls)
    inputs: tuple[str, ...] = ("text_input",)
    outputs: tuple[str, ...] = tuple(output.name for output in OUTPUTS)

    dtype: Dtype = "bfloat16"
    max_tokens_in_paged_kv_cache: int | None = None
    kv_cache_bytes: int | None = None
    tokens_per_block: int = 32
    max_num_tokens: int = 512
    max_seq_len: int | None = None
    trust_remote_code: bool = False
    ignored_parameters: tuple[str, ...] = ()
    default_max_tokens: int = 256
    max_time: float = 600.0
    cancellation_check_period_ms: int = 100
    batch_scheduler_policy: BatchSchedulerPolicy = "max_utilization"
    max_running_sequences: int = 0
    max_queue_size: int = 0
    enable_kv_cache_reuse: bool = True
    max_steps_per_execute: int = 1

    def __post_init__(self) -> None:
        conflicts = _conflicts(self)
        if conflicts:
            raise SettingsError(_message(self.model_name, conflicts))
        if self.max_running_sequences == 0:
            object.__setattr__(self, "max_running_sequences", self.max_batch_size)
        if self.max_tokens_in_paged_kv_cache is None and self.kv_cache_bytes is None:
            tokens = _DEFAULT_POOL_TOKENS_PER_SEQUENCE * self.max_batch_size
            object.__setattr__(self, "max_tokens_in_paged_kv_cache", tokens)

    @classmethod
    def from_model_config(
        cls, config: Config, model_directory: Path | None = None
    ) -> tuple[Settings, list[str]]:
        """Read the configuration Triton passes to a model.

        Args:
            config: the ModelConfig as a dict, inputs, outputs and transaction policy included; see ``completed``.
            model_directory: folder that holds config.pbtxt.

        Returns:
            The settings, and warnings for the log.

        Raises:
            SettingsError: names everything that is wrong, one line each.
        """
        settings, findings = examine(config, model_directory)
        if settings is None:
            raise SettingsError(_message(config.get("name", ""), findings.errors))
        return settings, findings.warnings


def examine(config: Config, model_directory: Path | None = None) -> tuple[Settings | None, Findings]:
    """As Settings.from_model_config, but hands back the errors one by one; settings are None where there are any."""
    findings = Findings()
    check_triton_settings(config, findings)
    values = _parse_parameters(config.get("parameters", {}), findings)
    if "model" not in values:
        return None, findings
    values |= {
        "model_name": config.get("name", ""),
        "model_directory": model_directory,
        "scheduler": scheduler_of(config),
        "max_batch_size": config.get("max_batch_size", 0),
        "instances": instances_of(config),
        "controls": controls_of(config),
        "inputs": tuple(tensor["name"] for tensor in config.get("input", ())),
        "outputs": tuple(tensor["name"] for tensor in config.get("output", ())),
    }
    draft = _Draft(values)
    findings.errors += _conflicts(draft)
    findings.warnings += _doubts(draft)
    return (None if findings.errors else Settings(**values)), findings


def auto_complete(config: Config) -> dict[str, Any]:
    """What Triton should add to a configuration, because it is absent there.

    Returns:
        ``input`` and ``output``: lists of {name, data_type, dims}, for add_input() and add_output();
        ``decoupled``: True where the transaction policy is absent, for set_model_transaction_policy(), else None.
    """
    inputs = {tensor["name"] for tensor in config.get("input", ())}
    outputs = {tensor["name"] for tensor in config.get("output", ())}
    text_input = {"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]}
    return {
        "input": [] if "text_input" in inputs else [text_input],
        "output": [
            {"name": output.name, "data_type": output.data_type, "dims": [1]}
            for output in OUTPUTS
            if output.name not in outputs
        ],
        "decoupled": None if "model_transaction_policy" in config else True,
    }


def completed(config: Config) -> dict[str, Any]:
    """A copy of the configuration as it is after Triton's auto-completion."""
    missing = auto_complete(config)
    copy = dict(config)
    copy["input"] = [*config.get("input", ()), *missing["input"]]
    copy["output"] = [*config.get("output", ()), *missing["output"]]
    if missing["decoupled"]:
        copy["model_transaction_policy"] = {"decoupled": True}
    return copy


@dataclass(frozen=True)
class ParameterKind:
    """How the text of a parameter is read.

    Attributes:
        allowed: what a value may be, for messages and comments.
        example: a value, for messages.
        parse: text -> value; raises ValueError.
    """

    allowed: str
    example: str
    parse: Callable[[str], Any]


def _integer(lowest: int, highest: int, example: int) -> ParameterKind:
    def parse(text: str) -> int:
        number = int(text) if re.fullmatch(r"[+-]?[0-9]{1,20}", text) else lowest - 1
        if not lowest <= number <= highest:
            raise ValueError(text)
        return number

    return ParameterKind(f"an integer from {lowest} to {highest}", str(example), parse)


def _choice(*options: str) -> ParameterKind:
    def parse(text: str) -> str:
        if text not in options:
            raise ValueError(text)
        return text

    return ParameterKind(", ".join(options[:-1]) + f" or {options[-1]}", options[0], parse)


def _number_choice(*options: int) -> ParameterKind:
    texts = _choice(*(str(option) for option in options))
    return dataclasses.replace(texts, parse=lambda text: int(texts.parse(text)))


def _boolean() -> ParameterKind:
    texts = _choice("true", "false")
    return dataclasses.replace(texts, parse=lambda text: texts.parse(text.lower()) == "true")


def _seconds(highest: int) -> ParameterKind:
    def parse(text: str) -> float:
        seconds = float(text)
        if not 0 < seconds <= highest:  # false for nan
            raise ValueError(text)
        return seconds

    return ParameterKind(f"a number of seconds above 0, up to {highest}", "600", parse)


_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def _byte_size() -> ParameterKind:
    def parse(text: str) -> int:
        match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,6})?) ?(|KiB|MiB|GiB|TiB)", text)
        if match is None or ("." in match[1] and not match[2]):
            raise ValueError(text)
        size = (
            int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]
        )
        if size < 1:
            raise ValueError(text)
        return size

    return ParameterKind("a number of bytes, or of KiB, MiB, GiB or TiB such as 512MiB", "2GiB", parse)


def _text() -> ParameterKind:
    def parse(text: str) -> str:
        if not text:
            raise ValueError(text)
        return text

    return ParameterKind(
        "a folder, a .gguf file, a Hugging Face hub id, or a file inside an installed package",
        "org/name",
        parse,
    )


def _patterns() -> ParameterKind:
    def parse(text: str) -> tuple[str, ...]:
        patterns = tuple(pattern.strip() for pattern in text.split(","))
        if not all(patterns):
            raise ValueError(text)
        return patterns

    return ParameterKind("patterns with * and ?, separated by commas", "x-*, traceparent", parse)


@dataclass(frozen=True)
class Parameter:
    """One of our parameters in config.pbtxt; an attribute of Settings has its name and holds its default.

    Attributes:
        name: key in config.pbtxt.
        kind: how its value is read, and what is allowed.
        doc: one line.
        unset: what an absent parameter means, where the default does not say it.
    """

    name: str
    kind: ParameterKind
    doc: str
    unset: str | None = None

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def default(self) -> Any:
        return _SETTINGS_FIELDS[self.name].default


_SETTINGS_FIELDS = {field.name: field for field in dataclasses.fields(Settings)}

PARAMETERS: tuple[Parameter, ...] = (
    Parameter(
        "model",
        _text(),
        "The model: a folder (relative to this one), a .gguf file, a hub id, or a file inside a Python package.",
    ),
    Parameter(
        "dtype", _choice("float32", "bfloat16", "float16"), "Number type of the weights and the KV cache."
    ),
    Parameter(
        "max_tokens_in_paged_kv_cache",
        _integer(1, 2**31 - 1, 32768),
        "Tokens whose keys and values the store holds, all sequences together.",
        unset=f"{_DEFAULT_POOL_TOKENS_PER_SEQUENCE} for each of max_batch_size sequences, or kv_cache_bytes",
    ),
    Parameter(
        "kv_cache_bytes",
        _byte_size(),
        "Size of the store in bytes, instead of max_tokens_in_paged_kv_cache.",
        unset="max_tokens_in_paged_kv_cache decides",
    ),
    Parameter("tokens_per_block", _number_choice(16, 32, 64, 128, 256), "Tokens in one block of the store."),
    Parameter(
        "max_num_tokens",
        _integer(1, 2**20, 512),
        "Most tokens in one step; longer prompts are read in pieces between the tokens of others.",
    ),
    Parameter(
        "max_seq_len",
        _integer(2, 2**31 - 1, 2048),
        "Most tokens of one sequence, prompt and output together.",
        unset="the model's context",
    ),
    Parameter("trust_remote_code", _boolean(), "Run Python code that comes with the model."),
    Parameter(
        "ignored_parameters",
        _patterns(),
        "Request parameters to ignore, beside Triton's own, such as forwarded headers.",
        unset="only Triton's own are ignored",
    ),
    Parameter(
        "default_max_tokens", _integer(1, 2**31 - 1, 256), "Tokens to generate where a request does not say."
    ),
    Parameter("max_time", _seconds(7 * 24 * 3600), "Seconds after which a sequence is ended."),
    Parameter(
        "cancellation_check_period_ms",
        _integer(1, 10_000, 100),
        "Milliseconds between two looks for clients that have gone.",
    ),
    Parameter(
        "batch_scheduler_policy",
        _choice("max_utilization", "guaranteed_no_evict"),
        "Admit while blocks last and recompute when they do not, or admit only what is sure to fit.",
    ),
    Parameter(
        "max_running_sequences",
        _integer(1, 2**16, 32),
        "Most sequences in one forward pass; others with a slot wait.",
        unset="max_batch_size",
    ),
    Parameter(
        "max_queue_size",
        _integer(0, 2**20, 64),
        "Sequences with a slot that may wait to run; more are refused as UNAVAILABLE.",
        unset="0, no limit but Triton's slots",
    ),
    Parameter("enable_kv_cache_reuse", _boolean(), "Share the blocks of prompts that begin alike."),
    Parameter(
        "max_steps_per_execute",
        _integer(1, 1024, 1),
        "Most steps in one trip through Triton, while no request waits for a slot.",
    ),
)


def parameter_text(name: str, value: str) -> str:
    """A parameter as it stands in config.pbtxt."""
    return f'parameters {{ key: "{name}" value {{ string_value: {json.dumps(value, ensure_ascii=False)} }} }}'


def _parse_parameters(stated: Mapping[str, Config], findings: Findings) -> dict[str, Any]:
    table = {parameter.name: parameter for parameter in PARAMETERS}
    values: dict[str, Any] = {}
    for name in stated:
        if name in table:
            _parse_parameter(table[name], str(stated[name].get("string_value", "")), values, findings)
        elif name not in _TRITONS_PARAMETERS:
            findings.errors.append(
                f"parameters.{name}: is not known{did_you_mean(name, table)}; known: {', '.join(table)}. "
                f"Rename or delete it"
            )
    for parameter in PARAMETERS:
        if parameter.required and parameter.name not in stated:
            findings.errors.append(
                f"parameters.{parameter.name}: is missing; allowed: {parameter.kind.allowed}. "
                f"Add {parameter_text(parameter.name, parameter.kind.example)}"
            )
    return values


def _parse_parameter(parameter: Parameter, text: str, values: dict[str, Any], findings: Findings) -> None:
    try:
        values[parameter.name] = parameter.kind.parse(text.strip())
    except ValueError:
        findings.errors.append(
            f"parameters.{parameter.name}: {text!r:.80} is not allowed; allowed: {parameter.kind.allowed}. "
            f"Write {parameter_text(parameter.name, parameter.kind.example)}"
        )


class _Draft:
    """Values on their way into Settings: attributes that are not stated read as the default."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        return self._values.get(name, _SETTINGS_FIELDS[name].default)


def _conflicts(settings: Settings | _Draft) -> list[str]:
    """What each value allows but the others do not."""
    problems = []
    tokens, size = settings.max_tokens_in_paged_kv_cache, settings.kv_cache_bytes
    if tokens is not None and size is not None:
        problems.append(
            f"parameters.kv_cache_bytes: {size} beside max_tokens_in_paged_kv_cache: {tokens}; both size the same "
            f"store. Delete one of them"
        )
    if tokens is not None and tokens < settings.tokens_per_block:
        problems.append(
            f"parameters.max_tokens_in_paged_kv_cache: {tokens} is less than one block of tokens_per_block: "
            f"{settings.tokens_per_block}. Raise it; {parameter_text('max_tokens_in_paged_kv_cache', '32768')}"
        )
    running, batch_size = settings.max_running_sequences, settings.max_batch_size
    if batch_size and running > batch_size:
        problems.append(
            f"parameters.max_running_sequences: {running} is more than max_batch_size: {batch_size}, the most that "
            f"Triton hands over at a time. Raise max_batch_size, or delete max_running_sequences"
        )
    at_once = running or batch_size
    if settings.max_num_tokens < at_once:
        source = "max_running_sequences" if running else "max_batch_size"
        problems.append(
            f"parameters.max_num_tokens: {settings.max_num_tokens} is less than {source}: {at_once}, and in a step "
            f"every sequence needs at least one token. Write {parameter_text('max_num_tokens', str(max(512, at_once)))}"
        )
    return problems


def _doubts(settings: _Draft) -> list[str]:
    """What works, but hardly as it was meant."""
    doubts = []
    tokens, longest = settings.max_tokens_in_paged_kv_cache, settings.max_seq_len
    if tokens is not None and longest is not None and longest > tokens:
        doubts.append(
            f"parameters.max_seq_len: {longest} is more than max_tokens_in_paged_kv_cache: {tokens}, so no sequence "
            f"can grow that long. Raise max_tokens_in_paged_kv_cache, or lower max_seq_len"
        )
    if settings.dtype == "float16" and settings.instances.kind == "KIND_CPU":
        doubts.append(
            f"parameters.dtype: 'float16' is slow on a CPU. Write {parameter_text('dtype', 'bfloat16')}, or float32"
        )
    return doubts


def _message(model_name: str, errors: list[str]) -> str:
    """All errors of a model, one a line."""
    count = "1 problem" if len(errors) == 1 else f"{len(errors)} problems"
    lines = [f"  {number}. {error}" for number, error in enumerate(errors, start=1)]
    return "\n".join([f"model {model_name!r}: {count} in config.pbtxt", *lines])
