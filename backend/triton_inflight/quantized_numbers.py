"""Weights as whole numbers: 8 bits with a scale for each output, 4 bits with a scale and a minimum for each group.

Nothing but the weight itself is looked at; there is no calibration.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

GROUP = 32
"""Inputs that share a scale in weights of 4 bits, and in rows that are multiplied with weights of whole numbers."""

_INT8_LARGEST = 127
_INT4_LARGEST = 15
# Narrower ranges to try: the ends are then cut off, and what lies between them is told apart better.
_INT4_RANGES = (1.0, 0.92, 0.84)


class Int8Numbers(NamedTuple):
    """weight = scale * number.

    Attributes:
        numbers: (outputs, inputs) int8 from -127 to 127.
        scales: (outputs, 1) float32.
    """

    numbers: torch.Tensor
    scales: torch.Tensor

    def dequantized(self) -> torch.Tensor:
        """(outputs, inputs) float32."""
        return self.numbers * self.scales


class Int4Numbers(NamedTuple):
    """weight = minimum + scale * number, as in the blocks that GGUF calls Q4_1.

    Attributes:
        numbers: (outputs, inputs up to a multiple of 32) uint8 from 0 to 15.
        scales, minima: (outputs, groups) float16.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor

    def dequantized(self) -> torch.Tensor:
        """(outputs, inputs up to a multiple of 32) float32."""
        groups = self.numbers.view(*self.scales.shape, GROUP)
        return (self.minima.float()[..., None] + self.scales.float()[..., None] * groups).flatten(1)


def quantized_int8(weight: torch.Tensor) -> Int8Numbers:
    """The nearest numbers of 8 bits, each output's largest being 127.

    Args:
        weight: (outputs, inputs).
    """
    weight = weight.detach().float()
    scales = weight.abs().amax(dim=1, keepdim=True) / _INT8_LARGEST
    numbers = (weight / torch.where(scales > 0, scales, 1.0)).round().to(torch.int8)
    return Int8Numbers(numbers, scales)


def quantized_int4(weight: torch.Tensor) -> Int4Numbers:
    """Numbers of 4 bits for groups of 32 inputs, of the ranges tried those with the least squared error.

    What came from numbers of 4 bits with a scale and a minimum in float16 comes out as these.

    Args:
        weight: (outputs, inputs). Inputs are filled up with each row's last one.
    """
    rows = weight.detach().float()
    missing = -rows.shape[1] % GROUP
    if missing:
        rows = torch.cat([rows, rows[:, -1:].expand(-1, missing)], dim=1)
    groups = rows.reshape(rows.shape[0], -1, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    best, least = _int4_of(groups, low, high)
    for share in _INT4_RANGES[1:]:
        cut = (1 - share) / 2 * (high - low)
        numbers, error = _int4_of(groups, low + cut, high - cut)
        better = error < least
        least = torch.where(better, error, least)
        pick = better[..., None]
        best = Int4Numbers(
            torch.where(pick.expand_as(groups).flatten(1), numbers.numbers, best.numbers),
            torch.where(better, numbers.scales, best.scales),
            torch.where(better, numbers.minima, best.minima),
        )
    return best


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """What rows become that are multiplied with whole numbers, by the same operations as in cpp_ext/integer_rows.hpp.

    Args:
        x: (rows, inputs).

    Returns:
        (rows, inputs) float32.
    """
    groups = F.pad(x.float(), (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)
    peak = groups.abs().amax(-1, keepdim=True)
    # Between tensors: torch would turn the quotient with a number into a product with its reciprocal.
    largest = torch.tensor(float(_INT8_LARGEST))
    values = torch.round(groups * torch.where(peak > 0, largest / peak, 0.0))
    return (peak / largest * values).flatten(1)[:, : x.shape[1]]


def _int4_of(groups: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> tuple[Int4Numbers, torch.Tensor]:
    """Numbers for (outputs, groups, 32) weights whose least number means ``low`` and whose largest ``high``.

    Returns:
        The numbers, and the squared error of each group.
    """
    minima = low.to(torch.float16)
    scales = ((high - minima.float()) / _INT4_LARGEST).to(torch.float16)
    minimum, scale = minima.float()[..., None], scales.float()[..., None]
    numbers = ((groups - minimum) / torch.where(scale > 0, scale, 1.0)).round().clamp(0, _INT4_LARGEST)
    error = (minimum + scale * numbers - groups).square().sum(-1)
    return Int4Numbers(numbers.to(torch.uint8).flatten(1), scales, minima), error
