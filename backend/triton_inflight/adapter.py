"""The adapter: Triton's Python backend on one side, the life of sequences on the other.

The only file that knows Triton's Python backend. Each ``execute`` is a trip: Triton's sequence batcher hands
over the requests of new and in-flight sequences, they are stepped together, and every request goes back to
the batcher (RESCHEDULE) until its sequence is finished (ALL).

This module stays light to import: Triton also loads it in a short-lived process, to complete the config.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import triton_python_backend_utils as pb_utils

from triton_inflight.errors import InflightError, RequestError
from triton_inflight.finals import Finals
from triton_inflight.outbox import Outbox
from triton_inflight.outputs import Tensor
from triton_inflight.settings import Settings, auto_complete
from triton_inflight.slots import RECLAIMING, Slots
from triton_inflight.threads import bound_spinning

if TYPE_CHECKING:
    from triton_inflight.metrics import Family, Metric

log = logging.getLogger("triton_inflight")


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
        # The heavy modules (torch, transformers): neither completing the config nor refusing it waits for them.
        bound_spinning()
        from triton_inflight.loader import load_engine
        from triton_inflight.memory import keep_out_of_collections
        from triton_inflight.metrics import Metrics
        from triton_inflight.schedulers import make_lifecycle
        from triton_inflight.trace import open_tracer

        engine, defaults = load_engine(self._settings, directory)
        engine.tracer = open_tracer(
            self._settings, engine.store, args["model_instance_name"], args["model_version"]
        )
        metrics = Metrics(_MetricMaker(common))
        self._outbox = Outbox()
        instances = self._settings.instances
        iterative = self._settings.scheduler == "iterative"
        self._slots = Slots(
            _StartSender(args["model_name"], int(args["model_version"])),
            sees_all=iterative and instances.count * max(1, len(instances.gpus)) == 1,
        )
        self._finals = Finals(self._slots.reclaim)
        self._holds_back = iterative
        self._lifecycle = make_lifecycle(
            self._settings, engine, defaults, metrics, self._slots.reclaim, self._outbox.flush
        )
        keep_out_of_collections()

    def execute(self, requests: list[Any]) -> None:
        """One trip. Whatever the transaction policy, responses go through response senders."""
        self._finals.trip_begins()
        finals = self._finals if self._holds_back else None
        carriers = [_Carrier(request, self._settings, self._outbox, finals) for request in requests]
        readable = [c for c in carriers if c.is_readable() and not c.is_reclaiming()]
        self._slots.trip_begins(carrier.correlation_id for carrier in carriers)
        self._outbox.flush()
        self._lifecycle.trip(readable)
        self._finals.trip_ended(len(carriers), next_is_near=any(carrier.goes_on for carrier in carriers))

    def is_ready(self) -> bool:
        """Whether to send requests here: what ``v2/models/NAME/ready`` asks, on servers later than March 2026."""
        return self._lifecycle.is_ready()

    def finalize(self) -> None:
        """Unload."""
        self._lifecycle.close()
        self._outbox.close()
        self._finals.close()
        self._slots.close()


class _Carrier:
    """A request on one trip; see ``visits.Carrier``.

    Args:
        outbox: what sends responses.
        finals: what sends final responses later; None sends them at once.
    """

    def __init__(self, request: Any, settings: Settings, outbox: Outbox, finals: Finals | None) -> None:
        self._request = request
        self._ready_control = settings.ready_control
        flags = request.flags()
        in_sequences = settings.scheduler in ("iterative", "sequence")
        self.starts = not in_sequences or bool(flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
        self.ends = in_sequences and bool(flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)
        self.sender = request.get_response_sender()
        self.correlation_id: int | str = 0
        self.identity = ("", "")
        self.goes_on = False
        self._outbox = outbox
        self._finals = None if self.ends else finals  # with END, Triton gives the slot back in any case

    def is_readable(self) -> bool:
        """Take in the text that Triton hands over unchecked; refuse a request whose text cannot be decoded."""
        try:
            self.correlation_id = self._request.correlation_id()
            self.identity = (self._request.request_id(), self._request.parameters())
        except UnicodeDecodeError as error:
            around = error.object[max(0, error.start - 60) : error.start + 20]
            self.refuse(
                RequestError(
                    "a request parameter, the request's ID or its sequence ID is not valid UTF-8: byte "
                    f"{error.object[error.start]:#04x} in {around!r}; send UTF-8"
                )
            )
            return False
        if self.correlation_id == 0 and not self.starts:
            # Triton's model_warmup passes by its batcher: without START or an ID, and it is not brought back.
            self.starts = self.ends = True
            self._finals = None
        return True

    def is_reclaiming(self) -> bool:
        """Whether it is of our own, to get a slot back; then it is answered at once."""
        if self.identity[0] != RECLAIMING:
            return False
        self._finals = None
        self.refuse(RequestError(RECLAIMING))
        return True

    def is_padding(self) -> bool:
        if self._ready_control is None:
            return False
        ready = pb_utils.get_input_tensor_by_name(self._request, self._ready_control)
        return ready is not None and not ready.as_numpy().any()

    def tensors(self) -> dict[str, Any]:
        return {tensor.name(): tensor.as_numpy() for tensor in self._request.inputs()}

    def parameters(self) -> dict[str, Any]:
        parameters: dict[str, Any] = json.loads(self._request.parameters() or "{}")
        return parameters

    def timeout_microseconds(self) -> int:
        return int(self._request.timeout())

    def is_cancelled(self) -> bool:
        return bool(self._request.is_cancelled())

    def send(self, tensors: Mapping[str, Tensor], final: bool) -> None:
        if final:
            self._send_final(functools.partial(_response, tensors))
        else:
            self._outbox.post(id(self), lambda: self.sender.send(_response(tensors), 0))

    def refuse(self, error: RequestError) -> None:
        triton_error = pb_utils.TritonError(str(error), getattr(pb_utils.TritonError, error.code))
        self._send_final(lambda: pb_utils.InferenceResponse(error=triton_error))

    def _send_final(self, make_response: Callable[[], Any]) -> None:
        sender, flag = self.sender, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        final = lambda: sender.send(make_response(), flag)  # noqa: E731
        if self._finals is None:
            self._outbox.post(id(self), final)
        else:
            self._finals.hold_back(self.correlation_id, self.sender, final)

    def reschedule(self) -> None:
        self.goes_on = True
        self._request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)


def _response(tensors: Mapping[str, Tensor]) -> Any:
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in tensors.items()])


class _StartSender:
    """Sends a model a request of our own; see ``slots.Slots``."""

    def __init__(self, model_name: str, model_version: int) -> None:
        self._name = model_name
        self._version = model_version

    def __call__(self, correlation_id: int | str, timeout_microseconds: int) -> bool:
        request = pb_utils.InferenceRequest(
            model_name=self._name,
            model_version=self._version,
            request_id=RECLAIMING,
            inputs=[pb_utils.Tensor("text_input", np.array([[b""]], dtype=np.object_))],
            requested_output_names=["text_output"],
            correlation_id=correlation_id,
            flags=pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
            timeout=timeout_microseconds,
        )
        errors = [
            response.error().message() for response in request.exec(decoupled=True) if response.has_error()
        ]
        log.debug("sequence %s, started to get its slot back: %s", correlation_id, errors)
        return any(RECLAIMING in error for error in errors)


class _MetricMaker:
    """Makes Triton's metrics.

    Args:
        common: labels of all of them.
    """

    def __init__(self, common: Mapping[str, str]) -> None:
        self._common = common

    def __call__(self, family: Family, label: str | None) -> Metric:
        own = {} if family.label is None else {family.label: str(label)}
        buckets = {"buckets": list(family.buckets)} if family.buckets else {}
        metric: Metric = self._family(family).Metric(labels={**self._common, **own}, **buckets)
        return metric

    @functools.cache  # noqa: B019 - lives as long as the model
    def _family(self, family: Family) -> Any:
        kind = getattr(pb_utils.MetricFamily, family.kind.upper())
        return pb_utils.MetricFamily(name=family.name, description=family.help, kind=kind)


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
