"""Sampling: transformers' processors are the oracle, rows do not touch each other, seeds hold everywhere."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

from triton_inflight.sampling import NO_TOKEN, probabilities, sample
from triton_inflight.sampling_params import SamplingParams
from triton_inflight.sampling_state import SamplingState, TokenCounts

Floats = npt.NDArray[np.float64]
EOS = (2, 5)


def scores_of(rows: int, vocabulary: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def state_of(params: SamplingParams, prompt: list[int], output: list[int]) -> SamplingState:
    state = SamplingState(params, prompt, EOS)
    for token in output:
        state.append(token)
    return state


# --- Parity with transformers ------------------------------------------------------------------------------


class OpenAIPenalties(LogitsProcessor):
    """mu[t] - count[t] * frequency - (count[t] > 0) * presence, over the output."""

    def __init__(self, params: SamplingParams, num_prompt: int) -> None:
        self.params, self.num_prompt = params, num_prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = np.bincount(input_ids[0, self.num_prompt :].numpy(), minlength=scores.shape[1])
        penalty = counts * self.params.frequency_penalty + (counts > 0) * self.params.presence_penalty
        return scores - torch.from_numpy(penalty)


@cache
def any_model() -> LlamaForCausalLM:
    """transformers puts its processors together in a method of a model; which model does not matter."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
    )


def transformers_probabilities(
    scores: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]
) -> Floats:
    """What transformers samples from: (vocabulary,), its processors in its order, in float64."""
    ending = [*EOS, *params.stop_token_ids]
    config = GenerationConfig(
        do_sample=not params.is_greedy,
        temperature=params.temperature if not params.is_greedy else 1.0,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p or None,
        typical_p=params.typical_p,
        repetition_penalty=params.repetition_penalty,
        min_new_tokens=params.min_tokens or None,
        bad_words_ids=[list(word) for word in params.bad_words] or None,
        sequence_bias=[[[token], bias] for token, bias in params.logit_bias.items()] or None,
    )
    config._eos_token_tensor = torch.tensor(list(EOS))
    processors = any_model()._get_logits_processor(
        config,
        input_ids_seq_length=len(prompt),
        logits_processor=LogitsProcessorList([OpenAIPenalties(params, len(prompt))]),
    )
    for processor in processors:
        if hasattr(processor, "min_new_tokens"):
            processor.eos_token_id = torch.tensor(ending)
    ids = torch.tensor([prompt + output])
    processed = processors(ids, scores[None].double())[0]
    if params.is_greedy:
        return np.eye(len(scores))[int(processed.argmax())]
    result: Floats = processed.softmax(-1).numpy()
    return result


def small_ids(**sizes: int) -> st.SearchStrategy[list[int]]:
    """Few different tokens, so that penalties, bad words and bans meet."""
    return st.lists(st.integers(0, 40), **sizes)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.0, 1.6]),
    top_k=st.sampled_from([0, 0, -1, 1, 3, 20, 50, 5000]),
    top_p=st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.9, 0.99]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3]),
    typical_p=st.sampled_from([1.0, 1.0, 1.0, 0.2, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.7, -1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.4, -0.2]),
    logit_bias=st.dictionaries(st.integers(0, 40), st.sampled_from([-100.0, -1.0, 0.5, 5.0]), max_size=4),
    bad_words=st.lists(small_ids(min_size=1, max_size=3).map(tuple), max_size=6).map(tuple),
    min_tokens=st.sampled_from([0, 0, 3, 8]),
    stop_token_ids=st.lists(st.integers(0, 40), max_size=2).map(tuple),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    rows=st.lists(
        st.tuples(PARAMS, small_ids(min_size=1, max_size=20), small_ids(max_size=10)), min_size=1, max_size=5
    ),
    vocabulary=st.sampled_from([64, 70, 257, 3001]),
    scale=st.sampled_from([0.5, 2.0, 6.0]),
    seed=st.integers(0, 1000),
    as_bfloat16=st.booleans(),
)
def test_probabilities_are_those_of_transformers(
    rows: list[tuple[SamplingParams, list[int], list[int]]],
    vocabulary: int,
    scale: float,
    seed: int,
    as_bfloat16: bool,
) -> None:
    """Row by row in mixed batches, also for the many equal scores of a bfloat16 model."""
    scores = scores_of(len(rows), vocabulary, seed, scale)
    if as_bfloat16:
        scores = scores.bfloat16().float()
    before = scores.clone()
    states = [state_of(*row) for row in rows]
    processed = probabilities(scores, states)
    for row, (params, prompt, output) in enumerate(rows):
        expected = transformers_probabilities(scores[row], params, prompt, output)
        found = processed[row]
        if as_bfloat16:
            # Where top_p splits tokens of one score, which of them stay is open: torch's sort is not stable.
            found, expected = np.sort(found), np.sort(expected)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5, err_msg=str(params))
    tokens = sample(scores, states)
    assert all(processed[row, token] > 0 for row, token in enumerate(tokens))
    assert torch.equal(scores, before)


