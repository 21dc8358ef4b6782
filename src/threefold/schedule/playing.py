"""Builds a schedule by playing it: whenever a rank is free, the builder decides what it does next.

The play is the simulator's: a result leaves when it is ready, a link carries one transfer at a time in each direction,
and ranks compute meanwhile. Every stage runs F, I and W each in the order of the microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from threefold.schedule.actions import Action, Kind
from threefold.schedule.making import make_schedule
from threefold.schedule.schedule import Placement, Schedule

SLACK = 1e-9
"""Sums of memory that differ by this share are equal."""


@dataclass(frozen=True)
class Durations:
    """How long everything takes, stage by stage, in one unit of time; B takes I and W together.

    ``transfer[i]`` is between stage i and stage i + 1, either way. ``after`` is what a rank does for the stage when all
    its passes are done. ``held`` is what a microbatch keeps on a stage from F to the end of B or W, in one unit of
    memory.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    transfer: tuple[float, ...]
    after: tuple[float, ...]
    held: tuple[float, ...]

    @classmethod
    def uniform(
        cls, num_stages: int, forward: float = 1.0, input_grad: float = 1.0, weight_grad: float = 1.0
    ) -> Durations:
        """Equal stages that each hold 1 for a microbatch, with free transfers; the defaults are unit costs."""
        every = [(value,) * num_stages for value in (forward, input_grad, weight_grad)]
        nothing, one = (0.0,) * num_stages, (1.0,) * num_stages
        return cls(*every, transfer=nothing[1:], after=nothing, held=one)

    @property
    def num_stages(self) -> int:
        """Stages over all ranks."""
        return len(self.forward)


@dataclass(frozen=True)
class Played:
    """A schedule that was built, and when the last rank has done all it has to."""

    schedule: Schedule
    length: float


class Builder:
    """One play. Times and counts are plain lists by rank or stage, since a search plays thousands of actions."""

    def __init__(
        self, num_microbatches: int, durations: Durations, limits: Sequence[float], placement: Placement
    ) -> None:
        self.m, self.num_ranks, self.num_stages = num_microbatches, len(limits), durations.num_stages
        self.durations, self.placement = durations, placement
        self.rank_of = [placement.rank_of(stage, self.num_ranks) for stage in range(self.num_stages)]
        self.stages = [[s for s in range(self.num_stages) if self.rank_of[s] == r] for r in range(self.num_ranks)]
        self.limits = [limit * (1 + SLACK) for limit in limits]
        # Of each stage, how many of F, I and W are done, and when the inputs of F and I are there.
        self.forwards, self.inputs, self.weights = ([0] * self.num_stages for _ in range(3))
        self.input_at: list[list[float]] = [[] for _ in range(self.num_stages)]
        self.input_at[0] = [0.0] * num_microbatches
        self.gradient_at: list[list[float]] = [[] for _ in range(self.num_stages)]
        self.free = [0.0] * self.num_ranks
        self.live = [0.0] * self.num_ranks
        self.link_free: dict[tuple[int, int], float] = {}
        self.rows: list[list[Action]] = [[] for _ in range(self.num_ranks)]
        self.events = [(0.0, rank) for rank in range(self.num_ranks)]

    def build(self) -> Played | None:
        """The schedule; None when the play ends before all is done."""
        while self.events:
            now, rank = heappop(self.events)
            if now >= self.free[rank]:
                chosen = self.choose(rank, now)
                if chosen is not None:
                    self._run(rank, now, *chosen)
        if sum(self.weights) < self.m * self.num_stages:
            return None
        num_chunks = self.num_stages // self.num_ranks
        schedule = make_schedule("searched", self.num_ranks, self.m, num_chunks, self.placement, self.rows.__getitem__)
        ends = (
            free + sum(self.durations.after[s] for s in stages)
            for free, stages in zip(self.free, self.stages, strict=True)
        )
        return Played(schedule, max(ends))

    def choose(self, rank: int, now: float) -> tuple[Kind, int] | None:
        """What the rank does now: kind and stage; None when it waits for its next event."""
        raise NotImplementedError

    def oldest_weights(self, rank: int) -> tuple[int | None, int]:
        """The stage of the weight gradient that has waited longest, None when none waits; and how many wait."""
        waiting = [s for s in self.stages[rank] if self.weights[s] < self.inputs[s]]
        number = sum(self.inputs[s] - self.weights[s] for s in waiting)
        return min(waiting, key=lambda s: (self.weights[s], -s), default=None), number

    def forward_is_ready(self, stage: int, now: float) -> bool:
        """Whether the input of the stage's next forward pass is there."""
        done, arrivals = self.forwards[stage], self.input_at[stage]
        return done < len(arrivals) and arrivals[done] <= now

    def backward_is_ready(self, stage: int, now: float) -> bool:
        """Whether the gradient for the stage's next input gradient is there."""
        done, arrivals = self.inputs[stage], self.gradient_at[stage]
        return done < len(arrivals) and arrivals[done] <= now

    def _run(self, rank: int, now: float, kind: Kind, stage: int) -> None:
        if kind is Kind.F:
            microbatch, duration = self.forwards[stage], self.durations.forward[stage]
            self.forwards[stage] += 1
            self.live[rank] += self.durations.held[stage]
        elif kind is Kind.I:
            microbatch, duration = self.inputs[stage], self.durations.input_grad[stage]
            self.inputs[stage] += 1
        else:
            microbatch, duration = self.weights[stage], self.durations.weight_grad[stage]
            self.weights[stage] += 1
            self.live[rank] -= self.durations.held[stage]
        self.rows[rank].append(Action(kind, stage, microbatch))
        self.free[rank] = end = now + duration
        if kind is not Kind.W:
            self._hand_on(kind, stage, end)
        heappush(self.events, (end, rank))

    def _hand_on(self, kind: Kind, stage: int, end: float) -> None:
        """The result reaches the stage that needs it."""
        if kind is Kind.F and stage == self.num_stages - 1:
            self.gradient_at[stage].append(end)
        elif kind is Kind.F:
            self._send(stage, stage + 1, self.durations.transfer[stage], end, self.input_at[stage + 1])
        elif stage > 0:
            self._send(stage, stage - 1, self.durations.transfer[stage - 1], end, self.gradient_at[stage - 1])

    def _send(self, stage: int, other: int, duration: float, end: float, arrivals: list[float]) -> None:
        here, there = self.rank_of[stage], self.rank_of[other]
        if here != there:
            end = max(end, self.link_free.get((here, there), 0.0)) + duration
            self.link_free[here, there] = end
        arrivals.append(end)
        heappush(self.events, (end, there))
