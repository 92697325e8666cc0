"""Which settings an accuracy run compares."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args, get_type_hints

from triton_inflight.bench_options import key_and_value
from triton_inflight.settings import Settings

Changes = dict[str, str]
"""Parameters of config.pbtxt that a run changes, by key."""

REFERENCE_DTYPE = "float32"
_DTYPES = ("float32", "bfloat16")
_SETTINGS = get_type_hints(Settings)
# Settings that cost accuracy: value that costs none, said wherever nothing else is, whatever config.pbtxt says.
_EXACT = {name: exact for name, exact in {"quantization": "none"}.items() if name in _SETTINGS}

# Steps by their number of tokens alone, not by the clock: every run then puts the same rows together.
_REPRODUCIBLE = {"max_step_stretch": "0"}


def variants_of(entries: Sequence[str]) -> Iterator[Changes]:
    """The reference, each dtype alone, and with it every combination of the other values.

    Args:
        entries: KEY=VALUE each, of config.pbtxt; without any, every quantization that there is.

    Raises:
        SettingsError: an entry is not KEY=VALUE.
    """
    values: dict[str, list[str]] = {}
    for entry in entries:
        key, value = key_and_value(entry)
        values.setdefault(key, []).append(value)
    dtypes = values.pop("dtype", list(_DTYPES))
    if not entries:
        values = {
            name: [v for v in get_args(_SETTINGS[name]) if v != exact] for name, exact in _EXACT.items()
        }
    for dtype in dict.fromkeys([REFERENCE_DTYPE, *dtypes]):
        yield {"dtype": dtype}
        if values and dtype in dtypes:
            for combination in itertools.product(*values.values()):
                yield {"dtype": dtype, **dict(zip(values, combination, strict=True))}


def is_plain(changes: Mapping[str, str]) -> bool:
    """Whether only the dtype is chosen."""
    return set(changes) == {"dtype"}


def completed(changes: Mapping[str, str]) -> Changes:
    """With what every run has to say beside its changes: so that a plain one is plain, and a second one the same."""
    return {**_EXACT, **_REPRODUCIBLE, **changes}


def name_of(changes: Mapping[str, str]) -> str:
    """What a run is called: its dtype, and what else is chosen."""
    return ", ".join(
        value if key in ("dtype", *_EXACT) else f"{key}={value}" for key, value in changes.items()
    )
