"""``threefold explain``: what a job means, in words, before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

SUMMARY_FILE = "summary.json"


def explain(job: Path, set_: list[str]) -> None:
    """Print where every rank of a job is, what it holds, and what each axis sends, when and how often.

    For the job file in a run directory, what the run has counted stands next to what is predicted.
    """
    from threefold.job import load_job
    from threefold.report.explain import print_explanation

    print_explanation(load_job(job, set_), summary=None if set_ else _summary_beside(job))


def _summary_beside(job: Path) -> dict[str, object] | None:
    """The summary of the run that this job file belongs to: ``threefold train`` writes both into its directory."""
    path = job.parent / SUMMARY_FILE
    if job.name != "job.json" or not path.exists():
        return None
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):  # of a run that is being written
        return None
