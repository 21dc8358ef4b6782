"""One rank of a 3D-parallel model: mesh, stage, pipeline and gradient sync put together.

The engine computes true gradients and leaves them in ``parameter.grad``; what is done with them (clipping, the
optimizer) is the trainer's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from threefold.job import Job, ModelSpec
from threefold.job.spec import Offload
from threefold.layout import (
    DECODER_STYLES,
    Layout,
    Style,
    StyleRule,
    compression_of,
    qkv_sizes,
    shard,
    split_halves,
)
from threefold.models.decoder import Decoder
from threefold.models.init import decoder_initial_value
from threefold.parallel.activity import ActivityLog
from threefold.parallel.batch import LoadSamples, ReplicaBatch, load_batch
from threefold.parallel.buckets import ShardingPolicy
from threefold.parallel.data import DataParallel
from threefold.parallel.mesh import Mesh, build_mesh
from threefold.parallel.pipeline import Hooks, LossSum, PipelineExecutor, StepState
from threefold.parallel.replicas import check_replicas, make_replicas_equal
from threefold.parallel.row import plan_row
from threefold.parallel.stage import (
    ShardedParameter,
    Stage,
    TensorParallelPlan,
    build_stages,
    compile_layers,
    defer_plain_linears,
    rank_parameters,
    ranks_of_ties,
    recompute_modules,
)
from threefold.parallel.vocab import VocabPart, cross_entropy_sum
from threefold.schedule import Schedule, forward_only, job_schedule, lower

DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""The format in which the model computes, by the job's precision."""


@dataclass(frozen=True)
class EngineOptions:
    """What an engine needs to know besides its stage: see the job file's keys of the same names."""

    schedule: Schedule
    boundary_shape: tuple[int, ...]
    dtype: torch.dtype
    sharding: ShardingPolicy


@dataclass(frozen=True)
class StepResult:
    """One step seen from any rank: all numbers are global and equal everywhere.

    ``loss`` is the mean over the valid tokens of the global batch, ``grad_norm`` the norm before clipping, ``stop``
    whether any rank wishes to end.
    """

    loss: float
    grad_norm: float
    num_valid: int
    stop: bool
    peak_live: int


class Engine:
    """Forward, backward and gradient reduction of one rank. All ranks must make the same calls.

    ``stages`` are all that this rank holds by the schedule.
    """

    def __init__(self, stages: Sequence[Stage], mesh: Mesh, loss_sum: LossSum, options: EngineOptions) -> None:
        self.stages, self.mesh, self.options = tuple(stages), mesh, options
        self.parameters: tuple[ShardedParameter, ...] = rank_parameters(stages)
        by_index = {stage.index: stage for stage in stages}
        self.executor = PipelineExecutor(by_index, mesh, options.boundary_shape, options.dtype, loss_sum)
        self.schedule = lower(options.schedule)
        self._evaluations: dict[int, Schedule] = {}
        if plan_row(self.schedule, mesh.coord.pp).splits_backward:
            for stage in stages:
                defer_plain_linears(stage, mesh.world)
        make_replicas_equal(self.parameters)
        self.data = DataParallel(stages, mesh.dp, options.sharding, mesh.memory)

    def train_step(
        self,
        samples: Sequence[Sequence[int]],
        load: LoadSamples,
        update: Callable[[StepResult], None],
        *,
        stop: bool = False,
        loss_scale: float = 1.0,
    ) -> StepResult:
        """One pass over this replica's ``samples`` (the sample numbers of each microbatch), then ``update(result)``.

        ``update`` finds the summed gradients, ``loss_scale`` times as large, in ``data``. ``stop`` is this rank's wish
        to end.
        """
        self._set_training(True)
        batch, num_valid = self._load(samples, load)
        self.data.begin_step()
        results: list[StepResult] = []

        def step(state: StepState) -> None:
            results.append(self._summarize(state, num_valid, stop))
            self.mesh.recorder.ready()
            update(results[0])

        hooks = Hooks(self.data.before_backward, self.data.after_compute, self.data.finish, step)
        with self.mesh.memory.measured():
            self.executor.run(self.schedule, batch, max(num_valid, 1), hooks, loss_scale)
        return results[0]

    def evaluate(self, samples: Sequence[Sequence[int]], load: LoadSamples) -> StepResult:
        """Loss over the valid tokens of all replicas' ``samples``; changes nothing, and the norm is 0."""
        self._set_training(False)
        batch, num_valid = self._load(samples, load)
        state = self.executor.run(self._forward_only(len(samples)), batch, max(num_valid, 1))
        return self._summarize(state, num_valid, stop=False, with_norm=False)

    def _forward_only(self, num_microbatches: int) -> Schedule:
        if num_microbatches not in self._evaluations:
            own = self.schedule
            schedule = forward_only(own.num_ranks, num_microbatches, own.num_chunks, own.placement)
            self._evaluations[num_microbatches] = lower(schedule)
        return self._evaluations[num_microbatches]

    def check_replicas(self, step: int) -> None:
        """Raise ReplicaError, on every rank, when copies of a parameter are not equal."""
        with self.data.whole_parameters():
            check_replicas(self.parameters, self.mesh, step)

    def _set_training(self, training: bool) -> None:
        for stage in self.stages:
            stage.train(training)

    def _load(self, samples: Sequence[Sequence[int]], load: LoadSamples) -> tuple[ReplicaBatch, int]:
        self.mesh.recorder.begin_step()
        self.mesh.activity.begin_action("load data", -1, -1)
        device, has_last = self.mesh.device, any(stage.is_last for stage in self.stages)
        has_first = any(stage.is_first for stage in self.stages)
        batch = load_batch(samples, load, device, with_tokens=has_first, with_labels=has_last)
        num_valid = torch.tensor([batch.num_valid], dtype=torch.float64, device=device)
        if has_last:  # the only stage that needs it before backward
            self.mesh.dp.all_reduce(num_valid).wait()
        return batch, int(num_valid.item())

    def _summarize(self, state: StepState, num_valid: int, stop: bool, with_norm: bool = True) -> StepResult:
        """One small all-reduce tells every rank, whatever its stage, the loss, the norm and whether to stop."""
        sums = torch.zeros(4, dtype=torch.float64, device=self.mesh.device)
        if state.loss_sum is not None and self.mesh.coord.tp == 0:
            sums[0] = state.loss_sum
            sums[1] = num_valid if self.mesh.coord.dp == 0 else 0
        if with_norm:
            sums[2] = self.data.squared_norm() / state.loss_scale**2
        sums[3] = float(stop)
        self.mesh.world.all_reduce(sums).wait()
        loss_sum, valid, squared_norm, stops = sums.tolist()
        # A batch without a single valid token has no loss; 0 would look like a perfect model.
        loss = loss_sum / valid if valid else float("nan")
        return StepResult(loss, squared_norm**0.5, int(valid), stops > 0, state.peak_live)


