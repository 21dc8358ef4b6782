"""The checker finds planted faults, and lowered schedules are proven safe."""

import itertools

import pytest

from threefold.errors import ScheduleError
from threefold.schedule import (
    Schedule,
    check_lowered,
    check_schedule,
    forward_only,
    gpipe,
    lower,
    naive,
    one_f_one_b,
    parse_schedule,
    require_legal,
    require_safe,
)

SMALL = "x stages=2 ranks=2 microbatches=2\n"


def edit(schedule: Schedule, rank: int, old: str, new: str) -> Schedule:
    """``schedule`` with ``old`` replaced in the text of one row."""
    lines = schedule.to_text().splitlines()
    assert old in lines[rank + 1]
    lines[rank + 1] = lines[rank + 1].replace(old, new)
    return parse_schedule("\n".join(lines))


@pytest.mark.parametrize(
    ("rows", "violation"),
    [
        ("rank 0: 0F0 0B0 0F1\nrank 1: 1F0 1B0 1F1 1B1", "rank 0: 0B1 is missing"),
        ("rank 0: 0F0 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1", "rank 0: 0F1 is missing"),
        ("rank 0: 0F0 0F0 0B0 0F1 0B1\nrank 1: 1F0 1B0 1F1 1B1", "rank 0: 0F0 stands 2 times"),
        ("rank 0: 0F0 0B0 0F1 0B1 0F2\nrank 1: 1F0 1B0 1F1 1B1", "rank 0: 0F2 is foreign"),
        ("rank 0: 0F0 0B0 0F1 0B1 2F0\nrank 1: 1F0 1B0 1F1 1B1", "rank 0: 2F0 is foreign"),
        ("rank 0: 0F0 0B0 0F1 0B1 1F0\nrank 1: 1B0 1F1 1B1", "rank 0: 1F0 belongs on rank 1"),
        ("rank 0: 0F0 0B0 0B1 0F1\nrank 1: 1F0 1B0 1F1 1B1", "rank 0: 0B1 stands before 0F1"),
        ("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F1 1B1 1F0 1B0", "waits for ever at 0B0 (deadlock): 1B0 or 1I0 never runs"),
        ("rank 0: 0F0 0I0 0F1 0B1\nrank 1: 1F0 1B0 1F1 1B1", "rank 0: 0W0 is missing"),
        ("rank 0: 0F0 0I0 0W0 0B0 0F1 0B1\nrank 1: 1F0 1B0 1F1 1B1", "0B0 stands beside I or W"),
        ("rank 0: 0F0 0W0 0I0 0F1 0B1\nrank 1: 1F0 1B0 1F1 1B1", "rank 0: 0W0 stands before 0I0"),
    ],
)
def test_planted_faults_are_named(rows: str, violation: str):
    found = check_schedule(parse_schedule(SMALL + rows))
    assert any(violation in line for line in found), found


def test_split_backward_passes_are_legal():
    rows = "rank 0: 0F0 0F1 0I0 0I1 0W0 0W1 \nrank 1: 1F0 1I0 1F1 1W0 1B1"
    schedule = parse_schedule(SMALL + rows)
    assert check_schedule(schedule) == []
    assert check_lowered(lower(schedule)) == []
    assert "1I0 1SEND_B0" in lower(schedule).to_text()


def test_two_chunks_a_rank_are_legal():
    text = "x stages=4 ranks=2 microbatches=1\nrank 0: 0F0 2F0 2B0 0B0\nrank 1: 1F0 3F0 3B0 1B0\n"
    assert check_lowered(lower(parse_schedule(text))) == []


def test_evaluation_has_no_backward():
    schedule = parse_schedule("forward_only stages=1 ranks=1 microbatches=1\nrank 0: 0F0 0B0\n")
    assert check_schedule(schedule) == ["rank 0: 0B0 is foreign to a forward-only schedule"]


def test_a_lost_row():
    schedule = Schedule("x", 2, 2, 1, one_f_one_b(2, 1).rows[:1])
    assert check_schedule(schedule) == ["rank 0: there are 1 rows for 2 ranks"]


def test_require_legal_prints_the_grid_with_the_row_marked():
    require_legal(one_f_one_b(4, 8))
    with pytest.raises(ScheduleError) as error:
        require_legal(edit(one_f_one_b(3, 2), 1, "1F1", "1F0"))
    lines = str(error.value).splitlines()
    assert "rank 1: 1F0 stands 2 times" in str(error.value)
    assert [line[0] for line in lines[-3:]] == [" ", ">", " "]
    assert lines[-2].startswith("> rank 1")
    with pytest.raises(ScheduleError, match="1F1 is missing"):
        lower(edit(one_f_one_b(3, 2), 1, "1F1", "1F0"))


