"""What a run writes down, and what it prints."""

import dataclasses
import io
import json
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from threefold.errors import JobError, WorkerError
from threefold.train.metrics import MetricsWriter, StepMetrics, new_run_dir
from threefold.train.recorded import StepTimes


def metrics(step: int, loss: float = 2.5, grad_norm: float | None = 1.5) -> StepMetrics:
    return StepMetrics(step, loss, grad_norm, 1e-3, 100 * step, 2000.0, 0.5)


def with_times(step: int, bubble: float | None = 0.25, **keys: Any) -> StepMetrics:
    times = StepTimes(bubble, {"warm_up": 0.125, "host": 0.0625}, 0.5)
    return dataclasses.replace(metrics(step), times=times, **keys)


def make_writer(
    run_dir: Path, total_steps: int = 10, tensorboard: bool = False, terminal: bool = False
) -> tuple[MetricsWriter, io.StringIO]:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=120)
    return MetricsWriter(run_dir, total_steps, tensorboard, live=True, console=console), output


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_steps_and_evaluations_are_lines_of_json(tmp_path: Path) -> None:
    writer, _ = make_writer(tmp_path / "run")
    writer.step(metrics(1))
    writer.evaluation(1, 3.25, 640)
    expected_step = {
        "step": 1,
        "loss": 2.5,
        "grad_norm": 1.5,
        "learning_rate": 1e-3,
        "tokens": 100,
        "tokens_per_s": 2000.0,
        "step_s": 0.5,
    }
    # Before the file is closed: a crash loses nothing that was reported.
    assert lines(tmp_path / "run") == [expected_step, {"step": 1, "eval_loss": 3.25, "eval_tokens": 640}]
    writer.close()


def test_a_loss_that_is_not_finite_is_null_in_json_and_seen_in_the_text(tmp_path: Path) -> None:
    writer, output = make_writer(tmp_path, total_steps=1000)
    with writer:
        writer.step(metrics(1))
        for step in range(2, 30):
            writer.step(metrics(step, loss=math.nan, grad_norm=math.inf))
    assert (lines(tmp_path)[5]["loss"], lines(tmp_path)[5]["grad_norm"]) == (None, None)
    printed = [line for line in output.getvalue().splitlines() if "loss nan (not finite" in line]
    assert [line.split()[1] for line in printed] == ["2/1000"]  # at once, though step 2 was not due, and only once


@pytest.mark.parametrize("total_steps", [1, 7, 100, 1000, 12_345])
def test_a_log_gets_first_and_last_step_and_some_in_between(tmp_path: Path, total_steps: int) -> None:
    writer, output = make_writer(tmp_path, total_steps)
    with writer:
        for step in range(1, total_steps + 1):
            writer.step(metrics(step))
    printed = [line for line in output.getvalue().splitlines() if line.startswith("step ")]
    assert printed[0].startswith(f"step 1/{total_steps}  loss 2.5000  2,000 tokens/s  ETA ")
    assert printed[-1].startswith(f"step {total_steps}/{total_steps} ")
    assert min(total_steps, 20) <= len(printed) <= 50


def test_the_remaining_time_follows_the_steps_time(tmp_path: Path) -> None:
    writer, output = make_writer(tmp_path, total_steps=7201)
    with writer:
        writer.step(metrics(1))
    assert "ETA 1:00:00" in output.getvalue()


def test_the_summary_says_from_where_to_where(tmp_path: Path) -> None:
    writer, output = make_writer(tmp_path)
    writer.step(metrics(1, loss=5.5))
    writer.step(metrics(2, loss=4.25))
    writer.close()
    writer.close()
    assert output.getvalue().count("loss 5.5000 (step 1) -> 4.2500 (step 2), 200 tokens, median 2,000 tokens/s") == 1


def test_a_run_without_a_step_says_so(tmp_path: Path) -> None:
    writer, output = make_writer(tmp_path)
    writer.close()
    assert "no step was done" in output.getvalue()


def test_a_terminal_gets_a_live_line(tmp_path: Path) -> None:
    writer, output = make_writer(tmp_path, terminal=True)
    with writer:
        for step in range(1, 11):
            writer.step(metrics(step, loss=math.nan if step == 5 else 2.5))
        writer.evaluation(10, 3.0, 64)
    assert "10/10" in output.getvalue()
    assert "loss 2.5000  2,000 tokens/s" in output.getvalue()
    assert "loss nan (not finite" in output.getvalue()
    assert "held-out loss 3.0000" in output.getvalue()


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    writer, _ = make_writer(tmp_path, tensorboard=True)
    with writer:
        writer.step(metrics(1, grad_norm=None))
        writer.step(metrics(2, loss=1.25))
        writer.evaluation(2, 3.0, 64)
    [file] = (tmp_path / "tensorboard").iterdir()
    events: list[Any] = list(EventFileLoader(str(file)).Load())
    scalars = {(value.tag, event.step): value.tensor.float_val[0] for event in events for value in event.summary.value}
    assert scalars["train/loss", 2] == 1.25
    assert scalars["eval/loss", 2] == 3.0
    assert ("train/grad_norm", 1) not in scalars
    assert scalars["train/tokens_per_s", 1] == 2000.0


