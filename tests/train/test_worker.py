"""Whole runs, from a job file to metrics, on real processes; and what is said when one of them dies or hangs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs import merge, small_job
from threefold.errors import DataError, JobError
from threefold.job import Job
from threefold.parallel.activity import Activity, ActivityBoard
from threefold.report.counted import counted_section
from threefold.report.facts import TextTable
from threefold.train.data.build import BuildRequest, build_token_directory
from threefold.train.launcher import BOARD_FILE, LOG_DIR
from threefold.train.metrics import METRICS_FILE
from threefold.train.summary import SUMMARY_FILE
from threefold.train.watchdog import process_state
from threefold.train.worker import choose_device, open_sources

BYTES_VOCAB = 257
SENTENCE = "the quick brown fox jumps over the lazy dog and runs away from it. "


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token directory of plain English, by bytes."""
    place = tmp_path_factory.mktemp("tokens")
    for number in range(8):
        (place / f"text{number}.txt").write_text(SENTENCE * 40)
    out = place / "out"
    build_token_directory(BuildRequest((place,), out, "bytes", validation_fraction=0.2, pattern="*.txt"))
    return out


def job_of(tokens: Path, **settings: Any) -> dict[str, Any]:
    data: dict[str, Any] = {
        "model": {
            "model_type": "llama",
            "vocab_size": BYTES_VOCAB,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32,
        },
        "data": {"train": str(tokens), "sequence_length": 16},
        "steps": 12,
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        "evaluation": {"every": 6, "batches": 2},
    }
    return merge(data, settings)


# ---------------------------------------------------------------------------------------------------------------------
# Before anything runs


def on_device(device: str) -> Job:
    return small_job(cluster={"device": device, "devices_per_node": 1})


def test_cpu_ranks_need_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(small_job()) == torch.device("cpu")
    assert choose_device(on_device("cpu")) == torch.device("cpu")


def test_gpus_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(JobError) as caught:
        choose_device(on_device("a100-80gb"))
    (problem,) = caught.value.problems
    assert problem.key == "cluster.device"
    assert "'a100-80gb'" in problem.message


def test_a_rank_takes_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert choose_device(on_device("a100-80gb")) == torch.device("cuda", 3)
    assert chosen == [torch.device("cuda", 3)]


def with_data(tokens: Path, vocab_size: int = BYTES_VOCAB, **settings: Any) -> Job:
    keys = job_of(tokens)["model"] | {"vocab_size": vocab_size}
    return small_job(keys, data={"train": str(tokens), "sequence_length": 16}, **settings)


def test_a_vocabulary_that_does_not_hold_the_tokens(tokens: Path) -> None:
    with pytest.raises(
        DataError, match=r"model\.vocab_size: .* has a vocabulary of 257, the model one of 200"
    ) as caught:
        open_sources(with_data(tokens, vocab_size=200))
    assert "set model.vocab_size to at least 257" in str(caught.value)
    assert open_sources(with_data(tokens, vocab_size=300)).train.vocab_size == BYTES_VOCAB


def test_held_out_tokens(tokens: Path, tmp_path: Path) -> None:
    assert open_sources(with_data(tokens)).validation is None
    job = with_data(tokens, evaluation={"every": 1})
    validation = open_sources(job).validation
    assert validation is not None
    assert validation.num_samples > 0
    text = tmp_path / "text.txt"
    text.write_text(SENTENCE * 40)
    out = tmp_path / "out"
    build_token_directory(BuildRequest((text,), out, "bytes", validation_fraction=0.0))
    with pytest.raises(DataError, match="validation"):
        open_sources(with_data(out, evaluation={"every": 1}))
    elsewhere = {"train": str(out), "validation": str(tokens), "sequence_length": 16}
    keys = job_of(tokens)["model"]
    assert open_sources(small_job(keys, data=elsewhere, evaluation={"every": 1})).validation is not None


def test_tokens_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        open_sources(with_data(tmp_path / "nowhere"))


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs


