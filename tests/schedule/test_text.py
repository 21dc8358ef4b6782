"""The text grammar and the printed grid."""

import dataclasses
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from threefold.errors import ScheduleError
from threefold.schedule import (
    Action,
    Kind,
    Placement,
    Schedule,
    forward_only,
    gpipe,
    interleaved_1f1b,
    lower,
    naive,
    one_f_one_b,
    parse_schedule,
    partner,
    zb_h1,
    zb_v,
)
from threefold.schedule.search import searched

GOLDEN = Path(__file__).parent / "golden"

staged = st.builds(
    Action,
    st.sampled_from([kind for kind in Kind if kind not in ("SYNC", "STEP")]),
    st.integers(0, 40),
    st.integers(0, 300),
)
actions = st.one_of(staged, st.sampled_from([Action(Kind.SYNC), Action(Kind.STEP)]))
schedules = st.builds(
    lambda name, stages, microbatches, rows, placement: Schedule(
        name, len(rows), stages, microbatches, tuple(map(tuple, rows)), placement
    ),
    st.sampled_from(["1f1b", "gpipe", "by_hand"]),
    st.integers(1, 40),
    st.integers(1, 300),
    st.lists(st.lists(actions, max_size=8), min_size=1, max_size=6),
    st.sampled_from(Placement),
)


@given(schedules)
def test_text_round_trip(schedule: Schedule):
    assert parse_schedule(schedule.to_text()) == schedule


def test_comments_and_blank_lines():
    text = "# by hand\n\n1f1b stages=2 ranks=2 microbatches=1  # header\nrank 0: 0F0 0B0\n\nrank 1: 1F0 1B0 # last\n"
    assert parse_schedule(text) == one_f_one_b(2, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the schedule is empty"),
        ("# nothing\n", "the schedule is empty"),
        ("1f1b stages=2\n", r"line 1: '1f1b stages=2' is no header"),
        ("x stages=0 ranks=1 microbatches=1\nrank 0:\n", "line 1: .* has a size of 0"),
        ("x stages=1 ranks=1 microbatches=1\nrank 1: 0F0\n", "line 2: 'rank 1' where 'rank 0:' must stand"),
        ("x stages=1 ranks=1 microbatches=1\n0F0\n", "line 2: '0F0' where 'rank 0:' must stand"),
        ("x stages=1 ranks=1 microbatches=1\n\nrank 0: 0F0 0G1\n", "line 3: '0G1' is no action"),
        ("x stages=1 ranks=1 microbatches=1\nrank 0: F0\n", "line 2: 'F0' is no action"),
        ("x stages=1 ranks=1 microbatches=1\nrank 0: 0SYNC\n", "line 2: '0SYNC' is no action"),
        ("x stages=1 ranks=2 microbatches=1\nrank 0: 0F0\n", "line 2: 1 rows for ranks=2"),
        ("x stages=2 ranks=1 microbatches=1 placement=w\n", "line 1: placement=w is unknown; write loop or v"),
    ],
)
def test_parse_errors_name_line_and_token(text: str, message: str):
    with pytest.raises(ScheduleError, match=message):
        parse_schedule(text)


def test_the_two_ends_of_a_transfer():
    for text, other in (("2SEND_F0", "3RECV_F0"), ("3SEND_B0", "2RECV_B0")):
        action = parse_schedule(f"x stages=4 ranks=1 microbatches=1\nrank 0: {text}\n").rows[0][0]
        assert str(partner(action)) == other
        assert partner(partner(action)) == action
    with pytest.raises(ValueError, match="0F0 is no transfer"):
        partner(Action(Kind.F, 0, 0))


def two_chunks() -> Schedule:
    """Two stages a rank, four in all, one microbatch: the grid shows stage numbers."""
    text = "by_hand stages=4 ranks=2 microbatches=1\nrank 0: 0F0 2F0 2I0 2W0 0B0\nrank 1: 1F0 3F0 3B0 1B0\n"
    return parse_schedule(text)


GRIDS = {
    "naive_3_2": naive(3, 2),
    "gpipe_4_4": gpipe(4, 4),
    "1f1b_4_8": one_f_one_b(4, 8),
    "1f1b_4_2": one_f_one_b(4, 2),
    "1f1b_2_12": one_f_one_b(2, 12),
    "forward_only_3_4": forward_only(3, 4),
    "two_chunks_with_split_backward": two_chunks(),
    "interleaved_1f1b_2_4_2": interleaved_1f1b(2, 4, 2),
    "interleaved_1f1b_3_5_2": interleaved_1f1b(3, 5, 2),
    "zb_h1_4_8": zb_h1(4, 8),
    "zb_h1_4_2": zb_h1(4, 2),
    "zb_v_3_6": zb_v(3, 6),
    "searched_2_4": searched(2, 4),
    "forward_only_v_2_3": forward_only(2, 3, 2, Placement.V),
}


def matches_golden(name: str, text: str) -> bool:
    """Compares with the golden file, which THREEFOLD_GOLDEN=write rewrites."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("THREEFOLD_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    return path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("name", GRIDS)
def test_golden_grids(name: str):
    assert matches_golden(f"grid_{name}", GRIDS[name].grid() + "\n")


@pytest.mark.parametrize(
    "name", ["gpipe_4_4", "1f1b_4_2", "forward_only_3_4", "interleaved_1f1b_2_4_2", "zb_h1_4_2", "zb_v_3_6"]
)
def test_golden_lowered_text(name: str):
    assert matches_golden(f"lowered_{name}", lower(GRIDS[name]).to_text())


def test_the_grid_ignores_transfers():
    assert lower(one_f_one_b(3, 4)).grid() == one_f_one_b(3, 4).grid()


def test_the_grid_shows_what_never_runs():
    schedule = one_f_one_b(2, 1)
    broken = dataclasses.replace(schedule, rows=(schedule.rows[0], (Action(Kind.B, 1, 0), Action(Kind.F, 1, 0))))
    assert broken.grid(marked=(1,)).splitlines()[-1] == "> rank 1  .  never: 1B0 1F0"


@pytest.mark.parametrize("schedule", GRIDS.values(), ids=GRIDS)
def test_generated_schedules_round_trip(schedule: Schedule):
    for one in (schedule, lower(schedule)):
        assert parse_schedule(one.to_text()) == one
        assert parse_schedule(one.to_text()).to_text() == one.to_text()


def test_only_a_v_is_written_in_the_header():
    assert zb_v(2, 1).to_text().splitlines()[0] == "zb_v stages=4 ranks=2 microbatches=1 placement=v"
    assert interleaved_1f1b(2, 1, 2).to_text().splitlines()[0] == "interleaved_1f1b stages=4 ranks=2 microbatches=1"
    text = "x stages=1 ranks=1 microbatches=1 placement=loop\nrank 0: 0F0 0B0\n"
    assert parse_schedule(text).placement is Placement.LOOP


def test_a_transfer_that_the_file_places_is_obeyed():
    """Receives are posted as late as possible here; lowering would post them earlier."""
    text = """by_hand stages=2 ranks=2 microbatches=2
rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 SYNC STEP
rank 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 SYNC STEP
"""
    schedule = parse_schedule(text)
    assert lower(schedule) == schedule
    with pytest.raises(ScheduleError, match="is missing; its other end is"):
        lower(parse_schedule(text.replace("1RECV_F1 ", "")))
