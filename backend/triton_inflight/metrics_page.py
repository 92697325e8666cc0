"""Prints docs/metrics.md from the table of families: ``python -m triton_inflight.metrics_page > docs/metrics.md``."""

from __future__ import annotations

from collections.abc import Iterator

from triton_inflight.metrics import FAMILIES, Family

_HEAD = """\
# Metrics

Written by `python -m triton_inflight.metrics_page` from the table that the server itself reports from.

Every model of this backend reports these on Triton's metrics endpoint (`:8002/metrics`), without any setting. Each
has the labels `model` and `version`, and `instance` too where `instance_group` has a `count` above 1. They lag what
happens by `cancellation_check_period_ms`. `triton-inflight top` shows them live in a terminal.

Times are counted from a sequence's first trip: the model sees neither Triton's own backlog nor when a request came in.
A request that is refused at once is in none of them but the counters of Triton's.
"""

_MISLEADING = """\
## Why Triton's own counters mislead here

To Triton every trip of an iterative sequence, of one step or a few, is a request. So, for such a model:

| Triton's | counts | use instead |
|---|---|---|
| `nv_inference_request_success` | trips, not generations | `inflight_sequences_total` |
| `nv_inference_request_failure{reason="CANCELED"}` | one for every sequence that has ended, however well: Triton ends \
it with an empty request that it cancels | `inflight_sequences_total{outcome="cancelled"}` and `{outcome="failed"}` |
| `nv_inference_request_duration_us` | the time since a sequence began, added up anew at every trip | \
`inflight_end_to_end_seconds` |
| `nv_inference_queue_duration_us` | the gaps between trips | `inflight_time_to_first_token_seconds` |
| `nv_inference_exec_count` | trips, of one step or more | `inflight_steps_total` |
| `nv_inference_pending_request_count` | also sequences between two trips | `inflight_sequences{state="waiting"}` |

How many sequences share a forward pass, which says whether in-flight batching works for a load, is in
`inflight_step_sequences`: `rate(inflight_step_sequences_sum[1m]) / rate(inflight_step_sequences_count[1m])` is their
mean number.

`nv_trt_llm_kv_cache_block_metrics` has the name and labels of TensorRT-LLM's backend. Newer tritonservers (not 2.51)
make the ORCA header `endpoint-load-metrics` of it, by which gateways balance load.
"""

# What tells the members of a family apart.
_MEMBERS = {
    "inflight_sequences": "active, waiting",
    "inflight_sequences_total": "stop, length, timeout, cancelled, failed, refused; client-driven also ended, reaped",
    "inflight_steps_total": "prefill, decode, mixed",
    "inflight_kv_blocks": "used, total",
    "nv_trt_llm_kv_cache_block_metrics": "used, max, tokens_per",
}


def page() -> str:
    """The page, in Markdown."""
    return "\n".join([_HEAD, *_families(), "", _MISLEADING])


def _families() -> Iterator[str]:
    yield "| name | kind | what | by |"
    yield "|---|---|---|---|"
    for family in FAMILIES:
        yield f"| `{family.name}` | {family.kind} | {family.help} | {_members(family)} |"


def _members(family: Family) -> str:
    return "" if family.label is None else f"`{family.label}`: {_MEMBERS[family.name]}"


if __name__ == "__main__":
    print(page(), end="")
