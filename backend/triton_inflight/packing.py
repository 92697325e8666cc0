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

import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from triton_inflight.decoder_stack import DecoderStack, can_be_stacked
from triton_inflight.differences import (
    COUPLING_TOLERANCE,
    MODEL_TOLERANCE,
    MODULE_TOLERANCE,
    QUANTIZED_MODEL_TOLERANCE,
    QUANTIZED_MODULE_TOLERANCE,
    relative_maximum,
    relative_rms,
)
from triton_inflight.errors import ModelError
from triton_inflight.fused import (
    FusedModule,
    GatedMLP,
    NativeRMSNorm,
    PackedLinear,
    SharedInput,
    SharedLinear,
)
from triton_inflight.fused_layer import FusedLayer, can_be_fused
from triton_inflight.packed_weight import PackedWeight, supported, unpacked_floats
from triton_inflight.rotary_takeover import take_over_rotary
from triton_inflight.weight_formats import Format, WeightFormats, matrix

log = logging.getLogger(__name__)

_ATTENTION_INPUTS = ("q_proj", "k_proj", "v_proj")
_MLP_PARTS = ("gate_proj", "up_proj", "down_proj")
_TEST_ROWS = 3


class Packed(NamedTuple):
    """What ``pack`` did.

    Attributes:
        num_modules: modules with a stand-in; 0 if the model is served as it was.
        weight_bytes: memory of packed weights.
        difference: of the logits, see ``MODEL_TOLERANCE``.
        num_quantized: packed weights of whole numbers, of one layer or several in one.
    """

    num_modules: int
    weight_bytes: int
    difference: float
    num_quantized: int = 0


Logits = Callable[[bool], torch.Tensor]
"""Runs the model; (tokens, vocabulary) of some sequences, which share steps if it is told so."""


def pack(model: PreTrainedModel, logits: Logits, formats: WeightFormats | None = None) -> Packed:
    """Replace what can be replaced in a model that lives on the CPU; elsewhere, nothing.

    Args:
        model: in eval mode, and not trained any more. Weights that are packed are freed.
        logits: of the model.
        formats: of the packed weights, by default those that the model has.

    Returns:
        What was done.

    Raises:
        ModelError: the formats are quantised ones, and the model cannot be served with them: it has no layer for
            them, its logits fall apart, or they depend on who shares a step. The model is then of no further use.
    """
    formats = formats or WeightFormats()
    if model.device.type != "cpu" or model.dtype not in MODULE_TOLERANCE:
        return Packed(0, 0, 0.0)
    if formats.quantization != "none":
        return _quantize(model, logits, formats)
    before = logits(True)
    packer = _Packer(model, formats)
    try:
        packer.run()
        difference = relative_rms(logits(True), before)
        reason = f"its logits then differ by {difference:.1e}"
    except Exception as error:
        log.debug("packing failed", exc_info=True)
        difference, reason = float("nan"), f"{type(error).__name__}: {error}"
    if not difference <= MODEL_TOLERANCE[model.dtype]:
        packer.undo()
        log.warning("%s is served without packed weights, so slower: %s", type(model).__name__, reason)
        return Packed(0, 0, difference)
    return Packed(len(packer.undos), packer.weight_bytes, difference)


def _quantize(model: PreTrainedModel, logits: Logits, formats: WeightFormats) -> Packed:
    """As ``pack``, with weights of whole numbers; what was asked for is done or refused, never left out."""
    together, alone = logits(True), logits(False)
    packer = _Packer(model, formats)
    try:
        packer.run()
        quantized = logits(True)
        difference = relative_rms(quantized, together)
        coupling = relative_maximum(logits(False), quantized)
    except Exception as error:
        raise _cannot_be_quantized(model, formats, f"{type(error).__name__}: {error}") from error
    allowed = QUANTIZED_MODEL_TOLERANCE[formats.quantization]
    # Parts of the model that are not replaced may have given a token other last bits in a batch before already.
    allowed_coupling = relative_maximum(alone, together) + COUPLING_TOLERANCE
    reason = ""
    if packer.num_quantized == 0:
        reason = "it has no linear layers that could be, or each would lose too much"
    elif not difference <= allowed:
        reason = (
            f"its logits then differ by {difference:.1e} of their root mean square (allowed: {allowed:.1e})"
        )
    elif not coupling <= allowed_coupling:
        reason = (
            f"the logits of a sequence then change by {coupling:.1e} of the largest with who shares its steps "
            f"(allowed: {allowed_coupling:.1e})"
        )
    if reason:
        raise _cannot_be_quantized(model, formats, reason)
    return Packed(len(packer.undos), packer.weight_bytes, difference, packer.num_quantized)