@pytest.mark.parametrize("p", range(1, 9))
def test_every_lowered_schedule_is_proven_safe(p: int):
    """Also with fewer microbatches than stages, where careless warm-ups hang."""
    for m, generate in itertools.product(range(1, 2 * p + 1), (naive, gpipe, one_f_one_b, forward_only)):
        schedule = generate(p, m)
        lowered = lower(schedule)
        assert check_lowered(lowered) == []
        assert lowered.grid() == schedule.grid()
        require_safe(lowered)


def test_lowering_twice_changes_nothing():
    assert lower(lower(gpipe(3, 4))) == lower(gpipe(3, 4))


def test_evaluation_is_lowered_without_sync_and_step():
    assert not {"SYNC", "STEP", "SEND_B"} & {
        action.kind.value for row in lower(forward_only(3, 2)).rows for action in row
    }


@pytest.mark.parametrize(
    ("rank", "old", "new", "violation"),
    [
        (
            0,
            "0F0 0SEND_F0 0F1 0SEND_F1",
            "0F0 0F1 0SEND_F1 0SEND_F0",
            "transfer 0 of the link to rank 1 is 0SEND_F1 here",
        ),
        (0, "0F0 0SEND_F0 0F1 0SEND_F1", "0F0 0F1 0SEND_F1 0SEND_F0", "blocks for ever at 0SEND_F1"),
        (1, "1RECV_F1 ", "", "rank 1: 1RECV_F1 is missing; its other end is 0SEND_F1"),
        (0, "0SEND_F0 ", "", "rank 0: 0SEND_F0 is missing; its other end is 1RECV_F0"),
        (1, "1RECV_F0 1RECV_F1 1F0", "1F0 1RECV_F0 1RECV_F1", "rank 1: 1F0 stands before 1RECV_F0 brings its input"),
        (0, "0F0 0SEND_F0", "0SEND_F0 0F0", "rank 0: 0SEND_F0 stands before 0F0 has made what it sends"),
        (0, "0RECV_B0 0B0", "0B0 0RECV_B0", "rank 0: 0B0 stands before 0RECV_B0 brings its input"),
        (1, "1B0 1SEND_B0", "1SEND_B0 1B0", "rank 1: 1SEND_B0 stands before 1B0 has made what it sends"),
        (0, "0SEND_F0", "0SEND_F0 0SEND_F0", "rank 0: 0SEND_F0 stands 2 times"),
        (0, "0SEND_F0", "0SEND_F0 0SEND_B0", "rank 0: 0SEND_B0 is foreign"),
        (1, "1SEND_F0", "1SEND_F0 0SEND_F1", "rank 1: 0SEND_F1 is foreign"),
        (2, " STEP", "", "rank 2: the row must end with SYNC STEP"),
        (2, "SYNC STEP", "STEP SYNC", "rank 2: the row must end with SYNC STEP"),
        (2, "2F0", "2F0 SYNC", "rank 2: the row must end with SYNC STEP"),
        (1, "1F2", "1F1", "rank 1: 1F1 stands 2 times"),
    ],
)
def test_planted_transfer_faults_are_named(rank: int, old: str, new: str, violation: str):
    faulty = edit(lower(one_f_one_b(3, 4)), rank, old, new)
    found = check_lowered(faulty)
    assert any(violation in line for line in found), found
    with pytest.raises(ScheduleError, match=f"> rank {rank}"):
        require_safe(faulty)


def test_crossing_sends_of_two_ranks_deadlock():
    """Each rank's own order looks right; only both together show that blocking sends wait for each other."""
    text = """x stages=2 ranks=2 microbatches=2
    rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 SYNC STEP
    rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 SYNC STEP
    """
    assert check_lowered(parse_schedule(text)) == [
        "rank 0: transfer 1 of the link to rank 1 is 0SEND_F1 here and 1SEND_B0 there",
        "rank 0: blocks for ever at 0SEND_F1 (action 3): rank 1 is at 1SEND_B0, not at 1RECV_F1",
        "rank 1: blocks for ever at 1SEND_B0 (action 3): rank 0 is at 0SEND_F1, not at 0RECV_B0",
    ]
