"""Rotary embeddings whose frequencies depend on how long the longest sequence of a batch is.

In one flat batch such a rule would let a long sequence change the results of its neighbours, so these kinds
are served only where the longest sequence allowed keeps them in a single regime.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig

from triton_inflight.errors import ModelError


def freeze_rope(config: PreTrainedConfig, max_seq_len: int | None) -> int | None:
    """The longest sequence to allow: ``max_seq_len``, or where it is None the end of the rope's first regime.

    Returns:
        The length in tokens, or None where neither the caller nor the rope sets one.

    Raises:
        ModelError: ``max_seq_len`` reaches into the second regime of a "dynamic" or "longrope" embedding.
    """
    for parameters in _rope_parameters(config):
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind not in ("dynamic", "longrope"):
            continue
        first_regime = (
            parameters.get("original_max_position_embeddings")
            or getattr(config, "original_max_position_embeddings", None)
            or config.max_position_embeddings
        )
        if max_seq_len is not None and max_seq_len > first_regime:
            raise ModelError(
                f"max_seq_len is {max_seq_len}, but this model's rope_type {kind!r} changes its frequencies past "
                f"{first_regime} tokens, so a long sequence would change the output of its batch mates; "
                f"set max_seq_len to at most {first_regime} in config.pbtxt"
            )
        max_seq_len = first_regime if max_seq_len is None else max_seq_len
    return max_seq_len


def _rope_parameters(config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """The rope settings of a config: one dict, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    yield from nested or [parameters]
