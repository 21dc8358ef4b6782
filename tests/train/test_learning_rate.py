"""The learning rate: shapes, closed forms, and independence of the world size."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from threefold.errors import JobError
from threefold.job import Job, parse_job, relayout
from threefold.job.spec import Scheduler
from threefold.train.learning_rate import LearningRateSchedule, batch_factor, learning_rate_schedule


def rates(schedule: LearningRateSchedule, num_steps: int) -> list[float]:
    return [schedule(step) for step in range(num_steps)]


def test_warm_up_rises_from_its_first_step_to_the_peak() -> None:
    schedule = LearningRateSchedule(peak_lr=1.0, warmup_steps=4)
    assert rates(schedule, 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_logarithmic_warm_up_rises_fast_then_slowly() -> None:
    first, second, third, *rest = rates(LearningRateSchedule(1.0, warmup_steps=3, warmup_shape="log"), 5)
    assert 0 < first < second < third == 1.0
    assert first > 1 / 3
    assert rest == [1.0, 1.0]


def test_linear_decay_ends_on_the_floor_after_the_last_step() -> None:
    schedule = LearningRateSchedule(1.0, "linear", warmup_steps=2, total_steps=6, min_lr_ratio=0.2)
    assert rates(schedule, 8) == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine_decay_is_halfway_in_the_middle() -> None:
    schedule = LearningRateSchedule(2.0, "cosine", warmup_steps=10, total_steps=110, min_lr_ratio=0.1)
    assert schedule(10) == 2.0
    assert schedule(60) == pytest.approx(2.0 * 0.55)
    assert schedule(35) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))))
    assert schedule(110) == schedule(1000) == pytest.approx(0.2)


@given(
    decay=st.sampled_from(["constant", "linear", "cosine"]),
    shape=st.sampled_from(["linear", "log"]),
    warmup_steps=st.integers(0, 30),
    total_steps=st.integers(1, 60),
    floor=st.floats(0, 1),
)
def test_rates_stay_between_0_and_the_peak_and_are_above_0_until_the_end(
    decay: Any, shape: Any, warmup_steps: int, total_steps: int, floor: float
) -> None:
    schedule = LearningRateSchedule(3e-4, decay, warmup_steps, shape, total_steps, floor)
    values = rates(schedule, total_steps)
    assert all(0 < value <= 3e-4 * (1 + 1e-12) for value in values)
    rising, falling = values[:warmup_steps], values[warmup_steps:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)


def test_batch_scaling_follows_the_published_rules() -> None:
    assert batch_factor("linear", 8192, 256) == 32  # Goyal et al. 2017: 0.1 at 256 becomes 3.2 at 8192
    assert batch_factor("sqrt", 1024, 256) == 2
    assert batch_factor("sqrt", 64, 256) == 0.5


def make_job(**scheduler: Any) -> Job:
    """Make a job of one process with 64 samples a step."""
    return parse_job(
        {
            "steps": 20,
            "train_batch_size": 64,
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
            "scheduler": {"type": "cosine", "warmup_steps": 3, "min_lr_ratio": 0.1, **scheduler},
        },
        world_size=1,
    )


@pytest.mark.parametrize("scaling", [{}, {"batch_scaling": "linear", "reference_batch_size": 16}])
def test_the_rate_of_a_step_does_not_depend_on_the_world_size(scaling: dict[str, Any]) -> None:
    """Field report B120: a scheduler that every rank, or every microbatch, advances runs too fast."""
    job = make_job(**scaling)
    alone = learning_rate_schedule(job)
    assert alone(0) == pytest.approx(1e-4 * (4 if scaling else 1))
    for dp in (2, 8, 64):
        spread = relayout(job, dp=dp)
        assert (spread.world_size, spread.train_batch_size) == (dp, 64)
        assert rates(learning_rate_schedule(spread), 20) == rates(alone, 20)


def test_the_decay_ends_at_the_jobs_steps_unless_told_otherwise() -> None:
    assert learning_rate_schedule(make_job())(20) == pytest.approx(3e-5)
    assert learning_rate_schedule(make_job(total_steps=40))(20) > 1e-4


def test_scaling_without_a_reference_is_refused() -> None:
    job = make_job()
    # The job's own rules refuse this in a file; a job that is made in Python passes them by.
    without_reference = job.model_copy(update={"scheduler": Scheduler(batch_scaling="sqrt")})
    with pytest.raises(JobError, match=r"scheduler.reference_batch_size: is missing(.|\n)*fix: set it"):
        learning_rate_schedule(without_reference)
