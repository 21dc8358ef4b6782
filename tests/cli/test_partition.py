"""Stages that are settled before a run, and advice after it, as a user meets them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cost.profiles import small_profile
from tests.jobs import LLAMA, merge
from threefold.cli.main import main
from threefold.cli.partition import advise, settled, with_partition
from threefold.errors import JobError
from threefold.job import load_job, parse_job
from threefold.layout import Layout
from threefold.parallel.recorder import Marks
from threefold.plan.balance import resolve_partition
from threefold.schedule import Kind, job_schedule, lower
from threefold.train.data.build import BuildRequest, build_token_directory
from threefold.train.recorded import RecordedStep, TimelineWriter


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tokens")
    (place / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    build_token_directory(BuildRequest((place,), place / "out", "bytes", validation_fraction=0.0, pattern="*.txt"))
    return place / "out"


def settings_of(tokens: Path | None = None, **settings: Any) -> dict[str, Any]:
    data: dict[str, Any] = {"sequence_length": 12} | ({"train": str(tokens)} if tokens else {})
    base = {
        "model": LLAMA | {"num_hidden_layers": 8, "vocab_size": 1000},
        "data": data,
        "steps": 3,
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "parallelism": {"pp": {"size": 2}},
    }
    return merge(base, settings)


class Runs:
    """Runs ``threefold`` in this process; ``train`` starts no ranks."""

    def __init__(
        self, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
    ) -> None:
        self.place, self.capsys, self.monkeypatch = place, capsys, monkeypatch
        (place / "job.json").write_text(json.dumps(settings))
        job = parse_job(settings)
        (place / "profile.json").write_text(small_profile(job, layer_s=1.0, head_s=4.0).to_json())
        monkeypatch.chdir(place)
        monkeypatch.setattr("threefold.train.launcher.launch", lambda *_, **__: 0)

    def run(self, *words: str) -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["threefold", *words])
        with pytest.raises(SystemExit) as caught:
            main()
        printed = self.capsys.readouterr()
        return int(caught.value.code or 0), printed.out, printed.err


@pytest.fixture
def runs(tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(tmp_path, capsys, monkeypatch, settings_of(tokens))


def test_train_settles_auto_and_says_why(runs: Runs) -> None:
    status, _, err = runs.run("train", "job.json", "--run-dir", "run")
    assert status == 0, err
    _, chosen = resolve_partition(load_job("job.json"))
    assert chosen is not None
    assert f"note: {chosen.words()}" in err
    resolved = load_job(runs.place / "run" / "job.json")
    assert resolved.parallelism.pp.partition == chosen.partition


def test_train_cuts_by_the_profile(runs: Runs) -> None:
    status, _, err = runs.run("train", "job.json", "--run-dir", "run", "--profile", "profile.json")
    assert status == 0, err
    assert "partition auto is [6, 2] by measured costs" in err
    assert load_job(runs.place / "run" / "job.json").parallelism.pp.partition == (6, 2)
    assert (runs.place / "run" / "profile.json").read_text() == (runs.place / "profile.json").read_text()


def test_a_partition_on_the_command_line_is_obeyed(runs: Runs) -> None:
    status, _, err = runs.run("train", "job.json", "--run-dir", "run", "--partition", "5,3")
    assert status == 0, err
    assert "partition auto" not in err
    assert load_job(runs.place / "run" / "job.json").parallelism.pp.partition == (5, 3)
    status, out, _ = runs.run("explain", "job.json", "--partition", "1,7")
    assert status == 0
    assert "1-7 (7)" in out


def test_a_profile_of_other_work_ends_before_anything_starts(runs: Runs) -> None:
    words = ("train", "job.json", "--run-dir", "run", "--profile", "profile.json", "--set", "data.sequence_length=8")
    status, _, err = runs.run(*words)
    assert status == 2
    assert "sequence length 12, but the job has 8" in err
    assert not (runs.place / "run").exists()


def test_a_searched_schedule_is_searched_by_the_profile(runs: Runs) -> None:
    words = ("--set", "parallelism.pp.schedule=searched", "--profile", "profile.json")
    status, _, err = runs.run("train", "job.json", "--run-dir", "run", *words)
    assert status == 0, err
    assert "schedule searched by measured costs" in err
    resolved = load_job(runs.place / "run" / "job.json")
    assert resolved.parallelism.pp.schedule_file == str(runs.place / "run" / "schedule.txt")
    schedule = job_schedule(resolved)
    assert (schedule.num_ranks, schedule.num_microbatches) == (2, 8)


def test_plan_and_its_job_take_the_profile(runs: Runs) -> None:
    status, out, err = runs.run("plan", "job.json", "--profile", "profile.json", "--as-is", "--json")
    assert status == 0, err
    plans = json.loads(out)["plans"]
    # Eight microbatches of a stage of six layers, and one of the other stage.
    assert plans[0]["step_s"] == pytest.approx(8 * 6 + 6, rel=0.02)
    assert plans[0]["mfu"] is None  # nobody states the peak of a CPU
    words = ("--profile", "profile.json", "--fix", "pp=2", "--fix", "micro_batch=1", "-o", "planned.json")
    status, _, err = runs.run("plan", "job.json", *words)
    assert status == 0, err
    partition = json.loads((runs.place / "planned.json").read_text())["parallelism"]["pp"]["partition"]
    assert sum(partition) == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["explain", "job.json", "--partition", "3,x"], "--partition: '3,x' is no partition"),
        (["explain", "job.json", "--partition", "3,3"], "parallelism.pp.partition: [3, 3] places 6 layers"),
        (["explain", "job.json", "--profile", "none.json"], "--profile: 'none.json' can't be read"),
        (
            ["plan", "--model", "gpt2", "--gpu", "h100", "--global-batch", "8", "--profile", "p.json"],
            "--profile: needs",
        ),
    ],
    ids=str,
)
def test_wrong_words_are_named(runs: Runs, words: list[str], message: str) -> None:
    status, _, err = runs.run(*words)
    assert status == 2
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3,3,2,4", "[3,3,2,4]"),
        ("[6, 2]", "[6,2]"),
        ("3+1", "[3,1]"),
        ("4.5, 3.5", "[4.5,3.5]"),
        ("even", "even"),
        ("auto", "auto"),
    ],
)
def test_partitions_as_they_are_written(text: str, value: str) -> None:
    assert with_partition(["steps=1"], text) == ["steps=1", f"parallelism.pp.partition={value}"]


@pytest.mark.parametrize("text", ["", "1,,2", "one", "-1,3", "1.25,2", "1.5.5,2", "auto,2"])
def test_what_is_no_partition_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="--partition"):
        with_partition([], text)


# After a run


def record(run_dir: Path, settings: dict[str, Any], seconds: dict[int, float]) -> None:
    """A recording of three steps whose stages take so long for forward, and twice that for backward."""
    job = parse_job(settings)
    schedule = lower(job_schedule(job))
    layout = Layout(dp=1, pp=job.pp, tp=1)
    run_dir.mkdir()
    (run_dir / "summary.json").write_text('{"format": 1, "steps": 3}\n')
    writer = TimelineWriter(run_dir, schedule, layout, 3)
    for step in (1, 2, 3):
        ranks = []
        for row in schedule.rows:
            factors = {Kind.F: 1.0, Kind.B: 2.0}
            durations = [factors.get(a.kind, 0.0) * seconds.get(a.stage, 0.0) * (5 if step == 1 else 1) for a in row]
            ends = np.cumsum(durations)
            times = np.stack([ends - durations, ends - durations, ends], axis=1)
            ranks.append(Marks(0.0, times))
        writer.keep(RecordedStep(step, schedule, layout, tuple(ranks)), is_last=step == 3)
    writer.close()


def test_a_run_ends_with_advice_where_it_pays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = settings_of(parallelism={"pp": {"partition": "even"}})
    record(tmp_path / "run", settings, {0: 0.004, 1: 0.010})  # layers of 1 ms, and a head of 6
    advise(parse_job(settings), tmp_path / "run")
    err = capsys.readouterr().err
    assert "balance: stage 1 is 43% slower than the mean: --partition 7,1" in err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["balance"]["partition"] == [7, 1]
    assert summary["balance"]["gain"] == pytest.approx((8 * 10 + 4) / (8 * 7 + 7) - 1, rel=0.01)
    assert summary["balance"]["stages_s"] == pytest.approx([0.012, 0.030], rel=0.01)


def test_a_balanced_run_ends_without_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = settings_of(parallelism={"pp": {"partition": "even"}})
    record(tmp_path / "run", settings, {0: 0.004, 1: 0.004})
    advise(parse_job(settings), tmp_path / "run")
    assert capsys.readouterr().err == ""
    assert "balance" not in json.loads((tmp_path / "run" / "summary.json").read_text())


def test_a_run_that_recorded_nothing_ends_without_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, notes = settled(parse_job(settings_of()), None)
    assert notes
    advise(job, tmp_path)
    (tmp_path / "timeline.jsonl").write_text("nonsense\n")
    advise(job, tmp_path)
    assert capsys.readouterr().err == ""
