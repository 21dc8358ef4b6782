"""The command line as a user meets it: what it prints, and with which status it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.job.malformed import malformed_jobs
from threefold.cli.main import main

DEMO = Path(__file__).parent.parent / "examples/demo.json"


def run_cli(
    words: Sequence[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str]:
    """Run the command in this process; its exit status and all that it printed."""
    monkeypatch.setattr(sys, "argv", ["threefold", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    captured = capsys.readouterr()
    code = caught.value.code
    return code if isinstance(code, int) else int(code is not None), captured.out + captured.err


def test_200_malformed_jobs_end_before_any_process_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr(subprocess.Popen, "__init__", lambda *args, **_: started.append(args))
    jobs = malformed_jobs(200, seed=1)
    assert len({content for _, _, content in jobs}) > 150, "the generator repeats itself"
    for description, name, content in jobs:
        path = tmp_path / name
        path.write_bytes(content)
        status, output = run_cli(["train", str(path), "--run-dir", str(tmp_path / "run")], capsys, monkeypatch)
        assert status == 2, (description, output)
        assert output.startswith("error: "), (description, output)
        assert "fix: " in output, (description, output)
        assert "Traceback" not in output, (description, output)
        assert not (tmp_path / "run").exists(), description
    assert not started


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["parity", str(DEMO), "--dtype", "float8"], "--dtype"),
        (["parity", str(DEMO), "--layout", "dp=2,pt=2"], "tp=VALUE"),
        (["parity", str(DEMO), "--layout", "tp=3"], "parallelism.tp.size"),
        (["parity", str(DEMO), "--layout", "pp=two"], "--layout pp"),
        (["parity", str(DEMO), "--layout", "pp=9"], "parallelism.pp.size"),
        (["parity", str(DEMO), "--world", "99"], "--world"),
        (["parity", str(DEMO), "--set", "seed.x=1"], "seed"),
        (["train", str(DEMO), "--set", "data.train=nowhere"], "nowhere"),
        (["train", str(DEMO), "--set", "checkpoint.every=2"], "checkpoint.every"),
        (["train", str(DEMO), "--set", "cluster.device=a100-80gb", "--set", "data.train=nowhere"], "cluster.device"),
        (["explain", "no-such-file.json"], "no-such-file.json"),
        (["check", str(DEMO), "--set", "paralelism.tp.size=2"], "parallelism"),
        (["data", "build", "no-such-source", "--out", "x", "--tokenizer", "bytes"], "no-such-source"),
    ],
    ids=lambda value: " ".join(value[:1] + value[2:]) if isinstance(value, list) else "",
)
def test_wrong_input_is_named_without_a_traceback(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, output = run_cli(words, capsys, monkeypatch)
    assert status == 2, output
    assert named in output
    assert "Traceback" not in output
    assert "fix: " in output


@pytest.mark.parametrize(
    "environment", [{"RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "y", "LOCAL_RANK": "0"}]
)
def test_half_of_torchruns_environment_is_named(
    environment: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    status, output = run_cli(["train", str(DEMO)], capsys, monkeypatch)
    assert status == 2
    assert "unset RANK WORLD_SIZE" in output


def test_what_is_not_finite_is_null_in_json() -> None:
    from threefold.measure.parity import _finite

    assert _finite({"a": [float("inf"), 1.0], "b": (float("nan"),)}) == {"a": [None, 1.0], "b": [None]}


def test_a_layout_that_states_a_size_twice_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, output = run_cli(["parity", str(DEMO), "--layout", "dp=2,dp=3"], capsys, monkeypatch)
    assert status == 2
    assert "is stated twice" in output


def command_line(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "threefold", *arguments], text=True, stderr=subprocess.PIPE, **options
    )


def test_output_that_can_not_be_written_is_an_error_without_traceback() -> None:
    with Path("/dev/full").open("w") as full:
        ended = command_line("explain", str(DEMO), stdout=full)
        message = ended.communicate()[1]
    assert ended.returncode == 1
    assert message == "error: the output can't be written: no space left where it goes\n"


def test_a_terminal_without_unicode_gets_question_marks() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = command_line("explain", str(DEMO), stdout=subprocess.PIPE, env=environment)
    output, message = ended.communicate()
    assert (ended.returncode, message) == (0, "")
    assert "8 devices: two replicas of the model (dp) ? two" in output


def test_ctrl_c_ends_a_verb_quietly(tmp_path: Path) -> None:
    """The verb waits for the end of a file that we hold open: opening a named pipe returns when both ends are there."""
    pipe = tmp_path / "runs.csv"
    os.mkfifo(pipe)
    waiting = command_line("validate", str(pipe), stdout=subprocess.PIPE)
    with pipe.open("w"):
        waiting.send_signal(signal.SIGINT)
        message = waiting.communicate()[1]
    assert (waiting.returncode, message) == (130, "")
