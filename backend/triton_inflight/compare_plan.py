"""What a comparison is of: the model, the schedulers, the requests and when they are sent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from triton_inflight.compare_loads import Closed, Load, RelativeRate
from triton_inflight.compare_measures import Slo
from triton_inflight.compare_requests import LengthMix, Mix
from triton_inflight.errors import SettingsError
from triton_inflight.weights import DEFAULT_REFERENCE

SCHEDULERS = ("iterative", "dynamic", "sequence", "decoupled")
SLOTS = 16
DEFAULT_LENGTHS = "16-128"
DEFAULT_MIX = LengthMix.parse(DEFAULT_LENGTHS, DEFAULT_LENGTHS)
DEFAULT_LOADS: tuple[Load, ...] = (Closed(2 * SLOTS), RelativeRate(0.5), RelativeRate(0.9))


@dataclass(frozen=True)
class Comparison:
    """What is compared, and how.

    Attributes:
        model: a model reference, for which an entry is made for each scheduler.
        schedulers: names of schedulers, in the order of tables; or, with ``repository``, of its entries.
        repository: a model repository whose entries are compared, instead of ``model``.
        mix: what requests are like; or a file of them, see ``read_requests``.
        loads: when they are sent, each in turn.
        rounds: how often each load is measured on each contender.
        seconds: how long requests arrive in an open loop, and in a closed one keep coming.
        slots: most sequences that generate at a time, under every scheduler; entries of a repository have their own.
        dtype: number type of the weights; ``bfloat16`` where absent, or what the entries of a repository say.
        changes: parameters of every config.pbtxt, by key.
        slo: what a request's latencies must not exceed to count as goodput.
        baseline: what ratios are taken to; ``dynamic`` where absent, or else the first.
        seed: of prompts, lengths and arrivals.
        check: compare only if float32 texts are equal under all schedulers.
        one_at_a_time: start a server anew for each of its turns, instead of pausing it between them.
    """

    model: str = DEFAULT_REFERENCE
    schedulers: Sequence[str] = SCHEDULERS
    repository: Path | None = None
    mix: Mix | Path = DEFAULT_MIX
    loads: Sequence[Load] = DEFAULT_LOADS
    rounds: int = 3
    seconds: float = 6.0
    slots: int = SLOTS
    dtype: str | None = None
    changes: Mapping[str, str] = field(default_factory=dict)
    slo: Slo | None = None
    baseline: str | None = None
    seed: int = 0
    check: bool = True
    one_at_a_time: bool = False

    def __post_init__(self) -> None:
        if not self.schedulers or not self.loads:
            raise SettingsError("a comparison needs at least one scheduler and one load")
        if len(set(self.schedulers)) < len(self.schedulers):
            raise SettingsError(
                f"named twice, where each is compared with the others: {', '.join(self.schedulers)}"
            )
        if self.rounds < 1 or not 0 < self.seconds < math.inf:
            raise SettingsError(
                f"{self.rounds} rounds of {self.seconds:g} s: give at least 1 round, and a time above 0 s"
            )
        if self.baseline is not None and self.baseline not in self.schedulers:
            raise SettingsError(
                f"the baseline {self.baseline!r} is not among what is compared: {', '.join(self.schedulers)}"
            )

    @property
    def base(self) -> str:
        """The contender that ratios are taken to."""
        return self.baseline or ("dynamic" if "dynamic" in self.schedulers else self.schedulers[0])


QUICK: Mapping[str, Any] = {
    "mix": LengthMix.parse("8-32", "4-16"),
    "loads": (Closed(8), RelativeRate(0.9)),
    "rounds": 1,
    "seconds": 1.0,
    "slots": 4,
    "dtype": "float32",
}
"""Options of a comparison that only shows that it runs: short requests, a second of each load. In float32, so that
the servers that are measured are those whose texts are checked."""