def test_bad_words_match_across_the_end_of_the_prompt() -> None:
    scores = scores_of(1, 70, 0)
    best = int(scores.argmax())
    params = SamplingParams(bad_words=((7, 8, best),))
    assert sample(scores, [state_of(params, [1, 7], [8])]) != [best]
    assert sample(scores, [state_of(params, [1, 8], [7])]) == [best]


def test_bad_words_longer_than_the_text_do_not_match() -> None:
    scores = scores_of(1, 70, 0)
    best = int(scores.argmax())
    assert sample(scores, [state_of(SamplingParams(bad_words=((9, 8, best),)), [8], [])]) == [best]


def test_endings_come_only_after_min_tokens() -> None:
    scores = torch.zeros(1, 70)
    scores[0, EOS[1]], scores[0, 30], scores[0, 12] = 9.0, 8.0, 7.0
    params = SamplingParams(min_tokens=2, stop_token_ids=(30,))
    assert sample(scores, [state_of(params, [1], [4])]) == [12]
    assert sample(scores, [state_of(params, [1], [4, 4])]) == [EOS[1]]


def test_what_ends_a_text() -> None:
    plain = SamplingState(SamplingParams(stop_token_ids=(30,)), [1], EOS)
    assert [plain.ends(token) for token in (*EOS, 30, 4)] == [True, True, True, False]
    ignoring = SamplingState(SamplingParams(stop_token_ids=(30,), ignore_eos=True), [1], EOS)
    assert [ignoring.ends(token) for token in (*EOS, 30, 4)] == [False, False, True, False]


def test_greedy_takes_the_first_of_equal_scores() -> None:
    scores = torch.zeros(2, 200)
    scores[0, [7, 150]] = 4.0
    scores[1, [0, 199]] = 4.0
    assert sample(scores) == [7, 0]
    edited = [state_of(SamplingParams(repetition_penalty=1.1), [1], []) for _ in range(2)]
    assert sample(scores, edited) == [7, 0]


def test_a_prompt_token_without_a_score_is_left_alone() -> None:
    """Some models embed more tokens than their head scores."""
    scores = scores_of(1, 70, 0)
    state = state_of(SamplingParams(repetition_penalty=1.5, logit_bias={90: 1.0}), [1, 100], [])
    assert sample(scores, [state]) == [int(scores.argmax())]


# --- Rows that cannot be sampled ---------------------------------------------------------------------------


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9)])
def test_a_row_without_numbers_harms_no_other(params: SamplingParams) -> None:
    scores = scores_of(3, 70, 0)
    alone = sample(scores[2:], [state_of(replace(params, seed=2), [1], [])])
    scores[0] = -math.inf
    scores[1, 33] = math.nan
    states = [state_of(replace(params, seed=seed), [1], []) for seed in range(3)]
    assert sample(scores, states) == [NO_TOKEN, NO_TOKEN, *alone]
    assert not probabilities(scores, states)[:2].any()


def test_a_row_with_everything_banned_has_no_token() -> None:
    scores = scores_of(2, 70, 0)
    banned = SamplingParams(
        bad_words=tuple((token,) for token in range(70) if token not in EOS), min_tokens=5
    )
    assert sample(scores, [state_of(banned, [1], []), state_of(SamplingParams(), [1], [])])[0] == NO_TOKEN


# --- Distribution ------------------------------------------------------------------------------------------

DRAWN = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_p=0.6),
    SamplingParams(temperature=1.3, top_p=0.9, min_p=0.05),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=1.0, top_k=2),
    SamplingParams(temperature=1.0, top_k=12),
    SamplingParams(temperature=1.0, typical_p=0.7),
    SamplingParams(temperature=0.7, typical_p=0.3),
    SamplingParams(temperature=1.0, typical_p=0.7, top_p=0.8),
    SamplingParams(temperature=1.0, repetition_penalty=1.5, presence_penalty=0.5),
]


