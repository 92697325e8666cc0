"""The command ``bench``: how fast a model is in process and through a real server, and what the server costs."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from triton_inflight.bench_machine import describe_machine, in_words
from triton_inflight.bench_options import (
    InputTokens,
    JsonFile,
    ModelName,
    ModelRepository,
    PromptSeed,
    QuickRound,
    Rounds,
    SetParameters,
    key_and_value,
)
from triton_inflight.bench_report import (
    PATHS,
    STEP_PARTS,
    TRIP_PARTS,
    figures_table,
    parts_table,
    ratio_table,
)
from triton_inflight.bench_rounds import Figures, Round, ratio_rows, result_row
from triton_inflight.bench_work import Workload, ordinary_tokens
from triton_inflight.threads import bound_spinning

if TYPE_CHECKING:
    from triton_inflight.bench_served import ServedModel
    from triton_inflight.loader import Loaded
    from triton_inflight.settings import Settings

_RATIOS = ("output_tokens_per_second", "decode_tokens_per_second")
_WARM_UP = -1  # the number of the round that is not counted

Run = Callable[[Workload, list[list[int]]], Round]


@dataclass
class _Path:
    """One way to the engine, and what its rounds at the current number of sequences gave."""

    name: str
    run: Run
    rounds: list[Figures] = field(default_factory=list)


def bench(
    model_repository: ModelRepository = Path("model_repository"),
    model: ModelName = "smollm2",
    in_process: Annotated[
        bool, typer.Option("--in-process", help="The engine alone. Default: this and --served.")
    ] = False,
    served: Annotated[
        bool, typer.Option("--served", help="A real tritonserver, over gRPC and HTTP, on free ports.")
    ] = False,
    sequences: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Sequences sent at once; repeatable. Default: 1, 8, 16, 32."),
    ] = None,
    input_tokens: InputTokens = 64,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated for each.")] = 64,
    rounds: Rounds = 5,
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Responses as tokens come, or one a sequence.")
    ] = True,
    stream_interval: Annotated[int, typer.Option(min=1, help="Tokens in a response.")] = 1,
    dtype: Annotated[str | None, typer.Option(help="In place of the one in config.pbtxt.")] = None,
    set_parameters: SetParameters = None,
    seed: PromptSeed = 0,
    json_file: JsonFile = None,
    quick: QuickRound = False,
) -> None:
    """Measure a model: tokens per second, latencies, CPU time, and served against in process.

    Every round sends prompts of random tokens all at once and lets each generate to a fixed length. The paths take
    turns round by round, so that a busy moment of the machine does not favour one of them.

    Examples:

    [cyan]triton-inflight bench[/]  the smollm2 of ./model_repository, some minutes

    [cyan]triton-inflight bench --in-process --sequences 32 --dtype float32[/]

    [cyan]triton-inflight bench --sequences 32 --stream-interval 4 --set max_steps_per_execute=8 --json out.json[/]
    """
    changes = dict(map(key_and_value, set_parameters or []))
    if dtype is not None:
        changes["dtype"] = dtype
    if quick:
        sequences, rounds = sequences or [1, 4], 1
        input_tokens, output_tokens = min(input_tokens, 16), min(output_tokens, 8)
    workloads = [
        Workload(number, input_tokens, output_tokens, stream, stream_interval)
        for number in sequences or [1, 8, 16, 32]
    ]
    paths = {"in_process": in_process or not served, "served": served or not in_process}
    console = report_console()
    machine = describe_machine()
    console.print(escape(in_words(machine)), soft_wrap=True)
    with ExitStack() as stack:
        setup = _set_up(stack, model_repository, model, changes, paths)
        results, ratios = _measure(setup, workloads, rounds, seed)
    console.print(
        figures_table(
            results, PATHS, f"{model}, {setup.settings.dtype}, {input_tokens} tokens in, {output_tokens} out"
        )
    )
    if paths["in_process"]:
        console.print(parts_table(results, "steps", STEP_PARTS, "Milliseconds of a step, in process"))
    if paths["served"]:
        console.print(
            parts_table(results, "trips", TRIP_PARTS, "Milliseconds of a trip, by the server's metrics")
        )
    if ratios:
        console.print(ratio_table(ratios, PATHS, "Served over in process"))
    if json_file is not None:
        report = {
            "machine": machine,
            "model": model,
            "settings": dataclasses.asdict(setup.settings),
            "seed": seed,
            "workload": {**dataclasses.asdict(workloads[0]), "sequences": [w.sequences for w in workloads]},
            "results": results,
            "ratios": ratios,
        }
        json_file.write_text(json.dumps(report, indent=1, default=as_json))


def as_json(value: Any) -> Any:
    """What JSON has no form for: dataclasses as objects, and paths as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)


