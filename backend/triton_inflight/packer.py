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
from triton_inflight.rotary_takeover import take_over_rotary
from triton_inflight.weight_formats import Format, WeightFormats, matrix

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

    Attributes:
        weight_bytes: memory of packed weights.
        num_quantized: packed weights of whole numbers.
    """

    def __init__(self, model: PreTrainedModel, formats: WeightFormats) -> None:
        self.model = model
        self.weight_bytes = 0
        self.num_quantized = 0
        self._changes: list[_Change] = []
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

    @property
    def num_changes(self) -> int:
        """Replacements that have been made."""
        return len(self._changes)

    def undo(self) -> None:
        """Put everything back. Weights that were quantised come back as what their numbers mean."""
        for change in reversed(self._changes):
            change.undo()
        self._changes.clear()
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
                self._check_product(name, packed)
                self._check_product(name, below)
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
                self._check_product(_ATTENTION_INPUTS[0], packed)
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
                self._check_product(name, packed)
                self._replace(parent, name, stand_in, [(packed, [module])])
                return

    def _layer(self, parent: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
        if can_be_fused(module):
            self._replace(parent, name, FusedLayer(module), [])

    def _stack(self, model: Any) -> None:
        layers, stack = model.layers, torch.nn.ModuleList([DecoderStack(model.layers)])
        self._change(lambda: setattr(model, "layers", layers), lambda: setattr(model, "layers", stack))

    def _rotary(self, parent: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
        del parent, name
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
        held = [
            _Held(layer, packed, part, layer.weight if id(layer.weight) in self._kept else None)
            for packed, layers in freed
            for part, layer in enumerate(layers)
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
