"""From when responses arrived to figures: rates, latencies, their medians over rounds, and ratios of two paths."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from triton_inflight.bench_work import Workload

Figures = dict[str, float | None]
"""Figures of a round by name; None where the round cannot tell."""


@dataclass(frozen=True)
class Round:
    """One round of a workload, followed to its end. Times are seconds since the first sequence was sent.

    Attributes:
        sent: when each sequence was sent.
        arrivals: when the responses of each sequence arrived, in order.
        tokens: how many tokens each of them brought.
        client_cpu: seconds of CPU time of the process that asks; in process, of the engine too.
        server_cpu: seconds of CPU time of the server's processes; None in process.
        parts: what else was measured, such as the seconds that a part of the work took; by name of the figure.
    """

    sent: Sequence[float]
    arrivals: Sequence[Sequence[float]]
    tokens: Sequence[Sequence[float]]
    client_cpu: float | None = None
    server_cpu: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Until the last response."""
        return max(times[-1] for times in self.arrivals)

    def figures(self, workload: Workload) -> Figures:
        """The round in numbers; times in seconds, rates in tokens per second, of all sequences together.

        Prefilling lasts until the last sequence has its first token; decoding is what comes after that. So a
        token that one sequence gets while another is still being prefilled counts as time of prefilling, in
        every engine alike. Inter-token latencies are times between responses, whatever tokens they bring.
        """
        end, first = self.seconds, max(times[0] for times in self.arrivals)
        figures: Figures = {
            "seconds": end,
            "output_tokens": sum(map(sum, self.tokens)),
            "responses": sum(map(len, self.arrivals)),
            "output_tokens_per_second": workload.sequences * workload.output_tokens / end,
            "client_cpu_seconds": self.client_cpu,
            "server_cpu_seconds": self.server_cpu,
            **self.parts,
        }
        names = (
            "prefill_tokens_per_second",
            "decode_tokens_per_second",
            "ttft_p50",
            "ttft_p99",
            "itl_p50",
            "itl_p99",
        )
        figures |= dict.fromkeys(names)
        if workload.stream:
            ttft = [times[0] - sent for sent, times in zip(self.sent, self.arrivals, strict=True)]
            figures["prefill_tokens_per_second"] = workload.sequences * workload.input_tokens / first
            figures["ttft_p50"], figures["ttft_p99"] = quantile(ttft, 0.5), quantile(ttft, 0.99)
        gaps = [after - before for times in self.arrivals for before, after in pairwise(times)]
        if workload.stream and gaps:
            figures["itl_p50"], figures["itl_p99"] = quantile(gaps, 0.5), quantile(gaps, 0.99)
            figures["decode_tokens_per_second"] = (
                self._tokens_after(first) / (end - first) if end > first else None
            )
        return figures

    def _tokens_after(self, moment: float) -> float:
        return sum(
            count
            for times, counts in zip(self.arrivals, self.tokens, strict=True)
            for time, count in zip(times, counts, strict=True)
            if time > moment
        )


@dataclass(frozen=True)
class Spread:
    """The median of several rounds, and the lowest and highest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def in_words(self, digits: int = 0) -> str:
        """``median (low to high)``."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def spreads(rounds: Sequence[Mapping[str, float | None]]) -> dict[str, Spread | None]:
    """Each figure over its rounds; None where a round has none."""
    result: dict[str, Spread | None] = {}
    for name in rounds[0]:
        values = [value for figures in rounds if (value := figures[name]) is not None]
        result[name] = Spread.of(values) if len(values) == len(rounds) else None
    return result


def ratio(ours: Sequence[Figures], theirs: Sequence[Figures], name: str) -> Spread | None:
    """A figure of one path over that of another, round by round, so that a busy moment of the machine hits both."""
    quotients = []
    for over, under in zip(ours, theirs, strict=True):
        numerator, denominator = over.get(name), under.get(name)
        if numerator is None or not denominator:
            return None
        quotients.append(numerator / denominator)
    return Spread.of(quotients)


def result_row(workload: Workload, name: str, rounds: Sequence[Figures]) -> dict[str, Any]:
    """What one path or contender gave at one number of sequences, as reports and tables hold it."""
    return {"sequences": workload.sequences, "path": name, "figures": spreads(rounds), "rounds": rounds}


def ratio_rows(
    workload: Workload,
    over: tuple[str, Sequence[Figures]],
    under: tuple[str, Sequence[Figures]],
    figures: Sequence[str],
) -> list[dict[str, Any]]:
    """Ratios of two paths or contenders, each given as its name and its rounds; without what one cannot tell."""
    return [
        {
            "sequences": workload.sequences,
            "of": over[0],
            "to": under[0],
            "figure": figure,
            "ratio": spread,
        }
        for figure in figures
        if (spread := ratio(over[1], under[1], figure)) is not None
    ]


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of the values does not exceed, linearly between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
