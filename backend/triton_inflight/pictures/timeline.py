"""The slot timeline: which sequence holds which row of the batch when, and what it runs there."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from triton_inflight.pictures.panels import panels_of
from triton_inflight.pictures.style import BLUE, EMPTY, INK, ORANGE, drawing, legend_above, note
from triton_inflight.trace_reading import Kind, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Axis = Literal["seconds", "steps"]

_PREFILL, _DECODE, _HELD = ORANGE, BLUE, "#BFD9EA"
_NAMES = {_PREFILL: "prefill", _DECODE: "decode", _HELD: "held, not running", EMPTY: "idle"}
_BAR = 0.84  # of a row's height
_FEW_STEPS = 80  # up to so many, each is drawn with an edge of its own
_TOUCHING = 0.002  # of the whole width: stretches nearer to each other than that are one
_AXES_POINTS = 590.0  # width of a panel, in points of type
_SMALLEST_TYPE = 5.5  # what is smaller is not read
_DIGIT = 0.78  # width of a bold digit with some air, in its size


@dataclass(frozen=True)
class _Span:
    """A stretch of one kind that a sequence runs in its row, in units of the axis; ``tokens`` are those it ran."""

    begin: float
    end: float
    colour: str
    tokens: int


@dataclass(frozen=True)
class _Stay:
    """A sequence's stay in a row, in units of the axis."""

    row: int
    begin: float
    end: float
    label: str


@dataclass(frozen=True)
class _Timeline:
    """What a panel shows.

    Attributes:
        num_rows: rows that a batch may have.
        end: of the last step.
        cells: each step has an edge of its own.
        spans: what runs in each row, in order.
    """

    num_rows: int
    end: float
    cells: bool
    spans: list[list[_Span]]
    stays: list[_Stay]


