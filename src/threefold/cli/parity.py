"""``threefold parity``: proof that layouts compute what one process computes."""

from __future__ import annotations

import json
from pathlib import Path


def parity(
    job: Path,
    world: int | None,
    layout: list[str],
    dtype: str,
    set_: list[str],
    json_: bool,
    steps: int,
    shrink: bool,
) -> None:
    """Compare layouts of a job with one process and print the verdict; SystemExit(1) when one differs."""
    from threefold.errors import JobError, Problem
    from threefold.job import load_job
    from threefold.measure.layouts import all_layouts, stated_layouts

    loaded = load_job(job, set_)
    _check_options(world, dtype, steps)
    _check_sections(loaded)

    from threefold.measure.parity import ParityReport, ParitySettings, run_parity
    from threefold.measure.parity import shrink as shrunk

    if shrink:
        loaded = shrunk(loaded)
    skipped: dict[str, JobError] = {}
    jobs = stated_layouts(loaded, layout)
    if not jobs or world is not None:
        possible, skipped = all_layouts(loaded, world or loaded.world_size)
        jobs |= possible
    if not jobs:
        problems = [Problem(p.key, f"{p.message} ({name})", p.fix) for name, e in skipped.items() for p in e.problems]
        raise JobError(problems)
    report: ParityReport = run_parity(jobs, ParitySettings(steps=steps, dtype=dtype), on_result=lambda r: None)
    if json_:
        print(json.dumps(report.to_dict() | {"skipped": {name: str(error) for name, error in skipped.items()}}))
    if not report.ok:
        raise SystemExit(1)
