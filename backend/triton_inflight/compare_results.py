"""What a comparison found: figures of every round, ratios, tables, files and pictures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from triton_inflight.bench_rounds import Figures, Spread, ratio, spreads
from triton_inflight.compare_client import Outcome
from triton_inflight.compare_loads import FixedLoad
from triton_inflight.compare_measures import inter_token_latencies
from triton_inflight.errors import InflightError
from triton_inflight.trace_reading import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

_TIMELINE_SECONDS = 8.0
_LOAD_LABELS = {
    "closed": "sequences in flight",
    "open": "offered load (requests/s)",
    "burst": "requests in the burst",
}


@dataclass(frozen=True)
class MeasuredRound:
    """One load on one scheduler, once.

    Attributes:
        load: when requests were sent.
        scheduler: the contender's name.
        number: of the round, from 0. All contenders got the same requests in it.
        start: when it began, by ``time.monotonic()``.
        outcomes: what became of its requests.
        figures: of it, by name; None where the round cannot tell.
        trace: what the server did meanwhile; None where it wrote no trace.
    """

    load: FixedLoad
    scheduler: str
    number: int
    start: float
    outcomes: Sequence[Outcome]
    figures: Figures
    trace: Trace | None


@dataclass(frozen=True)
class Results:
    """Everything that a comparison measured.

    Attributes:
        rounds: all of them, in the order in which they ran.
        schedulers: the contenders' names, in the order of tables.
        baseline: the one that ratios are taken to.
        about: the machine, versions, seeds, the comparison itself and what was derived from it.
        notes: what a reader has to know.
    """

    rounds: Sequence[MeasuredRound]
    schedulers: Sequence[str]
    baseline: str
    about: Mapping[str, Any]
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def loads(self) -> list[FixedLoad]:
        """In the order in which they ran."""
        return list(dict.fromkeys(each.load for each in self.rounds))

    @property
    def main_load(self) -> FixedLoad:
        """The one that pictures of a single load show: the last one."""
        return self.loads[-1]

    def of(self, load: FixedLoad, scheduler: str) -> list[MeasuredRound]:
        """The rounds of a scheduler under a load, by their numbers."""
        found = [each for each in self.rounds if each.load == load and each.scheduler == scheduler]
        return sorted(found, key=lambda each: each.number)

    def figures(self, load: FixedLoad, scheduler: str) -> dict[str, Spread | None]:
        """Median, lowest and highest of each figure over the rounds."""
        return spreads([each.figures for each in self.of(load, scheduler)])

    def ratio(
        self, figure: str, of: str, to: str | None = None, load: FixedLoad | None = None
    ) -> Spread | None:
        """A figure of one scheduler over that of another, taken round by round.

        Args:
            figure: such as ``output_tokens_per_second`` or ``ttft_p99``.
            of, to: names of schedulers; ``to`` is the baseline where absent.
            load: the main one where absent.

        Returns:
            Median, lowest and highest over the rounds; None where there is no such figure.
        """
        load = load or self.main_load
        ours, theirs = self.of(load, of), self.of(load, to or self.baseline)
        return ratio([each.figures for each in ours], [each.figures for each in theirs], figure)

    # -- for people -----------------------------------------------------------------------------------------

    def table(self) -> RenderableType:
        """What clients saw, what the servers did, and notes, for rich; a notebook shows it too."""
        from triton_inflight.compare_report import report

        return report(self)

    def pictures(self) -> dict[str, Figure]:
        """Figures of matplotlib, by the name of their file.

        Raises:
            InflightError: matplotlib is not installed.
        """
        return dict(self._pictures())

    def save(self, folder: Path) -> list[Path]:
        """Write results.json and the pictures into a folder; returns their paths.

        Where matplotlib is not installed, a text in place of the pictures says so.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "results.json"
        path.write_text(json.dumps(self.as_dict(), default=str))
        return [path, *self._save_pictures(folder)]

    def as_dict(self) -> dict[str, Any]:
        """All of it, as it stands in results.json: every request of every round with the moments of its tokens."""
        return {
            **self.about,
            "schedulers": list(self.schedulers),
            "baseline": self.baseline,
            "notes": list(self.notes),
            "summary": [
                {
                    "load": load.name,
                    "scheduler": scheduler,
                    "figures": {k: v and asdict(v) for k, v in self.figures(load, scheduler).items()},
                    "over_baseline": self._ratios(load, scheduler),
                }
                for load in self.loads
                for scheduler in self.schedulers
            ],
            "rounds": [_round_as_dict(each) for each in self.rounds],
        }

    def _ratios(self, load: FixedLoad, scheduler: str) -> dict[str, Any]:
        names = self.of(load, scheduler)[0].figures
        spreads = {name: self.ratio(name, scheduler, load=load) for name in names}
        return {name: asdict(spread) for name, spread in spreads.items() if spread is not None}

    # -- pictures -------------------------------------------------------------------------------------------

    def _save_pictures(self, folder: Path) -> Iterable[Path]:
        from triton_inflight.pictures import save

        try:
            return [save(figure, folder / f"{name}.png") for name, figure in self._pictures()]
        except InflightError as error:
            (folder / "pictures.txt").write_text(f"{error}\n")
            return [folder / "pictures.txt"]

    def _pictures(self) -> Iterable[tuple[str, Figure]]:
        from triton_inflight import pictures

        yield (
            "latencies",
            pictures.latency_cdfs([self._latencies(scheduler) for scheduler in self.schedulers]),
        )
        for kind, label in _LOAD_LABELS.items():
            loads = [load for load in self.loads if load.kind == kind]
            if len(loads) > 1:
                points = [self._point(load, scheduler) for load in loads for scheduler in self.schedulers]
                yield f"load_{kind}", pictures.load_curves(points, load_label=label)
        shown = [each for s in self.schedulers if (each := self.of(self.main_load, s)[0]).trace is not None]
        traces = [each.trace for each in shown if each.trace is not None]
        if traces:
            origins, titles = [each.start for each in shown], [each.scheduler for each in shown]
            yield "step_sequences", pictures.sequences_per_step(traces, origins=origins, titles=titles)
            window = (0.0, min(_TIMELINE_SECONDS, max(each.figures["seconds"] or 0.0 for each in shown)))
            yield "slots", pictures.slot_timeline(traces, origins=origins, titles=titles, window=window)

    def _latencies(self, scheduler: str) -> Any:
        from triton_inflight.pictures import Latencies

        outcomes = [outcome for each in self.of(self.main_load, scheduler) for outcome in each.outcomes]
        return Latencies(
            scheduler,
            np.array([outcome.ttft for outcome in outcomes]),
            inter_token_latencies(outcomes),
            np.array([outcome.e2e for outcome in outcomes]),
        )

    def _point(self, load: FixedLoad, scheduler: str) -> Any:
        from triton_inflight.pictures import LoadPoint

        def values(figure: str) -> list[float]:
            return [each.figures[figure] or 0.0 for each in self.of(load, scheduler)]

        names = ("output_tokens_per_second", "ttft_p50", "ttft_p99")
        return LoadPoint(scheduler, load.value, *map(values, names))


def _round_as_dict(each: MeasuredRound) -> dict[str, Any]:
    """A round with its requests; moments in seconds since its start, to a tenth of a millisecond."""
    return {
        "load": each.load.name,
        "scheduler": each.scheduler,
        "number": each.number,
        "figures": each.figures,
        "requests": [
            {
                "input_tokens": outcome.request.input_tokens,
                "output_tokens": outcome.request.output_tokens,
                "scheduled": round(outcome.scheduled, 4),
                "sent": round(outcome.sent, 4),
                "arrivals": [round(moment, 4) for moment in outcome.arrivals],
                "tokens": outcome.counts,
            }
            for outcome in each.outcomes
        ],
    }
