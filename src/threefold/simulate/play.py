"""Plays a schedule: every rank runs its row in order, and waits for what it needs.

One pass over the actions: a rank runs until it needs something that isn't there, and goes on when that has come. Every
time is a maximum of sums of costs, so a larger cost never makes a step shorter.

Transfers. A result leaves when it is ready. A link from one rank to another carries one transfer at a time, in the
order in which the rank sends; its other direction is free meanwhile, and so are both ranks: a receive is posted early
and waited for where its input is used. In a lowered schedule a transfer begins when both its send and its receive have
been reached; in one without transfers the receive is always posted in time. With ``blocking``, a send and its receive
are passed by both ranks together, and nobody computes meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from threefold.errors import ScheduleError
from threefold.schedule import Action, Kind, Schedule, lower, require_legal
from threefold.schedule.actions import COMPUTE, RECEIVES, SENDS
from threefold.simulate.costs import PerStage, StepCosts
from threefold.simulate.events import CODES
from threefold.simulate.record import build_timeline
from threefold.simulate.timeline import Timeline

Row = list[tuple[Kind, int]]
"""(kind, cell) of each action; the cell is stage × num_microbatches + microbatch."""

_INPUT, _GRADIENT, _KEPT = range(3)
"""What an action waits for: the stage's input, the gradient of its output, or what I left behind for W."""


def simulate(schedule: Schedule, costs: StepCosts, *, blocking: bool = False, step_together: bool = False) -> Timeline:
    """The timeline of ``schedule``, lowered or not, with ``costs``.

    ``blocking``: transfers occupy both ranks. ``step_together``: no rank updates its parameters before all have their
    gradients, as clipping by the global norm demands. Raises ScheduleError when it can't be played to its end,
    and ValueError when ``costs`` are for another number of stages.
    """
    if costs.num_stages != schedule.num_stages:
        raise ValueError(f"costs of {costs.num_stages} stages for a schedule of {schedule.num_stages}")
    if blocking and not _has_transfers(schedule):
        schedule = lower(schedule)
    player = _Blocking(schedule, costs) if blocking else _Overlapping(schedule, costs)
    player.run()
    return build_timeline(schedule, costs, player.done, blocking=blocking, step_together=step_together)


def step_s(schedule: Schedule, costs: StepCosts) -> float:
    """How long ``schedule`` takes: ``simulate(...).makespan_s`` without the timeline, which takes longer to make."""
    player = _Overlapping(schedule, costs)
    player.run()
    ends_s = list(player.free_s)
    for stage in range(0 if schedule.is_forward_only else schedule.num_stages):
        ends_s[player.rank_of[stage]] += costs.sync_s[stage] + costs.step_s[stage]
    return max(ends_s)


def _has_transfers(schedule: Schedule) -> bool:
    return any(action.kind in SENDS for row in schedule.rows for action in row)


