"""A light gRPC client for Triton: all requests on one stream, messages kept as bytes until the round is over."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2

from triton_inflight.bench_sse import Event, StreamError

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"


def stream_all(
    url: str, model: str, requests: Sequence[Mapping[str, Any]], timeout: float = 600
) -> tuple[list[float], list[list[Event]]]:
    """Send all requests at once on one stream, as a gateway in front of many users does.

    Args:
        url: host:port of the gRPC endpoint.
        requests: request parameters of each; ``text_input`` is sent empty.

    Returns:
        When each was sent, in seconds since the first; and the responses of each, with the text they bring.

    Raises:
        StreamError: the server sent an error.
    """
    messages = [
        infer_message(model, str(number), fields).SerializeToString()
        for number, fields in enumerate(requests)
    ]
    with grpc.insecure_channel(url) as channel:
        grpc.channel_ready_future(channel).result(timeout=timeout)
        # Without serializers, bytes go in and come out.
        call = channel.stream_stream(METHOD)
        start = time.perf_counter()
        try:
            received = [(time.perf_counter() - start, data) for data in call(iter(messages), timeout=timeout)]
        except grpc.RpcError as error:
            raise StreamError(f"{url}: {error}") from error
    events: list[list[Event]] = [[] for _ in messages]
    for moment, data in received:
        message = service_pb2.ModelStreamInferResponse.FromString(data)
        if message.error_message:
            raise StreamError(f"{url}: {message.error_message}")
        response = message.infer_response
        events[int(response.id)].append(Event(moment, b"".join(response.raw_output_contents)))
    return [0.0] * len(messages), events


def infer_message(
    model: str, request_id: str, fields: Mapping[str, Any], text: str = "", batched: bool = True
) -> Any:
    """A request of the inference protocol: ``text_input`` and request parameters.

    Args:
        batched: the model has a batch dimension (max_batch_size above 0).
    """
    message = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    tensor = message.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1] if batched else [1])
    tensor.contents.bytes_contents.append(text.encode())
    for name, value in fields.items():
        parameter = message.parameters[name]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int):
            parameter.int64_param = value
        else:
            parameter.string_param = str(value)
    return message
