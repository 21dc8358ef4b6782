"""The pipeline runs any legal schedule, holds what theory says, never hangs, and names what goes wrong."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tests.jobs import GPT2, small_job
from tests.parallel.custom import TIED_STYLES, Case, compare_custom, tied_model
from tests.parallel.ranks import RankRun, all_equal, replica_samples, run_steps, tokens_of, updater
from threefold.errors import JobError, WorkerError
from threefold.job import Job, relayout
from threefold.layout import Layout, Style, StyleRule, split_layers
from threefold.measure.layouts import parse_layout
from threefold.measure.parity import ParitySettings, run_parity
from threefold.measure.reference import run_reference
from threefold.measure.worker_pool import WorkerContext, WorkerPool
from threefold.parallel.buckets import ShardingPolicy
from threefold.parallel.collectives import Group, Pending
from threefold.parallel.deferred import WeightTask
from threefold.parallel.engine import Engine, EngineOptions, StepResult, build_engine, build_job_mesh
from threefold.parallel.mesh import Mesh, build_mesh
from threefold.parallel.stage import Stage, TensorParallelPlan, build_stage
from threefold.parallel.vocab import VocabPart, cross_entropy_sum
from threefold.schedule import build_schedule, job_schedule, peak_live_microbatches
from threefold.train.data.synthetic import SyntheticTokens
from threefold.train.optimizer import ShardedOptimizer

TINY = GPT2 | {"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 11, "max_position_embeddings": 4}
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "searched")
CHUNKS = {"interleaved_1f1b": 2, "zb_v": 2}


def tiny_job(
    pp: int, microbatches: int, schedule: str = "1f1b", layers: int = 0, micro_batch: int = 1, chunks: int = 0
) -> Job:
    chunks = chunks or CHUNKS.get(schedule, 1)
    return small_job(
        TINY | {"num_hidden_layers": layers or max(pp, 2) * chunks},
        pp=pp,
        data={"sequence_length": 4},
        parallelism={"pp": {"schedule": schedule, "chunks": chunks}},
        train_batch_size=microbatches * micro_batch,
        train_micro_batch_size_per_gpu=micro_batch,
        dtype="float64",
    )


def theory(schedule: str, pp: int, microbatches: int, rank: int) -> int | None:
    """Live microbatches by the formulas of the papers, where there is one."""
    known = {"naive": 1, "gpipe": microbatches, "1f1b": min(microbatches, pp - rank)}
    return known.get(schedule)


@dataclass
class Outcome:
    """One step of one schedule, seen from one rank: peaks as the engine counts and as the tensors live."""

    loss: float
    norm: float
    peak: int
    peak_of_tensors: int


# B063, B054, B122: any number of microbatches, and what is alive meanwhile


def numbers_of_microbatches(pp: int) -> range:
    return range(1, 2 * pp + 1)


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_b054_b063_b122_every_schedule_with_1_to_2p_microbatches(pool: WorkerPool, pp: int) -> None:
    ranks: list[dict[tuple[str, int], Outcome]] = pool.run(run_all_schedules, pp, pp)
    for (schedule, microbatches), outcome in ranks[0].items():
        assert outcome.loss == ranks[0]["gpipe", microbatches].loss  # to the last bit
        assert outcome.norm == pytest.approx(ranks[0]["gpipe", microbatches].norm, rel=1e-13)
        made = job_schedule(tiny_job(pp, microbatches, schedule))
        for rank, found in enumerate(outcomes[schedule, microbatches] for outcomes in ranks):
            expected = peak_live_microbatches(made, rank)
            assert expected == (theory(schedule, pp, microbatches, rank) or expected)
            assert found.peak == expected, (schedule, microbatches, rank)
            assert found.peak_of_tensors == expected, (schedule, microbatches, rank)
            assert found.loss == outcome.loss
    for microbatches in (1, 2 * pp):
        job = tiny_job(1, microbatches, layers=2 * pp)
        reference = run_reference(job, tokens_of(job), 1, 0.1, torch.float64)
        for schedule in SCHEDULES:
            assert ranks[0][schedule, microbatches].loss == pytest.approx(reference.losses[0], rel=1e-12)
            assert ranks[0][schedule, microbatches].norm == pytest.approx(reference.norms[0], rel=1e-12)


def run_all_schedules(context: WorkerContext, pp: int) -> dict[tuple[str, int], Outcome]:
    found = {}
    meshes = {
        turns_back: build_job_mesh(tiny_job(pp, 1, name), context.rank, activity=context.activity)
        for turns_back, name in ((False, "1f1b"), (True, "zb_v"))
    }
    for schedule in SCHEDULES:
        for microbatches in numbers_of_microbatches(pp):
            job = tiny_job(pp, microbatches, schedule, layers=2 * pp)
            engine = build_engine(job, meshes[schedule == "zb_v"])
            live = LiveTensors(engine)
            result = engine.train_step(replica_samples(job, 0, 0), tokens_of(job).batch, lambda _: None)
            assert live.count() == 0
            found[schedule, microbatches] = Outcome(result.loss, result.grad_norm, result.peak_live, live.peak)
    return found


class LiveTensors:
    """Counts the microbatches that hold memory: by what the stage (or the loss) returned for them, which its graph
    hangs on, or by the weight gradients that wait.
    """

    def __init__(self, engine: Engine) -> None:
        self.peak = 0
        self._alive: list[weakref.ref[Tensor]] = []
        self._waiting: list[list[WeightTask]] = []
        for stage in engine.stages:
            self._watch(stage, engine)

    def _watch(self, stage: Stage, engine: Engine) -> None:
        honest_loss, honest_backward = engine.executor.loss_sum, stage.backward_input
        if stage.is_last:
            engine.executor.loss_sum = lambda logits, labels: self._note(honest_loss(logits, labels))
        else:
            stage.register_forward_hook(self._on_forward)

        def backward_input(y: Tensor, gradient: Tensor) -> list[WeightTask]:
            self._waiting.append(honest_backward(y, gradient))
            return self._waiting[-1]

        stage.backward_input = backward_input

    def _on_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._note(output)

    def _note(self, output: Tensor) -> Tensor:
        self._alive.append(weakref.ref(output))
        self.peak = max(self.peak, self.count())
        return output

    def count(self) -> int:
        waiting = sum(bool(tasks) for tasks in self._waiting)
        return waiting + sum(ref() is not None for ref in self._alive)


# B066: links that do not buffer


def test_b066_no_schedule_needs_a_link_that_buffers(pool: WorkerPool) -> None:
    expected = pool.run(run_on_strict_links, 4, False)
    assert pool.run(run_on_strict_links, 4, True) == expected


def run_on_strict_links(context: WorkerContext, strict: bool) -> list[float]:
    """Losses of all schedules; on strict links a send blocks until its receive, in the row's order, is reached."""
    losses = []
    with pytest.MonkeyPatch.context() as patch:
        if strict:
            make_links_strict(patch)
        for schedule in SCHEDULES:
            mesh = build_job_mesh(tiny_job(4, 1, schedule), context.rank, activity=context.activity)
            for microbatches in (1, 2, 3, 6):
                losses += trained_and_evaluated(tiny_job(4, microbatches, schedule), mesh)
    return losses


