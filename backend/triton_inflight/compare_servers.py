"""The contenders of a comparison: one model under each scheduler, each on a real server of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from triton_inflight.bench_served import CpuAccount, copy_model
from triton_inflight.bench_sse import StreamError
from triton_inflight.compare_client import LoadClient, Outcome
from triton_inflight.compare_loads import Schedule
from triton_inflight.errors import SettingsError
from triton_inflight.launcher import TritonServer
from triton_inflight.processes import memory_bytes, pause, resume
from triton_inflight.scaffold import init_model
from triton_inflight.settings import Settings
from triton_inflight.trace_reading import Trace, read_trace
from triton_inflight.weights import resolve

# Between the last response and a pause. Triton 2.51's Python backend crashed (SIGSEGV) after pauses at once under
# `dynamic`, whose last response goes out before its batch is given back.
_SECONDS_TO_REST = 0.5
_SECONDS_TO_DIE = 2.0  # between the end of a crashing server's connections and its own
_SHARE_OF_MEMORY = 0.8  # of what is free, for all servers together


@dataclass(frozen=True)
class Entry:
    """A contender: an entry of a model repository.

    Attributes:
        name: the entry's, and what tables call it.
        settings: as its server reads them.
    """

    name: str
    settings: Settings

    @property
    def slots(self) -> int:
        """Most sequences that it generates at a time."""
        return self.settings.max_running_sequences


def write_entries(
    model: str, schedulers: Sequence[str], dtype: str, slots: int, repository: Path
) -> list[str]:
    """An entry for each scheduler, as ``init`` writes it, all with the same slots and the same KV budget.

    Args:
        model: a model reference; relative paths start from the current folder.

    Returns:
        Their names, which are those of the schedulers.

    Raises:
        SettingsError, ModelError: there is no such scheduler or model.
    """
    location = resolve(model).location
    for scheduler in schedulers:
        init_model(repository, scheduler, location, dtype, slots, scheduler=scheduler)
    return list(schedulers)


def copy_entries(
    repository: Path, names: Sequence[str], changes: Mapping[str, str], copy: Path
) -> list[Entry]:
    """Entries of a repository, copied into another one with some of their parameters changed.

    Raises:
        SettingsError, ModelError: one of them could not be served.
    """
    return [Entry(name, copy_model(repository, name, changes, copy)) for name in names]


def differences(entries: Sequence[Entry]) -> list[str]:
    """What makes a comparison of these entries uneven, in words."""
    looks: dict[str, Callable[[Entry], object]] = {
        "model": lambda entry: entry.settings.model,
        "dtype": lambda entry: entry.settings.dtype,
        "slots": lambda entry: entry.slots,
        "KV budget": lambda entry: (
            entry.settings.max_tokens_in_paged_kv_cache or entry.settings.kv_cache_bytes
        ),
        "max_num_tokens": lambda entry: entry.settings.max_num_tokens,
        "device": lambda entry: entry.settings.device,
    }
    return [
        f"{what}: " + ", ".join(f"{entry.name} {look(entry)}" for entry in entries)
        for what, look in looks.items()
        if len({look(entry) for entry in entries}) > 1
    ]


@dataclass(frozen=True)
class Sent:
    """A round as it went.

    Attributes:
        start: when it began, by ``time.monotonic()``.
        outcomes: of its requests, in order.
        window: of the schedule.
        client_cpu, server_cpu: seconds of CPU time of this process, and of the server's processes.
    """

    start: float
    outcomes: list[Outcome]
    window: float | None
    client_cpu: float
    server_cpu: float


class Fleet:
    """The servers of all contenders, of which one runs at a time, while the ``with`` block lasts.

    Where memory suffices, each is started once and paused (SIGSTOP) unless it is its turn; else each is started anew
    for every turn.

    Args:
        repository: what they serve.
        entries: what is in it.
        warm_up: what each server is asked before its first round.
        one_at_a_time: start each anew even where memory suffices.
        say: told what is going on.
    """

    def __init__(
        self,
        repository: Path,
        entries: Sequence[Entry],
        warm_up: Callable[[], Schedule],
        one_at_a_time: bool,
        say: Callable[[str], None],
    ) -> None:
        self._repository = repository
        self._entries = list(entries)
        self._warm_up = warm_up
        self._one_at_a_time = one_at_a_time
        self._say = say
        self._servers: dict[str, TritonServer] = {}
        self._traces: dict[str, list[Trace]] = {entry.name: [] for entry in entries}

    def __enter__(self) -> Fleet:
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def round(self, entry: Entry, schedule: Schedule) -> Sent:
        """Let a contender answer the requests of a schedule, alone on the machine.

        Raises:
            InflightError: the server failed, or generated more or fewer tokens than asked.
        """
        if self._one_at_a_time:
            self._start(entry)
            self._wait_ready(entry)
            sent = self._send(entry, schedule)
            self.close()
            return sent
        resume(self._pid(entry))
        sent = self._send(entry, schedule)
        self._pause(entry)
        return sent

    def close(self) -> None:
        """Stop all servers and read their traces."""
        stopping = [entry for entry in self._entries if entry.name in self._servers]
        for entry in stopping:
            if self._servers[entry.name].pid is not None:
                resume(self._pid(entry))
        with ThreadPoolExecutor(max(1, len(stopping))) as pool:  # a stop is mostly waiting
            list(pool.map(lambda entry: self._servers.pop(entry.name).stop(), stopping))
        for entry in stopping:
            self._collect_trace(entry)

    def traces(self, name: str) -> list[Trace]:
        """What a contender's servers wrote, once they have stopped; none if its config does not ask for traces."""
        return self._traces[name]

    def _start_all(self) -> None:
        if self._one_at_a_time:
            return
        first, *others = self._entries
        self._start(first)
        self._wait_ready(first)
        self._pause(first)
        needed = memory_bytes(self._pid(first)) * len(others)
        if needed > _SHARE_OF_MEMORY * psutil.virtual_memory().available:
            self._one_at_a_time = True
            self.close()
            return
        for entry in others:
            self._start(entry)
        for entry in others:
            self._wait_ready(entry)
            self._pause(entry)

    def _start(self, entry: Entry) -> None:
        self._say(f"starting the server of {entry.name}")
        server = self._servers[entry.name] = TritonServer(self._repository, models=[entry.name])
        server.start()

    def _wait_ready(self, entry: Entry) -> None:
        self._servers[entry.name].wait_ready()
        self._send(entry, self._warm_up())

    def _pause(self, entry: Entry) -> None:
        time.sleep(_SECONDS_TO_REST)
        pause(self._pid(entry))

    def _pid(self, entry: Entry) -> int:
        pid = self._servers[entry.name].pid
        assert pid is not None
        return pid

    def _send(self, entry: Entry, schedule: Schedule) -> Sent:
        server = self._servers[entry.name]
        client = LoadClient(server.grpc_url, entry.name, entry.settings.scheduler)
        try:
            with CpuAccount(self._pid(entry)) as account:
                start, outcomes = client.run(schedule)
        except StreamError as error:
            if server.wait(_SECONDS_TO_DIE):  # then its log says more than the stream that broke off
                raise server.failure() from error
            raise
        return Sent(start, outcomes, schedule.window, account.client, account.server)

    def _collect_trace(self, entry: Entry) -> None:
        if entry.settings.trace_directory is not None:
            path = Path(entry.settings.trace_directory, f"{entry.name}.json")
            if path.exists():
                self._traces[entry.name].append(read_trace(path))


def check_lengths(entries: Sequence[Entry], longest: int, context: int | None) -> None:
    """Whether every contender can hold the longest request.

    Args:
        longest: tokens of prompt and output together.
        context: of the model; None where it is unknown.

    Raises:
        SettingsError: one cannot.
    """
    for entry in entries:
        store = entry.settings.max_tokens_in_paged_kv_cache
        bounds = {
            "max_seq_len": entry.settings.max_seq_len,
            "the model's context": context,
            "max_tokens_in_paged_kv_cache": store,
        }
        for what, bound in bounds.items():
            if bound is not None and longest > bound:
                raise SettingsError(
                    f"{entry.name}: the longest request has {longest} tokens, prompt and output together, and {what} "
                    f"is {bound}; send shorter ones, or scale the table of lengths"
                )
