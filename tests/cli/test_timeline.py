"""``threefold timeline`` on a real run, and what it says where there is nothing to show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from threefold.train.data.build import BuildRequest, build_token_directory

SENTENCE = "the quick brown fox jumps over the lazy dog and runs away from it. "
STEPS = 5


def threefold(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "threefold", *map(str, words)]
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        command, capture_output=True, text=True, env=clean | {"OMP_NUM_THREADS": "1"} | environment, check=False
    )


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two stages, with its last steps traced."""
    place = tmp_path_factory.mktemp("timeline")
    (place / "text.txt").write_text(SENTENCE * 200)
    build_token_directory(BuildRequest((place / "text.txt",), place / "tokens", "bytes", validation_fraction=0.0))
    model = {
        "model_type": "llama",
        "vocab_size": 257,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    job = {
        "model": model,
        "data": {"train": str(place / "tokens"), "sequence_length": 16},
        "steps": STEPS,
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "parallelism": {"pp": {"size": 2}},
        "logging": {"every": 2},
    }
    (place / "job.json").write_text(json.dumps(job))
    done = threefold("train", place / "job.json", "--run-dir", place / "run", "--torch-profile", "3:4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bubble" in done.stdout
    return place / "run"


def test_the_log_has_the_bubble_of_every_step(run_dir: Path) -> None:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 4, 5]
    for line in lines:
        assert 0 < line["bubble"] < 1 and line["exposed_comm_s"] >= 0
        assert sum(line["idle_s"].values()) < line["step_s"]


def test_simulated_and_measured_are_side_by_side(run_dir: Path) -> None:
    done = threefold("timeline", run_dir)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1f1b, two stages on two ranks, four microbatches" in done.stdout
    assert "simulated with the mean times of the run's own actions" in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.endswith("|")]
    assert len(rows) == 4 and len({len(row) for row in rows}) == 1
    assert all("F" in row and "B" in row for row in rows[::2])
    # A machine that stalls in the measured step leaves its passes less than a column.
    assert all(set(row[row.index("|") :]) <= set("|FB=#. ") for row in rows)


def test_the_numbers_are_those_of_the_log(run_dir: Path) -> None:
    done = threefold("timeline", run_dir, "--step", 4, "--json")
    assert done.returncode == 0, done.stderr
    numbers: dict[str, Any] = json.loads(done.stdout)
    line = next(
        line for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()) if line["step"] == 4
    )
    (measured,) = numbers["measured"]
    assert measured["bubble"] == pytest.approx(line["bubble"], abs=1e-4)
    assert measured["exposed_comm_s"] == pytest.approx(line["exposed_comm_s"], abs=1e-5)
    # The step of the log is that of rank 0, which may be done while the other still updates.
    assert measured["step_s"] - measured["ranks"][0]["cool_down_s"] <= line["step_s"]
    assert 0 < numbers["simulated"]["bubble"] < 1


def test_page_and_trace_are_written(run_dir: Path, tmp_path: Path) -> None:
    done = threefold("timeline", run_dir, "--html", tmp_path / "t.html", "--trace", tmp_path / "t.json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [f"wrote {tmp_path / 't.html'}", f"wrote {tmp_path / 't.json'}"]
    page = (tmp_path / "t.html").read_text()
    trace = json.loads((tmp_path / "t.json").read_text())
    names = {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}
    for action in ("0F0", "0SEND_F3", "1RECV_F3", "1B3", "1SEND_B0", "0RECV_B0", "0B3", "SYNC", "STEP"):
        assert action in names and f'data-action="{action}"' in page


def test_torch_is_not_needed(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    done = threefold("timeline", run_dir, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_a_profile_in_the_run_directory_is_what_is_simulated_with(run_dir: Path, tmp_path: Path) -> None:
    for name in ("job.json", "timeline.jsonl"):
        (tmp_path / name).write_bytes((run_dir / name).read_bytes())
    (tmp_path / "profile.json").write_text("{}")
    done = threefold("timeline", tmp_path)
    assert done.returncode == 2 and "profile.json' is no profile" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_profile_of_a_run_stays_with_it(run_dir: Path, tmp_path: Path) -> None:
    job, profile = run_dir.parent / "job.json", tmp_path / "measured.json"
    done = threefold("profile", job, "-o", profile, "--seconds", 1)
    assert done.returncode == 0, done.stderr
    done = threefold("train", job, "--run-dir", tmp_path / "run", "--profile", profile)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "profile.json").read_bytes() == profile.read_bytes()
    done = threefold("timeline", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert f"simulated with the costs of {tmp_path / 'run' / 'profile.json'}" in done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["{run}", "--step", "3"], "--step: 3 is not recorded: 4 of the run's steps are"),
        (["nowhere"], "RUN: nowhere/timeline.jsonl can't be read: No such file"),
        (["{run}", "--html", "nowhere/t.html"], "--html: nowhere/t.html can't be written: No such file"),
        (["{run}", "--trace", "nowhere/t.json"], "--trace: nowhere/t.json can't be written: No such file"),
    ],
)
def test_what_can_not_be_shown(run_dir: Path, words: list[str], expected: str) -> None:
    done = threefold("timeline", *(word.format(run=run_dir) for word in words))
    assert done.returncode == 2
    assert expected in done.stderr and "fix: " in done.stderr and "Traceback" not in done.stderr


def test_wrong_steps_to_profile_are_told_before_anything_starts(run_dir: Path, tmp_path: Path) -> None:
    done = threefold("train", run_dir.parent / "job.json", "--run-dir", tmp_path / "run", "--torch-profile", "7")
    assert done.returncode == 2
    assert "--torch-profile: '7' are no steps of a job that has 5" in done.stderr
    assert not (tmp_path / "run").exists()


def test_the_profiler_wrote_a_trace_of_each_rank(run_dir: Path) -> None:
    for rank in range(2):
        trace = json.loads((run_dir / "torch_profile" / f"rank{rank}.json").read_text())
        names = [event["name"] for event in trace["traceEvents"]]
        assert names.count(f"{rank}F0") >= 2  # two steps