class _Player:
    """The state of a play: where each rank is, when it is free, and what has been made.

    ``run`` looks the method of an action up in a table by kind. A method returns False when its action must wait; the
    rank is then woken by whoever makes what it waits for.
    """

    def __init__(self, schedule: Schedule, costs: StepCosts) -> None:
        self.schedule = schedule
        self.num_ranks, self.num_stages = schedule.num_ranks, schedule.num_stages
        self.num_microbatches = schedule.num_microbatches
        self.rank_of = [schedule.stage_rank(stage) for stage in range(self.num_stages)]
        self.p2p_s = costs.p2p_s
        self.cost_s: Mapping[Kind, PerStage] = {
            Kind.F: costs.forward_s,
            Kind.B: costs.backward_s,
            Kind.I: costs.input_grad_s,
            Kind.W: costs.weight_grad_s,
        }
        num_cells = self.num_stages * self.num_microbatches
        first_stage = [0.0] * self.num_microbatches
        self.ready_s: list[list[float | None]] = [[None] * num_cells for _ in (_INPUT, _GRADIENT, _KEPT)]
        self.ready_s[_INPUT][: self.num_microbatches] = first_stage
        self.sleepers: dict[tuple[object, int], int] = {}
        self.awake = list(range(self.num_ranks))
        self.position = [0] * self.num_ranks
        self.free_s = [0.0] * self.num_ranks
        self.done: list[tuple[int, int, float, float]] = []  # code, cell, start, end
        self.perform: Mapping[Kind, Callable[[int, Kind, int], bool]] = {
            **dict.fromkeys(COMPUTE, self._compute),
            **dict.fromkeys(SENDS, self._send),
            **dict.fromkeys(RECEIVES, self._receive),
        }

    def run(self) -> None:
        """Play all rows to their ends. Raises ScheduleError when that is not possible."""
        rows = [self._row(row) for row in self.schedule.rows]
        while self.awake:
            rank = self.awake.pop()
            row, position = rows[rank], self.position
            while position[rank] < len(row):
                kind, cell = row[position[rank]]
                if not self.perform[kind](rank, kind, cell):
                    break
                position[rank] += 1
        if any(position < len(row) for position, row in zip(self.position, rows, strict=True)):
            require_legal(self.schedule)
            raise ScheduleError(f"schedule {self.schedule.name!r} never ends\n{self.schedule.grid()}")

    def _row(self, row: tuple[Action, ...]) -> Row:
        return [
            (action.kind, action.stage * self.num_microbatches + action.microbatch)
            for action in row
            if action.kind in self.perform
        ]

    def _compute(self, rank: int, kind: Kind, cell: int) -> bool:
        waits_for = _INPUT if kind is Kind.F else _KEPT if kind is Kind.W else _GRADIENT
        ready_s = self.ready_s[waits_for][cell]
        if ready_s is None:
            self.sleepers[waits_for, cell] = rank
            return False
        stage = cell // self.num_microbatches
        start_s = max(self.free_s[rank], ready_s)
        end_s = start_s + self.cost_s[kind][stage]
        self.free_s[rank] = end_s
        self.done.append((CODES[kind], cell, start_s, end_s))
        self._hand_on(kind, stage, cell, end_s)
        return True

    def _hand_on(self, kind: Kind, stage: int, cell: int, end_s: float) -> None:
        """Give a result to whoever needs it: the next stage, or the same one in its backward pass."""
        if kind is Kind.F and stage == self.num_stages - 1:
            self._make(_GRADIENT, cell, end_s)
        elif kind is Kind.F:
            self._to_neighbour(Kind.SEND_F, cell, end_s)
        elif kind is not Kind.W and stage > 0:
            self._to_neighbour(Kind.SEND_B, cell, end_s)
        if kind is Kind.I:
            self._make(_KEPT, cell, end_s)

    def _to_neighbour(self, send: Kind, cell: int, end_s: float) -> None:
        """A neighbouring stage on the same rank has it at once."""
        here, there = self._ends(send, cell)
        if here == there:
            self._arrive(send, cell, end_s)

    def _ends(self, send: Kind, cell: int) -> tuple[int, int]:
        """The ranks of what ``cell`` sends: from where, to where."""
        stage = cell // self.num_microbatches
        return self.rank_of[stage], self.rank_of[stage + 1 if send is Kind.SEND_F else stage - 1]

    def _arrive(self, send: Kind, cell: int, time_s: float) -> None:
        """What stage and microbatch ``cell`` sent is there for the neighbour to use."""
        if send is Kind.SEND_F:
            self._make(_INPUT, cell + self.num_microbatches, time_s)
        else:
            self._make(_GRADIENT, cell - self.num_microbatches, time_s)

    def _make(self, what: int, cell: int, time_s: float) -> None:
        self.ready_s[what][cell] = time_s
        self._wake(what, cell)

    def _wake(self, what: object, cell: int) -> None:
        rank = self.sleepers.pop((what, cell), None)
        if rank is not None:
            self.awake.append(rank)

    def _transfer(self, send: Kind, cell: int, start_s: float) -> float:
        """Carry what ``cell`` sends; returns when it is there."""
        stage = cell // self.num_microbatches
        end_s = start_s + self.p2p_s[stage if send is Kind.SEND_F else stage - 1]
        self.done.append((CODES[send], cell, start_s, end_s))
        return end_s

    def _sent_cell(self, receive: Kind, cell: int) -> tuple[Kind, int]:
        """The send of a receive: its kind and cell."""
        if receive is Kind.RECV_F:
            return Kind.SEND_F, cell - self.num_microbatches
        return Kind.SEND_B, cell + self.num_microbatches

    def _send(self, rank: int, kind: Kind, cell: int) -> bool:
        raise NotImplementedError

    def _receive(self, rank: int, kind: Kind, cell: int) -> bool:
        raise NotImplementedError


class _Overlapping(_Player):
    """Transfers run beside the computation."""

    def __init__(self, schedule: Schedule, costs: StepCosts) -> None:
        super().__init__(schedule, costs)
        self.is_lowered = _has_transfers(schedule)
        self.link_free_s: dict[tuple[int, int], float] = {}
        self.posted_s: dict[tuple[Kind, int], float] = {}

    def _to_neighbour(self, send: Kind, cell: int, end_s: float) -> None:
        here, there = self._ends(send, cell)
        if here == there:
            self._arrive(send, cell, end_s)
        elif not self.is_lowered:
            self._carry(send, cell, end_s)

    def _carry(self, send: Kind, cell: int, posted_s: float) -> None:
        link = self._ends(send, cell)
        end_s = self._transfer(send, cell, max(posted_s, self.link_free_s.get(link, 0.0)))
        self.link_free_s[link] = end_s
        self._arrive(send, cell, end_s)

    def _send(self, rank: int, kind: Kind, cell: int) -> bool:
        return self._post((kind, cell), self.free_s[rank])

    def _receive(self, rank: int, kind: Kind, cell: int) -> bool:
        return self._post(self._sent_cell(kind, cell), self.free_s[rank])

    def _post(self, transfer: tuple[Kind, int], now_s: float) -> bool:
        """One end of a transfer is reached; it begins when the other is too."""
        other_s = self.posted_s.pop(transfer, None)
        if other_s is None:
            self.posted_s[transfer] = now_s
        else:
            self._carry(*transfer, max(now_s, other_s))
        return True


class _Blocking(_Player):
    """Both ranks of a transfer are occupied by it, from when both have reached it."""

    def __init__(self, schedule: Schedule, costs: StepCosts) -> None:
        super().__init__(schedule, costs)
        self.reached_s: dict[tuple[Kind, int], float] = {}
        self.passed_s: dict[tuple[Kind, int], float] = {}

    def _send(self, rank: int, kind: Kind, cell: int) -> bool:
        return self._meet(rank, (kind, cell))

    def _receive(self, rank: int, kind: Kind, cell: int) -> bool:
        return self._meet(rank, self._sent_cell(kind, cell))

    def _meet(self, rank: int, transfer: tuple[Kind, int]) -> bool:
        if transfer in self.passed_s:
            self.free_s[rank] = self.passed_s.pop(transfer)
            return True
        if transfer not in self.reached_s:
            self.reached_s[transfer] = self.free_s[rank]
            self.sleepers[transfer] = rank
            return False
        end_s = self._transfer(*transfer, max(self.free_s[rank], self.reached_s.pop(transfer)))
        self.free_s[rank] = self.passed_s[transfer] = end_s
        self._arrive(*transfer, end_s)
        self._wake(*transfer)
        return True
