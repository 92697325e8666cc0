"""A client: several prompts at once over gRPC, and their answers while they grow."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from triton_inflight.errors import InflightError


class ClientError(InflightError):
    """The server cannot be reached, or does not serve the model."""


@dataclass
class Answer:
    """What came back for one prompt.

    Attributes:
        prompt: what was sent.
        text: what came back so far.
        finish_reason: why it ended; None while it has not.
        error: the server's error, if that is how it ended.
        num_input_tokens, num_output_tokens: as counted by the server.
        sent: when it was sent, in seconds since the first prompt.
        first_token, last_token: when the first and the last response arrived, in seconds since it was sent.
    """

    prompt: str
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    sent: float = 0.0
    first_token: float | None = None
    last_token: float | None = None

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None or self.error is not None


@dataclass
class GenerationStream:
    """Sends prompts to a model and follows their answers.

    Args:
        url: host:port of the server's gRPC endpoint.
        model: the model's name.
        parameters: request parameters that go with every prompt.

    Raises:
        ClientError: the server is not there, or the model is not ready.
    """

    url: str
    model: str
    parameters: dict[str, str | int | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._client = grpcclient.InferenceServerClient(self.url)
        try:
            ready = self._client.is_model_ready(self.model)
        except InferenceServerException as error:
            raise ClientError(
                f"no Triton answers at {self.url} ({error.message()}); start one with `triton-inflight serve`, "
                "or name another gRPC endpoint with --url"
            ) from error
        if not ready:
            raise ClientError(
                f"model '{self.model}' is not ready at {self.url}; name with --model what is served there: "
                f"{', '.join(self._served()) or 'nothing'}"
            )

    def run(self, prompts: Sequence[str], interval: float = 0.0) -> Iterator[list[Answer]]:
        """Send prompts, ``interval`` seconds apart; yields all answers when one has grown, until all are done."""
        answers = [Answer(prompt) for prompt in prompts]
        results: queue.Queue[tuple[Answer, Any, Any]] = queue.Queue()
        started = time.perf_counter()
        # A stream for each prompt: an error that arrives on a shared one does not say whose it is.
        clients = [grpcclient.InferenceServerClient(self.url) for _ in prompts]
        try:
            waiting = list(zip(clients, answers, strict=True))
            while not all(answer.done for answer in answers):
                now = time.perf_counter() - started
                while waiting and now >= interval * (len(answers) - len(waiting)):
                    client, answer = waiting.pop(0)
                    answer.sent = now
                    self._send(client, answer, results)
                try:
                    answer, result, error = results.get(
                        timeout=max(interval / 10, 0.001) if waiting else None
                    )
                except queue.Empty:
                    continue
                self._take(answer, result, error, time.perf_counter() - started - answer.sent)
                yield answers
        finally:
            for client, answer in zip(clients, answers, strict=True):
                client.stop_stream(cancel_requests=not answer.done)

    def model_parameters(self) -> dict[str, str]:
        """The parameters of the model's config.pbtxt, as the server has them."""
        config = self._client.get_model_config(self.model, as_json=True)["config"]
        return {key: value["string_value"] for key, value in config.get("parameters", {}).items()}

    def _served(self) -> list[str]:
        index = self._client.get_model_repository_index()
        return [model.name for model in index.models if model.state == "READY"]

    def _send(
        self,
        client: grpcclient.InferenceServerClient,
        answer: Answer,
        results: queue.Queue[tuple[Answer, Any, Any]],
    ) -> None:
        client.start_stream(callback=lambda result, error: results.put((answer, result, error)))
        tensor = grpcclient.InferInput("text_input", [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[answer.prompt.encode()]], dtype=object))
        wanted = {
            "stream": True,
            "return_finish_reason": True,
            "return_num_input_tokens": True,
            "return_num_output_tokens": True,
        }
        client.async_stream_infer(self.model, [tensor], parameters={**wanted, **self.parameters})

    @staticmethod
    def _take(answer: Answer, result: Any, error: Any, now: float) -> None:
        """Add a response to its answer."""
        if error is not None:
            answer.error = error.message()
            return
        answer.text += result.as_numpy("text_output").item().decode()
        answer.num_input_tokens = int(result.as_numpy("num_input_tokens").item())
        answer.num_output_tokens += int(result.as_numpy("num_output_tokens").item())
        answer.first_token = now if answer.first_token is None else answer.first_token
        answer.last_token = now
        reason = result.as_numpy("finish_reason")
        if reason is not None:
            answer.finish_reason = reason.item().decode()


def answers_as_json(answers: Sequence[Answer]) -> str:
    """The answers as a JSON list, one object a prompt."""
    return json.dumps([vars(answer) for answer in answers], ensure_ascii=False, indent=2)