def assert_drawn_from(tokens: list[int], expected: Floats) -> None:
    """Pearson's chi-square; with d degrees of freedom it has mean d and variance 2 d, and 4.5 deviations above
    the mean happen less than once in 3,000 times for the few degrees here. Seeds are fixed."""
    counts = np.bincount(tokens, minlength=len(expected)).astype(float)
    assert not counts[expected == 0].any()
    wanted = expected * len(tokens)
    # Cells that are too thin for the test become one.
    thick = wanted >= 5
    cells = np.append(wanted[thick], wanted[~thick].sum())
    seen = np.append(counts[thick], counts[~thick].sum())
    cells, seen = cells[cells > 0], seen[cells > 0]
    degrees = len(cells) - 1
    assert ((seen - cells) ** 2 / cells).sum() < degrees + 4.5 * math.sqrt(2 * degrees)


@pytest.mark.parametrize("params", DRAWN, ids=str)
def test_samples_of_one_sequence_follow_the_probabilities(params: SamplingParams) -> None:
    scores = scores_of(1, 150, 1, scale=1.5)
    state = state_of(replace(params, seed=11), [3, 4], [])
    expected = probabilities(scores, [state])[0]
    tokens = []
    for _ in range(2000):
        tokens += sample(scores, [state])
        # As if its output had grown by a token that no penalty knows.
        state.num_output += 1
    assert_drawn_from(tokens, expected)


@pytest.mark.parametrize("params", DRAWN, ids=str)
def test_samples_of_many_seeds_in_batches_follow_the_probabilities(params: SamplingParams) -> None:
    scores = scores_of(1, 150, 1, scale=1.5)
    others = scores_of(4, 150, 2)
    mates = [state_of(SamplingParams(), [1], []), *(state_of(p, [1], []) for p in DRAWN[1:6:2])]
    expected = probabilities(scores, [state_of(params, [3, 4], [])])[0]
    tokens = []
    for first in range(0, 2000, 50):
        states = [state_of(replace(params, seed=seed), [3, 4], []) for seed in range(first, first + 50)]
        tokens += sample(torch.cat([others, scores.expand(50, -1)]), mates + states)[4:]
    assert_drawn_from(tokens, expected)


def test_samples_of_a_large_vocabulary_follow_the_probabilities() -> None:
    """Blocks of the vocabulary weigh as much as their tokens."""
    scores = scores_of(1, 9001, 3, scale=1.0)
    expected = probabilities(scores, [state_of(SamplingParams(temperature=1.0), [1], [])])[0]
    rows = [state_of(SamplingParams(temperature=1.0, seed=seed), [1], []) for seed in range(4000)]
    tokens = [
        token
        for first in range(0, 4000, 500)
        for token in sample(scores.expand(500, -1), rows[first : first + 500])
    ]
    by_block = np.add.reduceat(expected, np.arange(0, 9001, 64))
    assert_drawn_from([token // 64 for token in tokens], by_block)
    within = np.bincount(np.arange(9001) % 64, weights=expected)
    assert_drawn_from([token % 64 for token in tokens], within)


# --- Seeds -------------------------------------------------------------------------------------------------

SEEDED = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.5, top_p=0.95),
    SamplingParams(temperature=0.9, top_p=0.3, min_p=0.01),
    SamplingParams(temperature=1.0, top_k=40, top_p=0.9, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, top_k=2000),
    SamplingParams(temperature=1.0, typical_p=0.8, presence_penalty=0.5, frequency_penalty=0.2),
    SamplingParams(temperature=1.0, min_p=0.02, logit_bias={4: 3.0}),
]


def stream(states: list[SamplingState], steps: int, watched: int, first: int = 0) -> list[int]:
    """The watched row's tokens; its scores depend on what it said, as a model's do, others' scores on the batch."""
    said = []
    for step in range(first, first + steps):
        scores = scores_of(len(states), 2500, 1000 * len(states) + step)
        scores[watched] = scores_of(1, 2500, states[watched].num_output, scale=2.5)[0]
        for row, (state, token) in enumerate(zip(states, sample(scores, states), strict=True)):
            state.append(token)
            if row == watched:
                said.append(token)
    return said


@pytest.mark.parametrize("params", SEEDED, ids=str)
def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch_of_16(params: SamplingParams) -> None:
    seeded = replace(params, seed=1234)
    alone = stream([state_of(seeded, [7, 8, 9], [])], 12, 0)
    assert len(set(alone)) > 1
    for place in (0, 6, 15):
        states = [state_of(replace(SEEDED[row % 7], seed=row), [1, row], []) for row in range(16)]
        states[place] = state_of(seeded, [7, 8, 9], [])
        assert stream(states, 12, place) == alone


