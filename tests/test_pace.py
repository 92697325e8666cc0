"""Prompts advance at a pace that leaves those who stream alone, whatever the machine."""

from __future__ import annotations

import random

import pytest

from conftest import generate_all, make_engine, random_prompt, solo, tiny_model
from triton_inflight.kv_store import KVStore
from triton_inflight.pace import Pace
from triton_inflight.planner import Planner
from triton_inflight.sequence import Sequence


def seconds(decodes: int, prompt_tokens: int, behind: int = 0) -> float:
    """A machine: a step costs so much, each decode and each token of a prompt, which grows along the prompt."""
    return 0.008 + 0.0004 * decodes + prompt_tokens * (0.0003 + 1e-7 * behind)


def trained(stretch: float) -> Pace:
    pace = Pace(stretch)
    pace.observe(seconds(0, 400), 0, 400)
    for decodes in (1, 8, 16) * 20:
        pace.observe(seconds(decodes, 0), decodes, 0)
    return pace


@pytest.mark.parametrize("stretch", [3, 5, 10])
@pytest.mark.parametrize("decodes", [1, 16, 32])
def test_a_step_with_a_long_prompt_is_within_the_stretch(stretch: int, decodes: int) -> None:
    """Also at numbers of sequences that were never seen without prompts beside them."""
    pace, behind, steps = trained(stretch), 0, []
    while behind < 6000:
        allowed = pace.allowed(decodes)
        assert allowed is not None
        steps.append(seconds(decodes, allowed, behind))
        pace.observe(steps[-1], decodes, allowed)
        behind += allowed
    quiet = seconds(decodes, 0)
    assert max(steps) < 1.1 * stretch * quiet
    assert sum(steps) / len(steps) > 0.6 * stretch * quiet, "what is allowed is made use of"


def test_one_step_that_took_long_for_other_reasons_changes_little() -> None:
    pace = trained(3)
    before = pace.allowed(8)
    pace.observe(30.0, 8, 0)
    after = pace.allowed(8)
    assert before is not None
    assert after is not None
    assert before <= after < 1.3 * before


@pytest.mark.parametrize("pace", [Pace(0), Pace(3)], ids=["no bound", "nothing known yet"])
def test_no_bound(pace: Pace) -> None:
    assert pace.allowed(8) is None


def test_nobody_waits_for_nobody() -> None:
    assert trained(3).allowed(0) is None


def test_a_prompt_advances_however_slow_it_is() -> None:
    pace = trained(3)
    for _ in range(30):
        pace.observe(60.0, 4, 16)
    assert pace.allowed(4) == 16


def test_the_planner_keeps_to_the_pace_while_others_decode() -> None:
    pace = trained(3)
    allowed = pace.allowed(1)
    assert allowed is not None
    assert 16 < allowed < 400
    planner = Planner(KVStore(64, 16), max_num_tokens=512, max_running_sequences=8, pace=pace)
    stream, prompt = Sequence(1, [1], 50), Sequence(2, [1] * 400, 500)
    planner.plan([stream], [stream])
    stream.advance(1)
    stream.tokens.append(1)
    plan = planner.plan([stream, prompt], [stream, prompt])
    assert {run.sequence: run.count for run in plan.runs} == {stream: 1, prompt: allowed}
    planner = Planner(KVStore(64, 16), max_num_tokens=512, max_running_sequences=8, pace=pace)
    alone = Sequence(3, [1] * 400, 500)
    assert planner.plan([alone], [alone]).runs[0].count == 400


def test_outputs_do_not_depend_on_it() -> None:
    """However the pace cuts prompts, here by chance."""
    model, dice = tiny_model("llama"), random.Random(0)
    engine = make_engine(model)
    pace = Pace(3)
    pace.allowed = lambda decodes: dice.randint(16, 40) if decodes else None  # type: ignore[method-assign]
    engine._planner._pace = pace
    prompts = [random_prompt(i, length) for i, length in enumerate((20, 200, 90, 300))]
    expected = [solo(model, engine._tokenizer.encode(p), 24) for p in prompts]
    assert generate_all(engine, prompts, [24] * 4, [0, 3, 5, 6])[0] == expected
