"""Batch: the arrays of one step, and the scope through which attention finds them."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from triton_inflight.kv_store import KVStore
from triton_inflight.kv_tensors import KVTensors
from triton_inflight.planner import Run
from triton_inflight.sequence import Sequence


@dataclass(frozen=True)
class Batch:
    """One flat row of T tokens from N sequences, without padding.

    ::

        tokens     a5 a6 a7 | b0 b1 | c9          T = 6, N = 3
        positions   5  6  7 |  0  1 |  9
        starts      0         3       5      6    (N + 1)
        lengths     8         2       10          tokens of each sequence after the step
        last_rows         2                5      rows whose next token is sampled (b has more prompt to come)

    Attributes:
        tokens: (1, T) int64, on the model's device.
        positions: (1, T) int64, on the model's device.
        tables: (N, M) int32, on the model's device: each sequence's blocks in order; unused entries are 0.
        starts: N + 1 row numbers; sequence i has the rows from ``starts[i]`` to ``starts[i + 1]``.
        lengths: N cell counts that each sequence attends over, this step's tokens included.
        last_rows: (S,) int64, on the model's device.
        sampled: the S sequences that the ``last_rows`` belong to.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    tables: torch.Tensor
    starts: Rows[int]
    lengths: Rows[int]
    last_rows: torch.Tensor
    sampled: Rows[Sequence]


def build_batch(runs: Rows[Run], store: KVStore, device: torch.device) -> Batch:
    """Lay out a step; the cells of its runs must be reserved. The cost is that of its new tokens alone."""
    sequences = [run.sequence for run in runs]
    firsts = np.array([s.num_computed for s in sequences], dtype=np.int64)
    counts = np.array([run.count for run in runs], dtype=np.int64)
    starts = np.concatenate(([0], np.cumsum(counts)))
    ids = np.array([s.sequence_id for s in sequences], dtype=np.uint64)
    choices = np.array([s.choice for s in sequences], dtype=np.uint32)
    _, tables = store.layout(ids, choices, firsts, counts)
    tokens = np.concatenate(
        [
            s.tokens[s.num_computed : s.num_computed + run.count]
            for s, run in zip(sequences, runs, strict=True)
        ]
    )
    positions = np.arange(starts[-1]) + np.repeat(firsts - starts[:-1], counts)
    complete = [i for i, run in enumerate(runs) if run.count == run.sequence.num_pending]
    return Batch(
        tokens=torch.from_numpy(tokens).to(device)[None],
        positions=torch.from_numpy(positions).to(device)[None],
        tables=torch.from_numpy(tables).to(device),
        starts=starts.tolist(),
        lengths=(firsts + counts).tolist(),
        last_rows=torch.from_numpy(starts[1:][complete] - 1).to(device),
        sampled=[sequences[i] for i in complete],
    )


@dataclass
class StepScope:
    """What an attention call needs and cannot be given through the model's own arguments.

    Some models drop unknown keyword arguments on the way to attention, so the batch travels in a context
    variable instead.

    Attributes:
        batch: the step's arrays.
        tensors: where keys and values are kept.
        calls: attention calls made so far in this forward pass.
        plans: the pools' plans of the step; the first attention call that needs one makes it for all.
    """

    batch: Batch
    tensors: KVTensors
    calls: int = 0
    plans: dict[object, Any] = field(default_factory=dict)


_SCOPE: ContextVar[StepScope | None] = ContextVar("triton_inflight_step", default=None)


@contextmanager
def step_scope(batch: Batch, tensors: KVTensors) -> Iterator[StepScope]:
    """Make a batch the current one for the forward pass run inside; scopes do not nest."""
    assert _SCOPE.get() is None, "a step is already running"
    scope = StepScope(batch, tensors)
    token = _SCOPE.set(scope)
    try:
        yield scope
    finally:
        _SCOPE.reset(token)


def current_scope() -> StepScope | None:
    """The scope of the step that is running, or ``None`` outside of one."""
    return _SCOPE.get()
