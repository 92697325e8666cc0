"""Metrics: what the engine and the adapter did, as Prometheus families on Triton's metrics endpoint.

Reporting one value costs a trip to the server's process, so the step only notes values down, and whoever
owns the metrics flushes them from a thread of its own, a few times a second.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from triton_inflight.engine import Step
from triton_inflight.kv_store import KVStore

_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 48, 64, 96, 128, 192, 256)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600)


@dataclass(frozen=True)
class Family:
    """One metric family: its name, kind, help text, the label that tells its members apart, its buckets."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    label: str | None = None
    buckets: tuple[float, ...] = ()


FAMILIES = (
    Family("inflight_sequences", "gauge", "Live sequences: active (hold blocks), waiting or paused", "state"),
    Family("inflight_sequences_total", "counter", "Ended sequences by how they ended", "outcome"),
    Family("inflight_steps_total", "counter", "Forward passes: prefill, decode, or mixed (both in one)", "kind"),
    Family("inflight_step_sequences", "histogram", "Sequences in a forward pass", buckets=_COUNTS),
    Family("inflight_step_tokens", "histogram", "Tokens in a forward pass", buckets=_TOKENS),
    Family("inflight_forward_seconds", "histogram", "Duration of a forward pass", buckets=_SECONDS),
    Family("inflight_loop_seconds", "histogram", "Rest of a trip: all but the forward pass", buckets=_SECONDS),
    Family("inflight_prompt_tokens_total", "counter", "Tokens of prompts"),
    Family("inflight_generated_tokens_total", "counter", "Tokens generated"),
    Family("inflight_prefix_hit_tokens_total", "counter", "Tokens of prompts found in the store, not run"),
    Family("inflight_preemptions_total", "counter", "Times a sequence gave its blocks back to be recomputed"),
    Family("inflight_time_to_first_token_seconds", "histogram", "First trip to first token", buckets=_SECONDS),
    Family("inflight_inter_token_latency_seconds", "histogram", "Time between tokens", buckets=_SECONDS),
    Family("inflight_end_to_end_seconds", "histogram", "First trip to last token", buckets=_SECONDS),
    Family("inflight_kv_blocks", "gauge", "Blocks of the KV-state store: used, total", "state"),
    # The name and the label by which Triton makes its ORCA load header.
    Family(
        "nv_trt_llm_kv_cache_block_metrics", "gauge", "KV-state store: used, max, tokens_per",
        "kv_cache_block_type",
    ),
)  # fmt: skip


class Metric(Protocol):
    """A member of a family, as Triton's Python backend has it."""

    def increment(self, value: float) -> None: ...

    def set(self, value: float) -> None: ...

    def observe(self, value: float) -> None: ...


class Metrics:
    """Notes values down, and reports them when flushed.

    Args:
        make: makes the member of a family that has the given value of the family's label.
    """

    def __init__(self, make: Callable[[Family, str | None], Metric]) -> None:
        self._make = make
        self._families = {family.name: family for family in FAMILIES}
        self._members: dict[tuple[str, str | None], Metric] = {}
        self._lock = threading.Lock()
        self._counts: defaultdict[tuple[str, str | None], float] = defaultdict(float)
        for family in FAMILIES:
            if family.kind == "counter" and family.label is None:
                self._counts[family.name, None] = 0.0  # so that it is on the page before it first counts
        self._gauges: dict[tuple[str, str | None], float] = {}
        self._observations: defaultdict[str, deque[float]] = defaultdict(deque)

    def count(self, name: str, value: float = 1, label: str | None = None) -> None:
        """Add to a counter."""
        with self._lock:
            self._counts[name, label] += value

    def gauge(self, name: str, value: float, label: str | None = None) -> None:
        """Set a gauge."""
        with self._lock:
            self._gauges[name, label] = value

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram."""
        self._observations[name].append(value)

    def step(self, step: Step) -> None:
        """Note a step down."""
        if step.num_preempted:
            self.count("inflight_preemptions_total", step.num_preempted)
        if step.num_prefix_hit_tokens:
            self.count("inflight_prefix_hit_tokens_total", step.num_prefix_hit_tokens)
        if not step.num_sequences:
            return
        kind = "mixed" if step.num_prefill_tokens and step.num_decode_tokens else (
            "prefill" if step.num_prefill_tokens else "decode"
        )  # fmt: skip
        self.count("inflight_steps_total", label=kind)
        self.observe("inflight_step_sequences", step.num_sequences)
        self.observe("inflight_step_tokens", step.num_prefill_tokens + step.num_decode_tokens)
        self.observe("inflight_forward_seconds", step.forward_seconds)

    def store(self, store: KVStore) -> None:
        """Note down how full the store is."""
        for name, label, value in (
            ("inflight_kv_blocks", "used", store.num_held),
            ("inflight_kv_blocks", "total", store.num_blocks),
            ("nv_trt_llm_kv_cache_block_metrics", "used", store.num_held),
            ("nv_trt_llm_kv_cache_block_metrics", "max", store.num_blocks),
            ("nv_trt_llm_kv_cache_block_metrics", "tokens_per", store.tokens_per_block),
        ):
            self.gauge(name, value, label)

    def flush(self) -> None:
        """Report everything noted down; call it from one thread at a time."""
        with self._lock:
            counts, self._counts = self._counts, defaultdict(float)
            gauges, self._gauges = self._gauges, {}
        for (name, label), value in counts.items():
            self._member(name, label).increment(value)
        for (name, label), value in gauges.items():
            self._member(name, label).set(value)
        for name, values in list(self._observations.items()):
            member = self._member(name, None)
            while values:
                member.observe(values.popleft())

    def _member(self, name: str, label: str | None) -> Metric:
        if (name, label) not in self._members:
            self._members[name, label] = self._make(self._families[name], label)
        return self._members[name, label]
