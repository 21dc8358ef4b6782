"""Compressed gradients: what is sent, that errors are fed back, and that replicas stay equal in any layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.jobs import GPT2, LLAMA, small_job
from tests.parallel.fakes import silent_group
from tests.parallel.ranks import RankRun, all_equal, replica_samples, run_steps, tokens_of, updater, whole_parameters
from tests.parallel.test_traffic import Totals, group_of
from threefold.cost.traffic import estimate_traffic
from threefold.job import Job, relayout
from threefold.layout import Layout
from threefold.layout.compression import chunk_elements, sign_bytes
from threefold.measure.layouts import parse_layout
from threefold.measure.parity import ParitySettings, run_parity
from threefold.measure.worker_pool import WorkerContext, WorkerPool
from threefold.parallel.engine import build_engine, build_job_mesh, build_layout
from threefold.parallel.mesh import build_mesh
from threefold.parallel.one_bit import Errors, exchange, pack_signs, unpack_signs
from threefold.parallel.power_sgd import PowerSgd
from threefold.train.optimizer import ShardedOptimizer

ADAM = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
ONE_BIT = {"type": "OneBitAdam", "params": {"lr": 0.01, "weight_decay": 0.1, "freeze_step": 2}}
WITHOUT_VECTORS = {"qkv_bias": False}
LAYOUTS = ["dp=4", "dp=2,tp=2", "dp=2,tp=2,sequence_parallel=true", "dp=2,pp=2", "dp=2,tp=2,pp=2"]


def power_sgd(start_step: int = 0, rank: int = 4) -> dict[str, Any]:
    return {"type": "powersgd", "rank": rank, "start_step": start_step}


def one_bit_job(model: dict[str, Any] | None = None, **settings: Any) -> Job:
    return small_job(model, optimizer=ONE_BIT, **settings)


def predicted(job: Job, rank: int, compressed: bool = True) -> Totals:
    totals: Totals = {}
    for transfer in estimate_traffic(job, build_layout(job).coord(rank).pp, compressed=compressed):
        key = (group_of(job, transfer), transfer.operation)
        calls, size = totals.get(key, (0, 0))
        totals[key] = (calls + transfer.count_per_step, size + transfer.bytes_per_step)
    return totals


def assert_trains_alike(runs: list[RankRun]) -> None:
    """Losses are global numbers; ``run_steps`` has compared the replicas' parameters bit for bit."""
    assert all_equal([run.losses for run in runs])
    assert all(loss == loss for loss in runs[0].losses)


# Sums in another number format


@pytest.mark.parametrize(("number_format", "rounding"), [("bf16", 2.0**-8), ("fp32", 2.0**-23)])
def test_gradients_are_summed_to_the_rounding_of_their_format(
    pool: WorkerPool, number_format: str, rounding: float
) -> None:
    """Each of up to 4 terms is rounded before it is sent, and each partial sum after."""
    for stage in (0, 1, 2, 3):
        job = small_job(communication_data_type=number_format, zero_optimization={"stage": stage})
        names = ["dp=4,accumulation=1", "dp=2,tp=2,pp=2"] if stage % 2 else ["dp=2,tp=2", "dp=2,pp=2"]
        report = run_parity(
            {name: relayout(job, **parse_layout(name)) for name in names}, ParitySettings(steps=1), pool
        )
        for layout in report.layouts:
            assert layout.loss_error < 1e-10
            assert rounding / 100 < layout.grad_error < 8 * rounding, layout


@pytest.mark.parametrize("number_format", ["bf16", "fp32", "fp16"])
def test_traffic_follows_the_format(pool: WorkerPool, number_format: str) -> None:
    precision: dict[str, Any] = (
        {"fp16": {"enabled": True, "loss_scale": 8.0}} if number_format == "fp16" else {"dtype": "float64"}
    )
    settings: dict[str, Any] = {"communication_data_type": number_format, "zero_optimization": {"stage": 1}}
    job = small_job(LLAMA, **settings, **precision)
    job = relayout(job, dp=2, tp=2)
    for rank, run in enumerate(pool.run(run_steps, 4, job, 1)):
        assert run.traffic == predicted(job, rank)


