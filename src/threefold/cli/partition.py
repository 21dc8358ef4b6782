"""``--partition`` and ``--profile``: a job's stages are settled before anything runs, and what was chosen is said."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threefold.errors import JobError, Problem

if TYPE_CHECKING:
    from threefold.cost.profile import Profile
    from threefold.job import Job

SUMMARY_FILE = "summary.json"
SCHEDULE_FILE = "schedule.txt"
"""A schedule that was searched for the run, in its directory."""


def with_partition(set_: Sequence[str], partition: str | None) -> list[str]:
    """The overrides with ``--partition`` among them. Raises JobError for what is neither counts, even nor auto."""
    if partition is None:
        return list(set_)
    text = partition.replace(" ", "").strip("[]")
    if text not in ("even", "auto") and not re.fullmatch(r"\d{1,9}(\.[05])?([,+]\d{1,9}(\.[05])?)*", text):
        fix = "write the layers of each stage like --partition 3,3,2,4 or 4.5,3.5 (halves only), or even, or auto"
        raise JobError([Problem("--partition", f"{partition!r} is no partition", fix)])
    value = text if text in ("even", "auto") else f"[{text.replace('+', ',')}]"
    return [*set_, f"parallelism.pp.partition={value}"]


def profile_of(path: Path | None, job: Job) -> Profile | None:
    """The profile that was named, checked against the job. Raises JobError."""
    if path is None:
        return None
    from threefold.cost.profile import read_profile

    return read_profile(path, job)


def settled(job: Job, profile: Path | None) -> tuple[Job, list[str]]:
    """The job with its partition as a list, and what was chosen and why.

    Raises JobError for a profile that can't be read or is of other work.
    """
    from threefold.plan.balance import resolve_partition

    job, balance = resolve_partition(job, profile_of(profile, job))
    return job, [] if balance is None else [balance.words()]


def searched(job: Job, profile: Path | None, run_dir: Path) -> tuple[Job, str | None, list[str]]:
    """The job with the schedule that measured costs find, as a file in ``run_dir`` yet to be written, and a note.

    Without a profile, and where the job states another schedule, the job is what it was.
    """
    measured = profile_of(profile, job)
    if measured is None or job.parallelism.pp.schedule != "searched" or job.pp == 1:
        return job, None, []
    from threefold.plan.balance import search_job

    found = search_job(job, measured)
    path = run_dir.resolve() / SCHEDULE_FILE
    pipeline = job.parallelism.pp.model_copy(
        update={"schedule": type(job.parallelism.pp)().schedule, "schedule_file": str(path)}
    )
    parallelism = job.parallelism.model_copy(update={"pp": pipeline})
    return job.model_copy(update={"parallelism": parallelism}), found.schedule.to_text(), [found.words()]


def advise(job: Job, run_dir: Path, profile: Path | None = None) -> None:
    """Say, when a run is over, whether another partition would have been faster; summary.json gets it too.

    Silent where nothing is to be gained, or the run recorded no step.
    """
    from threefold.errors import ThreefoldError
    from threefold.measure.imbalance import run_imbalance

    try:
        found = run_imbalance(job, run_dir, profile_of(profile, job))
    except (ThreefoldError, OSError):  # the run itself is done, and its recording is nobody's due
        return
    if found is None:
        return
    print(f"balance: {found.words()}", file=sys.stderr, flush=True)
    _add_to_summary(run_dir / SUMMARY_FILE, found.to_dict())


def _add_to_summary(path: Path, found: dict[str, Any]) -> None:
    if path.exists():
        summary = json.loads(path.read_text())
        path.write_text(json.dumps(summary | {"balance": found}, indent=1, allow_nan=False) + "\n")
