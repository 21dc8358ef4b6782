"""Simulated steps against theory: p stages, m microbatches, forward f, backward b, transfer t."""

from __future__ import annotations

import itertools

import pytest

from threefold.schedule import (
    NAMED,
    Placement,
    Schedule,
    bubble_share,
    forward_only,
    gpipe,
    lower,
    naive,
    one_f_one_b,
    parse_schedule,
    peak_live_microbatches,
)
from threefold.simulate import Cause, StepCosts, Timeline, simulate

SIZES = list(itertools.product(range(1, 9), (1, 2, 3, 5, 8, 9, 16, 31, 32)))
CHUNKED = """
interleaved_1f1b stages=4 ranks=2 microbatches=2
rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
rank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
"""
SPLIT = """
zb_h1 stages=2 ranks=2 microbatches=3
rank 0: 0F0 0F1 0I0 0F2 0I1 0W0 0W1 0I2 0W2
rank 1: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
"""


def play(schedule: Schedule, f: float = 1.0, b: float = 2.0, t: float = 0.0) -> Timeline:
    costs = StepCosts.uniform(schedule.num_stages, forward_s=f, backward_s=b, p2p_s=t, activation_bytes=1.0)
    return simulate(schedule, costs)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe_and_1f1b_take_m_plus_p_minus_1_turns(p: int, m: int) -> None:
    for f, b in ((1, 1), (1, 2), (2, 3)):
        for schedule in (gpipe(p, m), one_f_one_b(p, m)):
            timeline = play(schedule, f, b)
            assert timeline.makespan_s == (m + p - 1) * (f + b)
            assert timeline.bubble_fraction == pytest.approx(bubble_share(p, m))
        assert play(naive(p, m), f, b).makespan_s == m * p * (f + b)
        assert play(forward_only(p, m), f, b).makespan_s == (m + p - 1) * f


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_peak_memory_is_the_number_of_live_microbatches(p: int, m: int) -> None:
    assert play(one_f_one_b(p, m)).peak_memory_bytes.tolist() == [min(m, p - rank) for rank in range(p)]
    assert play(gpipe(p, m)).peak_memory_bytes.tolist() == [m] * p
    assert play(naive(p, m)).peak_memory_bytes.tolist() == [1] * p
    assert play(forward_only(p, m)).peak_memory_bytes.tolist() == [1] * p


@pytest.mark.parametrize("text", [CHUNKED, SPLIT])
def test_chunks_and_split_backwards_keep_what_the_schedule_says(text: str) -> None:
    schedule = parse_schedule(text)
    peaks = [peak_live_microbatches(schedule, rank) for rank in range(schedule.num_ranks)]
    assert play(schedule).peak_memory_bytes.tolist() == peaks
    assert play(schedule).makespan_s == schedule.makespan()


def test_zb_h1_of_two_ranks_takes_3m_plus_p_minus_1() -> None:
    assert play(parse_schedule(SPLIT)).makespan_s == 3 * 3 + 2 - 1


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if p > 1])
def test_transfers_add_2_p_minus_1_hops_to_gpipe(p: int, m: int) -> None:
    """While a transfer is shorter than a pass, a link is never the bottleneck: only filling and emptying pay."""
    assert play(gpipe(p, m), f=10, b=20, t=3).makespan_s == (m + p - 1) * 30 + 2 * (p - 1) * 3


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if p > 1])
def test_a_slow_link_sets_the_pace_of_gpipe(p: int, m: int) -> None:
    f, b, t = 1, 2, 5
    forward = (p - 1) * (f + t) + (m - 1) * t + f
    backward = (p - 1) * (b + t) + (m - 1) * t + b
    expected = forward + backward if p > 1 else m * (f + b)
    # The last stage turns round when its forwards end, which is when the last of them arrives.
    assert play(gpipe(p, m), f, b, t).makespan_s == expected


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if p > 1])
def test_transfers_slow_1f1b_down_in_every_round_trip(p: int, m: int) -> None:
    """Rank 0 keeps p microbatches on the way, each of which pays 2(p - 1) hops: 2t(p - 1)/p a microbatch.

    Of the last round, the first two microbatches pay nothing more than the round trip.
    """
    rounds, rest = divmod(m - 1, p)
    hops = 2 * ((rounds + 1) * (p - 1) + max(0, rest - 1))
    assert play(one_f_one_b(p, m), f=10, b=20, t=1).makespan_s == (m + p - 1) * 30 + hops


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 3), (4, 8), (8, 32)])
def test_lowered_schedules_play_alike(p: int, m: int) -> None:
    named = [one.build(p, m, one.chunks or 2) for one in NAMED.values()]
    for schedule in (*named, forward_only(p, m), forward_only(p, m, 2, Placement.V)):
        assert play(lower(schedule)).makespan_s == play(schedule).makespan_s
        assert len(play(lower(schedule), t=0.5)) == len(play(schedule, t=0.5))


