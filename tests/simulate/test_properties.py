"""Laws that hold for any costs."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from threefold.schedule import NAMED, Schedule, lower, parse_schedule
from threefold.simulate import StepCosts, simulate

FEW = settings(max_examples=60, deadline=None)
SECONDS = st.integers(1, 64).map(lambda ticks: ticks / 8)  # sums of these are exact
CHUNKED = parse_schedule(
    """
    interleaved_1f1b stages=4 ranks=2 microbatches=2
    rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    rank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """.replace("    ", "")
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    if draw(st.integers(0, 6)) == 0:
        return CHUNKED
    named = draw(st.sampled_from(list(NAMED.values())))
    chunks = named.chunks or draw(st.integers(1, 3))
    schedule = named.build(draw(st.integers(1, 5)), draw(st.integers(1, 8)), chunks)
    return lower(schedule) if draw(st.booleans()) else schedule


@st.composite
def plays(draw: st.DrawFn) -> tuple[Schedule, StepCosts]:
    schedule = draw(schedules())
    stages = schedule.num_stages

    def some(size: int) -> tuple[float, ...]:
        return tuple(draw(st.lists(SECONDS, min_size=size, max_size=size)))

    return schedule, StepCosts(**{f.name: some(stages - (f.name == "p2p_s")) for f in fields(StepCosts)})


@FEW
@given(plays(), st.booleans(), st.booleans())
def test_no_step_is_shorter_than_its_bounds(play: tuple[Schedule, StepCosts], blocking: bool, together: bool) -> None:
    schedule, costs = play
    makespan_s = simulate(schedule, costs, blocking=blocking, step_together=together).makespan_s
    m, p = schedule.num_microbatches, schedule.num_ranks
    work_s = [m * (f + b) for f, b in zip(costs.forward_s, costs.backward_s, strict=True)]
    endings_s = [sync + step for sync, step in zip(costs.sync_s, costs.step_s, strict=True)]
    for rank in range(p):
        mine = schedule.stages_of(rank)
        assert makespan_s >= sum(work_s[stage] + endings_s[stage] for stage in mine)
    rank_of = [schedule.stage_rank(stage) for stage in range(schedule.num_stages)]
    hops_s = 2 * sum(time for time, (a, b) in zip(costs.p2p_s, pairwise(rank_of), strict=True) if a != b)
    first_s = sum(endings_s[stage] for stage in schedule.stages_of(0))
    split = any(action.kind == "W" for action in schedule.rows[0])  # then only the last W ends the step
    down_and_up_s = sum(costs.forward_s) + sum(costs.input_grad_s if split else costs.backward_s)
    assert makespan_s >= down_and_up_s + split * costs.weight_grad_s[0] + hops_s + first_s


@FEW
@given(plays(), st.booleans(), st.booleans(), st.data())
def test_a_larger_cost_never_shortens_a_step(
    play: tuple[Schedule, StepCosts], blocking: bool, together: bool, data: st.DataObject
) -> None:
    schedule, costs = play
    name = data.draw(st.sampled_from([f.name for f in fields(StepCosts) if getattr(costs, f.name)]))
    values = list(getattr(costs, name))
    values[data.draw(st.integers(0, len(values) - 1))] += data.draw(SECONDS)
    dearer = StepCosts(**{**vars(costs), name: values})
    before, after = (simulate(schedule, each, blocking=blocking, step_together=together) for each in (costs, dearer))
    assert after.makespan_s >= before.makespan_s
    assert (after.peak_memory_bytes >= before.peak_memory_bytes).all()


@FEW
@given(schedules(), SECONDS, SECONDS)
def test_free_transfers_take_as_long_as_the_schedule_says(schedule: Schedule, f: float, b: float) -> None:
    costs = StepCosts.uniform(schedule.num_stages, forward_s=f, backward_s=b)
    assert simulate(schedule, costs).makespan_s == schedule.makespan(f, b)


@FEW
@given(plays(), st.booleans(), st.booleans())
def test_the_critical_path_fills_the_step(play: tuple[Schedule, StepCosts], blocking: bool, together: bool) -> None:
    timeline = simulate(*play, blocking=blocking, step_together=together)
    path = timeline.critical_path
    assert path[0].start_s == 0 and path[-1].end_s == timeline.makespan_s
    assert all(one.end_s == other.start_s for one, other in pairwise(path))
    assert sum(timeline.critical_s.values()) == timeline.makespan_s


@FEW
@given(plays(), st.booleans())
def test_every_second_of_every_rank_is_told(play: tuple[Schedule, StepCosts], blocking: bool) -> None:
    timeline = simulate(*play, blocking=blocking)
    told = timeline.compute_s + timeline.step_s + timeline.bubble_s + timeline.exposed_comm_s
    assert told == pytest.approx(timeline.makespan_s)


@FEW
@given(plays())
def test_a_play_is_deterministic(play: tuple[Schedule, StepCosts]) -> None:
    assert simulate(*play).events == simulate(*play).events
