"""What a run reports while it trains: ``metrics.jsonl``, TensorBoard scalars, and a line for whoever watches.

``metrics.jsonl`` holds two kinds of lines, told apart by their keys. A step has ``loss``::

    {"step": 1, "loss": 5.54, "grad_norm": 2.1, "learning_rate": 1e-4, "tokens": 8192, "tokens_per_s": 9e3,
     "step_s": 0.9, "bubble": 0.12, "idle_s": {"warm_up": 0.02, "stage": 0.08, "transfer": 0.01, "sync": 0.0,
     "cool_down": 0.01, "host": 0.01}, "exposed_comm_s": 0.01}

Where the pipeline's times are recorded, ``bubble`` is its share of the step, and seconds are means over ranks. With
fp16 there are ``loss_scale``, the one that the step was computed with, and ``skipped``, whether gradients overflowed.

An evaluation has ``eval_loss``; it is of the parameters after ``step`` steps, over ``eval_tokens`` valid tokens::

    {"step": 100, "eval_loss": 3.21, "eval_tokens": 65536}
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from threefold.errors import JobError, Problem, WorkerError
from threefold.train.lines import LineFile, cannot_write
from threefold.train.recorded import StepTimes

METRICS_FILE = "metrics.jsonl"
_NUM_PLAIN_LINES = 30
_RECENT_STEPS = 50  # for the remaining time
_MEDIAN_STEPS = 10_000  # for the summary; bounded, since runs can have millions of steps


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step: ``step`` counts the steps done, from 1, and ``tokens`` all tokens so far.

    ``loss`` is the mean of this step in nats. ``grad_norm`` is the global norm before clipping, None when not computed.
    ``loss_scale`` and ``skipped`` are those of fp16, ``times`` those that were recorded; None where there are none.
    """

    step: int
    loss: float
    grad_norm: float | None
    learning_rate: float
    tokens: int
    tokens_per_s: float
    step_s: float
    loss_scale: float | None = None
    skipped: bool | None = None
    times: StepTimes | None = None

    def fields(self) -> dict[str, Any]:
        """What is written: what there isn't is left out, but for the norm."""
        fields = asdict(self)
        times = fields.pop("times") or {}
        return {key: value for key, value in (fields | times).items() if value is not None or key == "grad_norm"}


class MetricsWriter:
    """Writes a run's metrics; only one rank has one. Close it, or use it in a ``with``.

    Each line is written at once and whole, so a crash loses nothing that was reported. With ``live`` and a terminal,
    one line is redrawn in place; otherwise some 30 plain lines are printed over the run, which is what a log wants. A
    loss that is not finite is written as null, since JSON has no NaN, and always printed.

    Raises JobError when ``run_dir`` holds another run's metrics, WorkerError when a line can't be written.
    """

    def __init__(
        self, run_dir: Path, total_steps: int, tensorboard: bool, live: bool, console: Console | None = None
    ) -> None:
        self._path = run_dir / METRICS_FILE
        _refuse_other_run(self._path)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = LineFile(self._path)
        console = console or Console()
        self._console = console
        self._scalars = _ScalarWriter(run_dir) if tensorboard else None
        self._display: _Display = (
            _LiveLine(console, total_steps) if live and console.is_terminal else _PlainLines(console, total_steps)
        )
        self._first: StepMetrics | None = None
        self._last: StepMetrics | None = None
        self._tokens_per_s: deque[float] = deque(maxlen=_MEDIAN_STEPS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error, a disk that is still full says nothing new.
        with contextlib.suppress(*([WorkerError] if kind else [])):
            self.close()

    def step(self, metrics: StepMetrics) -> None:
        """Record one optimizer step."""
        fields = metrics.fields()
        self._append(fields)
        self._add_scalars(metrics.step, {f"train/{name}": value for name, value in _scalars(fields) if name != "step"})
        self._first = self._first or metrics
        self._last = metrics
        self._tokens_per_s.append(metrics.tokens_per_s)
        self._display.step(metrics)

    def evaluation(self, step: int, loss: float, tokens: int) -> None:
        """Record the loss on held-out data after ``step`` steps, a mean over ``tokens`` valid tokens."""
        self._append({"step": step, "eval_loss": loss, "eval_tokens": tokens})
        self._add_scalars(step, {"eval/loss": loss})
        self._display.note(f"step {step}  held-out loss {_shown(loss)}  ({tokens:,} tokens)")

    def close(self) -> None:
        """Flush everything and print the summary; a second call does nothing."""
        if self._file.closed:
            return
        self._file.close()
        try:
            if self._scalars:
                self._scalars.close()
        finally:
            self._display.close()
        self._console.print(self._summary(), markup=False, highlight=False, soft_wrap=True)

    def _append(self, fields: Mapping[str, Any]) -> None:
        self._file.append({key: None if _is_not_finite(value) else value for key, value in fields.items()})

    def _add_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._scalars:
            self._scalars.add(step, scalars)

    def _summary(self) -> str:
        if self._first is None or self._last is None:
            return f"no step was done; {self._path} is empty"
        return (
            f"loss {_shown(self._first.loss)} (step {self._first.step}) -> {_shown(self._last.loss)} "
            f"(step {self._last.step}), {self._last.tokens:,} tokens, "
            f"median {statistics.median(self._tokens_per_s):,.0f} tokens/s\nmetrics: {self._path}"
        )


def new_run_dir(base: Path) -> Path:
    """Make and return the next of ``base/0001``, ``base/0002``, ...; two callers at once get different ones."""
    base.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(path.name) for path in base.iterdir() if path.name.isdecimal()), default=0)
    while True:
        run_dir = base / f"{number:04d}"
        try:
            run_dir.mkdir()  # fails if somebody was faster, which makes it the lock
        except FileExistsError:
            number += 1
        else:
            return run_dir


