"""Traces by PyTorch's profiler: which steps, and that actions are named in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.jobs import GPT2, small_job
from threefold.errors import JobError
from threefold.job import Job
from threefold.measure.worker_pool import WorkerContext, WorkerPool
from threefold.parallel.engine import build_engine, build_job_mesh
from threefold.train.data.synthetic import SyntheticTokens
from threefold.train.torch_profile import ProfiledSteps, StepProfiler, parse_steps
from threefold.train.trainer import Sources, Trainer


def test_steps_as_text() -> None:
    assert parse_steps("3", 10) == ProfiledSteps(3, 3)
    assert parse_steps("3:6", 10) == ProfiledSteps(3, 6)
    assert str(ProfiledSteps(3, 6)) == "3:6"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' names no steps"),
        ("three", "'three' names no steps"),
        ("3:", "'3:' names no steps"),
        ("-3", "'-3' names no steps"),
        ("3-6", "'3-6' names no steps(.|\n)*like 3:6"),
        ("1", "begins before step 2(.|\n)*begin at step 2 or later"),
        ("0:5", "begins before step 2"),
        ("6:3", "'6:3' are no steps of a job that has 10"),
        ("3:11", "'3:11' are no steps of a job that has 10(.|\n)*from 2 to 10"),
    ],
)
def test_what_are_no_steps(text: str, words: str) -> None:
    with pytest.raises(JobError, match=words) as caught:
        parse_steps(text, 10)
    assert caught.value.problems[0].key == "--torch-profile"


def train_profiled(context: WorkerContext, job: Job, run_dir: Path, steps: ProfiledSteps) -> bool:
    assert job.model is not None and job.data is not None
    mesh = build_job_mesh(job, context.rank, activity=context.activity)
    engine = build_engine(job, mesh)
    source = SyntheticTokens(job.model.vocab_size, job.data.sequence_length, job.seed)
    with StepProfiler(steps, run_dir, mesh) as profiler:
        Trainer(job, engine, Sources(source), None, profiler=profiler).run()
    return mesh.recorder.ranges is None


def test_every_action_of_the_profiled_steps_is_a_range_on_its_rank(pool: WorkerPool, tmp_path: Path) -> None:
    job = small_job(
        GPT2, pp=2, parallelism={"pp": {"schedule": "zb_h1"}}, gradient_accumulation_steps=2, train_batch_size=2
    )
    assert pool.run(train_profiled, 2, job, tmp_path, ProfiledSteps(2, 3)) == [True, True]
    for rank in range(2):
        trace = json.loads((tmp_path / "torch_profile" / f"rank{rank}.json").read_text())
        names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
        for action in (f"{rank}F0", f"{rank}I1", f"{rank}W1", "SYNC", "STEP"):
            assert names.count(action) == 2, action  # once in each of two steps
        assert f"{1 - rank}F0" not in names
        assert any(event["name"] == "aten::mm" for event in trace["traceEvents"])
