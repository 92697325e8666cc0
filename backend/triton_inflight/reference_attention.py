"""Paged attention in plain torch: the oracle of the native kernels, and what runs on devices without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from triton_inflight.kv_shape import KVShape


@dataclass(frozen=True)
class _Group:
    """Sequences of a step that run the same number of tokens, padded to the longest history among them.

    Attributes:
        rows: (n, t) int64, rows of the flat batch: t tokens of each of n sequences.
        tables: (n, m) int64, blocks of each sequence.
        bias: (n, 1, t, m * tokens_per_block) float32, 0 where a token may attend and -inf elsewhere.
    """

    rows: torch.Tensor
    tables: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True)
class ReferencePlan:
    """What all attention calls of a step with the same window share.

    Attributes:
        cells: (T,) int64, where each token's keys and values go.
        groups: the sequences of the step.
    """

    cells: torch.Tensor
    groups: list[_Group]


class ReferencePool:
    """Keys and values of every block for one attention call of the forward pass.

    Attributes:
        keys: (num_blocks, tokens_per_block, heads, key_width). It starts as zeros, which the operating system
            gives without touching the memory, and which keep a masked cell from ever being NaN.
        values: (num_blocks, tokens_per_block, heads, value_width), likewise.

    Args:
        num_blocks: blocks of the store.
        tokens_per_block: cells of a block.
        shape: of a token's keys and values.
        dtype, device: of keys and values.
    """

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        shape: KVShape,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        cells = (num_blocks, tokens_per_block, shape.heads)
        self.keys = torch.zeros((*cells, shape.key_width), dtype=dtype, device=device)
        self.values = torch.zeros((*cells, shape.value_width), dtype=dtype, device=device)

    @property
    def bytes_per_token(self) -> int:
        """Memory of one cell."""
        num_blocks, tokens_per_block = self.keys.shape[:2]
        return (self.keys.nbytes + self.values.nbytes) // (num_blocks * tokens_per_block)

    def copy_block(self, source: int, destination: int) -> None:
        """Copy the cells of a whole block."""
        self.keys[destination] = self.keys[source]
        self.values[destination] = self.values[source]

    def plan(
        self,
        tables: torch.Tensor,
        starts: Sequence[int],
        lengths: Sequence[int],
        _query_heads: int,
        window: int | None,
    ) -> ReferencePlan:
        """The work of a step, for every attention call with this window; see ``NativePool.plan``.

        One group holds all sequences that run a single token, and one each of the others.
        """
        counts = [b - a for a, b in pairwise(starts)]
        single = [i for i, count in enumerate(counts) if count == 1]
        members = ([single] if single else []) + [[i] for i, count in enumerate(counts) if count > 1]
        cells = torch.empty(starts[-1], dtype=torch.int64, device=tables.device)
        groups = []
        for group in members:
            rows, positions = self._rows(group, starts, lengths, tables.device)
            num_blocks = -(-max(lengths[i] for i in group) // self.tokens_per_block)
            blocks = tables[group, :num_blocks].long()
            cells[rows] = blocks.gather(1, positions // self.tokens_per_block) * self.tokens_per_block + (
                positions % self.tokens_per_block
            )
            distance = positions[:, :, None] - torch.arange(
                num_blocks * self.tokens_per_block, device=tables.device
            )
            seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
            bias = torch.zeros(seen.shape, device=tables.device).masked_fill_(~seen, float("-inf"))
            groups.append(_Group(rows, blocks, bias[:, None]))
        return ReferencePlan(cells, groups)

    def attend(
        self,
        plan: ReferencePlan,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the step's keys and values and attend over them; see ``NativePool.attend``."""
        self.keys.flatten(0, 1).index_copy_(0, plan.cells, key.to(self.keys.dtype))
        self.values.flatten(0, 1).index_copy_(0, plan.cells, value.to(self.values.dtype))
        out = query.new_empty(*query.shape[:2], value.shape[2])
        for group in plan.groups:
            out[group.rows] = self._attend(query[group.rows], group, scale, softcap, sinks)
        return out

    @property
    def tokens_per_block(self) -> int:
        return self.keys.shape[1]

    @staticmethod
    def _rows(
        group: list[int], starts: Sequence[int], lengths: Sequence[int], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(n, t) rows of the flat batch of some sequences, and the positions of the tokens there."""
        rows = torch.tensor([range(starts[i], starts[i + 1]) for i in group], device=device)
        offsets = torch.tensor([lengths[i] - starts[i + 1] for i in group], device=device)
        return rows, rows + offsets[:, None]

    def _attend(
        self,
        q: torch.Tensor,
        group: _Group,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """(n, t, query heads, key width) queries -> (n, t, query heads, value width).

        Scores are accumulated in float32, as in transformers' eager attention. Grouped heads are stacked as
        rows of one product per key head, so keys and values are never repeated.
        """
        n, t, heads, width = q.shape
        k = self.keys[group.tables].flatten(1, 2).transpose(1, 2)  # (n, key heads, cells, key width)
        v = self.values[group.tables].flatten(1, 2).transpose(1, 2)
        kv_heads = k.shape[1]
        per_head = heads // kv_heads
        stacked = q.view(n, t, kv_heads, per_head, width).permute(0, 2, 3, 1, 4)
        stacked = stacked.reshape(n, kv_heads, per_head * t, width)
        scores = (stacked @ k.to(q.dtype).transpose(2, 3)).float().view(n, kv_heads, per_head, t, -1) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores + group.bias[:, None]
        if sinks is not None:
            sink = sinks.float().view(1, kv_heads, per_head, 1, 1).expand(n, -1, -1, t, 1)
            weights = torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]
        else:
            weights = scores.softmax(dim=-1)
        out = weights.to(q.dtype).view(n, kv_heads, per_head * t, -1) @ v.to(q.dtype)
        return out.view(n, kv_heads, per_head, t, -1).permute(0, 3, 1, 2, 4).reshape(n, t, heads, -1)
