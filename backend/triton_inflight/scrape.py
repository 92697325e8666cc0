"""Reads a server's /metrics page."""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Sample:
    """One line of the page."""

    name: str
    labels: dict[str, str]
    value: float


class Samples:
    """The samples of a metrics page.

    Args:
        text: the page, in Prometheus' text format.
    """

    def __init__(self, text: str) -> None:
        self._samples = [
            Sample(sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples of that name whose labels include the given ones; 0 if there are none."""
        return sum(s.value for s in self._matching(name, labels))

    def label_values(self, name: str, label: str) -> list[str]:
        """The values that a label has on the samples of that name, sorted."""
        return sorted({s.labels[label] for s in self._matching(name, {}) if label in s.labels})

    def histogram(self, name: str, **labels: str) -> dict[float, float]:
        """Counts of a histogram's buckets by upper bound; not cumulative, empty buckets included."""
        cumulative: dict[float, float] = {}
        for sample in self._matching(f"{name}_bucket", labels):
            bound = float(sample.labels["le"])
            cumulative[bound] = cumulative.get(bound, 0) + sample.value
        bounds = sorted(cumulative)
        below = [0.0, *(cumulative[bound] for bound in bounds)]
        return {bound: cumulative[bound] - before for bound, before in zip(bounds, below, strict=False)}

    def _matching(self, name: str, labels: dict[str, str]) -> list[Sample]:
        return [s for s in self._samples if s.name == name and labels.items() <= s.labels.items()]


def scrape(url: str, timeout: float = 10) -> Samples:
    """Fetch and parse a metrics page.

    Args:
        url: such as ``http://127.0.0.1:8002/metrics``.
        timeout: in seconds.

    Raises:
        OSError: the page cannot be fetched.
    """
    with urllib.request.urlopen(url, timeout=timeout) as response:
        return Samples(response.read().decode())
