"""Interleaved 1F1B against its closed forms."""

import itertools

import pytest

from threefold.errors import JobError
from threefold.schedule import (
    check_lowered,
    check_schedule,
    interleaved_1f1b,
    lower,
    one_f_one_b,
    peak_live_microbatches,
)

SIZES = list(itertools.product(range(1, 9), range(1, 33)))


def longest_round(p: int, m: int) -> int:
    return -(-m // max(m // p, 1))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_legal_and_theory_of_time_and_memory(p: int, m: int) -> None:
    """(max(m, p) + (min(m, p) - 1) / v)(f + b), in units of a chunk; for p ≤ m that is m(f + b) + (p - 1)(f + b)/v."""
    for v in (1, 2, 3, 4):
        schedule = interleaved_1f1b(p, m, v)
        assert check_schedule(schedule) == []
        for f, b in ((1, 1), (1, 2), (2, 3)):
            assert schedule.makespan(f, b) == (max(m, p) * v + min(m, p) - 1) * (f + b)
        peaks = [peak_live_microbatches(schedule, rank) for rank in range(p)]
        assert peaks == [min(m * v, 2 * (p - r - 1) + (v - 1) * longest_round(p, m) + 1) for r in range(p)]


@pytest.mark.parametrize(("p", "v"), list(itertools.product((2, 3, 4), (2, 3))))
def test_any_number_of_microbatches_costs_no_more_bubble_than_a_multiple_of_the_ranks(p: int, v: int) -> None:
    """Rounds of p or more leave nobody waiting; a last round of m mod p would cost up to (v - 1)(p - 1) turns."""
    bubble = {m: interleaved_1f1b(p, m, v).makespan() - 3 * m * v for m in range(p, 6 * p)}
    assert set(bubble.values()) == {3 * (p - 1)}


@pytest.mark.parametrize(("p", "m"), [(4, 8), (4, 32), (3, 21)])
def test_rounds_of_p_are_those_of_the_paper(p: int, m: int) -> None:
    """Warm-up of 2(p - r - 1) + (v - 1)p passes, through chunk after chunk in groups of p microbatches."""
    schedule = interleaved_1f1b(p, m, 2)
    first = [str(action) for action in schedule.rows[0][: 2 * p]]
    assert first == [f"0F{i}" for i in range(p)] + [f"{p}F{i}" for i in range(p)]
    for rank, row in enumerate(schedule.rows):
        warmup = next(place for place, action in enumerate(row) if action.kind == "B") - 1
        assert warmup == min(2 * (p - rank - 1) + p, 2 * m)


def test_longer_rounds_come_first_and_differ_by_one() -> None:
    row = interleaved_1f1b(3, 11, 2).rows[0]
    rounds = [len(list(run)) for stage, run in itertools.groupby(a.stage for a in row if a.kind == "F") if stage == 0]
    assert rounds == [4, 4, 3]


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 1), (3, 7), (4, 3), (4, 8), (5, 13)])
def test_lowered_schedules_are_proven_safe(p: int, m: int) -> None:
    for v in (1, 2, 3):
        assert check_lowered(lower(interleaved_1f1b(p, m, v))) == []


def test_one_chunk_takes_as_long_as_1f1b_does() -> None:
    assert interleaved_1f1b(4, 9, 1).makespan() == one_f_one_b(4, 9).makespan()


def test_backward_passes_of_a_stage_run_in_the_order_of_the_microbatches() -> None:
    for row in interleaved_1f1b(3, 8, 3).rows:
        for stage in {action.stage for action in row}:
            assert [a.microbatch for a in row if a.kind == "B" and a.stage == stage] == list(range(8))


def test_sizes_below_one_name_the_key() -> None:
    with pytest.raises(JobError, match=r"parallelism.pp.chunks: 0 is no number of chunks"):
        interleaved_1f1b(2, 2, 0)
    with pytest.raises(JobError, match=r"parallelism.pp.size(.|\n)*gradient_accumulation_steps"):
        interleaved_1f1b(0, 0, 2)
