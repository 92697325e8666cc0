"""Stand-ins for the modules of a model: what can be replaced, by what, and back again.

Modules are found by their structure, never by the name of a model, and each is replaced only if its stand-in
computes the same on random input.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from triton_inflight.decoder_stack import DecoderStack, can_be_stacked
from triton_inflight.differences import (
    MODULE_TOLERANCE,
    PRODUCT_TOLERANCE,
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
from triton_inflight.packed_weight import PackedWeight, supported, unpacked
from triton_inflight.quantized_numbers import rounded_rows
from triton_inflight.ready_weights import ReadyWeights
from triton_inflight.rotary_takeover import take_over_rotary
from triton_inflight.weight_formats import Format, LayerGroup, WeightFormats, matrix

log = logging.getLogger(__name__)

_ATTENTION_INPUTS = ("q_proj", "k_proj", "v_proj")
_MLP_PARTS = ("gate_proj", "up_proj", "down_proj")
_TEST_ROWS = 3
_PRODUCT_ROWS = (1, 15)
"""Alone, and more than any version of the kernels takes at once."""


class _Change(NamedTuple):
    """A replacement, and how to take it back and do it again."""

    undo: Callable[[], None]
    redo: Callable[[], None]


class _Place(NamedTuple):
    """A module, its parent's name for it, and the model's."""

    path: str
    parent: torch.nn.Module
    name: str
    module: torch.nn.Module


class _Held(NamedTuple):
    """A layer whose weight is a part of a packed one; ``kept`` is its own, if something else reads that, too."""

    layer: Any
    packed: PackedWeight
    part: int
    kept: torch.nn.Parameter | None

    def free(self) -> None:
        """The layer's weight is only in the packed one, or what it was."""
        if self.kept is None:
            self.layer.weight.data = torch.empty(0, dtype=self.layer.weight.dtype)
        else:
            self.layer.weight = self.kept

    def give_back(self) -> None:
        """The layer has the packed weight's numbers, in its own type."""
        if self.kept is not None and not self.packed.is_quantized:
            return
        weight = unpacked(self.packed)[self.part].to(self.packed.dtype)
        if isinstance(self.layer, Conv1D):
            weight = weight.T.contiguous()
        if self.kept is None:
            self.layer.weight.data = weight
        else:
            self.layer.weight = torch.nn.Parameter(weight, requires_grad=False)


