"""Options that the benchmarks' commands share, so that the same word means the same thing everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from triton_inflight.errors import SettingsError

ModelRepository = Annotated[Path, typer.Option(help="The repository that has the model.")]
ModelName = Annotated[str, typer.Option(help="The model's name in it.")]
InputTokens = Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds measured, after one to warm up.")]
PromptSeed = Annotated[int, typer.Option(help="Of the random prompts.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write everything measured to this file.")]
SetParameters = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="In place of a parameter of config.pbtxt; repeatable."),
]
QuickRound = Annotated[
    bool, typer.Option("--quick", help="1 round of few sequences and tokens: does it run at all?")
]


def key_and_value(entry: str) -> tuple[str, str]:
    """One entry of ``--set``.

    Raises:
        SettingsError: it is not KEY=VALUE.
    """
    key, equals, value = entry.partition("=")
    if not equals or not key:
        raise SettingsError(f"--set {entry!r} is not KEY=VALUE, such as max_steps_per_execute=8")
    return key, value
