"""What happens before the first rank starts: all that can be known then is checked, and the run directory is made."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from threefold.errors import DataError, JobError, Problem
from threefold.job import Job, check_trainable
from threefold.schedule import job_schedule
from threefold.train.launcher import num_cores
from threefold.train.metrics import METRICS_FILE, new_run_dir

RESOLVED_JOB = "job.json"
"""The job as it runs, with every default and every derived number filled in; written into the run directory."""


RANKS_OF_A_CORE = 4
"""More CPU ranks than this on each core are remarked upon."""
BOARD_PREFIX = "activity"
"""How the names of activity boards begin."""


def check_one_machine(job: Job, job_file: Path) -> None:
    """Refuse GPUs on several machines, whose ranks must be started on each. CPU ranks may stand in for nodes."""
    cluster = job.cluster
    if cluster is None or cluster.nodes == 1 or job.is_cpu:
        return
    fix = (
        f"run this on each of them: torchrun --nnodes {cluster.nodes} --nproc-per-node {cluster.devices_per_node} "
        f"--rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-id NAME -m threefold train {job_file}"
    )
    raise JobError([Problem("cluster.nodes", f"is {cluster.nodes}; this command starts ranks on one machine", fix)])


def check_before_start(job: Job, num_local_ranks: int) -> None:
    """Refuse what can't be trained, data that is missing or does not fit, devices that are not there: all at once.

    Raises JobError, and ScheduleError for a schedule file that spells no legal schedule.
    """
    problems = check_trainable(job) + _wrong_schedule(job) + _missing_compiler(job)
    if not job.is_cpu:
        problems += missing_gpus(num_local_ranks)
    if job.model is not None and job.data is not None and job.data.train is not None:
        problems += _wrong_data(job)
    if problems:
        raise JobError(problems)


def _wrong_schedule(job: Job) -> list[Problem]:
    if job.parallelism.pp.schedule_file is None:
        return []
    try:
        job_schedule(job)
    except JobError as error:
        return list(error.problems)
    return []


def _missing_compiler(job: Job) -> list[Problem]:
    """For CPUs inductor writes C++; for GPUs it brings what it needs."""
    needed = job.compile.enabled and job.compile.backend == "inductor" and job.is_cpu
    if not needed or any(map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++"))):
        return []
    message = "torch.compile needs a C++ compiler for CPUs, and there is neither g++ nor clang++ nor what CXX names"
    return [Problem("compile.enabled", message, "install g++, or set it to false")]


def _wrong_data(job: Job) -> list[Problem]:
    from threefold.train.worker import open_sources

    try:
        open_sources(job)
    except DataError as error:
        return [error.problem]
    return []


def missing_gpus(needed: int) -> list[Problem]:
    """The problem of a machine with fewer GPUs than that."""
    import torch

    # device_count asks the driver; it does not make a context, which would take memory on the first GPU.
    found = torch.cuda.device_count()
    if found >= needed:
        return []
    message = f"the job needs {needed} GPUs on this machine, which has {found}"
    return [Problem("cluster.device", message, "set cluster.device=cpu, or run on a machine that has them")]


def choose_run_dir(stated: Path | None, job_file: Path) -> Path:
    """The directory that was stated, or a new one in ``runs/NAME``. Raises JobError where none can be made."""
    if stated is not None:
        return stated
    try:
        return new_run_dir(Path("runs") / job_file.stem)
    except OSError as error:
        raise JobError([_unwritable(Path("runs"), error)]) from error


def prepare_run_dir(run_dir: Path, job: Job) -> None:
    """Make the directory and write the resolved job into it.

    Refuses a directory that holds anything: an earlier run, one that starts at this moment, or somebody's files. Raises
    JobError.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        # Under torchrun other ranks may have put their activity boards here already.
        others = sorted(path.name for path in run_dir.iterdir() if not path.name.startswith(BOARD_PREFIX))
        if others:
            raise JobError([_occupied(run_dir, others)])
        with (run_dir / RESOLVED_JOB).open("x") as file:  # fails if another run was faster
            file.write(job.to_json())
    except FileExistsError as error:
        raise JobError([_occupied(run_dir, [RESOLVED_JOB])]) from error
    except OSError as error:
        raise JobError([_unwritable(run_dir, error)]) from error


def _occupied(run_dir: Path, names: Sequence[str]) -> Problem:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    what = "another run" if RESOLVED_JOB in names or METRICS_FILE in names else "other files"
    return Problem("--run-dir", f"{str(run_dir)!r} holds {what} ({shown})", "name a new directory, or an empty one")


def _unwritable(run_dir: Path, error: OSError) -> Problem:
    message = f"can't write into {str(run_dir)!r}: {error.strerror}"
    return Problem("--run-dir", message, "state --run-dir with a directory that you may write to")


def crowded(job: Job) -> list[str]:
    """A note where many ranks share a core: that shows that a job is right, not how fast it is."""
    cores = num_cores()
    nodes = job.cluster.nodes if job.cluster and "LOCAL_WORLD_SIZE" in os.environ else 1
    ranks = job.world_size // nodes
    if not job.is_cpu or ranks <= RANKS_OF_A_CORE * cores:
        return []
    return [f"{ranks} ranks share {cores} cores: each is that much slower, and so is starting them"]


def summarize(job: Job, run_dir: Path) -> str:
    """One paragraph: what is about to happen, in the numbers that a person checks first."""
    assert job.model is not None and job.data is not None, "check_trainable refuses a job without them"
    axes = " × ".join(f"{axis}={size}" for axis, size in (("dp", job.dp), ("tp", job.tp), ("pp", job.pp)))
    schedule = job.parallelism.pp.schedule_file or job.parallelism.pp.schedule
    pipeline = f" ({schedule})" if job.pp > 1 else ""
    device = job.cluster.device if job.cluster else "cpu"
    tokens = job.train_batch_size * job.data.sequence_length
    return (
        f"Training {_count(job.model.num_parameters)} parameters ({job.model.model_type}) for {job.steps} steps "
        f"in {job.precision} on {job.world_size} × {device}: {axes}{pipeline}. Each step takes {job.train_batch_size} "
        f"samples (micro batch {job.micro_batch} × accumulation {job.num_microbatches} × dp {job.dp}) = {tokens:,} "
        f"tokens. Everything goes to {run_dir}."
    )


def _count(number: int) -> str:
    """``36,288``, ``1.2 million``, ``70.6 billion``."""
    for size, name in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:,.1f} {name}"
    return f"{number:,}"
