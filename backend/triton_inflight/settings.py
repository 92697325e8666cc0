"""config.pbtxt -> one typed, validated Settings. Errors name the key, the value, what is allowed, the remedy.

PARAMETERS is the one table of this backend's own parameters: parsing, `init`'s comments and the suggestions
for misspelt keys come from it. Triton's own part of the configuration is judged in triton_config.py.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from triton_inflight import parameter_kinds as kinds
from triton_inflight.errors import RequestError, SettingsError
from triton_inflight.fields import FIELDS, Field, did_you_mean, find_field
from triton_inflight.outputs import OUTPUTS
from triton_inflight.parameter_kinds import LARGEST, Kind
from triton_inflight.trace_file import SMALLEST_BOUND as TRACE_SMALLEST_BOUND
from triton_inflight.triton_config import (
    Config,
    Findings,
    Instances,
    Scheduler,
    check_triton_settings,
    idle_seconds_of,
    instances_of,
    ready_control_of,
    scheduler_of,
    slots_of,
)
from triton_inflight.values import read_value

Dtype = Literal["float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8", "int4"]
BatchSchedulerPolicy = Literal["max_utilization", "guaranteed_no_evict"]
UnknownParameters = Literal["error", "warn"]

# Most sequences in one forward pass where Triton has no batcher and nothing is stated.
_UNBATCHED_SEQUENCES = 32

# Parameters of Triton's own Python backend, which stand in the same place as ours.
_TRITONS_PARAMETERS = frozenset(
    {"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS", "TRITON_BATCH_STRATEGY_PATH"}
)


@dataclass(frozen=True)
class Settings:
    """Everything the backend reads from a model's config.pbtxt. Only ``model`` has no default.

    The fields up to ``outputs`` are Triton's own settings; the rest are described in PARAMETERS.
    ``device`` is a torch device; where ``instances`` spread over several GPUs, it names the first of them.
    ``max_candidate_sequences`` are Triton's slots, ``max_batch_size`` of them if 0.
    ``ready_control`` is the name of Triton's READY control tensor, if one is declared; ``max_sequence_idle`` the
    seconds that a sequence may wait.
    ``max_running_sequences`` of 0 becomes ``max_batch_size``, and 32 where that is 0, too. ``defaults`` are what
    parameters named ``default_NAME`` say, by the name of the field.

    Raises:
        SettingsError: values that cannot go together.
    """

    model: str
    model_name: str = "model"
    model_directory: Path | None = None
    scheduler: Scheduler = "iterative"
    max_batch_size: int = 32
    max_candidate_sequences: int = 0
    decoupled: bool = True
    device: str = "cpu"
    instances: Instances = field(default_factory=Instances)
    ready_control: str | None = None
    max_sequence_idle: float = 3600.0
    inputs: tuple[str, ...] = ("text_input",)
    outputs: tuple[str, ...] = tuple(output.name for output in OUTPUTS)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    dtype: Dtype = "bfloat16"
    quantization: Quantization = "none"
    max_tokens_in_paged_kv_cache: int | None = None
    kv_cache_bytes: int | None = None
    tokens_per_block: int = 32
    max_num_tokens: int = 512
    max_step_stretch: int = 3
    max_seq_len: int | None = None
    trust_remote_code: bool = False
    ignored_parameters: tuple[str, ...] = ()
    unknown_parameters: UnknownParameters = "error"
    use_generation_config: bool = True
    default_max_tokens: int = 256
    stream_interval: int = 1
    max_time: float = 600.0
    cancellation_check_period_ms: int = 100
    batch_scheduler_policy: BatchSchedulerPolicy = "max_utilization"
    max_running_sequences: int = 0
    max_queue_size: int = 0
    enable_kv_cache_reuse: bool = True
    max_steps_per_execute: int = 32
    max_trip_ms: int = 40
    max_tokens_in_one_trip: int = 256
    log_plans: bool = False
    trace_directory: str | None = None
    trace_max_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        conflicts = _conflicts(self)
        if conflicts:
            raise SettingsError(_message(conflicts))
        if self.max_candidate_sequences == 0:
            object.__setattr__(self, "max_candidate_sequences", self.max_batch_size)
        if self.max_running_sequences == 0:
            object.__setattr__(self, "max_running_sequences", self.max_batch_size or _UNBATCHED_SEQUENCES)

    @classmethod
    def from_model_config(
        cls, config: Config, model_directory: Path | None = None
    ) -> tuple[Settings, list[str]]:
        """Read the configuration Triton passes to a model.

        Args:
            config: the ModelConfig as a dict, with inputs, outputs and transaction policy; see ``completed``.
            model_directory: folder that holds config.pbtxt.

        Returns:
            The settings, and warnings for the log.

        Raises:
            SettingsError: names everything that is wrong, one line each.
        """
        settings, findings = examine(config, model_directory)
        if settings is None:
            raise SettingsError(_message(findings.errors))
        return settings, findings.warnings


def examine(config: Config, model_directory: Path | None = None) -> tuple[Settings | None, Findings]:
    """As Settings.from_model_config, but hands back the errors one by one; with errors, settings are None."""
    findings = Findings()
    check_triton_settings(config, findings)
    values = _parse_parameters(config.get("parameters", {}), findings)
    values["defaults"] = _parse_defaults(config.get("parameters", {}), findings)
    if "model" not in values:
        return None, findings
    values |= {
        "model_name": config.get("name", ""),
        "model_directory": model_directory,
        "scheduler": scheduler_of(config),
        "max_batch_size": config.get("max_batch_size", 0),
        "max_candidate_sequences": slots_of(config),
        "decoupled": bool(config.get("model_transaction_policy", {}).get("decoupled")),
        "device": instances_of(config).device,
        "instances": instances_of(config),
        "ready_control": ready_control_of(config),
        "max_sequence_idle": idle_seconds_of(config),
        "inputs": tuple(tensor["name"] for tensor in config.get("input", ())),
        "outputs": tuple(tensor["name"] for tensor in config.get("output", ())),
    }
    draft = _Draft(values)
    findings.errors += _conflicts(draft)
    findings.warnings += _doubts(draft)
    return (None if findings.errors else Settings(**values)), findings


@dataclass(frozen=True)
class AutoCompletion:
    """What Triton should add to a configuration.

    Attributes:
        inputs, outputs: the absent ones as {name, data_type, dims}, for add_input() and add_output().
        decoupled: for set_model_transaction_policy(); what is stated stays as it is, to be judged later.
    """

    inputs: list[dict[str, Any]]
    outputs: list[dict[str, Any]]
    decoupled: bool


def auto_complete(config: Config) -> AutoCompletion:
    """What is absent in a configuration and follows from the backend alone."""
    declared = {tensor["name"] for key in ("input", "output") for tensor in config.get(key, ())}
    text_input = {"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]}
    outputs = [
        {"name": output.name, "data_type": output.data_type, "dims": list(output.dims)} for output in OUTPUTS
    ]
    return AutoCompletion(
        inputs=[] if "text_input" in declared else [text_input],
        outputs=[output for output in outputs if output["name"] not in declared],
        decoupled=config.get("model_transaction_policy", {}).get("decoupled", True),
    )


def completed(config: Config) -> dict[str, Any]:
    """A copy of the configuration as it is after Triton's auto-completion."""
    missing = auto_complete(config)
    return {
        **config,
        "input": [*config.get("input", ()), *missing.inputs],
        "output": [*config.get("output", ()), *missing.outputs],
        "model_transaction_policy": {"decoupled": missing.decoupled},
    }


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
    kind: Kind
    doc: str
    unset: str | None = None

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def default(self) -> Any:
        return _SETTINGS_FIELDS[self.name].default


