"""A schedule for people and as JSON: its grid, its bubble, its step and its memory, beside what rivals get."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from threefold.report.pipelines import grid_legend
from threefold.report.words import count_of
from threefold.schedule import NAMED, Schedule, build_schedule, peak_live_microbatches
from threefold.simulate import StepCosts, simulate

MIN_WIDTH = 120
"""Columns of the tables when they don't go to a terminal."""
MOST_GRID_COLUMNS = 400
"""A wider grid is not drawn."""

RIVALS = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v")

CostsOf = Callable[[int, int], StepCosts]
"""(ranks, stages) -> the costs of the model when it is cut into so many stages."""


@dataclass(frozen=True)
class Scored:
    """A schedule with what its play says. ``peak_live`` are microbatches of a rank's whole share, by rank."""

    schedule: Schedule
    step_time: float
    bubble: float
    exposed: float
    """Share of the step that the average rank waits for transfers."""
    peak_live: tuple[float, ...]

    @property
    def name(self) -> str:
        """The name with its chunks, where it has several."""
        chunks = f" × {self.schedule.num_chunks}" if self.schedule.num_chunks > 1 else ""
        return self.schedule.name + chunks

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        schedule = self.schedule
        return {
            "name": schedule.name,
            "ranks": schedule.num_ranks,
            "stages": schedule.num_stages,
            "chunks": schedule.num_chunks,
            "microbatches": schedule.num_microbatches,
            "placement": str(schedule.placement),
            "step_time": self.step_time,
            "bubble": self.bubble,
            "exposed_transfers": self.exposed,
            "peak_live_microbatches": list(self.peak_live),
        }


def score(schedule: Schedule, costs_of: CostsOf) -> Scored:
    """Play ``schedule``."""
    timeline = simulate(schedule, costs_of(schedule.num_ranks, schedule.num_stages))
    share = schedule.num_stages / schedule.num_ranks
    peaks = tuple(peak_live_microbatches(schedule, rank) / share for rank in range(schedule.num_ranks))
    total = timeline.makespan_s
    exposed = float(timeline.exposed_comm_s.mean()) / total if total else 0.0
    return Scored(schedule, total, timeline.bubble_fraction, exposed, peaks)


def rivals(schedule: Schedule, costs_of: CostsOf) -> tuple[Scored, ...]:
    """The named schedules for as many ranks and microbatches, with as many chunks where they take any number."""
    chunks = max(schedule.num_chunks, 2)
    ranks, microbatches = schedule.num_ranks, schedule.num_microbatches
    named = (build_schedule(name, ranks, microbatches, NAMED[name].chunks or chunks) for name in RIVALS)
    return tuple(score(one, costs_of) for one in named if one.name != schedule.name)


def to_dict(scored: Scored, others: Sequence[Scored]) -> dict[str, Any]:
    """The schedule with its text and its rivals, as JSON."""
    return {**scored.to_dict(), "text": scored.schedule.to_text(), "rivals": [other.to_dict() for other in others]}


def print_schedule(scored: Scored, others: Sequence[Scored], console: Console | None = None) -> None:
    """Print grid, table and notes; plain text where stdout is no terminal."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=MIN_WIDTH, color_system=None)
    schedule = scored.schedule
    console.print(Text(_headline(schedule), style="bold"))
    grid = schedule.grid()
    if max(map(len, grid.splitlines())) <= MOST_GRID_COLUMNS:
        console.print(Text(grid), soft_wrap=True)
        console.print(Text(grid_legend(schedule)), soft_wrap=True)
    else:
        console.print(Text(f"(The grid is wider than {MOST_GRID_COLUMNS} columns; --text prints the rows.)"))
    console.print()
    console.print(_table(scored, others))
    peaks = ", ".join(f"{peak:g}" for peak in scored.peak_live)
    console.print(Text(f"Peak live microbatches by rank: {peaks}."), soft_wrap=True)


def _headline(schedule: Schedule) -> str:
    chunks = f" with {count_of(schedule.num_chunks, 'chunk')} each" if schedule.num_chunks > 1 else ""
    back = ", stages go down the ranks and back up" if schedule.placement == "v" else ""
    ranks, microbatches = (
        count_of(schedule.num_ranks, "rank"),
        count_of(schedule.num_microbatches, "microbatch", "microbatches"),
    )
    return f"{schedule.name}: {ranks}{chunks}, {microbatches}{back}"


def _table(scored: Scored, others: Sequence[Scored]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    header = ("schedule", "step time", "against this", "bubble", "waits for transfers", "peak live microbatches")
    for place, name in enumerate(header):
        table.add_column(name, justify="right" if place else "left")
    for one in (scored, *others):
        against = "" if one is scored else f"{one.step_time / scored.step_time - 1:+.1%}" if scored.step_time else ""
        cells = (
            one.name,
            f"{one.step_time:.6g}",
            against,
            f"{one.bubble:.1%}",
            f"{one.exposed:.1%}",
            f"{max(one.peak_live):g}",
        )
        table.add_row(*map(Text, cells))
    return table
