"""A recorded step beside its simulation: the same rows, the same numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from threefold.report.timeline import (
    LEGEND,
    aligned,
    columns_of,
    format_cell,
    format_seconds,
    rank_letters,
)
from threefold.report.words import count_of
from threefold.simulate import Timeline

Replica = tuple[int, int]
"""The (dp, tp) of a pipeline."""


@dataclass(frozen=True)
class Comparison:
    """Step ``step`` of a run, simulated and measured; ``costs`` says in words where the simulation's seconds are from.

    ``measured`` holds every pipeline of the run. The simulation is of one, since they are to do the same.
    """

    run: str
    step: int
    costs: str
    simulated: Timeline
    measured: Mapping[Replica, Timeline]

    @property
    def shown(self) -> Replica:
        """The pipeline that is drawn: the slowest, which the others wait for."""
        return max(self.measured, key=lambda replica: self.measured[replica].makespan_s)

    @property
    def pair(self) -> dict[str, Timeline]:
        """Simulated and measured, by these words."""
        return {"simulated": self.simulated, "measured": self.measured[self.shown]}

    @property
    def timelines(self) -> dict[str, Timeline]:
        """All timelines, by what they are."""
        if len(self.measured) == 1:
            return self.pair
        measured = {f"measured dp {dp} tp {tp}": timeline for (dp, tp), timeline in self.measured.items()}
        return {"simulated": self.simulated, **measured}

    @property
    def title(self) -> str:
        """What this is of."""
        timeline = self.simulated
        words = (
            f"{self.run}, step {self.step}: {timeline.name}, {count_of(timeline.num_stages, 'stage')} on "
            f"{count_of(timeline.num_ranks, 'rank')}, "
            f"{count_of(timeline.num_microbatches, 'microbatch', 'microbatches')}"
        )
        if len(self.measured) == 1:
            return words
        dp, tp = self.shown
        return f"{words}; of {count_of(len(self.measured), 'pipeline')} the slowest, dp {dp} tp {tp}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON; seconds, and shares of 1."""
        measured = [{"dp": dp, "tp": tp, **_numbers(timeline)} for (dp, tp), timeline in self.measured.items()]
        return {
            "run": self.run,
            "step": self.step,
            "schedule": self.simulated.name,
            "costs": self.costs,
            "simulated": _numbers(self.simulated),
            "measured": measured,
        }


def _numbers(timeline: Timeline) -> dict[str, Any]:
    columns = {f"{name.replace(' ', '_')}_s": seconds for name, seconds in columns_of(timeline).items()}
    return {
        "step_s": timeline.makespan_s,
        "bubble": timeline.bubble_fraction,
        "exposed_comm_s": float(timeline.exposed_comm_s.mean()),
        "ranks": [
            {"rank": rank, **{name: float(seconds[rank]) for name, seconds in columns.items()}}
            for rank in range(timeline.num_ranks)
        ],
    }


def format_comparison(comparison: Comparison, width: int = 96) -> str:
    """The step as text: rows of letters on one scale, the numbers of the step, and those of each rank."""
    return "\n".join(
        [
            comparison.title,
            f"simulated with {comparison.costs}",
            "",
            *_rows(comparison, width),
            f"  {LEGEND}",
            "",
            *aligned(summary_rows(comparison)),
            "",
            *aligned(rank_rows(comparison)),
        ]
    )


def _rows(comparison: Comparison, width: int) -> Iterator[str]:
    pair = comparison.pair
    seconds = max(timeline.makespan_s for timeline in pair.values())
    labels = max(map(len, pair)), len(f"rank {comparison.simulated.num_ranks - 1}")
    for rank in range(comparison.simulated.num_ranks):
        for place, (words, timeline) in enumerate(pair.items()):
            name = "" if place else f"rank {rank}"
            letters = rank_letters(timeline, rank, width, seconds)
            yield f"  {name.ljust(labels[1])} {words.ljust(labels[0])} |{letters}|"


def summary_rows(comparison: Comparison) -> list[list[str]]:
    """A table of the whole step, head first."""
    pair = comparison.pair
    one, other = pair.values()
    change = other.makespan_s / one.makespan_s - 1 if one.makespan_s else 0.0
    points = 100 * (other.bubble_fraction - one.bubble_fraction)
    exposed = [float(timeline.exposed_comm_s.mean()) for timeline in pair.values()]
    return [
        ["", *pair, "difference"],
        ["step", format_seconds(one.makespan_s), format_seconds(other.makespan_s), f"{change:+.1%}"],
        ["bubble", f"{one.bubble_fraction:.1%}", f"{other.bubble_fraction:.1%}", f"{points:+.1f} points"],
        ["exposed communication", *map(format_cell, exposed), _signed(exposed[1] - exposed[0])],
    ]


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{format_cell(abs(seconds))}"


def rank_rows(comparison: Comparison) -> list[list[str]]:
    """A table of each rank's time by use, head first; the two numbers of a rank add up to the two steps."""
    columns = {words: columns_of(timeline) for words, timeline in comparison.pair.items()}
    rows = [["rank", "", *columns["simulated"]]]
    for rank in range(comparison.simulated.num_ranks):
        for words, seconds in columns.items():
            cells = [format_cell(values[rank]) for values in seconds.values()]
            rows.append([str(rank) if words == "simulated" else "", words, *cells])
    return rows
