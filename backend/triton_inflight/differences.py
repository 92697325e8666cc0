"""How far a stand-in may be from what it stands for, and how that is measured."""

from __future__ import annotations

import torch

MODULE_TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
"""Largest difference of a stand-in's output on random input, relative to the largest output."""

QUANTIZED_MODULE_TOLERANCE = {"int8": 0.05, "int4": 0.25}
"""Root mean square of the difference of a quantised layer's output on random input, relative to the output's."""

MODEL_TOLERANCE = {torch.bfloat16: 5e-2, torch.float32: 1e-4}
"""Root mean square of the difference of all logits, relative to that of the logits themselves."""

READY_MODEL_TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
"""As ``MODEL_TOLERANCE``, between the same packed weights now and when they were packed. The kernels give the same
bits; what torch computes may be rounded otherwise on another processor."""

QUANTIZED_MODEL_TOLERANCE = {"int8": 0.15, "int4": 0.5}
"""As ``MODEL_TOLERANCE``. It tells a model that can be quantised from one that falls apart, not a good one from a
better one."""

ROUNDED_INPUT_TOLERANCE = 0.1
"""As ``MODEL_TOLERANCE``, between quantised weights that are multiplied with rounded inputs and the same weights in the
model's own code."""

PRODUCT_TOLERANCE = 1e-4
"""Largest difference of a product of whole numbers from the same in float32, relative to the largest number."""

COUPLING_TOLERANCE = 1e-4
"""Largest change of a quantised model's logits with who shares a step, relative to the largest logit."""


def relative_maximum(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest number that was expected."""
    if result.shape != expected.shape:
        return float("inf")
    a, b = result.float(), expected.float()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))


def relative_rms(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The root mean square of the difference, relative to that of what was expected."""
    if result.shape != expected.shape:
        return float("inf")
    a, b = result.float(), expected.float()
    return float((a - b).square().mean().sqrt() / b.square().mean().sqrt().clamp(min=1e-30))
