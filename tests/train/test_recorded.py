"""The file of recorded steps: what is kept of a long run, and what is said of a file that is not one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from threefold.errors import JobError, WorkerError
from threefold.layout import Layout
from threefold.parallel.recorder import Marks
from threefold.schedule import build_schedule, lower
from threefold.train.lines import LineFile
from threefold.train.recorded import TIMELINE_FILE, RecordedStep, TimelineWriter, read_recording, stride_of

SCHEDULE = lower(build_schedule("zb_v", 2, 4, 2))
LAYOUT = Layout(dp=1, pp=2, tp=2, order=("pp", "tp", "dp"))


def recorded(step: int, length_s: float = 1.0) -> RecordedStep:
    ranks = []
    for rank in range(4):
        row = SCHEDULE.rows[LAYOUT.coord(rank).pp]
        ranks.append(Marks(-1e-3 * rank, np.linspace(0, length_s, 3 * len(row)).reshape(-1, 3)))
    return RecordedStep(step, SCHEDULE, LAYOUT, tuple(ranks))


def write(run_dir: Path, steps: int, num_logged: int | None = None) -> None:
    writer = TimelineWriter(run_dir, SCHEDULE, LAYOUT, steps if num_logged is None else num_logged)
    for step in range(1, steps + 1):
        writer.keep(recorded(step, length_s=1 + step / 1000), is_last=step == steps)
    writer.close()


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    write(tmp_path, 3)
    recording = read_recording(tmp_path)
    assert (recording.schedule, recording.layout) == (SCHEDULE, LAYOUT)
    assert list(recording.lines) == [1, 2, 3]
    step, original = recording.step(2), recorded(2, 1.002)
    for mine, theirs in zip(step.ranks, original.ranks, strict=True):
        assert mine.begin_s == pytest.approx(theirs.begin_s, abs=1e-7)
        assert mine.times_s == pytest.approx(theirs.times_s, abs=1e-7)


def test_the_typical_step_is_of_median_length_and_not_the_first(tmp_path: Path) -> None:
    writer = TimelineWriter(tmp_path, SCHEDULE, LAYOUT, 6)
    for step, length_s in enumerate((9.0, 1.0, 5.0, 1.2, 1.1, 7.0), start=1):
        writer.keep(recorded(step, length_s), is_last=step == 6)
    writer.close()
    assert read_recording(tmp_path).step().step == 4


def test_a_run_of_one_step_shows_it(tmp_path: Path) -> None:
    write(tmp_path, 1)
    assert read_recording(tmp_path).step().step == 1


@pytest.mark.parametrize("steps", [1, 99, 100, 101, 5000])
def test_a_long_run_keeps_a_hundred_steps_and_the_last(tmp_path: Path, steps: int) -> None:
    write(tmp_path, steps)
    kept = list(read_recording(tmp_path).lines)
    assert min(steps, 50) <= len(kept) <= 101
    assert (kept[0], kept[-1]) == (1, steps)
    assert len(set(np.diff(kept[:-1]).tolist())) <= 1


def test_a_large_job_keeps_fewer_steps() -> None:
    assert stride_of(1000, 100) == 10
    assert stride_of(1000, 1_000_000) == 143  # 9 MB a step
    assert stride_of(1000, 10**12) == 500
    assert stride_of(0, 100) == 1


def test_half_a_line_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, 3)
    path = tmp_path / TIMELINE_FILE
    path.write_bytes(path.read_bytes()[:-40])
    assert list(read_recording(tmp_path).lines) == [1, 2]


def test_a_step_that_is_not_kept(tmp_path: Path) -> None:
    write(tmp_path, 1000)
    with pytest.raises(JobError) as caught:
        read_recording(tmp_path).step(456)
    (problem,) = caught.value.problems
    assert problem.key == "--step" and "456 is not recorded: 101 of the run's steps are" in problem.message
    assert problem.fix == "use one near it: 431, 441, 451, 461, 471"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "can't be read: No such file"),
        ("", "no recording of format 1"),
        ("nonsense\n", "no recording of format 1"),
        ("[1]\n", "no recording of format 1"),
        ('{"format": 2}\n', "no recording of format 1"),
        (
            '{"format": 1, "layout": {"dp": 0, "pp": 1, "tp": 1, "order": ["tp", "pp", "dp"]}}\n',
            "no recording of format 1",
        ),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / TIMELINE_FILE).write_text(text)
    with pytest.raises(JobError, match=words) as caught:
        read_recording(tmp_path)
    assert caught.value.problems[0].key == "RUN"


def test_a_file_without_steps_or_with_rows_of_another_schedule(tmp_path: Path) -> None:
    writer = TimelineWriter(tmp_path, SCHEDULE, LAYOUT, 1)
    writer.close()
    with pytest.raises(JobError, match="holds no step"):
        read_recording(tmp_path)
    with (tmp_path / TIMELINE_FILE).open("a") as file:
        file.write('{"step": 1, "ranks": [[1, 2], [3], [4], [5]]}\n')
    with pytest.raises(JobError, match="no recording of format 1"):
        read_recording(tmp_path)


# Files of whole lines


def test_lines_are_there_at_once(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "lines")
    file.append({"a": 1})
    assert (tmp_path / "lines").read_text() == '{"a": 1}\n'
    file.close()
    file.close()
    assert file.closed


def test_a_disk_that_is_full_is_named_and_closing_adds_nothing() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs a device that is always full")
    file = LineFile(Path("/dev/full"))
    with pytest.raises(WorkerError, match=r"/dev/full can't be written: No space left on device(.|\n)*fix: make room"):
        file.append({"a": 1})
    file.close()


def test_numbers_that_json_lacks_are_a_bug(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "lines")
    with pytest.raises(ValueError, match="not JSON compliant"):
        file.append({"a": float("nan")})
    file.close()
    assert json.dumps((tmp_path / "lines").read_text()) == '""'
