"""What pictures of traces have in common: one panel a trace, each with its origin of time and its title."""

from __future__ import annotations

from collections.abc import Sequence

from triton_inflight.trace_reading import Trace


def panels_of(
    traces: Trace | Sequence[Trace], origins: Sequence[float] | None, titles: Sequence[str] | None
) -> tuple[list[Trace], list[float], list[str]]:
    """The traces of a picture, the seconds of each one's clock that count as 0, and the panels' titles.

    Where absent, the origins are those of the first steps, and the titles the schedulers' names.

    Raises:
        ValueError: a trace has no steps.
    """
    traces = [traces] if isinstance(traces, Trace) else list(traces)
    if not all(trace.steps for trace in traces):
        raise ValueError("a trace without steps has no timeline")
    return (
        traces,
        list(origins or [trace.steps[0].start_seconds for trace in traces]),
        list(titles or [trace.scheduler for trace in traces]),
    )
