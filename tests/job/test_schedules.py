"""What a job says about its schedule: names, chunks, files, and what other layouts make of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.jobs import GPT2, small_job
from threefold.job import Job, parse_job
from threefold.job.load import relayout
from threefold.job.shrink import shrink_job


def job_of(**pipeline: Any) -> Job:
    return small_job(parallelism={"pp": {"size": 2, **pipeline}})


@pytest.mark.parametrize(
    ("pipeline", "chunks"),
    [
        ({"schedule": "1f1b"}, 1),
        ({"schedule": "zb_h1"}, 1),
        ({"schedule": "zb_v"}, 2),
        ({"schedule": "zb_v", "chunks": 2}, 2),
        ({"schedule": "interleaved_1f1b", "chunks": 2}, 2),
        ({"schedule": "searched"}, 1),
        ({"schedule": "searched", "chunks": 2}, 2),
        ({"schedule_file": "mine.txt", "chunks": 2}, 2),
    ],
)
def test_chunks_are_resolved_and_survive_being_written(pipeline: dict[str, Any], chunks: int) -> None:
    job = job_of(**pipeline)
    assert job.parallelism.pp.chunks == chunks
    assert job.parallelism.pp.num_stages == 2 * chunks
    assert parse_job(job.model_dump(mode="json", exclude_none=True)) == job


def test_a_partition_counts_the_layers_of_every_chunk() -> None:
    assert job_of(schedule="zb_v", partition=[1, 2, 0, 1]).parallelism.pp.num_stages == 4


def test_a_file_is_written_without_the_name_that_it_excludes() -> None:
    written = job_of(schedule_file="mine.txt").model_dump(mode="json", exclude_none=True)["parallelism"]["pp"]
    assert written["schedule_file"] == "mine.txt"
    assert "schedule" not in written


def test_another_schedule_brings_its_own_chunks() -> None:
    plain, interleaved = job_of(), job_of(schedule="interleaved_1f1b", chunks=2)
    assert relayout(plain, schedule="interleaved_1f1b").parallelism.pp.chunks == 2
    assert relayout(plain, schedule="zb_v").parallelism.pp.chunks == 2
    assert relayout(interleaved, schedule="1f1b").parallelism.pp.chunks == 1
    assert relayout(plain, pp=1, schedule="interleaved_1f1b", chunks=4).parallelism.pp.num_stages == 4
    assert relayout(interleaved, pp=1).parallelism.pp.schedule == "interleaved_1f1b"


def test_a_partition_is_kept_for_as_many_stages_only() -> None:
    cut = job_of(partition=[1, 3])
    assert relayout(cut, pp=1, schedule="interleaved_1f1b").parallelism.pp.partition == (1, 3)
    assert isinstance(relayout(cut, schedule="zb_v").parallelism.pp.partition, str)


def test_a_schedule_file_is_for_one_pipeline() -> None:
    job = job_of(schedule_file="mine.txt", chunks=2)
    assert relayout(job, dp=2).parallelism.pp.schedule_file == "mine.txt"
    other = relayout(job, pp=1).parallelism.pp
    assert (other.schedule_file, other.schedule, other.chunks) == (None, "1f1b", 1)
    other = relayout(job, schedule="zb_v").parallelism.pp
    assert (other.schedule_file, other.schedule, other.chunks) == (None, "zb_v", 2)


def test_a_small_model_has_a_layer_for_every_stage() -> None:
    deep = {**GPT2, "num_hidden_layers": 40}
    small = shrink_job(small_job(deep, parallelism={"pp": {"size": 8, "schedule": "zb_v"}}))
    assert small.model is not None
    assert small.model.num_hidden_layers == small.parallelism.pp.num_stages == 16


def test_a_small_batch_keeps_the_microbatches_that_a_file_is_for() -> None:
    job = small_job(train_batch_size=256, train_micro_batch_size_per_gpu=4, parallelism={"pp": {"schedule_file": "x"}})
    assert shrink_job(job).num_microbatches == job.num_microbatches == 64
