"""The machine and the versions that a measurement belongs to."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import psutil

# What the kernels and oneDNN choose their code by.
_INSTRUCTION_SETS = (
    "avx2", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8",
    "asimd", "asimddp", "bf16", "i8mm", "sve",
)  # fmt: skip
_PACKAGES = ("triton-inflight", "torch", "transformers", "tritonclient", "nvidia-pytriton", "numpy")


def describe_machine() -> dict[str, Any]:
    """CPU name, cores this process may use, instruction sets, memory in bytes, load and versions."""
    name, flags = _cpu()
    return {
        "cpu": name,
        "cores": len(os.sched_getaffinity(0)),
        "instruction_sets": [known for known in _INSTRUCTION_SETS if known in flags],
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "load_average": os.getloadavg()[0],
        "versions": {package: version for package in _PACKAGES if (version := _version(package)) is not None},
    }


def in_words(machine: dict[str, Any]) -> str:
    """One line for a person."""
    sets = ", ".join(machine["instruction_sets"])
    memory = machine["memory_bytes"] / 2**30
    return f"{machine['cpu']}, {machine['cores']} cores, {memory:.0f} GiB, {sets}; load {machine['load_average']:.1f}"


def _cpu() -> tuple[str, set[str]]:
    """Name and flags of the processor as Linux states them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    stated = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = stated.get("model name") or platform.processor() or platform.machine()
    if "model" in stated:  # virtual machines often leave the number out of the name
        name += f" (family {stated.get('cpu family')}, model {stated['model']})"
    return name, set((stated.get("flags") or stated.get("Features") or "").split())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
