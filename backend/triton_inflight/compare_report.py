"""The tables of a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from triton_inflight.bench_rounds import Spread

if TYPE_CHECKING:
    from triton_inflight.compare_loads import FixedLoad
    from triton_inflight.compare_results import Results

Spreads = Mapping[str, Spread | None]

_RATIOS = {
    "output_tokens_per_second": "output tok/s",
    "ttft_p50": "TTFT p50",
    "ttft_p99": "TTFT p99",
    "itl_p50": "ITL p50",
    "itl_p99": "ITL p99",
    "e2e_p50": "end to end\np50",
    "e2e_p99": "end to end\np99",
    "server_cpu_ms_per_token": "server CPU\na token",
}


def report(results: Results) -> RenderableType:
    """What clients saw, what the servers did, the first scheduler over each other one, and the notes."""
    tables = [_clients(results), _servers(results)]
    if len(results.schedulers) > 1:
        tables.append(_ratios(results))
    return Group(*tables, *(f"[dim]{escape(note)}[/]" for note in results.notes))


def _clients(results: Results) -> Table:
    table = _table("What clients saw (medians of the rounds; low - high)")
    base = results.baseline
    with_goodput = any(results.figures(load, base)["goodput"] for load in results.loads)
    for heading in (
        "output tok/s",
        f"over {base}",
        "req/s",
        *(["goodput\nreq/s"] if with_goodput else []),
        "TTFT s\np50 / p90 / p99",
        f"TTFT p99\nover {base}",
        "ITL ms\np50 / p90 / p99",
        "end to end s\np50 / p90 / p99",
    ):
        table.add_column(heading, justify="right")
    for load, scheduler, figures in _rows(results):
        rate = results.ratio("output_tokens_per_second", scheduler, load=load)
        tail = results.ratio("ttft_p99", scheduler, load=load)
        table.add_row(
            load.name if scheduler == results.schedulers[0] else "",
            scheduler,
            _spread(figures["output_tokens_per_second"], ",.0f"),
            _spread(rate, ".2f"),
            _median(figures["requests_per_second"], ".2f"),
            *([_median(figures["goodput"], ".2f")] if with_goodput else []),
            _percentiles(figures, "ttft", 1, ".2f"),
            _spread(tail, ".2f"),
            _percentiles(figures, "itl", 1e3, ".0f"),
            _percentiles(figures, "e2e", 1, ".2f"),
        )
    return table


def _servers(results: Results) -> Table:
    table = _table("What the servers did (medians of the rounds)")
    for heading in (
        "steps",
        "sequences\nin a step",
        "slots\nbusy",
        "KV used\nmean / most",
        "server CPU s",
        "client CPU s",
        "server CPU\nms a token",
        f"tokens equal\nto {results.baseline}",
    ):
        table.add_column(heading, justify="right")
    for load, scheduler, figures in _rows(results):
        table.add_row(
            load.name if scheduler == results.schedulers[0] else "",
            scheduler,
            _median(figures.get("steps"), ",.0f"),
            _median(figures.get("step_sequences"), ".1f"),
            _median(figures.get("slots_busy"), ".0%"),
            f"{_median(figures.get('kv_used'), '.0%')} / {_median(figures.get('kv_used_most'), '.0%')}",
            _median(figures["server_cpu_seconds"], ".1f"),
            _median(figures["client_cpu_seconds"], ".2f"),
            _median(figures["server_cpu_ms_per_token"], ".2f"),
            _median(figures["equal_to_baseline"], ".0%"),
        )
    return table


def _ratios(results: Results) -> Table:
    first, *others = results.schedulers
    table = Table(
        "load", title=f"{first} over the others, round by round (medians; low - high)", title_justify="left"
    )
    table.add_column("over", no_wrap=True)
    for heading in _RATIOS.values():
        table.add_column(heading, justify="right")
    for load in results.loads:
        for other in others:
            spreads = [results.ratio(figure, first, other, load) for figure in _RATIOS]
            table.add_row(
                load.name if other == others[0] else "",
                other,
                *(_spread(spread, ".2f") for spread in spreads),
            )
    return table


def _table(title: str) -> Table:
    table = Table("load", title=title, title_justify="left")
    table.add_column("scheduler", no_wrap=True)
    return table


def _rows(results: Results) -> list[tuple[FixedLoad, str, Spreads]]:
    return [
        (load, scheduler, results.figures(load, scheduler))
        for load in results.loads
        for scheduler in results.schedulers
    ]


def _median(spread: Spread | None, form: str) -> str:
    return "-" if spread is None else f"{spread.median:{form}}"


def _spread(spread: Spread | None, form: str) -> str:
    return (
        "-"
        if spread is None
        else f"{spread.median:{form}}\n[dim]{spread.low:{form}} - {spread.high:{form}}[/]"
    )


def _percentiles(figures: Spreads, name: str, factor: float, form: str) -> str:
    spreads = [figures[f"{name}_p{percentile}"] for percentile in (50, 90, 99)]
    return " / ".join("-" if spread is None else f"{spread.median * factor:{form}}" for spread in spreads)
