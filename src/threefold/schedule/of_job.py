"""The one place that turns a job into its schedule; whoever plans, explains or trains it asks here."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from threefold.errors import JobError, Problem, ScheduleError
from threefold.schedule.check import require_legal, require_safe
from threefold.schedule.lower import is_lowered
from threefold.schedule.named import build_schedule
from threefold.schedule.schedule import Schedule, parse_schedule
from threefold.schedule.search import SEARCHED, searched

SCHEDULE_FILE = "parallelism.pp.schedule_file"


class PipelineSettings(Protocol):
    """``parallelism.pp`` of a job."""

    @property
    def size(self) -> int:
        """Ranks."""
        ...

    @property
    def schedule(self) -> str:
        """Name."""
        ...

    @property
    def schedule_file(self) -> str | None:
        """Path of a schedule as text, which then counts instead of the name."""
        ...

    @property
    def chunks(self) -> int:
        """Stages of each rank."""
        ...


class ParallelismSettings(Protocol):
    """``parallelism`` of a job."""

    @property
    def pp(self) -> PipelineSettings:
        """The pipeline's settings."""
        ...


class PipelineJob(Protocol):
    """What of a job decides its schedule; every ``Job`` has it."""

    @property
    def parallelism(self) -> ParallelismSettings:
        """The layout."""
        ...

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one step on each replica."""
        ...


def job_schedule(job: PipelineJob) -> Schedule:
    """The schedule that ``job`` states by name or by file, legal, and not lowered unless the file gives transfers.

    Raises JobError naming the key for a file that can't be read or is for other sizes than the job's, and ScheduleError
    for a file that spells no legal schedule.
    """
    pipeline = job.parallelism.pp
    if pipeline.schedule_file is not None:
        return _from_file(Path(pipeline.schedule_file), pipeline, job.num_microbatches)
    if pipeline.schedule == SEARCHED:
        return searched(pipeline.size, job.num_microbatches, pipeline.chunks)
    return build_schedule(pipeline.schedule, pipeline.size, job.num_microbatches, pipeline.chunks)


def read_schedule(path: Path) -> Schedule:
    """The legal schedule in the file at ``path``; one with transfers is proven safe besides.

    Raises JobError for a file that can't be read, ScheduleError with the violations and the grid.
    """
    schedule = parse_file(path)
    try:
        (require_safe if is_lowered(schedule) else require_legal)(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None
    return schedule


def parse_file(path: Path) -> Schedule:
    """The schedule in the file at ``path``, legal or not. Raises JobError or ScheduleError when it can't be read."""
    try:
        return parse_schedule(path.read_text(encoding="utf-8"))
    except OSError as error:
        message, fix = f"{path} can't be read: {error.strerror}", "name a file that `threefold schedule -o FILE` wrote"
    except UnicodeDecodeError:
        message, fix = f"{path} is no text file", "name a file that `threefold schedule -o FILE` wrote"
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None
    raise JobError([Problem(SCHEDULE_FILE, message, fix)])


def _from_file(path: Path, pipeline: PipelineSettings, num_microbatches: int) -> Schedule:
    schedule = read_schedule(path)
    stated = (
        ("parallelism.pp.size", pipeline.size, schedule.num_ranks, "ranks"),
        ("parallelism.pp.chunks", pipeline.chunks, schedule.num_stages / schedule.num_ranks, "stages on each rank"),
        ("gradient_accumulation_steps", num_microbatches, schedule.num_microbatches, "microbatches"),
    )
    problems = [
        Problem(key, f"{size} differs from the {written:g} {what} of {path}", f"set it to {written:g}")
        for key, size, written, what in stated
        if size != written
    ]
    if schedule.is_forward_only:
        fix = "give it backward passes and another name"
        problems.append(Problem(SCHEDULE_FILE, f"{path} has forward passes alone, which train nothing", fix))
    if problems:
        raise JobError(problems)
    return schedule
