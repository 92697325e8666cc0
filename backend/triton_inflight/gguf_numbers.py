"""Numbers of 4 bits taken over from a GGUF file as they are, without rounding floats again.

The model itself comes from the converted copy of the file (gguf_cache.py), as floats. Here the blocks that they
were computed from are read again. Names and orders of rows differ between the file and the model; whatever is
taken is first compared with the model's own floats, so a wrong guess costs nothing but exactness.

    Q4_0   float16 d, 32 numbers of 4 bits     weight = d * (number - 8)
    Q4_1   float16 d and m, 32 numbers         weight = m + d * number
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from triton_inflight.quantized_numbers import GROUP, Int4Numbers

log = logging.getLogger(__name__)

_HALF = 2  # bytes of a float16


class GGUFNumbers:
    """The 4-bit numbers of a file, by the parameters of the model that was made of it; see ``Int4Source``.

    Args:
        gguf: the file.
        model: of the file.
    """

    def __init__(self, gguf: Path, model: PreTrainedModel) -> None:
        self._heads = _head_counts(model)
        self._blocks = _blocks_by_parameter(gguf, model)

    def __call__(self, parameter: torch.Tensor) -> Int4Numbers | None:
        """The numbers that a parameter's floats were made of, if the file has them with float16 scales."""
        blocks = self._blocks.get(id(parameter))
        if blocks is None:
            return None
        for candidate in self._in_orders(blocks.numbers()):
            if _is(candidate, parameter):
                return candidate
        return None

    def _in_orders(self, numbers: Int4Numbers) -> Iterator[Int4Numbers]:
        """As they are in the file, and with the rows of each head put back into the order of halves: Llama's files
        have neighbours where transformers has halves."""
        yield numbers
        outputs = len(numbers.numbers)
        for heads in self._heads:
            if outputs % (2 * heads) == 0:
                rows = torch.arange(outputs).view(heads, outputs // heads // 2, 2).transpose(1, 2).flatten()
                yield Int4Numbers(*(part[rows] for part in numbers))


def _head_counts(model: PreTrainedModel) -> list[int]:
    """Of queries and of keys."""
    counts = {
        count
        for name in ("num_attention_heads", "num_key_value_heads")
        if isinstance(count := getattr(model.config, name, None), int) and count > 0
    }
    return sorted(counts)


def _blocks_by_parameter(gguf: Path, model: PreTrainedModel) -> dict[int, _Blocks]:
    """The file's weights of 4 bits by the identity of the model's parameters; none where names are not known."""
    from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map
    from transformers.integrations.gguf.reader import GgufHeader

    header = GgufHeader.from_file(str(gguf))
    architecture = next((key for key, name in MODEL_ARCH_NAMES.items() if name == header.architecture), None)
    if architecture is None:
        log.info("the weights of %s are rounded to 4 bits anew: its names of tensors are not known", gguf)
        return {}
    name_map = get_tensor_name_map(architecture, model.config.num_hidden_layers)
    parameters = {
        f"{name_map.get_name(name.removesuffix('.weight'))}.weight": parameter
        for name, parameter in model.named_parameters()
    }
    has_minimum = {GGMLQuantizationType.Q4_0: False, GGMLQuantizationType.Q4_1: True}
    memory = np.memmap(gguf, mode="r", dtype=np.uint8)
    blocks = {}
    for info in header.tensors:
        parameter, minimum = parameters.get(info.name), has_minimum.get(info.ggml_type)
        if parameter is not None and minimum is not None:
            start = header.data_start + info.offset
            data = memory[start : start + info.nbytes]
            blocks[id(parameter)] = _Blocks(data.reshape(info.shape[0], -1), minimum)
    return blocks


class _Blocks(NamedTuple):
    """A tensor of the file.

    Attributes:
        data: (outputs, bytes).
        has_minimum: Q4_1, else Q4_0.
    """

    data: np.ndarray[Any, np.dtype[np.uint8]]
    has_minimum: bool

    def numbers(self) -> Int4Numbers:
        """In the file's own order of rows."""
        header = 2 * _HALF if self.has_minimum else _HALF
        blocks = self.data.reshape(len(self.data), -1, header + GROUP // 2)
        halves = np.ascontiguousarray(blocks[..., :header]).view(np.float16)
        packed = blocks[..., header:]
        numbers = np.concatenate([packed & 0x0F, packed >> 4], axis=-1).reshape(len(blocks), -1)
        scales = torch.from_numpy(halves[..., 0].copy())
        minima = torch.from_numpy(halves[..., 1].copy()) if self.has_minimum else -8 * scales
        return Int4Numbers(torch.from_numpy(numbers), scales, minima)


def _is(numbers: Int4Numbers, parameter: torch.Tensor) -> bool:
    """Whether a parameter has just these numbers' values, rounded to its type."""
    if numbers.numbers.shape != parameter.shape:
        return False
    return torch.equal(numbers.dequantized().to(parameter.dtype), parameter.detach())
