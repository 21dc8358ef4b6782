"""The launcher, with ranks that do not need torch: whatever happens to one of them, the job ends and says why."""

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from threefold.errors import WorkerError
from threefold.parallel.activity import ActivityBoard, State
from threefold.train.launcher import BOARD_FILE, LOG_DIR, STORE_FILE, Patience, last_line, launch
from threefold.train.watchdog import FAILURE_FILE, process_state

WORLD = 3
DUMMY = Path(__file__).with_name("dummy_rank.py")
SHORT_S = 2.5  # a timeout to wait for, yet longer than a busy machine delays a heartbeat
IMPATIENT = Patience(poll_s=0.02, report_s=1.0, kill_s=1.0, stall_margin_s=1.0)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")


def command(behaviour: str, run_dir: Path, timeout_s: float) -> list[str]:
    return [sys.executable, str(DUMMY), behaviour, str(run_dir), str(timeout_s)]


def run(behaviour: str, run_dir: Path, timeout_s: float = 30.0) -> int:
    return launch(
        command(behaviour, run_dir, timeout_s), run_dir, WORLD, timeout_s=timeout_s, patience=IMPATIENT
    )  # fmt: skip


def failure(behaviour: str, run_dir: Path, timeout_s: float = 30.0) -> str:
    with pytest.raises(WorkerError) as caught:
        run(behaviour, run_dir, timeout_s)
    assert_no_process_is_left(run_dir)
    return str(caught.value)


def assert_no_process_is_left(run_dir: Path) -> None:
    board = ActivityBoard.open(run_dir / BOARD_FILE)
    for activity in board.read_all():
        assert activity.pid == 0 or process_state(activity.pid) == "gone"


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


# ---------------------------------------------------------------------------------------------------------------------
# In order


