"""Field reports on features that failed together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.jobs import GPT2, LLAMA, small_job
from tests.parallel.fakes import silent_mesh
from tests.parallel.ranks import RankRun, all_equal, run_steps
from tests.parallel.test_compose import ALLOWED
from tests.parallel.test_compression import train_on_one_batch
from threefold.job import relayout
from threefold.layout import Layout
from threefold.measure.parity import ParitySettings, run_parity
from threefold.measure.worker_pool import WorkerPool
from threefold.parallel.batch import ReplicaBatch
from threefold.parallel.pipeline import PipelineExecutor
from threefold.parallel.stage import Stage
from threefold.schedule import build_schedule

EMBEDDING = "embed.tokens.weight"


@pytest.mark.parametrize("partition", [[3, 1], [1, 3]])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_b027_b030_a_tied_embedding_is_sharded_alike_on_stages_of_other_sizes(
    pool: WorkerPool, zero: int, partition: list[int]
) -> None:
    """Gradients equal one process; after 20 steps of AdamW both ends hold the same bits."""
    settings: dict[str, Any] = {"zero_optimization": {"stage": zero, "reduce_bucket_size": 3000}}
    job = small_job({**GPT2, "vocab_size": 67}, **settings)
    job = relayout(job, dp=2, pp=2, partition=partition)
    report = run_parity({"tied": job}, ParitySettings(steps=2), pool)
    assert report.ok, report.layouts
    adam = small_job({**GPT2, "vocab_size": 67}, **settings, optimizer={"type": "AdamW", "params": {"lr": 0.01}})
    adam = relayout(adam, dp=2, pp=2, partition=partition, micro_batch=4)
    runs: list[RankRun] = pool.run(run_steps, 4, adam, 20)
    assert all_equal([run.hashes[EMBEDDING] for run in runs])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_b078_b079_half_precision_composes_with_zero_and_pipelines(precision: str) -> None:
    """Each of these is run by ``test_composes``, always with pp 2."""
    allowed = {(row.stage, row.offload) for row in ALLOWED if (row.precision, row.compression) == (precision, "none")}
    offloads = {0: ("nothing",), 1: ("nothing", "optimizer"), 2: ("nothing", "optimizer")}
    every = {(stage, name) for stage, names in offloads.items() for name in names}
    assert allowed == every | {(3, name) for name in ("nothing", "optimizer", "parameters", "both")}


def test_b082_the_loss_of_a_pipeline_is_finite_and_falls(pool: WorkerPool) -> None:
    """Under ZeRO, in half precision and recomputed, on the same tokens again and again."""
    job = small_job(
        LLAMA,
        dp=2,
        pp=2,
        bf16={"enabled": True},
        zero_optimization={"stage": 3},
        activation_checkpointing={"mode": "full"},
        optimizer={"type": "AdamW", "params": {"lr": 0.01}},
    )
    losses = pool.run(train_on_one_batch, 4, job, 8)[0]
    assert 0.5 < losses[-1] < losses[0] - 0.5 < 4.5


class Mask(nn.Module):
    """Returns what no gradient passes through."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return (x > 0).to(self.dtype)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_b081_a_stage_that_returns_a_mask_is_refused_by_name(dtype: torch.dtype) -> None:
    stage = Stage([("mask", Mask(dtype))], is_first=True, is_last=False)
    mesh = silent_mesh(Layout(pp=2), 0)
    executor = PipelineExecutor({0: stage}, mesh, (2, 3), torch.float32, lambda y, _: y.sum())
    batch = ReplicaBatch((range(2),), (torch.ones(2, 3),), ())
    with pytest.raises(ValueError, match=f"stage 0 returned {dtype} .* the next stage expects torch.float32"):
        executor.run(build_schedule("1f1b", 2, 1), batch, 1.0)