def slot_timeline(
    traces: Trace | Sequence[Trace],
    *,
    axis: Axis = "seconds",
    origins: Sequence[float] | None = None,
    window: tuple[float, float] | None = None,
    titles: Sequence[str] | None = None,
    labels: Mapping[int, str] | None = None,
) -> Figure:
    """Draw which sequence holds which row: one panel a trace, all on the same axis.

    Each panel says which share of its rows' time something ran, up to its last step.

    Args:
        traces: one or several; each needs at least one step.
        axis: ``seconds``; or ``steps``, where every step is equally wide and time between them is left out.
        origins: for each trace the seconds of its clock that count as 0; those of its first step where absent.
        window: first and last second, or step, to show; everything where absent.
        titles: of the panels; the schedulers' names where absent.
        labels: what to write for a sequence ID; its number in order of appearance where absent.

    Raises:
        InflightError: matplotlib is not installed.
        ValueError: a trace has no steps.
    """
    traces, origins, titles = panels_of(traces, origins, titles)
    timelines = [
        _timeline(trace, axis, origin, labels, window) for trace, origin in zip(traces, origins, strict=True)
    ]
    begin, end = window or (0.0, max(timeline.end for timeline in timelines))
    tallest = 3.6 if len(traces) <= 2 else 2.4
    inches = [min(0.26, tallest / timeline.num_rows) for timeline in timelines]
    heights = [height * timeline.num_rows for height, timeline in zip(inches, timelines, strict=True)]
    with drawing(sum(heights) + 0.42 * len(traces) + 0.75) as figure:
        panels = figure.subplots(len(traces), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for trace, origin, timeline, height, title, panel in zip(
            traces, origins, timelines, inches, titles, panels, strict=True
        ):
            _draw(panel, timeline, begin, end)
            _write(panel, timeline, begin, end, height)
            panel.set_title(title)
            last = min(end, timeline.end)
            if axis == "seconds":
                share = trace.busy_share(origin + begin, origin + last)
            else:
                share = _share_of_cells(timeline, begin, last)
            note(panel, f"rows busy {share:.0%}")
        for panel in panels[:-1]:
            panel.tick_params(axis="x", length=0)
        panels[-1].set_xlabel("step" if axis == "steps" else "time (s)")
        legend_above(figure, _keys(timelines, end - begin))
    return figure


# -- from a trace to what is drawn ---------------------------------------------------------------------------


def _timeline(
    trace: Trace,
    axis: Axis,
    origin: float,
    labels: Mapping[int, str] | None,
    window: tuple[float, float] | None,
) -> _Timeline:
    if axis == "steps":
        places = [(float(index), index + 1.0) for index in range(len(trace.steps))]
    else:
        places = [(step.start_seconds - origin, step.end_seconds - origin) for step in trace.steps]
    end = places[-1][1]
    first, last = window or (places[0][0], end)
    cells = axis == "steps" and last - first <= _FEW_STEPS
    touching = 0.0 if cells else _TOUCHING * (last - first)
    num_rows = max(trace.num_rows, 1 + max(run.row for step in trace.steps for run in step.rows))
    return _Timeline(
        num_rows,
        end,
        cells,
        _spans(trace, places, touching, num_rows),
        _stays(trace, _placing(trace, axis, origin), end, labels or _numbers(trace)),
    )


def _placing(trace: Trace, axis: Axis, origin: float) -> Callable[[float], float]:
    """What turns a moment between steps into a place on the axis."""
    if axis == "seconds":
        return lambda seconds: seconds - origin
    ends = [step.end_seconds for step in trace.steps]
    return lambda seconds: float(bisect_right(ends, seconds + 1e-9))


def _spans(
    trace: Trace, places: Sequence[tuple[float, float]], touching: float, num_rows: int
) -> list[list[_Span]]:
    """What runs; stretches of one kind that a sequence runs one after the other are one where they touch."""
    spans: list[list[_Span]] = [[] for _ in range(num_rows)]
    last: dict[int, tuple[int, int, Kind]] = {}
    for step, (begin, end) in zip(trace.steps, places, strict=True):
        for run in step.rows:
            row, what = spans[run.row], (run.sequence_id, run.choice, run.kind)
            colour = _PREFILL if run.kind == "prefill" else _DECODE
            if last.get(run.row) == what and begin - row[-1].end < touching:
                row[-1] = _Span(row[-1].begin, end, colour, row[-1].tokens + run.tokens)
            else:
                row.append(_Span(begin, end, colour, run.tokens))
            last[run.row] = what
    return spans


def _stays(
    trace: Trace, place: Callable[[float], float], end: float, labels: Mapping[int, str]
) -> list[_Stay]:
    return [
        _Stay(
            hold.row,
            place(hold.start_seconds),
            end if hold.end_seconds is None else place(hold.end_seconds),
            labels.get(hold.sequence_id, "") + (f".{hold.choice}" if hold.choice else ""),
        )
        for hold in trace.holds
    ]


def _numbers(trace: Trace) -> dict[int, str]:
    """Sequences in order of appearance, from 1."""
    ids = dict.fromkeys(hold.sequence_id for hold in trace.holds)
    return {sequence_id: str(number) for number, sequence_id in enumerate(ids, start=1)}


def _share_of_cells(timeline: _Timeline, begin: float, end: float) -> float:
    """Share of the cells between two steps in which something runs."""
    ran = sum(max(0.0, min(s.end, end) - max(s.begin, begin)) for row in timeline.spans for s in row)
    return ran / ((end - begin) * timeline.num_rows)


# -- drawing -------------------------------------------------------------------------------------------------


def _draw(panel: Axes, timeline: _Timeline, begin: float, end: float) -> None:
    """Rows from top to bottom: idle, upon it what is held, upon it what runs."""
    most = timeline.num_rows
    for row in range(most):
        _bars(panel, row, [(begin, min(end, timeline.end))], EMPTY)
        _bars(panel, row, [(stay.begin, stay.end) for stay in timeline.stays if stay.row == row], _HELD)
        for colour in (_PREFILL, _DECODE):
            spans = [span for span in timeline.spans[row] if span.colour == colour]
            _bars(panel, row, [(span.begin, span.end) for span in spans], colour, timeline.cells)
    for stay in timeline.stays:
        ends = [stay.row - _BAR / 2, stay.row + _BAR / 2]
        panel.plot([stay.begin, stay.begin], ends, color="white", linewidth=1.2, solid_capstyle="butt")
    panel.set_xlim(begin, end)
    panel.set_ylim(most - 0.5, -0.5)
    every = 1 if most <= 8 else 4
    panel.set_yticks(range(0, most, every))
    panel.set_ylabel("row")
    panel.tick_params(axis="y", length=0)
    panel.spines[["left", "bottom"]].set_visible(False)


def _bars(
    panel: Axes, row: int, bars: Sequence[tuple[float, float]], colour: str, edges: bool = False
) -> None:
    panel.broken_barh(
        [(left, right - left) for left, right in bars],
        (row - _BAR / 2, _BAR),
        facecolors=colour,
        edgecolors="white" if edges else "none",
        linewidths=0.8 if edges else 0.0,
    )


def _write(panel: Axes, timeline: _Timeline, begin: float, end: float, row_inches: float) -> None:
    """Whose a stay is, and in cells how many tokens a prefill ran, where there is room to read it."""
    from matplotlib.patheffects import withStroke

    tallest = min(8.5, 0.6 * row_inches * 72)
    points = _AXES_POINTS / (end - begin)

    def put(text: str, left: float, right: float, row: int, **look: Any) -> None:
        left, right = max(left, begin), min(right, end)
        middle = (left + right) / 2
        if timeline.cells:
            middle = math.floor(middle) + 0.5
        size = min(tallest, (right - left) * points / (_DIGIT * max(1, len(text))))
        if size >= _SMALLEST_TYPE:
            panel.text(middle, row, text, ha="center", va="center_baseline", fontsize=size, **look)

    halo = [withStroke(linewidth=2.5, foreground=_DECODE)]
    for stay in timeline.stays:
        place = _place_of_label([span for span in _within(timeline, stay) if span.colour == _DECODE])
        if place is not None:
            put(stay.label, *place, stay.row, color="white", fontweight="bold", path_effects=halo)
    for row, spans in enumerate(timeline.spans if timeline.cells else ()):
        for span in spans:
            if span.colour == _PREFILL:
                put(str(span.tokens), span.begin, span.end, row, color=INK)


def _place_of_label(decoded: Sequence[_Span]) -> tuple[float, float] | None:
    """The longest stretch, unless the sequence runs in pieces: then all from the first to the last."""
    if not decoded:
        return None
    longest = max(decoded, key=lambda span: span.end - span.begin)
    begin, end = decoded[0].begin, decoded[-1].end
    return (longest.begin, longest.end) if longest.end - longest.begin > (end - begin) / 2 else (begin, end)


def _within(timeline: _Timeline, stay: _Stay) -> list[_Span]:
    """What a sequence runs during a stay."""
    row = timeline.spans[stay.row]
    begin, end = (bisect_left(row, place, key=lambda span: span.begin) for place in (stay.begin, stay.end))
    return row[begin:end]


def _keys(timelines: Sequence[_Timeline], width: float) -> list[Any]:
    """The legend's entries, without that of what nowhere shows."""
    from matplotlib.patches import Patch

    gaps = [
        stay.end - stay.begin - sum(span.end - span.begin for span in _within(timeline, stay))
        for timeline in timelines
        for stay in timeline.stays
    ]
    shown = [colour for colour in _NAMES if colour != _HELD or max(gaps) > _TOUCHING * width]
    return [Patch(facecolor=colour, label=_NAMES[colour]) for colour in shown]
