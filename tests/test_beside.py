"""However Triton splits live sequences over trips, each gets its own tokens, in order, on its own trips."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import byte_tokenizer, make_engine, random_prompt, solo
from idle import endless_model, wait_until
from test_contract import WHAT_COMES_BACK, Asked, _no_metric
from triton_inflight.engine import Engine
from triton_inflight.errors import RequestError
from triton_inflight.lifecycle import Lifecycle
from triton_inflight.metrics import Metrics
from triton_inflight.protocol import model_defaults
from triton_inflight.schedulers import ClientDriven
from triton_inflight.settings import Settings

MOST_KEPT = 4
SETTINGS = Settings(model="tiny", max_trip_ms=0, max_steps_per_execute=MOST_KEPT)


class Request(Asked):
    """A request that Triton brings on some trips only. Its client may leave."""

    def __init__(self, number: int, prompt: str, max_tokens: int, **parameters: Any) -> None:
        fields = {"text_input": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        super().__init__(number, {**fields, **WHAT_COMES_BACK, **parameters})
        self.prompt, self.max_tokens = prompt, max_tokens
        self.on_trip = self.gone = False

    @property
    def sequence_id(self) -> int:
        assert isinstance(self.correlation_id, int)
        return self.correlation_id

    def is_cancelled(self) -> bool:
        return self.gone

    def send(self, tensors: Any, final: bool) -> None:
        assert self.on_trip, "a response is sent on a trip of its request, or it is lost"
        super().send(tensors, final)

    def refuse(self, error: RequestError) -> None:
        assert self.on_trip, "an error too"
        super().refuse(error)

    def tokens(self) -> list[int]:
        """What its client has got."""
        return [token for _, tokens, _ in self.choices() for token in tokens]


@pytest.fixture(scope="module")
def model():
    return endless_model()


@pytest.fixture(scope="module")
def engine(model) -> Engine:
    return make_engine(model)


@pytest.fixture
def lifecycle(engine: Engine) -> Iterator[Lifecycle]:
    made = Lifecycle(SETTINGS, engine, model_defaults(SETTINGS), Metrics(_no_metric))
    yield made
    made.close()
    assert len(engine) == engine.store.num_held == 0


def bring(lifecycle: Lifecycle, *requests: Request) -> None:
    """A trip of these."""
    for request in requests:
        request.on_trip = True
    lifecycle.trip(requests)
    for request in requests:
        request.on_trip = False


def bring_to_the_end(lifecycle: Lifecycle, *requests: Request) -> None:
    """Trips of these until all are answered."""
    for _ in range(1000):
        if not (going := [request for request in requests if not request.done]):
            return
        bring(lifecycle, *going)
    raise AssertionError("they never end")


def oracle(model, request: Request) -> list[int]:
    return solo(model, byte_tokenizer().encode(request.prompt), request.max_tokens)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), number=st.integers(2, 6), tight=st.booleans())
def test_any_split_over_trips_gives_the_tokens_of_the_oracle(
    model, engine: Engine, seed: int, number: int, tight: bool
) -> None:
    """Also where some clients leave, whom Triton may bring once more or drop, and where blocks run short."""
    used = make_engine(model, num_blocks=24, tokens_per_block=4) if tight else engine
    dice = random.Random(seed)
    lifecycle = Lifecycle(SETTINGS, used, model_defaults(SETTINGS), Metrics(_no_metric))
    try:
        requests = [
            Request(
                i,
                random_prompt(dice.randrange(1000), dice.randint(1, 30)),
                dice.randint(1, 25),
                stream=dice.random() < 0.7,
                stream_interval=dice.choice([1, 1, 3]),
            )
            for i in range(number)
        ]
        leaving = [request for request in requests if dice.random() < 0.25]
        _split_at_random(lifecycle, requests, leaving, dice)
        for request in requests:
            if not request.gone:
                assert request.error is None
                assert request.tokens() == oracle(model, request)
        wait_until(lambda: len(used) == 0, "those whose clients have left are reaped")
        assert used.store.num_held == 0
        used.store.check()
    finally:
        lifecycle.close()


def _split_at_random(
    lifecycle: Lifecycle, requests: Sequence[Request], leaving: Sequence[Request], dice: random.Random
) -> None:
    for _ in range(1000):
        going = [request for request in requests if not request.done and not request.gone]
        if not going:
            return
        for request in going:
            if request in leaving and not request.starts and dice.random() < 0.2:
                request.gone = True
        stays = [request for request in going if not request.gone or dice.random() < 0.3]
        bring(lifecycle, *dice.sample(stays, dice.randint(min(1, len(stays)), len(stays))))
    raise AssertionError("they never end")


def generated(lifecycle: Lifecycle, request: Request) -> tuple[int, int]:
    """Tokens of its sequence so far, and those of them that wait for its request."""
    client = lifecycle._clients[request.sequence_id]
    return client.num_output_tokens, client.num_kept


def test_the_absent_are_stepped_too(lifecycle: Lifecycle, model) -> None:
    first, second = Request(0, "first", 20), Request(1, "second", 20)
    bring(lifecycle, first)
    assert generated(lifecycle, first) == (1, 0)
    for trips in (1, 2):
        bring(lifecycle, second)
        assert generated(lifecycle, second) == (trips, 0), "with somebody absent, a trip is of one step"
        assert generated(lifecycle, first) == (1 + trips, trips)
    bring(lifecycle, first)
    assert generated(lifecycle, first) == (4, 0)
    bring_to_the_end(lifecycle, first, second)
    assert [first.tokens(), second.tokens()] == [oracle(model, first), oracle(model, second)]


def test_what_was_kept_is_sent_before_the_step(
    lifecycle: Lifecycle, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Request(0, "first", 20), Request(1, "second", 20)
    bring(lifecycle, first)
    for _ in range(MOST_KEPT):
        bring(lifecycle, second)
    due = lifecycle._clients[first.sequence_id].pending[0].text
    assert due, "the text of these tokens can be shown"
    step, seen = engine.step, []

    def look(sequence_ids: Any) -> Any:
        seen.append(first.responses[-1]["text_output"].item().decode())
        return step(sequence_ids)

    monkeypatch.setattr(engine, "step", look)
    bring(lifecycle, first)
    assert seen == [due]
    monkeypatch.undo()
    bring_to_the_end(lifecycle, first, second)


def test_what_is_kept_is_bounded(lifecycle: Lifecycle) -> None:
    first, second = Request(0, "first", 50), Request(1, "second", 3 * MOST_KEPT)
    bring(lifecycle, first)
    while not second.done:
        bring(lifecycle, second)
        assert generated(lifecycle, first)[1] <= MOST_KEPT
    assert generated(lifecycle, first) == (1 + MOST_KEPT, MOST_KEPT)
    bring_to_the_end(lifecycle, first)


def test_who_ends_while_absent_frees_its_blocks_and_is_answered_on_its_trip(
    lifecycle: Lifecycle, engine: Engine, model
) -> None:
    first, second = Request(0, "first", 2, stream=False), Request(1, "second", 10)
    bring(lifecycle, first)
    bring(lifecycle, second)
    assert first.sequence_id not in engine
    assert engine.store.num_held == len(engine.store.blocks(second.sequence_id, 0)) > 0
    assert not first.done
    bring(lifecycle, second)
    bring(lifecycle, first)
    assert first.done
    assert first.tokens() == oracle(model, first)
    bring_to_the_end(lifecycle, second)


def test_who_ends_while_absent_and_leaves_is_not_answered(lifecycle: Lifecycle) -> None:
    first, second = Request(0, "first", 2), Request(1, "second", 3)
    bring(lifecycle, first)
    bring_to_the_end(lifecycle, second)
    first.gone = True
    bring(lifecycle, first)
    assert not first.done, "it goes back to Triton, which then gives up its slot"


def test_who_is_absent_past_its_deadline_is_stepped_no_more(lifecycle: Lifecycle) -> None:
    first, second = Request(0, "first", 500, max_time=1), Request(1, "second", MOST_KEPT - 1)
    bring(lifecycle, first)
    time.sleep(1)
    bring_to_the_end(lifecycle, second)
    bring(lifecycle, first)
    assert first.done
    ((_, tokens, reason),) = first.choices()
    assert (len(tokens), reason) == (1, "timeout")


@pytest.mark.parametrize("broken", ["forward", "step"])
def test_a_fault_beside_whom_it_was_absent_is_told_on_its_trip(
    lifecycle: Lifecycle, engine: Engine, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Of the model's forward pass, and of anything else in a step."""

    def fail(*_: object) -> None:
        raise ValueError("it broke")

    first, second = Request(0, "first", 20), Request(1, "second", 20)
    bring(lifecycle, first)
    with monkeypatch.context() as patch:
        patch.setattr(*((engine._runner, "run") if broken == "forward" else (engine, "step")), fail)
        bring(lifecycle, second)
    assert len(engine) == engine.store.num_held == 0
    assert not first.done
    bring(lifecycle, first)
    for request in (first, second):
        assert request.error is not None
        assert "it broke" in str(request.error)


