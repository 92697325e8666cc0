"""How many sequences share a step, over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from triton_inflight.pictures.panels import panels_of
from triton_inflight.pictures.style import INK, drawing, looks_of, note
from triton_inflight.trace_reading import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def sequences_per_step(
    traces: Trace | Sequence[Trace],
    *,
    origins: Sequence[float] | None = None,
    titles: Sequence[str] | None = None,
) -> Figure:
    """Draw how many sequences ran in each step, at the time it ran: one panel a trace, all on the same axes.

    Between steps nothing runs, and nothing is drawn. The dashed line is the mean over the time of all steps.

    Args:
        traces: one or several; each needs at least one step.
        origins: for each trace the seconds of its clock that count as 0; those of its first step where absent.
        titles: of the panels; the schedulers' names where absent.

    Raises:
        InflightError: matplotlib is not installed.
        ValueError: a trace has no steps.
    """
    traces, origins, titles = panels_of(traces, origins, titles)
    looks = looks_of(titles)
    length = max(trace.steps[-1].end_seconds - origin for trace, origin in zip(traces, origins, strict=True))
    with drawing(1.15 * len(traces) + 0.6) as figure:
        panels = figure.subplots(len(traces), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for trace, origin, title, panel in zip(traces, origins, titles, panels, strict=True):
            starts = np.array([step.start_seconds for step in trace.steps]) - origin
            durations = np.array([step.duration_seconds for step in trace.steps])
            counts = np.array([len(step.rows) for step in trace.steps])
            mean = float(counts @ durations / durations.sum())
            places, heights = _outline(starts, starts + durations, counts, 0.002 * length)
            panel.fill_between(places, heights, step="post", color=looks[title]["color"], linewidth=0)
            panel.axhline(mean, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
            panel.set_title(title)
            note(panel, f"mean {mean:.1f}")
            panel.grid(axis="y")
            panel.set_axisbelow(True)
        panels[0].set_ylim(0, max(max(trace.num_rows for trace in traces), 1) * 1.05)
        panels[0].set_xlim(0.0, length)
        panels[0].yaxis.get_major_locator().set_params(integer=True, nbins=5)
        panels[-1].set_xlabel("time (s)")
        figure.supylabel("sequences in the step", fontsize=10)
    return figure


def _outline(
    starts: NDArray[np.float64], ends: NDArray[np.float64], counts: NDArray[np.int64], touching: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Where the count changes and to what: to 0 after a step, unless the next one begins at once."""
    pauses = np.append(starts[1:] - ends[:-1] >= touching, True)
    places = np.concatenate([starts, ends[pauses]])
    heights = np.concatenate([counts, np.zeros(pauses.sum())])
    order = np.argsort(places, kind="stable")
    return places[order], heights[order]
