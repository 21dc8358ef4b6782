"""The classic pipeline schedules for p stages on p ranks and m microbatches, compute actions only.

``lower`` adds transfers, gradient sync and the optimizer step. Every schedule runs the backward passes in the order of
the microbatches, so all of them add up each gradient in the same order and agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable

from threefold.errors import JobError, Problem
from threefold.schedule.actions import Action, Kind
from threefold.schedule.schedule import FORWARD_ONLY, Schedule


def naive(num_stages: int, num_microbatches: int) -> Schedule:
    """One microbatch at a time: forward through all stages, then backward; one rank works at any moment.

    Takes m p (f + b) and keeps one microbatch alive.
    """

    def row(stage: int) -> list[Action]:
        return [Action(kind, stage, i) for i in range(num_microbatches) for kind in (Kind.F, Kind.B)]

    return _schedule("naive", num_stages, num_microbatches, row)


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forward passes, then all backward passes (Huang et al. 2019, GPipe).

    Takes (m + p - 1)(f + b) and keeps all m microbatches alive. The paper draws the backward passes last microbatch
    first; we run them first microbatch first, which takes as long, as most runtimes do today.
    """

    def row(stage: int) -> list[Action]:
        forwards = [Action(Kind.F, stage, i) for i in range(num_microbatches)]
        return forwards + [Action(Kind.B, stage, i) for i in range(num_microbatches)]

    return _schedule("gpipe", num_stages, num_microbatches, row)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Warm-up forwards, then one forward, one backward in turn, then the backwards left (PipeDream-Flush).

    Rank r warms up with min(p - r - 1, m) forward passes: just enough to be busy until the first gradient comes back.
    Takes (m + p - 1)(f + b) as GPipe does, but keeps only min(m, p - r) microbatches alive (Narayanan et al. 2021,
    Memory-Efficient Pipeline-Parallel DNN Training).
    """

    def row(stage: int) -> list[Action]:
        num_warmup = min(num_stages - stage - 1, num_microbatches)
        actions = [Action(Kind.F, stage, i) for i in range(num_warmup)]
        for i in range(num_microbatches - num_warmup):
            actions += [Action(Kind.F, stage, num_warmup + i), Action(Kind.B, stage, i)]
        return actions + [Action(Kind.B, stage, i) for i in range(num_microbatches - num_warmup, num_microbatches)]

    return _schedule("1f1b", num_stages, num_microbatches, row)


def forward_only(num_stages: int, num_microbatches: int) -> Schedule:
    """Forward passes alone, for evaluation: takes (m + p - 1) f and keeps nothing."""

    def row(stage: int) -> list[Action]:
        return [Action(Kind.F, stage, i) for i in range(num_microbatches)]

    return _schedule(FORWARD_ONLY, num_stages, num_microbatches, row)


def build_schedule(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """The training schedule called ``name``. Raises JobError naming ``parallelism.pp.schedule`` for an unknown one."""
    generators = {"naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b}
    if name not in generators:
        fix = f"use one of {', '.join(generators)}"
        raise JobError([Problem("parallelism.pp.schedule", f"{name!r} is no schedule that this version knows", fix)])
    return generators[name](num_stages, num_microbatches)


def _schedule(name: str, num_stages: int, num_microbatches: int, row: Callable[[int], list[Action]]) -> Schedule:
    problems = []
    if num_stages < 1:
        problems.append(Problem("parallelism.pp.size", f"{num_stages} is no number of stages", "use 1 or more"))
    if num_microbatches < 1:
        message = f"{num_microbatches} is no number of microbatches"
        problems.append(Problem("gradient_accumulation_steps", message, "use 1 or more"))
    if problems:
        raise JobError(problems)
    rows = tuple(tuple(row(stage)) for stage in range(num_stages))
    return Schedule(name, num_stages, num_stages, num_microbatches, rows)
