"""Sampling: the next token of every row of a step, in one pass."""

from __future__ import annotations

import torch


def sample(logits: torch.Tensor) -> list[int]:
    """The most likely token of each row.

    Args:
        logits: (S, vocabulary) float32.

    Returns:
        S token ids. Of equal logits the first wins, as in transformers' greedy search.
    """
    return logits.argmax(dim=-1).tolist()  # type: ignore[no-any-return]
