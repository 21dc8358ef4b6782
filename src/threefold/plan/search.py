"""The search: judge the tops of all ladders that can still win, step down only where memory demands it.

Branch and bound. A rung is judged when all rungs above it are too large for the device and none of them is slower than
the plans known so far; the others need no judgement, because stepping down never makes a step faster. Likely tops come
first, so that the plans known are good early; the time of a likely top without what depends on the ZeRO stage is a
lower bound for its siblings.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from threefold.cost.estimate import Estimates, estimate
from threefold.cost.strategies import Array, Strategies
from threefold.plan.order import NEAR, ranked, rounded
from threefold.plan.question import Question, Resort
from threefold.plan.reasons import Reason
from threefold.plan.rungs import on_rungs
from threefold.plan.space import Space, build_space

BATCH = 4096
"""Strategies judged at once: enough to amortise a call, few enough to stay in the cache."""

NUM_MISSES = 3


class Status(IntEnum):
    """What is known about a rung."""

    OPEN = 0
    FITS = 1
    TOO_LARGE = 2
    TOO_LARGE_AND_SLOWER = 3
    DOMINATED = 4
    SLOWER = 5


@dataclass(frozen=True)
class Found:
    """The best strategy of each of the best layouts, best first, and what became of the other candidates.

    ``misses`` are, where nothing fits, the smallest strategies of the layouts that come nearest, nearest first.
    """

    strategies: Strategies
    misses: Strategies
    searched: int
    feasible: int
    rejected: Counter[Reason]


def seek(question: Question, top: int) -> tuple[Question, Found | None]:
    """Search with one resort after the other until something fits; the question says which resort that took.

    Where nothing fits, the last resort's result; None where no candidate is legal.
    """
    found = None
    for resort in Resort:
        question = replace(question, resort=resort)
        space = build_space(question)
        if space.legal.any():
            found = search(question, space, top)
            if len(found.strategies):
                break
    return question, found


def search(question: Question, space: Space, top: int) -> Found:
    """The ``top`` best layouts with their best settings."""
    climber = _Climber(question, space, top)
    likely = _likely(space.tops)
    climber.climb(likely)
    climber.climb(climber.can_win(likely))
    return climber.found()


def _likely(tops: Strategies) -> Array:
    """The tops to begin with: with sequence parallelism where there is tensor parallelism, and ZeRO stage 1."""
    stage = np.where(tops.dp * tops.cp > 1, 1, 0)
    return np.flatnonzero((tops.zero_stage == stage) & (tops.sequence_parallel == (tops.tp > 1)))


class _Climber:
    """Status, time and size of every rung, and the best time of each layout so far."""

    def __init__(self, question: Question, space: Space, top: int) -> None:
        self.question, self.space, self.top = question, space, top
        shape = space.legal.shape
        self.status = np.full(shape, Status.OPEN, dtype=np.int8)
        self.step_s = np.full(shape, np.inf)
        self.peak_bytes = np.full(shape, np.inf)
        self.family_s = np.zeros(int(space.family.max(initial=-1)) + 1)
        self.best_s = np.full(int(space.layout.max(initial=-1)) + 1, np.inf)

    @property
    def slowest_s(self) -> float:
        """The time above which a candidate is of no interest: it is neither listed nor as good as the fastest."""
        if len(self.best_s) < self.top:
            return np.inf
        return float(np.partition(self.best_s, self.top - 1)[self.top - 1]) * (1 + NEAR)

    def climb(self, tops: Array) -> None:
        """Judge the rungs below ``tops``, level by level."""
        for rung in range(len(self.space.rungs)):
            rows = tops[self.space.legal[tops, rung]]
            rows = rows[self._is_open(rows, rung)]
            for start in range(0, len(rows), BATCH):
                self._judge(rows[start : start + BATCH], rung)

    def _is_open(self, rows: Array, rung: int) -> Array:
        """Settle the rungs that need no judgement; the others are open."""
        above = [i for i, other in enumerate(self.space.rungs) if self.space.rungs[rung].is_right_below(other)]
        statuses = self.status[rows][:, above]
        dominated = ((statuses == Status.FITS) | (statuses == Status.DOMINATED)).any(axis=1)
        slower = ((statuses == Status.TOO_LARGE_AND_SLOWER) | (statuses == Status.SLOWER)).any(axis=1)
        self.status[rows, rung] = np.where(dominated, Status.DOMINATED, np.where(slower, Status.SLOWER, Status.OPEN))
        return ~(dominated | slower)

    def _judge(self, rows: Array, rung: int) -> None:
        strategies = on_rungs(self.space.tops.take(rows), self.space.rungs, np.full(len(rows), rung))
        found = estimate(self.question.model, self.question.sequence_length, self.question.hardware, strategies)
        step_s = rounded(found.step_s)
        np.minimum.at(self.best_s, self.space.layout[rows], np.where(found.fits, step_s, np.inf))
        self.step_s[rows, rung], self.peak_bytes[rows, rung] = step_s, found.peak_memory_bytes
        lost = np.where(step_s > self.slowest_s, Status.TOO_LARGE_AND_SLOWER, Status.TOO_LARGE)
        self.status[rows, rung] = np.where(found.fits, Status.FITS, lost)
        if rung == 0:
            self.family_s[self.space.family[rows]] = _without_replicas_s(found)

    def can_win(self, likely: Array) -> Array:
        """The tops beside the ``likely`` ones whose lower bound does not exceed the plans known; the others lose."""
        others = np.setdiff1d(np.arange(len(self.space.tops)), likely)
        loses = rounded(self.family_s[self.space.family[others]]) > self.slowest_s
        self.status[others[loses]] = Status.SLOWER
        return others[~loses]

    def found(self) -> Found:
        """The result."""
        fits = (self.status == Status.FITS) & self.space.legal
        strategies = self._best_of_layouts(fits & (self.step_s <= self.slowest_s), self.step_s, self.top)
        nowhere = np.zeros_like(fits)
        judged = nowhere if fits.any() else np.isfinite(self.peak_bytes)
        misses = self._best_of_layouts(judged, self.peak_bytes, NUM_MISSES)
        return Found(strategies, misses, self.space.searched, int(fits.sum()), self._rejected(len(strategies)))

    def _best_of_layouts(self, candidates: Array, value: Array, most: int) -> Strategies:
        """The candidate with the least ``value`` of each layout, for the ``most`` best layouts."""
        rows, rungs = np.nonzero(candidates)
        strategies = on_rungs(self.space.tops.take(rows), self.space.rungs, rungs)
        order = ranked(strategies, value[rows, rungs])
        _, first = np.unique(self.space.layout[rows[order]], return_index=True)
        return strategies.take(order[np.sort(first)][:most])

    def _rejected(self, num_plans: int) -> Counter[Reason]:
        counts = {status: int(((self.status == status) & self.space.legal).sum()) for status in Status}
        rejected = Counter(self.space.rejected)
        rejected[Reason.MEMORY] += counts[Status.TOO_LARGE] + counts[Status.TOO_LARGE_AND_SLOWER]
        rejected[Reason.DOMINATED] += counts[Status.DOMINATED]
        rejected[Reason.SLOWER] += counts[Status.SLOWER] + counts[Status.FITS] - num_plans
        return +rejected


def _without_replicas_s(found: Estimates) -> Array:
    """The part of a step that the ZeRO stage has no influence on, a lower bound for every stage."""
    exposed = sum(found.exposed_comm_s[axis] for axis in ("tp", "cp", "ep", "pp"))
    return found.compute_s + found.bubble_s + exposed
