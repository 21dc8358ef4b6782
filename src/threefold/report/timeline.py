"""A timeline for people: as text, and as a trace that Chrome, Perfetto and other viewers open.

Both read a ``Timeline``, whether a simulation or a run made it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from threefold.report.words import count_of, format_bytes
from threefold.schedule import Kind
from threefold.schedule.actions import COMPUTE, RECEIVES, SENDS, WHOLE_STEP
from threefold.simulate import Cause, Event, Timeline
from threefold.simulate.events import KINDS, Floats, Ints

MICROSECONDS = 1e6
"""Trace events count time in microseconds."""

LANES: Mapping[str, frozenset[Kind]] = {
    "compute": COMPUTE | WHOLE_STEP,
    "send forward": frozenset({Kind.SEND_F}),
    "receive forward": frozenset({Kind.RECV_F}),
    "send backward": frozenset({Kind.SEND_B}),
    "receive backward": frozenset({Kind.RECV_B}),
}
"""The rows of each rank in a trace, and the kinds in them; events of one row never overlap."""

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


# The trace


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The timeline in the Trace Event Format: a process a rank, with ``LANES`` as its rows.

    Memory, where it is known, is a counter of each rank.
    """
    events = [*_names(timeline), *(_slice(event) for event in timeline.events), *_memory(timeline)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"schedule": timeline.name}}


def chrome_trace_json(timeline: Timeline) -> str:
    """``chrome_trace`` as text, for a file ``trace.json``."""
    return json.dumps(chrome_trace(timeline))


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for rank in range(timeline.num_ranks):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for lane, name in enumerate(LANES):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": name}}


def _slice(event: Event) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": str(event.action),
        "cat": event.kind.value,
        "pid": event.rank,
        "tid": next(lane for lane, kinds in enumerate(LANES.values()) if event.kind in kinds),
        "ts": event.start_s * MICROSECONDS,
        "dur": event.duration_s * MICROSECONDS,
        "args": {"stage": event.action.stage, "microbatch": event.action.microbatch},
    }


def _memory(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for rank, curve in enumerate(timeline.memory):
        for time_s, held_bytes in zip(curve.times_s.tolist(), curve.held_bytes.tolist(), strict=True):
            yield {
                "ph": "C",
                "name": "memory",
                "pid": rank,
                "ts": time_s * MICROSECONDS,
                "args": {"bytes": held_bytes},
            }


# The text


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
    """One row a rank; each letter says what occupies the rank in the middle of its share of the step."""
    middles_s = (np.arange(width) + 0.5) * timeline.makespan_s / width
    label = len(f"rank {timeline.num_ranks - 1}")
    lines = []
    for rank in range(timeline.num_ranks):
        here = np.flatnonzero(timeline.in_lane & (timeline.rank == rank))
        lines.append(f"  {f'rank {rank}'.ljust(label)} |{_letters(timeline, here, middles_s)}|")
    return lines


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
    columns = {
        "compute": timeline.compute_s,
        **{cause.value.replace("_", " "): timeline.idle_s[cause] for cause in Cause},
        "optimizer": timeline.step_s,
    }
    header = ["rank", *columns, *(["peak memory"] if timeline.memory else [])]
    rows = [header]
    for rank in range(timeline.num_ranks):
        seconds = [format_seconds(values[rank]) if values[rank] else "0" for values in columns.values()]
        memory = [format_bytes(timeline.memory[rank].peak_bytes)] if timeline.memory else []
        rows.append([str(rank), *seconds, *memory])
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _path(timeline: Timeline) -> str:
    """What the longest chain of events consists of."""
    parts = [f"{format_seconds(seconds)} {kind.value}" for kind, seconds in timeline.critical_s.items() if seconds]
    return f"  critical path: {' + '.join(parts) or 'empty'}"
