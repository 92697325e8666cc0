"""The request contract in the engine: sampling, choices, stops, log probabilities, echo, and what they cost."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from conftest import EOS, byte_tokenizer, generate_all, make_engine, random_prompt, solo, tiny_model
from triton_inflight.engine import Engine
from triton_inflight.errors import RequestError
from triton_inflight.generation import Update
from triton_inflight.protocol import GenerationRequest
from triton_inflight.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def _run(
    engine: Engine, requests: list[GenerationRequest], arrivals: list[int] | None = None
) -> list[list[Update]]:
    """All updates of each request, run together to their ends."""
    updates: list[list[Update]] = [[] for _ in requests]
    waiting = list(enumerate(arrivals or [0] * len(requests)))
    steps = 0
    while waiting or len(engine):
        for index, arrival in list(waiting):
            if arrival <= steps:
                engine.add(index, requests[index])
                waiting.remove((index, arrival))
        for update in engine.step([i for i in range(len(requests)) if i in engine]).updates:
            assert update.error is None
            updates[update.sequence_id].append(update)
        engine.store.check()
        steps += 1
        assert steps < 2_000
    assert engine.store.num_held == 0
    return updates


def _tokens(updates: list[Update], choice: int = 0) -> list[int]:
    return [token for update in updates if update.choice == choice for token in update.tokens]


def _text(updates: list[Update], choice: int = 0) -> str:
    return "".join(update.text for update in updates if update.choice == choice)


def _sampled(prompt: str, seed: int | None, **changes: object) -> GenerationRequest:
    sampling = SamplingParams(temperature=1.0, top_k=20, seed=seed)
    return GenerationRequest(prompt, 24, sampling=sampling, **changes)


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_after_preemption(model) -> None:
    request = _sampled("the same", seed=7)
    alone = _tokens(_run(make_engine(model), [request])[0])
    others = [_sampled(random_prompt(i, 3 + 4 * i), seed=i) for i in range(15)]
    batch = _run(make_engine(model), [*others, request], arrivals=[i // 3 for i in range(15)] + [4])
    assert _tokens(batch[-1]) == alone
    tight = make_engine(model, num_blocks=12, tokens_per_block=8, max_seq_len=80)
    outputs = _run(tight, [*others[:8], request])
    assert _tokens(outputs[-1]) == alone


def test_without_a_seed_texts_differ(model) -> None:
    texts = {tuple(_tokens(u)) for u in _run(make_engine(model), [_sampled("x", None) for _ in range(6)])}
    assert len(texts) == 6


@pytest.mark.parametrize("num_blocks", [256, 14])
def test_greedy_choices_share_the_prompt_and_equal_the_oracle(model, num_blocks: int) -> None:
    """Of a store too small for all of them, choices are preempted, and still say the same."""
    prompt = random_prompt(1, 37)
    expected = solo(model, byte_tokenizer().encode(prompt), 20)
    engine = make_engine(model, num_blocks=num_blocks, tokens_per_block=8, max_seq_len=80)
    updates = _run(engine, [GenerationRequest(prompt, 20, n=4, best_of=4)])[0]
    for choice in range(4):
        assert _tokens(updates, choice) == expected


def test_the_blocks_of_a_prompt_are_held_once_for_all_choices(model) -> None:
    engine = make_engine(model, tokens_per_block=16)
    engine.add(0, GenerationRequest(random_prompt(1, 64), 20, n=4, best_of=4))
    engine.step([0])
    assert engine.store.num_held == 4
    engine.step([0])
    assert engine.store.num_held == 4 + 4


def test_sampled_choices_differ_and_are_the_same_again_with_the_same_seed(model) -> None:
    request = _sampled("choices", seed=3, n=3, best_of=3)
    first, second = (_run(make_engine(model), [request])[0] for _ in range(2))
    texts = [_tokens(first, choice) for choice in range(3)]
    assert len({tuple(text) for text in texts}) == 3
    assert [_tokens(second, choice) for choice in range(3)] == texts


def test_more_choices_than_may_run_are_refused(model) -> None:
    engine = make_engine(model, max_running_sequences=2)
    with pytest.raises(RequestError, match=r"best_of is 3; at most 2 .*max_running_sequences"):
        engine.add(0, GenerationRequest("x", 5, n=3, best_of=3))


def test_log_probabilities_are_those_of_the_stock_model(model) -> None:
    prompt = random_prompt(2, 45)
    sampling = SamplingParams(logprobs=2, prompt_logprobs=0)
    requests = [GenerationRequest(prompt, 10, sampling=sampling), GenerationRequest("mate", 30)]
    updates = _run(make_engine(model, max_num_tokens=16), requests)[0]
    ids = byte_tokenizer().encode(prompt)
    tokens = ids + _tokens(updates)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    given = [position for update in updates for position in update.logprobs]
    rows = range(len(ids) - 1, len(tokens) - 1)
    for position, row in zip(given, rows, strict=True):
        assert position.chosen.token_id == tokens[row + 1]
        assert position.chosen.logprob == pytest.approx(expected[row, tokens[row + 1]].item(), abs=1e-4)
        assert len(position.top) == 2
    assert updates[-1].cumulative_logprob == pytest.approx(sum(p.chosen.logprob for p in given), abs=1e-4)
    of_prompt = updates[0].prompt_logprobs
    assert of_prompt is not None
    assert of_prompt[0] is None
    assert len(of_prompt) == len(ids)
    for row, position in enumerate(of_prompt[1:]):
        assert position.chosen.token_id == ids[row + 1]
        assert position.chosen.logprob == pytest.approx(expected[row, ids[row + 1]].item(), abs=1e-4)


def test_log_probabilities_of_a_prompt_are_whole_although_it_is_cached(model) -> None:
    engine = make_engine(model, reuse=True, tokens_per_block=16)
    prompt = random_prompt(3, 64)
    _run(engine, [GenerationRequest(prompt, 2)])
    asking = GenerationRequest(prompt, 2, sampling=SamplingParams(prompt_logprobs=0))
    assert len(_run(engine, [asking])[0][0].prompt_logprobs) == 64


def test_a_stop_string_ends_the_text_before_it(model) -> None:
    whole = _text(_run(make_engine(model), [GenerationRequest("stop", 30)])[0])
    stop = whole[8:11]
    updates = _run(make_engine(model), [GenerationRequest("stop", 30, stop=(stop,))])[0]
    assert _text(updates) == whole[: whole.index(stop)]
    assert (updates[-1].finish_reason, updates[-1].stop_reason) == ("stop", stop)
    kept = GenerationRequest("stop", 30, stop=(stop,), include_stop_str_in_output=True)
    assert _text(_run(make_engine(model), [kept])[0]) == whole[: whole.index(stop) + len(stop)]


def test_a_stop_token_ends_the_text_and_is_named(model) -> None:
    tokens = _tokens(_run(make_engine(model), [GenerationRequest("stop", 30)])[0])
    end = tokens[6]
    request = GenerationRequest("stop", 30, sampling=SamplingParams(stop_token_ids=(end,)))
    updates = _run(make_engine(model), [request])[0]
    assert _tokens(updates) == tokens[: tokens.index(end) + 1]
    assert (updates[-1].finish_reason, updates[-1].stop_reason) == ("stop", end)


def test_what_may_begin_a_stop_is_shown_when_the_text_ends(model) -> None:
    whole = _text(_run(make_engine(model), [GenerationRequest("held", 12)])[0])
    stop = whole[-2:] + "never comes"
    assert _text(_run(make_engine(model), [GenerationRequest("held", 12, stop=(stop,))])[0]) == whole


def test_the_prompt_is_echoed_where_it_is_asked_for(model) -> None:
    plain = _text(_run(make_engine(model), [GenerationRequest("echo", 8)])[0])
    echoed = _run(make_engine(model), [GenerationRequest("echo", 8, exclude_input_in_output=False)])[0]
    assert _text(echoed) == "echo" + plain


def test_token_ids_are_a_prompt_too(model) -> None:
    ids = byte_tokenizer().encode("as ids")
    updates = _run(make_engine(model), [GenerationRequest("", 8, input_ids=tuple(ids))])[0]
    assert _tokens(updates) == solo(model, ids, 8)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (GenerationRequest("", 8, input_ids=(5, EOS + 1)), "input_ids"),
        (GenerationRequest("x", 8, sampling=SamplingParams(logit_bias={EOS + 1: 1.0})), "logit_bias"),
        (GenerationRequest("x", 8, sampling=SamplingParams(stop_token_ids=(-1,))), "stop_token_ids"),
        (GenerationRequest("", 8, messages=({"role": "user", "content": "x"},)), "messages"),
    ],
)
def test_what_the_model_does_not_know_is_refused(model, request_: GenerationRequest, field: str) -> None:
    with pytest.raises(RequestError, match=field):
        make_engine(model).add(0, request_)


def test_a_bad_word_never_comes(model) -> None:
    whole = _text(_run(make_engine(model), [GenerationRequest("bad", 30)])[0])
    word = next(a + b for a, b in pairwise(whole) if (a + b).isascii() and (a + b).isprintable())
    text = _text(_run(make_engine(model), [GenerationRequest("bad", 30, bad_words=(word,))])[0])
    assert word not in text


def test_an_early_end_shows_what_was_held_back(model) -> None:
    engine = make_engine(model)
    engine.add(0, GenerationRequest("early", 30, stop=("never",)))
    for _ in range(5):
        engine.step([0])
    (update,) = engine.finish(0, "timeout")
    assert update.finish_reason == "timeout"
    assert 0 not in engine
    assert engine.store.num_held == 0


def test_a_token_with_no_score_ends_its_own_sequence_only(model) -> None:
    everything = {token: float("-inf") for token in range(EOS + 1)}
    engine = make_engine(model)
    engine.add(0, GenerationRequest("x", 8, sampling=SamplingParams(logit_bias=everything)))
    engine.add(1, GenerationRequest("neighbour", 8))
    updates = {update.sequence_id: update for update in engine.step([0, 1]).updates}
    assert "every token is banned" in updates[0].error
    assert updates[1].error is None
    assert 0 not in engine
    outputs = []
    while 1 in engine:
        outputs += [t for u in engine.step([1]).updates for t in u.tokens]
    assert [*updates[1].tokens, *outputs] == solo(model, byte_tokenizer().encode("neighbour"), 8)


def test_generate_all_is_greedy(model) -> None:
    """The helper that other tests rely on."""
    prompt = random_prompt(9, 12)
    assert generate_all(make_engine(model), [prompt], [6])[0] == [
        solo(model, byte_tokenizer().encode(prompt), 6)
    ]
