"""What all generators share: sizes are judged once, and rows are made rank by rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from threefold.errors import JobError, Problem
from threefold.schedule.actions import Action, Kind
from threefold.schedule.schedule import Placement, Schedule

MakeRow = Callable[[int], Iterable[Action]]
"""Rank -> its compute actions in order."""


def one_chunk_schedule(name: str, num_ranks: int, num_microbatches: int, row: MakeRow) -> Schedule:
    """A schedule with one stage a rank; ``row`` makes the row of each. Raises JobError as ``make_schedule`` does."""
    return make_schedule(name, num_ranks, num_microbatches, 1, Placement.LOOP, row)


def make_schedule(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int, placement: Placement, row: MakeRow
) -> Schedule:
    """A schedule whose rows ``row`` makes, rank by rank.

    Raises JobError naming ``parallelism.pp.size``, ``gradient_accumulation_steps`` or ``parallelism.pp.chunks`` for
    sizes below 1.
    """
    sizes = (
        ("parallelism.pp.size", num_ranks, "stages"),
        ("gradient_accumulation_steps", num_microbatches, "microbatches"),
        ("parallelism.pp.chunks", num_chunks, "chunks"),
    )
    problems = [
        Problem(key, f"{size} is no number of {what}", "use 1 or more") for key, size, what in sizes if size < 1
    ]
    if problems:
        raise JobError(problems)
    rows = tuple(tuple(row(rank)) for rank in range(num_ranks))
    return Schedule(name, num_ranks, num_ranks * num_chunks, num_microbatches, rows, placement)


def rounds(num_ranks: int, num_microbatches: int) -> list[range]:
    """The microbatches of each round: as many rounds of ``num_ranks`` or more as there can be, longer ones first."""
    num_rounds = max(num_microbatches // max(num_ranks, 1), 1)
    size, num_longer = divmod(num_microbatches, num_rounds)
    starts = [one * size + min(one, num_longer) for one in range(num_rounds + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def passes(kind: Kind, stages: Sequence[int], dealt: Sequence[range]) -> list[Action]:
    """``kind`` of every stage and microbatch: a round goes through stage after stage before the next one begins."""
    return [Action(kind, stage, microbatch) for one in dealt for stage in stages for microbatch in one]
