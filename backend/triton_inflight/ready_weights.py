"""Packed weights of a model that were made, and compared with its own, at an earlier load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from triton_inflight.native import _native
from triton_inflight.packed_weight import PackedWeight, packed_again
from triton_inflight.weight_formats import LayerGroup, matrix

_BETWEEN = "|"


class ReadyWeights:
    """Packed weights by their places in the model.

    Args:
        kinds: of the numbers of each weight at a place, by name.
        tensors: theirs, as ``tensors_of`` names them.
    """

    def __init__(self, kinds: Mapping[str, Sequence[str]], tensors: Mapping[str, torch.Tensor]) -> None:
        self._kinds = dict(kinds)
        self._tensors = tensors

    def take(self, path: str, groups: Sequence[LayerGroup]) -> list[PackedWeight] | None:
        """The weights for a place, whose layers give shapes and biases; None where there were none.

        Raises:
            ValueError: they do not fit the layers.
        """
        kinds = self._kinds.pop(path, None)
        if kinds is None:
            return None
        return [
            packed_again(
                self._of(path, i),
                getattr(_native.WeightType, kind),
                [len(matrix(layer)) for layer in group.layers],
                matrix(group.layers[0]).shape[1],
                group.layers[0].weight.dtype,
                [layer.bias for layer in group.layers],
                group.gated,
            )
            for i, (kind, group) in enumerate(zip(kinds, groups, strict=True))
        ]

    @property
    def left(self) -> list[str]:
        """Places that nobody asked for."""
        return list(self._kinds)

    def _of(self, path: str, number: int) -> dict[str, torch.Tensor]:
        return {
            name: self._tensors[key]
            for name in ("data", "scales")
            if (key := _key(path, number, name)) in self._tensors
        }


def kinds_of(weights: Mapping[str, Sequence[PackedWeight]]) -> dict[str, list[str]]:
    """What ``ReadyWeights`` wants to know of packed weights beside their tensors."""
    return {path: [packed.kind.name for packed in packed_here] for path, packed_here in weights.items()}


def tensors_of(weights: Mapping[str, Sequence[PackedWeight]]) -> dict[str, torch.Tensor]:
    """The tensors of packed weights, by names that ``ReadyWeights`` knows."""
    return {
        _key(path, number, name): tensor
        for path, packed_here in weights.items()
        for number, packed in enumerate(packed_here)
        for name, tensor in packed.tensors().items()
    }


def _key(path: str, number: int, name: str) -> str:
    return _BETWEEN.join((path, str(number), name))
