"""Any request at all: an error that names it, or answers that do not depend on how they are sent or who is beside."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import EOS, byte_tokenizer, make_engine, random_prompt, tiny_model
from test_sampling import assert_drawn_from
from triton_inflight.engine import Engine
from triton_inflight.errors import RequestError
from triton_inflight.lifecycle import Lifecycle
from triton_inflight.metrics import Family, Metric, Metrics
from triton_inflight.protocol import GenerationRequest, model_defaults
from triton_inflight.sampling_params import SamplingParams
from triton_inflight.settings import Settings

SETTINGS = Settings(model="tiny", default_max_tokens=8)


class Asked:
    """A request, and what comes back: the way the backend sees one of Triton's, and the way its client does."""

    def __init__(self, number: int, parameters: Mapping[str, Any]) -> None:
        self.correlation_id: int | str = number + 1
        self.starts, self.ends = True, False
        self.identity = (str(number), "")
        self.sender = self
        self.responses: list[dict[str, Any]] = []
        self.error: RequestError | None = None
        self.done = False
        self._parameters = dict(parameters)

    def is_padding(self) -> bool:
        return False

    def tensors(self) -> dict[str, Any]:
        return {"text_input": np.array([[self._parameters.get("text_input", "").encode()]], dtype=object)}

    def parameters(self) -> dict[str, Any]:
        return {name: value for name, value in self._parameters.items() if name != "text_input"}

    def timeout_microseconds(self) -> int:
        return 0

    def is_cancelled(self) -> bool:
        return False

    def send(self, tensors: Mapping[str, Any], final: bool) -> None:
        assert not self.done
        self.responses.append(dict(tensors))
        self.done = final

    def refuse(self, error: RequestError) -> None:
        assert not self.done
        self.error, self.done = error, True

    def reschedule(self) -> None:
        assert not self.done
        self.starts = False

    def choices(self) -> list[tuple[str, list[int], str]]:
        """Text, tokens and finish reason of every choice, put together from all responses."""
        found: dict[int, tuple[str, list[int], str]] = {}
        for response in self.responses:
            own = response.get("sequence_index")
            numbers = range(len(response["text_output"])) if own is None else [own.item()]
            reasons = response.get("finish_reason", [b""] * len(numbers))
            columns = zip(
                numbers,
                response["text_output"],
                response["output_ids"][0],
                response["num_output_tokens"],
                reasons,
                strict=True,
            )
            for number, text, ids, count, reason in columns:
                before = found.setdefault(number, ("", [], ""))
                assert before[2] == "", "nothing comes after the end of a choice"
                said = ids[:count].tolist()
                found[number] = (
                    before[0] + text.decode("utf-8", "strict"),
                    before[1] + said,
                    reason.decode(),
                )
        return [found[number] for number in sorted(found)]


class _Unread:
    """A metric that nobody looks at."""

    def increment(self, value: float) -> None: ...

    def set(self, value: float) -> None: ...

    def observe(self, value: float) -> None: ...


def _no_metric(_family: Family, _label: str | None) -> Metric:
    return _Unread()


def run(engine: Engine, requests: Sequence[Mapping[str, Any]]) -> list[Asked]:
    """All requests together, to their ends; nothing may be left of them."""
    lifecycle = Lifecycle(SETTINGS, engine, model_defaults(SETTINGS), Metrics(_no_metric))
    try:
        asked = [Asked(number, request) for number, request in enumerate(requests)]
        for _ in range(1000):
            if not (live := [one for one in asked if not one.done]):
                break
            lifecycle.trip(live)
        assert all(one.done for one in asked)
        assert len(engine) == engine.store.num_held == 0
        engine.store.check()
    finally:
        lifecycle.close()
    return asked


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine(tiny_model("llama"))


@pytest.fixture(scope="module")
def tight() -> Engine:
    """Its store is too small for a few sequences at a time."""
    return make_engine(tiny_model("llama"), num_blocks=24, tokens_per_block=4)


WHAT_COMES_BACK = {"return_output_ids": True, "return_finish_reason": True, "return_num_output_tokens": True}


def _one_of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


