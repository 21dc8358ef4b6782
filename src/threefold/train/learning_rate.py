"""The learning rate of every optimizer step, as a pure function of the job and the step number.

There is no counter to advance: a rank asks for step k and gets the rate of step k, so the world size, gradient
accumulation and resuming can't change it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

from threefold.errors import JobError, Problem

if TYPE_CHECKING:
    from threefold.job.spec import Job


@dataclass(frozen=True)
class LearningRateSchedule:
    """A warm-up to ``peak_lr`` over ``warmup_steps`` steps, then ``decay`` to ``min_lr_ratio * peak_lr``.

    Call it with a 0-based optimizer step. Warm-up step k has ``(k + 1) / warmup_steps`` of the peak (log: the same of
    logarithms), so the first step, which would be wasted at rate 0, already has a rise, and the last has the peak. The
    floor is reached at step ``total_steps``, the first one after the run, and kept from then on.
    """

    peak_lr: float
    decay: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    warmup_shape: Literal["linear", "log"] = "linear"
    total_steps: int = 1
    min_lr_ratio: float = 0.0

    def __call__(self, step: int) -> float:
        """Return the learning rate of the 0-based optimizer step."""
        return self.peak_lr * (self._rise(step) if step < self.warmup_steps else self._fall(step))

    def scaled(self, factor: float) -> Self:
        """Return the schedule with every rate multiplied by ``factor``."""
        return replace(self, peak_lr=self.peak_lr * factor)

    def _rise(self, step: int) -> float:
        if self.warmup_shape == "log":
            return math.log1p(step + 1) / math.log1p(self.warmup_steps)
        return (step + 1) / self.warmup_steps

    def _fall(self, step: int) -> float:
        if self.decay == "constant":
            return 1.0
        # A warm-up as long as the run leaves no steps to fall in; max(1, ...) then keeps the peak for one step.
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        height = 1.0 - progress if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * height


def learning_rate_schedule(job: Job) -> LearningRateSchedule:
    """Return the schedule that a job states, its peak scaled to the global batch when the job asks for that.

    Raises JobError when ``scheduler.batch_scaling`` has no ``scheduler.reference_batch_size`` to scale from.
    """
    stated = job.scheduler
    schedule = LearningRateSchedule(
        peak_lr=job.optimizer.params.lr,
        decay=stated.type,
        warmup_steps=stated.warmup_steps,
        warmup_shape=stated.warmup_type,
        total_steps=stated.total_steps or job.steps or 1,
        min_lr_ratio=stated.min_lr_ratio,
    )
    if stated.batch_scaling == "none":
        return schedule
    if stated.reference_batch_size is None:
        raise JobError([_no_reference(stated.batch_scaling)])
    return schedule.scaled(batch_factor(stated.batch_scaling, job.train_batch_size, stated.reference_batch_size))


def batch_factor(scaling: Literal["linear", "sqrt"], train_batch_size: int, reference_batch_size: int) -> float:
    """Return by how much a rate that was tuned at ``reference_batch_size`` grows at ``train_batch_size``.

    linear: B / reference, for SGD (Goyal et al. 2017, "Accurate, Large Minibatch SGD"). sqrt: its square root, for Adam
    (Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms"). The global batch alone
    counts, never the number of ranks that it is spread over.
    """
    ratio = train_batch_size / reference_batch_size
    return ratio if scaling == "linear" else math.sqrt(ratio)


def _no_reference(scaling: str) -> Problem:
    return Problem(
        "scheduler.reference_batch_size",
        f"is missing; scheduler.batch_scaling {scaling!r} multiplies the rate by train_batch_size over it",
        'set it to the train_batch_size that optimizer.params.lr was tuned for, or set batch_scaling to "none"',
    )
