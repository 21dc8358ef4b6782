"""``threefold explain``: what a job means, in words, before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

SUMMARY_FILE = "summary.json"


def explain(job: Path, set_: list[str], profile: Path | None = None, partition: str | None = None) -> None:
    """Print where every rank of a job is, what it holds, and what each axis sends, when and how often.

    Stages that the job leaves to be cut are cut as ``train`` would, by the costs in ``profile`` where one is given.

    For the job file in a run directory, what the run has counted stands next to what is predicted.
    """
    from threefold.cli.partition import profile_of, with_partition
    from threefold.job import load_job
    from threefold.report.explain import print_explanation

    overrides = with_partition(set_, partition)
    loaded = load_job(job, overrides)
    summary = None if overrides else _summary_beside(job)
    print_explanation(loaded, summary=summary, profile=profile_of(profile, loaded))


def _summary_beside(job: Path) -> dict[str, object] | None:
    """The summary of the run that this job file belongs to: ``threefold train`` writes both into its directory."""
    path = job.parent / SUMMARY_FILE
    if job.name != "job.json" or not path.exists():
        return None
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):  # of a run that is being written
        return None
