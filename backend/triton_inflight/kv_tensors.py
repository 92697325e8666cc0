"""The tensors behind the KV-state store: keys and values of every block, for every attention call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch


class KVShape(NamedTuple):
    """What one attention call of a forward pass stores per token."""

    heads: int
    key_width: int
    value_width: int


class KVTensors:
    """Paged keys and values on one device, indexed by the store's block numbers.

    An attention call is known by its ordinal within the forward pass, not by its module's layer index: some
    models call attention twice in a layer, others run the same layer several times. For each there are

    * ``keys``   (num_blocks, tokens_per_block, heads, key_width)
    * ``values`` (num_blocks, tokens_per_block, heads, value_width)

    in the given dtype, made when the call is first seen. They start as zeros, which the operating system
    gives without touching the memory, and which keep a masked cell from ever being NaN.

    Args:
        num_blocks: blocks of the store.
        tokens_per_block: cells of a block.
        dtype: of keys and values.
        device: where they live.
    """

    def __init__(
        self, num_blocks: int, tokens_per_block: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self._dtype = dtype
        self._device = device
        self._shapes: list[KVShape] = []
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def shapes(self) -> tuple[KVShape, ...]:
        """The shapes of the attention calls seen so far, in the order of the forward pass."""
        return tuple(self._shapes)

    def layer(self, ordinal: int, shape: KVShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of attention call number ``ordinal``; a new one is made with ``shape``."""
        if ordinal == len(self._layers):
            self._shapes.append(shape)
            self._layers.append(
                (self._zeros(shape.heads, shape.key_width), self._zeros(shape.heads, shape.value_width))
            )
        assert self._shapes[ordinal] == shape, (ordinal, self._shapes[ordinal], shape)
        return self._layers[ordinal]

    def preallocate(self, shapes: Iterable[KVShape]) -> None:
        """Make the tensors of every attention call now, so that memory that is lacking is missed at load."""
        for ordinal, shape in enumerate(shapes):
            self.layer(ordinal, shape)

    @torch.inference_mode()
    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination), one after the other: a later copy may read an earlier one."""
        for source, destination in copies:
            for keys, values in self._layers:
                keys[destination] = keys[source]
                values[destination] = values[source]

    def _zeros(self, heads: int, width: int) -> torch.Tensor:
        size = (self.num_blocks, self.tokens_per_block, heads, width)
        return torch.zeros(size, dtype=self._dtype, device=self._device)


def bytes_per_token(shapes: Iterable[KVShape], dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token holds over all attention calls."""
    return sum(s.heads * (s.key_width + s.value_width) for s in shapes) * dtype.itemsize
