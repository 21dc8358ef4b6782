"""What a rank counts is what its tensors weigh, and what the cost model predicts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.jobs import GPT2, LLAMA, small_job
from tests.parallel.ranks import replica_samples, tokens_of, updater
from threefold.cost.held import estimate_held
from threefold.job import Job, relayout
from threefold.measure.layouts import parse_layout
from threefold.measure.worker_pool import WorkerContext, WorkerPool
from threefold.parallel.counters import MemoryCounter
from threefold.parallel.engine import build_engine, build_job_mesh, build_layout
from threefold.parallel.replicas import hash_tensor
from threefold.train.optimizer import ShardedOptimizer

CPU = {"device": "cpu"}
ADAM = {"type": "AdamW", "params": {"lr": 0.01}}
ONE_BIT = {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 1}}
BOTH = {"offload_optimizer": CPU, "offload_param": CPU}


def counted(context: WorkerContext, job: Job, measured_steps: int = 2) -> tuple[MemoryCounter, dict[str, int]]:
    """The counter after three steps, and what the tensors of parameters, gradients and optimizer weigh."""
    mesh = build_job_mesh(job, context.rank, activity=context.activity)
    mesh.memory.measured_steps = measured_steps
    engine = build_engine(job, mesh)
    optimizer = ShardedOptimizer(job.optimizer, engine.data)
    for step in range(3):
        samples = replica_samples(job, mesh.coord.dp, step)
        engine.train_step(samples, tokens_of(job).batch, updater(job, optimizer))
    buckets = engine.data.buckets
    states = [value for state in optimizer.inner.state.values() for value in state.values() if value.dim()]
    states += [bucket.master for bucket in buckets if bucket.has_copy]
    wholes = [bucket.whole for bucket in buckets]
    shards = [bucket.shard for bucket in buckets if bucket.shards_parameters]

    def weigh(tensors: list[Any]) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    weights = {
        "parameters": weigh(wholes) + weigh(shards),
        "gradients": weigh([bucket.grads for bucket in buckets]),
        "optimizer": weigh(states),
    }
    with engine.data.whole_parameters():
        weights["hash"] = sum(hash_tensor(entry.parameter) for entry in engine.parameters)
    memory = mesh.memory
    return MemoryCounter(held=memory.held, host=memory.host, peak=memory.peak), weights


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("dp=4", {"optimizer": ADAM}),
        ("dp=4", {"optimizer": ADAM, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}),
        ("dp=2,pp=2", {"optimizer": ADAM, "zero_optimization": {"stage": 2, "offload_optimizer": CPU}}),
        ("dp=2,tp=2,sequence_parallel=true", {"optimizer": ADAM, "zero_optimization": {"stage": 3}}),
        ("dp=2,tp=2,pp=2", {"bf16": {"enabled": True}, "optimizer": ADAM, "zero_optimization": {"stage": 3, **BOTH}}),
        ("dp=2,pp=2", {"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}, "dtype": "float64"}),
        ("dp=2,tp=2", {"optimizer": ONE_BIT}),
    ],
)
def test_counted_bytes_are_those_of_the_tensors_and_those_predicted(
    pool: WorkerPool, layout: str, settings: dict[str, Any]
) -> None:
    """A bucket of 3000 elements leaves padding in most shards."""
    zero = {**settings.get("zero_optimization", {}), "reduce_bucket_size": 3000}
    job = relayout(small_job(GPT2, **{**settings, "zero_optimization": zero}), **parse_layout(layout))
    for rank, (memory, weights) in enumerate(pool.run(counted, job.world_size, job)):
        total = {kind: memory.held[kind] + memory.host[kind] for kind in ("parameters", "gradients", "optimizer")}
        assert total == {kind: weights[kind] for kind in total}
        predicted = estimate_held(job, build_layout(job).coord(rank).pp)
        found = (memory.held["parameters"], memory.held["gradients"], memory.held["optimizer"])
        assert found == (predicted.parameters, predicted.gradients, predicted.optimizer)
        assert sum(memory.host.values()) == predicted.host
        assert memory.held["activations"] == 0 and memory.held["buffers"] == 0, "nothing is left of a step"
        assert memory.peak.total > sum(memory.held.values())
        assert memory.peak.step in (1, 2) and memory.peak.action


def peak_activations(pool: WorkerPool, job: Job, rank: int = 0) -> int:
    return pool.run(counted, job.world_size, job)[rank][0].peak.held["activations"]


def test_activations_follow_schedule_and_recompute(pool: WorkerPool) -> None:
    """GPipe holds all 8 microbatches, 1F1B 2 of them, naive one; a recomputed layer keeps its input alone."""
    job = small_job(LLAMA, pp=2, optimizer=ADAM)
    by_schedule = {
        name: peak_activations(pool, relayout(job, schedule=name), rank=0) for name in ("naive", "gpipe", "1f1b")
    }
    one = by_schedule["1f1b"] - by_schedule["naive"]
    assert by_schedule["naive"] == pytest.approx(one, rel=0.1)  # what it has sent before is not kept
    assert by_schedule["gpipe"] == pytest.approx(8 * one, rel=0.1)
    modes = {
        mode: peak_activations(pool, small_job(LLAMA, dp=2, optimizer=ADAM, activation_checkpointing={"mode": mode}))
        for mode in ("none", "selective", "full")
    }
    assert modes["full"] < modes["selective"] < modes["none"]
    inputs = 4 * 12 * 32 * 4  # of 4 layers: 12 tokens of 32 numbers of 4 bytes
    assert modes["full"] > inputs


def test_each_stage_recomputes_what_is_stated_for_it(pool: WorkerPool) -> None:
    """The first stage of 1F1B holds the most microbatches, so it may be the only one that needs to recompute."""

    def run(**recompute: object) -> list[int]:
        job = small_job(LLAMA, tp=2, pp=2, optimizer=ADAM, activation_checkpointing=recompute)
        return [peak_activations(pool, job, rank) for rank in (0, 2)]

    none, full, mixed = run(mode="none"), run(mode="full"), run(stages=["full", "none"])
    assert mixed == [full[0], none[1]]
    assert full[0] < none[0] and full[1] < none[1]


@pytest.mark.parametrize("zero", [0, 3])
def test_counting_changes_nothing(pool: WorkerPool, zero: int) -> None:
    job = small_job(
        GPT2, dp=2, optimizer=ADAM, zero_optimization={"stage": zero}, activation_checkpointing={"mode": "selective"}
    )
    with_counts, without = (pool.run(counted, 2, job, steps)[0][1] for steps in (2, 0))
    assert with_counts == without
