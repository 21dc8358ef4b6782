"""The classic pipeline schedules for p stages on p ranks and m microbatches, compute actions only.

``lower`` adds transfers, gradient sync and the optimizer step. Every schedule runs the backward passes in the order of
the microbatches, so all of them add up each gradient in the same order and agree to the last bit.
"""

from __future__ import annotations

from threefold.schedule.actions import Action, Kind
from threefold.schedule.making import make_schedule, one_chunk_schedule, passes, rounds
from threefold.schedule.schedule import FORWARD_ONLY, Placement, Schedule


def naive(num_stages: int, num_microbatches: int) -> Schedule:
    """One microbatch at a time: forward through all stages, then backward; one rank works at any moment.

    Takes m p (f + b) and keeps one microbatch alive.
    """

    def row(stage: int) -> list[Action]:
        return [Action(kind, stage, i) for i in range(num_microbatches) for kind in (Kind.F, Kind.B)]

    return one_chunk_schedule("naive", num_stages, num_microbatches, row)


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forward passes, then all backward passes (Huang et al. 2019, GPipe).

    Takes (m + p - 1)(f + b) and keeps all m microbatches alive. The paper draws the backward passes last microbatch
    first; we run them first microbatch first, which takes as long, as most runtimes do today.
    """

    def row(stage: int) -> list[Action]:
        forwards = [Action(Kind.F, stage, i) for i in range(num_microbatches)]
        return forwards + [Action(Kind.B, stage, i) for i in range(num_microbatches)]

    return one_chunk_schedule("gpipe", num_stages, num_microbatches, row)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Warm-up forwards, then one forward, one backward in turn, then the backwards left (PipeDream-Flush).

    Rank r warms up with min(p - r - 1, m) forward passes: just enough to be busy until the first gradient comes back.
    Takes (m + p - 1)(f + b) as GPipe does, but keeps only min(m, p - r) microbatches alive (Narayanan et al. 2021,
    Memory-Efficient Pipeline-Parallel DNN Training).
    """

    def row(stage: int) -> list[Action]:
        num_warmup = min(num_stages - stage - 1, num_microbatches)
        actions = [Action(Kind.F, stage, i) for i in range(num_warmup)]
        for i in range(num_microbatches - num_warmup):
            actions += [Action(Kind.F, stage, num_warmup + i), Action(Kind.B, stage, i)]
        return actions + [Action(Kind.B, stage, i) for i in range(num_microbatches - num_warmup, num_microbatches)]

    return one_chunk_schedule("1f1b", num_stages, num_microbatches, row)


def forward_only(
    num_ranks: int, num_microbatches: int, num_chunks: int = 1, placement: Placement = Placement.LOOP
) -> Schedule:
    """Forward passes alone, for evaluation: takes (m + p - 1) f with one chunk, and keeps nothing.

    With chunks, rounds of p microbatches go through chunk after chunk, as in interleaved 1F1B.
    """

    def row(rank: int) -> list[Action]:
        starts = range(0, num_ranks * num_chunks, num_ranks)
        stages = [start + placement.rank_of(start + rank, num_ranks) for start in starts]
        return passes(Kind.F, stages, rounds(num_ranks, num_microbatches))

    return make_schedule(FORWARD_ONLY, num_ranks, num_microbatches, num_chunks, placement, row)
