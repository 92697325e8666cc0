"""The planner: which sequences run in a step, and how many tokens each.

There is no prefill phase and no decode phase: a sequence runs ``min(num_pending, budget left)`` tokens.
A sequence that decodes has one token pending, one whose prompt is new or was preempted has many, and one
whose prompt is larger than the budget runs it in chunks. (vLLM's V1 scheduler is built on the same rule.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from triton_inflight.kv_store import KVStore
from triton_inflight.sequence import Sequence


@dataclass(frozen=True)
class Run:
    """A sequence's part of a step: its next ``count`` pending tokens."""

    sequence: Sequence
    count: int


@dataclass(frozen=True)
class Plan:
    """What a step runs.

    Attributes:
        runs: the sequences of the step; the cells of all their pending tokens are reserved.
        copies: (source, destination) blocks, to be copied in this order before the step writes.
        preempted: sequences whose blocks were taken back to make room.
        num_prefix_hit_tokens: tokens of admitted sequences that were found in the store.
    """

    runs: list[Run]
    copies: list[tuple[int, int]]
    preempted: list[Sequence]
    num_prefix_hit_tokens: int


@dataclass
class _Draft:
    """A plan in the making. ``holders`` are the live sequences that hold blocks, by precedence."""

    holders: list[Sequence]
    budget: int
    counts: dict[Sequence, int] = field(default_factory=dict)
    copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    num_prefix_hit_tokens: int = 0

    def behind(self, sequence: Sequence) -> list[Sequence]:
        """The holders that give way to ``sequence``, in order of precedence."""
        return [holder for holder in self.holders if _precedence(holder) > _precedence(sequence)]


class Planner:
    """Plans steps over one store.

    Sequences with one token pending go first, so that no stream stalls behind a long prompt; within each
    kind the higher priority, then the older. When blocks run out, the sequence of the lowest precedence gives
    its blocks back and is recomputed later; so the one of the highest precedence always advances.

    Args:
        store: the KV-state store that cells are reserved in.
        max_num_tokens: token budget of a step.
        max_running_sequences: most sequences that hold blocks, and so run, at a time.
    """

    def __init__(self, store: KVStore, max_num_tokens: int, max_running_sequences: int) -> None:
        self._store = store
        self._max_num_tokens = max_num_tokens
        self._max_running = max_running_sequences

    def plan(self, offered: Iterable[Sequence], live: Iterable[Sequence]) -> Plan:
        """Plan a step.

        Args:
            offered: the unfinished sequences of this trip.
            live: every unfinished sequence; any of them may have to give its blocks back.
        """
        draft = _Draft(sorted((s for s in live if s.num_computed), key=_precedence), self._max_num_tokens)
        admitting = True
        for sequence in sorted(offered, key=_turn):
            newcomer = sequence.num_computed == 0
            if draft.budget == 0 or sequence in draft.preempted or (newcomer and not admitting):
                continue
            if self._make_room(sequence, draft):
                draft.counts[sequence] = min(sequence.num_pending, draft.budget)
                draft.budget -= draft.counts[sequence]
            elif newcomer:
                admitting = False  # first come, first served: a small newcomer must not starve a large one
        runs = [Run(sequence, count) for sequence, count in draft.counts.items()]
        return Plan(runs, draft.copies, draft.preempted, draft.num_prefix_hit_tokens)

    def _make_room(self, sequence: Sequence, draft: _Draft) -> bool:
        """Reserve cells for all pending tokens, preempting from behind if need be; say whether it worked."""
        newcomer = sequence.num_computed == 0
        if newcomer:
            tokens = np.asarray(sequence.tokens, dtype=np.int64)
            sequence.advance(self._store.match_prefix(sequence.sequence_id, sequence.choice, tokens))
        behind = draft.behind(sequence)
        # A newcomer leaves one free block for every sequence ahead of it, or it would be preempted at once.
        ahead = sum(holder is not sequence for holder in draft.holders) - len(behind)
        wanted = self._blocks_needed(sequence) + (ahead if newcomer else 0)
        reachable = self._store.num_free + sum(len(self._store.blocks(*_key(s))) for s in behind)
        if ahead < self._max_running and wanted <= reachable:
            while behind and (ahead + len(behind) >= self._max_running or wanted > self._store.num_free):
                self._preempt(behind.pop(), draft)
                wanted = self._blocks_needed(sequence) + (ahead if newcomer else 0)
            copies = self._store.reserve(*_key(sequence), sequence.num_computed, len(sequence.tokens))
            if copies is not None:
                draft.copies += copies
                if newcomer:
                    draft.num_prefix_hit_tokens += sequence.num_computed
                    draft.holders.append(sequence)
                    draft.holders.sort(key=_precedence)
                return True
        if newcomer:
            self._store.drop(*_key(sequence))
            sequence.preempt()
        return False

    def _blocks_needed(self, sequence: Sequence) -> int:
        return self._store.blocks_needed(*_key(sequence), sequence.num_computed, len(sequence.tokens))

    def _preempt(self, sequence: Sequence, draft: _Draft) -> None:
        """Take a holder's blocks back, and its place in this step if it already had one."""
        self._store.drop(*_key(sequence))
        sequence.preempt()
        draft.holders.remove(sequence)
        draft.budget += draft.counts.pop(sequence, 0)
        draft.preempted.append(sequence)


def _key(sequence: Sequence) -> tuple[int, int]:
    return sequence.sequence_id, sequence.choice


def _precedence(sequence: Sequence) -> tuple[int, int, int]:
    """Sort key: the higher priority first, then the older."""
    return -sequence.priority, sequence.order, sequence.choice


def _turn(sequence: Sequence) -> tuple[bool, tuple[int, int, int]]:
    """Sort key of a step: sequences that hold blocks and have a single token pending first."""
    return sequence.num_computed == 0 or sequence.num_pending > 1, _precedence(sequence)
