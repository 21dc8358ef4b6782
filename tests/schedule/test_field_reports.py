"""What users of pipeline engines ran into, held at the level of schedules, for every schedule there is.

Numbers are those of the field reports.
"""

from __future__ import annotations

import itertools

import pytest

from threefold.schedule import (
    NAMED,
    Kind,
    Schedule,
    check_lowered,
    forward_only,
    lower,
    peak_live_microbatches,
)
from threefold.schedule.schedule import Placement, peak_held
from threefold.schedule.search import searched
from threefold.simulate import StepCosts, search, simulate, step_s


def every_schedule(p: int, m: int, v: int = 2) -> list[Schedule]:
    """All that has a name, the one that is searched, and evaluation, with one chunk or ``v``."""
    named = [one.build(p, m, one.chunks or v) for one in NAMED.values()]
    return [
        *named,
        searched(p, m),
        searched(p, m, v),
        forward_only(p, m),
        *(forward_only(p, m, v, placement) for placement in Placement),
    ]


@pytest.mark.parametrize("p", range(1, 6))
def test_b063_b066_no_schedule_hangs_with_few_microbatches_or_unbuffered_sends(p: int) -> None:
    """m in {1, ..., 2p}: both ends of every link agree on the order, and the rows end with sends that block."""
    for m in range(1, 2 * p + 1):
        for schedule in every_schedule(p, m):
            assert check_lowered(lower(schedule)) == [], schedule.name


@pytest.mark.parametrize(("p", "v"), list(itertools.product((2, 3, 4), (2, 3, 4))))
def test_b065_interleaved_sends_and_receives_never_cross(p: int, v: int) -> None:
    for m in (1, p - 1, p, p + 1, 2 * p, 3 * p + 1):
        assert check_lowered(lower(NAMED["interleaved_1f1b"].build(p, m, v))) == []


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 8), (4, 16), (8, 9)])
def test_b122_activations_are_freed_as_early_as_the_theory_says(p: int, m: int) -> None:
    theory = {
        "naive": [1] * p,
        "gpipe": [m] * p,
        "1f1b": [min(m, p - rank) for rank in range(p)],
        "zb_h1": [min(m, p)] * p,
    }
    for name, live in theory.items():
        schedule = NAMED[name].build(p, m, 1)
        assert [peak_live_microbatches(schedule, rank) for rank in range(p)] == live
        assert [peak_live_microbatches(lower(schedule), rank) for rank in range(p)] == live
    for schedule in every_schedule(p, m):
        costs = StepCosts.uniform(schedule.num_stages, activation_bytes=1.0)
        played = simulate(schedule, costs).peak_memory_bytes.tolist()
        assert played == [peak_live_microbatches(schedule, rank) for rank in range(p)]
        for rank, row in enumerate(schedule.rows):
            freed = sum(action.kind in (Kind.B, Kind.W) for action in row)
            made = sum(action.kind is Kind.F for action in row)
            assert schedule.is_forward_only or made == freed == m * len(schedule.stages_of(rank))


def costs_of(num_stages: int, f: float, i: float, w: float, transfer: float) -> StepCosts:
    share, nothing = 4 / num_stages, (0.0,) * num_stages
    return StepCosts(
        (f * share,) * num_stages, (i * share,) * num_stages, (w * share,) * num_stages,
        (transfer,) * (num_stages - 1), nothing, nothing, (1.0,) * num_stages, nothing,
    )  # fmt: skip


def test_b124_the_simulator_says_when_zero_bubble_loses_and_the_search_does_not() -> None:
    """ZB-V sends twice as often: with slow links and little to put off it loses, which training should not find out."""

    def lengths(w: float, transfer: float) -> dict[str, float]:
        stages = {"1f1b": 4, "zb_v": 8}
        return {
            name: step_s(NAMED[name].build(4, 16, number // 4), costs_of(number, 1, 1, w, transfer))
            for name, number in stages.items()
        }

    fast, slow = lengths(w=1, transfer=0), lengths(w=0.2, transfer=2)
    assert fast["zb_v"] < fast["1f1b"]
    assert slow["zb_v"] > slow["1f1b"]
    found = search(costs_of(4, 1, 1, 0.2, 2), 4, 16)
    assert found.length <= slow["1f1b"]
    assert max(peak_held(found.schedule, rank, (1.0,) * 4) for rank in range(4)) <= 4
