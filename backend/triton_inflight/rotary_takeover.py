"""A model family's ``apply_rotary_pos_emb``, replaced for the modules of one model.

The module that uses it gets a forward of the same code over other globals, so no other model in the process
sees it.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from triton_inflight.differences import MODULE_TOLERANCE, relative_maximum
from triton_inflight.fused import native_rotary

_ROTARY = "apply_rotary_pos_emb"


def take_over_rotary(module: torch.nn.Module, dtype: torch.dtype) -> Callable[[], None] | None:
    """Let a module's forward apply rotary positions natively, if its function does what they mostly do.

    Returns:
        What undoes it, or None where nothing was done.
    """
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, types.FunctionType) or _ROTARY not in forward.__code__.co_names:
        return None
    rotary = fast_rotary(forward.__globals__.get(_ROTARY), dtype)
    if rotary is None or "forward" in vars(module):
        return None
    over = types.FunctionType(
        forward.__code__,
        {**forward.__globals__, _ROTARY: rotary},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    over.__kwdefaults__ = forward.__kwdefaults__
    module.forward = types.MethodType(over, module)
    return lambda: delattr(module, "forward")


@functools.cache
def fast_rotary(original: Any, dtype: torch.dtype) -> Callable[..., Any] | None:
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
            relative_maximum(ours, theirs) <= MODULE_TOLERANCE[dtype]
            for ours, theirs in zip(rotary(q, k, cos, sin), expected, strict=True)
        )
    except Exception:
        return None  # of another signature or shape
    return rotary if same else None
