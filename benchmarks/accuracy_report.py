"""The lines of an accuracy report, and the table they are shown in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from accuracy_figures import Agreement, Change, agreement, change, same_best
from accuracy_runs import Outcome
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One line of the report.

    Attributes:
        name: what it is called.
        perplexity: of the text.
        to_reference: change of perplexity from the float32 row; None in that row.
        to_plain: change of perplexity from the row of the same dtype alone; None in such rows.
        same_best: share of the text's places with the most likely token of the float32 row.
        greedy: agreement of the greedy answers with those of the float32 row; None without answers.
        seconds: that the run took, loading included.
        nll: by window, see Scored.
    """

    name: str
    perplexity: float
    to_reference: Change | None
    to_plain: Change | None
    same_best: float
    greedy: Agreement | None
    seconds: float
    nll: Sequence[float]


@dataclass
class Comparison:
    """The runs so far.

    Attributes:
        plain: outcomes of the dtypes alone; the first is the reference.
        rows: of all runs, in their order.
        left_out: why a run has no row, by its name.
    """

    plain: dict[str, Outcome] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, dtype: str, outcome: Outcome, seconds: float, plain: bool) -> None:
        """Compare a run with those before it. Of a dtype that failed alone there is nothing to compare with."""
        if plain:
            self.plain[dtype] = outcome
        reference, base = next(iter(self.plain.values())), self.plain.get(dtype)
        scored = outcome.scored
        self.rows.append(
            Row(
                name,
                scored.perplexity,
                None if outcome is reference else change(scored, reference.scored),
                None if base is None or outcome is base else change(scored, base.scored),
                same_best(scored, reference.scored),
                agreement(outcome.answers, reference.answers) if outcome.answers else None,
                seconds,
                scored.nll,
            )
        )


def accuracy_table(rows: Sequence[Row], title: str) -> Table:
    """One line a run; shares and changes in percent."""
    table = Table(title=title)
    table.add_column("settings", no_wrap=True)
    for heading in (
        "perplexity",
        "to float32\n% ± 2 s.e.",
        "to dtype\n% ± 2 s.e.",
        "same top\ntoken %",
        "greedy:\nuntil apart %",
        "\nat all %",
        "\nwhole %",
        "s",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        greedy = row.greedy
        shares = (greedy.before_divergence, greedy.overall, greedy.identical) if greedy else (None,) * 3
        table.add_row(
            row.name,
            f"{row.perplexity:.4f}",
            _percent_change(row.to_reference),
            _percent_change(row.to_plain),
            *(("" if share is None else f"{share:.1%}".rstrip("%")) for share in (row.same_best, *shares)),
            f"{row.seconds:.0f}",
        )
    return table


def _percent_change(found: Change | None) -> str:
    return "" if found is None else f"{found.value * 100:+.3f} ± {found.error * 100:.3f}"
