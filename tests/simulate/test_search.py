"""The searched schedule against the named ones, in the simulator, for costs of any kind."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from threefold.errors import JobError
from threefold.schedule import NAMED, Schedule, check_lowered, lower, peak_live_microbatches
from threefold.schedule.schedule import peak_held
from threefold.simulate import StepCosts, search, search_chunks, simulate, step_s

FEW = settings(max_examples=30, deadline=None, derandomize=True)
SECONDS = st.integers(1, 32).map(lambda ticks: ticks / 8)


@st.composite
def costs_of(draw: st.DrawFn, num_stages: int) -> StepCosts:
    def some(number: int) -> tuple[float, ...]:
        return tuple(draw(st.lists(SECONDS, min_size=number, max_size=number)))

    return StepCosts(
        some(num_stages), some(num_stages), some(num_stages), some(num_stages - 1),
        some(num_stages), some(num_stages), (1.0,) * num_stages, (0.0,) * num_stages,
    )  # fmt: skip


def most_live(schedule: Schedule) -> float:
    """In microbatches of a rank's whole share."""
    return max(peak_live_microbatches(schedule, rank) for rank in range(schedule.num_ranks)) / schedule.num_chunks


@FEW
@given(st.integers(1, 4), st.integers(1, 8), st.integers(1, 3), st.integers(2, 16), st.data())
def test_never_slower_than_a_named_schedule_in_the_same_memory(
    p: int, m: int, v: int, halves: int, data: st.DataObject
) -> None:
    costs, limit = data.draw(costs_of(p * v)), halves / 2
    found = search(costs, p, m, limit_microbatches=limit)
    assert most_live(found.schedule) <= limit
    assert found.length == pytest.approx(simulate(found.schedule, costs).makespan_s, abs=1e-9)
    assert check_lowered(lower(found.schedule)) == []
    for named in NAMED.values():
        rival = named.build(p, m, v) if named.chunks in (None, v) else None
        if rival is not None and most_live(rival) <= limit:
            assert found.length <= simulate(rival, costs).makespan_s + 1e-9


@FEW
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 2), st.data())
def test_step_s_is_the_makespan_of_the_play(p: int, m: int, v: int, data: st.DataObject) -> None:
    costs = data.draw(costs_of(p * v))
    for named in NAMED.values():
        if named.chunks in (None, v):
            schedule = named.build(p, m, v)
            for one in (schedule, lower(schedule)):
                assert step_s(one, costs) == simulate(one, costs).makespan_s


def uniform(num_stages: int, share: float, transfer: float = 0.05) -> StepCosts:
    return StepCosts(
        (share,) * num_stages, (1.2 * share,) * num_stages, (0.8 * share,) * num_stages, (transfer,) * (num_stages - 1),
        (0.0,) * num_stages, (0.0,) * num_stages, (share,) * num_stages, (0.0,) * num_stages,
    )  # fmt: skip


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 32)])
def test_of_several_numbers_of_chunks_the_best_is_taken(p: int, m: int) -> None:
    found = search_chunks(lambda v: uniform(p * v, 1 / v), p, m, (1, 2))
    each = {v: search(uniform(p * v, 1 / v), p, m) for v in (1, 2)}
    assert found.length <= min(one.length for one in each.values()) * 1.01  # each has half of the budget
    one_f_one_b = simulate(NAMED["1f1b"].build(p, m, 1), uniform(p, 1)).makespan_s
    assert found.length < one_f_one_b * 0.9


def test_a_heavy_last_stage_is_scheduled_around() -> None:
    """With a head that takes half a stage more, the busiest rank works without a gap once it has begun."""
    costs = StepCosts(
        (1.0, 1.0, 1.0, 1.5), (1.0, 1.0, 1.0, 1.3), (1.0, 1.0, 1.0, 1.3), (0.1,) * 3,
        (0.0,) * 4, (0.0,) * 4, (1.0,) * 4, (0.0,) * 4,
    )  # fmt: skip
    found = search(costs, 4, 16)
    assert found.length == pytest.approx(3 * 1.1 + 16 * 4.1)


def test_bytes_limit_each_rank_by_itself() -> None:
    costs = uniform(4, 1.0)
    found = search(costs, 4, 8, limit_bytes=(2.0, 4.0, 3.0, 1.0))
    held = [peak_held(found.schedule, rank, costs.activation_bytes) for rank in range(4)]
    assert all(one <= limit for one, limit in zip(held, (2.0, 4.0, 3.0, 1.0), strict=True))
    with pytest.raises(JobError, match="less than one microbatch"):
        search(costs, 4, 8, limit_bytes=(2.0, 4.0, 3.0, 0.5))
