"""What one rank can know of its row of a schedule before it runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from threefold.schedule import Action, Kind, Schedule, partner
from threefold.schedule.actions import COMPUTE, SENDS

BACKWARD = frozenset({Kind.B, Kind.I, Kind.W})
WEIGHTS = frozenset({Kind.B, Kind.W})
"""After which a microbatch has left nothing on its stage."""

_ARRIVES_BY: Mapping[Kind, Kind] = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}


@dataclass(frozen=True)
class Row:
    """A row, and for each place in it: the F, B, I or W that comes next, and the sends that are over.

    ``completing`` are the places where a stage's gradients of the step become complete. ``settled`` are sends that the
    peer had received and used when it sent what has arrived there: waiting for them takes no time, and frees them.
    """

    actions: tuple[Action, ...]
    following: tuple[Action | None, ...]
    completing: frozenset[int]
    settled: tuple[tuple[Action, ...], ...]

    @property
    def splits_backward(self) -> bool:
        """Whether a backward pass runs as I and W."""
        return any(action.kind is Kind.I for action in self.actions)


def plan_row(schedule: Schedule, rank: int) -> Row:
    """The row of pipeline rank ``rank`` of a lowered ``schedule``."""
    row = schedule.rows[rank]
    return Row(row, tuple(following_compute(row)), completing_backwards(row), tuple(settled_sends(schedule, rank)))


def completing_backwards(row: Sequence[Action]) -> frozenset[int]:
    """The place of each stage's last B or W."""
    return frozenset({action.stage: index for index, action in enumerate(row) if action.kind in WEIGHTS}.values())


def following_compute(row: Sequence[Action]) -> list[Action | None]:
    """For each place the F, B, I or W that comes next after it."""
    following: list[Action | None] = []
    upcoming: Action | None = None
    for action in reversed(row):
        following.append(upcoming)
        upcoming = action if action.kind in COMPUTE else upcoming
    return following[::-1]


def settled_sends(schedule: Schedule, rank: int) -> list[tuple[Action, ...]]:
    """For each place the sends of this rank that are known to be over once that place's input has arrived.

    A peer runs its row in order. So when one of its sends has arrived here, it had used all that it received before.
    """
    position = {action: index for row in schedule.rows for index, action in enumerate(row)}
    open_sends: dict[int, list[Action]] = {}
    settled: list[tuple[Action, ...]] = []
    for action in schedule.rows[rank]:
        if action.kind in SENDS:
            open_sends.setdefault(schedule.stage_rank(partner(action).stage), []).append(action)
        arrives_by = _ARRIVES_BY.get(action.kind)
        receive = Action(arrives_by, action.stage, action.microbatch) if arrives_by else None
        if receive not in position:
            settled.append(())
            continue
        sent = partner(receive)
        mine = open_sends.get(schedule.stage_rank(sent.stage), [])
        settled.append(tuple(send for send in mine if _used_at(send, position) < position[sent]))
        open_sends[schedule.stage_rank(sent.stage)] = [send for send in mine if send not in settled[-1]]
    return settled


def _used_at(send: Action, position: Mapping[Action, int]) -> int:
    """Where in the peer's row what is sent gets used."""
    receive = partner(send)
    kinds = (Kind.F,) if send.kind is Kind.SEND_F else (Kind.B, Kind.I)
    users = (Action(kind, receive.stage, receive.microbatch) for kind in kinds)
    return next(position[user] for user in users if user in position)