def trained_and_evaluated(job: Job, mesh: Mesh) -> list[float]:
    engine, samples = build_engine(job, mesh), replica_samples(job, 0, 0)
    trained = engine.train_step(samples, tokens_of(job).batch, lambda _: None).loss
    return [trained, engine.evaluate(samples, tokens_of(job).batch).loss]


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_b065_interleaved_never_crosses_sends_and_receives(pool: WorkerPool, pp: int) -> None:
    """Chunks and microbatches of all sizes, divisible by the stages or not, on links that do not buffer.

    Who waits for ever is named after the pool's limit.
    """
    for losses in pool.run(run_interleaved_grid, pp, pp):
        for (chunks, microbatches), (trained, evaluated) in losses.items():
            assert trained == evaluated, (chunks, microbatches)


def run_interleaved_grid(context: WorkerContext, pp: int) -> dict[tuple[int, int], list[float]]:
    mesh = build_job_mesh(tiny_job(pp, 1), context.rank, activity=context.activity)
    with pytest.MonkeyPatch.context() as patch:
        make_links_strict(patch)
        return {
            (chunks, microbatches): trained_and_evaluated(
                tiny_job(pp, microbatches, "interleaved_1f1b", chunks=chunks), mesh
            )
            for chunks in (2, 3, 4)
            for microbatches in numbers_of_microbatches(pp)
        }


def make_links_strict(patch: pytest.MonkeyPatch) -> None:
    send, receive = Group.send, Group.receive

    def blocking_send(self: Group, tensor: Tensor, to_index: int) -> Pending:
        send(self, tensor, to_index).wait()
        receive(self, torch.zeros(1), to_index).wait()  # the receiver says that it has arrived there
        return Pending()

    def blocking_receive(self: Group, buffer: Tensor, from_index: int) -> Pending:
        receive(self, buffer, from_index).wait()
        send(self, torch.zeros(1), from_index).wait()
        return Pending()

    patch.setattr(Group, "send", blocking_send)
    patch.setattr(Group, "receive", blocking_receive)


# Samples and labels