@dataclass
class Run:
    """``threefold train`` in a process of its own."""

    process: subprocess.Popen[str]
    run_dir: Path

    def metrics(self) -> list[dict[str, Any]]:
        path = self.run_dir / METRICS_FILE
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.metrics() if "loss" in line]

    def board(self) -> tuple[Activity, ...]:
        board = ActivityBoard.open(self.run_dir / BOARD_FILE)
        try:
            return board.read_all()
        finally:
            board.close()

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: any(line["step"] >= step for line in self.steps()))

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.05)

    def freeze(self, rank: int) -> Activity:
        """Stop a rank in the middle of its work on a microbatch; returns what it was doing."""
        while True:
            activity = self.board()[rank]
            os.kill(activity.pid, signal.SIGSTOP)
            self.wait_until(lambda pid=activity.pid: process_state(pid) == "stopped")
            activity = self.board()[rank]
            if activity.microbatch is not None:
                return activity
            os.kill(activity.pid, signal.SIGCONT)
            time.sleep(0.01)

    def finish(self, timeout_s: float = 120.0) -> tuple[int, str]:
        """Exit status and all that was printed; no rank may be left."""
        output, _ = self.process.communicate(timeout=timeout_s)
        for activity in self.board() if (self.run_dir / BOARD_FILE).exists() else ():
            assert activity.pid == 0 or process_state(activity.pid) == "gone"
        return self.process.returncode, output


