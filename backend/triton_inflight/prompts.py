"""Prompts: what a request says as text, messages or token ids, as tokens of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

from triton_inflight.errors import RequestError
from triton_inflight.protocol import GenerationRequest
from triton_inflight.sampling_params import SamplingParams
from triton_inflight.text import encode, longest_token


def prompt_tokens(
    request: GenerationRequest,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary_size: int,
    max_tokens: int,
    remedy: str,
) -> list[int]:
    """Token ids of a request's prompt.

    Args:
        max_tokens: most of them.
        remedy: what sets ``max_tokens``, for the error.

    Raises:
        RequestError: there are none or too many of them, the model has no chat template for its messages, or an id
            is not in the model's vocabulary.
    """
    if request.input_ids:
        field, tokens = "input_ids", list(request.input_ids)
    else:
        field = "messages" if request.messages else "text_input"
        text = _templated(request, tokenizer) if request.messages else request.text_input
        # A megabyte takes most of a second to encode, in which everybody waits.
        longest = longest_token(tokenizer)
        if len(text) > max_tokens * longest:
            raise RequestError(
                f"{field} is {len(text)} characters long; this model takes at most {max_tokens} tokens, of up to "
                f"{longest} characters: {remedy}"
            )
        tokens = encode(tokenizer, text, field)
    if len(tokens) > max_tokens:
        raise RequestError(
            f"{field} is {len(tokens)} tokens long; this model takes at most {max_tokens}: {remedy}"
        )
    _check_ids(field, tokens, vocabulary_size)
    return tokens


def prompt_text(request: GenerationRequest, tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The prompt as text, for a client that wants it in front of the output."""
    if request.text_input:
        return request.text_input
    return str(
        tokenizer.decode(
            tokens, skip_special_tokens=request.skip_special_tokens, clean_up_tokenization_spaces=False
        )
    )


def sampling_params(
    request: GenerationRequest, tokenizer: PreTrainedTokenizerBase, vocabulary_size: int
) -> SamplingParams:
    """How the request's tokens are chosen, its bad words as token ids.

    A bad word is banned as it is and after a space, where a tokenizer has other tokens for it.

    Raises:
        RequestError: an id is not in the model's vocabulary.
    """
    _check_ids("logit_bias", request.sampling.logit_bias, vocabulary_size)
    _check_ids("stop_token_ids", request.sampling.stop_token_ids, vocabulary_size)
    if not request.bad_words:
        return request.sampling
    forms = [form for word in request.bad_words for form in (word, " " + word.lstrip())]
    encoded = [tuple(tokenizer.encode(form, add_special_tokens=False)) for form in forms]
    return dataclasses.replace(request.sampling, bad_words=tuple(dict.fromkeys(filter(None, encoded))))


def _templated(request: GenerationRequest, tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.chat_template:
        raise RequestError("messages: this model's tokenizer has no chat template; send text_input instead")
    try:
        messages = [dict(message) for message in request.messages]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template is code of the model's, and may refuse in its own words
        raise RequestError(f"messages: the model's chat template refuses them: {error}") from error


def _check_ids(field: str, token_ids: Iterable[int], vocabulary_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocabulary_size:
            raise RequestError(
                f"{field} has token id {token_id}; allowed: 0 to {vocabulary_size - 1}, the model's vocabulary"
            )