@dataclass
class Recording:
    """A source that remembers what it was asked for."""

    source: SyntheticTokens
    asked: list[list[int]] = field(default_factory=list)

    @property
    def vocab_size(self) -> int:
        return self.source.vocab_size

    @property
    def num_samples(self) -> int:
        return self.source.num_samples

    @property
    def sequence_length(self) -> int:
        return self.source.sequence_length

    def batch(self, sample_numbers: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        self.asked.append([number % self.num_samples for number in sample_numbers])
        return self.source.batch(sample_numbers)


def test_b073_b075_two_epochs_on_three_stages(pool: WorkerPool) -> None:
    """Six samples a step from a source of twelve: four steps are two epochs, with an evaluation in between."""
    job = tiny_job(3, 3, micro_batch=2)
    first, middle, last = pool.run(record_two_epochs, 3, job)
    epoch = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert first == last == [*epoch[:3], *epoch[3:], *epoch[:3], *epoch[:3], *epoch[3:]]
    assert middle == []


def record_two_epochs(context: WorkerContext, job: Job) -> list[list[int]]:
    source = Recording(SyntheticTokens(11, 4, seed=0, num_samples=12))
    engine = build_engine(job, build_job_mesh(job, context.rank, activity=context.activity))
    for step in range(4):
        engine.train_step(replica_samples(job, 0, step), source.batch, lambda _: None)
        if step == 1:
            engine.evaluate(replica_samples(job, 0, 0), source.batch)
    return source.asked


@dataclass
class Echo:
    """Every label is its own token: whoever pairs tokens of one sample with labels of another is found out."""

    source: SyntheticTokens

    def batch(self, sample_numbers: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        tokens, _ = self.source.batch(sample_numbers)
        return tokens, tokens


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "zb_h1"])
def test_b075_labels_belong_to_the_inputs(pool: WorkerPool, schedule: str) -> None:
    """The model copies its input, so that its loss on labels that are the input is 0, and large on any other."""
    for losses in pool.run(copy_through_stages, 3, schedule):
        assert losses == pytest.approx([0.0, 0.0], abs=1e-6)


def copy_through_stages(context: WorkerContext, schedule: str) -> list[float]:
    width, sequence, microbatches = 11, 4, 5
    embedding = nn.Embedding(width, width, _weight=60 * torch.eye(width, dtype=torch.float64))
    model = nn.Sequential(embedding, nn.Identity(), nn.Identity(), nn.Identity(), nn.Linear(width, width, bias=False))
    with torch.no_grad():
        model[4].weight = nn.Parameter(torch.eye(width, dtype=torch.float64))
    mesh = build_mesh(Layout(pp=3), context.rank, activity=context.activity)
    plan = TensorParallelPlan({"*": StyleRule(Style.VOCAB)})
    stage = build_stage(model, split_layers(5, 3, (2, 1, 2)), mesh, plan)
    made = build_schedule(schedule, 3, microbatches)
    options = EngineOptions(made, (2, sequence, width), torch.float64, ShardingPolicy(100))
    part = VocabPart(mesh.tp, width, 0, width)
    engine = Engine([stage], mesh, lambda logits, labels: cross_entropy_sum(logits, labels, part), options)
    samples = [range(2 * index, 2 * index + 2) for index in (3, 0, 4, 1, 2)]
    source = Echo(SyntheticTokens(width, sequence, seed=1))
    trained = engine.train_step(samples, source.batch, lambda _: None)
    return [trained.loss, engine.evaluate(samples, source.batch).loss]


def test_b068_microbatches_of_another_size_are_refused(pool: WorkerPool) -> None:
    with pytest.raises(JobError, match="train_batch_size"):
        small_job(train_batch_size=8, gradient_accumulation_steps=3, pp=2)
    message = pool.run(run_uneven_microbatches, 2)[0]
    assert message.startswith(
        "stage 0 returned torch.float64 (1, 4, 8); the next stage expects torch.float64 (2, 4, 8)"
    )


def run_uneven_microbatches(context: WorkerContext) -> str:
    job = tiny_job(2, 2, micro_batch=2)
    engine = build_engine(job, build_job_mesh(job, context.rank, activity=context.activity))
    if not engine.stages[0].is_first:
        return ""
    try:
        engine.train_step([range(1), range(1, 4)], tokens_of(job).batch, lambda _: None)
    except ValueError as error:
        return str(error)
    return "it was not refused"


# Uneven stages, ties, smoke, evaluation


def test_a_stage_without_layers_is_parity_proof(pool: WorkerPool) -> None:
    layouts = ("pp=3,partition=2+0+2", "pp=3,partition=0+0+4,schedule=gpipe", "pp=2,tp=2,partition=4+0")
    jobs = {layout: relayout(small_job(), **parse_layout(layout)) for layout in layouts}
    report = run_parity(jobs, ParitySettings(), pool)
    assert report.ok, report.layouts