# Each of them is in half of the requests, with values at the edges of what is allowed.
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": _one_of(1, 2, 12),
    "min_tokens": _one_of(0, 1, 5),
    "temperature": _one_of(0, 1e-6, 2e-5, 0.7, 1, 100),
    "top_k": _one_of(-1, 1, 3, 2**31 - 1),
    "top_p": _one_of(1e-9, 0.5, 1),
    "min_p": _one_of(0, 0.2, 1),
    "typical_p": _one_of(1e-9, 0.5, 1),
    "repetition_penalty": _one_of(0.01, 1.3, 100),
    "presence_penalty": _one_of(-2, 2),
    "frequency_penalty": _one_of(-2, 2),
    "logit_bias": _one_of(f'{{"{EOS}": 100}}', f'{{"{EOS}": -100, "5": 100}}', '{"300": 1}'),
    "bad_words": _one_of("a", '["a", "bc", ""]', json.dumps([chr(i) for i in range(32, 127)])),
    "stop": _one_of("a", '["a", "e", " "]', json.dumps([chr(i) for i in range(40, 80)]), "<eos>"),
    "stop_token_ids": _one_of(5, f"[{EOS}, 7]", "[]"),
    "ignore_eos": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "exclude_input_in_output": st.booleans(),
    "n": _one_of(1, 2, 3),
    "best_of": _one_of(1, 2, 4),
    "num_return_sequences": _one_of(1, 2),
    "stream_interval": _one_of(1, 2, 1024),
    "logprobs": _one_of(0, 3, 20),
    "prompt_logprobs": _one_of(0, 2),
    "return_log_probs": st.booleans(),
    "return_stop_reason": st.booleans(),
    "input_ids": _one_of("[5, 6, 7]", "[300]", f"[{EOS}]"),
    "messages": _one_of('[{"role": "user", "content": "Hi"}]', '[{"role": 1}]'),
    "request_priority": _one_of(-1, 1),
}


@st.composite
def anything(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.sets(st.sampled_from(sorted(FIELDS)), max_size=10))
    drawn = {name: draw(FIELDS[name]) for name in sorted(names)}
    prompt = draw(_one_of("x", "e\u0301 \U0001f600", " stop words ", ""))
    return {"text_input": prompt, "seed": draw(st.integers(0, 2**64 - 1)), **drawn, **WHAT_COMES_BACK}


def plausible() -> st.SearchStrategy[dict[str, Any]]:
    """Without what is refused most often, so that most requests are answered."""
    rare = ("input_ids", "messages", "num_return_sequences", "best_of", "min_tokens")

    def trimmed(request: dict[str, Any]) -> dict[str, Any]:
        request = {name: value for name, value in request.items() if name not in rare}
        bias = request.get("logit_bias", "")
        return {
            **request,
            "text_input": request["text_input"] or "y",
            "logit_bias": bias.replace("300", "30") or "{}",
        }

    return anything().map(trimmed)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(requests=st.lists(st.one_of(anything(), plausible(), plausible()), min_size=1, max_size=5))
def test_answers_do_not_depend_on_how_they_are_sent_or_who_is_beside(
    engine: Engine, tight: Engine, requests: list[dict[str, Any]]
) -> None:
    """A few requests at a time, each alone and unstreamed, then streamed and together in a store that is too small."""
    together = run(tight, [{**request, "stream": True} for request in requests])
    for request, streamed in zip(requests, together, strict=True):
        (alone,) = run(engine, [request])
        if alone.error is not None:
            assert alone.error.code == "INVALID_ARG", str(alone.error)
            assert streamed.error is not None
        elif streamed.error is not None:
            assert "allowed with stream" in str(streamed.error)
        else:
            assert streamed.choices() == alone.choices()
            assert all(reason in ("stop", "length") for _, _, reason in alone.choices())


def test_most_of_these_requests_are_answered(engine: Engine) -> None:
    """Else the test above would say little."""
    answered = refused = 0

    @settings(max_examples=50, deadline=None, derandomize=True, database=None)
    @given(request=plausible())
    def ask(request: dict[str, Any]) -> None:
        nonlocal answered, refused
        (asked,) = run(engine, [request])
        answered += asked.error is None
        refused += asked.error is not None

    ask()
    assert answered > 2 * refused


