"""Whether contenders may be compared: in float32, greedy texts have to be equal under all schedulers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from triton_inflight.compare_client import Outcome
from triton_inflight.compare_measures import common_tokens
from triton_inflight.compare_requests import Request
from triton_inflight.errors import InflightError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPTS, INPUT_TOKENS, OUTPUT_TOKENS = 8, 128, 32  # of the check; longer ones are cut off
_SHOWN = 60  # characters of a text in a message


class DifferentTextsError(InflightError):
    """Contenders that do not answer alike: their speed cannot be compared."""


def check_requests(requests: Sequence[Request]) -> list[Request]:
    """What the check asks: some of the requests of a comparison, none of them long."""
    return [request.cut(INPUT_TOKENS, OUTPUT_TOKENS) for request in requests[:PROMPTS]]


def check_equal(answers: Mapping[str, Sequence[Outcome]], tokenizer: PreTrainedTokenizerBase) -> None:
    """Compare everybody's answers with those of the first.

    Args:
        answers: of each contender, to the same requests.

    Raises:
        DifferentTextsError: names the first prompt whose answers differ, and the place.
    """
    (first, expected), *others = answers.items()
    for number, outcome in enumerate(expected):
        for name, given in others:
            equal = common_tokens(outcome, given[number])
            if equal < outcome.request.output_tokens:
                raise DifferentTextsError(
                    _message(number, first, outcome, name, given[number], equal, tokenizer)
                )


def _message(
    number: int,
    first: str,
    ours: Outcome,
    other: str,
    theirs: Outcome,
    equal: int,
    tokenizer: PreTrainedTokenizerBase,
) -> str:
    def text(ids: Sequence[int]) -> str:
        return repr(tokenizer.decode(list(ids))[:_SHOWN])

    prompt = repr(ours.request.prompt[:_SHOWN]) if ours.request.prompt else text(ours.request.token_ids)
    return (
        f"{first} and {other} answer differently in float32, so they are not compared. Prompt {number + 1}, {prompt}: "
        f"after {equal} equal tokens, {text(ours.tokens[:equal].tolist())}, {first} goes on with "
        f"{text(ours.tokens[equal:].tolist())}, {other} with {text(theirs.tokens[equal:].tolist())}. Are they the same "
        "model?"
    )
