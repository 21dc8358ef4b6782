"""Zero-bubble schedules: weight gradients wait until a rank would idle.

Qi et al. 2023, Zero Bubble Pipeline Parallelism (ZB-H1, ZB-V); Qi et al. 2024, Pipeline Parallelism with Controllable
Memory (V-shaped placement). The gradient of a stage's input (I) is what the stage before it waits for; that of its
weights (W) nobody waits for. Every stage runs its I and its W in the order of the microbatches, so gradients add up as
under 1F1B.
"""

from __future__ import annotations

from collections.abc import Iterator

from threefold.schedule.actions import Action, Kind
from threefold.schedule.making import make_schedule, one_chunk_schedule
from threefold.schedule.schedule import Placement, Schedule


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B whose rank r puts each weight gradient off by r microbatches, and so fills the drain with them.

    At F = I = W = 1 it takes 3m + p - 1 (for m ≥ p; 2m + 2p - 1 for fewer): each rank idles (p - 1)(F + I - W), a third
    of 1F1B's bubble. Rank r warms up as under 1F1B, and its put-off weight gradients keep min(m, p) microbatches alive
    on every rank: what 1F1B keeps on rank 0.
    """

    def row(rank: int) -> Iterator[Action]:
        num_warmup = min(num_ranks - rank - 1, num_microbatches)
        yield from (Action(Kind.F, rank, i) for i in range(num_warmup))
        for i in range(num_microbatches):
            if num_warmup + i < num_microbatches:
                yield Action(Kind.F, rank, num_warmup + i)
            yield Action(Kind.I, rank, i)
            if i >= rank:
                yield Action(Kind.W, rank, i - rank)
        yield from (Action(Kind.W, rank, i) for i in range(max(num_microbatches - rank, 0), num_microbatches))

    return one_chunk_schedule("zb_h1", num_ranks, num_microbatches, row)


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-V: two chunks a rank, stages r and 2p - 1 - r, so that the last stage shares rank 0 with the first.

    A microbatch that has gone down the ranks comes back up; its backward pass begins on rank 0, which began first. At
    F = I = W = 1 a chunk and m ≥ 2p no rank idles between its first and its last action: 6m + p - 1 chunk times, of
    which the p - 1 are the way down to the last rank. It keeps at most 2p of a rank's half-size chunks alive, the
    memory of 1F1B on rank 0.
    """

    def row(rank: int) -> list[Action]:
        # The pattern is for 2p microbatches or more; of fewer, those that don't exist are left out.
        planned = _zb_v_row(rank, num_ranks, max(num_microbatches, 2 * num_ranks))
        return [action for action in planned if action.microbatch < num_microbatches]

    return make_schedule("zb_v", num_ranks, num_microbatches, 2, Placement.V, row)


def _zb_v_row(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    """Warm-up fills the two chunks, the steady state does all six passes a microbatch, the drain does I before W."""
    down, up = _Chunk(rank, num_microbatches), _Chunk(2 * num_ranks - 1 - rank, num_microbatches)
    below = num_ranks - rank
    for _ in range(2 * below - 1):
        yield from down.take(Kind.F)
    for _ in range(rank):
        yield from up.take(Kind.F)
        yield from down.take(Kind.F)
    for _ in range(below):
        yield from up.take(Kind.F, Kind.I, Kind.W)
    while down.left(Kind.F) or up.left(Kind.F):
        yield from down.take(Kind.F, Kind.I, Kind.W)
        yield from up.take(Kind.F, Kind.I, Kind.W)
    for _ in range(rank):
        yield from down.take(Kind.I)
        yield from up.take(Kind.I)
    for _ in range(below):
        yield from down.take(Kind.I, Kind.W)
    for chunk in (up, down):
        yield from chunk.take(*[Kind.W] * chunk.left(Kind.W))


class _Chunk:
    """Hands out the passes of one stage, each kind in the order of the microbatches, until there are no more."""

    def __init__(self, stage: int, num_microbatches: int) -> None:
        self.stage, self.num_microbatches = stage, num_microbatches
        self.taken: dict[Kind, int] = {Kind.F: 0, Kind.I: 0, Kind.W: 0}

    def left(self, kind: Kind) -> int:
        """How many passes of ``kind`` are still to do."""
        return self.num_microbatches - self.taken[kind]

    def take(self, *kinds: Kind) -> Iterator[Action]:
        """The next pass of each of ``kinds``, where one is left."""
        for kind in kinds:
            if self.left(kind):
                yield Action(kind, self.stage, self.taken[kind])
                self.taken[kind] += 1
