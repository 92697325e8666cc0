"""What config.pbtxt tells Triton itself: read it, and find what would lose, delay or hang requests.

Works on the dict that Triton passes to Python models: its ModelConfig as JSON, with config.pbtxt's names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from triton_inflight.fields import (
    TENSOR_TYPES,
    did_you_mean,
    field_names,
    find_field,
    find_foreign,
)
from triton_inflight.outputs import OUTPUTS

Config = Mapping[str, Any]
Scheduler = Literal["iterative", "sequence", "dynamic", "decoupled"]
InstanceKind = Literal["KIND_CPU", "KIND_GPU", "KIND_MODEL"]

_SECOND = 1_000_000  # microseconds
TRITONS_DEFAULT_IDLE = _SECOND
_SHORTEST_IDLE = 60 * _SECOND
_LONGEST_IDLE = 24 * 3600 * _SECOND
SUGGESTED_IDLE = 3600 * _SECOND

_CONTROLS = {
    "CONTROL_SEQUENCE_START": "START",
    "CONTROL_SEQUENCE_END": "END",
    "CONTROL_SEQUENCE_READY": "READY",
    "CONTROL_SEQUENCE_CORRID": "CORRID",
}
_FALSE_TRUE = ("bool_false_true", "int32_false_true", "fp32_false_true")


@dataclass
class Findings:
    """What is wrong with a configuration: errors refuse the model, warnings do not."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Instances:
    """``instance_group``: how many instances, and on which devices.

    Attributes:
        kind: KIND_MODEL leaves the device to this backend.
        gpus: device ids where the kind is KIND_GPU; Triton makes ``count`` instances on each.
        count: instances, each with its own KV-state store.
    """

    kind: InstanceKind = "KIND_CPU"
    gpus: tuple[int, ...] = ()
    count: int = 1

    @property
    def device(self) -> str:
        """The torch device of the first instance."""
        if self.kind != "KIND_GPU":
            return "cpu"
        return f"cuda:{self.gpus[0]}" if self.gpus else "cuda"


def scheduler_of(config: Config) -> Scheduler:
    """Which of Triton's schedulers the configuration asks for."""
    if "sequence_batching" in config:
        return "iterative" if config["sequence_batching"].get("iterative_sequence") else "sequence"
    return "dynamic" if "dynamic_batching" in config else "decoupled"


def ready_control_of(config: Config) -> str | None:
    """Name of the control tensor that is false in the requests with which `direct` fills idle slots."""
    name, _ = _declared_controls(config).get("CONTROL_SEQUENCE_READY", (None, {}))
    return name


def slots_of(config: Config) -> int:
    """Sequences that Triton lets in at a time, as far as the config says; 0 if it does not."""
    oldest: Config = config.get("sequence_batching", {}).get("oldest", {})
    return int(oldest.get("max_candidate_sequences", 0))


def idle_seconds_of(config: Config) -> float:
    """How long Triton lets a sequence wait."""
    batching = config.get("sequence_batching", {})
    return (batching.get("max_sequence_idle_microseconds", 0) or TRITONS_DEFAULT_IDLE) / _SECOND


def instances_of(config: Config) -> Instances:
    """The instances; KIND_AUTO, which Triton has resolved before it asks us, counts as the CPU."""
    groups = config.get("instance_group") or [{}]
    gpus = tuple(int(gpu) for group in groups for gpu in group.get("gpus", ()))
    kind = groups[0].get("kind", "KIND_AUTO")
    if kind == "KIND_AUTO":
        kind = "KIND_GPU" if gpus else "KIND_CPU"
    return Instances(kind, gpus, sum(int(group.get("count", 0)) or 1 for group in groups))


def optional_inputs(names: Iterable[str]) -> list[dict[str, Any]]:
    """Declarations of inputs that clients may send or not, by their names."""
    return [_optional_input(name) for name in names]


