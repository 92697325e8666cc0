"""Weights of linear layers in the order in which the C++ kernels read them (cpp_ext/fused_types.hpp)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812

from triton_inflight.native import _native
from triton_inflight.quantized_numbers import GROUP, Int4Numbers, Int8Numbers

PANEL = 32
"""Columns that lie together."""
HALF_PANEL = 16
QUAD = 4
"""Inputs of a column that lie together in weights of whole numbers."""

_DTYPES = (torch.bfloat16, torch.float32)

RowsArgument = tuple[int, int, bool]
Biases = Sequence[torch.Tensor | None]


def supported(weight: torch.Tensor) -> bool:
    """Whether the kernels can multiply with this weight."""
    return weight.device.type == "cpu" and weight.dtype in _DTYPES and weight.ndim == 2


class ColumnOrder:
    """Where the outputs of several linear layers over one input lie in a packed weight.

    Each part starts at a multiple of 16 columns; what is between them are zeros.

    Args:
        sizes: outputs of each part.
        gated: the two parts, of one size, are gate and up of a gated MLP; each panel has 16 columns of both.

    Attributes:
        spans: first and end column of each part in the output.
        width: columns of the output, ``spans[-1]``'s end.
    """

    def __init__(self, sizes: Sequence[int], gated: bool = False) -> None:
        self._gated = gated
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + rounded(size, HALF_PANEL))
        self.spans = [(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        self.width = self.spans[-1][1]

    def arranged(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Parts of (outputs, anything), one below the other in the order of the packed columns."""
        padded = [_padded(part, HALF_PANEL, dim=0) for part in parts]
        if self._gated:
            padded = [torch.stack([part.view(-1, HALF_PANEL, part.shape[1]) for part in padded], dim=1)]
            padded = [padded[0].flatten(0, 2)]
        return _padded(torch.cat(padded) if len(padded) > 1 else padded[0], PANEL, dim=0)

    def parts(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """The parts that ``arranged`` made these rows of."""
        if self._gated:
            halves = rows.view(-1, 2, HALF_PANEL, rows.shape[1])
            rows = torch.cat([halves[:, 0].flatten(0, 1), halves[:, 1].flatten(0, 1)])
        return [rows[start:end].clone() for start, end in self.spans]


class PackedWeight:
    """Weights of one or several linear layers over the same input, to be read as one; see the functions below.

    Args:
        data: the numbers, in the kernels' order.
        order: of the columns.
        inputs: numbers of an input row.
        kind: of the numbers.
        dtype: of the layers that it stands for.
        biases: one (outputs,) tensor or ``None`` per part.
        scales: (outputs, 1) for each part, of int8.

    Attributes:
        spans: first and end column of each part in the output.
        width: columns of the output, ``spans[-1]``'s end.
        runtime: version and threads of the kernels.
        biases: as they were given.
    """

    def __init__(
        self,
        data: torch.Tensor,
        order: ColumnOrder,
        inputs: int,
        kind: _native.WeightType,
        dtype: torch.dtype,
        biases: Biases,
        scales: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.data, self.order, self.inputs, self.kind, self.dtype = data, order, inputs, kind, dtype
        self.spans, self.width = order.spans, order.width
        self.biases = biases
        self._scales = None if scales is None else order.arranged(scales).flatten().contiguous()
        self._bias = _arranged_biases(order, biases)
        multiple = {_native.WeightType.float32: 1, _native.WeightType.bf16: 2}.get(kind, GROUP)
        self.native = _native.PackedWeight(
            data.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
            0 if self._scales is None else self._scales.data_ptr(),
            rounded(self.width, PANEL),
            rounded(inputs, multiple),
            kind,
        )
        self.runtime = _native.Runtime(_native.chosen_isa(), torch.get_num_threads())

    @property
    def nbytes(self) -> int:
        """Memory of the numbers and their scales."""
        return self.data.nbytes + (0 if self._scales is None else self._scales.nbytes)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What ``packed_again`` makes the same weight of."""
        return {"data": self.data} | ({} if self._scales is None else {"scales": self._scales})

    def scales(self) -> torch.Tensor:
        """(columns, 1) of int8, float32, in the order of the packed columns."""
        assert self._scales is not None
        return self._scales[:, None]

    @property
    def is_quantized(self) -> bool:
        """Whether it is made of whole numbers."""
        return self.kind in (_native.WeightType.int8, _native.WeightType.int4)

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
        return self._product(x, self.width, dtype).view(*x.shape[:-1], self.width)

    def products(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Each part's (outputs, rows) in float32, of (rows, inputs)."""
        out = self._product(x, rounded(self.width, PANEL), torch.float32)
        return self.order.parts(out.T.contiguous())

    def _product(self, x: torch.Tensor, columns: int, dtype: torch.dtype | None) -> torch.Tensor:
        rows = self.input_rows(x)
        out = rows.new_empty(rows.shape[0], columns, dtype=dtype)
        _native.linear(
            self.runtime, self.native, argument(rows), self.inputs, rows.shape[0], argument(out), columns
        )
        return out

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


def packed_floats(weights: Sequence[torch.Tensor], biases: Biases, gated: bool = False) -> PackedWeight:
    """Weights as they are, (outputs, inputs) each, of one type, bfloat16 or float32."""
    dtype = weights[0].dtype
    kind, pair = (_native.WeightType.bf16, 2) if dtype is torch.bfloat16 else (_native.WeightType.float32, 1)
    order = ColumnOrder([len(weight) for weight in weights], gated)
    rows = _padded(order.arranged([weight.detach() for weight in weights]), pair, dim=1).contiguous()
    data = _panels(rows.view(torch.int32)).view(dtype)
    return PackedWeight(data, order, weights[0].shape[1], kind, dtype, biases)


def unpacked(packed: PackedWeight) -> list[torch.Tensor]:
    """The parts' (outputs, inputs) weights: those given to ``packed_floats``; float32 of what whole numbers mean."""
    if packed.kind == _native.WeightType.int8:
        rows = (_columns(packed).view(torch.uint8) ^ 0x80).view(torch.int8) * packed.scales()
    elif packed.kind == _native.WeightType.int4:
        rows = _int4_numbers(packed.data).dequantized()
    else:
        rows = _columns(packed).view(packed.dtype)
    return packed.order.parts(rows[:, : packed.inputs].contiguous())


def packed_int8(
    parts: Sequence[Int8Numbers], dtype: torch.dtype, biases: Biases, gated: bool = False
) -> PackedWeight:
    """Weights of 8 bits with a scale for each output, of layers of ``dtype``."""
    order = ColumnOrder([len(part.numbers) for part in parts], gated)
    rows = _padded(order.arranged([part.numbers for part in parts]), GROUP, dim=1)
    # Stored with 128 added: the dot-product instructions want one side without signs.
    data = _panels((rows.view(torch.uint8) ^ 0x80).contiguous().view(torch.int32))
    inputs = parts[0].numbers.shape[1]
    scales = [part.scales for part in parts]
    return PackedWeight(data, order, inputs, _native.WeightType.int8, dtype, biases, scales)


def packed_int4(
    parts: Sequence[Int4Numbers], inputs: int, dtype: torch.dtype, biases: Biases, gated: bool = False
) -> PackedWeight:
    """Weights of 4 bits with a scale and a minimum for each 32 inputs of an output, of layers of ``dtype``."""
    order = ColumnOrder([len(part.numbers) for part in parts], gated)
    numbers = order.arranged([part.numbers for part in parts])
    panels, groups = len(numbers) // PANEL, numbers.shape[1] // GROUP
    # (panel, half, column, group, quad, 4) -> (panel, group, quad, column, 4), the second half in the upper bits
    quads = numbers.view(panels, 2, HALF_PANEL, groups, GROUP // QUAD, QUAD).permute(0, 3, 4, 1, 2, 5)
    data = torch.empty(panels, groups, GROUP * HALF_PANEL + 2 * PANEL * 2, dtype=torch.uint8)
    data[..., : GROUP * HALF_PANEL] = (quads[:, :, :, 0] | quads[:, :, :, 1] << 4).flatten(2)
    for place, halves in enumerate(([p.scales for p in parts], [p.minima for p in parts])):
        columns = order.arranged(halves).view(panels, PANEL, groups).transpose(1, 2).contiguous()
        first = GROUP * HALF_PANEL + place * PANEL * 2
        data[..., first : first + PANEL * 2] = columns.view(torch.uint8)
    return PackedWeight(data, order, inputs, _native.WeightType.int4, dtype, biases)


def _int4_numbers(data: torch.Tensor) -> Int4Numbers:
    """In the order of the packed columns; the other way round than ``packed_int4``."""
    panels, groups = data.shape[:2]
    both = data[..., : GROUP * HALF_PANEL].reshape(panels, groups, GROUP // QUAD, HALF_PANEL, QUAD)
    quads = torch.cat([both & 0x0F, both >> 4], dim=3)
    halves = data[..., GROUP * HALF_PANEL :].contiguous().view(torch.float16).view(panels, groups, 2, PANEL)
    scales, minima = (halves[:, :, i].transpose(1, 2).reshape(panels * PANEL, groups) for i in (0, 1))
    return Int4Numbers(quads.permute(0, 3, 1, 2, 4).reshape(panels * PANEL, -1), scales, minima)


def packed_again(
    tensors: Mapping[str, torch.Tensor],
    kind: _native.WeightType,
    sizes: Sequence[int],
    inputs: int,
    dtype: torch.dtype,
    biases: Biases,
    gated: bool = False,
) -> PackedWeight:
    """A packed weight of what another one's ``tensors`` said.

    Args:
        sizes: outputs of each part.

    Raises:
        ValueError: the tensors have not the sizes of such a weight; the kernels would read behind them.
    """
    order = ColumnOrder(sizes, gated)
    columns = rounded(order.width, PANEL)
    row_bytes = {
        _native.WeightType.float32: inputs * 4,
        _native.WeightType.bf16: rounded(inputs, 2) * 2,
        _native.WeightType.int8: rounded(inputs, GROUP),
        _native.WeightType.int4: rounded(inputs, GROUP) // GROUP * (GROUP // 2 + 4),
    }[kind]
    data, scales = tensors["data"], tensors.get("scales")
    wanted = (columns * row_bytes, columns if kind == _native.WeightType.int8 else 0)
    if (data.nbytes, 0 if scales is None else scales.numel()) != wanted:
        raise ValueError(f"a packed weight has {data.nbytes} bytes, must have {wanted[0]}")
    parts = None if scales is None else order.parts(scales[:, None])
    return PackedWeight(data, order, inputs, kind, dtype, biases, parts)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """(rows, width) with the numbers of a row next to each other."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def argument(rows: torch.Tensor) -> RowsArgument:
    """What the kernels want to know of a (rows, width) tensor."""
    return rows.data_ptr(), rows.stride(0), rows.dtype is torch.bfloat16


def rounded(size: int, multiple: int) -> int:
    """``size``, up to the next multiple."""
    return -(-size // multiple) * multiple


def _panels(words: torch.Tensor) -> torch.Tensor:
    """(columns, words) -> (panels, words, 32): what moves are words of 4 bytes."""
    return words.view(-1, PANEL, words.shape[1]).transpose(1, 2).contiguous()


def _columns(packed: PackedWeight) -> torch.Tensor:
    """(columns, words): the other way round than ``_panels``."""
    panels = rounded(packed.width, PANEL) // PANEL
    words = packed.data.view(torch.int32).view(panels, -1, PANEL)
    return words.transpose(1, 2).reshape(panels * PANEL, -1)


def _arranged_biases(order: ColumnOrder, biases: Biases) -> torch.Tensor | None:
    if all(bias is None for bias in biases):
        return None
    sizes = [end - start for start, end in order.spans]
    rows = [
        torch.zeros(size, 1) if bias is None else bias.detach()[:, None].float()
        for size, bias in zip(sizes, biases, strict=True)
    ]
    return order.arranged(rows).flatten().contiguous()


def _padded(tensor: torch.Tensor, multiple: int, dim: int) -> torch.Tensor:
    """A (rows, columns) tensor with zeros at the end of one of its dimensions."""
    missing = rounded(tensor.shape[dim], multiple) - tensor.shape[dim]
    if missing == 0:
        return tensor
    return F.pad(tensor, (0, 0, 0, missing) if dim == 0 else (0, missing))
