"""Which numbers the packed weights of a model are made of: its own, or whole numbers of 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from transformers.pytorch_utils import Conv1D

from triton_inflight.packed_weight import PackedWeight, packed_floats, packed_int4, packed_int8
from triton_inflight.quantized_numbers import Int4Numbers, quantized_int4, quantized_int8
from triton_inflight.settings import Quantization

Format = Literal["floats", "int8", "int4"]
Int4Source = Callable[[torch.Tensor], Int4Numbers | None]
"""The numbers of 4 bits that a parameter was made of, where its file has such."""


class LayerGroup(NamedTuple):
    """Linear layers over one input that are packed as one.

    Attributes:
        layers: of one type.
        gated: see ``ColumnOrder``.
    """

    layers: Sequence[Any]
    gated: bool = False


class WeightFormats:
    """How the weights of a model are packed.

    Args:
        quantization: as in config.pbtxt.
        source: of numbers that are taken over as they are.
    """

    def __init__(self, quantization: Quantization = "none", source: Int4Source = lambda _: None) -> None:
        self.quantization = quantization
        self._source = source

    def of(self, output: bool) -> list[Format]:
        """Formats to try, in this order, for a layer's weights.

        An output layer has 8 bits where others have 4: each of its errors goes straight into a logit.

        Args:
            output: whether it is the model's output layer.
        """
        if self.quantization == "none":
            return ["floats"]
        return ["int8" if output else self.quantization, "floats"]

    def pack(self, group: LayerGroup, kind: Format) -> PackedWeight:
        """Weights of linear layers, (outputs, inputs) each, as one.

        Args:
            kind: one of ``of``.
        """
        layers, gated = group
        weights, biases = [matrix(layer) for layer in layers], [layer.bias for layer in layers]
        if kind == "int8":
            return packed_int8(
                [quantized_int8(weight) for weight in weights], weights[0].dtype, biases, gated
            )
        if kind == "int4":
            numbers = [self._source(layer.weight) or quantized_int4(matrix(layer)) for layer in layers]
            return packed_int4(numbers, weights[0].shape[1], weights[0].dtype, biases, gated)
        return packed_floats(weights, biases, gated)


def matrix(layer: torch.nn.Module) -> torch.Tensor:
    """A linear layer's weight as (outputs, inputs)."""
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    return weight.T if isinstance(layer, Conv1D) else weight
