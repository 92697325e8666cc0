"""All decoder layers of a model in one C++ call: between the layers, Python would take as long as their weights.

A model's list of layers is replaced by a list of one, which runs them all. As with a single layer, that is done
only where the code that goes through the list is, instruction for instruction, known here.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.mistral.modeling_mistral import MistralModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

from triton_inflight.attention import NextCalls, next_calls
from triton_inflight.fused import FusedModule
from triton_inflight.fused_layer import FusedLayer, function_code
from triton_inflight.native import _native

# Each hands every layer the same arguments, but for a mask that may be of the layer's type.
_MODELS = {function_code(model.forward) for model in (LlamaModel, MistralModel, Qwen2Model)}


def can_be_stacked(model: torch.nn.Module) -> bool:
    """Whether the ``layers`` of a model, which are replaced already, can be one ``DecoderStack``."""
    layers: Any = getattr(model, "layers", None)
    return (
        isinstance(layers, torch.nn.ModuleList)
        and len(layers) > 1
        and all(type(layer) is FusedLayer for layer in layers)
        and len(layers) == getattr(getattr(model, "config", None), "num_hidden_layers", None)
        and len({_common(layer) for layer in layers}) == 1
        and function_code(type(model).forward) in _MODELS
        and "forward" not in vars(model)
    )


def _common(layer: Any) -> tuple[object, ...]:
    """What has to be the same in all layers of a stack."""
    window = layer.options.get("sliding_window")
    return layer.scaling, window, layer.query_heads, layer.kv_shape, layer.hidden, layer.attention.is_causal


class DecoderStack(FusedModule):
    """The layers of a model over the flat batch of a step; in any other call, one after the other.

    Args:
        layers: of a model that ``can_be_stacked``.
    """

    def __init__(self, layers: torch.nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers
        fused: list[Any] = list(layers)
        self._weights: list[_native.LayerWeights] = [layer.weights for layer in fused]
        # In a tuple it is no module of this one's own, which it is in the list, and which is slow to look up.
        self._first: tuple[FusedLayer] = (fused[0],)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        calls = self._next_calls(hidden_states, **kwargs)
        if calls is None:
            for layer in self.layers:
                hidden_states = layer(hidden_states, **kwargs)
            return hidden_states
        cos, sin = kwargs["position_embeddings"]
        x = hidden_states.clone()
        (first,) = self._first
        _native.decoder_stack(
            first.runtime,
            self._weights,
            x.shape[1],
            x.dtype is torch.bfloat16,
            x.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            calls.plan,
            calls.pools[0].layout,
            calls.pools[0].isa,
            [pool.address for pool in calls.pools],
            first.scaling,
        )
        return x

    def _next_calls(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        cache: Any = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **_: Any,
    ) -> NextCalls | None:
        (first,) = self._first
        if cache is not None or position_embeddings is None or not first.attention.is_causal:
            return None
        if not first.takes(hidden_states, *position_embeddings):
            return None
        window = first.options.get("sliding_window")
        return next_calls(
            first.attention, len(self._weights), first.query_heads, first.kv_shape, window, attention_mask
        )
