"""``threefold check``: what it prints for right jobs, and that it raises everything for wrong ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from threefold.cli.check import check
from threefold.errors import JobError

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_right_job_is_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    check(EXAMPLES / "article-64xa100.json", [])
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("OK ") and "gpt3-175b, 175 billion parameters" in first
    assert "dp 4 × tp 8 × pp 2 = 64 ranks" in first
    assert "128 = micro batch 4 × accumulation 8 × dp 4" in first and first.endswith("fp16")
    assert rest == []


def test_what_can_not_be_trained_yet_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    check(EXAMPLES / "article-64xa100.json", ["checkpoint.every=100"])
    _, title, problem, *_ = capsys.readouterr().out.splitlines()
    assert title.startswith("not yet ready for `threefold train`")
    assert "checkpoint.every" in problem


def test_overrides_count(capsys: pytest.CaptureFixture[str]) -> None:
    check(EXAMPLES / "article-64xa100.json", ["parallelism.pp.size=4", "parallelism.dp.size=2"])
    assert "128 = micro batch 4 × accumulation 16 × dp 2" in capsys.readouterr().out


def test_notes_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"train_batch_size": 2, "wall_clock_breakdown": True}))
    check(path)
    assert "note: wall_clock_breakdown: has no effect" in capsys.readouterr().out


def test_a_wrong_job_raises_every_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"train_batch_size": 0, "stepz": 1}))
    with pytest.raises(JobError) as caught:
        check(path, ["seed"])
    assert {problem.key for problem in caught.value.problems} == {"train_batch_size", "stepz", "--set seed"}
    assert capsys.readouterr().out == ""
