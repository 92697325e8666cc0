"""The load generator: sends a schedule's requests to a model over one gRPC stream, and notes when what came back.

gRPC is the one protocol of Triton's that carries all four schedulers: HTTP's generate has no sequence IDs. So all are
measured through the same client. While a round runs it keeps messages as bytes, but for what it has to know: whose a
response is, and whether it is the last.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2

from triton_inflight.bench_grpc import METHOD, infer_message
from triton_inflight.bench_sse import StreamError
from triton_inflight.compare_loads import Schedule
from triton_inflight.compare_requests import Request
from triton_inflight.triton_config import Scheduler

_FIRST_SEQUENCE_ID = 2**32  # below it, Triton may give IDs to others
_FINAL = "triton_final_response"
_LENGTH_BYTES = 4  # before each string of a tensor
_ID_BYTES = 4


@dataclass
class Outcome:
    """What became of one request. Moments are seconds since the round began.

    Attributes:
        scheduled: when it was to be sent; what its latencies count from, so that a client that is late, or a server
            that makes it wait, does not make them look better.
        sent: when it was.
        arrivals: when its responses came, in order.
        ids: the token ids that each of them brought, as bytes of 32-bit integers.
        texts: the text that each of them brought, in UTF-8. A character may be complete only with a later token.
    """

    request: Request
    scheduled: float
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    ids: list[bytes] = field(default_factory=list)
    texts: list[bytes] = field(default_factory=list)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Its output as token ids."""
        return np.frombuffer(b"".join(self.ids), np.int32)

    @property
    def counts(self) -> list[int]:
        """How many tokens each of its responses brought."""
        return [len(ids) // _ID_BYTES for ids in self.ids]

    @property
    def text(self) -> str:
        """Its output."""
        return b"".join(self.texts).decode(errors="replace")

    @property
    def ttft(self) -> float:
        """Time to its first token, in seconds."""
        return self.arrivals[0] - self.scheduled

    @property
    def e2e(self) -> float:
        """Time to its last token, in seconds."""
        return self.arrivals[-1] - self.scheduled

    @property
    def mean_itl(self) -> float:
        """Seconds between two of its tokens, on average; 0 where it has only one."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, self.request.output_tokens - 1)


class LoadClient:
    """Sends rounds to one model.

    Args:
        url: host:port of the server's gRPC endpoint.
        model: the model's name.
        scheduler: what the model's config asks for. Under ``sequence``, the client asks for every token.
    """

    def __init__(self, url: str, model: str, scheduler: Scheduler) -> None:
        self.url = url
        self.model = model
        self.scheduler = scheduler

    def run(self, schedule: Schedule, timeout: float = 600) -> tuple[float, list[Outcome]]:
        """Send a round and follow it to the end of its last sequence.

        Args:
            timeout: seconds for all of it.

        Returns:
            When it began, by ``time.monotonic()``; and what became of the requests, in the order of the schedule.

        Raises:
            StreamError: the server sent an error, a stream broke off, the time is over, or a sequence got more or
                fewer tokens than it asked for.
        """
        if not schedule.timed:
            return time.monotonic(), []
        traffic = _Driven(self) if self.scheduler == "sequence" else _Streamed(self)
        with grpc.insecure_channel(self.url) as channel:
            try:
                grpc.channel_ready_future(channel).result(timeout=timeout)
                call = channel.stream_stream(METHOD)  # without serializers, bytes go in and come out
                start, outcomes = traffic.follow(schedule, call, timeout)
            except grpc.FutureTimeoutError as error:
                raise StreamError(
                    f"{self.model} at {self.url}: cannot be reached in {timeout:g} s"
                ) from error
            except grpc.RpcError as error:
                reason = error.details() if isinstance(error, grpc.Call) else error
                raise StreamError(f"{self.model} at {self.url}: {reason}") from error
        _check_lengths(self.model, outcomes)
        return start, outcomes

    def message(self, number: int, request: Request) -> Any:
        """The request as a protobuf message."""
        batched = self.scheduler != "decoupled"
        return infer_message(self.model, str(number), request.parameters(), request.text, batched)


class _Streamed:
    """One request a sequence; the server sends tokens as they come."""

    def __init__(self, client: LoadClient) -> None:
        self._client = client
        self._outcomes: list[Outcome] = []
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._timed: deque[tuple[int, bytes]] = deque()
        self._open = 0
        self._start = 0.0

    def follow(self, schedule: Schedule, call: Any, timeout: float) -> tuple[float, list[Outcome]]:
        for moment, request in schedule.timed:
            number = self._admit(request, moment)
            self._timed.append((number, self._first_message(number, request)))
        self._start = time.monotonic()
        for data in call(self._messages(), timeout=timeout):
            now = time.monotonic() - self._start
            reply = service_pb2.ModelStreamInferResponse.FromString(data)
            if reply.error_message:
                raise StreamError(f"{self._client.model} at {self._client.url}: {reply.error_message}")
            response = reply.infer_response
            if self._take(int(response.id), response, now):
                self._ended(schedule, now)
        if self._open:
            raise StreamError(
                f"{self._client.model}: {self._open} sequences had not ended when the stream did"
            )
        return self._start, self._outcomes

    def _admit(self, request: Request, scheduled: float) -> int:
        self._outcomes.append(Outcome(request, scheduled))
        self._open += 1
        return len(self._outcomes) - 1

    def _messages(self) -> Iterator[bytes]:
        """What to send, when it is to be sent; gRPC takes it from a thread of its own."""
        while True:
            timeout = None
            if self._timed:
                outcome = self._outcomes[self._timed[0][0]]
                timeout = outcome.scheduled - (time.monotonic() - self._start)
                if timeout <= 0:
                    outcome.sent = time.monotonic() - self._start
                    yield self._timed.popleft()[1]
                    continue
            try:
                message = self._outbox.get(timeout=timeout)
            except queue.Empty:
                continue
            if message is None:
                return
            yield message

    def _ended(self, schedule: Schedule, now: float) -> None:
        """A sequence has ended: another one follows, or the stream ends with the last."""
        self._open -= 1
        following = (
            None if schedule.window is None or now >= schedule.window else next(schedule.following, None)
        )
        if following is not None:
            number = self._admit(following, now)
            message = self._first_message(number, following)
            self._outcomes[number].sent = time.monotonic() - self._start
            self._outbox.put(message)
        elif not self._open:
            self._outbox.put(None)

    def _first_message(self, number: int, request: Request) -> bytes:
        message = self._client.message(number, request)
        message.parameters["stream"].bool_param = True
        return bytes(message.SerializeToString())

    def _take(self, number: int, response: Any, now: float) -> bool:
        """Note a response down; whether it is the last of its sequence."""
        self._note(number, response, now)
        return bool(response.parameters[_FINAL].bool_param)

    def _note(self, number: int, response: Any, now: float) -> None:
        outcome = self._outcomes[number]
        outcome.arrivals.append(now)
        for output, content in zip(response.outputs, response.raw_output_contents, strict=True):
            if output.name == "text_output":
                outcome.texts.append(content[_LENGTH_BYTES:])
            elif output.name == "output_ids":
                outcome.ids.append(content)


class _Driven(_Streamed):
    """A request for each token: START with the prompt, then one after another, and END when it has all of them."""

    def __init__(self, client: LoadClient) -> None:
        super().__init__(client)
        self._next_messages: dict[int, bytes] = {}  # of each sequence, always the same one

    def _first_message(self, number: int, request: Request) -> bytes:
        self._next_messages[number] = self._sequence_message(
            number, infer_message(self._client.model, str(number), {})
        )
        return self._sequence_message(number, self._client.message(number, request), "sequence_start")

    def _take(self, number: int, response: Any, now: float) -> bool:
        outcome = self._outcomes[number]
        if len(outcome.arrivals) == outcome.request.output_tokens:
            return True  # the answer to END
        self._note(number, response, now)
        if len(outcome.arrivals) < outcome.request.output_tokens:
            self._outbox.put(self._next_messages[number])
        else:
            end = infer_message(self._client.model, str(number), {})
            self._outbox.put(self._sequence_message(number, end, "sequence_end"))
        return False

    @staticmethod
    def _sequence_message(number: int, message: Any, flag: str = "") -> bytes:
        message.parameters["sequence_id"].int64_param = _FIRST_SEQUENCE_ID + number
        if flag:
            message.parameters[flag].bool_param = True
        return bytes(message.SerializeToString())


def _check_lengths(model: str, outcomes: Sequence[Outcome]) -> None:
    """Whether every sequence was as long as asked.

    Raises:
        StreamError: one was not.
    """
    for number, outcome in enumerate(outcomes):
        got, asked = sum(outcome.counts), outcome.request.output_tokens
        if got != asked:
            raise StreamError(f"{model}: request {number} got {got} tokens where {asked} were asked for")
