"""The adapter: Triton's requests on one side, the engine on the other.

The only file that knows Triton's Python backend. Each ``execute`` is a trip: Triton's sequence batcher hands
over the requests of new and in-flight sequences, the engine steps them together, and every request goes back
to the batcher (RESCHEDULE) until its sequence is finished (ALL).

This module stays light to import: Triton also loads it in a short-lived process, to complete the config.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton_python_backend_utils as pb_utils

from triton_inflight.errors import InflightError, RequestError
from triton_inflight.pending import Pending, best_of
from triton_inflight.protocol import GenerationRequest, output_tensors, parse_request
from triton_inflight.settings import Settings, auto_complete
from triton_inflight.threads import bound_spinning
from triton_inflight.watcher import Watcher

if TYPE_CHECKING:
    from triton_inflight.generation import Update
    from triton_inflight.metrics import Family, Metric

log = logging.getLogger("triton_inflight")

_FIRST_OWN_ID = 2**63  # engine IDs of sequences whose correlation ID is a string


class _UnarySender:
    """Stands for a response sender where Triton takes one response a request, as the trip's return value."""

    def __init__(self) -> None:
        self.response: Any = None

    def send(self, response: Any, _flags: int = 0) -> None:
        self.response = response

    def is_cancelled(self) -> bool:
        """Unknown between trips: only the request itself can be asked, and only in a trip."""
        return False


@dataclass
class _Client:
    """The client's side of a live sequence.

    Attributes:
        request: what it asked for.
        identity: what tells its request from another one with the same sequence ID.
        num_input_tokens: tokens of its prompt.
        started, first_token, last_token: seconds of the monotonic clock; None and 0 before the first token.
        deadline: when it has to be answered at the latest.
        pending: what is not sent yet, by choice.
        num_output_tokens: generated in all, by all choices.
    """

    request: GenerationRequest
    identity: tuple[str, str]
    num_input_tokens: int
    started: float
    deadline: float
    first_token: float | None = None
    last_token: float = 0.0
    pending: dict[int, Pending] = field(default_factory=dict)
    num_output_tokens: int = 0


@dataclass
class _Visit:
    """A sequence's part of one trip: the request that carries it, and where its responses go.

    Attributes:
        ends: the client set END, so Triton will not take the request back: it is answered in this trip.
        starts: the sequence began in this trip.
        open: the sequence is still to be stepped.
        answered: the final response has been sent; otherwise the request goes back to Triton.
    """

    request: Any
    sender: Any
    client: _Client
    starts: bool
    ends: bool
    open: bool = True
    answered: bool = False