# The sum of signs


@pytest.mark.parametrize("shape", [(1, 8), (3, 64)])
def test_signs_are_packed_8_to_a_byte(shape: tuple[int, int]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    packed = pack_signs(values)
    assert packed.dtype == torch.uint8 and packed.numel() * 8 == values.numel()
    assert torch.equal(unpack_signs(packed, torch.float32), torch.where(values >= 0, 1.0, -1.0))


def one_bit_sums(context: WorkerContext, elements: int, steps: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """All the sums, all that was to be summed, and what the errors still owe; bytes of one exchange."""
    mesh = build_mesh(Layout(dp=context.world_size), context.rank, activity=context.activity)
    generator = torch.Generator().manual_seed(context.rank)
    errors = Errors.zeros(elements, mesh.dp, torch.zeros(1, dtype=torch.float64))
    given, got = torch.zeros(elements, dtype=torch.float64), torch.zeros(elements, dtype=torch.float64)
    for _ in range(steps):
        values = torch.randn(elements, generator=generator, dtype=torch.float64)
        given += values
        got += exchange(values, errors, mesh.dp)
    owed = errors.worker.clone()
    owed[mesh.dp.index] += errors.server[0]
    sent = sum(mesh.traffic.payload_bytes.values())
    totals = torch.stack([given, owed.view(-1)[:elements]])
    mesh.dp.all_reduce(totals).wait()
    assert not owed.view(-1)[elements:].any(), "padding owes nothing"
    return got, totals[0], totals[1], sent // steps


@pytest.mark.parametrize("elements", [1, 63, 1000])
def test_what_signs_do_not_say_is_fed_back(pool: WorkerPool, elements: int) -> None:
    results = pool.run(one_bit_sums, 3, elements, 20)
    for got, given, owed, sent in results:
        assert torch.equal(got, results[0][0])
        torch.testing.assert_close(got + owed, given)
        assert sent == 2 * sign_bytes(elements, 3)
    assert chunk_elements(1000, 3) == 384
    assert float(results[0][2].abs().max()) < 60, "errors stay bounded: they are no sum of 20 roundings"


# 1-bit Adam


def test_one_bit_adam_is_adam_until_it_freezes(pool: WorkerPool) -> None:
    job = small_job(optimizer=ADAM, dp=2)
    adam = pool.run(run_steps, 2, job, 2)[0]
    one_bit = pool.run(run_steps, 2, one_bit_job(dp=2), 2)[0]
    assert one_bit.hashes == adam.hashes and one_bit.losses == adam.losses
    assert pool.run(run_steps, 2, one_bit_job(dp=2), 3)[0].losses[:2] == adam.losses


@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_b089_one_bit_adam_in_any_layout(pool: WorkerPool, model: dict[str, Any]) -> None:
    """Tied embedding over pp, replicated positions over tp: copies stay equal, and bytes sent are those predicted."""
    for layout in LAYOUTS:
        job = relayout(one_bit_job(model, steps=6), **parse_layout(layout))
        runs = pool.run(run_steps, job.world_size, job, 6)
        assert_trains_alike(runs)
        for rank, run in enumerate(runs):
            assert run.traffic == predicted(job, rank), f"rank {rank} of {layout}"
            assert {key for key in run.traffic if key[1] == "all_to_all"} <= {
                (axis, "all_to_all") for axis in ("dp", "dp+tp", "tied pp 0+1")
            }


def train_on_one_batch(context: WorkerContext, job: Job, steps: int) -> list[float]:
    engine = build_engine(job, build_job_mesh(job, context.rank, activity=context.activity))
    optimizer = ShardedOptimizer(job.optimizer, engine.data)
    samples = replica_samples(job, engine.mesh.coord.dp, 0)
    results = [engine.train_step(samples, tokens_of(job).batch, updater(job, optimizer)).loss for _ in range(steps)]
    engine.check_replicas(steps)
    return results


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}, {"dtype": "float64"}], ids=["32", "16", "64"])
def test_one_bit_adam_learns_as_adam_does(pool: WorkerPool, precision: dict[str, Any]) -> None:
    settings = {"dp": 2, "steps": 30, "train_micro_batch_size_per_gpu": 4, **precision}
    frozen_late = {"type": "OneBitAdam", "params": {"lr": 0.003, "freeze_step": 8, "betas": [0.9, 0.95]}}
    adam_lr = {"type": "AdamW", "params": {"lr": 0.003, "betas": [0.9, 0.95]}}
    adam = pool.run(train_on_one_batch, 2, small_job(LLAMA, optimizer=adam_lr, **settings), 30)[0]
    one_bit = pool.run(train_on_one_batch, 2, small_job(LLAMA, optimizer=frozen_late, **settings), 30)[0]
    assert one_bit[-1] < adam[0] - 0.8 * (adam[0] - adam[-1])