@pytest.mark.parametrize("params", SEEDED, ids=str)
def test_a_seed_goes_on_after_its_state_is_made_anew(params: SamplingParams) -> None:
    """Preemption keeps the state; this is stronger: prompt, output and seed are all there is to it."""
    seeded = replace(params, seed=99)
    whole = stream([state_of(seeded, [7, 8], [])], 10, 0)
    assert stream([state_of(seeded, [7, 8], whole[:4])], 6, 0) == whole[4:]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_sums_over_a_real_vocabulary_do_not_depend_on_the_batch(threads: int) -> None:
    """To the last bit: a kernel that splits work by the size of the batch would show here."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        scores = scores_of(9, 49152, 5)
        states = [state_of(replace(SEEDED[row % 7], seed=row), [1], []) for row in range(9)]
        together = probabilities(scores, states)
        tokens = sample(scores, states)
        for row in range(9):
            alone = scores[row : row + 1].clone()
            assert np.array_equal(probabilities(alone, [states[row]])[0], together[row])
            assert sample(alone, [states[row]]) == [tokens[row]]
    finally:
        torch.set_num_threads(before)


@pytest.mark.cuda
def test_a_gpu_gives_the_probabilities_and_the_independence_of_a_cpu() -> None:
    scores = scores_of(9, 49152, 5)
    states = [state_of(replace(SEEDED[row % 7], seed=row), [1], []) for row in range(9)]
    on_gpu = scores.cuda()
    np.testing.assert_allclose(
        probabilities(on_gpu, states), probabilities(scores, states), rtol=0, atol=1e-6
    )
    tokens = sample(on_gpu, states)
    for row in range(9):
        assert sample(on_gpu[row : row + 1].clone(), [states[row]]) == [tokens[row]]


def test_seeds_and_choices_and_no_seed_give_different_tokens() -> None:
    scores = torch.zeros(1, 1_000_000)
    hot = SamplingParams(temperature=1.0, seed=0)
    states = [SamplingState(replace(hot, seed=seed), [1], EOS) for seed in (0, 1, 2, 2**64 - 1)]
    states += [SamplingState(hot, [1], EOS, choice) for choice in (1, 2)]
    states += [SamplingState(replace(hot, seed=None), [1], EOS) for _ in range(2)]
    tokens = sample(scores.expand(len(states), -1), states)
    assert len(set(tokens)) == len(states)


def test_a_fork_is_another_choice_with_its_own_memory() -> None:
    params = SamplingParams(
        temperature=1.0, seed=4, repetition_penalty=1.3, frequency_penalty=0.5, bad_words=((8, 9),)
    )
    first = SamplingState(params, [7, 8], EOS)
    second = first.fork(1)
    made = SamplingState(params, [7, 8], EOS, choice=1)
    first.append(50)
    assert stream([second], 8, 0) == stream([made], 8, 0)
    assert first.output is not None
    assert first.output.ids.tolist() == [50]


# --- Cost --------------------------------------------------------------------------------------------------


def test_counts_are_those_of_the_text() -> None:
    prompt = [5, 3, 5]
    output = [random % 50 for random in range(0, 4000, 7)]
    counts = TokenCounts(prompt)
    for token in output:
        counts.append(token)
    expected = np.bincount(prompt + output)
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == {
        token: count for token, count in enumerate(expected.tolist()) if count
    }


def calls_of_a_step(num_output: int) -> int:
    """Python and C calls of one step with everything on, after an output of that length."""
    params = SamplingParams(
        temperature=1.0,
        top_k=20,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        bad_words=((3, 4), (5,)),
        min_tokens=10**6,
        seed=0,
    )
    state = state_of(params, [1, 2], [token % 50 for token in range(num_output)])
    scores = scores_of(1, 1000, 0)
    sample(scores, [state])
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        state.append(sample(scores, [state])[0] % 50)
    finally:
        sys.setprofile(None)
    return calls


def test_a_step_does_not_look_at_the_text_before() -> None:
    assert calls_of_a_step(100) == calls_of_a_step(20_000)
    state = state_of(SamplingParams(frequency_penalty=0.1), [1], [token % 50 for token in range(20_000)])
    assert state.output is not None
    assert len(state.output.ids) == 50