@contextmanager
def started(tmp_path: Path, job: dict[str, Any], *launcher: str) -> Iterator[Run]:
    job_file, run_dir = tmp_path / "job.json", tmp_path / "run"
    job_file.write_text(json.dumps(job))
    command = [*(launcher or (sys.executable, "-m", "threefold")), "train", str(job_file), "--run-dir", str(run_dir)]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )
    run = Run(process, run_dir)
    try:
        yield run
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def check_finished(run: Run, steps: int, *, has_pipeline: bool = False) -> None:
    lines = run.steps()
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    expected = {"step", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_s", "step_s"}
    expected |= {"idle_s", "exposed_comm_s"} | ({"bubble"} if has_pipeline else set())
    assert all(set(line) == expected for line in lines)
    assert lines[0]["loss"] == pytest.approx(5.55, abs=0.1)  # ln 257
    assert lines[-1]["loss"] < lines[0]["loss"] - 1.0
    evaluations = [line for line in run.metrics() if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [6, 12]
    assert evaluations[1]["eval_loss"] < evaluations[0]["eval_loss"] < 5.5


def check_summary(run: Run, job: Job) -> None:
    """All ranks' counts are there, and are what is predicted."""
    summary = json.loads((run.run_dir / SUMMARY_FILE).read_text())
    assert (summary["steps"], summary["stopped"], summary["tokens"]) == (12, False, 12 * 8 * 16)
    assert summary["loss"] == run.steps()[-1]["loss"] and summary["tokens_per_s"] > 0
    assert [rank["rank"] for rank in summary["ranks"]] == list(range(job.world_size))
    tables = [part for part in counted_section(job, summary).body if isinstance(part, TextTable)]
    assert {row[-1] for table in tables for row in table.rows} == {"equal"}
    assert all(rank["memory"]["peak"]["held"]["activations"] > 0 for rank in summary["ranks"])


@pytest.mark.parametrize(
    "parallelism",
    [{"dp": {"size": 2}}, {"tp": {"size": 2, "sequence_parallel": True}, "pp": {"size": 2}}],
    ids=["dp2", "tp2pp2"],
)
def test_a_job_file_is_trained(tokens: Path, tmp_path: Path, parallelism: dict[str, Any]) -> None:
    with started(tmp_path, job_of(tokens, parallelism=parallelism, logging={"tensorboard": True})) as run:
        status, output = run.finish()
        assert status == 0, output
        assert "step 12/12" in output
        assert "Traceback" not in output
        check_finished(run, 12, has_pipeline="pp" in parallelism)
        assert list((run.run_dir / "tensorboard").iterdir())
        job = Job.model_validate_json((run.run_dir / "job.json").read_text())
        assert job.world_size in (2, 4)
        check_summary(run, job)
        for log in (run.run_dir / LOG_DIR).iterdir():
            assert "Traceback" not in log.read_text(), log


@pytest.mark.slow
def test_a_job_file_is_trained_under_torchrun(tokens: Path, tmp_path: Path) -> None:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "threefold")
    with started(tmp_path, job_of(tokens, parallelism={"pp": {"size": 2}}), *launcher) as run:
        status, output = run.finish()
        assert status == 0, output
        check_finished(run, 12, has_pipeline=True)


# ---------------------------------------------------------------------------------------------------------------------
# Runs that end otherwise


def endless(tokens: Path, **settings: Any) -> dict[str, Any]:
    parallelism = {"pp": {"size": 2}}
    return job_of(tokens, steps=10**6, evaluation={"every": 0}, parallelism=parallelism, **settings)


def check_whole_lines(run: Run) -> None:
    text = (run.run_dir / METRICS_FILE).read_text()
    assert text.endswith("}\n")
    assert [line["step"] for line in run.steps()] == list(range(1, 1 + len(run.steps())))


def where(activity: Activity) -> str:
    """The place that a message must name."""
    place = f"stage 1, microbatch {activity.microbatch}"
    return f"at step {activity.step} in action {activity.action}, {place}"


def test_b069_a_rank_that_is_killed_is_named(tokens: Path, tmp_path: Path) -> None:
    with started(tmp_path, endless(tokens)) as run:
        run.wait_for_step(3)
        activity = run.freeze(rank=1)
        os.kill(activity.pid, signal.SIGKILL)
        status, output = run.finish()
        assert status == 1
        assert f"error: rank 1 (dp 0, pp 1, tp 0; pid {activity.pid}) was killed by signal 9 (SIGKILL) " in output
        assert where(activity) in output
        assert "Traceback" not in output
        check_whole_lines(run)


def test_b069_a_rank_that_is_stopped_is_named_by_the_watchdog(tokens: Path, tmp_path: Path) -> None:
    with started(tmp_path, endless(tokens, watchdog={"timeout_s": 5})) as run:
        run.wait_for_step(3)
        activity = run.freeze(rank=1)
        begin = time.monotonic()
        status, output = run.finish()
        assert time.monotonic() - begin < 40
        assert status == 1
        assert "error: the job hung, and was ended:\nrank 1 (dp 0, pp 1, tp 0) has shown no sign of life" in output
        assert f"its process {activity.pid} is stopped" in output
        assert where(activity) in output
        assert re.search(r"rank 0 waits for it in (receive from rank 1|all_reduce) over [\w+ ]+\[0,1\]", output)
        assert "Traceback" not in output
        check_whole_lines(run)


def test_ctrl_c_ends_the_run_after_a_step(tokens: Path, tmp_path: Path) -> None:
    with started(tmp_path, endless(tokens)) as run:
        run.wait_for_step(3)
        run.process.send_signal(signal.SIGINT)
        status, output = run.finish()
        assert status == 130, output
        assert "stopping after this step" in output
        check_whole_lines(run)
        assert f"stopped after step {len(run.steps())}; metrics are in {run.run_dir / METRICS_FILE}" in output
        assert "Traceback" not in output


def test_a_signal_to_one_rank_ends_the_run_and_does_not_call_it_done(tokens: Path, tmp_path: Path) -> None:
    with started(tmp_path, endless(tokens)) as run:
        run.wait_for_step(3)
        os.kill(run.board()[1].pid, signal.SIGTERM)
        status, output = run.finish()
        assert status == 143, output
        assert f"a rank got a signal to stop, so the job stopped after step {len(run.steps())}; " in output
        check_whole_lines(run)
        assert json.loads((run.run_dir / SUMMARY_FILE).read_text())["stopped"] is True
        assert "Traceback" not in output


def test_divergence_is_told_without_a_traceback(tokens: Path, tmp_path: Path) -> None:
    params = {"type": "SGD", "params": {"lr": 1e30}}
    with started(tmp_path, job_of(tokens, parallelism={"dp": {"size": 2}}, optimizer=params)) as run:
        status, output = run.finish()
        assert status == 1
        assert "training has diverged" in output
        assert "optimizer.params.lr" in output
        assert "Traceback" not in output


def test_tokens_of_another_vocabulary_are_refused_before_any_process_starts(tokens: Path, tmp_path: Path) -> None:
    with started(tmp_path, job_of(tokens, model={"vocab_size": 200})) as run:
        status, output = run.finish()
        assert status == 2
        assert output.startswith("error: model.vocab_size: ")
        assert not run.run_dir.exists()
