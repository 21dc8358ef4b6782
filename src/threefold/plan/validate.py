"""Scores predictions against published runs: how far off, how honest the interval, how good the ranking and the
verdict.

All shares are fractions: 0.08 is 8 %. An error is predicted over measured, minus 1.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from threefold.cost.calibration import load_calibration
from threefold.cost.case import Array
from threefold.cost.predict import Batch, Constants, Predictions, build_batch, predict
from threefold.cost.runs import Run, read_runs

LEAST_GROUP = 10
"""Runs that one model on one number of devices needs to be ranked."""

BYTES_OF_GB = 2**30
"""Published "GB" of device memory are what drivers and PyTorch report: GiB."""


@dataclass(frozen=True)
class Score:
    """Errors of one set of runs; None where no run states what it takes.

    ``n`` runs with a time, ``mape`` the mean absolute percentage error of the step time, ``bias`` the mean error,
    ``coverage90`` the share of runs inside the stated 90 % interval, ``rank_correlation`` (Spearman) and ``regret``
    (what the run predicted best loses against the best) of time per sample within groups of ``LEAST_GROUP`` or more,
    and ``memory_mape``.
    """

    n: int
    mape: float | None
    bias: float | None
    coverage90: float | None
    rank_correlation: float | None
    regret: float | None
    memory_mape: float | None


@dataclass(frozen=True)
class Fits:
    """Runs by whether they fitted into memory (ran) and whether the model says so."""

    true_fit: int
    false_fit: int
    true_oom: int
    false_oom: int


@dataclass(frozen=True)
class Report:
    """Everything that ``threefold validate`` says."""

    overall: Score
    sources: Mapping[str, Score]
    devices: Mapping[str, Score]
    fits: Fits
    not_modelled: Mapping[str, int]
    rows: Sequence[Mapping[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """The report as plain values, for ``--json``."""
        whole = {key: asdict(self.overall)[key] for key in ("n", "mape", "bias", "coverage90")}
        return {
            "all": whole,
            "sources": [{"source": name, **asdict(score)} for name, score in self.sources.items()],
            "gpus": [{"gpu": name, **asdict(score)} for name, score in self.devices.items()],
            "fits": asdict(self.fits),
            "not_modelled": dict(self.not_modelled),
            "rows": list(self.rows),
        }


def validate_runs(path: Path, constants: Constants = load_calibration) -> Report:
    """Predict every run of ``path`` and compare. Raises DataError for a file that is wrong, with line and column."""
    batch = build_batch(read_runs(path))
    return score_runs(batch, predict(batch, constants))


def score_runs(batch: Batch, found: Predictions) -> Report:
    """The report on ``batch`` predicted as ``found``."""
    runs = batch.runs
    every = np.arange(len(runs))

    def scored(name: Callable[[Run], str]) -> dict[str, Score]:
        names = np.array([name(run) for run in runs])
        return {str(key): score(runs, found, every[names == key]) for key in dict.fromkeys(names)}

    return Report(
        overall=score(runs, found, every),
        sources=scored(lambda run: document_of(run.source)),
        devices=scored(lambda run: run.text["gpu"]),
        fits=_fits(batch, found),
        not_modelled=Counter(reason for reason in batch.reasons if reason),
        rows=[_row(batch, found, index) for index in range(len(runs))],
    )


def document_of(source: str) -> str:
    """The repository and file, or the paper and table, that a source names; sections, revisions and copies left off."""
    return re.split(r" \[| @|, ", source)[0]


def score(runs: Sequence[Run], found: Predictions, chosen: Array) -> Score:
    """Errors of the runs at the indices ``chosen``."""
    timed = chosen[np.isfinite(found.ratio[chosen])]
    ratio = found.ratio[timed]
    inside = (1 / ratio >= found.low[timed]) & (1 / ratio <= found.high[timed])
    ranks, regrets = _rankings(runs, found, timed)
    memory = [error for index in chosen if (error := _memory_error(runs[index], found, index)) is not None]
    return Score(
        n=len(timed),
        mape=_mean(np.abs(ratio - 1)),
        bias=_mean(ratio - 1),
        coverage90=_mean(inside),
        rank_correlation=_mean(np.array(ranks)),
        regret=_mean(np.array(regrets)),
        memory_mape=_mean(np.abs(np.array(memory))),
    )


def _mean(values: Array) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _memory_error(run: Run, found: Predictions, index: int) -> float | None:
    published, predicted = run["memory_GB"], found.memory_bytes[index]
    if published is None or not np.isfinite(predicted):
        return None
    return float(predicted / (published * BYTES_OF_GB) - 1)


def _rankings(runs: Sequence[Run], found: Predictions, chosen: Array) -> tuple[list[float], list[float]]:
    ranks, regrets = [], []
    for members in ranked_groups(runs, chosen):
        observed = found.observed_s[members] / samples(runs, members)
        predicted = observed * found.ratio[members]
        correlation = spearman(predicted, observed)
        if correlation is not None:
            ranks.append(correlation)
        regrets.append(float(observed[predicted.argmin()] / observed.min() - 1))
    return ranks, regrets


def ranked_groups(runs: Sequence[Run], chosen: Array) -> Iterator[Array]:
    """Runs of one source with one model at one sequence length on one number of one kind of device."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index in chosen:
        run = runs[index]
        shape = tuple(run[name] for name in ("layers", "hidden", "heads", "vocab", "seq_len", "n_gpus"))
        key = (document_of(run.source), run.text["model_name"], run.text["gpu"], run.text["precision"], *shape)
        groups.setdefault(key, []).append(int(index))
    for members in groups.values():
        if len(members) >= LEAST_GROUP:
            yield np.array(members)


