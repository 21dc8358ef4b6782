"""The played schedule agrees with the closed forms that the search uses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plan.questions import ask, hardware_of
from threefold.cost.strategies import SCHEDULE_CODES, Strategies
from threefold.plan.limits import limits
from threefold.plan.plans import predict
from threefold.plan.play import MOST_ACTIONS, microbatches_played, play, played, step_costs
from threefold.plan.question import Question

QUESTION: Question = ask("gpt3-6.7b", hardware_of(nodes=2), 64, 2048)


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b"])
@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_time_and_memory_are_those_of_the_estimate(schedule: str, pp: int) -> None:
    strategy = Strategies.build(
        dp=16 // pp, pp=pp, num_microbatches=4 * pp, zero_stage=1, schedule=SCHEDULE_CODES[schedule]
    )
    timeline = play(QUESTION, strategy)
    estimate = predict(QUESTION, strategy)[0]
    assert timeline.makespan_s == pytest.approx(estimate.step_s, rel=0.03)
    assert timeline.peak_memory_bytes.max() == pytest.approx(estimate.peak_memory_bytes, rel=0.03)


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("interleaved_1f1b", 2), ("interleaved_1f1b", 4), ("zb_h1", 1), ("zb_v", 2)]
)
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 8), (4, 16), (4, 18), (8, 32)])
def test_so_are_those_of_the_schedules_that_fill_the_bubble(
    schedule: str, chunks: int, pp: int, microbatches: int
) -> None:
    strategy = Strategies.build(
        dp=16 // pp,
        pp=pp,
        chunks=chunks,
        num_microbatches=microbatches,
        zero_stage=1,
        schedule=SCHEDULE_CODES[schedule],
    )
    timeline, estimate = play(QUESTION, strategy), predict(QUESTION, strategy)[0]
    assert timeline.makespan_s == pytest.approx(estimate.step_s, rel=0.05)
    assert timeline.peak_memory_bytes.max() == pytest.approx(estimate.peak_memory_bytes, rel=0.05)


def test_chunks_share_what_is_said_once_a_device() -> None:
    strategy = Strategies.build(
        dp=4, pp=4, chunks=2, num_microbatches=8, zero_stage=1, schedule=SCHEDULE_CODES["interleaved_1f1b"]
    )
    costs, estimate = step_costs(QUESTION, strategy), predict(QUESTION, strategy)[0]
    assert costs.num_stages == 8
    assert sum(costs.step_s) == pytest.approx(4 * estimate.optimizer_s)


def test_a_long_play_is_cut() -> None:
    strategy = Strategies.build(dp=1, pp=8, num_microbatches=10**6)
    assert microbatches_played(strategy) == MOST_ACTIONS // 16
    assert microbatches_played(Strategies.build(dp=1, pp=100, num_microbatches=10**6)) == 300
    assert microbatches_played(Strategies.build(pp=8, num_microbatches=5)) == 5


def test_a_plan_that_does_not_fit_when_it_is_played_does_not_fit() -> None:
    plan = predict(QUESTION, Strategies.build(dp=4, pp=4, num_microbatches=16, zero_stage=1, recompute=2))[0]
    assert played(QUESTION, plan).fits
    assert not played(QUESTION, replace(plan, usable_memory_bytes=1e9)).fits


def test_the_bubble_of_a_cut_play_is_not_stated() -> None:
    strategy = Strategies.build(dp=2, pp=8, num_microbatches=64, zero_stage=1)
    plan = played(QUESTION, predict(QUESTION, strategy)[0])
    assert any("Played action by action" in words for words in limits(QUESTION, plan))
    assert plan.timeline is not None
    cut = replace(plan, timeline=replace(plan.timeline, num_microbatches=32))
    assert not any("Played action by action" in words for words in limits(QUESTION, cut))