_UNPREFIXED_DEFAULTS = ("exclude_input_in_output", "skip_special_tokens")
_SETTINGS_FIELDS = {field.name: field for field in dataclasses.fields(Settings)}

PARAMETERS: tuple[Parameter, ...] = (
    Parameter(
        "model",
        kinds.text(),
        "What to serve; relative paths start from this folder.",
    ),
    Parameter(
        "dtype",
        kinds.choice("float32", "bfloat16", "float16"),
        "Number type of the weights and the KV cache.",
    ),
    Parameter(
        "quantization",
        kinds.choice("none", "int8", "int4"),
        "Weights of linear layers in 8 or 4 bits, made at load, multiplied with inputs of 8 bits; on CPUs only.",
    ),
    Parameter(
        "max_tokens_in_paged_kv_cache",
        kinds.integer(1, LARGEST, 32768),
        "Tokens whose keys and values the store holds, all sequences together.",
        unset="what max_batch_size sequences may need, within half of the free memory",
    ),
    Parameter(
        "kv_cache_bytes",
        kinds.byte_size(),
        "Size of the store in bytes, instead of max_tokens_in_paged_kv_cache.",
        unset="as max_tokens_in_paged_kv_cache",
    ),
    Parameter(
        "tokens_per_block", kinds.number_choice(16, 32, 64, 128, 256), "Tokens in one block of the store."
    ),
    Parameter(
        "max_num_tokens",
        kinds.integer(1, LARGEST, 512),
        "Most tokens in one step; longer prompts are read in pieces between the tokens of others.",
    ),
    Parameter(
        "max_step_stretch",
        kinds.integer(0, 1000, 3),
        "About how many times as long a step may take for the prompts in it, while others generate; what their "
        "tokens cost is measured as they run. More: prompts are through sooner, streams stall for longer. 0: no bound.",
    ),
    Parameter(
        "max_seq_len",
        kinds.integer(2, LARGEST, 2048),
        "Most tokens of one sequence, prompt and output together.",
        unset="the model's context",
    ),
    Parameter("trust_remote_code", kinds.boolean(), "Run Python code that comes with the model."),
    Parameter(
        "ignored_parameters",
        kinds.patterns(),
        "Request parameters to ignore, beside Triton's own, such as forwarded headers.",
        unset="only Triton's own are ignored",
    ),
    Parameter(
        "unknown_parameters",
        kinds.choice("error", "warn"),
        "What becomes of request parameters that are not known: refuse the request, or ignore them with a warning "
        "in the log.",
    ),
    Parameter(
        "use_generation_config",
        kinds.boolean(),
        "Take defaults such as temperature and top_p from the model's generation config.",
    ),
    Parameter(
        "default_max_tokens",
        kinds.integer(1, LARGEST, 256),
        "Tokens to generate where a request does not say.",
    ),
    Parameter(
        "stream_interval",
        kinds.integer(1, 1024, 1),
        "Least tokens in one response of a stream, but for the first and the last.",
    ),
    Parameter("max_time", kinds.seconds(7 * 24 * 3600), "Seconds after which a sequence is ended."),
    Parameter(
        "cancellation_check_period_ms",
        kinds.integer(1, 10_000, 100),
        "Milliseconds between two looks for clients that have gone.",
    ),
    Parameter(
        "batch_scheduler_policy",
        kinds.choice("max_utilization", "guaranteed_no_evict"),
        "Admit while blocks last and recompute when they do not, or admit only what is sure to fit.",
    ),
    Parameter(
        "max_running_sequences",
        kinds.integer(1, 2**16, 32),
        "Most sequences in one forward pass; others wait.",
        unset=f"max_batch_size; without a batcher {_UNBATCHED_SEQUENCES}",
    ),
    Parameter(
        "max_queue_size",
        kinds.integer(0, 2**20, 64),
        "Sequences with a slot that may wait to run; more are refused as UNAVAILABLE.",
        unset="0, no limit but Triton's slots",
    ),
    Parameter("enable_kv_cache_reuse", kinds.boolean(), "Share the blocks of prompts that begin alike."),
    Parameter(
        "max_steps_per_execute",
        kinds.integer(1, 1024, 32),
        "Most steps in one trip through Triton. It ends earlier when a slot becomes free, while Triton holds a live "
        "sequence back for another trip, and after max_trip_ms while not all slots are taken. A sequence that is held "
        "back is stepped too, by at most so many tokens.",
    ),
    Parameter(
        "max_trip_ms",
        kinds.integer(0, 10_000, 40),
        "Milliseconds after which no further step begins in a trip that a new request could join.",
    ),
    Parameter(
        "max_tokens_in_one_trip",
        kinds.integer(1, LARGEST, 256),
        "Most tokens of a request that sets sequence_start and sequence_end together: it is answered within "
        "one trip.",
    ),
    Parameter(
        "log_plans",
        kinds.boolean(),
        "Log every step's plan: who runs how many tokens, who waits, who gave way.",
    ),
    Parameter(
        "trace_directory",
        kinds.folder(),
        "Write every step to a trace file in this folder, for Perfetto and for pictures.",
        unset="nothing is traced",
    ),
    Parameter(
        "trace_max_bytes",
        kinds.byte_size(TRACE_SMALLEST_BOUND, "64MiB"),
        "Bytes after which a trace file begins anew; the one before is kept.",
        unset="64MiB",
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
        elif name not in _TRITONS_PARAMETERS and defaulted_field(name) is None:
            known = [*table, *(f"default_{row.name}" for row in FIELDS if row.configurable)]
            findings.errors.append(
                f"parameters.{name}: is not known{did_you_mean(name, known)}; known: {', '.join(known)}. "
                f"Rename or delete it"
            )
    for parameter in PARAMETERS:
        if parameter.required and parameter.name not in stated:
            findings.errors.append(
                f"parameters.{parameter.name}: is missing; allowed: {parameter.kind.allowed}. "
                f"Add {parameter_text(parameter.name, parameter.kind.example)}"
            )
    return values


def defaulted_field(parameter: str) -> Field | None:
    """The field whose default a parameter of config.pbtxt sets, if it is one of those.

    ``default_NAME``, or one of the two names that TensorRT-LLM's configurations use without a prefix.
    """
    name = parameter if parameter in _UNPREFIXED_DEFAULTS else parameter.removeprefix("default_")
    row = find_field(name)
    if row is None or not row.configurable or (name == parameter and name not in _UNPREFIXED_DEFAULTS):
        return None
    return row


def _parse_defaults(stated: Mapping[str, Config], findings: Findings) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in stated:
        row = defaulted_field(name)
        if row is None:
            continue
        if row.name in values:
            findings.errors.append(
                f"parameters.{name}: is a second default of {row.name}. Delete one of them"
            )
            continue
        try:
            text = str(stated[name].get("string_value", ""))
            values[row.name] = read_value(row, f"parameters.{name}", text, list_as_text=True)
        except RequestError as error:
            findings.errors.append(f"{error}. Change or delete it")
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
            f"parameters.kv_cache_bytes: {size} beside max_tokens_in_paged_kv_cache: {tokens}; both size the "
            f"same store. Delete one of them"
        )
    if tokens is not None and tokens < settings.tokens_per_block:
        problems.append(
            f"parameters.max_tokens_in_paged_kv_cache: {tokens} is less than one block of tokens_per_block: "
            f"{settings.tokens_per_block}. Write {parameter_text('max_tokens_in_paged_kv_cache', '32768')}"
        )
    running, batch_size = settings.max_running_sequences, settings.max_batch_size
    if batch_size and running > batch_size:
        problems.append(
            f"parameters.max_running_sequences: {running} is more than max_batch_size: {batch_size}, which "
            f"is all that Triton hands over at a time. Raise max_batch_size, or delete max_running_sequences"
        )
    if settings.quantization != "none":
        problems += _conflicts_of_quantization(settings)
    at_once = running or batch_size
    if settings.max_num_tokens < at_once:
        source = "max_running_sequences" if running else "max_batch_size"
        enough = parameter_text("max_num_tokens", str(max(512, at_once)))
        problems.append(
            f"parameters.max_num_tokens: {settings.max_num_tokens} is less than {source}: {at_once}, and in "
            f"a step every sequence needs at least one token. Write {enough}"
        )
    return problems


def _conflicts_of_quantization(settings: Settings | _Draft) -> list[str]:
    problems = []
    if settings.device != "cpu":
        problems.append(
            f"parameters.quantization: {settings.quantization!r} beside instance_group.kind: "
            f"{settings.instances.kind}; quantised weights are multiplied by CPUs only. Write "
            f"instance_group [ {{ kind: KIND_CPU }} ], or {parameter_text('quantization', 'none')}"
        )
    if settings.dtype == "float16":
        problems.append(
            f"parameters.quantization: {settings.quantization!r} beside dtype: 'float16'; what is not quantised "
            f"must be in bfloat16 or float32. Write {parameter_text('dtype', 'bfloat16')}"
        )
    return problems


def _doubts(settings: _Draft) -> list[str]:
    """What works, but hardly as it was meant."""
    doubts = []
    tokens, longest = settings.max_tokens_in_paged_kv_cache, settings.max_seq_len
    if tokens is not None and longest is not None and longest > tokens:
        doubts.append(
            f"parameters.max_seq_len: {longest} is more than max_tokens_in_paged_kv_cache: {tokens}, so "
            f"no sequence can grow that long. Raise max_tokens_in_paged_kv_cache, or lower max_seq_len"
        )
    if settings.dtype == "float16" and settings.instances.kind == "KIND_CPU":
        doubts.append(
            f"parameters.dtype: 'float16' is slow on a CPU. Write {parameter_text('dtype', 'bfloat16')}"
        )
    if settings.instances.kind == "KIND_MODEL":
        doubts.append(
            "instance_group.kind: KIND_MODEL leaves the device to this backend, which takes the CPU. "
            "Write instance_group [ { kind: KIND_CPU } ], or KIND_GPU"
        )
    return doubts


def _message(errors: list[str]) -> str:
    """All errors of a model, one a line."""
    count = "1 problem" if len(errors) == 1 else f"{len(errors)} problems"
    lines = [f"  {number}. {error}" for number, error in enumerate(errors, start=1)]
    return "\n".join([f"{count} in config.pbtxt", *lines])
