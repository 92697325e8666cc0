"""How far a comparison has come, on the terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class Progress:
    """A bar with what is going on, the time that it took and that it will take.

    Args:
        console: where it is shown; stderr where absent.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("of about"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console or Console(stderr=True),
            transient=True,
            refresh_per_second=2,  # it takes time from what is measured
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def expect(self, seconds: float) -> None:
        """It will take about so long."""
        self._bar.update(self._task, total=seconds)

    def say(self, text: str) -> None:
        """What is going on."""
        self._bar.update(self._task, description=text)

    def done(self, seconds: float, text: str | None = None) -> None:
        """So much of what was expected is over."""
        self._bar.update(self._task, advance=seconds, description=text)