def _cannot_be_quantized(model: PreTrainedModel, formats: WeightFormats, reason: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__} cannot be served with quantization {formats.quantization}: {reason}; "
        f"set quantization to none in config.pbtxt, or delete it"
    )


class _Packer:
    """Replaces modules of a model and remembers how to undo it."""

    def __init__(self, model: PreTrainedModel, formats: WeightFormats) -> None:
        self.model = model
        self.undos: list[Callable[[], None]] = []
        self.weight_bytes = 0
        self.num_quantized = 0
        self._formats = formats
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
        """Put everything back; only where all weights are floats."""
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
        for kind in self._formats.of(output=False):
            packed = self._formats.pack([gate, up], kind, gated=True)
            below = self._formats.pack([down], kind)
            stand_in = GatedMLP(packed, below)
            if self._matches(kind, stand_in(x), expected, name, module):
                self._replace(parent, name, stand_in, [(packed, [gate, up]), (below, [down])])
                return

    def _attention_inputs(self, parent: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
        del parent, name
        parts = self._layers(module, _ATTENTION_INPUTS)
        if parts is None or len({part.weight.shape[1] for part in parts}) != 1:
            return
        x = self._random(parts[0].weight.shape[1])
        expected = [part(x) for part in parts]
        for kind in self._formats.of(output=False):
            packed = self._formats.pack(parts, kind)
            shared = SharedInput(packed)
            stand_ins = [SharedLinear(shared, i) for i in range(len(parts))]
            results = [stand_in(x) for stand_in in stand_ins]
            if all(map(self._matches, [kind] * 3, results, expected, _ATTENTION_INPUTS, parts)):
                for i, part_name in enumerate(_ATTENTION_INPUTS):
                    freed = [(packed, parts)] if i == 0 else []
                    self._replace(module, part_name, stand_ins[i], freed)
                return

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
            if relative_maximum(stand_in(x), expected) <= MODULE_TOLERANCE[torch.float32]:
                self._replace(parent, name, stand_in, [])
                return

    def _linear(self, parent: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
        if not _is_packable(module, self._dtype):
            return
        weight = matrix(module)
        if weight.shape[0] < 16:
            return
        x = self._random(weight.shape[1])
        expected = module(x)
        is_output = module is self._output
        for kind in self._formats.of(is_output):
            packed = self._formats.pack([module], kind)
            stand_in = PackedLinear(packed, torch.float32 if is_output else None)
            if self._matches(kind, stand_in(x), expected, name, module):
                self._replace(parent, name, stand_in, [(packed, [module])])
                return

    def _layer(self, parent: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
        if can_be_fused(module):
            self._replace(parent, name, FusedLayer(module), [])

    def _stack(self, model: Any) -> None:
        layers = model.layers
        model.layers = torch.nn.ModuleList([DecoderStack(layers)])
        self.undos.append(lambda: setattr(model, "layers", layers))

    def _rotary(self, parent: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
        del parent, name
        undo = take_over_rotary(module, self._dtype)
        if undo is not None:
            self.undos.append(undo)

    def _layers(self, module: torch.nn.Module, names: tuple[str, ...]) -> list[Any] | None:
        """A module's linear layers of these names, if it has all of them and all can be packed."""
        layers = [getattr(module, name, None) for name in names]
        if not all(type(layer) is torch.nn.Linear and _is_packable(layer, self._dtype) for layer in layers):
            return None
        return layers

    def _random(self, width: int) -> torch.Tensor:
        return torch.randn(1, _TEST_ROWS, width, generator=self._generator).to(self._dtype)

    def _matches(
        self, kind: Format, result: torch.Tensor, expected: torch.Tensor, name: str, module: torch.nn.Module
    ) -> bool:
        if kind == "floats":
            difference, allowed = relative_maximum(result, expected), MODULE_TOLERANCE[self._dtype]
        else:
            difference, allowed = relative_rms(result, expected), QUANTIZED_MODULE_TOLERANCE[kind]
        if difference <= allowed:
            return True
        log.info(
            "%s (%s) is not packed as %s: it would differ by %.1e (allowed: %.1e)",
            name, type(module).__name__, kind, difference, allowed,
        )  # fmt: skip
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
            self.weight_bytes += packed.nbytes
            self.num_quantized += packed.is_quantized
            for i, layer in enumerate(layers):
                if id(layer.weight) not in self._kept:
                    taken.append((layer, packed, i))
                    layer.weight.data = torch.empty(0, dtype=layer.weight.dtype)
        setattr(parent, name, stand_in)

        def undo() -> None:
            for layer, packed, i in taken:
                weight = unpacked_floats(packed)[i]
                layer.weight.data = weight.T.contiguous() if isinstance(layer, Conv1D) else weight
            setattr(parent, name, original)

        self.undos.append(undo)


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
