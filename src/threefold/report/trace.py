"""Timelines as a trace that Chrome, Perfetto and other viewers open (the Trace Event Format)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from threefold.schedule import Action, Kind, partner
from threefold.schedule.actions import RECEIVES, SENDS
from threefold.simulate import Event, Timeline

MICROSECONDS = 1e6
"""Trace events count time in microseconds."""

Slice = dict[str, Any]


def chrome_trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """The timelines one below the other: a process a rank, named after its timeline's key.

    A rank has a row for what it computes, and one for what it sends to and one for what it receives from each
    neighbour: one after the other, since viewers draw overlapping slices of a row as if one called the other. Arrows
    lead from each send to its receive. Memory, where it is known, is a counter of each rank.
    """
    events: list[Slice] = []
    for name, timeline in timelines.items():
        first = sum(event["name"] == "process_name" for event in events)
        events += [*_names(name, timeline, first), *_slices(timeline, first), *_memory(timeline, first)]
    for number, (send, receive) in enumerate(_transfers(events)):
        events += _arrow(number, send, receive)
    schedules = dict.fromkeys(timeline.name for timeline in timelines.values())
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"schedule": ", ".join(schedules)}}


def chrome_trace_json(timelines: Mapping[str, Timeline]) -> str:
    """``chrome_trace`` as text, for a file ``trace.json``."""
    return json.dumps(chrome_trace(timelines))


def _names(name: str, timeline: Timeline, first: int) -> Iterator[Slice]:
    for rank in range(timeline.num_ranks):
        pid, words = first + rank, f"{name} rank {rank}".strip()
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": words}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    lanes = dict.fromkeys((event.rank, *_lane(timeline, event)) for event in timeline.events)
    for rank, lane, words in sorted(lanes):
        yield {"ph": "M", "name": "thread_name", "pid": first + rank, "tid": lane, "args": {"name": words}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": first + rank, "tid": lane, "args": {"sort_index": lane}}


def _lane(timeline: Timeline, event: Event) -> tuple[int, str]:
    """Number and name of the row of an event."""
    if event.kind not in SENDS | RECEIVES:
        return 0, "compute"
    peer = timeline.placement.rank_of(partner(event.action).stage, timeline.num_ranks)
    if event.kind in SENDS:
        return 1 + 2 * peer, f"send to rank {peer}"
    return 2 + 2 * peer, f"receive from rank {peer}"


def _slices(timeline: Timeline, first: int) -> Iterator[Slice]:
    for event in timeline.events:
        yield {
            "ph": "X",
            "name": str(event.action),
            "cat": event.kind.value,
            "pid": first + event.rank,
            "tid": _lane(timeline, event)[0],
            "ts": event.start_s * MICROSECONDS,
            "dur": event.duration_s * MICROSECONDS,
            "args": {"stage": event.action.stage, "microbatch": event.action.microbatch},
        }


def _transfers(events: list[Slice]) -> Iterator[tuple[Slice, Slice]]:
    """Each send with its receive, which follows in the same timeline."""
    waiting: dict[str, Slice] = {}
    for event in events:
        if event.get("cat") not in SENDS | RECEIVES:
            continue
        action = Action(Kind(event["cat"]), event["args"]["stage"], event["args"]["microbatch"])
        other = waiting.pop(str(partner(action)), None)
        if other is None:
            waiting[str(action)] = event
        else:
            yield (event, other) if action.kind in SENDS else (other, event)


def _arrow(number: int, send: Slice, receive: Slice) -> list[Slice]:
    common = {"cat": "transfer", "name": "transfer", "id": number}
    start = {"ph": "s", "pid": send["pid"], "tid": send["tid"], "ts": send["ts"]}
    # Half way, since an arrow ends in the slice that encloses its time, and a slice does not enclose its end.
    end = {"ph": "f", "bp": "e", "pid": receive["pid"], "tid": receive["tid"], "ts": receive["ts"] + receive["dur"] / 2}
    return [common | start, common | end]


def _memory(timeline: Timeline, first: int) -> Iterator[Slice]:
    for rank, curve in enumerate(timeline.memory):
        for time_s, held_bytes in zip(curve.times_s.tolist(), curve.held_bytes.tolist(), strict=True):
            yield {
                "ph": "C",
                "name": "memory",
                "pid": first + rank,
                "ts": time_s * MICROSECONDS,
                "args": {"bytes": held_bytes},
            }
