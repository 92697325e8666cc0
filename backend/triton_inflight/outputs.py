"""The table of everything a client can get, and results -> output tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from triton_inflight.protocol import GenerationRequest


@dataclass(frozen=True)
class Output:
    """One output tensor.

    Attributes:
        name, data_type, dims: as declared in config.pbtxt; -1 stands for any length.
        doc: one line for the reference page.
        asked_by: the fields that ask for it; none: it is always sent.
    """

    name: str
    data_type: str
    dims: tuple[int, ...]
    doc: str
    asked_by: tuple[str, ...] = ()


# The shapes that clients read are those of the backends the names come from. vLLM's names have one value for each
# choice of the response and no batch dimension, as its clients and those of TensorRT-LLM index text_output.
OUTPUTS: tuple[Output, ...] = (
    Output(
        "text_output",
        "TYPE_STRING",
        (-1,),
        "New text of this response; the whole text where stream is false. Shape [choices].",
    ),
    Output(
        "finish_reason",
        "TYPE_STRING",
        (-1,),
        "Why the text ended: stop, length, cancelled or timeout. In the last response of a choice. Shape [choices].",
        ("return_finish_reason",),
    ),
    Output(
        "stop_reason",
        "TYPE_STRING",
        (-1,),
        "Which stop string, or the id of which token, ended the text; empty where neither did. In the last response "
        "of a choice. Shape [choices].",
        ("return_stop_reason",),
    ),
    Output(
        "num_input_tokens",
        "TYPE_UINT32",
        (1,),
        "Tokens of the prompt. In every response. Shape [1].",
        ("return_num_input_tokens",),
    ),
    Output(
        "num_output_tokens",
        "TYPE_UINT32",
        (-1,),
        "Tokens this response adds. In every response. Shape [choices].",
        ("return_num_output_tokens",),
    ),
    Output(
        "output_ids",
        "TYPE_INT32",
        (-1, -1),
        "Ids of the tokens this response adds. Shape [1, choices, most tokens of a choice], filled up with 0.",
        ("return_output_ids",),
    ),
    Output(
        "sequence_length",
        "TYPE_INT32",
        (-1,),
        "How many of each row of output_ids are tokens. Shape [1, choices].",
        ("return_sequence_length",),
    ),
    Output(
        "cumulative_logprob",
        "TYPE_FP32",
        (-1,),
        "Natural log probability of the whole output so far. Shape [choices].",
        ("return_cumulative_logprob",),
    ),
    Output(
        "logprobs",
        "TYPE_STRING",
        (-1,),
        "Log probabilities of the tokens this response adds: a JSON list with, for each of them, an object "
        '`{"50": {"logprob": -0.1, "rank": 1, "decoded_token": " a"}, ...}` by token id, the chosen token first. '
        "Shape [choices].",
        ("return_logprobs", "logprobs"),
    ),
    Output(
        "prompt_logprobs",
        "TYPE_STRING",
        (1,),
        "The same for the tokens of the prompt; null for its first. In the first response. Shape [1].",
        ("prompt_logprobs",),
    ),
    Output(
        "cum_log_probs",
        "TYPE_FP32",
        (-1,),
        "As cumulative_logprob, in TensorRT-LLM's shape [1, choices].",
        ("return_log_probs",),
    ),
    Output(
        "output_log_probs",
        "TYPE_FP32",
        (-1, -1),
        "Natural log probability of each token this response adds. Shape [1, choices, most tokens of a choice], "
        "filled up with 0.",
        ("return_log_probs",),
    ),
    Output(
        "sequence_index",
        "TYPE_INT32",
        (1,),
        "Which choice the response belongs to, from 0. Where each has its own responses. Shape [1, 1].",
        ("n", "num_return_sequences"),
    ),
)


@dataclass(frozen=True)
class Result:
    """What one response says of one choice. Only what the request asks for has to be filled in.

    Attributes:
        text: new text.
        finish_reason: set in the last response only.
        num_input_tokens: tokens of the prompt.
        num_output_tokens: tokens generated since the previous response.
        stop_reason: in the last response, the stop string or the id of the token that ended the text.
        choice: which choice it is, from 0.
        token_ids: the tokens generated since the previous response.
        token_logprobs: their natural log probabilities.
        cumulative_logprob: of all tokens of the choice so far.
        logprobs: of the tokens since the previous response, a JSON list as ``logprobs.to_json`` writes it.
        prompt_logprobs: of the prompt, likewise; in the first response only.
    """

    text: str
    finish_reason: str | None
    num_input_tokens: int
    num_output_tokens: int
    stop_reason: str | int | None = None
    choice: int = 0
    token_ids: Sequence[int] = ()
    token_logprobs: Sequence[float] = ()
    cumulative_logprob: float = 0.0
    logprobs: str = "[]"
    prompt_logprobs: str | None = None


Tensor = npt.NDArray[Any]


def output_tensors(results: Result | Sequence[Result], request: GenerationRequest) -> dict[str, Tensor]:
    """The tensors of one response, with the names, types and shapes of OUTPUTS: text always, the others where the
    client asked.

    Args:
        results: of one choice, or of all choices that the response holds.
        request: what the client asked for.
    """
    choices = (results,) if isinstance(results, Result) else tuple(results)
    first = choices[0]
    ended = all(choice.finish_reason is not None for choice in choices)
    tensors = {"text_output": _strings(choice.text for choice in choices)}
    if request.return_finish_reason and ended:
        tensors["finish_reason"] = _strings(str(choice.finish_reason) for choice in choices)
    if request.return_stop_reason and ended:
        reasons = ("" if choice.stop_reason is None else str(choice.stop_reason) for choice in choices)
        tensors["stop_reason"] = _strings(reasons)
    if request.return_num_input_tokens:
        tensors["num_input_tokens"] = np.array([first.num_input_tokens], dtype=np.uint32)
    if request.return_num_output_tokens:
        counts = [choice.num_output_tokens for choice in choices]
        tensors["num_output_tokens"] = np.array(counts, dtype=np.uint32)
    if request.return_output_ids:
        tensors["output_ids"] = _padded([choice.token_ids for choice in choices], np.int32)[None]
    if request.return_sequence_length:
        lengths = [choice.num_output_tokens for choice in choices]
        tensors["sequence_length"] = np.array([lengths], dtype=np.int32)
    if request.return_cumulative_logprob:
        tensors["cumulative_logprob"] = _sums(choices)
    if request.return_logprobs:
        tensors["logprobs"] = _strings(choice.logprobs for choice in choices)
    if request.sampling.prompt_logprobs is not None and first.prompt_logprobs is not None:
        tensors["prompt_logprobs"] = _strings([first.prompt_logprobs])
    if request.return_log_probs:
        tensors["cum_log_probs"] = _sums(choices)[None]
        tensors["output_log_probs"] = _padded([choice.token_logprobs for choice in choices], np.float32)[None]
    if request.sends_sequence_index:
        tensors["sequence_index"] = np.array([[first.choice]], dtype=np.int32)
    return tensors


def _strings(texts: Iterable[str]) -> Tensor:
    return np.array([text.encode("utf-8") for text in texts], dtype=np.object_)


def _sums(choices: Sequence[Result]) -> Tensor:
    return np.array([choice.cumulative_logprob for choice in choices], dtype=np.float32)


def _padded(rows: Sequence[Sequence[float]], dtype: type[np.generic]) -> Tensor:
    """Rows of different lengths as one table, filled up with 0."""
    table = np.zeros((len(rows), max(map(len, rows))), dtype=dtype)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return table
