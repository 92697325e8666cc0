"""How long prompts and outputs are: fixed, uniform, or as public statistics say that people's are."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from triton_inflight.errors import SettingsError


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts, as its quantile function: a straight line between each two points.

    Attributes:
        points: (share, tokens); that share of all lengths is at most so many tokens. Shares rise from 0 to 1.
    """

    points: tuple[tuple[float, float], ...]

    @classmethod
    def uniform(cls, low: int, high: int) -> Lengths:
        """Every number of tokens from ``low`` to ``high`` equally often.

        Raises:
            SettingsError: there is no such range.
        """
        if not 1 <= low <= high:
            raise SettingsError(
                f"lengths {low}-{high}: give a range of at least 1 token, such as 16-128, or one number"
            )
        # Half a token more on each side, so that rounding gives both ends as often as the others.
        return cls(((0.0, low - 0.5), (1.0, high + 0.5)))

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Lengths out of ``64``, or ``16-128`` for a uniform choice.

        Raises:
            SettingsError: the text is neither.
        """
        found = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", text)
        if not found:
            raise SettingsError(
                f"lengths {text!r}: give a number of tokens such as 64, or a range such as 16-128"
            )
        low = int(found[1])
        return cls.uniform(low, int(found[2] or low))

    def scaled(self, factor: float) -> Lengths:
        """The same shape, longer or shorter."""
        return Lengths(tuple((share, tokens * factor) for share, tokens in self.points))

    def at(self, share: float) -> int:
        """The length that this share of all lengths does not exceed, at least 1.

        Args:
            share: from 0 to less than 1.
        """
        place = min(bisect_right(self.points, share, key=lambda point: point[0]), len(self.points) - 1)
        (before, low), (after, high) = self.points[place - 1], self.points[place]
        tokens = low + (high - low) * (share - before) / (after - before)
        return max(1, math.floor(tokens + 0.5))

    @property
    def mean(self) -> float:
        """Of all lengths, before they are rounded."""
        return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(self.points))

    @property
    def longest(self) -> int:
        """The most tokens that ``at`` gives."""
        return max(1, math.ceil(self.points[-1][1] - 0.5))


@dataclass(frozen=True)
class Table:
    """Lengths that somebody published.

    Attributes:
        inputs, outputs: tokens of prompts and of outputs. How the two depend on each other is not kept.
        about: what was counted, and who says so.
    """

    inputs: Lengths
    outputs: Lengths
    about: str


_SHARES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.995, 0.999, 1.0)
_AZURE = (
    "Azure LLM inference trace 2023 (https://github.com/Azure/AzurePublicDataset, CC BY 4.0), of P. Patel, E. Choukse, "
    "C. Zhang, A. Shah, I. Goiri, S. Maleki, R. Bianchini: Splitwise: Efficient generative LLM inference using phase "
    "splitting, ISCA 2024"
)


def _quantiles(*tokens: float) -> Lengths:
    return Lengths(tuple(zip(_SHARES, tokens, strict=True)))


# Quantiles of the columns ContextTokens and GeneratedTokens, computed from the published files.
TABLES: Mapping[str, Table] = {
    "azure-conversation": Table(
        _quantiles(
            2, 29, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 2735, 4083, 4142, 4831, 6212, 14050
        ),
        _quantiles(7, 16, 41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 601, 643, 954, 1000),
        f"19,366 requests of a conversation service; {_AZURE}",
    ),
    "azure-code": Table(
        _quantiles(
            3, 17, 75, 147, 386, 770, 1075, 1469, 1909, 2433, 3192, 5186, 7302, 7436, 7436, 7437, 7437
        ),
        _quantiles(6, 6, 6, 7, 8, 9, 11, 13, 16, 20, 29, 55, 90, 252, 361, 824, 1899),
        f"8,819 requests of a code completion service; {_AZURE}",
    ),
}


def table_named(name: str) -> Table:
    """A table of lengths.

    Raises:
        SettingsError: there is none of that name.
    """
    if name not in TABLES:
        raise SettingsError(f"there is no table of lengths {name!r}; there are: {', '.join(TABLES)}")
    return TABLES[name]
