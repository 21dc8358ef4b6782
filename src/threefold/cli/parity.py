"""``threefold parity``: does a layout compute what one process computes?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from threefold.errors import JobError, Problem
    from threefold.job import Job
    from threefold.measure.parity import LayoutResult, ParityReport

_DTYPES = ("float64", "float32", "bfloat16")


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
    """Compare layouts of a job with one process and print the verdict; SystemExit(1) when one differs.

    Raises JobError when the job, an option or a stated layout is wrong.
    """
    from threefold.job import load_job

    _check_options(world, dtype, steps)
    loaded = load_job(job, set_)
    _check_sections(loaded)
    jobs, skipped = _choose_layouts(loaded, world, layout, shrink)
    _check_memory(jobs, dtype)

    import json

    from rich.console import Console

    from threefold.measure.parity import ParitySettings, run_parity

    # With --json the table goes to stderr, so that stdout holds one JSON document.
    console = Console(stderr=json_, highlight=False, soft_wrap=True)
    not_compared = _not_compared(loaded)
    _print_start(console, jobs, skipped, steps, dtype)
    for text in not_compared:
        console.print(f"[yellow]not compared[/]  {text}")
    console.print(f"\n{'layout':<44} {'loss':>9} {'gradient':>9} {'parameter':>9}   relative error")
    settings = ParitySettings(steps=steps, dtype=dtype)
    report = run_parity(jobs, settings, on_result=lambda result: _print_result(console, result))
    _print_verdict(console, report)
    if json_:
        reasons = {name: str(error) for name, error in skipped.items()}
        print(json.dumps(report.to_dict() | {"skipped": reasons, "not_compared": not_compared}))
    if not report.ok:
        raise SystemExit(1)


def _check_options(world: int | None, dtype: str, steps: int) -> None:
    from threefold.errors import JobError, Problem

    problems = []
    if dtype not in _DTYPES:
        problems.append(Problem("--dtype", f"{dtype!r} is no number format", f"use one of {', '.join(_DTYPES)}"))
    if world is not None and not 1 <= world <= 64:
        problems.append(Problem("--world", f"{world} is no number of processes for one machine", "use 1 to 64"))
    if not 1 <= steps <= 100:
        problems.append(Problem("--steps", f"{steps} is not from 1 to 100", "use 1 to 100; 2 shows what there is"))
    if problems:
        raise JobError(problems)


def _check_sections(job: Job) -> None:
    from threefold.errors import JobError, Problem

    missing = [name for name in ("model", "data") if getattr(job, name) is None]
    if missing:
        fix = "add the section {}; parity makes up its own tokens, but needs the model and data.sequence_length"
        raise JobError([Problem(name, "is missing", fix.format(name)) for name in missing])


def _check_memory(jobs: Mapping[str, Job], dtype: str) -> None:
    """Refuse a model that would fill this machine's memory, before the kernel ends what it likes."""
    from threefold.errors import JobError, Problem
    from threefold.measure.parity import bytes_needed, free_bytes

    needed, free = max(bytes_needed(job, dtype) for job in jobs.values()), free_bytes()
    if free is not None and needed > free:
        message = (
            f"parity needs about {needed / 1e9:,.0f} GB for a model of this size, and {free / 1e9:,.1f} GB are free"
        )
        fix = "add --shrink, or a smaller one: --set model.num_hidden_layers=2"
        raise JobError([Problem("model", message, fix)])


def _not_compared(job: Job) -> list[str]:
    """What the job asks for that the engines do not do yet: parity says nothing about it."""
    from threefold.job import check_trainable

    sections = ("model", "data", "steps")
    found = [f"{p.key}: {p.message}" for p in check_trainable(job) if p.key.split(".")[0] not in sections]
    if job.precision in ("fp16", "bf16"):
        found.append(f"{job.precision}: parity runs in the format of --dtype")
    return found


def _choose_layouts(
    job: Job, world: int | None, layouts: list[str], shrink: bool
) -> tuple[dict[str, Job], dict[str, JobError]]:
    """The stated layouts, and all factorizations of ``world``: the job's own world when no layout is stated."""
    from threefold.errors import JobError, Problem
    from threefold.job.shrink import shrink_job
    from threefold.measure.layouts import all_layouts, stated_layouts

    if shrink:
        job = shrink_job(job)
    jobs = stated_layouts(job, layouts)
    if layouts and world is None:
        return jobs, {}
    size = world or job.world_size
    if size > 64:
        fix = "give --world N (up to 64) or --layout, and --shrink for a large model"
        raise JobError([Problem("--world", f"the job's world of {size} ranks is too large for one machine", fix)])
    possible, impossible = all_layouts(job, size)
    if not possible and not jobs:
        raise JobError([_of_layout(name, p) for name, error in impossible.items() for p in error.problems])
    return jobs | possible, impossible


def _of_layout(name: str, problem: Problem) -> Problem:
    from threefold.errors import Problem

    return Problem(problem.key, f"{problem.message} (layout {name})", problem.fix)


def _print_start(
    console: Console, jobs: Mapping[str, Job], skipped: Mapping[str, JobError], steps: int, dtype: str
) -> None:
    job = next(iter(jobs.values()))
    model = job.model
    assert model is not None, "checked before"
    console.print(
        f"{model.model_type} model of {model.num_parameters:,} parameters, batch {job.train_batch_size}, {steps} steps "
        f"of SGD in {dtype}: one plain process against {len(jobs)} layouts; 40 % of the labels are ignored, unevenly"
    )
    for name, error in skipped.items():
        console.print(f"[yellow]not possible[/]  {name}: {error.problems[0].key}: {error.problems[0].message}")


def _print_result(console: Console, result: LayoutResult) -> None:
    verdict = "[green]equal[/]" if result.ok else "[bold red]DIFFERS[/]"
    errors = f"{result.loss_error:>9.1e} {result.grad_error:>9.1e} {result.param_error:>9.1e}"
    console.print(f"{result.layout:<44} {errors}   {verdict}")
    if result.first_difference is not None:
        console.print(f"    first difference: {result.first_difference}")


def _print_verdict(console: Console, report: ParityReport) -> None:
    num_ok = sum(result.ok for result in report.layouts)
    console.print(
        f"\n{num_ok} of {len(report.layouts)} layouts equal one process within {report.tolerance} ({report.dtype})"
    )
    console.print(
        "What rounding alone does to this model, one process against float64 (a layout may differ by a few times as "
        "much; more is a bug):"
    )
    for drift in report.drift:
        console.print(
            f"  {drift.dtype:<9} loss {drift.loss_error:.1e}, norm {drift.norm_error:.1e}, "
            f"gradients {drift.grad_error:.1e}, parameters {drift.param_error:.1e}"
        )
