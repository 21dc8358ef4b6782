"""Judges schedules: is everything computed once, in a possible order, and can no link deadlock?"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from threefold.errors import ScheduleError
from threefold.schedule.actions import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    Kind,
    partner,
    producers,
    transfer_after,
)
from threefold.schedule.schedule import Schedule, compute_rows
from threefold.schedule.timing import start_times

MOST_TOLD = 20
"""Of more violations, an error tells the first ones; most follow from them."""


@dataclass(frozen=True)
class Violation:
    """One thing that is wrong with the row of ``rank``."""

    rank: int
    message: str

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.message}"


def check_schedule(schedule: Schedule) -> list[str]:
    """What is wrong with the compute actions, one line each; empty when the schedule is legal.

    Finds missing, duplicate and foreign actions, actions on the wrong rank, a backward before its forward, and ranks
    that would wait for each other for ever. Transfers are judged by ``check_lowered``.
    """
    return [str(violation) for violation in _compute_violations(schedule)]


def require_legal(schedule: Schedule) -> None:
    """Raises ScheduleError with all violations and the grid, offending rows marked ``>``, unless it is legal."""
    _raise(schedule, _compute_violations(schedule))


def check_lowered(schedule: Schedule) -> list[str]:
    """What is wrong with a lowered schedule, one line each; empty when it is proven safe to run.

    Besides ``check_schedule``: every needed transfer stands once on each end, after what makes it and before what needs
    it; both ends of every link have the same order; each row ends with SYNC and STEP; and the rows run to their end
    when every send blocks until its receive is reached (rendezvous), which is the strictest link there is.
    """
    return [str(violation) for violation in _lowered_violations(schedule)]


def require_safe(schedule: Schedule) -> None:
    """Raises ScheduleError as ``require_legal`` does unless the lowered ``schedule`` is proven safe to run."""
    _raise(schedule, _lowered_violations(schedule))


def _raise(schedule: Schedule, violations: list[Violation]) -> None:
    if violations:
        marked = tuple(sorted({violation.rank for violation in violations}))
        text = "\n".join(f"  {violation}" for violation in violations[:MOST_TOLD])
        if len(violations) > MOST_TOLD:
            text += f"\n  and {len(violations) - MOST_TOLD:,} more"
        raise ScheduleError(f"schedule {schedule.name!r} is illegal:\n{text}\n{schedule.grid(marked)}")


# Compute actions


def _compute_violations(schedule: Schedule) -> list[Violation]:
    if len(schedule.rows) != schedule.num_ranks:
        return [Violation(0, f"there are {len(schedule.rows)} rows for {schedule.num_ranks} ranks")]
    rows = compute_rows(schedule)
    num_cells, num_forwards = schedule.num_stages * schedule.num_microbatches, sum(map(len, rows))
    if num_cells > 2 * num_forwards + MOST_TOLD:  # telling each would take for ever where a header has a typing error
        return [Violation(0, f"{num_cells - num_forwards:,} or more of {num_cells:,} forward passes are missing")]
    found = [*_foreign(schedule, rows), *_not_once(schedule, rows), *_too_early(rows)]
    # Something missing always leaves others waiting; say only the cause.
    return found or list(_waiting_forever(schedule, rows))


def _foreign(schedule: Schedule, rows: tuple[tuple[Action, ...], ...]) -> Iterator[Violation]:
    for rank, row in enumerate(rows):
        for action in row:
            if action.stage >= schedule.num_stages or action.microbatch >= schedule.num_microbatches:
                sizes = f"{schedule.num_stages} stages and {schedule.num_microbatches} microbatches"
                yield Violation(rank, f"{action} is foreign to a schedule of {sizes}")
            elif schedule.is_forward_only and action.kind is not Kind.F:
                yield Violation(rank, f"{action} is foreign to a forward-only schedule")
            elif schedule.stage_rank(action.stage) != rank:
                yield Violation(rank, f"{action} belongs on rank {schedule.stage_rank(action.stage)}")


def _not_once(schedule: Schedule, rows: tuple[tuple[Action, ...], ...]) -> Iterator[Violation]:
    count = Counter(action for row in rows for action in row)
    for stage in range(schedule.num_stages):
        rank = schedule.stage_rank(stage)
        for microbatch in range(schedule.num_microbatches):
            for message in _count_faults(count, stage, microbatch, schedule.is_forward_only):
                yield Violation(rank, message)


def _count_faults(count: Counter[Action], stage: int, microbatch: int, forward_only: bool) -> Iterator[str]:
    """A stage runs each microbatch forward once and backward once: B, or I and W."""
    times = {kind: count[Action(kind, stage, microbatch)] for kind in (Kind.F, Kind.B, Kind.I, Kind.W)}
    for kind, number in times.items():
        if number > 1:
            yield f"{stage}{kind.value}{microbatch} stands {number} times"
    if not times[Kind.F]:
        yield f"{stage}F{microbatch} is missing"
    if forward_only:
        return
    if times[Kind.B] and (times[Kind.I] or times[Kind.W]):
        yield f"{stage}B{microbatch} stands beside I or W; a backward pass is either fused or split"
    elif not times[Kind.B] and not (times[Kind.I] or times[Kind.W]):
        yield f"{stage}B{microbatch} is missing"
    elif not times[Kind.B]:
        yield from (f"{stage}{kind.value}{microbatch} is missing" for kind in (Kind.I, Kind.W) if not times[kind])


def _too_early(rows: tuple[tuple[Action, ...], ...]) -> Iterator[Violation]:
    before = {Kind.B: Kind.F, Kind.I: Kind.F, Kind.W: Kind.I}
    for rank, row in enumerate(rows):
        first = {action: position for position, action in reversed(list(enumerate(row)))}
        for position, action in enumerate(row):
            if action.kind in before:
                needed = Action(before[action.kind], action.stage, action.microbatch)
                if first.get(needed, -1) > position:
                    yield Violation(rank, f"{action} stands before {needed}")


def _waiting_forever(schedule: Schedule, rows: tuple[tuple[Action, ...], ...]) -> Iterator[Violation]:
    starts = start_times(rows, schedule.num_stages)
    started = {
        a for row, times in zip(rows, starts, strict=True) for a, t in zip(row, times, strict=True) if t is not None
    }
    for rank, row in enumerate(rows):
        stuck = next((action for action in row if action not in started), None)
        if stuck is None:
            continue
        missing = [needs for needs in producers(stuck, schedule.num_stages) if not started.intersection(needs)]
        inputs = ", ".join(" or ".join(map(str, needs)) for needs in missing)
        yield Violation(rank, f"waits for ever at {stuck} (deadlock): {inputs} never runs")


# Lowered schedules


def _lowered_violations(schedule: Schedule) -> list[Violation]:
    found = _compute_violations(schedule)
    if found:
        return found
    found = [*_transfers_not_once(schedule), *_transfers_misplaced(schedule), *_bad_endings(schedule)]
    return [*found, *_link_order(schedule), *_rendezvous_deadlock(schedule)]


def _needed_transfers(schedule: Schedule) -> dict[Action, int]:
    """Every send and receive that the schedule needs, with its rank."""
    needed: dict[Action, int] = {}
    for rank, row in enumerate(compute_rows(schedule)):
        for action in row:
            send = transfer_after(action, schedule.num_stages)
            if send is not None and not schedule.is_local(send):
                needed[send] = rank
                needed[partner(send)] = schedule.stage_rank(partner(send).stage)
    return needed


def _transfers_not_once(schedule: Schedule) -> Iterator[Violation]:
    needed = _needed_transfers(schedule)
    of_rank: list[list[Action]] = [[] for _ in schedule.rows]
    for action, owner in needed.items():
        of_rank[owner].append(action)
    for rank, row in enumerate(schedule.rows):
        count = Counter(action for action in row if action.kind in SENDS | RECEIVES)
        for action, number in count.items():
            if needed.get(action) != rank:
                yield Violation(rank, f"{action} is foreign: no result that this rank sends or needs")
            elif number > 1:
                yield Violation(rank, f"{action} stands {number} times")
        for action in of_rank[rank]:
            if not count[action]:
                yield Violation(rank, f"{action} is missing; its other end is {partner(action)}")


def _transfers_misplaced(schedule: Schedule) -> Iterator[Violation]:
    for rank, row in enumerate(schedule.rows):
        position = {action: index for index, action in enumerate(row)}
        for index, action in enumerate(row):
            if action.kind in COMPUTE:
                yield from (Violation(rank, text) for text in _misplaced(schedule, action, index, position))


def _misplaced(schedule: Schedule, action: Action, index: int, position: dict[Action, int]) -> Iterator[str]:
    send = transfer_after(action, schedule.num_stages)
    if send is not None and position.get(send, index) < index:
        yield f"{send} stands before {action} has made what it sends"
    receive_kind = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}.get(action.kind)
    if receive_kind is not None:
        receive = Action(receive_kind, action.stage, action.microbatch)
        if position.get(receive, index) > index:
            yield f"{action} stands before {receive} brings its input"


def _bad_endings(schedule: Schedule) -> Iterator[Violation]:
    ending = [] if schedule.is_forward_only else [Kind.SYNC, Kind.STEP]
    for rank, row in enumerate(schedule.rows):
        at_end = [action.kind for action in row[len(row) - len(ending) :]]
        number = sum(action.kind in (Kind.SYNC, Kind.STEP) for action in row)
        if at_end != ending or number != len(ending):
            wanted = " ".join(kind.value for kind in ending) or "neither SYNC nor STEP"
            yield Violation(rank, f"the row must end with {wanted}, and have it nowhere else")


def _link_order(schedule: Schedule) -> Iterator[Violation]:
    """Both directions between two ranks are one in-order link, the strictest reading of a communicator."""
    links: defaultdict[tuple[int, int], dict[int, list[Action]]] = defaultdict(dict)
    for rank, row in enumerate(schedule.rows):
        for action in _transfers(row):
            peer = schedule.stage_rank(partner(action).stage)
            as_send = action if action.kind in SENDS else partner(action)
            links[min(rank, peer), max(rank, peer)].setdefault(rank, []).append(as_send)
    for (low, high), ends in sorted(links.items()):
        for place, (one, other) in enumerate(zip(ends.get(low, []), ends.get(high, []), strict=False)):
            if one != other:
                yield Violation(low, f"transfer {place} of the link to rank {high} is {one} here and {other} there")
                break


def _transfers(row: Iterable[Action]) -> list[Action]:
    return [action for action in row if action.kind in SENDS | RECEIVES]


def _rendezvous_deadlock(schedule: Schedule) -> Iterator[Violation]:
    """Runs the rows with links that buffer nothing: both ends of a transfer pass it together or not at all."""
    position = [0] * schedule.num_ranks
    waiting = list(range(schedule.num_ranks))
    while waiting:
        rank = waiting.pop()
        row = schedule.rows[rank]
        while position[rank] < len(row) and row[position[rank]].kind not in SENDS | RECEIVES:
            position[rank] += 1
        if position[rank] == len(row):
            continue
        here = row[position[rank]]
        peer = schedule.stage_rank(partner(here).stage)
        if position[peer] < len(schedule.rows[peer]) and schedule.rows[peer][position[peer]] == partner(here):
            position[rank] += 1
            position[peer] += 1
            waiting += [peer, rank]
    for rank, row in enumerate(schedule.rows):
        if position[rank] < len(row):
            here = row[position[rank]]
            yield Violation(
                rank, f"blocks for ever at {here} (action {position[rank]}): {_peer_state(schedule, position, here)}"
            )


def _peer_state(schedule: Schedule, position: list[int], here: Action) -> str:
    peer = schedule.stage_rank(partner(here).stage)
    row = schedule.rows[peer]
    state = f"is at {row[position[peer]]}" if position[peer] < len(row) else "has finished"
    return f"rank {peer} {state}, not at {partner(here)}"
