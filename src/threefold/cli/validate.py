"""``threefold validate RUNS.csv``: predicts published runs and says how far off the predictions are."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from threefold.plan.validate import Report, Score

MIN_WIDTH = 110
"""Columns of the tables: narrower, names break into pieces."""


def validate(runs: Path, json_: bool) -> None:
    """Print the errors per source, per GPU and in all, or all of it as JSON on stdout and nothing else.

    Raises DataError with line and column of every wrong cell.
    """
    from threefold.plan.validate import validate_runs

    report = validate_runs(runs)
    if json_:
        print(json.dumps(report.to_json(), indent=2, allow_nan=False))
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.width = max(console.width, MIN_WIDTH)
    _print_scores(console, "Source", {**_short(report.sources), "all": report.overall})
    _print_scores(console, "GPU", report.devices)
    _print_rest(console, report)


def _print_scores(console: Console, title: str, scores: Mapping[str, Score]) -> None:
    from rich.table import Table

    table = Table(title_justify="left")
    table.add_column(title, overflow="fold")
    for name in ("runs", "error", "bias", "in 90 %", "ranks", "regret", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, score in scores.items():
        table.add_row(
            name,
            str(score.n),
            _percent(score.mape),
            _percent(score.bias, sign=True),
            _percent(score.coverage90),
            "" if score.rank_correlation is None else f"{score.rank_correlation:.2f}",
            _percent(score.regret),
            _percent(score.memory_mape),
        )
    console.print(table)


def _short(scores: Mapping[str, Score]) -> dict[str, Score]:
    """Repository and file name; the folders between them leave no room for the numbers."""
    return {re.sub(r"^(\S+) (?:\S+/)?(\S+\.\w+)$", r"\1 \2", name): score for name, score in scores.items()}


def _print_rest(console: Console, report: Report) -> None:
    fits = report.fits
    console.print(
        "error: mean absolute error of the step time; in 90 %: share inside the stated interval; ranks: rank "
        "correlation, and regret: loss of the run predicted best, within groups of ten or more runs of one model on "
        "one number of GPUs; memory: mean absolute error of the peak."
    )
    ran, failed = fits.true_fit + fits.false_oom, fits.true_oom + fits.false_fit
    console.print(
        f"Fits in memory: of {ran} runs that ran, {fits.false_oom} are called out of memory; of {failed} that ran out "
        f"of memory, {fits.false_fit} are called a fit."
    )
    for reason, count in sorted(report.not_modelled.items(), key=lambda item: -item[1]):
        console.print(f"Not modelled: {count} run{'s' * (count != 1)}: {reason}.")


def _percent(value: float | None, sign: bool = False) -> str:
    if value is None:
        return ""
    return f"{100 * value:+.1f} %" if sign else f"{100 * value:.1f} %"
