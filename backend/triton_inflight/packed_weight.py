"""Weights of linear layers in the order in which the C++ kernels read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch  # before _native: the kernels run on the threads of torch's OpenMP runtime
import torch.nn.functional as F  # noqa: N812

from triton_inflight import _native

PANEL = 32
"""Columns that lie together (cpp_ext/fused_types.hpp)."""
HALF_PANEL = 16

_DTYPES = (torch.bfloat16, torch.float32)

RowsArgument = tuple[int, int, bool]


def supported(weight: torch.Tensor) -> bool:
    """Whether the kernels can multiply with this weight."""
    return weight.device.type == "cpu" and weight.dtype in _DTYPES and weight.ndim == 2


class PackedWeight:
    """Weights of one or several linear layers over the same input, to be read as one.

    Each part starts at a multiple of 16 columns; what is between them are zeros.

    Args:
        weights: one (outputs, inputs) tensor per part, of one type, bfloat16 or float32.
        biases: one (outputs,) tensor or ``None`` per part.
        gated: the two parts, of one size, are gate and up of a gated MLP.

    Attributes:
        data: (panels, depth / pair, 32, pair), where a pair is 2 in bfloat16 and 1 in float32.
        spans: first and end column of each part in the output.
        width: columns of the output, ``spans[-1]``'s end.
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        gated: bool = False,
    ) -> None:
        self.dtype = weights[0].dtype
        self.inputs = weights[0].shape[1]
        self._gated = gated
        starts = [0]
        for weight in weights:
            starts.append(starts[-1] + _rounded(weight.shape[0], HALF_PANEL))
        self.spans = [(start, start + w.shape[0]) for start, w in zip(starts, weights, strict=False)]
        self.width = self.spans[-1][1]
        self.data = self._pack(weights)
        self._bias: torch.Tensor | None = None
        if any(bias is not None for bias in biases):
            rows = [
                torch.zeros(w.shape[0], 1) if b is None else b.detach()[:, None].float()
                for w, b in zip(weights, biases, strict=True)
            ]
            self._bias = self._columns(rows).flatten().contiguous()
        panels, steps, _, pair = self.data.shape
        self.native = _native.PackedWeight(
            self.data.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
            panels * PANEL,
            steps * pair,
            self.dtype is torch.bfloat16,
        )
        self.runtime = _native.Runtime(_native.chosen_isa(), torch.get_num_threads())

    def linear(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """All parts' outputs side by side.

        Args:
            x: (..., inputs) bfloat16 or float32.
            dtype: of the result, by default that of ``x``.

        Returns:
            (..., width); ``spans`` tells the parts.

        Raises:
            ValueError: ``x`` has another width or type.
        """
        rows = self.input_rows(x)
        out = rows.new_empty(rows.shape[0], self.width, dtype=dtype)
        _native.linear(
            self.runtime, self.native, argument(rows), self.inputs, rows.shape[0], argument(out), self.width
        )
        return out.view(*x.shape[:-1], self.width)

    def input_rows(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` as (rows, inputs), checked: the kernels read whatever is at its address.

        Raises:
            ValueError: ``x`` has another width or type, or is not on the CPU.
        """
        if x.shape[-1] != self.inputs or x.dtype not in _DTYPES or x.device.type != "cpu":
            raise ValueError(
                f"a {x.dtype} of shape {tuple(x.shape)} on {x.device} is given to a packed layer; it takes "
                f"(..., {self.inputs}) in bfloat16 or float32 on the CPU"
            )
        return as_rows(x)

    def unpacked(self) -> list[torch.Tensor]:
        """The parts' (outputs, inputs) weights, as they were given."""
        panels, steps, _, pair = self.data.shape
        rows = self.data.transpose(1, 2).reshape(panels * PANEL, steps * pair)
        if self._gated:
            halves = rows.view(-1, 2, HALF_PANEL, steps * pair)
            rows = torch.cat([halves[:, 0].flatten(0, 1), halves[:, 1].flatten(0, 1)])
        return [rows[start:end, : self.inputs].clone() for start, end in self.spans]

    def _columns(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Parts of (outputs, anything), one below the other in the order of the packed columns."""
        padded = [_padded(part, HALF_PANEL, dim=0) for part in parts]
        if self._gated:
            padded = [torch.stack([part.view(-1, HALF_PANEL, part.shape[1]) for part in padded], dim=1)]
            padded = [padded[0].flatten(0, 2)]
        return _padded(torch.cat(padded) if len(padded) > 1 else padded[0], PANEL, dim=0)

    def _pack(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        pair = 2 if self.dtype is torch.bfloat16 else 1
        rows = _padded(self._columns([weight.detach() for weight in weights]), pair, dim=1).contiguous()
        # A pair moves as one number of 4 bytes.
        words = rows.view(torch.int32).view(-1, PANEL, rows.shape[1] // pair)
        return words.transpose(1, 2).contiguous().view(self.dtype).view(len(words), -1, PANEL, pair)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """(rows, width) with the numbers of a row next to each other."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def argument(rows: torch.Tensor) -> RowsArgument:
    """What the kernels want to know of a (rows, width) tensor."""
    return rows.data_ptr(), rows.stride(0), rows.dtype is torch.bfloat16


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _padded(tensor: torch.Tensor, multiple: int, dim: int) -> torch.Tensor:
    """A (rows, columns) tensor with zeros at the end of one of its dimensions."""
    missing = _rounded(tensor.shape[dim], multiple) - tensor.shape[dim]
    if missing == 0:
        return tensor
    return F.pad(tensor, (0, 0, 0, missing) if dim == 0 else (0, missing))
