"""Pictures of how schedulers behave, made from traces and measurements.

Each function takes plain data and gives a matplotlib figure; ``save`` writes it as PNG. They need matplotlib,
which comes with the extra ``[compare]``, and say so.
"""

from triton_inflight.pictures.measured import Latencies, LoadPoint, latency_cdfs, load_curves
from triton_inflight.pictures.occupancy import sequences_per_step
from triton_inflight.pictures.style import require_matplotlib, save
from triton_inflight.pictures.timeline import slot_timeline

__all__ = [
    "Latencies",
    "LoadPoint",
    "latency_cdfs",
    "load_curves",
    "require_matplotlib",
    "save",
    "sequences_per_step",
    "slot_timeline",
]