@pytest.mark.parametrize("together", [1, 50])
def test_samples_of_a_model_follow_its_probabilities(together: int) -> None:
    """2,000 first tokens at temperature 1, alone and beside others with parameters of their own."""
    model = tiny_model("llama", num_hidden_layers=1)
    with torch.inference_mode():
        expected = (
            model(torch.tensor([byte_tokenizer().encode("draw")])).logits[0, -1].double().softmax(-1).numpy()
        )
    engine = make_engine(model)
    tokens = []
    for first in range(0, 2000, together):
        ids = range(first, first + together)
        for seed in ids:
            sampling = SamplingParams(temperature=1.0, seed=seed)
            engine.add(seed, GenerationRequest("draw", 1, sampling=sampling))
        mates = range(10_000, 10_000 + (4 if together > 1 else 0))
        for mate in mates:
            sampling = SamplingParams(temperature=0.5 * (mate % 2), top_k=3, presence_penalty=1.0)
            engine.add(mate, GenerationRequest(random_prompt(mate + first, 9), 1, sampling=sampling))
        updates = engine.step([*ids, *mates]).updates
        tokens += [update.tokens[0] for update in updates if update.sequence_id in ids]
    assert len(tokens) == 2000
    assert_drawn_from(tokens, expected)


def test_choices_that_end_in_one_step_keep_their_last_tokens(engine: Engine) -> None:
    for how in ({"n": 3}, {"n": 3, "stream": True}, {"num_return_sequences": 3}):
        request = {"text_input": "x", "max_tokens": 6, "temperature": 1, "seed": 5, "ignore_eos": True}
        (asked,) = run(engine, [{**request, **how, **WHAT_COMES_BACK}])
        assert [(len(ids), reason) for _, ids, reason in asked.choices()] == [(6, "length")] * 3


def test_everything_made_unlikely_harms_no_neighbour(engine: Engine) -> None:
    """Biases are finite, and an EOS token is no bad word: something is always the most likely."""
    words = [chr(i) for i in range(32, 127)]
    bias = {str(token): -100 for token in range(EOS + 1)}
    unlikely = {"bad_words": json.dumps(words), "logit_bias": json.dumps(bias), **WHAT_COMES_BACK}
    neighbour = {"text_input": "neighbour", **WHAT_COMES_BACK}
    asked = run(engine, [{"text_input": "x", **unlikely}, neighbour])
    assert not set(asked[0].choices()[0][0]) & set(words)
    assert asked[1].choices() == run(engine, [neighbour])[0].choices()


@pytest.mark.parametrize("interval", [1, 3])
def test_lists_as_long_as_they_may_be_are_bearable(engine: Engine, interval: int) -> None:
    """64 stops and 256 bad words of 1,000 characters, and 1,024 biases, beside a plain request."""
    stops = ["s" * 999 + chr(i) for i in range(200, 264)]
    words = ["w" * 999 + chr(i) for i in range(200, 456)]
    request = {
        "text_input": "x",
        "max_tokens": 20,
        "stop": json.dumps(stops),
        "bad_words": json.dumps(words),
        "stream": True,
        "stream_interval": interval,
        "ignore_eos": True,
        **WHAT_COMES_BACK,
    }
    plain = {"text_input": "x", "max_tokens": 20, "ignore_eos": True, **WHAT_COMES_BACK}
    asked = run(engine, [request, plain])
    assert asked[0].choices() == asked[1].choices()


def test_every_parameter_may_stand_beside_every_other(engine: Engine) -> None:
    """Pairs, each once: none of them is a fault of the server."""
    base = {"text_input": "pairs", "max_tokens": 3, "seed": 1, **WHAT_COMES_BACK}
    last = {name: list(_edges(name))[-1] for name in FIELDS if name != "messages"}
    pairs = [{**base, one: last[one], other: last[other]} for one, other in itertools.combinations(last, 2)]
    for first in range(0, len(pairs), 32):
        for asked in run(engine, pairs[first : first + 32]):
            assert asked.error is None or asked.error.code == "INVALID_ARG", str(asked.error)


def _edges(name: str) -> Sequence[Any]:
    strategy = FIELDS[name]
    return getattr(strategy, "elements", (False, True))