def test_one_bit_adam_sends_at_least_20_times_fewer_bytes(pool: WorkerPool) -> None:
    """On the wire: a ring all-reduce sends its payload twice, the two passes of signs once each."""
    wide = {**LLAMA, "hidden_size": 64, "intermediate_size": 192, "vocab_size": 256}
    job = one_bit_job(wide, dp=4, steps=4)
    traffic = pool.run(run_steps, 4, job, 3)[0].traffic
    plain = pool.run(run_steps, 4, job, 2)[0].traffic
    assert gradient_wire_bytes(plain, 4) / gradient_wire_bytes(traffic, 4) >= 20


def gradient_wire_bytes(traffic: Totals, ranks: int) -> float:
    passes = {"all_reduce": 2, "all_to_all": 1, "all_gather": 1}
    sent = sum(passes[operation] * size for (_, operation), (_, size) in traffic.items())
    return (sent - 2 * 5 * 8) * (ranks - 1) / ranks  # without the 5 numbers of a step that are no gradients


def test_an_overflow_leaves_errors_and_momentum_alone(pool: WorkerPool) -> None:
    job = small_job(GPT2, dp=2, pp=2, optimizer=ONE_BIT, fp16={"enabled": True, "initial_scale_power": 8})
    runs = pool.run(one_bit_with_overflow, 4, job)
    assert all(run == runs[0] for run in runs)
    losses = runs[0]
    assert losses[3] != losses[2] == pytest.approx(losses[2])
    assert losses[4] == losses[3], "the skipped step has changed nothing"


def one_bit_with_overflow(context: WorkerContext, job: Job) -> list[float]:
    """Two steps of Adam, one compressed, one that overflows on one rank, one more: always on the same samples."""
    engine = build_engine(job, build_job_mesh(job, context.rank, activity=context.activity))
    optimizer, losses = ShardedOptimizer(job.optimizer, engine.data), []
    samples = replica_samples(job, engine.mesh.coord.dp, 0)
    for step in range(6):

        def update(result: Any) -> None:
            if torch.isfinite(torch.tensor(result.grad_norm)):
                optimizer.step(0.01, 1.0 / 256.0)

        entry = engine.parameters[-1].parameter
        hook = entry.register_hook(lambda grad: grad + float("inf")) if step == 3 and context.rank == 3 else None
        losses.append(engine.train_step(samples, tokens_of(job).batch, update, loss_scale=256.0).loss)
        if hook:
            hook.remove()
    engine.check_replicas(6)
    return losses


# PowerSGD


@pytest.mark.parametrize("start_step", [0, 1, 2])
def test_b092_power_sgd_starts_at_any_step(pool: WorkerPool, start_step: int) -> None:
    """Equal to plain SGD before it starts, and compressed from then on, with buckets of a few parameters."""
    common: dict[str, Any] = {"dp": 2, "dtype": "float64", "zero_optimization": {"reduce_bucket_size": 5000}}
    plain = pool.run(run_steps, 2, small_job(**common), 4)[0]
    job = small_job(gradient_compression=power_sgd(start_step), **common)
    runs = pool.run(run_steps, 2, job, 4)
    assert_trains_alike(runs)
    assert runs[0].losses[: start_step + 1] == plain.losses[: start_step + 1]
    assert runs[0].losses[start_step + 1] != plain.losses[start_step + 1]
    assert runs[0].traffic == predicted(job, 0)
    if start_step:
        before = pool.run(run_steps, 2, job, start_step)[0]
        assert before.traffic == predicted(job, 0, compressed=False)


