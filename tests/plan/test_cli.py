"""``threefold plan`` as a user meets it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from threefold.cli.main import main
from threefold.job import load_job
from threefold.plan.as_is import predict_job

ARTICLE = [
    "plan", "--model", "gpt3-175b", "--gpu", "a100-80gb", "--nodes", "8", "--gpus-per-node", "8",
    "--global-batch", "512", "--sequence-length", "2048",
]  # fmt: skip
KEYS = {
    "parallelism", "step_s", "step_s_low", "step_s_high", "tokens_per_s", "tflops_per_gpu", "mfu", "peak_memory_bytes",
    "memory_bytes", "bubble_fraction", "exposed_comm_s", "communication_bytes", "reasons",
}  # fmt: skip


class Cli:
    """Runs commands in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.capsys, self.monkeypatch = capsys, monkeypatch

    def run(self, *words: str) -> tuple[int, str, str]:
        """Exit status, stdout and stderr."""
        self.monkeypatch.setattr(sys, "argv", ["threefold", *words])
        with pytest.raises(SystemExit) as caught:
            main()
        printed = self.capsys.readouterr()
        return int(caught.value.code or 0), printed.out, printed.err

    def json(self, *words: str) -> dict[str, Any]:
        """The document that a successful command prints."""
        status, out, err = self.run(*words, "--json")
        assert status == 0, err
        return json.loads(out)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    return Cli(capsys, monkeypatch)


def test_json_has_what_is_promised(cli: Cli) -> None:
    result = cli.json(*ARTICLE, "--top", "3")
    assert set(result) == {"searched", "feasible", "seconds", "plans", "rejected"}
    assert len(result["plans"]) == 3
    assert result["searched"] == sum(result["rejected"].values()) + 3
    for plan in result["plans"]:
        assert set(plan) == KEYS
        assert plan["step_s_low"] < plan["step_s"] < plan["step_s_high"]
        assert sum(plan["memory_bytes"].values()) == pytest.approx(plan["peak_memory_bytes"])
        sizes = plan["parallelism"]
        assert sizes["dp"] * sizes["tp"] * sizes["pp"] == 64
        assert sizes["dp"] * sizes["micro_batch"] * sizes["num_microbatches"] == 512
        assert plan["tokens_per_s"] == pytest.approx(512 * 2048 / plan["step_s"])


def test_people_get_a_table_the_reasons_and_the_counts(cli: Cli) -> None:
    status, out, _ = cli.run(*ARTICLE)
    assert status == 0
    assert "175 B parameters, on 8 × 8 a100-80gb" in out
    for words in ("90 % interval", "Why tp", "- One card", "- Batch: 512", "Searched", "tp would leave the node"):
        assert words in out
    assert not [line for line in out.splitlines() if len(line) > 132]