def samples(runs: Sequence[Run], members: Array) -> Array:
    """Sequences of a step of each run at the indices ``members``."""
    return np.array([runs[index]["global_batch"] or 1.0 for index in members])


def spearman(first: Array, second: Array) -> float | None:
    """Rank correlation, ties by their mean rank; None where one of the two does not vary."""
    a, b = _ranks(first), _ranks(second)
    if a.std() == 0 or b.std() == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: Array) -> Array:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def _fits(batch: Batch, found: Predictions) -> Fits:
    counts = Counter(
        (run.is_oom, bool(found.fits[index])) for index, run in enumerate(batch.runs) if batch.reasons[index] is None
    )
    return Fits(
        true_fit=counts[False, True],
        false_fit=counts[True, True],
        true_oom=counts[True, False],
        false_oom=counts[False, False],
    )


def _row(batch: Batch, found: Predictions, index: int) -> dict[str, Any]:
    run, reason = batch.runs[index], batch.reasons[index]
    row: dict[str, Any] = {
        "line": run.line,
        "source": run.source,
        "model": run.text["model_name"],
        "gpu": run.text["gpu"],
        "n_gpus": run["n_gpus"],
        "status": run.text["status"] or "ok",
        "modelled": reason is None,
        "reason": reason,
    }
    if reason is not None:
        return row
    step = found.step_s[index]
    return row | {
        "configurations": int(np.sum(batch.row == index)),
        "measured_s": _number(found.observed_s[index]),
        "step_s": _number(step),
        "step_s_low": _number(step * found.low[index]),
        "step_s_high": _number(step * found.high[index]),
        "error": _number(found.ratio[index] - 1),
        "inside90": _inside(found, index),
        "peak_memory_bytes": _number(found.memory_bytes[index]),
        "memory_error": _memory_error(run, found, index),
        "fits": bool(found.fits[index]),
    }


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _inside(found: Predictions, index: int) -> bool | None:
    ratio = found.ratio[index]
    return bool(found.low[index] <= 1 / ratio <= found.high[index]) if np.isfinite(ratio) else None
