"""Paged attention in C++, for the CPU: keys and values of a layer are stored and attended over in one call.

The kernels come in versions for several instruction sets; the fastest that the processor has is used, unless
the environment variable ``TRITON_INFLIGHT_ISA`` names another (portable, avx2, avx512, avx512_bf16).
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from triton_inflight.kv_shape import KVShape
from triton_inflight.native import _native

CELL_MULTIPLE = 16
"""``tokens_per_block`` must be a multiple of this."""


def supported(device: torch.device, dtype: torch.dtype, tokens_per_block: int) -> bool:
    """Whether the kernels can keep keys and values of this type, in blocks of this size, on this device."""
    return (
        device.type == "cpu"
        and dtype in (torch.float32, torch.bfloat16)
        and tokens_per_block % CELL_MULTIPLE == 0
    )


class NativePool:
    """Keys and values of every block for one attention call of the forward pass.

    Attributes:
        data: (num_blocks, elements) in the given dtype; a block may be copied as a whole, its inside is the
            kernels' own (cpp_ext/attention_types.hpp). The rows of a fresh pool take no memory until they are
            written.
        address: of ``data``.
        layout, isa: what the kernels want to know of the pool, and which version of them runs.

    Args:
        num_blocks: blocks of the store.
        tokens_per_block: cells of a block, a multiple of 16.
        shape: of a token's keys and values.
        dtype: float32 or bfloat16.
        isa: version of the kernels; by default the fastest, or that of ``TRITON_INFLIGHT_ISA``.

    Raises:
        ValueError: a size is out of range, or ``TRITON_INFLIGHT_ISA`` names a version that cannot run here.
    """

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        shape: KVShape,
        dtype: torch.dtype,
        isa: _native.Isa | None = None,
    ) -> None:
        self.layout = _native.PoolLayout(num_blocks, tokens_per_block, *shape, _is_bf16(dtype))
        self.isa = _native.chosen_isa() if isa is None else isa
        self.data = _zeros(num_blocks, self.layout.block_size, dtype)
        self.address = self.data.data_ptr()

    @property
    def bytes_per_token(self) -> int:
        """Memory of one cell, padding included."""
        return self.data.nbytes // (self.layout.num_blocks * self.layout.tokens_per_block)

    def copy_block(self, source: int, destination: int) -> None:
        """Copy the cells of a whole block."""
        self.data[destination] = self.data[source]

    def plan(
        self,
        tables: torch.Tensor,
        starts: Sequence[int],
        lengths: Sequence[int],
        query_heads: int,
        window: int | None,
    ) -> _native.AttentionPlan:
        """The work of a step, for every attention call that has these heads and this window.

        Args:
            tables: (N, M) int32, each sequence's blocks in order.
            starts: N + 1 rows of the flat batch.
            lengths: N cell counts, this step's tokens included.
            query_heads: a multiple of the pool's heads.
            window: how many tokens each token sees, itself included; all if None.

        Raises:
            ValueError: the arrays do not fit together, or name a block that does not exist.
        """
        return _native.AttentionPlan(
            tables.numpy(), starts, lengths, self.layout, query_heads, window or 0, torch.get_num_threads()
        )

    def attend(
        self,
        plan: _native.AttentionPlan,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the step's keys and values, and let each of its tokens attend over its own sequence.

        Args:
            plan: of this step, for this pool's heads.
            query: (T, query heads, key width) float32 or bfloat16; of any strides but the innermost, which
                must be 1, as for key and value.
            key: (T, heads, key width), rounded to the pool's type.
            value: (T, heads, value width), of the same type as ``key``.
            scale: factor of the scores, above 0.
            softcap: scores become ``softcap * tanh(score / softcap)``.
            sinks: (query heads,) logits that take part in the softmax and carry no value.

        Returns:
            (T, query heads, value width), of the query's type, contiguous.

        Raises:
            ValueError: tensors that do not fit the plan or the pool.
        """
        self._check(plan, query, key, value, scale)
        tokens, query_heads, _ = query.shape
        if sinks is not None:
            sinks = sinks.to(torch.float32).contiguous()
            if sinks.shape != (query_heads,):
                raise ValueError(f"sinks have the shape {tuple(sinks.shape)}, must be ({query_heads},)")
        out = torch.empty(tokens, query_heads, self.layout.value_width, dtype=query.dtype)
        _native.paged_attention(
            plan,
            self.layout,
            self.isa,
            self.address,
            _argument(query),
            _argument(key),
            _argument(value),
            _argument(out),
            scale,
            softcap or 0.0,
            0 if sinks is None else sinks.data_ptr(),
        )
        return out

    def _check(
        self,
        plan: _native.AttentionPlan,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
    ) -> None:
        """The kernels work on bare addresses: what is not caught here is read or written out of bounds."""
        layout = self.layout
        wanted = (
            (plan.num_tokens, plan.query_heads, layout.key_width),
            (plan.num_tokens, layout.heads, layout.key_width),
            (plan.num_tokens, layout.heads, layout.value_width),
        )
        shapes = (tuple(query.shape), tuple(key.shape), tuple(value.shape))
        if shapes != wanted:
            raise ValueError(f"query, key and value have the shapes {shapes}, must be {wanted}")
        if query.stride(2) != 1 or key.stride(2) != 1 or value.stride(2) != 1:
            raise ValueError("the innermost stride of query, key and value must be 1")
        if key.dtype != value.dtype:
            raise ValueError(f"key is {key.dtype} and value {value.dtype}, must be of one type")
        if not scale > 0:
            raise ValueError(f"scale is {scale}, must be above 0")


def _zeros(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros on large pages where the system has them: decoding reads all over the pool, and most of its small
    pages would have to be looked up anew."""
    memory = mmap.mmap(-1, rows * columns * dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(rows, columns)


def _is_bf16(dtype: torch.dtype) -> bool:
    if dtype is torch.bfloat16:
        return True
    if dtype is torch.float32:
        return False
    raise ValueError(f"{dtype} is given, but native attention works on torch.float32 and torch.bfloat16")


def _argument(tensor: torch.Tensor) -> tuple[int, int, int, bool]:
    """What the kernels want to know of a (T, heads, width) tensor."""
    token_stride, head_stride, _ = tensor.stride()
    return tensor.data_ptr(), token_stride, head_stride, _is_bf16(tensor.dtype)
