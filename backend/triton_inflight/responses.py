"""Responses: what is sent of a sequence, and when, while Triton has brought its request on a trip."""

from __future__ import annotations

from collections.abc import Callable

from triton_inflight.pending import Pending, best_of
from triton_inflight.protocol import output_tensors
from triton_inflight.visits import Visit


class Responses:
    """Sends what choices have pending.

    Args:
        decode: the text of one token.
    """

    def __init__(self, decode: Callable[[int], str]) -> None:
        self._decode = decode

    def due(self, visit: Visit, pending: Pending) -> None:
        """Send what the client wants of a choice by now, if anything."""
        request = visit.client.request
        if pending.ended or request.best_of != request.n:
            return
        ended = request.response_per_choice and pending.finish_reason is not None
        if ended or (request.stream and pending.is_due(request.stream_interval)):
            self.send(visit, [pending])

    def rest(self, visit: Visit) -> None:
        """End a visit with everything that is not sent yet."""
        visit.open, visit.answered = False, True
        request = visit.client.request
        waiting = [pending for pending in visit.client.pending.values() if not pending.ended]
        waiting = best_of(waiting, request.n)
        responses = [[pending] for pending in waiting] if request.response_per_choice else [waiting]
        for choices in responses[:-1]:
            self.send(visit, choices)
        self.send(visit, responses[-1], final=True)

    def send(self, visit: Visit, choices: list[Pending], final: bool = False) -> None:
        """One response with all that these choices have pending."""
        client = visit.client
        results = [choice.result(client.num_input_tokens, self._decode) for choice in choices]
        visit.carrier.send(output_tensors(results, client.request), final)