def test_one_after_the_other_pays_every_hop() -> None:
    for blocking in (False, True):
        costs = StepCosts.uniform(3, p2p_s=0.5)
        assert simulate(naive(3, 4), costs, blocking=blocking).makespan_s == 4 * (3 * 3 + 4 * 0.5)


def test_blocking_transfers_take_computing_time_from_both_ranks() -> None:
    costs = StepCosts.uniform(2, forward_s=1, backward_s=2, p2p_s=0.25)
    timeline = simulate(gpipe(2, 8), costs, blocking=True)
    assert timeline.blocking
    assert (timeline.idle_s[Cause.TRANSFER] == 16 * 0.25).all()
    # In the steady state, each rank computes and transfers in turn. A receive is posted before the pass that it is to
    # hide behind, and whoever blocks there waits a forward and a backward pass longer.
    assert timeline.makespan_s == (8 + 1) * 3 + 16 * 0.25 + 1 + 2


def test_sync_and_step_come_last() -> None:
    costs = StepCosts.uniform(4, sync_s=3, step_s=2)
    apart, together = (simulate(one_f_one_b(4, 8), costs, step_together=flag) for flag in (False, True))
    assert apart.makespan_s == together.makespan_s == (8 + 3) * 3 + 3 + 2
    ends = {event.rank: event.end_s for event in apart.events if event.kind == "STEP"}
    assert ends == {0: 38, 1: 36, 2: 34, 3: 32}
    assert {event.start_s for event in together.events if event.kind == "STEP"} == {36}


def test_a_rank_pays_for_all_its_stages() -> None:
    costs = StepCosts.uniform(4, sync_s=1, step_s=2, static_bytes=10, activation_bytes=1)
    timeline = simulate(parse_schedule(CHUNKED), costs)
    assert timeline.step_s.tolist() == [4, 4]
    assert timeline.peak_memory_bytes.tolist() == [24, 23]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_schedules_that_fill_the_bubble_play_as_their_closed_forms_say(p: int, m: int) -> None:
    """In units of F = I = W of a stage; interleaved (max(m, p)v + min(m, p) - 1)(f + b)."""
    for v in (2, 4):
        interleaved = play(NAMED["interleaved_1f1b"].build(p, m, v))
        assert interleaved.makespan_s == (max(m, p) * v + min(m, p) - 1) * 3
    assert play(NAMED["zb_h1"].build(p, m, 1)).makespan_s == max(3 * m + p - 1, 2 * m + 2 * p - 1)
    if m >= 2 * p:
        zb_v = play(NAMED["zb_v"].build(p, m, 2))
        assert zb_v.makespan_s == 6 * m + p - 1
        assert zb_v.bubble_fraction == pytest.approx((p - 1) / (6 * m + p - 1))


@pytest.mark.parametrize("transfer", [0.05, 0.25, 0.5])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 32)])
def test_no_receive_of_a_lowered_schedule_is_posted_too_late(p: int, m: int, transfer: float) -> None:
    """What lowering fixes, the order on each link and where receives are posted, costs nothing."""
    for named in NAMED.values():
        schedule = named.build(p, m, named.chunks or 2)
        assert play(lower(schedule), t=transfer).makespan_s <= play(schedule, t=transfer).makespan_s * 1.001


def test_stages_on_one_rank_hand_over_at_once() -> None:
    """Down and up a V of p ranks is 2(p - 1) hops each way; the turn at the last rank takes no time."""
    for p in (1, 2, 4):
        schedule = NAMED["zb_v"].build(p, 1, 2)
        hops = 4 * (p - 1)
        for one in (schedule, lower(schedule)):
            assert play(one, t=0.5).makespan_s == play(schedule).makespan_s + hops * 0.5
        blocking = simulate(schedule, StepCosts.uniform(2 * p, p2p_s=0.5), blocking=True)
        assert blocking.makespan_s == play(schedule).makespan_s + hops * 0.5


def test_the_memory_of_a_v_is_that_of_its_two_ends() -> None:
    costs = StepCosts.uniform(6, sync_s=1, step_s=2, static_bytes=10)
    timeline = simulate(NAMED["zb_v"].build(3, 6, 2), costs)
    assert timeline.step_s.tolist() == [4, 4, 4]
    assert timeline.peak_memory_bytes.tolist() == [20, 20, 20]
    uneven = StepCosts(**{**vars(costs), "static_bytes": (1, 2, 3, 4, 5, 6), "step_s": (1, 0, 0, 0, 0, 6)})
    timeline = simulate(NAMED["zb_v"].build(3, 6, 2), uneven)
    assert timeline.peak_memory_bytes.tolist() == [7, 7, 7]
    assert timeline.step_s.tolist() == [7, 0, 0]
