"""What the distributed tests run on the ranks: a few steps of a job, and what each rank saw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from threefold.job import Job
from threefold.layout import Shard
from threefold.measure.parity import replica_samples
from threefold.measure.worker_pool import WorkerContext
from threefold.parallel.engine import Engine, StepResult, build_engine, build_job_mesh
from threefold.parallel.norms import clip_factor
from threefold.parallel.replicas import hash_tensor
from threefold.train.data.source import SampleSource
from threefold.train.data.synthetic import SyntheticTokens
from threefold.train.optimizer import ShardedOptimizer


@dataclass
class RankRun:
    """What one rank saw."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    hashes: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    shards: dict[str, Shard] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    peak_live: int = 0
    traffic: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)

    def note_parameters(self, engine: Engine) -> None:
        """Keep the rank's parameters, and which part of the model they are."""
        for entry in engine.parameters:
            self.parameters[entry.name] = entry.parameter.detach().clone()
            self.shards[entry.name], self.shapes[entry.name] = entry.shard, entry.global_shape


def tokens_of(job: Job, **keys: Any) -> SyntheticTokens:
    assert job.model is not None and job.data is not None
    return SyntheticTokens(job.model.vocab_size, job.data.sequence_length, job.seed, **keys)


def run_steps(
    context: WorkerContext,
    job: Job,
    steps: int = 2,
    source: SampleSource | None = None,
    evaluate_first: bool = False,
) -> RankRun:
    """Train ``steps`` steps with the job's optimizer and clipping; the traffic is that of the last step."""
    engine = build_engine(job, build_job_mesh(job, context.rank, activity=context.activity))
    source = source or tokens_of(job, ignored_fraction=0.4)
    optimizer = ShardedOptimizer(job.optimizer, engine.data)
    run = RankRun()
    if evaluate_first:
        run.evaluations.append(engine.evaluate(replica_samples(job, engine.mesh.coord.dp, 0), source.batch).loss)
    for step in range(steps):
        engine.mesh.traffic.clear()
        result = engine.train_step(
            replica_samples(job, engine.mesh.coord.dp, step), source.batch, updater(job, optimizer)
        )
        run.losses.append(result.loss)
        run.norms.append(result.grad_norm)
        run.peak_live = result.peak_live
    traffic = engine.mesh.traffic
    run.traffic = {key: (traffic.calls[key], traffic.payload_bytes[key]) for key in traffic.calls}
    engine.check_replicas(steps)
    with engine.data.whole_parameters():
        run.hashes = {entry.name: hash_tensor(entry.parameter) for entry in engine.parameters}
        run.note_parameters(engine)
    return run


def updater(job: Job, optimizer: ShardedOptimizer) -> Callable[[StepResult], None]:
    def update(result: StepResult) -> None:
        optimizer.step(job.optimizer.params.lr, clip_factor(result.grad_norm, job.gradient_clipping))

    return update


def initial_parameters(context: WorkerContext, job: Job) -> RankRun:
    """What each rank starts from."""
    run = RankRun()
    run.note_parameters(build_engine(job, build_job_mesh(job, context.rank, activity=context.activity)))
    return run


def whole_parameters(runs: Sequence[RankRun]) -> dict[str, Tensor]:
    """The model put together from the parts of all ranks; NaN where no rank holds an element."""
    whole: dict[str, Tensor] = {}
    for run in runs:
        for name, local in run.parameters.items():
            value = whole.setdefault(name, local.new_full(run.shapes[name], float("nan")))
            part = run.shards[name]
            if part.dim is None:
                value.copy_(local)
            for piece in part.slices:
                source = local.narrow(part.dim or 0, piece.local_start, piece.length)
                value.narrow(part.dim or 0, piece.global_start, piece.length).copy_(source)
    return whole


def all_equal(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)
