"""The future peak of KV use: how many blocks the live sequences will need at most."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np


def future_peak(lengths: Rows[int], remaining: Rows[int], tokens_per_block: int) -> int:
    """Most blocks that sequences hold at a time, if each gets a token in every step until it ends.

    Sorted by what remains, sequence i ends after ``remaining[i]`` steps. Just then it and all that remain
    longer hold their most, and the shorter ones have given their blocks back; so the peak is the largest of
    these sums, which is less than the sum of all final lengths. (The rule is lightllm's, counted in blocks.)

    Args:
        lengths: tokens each sequence holds cells for.
        remaining: tokens each may still generate.
        tokens_per_block: cells of a block.
    """
    left = np.asarray(remaining)
    order = np.argsort(-left, kind="stable")
    held, left = np.asarray(lengths)[order], left[order]
    # Row i: blocks of every sequence when sequence i ends; those behind i on the list are gone by then.
    blocks = -(-(held[None, :] + left[:, None]) // tokens_per_block)
    return int(np.tril(blocks).sum(axis=1).max(initial=0))
