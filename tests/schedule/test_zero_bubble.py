"""ZB-H1 and ZB-V against their closed forms."""

import itertools

import pytest

from threefold.schedule import (
    Placement,
    Schedule,
    check_lowered,
    check_schedule,
    lower,
    makespan,
    one_f_one_b,
    peak_live_microbatches,
    zb_h1,
    zb_v,
)
from threefold.schedule.actions import Kind

SIZES = list(itertools.product(range(1, 9), range(1, 33)))


def peaks(schedule: Schedule) -> list[int]:
    return [peak_live_microbatches(schedule, rank) for rank in range(schedule.num_ranks)]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zb_h1_takes_3m_plus_p_minus_1_in_the_memory_of_1f1b(p: int, m: int) -> None:
    schedule = zb_h1(p, m)
    assert check_schedule(schedule) == []
    assert schedule.makespan() == max(3 * m + p - 1, 2 * m + 2 * p - 1)
    assert peaks(schedule) == [min(m, p)] * p
    assert max(peaks(schedule)) == max(peaks(one_f_one_b(p, m)))


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= 2 * p])
def test_the_bubble_of_zb_h1_is_that_of_the_paper(p: int, m: int) -> None:
    """(p - 1)(F + I - W) where W ≤ F and W ≤ I (Qi et al. 2023, table 2)."""
    for f, i, w in ((1, 1, 1), (2, 2, 1), (3, 4, 2), (2, 3, 2)):
        costs = {Kind.F: f, Kind.I: i, Kind.W: w}
        schedule = zb_h1(p, m)
        assert makespan(schedule.rows, schedule.num_stages, costs) == m * (f + i + w) + (p - 1) * (f + i - w)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zb_v_idles_only_until_the_first_microbatch_comes(p: int, m: int) -> None:
    schedule = zb_v(p, m)
    assert check_schedule(schedule) == []
    assert (schedule.num_stages, schedule.placement) == (2 * p, Placement.V)
    assert max(peaks(schedule)) <= min(2 * m, 2 * p), "two halves of a rank's share are one microbatch of 1F1B"
    if m >= 2 * p:
        assert schedule.makespan() == 6 * m + p - 1
    else:
        assert schedule.makespan() >= 6 * m + p - 1


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 1), (2, 4), (3, 7), (4, 3), (4, 8), (5, 13)])
def test_lowered_schedules_are_proven_safe(p: int, m: int) -> None:
    for schedule in (zb_h1(p, m), zb_v(p, m)):
        assert check_lowered(lower(schedule)) == []
        assert lower(schedule).grid() == schedule.grid()


def test_the_last_stage_down_and_the_first_up_share_a_rank_and_send_nothing() -> None:
    schedule = zb_v(3, 4)
    assert [schedule.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    sent = {action.stage for row in lower(schedule).rows for action in row if action.kind is Kind.SEND_F}
    assert sent == {0, 1, 3, 4}
    assert {action.stage for row in lower(schedule).rows for action in row if action.kind is Kind.SEND_B} == {
        1,
        2,
        4,
        5,
    }


@pytest.mark.parametrize("schedule", [zb_h1(3, 7), zb_v(3, 7)], ids=lambda one: one.name)
def test_gradients_add_up_in_the_order_of_the_microbatches(schedule: Schedule) -> None:
    for row in schedule.rows:
        for stage, kind in itertools.product({action.stage for action in row}, (Kind.I, Kind.W)):
            assert [a.microbatch for a in row if a.kind is kind and a.stage == stage] == list(range(7))
