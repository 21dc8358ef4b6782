"""Brings what each rank recorded of a step to the rank that writes it down."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from threefold.parallel.collectives import Group, Pending
from threefold.parallel.mesh import Mesh
from threefold.parallel.recorder import Floats, Marks, clock_offsets
from threefold.schedule import Schedule
from threefold.train.recorded import RecordedStep, StepTimes, TimelineWriter

_ROUNDS = 9
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

TimesOf = Callable[[RecordedStep], StepTimes]
"""What a step amounts to. It is handed in: what is bubble and what is not is the simulator's affair."""


class StepObserver:
    """Sees the logged steps of a run: rank 0 writes them into ``run_dir`` and says what they amount to.

    Use it as a context manager around the training.
    """

    def __init__(self, mesh: Mesh, schedule: Schedule, times_of: TimesOf, run_dir: Path, num_logged: int) -> None:
        self._records, self._times_of = StepRecords(mesh, schedule), times_of
        self._writer = TimelineWriter(run_dir, schedule, mesh.layout, num_logged) if mesh.rank == 0 else None

    def observe(self, step: int, *, is_last: bool) -> StepTimes | None:
        """Note the step that has just ended; all ranks must call it, and rank 0 gets the answer."""
        recorded = self._records.gather(step)
        if recorded is None or self._writer is None:
            return None
        self._writer.keep(recorded, is_last=is_last)
        return self._times_of(recorded)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # after an error the others may be gone, and there is nothing to wait for
            self._records.finish()
        if self._writer is not None:
            self._writer.close()


class StepRecords:
    """Gathers the steps of all ranks on rank 0, on one common clock. All ranks must make the same calls.

    Only rank 0 waits for the others: they go on with the next step while their numbers travel.
    """

    def __init__(self, mesh: Mesh, schedule: Schedule) -> None:
        self.mesh, self.schedule = mesh, schedule
        self._num_actions = max(len(row) for row in schedule.rows)
        self._offsets_s = measure_offsets(mesh.world, mesh.device)
        self._travelling: tuple[Pending, Tensor, Tensor] | None = None

    def gather(self, step: int) -> RecordedStep | None:
        """The step that has just ended, on rank 0."""
        mine = torch.from_numpy(self.mesh.recorder.read().padded(self._num_actions)).to(self.mesh.device)
        self.finish()
        everyone = mine.new_empty(self.mesh.world.size * len(mine))
        self._travelling = self.mesh.world.all_gather_into(everyone, mine), everyone, mine
        if self.mesh.rank != 0:
            return None
        self.finish()
        rows = everyone.cpu().numpy().reshape(self.mesh.world.size, -1) - self._offsets_s[:, None]
        # A step begins with the first stage. Ranks of others may be there before, and have nothing to do yet.
        begin_s = min(row[0] for rank, row in enumerate(rows) if self._holds_first_stage(rank))
        return RecordedStep(
            step, self.schedule, self.mesh.layout, tuple(map(self._marks, range(len(rows)), rows - begin_s))
        )

    def finish(self) -> None:
        """Wait until this rank's numbers have left."""
        if self._travelling is not None:
            self._travelling[0].wait()
            self._travelling = None

    def _holds_first_stage(self, rank: int) -> bool:
        return self.mesh.layout.coord(rank).pp == self.schedule.stage_rank(0)

    def _marks(self, rank: int, row: Floats) -> Marks:
        return Marks.from_padded(row, len(self.schedule.rows[self.mesh.layout.coord(rank).pp]))


def measure_offsets(world: Group, device: torch.device) -> Floats:
    """Seconds that each rank's clock is ahead of rank 0's; all ranks must call it."""
    machines = _gather(world, device, [float(_machine())])
    stamps_s = []
    for _ in range(_ROUNDS if len(set(machines[:, 0].tolist())) > 1 else 1):
        world.all_reduce(torch.zeros(1, device=device)).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        stamps_s.append(time.perf_counter())
    return clock_offsets([int(number) for number in machines[:, 0]], _gather(world, device, stamps_s).T)


def _machine() -> int:
    """A number that processes of one running machine share, and of different ones do not."""
    return zlib.crc32(_BOOT_ID.read_bytes()) if _BOOT_ID.exists() else 0


def _gather(world: Group, device: torch.device, values: list[float]) -> Floats:
    """[rank, value]"""
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    everyone = mine.new_empty(world.size * len(values))
    world.all_gather_into(everyone, mine).wait()
    return np.asarray(everyone.cpu().numpy()).reshape(world.size, -1)
