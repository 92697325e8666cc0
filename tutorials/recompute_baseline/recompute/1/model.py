"""Iterative sequences without a KV cache: each step runs the whole context of every sequence again, for one token.

A plain Triton Python model for any Hugging Face causal LM, to compare with. It does what is shown in Part 7 of
NVIDIA's Conceptual Guide: the sequence batcher brings new sequences and those in flight, they are padded to the
longest, the model runs over all of it, and whoever is unfinished is rescheduled. Tokens are chosen greedily.

Request parameters: ``max_tokens`` (128), ``ignore_eos`` (false), ``input_ids`` (JSON list; instead of the text).
Each token is a response.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


@dataclass
class Sequence:
    """A generation in flight: all of its tokens so far, and how many more may come."""

    tokens: list[int]
    left: int
    ignore_eos: bool = False
    eos: frozenset[int] = field(default_factory=frozenset)

    def append(self, token: int) -> bool:
        """Take its next token; whether that was the last one."""
        self.tokens.append(token)
        self.left -= 1
        return self.left == 0 or (token in self.eos and not self.ignore_eos)


class TritonPythonModel:
    """What Triton calls. Sequences are kept by their sequence ID, which is the CORRID control."""

    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        reference = parameters["model"]["string_value"]
        beside = Path(args["model_repository"], reference)  # a path starts from the model's folder
        location = str(beside) if beside.exists() else reference
        dtype = getattr(torch, parameters["dtype"]["string_value"])
        self._tokenizer = AutoTokenizer.from_pretrained(location)
        self._model = AutoModelForCausalLM.from_pretrained(location, dtype=dtype).eval()
        eos = self._model.generation_config.eos_token_id
        self._eos = frozenset([] if eos is None else np.atleast_1d(eos).tolist())
        # One greedy token, whatever the model's own defaults are. This is where a cache is not used.
        self._model.generation_config = GenerationConfig(max_new_tokens=1, use_cache=False, pad_token_id=0)
        self._sequences: dict[int, Sequence] = {}

    def execute(self, requests: list[Any]) -> None:
        going = []
        for request in requests:
            sequence_id = int(_value(request, "CORRID"))
            if request.is_cancelled():
                # Its client is gone. Rescheduled, a cancelled request gives its slot back at once.
                self._sequences.pop(sequence_id, None)
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                continue
            if _value(request, "START"):
                self._sequences[sequence_id] = self._begin(request)
            going.append((request, sequence_id))
        if not going:
            return
        sequences = [self._sequences[sequence_id] for _, sequence_id in going]
        for (request, sequence_id), token in zip(going, self._next_tokens(sequences), strict=True):
            finished = self._sequences[sequence_id].append(token)
            if finished:
                del self._sequences[sequence_id]
            else:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            self._send(request, token, finished)

    def _begin(self, request: Any) -> Sequence:
        parameters = json.loads(request.parameters())
        if "input_ids" in parameters:
            tokens = json.loads(parameters["input_ids"])
        else:
            tokens = self._tokenizer(_value(request, "text_input").decode())["input_ids"]
        ignore_eos = bool(parameters.get("ignore_eos"))
        return Sequence(tokens, int(parameters.get("max_tokens", 128)), ignore_eos, self._eos)

    def _next_tokens(self, sequences: list[Sequence]) -> list[int]:
        """The next token of each: left-padded to the longest, as (sequences, tokens), and run from the first token."""
        longest = max(len(sequence.tokens) for sequence in sequences)
        ids = torch.zeros(len(sequences), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, sequence in enumerate(sequences):
            ids[row, longest - len(sequence.tokens) :] = torch.tensor(sequence.tokens)
            mask[row, longest - len(sequence.tokens) :] = 1
        with torch.inference_mode():
            output = self._model.generate(ids, attention_mask=mask)
        return output[:, -1].tolist()

    def _send(self, request: Any, token: int, finished: bool) -> None:
        # One token at a time, so a character that takes several comes out broken.
        text = np.array([[self._tokenizer.decode([token]).encode()]], dtype=object)
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if finished else 0
        response = pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)])
        request.get_response_sender().send(response, flags)


def _value(request: Any, name: str) -> Any:
    """The one value of an input tensor."""
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy().item()