def test_power_sgd_in_any_layout(pool: WorkerPool) -> None:
    for model in (GPT2, LLAMA):
        for layout in LAYOUTS:
            job = small_job(model, gradient_compression=power_sgd(1), gradient_clipping=0.1)
            job = relayout(job, **parse_layout(layout))
            runs = pool.run(run_steps, job.world_size, job, 3)
            assert_trains_alike(runs)
            for rank, run in enumerate(runs):
                assert run.traffic == predicted(job, rank), f"rank {rank} of {layout}"


@pytest.mark.parametrize("zero", [0, 1])
def test_power_sgd_does_not_depend_on_replicas_or_stages(pool: WorkerPool, zero: int) -> None:
    """Its sums are linear and each matrix is compressed by itself: dp 4 and dp 2 x pp 2 are dp 2, to rounding."""
    job = small_job(LLAMA, dtype="float64", gradient_compression=power_sgd(rank=2), zero_optimization={"stage": zero})
    two = whole_parameters(pool.run(run_steps, 2, relayout(job, dp=2), 4))
    for layout in ("dp=4", "dp=2,pp=2"):
        laid_out = relayout(job, **parse_layout(layout))
        other = whole_parameters(pool.run(run_steps, 4, laid_out, 4))
        for name, value in two.items():
            torch.testing.assert_close(other[name], value, rtol=1e-7, atol=1e-8)


def power_sgd_sums(context: WorkerContext, job: Job, steps: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each compressed bucket: all gradients handed out, all true ones, and the ranks' errors together."""
    engine = build_engine(job, build_job_mesh(job, context.rank, activity=context.activity))
    compression = engine.data.compression
    assert isinstance(compression, PowerSgd)
    buckets = [bucket for bucket in engine.data.buckets if bucket.compressible]
    totals = [(torch.zeros_like(bucket.grads), torch.zeros_like(bucket.grads)) for bucket in buckets]
    for _ in range(steps):
        engine.data.begin_step()
        for bucket, (got, given) in zip(buckets, totals, strict=True):
            bucket.grads.normal_()
            true = bucket.grads.clone()
            bucket.group.all_reduce(true).wait()
            given += true
            compression.reduce(bucket)
            got += bucket.grads
    found = []
    for bucket, (got, given) in zip(buckets, totals, strict=True):
        error = compression.factors[id(bucket)].error
        assert error is not None
        bucket.group.all_reduce(error).wait()
        found.append((got, given, error))
    return found


def test_what_power_sgd_has_not_sent_it_owes(pool: WorkerPool) -> None:
    job = small_job(dp=2, dtype="float64", gradient_compression=power_sgd(rank=1))
    for got, given, owed in pool.run(power_sgd_sums, 2, job, 5)[0]:
        torch.testing.assert_close(got + owed, given)


def test_power_sgd_sends_little(pool: WorkerPool) -> None:
    job = small_job({**GPT2, "hidden_size": 128}, dp=2, gradient_compression=power_sgd(1))
    traffic = pool.run(run_steps, 2, job, 2)[0].traffic
    plain = pool.run(run_steps, 2, job, 1)[0].traffic
    assert gradient_wire_bytes(plain, 2) / gradient_wire_bytes(traffic, 2) > 6


def test_a_group_of_one_sends_nothing_and_compresses_nothing() -> None:
    values = torch.randn(9)
    errors = Errors.zeros(9, silent_group(1), values)
    assert exchange(values, errors, silent_group(1)).numel() == 9


def test_one_replica_is_plain(pool: WorkerPool) -> None:
    plain = pool.run(run_steps, 2, small_job(tp=2, optimizer=ADAM), 4)[0]
    assert pool.run(run_steps, 2, one_bit_job(tp=2, steps=5), 4)[0].hashes == plain.hashes
