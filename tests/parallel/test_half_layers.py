"""Stages that end between the attention and the feed-forward of a layer compute what one process computes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.jobs import GPT2, LLAMA, small_job
from tests.parallel.ranks import run_steps
from tests.parallel.test_counters import counted
from tests.parallel.test_traffic import predicted
from threefold.cost.held import estimate_held
from threefold.job import Job
from threefold.measure.parity import ParitySettings, run_parity
from threefold.measure.worker_pool import WorkerPool
from threefold.parallel.engine import build_layout, cut_layers, pieces

L = LLAMA["num_hidden_layers"]
DROPOUT = {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "two stages": {"partition": [L - 1.5, 1.5]},
    "half a layer alone": {"dp": 2, "partition": [0.5, L - 0.5], "zero": 3, "recompute": "full"},
    "both halves on one rank": {"dp": 2, "schedule": "zb_v", "partition": [0.5, 0.5, 0.5, L - 1.5], "zero": 3},
    "sequence parallel": {"tp": 2, "schedule": "zb_v", "partition": [1, 0.5, 1, L - 2.5], "recompute": "selective"},
    "all": {"dp": 2, "tp": 2, "schedule": "interleaved_1f1b", "partition": [1.5, L - 2.5, 0.5, 0.5], "zero": 1},
}


def job_of(
    model: dict[str, Any],
    partition: list[float],
    dp: int = 1,
    tp: int = 1,
    schedule: str = "1f1b",
    zero: int = 0,
    recompute: str = "none",
) -> Job:
    return small_job(
        model,
        parallelism={
            "dp": {"size": dp},
            "tp": {"size": tp, "sequence_parallel": tp > 1},
            "pp": {"size": 2, "schedule": schedule, "chunks": len(partition) // 2, "partition": partition},
        },
        zero_optimization={"stage": zero, "reduce_bucket_size": 3000},
        activation_checkpointing={"mode": recompute},
        gradient_clipping=0.05,
    )


@pytest.mark.parametrize("model", [GPT2, LLAMA, GPT2 | DROPOUT], ids=["gpt2", "llama", "dropout"])
def test_parity(pool: WorkerPool, model: dict[str, Any]) -> None:
    """Tied and untied embeddings; dropout draws the same masks wherever a layer is cut."""
    jobs = {name: job_of(model, **case) for name, case in CASES.items()}
    report = run_parity(jobs, ParitySettings(steps=2), pool)
    assert report.ok, report.layouts


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_traffic_is_counted_as_predicted(pool: WorkerPool, case: dict[str, Any]) -> None:
    job = job_of(LLAMA, **case)
    for rank, run in enumerate(pool.run(run_steps, job.world_size, job, 2)):
        assert run.traffic == predicted(job, build_layout(job).coord(rank).pp), f"rank {rank}"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bytes_held_are_counted_as_predicted(pool: WorkerPool, case: dict[str, Any]) -> None:
    job = job_of(LLAMA, **case)
    for rank, (counter, _) in enumerate(pool.run(counted, job.world_size, job)):
        held = estimate_held(job, build_layout(job).coord(rank).pp)
        assert counter.held["parameters"] == held.parameters, f"rank {rank}"
        assert counter.held["optimizer"] == held.optimizer, f"rank {rank}"


def test_only_cut_layers_are_two_parts() -> None:
    halves = [range(9), range(9, 13), range(13, 16)]
    cut = cut_layers(halves)
    assert cut == {4, 6}
    assert [pieces(half, cut) for half in halves] == [range(5), range(5, 8), range(8, 10)]
