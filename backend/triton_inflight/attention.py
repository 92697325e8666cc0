"""Paged attention behind transformers' attention interface: the only file that knows that interface.

A conforming model calls the registered function once per attention layer, with the queries, keys and values
of the step's flat batch. The function writes the new keys and values into the store's cells and lets every
token attend over the blocks of its own sequence. Masks are never materialised for the whole batch: the
registered mask function hands each layer a description of its pattern instead of a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from triton_inflight.batch import Batch, StepScope, current_scope
from triton_inflight.kv_tensors import KVShape

# Free of the substrings (sdpa, flash, flex, paged|, /) that transformers gives a meaning of its own.
IMPLEMENTATION = "triton_inflight"


@dataclass(frozen=True)
class MaskPattern:
    """Causal attention over a sequence's own tokens, the last ``window`` of them if it is given."""

    window: int | None


def use_paged_attention(model: PreTrainedModel) -> None:
    """Switch a model to this implementation; it then runs only inside a step scope.

    A model outside the interface keeps its own attention, with no more than a warning from transformers: who
    calls this must count the attention calls of a forward pass (``StepScope.calls``).
    """
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _describe_mask)
    model.set_attn_implementation(IMPLEMENTATION)


def _describe_mask(*_: Any, local_size: int | None = None, **__: Any) -> MaskPattern:
    """Mask function of the interface: some models tell the window through the mask alone."""
    return MaskPattern(local_size)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: MaskPattern | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function of the interface.

    Args:
        query: (1, query heads, T, key width), positions already applied.
        key, value: (1, key heads, T, width); heads are grouped, not expanded.
        attention_mask: what ``_describe_mask`` returned for this layer.
        scaling: factor of the scores; ``key width ** -0.5`` if None.
        sliding_window, softcap, s_aux: window in tokens, cap of the scores, a sink logit per query head.

    Returns:
        (1, T, query heads, value width) and no attention weights.

    Raises:
        RuntimeError: outside a step, or for attention that is not causal.
    """
    scope = current_scope()
    if scope is None:
        raise RuntimeError("paged attention was called outside of a step")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise RuntimeError("attention that is not causal (an encoder, or cross-attention) is not supported")
    window = sliding_window
    if isinstance(attention_mask, MaskPattern) and attention_mask.window is not None:
        window = attention_mask.window
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    shape = KVShape(k.shape[1], k.shape[2], v.shape[2])
    keys, values = scope.tensors.layer(scope.calls, shape)
    scope.calls += 1
    keys.flatten(0, 1).index_copy_(0, scope.batch.cells, k.to(keys.dtype))
    values.flatten(0, 1).index_copy_(0, scope.batch.cells, v.to(values.dtype))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    for group in _groups(scope, window):
        out[group.rows] = _attend(q[group.rows], keys, values, group, scale, softcap, s_aux)
    return out[None], None


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


def _groups(scope: StepScope, window: int | None) -> list[_Group]:
    """The groups of a step for one window, worked out by the first layer that asks."""
    groups = scope.memo.get(window)
    if groups is None:
        groups = scope.memo[window] = _make_groups(scope.batch, scope.tensors.tokens_per_block, window)
    return groups  # type: ignore[return-value]


def _make_groups(batch: Batch, tokens_per_block: int, window: int | None) -> list[_Group]:
    """One group of all sequences that run a single token, and one for each of the others."""
    counts = [b - a for a, b in zip(batch.starts, batch.starts[1:], strict=False)]
    single = [i for i, count in enumerate(counts) if count == 1]
    members = ([single] if single else []) + [[i] for i, count in enumerate(counts) if count > 1]
    device = batch.tokens.device
    groups = []
    for group in members:
        longest = max(batch.lengths[i] for i in group)
        num_blocks = -(-longest // tokens_per_block)
        rows = torch.tensor([range(batch.starts[i], batch.starts[i + 1]) for i in group], device=device)
        reach = torch.arange(num_blocks * tokens_per_block, device=device)
        distance = batch.positions[0][rows][:, :, None] - reach
        seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        bias = torch.zeros(seen.shape, device=device).masked_fill_(~seen, float("-inf"))[:, None]
        groups.append(_Group(rows, batch.tables[group, :num_blocks].long(), bias))
    return groups


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    group: _Group,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The torch reference: (n, t, query heads, key width) queries -> (n, t, query heads, value width).

    Scores are accumulated in float32, as in transformers' eager attention. Grouped heads are stacked as rows
    of one product per key head, so keys and values are never repeated.
    """
    n, t, heads, width = q.shape
    k = keys[group.tables].flatten(1, 2).transpose(1, 2)  # (n, key heads, cells, key width)
    v = values[group.tables].flatten(1, 2).transpose(1, 2)
    kv_heads = k.shape[1]
    per_head = heads // kv_heads
    stacked = (
        q.view(n, t, kv_heads, per_head, width)
        .permute(0, 2, 3, 1, 4)
        .reshape(n, kv_heads, per_head * t, width)
    )
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