def _optional_input(name: str) -> dict[str, Any]:
    known, foreign = find_field(name), find_foreign(name)
    if known is not None:
        data_type, dims = known.data_type, [-1 if known.is_list else 1]
    else:
        assert foreign is not None, name
        data_type, dims = foreign.data_type, list(foreign.dims)
    ragged = {"allow_ragged_batch": True} if -1 in dims else {}
    return {"name": name, "data_type": data_type, "dims": dims, "optional": True, **ragged}


def check_triton_settings(config: Config, findings: Findings) -> None:
    """Add to ``findings`` what Triton's part of the configuration would break."""
    scheduler = scheduler_of(config)
    if scheduler == "decoupled":
        _check_decoupled(config, findings)
    else:
        _check_batch_size(config, findings)
    if scheduler in ("iterative", "sequence"):
        _check_sequence_batching(config, findings)
        _check_controls(config, findings)
    _check_transaction_policy(config, findings)
    _check_inputs(config, findings)
    _check_outputs(config, findings)
    _check_instances(config, findings)


def _check_decoupled(config: Config, findings: Findings) -> None:
    """Without a batcher of Triton's, the engine batches by itself, and Triton must not add a batch dimension."""
    size = config.get("max_batch_size", 0)
    if size:
        findings.errors.append(
            f"sequence_batching: is absent, and max_batch_size: {size}. Write sequence_batching "
            "{ iterative_sequence: true ... } (`triton-inflight init` writes a whole config.pbtxt), or "
            "max_batch_size: 0 for an engine in a thread of its own, without a batcher of Triton's"
        )
    if not config.get("model_transaction_policy", {}).get("decoupled", True):
        findings.errors.append(
            "model_transaction_policy.decoupled: false, but without a batcher requests are answered after they were "
            "handed over. Delete it"
        )


def _check_batch_size(config: Config, findings: Findings) -> None:
    size = config.get("max_batch_size", 0)
    if size < 1:
        findings.errors.append(
            f"max_batch_size: {size} gives every step a single sequence, so nothing is ever batched. "
            f"Write 1 or more, such as max_batch_size: 32"
        )


def _check_sequence_batching(config: Config, findings: Findings) -> None:
    batching = config["sequence_batching"]
    _check_idle(batching.get("max_sequence_idle_microseconds", 0) or TRITONS_DEFAULT_IDLE, findings)
    if batching.get("state"):
        findings.errors.append(
            "sequence_batching.state: this backend keeps the state of its sequences itself. Delete state"
        )
    if "oldest" in batching:
        _check_oldest(batching["oldest"], config.get("max_batch_size", 0), findings)
    if batching.get("iterative_sequence"):  # else the clients' requests come back one by one
        _check_queue_delay(batching, findings)


def _check_idle(idle: int, findings: Findings) -> None:
    given = f"sequence_batching.max_sequence_idle_microseconds: {idle} ({idle / _SECOND:.9g} s)"
    if idle == TRITONS_DEFAULT_IDLE:
        given += ", Triton's default,"
    remedy = f"Write max_sequence_idle_microseconds: {SUGGESTED_IDLE} (1 h)"
    if idle < _SHORTEST_IDLE:
        findings.errors.append(
            f"{given} is too short: Triton drops a sequence whose step or wait for a slot takes longer, and "
            f"its client hangs. Allowed: {_SHORTEST_IDLE} (60 s) or more. {remedy}"
        )
    elif idle > _LONGEST_IDLE:
        findings.warnings.append(
            f"{given} is more than 24 h: a slot lost to a client that vanished comes back only after that. "
            f"{remedy}"
        )


