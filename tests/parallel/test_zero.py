"""ZeRO 1-3, offload, recompute and half precision: equal to one process, and holding and sending what theory says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.jobs import GPT2, LLAMA, small_job
from tests.parallel.ranks import RankRun, all_equal, replica_samples, run_steps, tokens_of, updater
from tests.parallel.test_traffic import predicted
from threefold.errors import WorkerError
from threefold.job import Job, relayout
from threefold.job.spec import Fp16
from threefold.measure.layouts import parse_layout
from threefold.measure.parity import ParitySettings, run_parity
from threefold.measure.worker_pool import WorkerContext, WorkerPool
from threefold.parallel.engine import build_engine, build_job_mesh, build_layout
from threefold.parallel.precision import LossScaler
from threefold.parallel.stage import ShardedParameter
from threefold.train.optimizer import ShardedOptimizer

DROPOUT = {"attn_pdrop": 0.1, "resid_pdrop": 0.2, "embd_pdrop": 0.1}
MODELS = {"gpt2": GPT2 | DROPOUT, "llama": LLAMA}
CPU = {"device": "cpu"}
STORAGE: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "1 offload": {"stage": 1, "offload_optimizer": CPU},
    "2": {"stage": 2},
    "2 offload": {"stage": 2, "offload_optimizer": CPU, "reduce_bucket_size": 3000},
    "3": {"stage": 3},
    "3 late": {"stage": 3, "overlap_comm": False},
    "3 offload": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU, "reduce_bucket_size": 3000},
}
LAYOUTS = ["dp=4", "dp=2,tp=2,sequence_parallel=true", "dp=2,pp=2,schedule={}", "dp=2,tp=2,pp=2,schedule={}"]


def job_of(model: str, storage: str, mode: str = "none", **settings: Any) -> Job:
    return small_job(
        MODELS[model],
        zero_optimization=STORAGE[storage],
        activation_checkpointing={"mode": mode},
        gradient_clipping=0.05,
        **settings,
    )


def assert_parity(pool: WorkerPool, job: Job, layouts: list[str], **settings: Any) -> None:
    jobs = {layout: relayout(job, **parse_layout(layout)) for layout in layouts}
    report = run_parity(jobs, ParitySettings(**settings), pool)
    assert report.ok, [result for result in report.layouts if not result.ok]


@pytest.mark.parametrize(
    ("model", "storage", "mode", "schedule"),
    [
        ("gpt2", "1 offload", "selective", "gpipe"),
        ("llama", "2", "none", "1f1b"),
        ("gpt2", "2 offload", "full", "naive"),
        ("llama", "3", "selective", "gpipe"),
        ("gpt2", "3", "full", "1f1b"),
        ("llama", "3 late", "none", "1f1b"),
        ("gpt2", "3 offload", "none", "1f1b"),
    ],
)
def test_parity(pool: WorkerPool, model: str, storage: str, mode: str, schedule: str) -> None:
    assert_parity(pool, job_of(model, storage, mode), [layout.format(schedule) for layout in LAYOUTS])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("model", MODELS)
def test_whole_parity_matrix(pool: WorkerPool, model: str, storage: str, mode: str) -> None:
    for schedule in ("naive", "gpipe", "1f1b"):
        layouts = [layout.format(schedule) for layout in LAYOUTS if "{}" in layout or schedule == "1f1b"]
        assert_parity(pool, job_of(model, storage, mode), layouts)


# What is sent


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("storage", ["1", "2 offload", "3", "3 offload"])
@pytest.mark.parametrize("model", MODELS)
def test_predicted_traffic_equals_counted(pool: WorkerPool, model: str, storage: str, mode: str) -> None:
    for layout in ("dp=4", "dp=2,tp=2,sequence_parallel=true", "dp=2,tp=2,pp=2"):
        job = relayout(job_of(model, storage, mode), **parse_layout(layout))
        for rank, run in enumerate(pool.run(run_steps, job.world_size, job, 2)):
            assert run.traffic == predicted(job, build_layout(job).coord(rank).pp), f"rank {rank} of {layout}"


# What is held


def held(context: WorkerContext, job: Job) -> dict[str, int]:
    """Bytes of each kind after a step, read from the tensors themselves, and the elements that they are for."""
    engine = build_engine(job, build_job_mesh(job, context.rank, activity=context.activity))
    optimizer = ShardedOptimizer(job.optimizer, engine.data)
    samples = replica_samples(job, engine.mesh.coord.dp, 0)
    engine.train_step(samples, tokens_of(job).batch, updater(job, optimizer))
    buckets = engine.data.buckets
    states = [value for state in optimizer.inner.state.values() for value in state.values() if value.numel() > 1]
    masters = [bucket.master for bucket in buckets if bucket.has_copy]
    return {
        "elements": sum(entry.parameter.numel() for entry in engine.parameters),
        "parameters": sum(bucket.whole.untyped_storage().nbytes() for bucket in buckets)
        + sum(bucket.shard.untyped_storage().nbytes() for bucket in buckets if bucket.shards_parameters),
        "gradients": sum(bucket.grads.untyped_storage().nbytes() for bucket in buckets),
        "optimizer": sum(value.untyped_storage().nbytes() for value in (*states, *masters)),
        "moments": sum(bucket.moment is not None for bucket in buckets),
        "buckets": len(buckets),
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_held_are_those_of_the_zero_paper(pool: WorkerPool, stage: int, precision: str) -> None:
    """Rajbhandari et al. 2020, section 5: with N elements, K bytes of optimizer state and Nd ranks, per element

    stage 0: parameter + gradient + K;  1: parameter + gradient + K/Nd;  2: parameter + (gradient + K)/Nd;  3: all / Nd.
    """
    bf16 = precision == "bf16"
    optimizer = {"type": "AdamW", "params": {"lr": 0.01}}
    job = small_job(
        dp=4, zero_optimization={"stage": stage}, bf16={"enabled": bf16}, optimizer=optimizer, train_batch_size=4
    )
    for found in pool.run(held, 4, job):
        N, slack = found["elements"], 4 * found["buckets"]  # each bucket may be padded by up to 3 elements
        parameter_bytes, state_bytes = (2, 12) if bf16 else (4, 8)  # master copy, mean and variance in fp32
        exact = {
            "parameters": parameter_bytes * N / (4 if stage == 3 else 1),
            "gradients": 4 * N / (4 if stage >= 2 else 1),
            "optimizer": state_bytes * N / (4 if stage >= 1 else 1),
        }
        for kind, theory in exact.items():
            assert theory <= found[kind] <= theory + 12 * slack, kind
        assert found["moments"] == 0


# Half precision


@pytest.mark.parametrize("storage", ["0", "2", "3 offload"])
def test_b086_b087_bf16_is_one_process_to_its_rounding(pool: WorkerPool, storage: str) -> None:
    assert_parity(pool, job_of("llama", storage), [layout.format("1f1b") for layout in LAYOUTS], dtype="bfloat16")


def test_b087_gradients_accumulate_in_fp32(pool: WorkerPool) -> None:
    """Four microbatches on one rank, or one on each of four: only the order of fp32 additions differs."""
    job = small_job(bf16={"enabled": True}, train_micro_batch_size_per_gpu=2)
    one = pool.run(run_steps, 1, relayout(job, dp=1), 3)[0]
    four = pool.run(run_steps, 4, relayout(job, dp=4), 3)[0]
    assert four.norms == pytest.approx(one.norms, rel=1e-5)
    assert four.losses == pytest.approx(one.losses, rel=1e-3)


ARTICLE = {
    "fp16": {"enabled": True, "initial_scale_power": 8},
    "zero_optimization": {"stage": 3, "offload_optimizer": CPU},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
}


def test_the_articles_job_scaled_down_trains(pool: WorkerPool) -> None:
    """dp 2, tp 2, pp 2, ZeRO-3 with the optimizer on the CPU, fp16."""
    job = small_job(GPT2, dp=2, tp=2, pp=2, **ARTICLE)
    runs: list[RankRun] = pool.run(run_steps_in_fp16, 8, job, 8)
    assert all_equal([run.losses for run in runs])
    assert runs[0].losses[-1] < runs[0].losses[0]


def run_steps_in_fp16(context: WorkerContext, job: Job, steps: int, overflow_at: int | None = None) -> RankRun:
    """Train with loss scaling, always on the same samples; at one step one gradient of one rank is made infinite."""
    engine = build_engine(job, build_job_mesh(job, context.rank, activity=context.activity))
    optimizer, scaler, run = ShardedOptimizer(job.optimizer, engine.data), LossScaler.of_job(job.fp16), RankRun()
    for step in range(steps):
        plant = Overflow(engine.parameters[-1]) if step == overflow_at and context.rank == 5 else None

        def update(result: Any) -> None:
            if not scaler.skips(result.grad_norm):
                optimizer.step(job.optimizer.params.lr, 1.0 / scaler.scale)

        scale = scaler.scale
        result = engine.train_step(
            replica_samples(job, engine.mesh.coord.dp, 0), tokens_of(job).batch, update, loss_scale=scale
        )
        run.losses.append(result.loss)
        run.norms.append(result.grad_norm)
        run.evaluations.append(scaler.scale)
        if plant:
            plant.remove()
    return run


class Overflow:
    """Makes the gradient of one parameter infinite."""

    def __init__(self, entry: ShardedParameter) -> None:
        self.handle = entry.parameter.register_hook(lambda grad: grad + float("inf"))

    def remove(self) -> None:
        self.handle.remove()


def test_b084_an_overflow_in_one_stage_of_one_replica_makes_all_skip_the_same_step(pool: WorkerPool) -> None:
    job = small_job(
        GPT2, dp=2, tp=2, pp=2, **(ARTICLE | {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}})
    )
    runs = pool.run(run_steps_in_fp16, 8, job, 4, 1)
    assert all_equal([(run.losses, run.evaluations) for run in runs])
    losses, scales = runs[0].losses, runs[0].evaluations
    assert scales == [256.0, 128.0, 128.0, 128.0]
    assert losses[2] == losses[1] != losses[0]  # the step after the skipped one starts from the same parameters
    assert losses[3] != losses[2]


def test_the_scale_follows_deepspeeds_rule() -> None:
    scaler = LossScaler.of_job(Fp16(enabled=True, initial_scale_power=4, loss_scale_window=2, hysteresis=2))
    inf = float("inf")
    scales = []
    for norm in (inf, inf, 1.0, 1.0, 1.0, 1.0, inf):
        scaler.skips(norm)
        scales.append(scaler.scale)
    assert scales == [16, 8, 8, 16, 16, 32, 32]


def test_constant_overflow_ends_with_advice() -> None:
    scaler = LossScaler.of_job(Fp16(enabled=True, initial_scale_power=2, hysteresis=1))
    assert [scaler.skips(float("nan")) for _ in range(2)] == [True, True]
    with pytest.raises(WorkerError, match=r"can't shrink any further(.|\n)*fix: lower optimizer.params.lr"):
        scaler.skips(float("inf"))
    with pytest.raises(WorkerError, match="loss scale 64"):
        LossScaler.of_job(Fp16(enabled=True, loss_scale=64.0)).skips(float("inf"))


def test_without_fp16_the_scale_is_1() -> None:
    assert LossScaler.of_job(Fp16()).scale == 1.0
