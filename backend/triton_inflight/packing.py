"""Faster modules for a model on the CPU: weights packed once, and several operations in one call.

The model's code stays as it is. Modules are found by their structure, never by the name of a model, and each is
replaced only if its stand-in computes the same on random input:

* linear layers, by ones over packed weights; the output layer gives float32 logits;
* three linear layers named q_proj, k_proj and v_proj, by one that computes them together;
* a module of gate_proj, up_proj, down_proj and SiLU, by one call;
* an RMSNorm, by one call;
* a decoder layer whose code is known, by one call before its attention and one after it;
* all layers of a model whose code is known, by one call;
* ``apply_rotary_pos_emb``, by one call: the module that uses it gets a forward of the same code over other
  globals, so no other model in the process sees it.

What the packed model says as a whole is compared as well; if it differs, everything is put back.
"""

from __future__ import annotations

import functools
import inspect
import logging
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from triton_inflight.decoder_stack import DecoderStack, can_be_stacked
from triton_inflight.fused import (
    FusedModule,
    GatedMLP,
    NativeRMSNorm,
    PackedLinear,
    SharedInput,
    SharedLinear,
    native_rotary,
)
from triton_inflight.fused_layer import FusedLayer, can_be_fused
from triton_inflight.packed_weight import PackedWeight, supported

log = logging.getLogger(__name__)

MODULE_TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
"""Largest difference of a stand-in's output on random input, relative to the largest output."""

MODEL_TOLERANCE = {torch.bfloat16: 5e-2, torch.float32: 1e-4}
"""Root mean square of the difference of all logits, relative to that of the logits themselves."""

_ATTENTION_INPUTS = ("q_proj", "k_proj", "v_proj")
_MLP_PARTS = ("gate_proj", "up_proj", "down_proj")
_TEST_ROWS = 3


class Packed(NamedTuple):
    """What ``pack`` did.

    Attributes:
        num_modules: modules with a stand-in; 0 if the model is served as it was.
        weight_bytes: memory of packed weights.
        difference: of the logits, see ``MODEL_TOLERANCE``.
    """

    num_modules: int
    weight_bytes: int
    difference: float


def pack(model: PreTrainedModel, logits: Callable[[], torch.Tensor]) -> Packed:
    """Replace what can be replaced in a model that lives on the CPU; elsewhere, nothing.

    Args:
        model: in eval mode, and not trained any more. Weights that are packed are freed.
        logits: runs the model; (tokens, vocabulary) of some sequences.

    Returns:
        What was done.
    """
    if model.device.type != "cpu" or model.dtype not in MODULE_TOLERANCE:
        return Packed(0, 0, 0.0)
    before = logits()
    packer = _Packer(model)
    try:
        packer.run()
        difference = _relative_rms(logits(), before)
        reason = f"its logits then differ by {difference:.1e}"
    except Exception as error:
        log.debug("packing failed", exc_info=True)
        difference, reason = float("nan"), f"{type(error).__name__}: {error}"
    if not difference <= MODEL_TOLERANCE[model.dtype]:
        packer.undo()
        log.warning("%s is served without packed weights, so slower: %s", type(model).__name__, reason)
        return Packed(0, 0, difference)
    return Packed(len(packer.undos), packer.weight_bytes, difference)


