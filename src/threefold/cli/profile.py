"""``threefold profile``: measure what the parts of a job's model and the links take on this machine."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from threefold.cli.output import say_written, write_output
from threefold.errors import JobError, Problem

if TYPE_CHECKING:
    from threefold.job import Job

DEFAULT_OUTPUT = Path("profile.json")
# Ranks that measure note nothing on the activity board, so the launcher must not take them for stuck.
_PATIENCE_S = 24 * 3600.0
_RESULT = "THREEFOLD_PROFILE"


def profile(job: Path, output: Path, seconds: float, set_: Sequence[str]) -> None:
    """Measure with as many ranks as the job runs on this machine, and write the profile; or be one of these ranks.

    Raises JobError before any process starts when the job, this machine or the output won't do, WorkerError when a
    rank fails.
    """
    if "RANK" in os.environ and _RESULT in os.environ:
        _measure(job, seconds, set_)
        return
    from threefold.job import load_job

    loaded = load_job(job, set_)
    _check(loaded, output)
    directory = Path(tempfile.mkdtemp(prefix="threefold-profile-"))
    text = _launch(loaded, directory, seconds)
    shutil.rmtree(directory)  # where a rank failed, its logs stay: the error names them
    write_output("-o", output, text)
    _show(output, loaded)


def local_job(job: Job) -> Job:
    """The job with the ranks that run on this machine alone, as replicas: each measures for itself."""

    local = job.world_size
    if job.cluster is not None and not job.is_cpu:
        local = min(local, job.cluster.devices_per_node)
    replicas = job.parallelism.dp.model_copy(update={"size": max(1, local // job.tp)})
    pipeline = job.parallelism.pp.model_copy(update={"size": 1})
    parallelism = job.parallelism.model_copy(update={"dp": replicas, "pp": pipeline})
    return job.model_copy(update={"parallelism": parallelism})


def _check(job: Job, output: Path) -> None:
    from threefold.job import check_trainable
    from threefold.train.preflight import missing_gpus

    # Tokens, steps and a directory for them are for training; what is measured needs none.
    problems = [problem for problem in check_trainable(job) if problem.key not in ("data.train", "steps")]
    measured = local_job(job)
    if not job.is_cpu:
        problems += missing_gpus(measured.world_size)
        if measured.world_size % job.tp or (job.cluster and job.tp > job.cluster.devices_per_node):
            message = f"{job.tp} ranks share a layer, and a node has fewer devices, so one machine can't measure it"
            problems.append(Problem("parallelism.tp.size", message, "profile with a smaller tp"))
    if output.is_dir() or not output.parent.is_dir():
        problems.append(Problem("-o", f"{str(output)!r} is no file that can be written", "name one, like profile.json"))
    if problems:
        raise JobError(problems)


def _launch(job: Job, directory: Path, seconds: float) -> str:
    from threefold.report.words import count_of
    from threefold.train.launcher import launch

    job_file, result = directory / "measured.json", directory / "profile.json"
    job_file.write_text(job.model_dump_json(exclude_none=True))
    num_ranks = local_job(job).world_size
    print(f"measuring with {count_of(num_ranks, 'busy rank')}, about {seconds:g} s", file=sys.stderr, flush=True)
    os.environ[_RESULT] = str(result)
    try:
        command = [sys.executable, "-m", "threefold", "profile", str(job_file), "--seconds", str(seconds)]
        status = launch(command, directory, num_ranks, timeout_s=_PATIENCE_S, cpu=job.is_cpu)
    finally:
        del os.environ[_RESULT]
    if status:
        raise SystemExit(status)
    return result.read_text()


def _measure(job_file: Path, seconds: float, set_: Sequence[str]) -> None:
    """Be one of the ranks."""
    from threefold.train.launcher import die_with_parent

    die_with_parent()

    from threefold.job import Job
    from threefold.measure.profile import Budget, measure_profile
    from threefold.train.worker import choose_device, joined_ranks

    job = Job.model_validate_json(job_file.read_bytes())
    local = local_job(job)
    rank, device = int(os.environ["RANK"]), choose_device(job)
    with joined_ranks(local, rank, device):
        found = measure_profile(job, rank, local.world_size, device, Budget(seconds=seconds))
        if rank == 0:
            Path(os.environ[_RESULT]).write_text(found.to_json())


def _show(output: Path, job: Job) -> None:
    from threefold.cost.profile import read_profile
    from threefold.report.profile import print_profile

    print_profile(read_profile(output, job))
    say_written(output)
