"""The root cause among many exits: who was killed or raised, not who lost the connection to it."""

import signal
from pathlib import Path

import pytest

from threefold.parallel.activity import Activity, State
from threefold.train.failures import Exit, explain_exits
from threefold.train.watchdog import EXIT_HANG, Diagnosis

LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:30216"


def exit_(rank: int, code: int, last_line: str = "") -> Exit:
    return Exit(rank, code, Path(f"logs/rank{rank}.stderr.log"), last_line)


def failed(rank: int, message: str, since_s: float) -> Activity:
    return Activity(rank, 100 + rank, f"dp {rank}", State.FAILED, 3, "0F0", 0, 0, message=message, since_s=since_s)


def cause(*exits: Exit, activities: tuple[Activity, ...] = (), hang: Diagnosis | None = None) -> str:
    return explain_exits(exits, {activity.rank: activity for activity in activities}, hang)


@pytest.mark.parametrize(
    "lost",
    [
        LOST,
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "threefold.errors.WorkerError: rank 0 failed in all_reduce over tp[0,1]: a peer died or left it (closed)",
    ],
)
def test_an_error_comes_before_a_lost_connection(lost: str) -> None:
    text = cause(exit_(0, 1, lost), exit_(1, 1, "ValueError: bad"), exit_(2, 1, lost))
    assert text.startswith("rank 1 failed before it could say what it does: ValueError: bad")
    assert "ranks 0, 2 lost it and ended too" in text
    assert text.endswith("log: logs/rank1.stderr.log")


def test_a_killed_rank_comes_before_an_error() -> None:
    text = cause(exit_(0, 1, "ValueError: bad"), exit_(1, -signal.SIGKILL))
    assert text.startswith("rank 1 was killed by signal 9 (SIGKILL)")
    assert "probably ran out of memory" in text


def test_an_abort_is_a_consequence_of_an_error_but_not_of_a_lost_connection() -> None:
    assert cause(exit_(0, -signal.SIGABRT), exit_(1, 1, "ValueError: bad")).startswith("rank 1 ")
    assert cause(exit_(0, 1, LOST), exit_(1, -signal.SIGABRT)).startswith("rank 1 ")


def test_an_abort_is_told_in_the_words_of_the_library_that_called_it() -> None:
    text = cause(exit_(0, -signal.SIGABRT, "what():  getpeername: not connected"))
    assert "signal 6 (SIGABRT) before it could say what it does: what():  getpeername: not connected\nlog:" in text


def test_of_two_errors_the_one_noted_first() -> None:
    text = cause(exit_(0, 1), exit_(1, 1), activities=(failed(0, "late", 20.0), failed(1, "early", 10.0)))
    assert text.startswith("rank 1 (dp 1; pid 101) failed at step 3 in action 0F0, stage 0, microbatch 0: early")


def test_if_all_only_lost_a_peer_the_first_is_named() -> None:
    assert cause(exit_(1, 1, LOST), exit_(0, 1, LOST)).startswith("rank 1 ")


def test_a_hang_is_told_in_the_words_of_the_watchdog() -> None:
    assert "rank 5 sleeps" in cause(exit_(0, EXIT_HANG), exit_(1, 1, LOST), hang=Diagnosis((5,), "rank 5 sleeps"))


def test_a_hang_that_nobody_explained() -> None:
    assert cause(exit_(0, EXIT_HANG)).startswith("rank 0 failed before it could say what it does: exit status 124")


def test_an_unknown_signal() -> None:
    assert "signal 200 (unknown)" in cause(exit_(0, -200))
