"""``threefold train``: check everything that can be known, then start the ranks; or be one of them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from threefold.job import Job, Loaded
    from threefold.train.torch_profile import ProfiledSteps

# torchrun ends every rank as soon as one has ended. So of an error that all ranks meet only the first one speaks, and
# the others live long enough to let it.
_LET_FIRST_RANK_SPEAK_S = 5.0
PROFILE_COPY = "profile.json"
"""The profile that a run was started with, in its directory."""


def train(
    job: Path,
    run_dir: Path | None,
    set_: list[str],
    profile: Path | None = None,
    partition: str | None = None,
    torch_profile: str | None = None,
) -> None:
    """Train a job and exit: 0 when it is done, 130 after Ctrl-C.

    Where ``RANK`` and ``WORLD_SIZE`` are set, this process is a rank that torchrun, or this very command, started.
    Raises JobError or DataError (exit 2) before any process starts, WorkerError (exit 1) when a rank fails.
    """
    from threefold.cli.partition import with_partition

    _check_environment()
    overrides = with_partition(set_, partition)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        status = _join(job, run_dir, overrides, profile, torch_profile)
    else:
        status = _start(job, run_dir, overrides, profile, torch_profile)
    raise SystemExit(status)


def _check_environment() -> None:
    """Refuse half of what torchrun sets, such as a RANK that was exported once and forgotten."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    given = {name: os.environ[name] for name in names if name in os.environ}
    if not {"RANK", "WORLD_SIZE"} <= given.keys():
        return
    wrong = [name for name in names if not given.get(name, "").isdecimal()]
    if not wrong:
        return

    from threefold.errors import JobError, Problem

    stated = ", ".join(f"{name}={value}" for name, value in given.items())
    message = f"the environment has {stated}, so this process is one of several ranks, but {wrong[0]} is no number"
    fix = "unset RANK WORLD_SIZE to let threefold start the ranks, or start this command with torchrun"
    raise JobError([Problem(wrong[0], message, fix)])


def _load(job_file: Path, overrides: Sequence[str], profile: Path | None, world_size: int | None = None) -> Loaded:
    """The job with all that is left to be chosen chosen, and notes on what was."""
    from threefold.cli.partition import settled
    from threefold.job import read_job

    loaded = read_job(job_file, overrides, world_size=world_size)
    job, chosen = settled(loaded.job, profile)
    return replace(loaded, job=job, notes=(*loaded.notes, *chosen))


def _start(
    job_file: Path, run_dir: Path | None, overrides: Sequence[str], profile: Path | None, torch_profile: str | None
) -> int:
    """Start a process for each rank of the job on this machine, and wait for them."""
    loaded = _load(job_file, overrides, profile)
    job = loaded.job

    from threefold.cli.partition import advise
    from threefold.train.launcher import launch
    from threefold.train.preflight import RESOLVED_JOB, check_before_start, check_one_machine, choose_run_dir

    check_one_machine(job, job_file)
    check_before_start(job, job.world_size)
    options = [] if torch_profile is None else ["--torch-profile", str(_profiled(torch_profile, job))]
    run_dir = choose_run_dir(run_dir, job_file)
    job = _begin_run(loaded, run_dir, profile)
    command = [sys.executable, "-m", "threefold", "train", str(run_dir / RESOLVED_JOB), "--run-dir", str(run_dir)]
    command += options
    status = launch(command, run_dir, job.world_size, timeout_s=job.watchdog.timeout_s, cpu=job.is_cpu)
    advise(job, run_dir, profile)
    return status


def _profiled(torch_profile: str, job: Job) -> ProfiledSteps:
    from threefold.train.torch_profile import parse_steps

    return parse_steps(torch_profile, job.steps or 0)


def _be_rank(job: Job, run_dir: Path, torch_profile: str | None) -> int:
    from threefold.measure.timeline import step_times
    from threefold.train.worker import run_worker

    profiled = None if torch_profile is None else _profiled(torch_profile, job)
    return run_worker(job, run_dir, times_of=step_times, profiled=profiled)


def _join(
    job_file: Path, run_dir: Path | None, overrides: Sequence[str], profile: Path | None, torch_profile: str | None
) -> int:
    """Be the rank that the environment names."""
    from threefold.train.launcher import BOARD_VARIABLE, die_with_parent

    die_with_parent()
    if BOARD_VARIABLE not in os.environ:
        return _join_torchrun(job_file, run_dir, overrides, profile, torch_profile)

    from threefold.job import load_job

    return _be_rank(load_job(job_file, overrides), run_dir or job_file.parent, torch_profile)


def _join_torchrun(
    job_file: Path, run_dir: Path | None, overrides: Sequence[str], profile: Path | None, torch_profile: str | None
) -> int:
    """Be a rank that torchrun started: nothing has been checked yet, and every rank finds the same errors."""
    from threefold.errors import DataError, JobError

    first = os.environ["RANK"] == "0"
    try:
        job, run_dir = _check_torchrun(job_file, run_dir, overrides, profile, first)
        if torch_profile is not None:
            _profiled(torch_profile, job)
    except (JobError, DataError) as error:
        if first:
            raise
        time.sleep(_LET_FIRST_RANK_SPEAK_S)
        return error.exit_status

    from threefold.cli.partition import advise
    from threefold.train.launcher import join_board

    join_board(run_dir)
    status = _be_rank(job, run_dir, torch_profile)
    if first:
        advise(job, run_dir, profile)
    return status


def _check_torchrun(
    job_file: Path, run_dir: Path | None, overrides: Sequence[str], profile: Path | None, first: bool
) -> tuple[Job, Path]:
    from threefold.train.preflight import check_before_start

    loaded = _load(job_file, overrides, profile, world_size=int(os.environ["WORLD_SIZE"]))
    run_dir = run_dir or _torchrun_run_dir(job_file)
    check_before_start(loaded.job, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    job = _begin_run(loaded, run_dir, profile, write=first and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0")
    run_dir.mkdir(parents=True, exist_ok=True)
    return job, run_dir


def _torchrun_run_dir(job_file: Path) -> Path:
    """``runs/NAME/ID`` with torchrun's run id, since all ranks must find the same name without talking."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if run_id != "none":
        return Path("runs") / job_file.stem / run_id

    from threefold.errors import JobError, Problem

    fix = "state --run-dir DIR, or give torchrun an --rdzv-id"
    raise JobError([Problem("--run-dir", "is missing, and torchrun has no run id to name one after", fix)])


def _begin_run(loaded: Loaded, run_dir: Path, profile: Path | None, write: bool = True) -> Job:
    """The job as it runs; with ``write`` its directory is made, and what is about to happen is said."""
    from threefold.cli.partition import SCHEDULE_FILE, searched
    from threefold.train.preflight import crowded, prepare_run_dir, summarize

    job, schedule, found = searched(loaded.job, profile, run_dir)
    if not write:
        return job
    prepare_run_dir(run_dir, job)
    if schedule is not None:
        (run_dir / SCHEDULE_FILE).write_text(schedule)
    if profile is not None:  # what the run was planned with stays with it, for `threefold timeline`
        (run_dir / PROFILE_COPY).write_bytes(profile.read_bytes())
    for line in (*(f"note: {note}" for note in (*loaded.notes, *found, *crowded(job))), summarize(job, run_dir)):
        print(line, file=sys.stderr, flush=True)
    return job
