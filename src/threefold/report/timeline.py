"""A timeline as text, whether a simulation or a run made it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from threefold.report.words import count_of, format_bytes
from threefold.schedule import Kind
from threefold.schedule.actions import RECEIVES, SENDS
from threefold.simulate import Timeline
from threefold.simulate.events import KINDS, Floats, Ints

IDLE = "."
LETTERS: Mapping[Kind, str] = {
    Kind.F: "F",
    Kind.B: "B",
    Kind.I: "I",
    Kind.W: "W",
    Kind.SYNC: "=",
    Kind.STEP: "#",
    **dict.fromkeys(SENDS, ">"),
    **dict.fromkeys(RECEIVES, "<"),
}
LEGEND = "F forward, B backward, I input gradient, W weight gradient, = gradient sync, # optimizer, . idle"
BLOCKING_LEGEND = LEGEND + ", > send, < receive"


def format_timeline(timeline: Timeline, width: int = 96) -> str:
    """The step as rows of ``width`` letters to scale, and a table of what each rank's time and memory went into."""
    head = (
        f"{timeline.name}: {count_of(timeline.num_stages, 'stage')} on {count_of(timeline.num_ranks, 'rank')}, "
        f"{count_of(timeline.num_microbatches, 'microbatch', 'microbatches')}, "
        f"{format_seconds(timeline.makespan_s)}, of which bubble {timeline.bubble_fraction:.1%}"
    )
    legend = BLOCKING_LEGEND if timeline.blocking else LEGEND
    return "\n".join([head, "", *_rows(timeline, width), f"  {legend}", "", *_table(timeline), "", _path(timeline)])


def format_seconds(seconds: float) -> str:
    """Seconds in a unit that suits them: ``12.5 ms``."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.4g} {unit}"
    return f"{seconds * 1e6:.4g} µs"


def _rows(timeline: Timeline, width: int) -> list[str]:
    """One row a rank."""
    label = len(f"rank {timeline.num_ranks - 1}")
    return [
        f"  {f'rank {rank}'.ljust(label)} |{rank_letters(timeline, rank, width, timeline.makespan_s)}|"
        for rank in range(timeline.num_ranks)
    ]


def rank_letters(timeline: Timeline, rank: int, width: int, seconds: float) -> str:
    """A rank's first ``seconds`` as ``width`` letters, each of what occupies it in the middle of its share."""
    here = np.flatnonzero(timeline.in_lane & (timeline.rank == rank))
    return _letters(timeline, here, (np.arange(width) + 0.5) * seconds / width)


def _letters(timeline: Timeline, lane: Ints, times_s: Floats) -> str:
    letter_of = [LETTERS[kind] for kind in KINDS]
    place = np.searchsorted(timeline.start_s[lane], times_s, side="right") - 1
    letters = []
    for time_s, index in zip(times_s.tolist(), place.tolist(), strict=True):
        event = lane[index] if index >= 0 else None
        busy = event is not None and time_s < timeline.end_s[event]
        letters.append(letter_of[timeline.code[event]] if busy else IDLE)
    return "".join(letters)


def _table(timeline: Timeline) -> list[str]:
    """Seconds of each rank by use, and its peak memory where that is known."""
    columns = columns_of(timeline)
    if not columns["host"].any():  # as in every simulation
        del columns["host"]
    rows = [["rank", *columns, *(["peak memory"] if timeline.memory else [])]]
    for rank in range(timeline.num_ranks):
        seconds = [format_cell(values[rank]) for values in columns.values()]
        memory = [format_bytes(timeline.memory[rank].peak_bytes)] if timeline.memory else []
        rows.append([str(rank), *seconds, *memory])
    return aligned(rows)


def columns_of(timeline: Timeline) -> dict[str, Floats]:
    """Seconds of each rank by use, which add up to the makespan."""
    causes = {cause.value.replace("_", " "): seconds for cause, seconds in timeline.idle_s.items()}
    return {"compute": timeline.compute_s, **causes, "optimizer": timeline.step_s}


def format_cell(seconds: float) -> str:
    """Seconds in a table."""
    return format_seconds(seconds) if seconds else "0"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of a table with columns of equal width, each set to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _path(timeline: Timeline) -> str:
    """What the longest chain of events consists of."""
    parts = [f"{format_seconds(seconds)} {kind.value}" for kind, seconds in timeline.critical_s.items() if seconds]
    return f"  critical path: {' + '.join(parts) or 'empty'}"
