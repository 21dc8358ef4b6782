"""The explanation of a job: where every rank is, what it holds, what it sends, when and how often, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from threefold.cost.profile import Profile
from threefold.job.spec import Job
from threefold.plan.balance import resolve_partition
from threefold.report.communication import reading_section, traffic_section
from threefold.report.compression import compression_section
from threefold.report.counted import counted_section
from threefold.report.facts import Facts, Grid, Section, TextTable, collect_facts
from threefold.report.overview import groups_section, job_section, map_section
from threefold.report.pipelines import schedule_section, schedule_warnings, stages_section
from threefold.report.placement import placement_warnings
from threefold.report.prediction import prediction_section
from threefold.report.sharding import shards_section

MIN_WIDTH = 120
"""Columns of the text when it doesn't go to a terminal."""


def print_explanation(
    job: Job,
    console: Console | None = None,
    summary: Mapping[str, Any] | None = None,
    profile: Profile | None = None,
) -> None:
    """Print the explanation of ``job``; plain text where stdout is no terminal.

    ``summary`` is what a run of the job has counted (its summary.json), ``profile`` what its parts were measured to
    take.
    """
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=MIN_WIDTH, color_system=None)
    for section in explain_sections(job, console.width, summary, profile):
        console.print(Text(section.title, style="bold"))
        console.print(Text("-" * len(section.title), style="dim"))
        for part in section.body:
            console.print(_renderable(part), soft_wrap=isinstance(part, Grid))
        console.print()


def _renderable(part: str | TextTable | Grid) -> Text | Table:
    if isinstance(part, str):
        return Text(part)
    if isinstance(part, Grid):
        return Text(part.text, no_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in part.header:
        table.add_column(name, overflow="fold")
    for row in part.rows:
        table.add_row(*map(Text, row))
    return table


def explain_sections(
    job: Job,
    width: int = MIN_WIDTH,
    summary: Mapping[str, Any] | None = None,
    profile: Profile | None = None,
) -> list[Section]:
    """The explanation as data. ``width`` (columns) decides whether the schedule's grid is shown."""
    job, balance = resolve_partition(job, profile)
    facts = collect_facts(job)
    sections = [
        job_section(facts),
        map_section(facts),
        groups_section(facts),
        stages_section(facts, balance),
        traffic_section(facts),
        compression_section(facts),
        prediction_section(job, profile),
        counted_section(job, summary),
        schedule_section(facts, width),
        shards_section(facts),
        reading_section(facts),
        _warnings_section(facts),
    ]
    return [section for section in sections if section.body]


def _warnings_section(facts: Facts) -> Section:
    return Section("Worth a second look", (*placement_warnings(facts.placement), *schedule_warnings(facts)))
