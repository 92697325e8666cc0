"""The adapter: Triton's requests on one side, the engine on the other.

The only file that knows Triton's Python backend. Each ``execute`` is a trip: Triton's sequence batcher hands
over the requests of new and in-flight sequences, the engine steps them together, and every request goes back
to the batcher (RESCHEDULE) until its sequence is finished (ALL).

This module stays light to import: Triton also loads it in a short-lived process, to complete the config.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton_python_backend_utils as pb_utils

from triton_inflight.errors import InflightError, RequestError
from triton_inflight.protocol import GenerationRequest, Result, output_tensors, parse_request
from triton_inflight.settings import Settings, auto_complete
from triton_inflight.threads import bound_spinning
from triton_inflight.watcher import Watcher

if TYPE_CHECKING:
    from triton_inflight.engine import Update
    from triton_inflight.metrics import Family, Metric

log = logging.getLogger("triton_inflight")


@dataclass
class _Client:
    """The client's side of a live sequence.

    Attributes:
        request: what it asked for.
        num_input_tokens: tokens of its prompt.
        started, last_token: seconds of the monotonic clock; ``last_token`` is None before the first.
        deadline: when it has to be answered at the latest.
        text, num_tokens: generated but not sent yet.
        num_output_tokens: generated in all.
    """

    request: GenerationRequest
    num_input_tokens: int
    started: float
    deadline: float
    last_token: float | None = None
    text: str = ""
    num_tokens: int = 0
    num_output_tokens: int = 0


@dataclass
class _Visit:
    """A sequence's part of one trip: the request that carries it, and where its responses go."""

    request: Any
    sender: Any
    client: _Client
    ends: bool  # the client set END: Triton will not take the request back
    released: bool = False


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

        self._engine = load_engine(self._settings, directory)
        self._metrics = Metrics(make_metric)
        self._clients: dict[int, _Client] = {}
        self._lock = threading.Lock()  # a trip, or the watcher between two trips
        period = self._settings.cancellation_check_period_ms / 1000
        self._watcher = Watcher(period, self._reap, self._report)
        self._report()
        self._watcher.start()

    def execute(self, requests: list[Any]) -> None:
        """One trip. Everything sent in it has been sent when it returns."""
        with self._lock:
            started = time.perf_counter()
            trip: dict[int, _Visit] = {}
            for request in requests:
                self._receive(request, trip)
            forward_seconds = self._generate(trip)
            for visit in trip.values():
                if not visit.released:
                    visit.request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            self._metrics.observe("inflight_loop_seconds", time.perf_counter() - started - forward_seconds)

    def finalize(self) -> None:
        """Unload: no thread and no response sender stays behind."""
        self._watcher.stop()

    # -- the requests of a trip ---------------------------------------------------------------------------

    def _receive(self, request: Any, trip: dict[int, _Visit]) -> None:
        """Take a request into the trip, or answer it at once."""
        if self._is_padding(request):
            return
        sequence_id = request.correlation_id()
        flags = request.flags()
        starts = bool(flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
        ends = bool(flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)
        sender = request.get_response_sender()
        if (starts or sequence_id not in self._clients) and request.is_cancelled():
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return
        try:
            if starts:
                self._start(sequence_id, request)
            elif sequence_id not in self._clients:
                raise RequestError(
                    f"sequence ID {sequence_id} is not live: its first request must set sequence_start, and a "
                    "sequence that has ended, or that was started twice, does not go on"
                )
        except RequestError as error:
            self._refuse(sender, error)
            return
        self._watcher.hold(sequence_id, sender)
        trip[sequence_id] = _Visit(request, sender, self._clients[sequence_id], ends)

    def _is_padding(self, request: Any) -> bool:
        """Whether Triton's `direct` strategy made this request up for a slot that has none."""
        if self._settings.ready_control is None:
            return False
        ready = pb_utils.get_input_tensor_by_name(request, self._settings.ready_control)
        return ready is not None and not ready.as_numpy().any()

    def _start(self, sequence_id: int, request: Any) -> None:
        """Make a new sequence of a request.

        Raises:
            RequestError: the request cannot be served, or its sequence ID is in use.
        """
        if sequence_id in self._clients:
            # Triton mixes the two up from here on, so neither may go on: the older ends when it comes next.
            self._forget(sequence_id)
            self._metrics.count("inflight_sequences_total", label="failed")
            raise RequestError(
                f"sequence ID {sequence_id} is live already; both of its generations end. Leave the ID out "
                "(Triton then gives one), or take an unused one of 2^32 or above",
                "ALREADY_EXISTS",
            )
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        generation = parse_request(tensors, json.loads(request.parameters() or "{}"), self._settings)
        now = time.monotonic()
        num_input_tokens = self._engine.add(sequence_id, generation)
        self._clients[sequence_id] = _Client(
            generation, num_input_tokens, started=now, deadline=now + self._settings.max_time
        )
        self._metrics.count("inflight_prompt_tokens_total", num_input_tokens)

    # -- steps and responses ------------------------------------------------------------------------------

    def _generate(self, trip: dict[int, _Visit]) -> float:
        """Step the sequences of a trip; return the seconds of forward passes.

        A trip goes on past ``max_steps_per_execute`` only for requests that Triton will not take back.
        """
        forward_seconds, steps = 0.0, 0
        while unfinished := [sequence_id for sequence_id, visit in trip.items() if not visit.released]:
            if steps >= self._settings.max_steps_per_execute and not any(trip[i].ends for i in unfinished):
                break
            step = self._engine.step(unfinished)
            steps += 1
            forward_seconds += step.forward_seconds
            self._metrics.step(step)
            for update in step.updates:
                # A preempted neighbour outside of the trip has no update; these are all in it.
                self._deliver(update.sequence_id, trip[update.sequence_id], update)
        return forward_seconds

    def _deliver(self, sequence_id: int, visit: _Visit, update: Update) -> None:
        """Send what the client wants to have by now, and end what is finished."""
        client = visit.client
        self._note_tokens(client, len(update.tokens))
        client.text += update.text
        client.num_tokens += len(update.tokens)
        if update.finish_reason is None:
            if client.request.stream and client.text:
                visit.sender.send(self._response(client, None))
            return
        self._forget(sequence_id)
        if visit.request.is_cancelled():
            self._metrics.count("inflight_sequences_total", label="cancelled")
            return  # rescheduled, not released: Triton 2.51 keeps the slot of a cancelled request it ends itself
        if update.error is not None:
            self._refuse(visit.sender, RequestError(f"sequence {sequence_id}: {update.error}", "INTERNAL"))
        else:
            visit.sender.send(
                self._response(client, update.finish_reason), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            )
            self._metrics.count("inflight_sequences_total", label=update.finish_reason)
            self._metrics.observe("inflight_end_to_end_seconds", time.monotonic() - client.started)
            log.info(
                "sequence %d: %d tokens in, %d out, %s",
                sequence_id, client.num_input_tokens, client.num_output_tokens, update.finish_reason,
            )  # fmt: skip
        visit.released = True

    def _note_tokens(self, client: _Client, num_tokens: int) -> None:
        """Count new tokens and how long they took."""
        if not num_tokens:
            return
        now = time.monotonic()
        if client.last_token is None:
            self._metrics.observe("inflight_time_to_first_token_seconds", now - client.started)
        else:
            self._metrics.observe("inflight_inter_token_latency_seconds", now - client.last_token)
        client.last_token = now
        client.num_output_tokens += num_tokens
        self._metrics.count("inflight_generated_tokens_total", num_tokens)

    def _response(self, client: _Client, finish_reason: str | None) -> Any:
        """A response with everything generated but not sent yet."""
        result = Result(client.text, finish_reason, client.num_input_tokens, client.num_tokens)
        client.text, client.num_tokens = "", 0
        tensors = output_tensors(result, client.request)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in tensors.items()])

    def _refuse(self, sender: Any, error: RequestError) -> None:
        """End a request with an error of its own."""
        triton_error = pb_utils.TritonError(str(error), getattr(pb_utils.TritonError, error.code))
        sender.send(
            pb_utils.InferenceResponse(error=triton_error), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        )

    # -- the end of sequences -----------------------------------------------------------------------------

    def _forget(self, sequence_id: int) -> None:
        """Drop everything known of a sequence."""
        self._engine.drop(sequence_id)
        self._clients.pop(sequence_id, None)
        self._watcher.release(sequence_id)

    def _reap(self, cancelled: list[int]) -> None:
        """The watcher found clients gone: free what their sequences hold."""
        with self._lock:
            for sequence_id in cancelled:
                if sequence_id in self._clients:
                    self._forget(sequence_id)
                    self._metrics.count("inflight_sequences_total", label="cancelled")
                    log.info("sequence %d: cancelled by its client", sequence_id)

    def _report(self) -> None:
        """Bring the metrics endpoint up to date."""
        with self._lock:
            self._metrics.store(self._engine.store)
            active = self._engine.num_active
            self._metrics.gauge("inflight_sequences", active, "active")
            self._metrics.gauge("inflight_sequences", len(self._engine) - active, "waiting")
        self._metrics.flush()


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
