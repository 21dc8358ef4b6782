"""Starts a process for each rank of one machine, watches over them, and says in one sentence why a job ended.

The ranks find each other through a file in the run directory, so nothing listens on the network. Every rank runs in a
session of its own: a terminal's Ctrl-C reaches this process alone, which then asks the ranks to finish their step.

Torch is imported only when processes are started: a rank calls `die_with_parent` first, before it imports torch.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from threefold.errors import WorkerError
from threefold.parallel.activity import ActivityBoard, State
from threefold.parallel.shared_files import PARENT_VARIABLE, sweep
from threefold.train.failures import Exit, explain_exits
from threefold.train.watchdog import FAILURE_FILE, Diagnosis, diagnose, patience_s, process_state, read_failure

if TYPE_CHECKING:
    from threefold.train.processes import Workers

BOARD_VARIABLE = "THREEFOLD_BOARD"
"""Environment variable of a rank: path of the activity board."""
STORE_VARIABLE = "THREEFOLD_STORE"
"""Environment variable of a rank: path of the file through which ranks find each other (a torch ``FileStore``)."""

MALLOC_TUNABLES = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in {
        "hugetlb": 1,  # ask for huge pages
        "mmap_max": 0,
        "trim_threshold": 2**31 - 1,
        "top_pad": 64 * 2**20,
        "tcache_count": 0,  # else a large aligned block that is freed loses some bytes, and does not fit again
    }.items()
)
"""What ``GLIBC_TUNABLES`` is for CPU ranks: memory that tensors free is kept and used again.

By default glibc takes every large tensor from the kernel and gives it back when it is freed, so that the kernel clears
the same pages again in every operation. CUDA's caching allocator does for GPUs what this does. Other C libraries, and
versions that do not know a name, ignore it. See the GNU C Library's manual, "Memory Allocation Tunables".
"""

BOARD_FILE = "activity.board"
STORE_FILE = "store"
LOG_DIR = "logs"

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A rank that dies because this process asked it to stop, before it could install its own handler.
_STOPPED_BY_US = frozenset({-signal.SIGINT, 128 + signal.SIGINT})


@dataclass(frozen=True)
class Patience:
    """How long the launcher waits, in seconds."""

    poll_s: float = 0.1
    report_s: float = 2.0  # after a rank ended badly, for the others to end by themselves and leave their reports
    kill_s: float = 3.0  # between SIGTERM and SIGKILL
    stall_margin_s: float = 15.0  # over the watchdogs' timeout, before the launcher does their work


def launch(
    command: Sequence[str],
    run_dir: Path,
    world_size: int,
    *,
    timeout_s: float,
    cpu: bool = True,
    patience: Patience | None = None,
) -> int:
    """Run ``command`` as ``world_size`` ranks and wait for them; returns 0, or 128 + signal after an orderly stop.

    ``run_dir`` must exist; it gets the board, the store and ``logs/``. ``timeout_s`` is that of the ranks' watchdogs.
    Raises ``WorkerError`` with the root cause when a rank fails or hangs; no process is left then.
    """
    _clear_leftovers(run_dir)
    board = ActivityBoard.create(run_dir / BOARD_FILE, world_size)
    with _StopRequests() as requests:
        from threefold.train.processes import Workers

        environments = [_environment(rank, world_size, run_dir, cpu) for rank in range(world_size)]
        workers = Workers.start(command, environments, run_dir / LOG_DIR)
        supervisor = _Supervisor(workers, board, run_dir, timeout_s, patience or Patience(), requests)
        try:
            return supervisor.run()
        finally:
            workers.close(supervisor.patience.kill_s)
            (run_dir / STORE_FILE).unlink(missing_ok=True)
            sweep()


def die_with_parent() -> None:
    """Tie the life of this rank to that of its parent, so that a launcher that is killed leaves no orphans.

    Call it first. The kernel does it (Linux only); elsewhere orphans end with their next collective.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = os.environ.get(PARENT_VARIABLE)
    # The parent may have died before the call took effect; then somebody else has adopted this process.
    if parent is not None and os.getppid() != int(parent):
        os._exit(1)


def join_board(run_dir: Path) -> None:
    """Give a rank that torchrun started its place on the board of its machine, which its environment then names."""
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    first_rank = rank - local_rank  # torchrun numbers the ranks of a machine one after the other
    path = run_dir.resolve() / f"activity-from-rank{first_rank}.board"
    ActivityBoard.join(path, int(os.environ["LOCAL_WORLD_SIZE"]), first_rank).close()
    os.environ[BOARD_VARIABLE] = str(path)


def _clear_leftovers(run_dir: Path) -> None:
    """Remove what an earlier job left: a store with old addresses, above all, would make the ranks wait for ever."""
    for name in (STORE_FILE, FAILURE_FILE):
        (run_dir / name).unlink(missing_ok=True)
    (run_dir / LOG_DIR).mkdir(exist_ok=True)
    for log in (run_dir / LOG_DIR).glob("rank*.std*.log"):  # only what ranks wrote: the directory is the user's
        log.unlink()


