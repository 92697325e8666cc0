"""From what became of requests to figures: rates, latencies, goodput, and how much of the output is equal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from triton_inflight.bench_rounds import Figures, quantile
from triton_inflight.compare_client import Outcome
from triton_inflight.errors import SettingsError

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Slo:
    """A service level objective: what a request's latencies must not exceed, in seconds; None says nothing.

    Attributes:
        ttft: time to first token.
        itl: time between tokens, on average over the request.
        e2e: time to the last token.
    """

    ttft: float | None = None
    itl: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """An objective out of ``ttft=0.5,itl=0.05``.

        Raises:
            SettingsError: the text is something else.
        """
        bounds: dict[str, float] = {}
        for part in text.split(","):
            found = re.fullmatch(r"\s*(ttft|itl|e2e)\s*=\s*(\d+\.?\d*|\.\d+)\s*", part)
            if not found:
                raise SettingsError(
                    f"--slo {text!r}: {part.strip()!r} is none of ttft, itl and e2e with its seconds, as in "
                    "ttft=0.5,itl=0.05"
                )
            if found[1] in bounds or float(found[2]) == 0:
                raise SettingsError(f"--slo {text!r}: bound {found[1]} once, by more than 0 seconds")
            bounds[found[1]] = float(found[2])
        return cls(**bounds)

    def met_by(self, outcome: Outcome) -> bool:
        """Whether a request was served well enough."""
        latencies = ((self.ttft, outcome.ttft), (self.itl, outcome.mean_itl), (self.e2e, outcome.e2e))
        return all(bound is None or latency <= bound for bound, latency in latencies)

    def __str__(self) -> str:
        bounds = (("TTFT", self.ttft), ("ITL", self.itl), ("end to end", self.e2e))
        return ", ".join(f"{name} ≤ {bound:g} s" for name, bound in bounds if bound is not None)


def client_figures(outcomes: Sequence[Outcome], window: float | None, slo: Slo | None) -> Figures:
    """What the clients of a round saw; times in seconds, rates per second.

    Args:
        window: in a closed loop, the seconds that rates are taken over: what comes later is the end of a load that
            is no longer kept up. Else None: until the last token of the round.
    """
    seconds = window or span(outcomes)
    tokens = sum(
        count
        for outcome in outcomes
        for moment, count in zip(outcome.arrivals, outcome.counts, strict=True)
        if moment <= seconds
    )
    done = [outcome for outcome in outcomes if outcome.arrivals[-1] <= seconds]
    figures: Figures = {
        "seconds": seconds,
        "requests": len(outcomes),
        "output_tokens": sum(outcome.request.output_tokens for outcome in outcomes),
        "input_tokens": sum(outcome.request.input_tokens for outcome in outcomes),
        "output_tokens_per_second": tokens / seconds,
        "requests_per_second": len(done) / seconds,
        "goodput": None if slo is None else sum(map(slo.met_by, done)) / seconds,
        "client_lag": max(outcome.sent - outcome.scheduled for outcome in outcomes),
    }
    latencies = {
        "ttft": [outcome.ttft for outcome in outcomes],
        "itl": inter_token_latencies(outcomes).tolist(),
        "e2e": [outcome.e2e for outcome in outcomes],
    }
    for name, values in latencies.items():
        for percentile in PERCENTILES:
            figures[f"{name}_p{percentile}"] = quantile(values, percentile / 100) if values else None
    return figures


def span(outcomes: Sequence[Outcome]) -> float:
    """Seconds from the first arrival of a request to the last token."""
    return max(outcome.arrivals[-1] for outcome in outcomes) - min(outcome.scheduled for outcome in outcomes)


def inter_token_latencies(outcomes: Sequence[Outcome]) -> NDArray[np.float64]:
    """Seconds between tokens, one for each token but a request's first response.

    Tokens that come together, because their characters are complete only then, share the time since the response
    before.
    """
    gaps, counts = [], []
    for outcome in outcomes:
        gaps += [after - before for before, after in pairwise(outcome.arrivals)]
        counts += outcome.counts[1:]
    return np.repeat(np.array(gaps) / np.maximum(counts, 1), counts) if gaps else np.array([])


def equal_share(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> float:
    """The share of output tokens before the first one in which two schedulers' answers to a request differ, over the
    requests that both had.
    """
    equal = total = 0
    for our, their in zip(ours, theirs, strict=False):
        equal += common_tokens(our, their)
        total += our.request.output_tokens
    return equal / total


def common_tokens(our: Outcome, their: Outcome) -> int:
    """How many tokens two answers to one request begin with in common."""
    length = min(len(our.tokens), len(their.tokens))
    different = np.flatnonzero(our.tokens[:length] != their.tokens[:length])
    return int(different[0]) if len(different) else length
