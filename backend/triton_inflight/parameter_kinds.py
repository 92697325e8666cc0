"""How the text of a parameter in config.pbtxt is read: what is allowed, and text -> value."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

LARGEST = 2**31 - 1
_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True)
class Kind:
    """One way to read a parameter.

    Attributes:
        allowed: what a value may be, for messages and comments.
        example: a value, for messages.
        parse: text without blanks around it -> value; raises ValueError.
    """

    allowed: str
    example: str
    parse: Callable[[str], Any]


def integer(lowest: int, highest: int, example: int) -> Kind:
    """A decimal integer from ``lowest`` to ``highest``; LARGEST stands for no particular bound."""

    def parse(text: str) -> int:
        _require(re.fullmatch(r"[+-]?[0-9]{1,20}", text))
        _require(lowest <= int(text) <= highest)
        return int(text)

    bounds = f", at least {lowest}" if highest == LARGEST else f" from {lowest} to {highest}"
    return Kind(f"an integer{bounds}", str(example), parse)


def choice(*options: str) -> Kind:
    """One of some words."""

    def parse(text: str) -> str:
        _require(text in options)
        return text

    return Kind(f"{', '.join(options[:-1])} or {options[-1]}", options[0], parse)


def number_choice(*options: int) -> Kind:
    """One of some integers."""
    words = choice(*(str(option) for option in options))
    return replace(words, parse=lambda text: int(words.parse(text)))


def boolean() -> Kind:
    """``true`` or ``false``, in any case."""
    words = choice("true", "false")
    return replace(words, parse=lambda text: words.parse(text.lower()) == "true")


def seconds(highest: int) -> Kind:
    """A number of seconds above 0."""

    def parse(text: str) -> float:
        _require(text.isascii() and "_" not in text)  # float() takes digits of any script, and underscores
        _require(0 < float(text) <= highest)  # not so for nan
        return float(text)

    return Kind(f"a number of seconds above 0, up to {highest}", "600", parse)


def byte_size(lowest: int = 1, example: str = "2GiB") -> Kind:
    """A number of bytes, or of a binary unit; at least ``lowest`` bytes."""

    def parse(text: str) -> int:
        match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,6})?) ?(|KiB|MiB|GiB|TiB)", text)
        if match is None:
            raise ValueError(text)
        size = int(Decimal(match[1]) * _UNITS[match[2]])
        _require(size >= lowest)
        return size

    bound = f", at least {lowest} bytes" if lowest > 1 else ""
    return Kind(f"a number of bytes, or of KiB, MiB, GiB or TiB such as 512MiB{bound}", example, parse)


def folder() -> Kind:
    """A folder, which need not exist yet."""

    def parse(text: str) -> str:
        _require(text and "\0" not in text)
        return text

    return Kind("a folder, absolute or relative to this one; it is made if need be", "/tmp/traces", parse)


def text() -> Kind:
    """A model reference; whether it leads to a model shows when it is resolved."""

    def parse(text: str) -> str:
        _require(text)
        return text

    return Kind(
        "a Hugging Face folder, a .gguf file, a hub id ORG/NAME, or package:NAME/FILE.gguf", "ORG/NAME", parse
    )


def patterns() -> Kind:
    """Patterns of fnmatch, separated by commas."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(pattern.strip() for pattern in text.split(","))
        _require(all(found))
        return found

    return Kind("patterns with * and ?, separated by commas", "x-*, traceparent", parse)


def _require(condition: object) -> None:
    if not condition:
        raise ValueError
