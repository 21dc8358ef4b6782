"""Searches a schedule for given durations and a limit on what each rank may hold.

What to beat are the named schedules that keep within the limit; the search never answers with a longer one. Against
them it sets weaves of their orders and list schedules by a table of policies, and changes the best of these rank by
rank for as long as that helps. All is deterministic, and the work is bounded by a budget of actions played.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from threefold.errors import JobError, Problem
from threefold.schedule.greedy import Policy, greedy, policies
from threefold.schedule.making import make_schedule
from threefold.schedule.named import NAMED
from threefold.schedule.playing import SLACK, Durations
from threefold.schedule.schedule import Placement, Schedule, peak_held
from threefold.schedule.timing import makespan
from threefold.schedule.weave import Weave, play_weave, unwoven

SEARCHED = "searched"
"""The name of a schedule that was searched."""

BUDGET = 240_000
"""Actions that one search may play; a few seconds."""

QUICK_BUDGET = 60_000
"""The same where nothing was measured, which every process of a run searches for itself."""

MOST_STARTS = 4
"""Of the plans that were played, so many of the best are changed further."""

Evaluate = Callable[[Schedule], float]
"""How long a schedule takes."""


@dataclass(frozen=True)
class Found:
    """The best schedule, how long it takes, and the name of the schedule that it is, "searched" for none known."""

    schedule: Schedule
    length: float
    origin: str


def searched(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """The best schedule found for unit costs (F = I = W = 1 on each stage) in the memory of 1F1B on rank 0.

    Raises JobError for sizes below 1.
    """
    make_schedule(SEARCHED, num_ranks, num_microbatches, num_chunks, Placement.LOOP, lambda rank: ())
    durations = Durations.uniform(num_ranks * num_chunks)
    limits = default_limits(num_ranks, durations)

    def length(schedule: Schedule) -> float:
        return makespan(schedule.rows, schedule.num_stages)

    return search_schedule(num_microbatches, durations, limits, length, QUICK_BUDGET).schedule


def default_limits(num_ranks: int, durations: Durations) -> tuple[float, ...]:
    """The memory of 1F1B on its fullest rank, on every rank: p microbatches of a rank's stages."""
    most = max(sum(durations.held[rank::num_ranks]) for rank in range(num_ranks))
    return (num_ranks * most,) * num_ranks


def search_schedule(
    num_microbatches: int, durations: Durations, limits: Sequence[float], evaluate: Evaluate, budget: int = BUDGET
) -> Found:
    """The shortest schedule found whose rank r never holds more than ``limits[r]``, for stages of ``durations``.

    ``evaluate`` says how long a schedule takes, by the same durations: the last word on what is shorter. ``budget``
    bounds the actions that are played. Raises JobError naming the memory limit when a rank can't hold even one
    microbatch.
    """
    search = _Search(num_microbatches, durations, tuple(limits), evaluate, budget)
    if not search.placements:
        fix = "raise the limit to one microbatch of all stages of a rank, or cut the model into more stages"
        message = f"is less than one microbatch on a rank: {min(limits):g}"
        raise JobError([Problem("--memory-limit", message, fix)])
    return search.run()


def lower_bound(num_microbatches: int, durations: Durations, num_ranks: int, placement: Placement) -> float:
    """No schedule takes less: every rank waits for the first microbatch, and then has all its own work to do."""
    work, start = [0.0] * num_ranks, [0.0] * num_ranks  # by rank
    seen, arrives = set[int](), 0.0
    for stage in range(durations.num_stages):
        rank = placement.rank_of(stage, num_ranks)
        if stage and rank != placement.rank_of(stage - 1, num_ranks):
            arrives += durations.transfer[stage - 1]
        if rank not in seen:
            seen.add(rank)
            start[rank] = arrives
        arrives += durations.forward[stage]
        each = durations.forward[stage] + durations.input_grad[stage] + durations.weight_grad[stage]
        work[rank] += num_microbatches * each + durations.after[stage]
    return max(map(float.__add__, start, work))


Plan = tuple[Placement, Policy] | Weave
"""What a schedule is built from: a policy on a placement, or a weave."""


@dataclass(frozen=True)
class _Try:
    """A plan that was played, and how long its schedule takes."""

    length: float
    plan: Plan


