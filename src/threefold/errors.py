"""Every error that a user of threefold can meet, with the exit status that the command line gives it.

All messages follow one template: what is wrong, the value, what is allowed, the nearest fix; and they name the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong in a job: the dotted ``key``, what is wrong with its value, and how to ``fix`` it."""

    key: str
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}\n    fix: {self.fix}"


class ThreefoldError(Exception):
    """Base of all errors that threefold raises on purpose; ``exit_status`` is what the command line returns."""

    exit_status: ClassVar[int] = 1


class JobError(ThreefoldError):
    """The job is wrong. Carries *all* problems found, not only the first (exit status 2)."""

    exit_status: ClassVar[int] = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class InfeasibleError(ThreefoldError):
    """Nothing fits; the message lists the nearest misses (exit status 3)."""

    exit_status: ClassVar[int] = 3


class ScheduleError(ThreefoldError):
    """A pipeline schedule is illegal (exit status 2); the message holds the grid with the offending row marked."""

    exit_status: ClassVar[int] = 2


class DataError(ThreefoldError):
    """A data source or token file can't be read or written as asked (exit status 2)."""

    exit_status: ClassVar[int] = 2

    @property
    def problem(self) -> Problem:
        """The message, ``key: what is wrong`` and ``fix: how to mend it``, taken apart."""
        key, _, rest = str(self).partition(": ")
        message, _, fix = rest.partition("\n    fix: ")
        return Problem(key, message, fix)


class WorkerError(ThreefoldError):
    """A rank failed or hung; the message names rank, stage, microbatch and collective."""


class ReplicaError(WorkerError):
    """Parameters that must be equal on several ranks are not."""
