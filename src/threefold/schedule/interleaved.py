"""Interleaved 1F1B: every rank holds several chunks of layers, and the bubble shrinks by their number.

Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, section 2.2.
"""

from __future__ import annotations

from itertools import chain, zip_longest

from threefold.schedule.actions import Action, Kind
from threefold.schedule.making import make_schedule, passes, rounds
from threefold.schedule.schedule import Placement, Schedule


def interleaved_1f1b(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """1F1B over ``num_chunks`` v chunks a rank: a round of microbatches goes through chunk after chunk.

    With forward f and backward b of all chunks of a rank together, it takes (max(m, p) + (min(m, p) - 1) / v)(f + b):
    for m ≥ p that is m(f + b) of work and a bubble of (p - 1)(f + b)/v. Rank r keeps at most
    2(p - r - 1) + (v - 1)g + 1 (stage, microbatch) pairs alive, where g is the longest round.

    The paper's rounds are of p microbatches, and m is a multiple of p. Any m is legal here: m is dealt out to ⌊m/p⌋
    rounds of p or more, since a round of fewer than p leaves ranks waiting for the next chunk; g = ⌈m/⌊m/p⌋⌉ is then
    p + 1 for most m. Only with m < p is there one short round, and no schedule does better: the first microbatch alone
    needs p(f + b).
    """
    dealt = rounds(num_ranks, num_microbatches)
    longest = max((len(one) for one in dealt), default=0)

    def row(rank: int) -> list[Action]:
        stages = range(rank, num_ranks * num_chunks, num_ranks)
        forwards = passes(Kind.F, stages, dealt)
        backwards = passes(Kind.B, stages[::-1], dealt)
        num_warmup = min(2 * (num_ranks - rank - 1) + (num_chunks - 1) * longest, len(forwards))
        turns = zip_longest(forwards[num_warmup:], backwards)
        return forwards[:num_warmup] + [action for action in chain.from_iterable(turns) if action is not None]

    return make_schedule("interleaved_1f1b", num_ranks, num_microbatches, num_chunks, Placement.LOOP, row)
