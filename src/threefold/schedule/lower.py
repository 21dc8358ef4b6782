"""Lowering: adds transfers, gradient sync and the optimizer step to a schedule of compute actions.

Why no link can deadlock: all compute actions and transfers of all ranks are put in *one* total order in which every
input is made before it is used (the order of the unit-cost play), and each rank's row is the part of that order that
concerns it. The first event of the order that isn't done yet is therefore the next in the row of every rank that takes
part in it, so something can always proceed, even when a send blocks until its receive is reached and no link buffers.
Both ends of a link also see its transfers in the same order, as an in-order communicator (NCCL) demands.

A receive stands where its data can be there first, often some actions before the one that needs it: a runtime posts it
there and waits for it only when the input is used.
"""

from __future__ import annotations

from dataclasses import replace

from threefold.schedule.actions import Action, Kind, partner, transfer_after
from threefold.schedule.check import require_legal
from threefold.schedule.schedule import Schedule, compute_rows
from threefold.schedule.timing import UNIT_COSTS, start_times


def lower(schedule: Schedule) -> Schedule:
    """``schedule`` with a SEND and RECV for every result that another rank needs, then SYNC and STEP on each row.

    A forward-only schedule gets transfers alone. Raises ScheduleError when the schedule isn't legal.
    """
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


def _total_order(schedule: Schedule) -> list[tuple[int, Action]]:
    """(rank, action) for every compute action and send, in the order of the play with ``UNIT_COSTS``.

    A compute action counts when it starts and a send when its result is ready; at equal times a send goes first, since
    the action that waits for it may start at that very time.
    """
    rows = compute_rows(schedule)
    events: list[tuple[tuple[float, int, int, int], int, Action]] = []
    for rank, (row, starts) in enumerate(zip(rows, start_times(rows, schedule.num_stages), strict=True)):
        for action, start in zip(row, starts, strict=True):
            assert start is not None, "a legal schedule starts every action"
            events.append(((start, 2, rank, 0), rank, action))
            send = transfer_after(action, schedule.num_stages)
            if send is not None and schedule.stage_rank(partner(send).stage) != rank:
                events.append(((start + UNIT_COSTS[action.kind], *_send_turn(send)), rank, send))
    return [(rank, action) for _, rank, action in sorted(events, key=lambda event: event[0])]


def _send_turn(send: Action) -> tuple[int, int, int]:
    """Which of the sends at one time goes first: a rank hands its own result on before it takes the next one in."""
    if send.kind is Kind.SEND_F:
        return 0, -send.stage, send.microbatch
    return 1, send.stage, send.microbatch
