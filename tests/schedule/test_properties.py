"""Laws of every schedule that has a name, for any sizes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from threefold.schedule import (
    NAMED,
    Kind,
    Placement,
    Schedule,
    check_lowered,
    check_schedule,
    forward_only,
    lower,
    parse_schedule,
)

FEW = settings(max_examples=80, deadline=None, derandomize=True)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    p, m, v = draw(st.integers(1, 7)), draw(st.integers(1, 20)), draw(st.integers(1, 4))
    name = draw(st.sampled_from([*NAMED, "forward_only"]))
    if name == "forward_only":
        return forward_only(p, m, v, draw(st.sampled_from(Placement)))
    return NAMED[name].build(p, m, NAMED[name].chunks or v)


@FEW
@given(schedules())
def test_it_is_legal_and_its_links_can_not_deadlock(schedule: Schedule) -> None:
    assert check_schedule(schedule) == []
    assert check_lowered(lower(schedule)) == []
    assert lower(lower(schedule)) == lower(schedule)
    assert lower(schedule).grid() == schedule.grid()


@FEW
@given(schedules())
def test_its_text_spells_it(schedule: Schedule) -> None:
    for one in (schedule, lower(schedule)):
        assert parse_schedule(one.to_text()) == one


@FEW
@given(schedules())
def test_every_stage_runs_each_kind_in_the_order_of_the_microbatches(schedule: Schedule) -> None:
    """So gradients are added up in the same order under every schedule."""
    for row in schedule.rows:
        for kind in (Kind.F, Kind.B, Kind.I, Kind.W):
            for stage in {action.stage for action in row}:
                done = [a.microbatch for a in row if a.kind is kind and a.stage == stage]
                assert done == sorted(done)


@FEW
@given(schedules())
def test_ranks_and_stages_agree(schedule: Schedule) -> None:
    held = [schedule.stages_of(rank) for rank in range(schedule.num_ranks)]
    assert sorted(stage for stages in held for stage in stages) == list(range(schedule.num_stages))
    for rank, stages in enumerate(held):
        assert all(schedule.stage_rank(stage) == rank for stage in stages)
        assert len(stages) == schedule.num_chunks
        assert {action.stage for action in schedule.rows[rank]} == set(stages)
