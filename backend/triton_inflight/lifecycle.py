"""The life of sequences: from the requests that carry them on trips to their answers.

The rules here keep clients from hanging and nothing from leaking, whatever Triton's core and clients do; which
facts they answer to stands in docs/lifecycle.md.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from triton_inflight.books import Books, Client
from triton_inflight.engine import Engine
from triton_inflight.errors import RequestError
from triton_inflight.generation import Update
from triton_inflight.metrics import Metrics
from triton_inflight.pending import Pending
from triton_inflight.protocol import GenerationRequest, parse_request
from triton_inflight.responses import Responses
from triton_inflight.settings import Settings
from triton_inflight.stopping import StopNotice
from triton_inflight.visits import Carrier, Trip, Visit, beside
from triton_inflight.watcher import Watcher

log = logging.getLogger(__name__)

# What a client is told whose sequence is ended from outside before its first token.
_NOTHING_TO_SEND = {
    "timeout": "the time allowed is over before the first token: the smaller of max_time in seconds and timeout in "
    "microseconds; allow more, or leave them out",
    "cancelled": "the server is stopping; try again when it is back",
}
_FIRST_OWN_ID = 2**63  # engine IDs of sequences whose correlation ID is a string


class Lifecycle:
    """Runs the trips of one model instance under Triton's iterative sequences.

    Args:
        settings: the model's.
        engine: what steps the sequences.
        defaults: what requests get where they say nothing.
        metrics: where to note what happens.
        reclaim: told the correlation ID of a sequence that Triton has dropped between two trips.
        flush: has the responses sent that carriers were given; called once for all of a step.
    """

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        defaults: Mapping[str, Any],
        metrics: Metrics,
        reclaim: Callable[[int | str], None] = lambda _: None,
        flush: Callable[[], None] = lambda: None,
    ) -> None:
        self._reclaim = reclaim
        self._flush = flush
        self._settings = settings
        self._engine = engine
        self._defaults = defaults
        self._metrics = metrics
        self._books = Books(metrics)
        self._responses = Responses(lambda token_id: str(engine.tokenizer.decode([token_id])))
        self._warn_once = functools.lru_cache(1024)(log.warning)
        self._clients: dict[int, Client] = {}
        self._string_ids: dict[str, int] = {}
        self._own_ids = itertools.count(_FIRST_OWN_ID)
        self._collided: set[int] = set()  # IDs with two requests, whose older one Triton still has to bring
        self._gone: set[int] = set()  # IDs the watcher found cancelled
        self._lock = threading.Lock()  # a trip, or the watcher between two trips
        self._level_wanted = True  # by the watcher, once a period
        self._stop = StopNotice()
        self._watcher = Watcher(settings.cancellation_check_period_ms / 1000, self._reap, self._report)
        self._report()
        self._watcher.start()

    def trip(self, carriers: Sequence[Carrier]) -> None:
        """Step the sequences of these requests. Everything sent in the trip has been sent when it returns."""
        with self._lock:
            started = time.perf_counter()
            trip: Trip = {}
            for carrier in carriers:
                self._receive(carrier, trip)
            forward_seconds = 0.0
            try:
                forward_seconds = self._generate(trip)
            except Exception as error:
                log.exception("a trip failed; its %d sequences end with an error", len(trip))
                self._fail_all(trip, error)
            for visit in trip.values():
                if not visit.answered:
                    self._give_back(visit.carrier)
            self._flush()
            self._trip_ends(started, forward_seconds)

    def is_ready(self) -> bool:
        """Whether new requests are welcome: no stop is announced, and the watcher lives. Never waits for a step."""
        return self._stop.end is None and self._watcher.is_alive()

    def close(self) -> None:
        """No thread, no response sender and no open file stays behind."""
        self._watcher.stop()
        if self._engine.tracer is not None:
            self._engine.tracer.close()

    def _trip_ends(self, started: float, forward_seconds: float) -> None:
        """Note down a trip that began then and had forward passes of so many seconds."""
        self._metrics.observe("inflight_loop_seconds", time.perf_counter() - started - forward_seconds)
        if self._engine.tracer is not None:
            self._engine.tracer.trip_ends(started)

    # -- the requests of a trip ---------------------------------------------------------------------------

    def _receive(self, carrier: Carrier, trip: Trip) -> None:
        """Take a request into the trip, or answer it at once."""
        if carrier.is_padding():
            return
        sequence_id = self._sequence_id(carrier)
        if (carrier.starts or sequence_id not in self._clients) and carrier.is_cancelled():
            self._give_back(carrier)
            return
        try:
            self._enter(sequence_id, carrier, trip)
        except RequestError as error:
            self._forget_string_id(sequence_id)
            carrier.refuse(error)
        except Exception as error:
            log.exception("sequence %d could not be started", sequence_id)
            self._forget_string_id(sequence_id)
            carrier.refuse(_internal(error))
        else:
            self._watcher.hold(sequence_id, carrier.sender)
            trip[sequence_id] = Visit(carrier, self._clients[sequence_id])

    def _sequence_id(self, carrier: Carrier) -> int:
        """The engine's ID of a sequence: Triton's, or one of our own for an ID that is a string."""
        if isinstance(carrier.correlation_id, int):
            return carrier.correlation_id
        return self._string_ids.setdefault(carrier.correlation_id, next(self._own_ids))

    def _enter(self, sequence_id: int, carrier: Carrier, trip: Trip) -> None:
        """Begin the sequence of a request, or see that it is the one that goes on.

        Raises:
            RequestError: neither.
        """
        if not carrier.starts:
            self._check_goes_on(sequence_id, carrier, trip)
            return
        if sequence_id in self._clients:
            self._end_both(sequence_id, trip)
        self._collided.discard(sequence_id)  # an older request that Triton has dropped will not come
        self._start(sequence_id, carrier)

    def _give_back(self, carrier: Carrier) -> None:
        """What becomes of a request that was not answered: it goes on, or its client is gone.

        Released for good, a cancelled request would keep its slot in Triton 2.51; rescheduled, the core ends it.
        """
        carrier.reschedule()

    def _start(self, sequence_id: int, carrier: Carrier) -> None:
        """Make a new sequence of a request.

        Raises:
            RequestError: the request cannot be served.
        """
        parameters = carrier.parameters()
        request = parse_request(
            carrier.tensors(), parameters, self._settings, self._defaults, self._warn_once
        )
        self._check_fits_the_way(request, carrier)
        now = time.monotonic()
        num_input_tokens = self._engine.add(sequence_id, request)
        allowed = _time_allowed(request, parameters, carrier.timeout_microseconds())
        client = Client(
            request,
            carrier.correlation_id,
            carrier.identity,
            num_input_tokens,
            started=now,
            deadline=now + allowed,
        )
        self._clients[sequence_id] = client
        self._books.started(client)

    def _check_fits_the_way(self, request: GenerationRequest, carrier: Carrier) -> None:
        """Whether Triton lets this request be answered as it wants to be.

        Raises:
            RequestError: it does not.
        """
        if not self._settings.decoupled and (request.stream or request.sends_sequence_index):
            raise RequestError(
                f"{'stream' if request.stream else 'num_return_sequences'} needs several responses, and this model "
                "gives one (model_transaction_policy.decoupled is false); leave it out, or ask another model"
            )
        bound = self._settings.max_tokens_in_one_trip
        if carrier.ends and request.max_tokens > bound:
            raise RequestError(
                f"max_tokens is {request.max_tokens}, but a request that sets sequence_start and sequence_end "
                f"together is answered within one trip, in at most {bound} tokens (max_tokens_in_one_trip in "
                "config.pbtxt); leave sequence_end out, since a sequence ends by itself, or lower max_tokens"
            )

    def _check_goes_on(self, sequence_id: int, carrier: Carrier, trip: Trip) -> None:
        """Whether a request without START is the one that started its sequence, brought back by Triton.

        Raises:
            RequestError: it is not.
        """
        if sequence_id in self._collided:
            self._collided.remove(sequence_id)
            raise _collision(carrier.correlation_id)
        if sequence_id not in self._clients:
            raise RequestError(
                f"sequence ID {carrier.correlation_id} is not live: its request must set sequence_start; a sequence "
                "that has ended does not go on, each generation is one request"
            )
        stranger = carrier.identity != self._clients[sequence_id].identity
        if carrier.ends or sequence_id in trip or stranger:
            self._end_both(sequence_id, trip)

    def _end_both(self, sequence_id: int, trip: Trip) -> None:
        """A second request on a live ID: Triton mixes the two up from here on, so neither may go on.

        Raises:
            RequestError: always; it is the newer one's. The older ends with it when it comes next.
        """
        older = trip.get(sequence_id)
        error = _collision(sequence_id)
        self._forget(sequence_id, "failed")
        if older is not None:
            self._refuse(older, error)
        else:
            self._collided.add(sequence_id)
        raise error

    # -- steps and responses ------------------------------------------------------------------------------

    def _generate(self, trip: Trip) -> float:
        """Step the sequences of a trip and those beside it, once or more often.

        Returns:
            The seconds of forward passes.
        """
        forward_seconds, steps, started = 0.0, 0, time.monotonic()
        self._catch_up(trip)
        self._flush()
        while (going := self._going_on(trip)) and (steps == 0 or self._one_more(trip, steps, started)):
            step = self._engine.step([*going, *self._beside(trip)])
            steps += 1
            forward_seconds += step.forward_seconds
            self._metrics.step(step)
            self._deliver(trip, step.updates)
            self._bound_queue(trip)
            self._flush()
            if step.num_sequences == 0:
                self._refuse_stuck(trip)
                break
        return forward_seconds

    def _one_more(self, trip: Trip, steps: int, started: float) -> bool:
        """Whether a further step of this trip keeps nobody waiting longer than ``max_trip_ms``.

        A request that sets END cannot come back, so it keeps the trip going. Else the trip ends when a slot has
        become free, and when somebody is absent, whose client waits for what is kept. While all who have a slot are
        here, nobody can join; else somebody may be waiting to.
        """
        if any(visit.open and visit.carrier.ends for visit in trip.values()):
            return True
        if steps >= self._settings.max_steps_per_execute or not all(visit.open for visit in trip.values()):
            return False
        if self._absent(trip):
            return False
        full = len(trip) >= self._settings.max_candidate_sequences
        return full or time.monotonic() - started < self._settings.max_trip_ms / 1000

    def _absent(self, trip: Trip) -> dict[int, Client]:
        """The live sequences that Triton did not bring on this trip."""
        return {i: client for i, client in self._clients.items() if i not in trip}

    def _beside(self, trip: Trip) -> list[int]:
        """The sequences to step beside those of a trip."""
        now = time.monotonic()
        if self._is_stopping(now):
            return []
        return beside(self._absent(trip), self._settings.max_steps_per_execute, now)

    def _is_stopping(self, now: float) -> bool:
        """Whether the server stops so soon that sequences have to end with what they have."""
        return self._stop.end is not None and now >= self._stop.end

    def _level(self) -> None:
        """Note down how full the engine is, if that is wanted; with the lock held."""
        if self._level_wanted:
            self._level_wanted = False
            self._books.level(self._engine)

    def _going_on(self, trip: Trip) -> list[int]:
        """The sequences of a trip to step next, once those are ended whose client is gone or whose time is up."""
        self._level()
        for sequence_id in list(self._gone):
            self._gone.discard(sequence_id)
            self._cancel(sequence_id, trip)
        now = time.monotonic()
        stopping = self._is_stopping(now)
        for sequence_id, visit in trip.items():
            if visit.open and (stopping or now >= visit.client.deadline):
                self._deliver(trip, self._engine.finish(sequence_id, "cancelled" if stopping else "timeout"))
        return [sequence_id for sequence_id, visit in trip.items() if visit.open]

    def _cancel(self, sequence_id: int, trip: Trip) -> None:
        """Its client is gone: free what it holds. The request is not answered, so it goes back to Triton."""
        if sequence_id in self._clients:
            if sequence_id not in trip:
                self._reclaim(self._clients[sequence_id].correlation_id)
            self._forget(sequence_id, "cancelled")
        if sequence_id in trip:
            trip[sequence_id].open = False

    def _deliver(self, trip: Trip, updates: Sequence[Update]) -> None:
        """Note down what a step did, send what clients want by now, end what is finished.

        Several choices of a sequence may get their last updates in one step: it is answered after all of them.
        """
        last: dict[int, Update] = {}
        for update in updates:
            earlier = last.get(update.sequence_id)
            if update.sequence_id not in self._engine and (earlier is None or earlier.error is None):
                last[update.sequence_id] = update
        for update in updates:
            self._take(update, trip.get(update.sequence_id), sends=update.sequence_id not in last)
        for sequence_id, update in last.items():
            if sequence_id in trip:
                self._end(trip[sequence_id], update)
            else:
                self._clients[sequence_id].last = update

    def _take(self, update: Update, visit: Visit | None, sends: bool) -> None:
        """Note down what a step did for a choice; send what the client wants of it by now, if it ``sends``.

        Without a visit it is kept: only the request's own trip can send.
        """
        client = self._clients[update.sequence_id]
        pending = client.pending.setdefault(update.choice, Pending(update.choice))
        pending.take(update)
        self._books.generated(client, len(update.tokens))
        if visit is not None:
            self._books.delivered(client)
            if sends:
                self._responses.due(visit, pending)

    def _catch_up(self, trip: Trip) -> None:
        """Send what was kept for sequences while they were absent; answer those that ended meanwhile."""
        for visit in trip.values():
            if not visit.open:
                continue
            client = visit.client
            due = client.pending.values() if client.num_kept else ()
            self._books.delivered(client)
            if client.last is not None:
                self._end(visit, client.last)
                continue
            for pending in due:
                self._responses.due(visit, pending)

    def _end(self, visit: Visit, update: Update) -> None:
        """Answer a sequence that has got its last update."""
        sequence_id = update.sequence_id
        visit.open = False
        if visit.carrier.is_cancelled():
            self._forget(sequence_id, "cancelled")
        elif update.error is not None:
            self._forget(sequence_id, "failed")
            self._refuse(visit, RequestError(f"sequence {sequence_id}: {update.error}", "INTERNAL"))
        elif update.finish_reason in _NOTHING_TO_SEND and visit.client.num_output_tokens == 0:
            self._forget(sequence_id, update.finish_reason)
            self._refuse(visit, RequestError(_NOTHING_TO_SEND[update.finish_reason], "UNAVAILABLE"))
        else:
            self._forget(sequence_id, str(update.finish_reason))
            self._responses.rest(visit)

    def _bound_queue(self, trip: Trip) -> None:
        """Refuse new sequences that no step had room for, where more wait already than the config allows."""
        most = self._settings.max_queue_size
        if not most or not any(visit.open and visit.carrier.starts for visit in trip.values()):
            return
        for sequence_id in self._engine.waiting()[most:]:
            visit = trip.get(sequence_id)
            if visit is not None and visit.open and visit.carrier.starts:
                self._forget(sequence_id, "refused")
                text = f"{most} sequences wait already (max_queue_size in config.pbtxt); try again later"
                self._refuse(visit, RequestError(text, "UNAVAILABLE"))

    def _refuse_stuck(self, trip: Trip) -> None:
        """Nothing could run: who cannot come back for another trip has to be told."""
        for sequence_id, visit in trip.items():
            if visit.open and visit.carrier.ends:
                self._forget(sequence_id, "failed")
                error = RequestError(
                    "the KV-state store is full, and a request with sequence_end cannot wait for another trip; "
                    "leave sequence_end out",
                    "UNAVAILABLE",
                )
                self._refuse(visit, error)

    def _fail_all(self, trip: Trip, error: Exception) -> None:
        """Something of ours broke: nobody hangs, nothing leaks. Who is absent may have been in the step."""
        for sequence_id, visit in trip.items():
            if not visit.answered:
                self._forget(sequence_id, "failed")
                self._refuse(visit, _internal(error))
        for sequence_id, client in self._absent(trip).items():
            if client.last is None:
                self._engine.drop(sequence_id)
                client.last = Update(sequence_id, finish_reason="error", error=str(_internal(error)))

    def _refuse(self, visit: Visit, error: RequestError) -> None:
        """End a visit with an error."""
        visit.open, visit.answered = False, True
        visit.carrier.refuse(error)

    # -- the end of sequences -----------------------------------------------------------------------------

    def _forget(self, sequence_id: int, outcome: str) -> None:
        """Drop everything known of a sequence, and note how it ended."""
        self._engine.drop(sequence_id)
        client = self._clients.pop(sequence_id, None)
        self._forget_string_id(sequence_id)
        self._watcher.release(sequence_id)
        if client is not None:
            self._books.ended(sequence_id, client, outcome)

    def _forget_string_id(self, sequence_id: int) -> None:
        """Once its sequence has ended, a string ID may begin another one."""
        if sequence_id >= _FIRST_OWN_ID and sequence_id not in self._clients:
            self._string_ids = {text: own for text, own in self._string_ids.items() if own != sequence_id}

    def _reap(self, cancelled: list[int]) -> None:
        """The watcher found clients gone: free what their sequences hold, now or within the trip that runs.

        It never waits for a trip, which may be long, since it has others to watch; it will find them again.
        """
        self._gone.update(cancelled)
        if self._lock.acquire(blocking=False):
            try:
                self._going_on({})
            finally:
                self._lock.release()

    def _report(self) -> None:
        """Bring the metrics endpoint up to date, and see whether the server is about to stop."""
        self._stop.look()
        self._level_wanted = True
        if self._lock.acquire(blocking=False):
            try:
                self._level()
            finally:
                self._lock.release()
        self._metrics.flush()
        if self._engine.tracer is not None:
            self._engine.tracer.flush()


def _internal(error: Exception) -> RequestError:
    return RequestError(f"{type(error).__name__}: {error}", "INTERNAL")


def _collision(correlation_id: int | str) -> RequestError:
    return RequestError(
        f"sequence ID {correlation_id} got a second request while it was live, so both end: a generation is one "
        "request, which Triton steps by itself; leave the ID out (Triton then gives one), or take an unused one of "
        "2^32 or above",
        "ALREADY_EXISTS",
    )


def _time_allowed(
    request: GenerationRequest, parameters: Mapping[str, Any], timeout_microseconds: int
) -> float:
    """Seconds a sequence may take: the smaller of max_time and the request's own timeout in microseconds.

    Triton's HTTP generate endpoint passes ``timeout`` on as a parameter, its other ones as a property.
    """
    stated = parameters.get("timeout", 0)
    timeout = timeout_microseconds or (stated if isinstance(stated, int) else 0)
    return min(request.max_time, timeout / 1e6) if timeout > 0 else request.max_time
