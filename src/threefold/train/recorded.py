"""``timeline.jsonl``: what every rank did when, in some steps of a run.

The first line holds the schedule, as text with its transfers, and the layout; each other line a step::

    {"format": 1, "schedule": "1f1b stages=2 ...", "layout": {"dp": 1, "pp": 2, "tp": 1, "order": ["tp", "pp", "dp"]}}
    {"step": 10, "ranks": [[0, 120, 120, 5130, ...], [85, ...]]}

A rank's numbers are when its step began, then begin, ready and end of each action of its row, in ticks of 0.1
microseconds since the first stage began, on one common clock. Steps are thinned, so that the file of a long run stays
small.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from threefold.errors import JobError, Problem, ThreefoldError
from threefold.layout import Layout
from threefold.parallel.recorder import Marks
from threefold.schedule import Schedule, parse_schedule
from threefold.train.lines import LineFile

TIMELINE_FILE = "timeline.jsonl"
_FORMAT = 1
_TICK_S = 1e-7
_MOST_STEPS = 100
_MOST_BYTES = 64_000_000
_BYTES_OF_A_MARK = 9


@dataclass(frozen=True)
class RecordedStep:
    """Marks of all ranks in one step; ``schedule`` is lowered, and time 0 is when the first stage began."""

    step: int
    schedule: Schedule
    layout: Layout
    ranks: tuple[Marks, ...]


@dataclass(frozen=True)
class StepTimes:
    """What a recorded step amounts to: the bubble's share of it, None without a pipeline, and mean seconds of ranks."""

    bubble: float | None
    idle_s: dict[str, float]
    exposed_comm_s: float


class TimelineWriter:
    """Keeps recorded steps of a run in its directory."""

    def __init__(self, run_dir: Path, schedule: Schedule, layout: Layout, num_logged: int) -> None:
        self._file = LineFile(run_dir / TIMELINE_FILE)
        self._file.append({"format": _FORMAT, "schedule": schedule.to_text(), "layout": asdict(layout)})
        self._stride = stride_of(num_logged, 3 * layout.dp * layout.tp * sum(len(row) for row in schedule.rows))
        self._num_seen = 0

    def keep(self, recorded: RecordedStep, *, is_last: bool) -> None:
        """Write the step down, if it is one of those that are kept: the last always is."""
        if self._num_seen % self._stride == 0 or is_last:
            self._file.append({"step": recorded.step, "ranks": [_ticks(marks) for marks in recorded.ranks]})
        self._num_seen += 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def stride_of(num_logged: int, num_marks: int) -> int:
    """Of so many logged steps with so many marks each, every how many are kept."""
    most = max(2, min(_MOST_STEPS, _MOST_BYTES // (_BYTES_OF_A_MARK * max(num_marks, 1))))
    return -(-num_logged // most) if num_logged else 1


def _ticks(marks: Marks) -> list[int]:
    seconds = np.concatenate([[marks.begin_s], marks.times_s.ravel()])
    return np.rint(seconds / _TICK_S).astype(np.int64).tolist()


@dataclass(frozen=True)
class Recording:
    """The recorded steps of a run, by their numbers."""

    schedule: Schedule
    layout: Layout
    lines: dict[int, Sequence[Sequence[int]]]

    def step(self, number: int | None = None) -> RecordedStep:
        """The step, by default the typical one. Raises JobError for one that is not kept."""
        number = self.typical if number is None else number
        if number not in self.lines:
            near = sorted(sorted(self.lines, key=lambda kept: abs(kept - number))[:5])
            message = f"{number} is not recorded: {len(self.lines)} of the run's steps are"
            raise JobError([Problem("--step", message, f"use one near it: {', '.join(map(str, near))}")])
        marks = tuple(self._marks(rank, numbers) for rank, numbers in enumerate(self.lines[number]))
        return RecordedStep(number, self.schedule, self.layout, marks)

    @property
    def settled(self) -> list[int]:
        """The steps that are kept, without the first where there are others: it warms up."""
        numbers = sorted(self.lines)
        return numbers[1:] or numbers

    @property
    def typical(self) -> int:
        """A step of median length."""
        by_length = sorted(self.settled, key=lambda number: max(marks[-1] for marks in self.lines[number]))
        return by_length[(len(by_length) - 1) // 2]

    def _marks(self, rank: int, ticks: Sequence[int]) -> Marks:
        row = self.schedule.rows[self.layout.coord(rank).pp]
        return Marks.from_padded(np.array(ticks, dtype=np.float64) * _TICK_S, len(row))


def read_recording(run_dir: Path) -> Recording:
    """The recording in a run's directory. Raises JobError where there is none, or it can't be read."""
    path = run_dir / TIMELINE_FILE
    try:
        lines = [_parse(line) for line in path.read_text(encoding="utf-8").splitlines()]
        recording = _read_lines(lines)
    except OSError as error:
        raise JobError([_unreadable(path, f"can't be read: {error.strerror}")]) from None
    except (ThreefoldError, LookupError, TypeError, ValueError):
        raise JobError([_unreadable(path, f"is no recording of format {_FORMAT}")]) from None
    if not recording.lines:
        raise JobError([_unreadable(path, "holds no step")])
    return recording


def _read_lines(lines: Sequence[dict[str, Any] | None]) -> Recording:
    head = lines[0]
    if head is None or head["format"] != _FORMAT:
        raise ValueError("another format")
    stated = head["layout"]
    layout = Layout(stated["dp"], stated["pp"], stated["tp"], tuple(stated["order"]))
    schedule = parse_schedule(head["schedule"])
    recording = Recording(schedule, layout, {line["step"]: line["ranks"] for line in lines[1:] if line is not None})
    widths = [1 + 3 * len(schedule.rows[layout.coord(rank).pp]) for rank in range(layout.world_size)]
    if any([len(row) for row in ranks] != widths for ranks in recording.lines.values()):
        raise ValueError("rows of another schedule")
    return recording


def _parse(line: str) -> dict[str, Any] | None:
    """A line; None for the half of one that a crash has left."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def _unreadable(path: Path, message: str) -> Problem:
    return Problem("RUN", f"{path} {message}", "name the directory of a run: threefold train JOB --run-dir DIR")