def _environment(rank: int, world_size: int, run_dir: Path, cpu: bool) -> dict[str, str]:
    """What a rank gets on top of this process's environment. What the user has set is left alone."""
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "PYTHONUNBUFFERED": "1",  # a rank that is killed can't flush
        BOARD_VARIABLE: str(run_dir.resolve() / BOARD_FILE),
        STORE_VARIABLE: str(run_dir.resolve() / STORE_FILE),
        PARENT_VARIABLE: str(os.getpid()),
    }
    defaults = {"OMP_NUM_THREADS": str(max(1, num_cores() // world_size))}
    if cpu:
        defaults["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        defaults["GLIBC_TUNABLES"] = MALLOC_TUNABLES
    return environment | {name: value for name, value in defaults.items() if name not in os.environ}


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # respects the limits that a batch system sets
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _StopRequests:
    """Counts the requests to stop (Ctrl-C, SIGTERM, SIGHUP) instead of raising wherever this process happens to be."""

    def __init__(self) -> None:
        self.count = 0
        self.first: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _StopRequests:
        for signum in _STOP_SIGNALS:
            # `nohup` ignores SIGHUP so that a job outlives the terminal; that must stay so.
            if signum is not signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or signal.Signals(signum)


@dataclass
class _Supervisor:
    """Watches the ranks until the job has ended, in order or not."""

    workers: Workers
    board: ActivityBoard
    run_dir: Path
    timeout_s: float
    patience: Patience
    requests: _StopRequests
    _forwarded: bool = False
    _ended: dict[int, int] = field(default_factory=dict)  # rank -> exit status, in the order seen
    _notes: list[tuple[State, int, float]] = field(default_factory=list)  # the board as of the last look
    _checked_s: float = field(default_factory=time.monotonic)
    _stalled_s: float = 0.0

    def run(self) -> int:
        while not self._all_ended():
            if any(self._ended.values()):
                self._wait_for_reports()
                break
            self._obey_requests()
            if self.requests.count > 1:
                break
            self._check_for_stall()
            time.sleep(self.patience.poll_s)
        return self._conclude()

    def _all_ended(self) -> bool:
        for rank, code in self.workers.exit_codes().items():
            self._ended.setdefault(rank, code)
        return len(self._ended) == self.board.num_ranks

    def _wait_for_reports(self) -> None:
        deadline = time.monotonic() + self.patience.report_s
        while not self._all_ended() and time.monotonic() < deadline:
            time.sleep(self.patience.poll_s)

    def _obey_requests(self) -> None:
        """Ask the ranks, once, to finish their step. A second request ends them at once, which the caller does."""
        if self.requests.count and not self._forwarded:
            self._forwarded = True
            _say("stopping after this step; ask again (Ctrl-C) to end at once")
            self.workers.send(signal.SIGINT)

    def _check_for_stall(self) -> None:
        """Do the watchdogs' work where they can't: all ranks are stopped, or some never began."""
        now = time.monotonic()
        activities = self.board.read_all()
        notes = [(activity.state, activity.sequence, activity.since_s) for activity in activities]
        # As in the watchdog, time in which this process itself was suspended does not count.
        step_s = min(now - self._checked_s, 2 * self.patience.poll_s)
        self._stalled_s = self._stalled_s + step_s if notes == self._notes else 0.0
        self._notes, self._checked_s = notes, now
        limit_s = max(patience_s(activity.state, self.timeout_s) for activity in activities)
        if self._stalled_s > limit_s + self.patience.stall_margin_s:
            processes = {rank: state for rank, pid in self.workers.pids().items() if (state := process_state(pid))}
            diagnosis = diagnose(activities, now, self.timeout_s, processes)
            raise WorkerError(f"the job hung, and was ended:\n{diagnosis.text}")

    def _conclude(self) -> int:
        bad = {rank: code for rank, code in self._ended.items() if code}
        if self.requests.first is not None and self._stopped_in_order(bad):
            _say(self._stop_sentence())
            return 128 + self.requests.first
        if not bad:
            return self._conclude_in_order()
        raise WorkerError(self._explain(bad))

    def _conclude_in_order(self) -> int:
        """Ranks whose own process got a signal end as if all had, and then the job is not done either."""
        stopped = [activity for activity in self.board.read_all() if activity.stopped]
        if not stopped:
            return 0
        _say(f"a rank got a signal to stop, so the job {self._stop_sentence()}")
        return 128 + signal.SIGTERM  # which signal it was only that rank knows

    def _stopped_in_order(self, bad: Mapping[int, int]) -> bool:
        """The user got what they asked for. Peers of a rank that stopped while it started may have complained."""
        return self.requests.count > 1 or not bad or any(code in _STOPPED_BY_US for code in bad.values())

    def _stop_sentence(self) -> str:
        from threefold.train.metrics import METRICS_FILE  # brings rich along, which a rank does without

        steps = [activity.step for activity in self.board.read_all() if activity.step is not None]
        if not steps:
            return "stopped before the first step"
        when = "in" if self.requests.count > 1 else "after"
        return f"stopped {when} step {max(steps)}; metrics are in {self.run_dir / METRICS_FILE}"

    def _explain(self, bad: Mapping[int, int]) -> str:
        from threefold.train.processes import stderr_log

        logs = {rank: stderr_log(self.run_dir / LOG_DIR, rank) for rank in bad}
        exits = [Exit(rank, code, logs[rank], last_line(logs[rank])) for rank, code in bad.items()]
        activities = {activity.rank: activity for activity in self.board.read_all()}
        hang: Diagnosis | None = read_failure(self.run_dir)
        return explain_exits(exits, activities, hang)


def last_line(log: Path) -> str:
    """The last line of a log that is not empty: of a traceback, that is the error. Empty where there is none."""
    if not log.exists():
        return ""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
