"""The engine against the oracle: what a sequence generates does not depend on whom it shares steps with."""

from __future__ import annotations

import cProfile
import random
import statistics

import pytest

from conftest import FAMILIES, generate_all, make_engine, random_prompt, solo, tiny_model
from triton_inflight.engine import Engine
from triton_inflight.errors import RequestError
from triton_inflight.protocol import GenerationRequest

LENGTHS = [1, 3, 17, 40, 90, 16, 2, 33]
MAX_TOKENS = [20, 31, 12, 25, 9, 40, 1, 16]
ARRIVALS = [0, 0, 1, 4, 6, 6, 9, 15]


def _prompts() -> list[str]:
    return [random_prompt(seed, length) for seed, length in enumerate(LENGTHS)]


def _expected(model, prompts: list[str], max_tokens: list[int]) -> list[list[int]]:
    encode = make_engine(model)._tokenizer.encode
    return [solo(model, encode(p), n) for p, n in zip(prompts, max_tokens, strict=True)]


@pytest.mark.parametrize("native", [True, False], ids=["native", "reference"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_ragged_batches_generate_what_each_prompt_generates_alone(family: str, native: bool) -> None:
    model = tiny_model(family)
    prompts = _prompts()
    engine = make_engine(model, max_num_tokens=24, native=native)
    outputs, steps = generate_all(engine, prompts, MAX_TOKENS, ARRIVALS)
    expected = _expected(model, prompts, MAX_TOKENS)
    assert outputs == expected
    assert len({tuple(output[:5]) for output in expected}) > 4, "the oracle must tell prompts apart"
    assert any(s.num_prefill_tokens and s.num_decode_tokens for s in steps)


def test_a_decode_step_sees_one_token_of_each_sequence() -> None:
    engine = make_engine(tiny_model("llama"))
    _, steps = generate_all(engine, _prompts(), [12] * len(LENGTHS))
    assert steps[0].num_prefill_tokens == sum(LENGTHS)
    for step in steps[1:]:
        assert step.num_prefill_tokens == 0
        assert step.num_decode_tokens == step.num_sequences


def _calls_of_a_decode_step(engine: Engine) -> int:
    """Python-level calls of one step, native operations included: what does not depend on the machine."""
    profile = cProfile.Profile()
    profile.runcall(engine.step, [0])
    return sum(entry.callcount for entry in profile.getstats())


def test_the_work_of_a_decode_step_does_not_grow_with_the_text() -> None:
    """Attention itself apart, which is one native call a layer however long the text is."""
    engine = make_engine(tiny_model("llama"))
    engine.add(0, GenerationRequest("x" * 20, 400))
    calls = []
    for _ in range(400):
        calls.append(_calls_of_a_decode_step(engine))
        if 0 not in engine:
            break
    early, late = statistics.median(calls[5:60]), statistics.median(calls[-60:])
    assert len(calls) > 200
    assert late <= early * 1.02


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_store_under_pressure_preempts_and_changes_no_token(seed: int, reuse: bool) -> None:
    model = tiny_model("llama")
    dice = random.Random(seed)
    prompts = [random_prompt(i, dice.randint(1, 60)) for i in range(12)]
    max_tokens = [dice.randint(1, 50) for _ in prompts]
    engine = make_engine(
        model,
        num_blocks=15,
        tokens_per_block=8,
        max_num_tokens=32,
        max_seq_len=120,
        max_running_sequences=6,
        reuse=reuse,
    )
    outputs, steps = generate_all(engine, prompts, max_tokens, [dice.randint(0, 40) for _ in prompts])
    assert outputs == _expected(model, prompts, max_tokens)
    assert sum(step.num_preempted for step in steps) > 0
    assert max(step.num_sequences for step in steps) <= 6
    assert engine.store.num_held == 0


def test_a_shared_prefix_is_computed_once_and_changes_no_token() -> None:
    model = tiny_model("llama")
    prefix = random_prompt(0, 64)
    prompts = [prefix + random_prompt(i, 5 + i) for i in range(4)] + [prefix]
    outputs, steps = generate_all(make_engine(model, reuse=True), prompts, [10] * 5, [0, 2, 2, 30, 30])
    assert outputs == _expected(model, prompts, [10] * 5)
    # Three prompts find the whole prefix; the last has to run its last token, so it finds one block less.
    assert sum(step.num_prefix_hit_tokens for step in steps) == 3 * 64 + 48


def test_the_store_is_empty_when_nobody_is_live() -> None:
    engine = make_engine(tiny_model("llama"))
    generate_all(engine, _prompts(), MAX_TOKENS, ARRIVALS)
    assert len(engine) == 0
    assert engine.store.num_held == 0


def test_a_dropped_sequence_gives_its_blocks_back_at_once() -> None:
    engine = make_engine(tiny_model("llama"))
    engine.add(7, GenerationRequest("abc" * 20, 50))
    engine.step([7])
    assert engine.store.num_held == 4
    engine.drop(7)
    assert engine.store.num_held == 0
    assert 7 not in engine
    engine.drop(7)  # a second time is no error


def _engine_of_64_tokens() -> Engine:
    return make_engine(tiny_model("llama"), max_seq_len=64)


def test_output_stops_at_the_end_of_the_context() -> None:
    outputs, _ = generate_all(_engine_of_64_tokens(), ["x" * 60], [50])
    assert len(outputs[0]) == 4


def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers() -> None:
    engine = _engine_of_64_tokens()
    with pytest.raises(RequestError, match=r"text_input is 64 tokens long.*at most 63"):
        engine.add(1, GenerationRequest("x" * 64, 10))
    assert len(engine) == 0