class _Packer:
    """Replaces modules of a model and remembers how to undo it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.undos: list[Callable[[], None]] = []
        self.weight_bytes = 0
        self._generator = torch.Generator().manual_seed(0)
        self._dtype = model.dtype
        typed: Any = model
        self._output: object = typed.get_output_embeddings()
        # Weights that something else than a linear layer reads, such as an embedding, stay where they are.
        self._kept = {
            id(parameter)
            for module in model.modules()
            if not isinstance(module, (torch.nn.Linear, Conv1D))
            for parameter in module.parameters(recurse=False)
        }

    @torch.no_grad()
    def run(self) -> None:
        """Larger units first: what they took in is gone when the smaller ones are looked for. Layers come last:
        they are known by what has been replaced in them, and a model's list of layers by these."""
        for replace in (
            self._rotary,
            self._gated_mlp,
            self._attention_inputs,
            self._norm,
            self._linear,
            self._layer,
        ):
            for parent, name, module in list(_children(self.model)):
                if not _is_hooked(module):
                    replace(parent, name, module)
        for model in list(self.model.modules()):
            if can_be_stacked(model):
                self._stack(model)

    def undo(self) -> None:
        for undo in reversed(self.undos):
            undo()
        self.undos.clear()
        self.weight_bytes = 0

    def _gated_mlp(self, parent: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
        parts = self._layers(module, _MLP_PARTS)
        if parts is None:
            return
        gate, up, down = parts
        activation = getattr(module, "act_fn", None)
        probe = self._random(64)
        if (
            gate.weight.shape != up.weight.shape
            or not callable(activation)
            or not torch.allclose(activation(probe), F.silu(probe))
        ):
            return
        x = self._random(gate.weight.shape[1])
        expected = module(x)
        packed = PackedWeight([gate.weight, up.weight], [gate.bias, up.bias], gated=True)
        below = PackedWeight([down.weight], [down.bias])
        stand_in = GatedMLP(packed, below)
        if self._matches(stand_in(x), expected, name, module):
            self._replace(parent, name, stand_in, [(packed, [gate, up]), (below, [down])])

    def _attention_inputs(self, parent: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
        del parent, name
        parts = self._layers(module, _ATTENTION_INPUTS)
        if parts is None or len({part.weight.shape[1] for part in parts}) != 1:
            return
        x = self._random(parts[0].weight.shape[1])
        packed = PackedWeight([part.weight for part in parts], [part.bias for part in parts])
        shared = SharedInput(packed)
        stand_ins = [SharedLinear(shared, i) for i in range(len(parts))]
        for stand_in, part, part_name in zip(stand_ins, parts, _ATTENTION_INPUTS, strict=True):
            if not self._matches(stand_in(x), part(x), part_name, part):
                return
        for i, part_name in enumerate(_ATTENTION_INPUTS):
            freed = [(packed, parts)] if i == 0 else []
            self._replace(module, part_name, stand_ins[i], freed)

    def _norm(self, parent: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
        weight = getattr(module, "weight", None)
        epsilon = next(
            (
                e
                for n in ("variance_epsilon", "eps", "epsilon")
                if isinstance(e := getattr(module, n, None), float)
            ),
            None,
        )
        if (
            not type(module).__name__.endswith("RMSNorm")
            or epsilon is None
            or weight is None
            or weight.ndim != 1
        ):
            return
        # In float32 the two forms that weights come in cannot be confused, nor with anything else.
        x = self._random(len(weight)).float()
        expected = module(x)
        for scale in (weight, 1.0 + weight.float()):
            stand_in = NativeRMSNorm(scale, epsilon)
            if _relative_maximum(stand_in(x), expected) <= MODULE_TOLERANCE[torch.float32]:
                self._replace(parent, name, stand_in, [])
                return

    def _linear(self, parent: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
        if not _is_packable(module, self._dtype):
            return
        weight = _matrix(module)
        if weight.shape[0] < 16:
            return
        x = self._random(weight.shape[1])
        packed = PackedWeight([weight], [module.bias])  # type: ignore[list-item]
        stand_in = PackedLinear(packed, torch.float32 if module is self._output else None)
        if self._matches(stand_in(x), module(x), name, module):
            self._replace(parent, name, stand_in, [(packed, [module])])

    def _layer(self, parent: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
        if can_be_fused(module):
            self._replace(parent, name, FusedLayer(module), [])

    def _stack(self, model: Any) -> None:
        layers = model.layers
        model.layers = torch.nn.ModuleList([DecoderStack(layers)])
        self.undos.append(lambda: setattr(model, "layers", layers))

    def _rotary(self, parent: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
        del parent, name
        forward = inspect.unwrap(type(module).forward)
        if not isinstance(forward, types.FunctionType) or _ROTARY not in forward.__code__.co_names:
            return
        rotary = _fast_rotary(forward.__globals__.get(_ROTARY), self._dtype)
        if rotary is None or "forward" in vars(module):
            return
        over = types.FunctionType(
            forward.__code__,
            {**forward.__globals__, _ROTARY: rotary},
            forward.__name__,
            forward.__defaults__,
            forward.__closure__,
        )
        over.__kwdefaults__ = forward.__kwdefaults__
        module.forward = types.MethodType(over, module)
        self.undos.append(lambda: delattr(module, "forward"))

    def _layers(self, module: torch.nn.Module, names: tuple[str, ...]) -> list[Any] | None:
        """A module's linear layers of these names, if it has all of them and all can be packed."""
        layers = [getattr(module, name, None) for name in names]
        if not all(type(layer) is torch.nn.Linear and _is_packable(layer, self._dtype) for layer in layers):
            return None
        return layers

    def _random(self, width: int) -> torch.Tensor:
        return torch.randn(1, _TEST_ROWS, width, generator=self._generator).to(self._dtype)

    def _matches(
        self, result: torch.Tensor, expected: torch.Tensor, name: str, module: torch.nn.Module
    ) -> bool:
        difference = _relative_maximum(result, expected)
        if difference <= MODULE_TOLERANCE[self._dtype]:
            return True
        log.info(
            "%s (%s) stays as it is: packed, it differs by %.1e", name, type(module).__name__, difference
        )
        return False

    def _replace(
        self,
        parent: torch.nn.Module,
        name: str,
        stand_in: FusedModule,
        freed: list[tuple[PackedWeight, list[Any]]],
    ) -> None:
        """Put a stand-in in a module's place and free the weights that it holds packed."""
        original = getattr(parent, name)
        taken = []
        for packed, layers in freed:
            self.weight_bytes += packed.data.nbytes
            for i, layer in enumerate(layers):
                if id(layer.weight) not in self._kept:
                    taken.append((layer, packed, i))
                    layer.weight.data = torch.empty(0, dtype=layer.weight.dtype)
        setattr(parent, name, stand_in)

        def undo() -> None:
            for layer, packed, i in taken:
                weight = packed.unpacked()[i]
                layer.weight.data = weight.T.contiguous() if isinstance(layer, Conv1D) else weight
            setattr(parent, name, original)

        self.undos.append(undo)


_ROTARY = "apply_rotary_pos_emb"


@functools.cache
def _fast_rotary(original: Any, dtype: torch.dtype) -> Callable[..., Any] | None:
    """A stand-in for a model family's function that applies rotary positions, if it does what they mostly do."""
    if not callable(original):
        return None
    rotary = native_rotary(original)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 3, 16, generator=generator).to(dtype) for heads in (4, 2))
    cos, sin = (torch.randn(1, 3, 16, generator=generator).to(dtype) for _ in range(2))
    try:
        expected = original(q, k, cos, sin)
        same = all(
            _relative_maximum(ours, theirs) <= MODULE_TOLERANCE[dtype]
            for ours, theirs in zip(rotary(q, k, cos, sin), expected, strict=True)
        )
    except Exception:
        return None  # of another signature or shape
    return rotary if same else None


def _children(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """Every module in its place: parent, name, module."""
    for parent in model.modules():
        for name, module in parent.named_children():
            yield parent, name, module


def _is_hooked(module: torch.nn.Module) -> bool:
    """Whether someone listens to a module's calls; a stand-in would not tell them."""
    return any(getattr(module, hooks) for hooks in ("_forward_hooks", "_forward_pre_hooks"))


def _is_packable(module: object, dtype: torch.dtype) -> bool:
    return (
        type(module) in (torch.nn.Linear, Conv1D)
        and isinstance(module, (torch.nn.Linear, Conv1D))
        and not _is_hooked(module)
        and supported(module.weight)
        and module.weight.dtype is dtype
        and module.weight.numel() > 0
    )


def _matrix(module: torch.nn.Module) -> torch.Tensor:
    """A linear layer's weight as (outputs, inputs)."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.T if isinstance(module, Conv1D) else weight


def _relative_maximum(result: torch.Tensor, expected: torch.Tensor) -> float:
    if result.shape != expected.shape:
        return float("inf")
    a, b = result.float(), expected.float()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))


def _relative_rms(result: torch.Tensor, expected: torch.Tensor) -> float:
    a, b = result.float(), expected.float()
    return float((a - b).square().mean().sqrt() / b.square().mean().sqrt().clamp(min=1e-30))
