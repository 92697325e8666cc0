"""What all pictures share: colours, type, and how a figure begins and ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triton_inflight.errors import InflightError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people tell apart whatever their colour vision
# (https://jfly.uni-koeln.de/color/).
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
VERMILLION, SKY, BLACK = "#D55E00", "#56B4E9", "#000000"

INK, FAINT_INK, GRID, EMPTY = "#222222", "#666666", "#DDDDDD", "#EFEFEF"

WIDTH_INCHES = 9.0
DPI = 160  # 1440 pixels: sharp where GitHub shows a page 900 pixels wide on a dense screen

_SCHEDULER_COLOURS = {"iterative": BLUE, "dynamic": ORANGE, "sequence": GREEN, "decoupled": PINK}
_FURTHER_COLOURS = (VERMILLION, BLACK, SKY)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")

_TYPE = {
    "font.size": 10.0,
    "axes.titlesize": 11.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 10.0,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT_INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": FAINT_INK,
    "ytick.color": FAINT_INK,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.fontsize": 10.0,
    "lines.linewidth": 2.0,
}


def require_matplotlib() -> None:
    """See that pictures can be drawn.

    Raises:
        InflightError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InflightError(
            f"pictures need matplotlib ({error}), which comes with an extra: pip install 'triton-inflight[compare]'"
        ) from error


@contextmanager
def drawing(height_inches: float) -> Iterator[Figure]:
    """A new figure, in whose block everything drawn has our type.

    Raises:
        InflightError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_TYPE):
        yield Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained", facecolor="white")


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG, the same bytes for the same picture; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=DPI, metadata={"Software": None})
    return path


def looks_of(schedulers: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour and marker of each scheduler's line: always the same for ours, others take what is left."""
    further = iter(_FURTHER_COLOURS * len(schedulers))
    names = list(dict.fromkeys(schedulers))
    return {
        name: {"color": _SCHEDULER_COLOURS.get(name) or next(further), "marker": marker}
        for name, marker in zip(names, _MARKERS * len(names), strict=False)
    }


def legend_above(figure: Figure, handles: Sequence[Any]) -> None:
    """One line of keys above all panels."""
    figure.legend(handles=list(handles), loc="outside upper left", ncols=len(handles), handlelength=1.4)


def note(axes: Axes, text: str) -> None:
    """A remark in the upper right corner, in line with the title."""
    axes.set_title(text, loc="right", fontsize=10, fontweight="normal", color=FAINT_INK)
