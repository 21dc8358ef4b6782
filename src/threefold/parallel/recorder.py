"""When this rank did each action of a step: three times an action, kept for one step, read only when somebody wants it.

An action *begins*; when it has waited for a received input (or, before the optimizer, for the other ranks) it is
*ready*; then it *ends*. On a CPU a time is ``time.perf_counter``, one clock for all processes of a machine. On CUDA it
is an event on the current stream, which says when the device got there; reading it waits for the device, so a step is
read when it is over.

Torch is imported only where it is needed: reports read what was recorded without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from threefold.schedule import Action

if TYPE_CHECKING:
    import torch

Floats = NDArray[np.float64]

BEGIN, READY, END = range(3)
_MARKS_PER_ACTION = 3


class Clock(Protocol):
    """Where times come from. ``mark`` is called many times in a step, ``read`` when the step is over."""

    def resize(self, num_slots: int) -> None:
        """Make room for so many marks; those that were made and fit are kept."""
        ...

    def mark(self, slot: int) -> None:
        """Note the time."""
        ...

    def read(self) -> Floats:
        """Seconds of all slots, by this machine's ``time.perf_counter``."""
        ...


class HostClock:
    """The processor's time."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._times: list[float] = []

    def resize(self, num_slots: int) -> None:
        """Make room for so many marks."""
        self._times += [0.0] * (num_slots - len(self._times))
        del self._times[num_slots:]

    def mark(self, slot: int) -> None:
        """Note the time."""
        self._times[slot] = self._now()

    def read(self) -> Floats:
        """Seconds of all slots."""
        return np.array(self._times, dtype=np.float64)


class CudaClock:
    """The device's time: events are recorded on the current stream and used again in every step."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._torch, self._device = torch, device
        self._events: list[torch.cuda.Event] = []

    def resize(self, num_slots: int) -> None:
        """Make room for so many marks."""
        while len(self._events) < num_slots:
            self._events.append(self._torch.cuda.Event(enable_timing=True))
        del self._events[num_slots:]

    def mark(self, slot: int) -> None:
        """Record the slot's event."""
        self._events[slot].record()

    def read(self) -> Floats:
        """Seconds of all slots, by the host's clock; waits for the device."""
        # The host reads its clock when an anchor has passed. A new anchor each time, since the two clocks drift apart.
        self._torch.cuda.synchronize(self._device)
        anchor = self._torch.cuda.Event(enable_timing=True)
        anchor.record()
        anchor.synchronize()
        now_s = time.perf_counter()
        return np.array([now_s - event.elapsed_time(anchor) / 1e3 for event in self._events])


class Recorder:
    """The marks of the current step, and the profiler ranges of its actions.

    ``ranges`` makes a context for an action's text; it is set while a profile is taken and costs nothing otherwise.
    Measured on one core of an x86-64 server (CPython 3.11): 0.4 microseconds an action, with all its marks.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.ranges: Callable[[str], Any] | None = None
        self._clock = clock or HostClock()
        self._mark = self._clock.mark
        self._slot = 1
        self._num_actions = 0
        self._open: Any = None
        self._clock.resize(1)

    @classmethod
    def on(cls, device: torch.device) -> Recorder:
        """The recorder of a rank that computes on ``device``."""
        return cls(CudaClock(device) if device.type == "cuda" else None)

    def begin_step(self) -> None:
        """A step, or an evaluation, begins."""
        self._mark(0)

    def begin_row(self, num_actions: int) -> None:
        """A row of so many actions comes."""
        self._num_actions = num_actions
        self._clock.resize(1 + _MARKS_PER_ACTION * num_actions)

    def begin(self, index: int, action: Action) -> None:
        """``action``, which is number ``index`` of the row, begins."""
        if self.ranges is not None:
            self._open = self.ranges(str(action))
            self._open.__enter__()
        self._slot = 1 + _MARKS_PER_ACTION * index
        self._mark(self._slot)
        self._mark(self._slot + READY)

    def ready(self) -> None:
        """The action has what it waited for; from here on it computes."""
        self._mark(self._slot + READY)

    def end(self) -> None:
        """The action is over."""
        self._mark(self._slot + END)
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None

    def read(self) -> Marks:
        """What the step that is over was."""
        times = self._clock.read()
        return Marks(float(times[0]), times[1:].reshape(self._num_actions, _MARKS_PER_ACTION))


@dataclass(frozen=True)
class Marks:
    """One rank's step: when it began, and [action, (begin, ready, end)], in seconds."""

    begin_s: float
    times_s: Floats

    def padded(self, num_actions: int) -> Floats:
        """``begin_s`` and all times, filled up to a row of ``num_actions``: what ranks of unlike rows can gather."""
        row = np.zeros(1 + _MARKS_PER_ACTION * num_actions)
        row[0] = self.begin_s
        row[1 : 1 + self.times_s.size] = self.times_s.ravel()
        return row

    @classmethod
    def from_padded(cls, row: Floats, num_actions: int) -> Marks:
        """The marks of a rank whose row has ``num_actions``."""
        return cls(float(row[0]), row[1 : 1 + _MARKS_PER_ACTION * num_actions].reshape(num_actions, _MARKS_PER_ACTION))


def clock_offsets(machines: Sequence[int], stamps_s: Floats) -> Floats:
    """Seconds that each rank's clock is ahead of rank 0's, from [round, rank] times at which ranks left a barrier.

    Ranks of one machine share its clock. Nobody leaves a barrier before all have come, so the first of each machine to
    leave is nearest to the common moment; the median over rounds drops those in which even the first was late.
    """
    first = {machine: stamps_s[:, np.equal(machines, machine)].min(axis=1) for machine in set(machines)}
    return np.array([float(np.median(first[machine] - first[machines[0]])) for machine in machines])
