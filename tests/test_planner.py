"""The planner: its rules one by one, and its invariants under random arrivals."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_inflight.admission import future_peak
from triton_inflight.kv_store import KVStore
from triton_inflight.planner import Plan, Planner
from triton_inflight.sequence import Sequence
from triton_inflight.settings import BatchSchedulerPolicy


def _sequence(order: int, prompt: int, limit: int = 100, priority: int = 0) -> Sequence:
    return Sequence(order, list(range(prompt)), limit, order=order, priority=priority)


def _planner(num_blocks: int = 64, max_num_tokens: int = 16, max_running: int = 8) -> tuple[Planner, KVStore]:
    store = KVStore(num_blocks, 4)
    return Planner(store, max_num_tokens, max_running), store


def _run(plan: Plan) -> None:
    """Do to the sequences what the engine does: compute, and append a token where none is pending."""
    for run in plan.runs:
        run.sequence.advance(run.count)
        if run.sequence.num_pending == 0:
            run.sequence.append(0)


def _counts(plan: Plan) -> dict[int, int]:
    return {run.sequence.order: run.count for run in plan.runs}


def test_a_prompt_above_the_budget_runs_in_chunks() -> None:
    planner, _ = _planner(max_num_tokens=16)
    sequence = _sequence(0, 40)
    counts = []
    for _ in range(4):
        plan = planner.plan([sequence], [sequence])
        counts.append(_counts(plan)[0])
        _run(plan)
    assert counts == [16, 16, 8, 1]


def test_decoding_sequences_go_before_an_older_long_prompt() -> None:
    planner, _ = _planner(max_num_tokens=16)
    long, short = _sequence(0, 60), _sequence(1, 2)
    _run(planner.plan([short], [short]))
    assert _counts(planner.plan([long, short], [long, short])) == {1: 1, 0: 15}


def test_a_plan_explains_itself() -> None:
    planner, _ = _planner(num_blocks=8, max_num_tokens=64)
    running, waiting = _sequence(0, 16, limit=20), _sequence(1, 24, limit=28)
    _run(planner.plan([running], [running]))
    live = [running, waiting]
    assert planner.plan(live, live).explain(live) == "#0 1 of 1 pending; #1 waits"


def test_a_small_newcomer_does_not_pass_a_large_one_that_waits_for_blocks() -> None:
    planner, store = _planner(num_blocks=8, max_num_tokens=64)
    running, large, small = _sequence(0, 16, limit=20), _sequence(1, 24, limit=28), _sequence(2, 2)
    _run(planner.plan([running], [running]))
    live = [running, large, small]
    assert _counts(planner.plan(live, live)) == {0: 1}
    assert store.live() == [0], "a sequence that waits holds no blocks"


def test_a_newcomer_leaves_a_block_for_every_sequence_ahead_of_it() -> None:
    planner, _ = _planner(num_blocks=7, max_num_tokens=64)
    running = _sequence(0, 16)
    _run(planner.plan([running], [running]))
    # Once the running sequence has the block of its next token, two blocks are free, and one is kept for it.
    large, small = _sequence(1, 8), _sequence(1, 4)
    assert _counts(planner.plan([running, large], [running, large])) == {0: 1}
    assert _counts(planner.plan([running, small], [running, small])) == {0: 1, 1: 4}


def test_when_blocks_run_out_the_youngest_gives_way_and_the_oldest_advances() -> None:
    planner, store = _planner(num_blocks=5, max_num_tokens=64)
    old, young = _sequence(0, 8, limit=20), _sequence(1, 4, limit=16)
    for _ in range(3):
        _run(planner.plan([old, young], [old, young]))
    preempted: list[Sequence] = []
    while old.num_output < 12:
        plan = planner.plan([old, young], [old, young])
        assert 0 in _counts(plan), "the oldest always advances"
        preempted += plan.preempted
        _run(plan)
        store.check()
    assert preempted == [young]
    assert young.num_computed == 0


def test_a_higher_priority_is_admitted_first_and_preempts_a_lower_one() -> None:
    planner, _ = _planner(num_blocks=6, max_num_tokens=64)
    low = _sequence(0, 16, limit=24)
    _run(planner.plan([low], [low]))
    high = _sequence(1, 16, limit=24, priority=5)
    plan = planner.plan([low, high], [low, high])
    assert plan.preempted == [low]
    assert _counts(plan) == {1: 16}


def test_no_more_sequences_run_than_max_running_sequences() -> None:
    planner, _ = _planner(max_running=3, max_num_tokens=64)
    live = [_sequence(i, 2) for i in range(6)]
    for _ in range(3):
        plan = planner.plan(live, live)
        assert sorted(_counts(plan)) == [0, 1, 2]
        _run(plan)


def _simulate(seed: int, policy: BatchSchedulerPolicy) -> int:
    """Random sequences in random trips, to the end of all; the number of preemptions."""
    dice = random.Random(seed)
    num_blocks, tokens_per_block, budget = 12, 4, dice.randint(6, 30)
    store = KVStore(num_blocks, tokens_per_block, dice.random() < 0.5)
    planner = Planner(store, budget, dice.randint(1, 6), policy)
    capacity = num_blocks * tokens_per_block
    live: list[Sequence] = []
    for order in range(dice.randint(1, 8)):
        prompt = [dice.randint(0, 1)] * dice.randint(1, capacity - 1)
        limit = dice.randint(len(prompt) + 1, capacity)
        live.append(Sequence(order, prompt, limit, order=order, priority=dice.randint(0, 1)))
    preemptions = 0
    for _ in range(5_000):
        if not live:
            break
        offered = [s for s in live if dice.random() < 0.9] or live
        plan = planner.plan(offered, live)
        store.check()
        preemptions += len(plan.preempted)
        assert sum(run.count for run in plan.runs) <= budget
        first = min(live, key=lambda s: (-s.priority, s.order))
        others = [run for run in plan.runs if run.sequence is not first]
        if policy == "max_utilization" and first in offered and all(r.count == 1 for r in others):
            assert first in [run.sequence for run in plan.runs], "the first of all always advances"
        for run in plan.runs:
            sequence = run.sequence
            assert len(store.blocks(sequence.sequence_id, 0)) * tokens_per_block >= len(sequence.tokens)
            sequence.advance(run.count)
            store.publish(sequence.sequence_id, 0, np.array(sequence.tokens), sequence.num_computed)
            if sequence.num_pending == 0:
                sequence.append(0)
            if len(sequence.tokens) == sequence.limit:
                store.free(sequence.sequence_id)
                live.remove(sequence)
    assert not live, "somebody never finished"
    assert store.num_held == 0
    return preemptions


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_under_max_utilization_all_finish_within_the_budgets(seed: int) -> None:
    _simulate(seed, "max_utilization")


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_under_guaranteed_no_evict_all_finish_and_nobody_is_preempted(seed: int) -> None:
    assert _simulate(seed, "guaranteed_no_evict") == 0


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=8))
def test_the_future_peak_is_the_peak_of_what_happens(sequences: list[tuple[int, int]]) -> None:
    def blocks(step: int) -> int:
        return sum(-(-(length + step) // 4) for length, remaining in sequences if step <= remaining)

    expected = max(blocks(step) for step in range(41))
    assert future_peak([s[0] for s in sequences], [s[1] for s in sequences], 4) == expected


def test_guaranteed_no_evict_lets_a_sequence_wait_that_max_utilization_admits() -> None:
    admitted = {}
    for policy in ("max_utilization", "guaranteed_no_evict"):
        planner = Planner(KVStore(8, 4), 64, 8, policy)
        live = [_sequence(0, 8, limit=20), _sequence(1, 8, limit=20)]
        admitted[policy] = len(planner.plan(live, live).runs)
    assert admitted == {"max_utilization": 2, "guaranteed_no_evict": 1}
