"""Layouts as a user writes them, ``dp=2,tp=2,pp=2,schedule=gpipe``, and all factorizations of a world size."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from threefold.errors import JobError, Problem
from threefold.job import Job, relayout

_KEY = "--layout"
_OTHER_SCHEDULES = ("interleaved_1f1b", "zb_v")


def _whole(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _truth(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[text.lower()]


def _counts(text: str) -> list[float]:
    return [float(part) for part in text.split("+")]


_READERS: tuple[tuple[str, str, Callable[[str], Any], str], ...] = (
    ("dp", "dp", _whole, "a whole number, 1 or more"),
    ("tp", "tp", _whole, "a whole number, 1 or more"),
    ("pp", "pp", _whole, "a whole number, 1 or more"),
    ("schedule", "schedule", str, "the name of a schedule"),
    ("chunks", "chunks", _whole, "a whole number, 1 or more"),
    ("sequence_parallel", "sequence_parallel", _truth, "true or false"),
    ("partition", "partition", _counts, "layers of each stage joined by +, like 4+3 or 4.5+2.5"),
    (
        "order",
        "order",
        lambda text: text.replace(">", ",").replace("+", ","),
        "axes joined by +, innermost first, like tp+pp+dp",
    ),
    ("micro_batch", "micro_batch", _whole, "a whole number, 1 or more"),
    ("accumulation", "accumulation", _whole, "a whole number, 1 or more"),
)
"""(name in a layout, argument of ``relayout``, reader, what is allowed)."""


def parse_layout(text: str) -> dict[str, Any]:
    """The arguments of ``relayout`` that ``text`` spells. Raises JobError naming the part that is wrong.

    Left-out sizes are 1, so ``tp=2`` is two ranks.
    """
    arguments: dict[str, Any] = {"dp": 1, "tp": 1, "pp": 1}
    problems = []
    seen: set[str] = set()
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name in seen:
            problems.append(Problem(f"{_KEY} {name}", f"is stated twice in {text!r}", "state it once"))
        seen.add(name)
        reader = next((entry for entry in _READERS if entry[0] == name), None)
        if reader is None or not equals:
            problems.append(_unknown(text, part.strip()))
            continue
        try:
            arguments[reader[1]] = reader[2](value)
        except (ValueError, KeyError):
            message = f"{value!r} in {text!r} is no value of {name}"
            problems.append(Problem(f"{_KEY} {name}", message, f"use {reader[3]}"))
    if problems:
        raise JobError(problems)
    return arguments


def _unknown(text: str, part: str) -> Problem:
    names = [entry[0] for entry in _READERS]
    near = difflib.get_close_matches(part.partition("=")[0], names, n=1, cutoff=0.5)
    fix = f"write {near[0]}=VALUE" if near else f"use NAME=VALUE with a name of {', '.join(names)}"
    return Problem(_KEY, f"{part!r} in {text!r} is no part of a layout", fix)


def factorizations(world_size: int) -> Iterator[tuple[int, int, int]]:
    """All (dp, tp, pp) whose product is ``world_size``."""
    for dp in range(1, world_size + 1):
        for tp in range(1, world_size // dp + 1):
            if world_size % (dp * tp) == 0:
                yield dp, tp, world_size // (dp * tp)


def stated_layouts(job: Job, layouts: Sequence[str]) -> dict[str, Job]:
    """The job in each layout, by the text that the user wrote. Raises JobError with the problems of all layouts."""
    jobs: dict[str, Job] = {}
    problems: list[Problem] = []
    for text in layouts:
        try:
            jobs[text] = relayout(job, **parse_layout(text))
        except JobError as error:
            problems += [
                Problem(problem.key, f"{problem.message} (layout {text})", problem.fix) for problem in error.problems
            ]
    if problems:
        raise JobError(problems)
    return jobs


def all_layouts(job: Job, world_size: int) -> tuple[dict[str, Job], dict[str, JobError]]:
    """The job in every factorization of ``world_size`` that it can have, and why it can't have the others.

    The most mixed one with a pipeline comes under other schedules, too, where the model has layers enough for them:
    one with several stages a rank, and one that runs weight gradients apart. The micro batch shrinks where a replica's
    share of the batch is smaller than it, for the batch must stay the same.
    """
    jobs: dict[str, Job] = {}
    impossible: dict[str, JobError] = {}
    for dp, tp, pp in factorizations(world_size):
        name = f"dp={dp},tp={tp},pp={pp}"
        try:
            jobs[name] = relayout(job, dp=dp, tp=tp, pp=pp, partition=_partition(job, pp), micro_batch=_micro(job, dp))
        except JobError as error:
            impossible[name] = error
    return jobs | _under_other_schedules(jobs), impossible


def _under_other_schedules(jobs: Mapping[str, Job]) -> dict[str, Job]:
    pipelines = {name: job for name, job in jobs.items() if job.pp > 1}
    if not pipelines:
        return {}
    name, job = min(pipelines.items(), key=lambda item: max(item[1].dp, item[1].tp, item[1].pp))
    found = {}
    for schedule in _OTHER_SCHEDULES:
        if schedule != job.parallelism.pp.schedule:
            with contextlib.suppress(JobError):
                found[f"{name},schedule={schedule}"] = relayout(job, schedule=schedule, partition="even")
    return found


def _partition(job: Job, pp: int) -> Any:
    """An explicit partition is one of the job's own number of stages."""
    partition = job.parallelism.pp.partition
    fits = isinstance(partition, str) or len(partition) == pp * job.parallelism.pp.chunks
    return partition if fits else "even"


def _micro(job: Job, dp: int) -> int:
    share = job.train_batch_size // dp
    return next(size for size in range(min(job.micro_batch, max(share, 1)), 0, -1) if share % size == 0)
