"""The activity board: what a rank notes, others read, even after it was killed or while it writes."""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from threefold.parallel import activity as activity_module
from threefold.parallel.activity import Activity, ActivityBoard, ActivityLog, ActivityWriter, NullActivity, State

WAIT = "all_reduce over tp[2,3]"


@pytest.fixture
def board(tmp_path: Path) -> ActivityBoard:
    return ActivityBoard.create(tmp_path / "activity.board", world_size=4)


def test_a_rank_that_never_wrote_is_absent(board: ActivityBoard) -> None:
    assert board.read_all() == tuple(Activity(rank) for rank in range(4))


def test_notes_are_read_through_another_mapping(board: ActivityBoard) -> None:
    before = time.monotonic()
    writer = ActivityWriter(board.path, 2, "dp 0, pp 1, tp 0")
    assert board.read(2).state is State.STARTING
    writer.begin_step(7)
    writer.begin_action("1F2", 1, 2)
    writer.begin_wait(WAIT)
    note = ActivityBoard.open(board.path).read(2)
    assert (note.rank, note.pid, note.place) == (2, os.getpid(), "dp 0, pp 1, tp 0")
    assert (note.state, note.step, note.action, note.stage, note.microbatch) == (State.WAITING, 7, "1F2", 1, 2)
    assert (note.operation, note.sequence) == (WAIT, 1)
    assert before <= note.heartbeat_s <= note.since_s <= time.monotonic()
    assert board.read(1).state is State.ABSENT
    assert board.read(3).state is State.ABSENT


def test_a_wait_ends_in_the_action_that_it_interrupted(board: ActivityBoard) -> None:
    writer = ActivityWriter(board, 0, "")
    writer.begin_action("0B1", 0, 1)
    writer.begin_wait(WAIT)
    writer.end_wait()
    writer.begin_wait(WAIT)
    writer.end_wait()
    note = board.read(0)
    assert (note.state, note.action, note.operation, note.sequence) == (State.COMPUTING, "0B1", "", 2)


def test_a_step_clears_the_action(board: ActivityBoard) -> None:
    writer = ActivityWriter(board, 0, "")
    writer.begin_action("0B1", 0, 1)
    writer.begin_step(3)
    assert board.read(0).action == ""
    assert (board.read(0).stage, board.read(0).microbatch) == (None, None)


def test_the_end_keeps_what_was_done_last(board: ActivityBoard) -> None:
    writer = ActivityWriter(board, 0, "dp 0")
    writer.begin_step(3)
    writer.begin_action("0B1", 0, 1)
    writer.finish("failed", "RuntimeError: it broke")
    note = board.read(0)
    assert (note.state, note.step, note.action, note.message) == (State.FAILED, 3, "0B1", "RuntimeError: it broke")


def test_the_heartbeat_changes_nothing_else(board: ActivityBoard) -> None:
    writer = ActivityWriter(board, 0, "")
    before = board.read(0)
    writer.heartbeat()
    after = board.read(0)
    assert after.heartbeat_s > before.heartbeat_s
    assert after.since_s == before.since_s


def test_long_texts_are_cut_at_a_character(board: ActivityBoard) -> None:
    writer = ActivityWriter(board, 1, "é" * 500)
    writer.begin_wait("é" * 500)
    writer.finish("failed", "x" + "é" * 500)
    note = board.read(1)
    assert set(note.place) == set(note.operation) == {"é"}
    assert set(note.message) == {"x", "é"}
    assert board.read(2).state is State.ABSENT


def test_ranks_of_a_later_node(tmp_path: Path) -> None:
    board = ActivityBoard.create(tmp_path / "node1", world_size=2, first_rank=2)
    ActivityWriter(board, 3, "here")
    assert [note.rank for note in board.read_all()] == [2, 3]
    assert ActivityBoard.open(board.path).read(3).place == "here"
    with pytest.raises(ValueError, match="rank 1 has no record"):
        board.read(1)


def test_create_wipes_and_join_does_not(tmp_path: Path) -> None:
    path = tmp_path / "board"
    ActivityWriter(ActivityBoard.join(path, 2), 1, "first")
    assert ActivityBoard.join(path, 2).read(1).place == "first"
    assert ActivityBoard.create(path, 2).read(1).state is State.ABSENT


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(b"x" * 5000)
    with pytest.raises(ValueError, match="not an activity board"):
        ActivityBoard.open(path)


def test_a_reader_never_sees_half_a_note(board: ActivityBoard) -> None:
    """Action, stage and microbatch of each note agree; a reader in another thread must see that."""
    writer = ActivityWriter(board, 0, "")
    writer.begin_action("0F0", 0, 0)
    done = threading.Event()

    def write() -> None:
        number = 0
        while not done.is_set():
            number += 1
            writer.begin_action(f"{number}F{number}", number, number)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(2000):
            note = board.read(0)
            assert note.action == f"{note.stage}F{note.microbatch}"
    finally:
        done.set()
        thread.join()


def test_a_note_that_was_never_finished_is_still_read(board: ActivityBoard) -> None:
    """A rank that is killed between the two versions leaves an odd one for ever."""
    writer = ActivityWriter(board, 0, "here")
    writer.begin_action("0F0", 0, 0)
    activity_module._VERSION.pack_into(board.memory, board.offset(0), 5)
    assert board.read(0).place == "here"


def _note_and_wait_for_death(path: str) -> None:
    writer = ActivityWriter(path, 1, "doomed")
    writer.begin_step(9)
    writer.begin_wait(WAIT)
    signal.pause()


def test_notes_outlive_a_killed_process(board: ActivityBoard) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_note_and_wait_for_death, args=(str(board.path),))
    process.start()
    deadline = time.monotonic() + 20
    while board.read(1).state is not State.WAITING and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.join()
    note = board.read(1)
    assert (note.pid, note.step, note.operation) == (process.pid, 9, WAIT)


def test_the_null_log_takes_every_note() -> None:
    log: ActivityLog = NullActivity()
    log.begin_step(0)
    log.begin_action("0F0", 0, 0)
    log.begin_wait(WAIT)
    log.end_wait()
    log.heartbeat()
    log.finish("done")
