"""`init` writes a model's config.pbtxt, `check` reads those of a repository and says what would not work."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from google.protobuf import text_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from rich.console import Console
from rich.markup import escape
from tritonclient.grpc import model_config_pb2

from triton_inflight.config_text import BACKEND, config_text
from triton_inflight.errors import ModelError, SettingsError
from triton_inflight.settings import Settings, completed, examine

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass
class ModelReport:
    """What `check` found out about one folder of a repository.

    Attributes:
        name: of the folder, which is the model's.
        skipped: why the folder is none of our models; None where it is one.
        errors: what keeps the model from loading or from serving well; each names its remedy.
        warnings: what should be looked at.
        settings: as the backend would read them; None where they have errors.
    """

    name: str
    skipped: str | None = None
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    settings: Settings | None = None


# -- check --------------------------------------------------------------------------------------------------


def check_repository(repository: Path) -> list[ModelReport]:
    """Read every config.pbtxt of a model repository, without a server.

    Returns:
        One report for each folder, by name.

    Raises:
        SettingsError: the repository is no folder, or holds no folder.
    """
    if not repository.is_dir():
        raise SettingsError(f"{repository}: no such folder; give a model repository")
    if (repository / "config.pbtxt").is_file():
        raise SettingsError(f"{repository}: is a model, not a repository; give the folder it lies in")
    folders = sorted(path for path in repository.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not folders:
        raise SettingsError(f"{repository}: holds no models; `triton-inflight init` makes one")
    return [_check_model(folder) for folder in folders]


def read_config(path: Path) -> dict[str, Any]:
    """Parse a config.pbtxt into the dict that Triton passes to Python models.

    Raises:
        SettingsError: the text is no model configuration; the message gives line and column.
    """
    try:
        message = text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        line, column = error.GetLine(), error.GetColumn()
        reason = re.sub(r"^\d+:\d+ : ", "", str(error))
        raise SettingsError(f"config.pbtxt:{line}:{column}: {reason}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"config.pbtxt: cannot be read: {error}") from None
    return _as_dict(message)


def _check_model(folder: Path) -> ModelReport:
    path = folder / "config.pbtxt"
    if not path.is_file():
        return ModelReport(folder.name, skipped="no config.pbtxt")
    try:
        config = read_config(path)
    except SettingsError as error:
        return ModelReport(folder.name, errors=[str(error)])
    if config["backend"] != BACKEND:
        used = config["backend"] or config["platform"] or "none"
        return ModelReport(folder.name, skipped=f'backend "{used}" is not "{BACKEND}"')
    report = ModelReport(folder.name)
    report.errors += _folder_errors(folder, config)
    report.settings, findings = examine(completed({**config, "name": folder.name}), folder)
    report.errors += findings.errors
    report.warnings += findings.warnings
    if report.settings is not None:
        report.errors += _reference_errors(report.settings, folder)
    return report


def _folder_errors(folder: Path, config: Mapping[str, Any]) -> Iterator[str]:
    if config["name"] not in ("", folder.name):
        yield (
            f'name: "{config["name"]}" is not the name of its folder, "{folder.name}", and Triton will not '
            f"load it. Delete the line, or rename the folder"
        )
    if re.search(r"\s", str(folder)):
        yield (
            f'folder "{folder}": a space in its path crashes Triton\'s Python backend. Move it to a path '
            f"without spaces"
        )
    if not any(path.is_dir() and path.name.isdecimal() for path in folder.iterdir()):
        yield (
            f"folder {folder.name}: has no version folder, and Triton will not load it. mkdir {folder / '1'}"
        )
    if config.get("response_cache", {}).get("enable"):
        yield (
            "response_cache.enable: true does not go together with sequence_batching, and Triton will not "
            "load the model. Delete response_cache"
        )


def _reference_errors(settings: Settings, folder: Path) -> Iterator[str]:
    from triton_inflight import weights

    try:
        weights.look_inside(weights.resolve(settings.model, folder))
    except ModelError as error:
        yield f"parameters.model: {error}"


def _as_dict(message: Message) -> dict[str, Any]:
    """A message as Triton writes its JSON for Python models: every plain field, and messages where present.

    protobuf's own MessageToDict makes text of 64-bit integers; Triton makes numbers.
    """
    return {
        descriptor.name: _plain(descriptor, getattr(message, descriptor.name))
        for descriptor in message.DESCRIPTOR.fields
        if not descriptor.has_presence or message.HasField(descriptor.name)
    }


def _plain(descriptor: FieldDescriptor, value: Any) -> Any:
    if descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry:
        of_values = descriptor.message_type.fields_by_name["value"]
        return {key: _plain_value(of_values, value[key]) for key in value}
    if not descriptor.has_presence and not isinstance(value, (str, bytes, bool, int, float)):
        return [_plain_value(descriptor, element) for element in value]
    return _plain_value(descriptor, value)


def _plain_value(descriptor: FieldDescriptor, value: Any) -> Any:
    if descriptor.message_type is not None:
        return _as_dict(value)
    if descriptor.enum_type is not None:
        return descriptor.enum_type.values_by_number[value].name
    return value


# -- init ---------------------------------------------------------------------------------------------------


def init_model(
    repository: Path,
    name: str,
    model: str,
    dtype: str = "bfloat16",
    max_batch_size: int = 32,
    force: bool = False,
    compat: bool = False,
    scheduler: str = "iterative",
) -> Path:
    """Write NAME/config.pbtxt and NAME/1/ into a model repository, which is made if needed; see ``config_text``.

    Returns:
        The path of the config.pbtxt.

    Raises:
        SettingsError: the name or a value is not allowed, or the file is there and ``force`` is not set.
    """
    if not _MODEL_NAME.fullmatch(name):
        raise SettingsError(
            f"--name {json.dumps(name)} is not allowed: it becomes a folder and a part of URLs. "
            f"Allowed: letters, digits, dots, dashes and underscores"
        )
    path = repository / name / "config.pbtxt"
    if path.exists() and not force:
        raise SettingsError(f"{path} exists already. Take another --name, or overwrite it with --force")
    text = config_text(model, dtype, max_batch_size, compat, scheduler)
    config = _as_dict(text_format.Parse(text, model_config_pb2.ModelConfig()))
    Settings.from_model_config(completed(config))
    version = path.parent / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version / ".gitkeep").touch()
    path.write_text(text, encoding="utf-8")
    return path


def _reference_from_here(model: str, folder: Path) -> str:
    """A model reference for a config.pbtxt in ``folder``, where relative paths start from that folder: a path that only
    the current folder has is made absolute.
    """
    path = Path(model)
    return str(path.absolute()) if path.exists() and not (folder / path).exists() else model


# -- the commands -------------------------------------------------------------------------------------------


def init(
    repository: Annotated[Path, typer.Argument(help="Model repository; made if it does not exist.")],
    name: Annotated[str, typer.Option(help="Name of the model, and of its folder.")],
    model: Annotated[
        str,
        typer.Option(
            help="A Hugging Face folder, a .gguf file, a hub id ORG/NAME, or package:NAME/FILE.gguf. "
            "A relative path that exists here is written as an absolute one; others start from the model's folder."
        ),
    ],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    max_batch_size: Annotated[
        int, typer.Option(min=1, max=65536, help="Most sequences that generate at the same time.")
    ] = 32,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing config.pbtxt.")] = False,
    compat: Annotated[
        bool,
        typer.Option(
            "--compat",
            help="Declare the input tensors of clients written for Triton's vLLM and TensorRT-LLM backends.",
        ),
    ] = False,
    scheduler: Annotated[
        str,
        typer.Option(
            help="iterative: new sequences join those in flight, at every step. dynamic: batches run to their end. "
            "sequence: the client asks for every token. decoupled: no batcher of Triton's, and tensors as clients of "
            "its vLLM backend send them. config.pbtxt says when to use which."
        ),
    ] = "iterative",
) -> None:
    """Write a commented config.pbtxt that loads.

    Examples:

    triton-inflight init models --name qwen --model Qwen/Qwen2.5-0.5B-Instruct

    triton-inflight init models --name vllm_model --model Qwen/Qwen2.5-0.5B-Instruct --scheduler decoupled
    """
    console = Console(highlight=False)
    try:
        model = _reference_from_here(model, repository / name)
        path = init_model(repository, name, model, dtype, max_batch_size, force, compat, scheduler)
    except (SettingsError, OSError) as error:
        text = f"cannot write there: {error}" if isinstance(error, OSError) else str(error)
        console.print(f"[red]error[/]  {escape(text)}", soft_wrap=True)
        raise typer.Exit(1) from None
    console.print(f"[green]wrote[/]  {escape(str(path))}", soft_wrap=True)
    console.print(f"[dim]next[/]   triton-inflight check {escape(str(repository))}", soft_wrap=True)


def check(
    repository: Annotated[Path, typer.Argument(help="Model repository.")],
) -> None:
    """Read every config.pbtxt of a repository and say what would not work, without a server.

    Ends with 1 where a model has errors. Example: triton-inflight check model_repository
    """
    console = Console(highlight=False)
    try:
        reports = check_repository(repository)
    except SettingsError as error:
        console.print(f"[red]error[/]  {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from None
    for report in reports:
        _print_report(report, console)
    if any(report.errors for report in reports):
        raise typer.Exit(1)


def _print_report(report: ModelReport, console: Console) -> None:
    name = escape(report.name)
    if report.skipped is not None:
        console.print(f"[dim]skipped[/]  {name}: {escape(report.skipped)}", soft_wrap=True)
        return
    if report.errors:
        console.print(f"[red]error[/]    {name}: {len(report.errors)} to fix", soft_wrap=True)
    else:
        console.print(f"[green]ok[/]       {name}", soft_wrap=True)
    for number, error in enumerate(report.errors, start=1):
        console.print(f"  {number}. {escape(error)}", soft_wrap=True)
    for warning in report.warnings:
        console.print(f"  [yellow]warning[/]  {escape(warning)}", soft_wrap=True)
