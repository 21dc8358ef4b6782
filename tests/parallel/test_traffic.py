"""Law 3: the bytes that the cost model says are sent are those that the runtime counts, call by call."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.jobs import GPT2, LLAMA, small_job
from tests.parallel.ranks import RankRun, run_steps
from threefold.cost.traffic import Transfer, estimate_traffic
from threefold.job import Job, relayout
from threefold.layout import AXES
from threefold.measure.layouts import parse_layout
from threefold.measure.worker_pool import WorkerPool
from threefold.parallel.engine import build_layout
from threefold.parallel.mesh import group_name, tied_name

Totals = dict[tuple[str, str], tuple[int, int]]
"""(group, operation) -> calls and payload bytes."""


def group_of(job: Job, transfer: Transfer) -> str:
    """The mesh's name of the group that a transfer's axis means; the mesh leaves out axes of one rank."""
    if transfer.axis == "dp+pp":
        return tied_name((0, job.pp - 1))
    axes = AXES if transfer.axis == "world" else transfer.axis.split("+")
    return group_name(build_layout(job), axes)


def predicted(job: Job, pp_coord: int) -> Totals:
    calls: Counter[tuple[str, str]] = Counter()
    payload_bytes: Counter[tuple[str, str]] = Counter()
    for transfer in estimate_traffic(job, pp_coord):
        key = (group_of(job, transfer), transfer.operation)
        calls[key] += transfer.count_per_step
        payload_bytes[key] += transfer.bytes_per_step
    return {key: (calls[key], payload_bytes[key]) for key in calls}


LAYOUTS = [
    "dp=1",
    "dp=2",
    "tp=2",
    "tp=2,sequence_parallel=true",
    "pp=2",
    "pp=3,partition=1+2+1,schedule=gpipe",
    "pp=3,partition=2+0+2",
    "dp=2,tp=2,sequence_parallel=true",
    "dp=2,tp=2,pp=2",
    "dp=2,tp=2,pp=2,sequence_parallel=true",
]
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "tied llama": LLAMA | {"tie_word_embeddings": True},
    "untied gpt2": GPT2 | {"tie_word_embeddings": False, "vocab_size": 64},
}


@pytest.mark.parametrize("bucket", [700, 4_000_000])
@pytest.mark.parametrize("keys", MODELS.values(), ids=MODELS)
def test_predicted_equals_counted(pool: WorkerPool, keys: dict[str, Any], bucket: int) -> None:
    job = small_job(
        keys, train_micro_batch_size_per_gpu=2, zero_optimization={"reduce_bucket_size": bucket}, gradient_clipping=0.1
    )
    for layout in LAYOUTS if bucket == 700 else LAYOUTS[-2:]:
        laid_out = relayout(job, **parse_layout(layout))
        runs: list[RankRun] = pool.run(run_steps, laid_out.world_size, laid_out, 2)
        for rank, run in enumerate(runs):
            assert run.traffic == predicted(laid_out, build_layout(laid_out).coord(rank).pp), f"rank {rank} of {layout}"


def test_float64_sends_twice_the_bytes(pool: WorkerPool) -> None:
    job = small_job(dp=2, pp=2, dtype="float64")
    for rank, run in enumerate(pool.run(run_steps, 4, job, 1)):
        assert run.traffic == predicted(job, build_layout(job).coord(rank).pp)
