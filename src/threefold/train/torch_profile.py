"""Traces of some steps by PyTorch's own profiler, with every action of the schedule as a named range.

Torch is imported only where it is needed, since options are judged before any rank starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from threefold.errors import JobError, Problem

if TYPE_CHECKING:
    from threefold.parallel.mesh import Mesh

PROFILE_DIR = "torch_profile"
_OPTION = "--torch-profile"


@dataclass(frozen=True)
class ProfiledSteps:
    """The steps, counted from 1, that are profiled: ``first`` to ``last``."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"


def parse_steps(text: str, steps: int) -> ProfiledSteps:
    """The steps that ``3`` or ``3:6`` spells, in a job of so many ``steps``. Raises JobError."""
    match = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text)
    if match is None:
        raise JobError([Problem(_OPTION, f"{text!r} names no steps", "state one, like 3, or first and last, like 3:6")])
    found = ProfiledSteps(int(match[1]), int(match[2] or match[1]))
    if found.first < 2:
        message = f"{text!r} begins before step 2, and the profiler warms up in the step before the first"
        raise JobError([Problem(_OPTION, message, "begin at step 2 or later")])
    if not found.first <= found.last <= steps:
        message = f"{text!r} are no steps of a job that has {steps}"
        raise JobError([Problem(_OPTION, message, f"name steps from 2 to {steps}, the first one first")])
    return found


class StepProfiler:
    """Profiles ``steps`` on this rank and writes ``torch_profile/rank0.json`` (or of its rank) into ``run_dir``.

    Use it as a context manager around all steps, and ``step`` around each.
    """

    def __init__(self, steps: ProfiledSteps, run_dir: Path, mesh: Mesh) -> None:
        from torch import profiler

        self._steps, self._recorder = steps, mesh.recorder
        self._path = run_dir / PROFILE_DIR / f"rank{mesh.rank}.json"
        self._on_cuda = mesh.device.type == "cuda"
        activities = [profiler.ProfilerActivity.CPU]
        if self._on_cuda:
            activities.append(profiler.ProfilerActivity.CUDA)
        self._profiler = profiler.profile(
            activities=activities,
            schedule=profiler.schedule(
                skip_first=steps.first - 2, wait=0, warmup=1, active=steps.last - steps.first + 1, repeat=1
            ),
            on_trace_ready=self._write,
        )

    def __enter__(self) -> Self:
        self._profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profiler.__exit__(*error)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around step ``number``: within the profiled steps, actions are ranges."""
        inside = self._steps.first <= number <= self._steps.last
        self._recorder.ranges = self._range if inside else None
        try:
            yield
        finally:
            self._recorder.ranges = None
        self._profiler.step()

    def _range(self, text: str) -> AbstractContextManager[Any]:
        from torch.profiler import record_function

        return _cuda_range(text) if self._on_cuda else record_function(text)

    def _write(self, profiler: Any) -> None:
        self._path.parent.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(self._path))


@contextmanager
def _cuda_range(text: str) -> Iterator[None]:
    """A range for PyTorch's profiler, and one for Nsight Systems."""
    import torch

    with torch.profiler.record_function(text), torch.cuda.nvtx.range(text):
        yield
