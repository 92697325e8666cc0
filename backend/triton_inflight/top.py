"""`triton-inflight top`: what a server does right now, from its metrics, one row a model."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from triton_inflight.errors import InflightError
from triton_inflight.scrape import Samples, scrape

_BAR_WIDTH = 16


@dataclass(frozen=True)
class ModelRates:
    """What one model did between two looks at its metrics, and how it stands at the second.

    Attributes:
        active, waiting: live sequences now.
        tokens_in, tokens_out: tokens a second.
        step_sequences: mean number of sequences in a step; None without steps.
        blocks_used, blocks_total: of the KV-state store, now.
        ttft, itl: (median, 99th percentile) in seconds; None without any.
        preemptions, cancelled, failed: since the server started.
    """

    model: str
    active: int
    waiting: int
    tokens_in: float
    tokens_out: float
    step_sequences: float | None
    blocks_used: int
    blocks_total: int
    ttft: tuple[float, float] | None
    itl: tuple[float, float] | None
    preemptions: int
    cancelled: int
    failed: int


def quantile(histogram: dict[float, float], share: float) -> float:
    """A quantile of a histogram, by linear interpolation within its bucket, as Prometheus' histogram_quantile.

    Args:
        histogram: count by upper bound, not cumulative; not all 0. The last bound may be infinite.
        share: from 0 to 1.

    Returns:
        The value; of the last, infinite bucket its lower bound.
    """
    rank = share * sum(histogram.values())
    below, lower = 0.0, 0.0
    for bound, count in sorted(histogram.items()):
        if count and below + count >= rank:
            return lower if math.isinf(bound) else lower + (bound - lower) * (rank - below) / count
        below += count
        lower = bound
    return lower


def rates(before: Samples, now: Samples, seconds: float) -> list[ModelRates]:
    """What every model did between two pages of metrics that are so many seconds apart.

    Args:
        before: the earlier page; an empty one counts from the server's start.
    """
    return [
        _rates_of(model, before, now, seconds) for model in now.label_values("inflight_kv_blocks", "model")
    ]


def _rates_of(model: str, before: Samples, now: Samples, seconds: float) -> ModelRates:
    def rise(name: str) -> float:
        return now.value(name, model=model) - before.value(name, model=model)

    def spread(name: str) -> tuple[float, float] | None:
        earlier = before.histogram(name, model=model)
        counts = {
            bound: count - earlier.get(bound, 0) for bound, count in now.histogram(name, model=model).items()
        }
        return (quantile(counts, 0.5), quantile(counts, 0.99)) if sum(counts.values()) > 0 else None

    steps = rise("inflight_step_sequences_count")
    ended = "inflight_sequences_total"
    return ModelRates(
        model,
        active=int(now.value("inflight_sequences", model=model, state="active")),
        waiting=int(now.value("inflight_sequences", model=model, state="waiting")),
        tokens_in=rise("inflight_prompt_tokens_total") / seconds,
        tokens_out=rise("inflight_generated_tokens_total") / seconds,
        step_sequences=rise("inflight_step_sequences_sum") / steps if steps else None,
        blocks_used=int(now.value("inflight_kv_blocks", model=model, state="used")),
        blocks_total=int(now.value("inflight_kv_blocks", model=model, state="total")),
        ttft=spread("inflight_time_to_first_token_seconds"),
        itl=spread("inflight_inter_token_latency_seconds"),
        preemptions=int(now.value("inflight_preemptions_total", model=model)),
        cancelled=int(now.value(ended, model=model, outcome="cancelled")),
        failed=int(now.value(ended, model=model, outcome="failed")),
    )


def table(rows: Sequence[ModelRates]) -> Table:
    """The rows as a table for the terminal."""
    result = Table("model", box=None, header_style="bold", pad_edge=False)
    for heading in (
        "active", "waiting", "tok/s in", "tok/s out", "seqs/step", "blocks", "", "TTFT p50 / p99", "ITL p50 / p99",
        "preempted", "cancelled", "failed",
    ):  # fmt: skip
        result.add_column(heading, justify="right")
    for row in rows:
        result.add_row(
            row.model,
            str(row.active),
            str(row.waiting),
            f"{row.tokens_in:.0f}",
            f"{row.tokens_out:.0f}",
            "-" if row.step_sequences is None else f"{row.step_sequences:.1f}",
            f"{row.blocks_used}/{row.blocks_total}",
            ProgressBar(max(row.blocks_total, 1), row.blocks_used, width=_BAR_WIDTH),
            _milliseconds(row.ttft),
            _milliseconds(row.itl),
            str(row.preemptions),
            str(row.cancelled),
            str(row.failed),
        )
    return result


def _milliseconds(spread: tuple[float, float] | None) -> str:
    return "-" if spread is None else f"{spread[0] * 1000:.0f} / {spread[1] * 1000:.0f} ms"


def top(
    url: Annotated[
        str, typer.Option(help="The server's metrics endpoint.")
    ] = "http://127.0.0.1:8002/metrics",
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look for one interval, print that, and end.")] = False,
) -> None:
    """Watch a server at work, until Ctrl-C: sequences, tokens a second, how full the KV-state store is, latencies.

    Latencies are read from histograms, so they are as fine as the histograms' buckets.

    Examples:

    [cyan]triton-inflight top[/]

    [cyan]triton-inflight top --url http://gpu-box:8002/metrics --interval 5[/]

    [cyan]triton-inflight top --once[/]  prints one table, for scripts and logs
    """
    console = Console(highlight=False)
    if once and not console.is_terminal:
        console.width = 200  # a log has no edge to wrap at
    before, since = _look(url), time.monotonic()
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            now, at = _look(url), time.monotonic()
            rows = rates(before, now, at - since)
            live.update(
                table(rows) if rows else "no model of the backend 'inflight' is loaded there", refresh=True
            )
            if once:
                return
            before, since = now, at


def _look(url: str) -> Samples:
    try:
        return scrape(url)
    except (OSError, ValueError) as error:
        raise InflightError(
            f"no metrics at {url} ({error}); start a server with `triton-inflight serve`, or name the metrics "
            "endpoint of another one with --url"
        ) from error