@pytest.mark.parametrize("layout", [Layout(pp=3), Layout(pp=3, dp=2), Layout(pp=3, tp=2)], ids=str)
@pytest.mark.parametrize("partition", [(2, 2, 2), (2, 1, 3)], ids=str)
def test_b032_several_ties_met_in_another_order_on_each_stage(
    pool: WorkerPool, layout: Layout, partition: tuple[int, ...]
) -> None:
    case = Case(tied_model, TensorParallelPlan(TIED_STYLES), layout, partition)
    pool.run(compare_custom, layout.world_size, case, timeout_s=60)


def test_b071_b082_3d_smoke(pool: WorkerPool) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 0.01}}
    job = small_job(TINY, dp=2, tp=2, pp=2, data={"sequence_length": 4}, optimizer=optimizer)
    runs: list[RankRun] = pool.run(run_steps, 8, job, 12, SyntheticTokens(11, 4, seed=0, num_samples=8))
    assert all_equal([run.losses for run in runs])
    losses = runs[0].losses
    assert losses[0] == pytest.approx(np.log(11), abs=0.2)
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))
    assert 0 < losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize(
    ("sequence_parallel", "schedule"), [(False, "1f1b"), (True, "interleaved_1f1b"), (True, "zb_v")]
)
def test_b072_evaluation_before_the_first_step(pool: WorkerPool, sequence_parallel: bool, schedule: str) -> None:
    pipeline = {"schedule": schedule, "chunks": CHUNKS.get(schedule, 1)}
    parallelism = {"tp": {"size": 2, "sequence_parallel": sequence_parallel}, "pp": pipeline}
    job = small_job(pp=2, tp=2, dtype="float64", parallelism=parallelism)
    runs: list[RankRun] = pool.run(run_steps, 4, job, 1, None, True)
    for run in runs:
        assert run.evaluations == runs[0].losses  # the same samples, the same model, the same number
    plain: list[RankRun] = pool.run(run_steps, 4, job, 1)
    assert [run.hashes for run in plain] == [run.hashes for run in runs]


# What goes wrong is named


def test_a_peer_that_dies_is_noticed_and_the_place_is_named(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(die_in_the_second_microbatch, 2)
    text = str(caught.value)
    assert "rank 1: the process died with exit code 17" in text
    assert "WorkerError: rank 0 failed in receive from rank 1 over pp[0,1]: a peer died or left it" in text
    assert "; rank 0 (dp 0, pp 0, tp 0) was at stage 0, microbatch " in text
    assert ", action 0" in text


def die_in_the_second_microbatch(context: WorkerContext) -> None:
    job = tiny_job(2, 4)
    engine = build_engine(job, build_job_mesh(job, context.rank, activity=context.activity))
    if context.rank == 1:
        engine.executor.loss_sum = partial(_die_at_second_call, [])
    engine.train_step(replica_samples(job, 0, 0), tokens_of(job).batch, lambda _: None)


def _die_at_second_call(calls: list[int], logits: Tensor, labels: Tensor) -> Tensor:
    calls.append(1)
    if len(calls) == 2:
        os._exit(17)
    return logits.sum()


def test_all_stages_know_loss_norm_and_the_wish_to_stop(pool: WorkerPool) -> None:
    results: list[list[StepResult]] = pool.run(stop_on_rank_2, 4)
    for step, stop in enumerate((False, True)):
        values = [(r[step].loss, r[step].grad_norm, r[step].num_valid, r[step].stop) for r in results]
        assert all_equal(values)
        assert values[0][3] is stop
        assert values[0][2] == 16
        assert np.isfinite(values[0][0])


def stop_on_rank_2(context: WorkerContext) -> list[StepResult]:
    job = tiny_job(4, 4)
    engine = build_engine(job, build_job_mesh(job, context.rank, activity=context.activity))
    update = updater(job, ShardedOptimizer(job.optimizer, engine.data))
    return [
        engine.train_step(
            replica_samples(job, 0, step), tokens_of(job).batch, update, stop=step == 1 and context.rank == 2
        )
        for step in range(2)
    ]


def test_a_batch_without_a_valid_token_has_no_loss_and_no_gradient(pool: WorkerPool) -> None:
    job = small_job(dp=2, pp=2)
    runs: list[RankRun] = pool.run(run_steps, 4, job, 1, tokens_of(job, only_valid=(1000, 0)))
    assert all(np.isnan(run.losses[0]) and run.norms == [0.0] for run in runs)
