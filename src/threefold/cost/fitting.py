"""Fits the calibration constants to measured runs: regularised least squares on the logarithm of time.

Every constant has a prior (its default, and how far from it experience allows), so that a constant about which the runs
say nothing keeps its default, and a source that is left out is predicted by what the others and the priors say. Sources
weigh by the root of their number of runs, and residuals far beyond the noise hardly count (Cauchy's loss), so that
neither one big table nor odd runs decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np

from threefold.cost.calibration import Calibration, calibration_from
from threefold.cost.case import Array
from threefold.cost.predict import Batch, Predictions, predict

CAUCHY = 0.08
"""Residual of log time at which a run counts half: twice the 4 % by which one configuration is published apart."""


@dataclass(frozen=True)
class Knob:
    """One fitted constant: ``section`` and ``key`` say whose ("software", "modern"), ``name`` which. Stacks that share
    their kernels share a knob: their keys are joined by "|".

    ``prior`` is its value before any run is seen, ``sigma`` the standard deviation of its logarithm that the prior
    allows.
    """

    section: str
    key: str
    name: str
    prior: float
    sigma: float
    least: float = 1e-9
    most: float = 1e12


def table_with(base: Mapping[str, Any], knobs: Sequence[Knob], logs: Array) -> dict[str, Any]:
    """``base`` with the knobs' constants set to exp(logs), inside their bounds."""
    table = deepcopy(dict(base))
    for knob, log in zip(knobs, logs, strict=True):
        section = table.setdefault(knob.section, {})
        value = float(np.clip(np.exp(log), knob.least, knob.most))
        for target in [section.setdefault(key, {}) for key in knob.key.split("|")] if knob.key else [section]:
            target[knob.name] = value
    return table


def constants_of(table: Mapping[str, Any]) -> Callable[[str, str], Calibration]:
    """Software and generation -> constants of ``table``; each pair is built once."""
    known: dict[tuple[str, str], Calibration] = {}

    def find(software: str, generation: str) -> Calibration:
        key = (software, generation)
        if key not in known:
            known[key] = calibration_from(table, software, generation)
        return known[key]

    return find


Errors = Callable[[Predictions], Array]
"""Predicted over measured of each run; NaN where nothing was measured."""


def time_errors(found: Predictions) -> Array:
    """Of the step time."""
    return found.ratio


def memory_errors(batch: Batch) -> Errors:
    """Of the peak memory, published in GiB."""
    published = np.array([run["memory_GB"] or np.nan for run in batch.runs]) * 2**30
    return lambda found: found.memory_bytes / published


def fit(
    batch: Batch,
    base: Mapping[str, Any],
    knobs: Sequence[Knob],
    used: Array,
    errors: Errors = time_errors,
    rounds: int = 5,
) -> dict[str, Any]:
    """The table of constants that explains the runs where ``used`` is true best, starting at the priors.

    Gauss-Newton on the residuals log(predicted / measured), reweighted for Cauchy's loss, with steps halved until the
    objective falls.
    """
    start = np.log([knob.prior for knob in knobs])
    sigma = np.array([knob.sigma for knob in knobs])
    weight = _weights(batch, used)

    def residuals(logs: Array) -> Array:
        ratio = errors(predict(batch, constants_of(table_with(base, knobs, logs))))
        return np.where(used, np.log(np.where(used, ratio, 1.0)), 0.0)

    logs, now = start.copy(), residuals(start)
    for _ in range(rounds):
        slopes = _slopes(residuals, logs, now)
        robust = weight * 1 / (1 + (now / CAUCHY) ** 2)
        normal = slopes.T @ (robust[:, None] * slopes) + np.diag(sigma**-2.0)
        step = np.linalg.solve(normal, slopes.T @ (robust * now) + (logs - start) / sigma**2)
        logs, now, moved = _descend(residuals, logs, now, step, lambda r, x: _loss(r, x, weight, start, sigma))
        if moved < 1e-4:
            break
    return table_with(base, knobs, logs)


def _weights(batch: Batch, used: Array) -> Array:
    """Of each run: precision of its measurement (4 % noise), times √n / n of its source."""
    origins = np.array([run.origin for run in batch.runs])
    counts = {origin: np.sum((origins == origin) & used) for origin in set(origins)}
    share = np.array([1.0 / np.sqrt(max(counts[origin], 1)) for origin in origins])
    return np.where(used, 2.0 * share / 0.04**2 / 10, 0.0)


def _slopes(residuals: Callable[[Array], Array], logs: Array, now: Array) -> Array:
    step = 1e-3
    columns = []
    for index in range(len(logs)):
        moved = logs.copy()
        moved[index] += step
        columns.append((residuals(moved) - now) / step)
    return np.stack(columns, axis=1)


def _loss(residual: Array, logs: Array, weight: Array, start: Array, sigma: Array) -> float:
    cauchy = 0.5 * CAUCHY**2 * np.log1p((residual / CAUCHY) ** 2)
    return float(np.sum(weight * cauchy) + 0.5 * np.sum(((logs - start) / sigma) ** 2))


def _descend(
    residuals: Callable[[Array], Array], logs: Array, now: Array, step: Array, loss: Callable[[Array, Array], float]
) -> tuple[Array, Array, float]:
    before = loss(now, logs)
    for scale in (1.0, 0.5, 0.25, 0.1, 0.03):
        moved = logs - scale * np.clip(step, -0.7, 0.7)
        there = residuals(moved)
        if loss(there, moved) < before:
            return moved, there, float(np.max(np.abs(moved - logs)))
    return logs, now, 0.0
