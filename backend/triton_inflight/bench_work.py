"""What a benchmark asks for: so many sequences at once, each of so many tokens in and out, always the same ones."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Workload:
    """Sequences that are all sent at once.

    Attributes:
        sequences: how many.
        input_tokens, output_tokens: of each one, exactly.
        stream: whether responses are sent as tokens come; else one response for each sequence.
        stream_interval: tokens in a response, where they are sent as they come.
    """

    sequences: int
    input_tokens: int
    output_tokens: int
    stream: bool = True
    stream_interval: int = 1

    def prompts(self, token_ids: Sequence[int], seed: str) -> list[list[int]]:
        """Random prompts out of ``token_ids``, the same ones for the same seed."""
        dice = random.Random(seed)
        return [dice.choices(token_ids, k=self.input_tokens) for _ in range(self.sequences)]

    def fields(self, prompt: list[int]) -> dict[str, Any]:
        """A request as this project's models take it: greedy, and as long as asked whatever comes out.

        The prompt goes as token ids in JSON, which is exact for every tokenizer; ``text_input``, which every
        model declares, has to be sent empty beside it.
        """
        fields: dict[str, Any] = {
            "input_ids": json.dumps(prompt),
            "max_tokens": self.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": self.stream,
        }
        if self.stream_interval > 1:
            fields["stream_interval"] = self.stream_interval
        return fields


def ordinary_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a tokenizer but for the special and added ones, which mean something to a model."""
    added = set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)
    return [token_id for token_id in range(len(tokenizer)) if token_id not in added]
