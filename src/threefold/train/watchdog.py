"""Never a silent wait: a thread in each rank that ends the job, and names who holds it up, when nothing moves any more.

Collectives block for as long as a peer is late, and a peer that is stopped, killed, or in the wrong collective is late
for ever. The backend's own timeout names the rank that *waits*. The activity board tells what all ranks do, so the rank
that is waited *for* can be named, with its stage, microbatch and action.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from threefold.parallel.activity import Activity, ActivityWriter, State

EXIT_HANG = 124
"""Exit status of a rank that its watchdog ended (the one that ``timeout(1)`` uses)."""

FAILURE_FILE = "failure.json"
"""The diagnosis of a hang, in the run directory, written by the first rank that made one."""

HEARTBEAT_S = 1.0

STARTING_S = 60.0
"""A rank that starts may take this long even where the timeout is shorter: importing and meeting take many seconds on
a busy machine, and tell nothing about how long a step may take."""

_LIVE = (State.STARTING, State.COMPUTING, State.WAITING)
_GROUP = re.compile(r"\[([\d, ]+)\]")
_PEER = re.compile(r"^(send to|receive from) rank (\d+)")


@dataclass(frozen=True)
class Diagnosis:
    """Why nothing moves: the ranks that hold the others up (none if the library itself is stuck), and the words."""

    culprits: tuple[int, ...]
    text: str


# ---------------------------------------------------------------------------------------------------------------------
# Diagnosis: pure functions of the board


def diagnose(
    activities: Sequence[Activity],
    now: float,
    timeout_s: float,
    processes: Mapping[int, str] = MappingProxyType({}),
) -> Diagnosis:
    """Name the ranks that hold the job up.

    ``now`` is ``time.monotonic()``; ``processes`` adds what the system knows about a rank's process, like ``stopped``.
    Call it when some rank has not moved for ``timeout_s``. From strongest to weakest evidence, the culprits are ranks

    1. without a heartbeat (stopped or killed), 2. that failed, 3. that ended or never started while others wait for
    them, 4. that others wait for and that do something else, 5. that wait in different collectives.
    """
    board = _Board(activities, now, timeout_s)
    found = board.silent() or board.failed() or board.blocking() or board.stuck_alone() or board.absent()
    if found:
        sentences = [_blame(board, activity, processes.get(activity.rank, "")) for activity in found]
        return Diagnosis(tuple(a.rank for a in found), _compose(sentences, board))
    return _mismatch(board)


class _Board:
    """The activities of all ranks at one moment, with the questions that a diagnosis asks."""

    def __init__(self, activities: Sequence[Activity], now: float, timeout_s: float) -> None:
        self.by_rank = {activity.rank: activity for activity in activities}
        self.now = now
        self.timeout_s = timeout_s
        # Well under the timeout, since a rank can be stopped a while after the others began to wait; well over the
        # heartbeat, since a busy machine delays it.
        self.silence_s = min(max(3 * HEARTBEAT_S, timeout_s / 2), timeout_s)

    def waiting(self) -> list[Activity]:
        return [activity for activity in self.by_rank.values() if activity.state is State.WAITING]

    def silent(self) -> list[Activity]:
        """Live ranks that show no sign of life."""
        return [activity for activity in self.by_rank.values() if self._is_silent(activity)]

    def failed(self) -> list[Activity]:
        """The rank that failed first; the failures of its peers are consequences."""
        failed = [activity for activity in self.by_rank.values() if activity.state is State.FAILED]
        return [min(failed, key=lambda activity: activity.since_s)] if failed else []

    def blocking(self) -> list[Activity]:
        """Ranks that do not wait themselves and that others wait for, directly or through a chain of waits."""
        reached = {rank for activity in self.waiting() for rank in self.waits_for(activity)}
        roots = [self.by_rank[rank] for rank in sorted(reached) if rank in self.by_rank]
        roots = [activity for activity in roots if activity.state is not State.WAITING]
        ended = [activity for activity in roots if activity.state in (State.DONE, State.ABSENT)]
        if ended:
            return ended
        # Of several that others wait for, those that have not moved for the timeout either; or else the slowest.
        late = [activity for activity in roots if self.now - activity.since_s > self.timeout_s]
        return late or sorted(roots, key=lambda activity: activity.since_s)[:1]

    def stuck_alone(self) -> list[Activity]:
        """Ranks that have not moved for the timeout although they wait for nobody."""
        return [
            activity
            for activity in self.by_rank.values()
            if activity.state in (State.STARTING, State.COMPUTING) and self.now - activity.since_s > self.timeout_s
        ]

    def absent(self) -> list[Activity]:
        """Ranks that never wrote a note: the last suspects, since none may have begun."""
        return [activity for activity in self.by_rank.values() if activity.state is State.ABSENT]

    def waits_for(self, activity: Activity) -> tuple[int, ...]:
        """The ranks that must still join the operation that ``activity`` waits in."""
        if activity.state is not State.WAITING:
            return ()
        return tuple(rank for rank in self.members(activity) if not self._joined(activity, self.by_rank.get(rank)))

    def behind(self, activity: Activity) -> set[int]:
        """The ranks that ``activity`` waits for, those that these wait for, and so on."""
        seen: set[int] = set()
        frontier = list(self.waits_for(activity))
        while frontier:
            rank = frontier.pop()
            if rank not in seen:
                seen.add(rank)
                frontier += self.waits_for(self.by_rank.get(rank, Activity(rank)))
        return seen

    def members(self, activity: Activity) -> tuple[int, ...]:
        """The other ranks of the operation that ``activity`` waits in."""
        peer = _PEER.match(activity.operation)
        if peer:
            return (int(peer[2]),)
        group = _GROUP.search(activity.operation)
        ranks = [int(rank) for rank in group[1].split(",")] if group else list(self.by_rank)
        return tuple(rank for rank in ranks if rank != activity.rank)

    def _is_silent(self, activity: Activity) -> bool:
        return activity.state in _LIVE and self.now - activity.heartbeat_s > self.silence_s

    def _joined(self, activity: Activity, other: Activity | None) -> bool:
        if other is None or other.state is not State.WAITING or other.step != activity.step or self._is_silent(other):
            return False
        mine, theirs = _PEER.match(activity.operation), _PEER.match(other.operation)
        if mine and theirs:
            return mine[1] != theirs[1] and int(theirs[2]) == activity.rank
        return other.operation == activity.operation


def _blame(board: _Board, activity: Activity, process: str) -> str:
    return f"{_name(activity)} {_offence(board, activity, process)}{_waiters(board, activity.rank)}"


def _offence(board: _Board, activity: Activity, process: str) -> str:
    idle_s = board.now - activity.since_s
    match activity.state:
        case State.ABSENT:
            return "never started"
        case State.DONE:
            return f"ended after step {activity.step} while others go on"
        case State.FAILED:
            return f"failed {describe_work(activity)}: {activity.message or 'see its log'}"
    silence_s = board.now - activity.heartbeat_s
    if silence_s > board.silence_s:
        what = f"its process {activity.pid} is {process}" if process else f"process {activity.pid} is stopped or killed"
        return f"has shown no sign of life for {silence_s:.0f} s ({what}): {describe_work(activity)}"
    if activity.state is State.STARTING:
        return f"has not finished starting after {idle_s:.0f} s"
    if idle_s <= board.timeout_s:
        return f"does something else: {describe_work(activity)}"
    return f"has not moved for {idle_s:.0f} s: {describe_work(activity)}"


def _waiters(board: _Board, culprit: int) -> str:
    """Who waits for the culprit, and in what: direct waiters by operation, then those that wait for them."""
    waiting = [activity for activity in board.waiting() if activity.rank != culprit]
    direct = [activity for activity in waiting if culprit in board.waits_for(activity)]
    parts = [
        f"{_ranks(a.rank for a in direct if a.operation == operation)} "
        f"{_verb('wait', [a for a in direct if a.operation == operation])} for it in {operation}"
        for operation in dict.fromkeys(activity.operation for activity in direct)
    ]
    behind = [activity for activity in waiting if activity not in direct and culprit in board.behind(activity)]
    if behind:
        parts.append(f"{_ranks(a.rank for a in behind)} {_verb('wait', behind)} behind")
    return "".join(f"; {part}" for part in parts)


def _mismatch(board: _Board) -> Diagnosis:
    """Everyone waits: for another machine, for each other in different collectives, or in one that is stuck."""
    waiting = board.waiting()
    elsewhere = {rank for activity in waiting for rank in board.waits_for(activity)} - set(board.by_rank)
    if elsewhere:
        head = f"{_ranks(elsewhere)}, on another machine, {'is' if len(elsewhere) == 1 else 'are'} waited for"
        return Diagnosis(tuple(sorted(elsewhere)), _compose([head], board))
    circle = [activity for activity in waiting if activity.rank in board.behind(activity)]
    if circle:
        pairs = "; ".join(f"rank {a.rank} in {a.operation} (wait {a.sequence}) at step {a.step}" for a in circle)
        head = f"{_ranks(a.rank for a in circle)} wait for each other in different collectives, none completes: {pairs}"
        return Diagnosis(tuple(a.rank for a in circle), _compose([head], board))
    joined = [activity for activity in waiting if not board.waits_for(activity)]
    operations = ", ".join(dict.fromkeys(activity.operation for activity in joined)) or "nothing"
    head = f"all its ranks have joined {operations} and it does not complete: the network or its library is stuck"
    return Diagnosis((), _compose([head], board))


def _compose(sentences: Iterable[str], board: _Board) -> str:
    return "\n".join([*sentences, activity_table(tuple(board.by_rank.values()), board.now)])


# ---------------------------------------------------------------------------------------------------------------------
# Words


def describe_work(activity: Activity) -> str:
    """What a rank does or did last: ``at step 7 in action 1F2, stage 1, microbatch 2, waiting in all_reduce ...``."""
    words = "before the first step" if activity.step is None else f"at step {activity.step}"
    words += f" in action {activity.action}" if activity.action else " between actions"
    if activity.stage is not None:
        words += f", stage {activity.stage}"
    if activity.microbatch is not None:
        words += f", microbatch {activity.microbatch}"
    if activity.operation:
        words += f", waiting in {activity.operation} (wait {activity.sequence})"
    return words


def activity_table(activities: Sequence[Activity], now: float) -> str:
    """What every rank does, one line a rank. Columns are padded so that a log file shows them aligned."""
    rows = [("rank", "place", "step", "action", "stage", "microbatch", "doing", "wait", "for")]
    rows += [_row(activity, now) for activity in activities]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(activity: Activity, now: float) -> tuple[str, ...]:
    def number(value: int | None) -> str:
        return "-" if value is None else str(value)

    return (
        str(activity.rank),
        activity.place or "-",
        number(activity.step),
        activity.action or "-",
        number(activity.stage),
        number(activity.microbatch),
        activity.operation or activity.state.value,
        str(activity.sequence),
        f"{now - activity.since_s:.1f} s" if activity.pid else "-",
    )


def _name(activity: Activity) -> str:
    return f"rank {activity.rank} ({activity.place})" if activity.place else f"rank {activity.rank}"


def _ranks(ranks: Iterable[int]) -> str:
    ordered = sorted(ranks)
    return f"rank{'s' if len(ordered) > 1 else ''} {', '.join(map(str, ordered))}"


def _verb(verb: str, subjects: Sequence[object]) -> str:
    return verb if len(subjects) > 1 else f"{verb}s"


# ---------------------------------------------------------------------------------------------------------------------
# The thread


class Watchdog:
    """Beats the heart of this rank and calls ``on_hang`` once if the rank does not move for ``timeout_s``.

    Not moving is to stay in one wait, or in one action without a wait. Use it as a context manager around the training.
    """

    def __init__(self, activity: ActivityWriter, timeout_s: float, on_hang: Callable[[Diagnosis], object]) -> None:
        self._activity = activity
        self._timeout_s = timeout_s
        self._on_hang = on_hang
        self._interval_s = min(HEARTBEAT_S, timeout_s / 4)
        self._ended = threading.Event()
        # A daemon, because a rank that ends by an exception must not wait for its watchdog.
        self._thread = threading.Thread(target=self._watch, name="threefold-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        last_note: object = None
        stalled_s, before = 0.0, time.monotonic()
        while not self._ended.wait(self._interval_s):
            self._activity.heartbeat()
            mine = self._activity.board.read(self._activity.rank)
            note, now = (mine.state, mine.sequence, mine.since_s), time.monotonic()
            # Count only time in which this process could run. Otherwise a job that was suspended as a whole (SIGSTOP, a
            # debugger) would be ended the moment it goes on.
            stalled_s = stalled_s + min(now - before, 2 * self._interval_s) if note == last_note else 0.0
            last_note, before = note, now
            if mine.state in _LIVE and stalled_s > patience_s(mine.state, self._timeout_s):
                self._report(now)
                return

    def _report(self, now: float) -> None:
        activities = self._activity.board.read_all()
        processes = {a.rank: state for a in activities if a.pid and (state := process_state(a.pid))}
        self._on_hang(diagnose(activities, now, self._timeout_s, processes))


def patience_s(state: State, timeout_s: float) -> float:
    """How long a rank in this state may stay as it is."""
    return max(timeout_s, STARTING_S) if state in (State.ABSENT, State.STARTING) else timeout_s


def end_process(run_dir: Path, rank: int) -> Callable[[Diagnosis], NoReturn]:
    """The ``on_hang`` of a real rank: write the diagnosis down, say it, and leave at once.

    The thread that trains is blocked inside the backend and can't raise, so nothing gentler than ``os._exit`` works.
    """

    def act(diagnosis: Diagnosis) -> NoReturn:
        write_failure(run_dir, diagnosis, reported_by=rank)
        print(f"rank {rank} ends the job, because it does not move:\n{diagnosis.text}", file=sys.stderr, flush=True)
        os._exit(EXIT_HANG)

    return act


def write_failure(run_dir: Path, diagnosis: Diagnosis, reported_by: int) -> bool:
    """Write ``failure.json`` unless another rank did; True if this one was first.

    Made by linking a finished file, so that a reader never sees half of it.
    """
    draft = run_dir / f".{FAILURE_FILE}.{reported_by}"
    draft.write_text(json.dumps({"kind": "hang", "reported_by": reported_by, **asdict(diagnosis)}, indent=1) + "\n")
    try:
        os.link(draft, run_dir / FAILURE_FILE)
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    return True


def read_failure(run_dir: Path) -> Diagnosis | None:
    """The diagnosis that a rank wrote before it ended the job, if one did."""
    try:
        stored = json.loads((run_dir / FAILURE_FILE).read_text())
    except FileNotFoundError:
        return None
    return Diagnosis(tuple(stored["culprits"]), stored["text"])


def process_state(pid: int) -> str:
    """``stopped``, ``gone``, or empty where the process runs or the system does not tell (Linux only)."""
    if not Path("/proc/self/stat").exists():
        return ""
    try:
        # The state letter follows the command name, which is in parentheses and may itself hold any character.
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    return {"T": "stopped", "t": "stopped by a debugger", "Z": "gone", "X": "gone"}.get(letter, "")
