"""Compiled layers compute what layers compute, in any layout; what communicates is left out of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.jobs import GPT2, LLAMA, small_job
from threefold.job import Job
from threefold.measure.parity import ParitySettings, run_parity
from threefold.measure.worker_pool import WorkerContext, WorkerPool
from threefold.parallel.engine import build_engine, build_job_mesh
from threefold.train.data.synthetic import SyntheticTokens

DROPOUT = {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2, "zero_optimization": {"stage": 3}},
    "tp": {"tp": 2, "parallelism": {"tp": {"sequence_parallel": True}}},
    "pp": {"pp": 2, "parallelism": {"pp": {"schedule": "zb_h1", "partition": [2.5, 1.5]}}},
    "recompute": {"activation_checkpointing": {"mode": "full"}},
    "selective": {"activation_checkpointing": {"mode": "selective"}},
}


def jobs(model: dict[str, Any], backend: str) -> dict[str, Job]:
    compiled: dict[str, Any] = {"compile": {"enabled": True, "backend": backend}}
    return {name: small_job(model, **settings, **compiled) for name, settings in LAYOUTS.items()}


@pytest.mark.parametrize("model", [GPT2 | DROPOUT, LLAMA], ids=["gpt2 with dropout", "llama"])
def test_parity_of_what_is_traced(pool: WorkerPool, model: dict[str, Any]) -> None:
    report = run_parity(jobs(model, "aot_eager"), ParitySettings(steps=2, timeout_s=300.0), pool)
    assert report.ok, report.layouts


@pytest.mark.slow
@pytest.mark.parametrize("model", [GPT2 | DROPOUT, LLAMA], ids=["gpt2 with dropout", "llama"])
def test_parity_of_what_is_generated(pool: WorkerPool, model: dict[str, Any]) -> None:
    report = run_parity(jobs(model, "inductor"), ParitySettings(steps=2, timeout_s=900.0), pool)
    assert report.ok, report.layouts


def graphs_of(context: WorkerContext, job: Job) -> int:
    """Graphs that two steps of training compile in a process that has compiled nothing yet."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    assert job.model is not None and job.data is not None
    engine = build_engine(job, build_job_mesh(job, context.rank, activity=context.activity))
    source = SyntheticTokens(job.model.vocab_size, job.data.sequence_length, 0)
    samples = [range(i, i + 1) for i in range(job.num_microbatches)]
    for _ in range(2):
        engine.train_step(samples, source.batch, lambda _: None)
    return counters["stats"]["unique_graphs"]


def test_many_layers_share_what_is_compiled(pool: WorkerPool) -> None:
    """Dynamo gives up on a function after some recompilations, without a word."""
    compiled: dict[str, Any] = {"compile": {"enabled": True, "backend": "eager"}}
    few, many = (small_job(LLAMA | {"num_hidden_layers": layers}, **compiled) for layers in (2, 20))
    (graphs,) = pool.run(graphs_of, 1, few)
    assert graphs > 0
    assert pool.run(graphs_of, 1, many) == [graphs]
