"""What a timeline says: idle time by cause, the critical path, memory over time."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest

from threefold.errors import ScheduleError
from threefold.schedule import Kind, gpipe, lower, one_f_one_b, parse_schedule
from threefold.simulate import Cause, Event, StepCosts, Timeline, simulate


def idle(timeline: Timeline) -> dict[str, list[float]]:
    return {cause.value: seconds.tolist() for cause, seconds in timeline.idle_s.items()}


def test_idle_time_of_1f1b_by_cause() -> None:
    costs = StepCosts.uniform(3, sync_s=1, step_s=1)
    assert idle(simulate(one_f_one_b(3, 4), costs)) == {
        "warm_up": [0, 1, 2],
        "stage": [6, 3, 0],
        "transfer": [0, 0, 0],
        "sync": [1, 1, 1],
        "cool_down": [0, 2, 4],
        "host": [0, 0, 0],
    }


def test_only_the_last_hop_counts_as_transfer_while_warming_up() -> None:
    costs = StepCosts.uniform(3, forward_s=1, backward_s=2, p2p_s=0.5)
    timeline = simulate(gpipe(3, 4), costs)
    assert timeline.idle_s[Cause.WARM_UP].tolist() == [0, 1, 2.5]
    assert timeline.idle_s[Cause.TRANSFER].tolist() == [0.5, 1, 0.5]
    assert timeline.exposed_comm_s.tolist() == [0.5, 1, 0.5]


def test_a_slow_stage_makes_the_others_wait() -> None:
    even = StepCosts.uniform(3)
    slow = StepCosts(**{**vars(even), "forward_s": (1, 2, 1)})
    timeline = simulate(one_f_one_b(3, 16), slow)
    assert timeline.idle_s[Cause.STAGE][2] > 10
    assert timeline.bubble_s[1] < timeline.bubble_s[0]


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("build", [gpipe, one_f_one_b])
def test_every_second_has_a_cause(build, blocking: bool) -> None:
    costs = StepCosts(
        forward_s=(1, 3, 2),
        input_grad_s=(2, 1, 3),
        weight_grad_s=(1, 2, 1),
        p2p_s=(0.5, 4),
        sync_s=(1, 0, 2),
        step_s=(1, 2, 0),
        activation_bytes=(1, 1, 1),
        static_bytes=(0, 0, 0),
    )
    for together in (False, True):
        timeline = simulate(build(3, 5), costs, blocking=blocking, step_together=together)
        total = timeline.compute_s + timeline.step_s + np.sum(list(timeline.idle_s.values()), axis=0)
        assert total == pytest.approx(timeline.makespan_s)
        assert all((seconds >= 0).all() for seconds in timeline.idle_s.values())


def test_the_critical_path_of_1f1b() -> None:
    timeline = simulate(one_f_one_b(2, 2), StepCosts.uniform(2, p2p_s=0.5, sync_s=1, step_s=1))
    words = [f"{event.rank}:{event.action}" for event in timeline.critical_path]
    assert words == [
        "0:0F0",
        "0:0SEND_F0",
        "1:1F0",
        "1:1B0",
        "1:1F1",
        "1:1B1",
        "1:1SEND_B1",
        "0:0B1",
        "0:SYNC",
        "0:STEP",
    ]
    assert timeline.critical_s == {
        Kind.F: 3,
        Kind.B: 6,
        Kind.SEND_F: 0.5,
        Kind.SEND_B: 0.5,
        Kind.SYNC: 1,
        Kind.STEP: 1,
    }


def test_the_critical_path_of_a_common_step_goes_through_the_last_gradient() -> None:
    costs = StepCosts.uniform(3, step_s=1)
    late = StepCosts(**{**vars(costs), "step_s": (1, 1, 5)})
    path = simulate(one_f_one_b(3, 4), late, step_together=True).critical_path
    assert [event.rank for event in path[-2:]] == [0, 2]
    assert path[-1].kind is Kind.STEP


def test_the_critical_path_never_waits_for_another_ranks_step() -> None:
    path = simulate(gpipe(2, 1), StepCosts.uniform(2, p2p_s=1, sync_s=1, step_s=2), blocking=True).critical_path
    assert " ".join(str(event.action) for event in path) == "0F0 0SEND_F0 1F0 1B0 1SEND_B0 0B0 SYNC STEP"


@pytest.mark.parametrize("blocking", [False, True])
def test_the_critical_path_has_no_gaps(blocking: bool) -> None:
    costs = StepCosts.uniform(4, forward_s=1, backward_s=2, p2p_s=0.75, sync_s=1, step_s=1)
    for schedule in (gpipe(4, 6), one_f_one_b(4, 6), lower(one_f_one_b(4, 6))):
        timeline = simulate(schedule, costs, blocking=blocking)
        path = timeline.critical_path
        assert path[0].start_s == 0 and path[-1].end_s == timeline.makespan_s
        assert all(one.end_s == other.start_s for one, other in pairwise(path))


def test_memory_over_time() -> None:
    costs = StepCosts.uniform(2, activation_bytes=10, static_bytes=100)
    curve = simulate(one_f_one_b(2, 2), costs).memory[0]
    assert curve.times_s.tolist() == [0, 0, 1, 6, 9]
    assert curve.held_bytes.tolist() == [100, 110, 120, 110, 100]


def test_events_of_one_rank_in_order() -> None:
    timeline = simulate(one_f_one_b(2, 2), StepCosts.uniform(2, p2p_s=0.5))
    words = [str(event.action) for event in timeline.events if event.rank == 1]
    assert words == ["1RECV_F0", "1F0", "1RECV_F1", "1B0", "1SEND_B0", "1F1", "1B1", "SYNC", "STEP", "1SEND_B1"]


def test_recorded_events_make_the_same_timeline() -> None:
    simulated = simulate(gpipe(3, 4), StepCosts.uniform(3, p2p_s=0.5, sync_s=1))
    recorded = Timeline.from_events("gpipe", 3, 3, 4, simulated.events[::-1])
    assert recorded.makespan_s == simulated.makespan_s
    assert idle(recorded) == idle(simulated)
    assert recorded.peak_memory_bytes.tolist() == []


def test_a_timeline_of_nothing() -> None:
    empty = Timeline.from_events("none", 2, 2, 1, [])
    assert empty.makespan_s == 0 and empty.bubble_fraction == 0 and empty.critical_path == ()


def test_an_event_of_a_timeline() -> None:
    first = simulate(gpipe(1, 1), StepCosts.uniform(1)).events[0]
    assert isinstance(first, Event)
    assert (str(first.action), first.rank, first.kind, first.duration_s) == ("0F0", 0, Kind.F, 1)


@pytest.mark.parametrize(
    ("row", "words"),
    [("1F0 1B0 1F1", "1B1 is missing"), ("1B0 1F0 1F1 1B1", "1B0 stands before 1F0")],
)
def test_what_can_not_be_played_is_shown(row: str, words: str) -> None:
    broken = parse_schedule(f"x stages=2 ranks=2 microbatches=2\nrank 0: 0F0 0F1 0B0 0B1\nrank 1: {row}")
    with pytest.raises(ScheduleError, match=words):
        simulate(broken, StepCosts.uniform(2))


def test_costs_must_be_those_of_the_stages() -> None:
    with pytest.raises(ValueError, match="costs of 3 stages for a schedule of 2"):
        simulate(gpipe(2, 1), StepCosts.uniform(3))
    with pytest.raises(ValueError, match="p2p_s has 2 values where 1 are needed"):
        StepCosts(**{**vars(StepCosts.uniform(2)), "p2p_s": (0, 0)})
    with pytest.raises(ValueError, match="forward_s has a cost that is negative"):
        StepCosts.uniform(2, forward_s=-1)


def test_a_large_step_is_played_quickly() -> None:
    schedule, costs = one_f_one_b(64, 512), StepCosts.uniform(64, p2p_s=0.01)
    begin = time.process_time()
    assert simulate(schedule, costs).makespan_s > (512 + 63) * 3
    assert time.process_time() - begin < 5  # about 0.3 s; slow machines and coverage tools take longer
