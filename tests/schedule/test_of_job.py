"""From a job to its schedule, by name and by file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.jobs import small_job
from threefold.errors import JobError, ScheduleError
from threefold.job import Job
from threefold.schedule import NAMED, Placement, build_schedule, job_schedule, lower, read_schedule, zb_v


def job_of(**pipeline: Any) -> Job:
    return small_job(parallelism={"pp": {"size": 2, **pipeline}})


@pytest.mark.parametrize("name", NAMED)
def test_by_name(name: str) -> None:
    chunks = {"chunks": 2} if name == "interleaved_1f1b" else {}
    assert job_schedule(job_of(schedule=name, **chunks)) == build_schedule(name, 2, 8)


def test_searched_in_the_stages_that_the_job_states() -> None:
    for chunks in (1, 2):
        schedule = job_schedule(job_of(schedule="searched", chunks=chunks))
        assert (schedule.name, schedule.num_stages, schedule.num_microbatches) == ("searched", 2 * chunks, 8)


def test_by_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    for schedule in (zb_v(2, 8), lower(zb_v(2, 8))):
        path.write_text("# drawn by hand\n" + schedule.to_text(), encoding="utf-8")
        found = job_schedule(job_of(schedule_file=str(path), chunks=2))
        assert found == schedule
        assert found.placement is Placement.V
        assert lower(found) == lower(schedule)


def test_a_file_for_other_sizes_names_every_key(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(zb_v(4, 6).to_text(), encoding="utf-8")
    with pytest.raises(JobError) as caught:
        job_schedule(job_of(schedule_file=str(path)))
    assert {problem.key: problem.fix for problem in caught.value.problems} == {
        "parallelism.pp.size": "set it to 4",
        "parallelism.pp.chunks": "set it to 2",
        "gradient_accumulation_steps": "set it to 6",
    }


def test_a_file_that_trains_nothing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(
        "forward_only stages=2 ranks=2 microbatches=8\n"
        + "rank 0: "
        + " ".join(f"0F{i}" for i in range(8))
        + "\nrank 1: "
        + " ".join(f"1F{i}" for i in range(8))
        + "\n"
    )
    with pytest.raises(JobError, match="forward passes alone"):
        job_schedule(job_of(schedule_file=str(path)))


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, JobError, "can't be read: No such file or directory"),
        (b"\xff\xfe\x00", JobError, "is no text file"),
        (b"", ScheduleError, "the schedule is empty"),
        (b"x stages=2 ranks=2 microbatches=1\nrank 0: 0F0 0B0\nrank 1: 1B0 1F0\n", ScheduleError, "> rank 1"),
        (
            b"x stages=2 ranks=2 microbatches=1\nrank 0: 0F0 0SEND_F0 0RECV_B0 0B0 SYNC STEP\nrank 1: 1F0 1B0\n",
            ScheduleError,
            "1RECV_F0 is missing",
        ),
    ],
)
def test_a_file_that_is_no_schedule_is_told_with_its_path(
    tmp_path: Path, content: bytes | None, error: type[Exception], message: str
) -> None:
    path = tmp_path / "mine.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error, match=message) as caught:
        read_schedule(path)
    assert str(path) in str(caught.value)


def test_a_file_of_absurd_sizes_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("x stages=2 ranks=2 microbatches=1000000000\nrank 0: 0F0\nrank 1: 1F0\n")
    with pytest.raises(ScheduleError, match="1,999,999,99"):
        read_schedule(path)
