"""A pipeline schedule as one value, and its text form.

The simulator, the memory model and the runtime all read this value; there is no second definition of any schedule.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from threefold.errors import ScheduleError
from threefold.schedule.actions import COMPUTE, Action, Kind, parse_action, partner
from threefold.schedule.grid import format_grid
from threefold.schedule.timing import makespan

FORWARD_ONLY = "forward_only"
"""The name of the schedule that evaluates: forward passes alone."""

_HEADER = re.compile(r"(\w+) stages=(\d+) ranks=(\d+) microbatches=(\d+)(?: placement=(\w+))?")
_ROW = re.compile(r"rank (\d+):(.*)")


class Placement(StrEnum):
    """Which rank holds which stage, where a rank holds several."""

    LOOP = "loop"
    """Stages go round the ranks: rank r holds r, r + p, r + 2p, ..."""
    V = "v"
    """Stages go down the ranks and come back up: of two chunks, rank r holds r and 2p - 1 - r."""

    def rank_of(self, stage: int, num_ranks: int) -> int:
        """The rank that holds ``stage``."""
        turn, place = divmod(stage, num_ranks)
        return num_ranks - 1 - place if self is Placement.V and turn % 2 else place


@dataclass(frozen=True)
class Schedule:
    """What every rank of one pipeline does in one step; ``rows[rank]`` is done from left to right."""

    name: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    rows: tuple[tuple[Action, ...], ...]
    placement: Placement = Placement.LOOP

    @property
    def is_forward_only(self) -> bool:
        """Whether the schedule evaluates: it has no backward passes and no optimizer step."""
        return self.name == FORWARD_ONLY

    @property
    def num_chunks(self) -> int:
        """Stages of a rank; where they don't divide evenly, of the rank that has most."""
        return -(-self.num_stages // self.num_ranks)

    def stage_rank(self, stage: int) -> int:
        """The pipeline rank that holds ``stage``."""
        return self.placement.rank_of(stage, self.num_ranks)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that ``rank`` holds, in order: its chunks."""
        turns = range(0, self.num_stages, self.num_ranks)
        stages = (start + self.placement.rank_of(start + rank, self.num_ranks) for start in turns)
        return tuple(stage for stage in stages if stage < self.num_stages)

    def is_local(self, transfer: Action) -> bool:
        """Whether both ends of ``transfer`` are on one rank, so that nothing has to be sent."""
        return self.stage_rank(transfer.stage) == self.stage_rank(partner(transfer).stage)

    def to_text(self) -> str:
        """The text that ``parse_schedule`` reads back: a header, then one line a rank."""
        sizes = f"stages={self.num_stages} ranks={self.num_ranks} microbatches={self.num_microbatches}"
        if self.placement is not Placement.LOOP:
            sizes += f" placement={self.placement}"
        rows = [" ".join([f"rank {rank}:", *map(str, row)]) for rank, row in enumerate(self.rows)]
        return "\n".join([f"{self.name} {sizes}", *rows]) + "\n"

    def grid(self, marked: tuple[int, ...] = ()) -> str:
        """A time grid of the compute actions with F = 1 and B = 2 columns; ``marked`` ranks' rows begin with ``>``."""
        return format_grid(self.rows, self.num_stages, marked)

    def makespan(self, forward: float = 1.0, backward: float = 2.0) -> float:
        """How long the step takes when transfers are free and I and W are half a backward pass each."""
        costs = {Kind.F: forward, Kind.B: backward, Kind.I: backward / 2, Kind.W: backward / 2}
        return makespan(self.rows, self.num_stages, costs)


def peak_live_microbatches(schedule: Schedule, rank: int) -> int:
    """The most (stage, microbatch) pairs whose activations ``rank`` keeps at once, the one being computed included.

    Activations live from F until B, or until W where the backward pass is split. Theory: naive 1, GPipe m,
    1F1B min(m, p - rank). Evaluation frees each microbatch at once.
    """
    return int(peak_held(schedule, rank, (1,) * schedule.num_stages))


def peak_held(schedule: Schedule, rank: int, held: Sequence[float]) -> float:
    """The most that ``rank`` keeps at once, when a live microbatch takes ``held[stage]``."""
    live = peak = 0.0
    for action in schedule.rows[rank]:
        if action.kind is Kind.F:
            live += held[action.stage]
            peak = max(peak, live)
        if action.kind in (Kind.B, Kind.W) or (action.kind is Kind.F and schedule.is_forward_only):
            live -= held[action.stage]
    return peak


def compute_rows(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """The rows without transfers, SYNC and STEP."""
    return tuple(tuple(action for action in row if action.kind in COMPUTE) for row in schedule.rows)


def parse_schedule(text: str) -> Schedule:
    """The schedule that ``text`` spells, legal or not (``require_legal`` judges).

    Grammar: a header ``1f1b stages=4 ranks=4 microbatches=8`` (with ``placement=v`` at its end where stages go back up
    the ranks), then ``rank 0: 0F0 0F1 ...`` for every rank in order; ``#`` starts a comment and blank lines are
    skipped. Raises ScheduleError with the line number and the token.
    """
    lines = [(number, line.split("#", 1)[0].strip()) for number, line in enumerate(text.splitlines(), start=1)]
    lines = [(number, line) for number, line in lines if line]
    if not lines:
        raise ScheduleError(
            "the schedule is empty; it begins with a header like '1f1b stages=4 ranks=4 microbatches=8'"
        )
    header = _parse_header(*lines[0])
    rows = tuple(_parse_row(number, line, rank) for rank, (number, line) in enumerate(lines[1:]))
    if len(rows) != header.num_ranks:
        raise ScheduleError(f"line {lines[-1][0]}: {len(rows)} rows for ranks={header.num_ranks}; give one row a rank")
    return replace(header, rows=rows)


def _parse_header(number: int, line: str) -> Schedule:
    """The schedule of a header: it has no rows yet."""
    match = _HEADER.fullmatch(line)
    if match is None:
        expected = "'NAME stages=N ranks=N microbatches=N', with ' placement=v' where stages turn back"
        raise ScheduleError(f"line {number}: {line!r} is no header; it reads {expected}")
    num_stages, num_ranks, num_microbatches = (int(value) for value in match.groups()[1:4])
    if min(num_stages, num_ranks, num_microbatches) < 1:
        raise ScheduleError(f"line {number}: {line!r} has a size of 0; stages, ranks and microbatches are 1 or more")
    placement = match[5] or Placement.LOOP
    if placement not in list(Placement):
        raise ScheduleError(f"line {number}: placement={placement} is unknown; write {' or '.join(Placement)}")
    return Schedule(match[1], num_ranks, num_stages, num_microbatches, (), Placement(placement))


def _parse_row(number: int, line: str, rank: int) -> tuple[Action, ...]:
    match = _ROW.fullmatch(line)
    if match is None or int(match[1]) != rank:
        raise ScheduleError(f"line {number}: {line.split(':')[0]!r} where 'rank {rank}:' must stand")
    actions = []
    for token in match[2].split():
        action = parse_action(token)
        if action is None:
            allowed = "an action like 0F0, 1B3, 0SEND_F2, 1RECV_F2, SYNC or STEP"
            raise ScheduleError(f"line {number}: {token!r} is no action; allowed is {allowed}")
        actions.append(action)
    return tuple(actions)
