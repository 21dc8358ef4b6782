"""No candidate is legal: which decision is to blame, and which values would do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from threefold.errors import JobError, Problem
from threefold.job.messages import choices, multiples_around
from threefold.plan.question import Question, Resort
from threefold.plan.space import Space, build_space


def nothing_legal(question: Question) -> JobError:
    """The error with a problem for every decision whose change alone would help, or one for all of them."""
    question = replace(question, resort=Resort.OFFLOAD)
    problems = [*_decisions(question), *_batch(question)]
    return JobError(problems or [_together(question)])


def _decisions(question: Question) -> Iterator[Problem]:
    for name, value in question.fixed.items():
        fixed = {key: other for key, other in question.fixed.items() if key != name}
        space = build_space(replace(question, fixed=fixed))
        if space.legal.any():
            fix = f"leave it out, or set it to {choices(_values(space, name))}"
            yield Problem(f"--fix {name}", f"{value} suits neither model, devices nor batch: {_main(question)}", fix)


def _batch(question: Question) -> Iterator[Problem]:
    sizes = multiples_around(question.global_batch, question.num_devices)
    legal = [size for size in sizes if build_space(replace(question, global_batch=size)).legal.any()]
    if legal:
        message = f"{question.global_batch} can't be split over {question.num_devices} devices: {_main(question)}"
        yield Problem("--global-batch", message, f"set it to {choices(legal)}")


def _together(question: Question) -> Problem:
    key = ", ".join(f"--fix {name}" for name in question.fixed) or "--nodes"
    message = f"no layout of {question.num_devices} devices is legal: {_main(question)}"
    return Problem(key, message, "use another number of devices" if not question.fixed else "leave them out")


def _values(space: Space, name: str) -> list[int]:
    """The values that a field has among the legal candidates."""
    return sorted({int(value) for value in np.unique(getattr(space.tops.take(space.legal.any(axis=1)), name))})


def _main(question: Question) -> str:
    """The commonest reason."""
    rejected = build_space(question).rejected
    return (
        str(max(rejected, key=lambda reason: rejected[reason])) if any(rejected.values()) else "no layout uses them all"
    )
