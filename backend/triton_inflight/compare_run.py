"""A comparison of schedulers, from the model to the results."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triton_inflight.bench_machine import describe_machine
from triton_inflight.bench_work import ordinary_tokens
from triton_inflight.compare_check import OUTPUT_TOKENS, PROMPTS, check_equal, check_requests
from triton_inflight.compare_loads import Closed, FixedLoad, RelativeRate, Schedule, Source, check_loads
from triton_inflight.compare_measures import client_figures, equal_share, span
from triton_inflight.compare_occupancy import cut, occupancy
from triton_inflight.compare_plan import SCHEDULERS, Comparison
from triton_inflight.compare_progress import Progress
from triton_inflight.compare_requests import Mix, read_requests
from triton_inflight.compare_results import MeasuredRound, Results
from triton_inflight.compare_servers import (
    Entry,
    Fleet,
    Sent,
    check_lengths,
    copy_entries,
    differences,
    write_entries,
)
from triton_inflight.weights import DEFAULT_REFERENCE, ModelDescription, describe

if TYPE_CHECKING:
    from rich.console import Console

_Key = tuple[FixedLoad, str, int]
"""A load, a contender's name, and the number of a round."""

_TRACING = {"trace_max_bytes": "4GiB"}  # a trace that began anew would lack rounds
_SECONDS_A_START, _TURN = (
    7.0,
    1.3,
)  # for the progress bar's estimate: of a server, and over the seconds of a turn


def compare(
    model: str = DEFAULT_REFERENCE, schedulers: Sequence[str] = SCHEDULERS, **options: Any
) -> Results:
    """Measure a model under several schedulers; ``options`` are the other attributes of ``Comparison``.

    Raises:
        InflightError: there is no such model, a server fails, or the schedulers' texts differ.
    """
    return run(Comparison(model, schedulers, **options))


