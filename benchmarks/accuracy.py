"""What number types and quantizations cost in accuracy: perplexity, and how many greedy tokens stay the same.

Everything runs through the engine as it serves, in this process. docs/accuracy.md says how the figures are defined.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from triton_inflight.threads import bound_spinning

bound_spinning()  # before torch is imported, as the server does

import typer  # noqa: E402
from accuracy_report import Comparison, accuracy_table  # noqa: E402
from accuracy_runs import Advance, Outcome, Task, prompts_of, run_engine, run_transformers, windows_of  # noqa: E402
from accuracy_variants import REFERENCE_DTYPE, Changes, completed, is_plain, name_of, variants_of  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.markup import escape  # noqa: E402

from triton_inflight import weights  # noqa: E402
from triton_inflight.bench import as_json, progress_bar, report_console  # noqa: E402
from triton_inflight.bench_machine import describe_machine, in_words  # noqa: E402
from triton_inflight.bench_options import JsonFile, ModelName  # noqa: E402
from triton_inflight.bench_served import copy_model  # noqa: E402
from triton_inflight.errors import InflightError  # noqa: E402
from triton_inflight.settings import Settings  # noqa: E402

_HERE = Path(__file__).parent
_REPOSITORY = _HERE.parent / "model_repository"
_TEXT = _HERE / "texts" / "persuasion.txt"

say = Console(stderr=True, highlight=False, soft_wrap=True).print


@dataclass(frozen=True)
class Run:
    """One model to load and measure: what it is called, what it changes of config.pbtxt, and what runs it."""

    name: str
    changes: Changes
    outcome: Callable[[Settings, Task, Advance], Outcome]

    @property
    def plain(self) -> bool:
        """Whether others of its dtype are compared with it."""
        return is_plain(self.changes) and self.outcome is run_engine


app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
def main(
    model_repository: Annotated[
        Path, typer.Option(help="The repository that has the model.", show_default="this project's")
    ] = _REPOSITORY,
    model: ModelName = "smollm2",
    set_parameters: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A value of a parameter of config.pbtxt to try; repeatable, also for one key: all combinations "
            "run. Default: dtype=float32 and dtype=bfloat16, without --set also with every quantization.",
        ),
    ] = None,
    text: Annotated[Path, typer.Option(help="The text, UTF-8.", show_default=_TEXT.name)] = _TEXT,
    window: Annotated[int, typer.Option(min=2, help="Tokens of each window of the text.")] = 1024,
    prompts: Annotated[
        int, typer.Option(min=1, help="Prompts to answer: up to a third chats, else pieces of the text.")
    ] = 48,
    output_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 64,
    transformers: Annotated[
        bool,
        typer.Option("--transformers/--no-transformers", help="Score with transformers' own model, too."),
    ] = True,
    seed: Annotated[int, typer.Option(help="Of where the pieces are cut.")] = 0,
    json_file: JsonFile = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few short windows and answers: does it run at all?")
    ] = False,
) -> None:
    """Measure what number types and quantizations change, each in an engine of its own, against float32.

    **Perplexity** is exp of the mean of -ln p(token | the tokens before it in its window), over a text that is cut
    into windows that do not overlap. "to float32" is by how much it is higher than in float32, give or take two
    standard errors of the windows' differences; "to dtype" is the same against the dtype alone. The row of
    transformers, stock and in float32, shows that the computation is right.

    **Same top token**: places of the text where the most likely token is that of float32.

    **Greedy**: answers, token by token beside those of float32. "until apart" counts the tokens before the first
    that differs, "at all" those that are equal at the same place (two texts that have come apart meet by chance
    only), "whole" the answers that are equal to their ends.

    Examples:

    `python benchmarks/accuracy.py --json accuracy.json`

    `python benchmarks/accuracy.py --set dtype=bfloat16 --set quantization=int8 --set quantization=int4`

    `python benchmarks/accuracy.py --model-repository models --model mine --text my.txt --no-transformers`
    """
    most_windows = None
    if quick:
        window, most_windows = min(window, 128), 3
        prompts, output_tokens = min(prompts, 6), min(output_tokens, 8)
    runs = [Run(name_of(changes), changes, run_engine) for changes in variants_of(set_parameters or [])]
    if transformers:
        runs.insert(1, Run(f"{REFERENCE_DTYPE}, transformers", {"dtype": REFERENCE_DTYPE}, run_transformers))
    console = report_console()
    machine = describe_machine()
    console.print(escape(in_words(machine)), soft_wrap=True)
    reference = _settings(model_repository, model, runs[0].changes)
    tokenizer = weights.describe(reference.model, trust_remote_code=reference.trust_remote_code).tokenizer
    windows = windows_of(text.read_text(encoding="utf-8"), tokenizer, window, most_windows)
    task = Task(windows, prompts_of(windows, tokenizer, prompts, seed), output_tokens)
    comparison = _compare(model_repository, model, runs, task)
    title = (
        f"{model}, {text.stem}: {len(windows)} windows of {window} tokens, "
        f"{len(task.prompts)} answers of up to {output_tokens} tokens"
    )
    console.print(accuracy_table(comparison.rows, title))
    if json_file is not None:
        report = {
            "machine": machine,
            "model": reference.model,
            "text": text.name,
            "window_tokens": window,
            "counted_tokens": sum(len(one) - 1 for one in windows),
            "prompts": task.prompts,
            "output_tokens": output_tokens,
            "seed": seed,
            "rows": comparison.rows,
            "left_out": comparison.left_out,
        }
        json_file.write_text(json.dumps(report, indent=1, default=as_json))


def _compare(repository: Path, model: str, runs: Sequence[Run], task: Task) -> Comparison:
    """Make all runs; the first one is the reference.

    Raises:
        InflightError: the reference fails. Others that do are named and left out.
    """
    comparison = Comparison()
    with progress_bar() as progress:
        for run in runs:
            bar = progress.add_task(run.name, total=task.tokens)
            started = time.perf_counter()
            try:
                settings = _settings(repository, model, run.changes)
                outcome = run.outcome(settings, task, partial(progress.advance, bar))
            except InflightError as error:
                if run is runs[0]:
                    raise
                comparison.left_out[run.name] = str(error)
                say(f"[yellow]left out[/]  {run.name}: {escape(str(error))}")
            else:
                seconds = time.perf_counter() - started
                comparison.add(run.name, run.changes["dtype"], outcome, seconds, run.plain)
            progress.update(bar, completed=task.tokens)  # answers may have ended early
            gc.collect()  # the engine refers to itself, and two of them may not fit into memory
    return comparison


def _settings(repository: Path, model: str, changes: Changes) -> Settings:
    """Those of a model in a repository, changed.

    Raises:
        InflightError: there is no such model, or a change is not allowed.
    """
    with tempfile.TemporaryDirectory(prefix="triton-inflight-accuracy-") as directory:
        return copy_model(repository, model, completed(changes), Path(directory))


if __name__ == "__main__":
    try:
        app()
    except InflightError as error:
        say(f"[red]error[/]  {escape(str(error))}")
        sys.exit(1)
