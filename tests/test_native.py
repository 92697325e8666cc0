"""A compiled module that is older than the Python code beside it is refused, wherever the backend begins."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from triton_inflight.errors import BuildError
from triton_inflight.native import _native, check_build

INTERFACE = Path(sys.modules["triton_inflight.native"].__file__).with_name("_native.pyi")


def _missing(promised: list[ast.stmt], given: object, prefix: str) -> list[str]:
    """Names of an interface that are not there."""
    missing = []
    for each in promised:
        if isinstance(each, ast.FunctionDef | ast.ClassDef):
            name = each.name
        elif isinstance(each, ast.AnnAssign):
            name = each.target.id
        else:
            continue
        if not hasattr(given, name):
            missing.append(f"{prefix}{name}")
        elif isinstance(each, ast.ClassDef):
            missing += _missing(each.body, getattr(given, name), f"{prefix}{name}.")
    return missing


def test_the_module_has_all_that_its_interface_promises() -> None:
    """The hash says that they belong together; that the file tells the truth is said here."""
    promised = ast.parse(INTERFACE.read_text()).body
    assert _missing(promised, _native, "") == []
    assert _missing(promised, ModuleType("empty"), ""), "nothing was looked at"


def test_a_module_of_the_same_build_is_taken() -> None:
    check_build(_native)


@pytest.mark.parametrize("built", ["0" * 64, None])
def test_a_module_of_another_build_is_refused_with_the_remedy(built: str | None) -> None:
    module = ModuleType("_native")
    module.__file__ = "somewhere/_native.so"
    if built is not None:
        module.interface_hash = built
    with pytest.raises(
        BuildError, match=r"somewhere/_native\.so was built .*pip install --no-build-isolation -e"
    ):
        check_build(module)


def test_the_hash_is_that_of_the_file_as_a_whole(tmp_path: Path) -> None:
    changed = tmp_path / "_native.pyi"
    changed.write_bytes(INTERFACE.read_bytes() + b"\ndef new() -> None: ...\n")
    with pytest.raises(BuildError):
        check_build(_native, changed)


def _imports_native(file: Path) -> bool:
    """Whether a file imports the module itself, rather than from where it is looked at."""
    imports = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    return any(
        (each.module == "triton_inflight" and "_native" in {alias.name for alias in each.names})
        or each.module == "triton_inflight._native"
        for each in imports
    )


def test_no_other_file_of_the_package_takes_the_module_unseen() -> None:
    files = sorted(INTERFACE.parent.rglob("*.py"))
    assert [file.name for file in files if _imports_native(file)] == ["native.py"]


def test_a_model_of_another_build_does_not_load() -> None:
    code = (
        "import torch\n"
        "import triton_inflight._native as native\n"
        "native.interface_hash = 'of another build'\n"
        "import triton_inflight.loader\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "BuildError" in done.stderr
