"""What an attention call stores of a token."""

from __future__ import annotations

from typing import NamedTuple


class KVShape(NamedTuple):
    """What one attention call of a forward pass stores per token: key heads, and numbers per head."""

    heads: int
    key_width: int
    value_width: int
