"""The requests of a comparison: a mix of lengths, or a user's own, always the same ones for the same seed."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from triton_inflight.compare_lengths import Lengths, Table
from triton_inflight.errors import SettingsError

_KEYS = ("prompt", "input_tokens", "output_tokens", "arrival")  # of a line of a user's file


@dataclass(frozen=True)
class Request:
    """What one sequence asks for.

    Attributes:
        input_tokens: of the prompt.
        output_tokens: to generate, exactly.
        prompt: as text; None for one of random tokens.
        arrival: in seconds since the first request; None where nothing says.
        token_ids: of a prompt of random tokens.
    """

    input_tokens: int
    output_tokens: int
    prompt: str | None = None
    arrival: float | None = None
    token_ids: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """What goes as ``text_input``, which every model declares and so has to be sent."""
        return self.prompt or ""

    def parameters(self) -> dict[str, Any]:
        """Request parameters: greedy, and as long as asked whatever comes out."""
        fields: dict[str, Any] = {
            "max_tokens": self.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "return_output_ids": True,
            "return_sequence_length": False,
        }
        if self.prompt is None:
            fields["input_ids"] = json.dumps(self.token_ids)
        return fields

    def cut(self, input_tokens: int, output_tokens: int) -> Request:
        """The same request with at most so many tokens. A prompt that is text stays whole."""
        return replace(
            self,
            input_tokens=self.input_tokens if self.prompt else min(self.input_tokens, input_tokens),
            output_tokens=min(self.output_tokens, output_tokens),
            token_ids=self.token_ids[:input_tokens],
        )


class Mix(Protocol):
    """What requests are like."""

    @property
    def about(self) -> str:
        """In words."""

    @property
    def mean_output(self) -> float:
        """Output tokens of a request, on average."""

    @property
    def longest(self) -> int:
        """The most tokens of a request, prompt and output together."""

    def requests(self, number: int, token_ids: Sequence[int], seed: str) -> list[Request]:
        """So many requests, the same ones for the same seed.

        Args:
            token_ids: what prompts of random tokens are made of.
        """


@dataclass(frozen=True)
class LengthMix:
    """Prompts of random tokens, whose lengths and those of the outputs are drawn from two distributions."""

    inputs: Lengths
    outputs: Lengths
    about: str

    @classmethod
    def parse(cls, inputs: str, outputs: str) -> LengthMix:
        """Lengths such as ``64`` or ``16-128``.

        Raises:
            SettingsError: they are not.
        """
        return cls(Lengths.parse(inputs), Lengths.parse(outputs), f"{inputs} tokens in, {outputs} out")

    @classmethod
    def of_table(cls, table: Table, name: str, scale: float = 1.0) -> LengthMix:
        """Lengths of a table, each multiplied by ``scale``.

        Raises:
            SettingsError: the scale is not above 0.
        """
        if not scale > 0:
            raise SettingsError(f"lengths cannot be scaled by {scale}; give a factor above 0, such as 0.125")
        about = name if scale == 1 else f"{name}, lengths times {scale:g}"
        return cls(table.inputs.scaled(scale), table.outputs.scaled(scale), about)

    @property
    def mean_output(self) -> float:
        return self.outputs.mean

    @property
    def longest(self) -> int:
        return self.inputs.longest + self.outputs.longest

    def requests(self, number: int, token_ids: Sequence[int], seed: str) -> list[Request]:
        """Lengths are drawn evenly over their distribution, one from each of ``number`` parts of it, in random
        order: so every round has about as many tokens as the others, with the spread that the distribution has.
        """
        dice = random.Random(seed)
        lengths = zip(_even(self.inputs, number, dice), _even(self.outputs, number, dice), strict=True)
        return [
            Request(inputs, outputs, token_ids=tuple(dice.choices(token_ids, k=inputs)))
            for inputs, outputs in lengths
        ]


def _even(lengths: Lengths, number: int, dice: random.Random) -> list[int]:
    """A stratified sample; see ``LengthMix.requests``."""
    drawn = [lengths.at((part + dice.random()) / number) for part in range(number)]
    dice.shuffle(drawn)
    return drawn


@dataclass(frozen=True)
class GivenMix:
    """A user's own requests. Those that say when they came are sent in their order; the others in random order, and
    each once before one comes again.
    """

    rows: tuple[Request, ...]
    about: str

    @property
    def mean_output(self) -> float:
        return sum(row.output_tokens for row in self.rows) / len(self.rows)

    @property
    def longest(self) -> int:
        return max(row.input_tokens + row.output_tokens for row in self.rows)

    @property
    def has_arrivals(self) -> bool:
        """Whether each says when it came."""
        return all(row.arrival is not None for row in self.rows)

    def requests(self, number: int, token_ids: Sequence[int], seed: str) -> list[Request]:
        dice = random.Random(seed)
        chosen: list[Request] = []
        while len(chosen) < number:
            chosen += self.rows if self.has_arrivals else dice.sample(self.rows, len(self.rows))
        return [
            row
            if row.prompt is not None
            else replace(row, token_ids=tuple(dice.choices(token_ids, k=row.input_tokens)))
            for row in chosen[:number]
        ]


def read_requests(path: Path, count_tokens: Callable[[str], int]) -> GivenMix:
    """Requests out of a file with one JSON object a line.

    Each has ``prompt`` (text) or ``input_tokens`` (a number, for random tokens), ``output_tokens``, and maybe
    ``arrival`` (seconds, from any beginning).

    Args:
        count_tokens: of a text.

    Raises:
        SettingsError: a line is something else; the message names it.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from error
    rows = [_row(f"{path}, line {n}", line, count_tokens) for n, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise SettingsError(f"{path}: holds no requests")
    with_arrival = [row for row in rows if row.arrival is not None]
    if with_arrival and len(with_arrival) < len(rows):
        raise SettingsError(
            f"{path}: {len(with_arrival)} of {len(rows)} lines have an arrival; give it in all or none"
        )
    if with_arrival:
        first = min(row.arrival or 0.0 for row in rows)
        rows = sorted(
            (replace(row, arrival=(row.arrival or 0.0) - first) for row in rows),
            key=lambda row: row.arrival or 0.0,
        )
    return GivenMix(tuple(rows), f"{len(rows)} requests of {path.name}")


def _row(place: str, line: str, count_tokens: Callable[[str], int]) -> Request:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise SettingsError(f"{place}: is no JSON: {error}") from error
    if not isinstance(entry, dict) or ("prompt" in entry) == ("input_tokens" in entry):
        raise SettingsError(
            f'{place}: give an object with either "prompt" or "input_tokens", and "output_tokens"'
        )
    if unknown := sorted(entry.keys() - _KEYS):
        raise SettingsError(f"{place}: {', '.join(unknown)} is unknown; there are {', '.join(_KEYS)}")
    prompt, arrival = entry.get("prompt"), entry.get("arrival")
    if prompt is not None and not (isinstance(prompt, str) and prompt):
        raise SettingsError(f"{place}: prompt is {prompt!r}; give a text that is not empty")
    if arrival is not None and not _is_finite_number(arrival):
        raise SettingsError(f"{place}: arrival is {arrival!r}; give seconds")
    inputs = _count(place, entry, "input_tokens") if prompt is None else count_tokens(prompt)
    return Request(inputs, _count(place, entry, "output_tokens"), prompt, arrival)


def _is_finite_number(value: object) -> bool:
    # bool is an int; and Python's JSON knows NaN and Infinity
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _count(place: str, entry: dict[str, Any], name: str) -> int:
    value = entry.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SettingsError(f"{place}: {name} is {value!r}; give a whole number of at least 1")
    return value
