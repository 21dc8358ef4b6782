"""``threefold check JOB``: judge a job without running it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from threefold.job import Job, ModelSpec


def check(job: Path, set_: Sequence[str] = ()) -> None:
    """Print that the job is right and what it amounts to. Raises JobError with every problem when it is wrong, and
    ScheduleError when its schedule file spells no legal schedule.

    A right job may still lack what training needs, or ask for what training does not do yet: that is listed too.
    """
    from threefold.job import check_trainable, read_job

    loaded = read_job(job, set_)
    if loaded.job.parallelism.pp.schedule_file is not None:
        from threefold.schedule import job_schedule

        job_schedule(loaded.job)
    if loaded.job.cluster is not None and not loaded.job.is_cpu:
        from threefold.cost.hardware import build_hardware

        build_hardware(loaded.job.cluster)  # refuses a device that nobody knows
    print(f"OK {job}: {_describe_model(loaded.job.model)}{_describe_layout(loaded.job)}")
    for note in loaded.notes:
        print(f"note: {note}")
    for number, problem in enumerate(check_trainable(loaded.job)):
        if number == 0:
            print("not yet ready for `threefold train`:")
        print(f"  {problem}")


def _describe_model(model: ModelSpec | None) -> str:
    if model is None:
        return ""
    return f"{model.preset or model.model_type}, {model.num_parameters / 1e9:.3g} billion parameters; "


def _describe_layout(job: Job) -> str:
    layout = f"dp {job.dp} × tp {job.tp} × pp {job.pp} = {job.world_size} rank{'s' * (job.world_size != 1)}"
    batch = (
        f"{job.train_batch_size} = micro batch {job.micro_batch} × accumulation {job.num_microbatches} × dp {job.dp}"
    )
    return f"{layout}; batch {batch}; {job.precision}"
