"""The searched schedule: legal, safe, within its memory, and never longer than what has a name."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from threefold.errors import JobError
from threefold.schedule import (
    NAMED,
    Kind,
    Placement,
    Schedule,
    check_lowered,
    check_schedule,
    lower,
    makespan,
    parse_schedule,
    peak_live_microbatches,
    zb_h1,
)
from threefold.schedule.greedy import Policy, greedy
from threefold.schedule.playing import Durations
from threefold.schedule.schedule import peak_held
from threefold.schedule.search import default_limits, lower_bound, search_schedule, searched
from threefold.schedule.weave import play_weave, unwoven

FEW = settings(max_examples=40, deadline=None, derandomize=True)
TICKS = st.integers(1, 24).map(lambda ticks: ticks / 8)  # sums of these are exact
SIZES = st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3))


def unit_length(schedule: Schedule) -> float:
    return makespan(schedule.rows, schedule.num_stages)


@st.composite
def durations_of(draw: st.DrawFn, num_stages: int) -> Durations:
    def some(number: int, values: st.SearchStrategy[float] = TICKS) -> tuple[float, ...]:
        return tuple(draw(st.lists(values, min_size=number, max_size=number)))

    return Durations(
        some(num_stages), some(num_stages), some(num_stages), some(num_stages - 1), some(num_stages), some(num_stages)
    )


@st.composite
def questions(draw: st.DrawFn) -> tuple[int, Durations, tuple[float, ...], Placement]:
    """Microbatches, durations, the limit of each rank (from one microbatch up) and a placement."""
    p, m, v = draw(SIZES)
    durations = draw(durations_of(p * v))
    placement = draw(st.sampled_from(Placement)) if v > 1 else Placement.LOOP
    full = [0.0] * p
    for stage, held in enumerate(durations.held):
        full[placement.rank_of(stage, p)] += held
    return m, durations, tuple(one * draw(st.integers(4, 20)) / 4 for one in full), placement


def is_sound(schedule: Schedule, held: tuple[float, ...], limits: tuple[float, ...]) -> bool:
    kept = all(peak_held(schedule, rank, held) <= limit * (1 + 1e-6) for rank, limit in enumerate(limits))
    return kept and check_schedule(schedule) == [] and check_lowered(lower(schedule)) == []


@FEW
@given(questions(), st.data())
def test_whatever_a_policy_prefers_it_ends_within_the_memory(
    question: tuple[int, Durations, tuple[float, ...], Placement], data: st.DataObject
) -> None:
    m, durations, limits, placement = question

    def each(values: st.SearchStrategy[float]) -> tuple[float, ...]:
        return tuple(data.draw(values) for _ in limits)

    policy = Policy(
        first=data.draw(st.sampled_from([None, Kind.F, Kind.I])),
        lag=each(st.sampled_from([0.0, 1.0, 2.0, float("inf")])),
        patience=data.draw(st.sampled_from([0.0, 0.5, 1.0])),
        deep=data.draw(st.booleans()),
        caps=tuple(limit * data.draw(st.sampled_from([0.25, 0.75, 1.0])) for limit in limits),
    )
    played = greedy(m, durations, limits, placement, policy)
    assert played is not None
    assert is_sound(played.schedule, durations.held, limits)
    assert parse_schedule(played.schedule.to_text()) == played.schedule
    assert played.length >= lower_bound(m, durations, len(limits), placement) * (1 - 1e-9)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize(("p", "m"), [(1, 3), (3, 2), (4, 7)])
def test_weaves_of_a_known_order_are_sound(name: str, p: int, m: int) -> None:
    schedule = NAMED[name].build(p, m, NAMED[name].chunks or 2)
    durations, limits = Durations.uniform(schedule.num_stages), (float(m * schedule.num_chunks),) * p
    for weave in unwoven(schedule):
        for one in (weave, *weave.neighbours()):
            played = play_weave(m, durations, limits, one)
            assert played is None or is_sound(played.schedule, durations.held, limits)
        assert play_weave(m, durations, limits, weave) is not None


def test_zb_h1_is_woven_of_1f1b() -> None:
    """F as far ahead as under 1F1B, W of rank r as far behind as r."""
    weave = next(unwoven(NAMED["1f1b"].build(4, 8, 1)))
    played = play_weave(8, Durations.uniform(4), (4.0,) * 4, weave)
    assert played is not None
    assert played.length == unit_length(zb_h1(4, 8))
    assert played.schedule.rows == zb_h1(4, 8).rows


@pytest.mark.parametrize(("p", "m", "v"), list(itertools.product((1, 2, 4), (1, 3, 8), (1, 2, 3))))
def test_of_unit_costs_it_is_as_good_as_the_best_in_the_memory_of_1f1b(p: int, m: int, v: int) -> None:
    schedule = searched(p, m, v)
    assert schedule.name == "searched"
    assert is_sound(schedule, (1.0,) * (p * v), (float(p * v),) * p)
    for named in NAMED.values():
        if named.chunks in (None, v):
            rival = named.build(p, m, v)
            if max(peak_live_microbatches(rival, rank) for rank in range(p)) <= p * v:
                assert unit_length(schedule) <= unit_length(rival)


def test_less_memory_than_any_named_one_needs_is_used_well() -> None:
    """Of two microbatches in four stages, naive is the only named schedule; it works one stage at a time."""
    durations = Durations.uniform(4)
    found = search_schedule(8, durations, (2.0,) * 4, unit_length)
    naive = NAMED["naive"].build(4, 8, 1)
    assert found.origin == "searched"
    assert found.length < 0.55 * unit_length(naive)
    assert is_sound(found.schedule, durations.held, (2.0,) * 4)


def test_more_memory_is_used() -> None:
    """ZB-H1 idles (p - 1)(F + I - W); with the memory of ZB-H2 nobody but the last rank waits (Qi et al. 2023)."""
    durations = Durations.uniform(4)
    found = search_schedule(16, durations, (7.0,) * 4, unit_length)
    assert found.length == 3 * 16 + 3
    assert found.length == lower_bound(16, durations, 4, Placement.LOOP)
    assert unit_length(zb_h1(4, 16)) == 3 * 16 + 3  # at unit costs it is as good already
    slow_weights = Durations((2.0,) * 4, (2.0,) * 4, (1.0,) * 4, (0.0,) * 3, (0.0,) * 4, (1.0,) * 4)

    def length(schedule: Schedule) -> float:
        return makespan(schedule.rows, 4, {Kind.F: 2.0, Kind.B: 3.0, Kind.I: 2.0, Kind.W: 1.0})

    more = search_schedule(16, slow_weights, (7.0,) * 4, length)
    assert more.length < length(zb_h1(4, 16)) == 16 * 5 + 3 * 3


def test_a_limit_below_one_microbatch_is_refused() -> None:
    with pytest.raises(JobError, match=r"--memory-limit: is less than one microbatch on a rank: 1.5"):
        search_schedule(4, Durations.uniform(4), (1.5, 2.0), unit_length)


def test_sizes_below_one_name_the_key() -> None:
    with pytest.raises(JobError, match=r"parallelism.pp.size(.|\n)*parallelism.pp.chunks"):
        searched(0, 4, 0)


def test_the_search_is_the_same_every_time() -> None:
    one, other = (search_schedule(12, Durations.uniform(6), (5.0,) * 3, unit_length) for _ in range(2))
    assert one == other


def test_default_limits_are_what_1f1b_holds_on_its_fullest_rank() -> None:
    assert default_limits(4, Durations.uniform(8)) == (8.0,) * 4


def test_without_a_budget_something_is_found_where_no_named_schedule_has_room() -> None:
    """Of two chunks in the memory of one microbatch, where every named schedule needs more."""
    found = search_schedule(6, Durations.uniform(8), (2.0,) * 4, unit_length, budget=0)
    assert found.origin == "searched"
    assert is_sound(found.schedule, (1.0,) * 8, (2.0,) * 4)