class TritonPythonModel:
    """What Triton's Python backend loads for every model that says ``backend: "inflight"``."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Fill in the inputs, outputs and transaction policy that config.pbtxt leaves out."""
        completion = auto_complete(config.as_dict())
        for tensor in completion.inputs:
            config.add_input(tensor)
        for tensor in completion.outputs:
            config.add_output(tensor)
        config.set_model_transaction_policy({"decoupled": completion.decoupled})
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Read the config, load the model, prove that it can be reproduced, and make the store.

        Raises:
            pb_utils.TritonModelException: with the message of what is wrong and where to set it.
        """
        _log_through_triton()
        try:
            self._load(args)
        except InflightError as error:
            raise pb_utils.TritonModelException(f"model '{args['model_name']}': {error}") from error

    def _load(self, args: dict[str, str]) -> None:
        # The heavy modules (torch, transformers) are imported here, and not for completing the config.
        bound_spinning()
        from triton_inflight.loader import load_engine
        from triton_inflight.metrics import Metrics, labels

        directory = Path(args["model_repository"])
        self._settings, warnings = Settings.from_model_config(json.loads(args["model_config"]), directory)
        for warning in warnings:
            log.warning("%s: %s", args["model_name"], warning)
        if args["model_instance_kind"] == "GPU":
            device = f"cuda:{args['model_instance_device_id']}"
            self._settings = dataclasses.replace(self._settings, device=device)
        common = {"model": args["model_name"], "version": args["model_version"]}
        if self._settings.instances.count > 1:
            common["instance"] = args["model_instance_name"]
        families: dict[str, Any] = {}

        def make_metric(family: Family, label: str | None) -> Metric:
            if family.name not in families:
                kind = getattr(pb_utils.MetricFamily, family.kind.upper())
                families[family.name] = pb_utils.MetricFamily(
                    name=family.name, description=family.help, kind=kind
                )
            buckets = {"buckets": list(family.buckets)} if family.buckets else {}
            metric: Metric = families[family.name].Metric(labels=labels(family, label, common), **buckets)
            return metric

        self._engine, self._defaults = load_engine(self._settings, directory)
        self._warn_once = functools.lru_cache(1024)(log.warning)
        self._metrics = Metrics(make_metric)
        self._clients: dict[int, _Client] = {}
        self._string_ids: dict[str, int] = {}
        self._own_ids = itertools.count(_FIRST_OWN_ID)
        self._collided: set[int] = set()  # IDs started twice, whose older request Triton still has to bring
        self._gone: set[int] = set()  # IDs the watcher found cancelled
        self._lock = threading.Lock()  # a trip, or the watcher between two trips
        period = self._settings.cancellation_check_period_ms / 1000
        self._watcher = Watcher(period, self._reap, self._report)
        self._report()
        self._watcher.start()

    def execute(self, requests: list[Any]) -> list[Any] | None:
        """One trip. Everything sent in it has been sent when it returns.

        Returns:
            Nothing; of a model with ``decoupled: false`` each request's response, None where it goes on.
        """
        with self._lock:
            started = time.perf_counter()
            trip: dict[int, _Visit] = {}
            senders = [self._receive(request, trip) for request in requests]
            try:
                forward_seconds = self._generate(trip)
            except Exception as error:
                log.exception("a trip failed; its %d sequences end with an error", len(trip))
                forward_seconds = 0.0
                self._fail_all(trip, error)
            for visit in trip.values():
                if not visit.answered:
                    visit.request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            self._metrics.observe("inflight_loop_seconds", time.perf_counter() - started - forward_seconds)
        return None if self._settings.decoupled else [sender.response for sender in senders]

    def finalize(self) -> None:
        """Unload: no thread and no response sender stays behind."""
        self._watcher.stop()

    # -- the requests of a trip ---------------------------------------------------------------------------

    def _receive(self, request: Any, trip: dict[int, _Visit]) -> Any:
        """Take a request into the trip, or answer it at once; where its responses go."""
        sender = request.get_response_sender() if self._settings.decoupled else _UnarySender()
        if self._is_padding(request):
            return sender
        sequence_id, flags = self._sequence_id(request), request.flags()
        starts = bool(flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
        ends = bool(flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)
        if (starts or sequence_id not in self._clients) and request.is_cancelled():
            # Released with ALL, it would keep its slot in Triton 2.51; the core answers it by itself.
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return sender
        try:
            if starts:
                self._start(sequence_id, request, ends, trip)
            else:
                self._check_goes_on(sequence_id, request, ends, trip)
        except RequestError as error:
            self._forget_string_id(sequence_id)
            self._refuse(sender, error)
        except Exception as error:
            log.exception("sequence %d could not be started", sequence_id)
            self._forget_string_id(sequence_id)
            self._refuse(sender, RequestError(f"{type(error).__name__}: {error}", "INTERNAL"))
        else:
            self._watcher.hold(sequence_id, sender)
            trip[sequence_id] = _Visit(request, sender, self._clients[sequence_id], starts, ends)
        return sender

    def _sequence_id(self, request: Any) -> int:
        """The engine's ID of a request's sequence: Triton's, or one of our own for an ID that is a string."""
        correlation_id: int | str = request.correlation_id()
        if isinstance(correlation_id, int):
            return correlation_id
        return self._string_ids.setdefault(correlation_id, next(self._own_ids))

    def _is_padding(self, request: Any) -> bool:
        """Whether Triton's `direct` strategy made this request up for a slot that has none."""
        if self._settings.ready_control is None:
            return False
        ready = pb_utils.get_input_tensor_by_name(request, self._settings.ready_control)
        return ready is not None and not ready.as_numpy().any()

    def _start(self, sequence_id: int, request: Any, ends: bool, trip: dict[int, _Visit]) -> None:
        """Make a new sequence of a request.

        Raises:
            RequestError: the request cannot be served, or its sequence ID is in use.
        """
        if sequence_id in self._clients:
            self._end_both(sequence_id, trip)
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        parameters = json.loads(request.parameters() or "{}")
        generation = parse_request(tensors, parameters, self._settings, self._defaults, self._warn_once)
        if not self._settings.decoupled and (generation.stream or generation.sends_sequence_index):
            raise RequestError(
                f"{'stream' if generation.stream else 'num_return_sequences'} needs several responses, and this model "
                "gives one (model_transaction_policy.decoupled is false); leave it out, or ask another model"
            )
        bound = self._settings.max_tokens_in_one_trip
        if ends and generation.max_tokens > bound:
            raise RequestError(
                f"max_tokens is {generation.max_tokens}, but a request that sets sequence_start and sequence_end "
                f"together is answered within one trip, in at most {bound} tokens (max_tokens_in_one_trip in "
                "config.pbtxt); leave sequence_end out, since a sequence ends by itself, or lower max_tokens"
            )
        now = time.monotonic()
        num_input_tokens = self._engine.add(sequence_id, generation)
        self._collided.discard(sequence_id)  # an older request that Triton has dropped will not come
        self._clients[sequence_id] = _Client(
            generation,
            _identity(request),
            num_input_tokens,
            started=now,
            deadline=now + _time_allowed(request, parameters, generation),
        )
        self._metrics.count("inflight_prompt_tokens_total", num_input_tokens)

    def _check_goes_on(self, sequence_id: int, request: Any, ends: bool, trip: dict[int, _Visit]) -> None:
        """Whether a request without START is the one that started its sequence, brought back by Triton.

        Raises:
            RequestError: it is not.
        """
        if sequence_id in self._collided:
            self._collided.remove(sequence_id)
            raise _collision(sequence_id)
        if sequence_id not in self._clients:
            raise RequestError(
                f"sequence ID {sequence_id} is not live: its request must set sequence_start; a sequence that "
                "has ended does not go on, each generation is one request"
            )
        if ends or sequence_id in trip or _identity(request) != self._clients[sequence_id].identity:
            self._end_both(sequence_id, trip)

    def _end_both(self, sequence_id: int, trip: dict[int, _Visit]) -> None:
        """A second request on a live ID: Triton mixes the two up from here on, so neither may go on.

        Raises:
            RequestError: always; it is the newer one's. The older ends with it when it comes next.
        """
        self._forget(sequence_id, "failed")
        if (older := trip.get(sequence_id)) is not None:
            self._answer(older, _collision(sequence_id))
        else:
            self._collided.add(sequence_id)
        raise _collision(sequence_id)

    # -- steps and responses ------------------------------------------------------------------------------

    def _generate(self, trip: dict[int, _Visit]) -> float:
        """Step the sequences of a trip; return the seconds of forward passes.

        A trip goes on past ``max_steps_per_execute`` only for requests that Triton will not take back.
        """
        forward_seconds, steps = 0.0, 0
        while going := self._going_on(trip, steps):
            step = self._engine.step(going)
            steps += 1
            forward_seconds += step.forward_seconds
            self._metrics.step(step)
            for update in step.updates:
                self._deliver(trip[update.sequence_id], update)
            self._bound_queue(trip)
            if step.num_sequences == 0:
                self._refuse_stuck(trip)
                break
        return forward_seconds

    def _going_on(self, trip: dict[int, _Visit], steps: int) -> list[int]:
        """The sequences to step next, once those are ended whose client is gone or whose time is up."""
        for sequence_id in list(self._gone):
            self._gone.discard(sequence_id)
            if sequence_id in self._clients:
                self._forget(sequence_id, "cancelled")
            if sequence_id in trip:
                trip[sequence_id].open = False
        now = time.monotonic()
        for sequence_id, visit in trip.items():
            if visit.open and not self._settings.decoupled and visit.request.is_cancelled():
                self._forget(sequence_id, "cancelled")
                visit.open = False
            elif visit.open and now >= visit.client.deadline:
                for update in self._engine.finish(sequence_id, "timeout"):
                    self._deliver(visit, update)
        going = [sequence_id for sequence_id, visit in trip.items() if visit.open]
        if steps >= self._settings.max_steps_per_execute and not any(trip[i].ends for i in going):
            return []
        return going

    def _deliver(self, visit: _Visit, update: Update) -> None:
        """Note down what a step did for a choice, send what the client wants by now, end what is finished."""
        if not visit.open:
            return  # another choice of it failed
        client, request = visit.client, visit.client.request
        self._note_tokens(client, len(update.tokens))
        pending = client.pending.setdefault(update.choice, Pending(update.choice))
        pending.take(update)
        if update.sequence_id not in self._engine:
            self._end(visit, update)
        elif request.best_of == request.n:
            ended = request.response_per_choice and update.finish_reason is not None
            if ended or (request.stream and pending.is_due(request.stream_interval)):
                self._send(visit, [pending])

    def _end(self, visit: _Visit, update: Update) -> None:
        """Answer a sequence that has got its last update."""
        client, sequence_id = visit.client, update.sequence_id
        visit.open = False
        if visit.request.is_cancelled():
            # Not answered, so rescheduled: Triton 2.51 keeps the slot of a cancelled request released with ALL.
            self._forget(sequence_id, "cancelled")
        elif update.error is not None:
            self._forget(sequence_id, "failed")
            self._answer(visit, RequestError(f"sequence {sequence_id}: {update.error}", "INTERNAL"))
        elif update.finish_reason == "timeout" and client.num_output_tokens == 0:
            self._forget(sequence_id, "timeout")
            self._answer(
                visit, RequestError("no token within the time allowed (max_time, timeout)", "UNAVAILABLE")
            )
        else:
            self._log_end(sequence_id, client, str(update.finish_reason))
            self._forget(sequence_id, str(update.finish_reason))
            self._answer(visit, None)

    def _bound_queue(self, trip: dict[int, _Visit]) -> None:
        """Refuse new sequences that no step had room for, where more wait already than the config allows."""
        most = self._settings.max_queue_size
        if not most or not any(visit.open and visit.starts for visit in trip.values()):
            return
        for sequence_id in self._engine.waiting()[most:]:
            visit = trip.get(sequence_id)
            if visit is not None and visit.open and visit.starts:
                self._forget(sequence_id, "refused")
                self._answer(
                    visit,
                    RequestError(
                        f"{most} sequences wait already (max_queue_size in config.pbtxt); try again later",
                        "UNAVAILABLE",
                    ),
                )

    def _refuse_stuck(self, trip: dict[int, _Visit]) -> None:
        """Nothing could run: who cannot come back for another trip has to be told."""
        for sequence_id, visit in trip.items():
            if visit.open and visit.ends:
                self._forget(sequence_id, "failed")
                error = RequestError(
                    "the KV-state store is full, and a request with sequence_end cannot wait for another trip; "
                    "leave sequence_end out",
                    "UNAVAILABLE",
                )
                self._answer(visit, error)

    def _fail_all(self, trip: dict[int, _Visit], error: Exception) -> None:
        """Something of ours broke: nobody hangs, nothing leaks."""
        for sequence_id, visit in trip.items():
            if not visit.answered:
                self._forget(sequence_id, "failed")
                self._answer(visit, RequestError(f"{type(error).__name__}: {error}", "INTERNAL"))

    def _answer(self, visit: _Visit, error: RequestError | None) -> None:
        """The final response of a visit: everything that is not sent yet, or an error."""
        visit.open, visit.answered = False, True
        if error is not None:
            self._refuse(visit.sender, error)
            return
        request = visit.client.request
        waiting = [pending for pending in visit.client.pending.values() if not pending.ended]
        waiting = best_of(waiting, request.n)
        responses = [[pending] for pending in waiting] if request.response_per_choice else [waiting]
        for choices in responses[:-1]:
            self._send(visit, choices)
        self._send(visit, responses[-1], final=True)

    def _send(self, visit: _Visit, choices: list[Pending], final: bool = False) -> None:
        """One response with all that these choices have pending."""
        client = visit.client
        results = [choice.result(client.num_input_tokens, self._decode_token) for choice in choices]
        tensors = output_tensors(results, client.request)
        response = pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, value) for name, value in tensors.items()]
        )
        if final:
            visit.sender.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        else:
            visit.sender.send(response)

    def _decode_token(self, token_id: int) -> str:
        return str(self._engine.tokenizer.decode([token_id]))

    def _refuse(self, sender: Any, error: RequestError) -> None:
        """An error as the final response."""
        triton_error = pb_utils.TritonError(str(error), getattr(pb_utils.TritonError, error.code))
        sender.send(
            pb_utils.InferenceResponse(error=triton_error), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        )

    # -- the books ----------------------------------------------------------------------------------------

    def _note_tokens(self, client: _Client, num_tokens: int) -> None:
        """Count new tokens and how long they took."""
        if not num_tokens:
            return
        now = time.monotonic()
        if client.first_token is None:
            client.first_token = now
            self._metrics.observe("inflight_time_to_first_token_seconds", now - client.started)
        else:
            self._metrics.observe("inflight_inter_token_latency_seconds", now - client.last_token)
        client.last_token = now
        client.num_output_tokens += num_tokens
        self._metrics.count("inflight_generated_tokens_total", num_tokens)

    def _log_end(self, sequence_id: int, client: _Client, finish_reason: str) -> None:
        now = time.monotonic()
        self._metrics.observe("inflight_end_to_end_seconds", now - client.started)
        log.info(
            "sequence %d: %d tokens in, %d out, first after %.3f s, all after %.3f s, %s",
            sequence_id,
            client.num_input_tokens,
            client.num_output_tokens,
            (client.first_token or now) - client.started,
            now - client.started,
            finish_reason,
        )

    def _forget(self, sequence_id: int, outcome: str) -> None:
        """Drop everything known of a sequence, and count how it ended."""
        self._engine.drop(sequence_id)
        self._clients.pop(sequence_id, None)
        self._forget_string_id(sequence_id)
        self._watcher.release(sequence_id)
        self._metrics.count("inflight_sequences_total", label=outcome)

    def _forget_string_id(self, sequence_id: int) -> None:
        """Once its sequence has ended, a string ID may begin another one."""
        if sequence_id >= _FIRST_OWN_ID and sequence_id not in self._clients:
            self._string_ids = {text: own for text, own in self._string_ids.items() if own != sequence_id}

    def _reap(self, cancelled: list[int]) -> None:
        """The watcher found clients gone: free what their sequences hold, now or within the trip that runs."""
        self._gone.update(cancelled)
        with self._lock:
            self._going_on({}, steps=0)

    def _report(self) -> None:
        """Bring the metrics endpoint up to date."""
        with self._lock:
            self._metrics.store(self._engine.store)
            waiting = len(self._engine.waiting())
            self._metrics.gauge("inflight_sequences", len(self._engine) - waiting, "active")
            self._metrics.gauge("inflight_sequences", waiting, "waiting")
        self._metrics.flush()


