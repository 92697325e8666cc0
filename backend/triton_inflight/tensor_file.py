"""Files of tensors that are mapped into memory, written once and whole.

    8 bytes    magic, with the version of this layout
    8 bytes    length of the header, little-endian
    8 bytes    CRC-32 of the header, little-endian
    header     JSON: the caller's meta, the size and the checksum of what follows, and where each tensor lies in it
    tensors    each at a multiple of 64 bytes from the start of the file

The safetensors format aligns to 8 bytes only; the kernels would read across cache lines.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_MAGIC = b"TIFLIGH1"
_ALIGNMENT = 64
_PREFIX = 24
WRITING = "writing-"
"""What names of files begin with that are being written, or were left by a crash."""


class DamagedFileError(Exception):
    """A file is not one of these, or not whole."""


def write(path: Path, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a file under a passing name and rename it; whoever reads meanwhile sees the old one or the new one.

    Args:
        meta: anything that JSON can say.
        tensors: on the CPU, by name.

    Raises:
        OSError: the file cannot be written.
    """
    places, end, checksum = {}, 0, 0
    for name, tensor in tensors.items():
        places[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end]
        end = _aligned(end + tensor.nbytes)
        checksum += _checksum(_bytes(tensor))
    header = json.dumps(
        {"meta": meta, "size": end, "checksum": _wrapped(checksum), "tensors": places}, separators=(",", ":")
    ).encode()
    header += b" " * (_aligned(_PREFIX + len(header)) - _PREFIX - len(header))
    descriptor, passing = tempfile.mkstemp(prefix=WRITING, dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_MAGIC + _number(len(header)) + _number(zlib.crc32(header)) + header)
            for tensor in tensors.values():
                file.write(_bytes(tensor).numpy().data)
                file.write(bytes(_aligned(tensor.nbytes) - tensor.nbytes))
        Path(passing).chmod(0o644)  # else it would be its writer's alone
        Path(passing).rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(passing).unlink()
        raise


def read_meta(path: Path) -> Any:
    """The meta of a file, without its tensors.

    Raises:
        DamagedFileError: the header is not whole.
        OSError: the file cannot be read.
    """
    return _header(path)[0]["meta"]


def read(path: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """The meta of a file, and its tensors by name, which stay in the file until they are used.

    All of them are looked through once for the checksum. Writing to them does not change the file.

    Raises:
        DamagedFileError: the file is not whole, or not what was written.
        OSError: the file cannot be read.
    """
    header, start = _header(path)
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size != start + header["size"]:
            raise DamagedFileError(f"{path} has not the size that its header says")
        if header["size"] == 0:
            return header["meta"], {name: _empty(*place) for name, place in header["tensors"].items()}
        memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    data = torch.frombuffer(memory, dtype=torch.uint8)[start:]
    if _wrapped(_checksum(data)) != header["checksum"]:
        raise DamagedFileError(f"{path} does not hold what was written into it")
    return header["meta"], {name: _view(data, *place) for name, place in header["tensors"].items()}


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header, and where the tensors begin."""
    with path.open("rb") as file:
        prefix = file.read(_PREFIX)
        length, checksum = (int.from_bytes(prefix[i : i + 8], "little") for i in (8, 16))
        if prefix[:8] != _MAGIC or length > os.fstat(file.fileno()).st_size:
            raise DamagedFileError(f"{path} has another format")
        text = file.read(length)
    if len(text) != length or zlib.crc32(text) != checksum:
        raise DamagedFileError(f"the header of {path} is not what was written")
    header: dict[str, Any] = json.loads(text)
    return header, _PREFIX + length


def _view(data: torch.Tensor, dtype: str, shape: list[int], offset: int) -> torch.Tensor:
    """A tensor of the file."""
    kind: torch.dtype = getattr(torch, dtype)
    if math.prod(shape) == 0:
        return _empty(dtype, shape, offset)
    return data[offset : offset + math.prod(shape) * kind.itemsize].view(kind).view(shape)


def _empty(dtype: str, shape: list[int], _: int) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _checksum(data: torch.Tensor) -> int:
    """Sum of the words of 8 bytes, the last one filled up with zeros: as fast as memory can be read."""
    whole = len(data) // 8 * 8
    rest = int.from_bytes(bytes(data[whole:].tolist()), "little", signed=False)
    return int(data[:whole].view(torch.int64).sum()) + rest


def _wrapped(checksum: int) -> int:
    """In 64 bits."""
    return checksum % 2**64


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")
