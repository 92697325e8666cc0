"""What was measured on clients: throughput and latency under load, and how latencies are distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from triton_inflight.pictures.style import drawing, legend_above, looks_of, note

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class LoadPoint:
    """What one scheduler reached under one load; each list has one number for every repeat.

    Attributes:
        scheduler: its name, as the picture shows it.
        load: sequences in flight, or requests per second.
        throughput: output tokens per second.
        ttft_p50, ttft_p99: time to first token, in seconds: the median and the 99th percentile of a repeat.
    """

    scheduler: str
    load: float
    throughput: Sequence[float]
    ttft_p50: Sequence[float]
    ttft_p99: Sequence[float]


@dataclass(frozen=True)
class Latencies:
    """What the requests of one scheduler waited, in seconds; arrays of one dimension, in any order.

    Attributes:
        scheduler: its name, as the picture shows it.
        ttft: time to first token, one a request.
        itl: inter-token latency, one for every token but a request's first.
        e2e: end to end, one a request.
    """

    scheduler: str
    ttft: NDArray[np.float64]
    itl: NDArray[np.float64]
    e2e: NDArray[np.float64]


def load_curves(points: Sequence[LoadPoint], *, load_label: str = "sequences in flight") -> Figure:
    """Draw throughput and time to first token against load: a line through the medians of the repeats for each
    scheduler, in a band from their least to their most.

    Args:
        points: in any order; each scheduler needs at least one.
        load_label: what the load is, with its unit: ``sequences in flight`` or ``offered load (requests/s)``.

    Raises:
        InflightError: matplotlib is not installed.
        ValueError: there are no points.
    """
    if not points:
        raise ValueError("without points there is nothing to draw")
    looks = looks_of([point.scheduler for point in points])
    with drawing(3.5) as figure:
        throughput, median, tail = figure.subplots(1, 3)
        _lines(throughput, points, lambda point: point.throughput, looks)
        _lines(median, points, lambda point: point.ttft_p50, looks)
        _lines(tail, points, lambda point: point.ttft_p99, looks)
        throughput.set_title("throughput (output tokens/s)")
        median.set_title(f"TTFT, median (s{_log_if_wide(median)})")
        tail.set_title(f"TTFT, p99 (s{_log_if_wide(tail)})")
        throughput.set_ylim(bottom=0.0)
        for panel in (throughput, median, tail):
            panel.grid(axis="y")
            panel.set_xlabel(load_label)
            _load_axis(panel, sorted({point.load for point in points}))
        legend_above(figure, throughput.get_lines())
    return figure


def latency_cdfs(latencies: Sequence[Latencies]) -> Figure:
    """Draw how the latencies of each scheduler are distributed: the share of requests (of tokens for the
    inter-token latency) that waited at most so long. A mark stands at each line's 99th percentile.

    Raises:
        InflightError: matplotlib is not installed.
        ValueError: there are no latencies.
    """
    if not latencies:
        raise ValueError("without latencies there is nothing to draw")
    looks = looks_of([each.scheduler for each in latencies])
    with drawing(3.5) as figure:
        first, between, whole = figure.subplots(1, 3, sharey=True)
        for each in latencies:
            _cdf(first, each.ttft, each.scheduler, looks)
            _cdf(between, each.itl * 1e3, each.scheduler, looks)
            _cdf(whole, each.e2e, each.scheduler, looks)
        first.set_title("time to first token")
        between.set_title("inter-token latency")
        whole.set_title("end to end")
        first.set_ylabel("cumulative share (%)")
        note(whole, "marks: p99")
        for panel, unit in ((first, "seconds"), (between, "milliseconds"), (whole, "seconds")):
            panel.set_xlabel(f"{unit} (log scale)")
            panel.set_xscale("log")
            panel.set_ylim(0, 101)
            panel.set_yticks([0, 25, 50, 75, 90, 99])
            panel.grid()
            _plain_log_ticks(panel.xaxis, *panel.get_xlim())
        legend_above(figure, first.get_lines())
    return figure


def _lines(
    panel: Axes,
    points: Sequence[LoadPoint],
    measure: Callable[[LoadPoint], Sequence[float]],
    looks: dict[str, dict[str, Any]],
) -> None:
    for scheduler, look in looks.items():
        own = sorted((p for p in points if p.scheduler == scheduler), key=lambda point: point.load)
        loads = [point.load for point in own]
        panel.plot(
            loads, [float(np.median(measure(p))) for p in own], label=scheduler, markersize=5.5, **look
        )
        lowest, highest = [min(measure(p)) for p in own], [max(measure(p)) for p in own]
        panel.fill_between(loads, lowest, highest, color=look["color"], alpha=0.2, linewidth=0)


def _cdf(panel: Axes, seconds: NDArray[np.float64], scheduler: str, looks: dict[str, dict[str, Any]]) -> None:
    if not len(seconds):
        return
    values = np.sort(seconds)
    shares = np.arange(1, len(values) + 1) / len(values) * 100
    colour, marker = looks[scheduler]["color"], looks[scheduler]["marker"]
    (line,) = panel.plot(
        np.concatenate([values[:1], values]),
        np.concatenate([[0.0], shares]),
        drawstyle="steps-post",
        color=colour,
        marker=marker,
        markersize=5.5,
        markevery=[1 + int(np.searchsorted(shares, 99.0))],
        label=scheduler,
    )
    line.set_solid_joinstyle("round")


def _log_if_wide(panel: Axes) -> str:
    """A logarithmic axis where the values of lines would not be told apart on another; what the title says of it."""
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in panel.get_lines()])
    if values.min() <= 0 or values.max() / values.min() < 12:
        panel.set_ylim(bottom=0.0)
        return ""
    panel.set_yscale("log")
    _plain_log_ticks(panel.yaxis, *panel.get_ylim())
    return ", log scale"


def _load_axis(panel: Axes, loads: Sequence[float]) -> None:
    """Equal steps for loads that double, with a tick at each; else a plain axis."""
    if loads[0] > 0 and loads[-1] / loads[0] >= 16:
        panel.set_xscale("log", base=2)
        panel.set_xticks(loads)
        panel.xaxis.set_major_formatter("{x:g}")
    else:
        panel.set_xlim(left=0.0)


def _plain_log_ticks(axis: Axis, low: float, high: float) -> None:
    """Ticks at 1, 2 and 5 of each decade, or 1 alone where there are many decades, in plain numbers."""
    from matplotlib.ticker import LogLocator, NullLocator

    few = np.log10(high / low) < 2.3
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())