def _collision(sequence_id: int) -> RequestError:
    return RequestError(
        f"sequence ID {sequence_id} got a second request while it was live, so both end: a generation is one "
        "request, which Triton steps by itself; leave the ID out (Triton then gives one), or take an unused one of "
        "2^32 or above",
        "ALREADY_EXISTS",
    )


def _identity(request: Any) -> tuple[str, str]:
    """What stays with a request on all its trips; cheaper than its tensors."""
    return request.request_id(), request.parameters()


def _time_allowed(request: Any, parameters: dict[str, Any], generation: GenerationRequest) -> float:
    """Seconds a sequence may take: the smaller of max_time and the request's own timeout in microseconds.

    Triton's HTTP generate endpoint passes ``timeout`` on as a parameter, its other ones as a property.
    """
    stated = parameters.get("timeout", 0)
    timeout = request.timeout() or (stated if isinstance(stated, int) else 0)
    return min(generation.max_time, timeout / 1e6) if timeout > 0 else generation.max_time


class _TritonHandler(logging.Handler):
    """Hands log records to Triton's own log."""

    def emit(self, record: logging.LogRecord) -> None:
        write = {
            logging.DEBUG: pb_utils.Logger.log_verbose,
            logging.INFO: pb_utils.Logger.log_info,
            logging.WARNING: pb_utils.Logger.log_warn,
        }.get(record.levelno, pb_utils.Logger.log_error)
        write(self.format(record))


def _log_through_triton() -> None:
    """Send this package's log to Triton, once a process."""
    root = logging.getLogger("triton_inflight")
    if not any(isinstance(handler, _TritonHandler) for handler in root.handlers):
        root.addHandler(_TritonHandler())
        root.setLevel(logging.INFO)
        root.propagate = False
