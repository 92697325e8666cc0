"""What tracing costs: microseconds of a step that waits, of the thread that writes, and bytes of a step.

python benchmarks/tracing.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from triton_inflight.kv_store import KVStore
from triton_inflight.planner import Planner
from triton_inflight.sequence import Sequence
from triton_inflight.trace import Tracer
from triton_inflight.trace_events import Head

STEPS = 400
NUM_BLOCKS = 4096


def measure(num_sequences: int, path: Path) -> tuple[float, float, float]:
    """Median seconds of noting a step and of writing it, and mean bytes of a step, of so many that decode."""
    store = KVStore(NUM_BLOCKS, 32, False)
    planner = Planner(store, max_num_tokens=512, max_running_sequences=num_sequences)
    sequences = [Sequence(i, list(range(4)), limit=1000, order=i) for i in range(num_sequences)]
    tracer = Tracer(path, Head("m", "iterative", num_sequences, NUM_BLOCKS, 0.0, 1), store, max_bytes=2**30)
    noting, writing = [], []
    for _ in range(STEPS):
        started = time.perf_counter()
        plan = planner.plan(sequences, sequences)
        begins = time.perf_counter()
        tracer.step_begins(started, plan, num_sequences)
        begun = time.perf_counter()
        for run in plan.runs:
            run.sequence.advance(run.count)
            run.sequence.append(0)
        ends = time.perf_counter()
        tracer.step_ends([], num_sequences)
        tracer.trip_ends(started)
        ended = time.perf_counter()
        tracer.flush()
        noting.append(begun - begins + ended - ends)
        writing.append(time.perf_counter() - ended)
    tracer.close()
    return statistics.median(noting), statistics.median(writing), path.stat().st_size / STEPS


if __name__ == "__main__":
    print("| sequences in the step | the step waits | the writing thread works | bytes |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for count in (1, 8, 32, 64):
            note, write, size = measure(count, Path(folder, f"{count}.json"))
            print(f"| {count} | {note * 1e6:.0f} µs | {write * 1e6:.0f} µs | {size:.0f} |")
