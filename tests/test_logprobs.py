"""Log probabilities are those of the model's scores, in the form that vLLM's clients read."""

from __future__ import annotations

import json
import math

import pytest
import torch

from triton_inflight.logprobs import PositionLogprobs, TokenLogprob, logprobs_of, to_json


def scores() -> torch.Tensor:
    return torch.randn(5, 300, generator=torch.Generator().manual_seed(0)) * 3


def test_only_rows_that_ask_get_an_answer() -> None:
    found = logprobs_of(scores(), [1, 2, 3, 4, 5], [None, 0, None, 2, None])
    assert [position is None for position in found] == [True, False, True, False, True]
    assert logprobs_of(scores(), [1] * 5, [None] * 5) == [None] * 5


@pytest.mark.parametrize("counts", [[0, 1, 3, 20, 300], [2, None, None, 5, 1]])
def test_values_and_ranks_are_those_of_log_softmax(counts: list[int | None]) -> None:
    tokens = [0, 17, int(scores()[2].argmax()), 299, 5]
    reference = scores().double().log_softmax(-1)
    for row, position in enumerate(logprobs_of(scores(), tokens, counts)):
        count = counts[row]
        if count is None:
            assert position is None
            continue
        assert position is not None
        order = reference[row].argsort(descending=True).tolist()
        assert position.chosen.token_id == tokens[row]
        assert position.chosen.logprob == pytest.approx(reference[row, tokens[row]].item(), abs=1e-5)
        assert position.chosen.rank == order.index(tokens[row]) + 1
        assert [token.token_id for token in position.top] == order[:count]
        assert [token.rank for token in position.top] == list(range(1, count + 1))
        assert [token.logprob for token in position.top] == pytest.approx(
            reference[row, order[:count]].tolist(), abs=1e-5
        )


def test_the_chosen_token_is_there_once_and_first() -> None:
    best = int(scores()[0].argmax())
    chosen_best, chosen_other = logprobs_of(scores()[[0, 0]], [best, 4], [2, 2])
    assert chosen_best is not None
    assert chosen_other is not None
    assert list(chosen_best.entries(str)) == [str(token.token_id) for token in chosen_best.top]
    assert list(chosen_other.entries(str)) == ["4", *(str(token.token_id) for token in chosen_other.top)]


def test_json_is_a_list_of_objects_by_token_id() -> None:
    position = PositionLogprobs(TokenLogprob(7, -1.5, 3), (TokenLogprob(9, -0.25, 1),))
    words = {7: "ü", 9: " nine"}
    assert json.loads(to_json([None, position], words.__getitem__)) == [
        None,
        {
            "7": {"logprob": -1.5, "rank": 3, "decoded_token": "ü"},
            "9": {"logprob": -0.25, "rank": 1, "decoded_token": " nine"},
        },
    ]


def test_json_has_a_number_for_impossible_tokens() -> None:
    """JSON has no infinity, and strict readers refuse the word."""
    impossible = torch.tensor([[0.0, -math.inf, 1.0]])
    (position,) = logprobs_of(impossible, [1], [3])
    text = to_json([position], str)
    assert "Infinity" not in text
    assert json.loads(text)[0]["1"]["logprob"] == -9999.0


def test_more_than_the_vocabulary_is_the_whole_vocabulary() -> None:
    (position,) = logprobs_of(scores()[:1], [0], [1000])
    assert position is not None
    assert len(position.top) == 300


def test_a_prompts_tokens_follow_the_rows_before_them() -> None:
    prompt = [3, 1, 4, 1]
    found = logprobs_of(scores()[: len(prompt) - 1], prompt[1:], [0] * (len(prompt) - 1))
    reference = scores().log_softmax(-1)
    for row, position in enumerate(found):
        assert position is not None
        assert position.chosen.logprob == pytest.approx(reference[row, prompt[row + 1]].item(), abs=1e-5)