def test_start_and_end_in_one_request_end_in_its_trip_beside_others(lifecycle: Lifecycle, model) -> None:
    first, both = Request(0, "first", 40), Request(1, "both", 30)
    both.ends = True
    bring(lifecycle, first)
    bring(lifecycle, both)
    assert both.done
    assert both.tokens() == oracle(model, both)
    bring_to_the_end(lifecycle, first)
    assert first.tokens() == oracle(model, first)


def test_a_collision_ends_both_whatever_is_kept_for_the_older(lifecycle: Lifecycle) -> None:
    older, beside, newer = Request(0, "older", 30), Request(1, "beside", 30), Request(0, "newer", 30)
    bring(lifecycle, older)
    bring(lifecycle, beside)
    assert generated(lifecycle, older)[1] > 0
    bring(lifecycle, older, newer)
    for request in (older, newer):
        assert request.error is not None
        assert "got a second request while it was live" in str(request.error)
    bring_to_the_end(lifecycle, beside)


def test_a_client_that_drives_gets_a_token_only_when_it_asks(engine: Engine) -> None:
    driven = ClientDriven(SETTINGS, engine, model_defaults(SETTINGS), Metrics(_no_metric))
    try:
        first, second = Request(0, "first", 20), Request(1, "second", 20)
        bring(driven, first)
        bring(driven, second)
        assert generated(driven, first) == (1, 0)
    finally:
        for request in (first, second):
            engine.drop(request.sequence_id)
        driven.close()
