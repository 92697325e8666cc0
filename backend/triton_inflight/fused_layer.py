"""Whole decoder layers in two C++ calls, one before and one after their attention.

A layer is taken over only if its code, and that of its attention, is instruction for instruction the one whose
meaning is known here: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``. transformers generates the files of
most families from a few, so that many have exactly this code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

from triton_inflight.fused import FusedModule, GatedMLP, NativeRMSNorm, PackedLinear, SharedLinear
from triton_inflight.kv_shape import KVShape
from triton_inflight.native import _native

Code = tuple[object, ...]

_INTERFACE: Any = ALL_ATTENTION_FUNCTIONS  # whose annotation forbids that there is no default


def function_code(function: Callable[..., Any]) -> Code:
    """What a function does, apart from what its global names mean."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ()
    return code.co_code, code.co_names, code.co_varnames, code.co_consts


_LAYER = function_code(LlamaDecoderLayer.forward)

# What each attention hands to transformers' interface beside scaling and dropout.
_ATTENTIONS: dict[Code, Callable[[Any], dict[str, Any]]] = {
    function_code(LlamaAttention.forward): lambda _: {},
    function_code(Qwen2Attention.forward): lambda module: {"sliding_window": module.sliding_window},
    function_code(MistralAttention.forward): lambda module: {
        "sliding_window": getattr(module.config, "sliding_window", None)
    },
}


def can_be_fused(layer: torch.nn.Module) -> bool:
    """Whether a layer, whose own modules are replaced already, is one that ``FusedLayer`` can be."""
    attention: Any = getattr(layer, "self_attn", None)
    if _forward_code(layer) != _LAYER or _forward_code(attention) not in _ATTENTIONS:
        return False
    first: Any = getattr(layer, "input_layernorm", None)
    second: Any = getattr(layer, "post_attention_layernorm", None)
    projections = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj")]
    return (
        isinstance(first, NativeRMSNorm)
        and isinstance(second, NativeRMSNorm)
        and isinstance(getattr(layer, "mlp", None), GatedMLP)
        and isinstance(getattr(attention, "o_proj", None), PackedLinear)
        and all(isinstance(projection, SharedLinear) for projection in projections)
        and len({p.shared for p in projections if isinstance(p, SharedLinear)}) == 1
        # Its function for rotary positions was compared with ours.
        and "forward" in vars(attention)
        and attention.head_dim % 2 == 0
        and not layer.training
    )


class FusedLayer(FusedModule):
    """A decoder layer over the flat batch of a step; whatever else it is called with goes to the original.

    Args:
        layer: one that ``can_be_fused``.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        original: Any = layer
        attention = original.self_attn
        inputs = attention.q_proj.shared.packed
        output = attention.o_proj.packed
        mlp: GatedMLP = original.mlp
        self.original = layer
        # Not as a module of its own, which it is below the original, and which is slow to look up.
        self.__dict__["attention"] = attention
        self.scaling: float = attention.scaling
        self.options = _ATTENTIONS[function_code(type(attention).forward)](attention)
        self._width = attention.head_dim
        self._columns = inputs.width
        self._spans = inputs.spans
        self.hidden = inputs.inputs
        (query, query_end), (key, key_end), (value, _) = inputs.spans
        self.runtime = inputs.runtime
        self.query_heads = (query_end - query) // self._width
        self.kv_shape = KVShape((key_end - key) // self._width, self._width, self._width)
        self.weights = _native.LayerWeights(
            original.input_layernorm.argument,
            inputs.native,
            output.native,
            original.post_attention_layernorm.argument,
            mlp.gate_up.native,
            mlp.down.native,
            self.hidden,
            inputs.width,
            output.inputs,
            self._width,
            self.query_heads,
            self.kv_shape.heads,
            key,
            value,
        )

    def __getattr__(self, name: str) -> Any:
        """Models ask their layers for facts, such as which mask they need; the original knows them."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("original"), name)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        attend = _INTERFACE.get_interface(self.attention.config._attn_implementation, None)
        if (
            attend is None
            or cache is not None
            or position_embeddings is None
            or not self.takes(hidden_states, *position_embeddings)
        ):
            result: torch.Tensor = self.original(
                hidden_states,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cache=cache,
                use_cache=use_cache,
                position_embeddings=position_embeddings,
                **kwargs,
            )
            return result
        rows = hidden_states.shape[1]
        bf16 = hidden_states.dtype is torch.bfloat16
        cos, sin = position_embeddings
        inputs = hidden_states.new_empty(rows, self._columns)
        _native.layer_input(
            self.runtime,
            self.weights,
            rows,
            bf16,
            hidden_states.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            inputs.data_ptr(),
        )
        query, key, value = (
            inputs[:, start:end].view(1, rows, -1, self._width).transpose(1, 2) for start, end in self._spans
        )
        attended, _ = attend(
            self.attention,
            query,
            key,
            value,
            attention_mask,
            dropout=0.0,
            scaling=self.scaling,
            position_ids=position_ids,
            use_cache=use_cache,
            **self.options,
            **kwargs,
        )
        attended = attended.contiguous()
        out = torch.empty_like(hidden_states)
        _native.layer_output(
            self.runtime,
            self.weights,
            rows,
            bf16,
            hidden_states.data_ptr(),
            attended.data_ptr(),
            out.data_ptr(),
        )
        return out

    def takes(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        """Whether these are the contiguous rows of one type that the kernels read."""
        angles = (1, hidden.shape[1], self._width)
        return (
            hidden.dtype in (torch.bfloat16, torch.float32)
            and hidden.dtype is cos.dtype
            and hidden.dtype is sin.dtype
            and hidden.shape[0] == 1
            and hidden.shape[2] == self.hidden
            and cos.shape == angles
            and sin.shape == angles
            and hidden.is_contiguous()
            and cos.is_contiguous()
            and sin.is_contiguous()
            and hidden.device.type == "cpu"
        )


def _forward_code(module: object) -> Code | None:
    forward = getattr(type(module), "forward", None)
    return function_code(forward) if isinstance(module, torch.nn.Module) and forward is not None else None
