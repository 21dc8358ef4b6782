"""The diagnosis of a hang: many boards, each with the culprit that a person would name; and the thread that asks."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from threefold.parallel.activity import Activity, ActivityBoard, ActivityWriter, State
from threefold.train.watchdog import (
    EXIT_HANG,
    STARTING_S,
    Diagnosis,
    Watchdog,
    diagnose,
    end_process,
    patience_s,
    process_state,
    read_failure,
    write_failure,
)

NOW = 1000.0
TIMEOUT = 30.0
LATE = NOW - 31.0
TP01, TP23 = "all_reduce over tp[0,1]", "all_reduce over tp[2,3]"


def waiting(rank: int, operation: str, since: float = LATE, step: int = 7) -> Activity:
    return Activity(
        rank, 100 + rank, f"dp 0, pp {rank // 2}, tp {rank % 2}", State.WAITING, step, f"{rank // 2}F2", rank // 2, 2,
        operation, 41, since, NOW,
    )  # fmt: skip


def computing(rank: int, since: float = LATE, step: int = 7) -> Activity:
    return replace(waiting(rank, "", since, step), state=State.COMPUTING)


def ended(rank: int, state: State, message: str = "", since: float = LATE) -> Activity:
    return replace(waiting(rank, "", since), state=state, message=message, heartbeat_s=since)


def dead(activity: Activity) -> Activity:
    return replace(activity, heartbeat_s=LATE)


def judge(*activities: Activity, processes: dict[int, str] | None = None) -> Diagnosis:
    return diagnose(activities, NOW, TIMEOUT, processes or {})


def test_slow_compute_is_named_with_all_that_wait_for_it() -> None:
    found = judge(
        waiting(0, "receive from rank 2 over pp[0,2]"),
        waiting(1, "receive from rank 3 over pp[1,3]"),
        waiting(2, TP23),
        computing(3),
    )
    assert found.culprits == (3,)
    assert found.text.splitlines()[0] == (
        "rank 3 (dp 0, pp 1, tp 1) has not moved for 31 s: at step 7 in action 1F2, stage 1, microbatch 2; "
        "rank 1 waits for it in receive from rank 3 over pp[1,3]; "
        "rank 2 waits for it in all_reduce over tp[2,3]; rank 0 waits behind"
    )


def test_the_table_shows_every_rank() -> None:
    text = judge(waiting(0, TP01), computing(1)).text
    header, first, second = text.splitlines()[1:]
    assert header.split() == ["rank", "place", "step", "action", "stage", "microbatch", "doing", "wait", "for"]
    assert "all_reduce over tp[0,1]" in first
    assert "41" in first
    assert "31.0 s" in first
    assert "computing" in second


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        ({}, "process 103 is stopped or killed"),
        ({3: "stopped"}, "its process 103 is stopped"),
        ({3: "gone"}, "its process 103 is gone"),
    ],
)
def test_a_silent_process_is_named_even_if_it_waits(processes: dict[int, str], words: str) -> None:
    found = judge(waiting(2, TP23), dead(waiting(3, TP23)), processes=processes)
    assert found.culprits == (3,)
    assert words in found.text
    assert "no sign of life for 31 s" in found.text
    assert "waiting in all_reduce over tp[2,3] (wait 41); rank 2 waits for it in all_reduce" in found.text


def test_a_silent_process_outweighs_the_failures_that_followed() -> None:
    found = judge(ended(0, State.FAILED, "connection closed by peer", since=NOW - 1), dead(computing(1)))
    assert found.culprits == (1,)


def test_the_first_failure_is_the_cause() -> None:
    found = judge(
        ended(0, State.FAILED, "connection closed by peer", since=NOW - 39),
        ended(1, State.FAILED, "RuntimeError: it broke", since=NOW - 40),
        waiting(2, "all_reduce over dp[0,1,2]"),
    )
    assert found.culprits == (1,)
    assert "failed at step 7 in action 0F2, stage 0, microbatch 2: RuntimeError: it broke" in found.text


def test_a_rank_that_ended_while_others_wait_for_it() -> None:
    """Everyone waits in the same collective except one that has finished: a rank that did fewer steps."""
    group = "all_reduce over dp[0,1,2,3]"
    found = judge(*(waiting(rank, group) for rank in (0, 1, 2)), ended(3, State.DONE))
    assert found.culprits == (3,)
    assert "ended after step 7 while others go on; ranks 0, 1, 2 wait for it in all_reduce over dp" in found.text


def test_a_rank_that_ended_and_is_not_waited_for_is_innocent() -> None:
    found = judge(ended(0, State.DONE), waiting(1, "all_reduce over tp[1,2]"), computing(2))
    assert found.culprits == (2,)


def test_a_rank_that_never_started() -> None:
    found = judge(waiting(0, TP01), Activity(1))
    assert found.culprits == (1,)
    assert found.text.startswith("rank 1 never started; rank 0 waits for it")


def test_no_rank_ever_started() -> None:
    found = judge(Activity(0), Activity(1))
    assert found.culprits == (0, 1)
    assert found.text.startswith("rank 0 never started\nrank 1 never started\n")


def test_a_rank_that_is_still_starting() -> None:
    starting = Activity(1, 101, "dp 0, pp 0, tp 1", State.STARTING, since_s=LATE, heartbeat_s=NOW)
    found = judge(waiting(0, TP01), starting)
    assert found.culprits == (1,)
    assert "has not finished starting after 31 s" in found.text


def test_loading_data_for_ever_without_anybody_waiting() -> None:
    loading = replace(computing(0), action="load", stage=None, microbatch=None)
    found = judge(loading)
    assert found.culprits == (0,)
    assert found.text.startswith("rank 0 (dp 0, pp 0, tp 0) has not moved for 31 s: at step 7 in action load")


def test_loading_data_for_ever_while_others_wait() -> None:
    loading = replace(computing(0), action="load", stage=None, microbatch=None)
    found = judge(loading, waiting(1, "receive from rank 0 over pp[0,1]"))
    assert found.culprits == (0,)
    assert "rank 1 waits for it in receive from rank 0" in found.text


def test_before_the_first_action() -> None:
    idle = replace(computing(0), action="", stage=None, microbatch=None, step=None)
    assert "has not moved for 31 s: before the first step between actions" in judge(idle).text


def test_a_rank_that_moves_but_never_joins() -> None:
    """It runs something else, an evaluation say, so it is not idle; still it is the one that is waited for."""
    found = judge(waiting(0, TP01), computing(1, since=NOW - 0.1))
    assert found.culprits == (1,)
    assert "does something else" in found.text


def test_of_two_that_are_waited_for_the_one_that_does_not_move() -> None:
    group = "all_reduce over dp[0,1,2]"
    found = judge(waiting(0, group), computing(1, since=NOW - 0.1), computing(2))
    assert found.culprits == (2,)


def test_ranks_in_different_collectives() -> None:
    found = judge(waiting(2, TP23), waiting(3, "all_gather over tp[2,3]"))
    assert found.culprits == (2, 3)
    first = found.text.splitlines()[0]
    assert first.startswith("ranks 2, 3 wait for each other in different collectives")
    assert "rank 2 in all_reduce over tp[2,3] (wait 41) at step 7" in first
    assert "rank 3 in all_gather over tp[2,3] (wait 41) at step 7" in first


def test_ranks_in_different_collectives_are_told_from_those_behind() -> None:
    found = judge(
        waiting(0, "receive from rank 2 over pp[0,2]"), waiting(2, TP23), waiting(3, "all_reduce over dp[2,3]")
    )
    assert found.culprits == (2, 3)


def test_ranks_in_the_same_collective_of_different_steps() -> None:
    found = judge(waiting(0, TP01, step=7), waiting(1, TP01, step=8))
    assert found.culprits == (0, 1)
    assert "at step 7" in found.text
    assert "at step 8" in found.text


def test_two_ranks_that_both_receive() -> None:
    found = judge(waiting(0, "receive from rank 1 over pp[0,1]"), waiting(1, "receive from rank 0 over pp[0,1]"))
    assert found.culprits == (0, 1)


def test_a_send_and_its_receive_belong_together() -> None:
    found = judge(waiting(0, "send to rank 1 over pp[0,1]"), waiting(1, "receive from rank 0 over pp[0,1]"))
    assert found.culprits == ()
    assert "the network or its library is stuck" in found.text


def test_everyone_has_joined_the_same_collective() -> None:
    found = judge(waiting(0, TP01), waiting(1, TP01))
    assert found.culprits == ()
    assert found.text.startswith("all its ranks have joined all_reduce over tp[0,1] and it does not complete")


def test_a_rank_of_another_machine() -> None:
    found = judge(waiting(0, "all_reduce over dp[0,8]"), waiting(1, "receive from rank 0 over pp[0,1]"))
    assert found.culprits == (8,)
    assert found.text.startswith("rank 8, on another machine, is waited for")


def test_a_text_without_ranks_waits_for_all() -> None:
    found = judge(waiting(0, "barrier"), waiting(1, "barrier"), computing(2))
    assert found.culprits == (2,)


def test_a_short_timeout_does_not_take_the_pause_between_heartbeats_for_death() -> None:
    just_beaten = replace(waiting(0, TP01, since=NOW - 2.5), heartbeat_s=NOW - 0.6)
    found = diagnose([just_beaten, replace(just_beaten, rank=1, state=State.COMPUTING)], NOW, 2.0)
    assert found.culprits == (1,)
    assert "no sign of life" not in found.text


# ---------------------------------------------------------------------------------------------------------------------
# The thread


def watched(tmp_path: Path, timeout_s: float) -> tuple[ActivityWriter, Watchdog, list[Diagnosis]]:
    writer = ActivityWriter(ActivityBoard.create(tmp_path / "board", 1), 0, "dp 0, pp 0, tp 0")
    found: list[Diagnosis] = []
    return writer, Watchdog(writer, timeout_s, found.append), found


def test_the_thread_speaks_once_of_a_rank_that_does_not_move(tmp_path: Path) -> None:
    writer, watchdog, found = watched(tmp_path, timeout_s=0.2)
    writer.begin_step(1)
    with watchdog:
        time.sleep(0.8)
    assert [diagnosis.culprits for diagnosis in found] == [(0,)]


def test_the_thread_is_content_while_the_rank_moves(tmp_path: Path) -> None:
    writer, watchdog, found = watched(tmp_path, timeout_s=0.4)
    with watchdog:
        for step in range(20):
            writer.begin_step(step)
            time.sleep(0.04)
    assert found == []


def test_the_thread_gives_a_rank_that_starts_more_time(tmp_path: Path) -> None:
    _, watchdog, found = watched(tmp_path, timeout_s=0.2)
    with watchdog:
        time.sleep(0.6)
    assert found == []
    assert patience_s(State.STARTING, 0.2) == STARTING_S
    assert patience_s(State.STARTING, 300.0) == 300.0
    assert patience_s(State.WAITING, 0.2) == 0.2


def test_the_thread_is_content_after_the_end(tmp_path: Path) -> None:
    writer, watchdog, found = watched(tmp_path, timeout_s=0.2)
    with watchdog:
        writer.finish("done")
        time.sleep(0.6)
    assert found == []


def test_the_thread_beats(tmp_path: Path) -> None:
    writer, watchdog, _ = watched(tmp_path, timeout_s=0.4)
    before = writer.board.read(0).heartbeat_s
    with watchdog:
        time.sleep(0.3)
    assert writer.board.read(0).heartbeat_s > before


def test_the_thread_does_not_outlive_its_block(tmp_path: Path) -> None:
    _, watchdog, _ = watched(tmp_path, timeout_s=60)
    with watchdog:
        pass
    assert "threefold-watchdog" not in {thread.name for thread in threading.enumerate()}


def test_the_first_diagnosis_is_kept(tmp_path: Path) -> None:
    assert read_failure(tmp_path) is None
    assert write_failure(tmp_path, Diagnosis((1,), "first"), reported_by=0)
    assert not write_failure(tmp_path, Diagnosis((2,), "second"), reported_by=1)
    assert read_failure(tmp_path) == Diagnosis((1,), "first")
    assert [path.name for path in tmp_path.iterdir()] == ["failure.json"]
    assert json.loads((tmp_path / "failure.json").read_text())["reported_by"] == 0


def test_a_hang_ends_the_process(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from threefold.train.watchdog import *; " + (
        "end_process(Path(sys.argv[1]), 3)(Diagnosis((1,), 'rank 1 sleeps'))"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert result.returncode == EXIT_HANG
    assert "rank 1 sleeps" in result.stderr
    assert read_failure(tmp_path) == Diagnosis((1,), "rank 1 sleeps")
    assert callable(end_process(tmp_path, 0))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_the_state_of_a_process() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert process_state(process.pid) == ""
        os.kill(process.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 5
        while process_state(process.pid) != "stopped" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process_state(process.pid) == "stopped"
    finally:
        process.kill()
        process.communicate()
    assert process_state(process.pid) == "gone"