class _Display(Protocol):
    """Where the lines for a person go."""

    def step(self, metrics: StepMetrics) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class _PlainLines:
    """Prints the first step, the last, and some in between; and the first of a row of steps whose loss isn't finite."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self._console = console
        self._total_steps = total_steps
        self._every = max(1, round(total_steps / _NUM_PLAIN_LINES))
        self._is_first = True
        self._was_finite = True
        self._recent_step_s: deque[float] = deque(maxlen=_RECENT_STEPS)

    def step(self, metrics: StepMetrics) -> None:
        self._recent_step_s.append(metrics.step_s)
        is_finite = math.isfinite(metrics.loss)
        is_due = self._is_first or metrics.step % self._every == 0 or metrics.step == self._total_steps
        if is_due or (self._was_finite and not is_finite):
            self.note(f"step {metrics.step}/{self._total_steps}  {_numbers(metrics)}  ETA {self._eta(metrics.step)}")
        self._is_first, self._was_finite = False, is_finite

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None: ...

    def _eta(self, step: int) -> str:
        seconds = max(0, self._total_steps - step) * statistics.median(self._recent_step_s)
        minutes, seconds = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}"


class _LiveLine:
    """One line at the bottom of a terminal, redrawn; notes scroll by above it."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[numbers]}", markup=False),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("train", total=total_steps, numbers="")
        self._was_finite = True
        self._progress.start()

    def step(self, metrics: StepMetrics) -> None:
        self._progress.update(self._task, completed=metrics.step, numbers=_numbers(metrics))
        is_finite = math.isfinite(metrics.loss)
        if self._was_finite and not is_finite:  # stays on the screen when the line has moved on
            self.note(f"step {metrics.step}  {_numbers(metrics)}")
        self._was_finite = is_finite

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._progress.stop()


class _ScalarWriter:
    """TensorBoard scalars by tensorboard's own event writer, which needs neither torch nor TensorFlow."""

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event: Any = event_pb2
        self._summary: Any = summary_pb2
        self._path = run_dir / "tensorboard"
        self._events = EventFileWriter(str(self._path))

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        # The classes are generated at import, out of a type checker's sight.
        values = [self._summary.Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        summary = self._summary.Summary(value=values)
        try:
            self._events.add_event(self._event.Event(wall_time=time.time(), step=step, summary=summary))
        except OSError as error:
            raise cannot_write(self._path, error) from None

    def close(self) -> None:
        try:
            self._events.close()
        except OSError as error:
            raise cannot_write(self._path, error) from None


def _scalars(fields: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Numbers by name; those of a mapping have its name before theirs."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{inner}", number) for inner, number in _scalars(value))
        elif value is not None:
            yield name, float(value)


def _is_not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _numbers(metrics: StepMetrics) -> str:
    bubble = f"  bubble {metrics.times.bubble:.0%}" if metrics.times and metrics.times.bubble is not None else ""
    skipped = f"  skipped (overflow at loss scale {metrics.loss_scale:g})" if metrics.skipped else ""
    return f"loss {_shown(metrics.loss)}  {metrics.tokens_per_s:,.0f} tokens/s{bubble}{skipped}"


def _shown(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else f"{loss} (not finite: training has diverged)"


def _refuse_other_run(path: Path) -> None:
    if path.exists() and path.stat().st_size > 0:
        raise JobError(
            [Problem("--run-dir", f"{str(path)!r} already holds the metrics of a run", "name a new directory")]
        )
