"""What a person sees in the terminal: answers side by side, and what happened in the server's steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from triton_inflight.client import Answer, GenerationStream
from triton_inflight.scrape import Samples

_PANEL_WIDTH = 52
_GROWING_LINES = 6  # the end of an answer that is still growing; all of it is shown once it is done


def follow(
    console: Console,
    stream: GenerationStream,
    prompts: Sequence[str],
    titles: Sequence[str],
    interval: float = 0.0,
) -> list[Answer]:
    """Run prompts to their ends, their answers growing side by side; where there is no terminal, only the result."""
    answers: list[Answer] = []
    with _redrawn(console) as live:
        for answers in stream.run(prompts, interval):
            if live is not None:
                live.update(_panels(console, answers, titles, _GROWING_LINES))
    console.print(_panels(console, answers, titles, None))
    return answers


@contextmanager
def _redrawn(console: Console) -> Iterator[Live | None]:
    """A picture that is redrawn in place and vanishes at the end; None where there is no terminal."""
    if not console.is_terminal:
        yield None
        return
    with Live(console=console, refresh_per_second=12, transient=True) as live:
        yield live


def _panels(console: Console, answers: Sequence[Answer], titles: Sequence[str], lines: int | None) -> Columns:
    return Columns(
        [_panel(console, answer, title, lines) for answer, title in zip(answers, titles, strict=True)]
    )


def _panel(console: Console, answer: Answer, title: str, lines: int | None) -> Panel:
    """One answer, or the last ``lines`` lines of it."""
    text = Text(answer.error or answer.text.strip())
    if lines is not None:
        wrapped = text.wrap(console, _PANEL_WIDTH - 4)
        text = Text("\n").join(wrapped[-lines:])
    state = "error" if answer.error else f"{answer.num_output_tokens} tokens, {answer.finish_reason or '...'}"
    return Panel(
        text,
        title=Text(title, overflow="ellipsis", no_wrap=True),
        subtitle=state,
        width=_PANEL_WIDTH,
        height=None if lines is None else lines + 2,
        border_style="red" if answer.error else "green" if answer.done else "cyan",
    )


def answer_table(answers: Sequence[Answer], titles: Sequence[str]) -> Table:
    """Tokens and times of every answer, and of all of them together."""
    table = Table("prompt", title="What came back")
    for heading in ("tokens in", "tokens out", "first token", "last token", "ended by"):
        table.add_column(heading, justify="right")
    for answer, title in zip(answers, titles, strict=True):
        table.add_row(
            Text(title.strip().replace("\n", " "), overflow="ellipsis", no_wrap=True),
            str(answer.num_input_tokens),
            str(answer.num_output_tokens),
            _seconds(answer.first_token),
            _seconds(answer.last_token),
            "error" if answer.error else answer.finish_reason,
        )
    last = max((answer.sent + (answer.last_token or 0.0) for answer in answers), default=0.0)
    total = sum(answer.num_output_tokens for answer in answers)
    rate = f"{total / last:.0f} tokens/s" if last else ""
    table.add_section()
    table.add_row("all together", "", str(total), "", _seconds(last), rate)
    return table


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


def step_table(samples: Samples, model: str) -> Table:
    """How many sequences shared a forward pass, as the server's metrics tell it."""
    histogram = samples.histogram("inflight_step_sequences", model=model)
    steps = sum(histogram.values())
    mixed = samples.value("inflight_steps_total", model=model, kind="mixed")
    title = f"Sequences in a step: {steps:.0f} steps, {mixed:.0f} of them with new and in-flight sequences"
    table = Table("sequences", title=title)
    table.add_column("steps", justify="right")
    table.add_column("")
    for below, bound in pairwise([0.0, *histogram]):
        if count := histogram[bound]:
            span = f"{bound:.0f}" if bound - below == 1 else f"{below + 1:.0f} to {bound:.0f}"
            table.add_row(span, f"{count:.0f}", "#" * max(1, round(40 * count / steps)))
    return table
