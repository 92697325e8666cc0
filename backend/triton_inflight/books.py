"""The books: what happened to sequences, as metrics and one line of log each."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from triton_inflight.engine import Engine
from triton_inflight.generation import Update
from triton_inflight.metrics import Metrics
from triton_inflight.pending import Pending
from triton_inflight.protocol import GenerationRequest

log = logging.getLogger(__name__)


@dataclass
class Client:
    """The client's side of a live sequence.

    Attributes:
        request: what it asked for.
        correlation_id: Triton's ID of its sequence.
        identity: what tells its request from another one with the same sequence ID.
        num_input_tokens: tokens of its prompt.
        started, first_token, last_token: seconds of the monotonic clock; None and 0 before the first token.
        deadline: when it has to be answered at the latest, by the same clock.
        last_request: when its client last asked for a token, where clients do.
        pending: what is not sent yet, by choice.
        num_output_tokens: generated in all, by all choices.
        num_kept: those of them that were generated since its request was last on a trip.
        last: what ended its sequence while its request was on no trip, which has to be told it.
    """

    request: GenerationRequest
    correlation_id: int | str
    identity: tuple[str, str]
    num_input_tokens: int
    started: float
    deadline: float
    last_request: float = 0.0
    first_token: float | None = None
    last_token: float = 0.0
    pending: dict[int, Pending] = field(default_factory=dict)
    num_output_tokens: int = 0
    num_kept: int = 0
    last: Update | None = None


class Books:
    """Keeps the metrics of one model instance."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics

    def started(self, client: Client) -> None:
        """A sequence began."""
        self.metrics.count("inflight_prompt_tokens_total", client.num_input_tokens)

    def generated(self, client: Client, count: int) -> None:
        """A client's sequence got new tokens."""
        client.num_output_tokens += count
        client.num_kept += count
        self.metrics.count("inflight_generated_tokens_total", count)

    def delivered(self, client: Client) -> None:
        """What a client's sequence got can be sent just now; tokens that come together share the time since the
        last one.
        """
        count, client.num_kept = client.num_kept, 0
        if not count:
            return
        now = time.monotonic()
        if client.first_token is None:
            client.first_token = client.last_token = now
            self.metrics.observe("inflight_time_to_first_token_seconds", now - client.started)
            count -= 1
        for _ in range(count):
            self.metrics.observe("inflight_inter_token_latency_seconds", (now - client.last_token) / count)
        client.last_token = now

    def ended(self, sequence_id: int, client: Client, outcome: str) -> None:
        """A sequence ended: ``stop``, ``length``, ``timeout``, ``cancelled``, ``failed``, ``refused``..."""
        self.metrics.count("inflight_sequences_total", label=outcome)
        now = time.monotonic()
        if client.first_token is not None:
            self.metrics.observe("inflight_end_to_end_seconds", now - client.started)
        log.info(
            "sequence %d: %d tokens in, %d out, first after %s, all after %.3f s, %s",
            sequence_id,
            client.num_input_tokens,
            client.num_output_tokens,
            "-" if client.first_token is None else f"{client.first_token - client.started:.3f} s",
            now - client.started,
            outcome,
        )

    def level(self, engine: Engine) -> None:
        """How full the engine is now."""
        waiting = len(engine.waiting())
        self.metrics.store(engine.store)
        self.metrics.gauge("inflight_sequences", len(engine) - waiting, "active")
        self.metrics.gauge("inflight_sequences", waiting, "waiting")
