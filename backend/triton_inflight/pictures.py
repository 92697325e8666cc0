"""Pictures of how schedulers behave, made from traces and measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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
