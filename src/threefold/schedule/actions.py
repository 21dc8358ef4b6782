"""The words of a pipeline schedule: what one rank does next.

Text of an action: stage, kind, microbatch, as in ``2F0`` (stage 2 runs the forward pass of microbatch 0).
``2SEND_F0``: stage 2 sends its output of microbatch 0 to stage 3, which does ``3RECV_F0``.
``3SEND_B0``: stage 3 sends the gradient of its input to stage 2, which does ``2RECV_B0``.
``SYNC`` and ``STEP`` have neither stage nor microbatch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What an action does."""

    F = "F"
    """Forward pass."""
    B = "B"
    """Full backward pass: I and W in one."""
    I = "I"  # noqa: E741 - the name that papers and grids use
    """Backward pass for the gradient of the stage's input only."""
    W = "W"
    """Backward pass for the gradients of the stage's weights only."""
    SEND_F = "SEND_F"
    """Sends the stage's output to the next stage."""
    RECV_F = "RECV_F"
    """Receives the stage's input from the previous stage."""
    SEND_B = "SEND_B"
    """Sends the gradient of the stage's input to the previous stage."""
    RECV_B = "RECV_B"
    """Receives the gradient of the stage's output from the next stage."""
    SYNC = "SYNC"
    """Finishes the reduction of gradients over replicas."""
    STEP = "STEP"
    """Updates the parameters."""


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
WHOLE_STEP = frozenset({Kind.SYNC, Kind.STEP})

_PATTERN = re.compile(r"(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)")


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a rank's row. ``stage`` and ``microbatch`` are -1 for SYNC and STEP."""

    kind: Kind
    stage: int = -1
    microbatch: int = -1

    def __str__(self) -> str:
        if self.kind in WHOLE_STEP:
            return self.kind.value
        return f"{self.stage}{self.kind.value}{self.microbatch}"


def parse_action(token: str) -> Action | None:
    """The action that ``token`` spells, or None when it spells none."""
    if token in WHOLE_STEP:
        return Action(Kind(token))
    match = _PATTERN.fullmatch(token)
    if match is None:
        return None
    stage, kind, microbatch = match.groups()
    return Action(Kind(kind), int(stage), int(microbatch))


def partner(action: Action) -> Action:
    """The other end of a transfer: the receive of a send and the send of a receive."""
    stage, microbatch = action.stage, action.microbatch
    match action.kind:
        case Kind.SEND_F:
            return Action(Kind.RECV_F, stage + 1, microbatch)
        case Kind.RECV_F:
            return Action(Kind.SEND_F, stage - 1, microbatch)
        case Kind.SEND_B:
            return Action(Kind.RECV_B, stage - 1, microbatch)
        case Kind.RECV_B:
            return Action(Kind.SEND_B, stage + 1, microbatch)
        case _:
            raise ValueError(f"{action} is no transfer")


def producers(action: Action, num_stages: int) -> tuple[tuple[Action, ...], ...]:
    """What a compute action needs: of each inner tuple, one action must have run before.

    A forward needs the previous stage's forward; a backward needs its own forward and the next stage's backward, fused
    (B) or split (I); a weight gradient needs its own input gradient, which left behind what it multiplies.
    """
    stage, microbatch = action.stage, action.microbatch
    needs: list[tuple[Action, ...]] = []
    if action.kind is Kind.F and stage > 0:
        needs.append((Action(Kind.F, stage - 1, microbatch),))
    if action.kind in (Kind.B, Kind.I):
        needs.append((Action(Kind.F, stage, microbatch),))
        if stage < num_stages - 1:
            needs.append((Action(Kind.B, stage + 1, microbatch), Action(Kind.I, stage + 1, microbatch)))
    if action.kind is Kind.W:
        needs.append((Action(Kind.I, stage, microbatch),))
    return tuple(needs)


def transfer_after(action: Action, num_stages: int) -> Action | None:
    """The send that carries a compute action's result to the neighbouring stage, None when nobody needs it."""
    if action.kind is Kind.F and action.stage < num_stages - 1:
        return Action(Kind.SEND_F, action.stage, action.microbatch)
    if action.kind in (Kind.B, Kind.I) and action.stage > 0:
        return Action(Kind.SEND_B, action.stage, action.microbatch)
    return None
