"""``threefold explain``: what a job means, in words, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def explain(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="A job file, JSON or YAML.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one key of the job.")
    ] = None,
) -> None:
    """Explain a job: where every rank is, what it holds, and what each axis sends, when and how often.

    Starts nothing and needs no GPU; works without a model, too.
    """
    from threefold.job import load_job
    from threefold.report.explain import print_explanation

    print_explanation(load_job(job, set_ or []))
