"""Schedules against their closed forms."""

import itertools

import pytest

from threefold.errors import JobError
from threefold.schedule import (
    Schedule,
    bubble_share,
    build_schedule,
    check_schedule,
    forward_only,
    gpipe,
    makespan,
    naive,
    one_f_one_b,
    peak_live_microbatches,
)

SIZES = list(itertools.product(range(1, 9), [1, 2, 3, 5, 7, 8, 9, 16, 31, 32]))


def peaks(schedule: Schedule) -> list[int]:
    return [peak_live_microbatches(schedule, rank) for rank in range(schedule.num_ranks)]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_legal_and_theory_of_time_and_memory(p: int, m: int):
    for schedule in (naive(p, m), gpipe(p, m), one_f_one_b(p, m), forward_only(p, m)):
        assert check_schedule(schedule) == []
    assert peaks(naive(p, m)) == [1] * p
    assert peaks(gpipe(p, m)) == [m] * p
    assert peaks(one_f_one_b(p, m)) == [min(m, p - rank) for rank in range(p)]
    assert peaks(forward_only(p, m)) == [1] * p
    for f, b in ((1, 1), (1, 2), (2, 3)):
        assert gpipe(p, m).makespan(f, b) == one_f_one_b(p, m).makespan(f, b) == (m + p - 1) * (f + b)
        assert naive(p, m).makespan(f, b) == m * p * (f + b)
        assert forward_only(p, m).makespan(f, b) == (m + p - 1) * f


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 5), (4, 8), (8, 3)])
def test_the_bubble_is_what_a_rank_idles(p: int, m: int):
    total = one_f_one_b(p, m).makespan()
    assert bubble_share(p, m) == pytest.approx((total - 3 * m) / total)


def test_one_f_one_b_warms_up_as_far_as_it_must():
    rows = one_f_one_b(3, 4).rows
    assert " ".join(map(str, rows[0])) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert " ".join(map(str, rows[2])) == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    assert " ".join(map(str, one_f_one_b(4, 2).rows[0])) == "0F0 0F1 0B0 0B1"


def test_backward_passes_run_in_the_same_order_everywhere():
    """So that gradients are added up in the same order and schedules agree to the last bit."""
    for schedule in (naive(3, 5), gpipe(3, 5), one_f_one_b(3, 5)):
        for row in schedule.rows:
            assert [action.microbatch for action in row if action.kind == "B"] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
def test_build_by_name(name: str):
    assert build_schedule(name, 2, 3).name == name


def test_bad_requests_name_the_key():
    with pytest.raises(JobError, match=r"parallelism.pp.schedule: 'zb_h9'(.|\n)*naive, gpipe, 1f1b"):
        build_schedule("zb_h9", 2, 2)
    with pytest.raises(JobError, match=r"parallelism.pp.chunks: 2 chunks are not what zb_h1 has: 1 on each rank"):
        build_schedule("zb_h1", 2, 2, 2)
    with pytest.raises(JobError, match=r"parallelism.pp.size(.|\n)*gradient_accumulation_steps"):
        gpipe(0, 0)


def test_makespan_of_a_deadlock_is_refused():
    rows = one_f_one_b(2, 1).rows
    with pytest.raises(ValueError, match="never starts"):
        makespan((rows[0], rows[1][1:]), 2)