def test_all_finish(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("finish", tmp_path) == 0
    assert capfd.readouterr().out == "hello from rank 0\n"
    assert (tmp_path / LOG_DIR / "rank1.stdout.log").read_text() == "hello from rank 1\n"
    assert_no_process_is_left(tmp_path)


def test_a_job_that_a_rank_ended_early_is_not_called_done(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A signal may reach a rank alone; all ranks then end after the same step, in order."""
    assert run("finish early", tmp_path) == 128 + signal.SIGTERM
    errors = capfd.readouterr().err
    assert f"a rank got a signal to stop, so the job stopped after step 12; metrics are in {tmp_path}" in errors


def test_ranks_get_their_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert run("report environment", tmp_path) == 0
    for rank in range(WORLD):
        assert last_line(tmp_path / LOG_DIR / f"rank{rank}.stderr.log") == f"{rank} 3 {rank} 3 5 lo"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_cpu_ranks_use_freed_memory_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pages() -> int:
        assert run("report pages", tmp_path) == 0
        return int(last_line(tmp_path / LOG_DIR / "rank0.stderr.log"))

    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    kept = pages()
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.perturb=0")  # what the user has set is left alone
    assert 5 * kept < pages()


def test_leftovers_of_an_earlier_job_are_removed(tmp_path: Path) -> None:
    (tmp_path / LOG_DIR).mkdir()
    for leftover in (tmp_path / STORE_FILE, tmp_path / FAILURE_FILE, tmp_path / LOG_DIR / "rank7.stderr.log"):
        leftover.write_text("old")
    (tmp_path / LOG_DIR / "thesis.txt").write_text("mine")
    assert run("finish", tmp_path) == 0
    assert (tmp_path / LOG_DIR / "thesis.txt").read_text() == "mine"
    assert not (tmp_path / STORE_FILE).exists()
    assert not (tmp_path / FAILURE_FILE).exists()
    assert not (tmp_path / LOG_DIR / "rank7.stderr.log").exists()


# ---------------------------------------------------------------------------------------------------------------------
# A rank dies


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    text = failure("killed", tmp_path)
    assert text.startswith("rank 1 (dp 1, pp 0, tp 0; pid ")
    assert "was killed by signal 9 (SIGKILL) at step 12 in action 0B1, stage 0, microbatch 1" in text
    assert f"log: {tmp_path / LOG_DIR / 'rank1.stderr.log'}" in text


def test_peers_that_lost_a_killed_rank_are_not_the_cause(tmp_path: Path) -> None:
    text = failure("killed, peers lose it", tmp_path)
    assert text.startswith("rank 1 (dp 1, pp 0, tp 0; pid ")
    assert "ranks 0, 2 lost it and ended too" in text


def test_an_exception_is_named_and_its_traceback_stays_in_the_log(tmp_path: Path) -> None:
    text = failure("raise, peers lose it", tmp_path)
    assert text.startswith("rank 1 (dp 1, pp 0, tp 0; pid ")
    assert "failed at step 12 in action 0B1" in text
    assert "RuntimeError: the loss is not a number" in text
    assert "ranks 0, 2 lost it and ended too" in text
    assert "Traceback" not in text
    assert "Traceback" in (tmp_path / LOG_DIR / "rank1.stderr.log").read_text()


def test_a_rank_that_noted_its_failure_is_quoted(tmp_path: Path) -> None:
    assert "WorkerError: labels do not match" in failure("noted failure", tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# A rank hangs


@pytest.mark.parametrize(("behaviour", "words"), [("stopped", "is stopped"), ("sleep", "has not moved for")])
def test_a_rank_that_hangs_is_named(behaviour: str, words: str, tmp_path: Path) -> None:
    text = failure(behaviour, tmp_path, timeout_s=SHORT_S)
    assert text.startswith("the job hung, and was ended:\nrank 1 (dp 1, pp 0, tp 0) ")
    assert words in text
    assert "at step 12 in action 0B1, stage 0, microbatch 1" in text
    assert "ranks 0, 2 wait for it in all_reduce over dp[0,1,2]" in text


def test_a_job_without_a_rank_that_could_speak_is_ended_by_the_launcher(tmp_path: Path) -> None:
    text = failure("all stopped", tmp_path, timeout_s=SHORT_S)
    assert text.startswith("the job hung, and was ended:\n")
    assert "is stopped" in text
    assert not (tmp_path / FAILURE_FILE).exists()


# ---------------------------------------------------------------------------------------------------------------------
# The launcher gets a signal


LAUNCH = """
import sys
from pathlib import Path
from threefold.errors import WorkerError
from threefold.train.launcher import Patience, launch
patience = Patience(poll_s=0.02, report_s=0.5, kill_s=1.0, stall_margin_s=1.0)
sys.exit(launch(sys.argv[2:], Path(sys.argv[1]), 3, timeout_s=60.0, patience=patience))
"""


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def start(behaviour: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(tmp_path), *command(behaviour, tmp_path, 60.0)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        processes.append(process)
        wait_until(lambda: all_ready(tmp_path))
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def all_ready(run_dir: Path) -> bool:
    """Every rank has installed its handler: rank 0 prints to the terminal, so its note on the board must do."""
    board = run_dir / BOARD_FILE
    logs = [run_dir / LOG_DIR / f"rank{rank}.stdout.log" for rank in range(1, WORLD)]
    if not all(log.exists() and "ready" in log.read_text() for log in logs):
        return False
    return ActivityBoard.open(board).read(0).action != ""


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ranks_finish_their_step_when_asked_to_stop(
    signum: signal.Signals, status: int, launched: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = launched("finish step on signal")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signum)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status
    assert f"stopped after step 13; metrics are in {tmp_path}/metrics.jsonl" in errors
    assert "Traceback" not in errors
    states = {activity.state for activity in ActivityBoard.open(tmp_path / BOARD_FILE).read_all()}
    assert states == {State.DONE}


def test_a_second_request_ends_the_job_at_once(
    launched: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = launched("ignore signal")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped in step 12" in errors
    assert_no_process_is_left(tmp_path)


def test_ranks_that_can_not_stop_in_order_yet(launched: Callable[[str], subprocess.Popen[str]], tmp_path: Path) -> None:
    """A rank that has no handler yet dies of the signal. That is what the user wanted, not a failure."""
    process = launched("die while starting on signal")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert_no_process_is_left(tmp_path)


def test_a_killed_launcher_leaves_no_orphans(launched: Callable[[str], subprocess.Popen[str]], tmp_path: Path) -> None:
    process = launched("ignore signal")
    pids = [activity.pid for activity in ActivityBoard.open(tmp_path / BOARD_FILE).read_all()]
    assert all(process_state(pid) == "" for pid in pids)
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: all(process_state(pid) == "gone" for pid in pids))


# ---------------------------------------------------------------------------------------------------------------------


def test_the_last_line_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_line(log) == ""
    log.write_text("Traceback\n  File\nRuntimeError: no\n\n")
    assert last_line(log) == "RuntimeError: no"
