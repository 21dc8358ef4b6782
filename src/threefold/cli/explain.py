"""``threefold explain``: what a job means, in words, before anything runs."""

from __future__ import annotations

from pathlib import Path


def explain(job: Path, set_: list[str]) -> None:
    """Print where every rank of a job is, what it holds, and what each axis sends, when and how often."""
    from threefold.job import load_job
    from threefold.report.explain import print_explanation

    print_explanation(load_job(job, set_))
