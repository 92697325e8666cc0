"""When the requests of a comparison are sent: so many at a time, at random moments, all at once, or as recorded."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from triton_inflight.compare_requests import GivenMix, Mix, Request
from triton_inflight.errors import SettingsError

_CHUNK = 32  # requests drawn at a time where nobody knows how many it will take


@dataclass(frozen=True)
class Schedule:
    """One round's requests.

    Attributes:
        timed: those whose moment is fixed, in seconds since the start, in order.
        following: in a closed loop, what is sent whenever a sequence ends.
        window: seconds after which nothing follows; in a closed loop, figures are of this time. None in others.
    """

    timed: list[tuple[float, Request]]
    following: Iterator[Request] = field(default_factory=lambda: iter(()))
    window: float | None = None


@dataclass(frozen=True)
class Source:
    """Where requests come from: a mix of lengths, and the token ids that random prompts are made of."""

    mix: Mix
    token_ids: Sequence[int]

    def draw(self, number: int, seed: str) -> list[Request]:
        """So many requests, the same ones for the same seed."""
        return self.mix.requests(number, self.token_ids, seed)


@dataclass(frozen=True)
class Closed:
    """A closed loop: always so many sequences in flight; whenever one ends, the next is sent."""

    concurrency: int

    kind = "closed"

    @property
    def name(self) -> str:
        return f"{self.concurrency} in flight"

    @property
    def value(self) -> float:
        """Where it stands on the axis of a picture."""
        return self.concurrency

    def schedule(self, source: Source, seconds: float, seed: str) -> Schedule:
        chunks = (source.draw(_CHUNK, f"{seed} {number}") for number in itertools.count())
        following = itertools.chain.from_iterable(chunks)
        first = [(0.0, next(following)) for _ in range(self.concurrency)]
        return Schedule(first, following, window=seconds)


@dataclass(frozen=True)
class Poisson:
    """An open loop: requests come at random moments of a Poisson process, however fast they are answered.

    Attributes:
        rate: requests a second on average.
        share: of the closed loop's maximum that the rate was derived from; None where it was given.
    """

    rate: float
    share: float | None = None

    kind = "open"

    @property
    def name(self) -> str:
        share = "" if self.share is None else f" ({self.share:g}x)"
        return f"{self.rate:.3g} req/s{share}"

    @property
    def value(self) -> float:
        """Where it stands on the axis of a picture."""
        return self.rate

    def schedule(self, source: Source, seconds: float, seed: str) -> Schedule:
        """As many requests as the rate gives in the time, at uniformly random moments: which is how a Poisson
        process looks to somebody who knows how often it came. So each round offers the same load.
        """
        number = max(1, round(self.rate * seconds))
        dice = random.Random(f"{seed} arrivals")
        moments = sorted(dice.uniform(0, seconds) for _ in range(number))
        return Schedule(
            [(moment - moments[0], r) for moment, r in zip(moments, source.draw(number, seed), strict=True)]
        )


@dataclass(frozen=True)
class RelativeRate:
    """A Poisson load at a share of the rate that a closed loop reaches, which has to be measured first."""

    share: float

    kind = "open"

    @property
    def name(self) -> str:
        return f"{self.share:g}x"

    def at(self, maximum: float) -> Poisson:
        """The load, once the closed loop's requests per second are known."""
        return Poisson(self.share * maximum, self.share)


@dataclass(frozen=True)
class Burst:
    """So many requests, all at once."""

    sequences: int

    kind = "burst"

    @property
    def name(self) -> str:
        return f"burst of {self.sequences}"

    @property
    def value(self) -> float:
        """Where it stands on the axis of a picture."""
        return self.sequences

    def schedule(self, source: Source, seconds: float, seed: str) -> Schedule:  # noqa: ARG002
        return Schedule([(0.0, request) for request in source.draw(self.sequences, seed)])


@dataclass(frozen=True)
class Replay:
    """A user's requests at the moments that they state."""

    kind = "replay"
    name = "replay"
    value = 1.0

    def schedule(self, source: Source, seconds: float, seed: str) -> Schedule:  # noqa: ARG002
        requests = source.draw(len(_with_arrivals(source.mix).rows), seed)
        return Schedule([(request.arrival or 0.0, request) for request in requests])


def check_loads(loads: Sequence[Load], mix: Mix) -> None:
    """Whether each of the loads can be made of such requests.

    Raises:
        SettingsError: one cannot.
    """
    if any(isinstance(load, Replay) for load in loads):
        _with_arrivals(mix)


def _with_arrivals(mix: Mix) -> GivenMix:
    if not isinstance(mix, GivenMix) or not mix.has_arrivals:
        raise SettingsError(
            'to replay requests, name their file with --requests; each of its lines has to say its "arrival" in seconds'
        )
    return mix


Load = Closed | Poisson | RelativeRate | Burst | Replay
FixedLoad = Closed | Poisson | Burst | Replay


def parse_rate(text: str) -> Poisson | RelativeRate:
    """A rate out of ``4`` or ``4.5`` requests a second, or ``0.9x`` the maximum of a closed loop.

    Raises:
        SettingsError: the text is neither, or not above 0.
    """
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)(x?)", text.strip())
    if not found or float(found[1]) <= 0:
        raise SettingsError(
            f"rate {text!r}: give requests a second such as 4.5, or a share of the closed loop's maximum such as 0.9x"
        )
    return RelativeRate(float(found[1])) if found[2] else Poisson(float(found[1]))