def run(comparison: Comparison, traces: Path | None = None, console: Console | None = None) -> Results:
    """Carry a comparison out.

    Args:
        traces: folder to keep the servers' traces in; they are for Perfetto.
        console: where progress is shown; stderr where absent.

    Raises:
        InflightError: as for ``compare``.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="triton-inflight-compare-")))
        progress = stack.enter_context(Progress(console))
        return _Run(comparison, folder, traces or folder / "traces", progress).results()


class _Run:
    """A comparison in the making."""

    def __init__(self, comparison: Comparison, folder: Path, traces: Path, progress: Progress) -> None:
        self._comparison = comparison
        self._folder = folder
        self._progress = progress
        progress.say("reading the model's config and tokenizer")
        self._repository = comparison.repository or folder / "written"
        if comparison.repository is None:
            c = comparison
            write_entries(c.model, c.schedulers, c.dtype or "bfloat16", c.slots, self._repository)
        self._entries = self._copy("timed", {**_TRACING, "trace_directory": str(traces.absolute())})
        self._described = _describe(self._entries[0])
        self._mix = self._read_mix()
        check_loads(comparison.loads, self._mix)
        self._source = Source(self._mix, ordinary_tokens(self._described.tokenizer))
        context = getattr(self._described.config, "max_position_embeddings", None)
        check_lengths(self._entries, self._mix.longest, context)

    def results(self) -> Results:
        """Do it all."""
        comparison = self._comparison
        is_float32 = all(entry.settings.dtype == "float32" for entry in self._entries)
        relative = any(isinstance(load, RelativeRate) for load in comparison.loads)
        turns = len(self._entries) * len(comparison.loads) * comparison.rounds
        starts = _SECONDS_A_START * len(self._entries)
        fleets = 1 + (comparison.check and not is_float32)
        self._progress.expect(starts * fleets + comparison.seconds * (turns * _TURN + relative))
        if comparison.check and not is_float32:
            entries = self._copy("float32", {"dtype": "float32"})
            with self._fleet("float32", entries) as fleet:
                self._progress.done(starts)
                self._check(fleet, entries)
        began = time.time()
        with self._fleet("timed", self._entries) as fleet:
            self._progress.done(starts)
            if comparison.check and is_float32:
                self._check(fleet, self._entries)
            maximum = self._closed_loop_maximum(fleet) if relative else None
            loads = [
                load.at(maximum or 0.0) if isinstance(load, RelativeRate) else load
                for load in comparison.loads
            ]
            sent = self._measure(fleet, loads)
        self._progress.say("reading the traces")
        rounds = [self._measured(key, each, fleet) for key, each in sent.items()]
        return Results(
            _with_equal_shares(rounds, comparison.base),
            list(comparison.schedulers),
            comparison.base,
            self._about(maximum, time.time() - began),
            self._notes(),
        )

    # -- what is done, in order -----------------------------------------------------------------------------

    def _copy(self, name: str, changes: Mapping[str, str]) -> list[Entry]:
        dtype = {} if self._comparison.dtype is None else {"dtype": self._comparison.dtype}
        changes = {**dtype, **self._comparison.changes, **changes}
        return copy_entries(self._repository, self._comparison.schedulers, changes, self._folder / name)

    def _read_mix(self) -> Mix:
        if isinstance(self._comparison.mix, Path):
            tokenizer = self._described.tokenizer
            return read_requests(self._comparison.mix, lambda text: len(tokenizer.encode(text)))
        return self._comparison.mix

    def _fleet(self, name: str, entries: Sequence[Entry]) -> Fleet:
        one_at_a_time = self._comparison.one_at_a_time
        return Fleet(self._folder / name, entries, self._warm_up, one_at_a_time, self._progress.say)

    def _check(self, fleet: Fleet, entries: Sequence[Entry]) -> None:
        """Refuse to compare contenders whose greedy float32 texts differ."""
        requests = check_requests(self._source.draw(PROMPTS, f"{self._comparison.seed} check"))
        schedule = Schedule([(0.0, request) for request in requests])
        answers = {}
        for entry in entries:
            self._progress.say(f"float32 texts of {entry.name}")
            answers[entry.name] = fleet.round(entry, schedule).outcomes
        check_equal(answers, self._described.tokenizer)

    def _warm_up(self) -> Schedule:
        """As many sequences as there are slots, at once: every size of a step up to it, once."""
        requests = self._source.draw(self._entries[0].slots, f"{self._comparison.seed} warm-up")
        return Schedule([(0.0, request.cut(request.input_tokens, OUTPUT_TOKENS)) for request in requests])

    def _closed_loop_maximum(self, fleet: Fleet) -> float:
        """Requests a second that iterative sequences (or else the first contender) reach when there is always one
        waiting for each slot.
        """
        entry = next((e for e in self._entries if e.settings.scheduler == "iterative"), self._entries[0])
        self._progress.say(f"the closed loop's maximum of {entry.name}")
        schedule = Closed(2 * entry.slots).schedule(
            self._source, self._comparison.seconds, f"{self._comparison.seed} maximum"
        )
        sent = fleet.round(entry, schedule)
        self._progress.done(self._comparison.seconds)
        rate = client_figures(sent.outcomes, sent.window, None)["output_tokens_per_second"]
        assert rate is not None
        return rate / self._mix.mean_output

    def _measure(self, fleet: Fleet, loads: Sequence[FixedLoad]) -> dict[_Key, Sent]:
        """All rounds. Contenders take turns, another one first each time, so that a busy moment of the machine, or
        being the first after it, favours nobody.
        """
        sent = {}
        for number in range(self._comparison.rounds):
            for load in loads:
                for entry in _rotated(self._entries, number):
                    self._progress.say(
                        f"round {number + 1} of {self._comparison.rounds}, {load.name}: {entry.name}"
                    )
                    seed = f"{self._comparison.seed} {load.name} {number}"
                    schedule = load.schedule(self._source, self._comparison.seconds, seed)
                    sent[load, entry.name, number] = fleet.round(entry, schedule)
                    self._progress.done(self._comparison.seconds * _TURN)
        return sent

    def _measured(self, key: _Key, sent: Sent, fleet: Fleet) -> MeasuredRound:
        """A round with its figures."""
        load, name, number = key
        figures = client_figures(sent.outcomes, sent.window, self._comparison.slo)
        figures["client_cpu_seconds"] = sent.client_cpu
        figures["server_cpu_seconds"] = sent.server_cpu
        figures["server_cpu_ms_per_token"] = sent.server_cpu * 1e3 / (figures["output_tokens"] or 1)
        end = sent.start + (sent.window or span(sent.outcomes))
        part = cut(fleet.traces(name), sent.start, end)
        if part is not None:
            figures |= dataclasses.asdict(occupancy(part, sent.start, end))
        return MeasuredRound(load, name, number, sent.start, sent.outcomes, figures, part)

    def _about(self, maximum: float | None, seconds: float) -> dict[str, Any]:
        return {
            "machine": describe_machine(),
            "comparison": {
                **dataclasses.asdict(self._comparison),
                "loads": [load.name for load in self._comparison.loads],
                "mix": self._mix.about,
            },
            "closed_loop_maximum_requests_per_second": maximum,
            "seconds_measured": seconds,
            "settings": {entry.name: dataclasses.asdict(entry.settings) for entry in self._entries},
        }

    def _notes(self) -> list[str]:
        """What a reader of the table has to know."""
        notes = [f"{self._mix.about}; {self._entries[0].slots} slots; {_counted(self._comparison.rounds)}"]
        notes += [f"UNEVEN: {what}" for what in differences(self._entries)]
        if self._comparison.check:
            notes.append("greedy float32 texts were equal under all schedulers")
        else:
            notes.append("NOT CHECKED: whether greedy float32 texts are equal under all schedulers")
        if self._comparison.slo is not None:
            notes.append(f"goodput: requests a second with {self._comparison.slo}")
        return notes


def _counted(rounds: int) -> str:
    return "1 round" if rounds == 1 else f"{rounds} rounds"


def _describe(entry: Entry) -> ModelDescription:
    settings = entry.settings
    return describe(
        settings.model, trust_remote_code=settings.trust_remote_code, base=settings.model_directory
    )


def _rotated(entries: Sequence[Entry], by: int) -> list[Entry]:
    start = by % len(entries)
    return [*entries[start:], *entries[:start]]


def _with_equal_shares(rounds: Sequence[MeasuredRound], baseline: str) -> list[MeasuredRound]:
    """The rounds with the share of their output tokens that the baseline gave as well."""
    bases = {(each.load, each.number): each for each in rounds if each.scheduler == baseline}
    for each in rounds:
        base = bases[each.load, each.number]
        each.figures["equal_to_baseline"] = equal_share(each.outcomes, base.outcomes)
    return list(rounds)
