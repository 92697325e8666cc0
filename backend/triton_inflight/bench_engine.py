"""The engine alone, in this process: no server, no client."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from triton_inflight.bench_breakdown import timed_parts
from triton_inflight.bench_rounds import Round
from triton_inflight.bench_work import Workload
from triton_inflight.errors import InflightError
from triton_inflight.protocol import parse_request

if TYPE_CHECKING:
    from triton_inflight.engine import Engine
    from triton_inflight.generation import Update
    from triton_inflight.loader import Loaded
    from triton_inflight.settings import Settings


def run_in_process(
    loaded: Loaded, settings: Settings, workload: Workload, prompts: Sequence[Sequence[int]]
) -> Round:
    """Add all prompts and step them to their ends; requests mean what they mean on the server.

    Raises:
        InflightError: a sequence failed, or no step can run any.
    """
    engine = loaded.engine
    requests = [
        parse_request({}, workload.fields(list(prompt)), settings, loaded.defaults) for prompt in prompts
    ]
    arrivals: list[list[float]] = [[] for _ in prompts]
    tokens: list[list[float]] = [[] for _ in prompts]
    with timed_parts(engine) as parts:
        cpu, start = time.process_time(), time.perf_counter()
        for number, request in enumerate(requests):
            engine.add(number, request)
        live = dict.fromkeys(range(len(requests)))
        while live:
            # As many as a trip would bring; without a batcher (0), that is no bound.
            updates = progressing_step(engine, list(live)[: settings.max_batch_size or None])
            now = time.perf_counter() - start
            for update in updates:
                if update.tokens:
                    arrivals[update.sequence_id].append(now)
                    tokens[update.sequence_id].append(len(update.tokens))
                if update.finish_reason is not None:
                    del live[update.sequence_id]
        cpu = time.process_time() - cpu
    return Round([0.0] * len(requests), arrivals, tokens, client_cpu=cpu, parts=parts)


def progressing_step(engine: Engine, sequence_ids: list[int]) -> list[Update]:
    """One step of these sequences.

    Raises:
        InflightError: one of them failed, or none can run.
    """
    step = engine.step(sequence_ids)
    if not step.num_sequences:
        raise InflightError(
            "the engine makes no progress: the KV-state store is too small for these sequences "
            "(max_tokens_in_paged_kv_cache or kv_cache_bytes in config.pbtxt)"
        )
    for update in step.updates:
        if update.error is not None:
            raise InflightError(f"sequence {update.sequence_id} failed: {update.error}")
    return step.updates
