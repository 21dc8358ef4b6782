"""When a rank did what: the marks of a step, what they cost, and the ranges of a profiler."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import numpy as np
import pytest
import torch

from threefold.parallel.recorder import BEGIN, END, READY, CudaClock, HostClock, Marks, Recorder, clock_offsets
from threefold.schedule import Action, Kind

FORWARD, BACKWARD = Action(Kind.F, 2, 0), Action(Kind.B, 2, 0)


def ticking() -> HostClock:
    """A clock that shows 0, 1, 2, ..."""
    numbers = count()
    return HostClock(lambda: float(next(numbers)))


def record(recorder: Recorder, *actions: Action, waits: bool = False) -> Marks:
    recorder.begin_step()
    recorder.begin_row(len(actions))
    for index, action in enumerate(actions):
        recorder.begin(index, action)
        if waits:
            recorder.ready()
        recorder.end()
    return recorder.read()


def test_an_action_that_waits_is_ready_later_than_it_begins() -> None:
    marks = record(Recorder(ticking()), FORWARD, BACKWARD, waits=True)
    assert marks.begin_s == 0
    assert marks.times_s.tolist() == [[1, 3, 4], [5, 7, 8]]
    assert (BEGIN, READY, END) == (0, 1, 2)


def test_an_action_that_waits_for_nothing_is_ready_at_once() -> None:
    marks = record(Recorder(ticking()), FORWARD)
    assert marks.times_s.tolist() == [[1, 2, 3]]


def test_a_shorter_step_between_two_longer_ones_leaves_nothing_behind() -> None:
    """As an evaluation between two training steps does."""
    recorder = Recorder(ticking())
    record(recorder, FORWARD, BACKWARD)
    assert record(recorder, FORWARD).times_s.shape == (1, 3)
    again = record(recorder, FORWARD, BACKWARD)
    assert again.times_s.shape == (2, 3)
    assert (np.diff(again.times_s.ravel()) == 1).all()


def test_ranks_of_unlike_rows_gather_rows_of_one_length() -> None:
    marks = record(Recorder(ticking()), FORWARD, BACKWARD)
    row = marks.padded(5)
    assert row.shape == (16,)
    again = Marks.from_padded(row, 2)
    assert again.begin_s == marks.begin_s and (again.times_s == marks.times_s).all()


def test_recording_takes_no_memory_and_next_to_no_time() -> None:
    recorder, row = Recorder(), [FORWARD] * 100

    def run() -> None:
        recorder.begin_step()
        recorder.begin_row(len(row))
        for index, action in enumerate(row):
            recorder.begin(index, action)
            recorder.ready()
            recorder.end()

    run()
    tracemalloc.start()
    run()
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(10):
        run()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 10_000  # the times alone: each replaces one of the step before
    begin = time.process_time()
    for _ in range(100):
        run()
    assert time.process_time() - begin < 1.0  # 10,000 actions; about 0.005 s


def test_actions_are_ranges_while_a_profile_is_taken_and_only_then() -> None:
    seen: list[str] = []

    @contextmanager
    def named(text: str) -> Iterator[None]:
        seen.append(f"{text} begins")
        yield
        seen.append(f"{text} ends")

    recorder = Recorder()
    record(recorder, FORWARD)
    recorder.ranges = named
    record(recorder, FORWARD, Action(Kind.STEP))
    recorder.ranges = None
    record(recorder, BACKWARD)
    assert seen == ["2F0 begins", "2F0 ends", "STEP begins", "STEP ends"]


def test_clocks_of_one_machine_are_one_clock() -> None:
    stamps = np.array([[5.0, 9.0, 6.0]])
    assert clock_offsets([7, 7, 7], stamps).tolist() == [0, 0, 0]


def test_the_clock_of_another_machine_is_compared_where_both_left_a_barrier() -> None:
    generator = np.random.default_rng(0)
    true = np.array([0.0, 0.0, 1000.0, 1000.0])
    late = generator.exponential(1e-3, (9, 4))  # some leave a barrier late
    stamps = np.arange(9.0)[:, None] + true + late
    offsets = clock_offsets([1, 1, 2, 2], stamps)
    assert offsets[:2].tolist() == [0, 0] and offsets[2] == offsets[3]
    assert offsets[2] == pytest.approx(1000.0, abs=1e-3)


class FakeEvent:
    """A CUDA event of a device whose clock stands at ``now_ms``."""

    now_ms = 0.0
    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        FakeEvent.made += 1

    def record(self) -> None:
        self.at_ms = FakeEvent.now_ms

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: FakeEvent) -> float:
        return later.at_ms - self.at_ms


def test_times_of_a_gpu_are_told_by_the_hosts_clock_and_events_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logic only: a device whose events are made up. What a real one does is not tested here."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0)
    monkeypatch.setattr(FakeEvent, "made", 0)
    clock = CudaClock(torch.device("cuda", 0))
    for _ in range(3):
        clock.resize(2)
        for slot, now_ms in enumerate((1000.0, 4000.0)):
            FakeEvent.now_ms = now_ms
            clock.mark(slot)
        FakeEvent.now_ms = 5000.0
        assert clock.read().tolist() == [96.0, 99.0]
    assert FakeEvent.made == 2 + 3  # the anchors are new, the events are not
