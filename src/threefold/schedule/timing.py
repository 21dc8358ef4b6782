"""Plays a schedule with a cost for each kind of action; transfers take no time, or all the same.

With forward cost f, backward cost b, p stages and m microbatches, GPipe and 1F1B both take (m + p - 1)(f + b), of which
each rank idles (p - 1)(f + b): the bubble, a share (p - 1) / (m + p - 1) of the step (Huang et al. 2019, GPipe;
Narayanan et al. 2021, Megatron-LM). The naive schedule takes m p (f + b).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from threefold.schedule.actions import COMPUTE, Action, Kind, producers

UNIT_COSTS: Mapping[Kind, float] = MappingProxyType({Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0})
"""A backward pass does twice the work of a forward pass: gradients of the input and of the weights."""

Rows = Sequence[Sequence[Action]]


def start_times(
    rows: Rows, num_stages: int, costs: Mapping[Kind, float] = UNIT_COSTS, transfer: float = 0.0
) -> tuple[tuple[float | None, ...], ...]:
    """When each action of each row starts, None where it never can (a deadlock, or an input that nobody makes).

    A rank runs its row in order; an action waits for its inputs (``producers``) on whatever rank, and ``transfer``
    longer for those of another one. Kinds without a cost take no time and wait for nothing.
    """
    starts: list[list[float | None]] = [[None] * len(row) for row in rows]
    ends: dict[Action, tuple[float, int]] = {}  # and the rank
    position = [0] * len(rows)
    free_at = [0.0] * len(rows)
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(rows):
            while position[rank] < len(row):
                action = row[position[rank]]
                ready = _ready_at(action, num_stages, ends, rank, transfer)
                if ready is None:
                    break
                start = max(free_at[rank], ready)
                starts[rank][position[rank]] = start
                free_at[rank] = start + costs.get(action.kind, 0.0)
                ends[action] = free_at[rank], rank
                position[rank] += 1
                progress = True
    return tuple(tuple(row) for row in starts)


def _ready_at(
    action: Action, num_stages: int, ends: Mapping[Action, tuple[float, int]], rank: int, transfer: float
) -> float | None:
    """When the last input is on ``rank``; None while one is missing."""
    if action.kind not in COMPUTE:
        return 0.0
    ready = 0.0
    for alternatives in producers(action, num_stages):
        done = [ends[producer] for producer in alternatives if producer in ends]
        if not done:
            return None
        ready = max(ready, *(end + transfer * (maker != rank) for end, maker in done))
    return ready


def makespan(rows: Rows, num_stages: int, costs: Mapping[Kind, float] = UNIT_COSTS) -> float:
    """When the last action ends. Raises ValueError when the schedule never ends."""
    end = 0.0
    for row, starts in zip(rows, start_times(rows, num_stages, costs), strict=True):
        for action, start in zip(row, starts, strict=True):
            if start is None:
                raise ValueError(f"{action} never starts")
            end = max(end, start + costs.get(action.kind, 0.0))
    return end


def idle_share(rows: Rows, num_stages: int, costs: Mapping[Kind, float] = UNIT_COSTS) -> float:
    """The share of the step that the average rank computes nothing: the bubble. Raises ValueError as ``makespan``."""
    total = makespan(rows, num_stages, costs) * len(rows)
    busy = sum(costs.get(action.kind, 0.0) for row in rows for action in row)
    return 1 - busy / total if total else 0.0