def _check_oldest(oldest: Config, max_batch_size: int, findings: Findings) -> None:
    candidates = int(oldest.get("max_candidate_sequences", 0))
    key = f"sequence_batching.oldest.max_candidate_sequences: {candidates}"
    remedy = f"Write oldest {{ max_candidate_sequences: {max_batch_size} }}"
    if candidates < 1:
        findings.errors.append(f"{key} leaves no slot for any sequence. {remedy}")
    elif candidates < max_batch_size:
        findings.warnings.append(
            f"{key} is less than max_batch_size: {max_batch_size}, so no step is ever full. {remedy}"
        )
    elif candidates > max_batch_size:
        findings.warnings.append(
            f"{key} is more than max_batch_size: {max_batch_size}, so sequences take turns while all of them "
            f"hold their KV cache. {remedy}, or raise max_batch_size"
        )


def _check_queue_delay(batching: Config, findings: Findings) -> None:
    strategy = "oldest" if "oldest" in batching else "direct"
    delay = int(batching.get(strategy, {}).get("max_queue_delay_microseconds", 0))
    if delay:
        findings.warnings.append(
            f"sequence_batching.{strategy}.max_queue_delay_microseconds: {delay} is waited for in every trip "
            f"that is not full, and delays every token by as much. Delete it: steps fill up without a delay"
        )


def _declared_controls(config: Config) -> dict[str, tuple[str, Config]]:
    """Kind of control -> (name of its tensor, its declaration)."""
    return {
        control["kind"]: (tensor["name"], control)
        for tensor in config.get("sequence_batching", {}).get("control_input", ())
        for control in tensor.get("control", ())
    }


def _check_controls(config: Config, findings: Findings) -> None:
    declared = _declared_controls(config)
    for kind, usual_name in _CONTROLS.items():
        if kind in declared:
            _check_control(kind, *declared[kind], findings)
        elif kind != "CONTROL_SEQUENCE_READY" or "oldest" not in config["sequence_batching"]:
            findings.errors.append(
                f"sequence_batching.control_input: {kind} is missing{_why_needed(kind)}. "
                f"Add {_control_text(usual_name, kind)}"
            )


def _why_needed(kind: str) -> str:
    if kind == "CONTROL_SEQUENCE_READY":
        return " (without `oldest`, Triton fills idle slots with requests that only READY tells apart)"
    return ""


def _check_control(kind: str, name: str, control: Config, findings: Findings) -> None:
    key = f"sequence_batching.control_input {name}"
    if kind == "CONTROL_SEQUENCE_CORRID":
        data_type = control.get("data_type", "TYPE_INVALID")
        if data_type != "TYPE_UINT64":
            why = ", in which ids collide and requests fail" if data_type == "TYPE_STRING" else ""
            findings.errors.append(
                f"{key}: data_type {data_type}{why}; allowed: TYPE_UINT64. Write {_control_text(name, kind)}"
            )
        return
    values = next((list(control[key]) for key in _FALSE_TRUE if control.get(key)), [])
    if values != [0, 1]:  # [False, True] and [0.0, 1.0] are equal to it
        findings.errors.append(
            f"{key}: false and true are {values}; allowed: false and true, or 0 and 1. "
            f"Write {_control_text(name, kind)}"
        )


def _control_text(name: str, kind: str) -> str:
    value = (
        "data_type: TYPE_UINT64" if kind == "CONTROL_SEQUENCE_CORRID" else "bool_false_true: [ false, true ]"
    )
    return f'control_input {{ name: "{name}" control {{ kind: {kind} {value} }} }}'


def _check_transaction_policy(config: Config, findings: Findings) -> None:
    policy = config.get("model_transaction_policy", {})
    if "decoupled" not in policy:
        findings.errors.append(
            "model_transaction_policy.decoupled: not stated and Triton's auto-completion is off. "
            "Write model_transaction_policy { decoupled: true }"
        )
    elif not policy["decoupled"]:
        findings.warnings.append(
            "model_transaction_policy.decoupled: false; this model gives one response and refuses stream. "
            "Unless plain infer calls are wanted, delete it"
        )


