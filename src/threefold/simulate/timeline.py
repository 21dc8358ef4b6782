"""Timeline: what every rank of a pipeline did when, simulated or measured, and what that says.

Time of a rank = computing + optimizer step + idle; idle time is sorted by its cause. Columns are numpy arrays of equal
length, since a step of 64 ranks has hundreds of thousands of events; ``events`` are the same as objects.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from threefold.schedule import Action, Kind, Placement
from threefold.schedule.actions import COMPUTE, RECEIVES, SENDS
from threefold.simulate.events import CODES, KINDS, Event, Floats, Ints, Mask, sum_by
from threefold.simulate.idle import BUBBLE, COMMUNICATION, Cause, idle_by_cause
from threefold.simulate.path import critical_path


@dataclass(frozen=True, eq=False)
class MemoryCurve:
    """Bytes that one rank holds: ``held_bytes[i]`` from ``times_s[i]`` until ``times_s[i + 1]``."""

    times_s: Floats
    held_bytes: Floats

    @property
    def peak_bytes(self) -> float:
        """The most at any time."""
        return float(self.held_bytes.max())


@dataclass(frozen=True, eq=False)
class Timeline:
    """All events of one step, sorted by rank and then by time; time 0 is the start of the step.

    A transfer is two events with the same times: a send on one rank and a receive on the other. Unless
    ``blocking``, ranks compute meanwhile. ``memory`` has a curve a rank, or is empty where nothing is known.
    """

    name: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    rank: Ints
    code: Ints
    stage: Ints
    microbatch: Ints
    start_s: Floats
    end_s: Floats
    blocking: bool = False
    memory: tuple[MemoryCurve, ...] = field(default=(), repr=False)
    placement: Placement = Placement.LOOP

    @classmethod
    def from_events(
        cls,
        name: str,
        num_ranks: int,
        num_stages: int,
        num_microbatches: int,
        events: Sequence[Event],
        placement: Placement = Placement.LOOP,
    ) -> Timeline:
        """A timeline of events that were recorded, in any order."""
        ordered = sorted(events, key=lambda event: (event.rank, event.start_s))

        def column(values: list[int]) -> Ints:
            return np.array(values, dtype=np.int64)

        return cls(
            name,
            num_ranks,
            num_stages,
            num_microbatches,
            rank=column([event.rank for event in ordered]),
            code=column([CODES[event.kind] for event in ordered]),
            stage=column([event.action.stage for event in ordered]),
            microbatch=column([event.action.microbatch for event in ordered]),
            start_s=np.array([event.start_s for event in ordered], dtype=np.float64),
            end_s=np.array([event.end_s for event in ordered], dtype=np.float64),
            placement=placement,
        )

    def __len__(self) -> int:
        return len(self.code)

    def event(self, index: int) -> Event:
        """The event in row ``index`` of the columns."""
        action = Action(KINDS[self.code[index]], int(self.stage[index]), int(self.microbatch[index]))
        return Event(int(self.rank[index]), action, float(self.start_s[index]), float(self.end_s[index]))

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """All events as objects."""
        return tuple(self.event(index) for index in range(len(self)))

    def has_kind(self, kinds: Collection[Kind]) -> Mask:
        """Which events are of one of ``kinds``."""
        return np.isin(self.code, [CODES[kind] for kind in kinds])

    @cached_property
    def in_lane(self) -> Mask:
        """Which events occupy their rank, one after the other; transfers do only where they block."""
        beside = frozenset() if self.blocking else SENDS | RECEIVES
        return ~self.has_kind(beside)

    @property
    def makespan_s(self) -> float:
        """How long the step takes."""
        return float(self.end_s.max(initial=0.0))

    def seconds_of(self, kinds: Collection[Kind]) -> Floats:
        """Seconds that each rank spends in events of ``kinds``."""
        chosen = self.has_kind(kinds)
        return sum_by(self.rank[chosen], (self.end_s - self.start_s)[chosen], self.num_ranks)

    @property
    def compute_s(self) -> Floats:
        """Seconds that each rank computes microbatches."""
        return self.seconds_of(COMPUTE)

    @property
    def step_s(self) -> Floats:
        """Seconds of each rank's optimizer step."""
        return self.seconds_of((Kind.STEP,))

    @cached_property
    def idle_s(self) -> Mapping[Cause, Floats]:
        """Idle seconds of each rank by cause; with ``compute_s`` and ``step_s`` they add up to the makespan."""
        return idle_by_cause(self)

    @property
    def bubble_s(self) -> Floats:
        """Seconds that each rank idles because of the schedule or uneven stages."""
        return np.sum([self.idle_s[cause] for cause in BUBBLE], axis=0)

    @property
    def bubble_fraction(self) -> float:
        """The bubble's share of the step, over all ranks: (p - 1) / (m + p - 1) for 1F1B with equal stages."""
        return float(self.bubble_s.mean()) / self.makespan_s if self.makespan_s else 0.0

    @property
    def exposed_comm_s(self) -> Floats:
        """Seconds that each rank idles because of communication."""
        return np.sum([self.idle_s[cause] for cause in COMMUNICATION], axis=0)

    @property
    def peak_memory_bytes(self) -> Floats:
        """The most bytes that each rank holds at once; empty where memory is not known."""
        return np.array([curve.peak_bytes for curve in self.memory])

    @cached_property
    def critical_path(self) -> tuple[Event, ...]:
        """A chain of events that explains the makespan, first to last: each begins when the one before it ends.

        Shortening anything outside it doesn't shorten the step. A transfer appears as its send.
        """
        return critical_path(self)

    @property
    def critical_s(self) -> Mapping[Kind, float]:
        """Seconds of the critical path by kind of action."""
        found: dict[Kind, float] = {}
        for event in self.critical_path:
            found[event.kind] = found.get(event.kind, 0.0) + event.duration_s
        return found
