"""The C++ module, once it is known to have the interface that this Python code was written for.

The interface is ``_native.pyi``. The build notes its hash in the module, so a module that was built before the file
last changed (an editable install whose C++ was not rebuilt) is refused at once, rather than where something of it is
first missed. Every other file of the package imports ``_native`` from here.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import ModuleType

import torch  # noqa: F401 - before _native: the kernels run on the threads of torch's OpenMP runtime

from triton_inflight import _native
from triton_inflight.errors import BuildError

__all__ = ["_native", "check_build"]

_INTERFACE = Path(__file__).with_name("_native.pyi")


def check_build(module: ModuleType, interface: Path = _INTERFACE) -> None:
    """See that a compiled module was built with this interface.

    Raises:
        BuildError: it was built with another one.
    """
    expected = hashlib.sha256(interface.read_bytes()).hexdigest()
    built = getattr(module, "interface_hash", "none")
    if built != expected:
        raise BuildError(
            f"{module.__file__} was built with another interface than that of {interface}: hash {built:.12}, not "
            f"{expected:.12}. Build it again: in a clone of the project run `pip install --no-build-isolation -e .`, "
            "or else `pip install --force-reinstall --no-deps triton-inflight`"
        )


check_build(_native)
