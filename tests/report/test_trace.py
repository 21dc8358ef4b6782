"""Timelines as traces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from threefold.report.trace import chrome_trace, chrome_trace_json
from threefold.schedule import build_schedule, gpipe, one_f_one_b
from threefold.simulate import StepCosts, Timeline, simulate

COSTS = StepCosts.uniform(2, p2p_s=1, sync_s=1, step_s=2, activation_bytes=1e6, static_bytes=2e9)


def slices(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_a_trace_has_a_process_a_rank_and_all_events() -> None:
    timeline = simulate(gpipe(2, 2), COSTS)
    trace = json.loads(chrome_trace_json({"": timeline}))
    assert trace == chrome_trace({"": timeline})
    assert len(slices(trace)) == len(timeline)
    first = next(event for event in slices(trace) if event["name"] == "1F0")
    assert (first["pid"], first["tid"], first["ts"], first["dur"]) == (1, 0, 2e6, 1e6)
    assert {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"} == {
        "rank 0",
        "rank 1",
    }
    memory = [event["args"]["bytes"] for event in trace["traceEvents"] if event["ph"] == "C" and event["pid"] == 0]
    assert max(memory) == 2e9 + 2e6


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_v", 2)])
def test_events_of_one_row_do_not_overlap(name: str, chunks: int) -> None:
    """Viewers draw overlapping slices of one row as if one called the other."""
    rows: dict[tuple[int, int], float] = {}
    timeline = simulate(build_schedule(name, 4, 8, chunks), StepCosts.uniform(4 * chunks, p2p_s=5))
    for event in slices(chrome_trace({"": timeline})):
        row = event["pid"], event["tid"]
        assert event["ts"] >= rows.get(row, 0.0)
        rows[row] = event["ts"] + event["dur"]


def test_a_timeline_without_memory_has_no_counter() -> None:
    recorded = Timeline.from_events("gpipe", 2, 2, 2, simulate(gpipe(2, 2), COSTS).events)
    assert not any(event["ph"] == "C" for event in chrome_trace({"": recorded})["traceEvents"])


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_every_event_is_what_the_format_demands(name: str) -> None:
    """Keys and types of the Trace Event Format; viewers drop an event that lacks one, and say nothing."""
    chunks = 2 if name == "zb_v" else 1
    timeline = simulate(build_schedule(name, 2, 4, chunks), StepCosts.uniform(2 * chunks, p2p_s=0.5))
    trace = chrome_trace({"simulated": timeline, "measured": timeline})
    named = {event["pid"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert named == {0, 1, 2, 3}
    rows = {(event["pid"], event["tid"]) for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert len(rows) == 4 * 3  # computing, and one neighbour to send to and to receive from
    needed = {
        "M": {"args"},
        "X": {"tid", "ts", "dur", "cat"},
        "C": {"ts", "args"},
        "s": {"id", "ts"},
        "f": {"id", "bp"},
    }
    for event in trace["traceEvents"]:
        assert {"name", "pid", *needed[event["ph"]]} <= event.keys()
        assert event["pid"] in named
        if event["ph"] == "X":
            assert (event["pid"], event["tid"]) in rows and event["dur"] >= 0 <= event["ts"]
    json.dumps(trace, allow_nan=False)


def test_arrows_lead_from_each_send_to_its_receive_and_stay_in_their_timeline() -> None:
    timeline = simulate(one_f_one_b(3, 4), StepCosts.uniform(3, p2p_s=0.5))
    trace = chrome_trace({"simulated": timeline, "measured": timeline})
    ends: dict[int, dict[str, Any]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] in "sf":
            ends.setdefault(event["id"], {})[event["ph"]] = event
    assert len(ends) == 2 * 4 * 2 * 2  # timelines × microbatches × links × directions
    for pair in ends.values():
        start, end = pair["s"], pair["f"]
        assert abs(start["pid"] - end["pid"]) == 1 and start["pid"] // 3 == end["pid"] // 3
        for arrow, words in ((start, "SEND"), (end, "RECV")):
            inside = [
                event["name"]
                for event in slices(trace)
                if (event["pid"], event["tid"]) == (arrow["pid"], arrow["tid"])
                and event["ts"] <= arrow["ts"] < event["ts"] + event["dur"]
            ]
            assert len(inside) == 1 and words in inside[0]