def _check_inputs(config: Config, findings: Findings) -> None:
    batched = scheduler_of(config) != "decoupled"
    inputs = config.get("input", ())
    names = [tensor["name"] for tensor in inputs]
    if "text_input" not in names:
        findings.errors.append(
            "input text_input: is missing. "
            'Add input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }'
        )
    for tensor in inputs:
        _check_input(tensor, findings)
        _check_raggedness(tensor, batched, findings)
    optional = [
        tensor["name"] for tensor in inputs if tensor.get("optional") and tensor["name"] != "text_input"
    ]
    if optional and batched:
        names = optional if len(optional) <= 4 else [*optional[:3], f"and {len(optional) - 3} more"]
        findings.warnings.append(
            f"input {', '.join(names)}: optional. Requests that send different sets of optional inputs "
            f"never share a trip, and more trips cost time. Delete them from config.pbtxt and let clients send "
            f"request parameters, unless you need clients that send tensors"
        )


def _check_input(tensor: Config, findings: Findings) -> None:
    name = tensor["name"]
    known, foreign = find_field(name), find_foreign(name)
    if known is not None:
        types = [known.data_type, *(t for t in TENSOR_TYPES[known.kind] if t != known.data_type)]
        shapes = [[-1], [1]] if known.is_list else [[1], [-1]]
        _check_tensor("input", tensor, types, shapes, findings)
    elif foreign is not None:
        _check_tensor("input", tensor, [foreign.data_type], [list(foreign.dims)], findings)
    else:
        names = field_names()
        findings.errors.append(
            f"input {name}: is not known{did_you_mean(name, names)}; known: {', '.join(names)}. Delete it"
        )


def _check_raggedness(tensor: Config, batched: bool, findings: Findings) -> None:
    if batched and -1 in _dims(tensor) and not tensor.get("allow_ragged_batch"):
        findings.errors.append(
            f"input {tensor['name']}: dims {_dims(tensor)} without allow_ragged_batch, so that requests of different "
            f"length never share a step. Add allow_ragged_batch: true to it"
        )


def _check_outputs(config: Config, findings: Findings) -> None:
    known = {output.name: output for output in OUTPUTS}
    declared = {tensor["name"]: tensor for tensor in config.get("output", ())}
    for name, tensor in declared.items():
        if name in known:
            dims = list(known[name].dims)
            _check_tensor("output", tensor, [known[name].data_type], [dims, [1] * len(dims)], findings)
        else:
            findings.errors.append(
                f"output {name}: is not known{did_you_mean(name, known)}; known: {', '.join(known)}. "
                f"Delete it"
            )
    if "text_output" not in declared:
        findings.errors.append(
            "output text_output: is missing and Triton's auto-completion is off. "
            'Add output { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] }'
        )


def _check_tensor(
    place: str,
    tensor: Config,
    data_types: list[str],
    shapes: list[list[int]],
    findings: Findings,
) -> None:
    """The first data type and the first shape are the ones to recommend."""
    key = f"{place} {tensor['name']}"
    if tensor.get("data_type") not in data_types:
        findings.errors.append(
            f"{key}: data_type {tensor.get('data_type')}; allowed: {', '.join(data_types)}. "
            f"Write data_type: {data_types[0]}"
        )
    if _dims(tensor) not in shapes:
        allowed = " or ".join(dict.fromkeys(str(shape) for shape in shapes))
        remedy = f"Write dims: [ {', '.join(map(str, shapes[0]))} ]"
        findings.errors.append(f"{key}: dims {_dims(tensor)}; allowed: {allowed}. {remedy}")


def _dims(tensor: Config) -> list[int]:
    return [int(size) for size in tensor.get("dims", ())]


def _check_instances(config: Config, findings: Findings) -> None:
    kinds = sorted({group.get("kind", "KIND_AUTO") for group in config.get("instance_group", ())})
    if len(kinds) > 1:
        findings.errors.append(
            f"instance_group: kinds {' and '.join(kinds)} in one model; allowed: one kind. "
            f"Make a model folder for each kind"
        )
