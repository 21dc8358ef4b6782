"""Timelines as text and as traces."""

from __future__ import annotations

import json

import pytest

from threefold.report.timeline import chrome_trace, chrome_trace_json, format_seconds, format_timeline
from threefold.schedule import gpipe, one_f_one_b
from threefold.simulate import StepCosts, Timeline, simulate

COSTS = StepCosts.uniform(2, p2p_s=1, sync_s=1, step_s=2, activation_bytes=1e6, static_bytes=2e9)


def test_the_text_of_a_step() -> None:
    timeline = simulate(one_f_one_b(2, 2), COSTS)
    assert timeline.makespan_s == 14
    assert format_timeline(timeline, width=14).splitlines() == [
        "1f1b: two stages on two ranks, two microbatches, 14 s, of which bubble 25.0%",
        "",
        "  rank 0 |FF....BB.BB=##|",
        "  rank 1 |..FBBFBB=##...|",
        "  F forward, B backward, I input gradient, W weight gradient, = gradient sync, # optimizer, . idle",
        "",
        "  rank  compute  warm up  stage  transfer  sync  cool down  optimizer  peak memory",
        "     0      6 s        0    3 s       2 s   1 s          0        2 s         2 GB",
        "     1      6 s      1 s      0       1 s   1 s        3 s        2 s         2 GB",
        "",
        "  critical path: 3 s F + 1 s SEND_F + 6 s B + 1 s SEND_B + 1 s SYNC + 2 s STEP",
    ]


def test_blocking_transfers_are_letters_too() -> None:
    text = format_timeline(simulate(gpipe(2, 1), COSTS, blocking=True), width=11)
    assert "rank 0 |F>...<BB=##|" in text and "> send, < receive" in text


def test_a_trace_has_a_process_a_rank_and_all_events() -> None:
    timeline = simulate(gpipe(2, 2), COSTS)
    trace = json.loads(chrome_trace_json(timeline))
    assert trace == chrome_trace(timeline)
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == len(timeline)
    first = next(event for event in slices if event["name"] == "1F0")
    assert (first["pid"], first["tid"], first["ts"], first["dur"]) == (1, 0, 2e6, 1e6)
    assert {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"} == {
        "rank 0",
        "rank 1",
    }
    memory = [event["args"]["bytes"] for event in trace["traceEvents"] if event["ph"] == "C" and event["pid"] == 0]
    assert max(memory) == 2e9 + 2e6


def test_events_of_one_row_do_not_overlap() -> None:
    """Viewers draw overlapping slices of one row as if one called the other."""
    rows: dict[tuple[int, int], float] = {}
    for event in chrome_trace(simulate(one_f_one_b(4, 8), StepCosts.uniform(4, p2p_s=5)))["traceEvents"]:
        if event["ph"] == "X":
            row = event["pid"], event["tid"]
            assert event["ts"] >= rows.get(row, 0.0)
            rows[row] = event["ts"] + event["dur"]


def test_a_timeline_without_memory_has_no_column_for_it() -> None:
    recorded = Timeline.from_events("gpipe", 2, 2, 2, simulate(gpipe(2, 2), COSTS).events)
    assert "memory" not in format_timeline(recorded)
    assert not any(event["ph"] == "C" for event in chrome_trace(recorded)["traceEvents"])


@pytest.mark.parametrize(("seconds", "text"), [(2.5, "2.5 s"), (0.0125, "12.5 ms"), (3e-5, "30 µs"), (0, "0 µs")])
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
