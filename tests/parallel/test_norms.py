"""The gradient norm is that of the whole model, each element once, and clipping by it is that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.jobs import GPT2, LLAMA, small_job
from tests.parallel.fakes import silent_mesh
from tests.parallel.ranks import all_equal, run_steps, tokens_of, whole_parameters
from threefold.job import Job, relayout
from threefold.measure.layouts import parse_layout
from threefold.measure.reference import Reference, run_reference
from threefold.measure.worker_pool import WorkerPool
from threefold.parallel.engine import build_engine, build_layout
from threefold.parallel.norms import clip_factor

STEPS, RATE = 2, 0.5
LIMIT = 0.003
"""Far below the norm of any of these gradients, so that clipping decides the update."""


def clipped_job(keys: dict[str, Any]) -> Job:
    return small_job(keys, dtype="float64", gradient_clipping=LIMIT, optimizer={"type": "SGD", "params": {"lr": RATE}})


def reference_of(job: Job) -> Reference:
    return run_reference(job, tokens_of(job, ignored_fraction=0.4), STEPS, RATE, torch.float64)


@pytest.mark.parametrize(
    ("keys", "layouts"),
    [
        (GPT2, ["pp=2", "dp=2,tp=2", "tp=4,sequence_parallel=true", "dp=2,pp=2,tp=2,sequence_parallel=true"]),
        (LLAMA, ["pp=4", "dp=2,tp=2,sequence_parallel=true"]),
        (LLAMA | {"tie_word_embeddings": True}, ["dp=2,pp=2", "pp=3,partition=2+0+2"]),
        (LLAMA | {"vocab_size": 5}, ["tp=4"]),  # the last rank holds nothing but padding
    ],
    ids=["gpt2", "llama", "tied llama", "five tokens"],
)
def test_b001_b003_b004_b006_b007_b012_norm_and_clipped_step_are_those_of_one_process(
    pool: WorkerPool, keys: dict[str, Any], layouts: list[str]
) -> None:
    job = clipped_job(keys)
    reference = reference_of(job)
    for layout in layouts:
        laid_out = relayout(job, **parse_layout(layout))
        runs = pool.run(run_steps, laid_out.world_size, laid_out, STEPS)
        assert all_equal([run.norms for run in runs]), layout
        assert runs[0].norms == pytest.approx(reference.norms, rel=1e-12), layout
        assert min(reference.norms) > 10 * LIMIT
        for name, value in whole_parameters(runs).items():
            torch.testing.assert_close(value, reference.parameters[-1][name], rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("keys", [GPT2, LLAMA, GPT2 | {"tie_word_embeddings": False}, LLAMA | {"vocab_size": 5}])
@pytest.mark.parametrize("layout", ["dp=2,tp=2,pp=2", "tp=4", "pp=4", "dp=3,tp=2,pp=3,sequence_parallel=true"])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_b007_every_element_of_the_model_counts_exactly_once(keys: dict[str, Any], layout: str, zero: int) -> None:
    """With every gradient at 1, the squared norm is the number of parameters."""
    job = small_job(keys, train_batch_size=12, dtype="float64", zero_optimization={"stage": zero})
    job = relayout(job, **parse_layout(layout))
    assert job.model is not None
    ties = [(0, job.pp - 1)] if job.model.tie_word_embeddings and job.pp > 1 else []
    total = 0.0
    for rank in range(job.world_size):
        mesh = silent_mesh(build_layout(job), rank, ties)
        data = build_engine(job, mesh).data
        for piece in data.gradient_pieces():
            rows, row_size = piece.entry.parameter.shape[0], piece.entry.parameter[0].numel()
            real = (rows - piece.entry.shard.num_padding if piece.entry.shard.dim == 0 else rows) * row_size
            piece.values.copy_(torch.arange(piece.start, piece.start + piece.values.numel()) < real)
        total += float(data.squared_norm())
    assert total == pytest.approx(job.model.num_parameters, rel=1e-12)


def test_large_tensors_are_summed_exactly_enough() -> None:
    """A float32 sum of two million squares is off by 3e-5 on a CPU, and the norm would hang on where ZeRO cuts."""
    job = small_job(GPT2 | {"vocab_size": 61, "max_position_embeddings": 65_536, "num_hidden_layers": 1})
    engine = build_engine(job, silent_mesh(build_layout(job), 0))
    generator = torch.Generator().manual_seed(0)
    for bucket in engine.data.buckets:
        bucket.grads.normal_(generator=generator)
    exact = sum(
        float(piece.values.double().square().sum())
        for bucket in engine.data.buckets
        for piece in bucket.pieces(bucket.grad_shard)
    )
    assert float(engine.data.squared_norm()) == pytest.approx(exact, rel=5e-7)


@pytest.mark.parametrize(("norm", "limit"), [(3.0, 1.0), (0.5, 1.0), (1.0, 1.0), (1e-9, 1e-12)])
def test_clipping_is_pytorchs(norm: float, limit: float) -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    parameter.grad = torch.tensor([norm], dtype=torch.float64)
    nn.utils.clip_grad_norm_([parameter], limit)
    assert norm * clip_factor(norm, limit) == pytest.approx(float(parameter.grad), rel=1e-12)


def test_a_limit_of_0_is_no_limit() -> None:
    assert clip_factor(1e9, 0.0) == 1.0
