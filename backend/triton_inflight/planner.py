"""The planner: which sequences run in a step, and how many tokens each.

There is no prefill phase and no decode phase: a sequence runs ``min(num_pending, budget left)`` tokens.
A sequence that decodes has one token pending, one whose prompt is new or was preempted has many, and one
whose prompt is larger than the budget runs it in chunks. (vLLM's V1 scheduler is built on the same rule.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from triton_inflight.admission import future_peak
from triton_inflight.kv_store import KVStore
from triton_inflight.pace import Pace
from triton_inflight.sequence import Sequence
from triton_inflight.settings import BatchSchedulerPolicy


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

    def explain(self, offered: Collection[Sequence]) -> str:
        """One line: who of the offered runs how many tokens, who waits, who gave way."""
        counts = {run.sequence: run.count for run in self.runs}
        parts = []
        for sequence in offered:
            if sequence in self.preempted:
                state = "gave its blocks back"
            elif sequence not in counts:
                state = "waits"
            else:
                state = f"{counts[sequence]} of {sequence.num_pending} pending"
            choice = f".{sequence.choice}" if sequence.choice else ""
            parts.append(f"#{sequence.sequence_id}{choice} {state}")
        others = len(self.preempted) - sum(sequence in self.preempted for sequence in offered)
        return "; ".join(parts) + (f"; {others} others gave their blocks back" if others else "")


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
    kind the higher priority, then the older. What happens when blocks run short depends on the policy:

    * ``max_utilization`` admits while blocks last. When they run out, the sequence of the lowest precedence
      gives its blocks back and is recomputed later; so the one of the highest precedence always advances.
    * ``guaranteed_no_evict`` admits a sequence only if the future peak of KV use fits, and never preempts.
      A sequence waits for a step where its token would raise that peak above the store; the one that is
      nearest to its end never does, so somebody always advances.

    Args:
        store: the KV-state store that cells are reserved in.
        max_num_tokens: token budget of a step.
        max_running_sequences: most sequences that hold blocks, and so run, at a time.
        policy: ``max_utilization`` or ``guaranteed_no_evict``.
        pace: bounds the tokens of prompts in a step in which others decode; no bound if None.
    """

    def __init__(
        self,
        store: KVStore,
        max_num_tokens: int,
        max_running_sequences: int,
        policy: BatchSchedulerPolicy = "max_utilization",
        pace: Pace | None = None,
    ) -> None:
        self._store = store
        self._max_num_tokens = max_num_tokens
        self.max_running_sequences = max_running_sequences
        self._pace = pace
        self._evicts = policy == "max_utilization"

    def plan(self, offered: Collection[Sequence], live: Iterable[Sequence]) -> Plan:
        """Plan a step.

        Args:
            offered: the unfinished sequences of this trip.
            live: every unfinished sequence; any of them may have to give its blocks back.
        """
        draft = _Draft(sorted((s for s in live if s.num_computed), key=_precedence), self._budget(offered))
        turns = sorted(offered, key=_turn)
        held_back = set() if self._evicts else self._held_back(turns, draft)
        admitting = True
        for sequence in turns:
            newcomer = sequence.num_computed == 0
            count = min(sequence.num_pending, draft.budget)
            if count == 0 or sequence in draft.preempted:
                continue
            if sequence in held_back:
                draft.budget -= count  # it was weighed with its share, so the others get no more than theirs
            elif newcomer and not (admitting and self._admit(sequence, draft)):
                admitting = False  # first come, first served: a small newcomer must not starve a large one
            elif newcomer or self._continue(sequence, draft):
                count = min(sequence.num_pending, draft.budget)  # of a newcomer's prompt a part may be cached
                draft.counts[sequence] = count
                draft.budget -= count
        runs = [Run(sequence, count) for sequence, count in draft.counts.items()]
        return Plan(runs, draft.copies, draft.preempted, draft.num_prefix_hit_tokens)

    def observe(self, seconds: float, num_decode_tokens: int, num_prefill_tokens: int) -> None:
        """Learn from a step how long they take."""
        if self._pace is not None:
            self._pace.observe(seconds, num_decode_tokens, num_prefill_tokens)

    def _budget(self, offered: Collection[Sequence]) -> int:
        """Most tokens of a step."""
        if self._pace is None:
            return self._max_num_tokens
        decodes = sum(sequence.num_computed > 0 and sequence.num_pending == 1 for sequence in offered)
        allowed = self._pace.allowed(decodes)
        return self._max_num_tokens if allowed is None else min(self._max_num_tokens, decodes + allowed)

    def _admit(self, sequence: Sequence, draft: _Draft) -> bool:
        """Give a newcomer what is cached of its prompt and cells for the rest, if there is room for both."""
        if sequence.reuses_prefix:
            tokens = np.asarray(sequence.tokens, dtype=np.int64)
            sequence.advance(self._store.match_prefix(*_key(sequence), tokens))
        behind = draft.behind(sequence) if self._evicts else []
        ahead = _width(draft.holders) - _width(behind)
        # It leaves one free block for every sequence ahead of it, or it would be preempted at once.
        headroom = ahead if self._evicts else 0
        places = self.max_running_sequences - ahead - _width([sequence])
        if (
            places >= 0
            and (self._evicts or self._fits_for_good(sequence, draft))
            and self._make_room(sequence, headroom, places, behind, draft)
        ):
            draft.num_prefix_hit_tokens += sequence.num_computed
            draft.holders.append(sequence)
            draft.holders.sort(key=_precedence)
            return True
        self._store.drop(*_key(sequence))
        sequence.preempt()
        return False

    def _continue(self, sequence: Sequence, draft: _Draft) -> bool:
        """Give a sequence that holds blocks the cells of its pending tokens."""
        if self._blocks_needed(sequence) <= self._store.num_free:  # nearly always, so spare the rest
            return self._reserve(sequence, draft)
        behind = draft.behind(sequence) if self._evicts else []
        return self._make_room(sequence, 0, _width(behind), behind, draft)

    def _make_room(
        self, sequence: Sequence, headroom: int, places: int, behind: list[Sequence], draft: _Draft
    ) -> bool:
        """Reserve cells for all pending tokens; say whether it worked.

        Args:
            headroom: blocks that have to stay free.
            places: how many of those ``behind`` may keep their blocks at most.
            behind: whom to preempt if need be, the last of them first.
        """
        wanted = self._blocks_needed(sequence) + headroom
        if wanted > self._store.num_free + sum(len(self._store.blocks(*_key(s))) for s in behind):
            return False
        while behind and (_width(behind) > places or wanted > self._store.num_free):
            self._preempt(behind.pop(), draft)
            wanted = self._blocks_needed(sequence) + headroom  # what is shared may have to be copied no more
        return wanted <= self._store.num_free and self._reserve(sequence, draft)

    def _reserve(self, sequence: Sequence, draft: _Draft) -> bool:
        copies = self._store.reserve(*_key(sequence), sequence.num_computed, len(sequence.tokens))
        if copies is None:
            return False
        draft.copies += copies
        return True

    def _fits_for_good(self, sequence: Sequence, draft: _Draft) -> bool:
        """Whether the future peak with a newcomer fits, whether its prompt is through in this step or not."""
        holders = [*draft.holders, sequence]
        growing = {s for s in draft.holders if draft.counts.get(s) == s.num_pending}
        peaks = (self._peak(holders, growing), self._peak(holders, growing | {sequence}))
        return max(peaks) <= self._store.num_blocks

    def _held_back(self, turns: list[Sequence], draft: _Draft) -> set[Sequence]:
        """The offered holders whose next token would raise the future peak above the store.

        A step in which every holder gets a token never raises the peak. One that leaves some out may: those
        not in this trip, and those that have more than a step's share of their prompt to run.
        """
        budget, growing = draft.budget, set()
        for sequence in turns:
            if sequence.num_computed:
                count = min(sequence.num_pending, budget)
                budget -= count
                if count == sequence.num_pending:
                    growing.add(sequence)
        if self._peak(draft.holders, growing) <= self._store.num_blocks:
            return set()
        allowed: set[Sequence] = set()
        for sequence in sorted(growing, key=_remaining):
            if self._peak(draft.holders, allowed | {sequence}) <= self._store.num_blocks:
                allowed.add(sequence)
        return growing - allowed

    def _peak(self, holders: list[Sequence], growing: set[Sequence]) -> int:
        """The future peak of KV use, once each of ``growing`` has got a token."""
        lengths, remaining = [], []
        for sequence in holders:
            width = _width([sequence])
            lengths += [len(sequence.tokens) + (sequence in growing)] * width
            remaining += [_remaining(sequence) - (sequence in growing)] * width
        return future_peak(lengths, remaining, self._store.tokens_per_block)

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


def _width(sequences: list[Sequence]) -> int:
    """How many sequences these are, once those that will be forked have been."""
    return len(sequences) + sum(sequence.num_forks for sequence in sequences)


def _remaining(sequence: Sequence) -> int:
    """Tokens a sequence may still generate."""
    return sequence.limit - len(sequence.tokens)


def _precedence(sequence: Sequence) -> tuple[int, int, int]:
    """Sort key: the higher priority first, then the older."""
    return -sequence.priority, sequence.order, sequence.choice


def _turn(sequence: Sequence) -> tuple[bool, tuple[int, int, int]]:
    """Sort key of a step: sequences that hold blocks and have a single token pending first."""
    return sequence.num_computed == 0 or sequence.num_pending > 1, _precedence(sequence)
