"""Visits: the part that a sequence has in one trip; and who is stepped beside a trip, without one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from triton_inflight.books import Client
    from triton_inflight.errors import RequestError
    from triton_inflight.outputs import Tensor
    from triton_inflight.watcher import ResponseSender


class Carrier(Protocol):
    """A request on one trip.

    Attributes:
        correlation_id: Triton's ID of the sequence.
        starts, ends: the flags that the client set.
        identity: what stays with a request on all its trips, and tells it from others.
        sender: what the watcher asks whether the client is gone.
    """

    correlation_id: int | str
    starts: bool
    ends: bool
    identity: tuple[str, str]
    sender: ResponseSender

    def is_padding(self) -> bool:
        """Whether Triton made it up for a slot that has no request."""

    def tensors(self) -> Mapping[str, Any]:
        """Its input tensors."""

    def parameters(self) -> dict[str, Any]:
        """Its request parameters."""

    def timeout_microseconds(self) -> int:
        """Its timeout as Triton has it; 0 if there is none."""

    def is_cancelled(self) -> bool:
        """Whether its client is gone, as far as Triton knows."""

    def send(self, tensors: Mapping[str, Tensor], final: bool) -> None:
        """Send a response, with the next flush."""

    def refuse(self, error: RequestError) -> None:
        """Send an error as the final response, with the next flush."""

    def reschedule(self) -> None:
        """Give the request back to Triton for another trip. Otherwise it is released for good."""


@dataclass
class Visit:
    """A sequence's part of one trip.

    Attributes:
        open: the sequence is still to be stepped.
        answered: the final response has been sent; otherwise the request goes back to Triton.
    """

    carrier: Carrier
    client: Client
    open: bool = True
    answered: bool = False


Trip = dict[int, Visit]
"""Those that Triton brought together, by the engine's sequence ID."""


def beside(absent: Mapping[int, Client], most_kept: int, now: float) -> list[int]:
    """Who of the absent sequences is to be stepped beside those of a trip.

    Triton splits live sequences over trips as they come and by their sets of input tensors; steps do not. What an
    absent sequence gets is kept until its request comes. That is bounded, since Triton may have dropped the sequence,
    and since all that is kept comes to its client at once.

    Args:
        absent: the live sequences that Triton did not bring on the trip, with what is known of their clients.
        most_kept: tokens of a sequence that may be kept.
        now: seconds of the monotonic clock; nobody is stepped past its deadline.
    """
    return [i for i, c in absent.items() if c.last is None and c.num_kept < most_kept and now < c.deadline]
