"""Finds the root cause among ranks that ended badly: the one that was killed or raised, not those that then lost it."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from threefold.parallel.activity import Activity, State
from threefold.train.watchdog import EXIT_HANG, Diagnosis, describe_work

# What gloo, NCCL and the store say when a peer has gone. A rank that says so is a victim.
_LOST_PEER = re.compile(
    r"connection (closed|reset|refused|was likely closed)|closed by (remote )?peer|broken pipe|socket (closed|timeout)"
    r"|a peer died|remote process exited|connect(ing)? to .* (failed|timed out)|timed out waiting",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Exit:
    """How one rank ended: its exit status (negative: the signal that killed it), its log, the last line in it."""

    rank: int
    code: int
    log: Path
    last_line: str = ""


class Evidence(IntEnum):
    """How surely an exit is a cause of the others; the lowest number is the surest."""

    KILLED = 0  # by a signal from outside, or by a fault of its own memory
    HANG = 1  # its watchdog ended it, and wrote down who was to blame
    RAISED = 2  # it raised an error of its own
    ABORTED = 3  # it called abort(), which communication libraries do when a peer is lost
    LOST_PEER = 4  # it only lost its connection


def explain_exits(exits: Sequence[Exit], activities: Mapping[int, Activity], hang: Diagnosis | None) -> str:
    """The root cause in words, for ranks that ended with a status other than 0.

    ``exits`` are in the order in which they were seen; ``activities`` are the last notes of all ranks; ``hang`` is the
    diagnosis that a watchdog wrote, if one did.
    """
    cause = min(exits, key=lambda exit_: _order(exit_, activities))
    if _evidence(cause, activities) is Evidence.HANG and hang is not None:
        return f"the job hung, and was ended:\n{hang.text}"
    victims = sorted(exit_.rank for exit_ in exits if exit_ is not cause and _is_victim(exit_, activities))
    lines = [f"{_who(cause, activities)} {_what(cause, activities)}"]
    if victims:
        lines.append(f"{'ranks' if len(victims) > 1 else 'rank'} {', '.join(map(str, victims))} lost it and ended too")
    lines.append(f"log: {cause.log}")
    return "\n".join(lines)


def _order(exit_: Exit, activities: Mapping[int, Activity]) -> tuple[int, float]:
    """Surest evidence first; among equals, the rank that noted its failure first."""
    activity = activities.get(exit_.rank, Activity(exit_.rank))
    return _evidence(exit_, activities), activity.since_s if activity.state is State.FAILED else float("inf")


def _evidence(exit_: Exit, activities: Mapping[int, Activity]) -> Evidence:
    if exit_.code == -signal.SIGABRT:
        return Evidence.ABORTED
    if exit_.code < 0:
        return Evidence.KILLED
    if exit_.code == EXIT_HANG:
        return Evidence.HANG
    return Evidence.LOST_PEER if _LOST_PEER.search(_message(exit_, activities)) else Evidence.RAISED


def _is_victim(exit_: Exit, activities: Mapping[int, Activity]) -> bool:
    return _evidence(exit_, activities) in (Evidence.ABORTED, Evidence.LOST_PEER)


def _who(exit_: Exit, activities: Mapping[int, Activity]) -> str:
    activity = activities.get(exit_.rank)
    if activity is None or not activity.pid:
        return f"rank {exit_.rank}"
    return f"rank {exit_.rank} ({activity.place}; pid {activity.pid})"


def _what(exit_: Exit, activities: Mapping[int, Activity]) -> str:
    activity = activities.get(exit_.rank)
    where = describe_work(activity) if activity and activity.pid else "before it could say what it does"
    if exit_.code < 0:
        return f"was killed by signal {-exit_.code} ({_signal_name(-exit_.code)}) {where}{_hint(exit_)}"
    return f"failed {where}: {_message(exit_, activities) or f'exit status {exit_.code}'}"


def _message(exit_: Exit, activities: Mapping[int, Activity]) -> str:
    activity = activities.get(exit_.rank)
    return (activity.message if activity else "") or exit_.last_line


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _hint(exit_: Exit) -> str:
    if exit_.code == -signal.SIGABRT and exit_.last_line:  # a library that calls abort() says why
        return f": {exit_.last_line}"
    # Said because it is the usual cause, and nothing else tells: the kernel writes it only to its own log.
    return ". If nobody sent it, the machine probably ran out of memory" if exit_.code == -signal.SIGKILL else ""