def test_another_runs_metrics_are_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    writer, _ = make_writer(tmp_path)  # an empty file holds nothing to lose
    with writer:
        writer.step(metrics(1))
    with pytest.raises(JobError, match=r"--run-dir: .*already holds the metrics of a run(.|\n)*fix: name a new"):
        make_writer(tmp_path)
    assert len(lines(tmp_path)) == 1


def test_run_directories_are_numbered_and_never_shared(tmp_path: Path) -> None:
    base = tmp_path / "runs"
    assert new_run_dir(base) == base / "0001"
    (base / "0041").mkdir()
    (base / "notes").mkdir()
    assert new_run_dir(base) == base / "0042"
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: new_run_dir(base), range(32)))
    assert len(set(made)) == 32
    assert all(path.is_dir() for path in made)


# Recorded times, and fp16


def test_recorded_times_are_on_the_line_of_their_step(tmp_path: Path) -> None:
    writer, output = make_writer(tmp_path)
    with writer:
        writer.step(with_times(1))
        writer.step(with_times(2, bubble=None))
    first, second = lines(tmp_path)
    assert (first["bubble"], first["exposed_comm_s"]) == (0.25, 0.5)
    assert first["idle_s"] == {"warm_up": 0.125, "host": 0.0625}
    assert "bubble" not in second and second["idle_s"] == first["idle_s"]
    printed = output.getvalue().splitlines()
    assert "tokens/s  bubble 25%  ETA" in printed[0] and "bubble" not in printed[1]


def test_a_terminal_sees_the_bubble(tmp_path: Path) -> None:
    writer, output = make_writer(tmp_path, terminal=True)
    with writer:
        writer.step(with_times(1))
    assert "bubble 25%" in output.getvalue()


def test_fp16_says_its_scale_and_what_it_skips(tmp_path: Path) -> None:
    writer, output = make_writer(tmp_path)
    with writer:
        writer.step(dataclasses.replace(metrics(1, grad_norm=math.inf), loss_scale=65536.0, skipped=True))
        writer.step(dataclasses.replace(metrics(2), loss_scale=32768.0, skipped=False))
        writer.step(metrics(3))
    one, two, three = lines(tmp_path)
    assert (one["loss_scale"], one["skipped"], one["grad_norm"]) == (65536.0, True, None)
    assert (two["loss_scale"], two["skipped"]) == (32768.0, False)
    assert not {"loss_scale", "skipped", "bubble", "idle_s"} & three.keys()
    assert output.getvalue().count("skipped (overflow at loss scale 65536)") == 1


def test_tensorboard_gets_times_by_cause(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    writer, _ = make_writer(tmp_path, tensorboard=True)
    with writer:
        writer.step(with_times(1, loss_scale=2.0, skipped=False))
    [file] = (tmp_path / "tensorboard").iterdir()
    events: list[Any] = list(EventFileLoader(str(file)).Load())
    scalars = {value.tag: value.tensor.float_val[0] for event in events for value in event.summary.value}
    assert scalars["train/bubble"] == 0.25 and scalars["train/idle_s/warm_up"] == 0.125
    assert scalars["train/loss_scale"] == 2.0 and scalars["train/skipped"] == 0.0


# A full disk


_UNTIL_FULL = """
import resource, sys
from pathlib import Path
from threefold.train.metrics import MetricsWriter, StepMetrics

resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # the kernel writes what fits, then refuses, as on a full disk
with MetricsWriter(Path(sys.argv[1]), 100, tensorboard=False, live=False) as writer:
    for step in range(1, 100):
        writer.step(StepMetrics(step, 2.5, 1.5, 1e-3, 100 * step, 2000.0, 0.5))
"""


def test_a_full_disk_ends_the_run_with_one_error_and_leaves_whole_lines(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _UNTIL_FULL, str(tmp_path / "run")], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count("metrics.jsonl can't be written: File too large") == 1
    assert "fix: make room on its disk" in done.stderr
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert text.endswith("\n") and 800 < len(text) <= 1000
    assert [line["step"] for line in lines(tmp_path / "run")] == list(range(1, text.count("\n") + 1))
    assert "metrics: " in done.stdout  # the summary of what was done


def test_a_full_disk_under_tensorboard_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, _ = make_writer(tmp_path, tensorboard=True)
    writer.step(metrics(1))

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    assert writer._scalars is not None
    events = writer._scalars._events
    monkeypatch.setattr(events, "add_event", fail)
    with pytest.raises(WorkerError, match=r"tensorboard can't be written: No space left on device"), writer:
        monkeypatch.setattr(events, "close", fail)
        writer.step(metrics(2))
    monkeypatch.undo()
    events.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
