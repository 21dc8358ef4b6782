"""What a run has counted, next to what is predicted: bytes sent in its last step, and bytes held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from threefold.cost.held import estimate_held
from threefold.cost.traffic import estimate_traffic
from threefold.job.spec import Job
from threefold.layout import AXES
from threefold.report.facts import Section, TextTable
from threefold.report.words import format_bytes, format_integers
from threefold.schedule import job_schedule

TITLE = "What was counted"
STATES = ("parameters", "gradients", "optimizer")


def counted_section(job: Job, summary: Mapping[str, Any] | None) -> Section:
    """Empty without a ``summary`` (of the run that ``job`` is the job of) or a model."""
    if summary is None or job.model is None or job.data is None:
        return Section(TITLE, ())
    ranks: list[Mapping[str, Any]] = summary["ranks"]
    ended = f"{summary['steps']} steps, loss {summary['loss']}, {summary['tokens_per_s']:,} tokens/s."
    header = ("bytes", "stage", "predicted", "counted", "")
    rows = (*_sent_rows(job, ranks), *_held_rows(job, ranks))
    note = "Bytes sent are those of one rank in the last step; bytes held are those between two steps."
    return Section(TITLE, (ended, TextTable(header, rows), _peak_words(ranks), note))


def group_of(job: Job, axis: str) -> str:
    """The name by which the runtime counts what the cost model says of ``axis``: axes of one rank are left out."""
    if axis == "dp+pp":
        return f"tied pp 0+{job.pp - 1}"
    axes = AXES if axis == "world" else axis.split("+")
    return "+".join(name for name in AXES if name in axes and getattr(job, name) > 1)


def _sent_rows(job: Job, ranks: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    rows: dict[tuple[str, int, tuple[int, ...]], list[int]] = {}
    schedule = job_schedule(job)
    for stage in range(job.pp):
        predicted: Counter[str] = Counter()
        for transfer in estimate_traffic(job, stage, stages=schedule.stages_of(stage)):
            predicted[group_of(job, transfer.axis)] += transfer.bytes_per_step
        counted = [_sent(rank) for rank in ranks if rank["pp"] == stage]
        for group in sorted({*predicted, *(name for each in counted for name in each)}):
            amounts = tuple(sorted({each[group] for each in counted}))
            rows.setdefault((group, predicted[group], amounts), []).append(stage)
    for (group, expected, amounts), stages in rows.items():
        yield _row(f"sent over {group}", stages, expected, amounts)


def _sent(rank: Mapping[str, Any]) -> Counter[str]:
    found: Counter[str] = Counter()
    for row in rank["traffic"]["last_step"]:
        found[row["group"]] += row["bytes"]
    return found


def _held_rows(job: Job, ranks: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    schedule = job_schedule(job)
    for stage in range(job.pp):
        predicted = estimate_held(job, stage, schedule.stages_of(stage))
        memories = [rank["memory"] for rank in ranks if rank["pp"] == stage]
        for name in STATES:
            amounts = tuple(sorted({memory["held"][name] for memory in memories}))
            yield _row(name, [stage], getattr(predicted, name), amounts)
        hosts = tuple(sorted({sum(memory["host"].values()) for memory in memories}))
        if predicted.host or any(hosts):
            yield _row("in host memory", [stage], predicted.host, hosts)


def _row(what: str, stages: list[int], predicted: int, counted: tuple[int, ...]) -> tuple[str, ...]:
    shown = " to ".join(dict.fromkeys(map(format_bytes, (counted[0], counted[-1])))) if counted else "-"
    verdict = "equal" if set(counted) == {predicted} else "differs"
    return what, format_integers(stages), format_bytes(predicted), shown, verdict


def _peak_words(ranks: Iterable[Mapping[str, Any]]) -> str:
    most = max(ranks, key=lambda rank: rank["memory"]["peak"]["bytes"])
    peak = most["memory"]["peak"]
    items = ", ".join(f"{name} {format_bytes(size)}" for name, size in peak["held"].items() if size)
    return (
        f"The fullest device is that of rank {most['rank']}: {format_bytes(peak['bytes'])} in step {peak['step']} at "
        f"{peak['action']} ({items})."
    )
