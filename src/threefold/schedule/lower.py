"""Lowering: adds transfers, gradient sync and the optimizer step to a schedule of compute actions.

Why no link can deadlock: all compute actions and transfers of all ranks are put in *one* total order in which every
input is made before it is used (the order of the ends in a play), and each rank's row is the part of that order that
concerns it. The first event of the order that isn't done yet is therefore the next in the row of every rank that takes
part in it, so something can always proceed, even when a send blocks until its receive is reached and no link buffers.
Both ends of a link also see its transfers in the same order, as an in-order communicator (NCCL) demands.

A receive stands before the action that its rank is busy with when the data comes, often some actions before the one
that needs it: a runtime posts it there, so that the data travels while the rank computes, and waits for it only when
the input is used. The simulator plays transfers so, and finds that no receive is posted too late to matter.
"""

from __future__ import annotations

from dataclasses import replace

from threefold.schedule.actions import RECEIVES, SENDS, Action, Kind, partner, transfer_after
from threefold.schedule.check import require_legal, require_safe
from threefold.schedule.schedule import Schedule, compute_rows
from threefold.schedule.timing import UNIT_COSTS, start_times

TRANSFER = 0.5
"""Of the play that orders transfers, in forward passes. With less, ranks seem to be further than they are where
transfers take time, and post receives too late; with more, links carry what is needed later before what is needed
sooner."""


def lower(schedule: Schedule) -> Schedule:
    """``schedule`` with a SEND and RECV for every result that another rank needs, then SYNC and STEP on each row.

    A forward-only schedule gets transfers alone. A schedule that has transfers is obeyed as it stands. Raises
    ScheduleError when the schedule isn't legal, or its own transfers aren't safe.
    """
    if is_lowered(schedule):
        require_safe(schedule)
        return schedule
    require_legal(schedule)
    rows: list[list[Action]] = [[] for _ in range(schedule.num_ranks)]
    for rank, action in _total_order(schedule):
        rows[rank].append(action)
        if action.kind in (Kind.SEND_F, Kind.SEND_B):
            receive = partner(action)
            rows[schedule.stage_rank(receive.stage)].append(receive)
    if not schedule.is_forward_only:
        for row in rows:
            row += [Action(Kind.SYNC), Action(Kind.STEP)]
    return replace(schedule, rows=tuple(tuple(row) for row in rows))


def is_lowered(schedule: Schedule) -> bool:
    """Whether ``schedule`` has transfers."""
    return any(action.kind in SENDS | RECEIVES for row in schedule.rows for action in row)


def _total_order(schedule: Schedule) -> list[tuple[int, Action]]:
    """(rank, action) for every compute action, each followed by the send of its result, in the order in which they end.

    Time is that of a play with ``UNIT_COSTS`` and ``TRANSFER``. What ends at one time goes down the pipeline, then up
    it, so that who takes a result in has the receive posted before the action that it is busy with then.
    """
    rows = compute_rows(schedule)
    events: list[tuple[tuple[float, int, int], int, Action]] = []
    times = start_times(rows, schedule.num_stages, transfer=TRANSFER)
    for rank, (row, starts) in enumerate(zip(rows, times, strict=True)):
        for action, start in zip(row, starts, strict=True):
            assert start is not None, "a legal schedule starts every action"
            upwards, order = (0, action.stage) if action.kind is Kind.F else (1, -action.stage)
            events.append(((start + UNIT_COSTS[action.kind], upwards, order), rank, action))
    ordered: list[tuple[int, Action]] = []
    for _, rank, action in sorted(events, key=lambda event: event[0]):
        ordered.append((rank, action))
        send = transfer_after(action, schedule.num_stages)
        if send is not None and not schedule.is_local(send):
            ordered.append((rank, send))
    return ordered
