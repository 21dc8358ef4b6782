"""The training loop of one rank: it obeys the job and decides nothing about the layout."""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType

import numpy as np
from numpy.typing import NDArray

from threefold.errors import WorkerError
from threefold.job import Job
from threefold.parallel.batch import LoadSamples
from threefold.parallel.engine import Engine, StepResult
from threefold.parallel.norms import clip_factor
from threefold.parallel.precision import LossScaler
from threefold.train.data.order import microbatch_samples
from threefold.train.data.source import IGNORED, SampleSource
from threefold.train.learning_rate import learning_rate_schedule
from threefold.train.metrics import MetricsWriter, StepMetrics
from threefold.train.optimizer import ShardedOptimizer
from threefold.train.recording import StepObserver
from threefold.train.summary import Sent, TrainSummary, difference, median
from threefold.train.torch_profile import StepProfiler

_TIMED_STEPS = 1000
_MEASURED_STEPS = 2
"""Steps whose activations are counted: the first has no optimizer state yet."""


class StopRequest:
    """Whether this process was asked to end after the current step (Ctrl-C, or SIGTERM from a scheduler)."""

    def __init__(self) -> None:
        self.wanted = False

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Note SIGINT and SIGTERM instead of dying of them, as long as the context lasts."""
        signals = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(signum, self._note) for signum in signals]
        try:
            yield self
        finally:
            for signum, handler in zip(signals, before, strict=True):
                signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.wanted = True


@dataclass(frozen=True)
class Sources:
    """Where samples come from; ``validation`` is None when there are no held-out tokens."""

    train: SampleSource
    validation: SampleSource | None = None


class Trainer:
    """Trains ``engine`` on ``sources`` as ``job`` says. Only one rank has a ``metrics`` writer.

    All ranks have an ``observer``, or none. ``profiler`` is told of every step.
    """

    def __init__(
        self,
        job: Job,
        engine: Engine,
        sources: Sources,
        metrics: MetricsWriter | None,
        stop: StopRequest | None = None,
        observer: StepObserver | None = None,
        profiler: StepProfiler | None = None,
    ) -> None:
        self.job, self.engine, self.sources, self.metrics = job, engine, sources, metrics
        self.stop, self.observer, self.profiler = stop or StopRequest(), observer, profiler
        self.optimizer = ShardedOptimizer(job.optimizer, engine.data)
        self.scaler = LossScaler.of_job(job.fp16)
        self.learning_rate = learning_rate_schedule(job)
        self.step_seconds: deque[float] = deque(maxlen=_TIMED_STEPS)
        self.last_step: Sent = ()
        self.skipped = False
        engine.mesh.memory.measured_steps = _MEASURED_STEPS

    def run(self) -> TrainSummary:
        """Train to the job's last step, or to the end of the step in which a rank was asked to stop.

        Raises WorkerError when the loss is not finite, ReplicaError when replicas have drifted apart.
        """
        job, loss, steps = self.job, math.nan, self.job.steps or 0
        for step in range(steps):
            self.engine.mesh.activity.begin_step(step + 1)
            with self.profiler.step(step + 1) if self.profiler else nullcontext():
                result = self._train_step(step)
            loss = result.loss
            done = step + 1
            if _is_due(job.replica_check.every, done, steps):
                self.engine.check_replicas(done)
            if result.stop:
                return self._summary(done, loss, stopped=done < steps)
            if self.sources.validation is not None and _is_due(job.evaluation.every, done, steps):
                self._evaluate(done, self.sources.validation)
        return self._summary(steps, loss, stopped=False)

    def _summary(self, steps: int, loss: float, stopped: bool) -> TrainSummary:
        seconds = median(self.step_seconds)
        speed = self._step_tokens / seconds if seconds else 0.0
        return TrainSummary(steps, loss, stopped, steps * self._step_tokens, speed, self.last_step)

    @property
    def _step_tokens(self) -> int:
        assert self.job.data is not None, "check_trainable was not called"
        return self.job.train_batch_size * self.job.data.sequence_length

    def _train_step(self, step: int) -> StepResult:
        begin, sent_before = time.perf_counter(), self.engine.mesh.traffic.snapshot()
        rate, scale = self.learning_rate(step), self.scaler.scale
        result = self.engine.train_step(
            self._samples(step),
            self.sources.train.batch,
            lambda result: self._update(step, rate, result),
            stop=self.stop.wanted,
            loss_scale=scale,
        )
        self.step_seconds.append(time.perf_counter() - begin)
        self.last_step = difference(self.engine.mesh.traffic.snapshot(), sent_before)
        self._report(step, rate, scale, result)
        return result

    def _update(self, step: int, rate: float, result: StepResult) -> None:
        finite = math.isfinite(result.loss) and math.isfinite(result.grad_norm)
        if not finite and result.num_valid and not self.job.fp16.enabled:
            raise WorkerError(
                f"step {step + 1}: the loss is {result.loss} and the gradient norm {result.grad_norm}, so training has "
                f"diverged; parameters are as they were before this step. fix: lower optimizer.params.lr (now "
                f"{rate:.3g}), lengthen scheduler.warmup_steps or set gradient_clipping "
                f"(now {self.job.gradient_clipping})"
            )
        factor = clip_factor(result.grad_norm, self.job.gradient_clipping) / self.scaler.scale
        self.skipped = self.scaler.skips(result.grad_norm)
        if not self.skipped:
            self.optimizer.step(rate, factor)

    def _report(self, step: int, rate: float, scale: float, result: StepResult) -> None:
        done, step_s = step + 1, self.step_seconds[-1]
        is_last = result.stop or done == self.job.steps
        if not (step == 0 or is_last or done % self.job.logging.every == 0):
            return
        times = self.observer.observe(done, is_last=is_last) if self.observer else None
        if self.metrics is None:
            return
        self.metrics.step(
            StepMetrics(
                step=done,
                loss=result.loss,
                grad_norm=result.grad_norm,
                learning_rate=rate,
                tokens=done * self._step_tokens,
                tokens_per_s=self._step_tokens / step_s,
                step_s=step_s,
                loss_scale=scale if self.job.fp16.enabled else None,
                skipped=self.skipped if self.job.fp16.enabled else None,
                times=times,
            )
        )

    def _evaluate(self, done: int, source: SampleSource) -> None:
        """Loss on the first ``evaluation.batches`` held-out batches: the same samples each time."""
        assert self.job.data is not None, "check_trainable was not called"
        # The last batch may hold fewer samples than others; what is beyond the end is not counted.
        available = -(-source.num_samples // self.job.train_batch_size)
        batches = min(self.job.evaluation.batches, available)
        load = once_each(source)
        results = [self.engine.evaluate(self._samples(index), load) for index in range(batches)]
        num_valid = sum(result.num_valid for result in results)
        total = sum(result.loss * result.num_valid for result in results if result.num_valid)
        loss = total / num_valid if num_valid else math.nan
        if self.metrics is not None:
            self.metrics.evaluation(done, loss, num_valid)

    def _samples(self, step: int) -> Sequence[range]:
        job = self.job
        return [
            microbatch_samples(
                step, job.train_batch_size, job.micro_batch, job.num_microbatches, self.engine.mesh.coord.dp, index
            )
            for index in range(job.num_microbatches)
        ]


def once_each(source: SampleSource) -> LoadSamples:
    """Loads the samples of one epoch; the labels of sample numbers beyond it are ignored."""

    def load(numbers: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        tokens_BS, labels_BS = source.batch(numbers)
        beyond_B = np.asarray(numbers) >= source.num_samples
        return tokens_BS, np.where(beyond_B[:, None], IGNORED, labels_BS)

    return load


def _is_due(every: int, done: int, steps: int) -> bool:
    """Whether something that happens every so many steps (0: never) happens now; the last step always counts."""
    return every > 0 and (done % every == 0 or done == steps)