def test_the_job_file_that_is_written_is_the_plan(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    plan = cli.json(*ARTICLE, "-o", str(path), "--inter-node", "8x200Gb/s")["plans"][0]
    job = load_job(path)
    sizes = plan["parallelism"]
    assert [job.dp, job.tp, job.pp] == [sizes["dp"], sizes["tp"], sizes["pp"]]
    assert job.zero_optimization.stage == sizes["zero_stage"]
    as_is = cli.json("plan", str(path), "--as-is")
    assert as_is["searched"] == as_is["feasible"] == 1
    assert as_is["plans"][0]["parallelism"] == sizes
    assert as_is["plans"][0]["step_s"] == pytest.approx(plan["step_s"])
    assert cli.json("plan", str(path))["plans"][0]["parallelism"] == sizes


def test_a_written_job_says_what_training_still_needs(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    _, _, err = cli.run(*ARTICLE, "-o", str(path))
    assert "To train it, state steps and data.train" in err
    _, _, err = cli.run("plan", str(path), "--set", "steps=7", "--set", "data.train=tokens", "-o", str(path))
    assert "To train it" not in err


def test_a_job_is_replanned_and_written(cli: Cli, tmp_path: Path) -> None:
    path, again = tmp_path / "job.json", tmp_path / "again.json"
    cli.json(*ARTICLE, "-o", str(path))
    cli.json("plan", str(path), "--set", "steps=7", "--fix", "tp=8", "-o", str(again))
    assert load_job(again).tp == 8
    assert load_job(again).steps == 7


def test_decisions_are_obeyed(cli: Cli) -> None:
    fixes = ("--fix", "tp=8", "--fix", "recompute=selective", "--fix", "zero=1")
    for plan in cli.json(*ARTICLE, *fixes)["plans"]:
        assert plan["parallelism"]["tp"] == 8
        assert plan["parallelism"]["recompute"] == "selective"
        assert plan["parallelism"]["zero_stage"] == 1


def test_when_nothing_fits_the_status_is_3(cli: Cli) -> None:
    words = [word if word != "8" else "1" for word in ARTICLE]
    status, out, err = cli.run(*words, "--json")
    assert status == 3
    assert json.loads(out)["plans"] == []
    assert "nearest misses" in err
    assert "what would make it fit" in err


def test_a_job_that_does_not_fit_is_predicted_with_status_3(cli: Cli) -> None:
    path = Path(__file__).parents[2] / "examples" / "article-64xa100.json"
    status, out, err = cli.run("plan", str(path), "--as-is", "--json")
    plan = predict_job(load_job(path)).plans[0]
    assert status == (0 if plan.fits else 3)
    assert json.loads(out)["plans"][0]["step_s"] == pytest.approx(plan.step_s)
    assert plan.fits or "Does not fit" in err


def test_all_that_is_wrong_is_said_at_once(cli: Cli) -> None:
    words = ["plan", "--model", "gpt9", "--gpu", "a100-8gb", "--nodes", "0", "--global-batch", "0", "--fix", "tp=x"]
    status, _, err = cli.run(*words, "--inter-node", "fast")
    assert status == 2
    for key in ("--model", "--gpu", "--nodes", "--global-batch", "--fix tp", "--inter-node"):
        assert re.search(rf"(^|: ){key}: ", err, re.MULTILINE), key


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["plan"], ["plan"]),
        (["plan", "--model", "gpt2"], ["--gpu", "--global-batch"]),
        ([*ARTICLE, "--as-is", "--set", "steps=1"], ["--as-is", "--set"]),
        ([*ARTICLE, "--top", "0"], ["--top"]),
        (["plan", "job.json", "--gpu", "h100", "--as-is", "--fix", "tp=2", "-o", "x"], ["--gpu", "--fix", "-o"]),
        (["plan", "no-such-job.json"], ["no-such-job.json"]),
        ([*ARTICLE, "-o", "/no/such/directory/job.json"], ["-o"]),
        ([*ARTICLE, "--fix", "cp=2", "-o", "job.json"], ["-o"]),
        ([*ARTICLE, "--sequence-length", "4096"], ["--sequence-length"]),
    ],
)
def test_wrong_words_are_named(cli: Cli, words: list[str], keys: list[str]) -> None:
    status, _, err = cli.run(*words)
    assert status == 2
    assert all(f"{key}: " in err for key in keys), err
    assert err.count("fix: ") >= len(keys)


def test_a_hugging_face_config_is_a_model(cli: Cli, tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 1024, "num_hidden_layers": 8,
        "num_attention_heads": 16, "intermediate_size": 2816, "max_position_embeddings": 2048,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in (tmp_path, tmp_path / "config.json"):
        result = cli.json("plan", "--model", str(name), "--gpu", "h100", "--global-batch", "64")
        assert result["plans"][0]["parallelism"]["dp"] == 8


def test_a_plan_needs_no_torch_and_no_patience() -> None:
    code = "import sys; sys.modules['torch'] = None; from threefold.cli.main import main; main()"
    before = os.times()
    start_s = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", code, *ARTICLE], capture_output=True, text=True, check=False)
    elapsed_s = time.perf_counter() - start_s
    after = os.times()
    assert result.returncode == 0, result.stderr
    assert "Why tp" in result.stdout
    used_s = after.children_user - before.children_user + after.children_system - before.children_system
    assert min(elapsed_s, used_s) < 1.5
