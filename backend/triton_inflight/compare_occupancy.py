"""What a server did while a round ran, out of its trace: how full its steps, its slots and its store were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from triton_inflight.trace_reading import Trace


@dataclass(frozen=True)
class Occupancy:
    """How busy a server was between two moments.

    Attributes:
        steps: that ended in that time.
        step_sequences: sequences in a step, weighted with how long the step took.
        slots_busy: share of the slots' time in which a sequence ran; time between steps counts as idle.
        kv_used, kv_used_most: share of the store's blocks that was held, on average over time, and at most.
    """

    steps: int
    step_sequences: float
    slots_busy: float
    kv_used: float
    kv_used_most: float


def cut(traces: Sequence[Trace], begin: float, end: float) -> Trace | None:
    """The part of a server's traces between two moments of ``time.monotonic()``; None where no step ended then."""
    for trace in traces:
        steps = tuple(step for step in trace.steps if begin <= step.end_seconds <= end)
        if steps:
            holds = (hold for hold in trace.holds if hold.end_seconds is None or hold.end_seconds >= begin)
            return replace(
                trace,
                steps=steps,
                holds=tuple(hold for hold in holds if hold.start_seconds <= end),
                blocks_used=_levels(trace, begin, end),
            )
    return None


def occupancy(part: Trace, begin: float, end: float) -> Occupancy:
    """How busy the server was.

    Args:
        part: its trace, cut to this time.
    """
    stepping = sum(step.duration_seconds for step in part.steps)
    running = sum(step.duration_seconds * len(step.rows) for step in part.steps)
    levels = [*part.blocks_used, (end, 0)]
    held = sum((after[0] - before[0]) * before[1] for before, after in pairwise(levels))
    return Occupancy(
        steps=len(part.steps),
        step_sequences=running / stepping,
        slots_busy=running / (part.num_rows * (end - begin)),
        kv_used=held / ((end - begin) * part.blocks_total),
        kv_used_most=max(blocks for _, blocks in part.blocks_used) / part.blocks_total,
    )


def _levels(trace: Trace, begin: float, end: float) -> tuple[tuple[float, int], ...]:
    """Blocks held from ``begin`` on, whenever it changed."""
    before = [blocks for seconds, blocks in trace.blocks_used if seconds <= begin]
    within = [level for level in trace.blocks_used if begin < level[0] <= end]
    return ((begin, before[-1] if before else 0), *within)