class _Search:
    """The best so far, and what is left of the budget."""

    def __init__(
        self,
        num_microbatches: int,
        durations: Durations,
        limits: tuple[float, ...],
        evaluate: Evaluate,
        budget: int,
    ) -> None:
        self.m, self.durations, self.limits, self.evaluate = num_microbatches, durations, limits, evaluate
        self.num_ranks = len(limits)
        self.num_chunks = durations.num_stages // self.num_ranks
        candidates = tuple(Placement) if self.num_chunks > 1 else (Placement.LOOP,)
        self.placements = tuple(one for one in candidates if self._has_room(one))
        self.bound = min(lower_bound(self.m, durations, self.num_ranks, one) for one in candidates)
        self.num_actions = 3 * durations.num_stages * num_microbatches
        self.budget = budget
        self.best: Found | None = None
        self.named: list[Schedule] = []

    def _has_room(self, placement: Placement) -> bool:
        """Whether every rank can hold one microbatch of its stages."""
        held = [0.0] * self.num_ranks
        for stage, each in enumerate(self.durations.held):
            held[placement.rank_of(stage, self.num_ranks)] += each
        return all(one <= limit * (1 + SLACK) for one, limit in zip(held, self.limits, strict=True))

    def run(self) -> Found:
        """Offer the named schedules, play all plans, then change the best of them for as long as that helps."""
        # Zero bubble first: where it is as short as can be, nothing else is even built. One rank has no bubble.
        for named in NAMED.values() if self.num_ranks == 1 else reversed(list(NAMED.values())):
            if named.chunks in (None, self.num_chunks) and not self.is_optimal:
                self.named.append(named.build(self.num_ranks, self.m, self.num_chunks))
                self.offer(self.named[-1])
        tries = [found for plan in self.plans() if (found := self.play(plan)) is not None]
        tries.sort(key=lambda one: one.length)  # stable: of equal ones the first
        for start in tries[:MOST_STARTS]:
            self.bend(start)
        assert self.best is not None, "a policy finds something wherever one microbatch has room"
        return self.best

    def plans(self) -> Iterator[Plan]:
        """Where the search starts."""
        for schedule in self.named:
            yield from unwoven(schedule)
        table = policies(self.durations, self.limits, self.num_chunks)
        yield from ((placement, policy) for policy, placement in product(table, self.placements))

    def bend(self, best: _Try) -> None:
        """Change a plan rank by rank, taking every change that shortens its schedule, until none does."""
        better = True
        while better and not self.is_done:
            better = False
            for plan in self.neighbours(best.plan):
                tried = self.play(plan)
                if tried is not None and tried.length < best.length * (1 - SLACK):
                    best, better = tried, True
                    break

    def neighbours(self, plan: Plan) -> Iterator[Plan]:
        """Plans that treat one rank, or a span of ranks, a little differently."""
        if isinstance(plan, Weave):
            yield from plan.neighbours()
            return
        placement, policy = plan
        step = max(self.durations.held)
        for rank in range(self.num_ranks):
            for lag in (policy.lag[rank] + 1, policy.lag[rank] - 1):
                if lag >= 0 and lag != policy.lag[rank]:
                    yield placement, replace(policy, lag=_with(policy.lag, rank, lag))
            for cap in (policy.caps[rank] - step, policy.caps[rank] + step):
                if 0 < cap <= self.limits[rank]:
                    yield placement, replace(policy, caps=_with(policy.caps, rank, cap))

    @property
    def is_done(self) -> bool:
        """Whether the budget is used up, or nothing shorter is possible."""
        return self.is_optimal or (self.best is not None and self.budget < self.num_actions)

    @property
    def is_optimal(self) -> bool:
        """Whether nothing shorter is possible."""
        return self.best is not None and self.best.length <= self.bound * (1 + SLACK)

    def play(self, plan: Plan) -> _Try | None:
        """Play and offer what ``plan`` makes; None when there is no budget left, or it can't be built."""
        if self.is_done:
            return None
        self.budget -= self.num_actions
        if isinstance(plan, Weave):
            played = play_weave(self.m, self.durations, self.limits, plan)
        else:
            played = greedy(self.m, self.durations, self.limits, *plan)
        if played is None:
            return None
        if self.best is None or played.length < self.best.length * (1 - SLACK):
            self.offer(played.schedule)
        return _Try(played.length, plan)

    def offer(self, schedule: Schedule) -> None:
        """Keep ``schedule`` if it is the best so far and keeps within the limits."""
        for rank, limit in enumerate(self.limits):
            if peak_held(schedule, rank, self.durations.held) > limit * (1 + SLACK):
                return
        length = self.evaluate(schedule)
        if self.best is None or length < self.best.length * (1 - SLACK):
            self.best = Found(replace(schedule, name=SEARCHED), length, schedule.name)


def _with(values: tuple[float, ...], index: int, value: float) -> tuple[float, ...]:
    return (*values[:index], value, *values[index + 1 :])
