"""The words of problems: values, lists of choices and near misses, shown alike everywhere."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from threefold.errors import Problem

LONGEST_VALUE = 60
MOST_CHOICES = 16


@dataclass
class Findings:
    """What reading a job brought up: problems that refuse it, and notes on keys that were read but have no effect."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def problem(self, key: str, message: str, fix: str) -> None:
        """Add one problem."""
        self.problems.append(Problem(printable(key), message, fix))

    def explains(self, key: str) -> bool:
        """Whether a problem is already known about ``key`` or a section above it."""
        return any(key == problem.key or key.startswith(f"{problem.key}.") for problem in self.problems)

    def concerns(self, *keys: str) -> bool:
        """Whether a problem is already known about one of ``keys``, a section above it or a key below it."""
        return any(_related(problem.key, key) for problem in self.problems for key in keys)


def _related(one: str, other: str) -> bool:
    shorter, longer = sorted((one, other), key=len)
    return longer == shorter or longer.startswith(f"{shorter}.")


def printable(text: str) -> str:
    """``text`` on one line that every terminal can print: control characters and lone surrogates escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def show(value: object) -> str:
    """A value as a job file would write it, cut where it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    text = printable(text)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


def choices(values: Iterable[object]) -> str:
    """``1, 2, 4 or 8``; a long list is cut in the middle."""
    words = [str(value) for value in values]
    if len(words) > MOST_CHOICES:
        words = [*words[: MOST_CHOICES - 2], "…", words[-1]]
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def nearest_word(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word most like ``word``, whatever its case; None where nothing is alike."""
    by_lower = {name.lower(): name for name in known}
    matches = get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[matches[0]] if matches else None


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def common_divisors(*numbers: int) -> list[int]:
    """All numbers that divide every one of ``numbers``, ascending."""
    return divisors(math.gcd(*numbers))


def multiples_around(number: int, unit: int) -> list[int]:
    """The positive multiples of ``unit`` next to ``number``: the one below, where there is one, and the one above."""
    below = number // unit * unit
    return [multiple for multiple in (below, below + unit) if multiple > 0]


def nearest_number(number: int, allowed: Sequence[int]) -> int:
    """The allowed number nearest to ``number``; the smaller of two equally near."""
    return min(allowed, key=lambda candidate: (abs(candidate - number), candidate))
