"""The command line: exit statuses and messages, seen from outside; and ranks as torchrun starts them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from threefold import __version__
from threefold.cli import train as train_module
from threefold.errors import JobError

JOB = """
model: {model_type: gpt2, vocab_size: 257, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2}
data: {train: tokens, sequence_length: 8}
steps: 3
train_batch_size: 2
train_micro_batch_size_per_gpu: 1
parallelism: {pp: {size: 2}}
"""


def threefold(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "threefold", *arguments],
        capture_output=True, text=True, check=False, cwd=cwd, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def test_the_version() -> None:
    assert threefold("--version").stdout == f"threefold {__version__}\n"


def test_no_verb_is_a_request_for_help() -> None:
    result = threefold()
    assert "Usage: threefold" in result.stdout + result.stderr


@pytest.mark.parametrize("arguments", [["trian", "job.json"], ["train"], ["explain", "job.json", "--nonsense"]])
def test_wrong_usage_ends_with_status_2(arguments: list[str]) -> None:
    result = threefold(*arguments)
    assert result.returncode == 2
    assert "Usage: threefold" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("verb", ["train", "check", "explain", "parity"])
def test_a_wrong_job_is_told_in_words(verb: str, job_file: Path) -> None:
    result = threefold(verb, str(job_file), "--set", "parallelism.tp.sise=2")
    assert result.returncode == 2
    assert "parallelism.tp.sise" in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_a_device_that_nobody_knows_is_told_by_check(job_file: Path) -> None:
    cluster = '{"device": "h10", "nodes": 1, "devices_per_node": 2}'
    result = threefold("check", str(job_file), "--set", f"cluster={cluster}")
    assert result.returncode == 2
    assert "h100" in result.stderr


def test_parity_of_a_model_that_is_too_large_is_refused_at_once(job_file: Path) -> None:
    result = threefold(
        "parity",
        str(job_file),
        "--world",
        "2",
        "--set",
        "model.num_hidden_layers=100000",
        "--set",
        "model.hidden_size=8192",
    )
    assert result.returncode == 2
    assert "parity needs about" in result.stderr and "--shrink" in result.stderr


def test_data_that_is_missing_ends_before_any_process_starts(job_file: Path, tmp_path: Path) -> None:
    result = threefold("train", str(job_file), "--run-dir", "run", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert "tokens" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_job_trains_from_text_to_metrics(job_file: Path, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "poem.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    sources = ["text", "--out", "tokens", "--tokenizer", "bytes", "--validation-fraction", "0"]
    assert threefold("data", "build", *sources, cwd=tmp_path).returncode == 0
    result = threefold("train", str(job_file), "--run-dir", "run", "--set", "seed=5", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "dp=1 × tp=1 × pp=2 (1f1b)" in result.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    assert '"seed": 5' in (tmp_path / "run" / "job.json").read_text()


# ---------------------------------------------------------------------------------------------------------------------
# Under torchrun


def as_rank(rank: int, monkeypatch: pytest.MonkeyPatch, world: int = 3, run_id: str = "none") -> None:
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    monkeypatch.setattr(train_module, "_LET_FIRST_RANK_SPEAK_S", 0.0)
    # This test process must not die with whoever started it.
    monkeypatch.setattr("threefold.train.launcher.die_with_parent", lambda: None)


def test_an_error_of_all_ranks_is_raised_by_the_first(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(0, monkeypatch)
    with pytest.raises(JobError, match=r"pp"):
        train_module.train(job_file, Path("run"), [])


def test_an_error_of_all_ranks_is_not_repeated_by_the_others(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    as_rank(1, monkeypatch)
    with pytest.raises(SystemExit) as caught:
        train_module.train(job_file, Path("run"), [])
    assert caught.value.code == JobError.exit_status
    assert capsys.readouterr().err == ""


def test_a_run_directory_is_named_after_the_run_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "abc")
    assert train_module._torchrun_run_dir(Path("jobs/my.json")) == Path("runs/my/abc")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    with pytest.raises(JobError, match="--run-dir"):
        train_module._torchrun_run_dir(Path("jobs/my.json"))
