"""Paged attention behind transformers' attention interface: the only file that knows that interface.

A conforming model calls the registered function once per attention layer, with the queries, keys and values
of the step's flat batch. The function hands them to the pool of that layer, which writes the new keys and values
into the store's cells and lets every token attend over the blocks of its own sequence. Masks are never
materialised for the whole batch: the registered mask function hands each layer a description of its pattern
instead of a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from triton_inflight.batch import StepScope, current_scope
from triton_inflight.kv_shape import KVShape
from triton_inflight.native import _native
from triton_inflight.native_attention import NativePool
from triton_inflight.reference_attention import ReferencePool

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
    window = _window(sliding_window, attention_mask)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    shape = KVShape(k.shape[1], k.shape[2], v.shape[2])
    pool = _next_pool(scope, shape)
    plan = _plan(scope, pool, shape, q.shape[1], window)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    return pool.attend(plan, q, k, v, scale, softcap, s_aux)[None], None


class NextCalls(NamedTuple):
    """Attention calls that differ in nothing but their pools."""

    plan: _native.AttentionPlan
    pools: list[NativePool]


def next_calls(
    model_attention: torch.nn.Module,
    count: int,
    query_heads: int,
    shape: KVShape,
    sliding_window: int | None,
    attention_mask: MaskPattern | None,
) -> NextCalls | None:
    """The step's next ``count`` attention calls, for one who makes them all at once in C++.

    Args:
        model_attention: the attention module of any of those layers.
        count: layers.
        query_heads, shape, sliding_window, attention_mask: what each of them would hand to the interface.

    Returns:
        ``None`` where they have to go through the interface one by one: the model's attention is another one, or
        its pools are not those of the native kernels.
    """
    config: Any = model_attention.config
    scope = current_scope()
    if scope is None or config._attn_implementation != IMPLEMENTATION:
        return None
    if not scope.tensors.is_native:
        return None
    pools = [_next_pool(scope, shape) for _ in range(count)]
    plan = _plan(scope, pools[0], shape, query_heads, _window(sliding_window, attention_mask))
    return NextCalls(plan, pools)  # type: ignore[arg-type]


def _window(sliding_window: int | None, mask: MaskPattern | None) -> int | None:
    """The layer's window; where its mask tells one, that."""
    if isinstance(mask, MaskPattern) and mask.window is not None:
        return mask.window
    return sliding_window


def _next_pool(scope: StepScope, shape: KVShape) -> NativePool | ReferencePool:
    pool = scope.tensors.pool(scope.calls, shape)
    scope.calls += 1
    return pool


def _plan(
    scope: StepScope, pool: NativePool | ReferencePool, shape: KVShape, query_heads: int, window: int | None
) -> Any:
    """The step's work for such calls: as a rule the same for all layers, or for every second one."""
    same_work = (shape, query_heads, window)
    if same_work not in scope.plans:
        batch = scope.batch
        scope.plans[same_work] = pool.plan(batch.tables, batch.starts, batch.lengths, query_heads, window)
    return scope.plans[same_work]
