"""The other schedulers that a config.pbtxt may ask for, over the same engine.

Each behaves as a careful engineer's model would under it, so that iterative sequences can be compared with what
people use without them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from triton_inflight.books import Client
from triton_inflight.engine import Engine
from triton_inflight.errors import RequestError
from triton_inflight.generation import Update
from triton_inflight.lifecycle import Lifecycle
from triton_inflight.metrics import Metrics
from triton_inflight.settings import Settings
from triton_inflight.visits import Carrier, Trip, Visit

log = logging.getLogger(__name__)


class _WithoutSequences(Lifecycle):
    """Requests that are no sequences to Triton: each is handed over once, and has to be answered."""

    def _sequence_id(self, carrier: Carrier) -> int:  # noqa: ARG002
        return next(self._own_ids)

    def _enter(self, sequence_id: int, carrier: Carrier, trip: Trip) -> None:  # noqa: ARG002
        self._start(sequence_id, carrier)

    def _give_back(self, carrier: Carrier) -> None:
        carrier.refuse(RequestError("cancelled by the client", "CANCELLED"))


class Dynamic(_WithoutSequences):
    """``dynamic_batching``: the batch that Triton forms runs to the end of its last member; nobody joins.

    Who has finished leaves the forward pass, and is answered at once.
    """

    def _one_more(self, trip: Trip, steps: int, started: float) -> bool:  # noqa: ARG002
        return True


class ClientDriven(Lifecycle):
    """``sequence_batching`` without ``iterative_sequence``: the client asks for every token.

    START carries the prompt and gets the first token; each further request of the ID gets one more, with
    ``finish_reason`` once the text has ended; END frees what the sequence holds. A sequence that is left alone for
    longer than Triton's idle time is dropped by a clock of our own: Triton tells the model nothing of it.
    """

    def _enter(self, sequence_id: int, carrier: Carrier, trip: Trip) -> None:  # noqa: ARG002
        if carrier.starts:
            if sequence_id in self._clients:
                self._forget(sequence_id, "cancelled")  # its client began anew
            self._start(sequence_id, carrier)
        elif sequence_id not in self._clients:
            raise RequestError(
                f"sequence ID {carrier.correlation_id} is not live: it never started, has ended, or was left alone for "
                f"more than {self._settings.max_sequence_idle:.0f} s (max_sequence_idle_microseconds in config.pbtxt)"
            )
        self._clients[sequence_id].last_request = time.monotonic()

    def _receive(self, carrier: Carrier, trip: Trip) -> None:
        sequence_id = self._sequence_id(carrier)
        if carrier.ends and not carrier.starts:
            if sequence_id in self._clients:
                self._forget(sequence_id, "ended")
            carrier.send({}, final=True)
            return
        super()._receive(carrier, trip)

    def _check_fits_the_way(self, request: Any, carrier: Carrier) -> None:  # noqa: ARG002
        if request.best_of > 1:
            raise RequestError(
                "n or best_of is above 1: a sequence that its client drives has one choice; leave it out"
            )

    def _one_more(self, trip: Trip, steps: int, started: float) -> bool:  # noqa: ARG002
        return True  # until each has its token: a long prompt may take several steps

    def _absent(self, trip: Trip) -> dict[int, Client]:  # noqa: ARG002
        return {}  # a sequence is stepped when its client asks

    def _take(self, update: Update, visit: Visit | None, sends: bool) -> None:
        """A token is the whole answer to the request that asked for it."""
        super()._take(update, visit, sends=False)
        if not sends or visit is None:
            return
        visit.open, visit.answered = False, True
        self._watcher.release(update.sequence_id)  # a sender must not be asked once its request is answered
        self._responses.send(visit, [visit.client.pending[update.choice]], final=True)
        if visit.carrier.ends:
            self._forget(update.sequence_id, "ended")

    def _give_back(self, carrier: Carrier) -> None:
        carrier.refuse(RequestError("cancelled by the client", "CANCELLED"))

    def _report(self) -> None:
        super()._report()
        idle_since = time.monotonic() - self._settings.max_sequence_idle
        with self._lock:
            for sequence_id in [i for i, c in self._clients.items() if c.last_request < idle_since]:
                self._forget(sequence_id, "reaped")


class Decoupled(_WithoutSequences):
    """No batcher: Triton hands over each request as it comes, and the engine steps in a thread of its own."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        defaults: Mapping[str, Any],
        metrics: Metrics,
        reclaim: Callable[[int | str], None],
        flush: Callable[[], None],
    ) -> None:
        super().__init__(settings, engine, defaults, metrics, reclaim, flush)
        self._arrived: list[Carrier] = []
        self._news = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="triton-inflight-engine", daemon=True)
        self._thread.start()

    def trip(self, carriers: Sequence[Carrier]) -> None:
        """Take requests over; they are answered later."""
        with self._news:
            self._arrived += carriers
            self._news.notify()

    def close(self) -> None:
        """Finish what is live, then end the thread."""
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join()
        super().close()

    def _run(self) -> None:
        trip: Trip = {}
        while True:
            with self._news:
                self._news.wait_for(lambda: self._arrived or trip or self._closing)
                arrived, self._arrived = self._arrived, []
            if not arrived and not trip:
                return
            with self._lock:
                self._step(arrived, trip)

    def _step(self, arrived: Sequence[Carrier], trip: Trip) -> None:
        """One step of everything that is live, with the newcomers."""
        started = time.perf_counter()
        for carrier in arrived:
            self._receive(carrier, trip)
        forward_seconds = 0.0
        try:
            forward_seconds = self._generate(trip)
        except Exception as error:
            log.exception("a step failed; its %d sequences end with an error", len(trip))
            self._fail_all(trip, error)
        for sequence_id, visit in list(trip.items()):
            if not visit.open:
                del trip[sequence_id]
                if not visit.answered:
                    self._give_back(visit.carrier)
        self._flush()
        self._trip_ends(started, forward_seconds)

    def _one_more(self, trip: Trip, steps: int, started: float) -> bool:  # noqa: ARG002
        return False  # look for newcomers between any two steps


def make_lifecycle(
    settings: Settings,
    engine: Engine,
    defaults: Mapping[str, Any],
    metrics: Metrics,
    reclaim: Callable[[int | str], None],
    flush: Callable[[], None],
) -> Lifecycle:
    """The lifecycle of the scheduler that the settings name; see ``Lifecycle``."""
    kinds: dict[str, type[Lifecycle]] = {
        "iterative": Lifecycle,
        "sequence": ClientDriven,
        "dynamic": Dynamic,
        "decoupled": Decoupled,
    }
    return kinds[settings.scheduler](settings, engine, defaults, metrics, reclaim, flush)