class Packer:
    """Replaces modules of a model and remembers how to undo it.

    Args:
        model: in eval mode, on the CPU.
        formats: of the packed weights.
        ready: weights that were packed and compared before; the layers' own are then not looked at.

    Attributes:
        weights: the packed weights, by the places of what holds them.
        weight_bytes: memory of packed weights.
        num_quantized: packed weights of whole numbers.
    """

    def __init__(
        self, model: PreTrainedModel, formats: WeightFormats, ready: ReadyWeights | None = None
    ) -> None:
        self.model = model
        self.weights: dict[str, list[PackedWeight]] = {}
        self.weight_bytes = 0
        self.num_quantized = 0
        self._changes: list[_Change] = []
        self._formats = formats
        self._ready = ready
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
            for place in list(_places(self.model)):
                if not _is_hooked(place.module):
                    replace(place)
        for model in list(self.model.modules()):
            if can_be_stacked(model):
                self._stack(model)

    @property
    def num_changes(self) -> int:
        """Replacements that have been made."""
        return len(self._changes)

    def undo(self) -> None:
        """Put everything back. Weights that were quantised come back as what their numbers mean."""
        for change in reversed(self._changes):
            change.undo()
        self._changes.clear()
        self.weights.clear()
        self.weight_bytes = 0

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Everything is put back for a while: the model's own code, with what the packed numbers mean."""
        for change in reversed(self._changes):
            change.undo()
        try:
            yield
        finally:
            for change in self._changes:
                change.redo()

    def _gated_mlp(self, place: _Place) -> None:
        parts = self._layers(place.module, _MLP_PARTS)
        if parts is None:
            return
        gate, up, down = parts
        activation = getattr(place.module, "act_fn", None)
        probe = self._random(64)
        if (
            gate.weight.shape != up.weight.shape
            or not callable(activation)
            or not torch.allclose(activation(probe), F.silu(probe))
        ):
            return

        def result(packed: list[PackedWeight], x: torch.Tensor) -> list[torch.Tensor]:
            return [GatedMLP(*packed)(x)]

        groups = [LayerGroup([gate, up], gated=True), LayerGroup([down])]
        packed = self._packed(place.path, groups, [place.module], result)
        if packed is not None:
            self._replace(place.parent, place.name, GatedMLP(*packed), list(zip(packed, groups, strict=True)))

    def _attention_inputs(self, place: _Place) -> None:
        parts = self._layers(place.module, _ATTENTION_INPUTS)
        if parts is None or len({part.weight.shape[1] for part in parts}) != 1:
            return

        def stand_ins(packed: PackedWeight) -> list[SharedLinear]:
            shared = SharedInput(packed)
            return [SharedLinear(shared, i) for i in range(len(parts))]

        def result(packed: list[PackedWeight], x: torch.Tensor) -> list[torch.Tensor]:
            return [stand_in(x) for stand_in in stand_ins(packed[0])]

        group = LayerGroup(parts)
        packed = self._packed(place.path, [group], parts, result)
        if packed is not None:
            for i, stand_in in enumerate(stand_ins(packed[0])):
                freed = [(packed[0], group)] if i == 0 else []
                self._replace(place.module, _ATTENTION_INPUTS[i], stand_in, freed)

    def _norm(self, place: _Place) -> None:
        module = place.module
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
                self._replace(place.parent, place.name, stand_in, [])
                return

    def _linear(self, place: _Place) -> None:
        if not _is_packable(place.module, self._dtype) or matrix(place.module).shape[0] < 16:
            return
        dtype = torch.float32 if place.module is self._output else None

        def result(packed: list[PackedWeight], x: torch.Tensor) -> list[torch.Tensor]:
            return [PackedLinear(packed[0], dtype)(x)]

        group = LayerGroup([place.module])
        packed = self._packed(place.path, [group], [place.module], result)
        if packed is not None:
            self._replace(place.parent, place.name, PackedLinear(packed[0], dtype), [(packed[0], group)])

    def _packed(
        self,
        path: str,
        groups: list[LayerGroup],
        modules: list[Any],
        result: Callable[[list[PackedWeight], torch.Tensor], list[torch.Tensor]],
    ) -> list[PackedWeight] | None:
        """Packed weights for a place in the model, or None where it is to stay as it is.

        Args:
            path: the place.
            groups: of layers, each to be packed as one.
            modules: whose outputs tell what is right.
            result: what stand-ins over the packed weights say instead, to an input.
        """
        if self._ready is not None:
            packed = self._ready.take(path, groups)
        else:
            packed = self._packed_now(path, groups, modules, result)
        if packed is not None:
            self.weights[path] = packed
        return packed

    def _packed_now(
        self,
        path: str,
        groups: list[LayerGroup],
        modules: list[Any],
        result: Callable[[list[PackedWeight], torch.Tensor], list[torch.Tensor]],
    ) -> list[PackedWeight] | None:
        x = self._random(matrix(groups[0].layers[0]).shape[1])
        expected = [module(x) for module in modules]
        for kind in self._formats.of(output=groups[0].layers[0] is self._output):
            packed = [self._formats.pack(group, kind) for group in groups]
            if all(self._matches(kind, a, b, path) for a, b in zip(result(packed, x), expected, strict=True)):
                for one in packed:
                    self._check_product(path, one)
                return packed
        return None

    def _layer(self, place: _Place) -> None:
        if can_be_fused(place.module):
            self._replace(place.parent, place.name, FusedLayer(place.module), [])

    def _stack(self, model: Any) -> None:
        layers, stack = model.layers, torch.nn.ModuleList([DecoderStack(model.layers)])
        self._change(lambda: setattr(model, "layers", layers), lambda: setattr(model, "layers", stack))

    def _rotary(self, place: _Place) -> None:
        module = place.module
        undo = take_over_rotary(module, self._dtype)
        if undo is not None:
            forward = module.forward
            self._changes.append(_Change(undo, lambda: setattr(module, "forward", forward)))

    def _layers(self, module: torch.nn.Module, names: tuple[str, ...]) -> list[Any] | None:
        """A module's linear layers of these names, if it has all of them and all can be packed."""
        layers = [getattr(module, name, None) for name in names]
        if not all(type(layer) is torch.nn.Linear and _is_packable(layer, self._dtype) for layer in layers):
            return None
        return layers

    def _random(self, width: int, rows: int = _TEST_ROWS) -> torch.Tensor:
        return torch.randn(1, rows, width, generator=self._generator).to(self._dtype)

    def _check_product(self, name: str, packed: PackedWeight) -> None:
        """See whether a kernel computes what the whole numbers mean, to the last bits of a float32.

        Raises:
            ModelError: it does not.
        """
        if not packed.is_quantized:
            return
        weights = unpacked(packed)
        for rows in _PRODUCT_ROWS:
            x = self._random(packed.inputs, rows)[0]
            left = rounded_rows(x)
            expected = [
                F.linear(left, weight, None if bias is None else bias.float()).T
                for weight, bias in zip(weights, packed.biases, strict=True)
            ]
            difference = relative_maximum(torch.cat(packed.products(x)), torch.cat(expected))
            if not difference <= PRODUCT_TOLERANCE:
                raise ModelError(
                    f"the product of {rows} rows with {name} in {packed.kind.name} differs by {difference:.1e} from "
                    f"what the numbers mean (allowed: {PRODUCT_TOLERANCE:.0e}): the kernels for "
                    f"{packed.runtime.integer_isa.name} do not work on this machine"
                )

    def _matches(self, kind: Format, result: torch.Tensor, expected: torch.Tensor, path: str) -> bool:
        if kind == "floats":
            difference, allowed = relative_maximum(result, expected), MODULE_TOLERANCE[self._dtype]
        else:
            difference, allowed = relative_rms(result, expected), QUANTIZED_MODULE_TOLERANCE[kind]
        if difference <= allowed:
            return True
        log.info(
            "%s is not packed as %s: it would differ by %.1e (allowed: %.1e)", path, kind, difference, allowed
        )
        return False

    def _replace(
        self,
        parent: torch.nn.Module,
        name: str,
        stand_in: FusedModule,
        freed: list[tuple[PackedWeight, LayerGroup]],
    ) -> None:
        """Put a stand-in in a module's place and free the weights that it holds packed."""
        original = getattr(parent, name)
        held = [
            _Held(layer, packed, part, layer.weight if id(layer.weight) in self._kept else None)
            for packed, group in freed
            for part, layer in enumerate(group.layers)
        ]
        for packed, _ in freed:
            self.weight_bytes += packed.nbytes
            self.num_quantized += packed.is_quantized

        def undo() -> None:
            for one in held:
                one.give_back()
            setattr(parent, name, original)

        def redo() -> None:
            for one in held:
                one.free()
            setattr(parent, name, stand_in)

        self._change(undo, redo)

    def _change(self, undo: Callable[[], None], redo: Callable[[], None]) -> None:
        redo()
        self._changes.append(_Change(undo, redo))


def _places(model: torch.nn.Module) -> Iterator[_Place]:
    """Every module in its place."""
    for path, parent in model.named_modules():
        for name, module in parent.named_children():
            yield _Place(f"{path}.{name}" if path else name, parent, name, module)


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
