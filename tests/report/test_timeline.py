"""Timelines as text."""

from __future__ import annotations

import pytest

from threefold.report.timeline import format_seconds, format_timeline
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


def test_a_timeline_without_memory_has_no_column_for_it() -> None:
    recorded = Timeline.from_events("gpipe", 2, 2, 2, simulate(gpipe(2, 2), COSTS).events)
    assert "memory" not in format_timeline(recorded)


@pytest.mark.parametrize(("seconds", "text"), [(2.5, "2.5 s"), (0.0125, "12.5 ms"), (3e-5, "30 µs"), (0, "0 µs")])
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
