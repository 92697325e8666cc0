"""The tensors behind the KV-state store: a pool of keys and values for every attention call."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from triton_inflight import native_attention
from triton_inflight.kv_shape import KVShape
from triton_inflight.native_attention import NativePool
from triton_inflight.reference_attention import ReferencePool


class KVTensors:
    """Paged keys and values on one device, indexed by the store's block numbers.

    An attention call is known by its ordinal within the forward pass, not by its module's layer index: some
    models call attention twice in a layer, others run the same layer several times. Each has a pool, made when
    the call is first seen: of the native kernels where they support it, of plain torch elsewhere.

    Args:
        num_blocks: blocks of the store.
        tokens_per_block: cells of a block.
        dtype: of keys and values.
        device: where they live.
        native: False for the torch reference also where there are native kernels.

    Attributes:
        is_native: the pools are those of the native kernels.
    """

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        dtype: torch.dtype,
        device: torch.device,
        native: bool = True,
    ) -> None:
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self._dtype = dtype
        self._device = device
        self.is_native = native and native_attention.supported(device, dtype, tokens_per_block)
        self._shapes: list[KVShape] = []
        self._pools: list[NativePool | ReferencePool] = []

    @property
    def shapes(self) -> tuple[KVShape, ...]:
        """The shapes of the attention calls seen so far, in the order of the forward pass."""
        return tuple(self._shapes)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values that one token holds over all attention calls."""
        return sum(pool.bytes_per_token for pool in self._pools)

    def pool(self, ordinal: int, shape: KVShape) -> NativePool | ReferencePool:
        """The pool of attention call number ``ordinal``; a new one is made for ``shape``."""
        if ordinal == len(self._pools):
            self._shapes.append(shape)
            self._pools.append(self._make(shape))
        assert self._shapes[ordinal] == shape, (ordinal, self._shapes[ordinal], shape)
        return self._pools[ordinal]

    def preallocate(self, shapes: Iterable[KVShape]) -> None:
        """Make the pools of every attention call now, so that memory that is lacking is missed at load."""
        for ordinal, shape in enumerate(shapes):
            self.pool(ordinal, shape)

    @torch.inference_mode()
    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination), one after the other: a later copy may read an earlier one."""
        for source, destination in copies:
            for pool in self._pools:
                pool.copy_block(source, destination)

    def _make(self, shape: KVShape) -> NativePool | ReferencePool:
        size = (self.num_blocks, self.tokens_per_block, shape, self._dtype)
        return NativePool(*size) if self.is_native else ReferencePool(*size, self._device)
