"""What a benchmark shows in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from triton_inflight.bench_rounds import Spread

PATHS = {"in_process": "in process", "grpc": "gRPC", "http": "HTTP SSE"}
STEP_PARTS = ("plan", "batch", "forward", "sampling", "text", "rest")
TRIP_PARTS = ("engine", "adapter", "triton")


def figures_table(results: Sequence[Mapping[str, Any]], names: Mapping[str, str], title: str) -> Table:
    """Medians over the rounds, of each path at each number of sequences.

    Args:
        results: with ``sequences``, ``path`` and ``figures``, the spreads by name.
        names: what to call each path.
    """
    table = Table("seq.", title=title)
    table.add_column("path", no_wrap=True)
    for heading in (
        "output tok/s",
        "low - high",
        "prefill tok/s",
        "decode tok/s",
        "TTFT ms\np50 / p99",
        "ITL ms\np50 / p99",
        "CPU s\nclient / server",
    ):
        table.add_column(heading, justify="right")
    previous = None
    for result in results:
        figures = result["figures"]
        if previous not in (None, result["sequences"]):
            table.add_section()
        table.add_row(
            "" if result["sequences"] == previous else str(result["sequences"]),
            names.get(result["path"], result["path"]),
            _median(figures, "output_tokens_per_second"),
            _range(figures["output_tokens_per_second"], ".0f"),
            _median(figures, "prefill_tokens_per_second"),
            _median(figures, "decode_tokens_per_second"),
            _pair(figures, ("ttft_p50", "ttft_p99"), 1e3, ".0f"),
            _pair(figures, ("itl_p50", "itl_p99"), 1e3, ".1f"),
            _pair(figures, ("client_cpu_seconds", "server_cpu_seconds"), 1, ".2f"),
        )
        previous = result["sequences"]
    return table


def ratio_table(ratios: Sequence[Mapping[str, Any]], names: Mapping[str, str], title: str) -> Table:
    """Ratios of two paths: the median of the rounds' ratios, the lowest and the highest.

    Args:
        ratios: with ``sequences``, ``of``, ``to``, ``figure`` and ``ratio``, the spread.
        names: what to call each path.
    """
    table = Table("sequences", "what", "figure", title=title)
    table.add_column("ratio", justify="right")
    table.add_column("low - high", justify="right")
    for row in ratios:
        spread: Spread = row["ratio"]
        table.add_row(
            str(row["sequences"]),
            f"{names.get(row['of'], row['of'])} / {names.get(row['to'], row['to'])}",
            row["figure"].replace("_", " "),
            f"{spread.median:.2f}",
            _range(spread, ".2f"),
        )
    return table


def parts_table(results: Sequence[Mapping[str, Any]], count: str, parts: Sequence[str], title: str) -> Table:
    """Where the time of a step or a trip goes, in milliseconds.

    Args:
        count: ``steps`` or ``trips``; results without it are left out.
        parts: of STEP_PARTS or TRIP_PARTS.
    """
    table = Table("sequences", "path", title=title)
    for heading in (count, *parts):
        table.add_column(heading, justify="right")
    for result in results:
        figures = result["figures"]
        if count in figures:
            number = figures[count].median
            cells = [f"{figures[f'{part}_seconds'].median * 1e3 / number:.2f}" for part in parts]
            table.add_row(str(result["sequences"]), PATHS[result["path"]], f"{number:.0f}", *cells)
    return table


def _median(figures: Mapping[str, Spread | None], name: str) -> str:
    spread = figures[name]
    return "" if spread is None else f"{spread.median:,.0f}"


def _range(spread: Spread | None, form: str) -> str:
    return "" if spread is None else f"{spread.low:{form}} - {spread.high:{form}}"


def _pair(figures: Mapping[str, Spread | None], names: tuple[str, str], factor: float, form: str) -> str:
    values = [figures[name] for name in names]
    return " / ".join("-" if spread is None else f"{spread.median * factor:{form}}" for spread in values)
