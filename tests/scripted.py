"""A real model that says what a test wants: its weights are set by hand, so that the position tells the next token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerBase

_HEAD = 64


class Scripts:
    """Texts that one model has by heart, each one said after a prompt of its own length.

    Args:
        texts: token ids by the name of the text; each is followed by the tokenizer's EOS token.
        tokenizer: saved with the model.
    """

    def __init__(self, texts: Mapping[str, Sequence[int]], tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._starts: dict[str, int] = {}
        self._script: list[int] = []
        for name, ids in texts.items():
            self._starts[name] = len(self._script)
            self._script += [*ids, tokenizer.eos_token_id]

    def prompt(self, name: str, filler: int) -> str:
        """The prompt of a text as ``input_ids``, a JSON list: so many of one token."""
        return str([filler] * (self._starts[name] + 1))

    def save(self, folder: Path) -> Path:
        """Write model and tokenizer to a folder.

        A GPT-2 whose hidden state is nothing but a 1 at the place of its position: token embeddings are 0, attention
        and MLP add 0, and the head gives the token of each position a score for that place.
        """
        positions = -(-(len(self._script) + 1) // _HEAD) * _HEAD
        config = GPT2Config(
            vocab_size=len(self._tokenizer),
            n_positions=positions,
            n_embd=positions,
            n_inner=8,
            n_layer=1,
            n_head=positions // _HEAD,
            tie_word_embeddings=False,
            bos_token_id=self._tokenizer.bos_token_id,
            eos_token_id=self._tokenizer.eos_token_id,
        )
        model = GPT2LMHeadModel(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".ln_" not in name:
                    parameter.zero_()
            model.transformer.wpe.weight.copy_(torch.eye(positions))
            for position, token_id in enumerate(self._script):
                model.lm_head.weight[token_id, position] = 1
        model.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)
        return folder