def tensor_parallel_plan(spec: ModelSpec, sequence_parallel: bool) -> TensorParallelPlan:
    """How the built-in decoder is split."""
    qkv = qkv_sizes(spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim)
    return TensorParallelPlan(DECODER_STYLES, qkv, sequence_parallel)


def build_layout(job: Job) -> Layout:
    """The job's rank map."""
    return Layout(dp=job.dp, pp=job.pp, tp=job.tp, order=tuple(job.parallelism.order.split(",")))


def build_job_mesh(
    job: Job, rank: int, device: torch.device | None = None, activity: ActivityLog | None = None
) -> Mesh:
    """The mesh of the job's layout, with the groups that its model needs."""
    schedule = job_schedule(job)
    ends = [(0, schedule.num_stages - 1)] if job.model is not None and job.model.tie_word_embeddings else []
    tied = ranks_of_ties(ends, schedule.stage_rank)
    return build_mesh(build_layout(job), rank, device, activity, tied, job.shared_memory)


def build_engine(job: Job, mesh: Mesh, dtype: torch.dtype | None = None) -> Engine:
    """The engine of the built-in decoder that ``job`` describes, on this rank, in ``dtype`` or the job's own."""
    spec, data = job.model, job.data
    assert spec is not None and data is not None, "check_trainable was not called"
    number_format = dtype or DTYPES[job.precision]
    sequence_parallel = job.parallelism.tp.sequence_parallel
    schedule = job_schedule(job)
    halves = split_halves(spec.num_hidden_layers, schedule.num_stages, job.parallelism.pp.partition)
    cut = cut_layers(halves)
    with torch.device("meta"):
        model = Decoder(spec, cut)
    plan = tensor_parallel_plan(spec, sequence_parallel)
    initial_value = decoder_initial_value(spec, job.seed)
    stages = build_stages(
        model,
        [pieces(half, cut) for half in halves],
        mesh,
        plan,
        rank_of=schedule.stage_rank,
        seed=job.seed,
        initial_value=initial_value,
        dtype=number_format,
    )
    local_sequence = data.sequence_length // (job.tp if sequence_parallel else 1)
    options = EngineOptions(
        schedule=schedule,
        boundary_shape=(job.micro_batch, local_sequence, spec.hidden_size),
        dtype=number_format,
        sharding=sharding_policy(job, number_format),
    )
    for stage in stages:
        recompute = job.activation_checkpointing.of_stage(stage.index)
        stage.recompute_layers = recompute == "full"
        if recompute == "selective":
            recompute_modules(stage, "attention.core")
        if job.compile.enabled:
            compile_layers(stage, job.compile.backend)
    return Engine(stages, mesh, decoder_loss(spec, mesh), options)


def cut_layers(halves: Sequence[range]) -> frozenset[int]:
    """The layers that a stage's end goes through."""
    return frozenset(half.start // 2 for half in halves if half.start % 2)


def pieces(halves: range, cut: Collection[int]) -> range:
    """A stage's half layers as numbers of parts, where only the layers in ``cut`` are two parts."""

    def piece(half: int) -> int:
        layer = half // 2
        return layer + sum(other < layer for other in cut) + half % 2

    return range(piece(halves.start), piece(halves.stop))


def sharding_policy(job: Job, number_format: torch.dtype) -> ShardingPolicy:
    """How the job's data parallelism stores and sends things when the model computes in ``number_format``."""
    zero = job.zero_optimization

    def offloads(section: Offload | None) -> bool:
        return section is not None and section.device == "cpu"

    return ShardingPolicy(
        bucket_elements=zero.reduce_bucket_size,
        stage=zero.stage,
        overlap=zero.overlap_comm,
        accumulate=torch.float64 if number_format == torch.float64 else torch.float32,
        offload_optimizer=offloads(zero.offload_optimizer),
        offload_parameters=offloads(zero.offload_param),
        communicate=DTYPES[job.communication_data_type] if job.communication_data_type else None,
        compression=compression_of(job),
    )


def decoder_loss(spec: ModelSpec, mesh: Mesh) -> LossSum:
    """Cross entropy over this rank's part of the vocabulary."""
    rows = (spec.vocab_size, spec.hidden_size)
    columns = shard(StyleRule(Style.VOCAB), "weight", rows, mesh.layout.tp, mesh.coord.tp)
    part = VocabPart.of_shard(columns, spec.vocab_size, mesh.tp)
    return lambda logits_BSV, labels_BS: cross_entropy_sum(logits_BSV, labels_BS, part)
