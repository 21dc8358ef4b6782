"""List scheduling: each rank takes what a policy prefers of what can start.

A rank never holds more than its limit, and never deadlocks under it: beside what it holds, it always has room for the
forward passes that its oldest unfinished microbatch still needs, so the oldest microbatch of all can go all the way
down, come back up, and make room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

from threefold.schedule.actions import Kind
from threefold.schedule.playing import SLACK, Builder, Durations, Played
from threefold.schedule.schedule import Placement


@dataclass(frozen=True)
class Policy:
    """What a rank prefers when it may choose.

    ``first`` is the kind that goes first where F and I can both start, None alternates. ``lag`` is how many weight
    gradients a rank puts off, a number for each rank; more than that are done at once. ``patience`` is the share of a
    weight gradient that must fit before the next input comes. ``deep`` takes the forward pass of the latest chunk,
    otherwise of the oldest microbatch. ``caps`` limits what a rank holds below its memory.
    """

    first: Kind | None
    lag: tuple[float, ...]
    patience: float
    deep: bool
    caps: tuple[float, ...]


def policies(durations: Durations, limits: Sequence[float], num_chunks: int) -> Iterator[Policy]:
    """The policies that are worth a try, the most promising first.

    Of lags: r on rank r as in ZB-H1, until the rank would idle, and none as in 1F1B. Of caps: all memory, and a slope
    down the ranks as in 1F1B.
    """
    num_ranks = len(limits)
    lags = (tuple(map(float, range(num_ranks))), (inf,) * num_ranks, (0.0,) * num_ranks)
    sloped = tuple(limit * (1 - rank / num_ranks) for rank, limit in enumerate(limits))
    caps = (tuple(limits), sloped)
    depths = (True, False) if num_chunks > 1 else (True,)
    firsts = (Kind.I, Kind.F, None)
    for cap, patience, lag, first, deep in product(caps, (0.0, 1.0), lags, firsts, depths):
        yield Policy(first, lag, patience, deep, cap)


def greedy(
    num_microbatches: int, durations: Durations, limits: Sequence[float], placement: Placement, policy: Policy
) -> Played | None:
    """What ``policy`` makes for the ranks of ``limits``, each the most that the rank may hold.

    Every rank must have room for one microbatch.
    """
    return _Greedy(num_microbatches, durations, limits, placement, policy).build()


class _Greedy(Builder):
    def __init__(
        self,
        num_microbatches: int,
        durations: Durations,
        limits: Sequence[float],
        placement: Placement,
        policy: Policy,
    ) -> None:
        super().__init__(num_microbatches, durations, limits, placement)
        self.policy = policy
        self.caps = [cap * (1 + SLACK) for cap in policy.caps]
        self.last = [Kind.I] * self.num_ranks

    def choose(self, rank: int, now: float) -> tuple[Kind, int] | None:
        forward, backward = self._forward(rank, now), self._backward(rank, now)
        oldest, number = self.oldest_weights(rank)
        idle = forward is None and backward is None
        if oldest is not None and (number > self.policy.lag[rank] or (idle and self._may_fill(rank, now, oldest))):
            return Kind.W, oldest
        if forward is not None and backward is not None:
            first = self.policy.first or (Kind.F if self.last[rank] is Kind.I else Kind.I)
            forward, backward = (forward, None) if first is Kind.F else (None, backward)
        if forward is not None:
            self.last[rank] = Kind.F
            return Kind.F, forward
        if backward is not None:
            self.last[rank] = Kind.I
            return Kind.I, backward
        return None

    def _forward(self, rank: int, now: float) -> int | None:
        """The stage whose next forward pass can start, by the policy's preference."""
        ready = [s for s in self.stages[rank] if self.forward_is_ready(s, now) and self._has_room(rank, s)]
        if self.policy.deep:
            return ready[-1] if ready else None
        return min(ready, key=lambda s: (self.forwards[s], -s), default=None)

    def _has_room(self, rank: int, stage: int) -> bool:
        """Whether the rank can hold one more microbatch of ``stage``, and all that its oldest microbatch needs."""
        oldest = min(self.weights[s] for s in self.stages[rank])
        missing = [s for s in self.stages[rank] if self.forwards[s] <= oldest]
        if stage in missing:
            return True
        held = self.durations.held
        more = self.live[rank] + held[stage]
        return more + sum(held[s] for s in missing) <= self.limits[rank] and more <= self.caps[rank]

    def _backward(self, rank: int, now: float) -> int | None:
        """The stage whose next input gradient can start; of several the oldest microbatch's, which has most to free."""
        ready = [s for s in self.stages[rank] if self.backward_is_ready(s, now)]
        return min(ready, key=lambda s: (self.inputs[s], -s), default=None)

    def _may_fill(self, rank: int, now: float, stage: int) -> bool:
        """Whether a weight gradient fits, as far as the policy cares, before the next input that is on its way."""
        if not self.policy.patience:
            return True
        until = now + self.policy.patience * self.durations.weight_grad[stage]
        for s in self.stages[rank]:
            for times, done in ((self.input_at[s], self.forwards[s]), (self.gradient_at[s], self.inputs[s])):
                if done < len(times) and now < times[done] < until:
                    return False
        return True
