"""Stand-ins for modules of a model: the same function of the same input, in one C++ call.

They are called without ``torch.nn.Module``'s hooks, which cost as much as a small layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from triton_inflight.native import _native
from triton_inflight.packed_weight import PackedWeight, argument, as_rows

Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class FusedModule(torch.nn.Module):
    """A module whose call is its ``forward``, whatever hooks are registered."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


class PackedLinear(FusedModule):
    """A linear layer over a packed weight.

    Args:
        packed: a weight of one part.
        dtype: of the output, by default that of the input.

    Attributes:
        packed: the weight.
        weight: tells shape and type; its numbers are in the packed weight alone.
    """

    def __init__(self, packed: PackedWeight, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = packed.inputs, packed.width
        self.weight = torch.empty(packed.width, packed.inputs, dtype=packed.dtype, device="meta")
        self.packed = packed
        self._dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.packed.linear(x, self._dtype)


class SharedInput:
    """Several linear layers that a model calls one after the other on the same tensor, computed as one.

    The first call computes all of them; the others take what is ready. The result is held until each part is
    taken or another input comes.
    """

    def __init__(self, packed: PackedWeight) -> None:
        self.packed = packed
        self._input: torch.Tensor | None = None
        self._ready: dict[int, torch.Tensor] = {}

    def take(self, part: int, x: torch.Tensor) -> torch.Tensor:
        """Output of one part, a view of (..., outputs) into the output of all."""
        if x is not self._input or part not in self._ready:
            both = self.packed.linear(x)
            self._ready = {i: both[..., start:end] for i, (start, end) in enumerate(self.packed.spans)}
            self._input = x
        result = self._ready.pop(part)
        if not self._ready:
            self._input = None
        return result


class SharedLinear(FusedModule):
    """One of several linear layers over the same input.

    Attributes:
        shared: what it is a part of.
        weight: tells shape and type; its numbers are in the packed weight alone.
    """

    def __init__(self, shared: SharedInput, part: int) -> None:
        super().__init__()
        start, end = shared.packed.spans[part]
        self.in_features, self.out_features = shared.packed.inputs, end - start
        self.weight = torch.empty(
            self.out_features, self.in_features, dtype=shared.packed.dtype, device="meta"
        )
        self.shared = shared
        self._part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared.take(self._part, x)


class GatedMLP(FusedModule):
    """down(silu(gate(x)) * up(x)).

    Args:
        gate_up: gate and up, packed as gated.
        down: a weight of one part.
    """

    def __init__(self, gate_up: PackedWeight, down: PackedWeight) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.gate_up.input_rows(x)
        width = self.down.width
        out = rows.new_empty(rows.shape[0], width)
        _native.gated_mlp(
            self.gate_up.runtime,
            self.gate_up.native,
            self.down.native,
            argument(rows),
            self.gate_up.inputs,
            rows.shape[0],
            argument(out),
            width,
        )
        return out.view(*x.shape[:-1], width)


class NativeRMSNorm(FusedModule):
    """x / sqrt(mean(x^2) + epsilon) * scale, computed in float32, of the type of ``x``.

    Args:
        scale: (width,).
        epsilon: above 0.

    Attributes:
        argument: address of the scale, and epsilon.
    """

    def __init__(self, scale: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        self._scale = scale.detach().float().contiguous()
        self._address = self._scale.data_ptr()
        self._epsilon = epsilon
        self.argument = (self._address, epsilon)
        self._runtime = _native.Runtime(_native.chosen_isa(), torch.get_num_threads())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != len(self._scale) or not _is_usable(x):
            raise ValueError(
                f"a {x.dtype} of shape {tuple(x.shape)} on {x.device} is given to a native RMSNorm; it takes "
                f"(..., {len(self._scale)}) in bfloat16 or float32 on the CPU"
            )
        rows = as_rows(x)
        out = rows.new_empty(rows.shape)
        _native.rms_norm(
            self._runtime,
            argument(rows),
            argument(out),
            self._address,
            rows.shape[1],
            rows.shape[0],
            self._epsilon,
        )
        return out.view(x.shape)


def native_rotary(original: Rotary) -> Rotary:
    """A function that applies rotary positions, in the order of halves, to flat batches.

    Args:
        original: ``(query, key, cos, sin) -> (query, key)`` as in transformers; it is called for whatever is no
            flat batch of one type.

    Returns:
        The function. Its query and key are (1, heads, T, width), cos and sin (1, T, width).
    """
    runtime = _native.Runtime(_native.chosen_isa(), torch.get_num_threads())

    def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        _, heads, tokens, width = x.shape
        out = x.new_empty(tokens, heads, width)
        _native.rotate(
            runtime,
            (x.data_ptr(), x.stride(2), x.stride(1), heads),
            (out.data_ptr(), heads * width, width, heads),
            argument(cos),
            argument(sin),
            width,
            width,
            tokens,
        )
        return out.transpose(0, 1)[None]

    def apply_rotary_pos_emb(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        usable = not args and not kwargs and _is_flat((q, k), (cos, sin))
        if not usable:
            return original(q, k, cos, sin, *args, **kwargs)
        return turned(q, cos[0], sin[0]), turned(k, cos[0], sin[0])

    return apply_rotary_pos_emb


def _is_usable(x: torch.Tensor) -> bool:
    return x.dtype in (torch.bfloat16, torch.float32) and x.device.type == "cpu"


def _is_flat(states: Sequence[torch.Tensor], angles: Sequence[torch.Tensor]) -> bool:
    """Whether rotary positions are asked for a flat batch, of a type and strides that the kernel takes."""
    dtype = states[0].dtype
    tokens, width = states[0].shape[-2:]
    return (
        _is_usable(states[0])
        and width % 2 == 0
        and all(
            x.ndim == 4 and x.shape[0] == 1 and x.shape[2:] == (tokens, width) and x.dtype is dtype
            for x in states
        )
        and all(x.shape == (1, tokens, width) and x.dtype is dtype for x in angles)
        and all(x.stride(-1) == 1 for x in (*states, *angles))
    )
