"""What the stages of a finished run took, from its recording, and whether another cut would be faster (no torch)."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np

from threefold.cost.profile import Profile
from threefold.job import Job
from threefold.parallel.recorder import END, READY
from threefold.plan.imbalance import Imbalance, StagePasses, find_imbalance
from threefold.schedule import Kind
from threefold.schedule.actions import COMPUTE
from threefold.train.recorded import TIMELINE_FILE, Recording, read_recording


def run_imbalance(job: Job, run_dir: Path, profile: Profile | None = None) -> Imbalance | None:
    """Advice on the partition of the run in ``run_dir``; None where there is none to give, or nothing was recorded.

    Raises JobError for a recording that can't be read.
    """
    if job.pp == 1 or not (run_dir / TIMELINE_FILE).exists():
        return None
    recording = read_recording(run_dir)
    passes, step_s = stage_passes(recording)
    return find_imbalance(job, passes, step_s, profile)


def stage_passes(recording: Recording) -> tuple[list[StagePasses], float]:
    """The passes of every stage, and what a rank's step takes besides, as medians over steps, microbatches and ranks.

    The first step, which warms up, counts only where it is the only one.
    """
    numbers = sorted(recording.lines)
    seconds: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    others: list[float] = []
    for number in numbers[1:] or numbers:
        step = recording.step(number)
        for rank, marks in enumerate(step.ranks):
            row = recording.schedule.rows[recording.layout.coord(rank).pp]
            taken = marks.times_s[:, END] - marks.times_s[:, READY]
            others.append(sum(taken[index] for index, action in enumerate(row) if action.kind is Kind.STEP))
            for action, action_s in zip(row, taken, strict=True):
                if action.kind in COMPUTE:
                    seconds[action.kind, action.stage].append(action_s)

    def of(kind: Kind, stage: int) -> float:
        return float(np.median(seconds[kind, stage])) if seconds[kind, stage] else 0.0

    stages = range(recording.schedule.num_stages)
    # A schedule may run some microbatches' backward passes whole and others apart: either tells the whole.
    return [
        StagePasses(of(Kind.F, stage), of(Kind.B, stage) or of(Kind.I, stage) + of(Kind.W, stage)) for stage in stages
    ], float(np.median(others))
