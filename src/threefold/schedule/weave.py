"""Schedules woven from a known order of forward and backward passes: how far F leads I, how far W lags behind.

1F1B, interleaved 1F1B, ZB-H1, ZB-H2 and ZB-V are all of this kind: on each rank an order of forward passes and one of
backward passes, a lead of so many forwards, then one of each in turn; weight gradients follow so many behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from math import inf
from typing import TypeVar

from threefold.schedule.actions import Kind
from threefold.schedule.playing import Builder, Durations, Played
from threefold.schedule.schedule import Placement, Schedule

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Weave:
    """Of each rank: its forwards and backwards in order, how many forwards lead, how many weight gradients lag.

    ``patience`` is the share of a weight gradient that must fit into a gap before it fills it; infinite where gaps stay
    empty.
    """

    placement: Placement
    forwards: tuple[tuple[int, ...], ...]
    """Stage of each forward pass; its microbatch is the next of that stage."""
    backwards: tuple[tuple[int, ...], ...]
    leads: tuple[int, ...]
    lags: tuple[float, ...]
    patience: float = inf

    def neighbours(self) -> Iterator[Weave]:
        """Weaves with a lead or lag of one rank, or of all ranks from the first to it, one more or less."""
        num_ranks = len(self.leads)
        spans = [(rank, rank + 1) for rank in range(num_ranks)] + [(0, rank + 1) for rank in range(1, num_ranks)]
        for start, end in spans:
            for more in (1, -1):
                leads = _shifted(self.leads, start, end, more)
                if min(leads) >= 0:
                    yield replace(self, leads=leads)
                lags = _shifted(self.lags, start, end, more)
                if min(lags) >= 0 and lags != self.lags:
                    yield replace(self, lags=lags)
        for patience in (0.0, 0.5, 1.0, inf):
            if patience != self.patience:
                yield replace(self, patience=patience)


def _shifted(values: tuple[Number, ...], start: int, end: int, more: int) -> tuple[Number, ...]:
    return (*values[:start], *(value + more for value in values[start:end]), *values[end:])


def unwoven(schedule: Schedule) -> Iterator[Weave]:
    """Weaves in the order of ``schedule``: weight gradients r behind on rank r, at once, and in the gaps alone."""
    forwards, backwards, leads = [], [], []
    for row in schedule.rows:
        forwards.append(tuple(action.stage for action in row if action.kind is Kind.F))
        backwards.append(tuple(action.stage for action in row if action.kind in (Kind.B, Kind.I)))
        kinds = [action.kind for action in row]
        first = next(place for place, kind in enumerate(kinds) if kind in (Kind.B, Kind.I))
        leads.append(max(first - 1, 0))
    weave = Weave(schedule.placement, tuple(forwards), tuple(backwards), tuple(leads), ())
    num_ranks = schedule.num_ranks
    yield replace(weave, lags=tuple(map(float, range(num_ranks))))
    yield replace(weave, lags=(0.0,) * num_ranks)
    yield replace(weave, lags=(inf,) * num_ranks, patience=1.0)


def play_weave(num_microbatches: int, durations: Durations, limits: Sequence[float], weave: Weave) -> Played | None:
    """What ``weave`` makes; None when it deadlocks, or needs more than a rank's limit."""
    return _Woven(num_microbatches, durations, limits, weave).build()


class _Woven(Builder):
    def __init__(self, num_microbatches: int, durations: Durations, limits: Sequence[float], weave: Weave) -> None:
        super().__init__(num_microbatches, durations, limits, weave.placement)
        self.weave = weave
        self.order = [
            _in_turns(forwards, backwards, lead)
            for forwards, backwards, lead in zip(weave.forwards, weave.backwards, weave.leads, strict=True)
        ]
        self.place = [0] * self.num_ranks

    def choose(self, rank: int, now: float) -> tuple[Kind, int] | None:
        stage, number = self.oldest_weights(rank)
        if stage is not None and number > self.weave.lags[rank]:
            return Kind.W, stage
        if self.place[rank] < len(self.order[rank]):
            kind, next_stage = self.order[rank][self.place[rank]]
            has_room = kind is Kind.I or self.live[rank] + self.durations.held[next_stage] <= self.limits[rank]
            is_ready = self.forward_is_ready if kind is Kind.F else self.backward_is_ready
            if has_room and is_ready(next_stage, now):
                self.place[rank] += 1
                return kind, next_stage
            if has_room and not self._may_fill(stage, kind, next_stage, now):
                return None
        return None if stage is None else (Kind.W, stage)

    def _may_fill(self, stage: int | None, kind: Kind, next_stage: int, now: float) -> bool:
        """Whether a weight gradient may go before the next pass, which waits for its input."""
        if stage is None or self.weave.patience == inf:
            return False
        done = self.forwards[next_stage] if kind is Kind.F else self.inputs[next_stage]
        arrivals = (self.input_at if kind is Kind.F else self.gradient_at)[next_stage]
        fits_until = now + self.weave.patience * self.durations.weight_grad[stage]
        return done >= len(arrivals) or arrivals[done] >= fits_until


def _in_turns(forwards: Sequence[int], backwards: Sequence[int], lead: int) -> list[tuple[Kind, int]]:
    """The lead of forwards, then a forward and a backward in turn, then the backwards left."""
    turns = zip_longest(((Kind.F, stage) for stage in forwards[lead:]), ((Kind.I, stage) for stage in backwards))
    return [(Kind.F, stage) for stage in forwards[:lead]] + [one for one in chain.from_iterable(turns) if one]