@dataclass
class _Setup:
    """What is measured."""

    settings: Settings
    token_ids: Sequence[int]
    loaded: Loaded | None
    served: ServedModel | None

    def paths(self) -> list[_Path]:
        """The ways that are measured, without any rounds yet."""
        paths = []
        if self.loaded is not None:
            from triton_inflight.bench_engine import run_in_process

            run = partial(run_in_process, self.loaded, self.settings)
            paths.append(_Path("in_process", run))
        if self.served is not None:
            paths += [_Path("grpc", self.served.run_grpc), _Path("http", self.served.run_http)]
        return paths


def _set_up(
    stack: ExitStack, repository: Path, model: str, changes: dict[str, str], paths: dict[str, bool]
) -> _Setup:
    bound_spinning()  # before torch comes in, as in the server
    from triton_inflight import weights
    from triton_inflight.bench_served import ServedModel, copy_model
    from triton_inflight.loader import load_engine
    from triton_inflight.memory import keep_out_of_collections

    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="triton-inflight-bench-")))
    settings = copy_model(repository, model, changes, directory)
    with Console(stderr=True).status("loading the model"):
        loaded = load_engine(settings) if paths["in_process"] else None
        keep_out_of_collections()
        tokenizer = loaded.engine.tokenizer if loaded else weights.describe(settings.model).tokenizer
    served = stack.enter_context(ServedModel(directory, model, progress=True)) if paths["served"] else None
    return _Setup(settings, ordinary_tokens(tokenizer), loaded, served)


def _measure(
    setup: _Setup, workloads: Sequence[Workload], rounds: int, seed: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Results of every path and workload, and the ratios of served to in process."""
    results, ratios = [], []
    with progress_bar() as progress:
        task = progress.add_task("", total=len(workloads) * (rounds + 1))
        for workload in workloads:
            paths = setup.paths()
            for number in range(_WARM_UP, rounds):
                for path in paths:
                    progress.update(task, description=f"{workload.sequences} sequences, {PATHS[path.name]}")
                    # Prompts of its own for every path: none may be in the prefix cache already.
                    prompts = workload.prompts(setup.token_ids, f"{seed} {workload} {number} {path.name}")
                    measured = path.run(workload, prompts)
                    if number != _WARM_UP:
                        path.rounds.append(measured.figures(workload))
                progress.advance(task)
            for path in paths:
                results.append(result_row(workload, path.name, path.rounds))
            ratios += _ratios(workload, paths)
    return results, ratios


def _ratios(workload: Workload, paths: Sequence[_Path]) -> list[dict[str, Any]]:
    """Rates of the served paths over those in process, where both were measured."""
    in_process = next((path for path in paths if path.name == "in_process"), None)
    if in_process is None:
        return []
    return [
        row
        for path in paths
        if path is not in_process
        for row in ratio_rows(
            workload, (path.name, path.rounds), (in_process.name, in_process.rounds), _RATIOS
        )
    ]


def report_console() -> Console:
    """Where the report goes; wide enough for its tables where that is no terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=132)


def progress_bar() -> Progress:
    """Rounds done, and how long the rest will take; on stderr."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
